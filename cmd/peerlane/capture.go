package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/topo"
)

func newCaptureCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "capture > FILE.tar.gz",
		Short: "Write what a host's topology is read from to one file",
		Long: `Write what this host's topology is read from to standard output, as one tar.gz:
what sysfs, procfs and NVML tell of PCI functions, GPUs, RDMA devices, NUMA nodes
and processors. "--input FILE.tar.gz" reads it anywhere else, so a report of a
bug needs no more than this file.

It has no serial numbers, no host names and no addresses of network interfaces.
It has the UUIDs of GPUs and the node GUIDs of RDMA devices. The kernel shows PCI
capabilities to root alone; others get a capture without them.`,
		Example: `  peerlane topo capture > host.tar.gz
  peerlane topo --input host.tar.gz`,
		Args: noArgs,
	}
	host := addLiveHost(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if a.out.File() != nil {
			return usageError{cmd.CommandPath(), errors.New("standard output is a terminal and a capture is binary: redirect to a file, as in `peerlane topo capture > host.tar.gz`")}
		}
		if os.Geteuid() != 0 {
			a.log.Info("not run by root, so the capture is without PCI capabilities; the rest is complete")
		}
		return topo.Capture(host.options(), a.out.Document())
	}
	return cmd
}
