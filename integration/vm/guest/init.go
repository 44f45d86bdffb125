package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// initialize is process 1 of the small image: it sets up a host without systemd, starts the agent
// and powers the machine off when the agent ends.
func initialize() error {
	const quiet = unix.MS_NOSUID | unix.MS_NODEV
	if err := mountAll([]mount{
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=620,gid=5"},
		{"tmpfs", "/dev/shm", "tmpfs", quiet, "mode=1777"},
		{"mqueue", "/dev/mqueue", "mqueue", quiet | unix.MS_NOEXEC, ""},
		{"tmpfs", "/tmp", "tmpfs", quiet, "mode=1777"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", quiet | unix.MS_NOEXEC, ""},
	}); err != nil {
		return err
	}
	// As on every host with systemd.
	if err := unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mounts shared: %w", err)
	}
	if err := enableControllers("/sys/fs/cgroup"); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte("peerlane-vm")); err != nil {
		return err
	}
	// The agent is a separate process: process 1 reaps orphans, and would steal the exit statuses
	// of the agent's children.
	process, err := os.StartProcess(agent, []string{agent, "serve"},
		&os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return err
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return fmt.Errorf("wait for children: %w", err)
		case pid == process.Pid:
			return fmt.Errorf("the agent ended with status %d", status.ExitStatus())
		}
	}
}

func enableControllers(cgroup string) error {
	list, err := os.ReadFile(cgroup + "/cgroup.controllers")
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(list)) {
		if err := os.WriteFile(cgroup+"/cgroup.subtree_control", []byte("+"+name), 0); err != nil {
			return fmt.Errorf("enable the cgroup controller %s: %w", name, err)
		}
	}
	return nil
}
