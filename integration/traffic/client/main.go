// Command traffic-client exchanges verified messages with a peer. Package traffic starts the command,
// writes JSON orders to standard input and reads JSON results from standard output.
package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/integration/traffic"
)

func main() {
	if err := traffic.Serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "traffic-client:", err)
		os.Exit(1)
	}
}
