//go:build cluster

package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

// daemon is a long-running program of a cluster.
type daemon struct {
	name    string
	command []string
	ready   func() error // nil: ready at the start
	log     string       // a path
	process *os.Process
	ended   chan error
}

// start starts the daemon and waits until the daemon is ready.
func (d *daemon) start(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	c := exec.Command(d.command[0], d.command[1:]...)
	c.Dir = filepath.Dir(d.log)
	c.Stdout, c.Stderr = log, log
	ended, err := testutil.StartChild(c)
	if err != nil {
		t.Fatal(err)
	}
	d.process, d.ended = c.Process, ended
	if d.ready == nil {
		return
	}
	for end := testutil.BeginFor(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := d.ready()
		if err == nil {
			return
		}
		select {
		case status := <-ended:
			d.process = nil
			t.Fatalf("%s ended: %v: %s", d.name, status, tail(d.log))
		default:
		}
		if end.Over() {
			t.Fatalf("%s is not ready: %v: %s", d.name, err, tail(d.log))
		}
	}
}

// signal sends a signal that ends the daemon, and waits for its end.
func (d *daemon) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if d.process == nil {
		return
	}
	d.process.Signal(s) // the process may have ended
	select {
	case <-d.ended:
	case <-testutil.After(30 * time.Second):
		t.Errorf("%s does not end: %s", d.name, tail(d.log))
		d.process.Kill() // as above
		<-d.ended
	}
	d.process = nil
}

func (d *daemon) stop(t *testing.T) { t.Helper(); d.signal(t, syscall.SIGTERM) }
func (d *daemon) kill(t *testing.T) { t.Helper(); d.signal(t, syscall.SIGKILL) }

func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-3000):])
}
