// Command manpages writes the man pages of Peerlane's programs from the programs' help texts and
// from docs/configuration.md.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/cmd/manual"
)

func main() {
	bin := flag.String("bin", "bin", "Peerlane's programs are in `DIR`")
	out := flag.String("out", "bin/man", "write the pages to `DIR`")
	configuration := flag.String("configuration", "docs/configuration.md", "the reference of the configuration `FILE`")
	flag.Parse()
	if err := write(*bin, *configuration, *out); err != nil {
		fmt.Fprintln(os.Stderr, "manpages:", err)
		os.Exit(1)
	}
}

// programs are the programs with a single page from their help. Section 8: engines and systemd run
// these programs.
var programs = map[string]string{
	"peerlane-hook":    "the OCI hook that starts the relays of containers",
	"peerlane-runtime": "an OCI runtime that adds CDI devices to containers of engines without CDI",
}

func write(bin, configuration, out string) error {
	version, err := output(filepath.Join(bin, "peerlane"), "version")
	if err != nil {
		return err
	}
	release := strings.Fields(version)[1] // peerlane VERSION (...)
	pages := map[string]string{}
	for program, section := range map[string]int{"peerlane": 1, "peerlane-relay": 8} {
		text, err := output(filepath.Join(bin, program), "manual")
		if err != nil {
			return err
		}
		command, err := manual.Read(strings.NewReader(text))
		if err != nil {
			return fmt.Errorf("help of %s: %w", program, err)
		}
		for name, page := range command.Pages(section, release) {
			pages[name] = page
		}
	}
	for program, brief := range programs {
		option := map[string]string{"peerlane-hook": "help", "peerlane-runtime": "--peerlane-help"}[program]
		text, err := output(filepath.Join(bin, program), option)
		if err != nil {
			return err
		}
		pages[program+".8"] = manual.Prose(manual.Page{
			Name: program, Section: 8, Version: release, Brief: brief, SeeAlso: []string{"peerlane(1)",
				"peerlane-config.toml(5)"},
		}, text)
	}
	markdown, err := os.ReadFile(configuration)
	if err != nil {
		return err
	}
	pages["peerlane-config.toml.5"] = manual.FromMarkdown(manual.Page{
		Name: "peerlane-config.toml", Section: 5, Version: release, Brief: "Peerlane's configuration, " +
			"/etc/peerlane/config.toml",
		SeeAlso: []string{"peerlane(1)", "peerlane-hook(8)"},
	}, string(markdown))
	// Remove the pages of an earlier build.
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	for name, page := range pages {
		path := filepath.Join(out, "man"+name[len(name)-1:], name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func output(program string, arguments ...string) (string, error) {
	c := exec.Command(program, arguments...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	text, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(text), nil
}
