package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/peerlane/peerlane/integration/vm/pcitree"
)

// tree loads a PCIe tree for a user of a shell: a table of the package by name, or a file.
func tree(arguments []string) error {
	if len(arguments) != 1 {
		return fmt.Errorf("usage: guest tree none|%s|FILE", strings.Join(pcitree.Names(), "|"))
	}
	name := arguments[0]
	if out, err := exec.Command("modprobe", "pcitree").CombinedOutput(); err != nil {
		return fmt.Errorf("modprobe pcitree: %w: %s", err, out)
	}
	if name == "none" {
		return pcitree.Unload()
	}
	text, err := pcitree.ReadTable(name)
	if err != nil {
		file, readErr := os.ReadFile(name)
		if readErr != nil {
			return fmt.Errorf("%w; and as a file: %w", err, readErr)
		}
		text = string(file)
	}
	parsed, err := pcitree.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return parsed.Load()
}
