//go:build !front

package main

import (
	"errors"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
)

func newCDIAnchorCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "anchor",
		Short: "Mount the empty directory for containers at " + paths.ContainerDir,
		Long: `Mount the anchor: the empty directory that containers get at ` + paths.ContainerDir + `, over
which the hook mounts the relay's socket. The mount is a read-only tmpfs of one
inode, so no container runtime can write in it. Without it the hook refuses
containers with a lane.

peerlane-anchor.service runs it at boot, before container engines; peerlane cdi generate
and refresh do the same. If the anchor is mounted, they change nothing. The command
needs root. An engine without root needs no mount: its anchor is a directory of the user.`,
		Example: `  peerlane cdi anchor`,
		Args:    noArgs,
	}
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if !paths.MountsAnchor() {
			return &fault.Error{Code: fault.NotRoot, Operation: "mount the anchor", Object: a.layout.Anchor(),
				Cause: errors.New(
					"the mount of the anchor needs root in the initial user namespace"), Remedy: "run it as root, outside of a user " +
					"namespace"}
		}
		if err := a.mountAnchor(); err != nil || form.value != formJSON {
			return err
		}
		return a.printJSON(struct {
			Anchor string `json:"anchor"`
		}{a.layout.Anchor()})
	}
	return cmd
}

// mountAnchor mounts the anchor under the layout's lock.
func (a *app) mountAnchor() error {
	held, err := cdi.Hold(a.layout)
	if err != nil {
		return err
	}
	defer held.Close()
	return a.layout.MountAnchor()
}

// installAnchor mounts the anchor for installed specifications. A failure is a warning: the
// specifications are in place.
func (a *app) installAnchor() error {
	if !paths.MountsAnchor() {
		return nil
	}
	err := a.mountAnchor()
	if errors.Is(err, unix.EPERM) || errors.Is(err, paths.ErrAnchorHidden) {
		a.log.Warnf("%v; the hook refuses containers with a lane until `%s` mounts it", err, a.layout.AnchorCommand())
		return nil
	}
	return err
}
