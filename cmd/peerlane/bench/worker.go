package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/wire"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// order is a command for a client.
type order struct {
	Do     string `json:"do"`
	Socket string `json:"socket,omitempty"`
	// Bytes is the size of a buffer.
	Bytes uint64 `json:"bytes,omitempty"`
	// Staging is the staging memory of a client that copies itself, in bytes per direction.
	Staging uint64 `json:"staging,omitempty"`
	// Handed is Client.Handed of package measure, and Followed is Stream.Followed.
	Handed   uint64        `json:"handed,omitempty"`
	Followed bool          `json:"followed,omitempty"`
	Handle   wire.Handle   `json:"handle"`
	Size     uint64        `json:"size,omitempty"`
	Depth    int           `json:"depth,omitempty"`
	Duration time.Duration `json:"duration,omitempty"`
	Rounds   int           `json:"rounds,omitempty"`
	// Base is the first value of timelines.
	Base   uint64 `json:"base,omitempty"`
	Tag    uint64 `json:"tag,omitempty"`
	Starts bool   `json:"starts,omitempty"`
	// Fields of doList. Size is the size of a block, and Keys are the keys of doExpose.
	Reads  bool             `json:"reads,omitempty"`
	Layers uint64           `json:"layers,omitempty"`
	Blocks uint64           `json:"blocks,omitempty"`
	Keys   []wire.RemoteKey `json:"keys,omitempty"`
}

func (o order) as(s *measure.Stream) { s.Followed = o.Followed }

// Commands for a client.
const (
	doContext = "context" // start CUDA only
	doAttach  = "attach"
	doListen  = "listen"
	doConnect = "connect"
	doAccept  = "accept"
	doSend    = "send"    // send a stream
	doReceive = "receive" // receive a stream
	doBoth    = "both"    // send and receive at the same time
	doFirst   = "first"   // exchange 8 bytes in both directions
	doHandOff = "hand-off"
	doExpose  = "expose" // expose both buffers to the accepted connection
	doList    = "list"
)

// reply is a client's answer.
type reply struct {
	Error  string         `json:"error,omitempty"`
	Handle wire.Handle    `json:"handle"`
	Route  string         `json:"route,omitempty"`
	GBs    float64        `json:"gbs,omitempty"`
	Times  *measure.Times `json:"times,omitempty"`
	// CUDA is the time of CUDA's start (doContext and doAttach), and Ours the time of Peerlane's
	// calls (doAttach and doFirst).
	CUDA time.Duration `json:"cuda,omitempty"`
	Ours time.Duration `json:"ours,omitempty"`
	// Keys are the keys of the outgoing and the incoming buffer (doExpose). Post and List are the
	// least times of a post and of a list (doList).
	Keys []wire.RemoteKey `json:"keys,omitempty"`
	Post time.Duration    `json:"post,omitempty"`
	List time.Duration    `json:"list,omitempty"`
}

// patience limits the time of an order, in addition to twice the requested duration.
const patience = 2 * time.Minute

// Serve is the main loop of a client process: it executes orders until the end of in.
func Serve(in io.Reader, out io.Writer) error {
	// A CUDA context is current on one thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	orders, replies := json.NewDecoder(in), json.NewEncoder(out)
	var c serving
	for {
		var o order
		err := orders.Decode(&o)
		if errors.Is(err, io.EOF) {
			if c.client != nil {
				return c.client.Close()
			}
			return nil
		}
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience+2*o.Duration)
		r, err := c.do(ctx, o)
		cancel()
		if err != nil {
			r.Error = fmt.Sprintf("%s: %v", o.Do, err)
		}
		if err := replies.Encode(r); err != nil {
			return err
		}
	}
}

type serving struct {
	client *measure.Client
	accept func(context.Context) error

	// start sets these fields.
	driver *cuda.Driver
	device cuda.Device
	gpu    wire.UUID
}

func (s *serving) do(ctx context.Context, o order) (r reply, err error) {
	c := s.client
	switch o.Do {
	case doContext:
		return s.start()
	case doAttach:
		return s.attach(ctx, o)
	case doListen:
		l, err := c.Session.Listen(ctx, c.GPU)
		if err != nil {
			return r, err
		}
		r.Handle = l.Handle()
		s.accept = func(ctx context.Context) (err error) {
			c.Receiving, err = l.Accept(ctx)
			return err
		}
	case doConnect:
		if c.Sending, err = c.Session.Connect(ctx, c.GPU, o.Handle); err == nil {
			r.Route = map[uint32]string{wire.RouteStaged: staged, wire.RouteDirect: direct}[c.Sending.Route]
		}
	case doAccept:
		err = s.accept(ctx)
	case doSend:
		var times []time.Duration
		c.Handed = o.Handed
		r.GBs, times, err = c.StreamSend(ctx, o.Size, o.Depth, o.Duration, o.Tag, o.as)
		r.Times = measure.TimesOf(times)
	case doReceive:
		err = c.StreamReceive(ctx, o.Size, o.Depth, o.Tag)
	case doBoth:
		received := make(chan error, 1)
		go func() { received <- c.StreamReceive(ctx, o.Size, o.Depth, o.Tag) }()
		r.GBs, _, err = c.StreamSend(ctx, o.Size, o.Depth, o.Duration, o.Tag, o.as)
		err = errors.Join(err, <-received)
	case doFirst:
		start := time.Now()
		err = c.Meet(ctx, o.Tag)
		r.Ours = time.Since(start)
	case doHandOff:
		var times []time.Duration
		times, err = c.HandOff(ctx, o.Starts, o.Rounds, o.Base, o.Tag)
		r.Times = measure.TimesOf(times)
	case doExpose:
		return s.expose(ctx)
	case doList:
		return s.list(ctx, o)
	default:
		err = errors.New("unknown order")
	}
	return r, err
}

// start starts CUDA on the only visible GPU, unless CUDA has already started.
func (s *serving) start() (r reply, err error) {
	if s.driver != nil {
		return r, nil
	}
	start := time.Now()
	d, err := cuda.Open()
	if err != nil {
		return r, err
	}
	if s.device, err = d.DeviceGet(0); err != nil {
		return r, err
	}
	uuid, err := d.DeviceUUID(s.device)
	if err != nil {
		return r, err
	}
	if s.gpu, err = wire.ParseGPU(uuid); err != nil {
		return r, err
	}
	if _, err = d.CtxCreate(s.device, cuda.CtxOptions{}); err != nil {
		return r, err
	}
	s.driver = d
	r.CUDA = time.Since(start)
	return r, nil
}

func (s *serving) attach(ctx context.Context, o order) (r reply, err error) {
	if r, err = s.start(); err != nil {
		return r, err
	}
	start := time.Now()
	s.client, err = measure.AttachWithStaging(ctx, s.driver, s.device, s.gpu, o.Socket, o.Bytes, o.Staging)
	r.Ours = time.Since(start)
	return r, err
}

// worker is a client process, as the run sees it.
type worker struct {
	name    string
	lane    planner.Lane
	gpu     topo.GPU
	command *exec.Cmd
	in      io.WriteCloser
	out     *json.Decoder
	errors  strings.Builder
	// generation is the generation of the worker's relay.
	generation *generation.Generation
	tags       uint64
	// values is the last value of the client's timelines.
	values uint64
	// far is the bench of the other host if the client runs there; then command is nil.
	far *far
}

// do sends an order to the client and returns its reply.
func (w *worker) do(o order) (reply, error) {
	if w.far != nil {
		return w.far.order(o)
	}
	var r reply
	err := json.NewEncoder(w.in).Encode(o)
	if err == nil {
		err = w.out.Decode(&r)
	}
	if err == nil && r.Error != "" {
		err = errors.New(r.Error)
	}
	if err != nil {
		err = fmt.Errorf("client %s: %w %s", w.name, err, strings.TrimSpace(w.errors.String()))
	}
	return r, err
}

// abandon ends the work of the client.
func (w *worker) abandon() {
	switch {
	case w.far != nil:
		w.far.abandon()
	case w.command.Process != nil:
		_ = w.command.Process.Kill() // the client may have ended
	}
}

// stop ends the client and waits for its exit.
func (w *worker) stop() error {
	w.in.Close()
	ended := make(chan error, 1)
	go func() { ended <- w.command.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			err = fmt.Errorf("client %s: %w %s", w.name, err, strings.TrimSpace(w.errors.String()))
		}
		return err
	case <-time.After(patience):
		return errors.Join(fmt.Errorf("client %s did not end by itself", w.name), w.command.Process.Kill(), <-ended)
	}
}

// together runs an order on several clients concurrently.
func together(orders map[*worker]order) (map[*worker]reply, error) {
	type answer struct {
		who *worker
		reply
		err error
	}
	answers := make(chan answer)
	for w, o := range orders {
		go func() {
			r, err := w.do(o)
			answers <- answer{w, r, err}
		}()
	}
	replies := map[*worker]reply{}
	var failed error
	for range orders {
		a := <-answers
		replies[a.who] = a.reply
		failed = errors.Join(failed, a.err)
		if a.err != nil {
			// Abandon the clients that wait for the failed client.
			for w := range orders {
				if w != a.who {
					w.abandon()
				}
			}
		}
	}
	return replies, failed
}
