//go:build front

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// commands returns the subcommands that the front runs itself.
func commands(a *app) []*cobra.Command {
	return []*cobra.Command{newTopoCommand(a), newVersionCommand(a)}
}

// delegate executes the full program unless the front runs the command line itself.
func delegate(args []string) error {
	if frontRuns(args) {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the program that runs this command: %w", err)
	}
	program := behindFront(self)
	err = syscall.Exec(program, append([]string{"peerlane"}, args...), os.Environ())
	return fmt.Errorf("run %s, which has all commands but topo and version: %w; reinstall Peerlane",
		filepath.Clean(program), err)
}

func setTemplates(*cobra.Command) {}

// Stubs for the shared files: the front has neither pictures nor plans.

func (a *app) printPicture(string, *topo.Host, *planner.Plan) error { return os.ErrInvalid }

func hookPath(string) (string, error)                       { return "", os.ErrNotExist }
func (a *app) measureHost(*cobra.Command, *hostFlags) error { return os.ErrInvalid }
func (a *app) useKnownPairs(*topo.Host, *planned) bool      { return false }
func (a *app) warnOfPairs(*planned, string)                 {}
