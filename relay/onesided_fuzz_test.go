package relay

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/wire"
)

// foreign is memory of the remote relay, which a link writes.
func (w *world) foreign() (duplicate func() int) {
	region := w.host(fuzzTarget)
	fd, err := region.Export()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { unix.Close(fd) })
	return func() int {
		again, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			w.t.Fatal(err)
		}
		return again
	}
}

func patterned(m *device.Memory) {
	all := bytesAt(m, 0, m.Bytes)
	for i := range all {
		all[i] = pattern(uint64(i))
	}
}

// heard gives a sender mostly valid grants.
func (l *fuzzLink) heard(do *script, duplicate func() int) {
	if !l.s.portOpen() {
		return
	}
	switch do.next() % 5 {
	case 0:
		m, fds := l.region(1, do.near(fuzzTarget), duplicate)
		if _, there := l.targets[1]; !there {
			l.remote[1] = m.Bytes
		}
		l.s.receive(m, 0, fds)
	case 1, 2:
		send := do.near(max(1, uint64(do.next())%(l.s.last+1)))
		m := &wire.PeerGrant{Send: send, Grant: do.near(l.s.granting + 1), Region: 1, Offset: do.near(uint64(do.next()) * 64)}
		if op := l.s.active[send]; op != nil {
			m.Part, m.Length = do.near(op.granted), do.near(min(op.length-op.granted, do.length(fuzzMemory)))
		}
		if l.said[m.Grant] == nil {
			l.said[m.Grant] = m
		}
		l.s.receive(m, 0, nil)
	case 3:
		m := &wire.PeerDelivered{Send: do.near(max(1, l.s.last))}
		if do.next() > 200 {
			m.Status = uint32(wire.StatusBadKey)
		}
		l.s.receive(m, 0, nil)
	case 4:
		switch which := do.next(); {
		case which < 100:
			l.opened(nil)
		case which < 250:
			l.wrote(which, nil)
		default:
			l.wrote(which, errFuzz)
		}
	}
}

// finish ends a link's operations in flight.
func (l *fuzzLink) finish() {
	for len(l.opening)+len(l.writes) > 0 || l.queue.Busy() {
		l.copied()
		l.opened(nil)
		l.wrote(0, nil)
	}
}

// fills plays a NIC, or a copy, that usually fills a receiver's grant.
func (w *world) fills(r *receiver, do *script, what func(op *operation, at uint64) byte) {
	number := do.near(uint64(do.next()) % (r.lastGrant + 1))
	g := r.grants[number]
	if g != nil {
		n := g.length - g.filled
		if r.route == wire.RouteStaged {
			n = do.near(min(uint64(do.next())*32, n))
		}
		if n > 0 && n <= g.length-g.filled {
			op := g.arrival.op
			to := bytesAt(op.memory.mapped, op.offset+g.part+g.filled, n)
			if g.slot != nil {
				to = bytesAt(w.slots, g.slot.offset+g.filled, n)
			}
			for i := range to {
				to[i] = what(op, g.part+g.filled+uint64(i))
			}
		}
		if r.route == wire.RouteStaged {
			if !r.immediateEnd {
				r.immediate(number, n)
			}
			return
		}
	}
	if r.portOpen() && r.route == wire.RouteDirect {
		r.receive(&wire.PeerWritten{Grant: number}, 0, nil)
	} else if !r.immediateEnd && r.route == wire.RouteStaged {
		r.immediate(number, uint64(do.next()))
	}
}

// ends is the end of a receiver's sender.
func (w *world) ends(r *receiver) {
	if r.portOpen() {
		w.leave(r.connection)
	}
	if !r.immediateEnd {
		r.landingsEnded()
	}
	w.copied()
}

// FuzzPeerOfAReader sends arbitrary messages of the owner's relay and a NIC to a relay whose client
// reads and writes. Read bytes land at the requested place, written bytes come from there, an
// operation ends once, and no resource remains.
func FuzzPeerOfAReader(f *testing.F) {
	// A read on each route: it is asked for, the way back comes, data is announced, granted, filled.
	f.Add([]byte{0, 1, 64, 0, 64, 0, 5, 6, 0, 0, 0, 0, 7, 0, 1, 255, 0, 7, 0, 1, 255, 0, 7, 0, 1, 255, 0, 9, 9})
	f.Add([]byte{1, 1, 64, 0, 64, 0, 5, 6, 0, 0, 0, 0, 7, 0, 1, 9, 9})
	f.Add([]byte{240, 1, 64, 0, 64, 0, 5, 6, 0, 0, 0, 0, 7, 0, 1, 255, 0, 9, 9})
	// Writes and sends, one refused; a read refused, one canceled.
	f.Add([]byte{0, 0, 8, 0, 8, 0, 2, 8, 0, 8, 0, 3, 0, 0, 3, 4, 0, 3, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 4, 0, 4, 0, 4, 1, 0,
		8, 3, 10, 0})
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		do := script(text)
		w := newWorld(t)
		patterned(w.mine.mapped)
		duplicate := w.foreign()
		route := w.route(do.next())
		l := w.link(route, w.mine)
		s := l.s
		var back *receiver
		hear := func(m wire.Message) {
			if s.portOpen() {
				s.receive(m, 0, nil)
			}
		}
		for len(do) > 0 {
			switch do.next() % 12 {
			case 0, 1, 2:
				if s.isDown() || len(w.posted) >= 64 {
					break
				}
				kind := []uint32{wire.OpWrite, wire.OpRead, wire.OpSend}[int(do.next())%3]
				length := do.length(fuzzMemory)
				op := w.post(s.connection, kind, 0, uint64(do.next())%(fuzzMemory-length+1), length)
				if kind != wire.OpRead {
					l.sent[op.send] = op
				}
			case 3:
				l.heard(&do, duplicate)
			case 4:
				m := &wire.PeerReadRefused{Read: do.near(max(1, uint64(do.next())%(s.reading.last+1))),
					Status: uint32(do.near(uint64(wire.StatusBadKey)))}
				hear(m)
			case 5:
				if b := s.reading.back; b != nil && b.listener.expects() {
					back = newReceiver(w.connection(route))
					back.hidden = true
					if w.tcp {
						back.writes = fuzzArrivals{}
					}
					s.reverseOpened(back)
				}
			case 6:
				m := &wire.PeerReadData{Read: do.near(max(1, uint64(do.next())%(s.reading.last+1)))}
				if back == nil || !back.portOpen() {
					break
				}
				m.Send = do.near(back.announced + 1)
				if op := s.reading.asked[m.Read]; op != nil {
					m.Length = do.near(op.length)
				}
				back.receive(m, 0, nil)
			case 7:
				if back != nil {
					w.fills(back, &do, func(op *operation, at uint64) byte { return pattern(op.offset + at) })
				}
			case 8:
				if cookie := uint64(do.next()); w.posted[cookie] != nil {
					s.cancel(cookie)
				}
			case 9:
				w.copied()
			case 10:
				w.read()
			case 11:
				switch do.next() {
				case 1:
					hear(&wire.PeerBackRefused{Status: uint32(do.near(uint64(wire.StatusLimit)))})
				case 2:
					hear(&wire.PeerClose{})
				case 3:
					if s.portOpen() {
						w.leave(s.connection)
					}
				case 4:
					if back != nil && back.portOpen() {
						w.leave(back.connection)
					}
				case 5:
					hear(&wire.PeerWrite{Send: 1})
				case 6:
					if back != nil && back.portOpen() {
						back.receive(&wire.PeerBack{}, 0, nil)
					}
				}
			}
			if back != nil && (!s.isDown()) != (!back.isDown()) {
				t.Fatalf("one of the two is up: %v, %v", s.down, back.down)
			}
			if len(s.reading.asked) > len(w.posted) || back != nil && len(w.relay.listeners) > 0 {
				t.Fatalf("%d reads of %d operations, %d listeners", len(s.reading.asked), len(w.posted), len(w.relay.listeners))
			}
		}
		l.finish()
		if s.portOpen() {
			w.leave(s.connection)
		}
		l.finish()
		if back != nil {
			w.ends(back)
		}
		w.over()
		for _, op := range w.posted {
			if done := w.ended[op.cookie]; done.Status == uint32(wire.StatusOK) && done.Length != op.length {
				t.Fatalf("an operation of %d bytes ended with %d", op.length, done.Length)
			}
		}
		if len(w.relay.listeners) > 0 {
			t.Fatal("the listener for the way back is still there")
		}
		for i, b := range bytesAt(w.mine.mapped, 0, fuzzMemory) {
			if b != pattern(uint64(i)) {
				t.Fatalf("byte %d is another's", i)
			}
		}
	})
}

// FuzzPeerOfARegionOwner sends arbitrary messages of a reader's relay to a relay whose client has
// exposed memory. Nothing is written or read outside the ranges, or after a revoke, and nothing is
// left.
func FuzzPeerOfARegionOwner(f *testing.F) {
	// A write and a read per route, and a revoke.
	f.Add([]byte{0, 0, 0, 16, 0, 0, 0, 2, 1, 0, 255, 0, 2, 1, 0, 255, 0, 4, 5, 1, 0, 0, 0, 16, 0, 0, 0, 3, 0, 0, 3, 4, 0,
		3, 1, 0, 1, 0, 0, 0, 0, 0, 64, 4, 3, 4, 200, 6, 0, 6, 1})
	f.Add([]byte{1, 0, 0, 16, 0, 0, 0, 2, 1, 0, 4, 1, 0, 0, 0, 16, 0, 0, 0, 5, 3, 0, 0, 3, 4, 0, 3, 1, 0, 1, 0, 0, 0, 0,
		0, 64, 4, 3, 4, 200, 6, 0})
	f.Add([]byte{240, 0, 0, 16, 0, 0, 0, 2, 1, 0, 255, 4, 1, 0, 0, 0, 16, 0, 0, 0, 5, 3, 0, 0, 3, 4, 0, 6, 0, 6, 1})
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 512 {
			return
		}
		const first, length, whole = 4096, 8192, 16384
		do := script(text)
		w := newWorld(t)
		duplicate := w.foreign()
		route := w.route(do.next())
		w.mine.staged = nil
		r := newReceiver(w.connection(route))
		if w.tcp {
			r.writes = fuzzArrivals{}
		}
		shown, written := w.memory(whole), w.memory(whole)
		patterned(shown.mapped)
		fill(written.mapped, fuzzUntouched)
		offer := func(m *memory, key byte, access uint32) *exposedRegion {
			o := &exposedRegion{number: w.session.number(), key: wire.UUID{key}, memory: m, offset: first, length: length,
				access: access, connection: r.number}
			w.session.regions[o.number], w.relay.regions[o.key], m.regions[o] = o, o, true
			return o
		}
		offers := []*exposedRegion{offer(written, 1, wire.RemoteWrite), offer(shown, 2, wire.RemoteRead)}
		var left []byte // in what was offered to be written, when that was over
		offers[0].gone = func() { left = bytes.Clone(bytesAt(written.mapped, 0, whole)) }
		var back *fuzzLink
		hear := func(m wire.Message) {
			if r.portOpen() {
				r.receive(m, 0, nil)
			}
		}
		key := func(right byte) wire.UUID {
			if b := do.next(); b > 200 {
				return wire.UUID{byte(b) % 4}
			}
			return wire.UUID{right}
		}
		place := func() (offset, n uint64) {
			n = do.length(length)
			return do.near(uint64(do.next()) * 64 % (length - n + 1)), n
		}
		var reads uint64
		r.back = &reverseConnection{}
		for len(do) > 0 {
			switch do.next() % 8 {
			case 0:
				m := &wire.PeerWrite{Send: do.near(r.announced + 1), Key: key(1)}
				m.Offset, m.Length = place()
				hear(m)
			case 1:
				reads++
				m := &wire.PeerRead{Read: do.near(reads), Key: key(2)}
				m.Offset, m.Length = place()
				hear(m)
			case 2:
				w.fills(r, &do, func(*operation, uint64) byte { return 7 })
			case 3:
				if back != nil {
					back.heard(&do, duplicate)
				}
			case 4:
				w.copied()
			case 5:
				if back == nil && !r.isDown() {
					back = w.link(route, shown)
					back.s.hidden = true
					r.pair(back.s.connection)
					r.opened(r.back, back.s)
				}
			case 6:
				if o := offers[do.next()%2]; o.state == lifeLive {
					o.revoke()
				}
			case 7:
				switch do.next() {
				case 1:
					hear(&wire.PeerClose{})
				case 2:
					hear(&wire.PeerBack{})
				case 3:
					hear(&wire.PeerReadData{Send: r.announced + 1, Read: 1, Length: 8})
				case 4:
					hear(&wire.PeerSend{Send: do.near(r.announced + 1), Length: 8})
				case 5:
					if back != nil && back.s.portOpen() {
						w.leave(back.s.connection)
					}
				case 6:
					if r.portOpen() {
						w.leave(r.connection)
					}
				}
			}
			if back != nil {
				for number, op := range back.s.active {
					back.sent[number] = op
				}
			}
			for _, g := range r.grants {
				if op := g.arrival.op; op.memory != written || op.offset < first || op.offset+op.length > first+length ||
					op.length != g.arrival.length {
					t.Fatalf("bytes %d+%d are granted", op.offset, op.length)
				}
			}
			if r.serving+len(r.back.waiting) > maxServing {
				t.Fatalf("%d operations are served", r.serving)
			}
		}
		w.copied()
		if back != nil {
			back.finish()
			if back.s.portOpen() {
				w.leave(back.s.connection)
			}
			back.finish()
		}
		w.ends(r)
		w.over()
		for _, o := range offers {
			if o.users != 0 || o.memory.users != 0 || r.serving != 0 {
				t.Fatalf("%d use what was offered, %d the memory, %d are served", o.users, o.memory.users, r.serving)
			}
			if o.state == lifeLive {
				o.revoke()
			}
		}
		if len(w.session.regions)+len(w.relay.regions) > 0 {
			t.Fatal("an offer is left")
		}
		got := bytesAt(written.mapped, 0, whole)
		for i, b := range got {
			if b != fuzzUntouched && (b != 7 || i < first || i >= first+length) {
				t.Fatalf("byte %d was written", i)
			}
		}
		if !bytes.Equal(got, left) {
			t.Fatal("what was withdrawn was written")
		}
	})
}
