// Command build compiles the software device to a path: go run ./relay/verbs/softdevice/build
// bin/libpeerlane-softdevice.so
package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: build PATH")
		os.Exit(2)
	}
	if err := softdevice.Build(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
