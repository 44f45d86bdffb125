package main

import (
	"fmt"
	"os"

	"github.com/peerlane/peerlane/hook/supervisor"
)

// accept is the command of peerlane-relay@.service: it runs the supervisor for the connection at
// standard input.
func accept(args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("accept: unexpected argument %q; %w", args[0], errUsage)
	}
	return supervisor.TakeOver(os.Stdin)
}
