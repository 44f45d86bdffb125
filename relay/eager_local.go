package relay

import (
	"unsafe"

	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// Short messages to another container of this host, on route direct, out of the host's memory, do
// not wait for a grant: the bytes are in a window mapped by both relays when the announcement
// arrives, and the receiver copies the bytes into the client's memory. If the receiver cannot copy
// at once, it grants room, and the message travels as a long message. The sender owns a window
// again when the message is delivered, or refused. A message without a free window waits for a
// grant.

// windows are a port's.
type windows interface {
	// Window returns nil without a window of this number.
	Window(number uint64) []byte
}

// hasWindows reports whether both relays of a connection between two containers of a host expect
// windows, by the agreed version.
func hasWindows(c *connection, version uint32) bool {
	return c.route == wire.RouteDirect && version >= wire.WindowsVersion
}

// --- the sender's side ------------------------------------------------------------

func allWindows() []uint64 {
	all := make([]uint64, packet.Windows)
	for number := range all {
		all[number] = uint64(number)
	}
	return all
}

// sendEagerLocal sends a short message at once, if there is a window.
func (s *sender) sendEagerLocal(op *operation) bool {
	left := len(s.windows) - 1
	if left < 0 || op.length == 0 || op.length > packet.WindowBytes || !op.memory.mapped.Host() {
		return false
	}
	number := s.windows[left]
	window := s.shared.Window(number)
	if window == nil {
		return false
	}
	s.windows = s.windows[:left]
	op.in, op.window = localWindow, int(number)
	copy(window, unsafe.Slice((*byte)(op.memory.place(op.offset).Host), op.length))
	s.port.Send(&wire.PeerEager{Send: op.send, Tag: op.tag, Length: op.length, Window: uint32(number)}, 0)
	return true
}

// endEagerLocal is the receiver's answer to a message that may be in a window.
func (s *sender) endEagerLocal(op *operation, status wire.Status) {
	if op.in != localWindow {
		return
	}
	op.in = noWindow
	s.windows = append(s.windows, uint64(op.window))
	if status != wire.StatusOK || op.granted > 0 {
		return
	}
	s.stalled(noGrant, op.began)
	op.moved = op.length
	s.session.relay.counters.sent += op.length
	s.session.relay.counters.direct += op.length
}

// --- the receiver's side ------------------------------------------------------------

// announcedEagerLocal is a message whose bytes are in a window.
func (r *receiver) announcedEagerLocal(m *wire.PeerEager) error {
	window := r.shared.Window(uint64(m.Window))
	if m.Length == 0 || m.Length > uint64(len(window)) {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s sent %d bytes in window %d, which has %d", r.peer,
			m.Length, m.Window, len(window))
	}
	return r.announce(&arrival{send: m.Send, tag: m.Tag, length: m.Length, short: window[:m.Length]})
}

// takeEagerLocal copies a message from the window. The result is false if the message has to wait
// for a grant. The window is mapped for as long as the connection is up, and so has messages.
func (r *receiver) takeEagerLocal(a *arrival) bool {
	op := a.op
	to := op.memory.place(op.offset)
	done := func(err error) {
		if err != nil {
			r.session.relay.failed(err)
			r.shutdown(wire.Errorf(wire.StatusCUDA, "%s: copying a short message failed: %w", r.session.relay.name(), err))
			return
		}
		r.session.relay.counters.direct += a.length
		r.arrived(a, a.length)
	}
	if to.Host != nil {
		copy(unsafe.Slice((*byte)(to.Host), a.length), a.short)
		done(nil)
		return true
	}
	if stored, err := op.memory.lane.device.Store(to, a.short); stored {
		done(err)
		return true
	}
	op.underWay++
	taken := r.lane.pull.take().Write(to.Ptr, a.short, func(err error) {
		op.underWay--
		done(err)
		op.settle()
		r.settle()
	})
	if !taken {
		op.underWay--
	}
	return taken
}
