package traffic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/relay/wire"
)

// patience limits a step of a client: a longer step hangs.
const patience = 2 * time.Minute

// victim is a client's process, in Go or C, for the killer.
type victim struct {
	name    string
	in      *container
	command *exec.Cmd
	ended   chan struct{} // closed after the end
	err     error         // set before ended is closed
	stderr  testbed.Tail
}

// begin starts a process that the fleet may kill; read reads the whole output before begin waits
// for the process.
func (f *Fleet) begin(name string, in *container, command *exec.Cmd, read func(io.Reader)) (*victim, error) {
	v := &victim{name: name, in: in, command: command, ended: make(chan struct{})}
	command.Stderr = &v.stderr
	out, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if in.ending {
		return nil, &failure{late: true, text: name + ": its container has ended"}
	}
	if err := command.Start(); err != nil {
		return nil, err
	}
	f.victims[v] = true
	go func() {
		read(out)
		v.err = command.Wait()
		f.mu.Lock()
		delete(f.victims, v)
		f.mu.Unlock()
		close(v.ended)
	}()
	return v, nil
}

// worker is a client's process.
type worker struct {
	*victim
	container *container
	in        io.WriteCloser
	replies   chan reply // closed at the process's end
}

// clientProgram is the program of a client, in the directory of the host's programs.
const clientProgram = "traffic-client"

// worker starts a client in a container.
func (f *Fleet) worker(c *container) (*worker, error) {
	// Not with the fleet's context: the orders end the process.
	command, err := f.host.Program(context.Background(), clientProgram, c.gpu)
	if err != nil {
		return nil, err
	}
	w := &worker{container: c, replies: make(chan reply, 1)}
	if w.in, err = command.StdinPipe(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.clients++
	name := fmt.Sprintf("client %d", f.clients)
	f.mu.Unlock()
	w.victim, err = f.begin(name, c, command, func(out io.Reader) {
		for decoder := json.NewDecoder(out); ; {
			var r reply
			if err := decoder.Decode(&r); err != nil {
				break
			}
			w.replies <- r
		}
		close(w.replies)
	})
	return w, err
}

// failure describes a failed step of a client.
type failure struct {
	status wire.Status // 0: no status
	killed bool        // the process was killed
	late   bool        // the container was ending before the start
	hangs  bool
	text   string
}

func (f *failure) Error() string { return f.text }

// gone returns the failure of a process that ended during a step.
func (v *victim) gone(what string) error {
	<-v.ended
	return &failure{killed: v.wasKilled(), text: fmt.Sprintf("%s, %s: it ended (%v): %s", v.name, what, v.err, &v.stderr)}
}

// wasKilled reports whether a process ended by SIGKILL.
func (v *victim) wasKilled() bool {
	status, ok := v.command.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// do sends an order to the client and returns its reply.
func (w *worker) do(o order) (reply, error) {
	var r reply
	if err := json.NewEncoder(w.in).Encode(o); err != nil {
		return r, w.gone(o.Do)
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case answer, ok := <-w.replies:
		if !ok {
			return r, w.gone(o.Do)
		}
		if answer.Error != "" {
			return answer, &failure{status: answer.Status, text: w.name + ": " + answer.Error}
		}
		return answer, nil
	case <-limit.C:
		return r, w.hangs(o.Do)
	}
}

// hangs ends a client that does not answer; the client prints its goroutines.
func (w *worker) hangs(what string) error {
	_ = w.command.Process.Signal(syscall.SIGQUIT)
	select {
	case <-w.ended:
	case <-time.After(10 * time.Second):
		_ = w.command.Process.Kill()
		<-w.ended
	}
	return &failure{hangs: true, text: fmt.Sprintf("%s, %s: no answer within %v: the client hangs: %s", w.name, what,
		patience, &w.stderr)}
}

// leave ends a client by closing the session.
func (w *worker) leave() error {
	w.in.Close()
	select {
	case <-w.ended:
	case <-time.After(patience):
		return w.hangs("leaving")
	}
	if w.err != nil {
		return w.gone("leaving")
	}
	return nil
}

// kill ends a client during any step.
func (w *worker) kill() {
	_ = w.command.Process.Kill() // may have ended
	w.in.Close()
	<-w.ended
}

// both sends orders to two clients concurrently.
func both(a, b *worker, first, second order) (replies [2]reply, err error) {
	var wait sync.WaitGroup
	var failed [2]error
	for i, w := range []*worker{a, b} {
		wait.Go(func() { replies[i], failed[i] = w.do([]order{first, second}[i]) })
	}
	wait.Wait()
	return replies, errors.Join(failed[:]...)
}
