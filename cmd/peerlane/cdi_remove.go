//go:build !front

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
)

func newCDIRemoveCommand(a *app) *cobra.Command {
	var force, dry bool
	cmd := &cobra.Command{
		Use:   "remove",
		Short: "Remove Peerlane's specifications and plan",
		Long: `Remove Peerlane's specifications in both formats and the plan, and unmount the empty
directory for containers. Other vendors' files and the configuration stay. Afterwards
no container can get a lane or restart with its lane.

While containers with a lane run the command refuses, unless --force is given: these
containers keep their relays.

Exit status:
  0  all files are removed
  1  failed, or containers with a lane run`,
		Example: `  peerlane cdi remove --dry-run
  peerlane cdi remove`,
		Args: noArgs,
	}
	f, form := &specFlags{cmd: cmd}, addForm(cmd)
	addSpecDirs(cmd, f,
		"remove the specifications in `DIR`; may be given more than once (default: /etc/cdi and /var/run/cdi)")
	cmd.Flags().BoolVar(&force, "force", false, "remove while containers with a lane run")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print the files to remove, and remove nothing")
	cmd.RunE = func(*cobra.Command, []string) error {
		live, err := a.liveContainers()
		if err != nil && !force {
			return asRoot(fmt.Errorf("find containers with a lane: %w; --force skips this check", err))
		}
		if len(live) > 0 {
			sentence := fmt.Sprintf("containers with a lane are running (%s) and could not be "+
				"restarted", strings.Join(live, ", "))
			if !force && !dry {
				return fmt.Errorf("%s; stop these containers first, or use --force", sentence)
			}
			a.log.Warn(sentence)
		}
		i := cdi.Installation{Layout: a.layout, Dirs: a.specDirs(f)}
		changes, err := i.Remove(dry)
		if err != nil {
			return asRoot(err)
		}
		unmounted := false
		if !dry && paths.MountsAnchor() {
			if unmounted, err = a.layout.UnmountAnchor(); err != nil {
				return err
			}
		}
		if form.value == formJSON {
			removed := []string{}
			for _, c := range changes {
				removed = append(removed, c.Path)
			}
			return a.printJSON(struct {
				DryRun  bool     `json:"dryRun,omitempty"`
				Removed []string `json:"removed"`
			}{dry, removed})
		}
		for _, c := range changes {
			words := changeWords(c)
			if dry {
				words = "would have " + words
			}
			a.out.Println(words)
		}
		if unmounted {
			a.out.Println("unmounted " + a.layout.Anchor())
		}
		if len(changes) == 0 && !unmounted {
			a.out.Println("Nothing is left to remove.")
		}
		return nil
	}
	return cmd
}

// liveContainers returns the names of running containers with a relay.
func (a *app) liveContainers() (names []string, err error) {
	relays, err := generation.List(a.layout)
	for _, r := range relays {
		if r.Alive {
			names = append(names, terminal.Sanitise(r.Container.ID))
		}
	}
	return names, err
}
