package main

import (
	"fmt"

	"github.com/peerlane/peerlane/hook/sandbox"
)

// confine executes a program in the sandbox of relays.
func confine(args []string) error {
	err := sandbox.Main(args)
	if err != nil && sandbox.IsUsage(err) {
		return fmt.Errorf("%w; %w", err, errUsage)
	}
	return err
}
