package control

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"github.com/creack/pty"
)

// Serve executes the client's requests until the connection ends, and then kills remaining
// processes.
func Serve(conn io.ReadWriter, ready Ready) error {
	s := &server{enc: json.NewEncoder(conn), children: map[int64]*child{}}
	if err := s.send(frame{Ready: &ready}); err != nil {
		return err
	}
	defer s.killAll()
	dec := json.NewDecoder(conn)
	for {
		var f frame
		if err := dec.Decode(&f); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := s.take(f); err != nil {
			return err
		}
	}
}

type server struct {
	write sync.Mutex
	enc   *json.Encoder

	mu       sync.Mutex
	children map[int64]*child
}

type child struct {
	cmd      *exec.Cmd
	input    io.WriteCloser
	terminal bool

	mu     sync.Mutex
	queued []byte        // input that the process has not read
	closed bool          // the input has ended
	more   chan struct{} // has an element when new input exists
	gone   chan struct{} // closed when the process has ended
}

func (s *server) send(f frame) error {
	s.write.Lock()
	defer s.write.Unlock()
	return s.enc.Encode(f)
}

func (s *server) take(f frame) error {
	if f.Ping {
		return s.send(frame{Pong: true})
	}
	if f.Start != nil {
		if err := s.start(f.ID, *f.Start); err != nil {
			return s.send(frame{ID: f.ID, Exit: failedStart(err)})
		}
		return nil
	}
	s.mu.Lock()
	c := s.children[f.ID]
	s.mu.Unlock()
	if c == nil {
		return nil // ended meanwhile
	}
	switch {
	case f.Kill:
		c.kill()
	case len(f.Input) > 0 || f.EOF:
		return c.put(f.Input, f.EOF)
	}
	return nil
}

// put queues input. It never blocks, because the next frame may be a kill.
func (c *child) put(data []byte, end bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queued)+len(data) > inputCredit {
		return errors.New("input exceeds the credit")
	}
	c.queued = append(c.queued, data...)
	c.closed = c.closed || end
	select {
	case c.more <- struct{}{}:
	default: // already signalled
	}
	return nil
}

// next waits for input; end marks the last.
func (c *child) next() (data []byte, end bool) {
	for {
		c.mu.Lock()
		data, end = c.queued, c.closed
		c.queued = nil
		c.mu.Unlock()
		if len(data) > 0 || end {
			return data, end
		}
		select {
		case <-c.more:
		case <-c.gone:
			return nil, true
		}
	}
}

func (s *server) start(id int64, command Command) error {
	if len(command.Argv) == 0 {
		return errors.New("missing program")
	}
	cmd := exec.Command(command.Argv[0], command.Argv[1:]...)
	cmd.Dir = command.Dir
	cmd.Env = append(os.Environ(), command.Env...)
	c := &child{cmd: cmd, more: make(chan struct{}, 1), gone: make(chan struct{})}
	var outputs sync.WaitGroup
	if command.Terminal != nil {
		terminal, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: command.Terminal.Rows, Cols: command.Terminal.Cols})
		if err != nil {
			return err
		}
		c.terminal, c.input = true, terminal
		outputs.Go(func() { s.copy(id, terminal, false) })
	} else {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		stdin, err := cmd.StdinPipe()
		if err != nil {
			return err
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		stderr, err := cmd.StderrPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		c.input = stdin
		outputs.Go(func() { s.copy(id, stdout, false) })
		outputs.Go(func() { s.copy(id, stderr, true) })
	}
	s.mu.Lock()
	s.children[id] = c
	s.mu.Unlock()
	go s.feed(id, c)
	go func() {
		outputs.Wait()
		err := cmd.Wait()
		close(c.gone)
		s.mu.Lock()
		delete(s.children, id)
		s.mu.Unlock()
		// The client may have closed the connection, which Serve detects.
		_ = s.send(frame{ID: id, Exit: result(cmd, err)})
	}()
	return nil
}

// feed writes the input to the process, and discards it after the process has closed its end.
func (s *server) feed(id int64, c *child) {
	var failed error
	for {
		data, end := c.next()
		if failed == nil && len(data) > 0 {
			_, failed = c.input.Write(data)
		}
		if len(data) > 0 && s.send(frame{ID: id, Taken: len(data)}) != nil {
			return
		}
		if end {
			break
		}
	}
	if !c.terminal {
		_ = c.input.Close() // the process may have closed it first
	}
}

func (s *server) copy(id int64, from io.Reader, isError bool) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			f := frame{ID: id}
			if isError {
				f.Error = buffer[:n]
			} else {
				f.Output = buffer[:n]
			}
			if s.send(f) != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func result(cmd *exec.Cmd, err error) *exit {
	if cmd.ProcessState == nil {
		return failedStart(err)
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return &exit{Status: 128 + int(status.Signal())}
	}
	return &exit{Status: cmd.ProcessState.ExitCode()}
}

// kill kills the process group; a terminal's process leads a session.
func (c *child) kill() {
	// ESRCH after the end.
	_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
}

func (s *server) killAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.children {
		c.kill()
	}
}
