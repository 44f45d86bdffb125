package measure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// Client is this process attached to its relay, with two buffers of GPU memory
// that the relay has mapped, and a connection each way once they are set. It
// belongs to the thread that has the context.
type Client struct {
	Driver    *cuda.Driver
	GPU       wire.UUID
	Session   *client.Session
	Streams   *client.StreamTimelines
	Outgoing  *Buffer
	Incoming  *Buffer
	Sending   *client.Connection
	Receiving *client.Connection

	// Handed is how much of a message this process sends after it has copied the whole
	// one to staging memory: 8, say, to measure the copy and its hand-over without the
	// way to the receiver, which then receives messages of that size. 0 is all of it.
	Handed uint64

	context cuda.Context
	// Where this process copies itself: messages that were copied to Outgoing's
	// staging memory, and those that come into Incoming's.
	copied   uint64
	landed   uint64
	follower *client.Follower // of Outgoing's stream, where a Stream wants one; nil before
}

// Timelines of a session as its Client uses them.
const (
	Filled  = 0 // our stream: outgoing bytes are in place
	Arrived = 1 // the relay: incoming bytes are in place
	bounced = 2 // our stream: a hand-off came, send the next

	// Of a Stream, where this process copies itself.
	copiedLine  = 5 // our stream, or its follower: a message is in its slot
	emptiedLine = 4 // our stream: a slot may be received into again
	// The relay: a message has come into its slot. One for each slot, since nobody
	// promises that messages end in their order.
	landedLines = 64
	maxSlots    = 128
)

// Buffer is GPU memory, a stream of its own, and what messages are sent out of or
// received into: that memory, or staging memory to which this process copies itself.
type Buffer struct {
	Ptr    cuda.Ptr
	Stream cuda.Stream
	Memory *client.Memory
	Bytes  uint64
}

// copies reports whether this process copies to and from staging memory itself.
func (b *Buffer) copies() bool { return b.Memory.Ptr != 0 }

// AttachCopying attaches to the relay at a socket, with buffers of so many bytes on the device,
// whose context is current. The process copies itself, to and from staging bytes of
// staging memory in each direction: as many as StreamSend is to have in flight. With 0
// the relay copies. It takes a container, or a plain process, that sees the lane's server
// GPUs (Host.ClientCopy of package testbed).
func AttachCopying(ctx context.Context, d *cuda.Driver, device cuda.Device, gpu wire.UUID, socket string, bytes, staging uint64) (*Client, error) {
	c := &Client{Driver: d, GPU: gpu}
	var err error
	if c.context, err = d.CtxGetCurrent(); err != nil {
		return nil, err
	}
	if c.Session, err = client.Dial(ctx, socket, gpu); err != nil {
		return nil, err
	}
	if c.Outgoing, err = c.buffer(ctx, device, bytes, staging, wire.AccessSend); err == nil {
		c.Incoming, err = c.buffer(ctx, device, bytes, staging, wire.AccessReceive)
	}
	if err == nil {
		c.Streams, err = c.Session.RegisterTimelines(d)
	}
	if err != nil {
		return nil, errors.Join(err, c.Session.Close())
	}
	return c, nil
}

// Close ends the session; the buffers end with the process.
func (c *Client) Close() error {
	var err error
	if c.follower != nil {
		err = c.follower.Close()
	}
	return errors.Join(err, c.Streams.Unregister(), c.Session.Close())
}

func (c *Client) buffer(ctx context.Context, device cuda.Device, bytes, staging uint64, access uint32) (*Buffer, error) {
	d := c.Driver
	granule, err := d.MemGranularity(device)
	if err != nil {
		return nil, err
	}
	bytes = (bytes + granule - 1) / granule * granule
	handle, err := d.MemCreate(device, bytes, cuda.MemOptions{Exportable: true, RDMA: true})
	if err != nil {
		return nil, err
	}
	b := &Buffer{Bytes: bytes}
	if b.Ptr, err = d.MemAddressReserve(bytes, 0); err != nil {
		return nil, err
	}
	if err := d.MemMap(b.Ptr, bytes, 0, handle); err != nil {
		return nil, err
	}
	if err := d.MemSetAccess(b.Ptr, bytes, cuda.Access{Device: device, Write: true}); err != nil {
		return nil, err
	}
	if b.Stream, err = d.StreamCreate(); err != nil {
		return nil, err
	}
	if staging > 0 {
		b.Memory, err = c.Session.Staging(ctx, d, client.Staging{Bytes: staging, GPU: c.GPU, Access: access})
		return b, err
	}
	fd, err := d.MemExportFD(handle)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "gpu-memory")
	defer file.Close()
	b.Memory, err = c.Session.Export(ctx, client.Allocation{FD: fd, Bytes: bytes, GPU: c.GPU, Access: access})
	return b, err
}

// HostBuffer is pinned host memory.
func HostBuffer(d *cuda.Driver, bytes uint64) ([]byte, error) {
	host, err := d.MemHostAlloc(bytes)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(host), bytes), nil
}

// Timeline is one of the session's, by one of the numbers above.
func (c *Client) Timeline(number uint32) *client.Timeline {
	t, err := c.Session.Timeline(number)
	if err != nil {
		panic(err) // the numbers are constants within the session's range
	}
	return t
}

// Meet lets both sides come to the same point: a message of 8 bytes each way.
func (c *Client) Meet(ctx context.Context, tag uint64) error {
	receives, sends := c.NewStream(false, 8, 1, tag), c.NewStream(true, 8, 1, tag)
	receive, err := receives.Post()
	if err != nil {
		return err
	}
	send, err := sends.Post()
	if err != nil {
		return err
	}
	for _, op := range []*client.Operation{receive, send} {
		if _, err := op.Wait(ctx); err != nil {
			return err
		}
	}
	return errors.Join(receives.End(), sends.End())
}

// HandOff sends 8 bytes to and fro and returns half of each round's time. No CPU
// of a client takes part between posting and looking at the clock: a relay
// advances a timeline, the client's stream waits for it and advances another, on
// which the next send waits. One side starts; values of the timelines begin
// after `base`.
func (c *Client) HandOff(ctx context.Context, starts bool, rounds int, base, tag uint64) ([]time.Duration, error) {
	var times []time.Duration
	for round := range rounds {
		value := base + uint64(round) + 1
		own := client.Tag(tag + value)
		receive, err := c.Receiving.Receive(c.Incoming.Memory, 0, 8, own, client.Signal(c.Timeline(Arrived), value))
		if err != nil {
			return nil, err
		}
		start := time.Now()
		if starts {
			err = errors.Join(c.copyOut(c.Outgoing.Stream, 8), c.Streams.Write(c.Outgoing.Stream, c.Timeline(bounced), value))
			if c.Incoming.copies() {
				err = errors.Join(err, c.Streams.Wait(c.Incoming.Stream, c.Timeline(Arrived), value), c.CopyIn(8))
			}
		} else {
			err = errors.Join(c.Streams.Wait(c.Incoming.Stream, c.Timeline(Arrived), value), c.CopyIn(8),
				c.copyOut(c.Incoming.Stream, 8), c.Streams.Write(c.Incoming.Stream, c.Timeline(bounced), value))
		}
		if err != nil {
			return nil, err
		}
		send, err := c.Sending.Send(c.Outgoing.Memory, 0, 8, own, client.After(c.Timeline(bounced), value))
		if err != nil {
			return nil, err
		}
		for _, op := range []*client.Operation{receive, send} {
			if _, err := op.Wait(ctx); err != nil {
				return nil, fmt.Errorf("round %d: %w", round, err)
			}
		}
		times = append(times, time.Since(start)/2)
	}
	return times, c.Driver.StreamSynchronize(c.Incoming.Stream)
}

// CopyOut has the stream of Outgoing copy what is about to be sent, from its begin, to
// the staging memory; where the relay copies it does nothing.
func (c *Client) CopyOut(n uint64) error { return c.copyOut(c.Outgoing.Stream, n) }

func (c *Client) copyOut(stream cuda.Stream, n uint64) error {
	if !c.Outgoing.copies() {
		return nil
	}
	return c.Driver.MemcpyAsync(c.Outgoing.Memory.Ptr, c.Outgoing.Ptr, n, stream)
}

// CopyIn has the stream of Incoming copy what has been received out of the staging
// memory; where the relay copies it does nothing.
func (c *Client) CopyIn(n uint64) error {
	if !c.Incoming.copies() {
		return nil
	}
	return c.Driver.MemcpyAsync(c.Incoming.Ptr, c.Incoming.Memory.Ptr, n, c.Incoming.Stream)
}

// Stream posts messages of one size, one after the other. Where this process copies
// itself the staging memory is a ring of slots: a message is copied to the next one and
// handed over by a timeline, or received there and copied out when the relay's timeline
// says that it has come. No thread waits for any copy.
type Stream struct {
	// Depth is how many messages may be in flight: as was asked for, or as there are
	// slots.
	Depth int
	// Followed has a follower of the stream say that a message is in its slot, in place
	// of the stream itself.
	Followed bool

	c     *Client
	sends bool
	size  uint64
	tag   uint64
	next  uint64 // message
	begin uint64 // landed before the first
}

// NewStream makes a stream of sends or receives, of a size that Outgoing and Incoming
// have. Everything that was posted before has to have ended.
func (c *Client) NewStream(sends bool, size uint64, depth int, tag uint64) *Stream {
	s := &Stream{Depth: depth, c: c, sends: sends, size: size, tag: tag, begin: c.landed}
	if b := s.buffer(); b.copies() && size > 0 {
		s.Depth = int(min(uint64(depth), b.Memory.Bytes/size, maxSlots))
	}
	return s
}

func (s *Stream) buffer() *Buffer {
	if s.sends {
		return s.c.Outgoing
	}
	return s.c.Incoming
}

// Post posts the next message. Of sends the one Depth before it has to have ended.
func (s *Stream) Post() (*client.Operation, error) {
	c, b, d := s.c, s.buffer(), s.c.Driver
	post := c.Receiving.Receive
	if s.sends {
		post = c.Sending.Send
	}
	if !b.copies() {
		return post(b.Memory, 0, s.size, client.Tag(s.tag))
	}
	turn := s.next % uint64(s.Depth)
	s.next++
	at := turn * s.size
	slot := b.Memory.Ptr + cuda.Ptr(at)
	if s.sends {
		c.copied++
		line, value := c.Timeline(copiedLine), c.copied
		err := d.MemcpyAsync(slot, b.Ptr, s.size, b.Stream)
		switch {
		case err != nil:
		case s.Followed:
			if c.follower == nil {
				if c.follower, err = c.Streams.Follow(b.Stream); err != nil {
					return nil, err
				}
			}
			err = c.follower.Write(line, value)
		default:
			err = c.Streams.Write(b.Stream, line, value)
		}
		if err != nil {
			return nil, err
		}
		n := s.size
		if c.Handed > 0 {
			n = min(n, c.Handed)
		}
		return post(b.Memory, at, n, client.Tag(s.tag), client.After(line, value))
	}
	c.landed++
	landed, emptied := c.Timeline(landedLines+uint32(turn)), c.Timeline(emptiedLine)
	empty := max(s.begin, c.landed-min(c.landed, uint64(s.Depth)))
	op, err := post(b.Memory, at, s.size, client.Tag(s.tag), client.After(emptied, empty), client.Signal(landed, c.landed))
	if err != nil {
		return nil, err
	}
	return op, errors.Join(c.Streams.Wait(b.Stream, landed, c.landed), d.MemcpyAsync(b.Ptr, slot, s.size, b.Stream),
		c.Streams.Write(b.Stream, emptied, c.landed))
}

// End waits for this process's own copies. All messages have to have ended.
func (s *Stream) End() error {
	b := s.buffer()
	if !b.copies() {
		return nil
	}
	return s.c.Driver.StreamSynchronize(b.Stream)
}

// keptTimes bounds the messages whose times are kept.
const keptTimes = 1 << 18

// StreamSend sends messages of one size, `depth` of them in flight, and then an
// empty one, which ends the stream. After a tenth of the duration to warm up it
// measures for that long: GB/s, and how long each message took from its post. `as`
// changes what the Stream is like.
func (c *Client) StreamSend(ctx context.Context, size uint64, depth int, duration time.Duration, tag uint64, as ...func(*Stream)) (float64, []time.Duration, error) {
	type posted struct {
		op *client.Operation
		at time.Time
	}
	var flight []posted
	var times []time.Duration
	var first time.Time
	bytes, elapsed := uint64(0), time.Duration(0)
	messages := c.NewStream(true, size, depth, tag)
	for _, f := range as {
		f(messages)
	}
	for begin := time.Now(); elapsed < duration; {
		if len(flight) < messages.Depth {
			now := time.Now()
			op, err := messages.Post()
			if err != nil {
				return 0, nil, err
			}
			flight = append(flight, posted{op, now})
			continue
		}
		if _, err := flight[0].op.Wait(ctx); err != nil {
			return 0, nil, fmt.Errorf("messages of %d bytes: %w", size, err)
		}
		now := time.Now()
		switch {
		case !first.IsZero():
			elapsed = now.Sub(first)
			bytes += size
			if len(times) < keptTimes {
				times = append(times, now.Sub(flight[0].at))
			}
		case now.Sub(begin) >= duration/10:
			first = now
		}
		flight = flight[1:]
	}
	op, err := c.Sending.Send(c.Outgoing.Memory, 0, 0, client.Tag(tag))
	if err != nil {
		return 0, nil, err
	}
	for _, p := range append(flight, posted{op: op}) {
		if _, err := p.op.Wait(ctx); err != nil {
			return 0, nil, err
		}
	}
	return float64(bytes) / elapsed.Seconds() / 1e9, times, messages.End()
}

// StreamReceive is the other side of StreamSend. Receives are always posted: of
// those that no message came for it takes leave.
func (c *Client) StreamReceive(ctx context.Context, size uint64, depth int, tag uint64) (err error) {
	// It may be another thread than that which has the context.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := c.Driver.CtxGetCurrent()
	if err == nil {
		err = c.Driver.CtxSetCurrent(c.context)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Driver.CtxSetCurrent(before)) }()
	var flight []*client.Operation
	messages := c.NewStream(false, size, 2*depth, tag)
	for {
		for len(flight) < messages.Depth {
			op, err := messages.Post()
			if err != nil {
				return err
			}
			flight = append(flight, op)
		}
		n, err := flight[0].Wait(ctx)
		if err != nil {
			return fmt.Errorf("messages of %d bytes: %w", size, err)
		}
		flight = flight[1:]
		if n == 0 {
			break
		}
	}
	for _, op := range flight {
		if err := op.Cancel(); err != nil {
			return err
		}
	}
	for _, op := range flight {
		if _, err := op.Wait(ctx); !errors.Is(err, &wire.Error{Status: wire.StatusCanceled}) {
			return fmt.Errorf("a receive that was cancelled ended with %v", err)
		}
	}
	return messages.End()
}
