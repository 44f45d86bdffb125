package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// initName is the name under which confine executes itself as the first process of
// the PID namespace.
const initName = "confine-init"

// initCommand returns the command that executes runInit: in new namespaces as root,
// else in a process group alone.
func initCommand(command []string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = append([]string{initName}, command...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWNS
	}
	return cmd
}

// runInit executes a command and reaps every process that the kernel gives to init. The end of the
// command ends init, and so the PID namespace. Init survives the SIGQUIT of its process group.
func runInit(command []string) int {
	signal.Notify(make(chan os.Signal, 1), unix.SIGQUIT)
	if os.Getpid() == 1 {
		if err := mountProc(); err != nil {
			return failed("prepare the mount namespace", err)
		}
	}
	path, err := exec.LookPath(command[0])
	if err != nil {
		return failed("start "+command[0], err)
	}
	// The loop below reaps the process, not package os.
	child, err := syscall.ForkExec(path, command, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}})
	if err != nil {
		return failed("start "+command[0], err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return failed("wait for "+command[0], err)
		case pid != child:
		case status.Exited():
			return status.ExitStatus()
		case status.Signaled():
			return 128 + int(status.Signal())
		}
	}
}

// mountProc makes the mounts private and mounts a /proc of this PID namespace.
func mountProc() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount / private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return nil
}
