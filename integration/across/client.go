// Package across is a client that exchanges verified messages with another client, many in flight
// in both directions, between GPU memories, and reports the result of every message. Tests of
// networks run the client in a container of each host.
package across

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// Commands for a client.
const (
	// Connect connects with the Handle of the other client, accepts a connection, and exchanges
	// messages until Bytes are sent, Finish arrives, or an operation fails.
	Connect = "connect"
	Finish  = "finish"
	Count   = "count" // answered at once, even while an operation hangs
)

// Order is a JSON line of a client's input.
type Order struct {
	Do     string      `json:"do"`
	Handle wire.Handle `json:"handle"`
	// Side is 0 at one client and 1 at the other; the remaining fields are equal.
	Side    int    `json:"side"`
	Seed    uint64 `json:"seed"`
	Bytes   uint64 `json:"bytes"`   // per direction, minimum; 0: until Finish
	Largest uint64 `json:"largest"` // message, bytes, up to slotBytes
}

// Messages of a client.
const (
	Listening = "listening" // with a Handle, for the next Connect
	Moving    = "moving"    // the first messages have arrived
	Counted   = "counted"
	Done      = "done"
	Failed    = "failed" // the connections are closed; Listening follows
	Wrong     = "error"  // and the client ends
)

// Line is a JSON line of a client's output.
type Line struct {
	Kind   string      `json:"kind"`
	Handle wire.Handle `json:"handle"`
	Error  string      `json:"error,omitempty"`
	At     time.Time   `json:"at"`
	Report Report      `json:"report"`
}

// Report is the result of an exchange so far.
type Report struct {
	Posted        int      `json:"posted"` // sends, of messages
	Sent          int      `json:"sent"`   // operations that succeeded
	Received      int      `json:"received"`
	BytesReceived uint64   `json:"bytesReceived"`
	Pending       int      `json:"pending"`  // operations at the first failure, including the failed operation
	Failures      []string `json:"failures"` // errors of the pending operations; the rest succeeded
}

const (
	// slotBytes is the room for a message in flight.
	slotBytes = 6 << 20
	// AtOnce is the number of messages in flight per direction.
	AtOnce = 4
)

// hangs is the time after which an operation counts as endless.
const hangs = 2 * time.Minute

// Serve is the main loop of a client process: it executes commands until in ends.
func Serve(in io.Reader, out io.Writer, socket string) error {
	// A CUDA context is current on a single thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := &process{out: json.NewEncoder(out), connect: make(chan Order), scratch: make([]byte, slotBytes),
		received: make([]byte, slotBytes)}
	ctx := context.Background() // the parent kills a client that does not end
	if err := c.start(ctx, socket); err != nil {
		return err
	}
	read := make(chan error, 1)
	go func() { read <- c.read(in) }()
	for {
		listener, err := c.session.Listen(ctx, c.gpu)
		if err != nil {
			return err
		}
		if err := c.emit(Line{Kind: Listening, Handle: listener.Handle()}); err != nil {
			return err
		}
		select {
		case o := <-c.connect:
			err = c.exchange(ctx, listener, o)
		case err := <-read:
			return err
		}
		if err != nil {
			return err
		}
	}
}

// process is a client.
type process struct {
	session  *client.Session
	gpu      wire.UUID
	driver   *cuda.Driver
	stream   cuda.Stream
	outgoing memory
	incoming memory
	scratch  []byte
	received []byte
	connect  chan Order
	finish   atomic.Bool

	mu     sync.Mutex // mu guards the next fields: commands are read during the exchange
	out    *json.Encoder
	report Report
}

// memory is GPU memory that the relay knows, AtOnce slots.
type memory struct {
	at    cuda.Ptr
	known *client.Memory
}

func (c *process) emit(l Line) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.At, l.Report = time.Now(), c.report
	return c.out.Encode(l)
}

func (c *process) count(f func(*Report)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.report)
}

// read passes orders on until the end of the input.
func (c *process) read(in io.Reader) error {
	orders := json.NewDecoder(in)
	for {
		var o Order
		err := orders.Decode(&o)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch o.Do {
		case Connect:
			c.finish.Store(false)
			c.connect <- o
		case Finish:
			c.finish.Store(true)
		case Count:
			err = c.emit(Line{Kind: Counted})
		default:
			err = fmt.Errorf("an order to %q", o.Do)
		}
		if err != nil {
			return err
		}
	}
}

// start opens the GPU and a session, and registers the memory with the relay.
func (c *process) start(ctx context.Context, socket string) error {
	d, err := cuda.Open()
	if err != nil {
		return client.WithoutGPU(ctx, socket, err)
	}
	device, err := d.DeviceGet(0)
	if err != nil {
		return err
	}
	uuid, err := d.DeviceUUID(device)
	if err != nil {
		return err
	}
	if c.gpu, err = wire.ParseGPU(uuid); err != nil {
		return err
	}
	if _, err = d.CtxCreate(device, cuda.CtxOptions{Lean: true}); err != nil {
		return err
	}
	if c.stream, err = d.StreamCreate(); err != nil {
		return err
	}
	if c.session, err = client.Dial(ctx, socket, c.gpu); err != nil {
		return err
	}
	c.driver = d
	for _, m := range []*memory{&c.outgoing, &c.incoming} {
		if *m, err = c.share(ctx, device); err != nil {
			return err
		}
	}
	return nil
}

func (c *process) share(ctx context.Context, device cuda.Device) (m memory, err error) {
	const bytes = AtOnce * slotBytes
	d := c.driver
	handle, err := d.MemCreate(device, bytes, cuda.MemOptions{Exportable: true})
	if err != nil {
		return m, err
	}
	if m.at, err = d.MemAddressReserve(bytes, 0); err == nil {
		err = d.MemMap(m.at, bytes, 0, handle)
	}
	if err == nil {
		err = d.MemSetAccess(m.at, bytes, cuda.Access{Device: device, Write: true})
	}
	if err != nil {
		return m, err
	}
	fd, err := d.MemExportFD(handle)
	if err != nil {
		return m, err
	}
	file := os.NewFile(uintptr(fd), "gpu-memory")
	defer file.Close()
	m.known, err = c.session.Export(ctx, client.Allocation{FD: fd, Bytes: bytes, GPU: c.gpu})
	return m, err
}

// posted is a send or a receive that is pending.
type posted struct {
	*client.Operation
	number uint64 // of the message: messages match in order, but may end in any order
	size   uint64 // bytes; 0 at the end of a direction
}

func (p posted) slot() uint64 { return p.number % AtOnce }

// connected is a running exchange.
type connected struct {
	*process
	sending, receiving *client.Connection
	ours, theirs       *messages
	sends, receives    []posted // in order
	bytes              uint64   // bytes of posted sends
	finished           bool     // the local end of the direction is posted
}

// exchange executes Connect. It returns an error that no network fault explains.
func (c *process) exchange(ctx context.Context, listener *client.Listener, o Order) error {
	c.count(func(r *Report) { *r = Report{} })
	x := &connected{process: c, ours: newMessages(o.Seed, o.Side, o.Largest),
		theirs: newMessages(o.Seed, 1-o.Side, o.Largest)}
	failed := x.meet(ctx, listener, o.Handle)
	if failed == nil {
		failed = x.run(ctx, o.Bytes)
	}
	var wrong *wrongError
	if errors.As(failed, &wrong) {
		return failed
	}
	if failed != nil {
		if err := x.gather(ctx); err != nil {
			return err
		}
	}
	for _, connection := range []*client.Connection{x.sending, x.receiving} {
		if connection == nil {
			continue
		}
		if err := connection.Close(ctx); err != nil {
			return err
		}
	}
	if err := listener.Close(ctx); err != nil {
		return err
	}
	if failed != nil {
		return c.emit(Line{Kind: Failed, Error: failed.Error()})
	}
	return c.emit(Line{Kind: Done})
}

// meet opens a connection in each direction.
func (x *connected) meet(ctx context.Context, listener *client.Listener, to wire.Handle) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, hangs, errors.New("the other client does not connect"))
	defer cancel()
	if x.sending, err = x.session.Connect(ctx, x.gpu, to); err != nil {
		return err
	}
	x.receiving, err = listener.Accept(ctx)
	return err
}

// wrongError reports a message with wrong content, or an operation without an end.
type wrongError struct{ error }

// wait waits for an operation, for at most the time after which it counts as endless.
func wait(ctx context.Context, op posted) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, hangs)
	defer cancel()
	n, err := op.Wait(ctx)
	if err != nil && ctx.Err() != nil {
		err = &wrongError{fmt.Errorf("an operation hangs: no completion within %v", hangs)}
	}
	return n, err
}

// moving is the number of received messages after which traffic counts as flowing.
const moving = 8

// run posts receives and sends, waits in order and replaces each ended operation by the next. A
// message of 0 bytes ends a direction.
func (x *connected) run(ctx context.Context, bytes uint64) error {
	for range AtOnce {
		if err := x.receive(); err != nil {
			return err
		}
	}
	for range AtOnce {
		if err := x.send(bytes); err != nil {
			return err
		}
	}
	for over := false; !over || len(x.sends) > 0; {
		if !over {
			n, err := wait(ctx, x.receives[0])
			if err != nil {
				return err
			}
			op := x.receives[0]
			x.receives = x.receives[1:]
			if over = n == 0; !over {
				if err := errors.Join(x.take(op, n), x.receive()); err != nil {
					return err
				}
			}
		}
		if len(x.sends) > 0 {
			op := x.sends[0]
			if _, err := wait(ctx, op); err != nil {
				return err
			}
			x.sends = x.sends[1:]
			x.sent(op)
			if err := x.send(bytes); err != nil {
				return err
			}
		}
	}
	return nil
}

// gather waits for the operations that were pending at the first failure: some may have succeeded.
func (x *connected) gather(ctx context.Context) error {
	var failures []string
	for i, op := range slices.Concat(x.receives, x.sends) {
		n, err := wait(ctx, op)
		var wrong *wrongError
		switch {
		case errors.As(err, &wrong):
			return err
		case err != nil:
			failures = append(failures, err.Error())
		case i >= len(x.receives):
			x.sent(op)
		case n > 0:
			if err := x.take(op, n); err != nil {
				return err
			}
		}
	}
	x.count(func(r *Report) { r.Pending, r.Failures = len(x.receives)+len(x.sends), failures })
	return nil
}

func (x *connected) receive() error {
	p := posted{}
	p.number, p.size = x.theirs.next()
	var err error
	if p.Operation, err = x.receiving.Receive(x.incoming.known, p.slot()*slotBytes, slotBytes); err == nil {
		x.receives = append(x.receives, p)
	}
	return err
}

// take compares a message of n bytes with the expected message.
func (x *connected) take(p posted, n uint64) error {
	if n != p.size {
		return &wrongError{fmt.Errorf("message %d has %d bytes instead of %d: a message was lost or duplicated", p.number, n,
			p.size)}
	}
	got := x.received[:n]
	err := x.driver.MemcpyDtoHAsync(unsafe.Pointer(&got[0]), x.incoming.at+cuda.Ptr(p.slot()*slotBytes), n, x.stream)
	if err = errors.Join(err, x.driver.StreamSynchronize(x.stream)); err != nil {
		return &wrongError{err}
	}
	if err := x.theirs.check(p.number, got, x.scratch); err != nil {
		return &wrongError{err}
	}
	x.count(func(r *Report) { r.Received++; r.BytesReceived += n })
	if p.number+1 == moving {
		return x.emit(Line{Kind: Moving})
	}
	return nil
}

// send posts the next message, then the end, and afterwards no operation.
func (x *connected) send(bytes uint64) error {
	if x.finished {
		return nil
	}
	var p posted
	p.number, p.size = x.ours.next()
	if x.finished = x.finish.Load() || bytes > 0 && x.bytes >= bytes; x.finished {
		p.size = 0
	} else {
		x.ours.fill(p.number, x.scratch[:p.size])
		err := x.driver.MemcpyHtoDAsync(x.outgoing.at+cuda.Ptr(p.slot()*slotBytes), unsafe.Pointer(&x.scratch[0]), p.size,
			x.stream)
		if err = errors.Join(err, x.driver.StreamSynchronize(x.stream)); err != nil {
			return &wrongError{err}
		}
		x.bytes += p.size
		x.count(func(r *Report) { r.Posted++ })
	}
	var err error
	if p.Operation, err = x.sending.Send(x.outgoing.known, p.slot()*slotBytes, p.size); err == nil {
		x.sends = append(x.sends, p)
	}
	return err
}

func (x *connected) sent(p posted) {
	if p.size > 0 {
		x.count(func(r *Report) { r.Sent++ })
	}
}
