package main

import (
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/relay/verbs/softdevice/engine"
)

func newSoftwareDevice() *cobra.Command {
	var socket string
	c := &cobra.Command{
		Use:   "software-device",
		Short: "Move bytes on GPUs for software RDMA devices of demos, benchmarks and tests",
		Long: `Move bytes between GPU memory of relays that use software RDMA devices, by the copy
engines of the GPUs. peerlane demo and peerlane bench start this process.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return softwareDevice(socket) },
	}
	c.Flags().StringVar(&socket, "socket", "", "socket to listen on for processes with a software device (required)")
	if err := c.MarkFlagRequired("socket"); err != nil {
		panic(err) // the flag is defined above
	}
	return c
}

func softwareDevice(socket string) error {
	e, err := engine.New()
	if err != nil {
		return err
	}
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	// Relays run as their own users.
	if err := os.Chmod(socket, 0o666); err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-stop
		listener.Close()
	}()
	logrus.Info("the engine of software devices is ready")
	return e.Serve(listener)
}
