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

// Client is this process attached to its relay: two buffers of GPU memory that the relay has
// mapped and, after the setup, a connection in each direction. Only the thread with the CUDA
// context uses a Client.
type Client struct {
	driver    *cuda.Driver
	GPU       wire.UUID
	Session   *client.Session
	Streams   *client.StreamTimelines
	Outgoing  *Buffer
	Incoming  *Buffer
	Sending   *client.Connection
	Receiving *client.Connection

	// Handed is the part of a message that this process sends after it has copied the whole
	// message to staging memory; the receiver receives messages of that size. With 8, for example,
	// a stream measures the copy and its hand-over without the transport. 0 means the whole
	// message.
	Handed uint64

	context cuda.Context
	// Numbers of messages of a process that copies itself: copied to Outgoing's staging memory,
	// and received into Incoming's staging memory.
	copied uint64
	landed uint64
	// follower follows Outgoing's stream; nil until a Stream uses it.
	follower *client.Follower
}

// Timelines of the session of a Client, with the process that advances the timeline.
const (
	Filled  = 0 // this client's stream: outgoing bytes are in place
	Arrived = 1 // the relay: incoming bytes are in place
	bounced = 2 // this client's stream: a hand-off arrived, so send the next

	// Timelines of a Stream of a process that copies itself.
	copiedLine  = 5 // this client's stream or its follower: a message is in its slot
	emptiedLine = 4 // this client's stream: a slot is free for another message
	// The relay: a message has arrived in its slot. One timeline per slot, because messages may
	// end in any order.
	landedLines = 64
	maxSlots    = 128
)

// Buffer is GPU memory with its own stream. Memory is the memory of messages: the same GPU memory,
// or the staging memory to which this process copies.
type Buffer struct {
	Ptr    cuda.Ptr
	Stream cuda.Stream
	Memory *client.Memory
	bytes  uint64
}

// Bytes returns the size of the buffer.
func (b *Buffer) Bytes() uint64 { return b.bytes }

// copies reports whether this process copies to and from staging memory itself.
func (b *Buffer) copies() bool { return b.Memory.Ptr != 0 }

// AttachWithStaging attaches to the relay at a socket, with buffers of this size in bytes on the
// device, whose context is current. With staging, this process copies itself, to and from staging
// memory of that size in each direction, which must be enough for the messages in flight of
// StreamSend. Such a process must see the lane's server GPUs (Host.ClientCopy of package testbed).
// With 0 the relay copies.
func AttachWithStaging(ctx context.Context, d *cuda.Driver, device cuda.Device, gpu wire.UUID, socket string, bytes,
	staging uint64) (*Client, error) {
	c := &Client{driver: d, GPU: gpu}
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

// Close ends the session. The end of the process frees the buffers.
func (c *Client) Close() error {
	var err error
	if c.follower != nil {
		err = c.follower.Close()
	}
	return errors.Join(err, c.Streams.Unregister(), c.Session.Close())
}

func (c *Client) buffer(ctx context.Context, device cuda.Device, bytes, staging uint64, access uint32) (*Buffer,
	error) {
	d := c.driver
	granule, err := d.MemGranularity(device)
	if err != nil {
		return nil, err
	}
	bytes = (bytes + granule - 1) / granule * granule
	handle, err := d.MemCreate(device, bytes, cuda.MemOptions{Exportable: true, RDMA: true})
	if err != nil {
		return nil, err
	}
	b := &Buffer{bytes: bytes}
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

// HostBuffer allocates pinned host memory.
func HostBuffer(d *cuda.Driver, bytes uint64) ([]byte, error) {
	host, err := d.MemHostAlloc(bytes)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(host), bytes), nil
}

// Timeline returns a timeline of the session by number, one of the constants above.
func (c *Client) Timeline(number uint32) *client.Timeline {
	t, err := c.Session.Timeline(number)
	if err != nil {
		panic(err) // the numbers are constants within the session's range
	}
	return t
}

// Meet synchronises both sides with a message of 8 bytes in each direction.
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

// HandOff sends 8 bytes back and forth, and returns half of the time of every iteration. No CPU of
// a client is involved between posting and reading the clock: a relay advances a timeline, the
// client's stream waits for that timeline and advances another timeline, on which the next send
// waits. One side starts. The values of the timelines begin after base.
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
	return times, c.driver.StreamSynchronize(c.Incoming.Stream)
}

// CopyOut queues the copy of the next message to staging memory on the stream of Outgoing. CopyOut
// does nothing if the relay copies.
func (c *Client) CopyOut(n uint64) error { return c.copyOut(c.Outgoing.Stream, n) }

func (c *Client) copyOut(stream cuda.Stream, n uint64) error {
	if !c.Outgoing.copies() {
		return nil
	}
	return c.driver.MemcpyAsync(c.Outgoing.Memory.Ptr, c.Outgoing.Ptr, n, stream)
}

// CopyIn queues the copy of the received message out of staging memory on the stream of Incoming.
// CopyIn does nothing if the relay copies.
func (c *Client) CopyIn(n uint64) error {
	if !c.Incoming.copies() {
		return nil
	}
	return c.driver.MemcpyAsync(c.Incoming.Ptr, c.Incoming.Memory.Ptr, n, c.Incoming.Stream)
}

// Stream posts consecutive messages of one size. If this process copies itself, the staging memory
// is a ring of slots. A sender's CUDA stream copies a message to the next slot and hands the slot
// over by a timeline. A receiver receives into the slot, and its CUDA stream copies the message
// out when the relay's timeline reports the arrival. No thread waits for a copy.
type Stream struct {
	// Depth is the maximum number of messages in flight: the requested number, or the number of
	// slots if lower.
	Depth int
	// Followed makes a follower of the CUDA stream, in place of the stream, report that a message
	// is in its slot.
	Followed bool

	c     *Client
	sends bool
	size  uint64
	tag   uint64
	// next is the number of the next message.
	next uint64
	// begin is the value of landed before the first message.
	begin uint64
}

// NewStream returns a Stream of sends or receives whose size fits Outgoing and Incoming. All
// earlier operations must have ended.
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

// Post posts the next message. A send first waits for the end of the send that is Depth messages
// earlier.
func (s *Stream) Post() (*client.Operation, error) {
	c, b, d := s.c, s.buffer(), s.c.driver
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

// End waits for this process's own copies. Every message must have ended.
func (s *Stream) End() error {
	b := s.buffer()
	if !b.copies() {
		return nil
	}
	return s.c.driver.StreamSynchronize(b.Stream)
}

// keptTimes limits the number of messages whose times StreamSend keeps.
const keptTimes = 1 << 18

// StreamSend sends messages of one size, depth messages in flight, and then an empty message,
// which ends the stream. After a warm-up of a tenth of the duration StreamSend measures the rate
// in GB/s, and the time of every message from post to completion. as changes the Stream.
func (c *Client) StreamSend(ctx context.Context, size uint64, depth int, duration time.Duration, tag uint64,
	as ...func(*Stream)) (float64, []time.Duration, error) {
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

// StreamReceive receives the messages of StreamSend. StreamReceive always has receives posted, and
// cancels the receives without a message at the end.
func (c *Client) StreamReceive(ctx context.Context, size uint64, depth int, tag uint64) (err error) {
	// The caller's thread may not be the thread with the context.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := c.driver.CtxGetCurrent()
	if err == nil {
		err = c.driver.CtxSetCurrent(c.context)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.driver.CtxSetCurrent(before)) }()
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
