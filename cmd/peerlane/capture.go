package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/topo/reader"
)

func newCaptureCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "capture [flags] > FILE.tar.gz",
		Short: "Write the sources of a host's topology to one file",
		Long: `Write the sources of this host's topology to standard output, as one tar.gz: the parts
of sysfs, procfs and NVML about PCI functions, GPUs, RDMA devices, NUMA nodes and
processors. "--input FILE.tar.gz" reads the file on any host; attach it to bug reports.

It contains no serial numbers, host names or addresses of network interfaces. It
contains the UUIDs of GPUs and the node GUIDs of RDMA devices. Only root gets PCI
capabilities from the kernel; captures of other users lack them.`,
		Example: `  peerlane topo capture > host.tar.gz
  peerlane topo --input host.tar.gz`,
		Args: noArgs,
	}
	host := addLiveHost(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		if a.out.File() != nil {
			return usageError{cmd.CommandPath(),
				errors.New("standard output is a terminal and a capture is binary: redirect to a file, as in `peerlane topo " +
					"capture > host.tar.gz`")}
		}
		if os.Geteuid() != 0 {
			a.log.Info("the capture lacks PCI capabilities, which only root can read; the rest is complete")
		}
		return reader.Capture(host.options(), a.out.Document())
	}
	return cmd
}
