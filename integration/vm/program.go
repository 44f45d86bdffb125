package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Program returns a command on the host that ends with ctx, including its child processes.
func Program(ctx context.Context, name string, arguments ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, arguments...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error {
		// At the end of this time the group is killed, and pipes are closed.
		time.AfterFunc(5*time.Second, func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) })
		return syscall.Kill(-c.Process.Pid, syscall.SIGTERM)
	}
	c.WaitDelay = 10 * time.Second
	return c
}

// step runs a program and returns the standard output; an error has the end of all output.
func step(ctx context.Context, dir, name string, arguments ...string) ([]byte, error) {
	c := Program(ctx, name, arguments...)
	c.Dir = dir
	c.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
	var out, all tail
	c.Stdout, c.Stderr = io.MultiWriter(&out, &all), &all
	if err := c.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", name, err, all.Bytes())
	}
	return out.Bytes(), nil
}

// output runs a program and writes its output to a file.
func output(ctx context.Context, file, name string, arguments ...string) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	var errs tail
	c := Program(ctx, name, arguments...)
	c.Stdout, c.Stderr = out, &errs
	if err := errors.Join(c.Run(), out.Close()); err != nil {
		return fmt.Errorf("%s %q: %w\n%s", name, arguments, err, errs.Bytes())
	}
	return nil
}

// tail keeps the last 16 KiB of its input. Two writers may share it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if n := len(t.text) - 16<<10; n > 0 {
		t.text = t.text[n:]
	}
	return len(b), nil
}

func (t *tail) Bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.text)
}
