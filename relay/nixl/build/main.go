// Command build compiles the NIXL plugin and the forwarders:
//
//	go run ./relay/nixl/build bin/nixl
package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/relay/nixl"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: build DIR")
		os.Exit(2)
	}
	if err := nixl.Build(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
