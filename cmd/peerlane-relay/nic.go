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
		Short: "Be a NIC for transport loop: write from the slots of one relay to those of another",
		Long: `Be a NIC for transport loop, on a host that has GPUs and no NIC, or to
measure the staged route alone. It writes from the staging slots of one relay to
those of another, by copies that GPUs beside it issue.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return emulatedNIC(name, socket, gpus, rate) },
	}
	c.Flags().StringVar(&name, "name", "", "the NIC's name in the plan (required)")
	c.Flags().StringVar(&socket, "socket", "", "where to listen for relays (required)")
	c.Flags().StringArrayVar(&gpus, "gpu", nil, "PCI address of a GPU beside the NIC; may be given again (required)")
	c.Flags().Float64Var(&rate, "rate", 0, "most GB/s (1e9 bytes a second) of all its writes; 0 for no bound")
	for _, required := range []string{"name", "socket", "gpu"} {
		if err := c.MarkFlagRequired(required); err != nil {
			panic(err) // a flag of that name is defined above
		}
	}
	return c
}

func emulatedNIC(name, socket string, gpus []string, rate float64) error {
	if rate < 0 {
		return fmt.Errorf("--rate %v: a rate is positive, or 0 for no bound", rate)
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
