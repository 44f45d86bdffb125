// Command build compiles the NCCL plugin:
//
//	go run ./relay/nccl/build bin
package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/relay/nccl"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: build DIR")
		os.Exit(2)
	}
	if err := nccl.Build(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
