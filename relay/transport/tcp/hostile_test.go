package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

// number returns the payload of a frame with a number.
func number(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

// TestForeignFramesEndThePeer demands that an invalid frame ends the Peer with the cause on both
// sides, and stores nothing.
func TestForeignFramesEndThePeer(t *testing.T) {
	message := wire.Encode(&wire.Done{}, 0)
	open := appendFrame(nil, 3, frameOpen, message)
	raised := func(kind, length uint32) []byte {
		b := appendFrame(nil, 3, kind)
		binary.LittleEndian.PutUint32(b[8:], length)
		return b
	}
	eager := func(change func(*piece)) []byte {
		p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: 4, bytes: 4}
		change(&p)
		return append(bytes.Clone(open), appendFrame(nil, 3, frameEager, p.header(), []byte("evil"))...)
	}
	cases := map[string][]byte{
		"an unknown kind":                 appendFrame(nil, 3, 99),
		"kind 0":                          make([]byte, frameHeader),
		"a very long message":             raised(frameMessage, wire.MaxMessage+1),
		"a very long write":               raised(frameEager, 1<<32-1),
		"a beat with a payload":           raised(frameBeat, 1),
		"a beat of a channel":             appendFrame(nil, 3, frameBeat),
		"a message of no channel":         appendFrame(nil, 0, frameMessage, message),
		"a message of a channel not open": appendFrame(nil, 3, frameMessage, message),
		"a channel of our numbers":        appendFrame(nil, 4, frameOpen, message),
		"channel 1":                       appendFrame(nil, 1, frameOpen, message),
		"a channel twice":                 append(bytes.Clone(open), open...),
		"a channel before the last":       append(appendFrame(nil, 5, frameOpen, message), open...),
		"more channels than may be": append(append(bytes.Clone(open), appendFrame(nil, 5, frameOpen, message)...),
			appendFrame(nil, 7, frameOpen, message)...),
		"no message": append(bytes.Clone(open), appendFrame(nil, 3, frameMessage,
			[]byte("nonsense"))...),
		"a channel left twice": append(append(bytes.Clone(open), appendFrame(nil, 3, frameLeave)...),
			appendFrame(nil, 3, frameLeave)...),
		"a message after the channel's end": append(append(bytes.Clone(open), appendFrame(nil, 3, frameLeave)...),
			appendFrame(nil, 3, frameMessage, message)...),
		"a write that was not sent": append(bytes.Clone(open), appendFrame(nil, 3, frameLanded, number(1))...),
		"a goodbye that is none":    appendFrame(nil, 0, frameGoodbye, message),
		"a write without a mark": append(bytes.Clone(open), appendFrame(nil, 3, frameEager,
			make([]byte, pieceHeader+1))...),
		"a write of another channel":  eager(func(p *piece) { p.channel = 5 }),
		"a write in another region":   eager(func(p *piece) { p.region = 2 }),
		"a write not granted":         eager(func(p *piece) { p.immediate = 2 }),
		"a write beside the grant":    eager(func(p *piece) { p.offset = 1 }),
		"a write of more than comes":  eager(func(p *piece) { p.length = 8 }),
		"a piece that does not begin": eager(func(p *piece) { p.at = rawPiece }),
		"a piece of another length":   eager(func(p *piece) { p.bytes = 3 }),
	}
	for name, said := range cases {
		t.Run(name, func(t *testing.T) {
			e, r := against(t, 1, Config{Channels: 2, Heartbeat: time.Minute, Dead: time.Hour})
			memory := make([]byte, 8)
			e.loop.Call(func() {
				e.peer.config.Accept = func(c *Channel, _ wire.Message, _ uint32) {
					if c.number != 3 {
						return
					}
					in := c.Receive(func(uint64, uint64) { t.Error("an immediate came") }, func() {})
					in.add(1, memory)
					if err := in.Grant(1, 1, 0, 8); err != nil {
						t.Error(err)
					}
				}
			})
			r.listens()
			go func() { _, _ = r.control.Write(said) }()
			goodbye := receive(t, r.frames, "a goodbye")
			for goodbye.kind != 0 && goodbye.kind != frameGoodbye {
				goodbye = receive(t, r.frames, "a goodbye")
			}
			r.close() // otherwise the test waits for a time limit
			err := e.died()
			var of *PeerError
			if s := wire.StatusOf(err); s != wire.StatusMalformed && s != wire.StatusLimit || !errors.As(err, &of) ||
				of.Peer != e.peer.Name() {
				t.Errorf("%v (%v)", err, s)
			}
			m, _, failed := wire.Decode(goodbye.payload) // an error without a goodbye
			var own, told *wire.Error
			if failure, ok := m.(*wire.Failure); failed != nil || !ok || !errors.As(err, &own) ||
				!errors.As(failure.Err(), &told) || told.Status != own.Status || told.Reason != own.Reason {
				t.Errorf("the other side is told %v, %v", m, failed)
			}
			if !bytes.Equal(memory, make([]byte, 8)) {
				t.Errorf("landed: %q", memory)
			}
		})
	}
}

// TestForeignPiecesEndThePeer demands the same of an invalid piece. An earlier piece has been
// stored; the invalid piece is not.
func TestForeignPiecesEndThePeer(t *testing.T) {
	const bytesOf = 3*rawPiece - 100
	good := piece{channel: 3, region: 1, number: 9, immediate: 1, length: bytesOf, bytes: rawPiece}
	cases := map[string]func(*piece){
		"twice":                func(*piece) {},
		"of another channel":   func(p *piece) { p.channel = 5 },
		"of another region":    func(p *piece) { p.region = 0 },
		"of no grant":          func(p *piece) { p.immediate = 7 },
		"of another write":     func(p *piece) { p.number = 10; p.at = rawPiece },
		"of another length":    func(p *piece) { p.length++; p.at = rawPiece },
		"of another place":     func(p *piece) { p.offset = rawPiece; p.at = rawPiece },
		"too long":             func(p *piece) { p.at = rawPiece; p.bytes++ },
		"too short":            func(p *piece) { p.at = rawPiece; p.bytes-- },
		"of nothing":           func(p *piece) { p.at = rawPiece; p.bytes = 0 },
		"across pieces":        func(p *piece) { p.at = rawPiece / 2 },
		"behind the end":       func(p *piece) { p.at = 3 * rawPiece },
		"before the beginning": func(p *piece) { p.at = 1<<64 - rawPiece },
		"longer than the last": func(p *piece) { p.at = 2 * rawPiece },
	}
	for name, change := range cases {
		t.Run(name, func(t *testing.T) {
			e, r := against(t, 2, Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour})
			memory := make([]byte, bytesOf)
			arrived, ended := e.granting(r, 3, memory)
			r.listens()
			if _, err := r.data[0].Write(append(good.header(), bytes.Repeat([]byte{1}, rawPiece)...)); err != nil {
				t.Fatal(err)
			}
			bad := good
			change(&bad)
			go func() {
				_, _ = r.data[1].Write(append(bad.header(), bytes.Repeat([]byte{2}, int(bad.bytes))...))
			}()
			if err := e.died(); wire.StatusOf(err) != wire.StatusMalformed {
				t.Error(err)
			}
			receive(t, ended, "the end of the grants")
			if !bytes.Equal(memory[:rawPiece], bytes.Repeat([]byte{1}, rawPiece)) {
				t.Error("the piece before it has not landed")
			}
			if len(arrived) > 0 || bytes.IndexByte(memory, 2) >= 0 {
				t.Errorf("%d immediates, and bytes landed at %d", len(arrived), bytes.IndexByte(memory, 2))
			}
			r.close()
		})
	}
}

// TestLeavingWithinAWriteEndsThePeer demands the end of a Peer that closes a channel within a
// write: the rest of the write could overwrite a later grant.
func TestLeavingWithinAWriteEndsThePeer(t *testing.T) {
	e, r := against(t, 1, Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour})
	r.listens()
	memory := make([]byte, 2*rawPiece)
	_, ended := e.granting(r, 3, memory)
	p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: 2 * rawPiece, bytes: rawPiece}
	if _, err := r.data[0].Write(append(p.header(), 1)); err != nil { // the Peer reads this
		t.Fatal(err)
	}
	if err := r.say(3, frameLeave); err != nil {
		t.Fatal(err)
	}
	if err := e.died(); !errors.Is(err, errWithinWrite) {
		t.Error(err)
	}
	receive(t, ended, "the end of the grants")
}

// TestTruncatedFramesDeliverNothing demands that an incomplete frame is no message and no write.
func TestTruncatedFramesDeliverNothing(t *testing.T) {
	p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: rawPiece, bytes: rawPiece}
	piece := append(p.header(), make([]byte, rawPiece)...)
	frame := appendFrame(nil, 3, frameMessage, wire.Encode(&wire.PeerWritten{}, 0))
	for _, n := range []int{0, 1, pieceHeader - 1, pieceHeader, pieceHeader + 1, len(piece) - 1} {
		for _, control := range []bool{false, true} {
			if control && n >= len(frame) {
				continue
			}
			noGoroutines(t)
			e, r := against(t, 1, Config{Heartbeat: 10 * time.Millisecond, Dead: time.Hour})
			arrived, ended := e.granting(r, 3, make([]byte, rawPiece))
			r.listens()
			c, what := r.data[0], piece
			if control {
				c, what = r.control, frame
			}
			if _, err := c.Write(what[:n]); err != nil {
				t.Fatal(err)
			}
			c.Close()
			var of *PeerError
			if err := e.died(); !errors.As(err, &of) || of.Event != "closed its connection" {
				t.Errorf("after %d bytes: %v", n, err)
			}
			receive(t, ended, "the end of the grants")
			if len(arrived) > 0 {
				t.Errorf("after %d bytes: an immediate", n)
			}
			r.close()
		}
	}
}

// TestMismatchedGreetingsMakeNoPeer demands that connections with different greetings create no
// Peer, and get the cause.
func TestMismatchedGreetingsMakeNoPeer(t *testing.T) {
	good := greeting{oldest: oldestVersion, newest: newestVersion, set: [16]byte{7}, streams: 2, piece: defaultPiece}
	with := func(change func(*greeting)) []byte { g := good; change(&g); return g.bytes() }
	cases := map[string]struct {
		said   []byte
		status wire.Status
	}{
		"another protocol": {[]byte(strings.Repeat("GET / HTTP/1.1\r\n", 3)), wire.StatusMalformed},
		"newer": {with(func(g *greeting) {
			g.oldest, g.newest = newestVersion+1, newestVersion+1
		}), wire.StatusVersion},
		"older":          {with(func(g *greeting) { g.oldest, g.newest = 0, oldestVersion-1 }), wire.StatusVersion},
		"backwards":      {with(func(g *greeting) { g.oldest, g.newest = 2, 1 }), wire.StatusVersion},
		"very many":      {with(func(g *greeting) { g.streams = maxStreams + 1 }), wire.StatusMalformed},
		"none":           {with(func(g *greeting) { g.streams = 0 }), wire.StatusMalformed},
		"beyond":         {with(func(g *greeting) { g.stream = 3 }), wire.StatusMalformed},
		"no pieces":      {with(func(g *greeting) { g.piece = 0 }), wire.StatusMalformed},
		"large pieces":   {with(func(g *greeting) { g.piece = 1 << 31 }), wire.StatusMalformed},
		"the same twice": {with(func(*greeting) {}), wire.StatusMalformed},
		"other numbers":  {with(func(g *greeting) { g.stream, g.streams = 1, 3 }), wire.StatusMalformed},
		"too many sets":  {with(func(g *greeting) { g.set[0]++ }), wire.StatusLimit},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := &Gathering{Most: 1, Time: waitTime}
			defer g.Close()
			add := func(said []byte) (*Streams, net.Conn, error) {
				ours, theirs := net.Pipe()
				go func() { _, _ = ours.Write(said) }()
				answer := make(chan *greeting, 1)
				go func() {
					b := make([]byte, greetingBytes)
					_, _ = io.ReadFull(ours, b)
					a, _ := readGreeting(b)
					answer <- a
				}()
				s, err := g.Add(theirs, "node7")
				if err != nil && !strings.HasPrefix(name, "another") {
					if a := receive(t, answer, "the refusal"); a == nil || wire.Status(a.refusal) != wire.StatusOf(err) {
						t.Errorf("%v: the other side hears %+v", err, a)
					}
				}
				return s, ours, err
			}
			_, first, err := add(good.bytes())
			if err != nil {
				t.Fatal(err)
			}
			defer first.Close()
			s, second, err := add(c.said)
			defer second.Close()
			if s != nil || wire.StatusOf(err) != c.status {
				t.Errorf("%v, %v", s, err)
			}
		})
	}
}

// TestSetsBelongToTheirDialer demands that a connection of another dialer joins no set, and that an
// incomplete set ends at its limit.
func TestSetsBelongToTheirDialer(t *testing.T) {
	t.Parallel()
	g := &Gathering{Time: 2 * time.Second} // for the greetings as well
	hello := greeting{oldest: oldestVersion, newest: newestVersion, streams: 1, piece: defaultPiece}
	var conns []net.Conn
	for i, who := range []string{"dialer", "stranger"} {
		ours, theirs := net.Pipe()
		conns = append(conns, ours)
		hello.stream = uint32(i)
		go func() { _, _ = ours.Write(hello.bytes()) }()
		if s, err := g.Add(theirs, who); s != nil || err != nil {
			t.Fatalf("%s: %v, %v", who, s, err)
		}
	}
	for _, c := range conns {
		_ = c.SetReadDeadline(testutil.Deadline())
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("an incomplete set: %v", err)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.sets) > 0 {
		t.Errorf("%d sets are left", len(g.sets))
	}
}

// TestSetsOfOneDialerAreBounded demands that incomplete sets of one dialer exclude no other dialer.
func TestSetsOfOneDialerAreBounded(t *testing.T) {
	g := &Gathering{Most: 3, MostOfOne: 2, Time: waitTime}
	defer g.Close()
	for i, c := range []struct {
		who    string
		status wire.Status
	}{{"one", wire.StatusOK}, {"one", wire.StatusOK}, {"one", wire.StatusLimit}, {"other", wire.StatusOK},
		{"third", wire.StatusLimit}} {
		ours, theirs := net.Pipe()
		defer ours.Close()
		hello := greeting{oldest: oldestVersion, newest: newestVersion, set: [16]byte{byte(i)}, streams: 1,
			piece: defaultPiece}
		go func() {
			_, _ = ours.Write(hello.bytes())
			_, _ = io.Copy(io.Discard, ours)
		}()
		if _, err := g.Add(theirs, c.who); wire.StatusOf(err) != c.status {
			t.Errorf("set %d, of %s: %v", i, c.who, err)
		}
	}
}

// TestMemoryIsRemovedWithAGrant demands that the removal of memory with an open grant ends the
// Peer, and that no byte is stored there.
func TestMemoryIsRemovedWithAGrant(t *testing.T) {
	e, r := against(t, 1, Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour})
	r.listens()
	memory := make([]byte, rawPiece)
	_, ended := e.granting(r, 3, memory)
	e.loop.Call(func() {
		in := e.peer.channels[3].arrivals
		in.RemoveMemory(2) // a region without a grant
		if e.peer.isDying() {
			t.Error("the peer dies")
		}
		in.RemoveMemory(1)
	})
	if err := e.died(); wire.StatusOf(err) != wire.StatusInternal || !errors.Is(err, errGranted) {
		t.Error(err)
	}
	receive(t, ended, "the end of the grants")
}

// TestDialFailureClosesAllConnections demands that Dial closes its connections after a failure.
func TestDialFailureClosesAllConnections(t *testing.T) {
	refuses := errors.New("no route to host")
	var made []net.Conn
	_, err := Dial(context.Background(), time.Now().Add(waitTime), func(context.Context) (net.Conn, error) {
		if len(made) == 2 {
			return nil, refuses
		}
		ours, theirs := net.Pipe()
		made = append(made, theirs)
		return ours, nil
	}, 4, 0)
	if !errors.Is(err, refuses) {
		t.Error(err)
	}
	for _, c := range made {
		if _, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("a connection is left: %v", err)
		}
	}
}

// FuzzFrame demands that a frame has a length of its kind and lies within the received bytes.
func FuzzFrame(f *testing.F) {
	f.Add(appendFrame(nil, 3, frameMessage, wire.Encode(&wire.Done{}, 0)))
	f.Add(appendFrame(nil, 0, frameBeat))
	f.Add(appendFrame(nil, 0, frameExtension, []byte("x")))
	f.Add(appendFrame(nil, 1<<31, frameLanded, number(1<<63)))
	f.Fuzz(func(t *testing.T, data []byte) {
		one, n, err := nextFrame(data)
		if err != nil || n == 0 {
			if n != 0 || len(data) >= frameHeader+maxFrame && err == nil {
				t.Errorf("%d bytes are used of %d: %v", n, len(data), err)
			}
			return
		}
		if n > len(data) || len(one.payload) > maxFrame ||
			!bytes.Equal(appendFrame(nil, one.channel, one.kind, one.payload), data[:n]) {
			t.Errorf("%+v of %d bytes", one, n)
		}
	})
}

// FuzzGreeting demands that an accepted greeting encodes to the same bytes.
func FuzzGreeting(f *testing.F) {
	f.Add((&greeting{oldest: 1, newest: 1, streams: 4, stream: 2, piece: defaultPiece}).bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		g, err := readGreeting(data)
		if err == nil && (g.streams < 1 || g.streams > maxStreams || g.stream > g.streams || g.piece < minPiece ||
			!bytes.Equal(g.bytes(), data)) {
			t.Errorf("%+v", g)
		}
	})
}

// FuzzPieces demands that each accepted piece gets granted memory of its length, and that no byte
// of a grant is given twice.
func FuzzPieces(f *testing.F) {
	p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: 10000, bytes: rawPiece}
	first := p.header()
	p.at = rawPiece
	f.Add(uint64(0), uint64(10000), append(first, p.header()...))
	p.offset, p.at, p.length, p.bytes = 5, 0, 3, 3
	f.Add(uint64(5), uint64(3), p.header())
	f.Fuzz(func(t *testing.T, offset, length uint64, data []byte) {
		const size = 5 * rawPiece
		memory := make([]byte, size)
		peer := &Peer{landings: landings{piece: rawPiece, channels: map[uint32]*runway{}}}
		c := &Channel{peer: peer, number: 3}
		in := c.Receive(nil, nil)
		in.add(1, memory)
		err := in.Grant(1, 1, offset, length)
		if fits := length > 0 && offset <= size && length <= size-offset; fits != (err == nil) {
			t.Fatalf("%d bytes at %d: %v", length, offset, err)
		}
		for ; len(data) >= pieceHeader; data = data[pieceHeader:] {
			p, err := readPiece(data)
			if err != nil {
				continue
			}
			w, to, err := peer.landings.begin(p)
			if err != nil {
				continue
			}
			if len(to) != int(p.bytes) || p.channel != 3 || p.region != 1 || p.immediate != 1 {
				t.Fatalf("%+v has %d bytes", p, len(to))
			}
			for i := range to {
				if to[i]++; to[i] > 1 {
					t.Fatalf("%+v is given what was given before", p)
				}
			}
			peer.landings.end(w, p)
		}
		for i, b := range memory {
			if b > 0 && (err != nil || uint64(i) < offset || uint64(i) >= offset+length) {
				t.Fatalf("byte %d was written, %d at %d are granted", i, length, offset)
			}
		}
	})
}

// FuzzPeer demands that a Peer with arbitrary bytes on the control stream and a data stream ends or
// continues, and stores only granted bytes.
func FuzzPeer(f *testing.F) {
	p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: 4, bytes: 4}
	open := appendFrame(nil, 3, frameOpen, wire.Encode(&wire.Done{}, 0))
	f.Add(append(bytes.Clone(open), appendFrame(nil, 3, frameEager, p.header(), []byte("here"))...), []byte{})
	f.Add(append(bytes.Clone(open), appendFrame(nil, 3, frameLeave)...), append(p.header(), "here"...))
	f.Add(open, append(p.header(), "here"...))
	f.Fuzz(func(t *testing.T, control, data []byte) {
		memory := make([]byte, 12)
		e, r := against(t, 1, Config{Heartbeat: time.Millisecond, Dead: time.Hour, Accept: func(c *Channel, _ wire.Message,
			_ uint32) {
			in := c.Receive(func(uint64, uint64) {}, func() {})
			in.add(1, memory)
			if c.number == 3 {
				if err := in.Grant(1, 1, 0, 4); err != nil {
					t.Error(err)
				}
			}
		}})
		go func() { _, _ = io.Copy(io.Discard, r.control) }()
		_, _ = r.control.Write(control)
		_, _ = r.data[0].Write(data)
		r.close()
		e.died()
		if !bytes.Equal(memory[4:], make([]byte, 8)) {
			t.Errorf("written: %q", memory)
		}
	})
}
