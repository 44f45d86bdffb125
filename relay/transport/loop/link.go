// Package loop is the transport of the staged route on one host: an emulated
// NIC, a process of its own, writes from the sender's slots to the receiver's
// and delivers each write's immediate to the receiver, as an RDMA
// write-with-immediate does. It exercises and measures the whole staged route
// on machines that have GPUs and no NIC.
package loop

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// Link is the sender's end. It implements transport.Link.
type Link struct {
	port    *packet.Port
	name    string
	pending map[uint64]func(error)
	broken  error
	down    func(error)
	paced   func(time.Duration)
}

// reasonTime is how long is waited for the reason why a NIC hears nothing.
const reasonTime = time.Second

// dialTime limits how long Dial waits while the NIC accepts no connection.
const dialTime = 10 * time.Second

// Dial opens a connection to an emulated NIC, which will deliver immediates on
// the socket `receiver`. It may block; down is called on the loop when the NIC
// is gone, paced for each write that had to wait for the NIC's rate. The descriptor
// stays the caller's.
func Dial(l *poll.Loop, socket string, receiver int, down func(error), paced func(time.Duration)) (*Link, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	conn, err := packet.DialContext(ctx, socket)
	if errors.Is(err, packet.ErrQueueFull) {
		return nil, wire.Errorf(wire.StatusNICDied, "the emulated NIC at %s accepts no connection: its queue was full for %v; restart it", socket, dialTime)
	}
	if err != nil {
		return nil, wire.Errorf(wire.StatusNICDied, "the emulated NIC at %s does not answer (%v); start it with peerlane-relay emulated-nic", socket, err)
	}
	hello := &wire.NICHello{Magic: wire.Magic, Oldest: wire.OldestVersion, Newest: wire.NewestVersion, Shares: 1}
	if err := conn.Send(hello, 0, receiver); err != nil {
		_ = conn.SetReadDeadline(time.Now().Add(reasonTime))
		if m, _, _ := conn.ReceiveBare(); m != nil { // it may have said why it closed
			if failure, ok := m.(*wire.Failure); ok {
				err = failure.Err()
			}
		}
		conn.Close()
		return nil, wire.Errorf(wire.StatusNICDied, "the emulated NIC at %s: %v", socket, err)
	}
	fd, err := conn.Detach()
	if err != nil {
		conn.Close()
		return nil, err
	}
	link := &Link{name: socket, pending: map[uint64]func(error){}, down: down, paced: paced}
	var watch error
	if !l.Call(func() {
		if link.port, watch = packet.NewPort(l, fd, link.receive, link.end); watch == nil {
			link.port.TakeShared(false)
		}
	}) {
		watch = fmt.Errorf("the relay is ending")
	}
	if watch != nil {
		unix.Close(fd)
		return nil, watch
	}
	return link, nil
}

// AddSource registers memory of the sender's relay with the NIC.
func (l *Link) AddSource(region, kind uint32, fd int, bytes uint64) {
	l.port.Send(&wire.NICRegion{Region: region, Kind: kind, Bytes: bytes}, 0, fd)
}

// AddTarget registers memory of the receiver's relay with the NIC. The NIC
// works in order, so that writes can be posted at once; a registration that
// fails fails them.
func (l *Link) AddTarget(region, kind uint32, parts []device.Part, ready func(error)) {
	slots := parts[0] // which are one allocation
	l.port.Send(&wire.NICRegion{Region: region | targetRegion, Kind: kind, Bytes: slots.Bytes}, 0, slots.FD)
	ready(l.broken)
}

// RemoveTarget has the NIC let the memory go.
func (l *Link) RemoveTarget(region uint32) {
	l.port.Send(&wire.NICForget{Region: region | targetRegion}, 0)
}

// RemoveSource has the NIC let the memory go.
func (l *Link) RemoveSource(region uint32) { l.port.Send(&wire.NICForget{Region: region}, 0) }

// targetRegion keeps the receiver's numbers apart from the sender's.
const targetRegion = 1 << 31

// Write posts a write-with-immediate.
func (l *Link) Write(to transport.Target, from transport.Source, n uint64, immediate uint64, done func(error)) {
	if l.broken != nil {
		done(l.broken)
		return
	}
	l.pending[immediate] = done
	l.port.Send(&wire.NICWrite{
		Immediate:    immediate,
		Length:       n,
		SourceOffset: from.Offset,
		TargetOffset: to.Offset,
		Source:       from.Region,
		Target:       to.Region | targetRegion,
	}, 0)
}

// Close ends the connection to the NIC.
func (l *Link) Close() { l.port.Close() }

func (l *Link) receive(m wire.Message, _ uint32, fds []int) {
	packet.CloseAll(fds)
	switch m := m.(type) {
	case *wire.NICWritten:
		done := l.pending[m.Immediate]
		if done == nil {
			l.fail(wire.Errorf(wire.StatusNICDied, "the emulated NIC at %s completed write %d, which was not posted", l.name, m.Immediate))
			return
		}
		delete(l.pending, m.Immediate)
		if m.Paced > 0 {
			l.paced(time.Duration(m.Paced) * time.Microsecond)
		}
		if m.Status != uint32(wire.StatusOK) {
			done(wire.Errorf(wire.Status(m.Status), "the emulated NIC at %s could not write: %v", l.name, wire.Status(m.Status)))
			return
		}
		done(nil)
	case *wire.Failure:
		l.fail(fmt.Errorf("the emulated NIC at %s: %w", l.name, m.Err()))
	default:
		l.fail(wire.Errorf(wire.StatusNICDied, "the emulated NIC at %s sent a %T", l.name, m))
	}
}

func (l *Link) end(err error) {
	l.fail(wire.Errorf(wire.StatusNICDied, "the emulated NIC at %s ended (%v)", l.name, err))
}

func (l *Link) fail(err error) {
	if l.broken != nil {
		return
	}
	l.broken = err
	l.port.Close()
	pending := l.pending
	l.pending = map[uint64]func(error){}
	for _, done := range pending {
		done(err)
	}
	l.down(err)
}

// Arrivals are the receiver's end. They implement transport.Arrivals. Which memory may
// be written the sender's NIC knows of the sender's relay, as it does of a real one.
type Arrivals struct{ port *packet.Port }

var (
	_ transport.Link     = (*Link)(nil)
	_ transport.Arrivals = (*Arrivals)(nil)
)

// Receive takes over the socket on which the sender's NIC delivers immediates: arrived
// is called for each, ended with io.EOF when no write of this connection can come any
// more, and before that with what makes that no further one can be heard of.
func Receive(l *poll.Loop, fd int, arrived func(immediate, length uint64), ended func(error)) (*Arrivals, error) {
	port, err := packet.NewPort(l, fd, func(m wire.Message, _ uint32, fds []int) {
		packet.CloseAll(fds)
		switch m := m.(type) {
		case *wire.NICImmediate:
			arrived(m.Immediate, m.Length)
		case *wire.Failure:
			ended(m.Err())
		}
	}, ended)
	if err != nil {
		return nil, err
	}
	port.TakeShared(false)
	port.Linger()
	return &Arrivals{port}, nil
}

// AddMemory does nothing.
func (a *Arrivals) AddMemory(uint32, *device.Memory) error { return nil }

// RemoveMemory does nothing.
func (a *Arrivals) RemoveMemory(uint32) {}

// Grant does nothing.
func (a *Arrivals) Grant(uint64, uint32, uint64, uint64) error { return nil }

// Close closes the socket.
func (a *Arrivals) Close() { a.port.Close() }
