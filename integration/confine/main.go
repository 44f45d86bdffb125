// Confine runs a test command and ends everything that the command has started.
//
//	confine [-idle DURATION] COMMAND [ARGUMENT...]
//
// As root, confine runs the command in new PID and mount namespaces: when the command ends, or
// confine itself dies, the kernel kills the remaining processes and removes the mounts. Without
// root it creates a process group only.
//
// A command has no time limit. Confine watches standard output: after an idle time without a byte
// it sends SIGQUIT, upon which Go programs print goroutine stacks, and kills the command after a
// further graceTime. The exit status is the command's, 124 after an idle time, and 128 plus the
// number of a signal.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

const (
	statusIdle = 124
	// graceTime is the time for programs to print goroutine stacks.
	graceTime = 20 * time.Second
)

func main() {
	// The kernel sends the parent-death signal when this thread ends.
	runtime.LockOSThread()
	if len(os.Args) > 2 && os.Args[0] == initName {
		os.Exit(runInit(os.Args[1:]))
	}
	idle := flag.Duration("idle", 15*time.Minute, "kill the command after this time without output")
	flag.Parse()
	if flag.NArg() == 0 || *idle <= 0 {
		fmt.Fprintln(os.Stderr, "usage: confine [-idle DURATION] COMMAND [ARGUMENT...]")
		os.Exit(2)
	}
	os.Exit(confine(flag.Args(), *idle, os.Stdout))
}

// confine runs a command as the package comment describes, copies standard output to out, and
// returns the exit status.
func confine(command []string, idle time.Duration, out io.Writer) int {
	cmd := initCommand(command)
	cmd.Stdin, cmd.Stderr = os.Stdin, os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return failed("create the pipe of its output", err)
	}
	signals, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	if err := cmd.Start(); err != nil {
		return failed("start "+command[0], err)
	}
	group := -cmd.Process.Pid
	progress := make(chan struct{}, 1)
	copied := make(chan error, 1)
	go func() {
		_, err := io.Copy(out, &progressReader{stdout, progress})
		copied <- err
	}()
	status := watch(signals, group, idle, progress, copied)
	if status != 0 {
		_ = unix.Kill(group, unix.SIGKILL) // ESRCH: the command has ended
		// After a failed write nothing reads the pipe: Wait closes it.
	}
	err = cmd.Wait()
	if status == 0 {
		status = statusOf(err)
	}
	return status
}

// watch waits until the command's output ends. It returns 0, or the exit status of confine if the
// command has to be killed.
func watch(signals context.Context, group int, idle time.Duration, progress <-chan struct{}, copied <-chan error) int {
	timer := time.NewTimer(idle)
	for {
		select {
		case err := <-copied:
			if err != nil { // the reader of standard output has exited
				return failed("write the output", err)
			}
			return 0
		case <-signals.Done():
			return 128 + int(unix.SIGTERM)
		case <-progress:
			timer.Reset(idle)
		case <-timer.C:
			fmt.Fprintf(os.Stderr, "confine: no output for %v; sending SIGQUIT, then SIGKILL\n", idle)
			_ = unix.Kill(group, unix.SIGQUIT) // ESRCH: the command has ended
			select {
			case <-copied:
			case <-signals.Done():
			case <-time.After(graceTime):
			}
			return statusIdle
		}
	}
}

// progressReader reports successful reads without blocking.
type progressReader struct {
	io.Reader
	progress chan<- struct{}
}

func (r *progressReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if n > 0 {
		select {
		case r.progress <- struct{}{}:
		default:
		}
	}
	return n, err
}

func statusOf(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		return failed("wait for the command", err)
	case exit.ExitCode() >= 0:
		return exit.ExitCode()
	}
	status, _ := exit.Sys().(interface{ Signal() unix.Signal })
	if status == nil {
		return 1
	}
	return 128 + int(status.Signal())
}

func failed(operation string, err error) int {
	fmt.Fprintf(os.Stderr, "confine: %s: %v\n", operation, err)
	return 1
}
