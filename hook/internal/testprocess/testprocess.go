// Package testprocess gives tests the identities of processes.
package testprocess

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/peerlane/peerlane/hook/process"
)

// Own returns the identity of this process.
func Own(t testing.TB) process.Process {
	t.Helper()
	p, pidfd, err := process.Identify(os.Getpid())
	if err == nil {
		err = pidfd.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Ended returns the identity of a process that has ended.
func Ended(t testing.TB) process.Process {
	t.Helper()
	c := exec.Command("cat")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p, pidfd, err := process.Identify(c.Process.Pid)
	if err != nil {
		t.Fatal(errors.Join(err, in.Close(), c.Wait()))
	}
	if err := errors.Join(pidfd.Close(), in.Close(), c.Wait()); err != nil {
		t.Fatal(err)
	}
	return p
}
