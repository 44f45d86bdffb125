package main

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/kubernetes/hostinstall"
)

// installTimeout is longer than the two minutes that units have for their start.
const installTimeout = 5 * time.Minute

func installCommand() *cobra.Command {
	var payload, host string
	c := &cobra.Command{
		Use:   "install",
		Short: "Install Peerlane's programs and units on a host without packages",
		Long: `install copies the programs of the image to ` + hostinstall.Prefix + ` on the host, units to
/etc/systemd/system, and rules to /etc/udev/rules.d and /etc/modprobe.d; starts the units of the anchor,
of relays and of the refresh; and ends. Existing files in /etc/peerlane stay. Running relays keep their
program. The init container of the DaemonSet runs install where the value install.enabled is true.`,
		Example: "  peerlane-kubelet install --payload /payload --host /host",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			ctx, cancel := context.WithTimeout(ctx, installTimeout)
			defer cancel()
			systemd, err := hostinstall.Connect(ctx, filepath.Join(host, "run/systemd/private"))
			if err != nil {
				return err
			}
			return hostinstall.Install(ctx, hostinstall.Config{Payload: payload, Host: host, Systemd: systemd,
				Log: logrus.StandardLogger()})
		},
	}
	c.Flags().StringVar(&payload, "payload", "/payload", "directory of the image with the files of the host")
	c.Flags().StringVar(&host, "host", "/host", "directory at which the directories of the host are mounted")
	return c
}
