package main

import (
	"path/filepath"
	"slices"
	"strings"
)

// Packages contain this command twice. /usr/bin/peerlane is built with the tag front: it runs topo
// and version, and executes /usr/libexec/peerlane/peerlane for all other commands. The second
// program links clients of engines, Prometheus and CUDA, and so starts in twice the time.

// frontRuns reports whether the front runs a command line itself. The other program prints help,
// pictures and plans, including plans of the virtual switch.
func frontRuns(args []string) bool {
	if len(args) == 0 || args[0] != "topo" && args[0] != "version" {
		return false
	}
	return !slices.ContainsFunc(args, func(arg string) bool {
		return strings.Contains(arg, "svg") || strings.Contains(arg, "html") || strings.Contains(arg, "virtual") ||
			arg == "help" || arg == "-h" || arg == "--help" || strings.HasPrefix(arg, "--help=")
	})
}

// behindFront returns the path of the full program for the path of the front.
func behindFront(front string) string {
	return filepath.Join(filepath.Dir(front), "../libexec/peerlane/peerlane")
}
