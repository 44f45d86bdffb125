package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// killTimeout limits the time for a killed process to end.
	killTimeout = 10 * time.Second
	// sendTimeout limits the time for sending a frame to an agent, which always reads.
	sendTimeout = time.Minute
)

// Client runs processes in a guest. It is safe for concurrent use.
type Client struct {
	conn io.ReadWriteCloser
	done chan struct{}
	err  error // set before done is closed

	write sync.Mutex
	enc   *json.Encoder
	// delivering is set while the client waits for a reader of output.
	delivering atomic.Bool

	mu        sync.Mutex
	last      int64
	processes map[int64]*process
	ready     *Ready
	isReady   chan struct{}
	pongs     chan struct{}
}

// process is a running process.
type process struct {
	stdout, stderr io.Writer
	taken          atomic.Int64  // bytes of input
	took           chan struct{} // has an element if the process has taken more input
	over           chan struct{} // closed when Run has returned
	exit           chan exit
	failed         error // of a writer
}

// NewClient returns a client of the agent at the other end of conn.
func NewClient(conn io.ReadWriteCloser) *Client {
	c := &Client{
		conn: conn, done: make(chan struct{}), enc: json.NewEncoder(conn),
		processes: map[int64]*process{}, isReady: make(chan struct{}), pongs: make(chan struct{}, 1),
	}
	go c.read()
	return c
}

func (c *Client) read() {
	dec := json.NewDecoder(c.conn)
	for {
		var f frame
		if err := dec.Decode(&f); err != nil {
			c.err = fmt.Errorf("the guest's agent: %w", err)
			close(c.done)
			return
		}
		c.take(f)
	}
}

func (c *Client) take(f frame) {
	if f.Pong {
		select {
		case c.pongs <- struct{}{}:
		default: // Run has returned
		}
		return
	}
	c.mu.Lock()
	if f.Ready != nil && c.ready == nil {
		c.ready = f.Ready
		close(c.isReady)
	}
	p := c.processes[f.ID]
	if f.Exit != nil {
		delete(c.processes, f.ID)
	}
	c.mu.Unlock()
	if p == nil {
		return // Run has returned
	}
	for _, out := range []struct {
		to   io.Writer
		data []byte
	}{{p.stdout, f.Output}, {p.stderr, f.Error}} {
		if len(out.data) > 0 && out.to != nil && p.failed == nil {
			c.delivering.Store(true)
			_, p.failed = out.to.Write(out.data)
			c.delivering.Store(false)
		}
	}
	if f.Taken > 0 {
		p.taken.Add(int64(f.Taken))
		select {
		case p.took <- struct{}{}:
		default: // already signalled
		}
	}
	if f.Exit != nil {
		p.exit <- *f.Exit
	}
}

func (c *Client) send(f frame) error {
	c.write.Lock()
	defer c.write.Unlock()
	if conn, ok := c.conn.(net.Conn); ok {
		if err := conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
			return err
		}
	}
	if err := c.enc.Encode(f); err != nil {
		return fmt.Errorf("send to the guest's agent: %w", err)
	}
	return nil
}

// Ready waits for the agent.
func (c *Client) Ready(ctx context.Context) (Ready, error) {
	select {
	case <-c.isReady:
		return *c.ready, nil
	case <-c.done:
		return Ready{}, c.err
	case <-ctx.Done():
		return Ready{}, fmt.Errorf("wait for the guest's agent: %w", ctx.Err())
	}
}

// Ping requests a sign of life from the agent, one request at a time. While a reader of process
// output blocks, the answer waits behind the output, which is no error.
func (c *Client) Ping(ctx context.Context) error {
	select { // the answer to an abandoned ping
	case <-c.pongs:
	default:
	}
	sent := make(chan error, 1)
	go func() { sent <- c.send(frame{Ping: true}) }()
	for {
		select {
		case err := <-sent:
			if err != nil {
				return err
			}
			sent = nil
			continue
		case <-c.pongs:
			return nil
		case <-c.done:
			return c.err
		case <-ctx.Done():
		}
		if c.delivering.Load() {
			return nil
		}
		return fmt.Errorf("the guest does not answer: %w", context.Cause(ctx))
	}
}

// Run runs a process to its end. An exit status other than 0 is an *ExitError. When ctx ends, Run
// kills the process group. stdin may be nil. Run reads stdin until its end or the end of the
// process, so a blocking reader outlives Run.
func (c *Client) Run(ctx context.Context, cmd Command, stdin io.Reader, stdout, stderr io.Writer) error {
	p := &process{stdout: stdout, stderr: stderr, took: make(chan struct{}, 1), over: make(chan struct{}),
		exit: make(chan exit, 1)}
	c.mu.Lock()
	c.last++
	id := c.last
	c.processes[id] = p
	c.mu.Unlock()
	defer func() {
		close(p.over)
		c.mu.Lock()
		delete(c.processes, id)
		c.mu.Unlock()
	}()
	if err := c.send(frame{ID: id, Start: &cmd}); err != nil {
		return err
	}
	if stdin == nil {
		if err := c.send(frame{ID: id, EOF: true}); err != nil {
			return err
		}
	} else {
		go c.feed(id, p, stdin)
	}
	select {
	case e := <-p.exit:
		return c.endError(cmd, p, e)
	case <-c.done:
		return c.err
	case <-ctx.Done():
	}
	why := context.Cause(ctx)
	if err := c.send(frame{ID: id, Kill: true}); err != nil {
		return errors.Join(why, err)
	}
	select {
	case <-p.exit:
		return fmt.Errorf("%q was killed: %w", cmd.Argv, why)
	case <-c.done:
		return errors.Join(why, c.err)
	case <-time.After(killTimeout):
		return fmt.Errorf("%q did not end within %v of being killed: %w", cmd.Argv, killTimeout, why)
	}
}

// feed sends input, up to the credit of the agent.
func (c *Client) feed(id int64, p *process, stdin io.Reader) {
	sent := int64(0)
	for {
		credit := inputCredit - (sent - p.taken.Load())
		if credit <= 0 {
			select {
			case <-p.took:
			case <-p.over:
				return
			case <-c.done:
				return
			}
			continue
		}
		buffer := make([]byte, min(credit, 32<<10))
		n, err := stdin.Read(buffer)
		if n > 0 {
			sent += int64(n)
			if c.send(frame{ID: id, Input: buffer[:n]}) != nil {
				return // the reader of frames has the reason
			}
		}
		if err != nil {
			_ = c.send(frame{ID: id, EOF: true}) // the reader of frames has the reason
			return
		}
	}
}

func (c *Client) endError(cmd Command, p *process, e exit) error {
	switch {
	case e.Failed != "":
		return &startError{cmd.Argv, e.Failed, e.Errno}
	case e.Status != 0:
		return &ExitError{Argv: cmd.Argv, Status: e.Status}
	}
	return p.failed
}

// Close closes the connection. The agent then kills the client's remaining processes.
func (c *Client) Close() error { return c.conn.Close() }
