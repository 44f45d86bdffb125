// Command traffic-client exchanges verified messages with other clients. It reads JSON orders from
// standard input and prints JSON results; package traffic starts it.
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
