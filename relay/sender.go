package relay

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// sender is a connection's sending end. A sender moves bytes only into granted memory of the
// receiver.
type sender struct {
	*connection
	link      transport.Link
	eagerLink transport.Link // of short messages, to another host
	last      uint64
	granting  uint64                // the last grant's number
	active    map[uint64]*operation // announced, by number
	targets   map[uint32]*target
	underWay  int // grants that are being filled
	open      int // grants that are not used up
	// parts are allocations of a region that is still to come.
	parts   []device.Part
	partsOf uint32
	eager   *eagerOut // nil where it has no quota
	// windows are those of this host that hold no message.
	windows []uint64
	reading reading
	listing listing
	// shares: the receiver's client uses the sender's GPU.
	shares  bool
	buffers *buffers // that this sender uses; nil before the first buffered send
}

// maxGrants limits the state for a remote relay that grants byte by byte: far more than a lane has
// slots, or a session operations.
const maxGrants = 1 << 14

// target is memory of the receiver.
type target struct {
	region  uint32
	bytes   uint64
	foreign uint64 // of the host's memory, as counted
	state   targetState
	grants  []*wire.PeerGrant // that came before it was ready
	granted int               // grants that are not used up yet
}

func newSender(c *connection, link transport.Link) *sender {
	s := &sender{connection: c, link: link, eagerLink: link, active: map[uint64]*operation{},
		targets: map[uint32]*target{}}
	c.side = s
	return s
}

func (s *sender) start(op *operation) {
	switch {
	case op.kind == wire.OpRead:
		s.read(op)
		return
	case isList(op.kind):
		s.startList(op)
		return
	}
	s.enlist(op)
	if op.kind == wire.OpWrite {
		s.write(op)
		return
	}
	if s.sendEager(op) || s.sendEagerLocal(op) {
		return
	}
	s.buffer(op)
	s.port.Send(&wire.PeerSend{Send: op.send, Tag: op.tag, Length: op.length}, 0)
}

// enlist numbers a message that is about to be announced.
func (s *sender) enlist(op *operation) {
	s.last++
	op.send, op.sender = s.last, s
	s.active[op.send] = op
}

// cancel asks the receiver to forget a message; its answer ends the operation.
func (s *sender) cancel(cookie uint64) {
	for _, op := range s.active {
		if op.cookie == cookie {
			op.apply(operationCancel, wire.StatusOK)
		}
	}
	s.cancelRead(cookie)
	s.cancelList(cookie)
}

func (s *sender) message(m wire.Message, fds []int) error {
	if s.isDown() {
		return nil // sent before the other side knew; the operations are over and may have let go of their memory
	}
	switch m := m.(type) {
	case *wire.PeerRegionPart:
		return s.addPart(m, fds)
	case *wire.PeerRegion:
		return s.addTarget(m, fds)
	case *wire.PeerForget:
		if t := s.targets[m.Region]; t != nil {
			// On route staged the receiver can know of a write's end before our NIC tells
			// us.
			if t.granted > 0 && s.route == wire.RouteDirect {
				return wire.Errorf(wire.StatusMalformed, "the relay of %s took region %d back under a write that it had granted",
					s.peer, m.Region)
			}
			s.applyTarget(t, targetForget)
		}
		return nil
	case *wire.PeerQuota:
		return s.takeQuota(m)
	case *wire.PeerGrant:
		return s.granted(m)
	case *wire.PeerDelivered:
		return s.delivered(m)
	case *wire.PeerReadRefused:
		return s.readRefused(m)
	case *wire.PeerBackRefused:
		return s.reverseRefused(m)
	case *wire.PeerListRefused:
		return s.listRefused(m)
	case *wire.PeerGrantRanges:
		return s.addGrantRanges(m)
	}
	return wire.Errorf(wire.StatusMalformed, "the relay of %s sent a %T to a sender", s.peer, m)
}

// used ends a grant.
func (s *sender) used(t *target) {
	t.granted--
	s.open--
	s.settleTarget(t)
}

// settleTarget lets go of memory that was taken back, once no grant is left.
func (s *sender) settleTarget(t *target) {
	if t.granted == 0 {
		s.applyTarget(t, targetIdle)
	}
}

func (s *sender) applyTarget(t *target, e targetEvent) {
	switch targetTable.Must(&t.state, e) {
	case targetSettle:
		s.settleTarget(t)
	case targetRemove:
		delete(s.targets, t.region)
		s.link.RemoveTarget(t.region)
		s.session.relay.release(quota{foreign: t.foreign})
	}
}

// addPart keeps an allocation for the region that will come.
func (s *sender) addPart(m *wire.PeerRegionPart, fds []int) error {
	switch {
	case len(fds) != 1 || s.route != wire.RouteDirect || len(s.parts) > 0 && s.partsOf != m.Region:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s sent an allocation of region %d with %d descriptors",
			s.peer, m.Region, len(fds))
	case len(s.parts) >= wire.MaxParts:
		return wire.Errorf(wire.StatusLimit,
			"the relay of %s sent a region of more than %d allocations, which is the limit", s.peer, wire.MaxParts)
	}
	if err := checkForeign(fds[0], s.lane.device.Driver.Simulated()); err != nil {
		return err
	}
	if err := s.session.relay.reserve(ofPart); err != nil {
		return err
	}
	fd, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		s.session.relay.release(ofPart)
		return err
	}
	s.parts, s.partsOf = append(s.parts, device.Part{FD: fd, Bytes: m.Bytes}), m.Region
	return nil
}

// closeParts closes descriptors that addPart counted.
func (s *sender) closeParts(parts []device.Part) {
	for _, p := range parts {
		unix.Close(p.FD)
		s.session.relay.release(ofPart)
	}
}

func (s *sender) addTarget(m *wire.PeerRegion, fds []int) error {
	remote := s.remote()
	wanted := 1
	if m.Kind == wire.MemoryParts || remote {
		wanted = 0
	}
	if len(fds) != wanted || (m.Kind == wire.MemoryRemote) != remote || s.targets[m.Region] != nil {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s sent region %d of kind %d twice, or with %d descriptors",
			s.peer, m.Region, m.Kind, len(fds))
	}
	if len(s.targets) >= wire.MaxMemories {
		return wire.Errorf(wire.StatusLimit, "the relay of %s sent %d regions, which is the limit", s.peer, len(s.targets))
	}
	t := &target{region: m.Region, bytes: m.Bytes}
	switch m.Kind {
	case wire.MemoryRemote:
	case wire.MemoryGPU:
		if err := checkForeign(fds[0], s.lane.device.Driver.Simulated()); err != nil {
			return err
		}
	case wire.MemoryParts:
		left, fit := m.Bytes, len(s.parts) > 0 && s.partsOf == m.Region
		for _, p := range s.parts {
			fit = fit && p.Bytes <= left
			left -= p.Bytes
		}
		if !fit || left != 0 {
			return wire.Errorf(wire.StatusMalformed,
				"the relay of %s sent region %d of %d bytes, and its allocations have not as many", s.peer, m.Region, m.Bytes)
		}
	case wire.MemoryHost:
		if err := device.CheckHost(fds[0], m.Bytes); err != nil {
			return wire.Errorf(wire.StatusBadDescriptor, "the relay of %s: %v", s.peer, err)
		}
		if s.route == wire.RouteDirect {
			// Pages may be missing, and pages that a write allocates count for this process.
			if err := s.session.relay.reserve(quota{foreign: m.Bytes}); err != nil {
				return err
			}
			t.foreign = m.Bytes
		}
	default:
		return wire.Errorf(wire.StatusMalformed,
			"the relay of %s sent region %d of kind %d, which this version does not know", s.peer, m.Region, m.Kind)
	}
	var parts []device.Part
	closeParts := func() { s.closeParts(parts) }
	switch m.Kind {
	case wire.MemoryRemote:
	case wire.MemoryParts:
		parts, s.parts = s.parts, nil
	default:
		fd, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			s.session.relay.release(quota{foreign: t.foreign})
			return err
		}
		parts, closeParts = []device.Part{{FD: fd, Bytes: m.Bytes}}, func() { unix.Close(fd) }
	}
	s.targets[m.Region] = t
	s.underWay++ // the link must not be closed under the mapping
	s.link.AddTarget(m.Region, m.Kind, parts, func(err error) {
		closeParts()
		s.underWay--
		s.mapped(t, err)
	})
	return nil
}

// mapped fills the grants that preceded the end of a mapping. err is the failure of the mapping.
func (s *sender) mapped(t *target, err error) {
	if err == nil {
		s.applyTarget(t, targetMapped)
	} else {
		s.applyTarget(t, targetMapFailed)
		// No matter for failed: the descriptor is foreign, and its errors do not concern this relay's context.
		go s.session.relay.examine(wire.Errorf(wire.StatusBadDescriptor, "the memory of %s cannot be mapped: %v", s.peer,
			err))
		s.shutdown(wire.Errorf(ofCopies(err), "the memory of %s cannot be mapped: %v", s.peer, err))
	}
	grants := t.grants
	t.grants = nil
	for _, g := range grants {
		if !s.isDown() {
			s.fill(g, s.active[g.Send])
		}
	}
	s.fillLists()
	s.settle()
}

// granted checks the remote relay's message as untrusted input: a wrong number must not let it read
// another place of the client's memory.
func (s *sender) granted(m *wire.PeerGrant) error {
	if m.Region == wire.ListRegion && s.route == wire.RouteDirect {
		return s.grantedList(m)
	}
	op := s.active[m.Send]
	t := s.targets[m.Region]
	switch {
	case op == nil:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s granted message %d, which is not sent", s.peer, m.Send)
	case op.pieces != nil && s.route == wire.RouteDirect:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s granted one range for list message %d", s.peer, m.Send)
	case m.Grant != s.granting+1 || m.Part != op.granted:
		// Each grant and each byte once, and in order: two posts under the same number would be
		// indistinguishable at their ends.
		return wire.Errorf(wire.StatusMalformed, "the relay of %s gave grant %d of byte %d after grant %d up to byte %d",
			s.peer, m.Grant, m.Part, s.granting, op.granted)
	case s.open >= maxGrants:
		return wire.Errorf(wire.StatusLimit, "the relay of %s has %d grants open, which is the limit", s.peer, s.open)
	case m.Length == 0 || m.Part > op.length || m.Length > op.length-m.Part:
		return wire.Errorf(wire.StatusMalformed, "the relay of %s granted bytes %d+%d of a message of %d", s.peer, m.Part,
			m.Length, op.length)
	case t == nil || t.state.revoked() || m.Offset > t.bytes || m.Length > t.bytes-m.Offset:
		return wire.Errorf(wire.StatusMalformed,
			"the relay of %s granted %d bytes at %d of region %d, which has not as many", s.peer, m.Length, m.Offset, m.Region)
	}
	if s.granting++; op.granted == 0 {
		s.stalled(noGrant, op.began)
	}
	op.granted += m.Length
	t.granted++
	s.open++
	if !t.state.ready() {
		t.grants = append(t.grants, m)
		return nil
	}
	s.fill(m, op)
	return nil
}

func (s *sender) fill(m *wire.PeerGrant, op *operation) {
	t := s.targets[m.Region]
	switch {
	case op == nil: // refused by the receiver meanwhile
		s.used(t)
	case op.buffered != nil && !op.buffered.filled:
		op.buffered.grants = append(op.buffered.grants, m)
	case op.buffered != nil:
		s.fromBuffer(m, op, t)
	case op.pieces == nil && s.inReach(op.memory) && !s.throughSlots(op.memory):
		s.whole(m, op, t)
	default:
		s.stageTicketed(m, op, t)
	}
}

// whole moves the bytes of a grant at once, from the client's memory: on route direct, and on route
// staged if the client's memory is on a server GPU, or, over TCP, in host memory.
func (s *sender) whole(m *wire.PeerGrant, op *operation, t *target) {
	r, memory, at := s.session.relay, op.memory, op.offset+m.Part
	from, routed := transport.Source{Place: memory.place(at)}, &r.counters.direct
	if s.route == wire.RouteStaged {
		from.NICs, routed = s.nicsFor(memory), &r.counters.staged
	}
	s.hold(op)
	s.link.Write(transport.Target{Region: m.Region, Offset: m.Offset}, from, m.Length, m.Grant, func(err error) {
		if err != nil {
			s.broken(err, "copying to "+s.peer)
		} else {
			r.counters.sent += m.Length
			*routed += m.Length
			op.moved += m.Length
			if s.countInPlace(op, m.Length); memory.staged != nil {
				memory.staged.on.out += m.Length
			}
			if s.route == wire.RouteDirect && !s.isDown() {
				s.port.Send(&wire.PeerWritten{Grant: m.Grant}, 0)
			}
		}
		s.used(t)
		s.unhold(op)
	})
}

// stageTicketed is stage once the write may be posted. A slot that waited for a credit, while
// credits wait for slots, would stop every connection of both relays.
func (s *sender) stageTicketed(m *wire.PeerGrant, op *operation, t *target) {
	link, is := s.link.(*verbs.Link)
	if !is {
		s.stage(m, op, t, 0)
		return
	}
	link.Ticketed(m.Grant, func(err error) {
		if err != nil {
			s.used(t)
			s.broken(err, "sending from a staging slot")
			return
		}
		s.stage(m, op, t, 0)
	})
}

// stage moves the bytes of a grant, from an offset on, through slots on a server GPU: it fills a
// slot, and lets the NIC write that. If the receiver's slots are larger than the sender's, the rest
// follows: a single write at a time has the grant's number.
func (s *sender) stage(m *wire.PeerGrant, op *operation, t *target, at uint64) {
	r, lane := s.session.relay, s.lane
	s.out.acquire(s.connection, func(slot *slot) bool {
		if s.isDown() || op.state == operationEnded {
			s.used(t)
			return false
		}
		n := min(slot.region.slotBytes, m.Length-at)
		s.hold(op)
		op.copyOut(lane.push.take(), slot.place(), m.Part+at, n, func(err error) {
			if err != nil {
				s.used(t)
				s.out.fail(slot.region)
				s.broken(err, "copying into a staging slot")
				s.out.release(slot)
				s.unhold(op)
				return
			}
			slot.region.in += n
			s.link.Write(transport.Target{Region: m.Region, Offset: m.Offset + at},
				transport.Source{Place: slot.place(), NICs: slot.region.nics}, n, m.Grant, func(err error) {
					if err != nil {
						s.broken(err, "sending from a staging slot")
					} else {
						slot.region.out += n
						r.counters.sent += n
						r.counters.staged += n
						op.moved += n
					}
					s.out.release(slot)
					if err == nil && at+n < m.Length {
						s.stage(m, op, t, at+n)
					} else {
						s.used(t)
					}
					s.unhold(op)
				})
		})
		return true
	})
}

func (s *sender) hold(op *operation) {
	op.underWay++
	s.underWay++
}

func (s *sender) unhold(op *operation) {
	op.underWay--
	s.underWay--
	op.settle()
	s.settle()
}

// broken takes the connection down after a failed copy.
func (s *sender) broken(err error, what string) {
	var why *wire.Error
	if s.remote() && errors.As(err, &why) { // it says all itself
		s.shutdown(why)
		return
	}
	s.session.relay.failed(err)
	s.shutdown(wire.Errorf(ofCopies(err), "%s: %s failed: %w", s.session.relay.name(), what, err))
}

// ofCopies returns the status of a failed transfer.
func ofCopies(err error) wire.Status {
	if status := wire.StatusOf(err); status != wire.StatusInternal {
		return status
	}
	return wire.StatusCUDA
}

// delivered ends a message: the bytes are in the receiver's memory, or the receiver has dropped the
// message.
func (s *sender) delivered(m *wire.PeerDelivered) error {
	op := s.active[m.Send]
	if op == nil {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s delivered message %d, which is not sent", s.peer, m.Send)
	}
	status, event := wire.Status(m.Status), operationDeliver
	if status != wire.StatusOK {
		event = operationRefuse
	}
	if _, possible := operationTable.Cell(op.state, event); !possible {
		return wire.Errorf(wire.StatusMalformed, "the relay of %s delivered message %d twice", s.peer, m.Send)
	}
	if op.in == remoteWindow {
		s.answered(op.window)
	}
	s.endEagerLocal(op, status)
	if status != wire.StatusOK {
		s.forget(op)
	}
	op.apply(event, status)
	return nil
}

// conclude ends a message that both sides are done with, also on a connection
// that is down: a receiver may leave as soon as it has the bytes. The receiver can have the bytes before
// the sender's NIC reports the completion.
func (s *sender) conclude(op *operation) {
	if op.moved != op.length {
		s.shutdown(wire.Errorf(wire.StatusMalformed,
			"the relay of %s says it has all %d bytes of a message of which %d were sent", s.peer, op.length, op.moved))
		op.apply(operationContradict, s.down.Status)
		return
	}
	s.forget(op)
	op.finish(wire.StatusOK)
}

// forget removes an announced message. A crowded connection goes on.
func (s *sender) forget(op *operation) {
	delete(s.active, op.send)
	if len(s.posted) > 0 { // none on a connection that is down
		s.session.waits[s.connection] = true
	}
}

func (s *sender) stop(why *wire.Error) {
	s.stopLists(why.Status)
	s.stopReads(why.Status)
	if s.reading.back != nil {
		s.reading.back.close()
	}
	for _, op := range s.active {
		op.apply(operationDown, why.Status)
	}
}

func (s *sender) drained() bool { return s.underWay == 0 }

func (s *sender) free() {
	s.link.Close()
	if s.eager != nil {
		s.eager.quotas.release(s.eager.at)
	}
	s.leaveBuffers()
	s.closeParts(s.parts)
	s.parts = nil
	for _, t := range s.targets {
		s.session.relay.release(quota{foreign: t.foreign})
	}
}
