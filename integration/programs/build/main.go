// Command build builds every program that tests need into a directory.
package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/integration/programs"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: build DIR")
		os.Exit(2)
	}
	err := os.MkdirAll(os.Args[1], 0o755)
	if err == nil {
		err = programs.Build(os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}
