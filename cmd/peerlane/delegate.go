package main

import (
	"path/filepath"
	"slices"
	"strings"
)

// Packages have this command twice: built with the tag front as /usr/bin/peerlane,
// which runs topo and version itself and executes the other, and without as
// /usr/libexec/peerlane/peerlane, which has all commands. To start the second takes
// twice the time, for it is linked with what talks to engines, Prometheus and GPUs.

// frontRuns says whether the front runs a command line itself. Help, pictures and
// plans, which the virtual switch is made of, come from the other program.
func frontRuns(args []string) bool {
	if len(args) == 0 || args[0] != "topo" && args[0] != "version" {
		return false
	}
	return !slices.ContainsFunc(args, func(arg string) bool {
		return strings.Contains(arg, "svg") || strings.Contains(arg, "html") || strings.Contains(arg, "virtual") || arg == "help" || arg == "-h" || arg == "--help" || strings.HasPrefix(arg, "--help=")
	})
}

// behindFront is where packages have the other program, seen from the front.
func behindFront(front string) string {
	return filepath.Join(filepath.Dir(front), "../libexec/peerlane/peerlane")
}
