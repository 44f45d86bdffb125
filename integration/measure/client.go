package measure

import (
	"context"
	"errors"
	"fmt"
	"os"
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
}

// Timelines of a session as its Client uses them.
const (
	Filled  = 0 // our stream: outgoing bytes are in place
	Arrived = 1 // the relay: incoming bytes are in place
	Bounced = 2 // our stream: a hand-off came, send the next
)

// Buffer is GPU memory that the relay has mapped, and a stream of its own.
type Buffer struct {
	Ptr    cuda.Ptr
	Stream cuda.Stream
	Memory *client.Memory
}

// Attach attaches to the relay at a socket, with buffers of so many bytes on the
// device, whose context is current.
func Attach(ctx context.Context, d *cuda.Driver, device cuda.Device, gpu wire.UUID, socket string, bytes uint64) (*Client, error) {
	c := &Client{Driver: d, GPU: gpu}
	var err error
	if c.Session, err = client.Dial(ctx, socket, gpu); err != nil {
		return nil, err
	}
	if c.Outgoing, err = c.buffer(ctx, device, bytes, wire.AccessSend); err == nil {
		c.Incoming, err = c.buffer(ctx, device, bytes, wire.AccessReceive)
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
func (c *Client) Close() error { return errors.Join(c.Streams.Unregister(), c.Session.Close()) }

func (c *Client) buffer(ctx context.Context, device cuda.Device, bytes uint64, access uint32) (*Buffer, error) {
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
	b := &Buffer{}
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
	receive, err := c.Receiving.Receive(c.Incoming.Memory, 0, 8, client.Tag(tag))
	if err != nil {
		return err
	}
	send, err := c.Sending.Send(c.Outgoing.Memory, 0, 8, client.Tag(tag))
	if err != nil {
		return err
	}
	for _, op := range []*client.Operation{receive, send} {
		if _, err := op.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
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
			err = c.Streams.Write(c.Outgoing.Stream, c.Timeline(Bounced), value)
		} else if err = c.Streams.Wait(c.Incoming.Stream, c.Timeline(Arrived), value); err == nil {
			err = c.Streams.Write(c.Incoming.Stream, c.Timeline(Bounced), value)
		}
		if err != nil {
			return nil, err
		}
		send, err := c.Sending.Send(c.Outgoing.Memory, 0, 8, own, client.After(c.Timeline(Bounced), value))
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
	return times, nil
}

// keptTimes bounds the messages whose times are kept.
const keptTimes = 1 << 18

// StreamSend sends messages of one size, `depth` of them in flight, and then an
// empty one, which ends the stream. After a tenth of the duration to warm up it
// measures for that long: GB/s, and how long each message took from its post.
func (c *Client) StreamSend(ctx context.Context, size uint64, depth int, duration time.Duration, tag uint64) (float64, []time.Duration, error) {
	type posted struct {
		op *client.Operation
		at time.Time
	}
	var flight []posted
	var times []time.Duration
	var first time.Time
	bytes, elapsed := uint64(0), time.Duration(0)
	for begin := time.Now(); elapsed < duration; {
		if len(flight) < depth {
			now := time.Now()
			op, err := c.Sending.Send(c.Outgoing.Memory, 0, size, client.Tag(tag))
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
	return float64(bytes) / elapsed.Seconds() / 1e9, times, nil
}

// StreamReceive is the other side of StreamSend. Receives are always posted: of
// those that no message came for it takes leave.
func (c *Client) StreamReceive(ctx context.Context, size uint64, depth int, tag uint64) error {
	var flight []*client.Operation
	for {
		for len(flight) < 2*depth {
			op, err := c.Receiving.Receive(c.Incoming.Memory, 0, size, client.Tag(tag))
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
	return nil
}
