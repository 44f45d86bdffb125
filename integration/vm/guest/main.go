// Command guest is the first process of a virtual machine, and its agent.
//
//	guest          in the initial RAM file system: find the disk, go there
//	guest init     process 1 of the small image
//	guest serve    the agent: the network, then processes for the host
//	guest tree X   put the PCIe tree X in place (package pcitree); none removes it
//
// Guest is static and makes system calls instead of running programs: under emulation a fork and an
// exec cost 60 ms.
package main

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	var err error
	switch mode := append(os.Args, "")[1]; {
	case mode == "serve":
		err = serve()
	case mode == "tree":
		err = tree(os.Args[2:])
	case os.Getpid() != 1:
		fmt.Fprintln(os.Stderr, "guest: this is the first process of a virtual machine; it does nothing elsewhere")
		os.Exit(2)
	case mode == "init":
		err = initialize()
	default:
		err = boot()
	}
	if err == nil {
		return
	}
	fmt.Fprintf(os.Stderr, "guest: %v\n", err)
	if os.Getpid() == 1 {
		// The console shows the reason; the host detects the end of the machine.
		time.Sleep(100 * time.Millisecond)
		powerOff()
	}
	os.Exit(1)
}

func powerOff() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) // returns only with an error
}

// mount is a file system to mount.
type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

func mountAll(list []mount) error {
	for _, m := range list {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s (%s) at %s: %w", m.source, m.kind, m.target, err)
		}
	}
	return nil
}
