// Command build compiles the CUDA simulator's library to a path: go run ./cuda/sim/build
// bin/libpeerlane-cuda-sim.so
package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/cuda/sim"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: build PATH")
		os.Exit(2)
	}
	if err := sim.Build(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
