package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// ClientOptions are those of the process in a container.
type ClientOptions struct {
	Socket string
	Name   string // "A" or "B"
	Script Script
}

// RunClient is the process in a container: it looks at what was injected,
// attaches to its relay, and exchanges messages with the other container as
// the script says. It talks to the orchestrator in JSON lines.
func RunClient(in io.Reader, out io.Writer, o ClientOptions) error {
	// A CUDA context is current on one thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := &demoClient{ClientOptions: o, out: json.NewEncoder(out)}
	lines := bufio.NewReader(in)
	if o.Socket == "-" {
		path, err := lines.ReadString('\n')
		if err != nil {
			return fmt.Errorf("waiting for the path of the relay's socket: %w", err)
		}
		c.Socket = strings.TrimSpace(path)
	}
	err := c.run(json.NewDecoder(lines))
	if err != nil {
		return errors.Join(err, c.out.Encode(event{Kind: "failed", Error: err.Error()}))
	}
	return c.out.Encode(event{Kind: "done", Result: &c.result})
}

type demoClient struct {
	ClientOptions
	out    *json.Encoder
	result Client

	driver    *cuda.Driver
	gpu       wire.UUID
	session   *client.Session
	timelines *client.StreamTimelines
	outgoing  *buffer
	incoming  *buffer
	sending   *client.Connection
	receiving *client.Connection
}

// Timelines of a session as the demo uses them.
const (
	filled  = 0 // our stream: outgoing bytes are in place
	arrived = 1 // the relay: incoming bytes are in place
	bounced = 2 // our stream: a hand-off came, send the next
)

func (c *demoClient) other() string {
	if c.Name == "A" {
		return "B"
	}
	return "A"
}

func (c *demoClient) run(orders *json.Decoder) (err error) {
	injected, err := lookAround()
	if err != nil {
		return err
	}
	if c.driver, err = cuda.Open(); err == nil {
		injected.GPUs, err = visibleGPUs(c.driver)
	}
	if err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
		defer cancel()
		return client.WithoutGPU(ctx, c.Socket, err)
	}
	if err := c.out.Encode(event{Kind: "injected", Injected: injected}); err != nil {
		return err
	}
	if c.gpu, err = wire.ParseGPU(injected.GPUs[0]); err != nil {
		return err
	}
	device, err := c.driver.DeviceGet(0)
	if err != nil {
		return err
	}
	if _, err := c.driver.CtxCreate(device, cuda.CtxOptions{}); err != nil {
		return fmt.Errorf("a context on this container's GPU: %w", err)
	}
	if err := c.attach(device); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.timelines.Unregister(), c.session.Close()) }()
	if err := c.connect(orders); err != nil {
		return err
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"exchanging verified messages", c.exchange},
		{"measuring rates", c.rates},
		{"measuring the hand-off", c.handOff},
		{"reading the relay's counters", c.counters},
	} {
		if err := c.out.Encode(event{Kind: "progress", Step: step.name}); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
		err := step.do(ctx)
		cancel()
		if err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// lookAround reads from inside what a container was given.
func lookAround() (*Injected, error) {
	i := &Injected{Environment: map[string]string{}}
	for _, pattern := range []string{"/dev/nvidia*", "/dev/infiniband/*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		i.Devices = append(i.Devices, found...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		// proc(5): id parent major:minor root point options optional... - type source super
		f := strings.Fields(line)
		if len(f) < 7 || !strings.Contains(f[4], "peerlane") && !strings.Contains(f[4], "cuda") {
			continue
		}
		propagation := "private"
		if f[6] != "-" {
			propagation = f[6]
		}
		// A later mount at one place hides the earlier one, as the relay's socket
		// does the specification's anchor.
		i.Mounts = slices.DeleteFunc(i.Mounts, func(m string) bool { return strings.HasPrefix(m, f[4]+" ") })
		i.Mounts = append(i.Mounts, fmt.Sprintf("%s (%s, %s)", f[4], f[5], propagation))
	}
	for _, variable := range os.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, "PEERLANE_") || strings.HasPrefix(name, "NVIDIA_") || strings.HasPrefix(name, "CUDA_") {
			i.Environment[name] = value
		}
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	i.PIDs = len(processes)
	return i, nil
}

func visibleGPUs(d *cuda.Driver) ([]string, error) {
	n, err := d.DeviceCount()
	if err != nil {
		return nil, err
	}
	var list []string
	for i := range n {
		g, err := d.DeviceGet(i)
		if err != nil {
			return nil, err
		}
		uuid, err := d.DeviceUUID(g)
		if err != nil {
			return nil, err
		}
		list = append(list, uuid)
	}
	if len(list) == 0 {
		return nil, errors.New("CUDA shows no GPU")
	}
	return list, nil
}

// buffer is GPU memory that the relay has mapped, with host memory beside it
// for filling and checking, and a stream of its own.
type buffer struct {
	driver *cuda.Driver
	ptr    cuda.Ptr
	host   []byte
	stream cuda.Stream
	memory *client.Memory
}

func (c *demoClient) attach(device cuda.Device) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
	defer cancel()
	start := time.Now()
	var err error
	if c.session, err = client.Dial(ctx, c.Socket, c.gpu); err != nil {
		return err
	}
	c.result.ProtocolVersion = c.session.Version()
	if c.outgoing, err = c.newBuffer(ctx, device, wire.AccessSend); err != nil {
		return err
	}
	if c.incoming, err = c.newBuffer(ctx, device, wire.AccessReceive); err != nil {
		return err
	}
	c.result.FirstAttach = time.Since(start)
	c.timelines, err = c.session.RegisterTimelines(c.driver)
	return err
}

func (c *demoClient) newBuffer(ctx context.Context, device cuda.Device, access uint32) (*buffer, error) {
	d := c.driver
	b := &buffer{driver: d}
	handle, err := d.MemCreate(device, maxMessage, cuda.MemOptions{Exportable: true, RDMA: true})
	if err != nil {
		return nil, err
	}
	if b.ptr, err = d.MemAddressReserve(maxMessage, 0); err != nil {
		return nil, err
	}
	if err := d.MemMap(b.ptr, maxMessage, 0, handle); err != nil {
		return nil, err
	}
	if err := d.MemSetAccess(b.ptr, maxMessage, cuda.Access{Device: device, Write: true}); err != nil {
		return nil, err
	}
	host, err := d.MemHostAlloc(maxMessage)
	if err != nil {
		return nil, err
	}
	b.host = unsafe.Slice((*byte)(host), maxMessage)
	if b.stream, err = d.StreamCreate(); err != nil {
		return nil, err
	}
	fd, err := d.MemExportFD(handle)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "gpu-memory")
	defer file.Close()
	b.memory, err = c.session.Export(ctx, client.Allocation{FD: fd, Bytes: maxMessage, GPU: c.gpu, Access: access})
	return b, err
}

// connect makes both directions.
func (c *demoClient) connect(orders *json.Decoder) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
	defer cancel()
	listener, err := c.session.Listen(ctx, c.gpu)
	if err != nil {
		return err
	}
	if err := c.out.Encode(event{Kind: "listening", Handle: listener.Handle()}); err != nil {
		return err
	}
	var next order
	if err := orders.Decode(&next); err != nil {
		return fmt.Errorf("waiting for the other container's handle: %w", err)
	}
	if c.sending, err = c.session.Connect(ctx, c.gpu, next.Connect); err != nil {
		return err
	}
	if c.receiving, err = listener.Accept(ctx); err != nil {
		return err
	}
	route := map[uint32]string{wire.RouteStaged: "staged", wire.RouteDirect: "direct"}[c.sending.Route]
	return c.out.Encode(event{Kind: "connected", Connection: c.sending.Peer, Route: route})
}

func (c *demoClient) timeline(number uint32) *client.Timeline {
	t, err := c.session.Timeline(number)
	if err != nil {
		panic(err) // the numbers are constants within the session's range
	}
	return t
}

// exchange sends and receives the script's messages, both at once, each handed
// over by timelines: our stream says when a message may go, and waits until
// one has come.
func (c *demoClient) exchange(ctx context.Context) error {
	done := uint64(0)
	reported := uint64(0)
	for i, n := range c.Script.sizes() {
		value := uint64(i + 1)
		receive, err := c.receiving.Receive(c.incoming.memory, 0, n, client.Tag(value), client.Signal(c.timeline(arrived), value))
		if err != nil {
			return err
		}
		patternOf(c.Script.Seed, c.Name, i).fill(c.outgoing.host[:n])
		if err := c.driver.MemcpyHtoDAsync(c.outgoing.ptr, unsafe.Pointer(&c.outgoing.host[0]), n, c.outgoing.stream); err != nil {
			return err
		}
		if err := c.timelines.Write(c.outgoing.stream, c.timeline(filled), value); err != nil {
			return err
		}
		send, err := c.sending.Send(c.outgoing.memory, 0, n, client.Tag(value), client.After(c.timeline(filled), value))
		if err != nil {
			return err
		}
		if err := c.timelines.Wait(c.incoming.stream, c.timeline(arrived), value); err != nil {
			return err
		}
		if err := c.driver.MemcpyDtoHAsync(unsafe.Pointer(&c.incoming.host[0]), c.incoming.ptr, n, c.incoming.stream); err != nil {
			return err
		}
		for _, op := range []*client.Operation{receive, send} {
			moved, err := op.Wait(ctx)
			if err != nil {
				return fmt.Errorf("message %d of %d bytes: %w", i, n, err)
			}
			if moved != n {
				return fmt.Errorf("message %d: %d of %d bytes moved", i, moved, n)
			}
		}
		if err := c.driver.StreamSynchronize(c.incoming.stream); err != nil {
			return err
		}
		if err := patternOf(c.Script.Seed, c.other(), i).check(c.incoming.host[:n]); err != nil {
			return fmt.Errorf("message %d from container %s is WRONG %w", i, c.other(), err)
		}
		c.result.Sent += n
		c.result.Received += n
		c.result.VerifiedBytes += n
		c.result.Messages++
		if done += n; done-reported >= 16<<20 {
			reported = done
			if err := c.out.Encode(event{Kind: "progress", Step: "exchanging verified messages", Bytes: done}); err != nil {
				return err
			}
		}
	}
	c.result.Verified = true
	return nil
}

// Tags of the measurements, apart from those of the exchange.
const (
	rateTag    = 1 << 32
	handOffTag = 2 << 32
)

// rates measures one direction, A to B, several messages in flight. The sender
// takes the time from the first post to the last completion, which says that
// the bytes are in the receiver's memory.
func (c *demoClient) rates(ctx context.Context) error {
	for _, size := range c.Script.RateSizes {
		count := int(max(c.Script.RateBytes/size, uint64(2*c.Script.Depth)))
		// One message each way before, so that neither side starts early, and the
		// way is warm.
		if err := c.meet(ctx, rateTag+size); err != nil {
			return err
		}
		post := func() (*client.Operation, error) {
			if c.Name == "A" {
				return c.sending.Send(c.outgoing.memory, 0, size, client.Tag(rateTag))
			}
			return c.receiving.Receive(c.incoming.memory, 0, size, client.Tag(rateTag))
		}
		start := time.Now()
		var flight []*client.Operation
		for posted := 0; posted < count || len(flight) > 0; {
			if posted < count && len(flight) < c.Script.Depth {
				op, err := post()
				if err != nil {
					return err
				}
				flight = append(flight, op)
				posted++
				continue
			}
			if _, err := flight[0].Wait(ctx); err != nil {
				return fmt.Errorf("messages of %d bytes: %w", size, err)
			}
			flight = flight[1:]
		}
		if c.Name == "A" {
			c.result.Rates = append(c.result.Rates, Rate{size, float64(size) * float64(count) / time.Since(start).Seconds() / 1e9})
			c.result.Sent += size * uint64(count)
		} else {
			c.result.Received += size * uint64(count)
		}
	}
	return nil
}

// meet lets both clients come to the same point.
func (c *demoClient) meet(ctx context.Context, tag uint64) error {
	receive, err := c.receiving.Receive(c.incoming.memory, 0, 8, client.Tag(tag))
	if err != nil {
		return err
	}
	send, err := c.sending.Send(c.outgoing.memory, 0, 8, client.Tag(tag))
	if err != nil {
		return err
	}
	for _, op := range []*client.Operation{receive, send} {
		if _, err := op.Wait(ctx); err != nil {
			return err
		}
	}
	c.result.Sent += 8
	c.result.Received += 8
	return nil
}

// handOff sends 8 bytes to and fro. No CPU of a client takes part between
// posting and looking at the clock: a relay advances a timeline, the client's
// stream waits for it and advances another, on which the next send waits.
func (c *demoClient) handOff(ctx context.Context) error {
	var times []time.Duration
	for round := range c.Script.Rounds {
		value := uint64(len(c.Script.sizes()) + round + 1)
		tag := handOffTag + value
		receive, err := c.receiving.Receive(c.incoming.memory, 0, 8, client.Tag(tag), client.Signal(c.timeline(arrived), value))
		if err != nil {
			return err
		}
		start := time.Now()
		after := client.After(c.timeline(bounced), value)
		if c.Name == "A" {
			err = c.timelines.Write(c.outgoing.stream, c.timeline(bounced), value)
		} else {
			if err = c.timelines.Wait(c.incoming.stream, c.timeline(arrived), value); err == nil {
				err = c.timelines.Write(c.incoming.stream, c.timeline(bounced), value)
			}
		}
		if err != nil {
			return err
		}
		send, err := c.sending.Send(c.outgoing.memory, 0, 8, client.Tag(tag), after)
		if err != nil {
			return err
		}
		for _, op := range []*client.Operation{receive, send} {
			if _, err := op.Wait(ctx); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		times = append(times, time.Since(start)/2)
		c.result.Sent += 8
		c.result.Received += 8
	}
	if c.Name == "A" && len(times) > 0 {
		slices.Sort(times)
		c.result.HandOffMedian, c.result.HandOff99 = times[len(times)/2], times[len(times)*99/100]
	}
	return nil
}

func (c *demoClient) counters(ctx context.Context) error {
	s, err := c.session.Statistics(ctx)
	if err != nil {
		return err
	}
	c.result.Relay = RelayCounters{Sent: s.Sent, Received: s.Received, Direct: s.Direct, Staged: s.Staged, Contexts: int(s.Contexts)}
	for _, g := range s.Server[:s.Servers] {
		c.result.Relay.Servers = append(c.result.Relay.Servers, ServerCounter{GPU: g.GPU.GPU(), In: g.In, Out: g.Out})
	}
	return nil
}
