// Command build compiles the stand-in for libibverbs to the path that it is given:
// go run ./relay/verbs/standin/build bin/libpeerlane-verbs-standin.so
package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/relay/verbs/standin"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: build PATH")
		os.Exit(2)
	}
	if err := standin.Build(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
