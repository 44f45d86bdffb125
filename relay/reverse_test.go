package relay

import (
	"testing"

	"github.com/peerlane/peerlane/relay/wire"
)

// readsAt is a reader with a requested read of so many bytes, and the reverse connection.
func readsAt(t *testing.T, n uint64) (w *world, s *sender, back *receiver, op *operation) {
	w = newWorld(t)
	s = w.link(wire.RouteStaged, w.mine).s
	op = w.post(s.connection, wire.OpRead, 0, 0, n)
	back = newReceiver(w.connection(wire.RouteStaged))
	back.hidden = true
	s.reverseOpened(back)
	return w, s, back, op
}

// A read returns the requested bytes, or an error; and a read canceled before its data arrives gets
// none.
func TestReadReturnsAllBytesOrAnError(t *testing.T) {
	const n = 100
	for _, c := range []struct {
		name     string
		say      func(s *sender, back *receiver, op *operation)
		status   wire.Status
		goesDown bool
	}{
		{"too little", func(_ *sender, back *receiver, op *operation) {
			back.receive(&wire.PeerReadData{Send: 1, Read: op.send, Length: n - 1}, 0, nil)
		}, wire.StatusMalformed, true},
		{"too much", func(_ *sender, back *receiver, op *operation) {
			back.receive(&wire.PeerReadData{Send: 1, Read: op.send, Length: n + 1}, 0, nil)
		}, wire.StatusMalformed, true},
		{"for no read", func(_ *sender, back *receiver, op *operation) {
			back.receive(&wire.PeerReadData{Send: 1, Read: op.send + 1, Length: n}, 0, nil)
		}, wire.StatusMalformed, true},
		{"after a cancel", func(s *sender, back *receiver, op *operation) {
			s.cancel(op.cookie)
			back.receive(&wire.PeerReadData{Send: 1, Read: op.send, Length: n}, 0, nil)
		}, wire.StatusCanceled, false},
		{"a refusal", func(s *sender, _ *receiver, op *operation) {
			s.receive(&wire.PeerReadRefused{Read: op.send, Status: uint32(wire.StatusBadKey)}, 0, nil)
		}, wire.StatusBadKey, false},
		{"a refusal that is none", func(s *sender, _ *receiver, op *operation) {
			s.receive(&wire.PeerReadRefused{Read: op.send}, 0, nil)
		}, wire.StatusMalformed, true},
		{"a refusal of the way back that is there", func(s *sender, _ *receiver, _ *operation) {
			s.receive(&wire.PeerBackRefused{Status: uint32(wire.StatusLimit)}, 0, nil)
		}, wire.StatusMalformed, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, s, back, op := readsAt(t, n)
			c.say(s, back, op)
			w.read()
			if done := w.ended[op.cookie]; done.Status != uint32(c.status) || done.Length != 0 {
				t.Errorf("the read ended with %+v, not %v", done, c.status)
			}
			if (s.isDown()) != c.goesDown || (back.isDown()) != c.goesDown {
				t.Errorf("the connections are down: %v, %v", s.down, back.down)
			}
			if len(back.grants) > 0 {
				t.Error("something was granted")
			}
			if s.portOpen() {
				w.leave(s.connection)
			}
			w.ends(back)
			w.over()
		})
	}
}

// Without a reverse connection the requested reads end, also the next read, and a later read
// requests one again.
func TestReadWithoutReverseConnectionFailsAndLaterRetries(t *testing.T) {
	w := newWorld(t)
	s := w.link(wire.RouteDirect, w.mine).s
	for range 2 {
		reads := []*operation{w.post(s.connection, wire.OpRead, 0, 0, 8), w.post(s.connection, wire.OpRead, 0, 8, 8)}
		if len(w.relay.listeners) != 1 {
			t.Fatalf("%d ways back are awaited", len(w.relay.listeners))
		}
		s.receive(&wire.PeerBackRefused{Status: uint32(wire.StatusLimit)}, 0, nil)
		w.read()
		for _, op := range reads {
			if done := w.ended[op.cookie]; done.Status != uint32(wire.StatusNoReverseConnection) {
				t.Errorf("a read ended with %+v", done)
			}
		}
		next := w.post(s.connection, wire.OpRead, 0, 0, 8)
		w.read()
		if done := w.ended[next.cookie]; done.Status != uint32(wire.StatusNoReverseConnection) {
			t.Errorf("the next ended with %+v", done)
		}
		if s.isDown() || len(w.relay.listeners) > 0 {
			t.Errorf("down: %v; %d ways back are awaited", s.down, len(w.relay.listeners))
		}
		s.reading.again = 0
	}
	w.leave(s.connection)
	w.over()
}

// A relay without room for the way back says so, and goes on.
func TestOwnerAtConnectionLimitRefusesReverseConnection(t *testing.T) {
	w := newWorld(t)
	r := newReceiver(w.connection(wire.RouteDirect))
	full := quota{connections: w.relay.limits.Connections}
	if err := w.relay.reserve(full); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r.receive(&wire.PeerBack{}, 0, nil)
		if r.isDown() || r.back != nil {
			t.Fatalf("down: %v; a way back: %v", r.down, r.back)
		}
		r.receive(&wire.PeerRead{Read: 1}, 0, nil) // that was under way
	}
	w.relay.release(full)
	w.leave(r.connection)
	w.over()
}

// A relay without room for its end does not request one.
func TestReaderAtConnectionLimitRefusesRead(t *testing.T) {
	w := newWorld(t)
	s := w.link(wire.RouteDirect, w.mine).s
	full := quota{connections: w.relay.limits.Connections}
	if err := w.relay.reserve(full); err != nil {
		t.Fatal(err)
	}
	op := w.post(s.connection, wire.OpRead, 0, 0, 8)
	w.read()
	if done := w.ended[op.cookie]; done.Status != uint32(wire.StatusNoReverseConnection) || s.isDown() ||
		s.reading.back != nil {
		t.Errorf("the read ended with %+v; down: %v; a way back: %v", done, s.down, s.reading.back)
	}
	w.relay.release(full)
	s.reading.again = 0
	op = w.post(s.connection, wire.OpRead, 0, 0, 8)
	if s.reading.asked[op.send] != op || len(w.relay.listeners) != 1 {
		t.Errorf("the next one is not asked for")
	}
	w.leave(s.connection)
	w.over()
}

// A session offers so much and no more.
func TestSessionRegionsAreLimited(t *testing.T) {
	w := newWorld(t)
	c := w.connection(wire.RouteDirect)
	m := &wire.Expose{Memory: w.mine.number, Length: 8, Access: wire.RemoteRead, Connection: c.number}
	for range wire.MaxRegions {
		w.session.expose(m, 1)
	}
	if _, err := w.session.newRegion(m); wire.StatusOf(err) != wire.StatusLimit ||
		len(w.session.regions) != wire.MaxRegions || len(w.relay.regions) != wire.MaxRegions {
		t.Errorf("after %d: %v", len(w.session.regions), err)
	}
	w.mine.users++ // so that it stays, as the world's
	w.mine.retire()
	if len(w.session.regions)+len(w.relay.regions) != 0 {
		t.Errorf("%d are left", len(w.session.regions))
	}
}

// A key is of its session: that of another client of the container, whose connection may
// have the same number, opens nothing.
func TestRegionKeyOfOtherSessionIsRefused(t *testing.T) {
	w := newWorld(t)
	c := w.connection(wire.RouteDirect)
	o := &exposedRegion{key: wire.UUID{1}, memory: w.mine, length: 8, access: wire.RemoteRead, connection: c.number}
	w.relay.regions[o.key] = o
	other := *w.session
	of := *c
	of.session = &other
	if _, status := of.serve(wire.OpSend, o.key, 0, 8); status != wire.StatusBadKey {
		t.Errorf("another session's: %v", status)
	}
	if op, status := c.serve(wire.OpSend, o.key, 0, 8); status != wire.StatusOK {
		t.Errorf("its own: %v", status)
	} else {
		op.finish(wire.StatusOK)
	}
	if o.users+w.mine.users+c.serving != 0 {
		t.Errorf("%d, %d, %d operations are left", o.users, w.mine.users, c.serving)
	}
}

// A reverse connection over a route different from the connection's, for which the memory was
// checked, takes both down.
func TestReverseConnectionOfOtherRouteEndsBoth(t *testing.T) {
	w := newWorld(t)
	s := w.link(wire.RouteStaged, w.mine).s
	w.mine.kind = wire.MemoryIPC // which is read into by route staged alone
	w.post(s.connection, wire.OpRead, 0, 0, 8)
	back := newReceiver(w.connection(wire.RouteDirect))
	back.hidden = true
	s.reverseOpened(back)
	if !s.isDown() || s.down.Status != wire.StatusMalformed || back.down != s.down {
		t.Fatalf("the connection is down with %v, the way back with %v", s.down, back.down)
	}
	w.leave(s.connection)
	w.ends(back)
	w.over()
}

// A read from a remote relay does not use memory of cudaMalloc, which the remote relay would have
// to write.
func TestReadIntoCudaMallocMemoryFromOtherRelayIsRefused(t *testing.T) {
	w := newWorld(t)
	s := w.link(wire.RouteDirect, w.mine).s
	op := w.post(s.connection, wire.OpRead, 0, 0, 8)
	w.mine.kind, w.mine.parts = wire.MemoryIPC, nil
	back := newReceiver(w.connection(wire.RouteDirect))
	back.hidden = true
	s.reverseOpened(back)
	back.receive(&wire.PeerReadData{Send: 1, Read: op.send, Length: op.length}, 0, nil)
	w.read()
	if done := w.ended[op.cookie]; done.Status != uint32(wire.StatusNotPermitted) {
		t.Fatalf("the read ended with %v", wire.Status(done.Status))
	}
	w.leave(s.connection)
	w.ends(back)
	w.over()
}

// An awaited reverse connection has room in the session, regardless of later connections.
func TestReverseConnectionIntoFullSessionHasRoom(t *testing.T) {
	w := newWorld(t)
	s := w.link(wire.RouteDirect, w.mine).s
	w.post(s.connection, wire.OpRead, 0, 0, 8)
	l := s.reading.back.listener
	others := map[uint32]bool{}
	for len(w.session.connections) <= wire.MaxConnections {
		others[w.connection(wire.RouteDirect).number] = true
	}
	back := newReceiver(w.opening(wire.RouteDirect))
	w.session.ended = nil // its client is there
	l.take(back)
	w.session.ended = errEnding
	if s.isDown() || back.isDown() || back.reader != s {
		t.Fatalf("the connection is down with %v, the way back with %v", s.down, back.down)
	}
	for number := range others {
		delete(w.session.connections, number)
	}
	w.leave(s.connection)
	w.ends(back)
	w.over()
}
