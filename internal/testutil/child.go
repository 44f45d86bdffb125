package testutil

import (
	"os/exec"
	"runtime"
	"syscall"
)

// StartChild starts a command that the kernel kills at the end of this process. The channel
// receives the result of the command's Wait, and is buffered.
func StartChild(c *exec.Cmd) (ended chan error, err error) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started, result := make(chan error), make(chan error, 1)
	go func() {
		// The kernel sends the signal at the death of the thread that started the child.
		runtime.LockOSThread()
		err := c.Start()
		started <- err
		if err == nil {
			result <- c.Wait()
		}
	}()
	return result, <-started
}
