package main

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/relay/transport/loop"
)

func newEmulatedNIC() *cobra.Command {
	var name, socket string
	var gpus []string
	var rate float64
	c := &cobra.Command{
		Use:   "emulated-nic",
		Short: "Emulate a NIC for transport loop: copy from the slots of one relay to the slots of another",
		Long: `Emulate a NIC for transport loop, on a host with GPUs and without a NIC, or to measure
the staged route alone. The GPUs near the emulated NIC copy from the staging slots of one
relay to the staging slots of another.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return emulatedNIC(name, socket, gpus, rate) },
	}
	c.Flags().StringVar(&name, "name", "", "name of the NIC in the plan (required)")
	c.Flags().StringVar(&socket, "socket", "", "socket to listen on for relays (required)")
	c.Flags().StringArrayVar(&gpus, "gpu", nil, "PCI address of a GPU near the NIC; may be given more than once "+
		"(required)")
	c.Flags().Float64Var(&rate, "rate", 0, "maximum rate of all writes, in GB/s (1e9 bytes per second); 0 for no limit")
	for _, required := range []string{"name", "socket", "gpu"} {
		if err := c.MarkFlagRequired(required); err != nil {
			panic(err) // a flag of that name is defined above
		}
	}
	return c
}

func emulatedNIC(name, socket string, gpus []string, rate float64) error {
	if rate < 0 {
		return fmt.Errorf("--rate %v: must be positive, or 0 for no limit", rate)
	}
	nic, err := loop.NewNIC(name, gpus, rate*1e9)
	if err != nil {
		return err
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("the emulated NIC %s cannot listen: %w", name, err)
	}
	if err := os.Chmod(socket, 0o666); err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-stop
		listener.Close()
	}()
	logrus.WithFields(logrus.Fields{"nic": name, "gpus": gpus}).Info("the emulated NIC is ready")
	return nic.Serve(listener)
}
