//go:build !front

package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cdi"
)

func newCDIValidateCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Compare installed specifications with this host",
		Long: `Compare the installed specifications and the plan with this host, and print each
difference with its remedy on a line: GPUs and NICs that moved, appeared, disappeared
or were renamed, ports that went down, device nodes, the hook, the plan, the tenancy,
and files that engines ignore or that other users can write.

Exit status:
  0  installed specifications match this host
  3  they differ
  1  unknown: run as root, or after the driver is loaded`,
		Example: `  peerlane cdi validate
  peerlane cdi validate -o json | jq -r '.drift[].remedy'
  peerlane cdi validate || peerlane cdi refresh`,
		Args: noArgs,
	}
	host, f, form := addLiveHost(cmd), &specFlags{cmd: cmd}, addForm(cmd)
	host.addSoftware()
	addSpecDirs(cmd, f,
		"compare the specifications in `DIR`; may be given more than once (default: /etc/cdi and /var/run/cdi)")
	addContents(cmd, f, "the installed one")
	cmd.RunE = func(*cobra.Command, []string) error {
		dirs := a.specDirs(f)
		files, err := cdi.Load(dirs)
		if err != nil {
			return asRoot(err)
		}
		p, err := a.plan(host)
		if err != nil {
			return err
		}
		if dirs, err = cdi.InUse(dirs); err != nil {
			return err
		}
		v := cdi.Validator{
			Installation: cdi.Installation{Layout: a.layout, Dirs: dirs},
			Files:        files, Live: p.plan, Options: a.specOptions(p, host, f.hook, f.devRoot),
		}
		drift, err := v.Validate()
		if err != nil {
			return asRoot(err)
		}
		if form.value == formJSON {
			names := []string{}
			for _, file := range files {
				names = append(names, file.Path)
			}
			if err := a.printJSON(struct {
				Fits  bool        `json:"fits"`
				Files []string    `json:"files"`
				Drift []cdi.Drift `json:"drift"`
			}{len(drift) == 0, names, drift}); err != nil {
				return err
			}
		} else {
			for _, d := range drift {
				a.out.Printf("%s: %s; %s\n", a.paint(d.Subject, yellow), d.Message, d.Remedy)
			}
		}
		switch len(drift) {
		case 0:
			if form.value != formJSON {
				a.out.Printf("The installed files match this host (%d specifications).\n", len(files))
			}
			return nil
		case 1:
			return findingError{exitDrift, errors.New("installed specifications differ from this host: 1 difference")}
		}
		return findingError{exitDrift, fmt.Errorf("installed specifications differ from this host: %d differences",
			len(drift))}
	}
	return cmd
}
