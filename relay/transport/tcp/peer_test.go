package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// TestWritesUnderGrantsArrive demands that each byte and each immediate of a granted write arrives
// once, and that the source is free when the bytes have arrived.
func TestWritesUnderGrantsArrive(t *testing.T) {
	for name, of := range networks {
		for _, streams := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s/%d streams", name, streams), func(t *testing.T) {
				noGoroutines(t)
				const piece, slot, slots = 8 << 10, 64 << 10, 16
				memory := make([]byte, slots*slot)
				source := make([]byte, slots*slot)
				random := rand.NewChaCha8([32]byte{byte(streams)})
				_, _ = random.Read(source)
				draw := rand.New(random)

				type arrival struct{ immediate, length uint64 }
				arrived := make(chan arrival, slots)
				ready := make(chan *Arrivals, 1)
				a, b := pair(t, of, streams, piece, Config{Eager: -1 + 4096*(streams%2)}, func(c *Channel, _ wire.Message,
					_ uint32) {
					in := c.Receive(func(immediate, length uint64) { arrived <- arrival{immediate, length} }, func() {})
					in.add(7, memory)
					ready <- in
				})
				c := a.open(&wire.Done{}, ignore, func(error) {})
				in := receive(t, ready, "the channel")
				immediate := uint64(0)
				for range 4 {
					lengths := make([]int, slots)
					want := bytes.Clone(memory)
					b.loop.Call(func() {
						for i := range lengths {
							lengths[i] = 1 + draw.IntN(slot)
							if i == 0 {
								lengths[i] = slot
							}
							copy(want[i*slot:], source[i*slot:][:lengths[i]])
							if err := in.Grant(immediate+uint64(i), 7, uint64(i*slot), uint64(lengths[i])); err != nil {
								t.Error(err)
							}
						}
					})
					done := make(chan error, slots)
					a.loop.Call(func() {
						for i, n := range lengths {
							c.Link().Write(transport.Target{Region: 7, Offset: uint64(i * slot)}, hostPlace(source, i*slot), uint64(n),
								immediate+uint64(i), func(err error) {
									// Over TCP the race detector does not see the order of
									// accesses.
									if name == "pipes" && !bytes.Equal(memory[i*slot:][:n], source[i*slot:][:n]) {
										err = errors.Join(err, fmt.Errorf("write %d is done before its bytes are there", i))
									}
									done <- err
								})
						}
					})
					for range lengths {
						if err := receive(t, done, "a write's end"); err != nil {
							t.Fatal(err)
						}
						one := receive(t, arrived, "an immediate")
						i := int(one.immediate - immediate)
						if i < 0 || i >= slots || lengths[i] == 0 || uint64(lengths[i]) != one.length {
							t.Fatalf("immediate %d of %d bytes, where those after %d have %v", one.immediate, one.length, immediate, lengths)
						}
						lengths[i] = 0
					}
					if !bytes.Equal(memory, want) { // after the immediates
						t.Fatal("other bytes have changed")
					}
					_, _ = random.Read(source)
					immediate += slots
				}
			})
		}
	}
}

// TestGrantTakesSeveralWrites demands that several successive writes can fill a grant.
func TestGrantTakesSeveralWrites(t *testing.T) {
	memory := make([]byte, 100<<10)
	source := bytes.Repeat([]byte("lane"), 25<<10)
	lengths := make(chan uint64, 10)
	ready := make(chan *Arrivals, 1)
	a, b := pair(t, pipes, 2, 8<<10, Config{}, func(c *Channel, _ wire.Message, _ uint32) {
		in := c.Receive(func(_, length uint64) { lengths <- length }, func() {})
		in.add(1, memory)
		ready <- in
	})
	c := a.open(&wire.Done{}, ignore, func(error) {})
	in := receive(t, ready, "the channel")
	b.loop.Call(func() {
		if err := in.Grant(9, 1, 0, uint64(len(memory))); err != nil {
			t.Error(err)
		}
	})
	at := 0
	for _, n := range []int{30 << 10, 3, 70<<10 - 3} {
		done := make(chan error, 1)
		a.loop.Call(func() {
			c.Link().Write(transport.Target{Region: 1, Offset: uint64(at)}, hostPlace(source, at), uint64(n), 9,
				func(err error) { done <- err })
		})
		if err := receive(t, done, "a write's end"); err != nil {
			t.Fatal(err)
		}
		if got := receive(t, lengths, "an immediate"); got != uint64(n) {
			t.Errorf("an immediate of %d bytes after %d", got, n)
		}
		at += n
	}
	if !bytes.Equal(memory, source) {
		t.Error("other bytes have come")
	}
}

// TestEagerWritesArePieces demands that a write with the messages is at most as long as a piece,
// the longest that the peer accepts.
func TestEagerWritesArePieces(t *testing.T) {
	memory, source := make([]byte, 10<<10), bytes.Repeat([]byte("lane"), 10<<8)
	ready := make(chan struct{})
	a, _ := pair(t, pipes, 1, 4<<10, Config{Eager: 16 << 10}, func(c *Channel, _ wire.Message, _ uint32) {
		in := c.Receive(func(uint64, uint64) {}, func() {})
		in.add(1, memory)
		if err := in.Grant(1, 1, 0, uint64(len(memory))); err != nil {
			t.Error(err)
		}
		close(ready)
	})
	done := make(chan error, 1)
	c := a.open(&wire.Done{}, ignore, func(error) {})
	receive(t, ready, "the grant")
	a.loop.Call(func() {
		c.Link().Write(transport.Target{Region: 1}, hostPlace(source, 0), uint64(len(source)), 1,
			func(err error) { done <- err })
	})
	if err := receive(t, done, "the write's end"); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(memory, source) {
		t.Error("other bytes have come")
	}
}

// TestChannelsKeepSeparateOrder demands that each channel gets its messages in order, and then the
// end of the peer.
func TestChannelsKeepSeparateOrder(t *testing.T) {
	for name, of := range networks {
		t.Run(name, func(t *testing.T) {
			noGoroutines(t)
			const channels, messages = 100, 30
			finished := make(chan error, 2*channels)
			// count returns a handler that expects the numbers from 0 on.
			count := func(number uint64) (func(wire.Message, uint32, []int), func(error)) {
				next := uint64(0)
				return func(m wire.Message, sequence uint32, _ []int) {
						send, ok := m.(*wire.PeerSend)
						if !ok || send.Tag != number || send.Send != next || sequence != uint32(next) {
							t.Errorf("channel %d has %+v after %d", number, m, next)
						}
						next++
					}, func(err error) {
						if next != messages || err != io.EOF {
							err = fmt.Errorf("channel %d ended after %d messages: %v", number, next, err)
						} else {
							err = nil
						}
						finished <- err
					}
			}
			say := func(c *Channel, number uint64) {
				for i := range uint64(messages) {
					c.Send(&wire.PeerSend{Send: i, Tag: number}, uint32(i))
				}
			}
			a, b := pair(t, of, 1, 0, Config{}, func(c *Channel, first wire.Message, _ uint32) {
				number := first.(*wire.PeerWithdraw).Send
				c.Handle(count(number))
				say(c, number)
			})
			opened := make([]*Channel, channels)
			for i := range opened {
				received, ended := count(uint64(i))
				told := make(chan struct{})
				opened[i] = a.open(&wire.PeerWithdraw{Send: uint64(i)}, func(m wire.Message, sequence uint32, fds []int) {
					received(m, sequence, fds)
					if m.(*wire.PeerSend).Send == messages-1 {
						close(told)
					}
				}, ended)
				a.loop.Call(func() { say(opened[i], uint64(i)) })
				receive(t, told, "the other side's messages")
			}
			a.loop.Call(func() {
				for _, c := range opened {
					c.Leave()
				}
			})
			for range channels { // of the accepting side
				if err := receive(t, finished, "a channel's end"); err != nil {
					t.Error(err)
				}
			}
			for _, e := range []*side{a, b} {
				testutil.Until(t, "channels to go", func() bool {
					left := 0
					e.loop.Call(func() { left = len(e.peer.channels) + e.peer.theirs })
					return left == 0
				})
			}
		})
	}
}

// TestMessagesOfIterationAreOneWrite demands that the messages of one iteration of the loop share a
// write.
func TestMessagesOfIterationAreOneWrite(t *testing.T) {
	for _, alone := range []bool{false, true} {
		got := make(chan uint64, 1000)
		dialed, accepted := greeted(t, pipes, 1, 0)
		wire1 := &counted{Conn: dialed.control}
		dialed.control = wire1
		a := newSide(t, dialed, Config{Alone: alone, Heartbeat: time.Hour, Dead: 2 * time.Hour})
		newSide(t, accepted, Config{Heartbeat: time.Hour, Dead: 2 * time.Hour, Accept: func(c *Channel, _ wire.Message,
			_ uint32) {
			c.Handle(func(m wire.Message, _ uint32, _ []int) { got <- m.(*wire.PeerWritten).Grant }, func(error) {})
		}})
		const connections, each = 10, 8
		a.loop.Call(func() {
			for range connections {
				c, err := a.peer.Open(&wire.Done{}, 0, ignore, func(error) {})
				if err != nil {
					t.Error(err)
					return
				}
				for i := range uint64(each) {
					c.Send(&wire.PeerWritten{Grant: i}, 0)
				}
			}
			if !alone && a.peer.frames != connections*(each+1) {
				t.Errorf("within the turn %d messages wait for its end", a.peer.frames)
			}
		})
		for i := range connections * each {
			if n := receive(t, got, "a message"); n != uint64(i%each) {
				t.Fatalf("message %d is %d", i, n)
			}
		}
		const messages = connections * (each + 1)
		want := uint64(1)
		if alone {
			want = messages
		}
		wire1.mu.Lock()
		writes := wire1.writes
		wire1.mu.Unlock()
		if f := a.peer.Figures(); f.Messages != messages || f.Batches != want || uint64(writes) != want {
			t.Errorf("alone %v: %d messages in %d writes (%d of the connection), want %d in %d", alone, f.Messages, f.Batches,
				writes, messages, want)
		}
	}
}

// TestUnreadMessagesAboveLimitEndPeer demands that a peer that reads nothing ends the Peer at the
// limit of waiting bytes.
func TestUnreadMessagesAboveLimitEndPeer(t *testing.T) {
	noGoroutines(t)
	const most = 64 << 10
	e, _ := against(t, 1, Config{Waiting: most, Dead: time.Hour, Heartbeat: 20 * time.Millisecond})
	ended := make(chan error, 1)
	c := e.open(&wire.Done{}, ignore, func(err error) { ended <- err })
	held := 0
	for !e.peer.isDying() {
		e.loop.Call(func() {
			c.Send(&wire.Failure{}, 0)
			e.peer.outbox.mu.Lock()
			held = max(held, cap(e.peer.outbox.data)+len(e.peer.sent))
			e.peer.outbox.mu.Unlock()
		})
	}
	if held > 3*most {
		t.Errorf("%d bytes were held, where %d may wait", held, most)
	}
	if err := receive(t, ended, "the channel's end"); !errors.Is(err, errUnread) ||
		wire.StatusOf(err) != wire.StatusPeerRelayDied {
		t.Error(err)
	}
}

// TestBusyLoopReadsNoMore demands that a Peer reads nothing more until the loop has handled the
// received frames.
func TestBusyLoopReadsNoMore(t *testing.T) {
	dialed, accepted := greeted(t, pipes, 1, 0)
	in := &counted{Conn: accepted.control}
	accepted.control = in
	a := newSide(t, dialed, Config{Dead: time.Hour})
	entered, leave := make(chan struct{}), make(chan struct{})
	messages := make(chan struct{}, 100_000)
	newSide(t, accepted, Config{Dead: time.Hour, Accept: func(c *Channel, _ wire.Message, _ uint32) {
		first := true
		c.Handle(func(wire.Message, uint32, []int) {
			if first {
				first = false
				close(entered)
				<-leave
			}
			messages <- struct{}{}
		}, func(error) {})
	}})
	c := a.open(&wire.Done{}, ignore, func(error) {})
	const sent, size = 1000, 504 + 12
	for range sent {
		a.loop.Do(func() { c.Send(&wire.Failure{}, 0) })
	}
	receive(t, entered, "the first message")
	a.loop.Call(func() {}) // the messages are sent
	read, still := -1, 0
	testutil.Until(t, "the reading to stand still", func() bool {
		in.mu.Lock()
		defer in.mu.Unlock()
		if still++; in.read != read {
			read, still = in.read, 0
		}
		return still == 100
	})
	if read > 128<<10 {
		t.Errorf("%d bytes of %d were read while the loop is busy", read, sent*size)
	}
	close(leave)
	for range sent {
		receive(t, messages, "a message")
	}
}

// TestSilentPeerIsClosedWithReason demands that a peer that sends nothing, or accepts nothing, is
// dead at the limit, with the cause.
func TestSilentPeerIsClosedWithReason(t *testing.T) {
	source := make([]byte, 64<<10)
	config := Config{Name: "node7 (10.1.0.7 over eth2)", Heartbeat: 20 * time.Millisecond, Dead: 300 * time.Millisecond,
		Waiting: 1 << 30}
	// Only the deadline under test runs: on a slow host another deadline could pass first.
	cases := map[string]struct {
		play          func(e *side, r *raw)
		want          error
		control, data patient
	}{
		"says nothing": {func(_ *side, r *raw) { r.listens() }, errSaidNothing, patient{reads: true}, patient{}},
		"says nothing any more": {func(_ *side, r *raw) {
			if err := r.listens().say(0, frameBeat); err != nil {
				t.Error(err)
			}
		}, errSaidNothing, patient{reads: true}, patient{}},
		"takes no messages": {func(*side, *raw) {}, errTookNothing, patient{writes: true}, patient{}},
		"takes no pieces": {func(e *side, r *raw) {
			r.listens()
			c := e.open(&wire.Done{}, ignore, func(error) {})
			e.loop.Call(func() {
				c.Link().Write(transport.Target{}, hostPlace(source, 0), 64<<10, 1, func(error) {})
				e.peer.underWay.Store(-1) // no wait for an acknowledgement either
			})
		}, errTookNothing, patient{}, patient{writes: true}},
		"acknowledges nothing": {func(e *side, r *raw) {
			r.listens()
			for _, c := range r.data {
				go func() { _, _ = io.Copy(io.Discard, c) }()
			}
			c := e.open(&wire.Done{}, ignore, func(error) {})
			e.loop.Call(func() { c.Link().Write(transport.Target{}, hostPlace(source, 0), 64<<10, 1, func(error) {}) })
		}, errUnacknowledged, patient{}, patient{}},
		"stops within a piece": {func(e *side, r *raw) {
			r.listens()
			e.granting(r, 3, make([]byte, 8<<10))
			p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: 8 << 10, bytes: rawPiece}
			_, _ = r.data[0].Write(append(p.header(), 1, 2, 3))
		}, errNoProgress, patient{}, patient{reads: true}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			noGoroutines(t)
			began := time.Now()
			next := c.control
			e, r := against(t, 2, config, func(conn net.Conn) net.Conn {
				p := next
				p.Conn, next = conn, c.data
				return p
			})
			c.play(e, r)
			err := e.died()
			var of *PeerError
			if !errors.Is(err, c.want) || !errors.As(err, &of) || of.Peer != config.Name || of.Route != "pipe to pipe" {
				t.Errorf("%v; want one with %v", err, c.want)
			}
			if wire.StatusOf(err) != wire.StatusPeerRelayDied {
				t.Errorf("status %v", wire.StatusOf(err))
			}
			if took := time.Since(began); took < config.silence() {
				t.Errorf("dead after %v", took)
			}
		})
	}
}

// granting makes the Peer accept a channel and grant a memory there, as number 1.
func (e *side) granting(r *raw, channel uint32, memory []byte) (arrived chan uint64, ended chan struct{}) {
	e.tb.Helper()
	arrived, ended = make(chan uint64, 100), make(chan struct{})
	ready := make(chan struct{})
	e.loop.Call(func() {
		e.peer.config.Accept = func(c *Channel, _ wire.Message, _ uint32) {
			in := c.Receive(func(immediate, _ uint64) { arrived <- immediate }, func() { close(ended) })
			in.add(1, memory)
			if err := in.Grant(1, 1, 0, uint64(len(memory))); err != nil {
				e.tb.Error(err)
			}
			close(ready)
		}
	})
	if err := r.say(channel, frameOpen, wire.Encode(&wire.Done{}, 0)); err != nil {
		e.tb.Fatal(err)
	}
	receive(e.tb, ready, "the channel")
	return arrived, ended
}

// TestHeartbeatsKeepIdlePeerAlive demands that any received byte restarts the time to the peer's
// death, and that an idle Peer sends heartbeats.
func TestHeartbeatsKeepIdlePeerAlive(t *testing.T) {
	ours, theirs := net.Pipe()
	c := &counted{Conn: theirs}
	newSide(t, &Streams{control: c, piece: rawPiece, ours: rawPiece}, Config{Heartbeat: time.Millisecond, Dead: time.Hour})
	defer ours.Close()
	header := make([]byte, frameHeader)
	for i := range 5 {
		if _, err := io.ReadFull(ours, header); err != nil {
			t.Fatal(err)
		}
		if f, _, err := nextFrame(header); err != nil || f.kind != frameBeat {
			t.Fatalf("%+v %v", f, err)
		}
		if _, err := ours.Write(appendFrame(nil, 0, frameBeat)); err != nil {
			t.Fatal(err)
		}
		testutil.Until(t, "a new deadline", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.deadlines) == i+2 })
	}
	for i, d := range c.deadlines {
		if i > 0 && !d.After(c.deadlines[i-1]) || time.Until(d) < time.Minute {
			t.Errorf("deadline %d is %v", i, d)
		}
	}
}

// TestPeerEndEndsEachChannelOnce demands that the end of either side, at any moment, ends each
// channel and each write once, with the peer, the place and the cause.
func TestPeerEndEndsEachChannelOnce(t *testing.T) {
	ends := map[string]struct {
		end       func(a, b *side)
		want      error         // nil for a failed connection
		heartbeat time.Duration // the end of a stream may precede the reason by as much
	}{
		"here":             {func(a, _ *side) { a.peer.Close() }, errClosed, time.Minute},
		"there":            {func(_, b *side) { b.peer.Close() }, &wire.Error{Status: wire.StatusPeerClosed}, time.Minute},
		"reset":            {func(_, b *side) { reset(b.peer.control) }, nil, 100 * time.Millisecond},
		"of a data stream": {func(_, b *side) { reset(b.peer.data[0]) }, nil, 100 * time.Millisecond},
	}
	for name, c := range ends {
		t.Run(name, func(t *testing.T) {
			noGoroutines(t)
			a, b := pair(t, loopback, 2, 64<<10, Config{Name: "node7", Heartbeat: c.heartbeat, Dead: time.Hour}, nil)
			ended := make(chan error, 10)
			source := make([]byte, 1<<20)
			for range 5 {
				ch := a.open(&wire.Done{}, ignore, func(err error) { ended <- err })
				_ = ch
			}
			testutil.Until(t, "channels that the other side left", func() bool { return len(ended) == 5 })
			for range 5 {
				<-ended
			}
			b.loop.Call(func() { b.peer.config.Accept = func(*Channel, wire.Message, uint32) {} })
			done := make(chan error, 20)
			for range 5 {
				ch := a.open(&wire.Done{}, ignore, func(err error) { ended <- err })
				a.loop.Call(func() { ch.Send(&wire.Done{}, 0) })
			}
			c.end(a, b)
			why := a.died()
			if c.want != nil && !errors.Is(why, c.want) {
				t.Errorf("%v; want %v", why, c.want)
			}
			var of *PeerError
			if c.want != errClosed && (!errors.As(why, &of) || of.Peer != "node7" || !strings.Contains(of.Route, "127.0.0.1")) {
				t.Errorf("%v does not have the other relay and the route", why)
			}
			for range 5 {
				if err := receive(t, ended, "a channel's end"); err != why {
					t.Errorf("%v, not %v", err, why)
				}
			}
			a.loop.Call(func() {
				if _, err := a.peer.Open(&wire.Done{}, 0, ignore, func(error) {}); err != why {
					t.Errorf("opening a channel of a dead peer: %v", err)
				}
				(&Channel{peer: a.peer}).Link().Write(transport.Target{}, hostPlace(source, 0), 1, 1,
					func(err error) { done <- err })
			})
			if err := receive(t, done, "a write to a dead peer"); err != why {
				t.Error(err)
			}
			b.died()
		})
	}
}

func reset(c net.Conn) {
	if z, is := c.(*zerocopyConn); is {
		c = z.TCPConn
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// TestWriteSourceIsReleasedAfterLastRead demands that the source of a write is free only when no
// goroutine reads it, also after the death of the Peer; an acknowledgement of the peer is not
// sufficient.
func TestWriteSourceIsReleasedAfterLastRead(t *testing.T) {
	for _, dies := range []bool{true, false} {
		noGoroutines(t)
		ours, theirs := net.Pipe()
		control, controls := net.Pipe()
		stuck := &counted{Conn: theirs, hold: make(chan struct{}), held: make(chan struct{}, 10)}
		r := (&raw{tb: t, control: control, data: []net.Conn{ours}, frames: make(chan frame, 100)}).listens()
		e := newSide(t, &Streams{control: controls, data: []net.Conn{stuck}, piece: rawPiece, ours: rawPiece},
			Config{Eager: -1, Heartbeat: 20 * time.Millisecond, Dead: time.Hour})
		c := e.open(&wire.Done{}, ignore, func(error) {})
		done := make(chan error, 1)
		e.loop.Call(func() {
			c.Link().Write(transport.Target{}, hostPlace(make([]byte, 100), 0), 100, 1, func(err error) { done <- err })
		})
		receive(t, stuck.held, "the piece to be sent")
		if dies {
			e.peer.Close()
		} else if err := r.say(c.number, frameLanded, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
			t.Fatal(err)
		} else {
			testutil.Until(t, "the other side's word", func() bool {
				said := false
				e.loop.Call(func() {
					e.peer.queue.mu.Lock()
					defer e.peer.queue.mu.Unlock()
					for _, w := range e.peer.writes {
						said = w.state >= writeAcked
					}
				})
				return said || len(done) > 0
			})
		}
		for range 10 {
			e.loop.Call(func() {})
			time.Sleep(time.Millisecond)
		}
		if len(done) > 0 {
			t.Errorf("dies %v: the write is done while its bytes are read", dies)
		}
		go func() { _, _ = io.Copy(io.Discard, ours) }()
		close(stuck.hold)
		if err := receive(t, done, "the write's end"); (err != nil) != dies {
			t.Errorf("dies %v: %v", dies, err)
		}
		r.close()
	}
}

// TestGrantedMemoryIsReleasedAfterLastWrite demands that granted memory is free only when no
// goroutine writes it.
func TestGrantedMemoryIsReleasedAfterLastWrite(t *testing.T) {
	noGoroutines(t)
	ours, theirs := net.Pipe()
	control, controls := net.Pipe()
	stuck := &counted{Conn: theirs, holdRead: make(chan struct{}), held: make(chan struct{}, 10)}
	r := (&raw{tb: t, control: control, data: []net.Conn{ours}, frames: make(chan frame, 100)}).listens()
	defer r.close()
	e := newSide(t, &Streams{control: controls, data: []net.Conn{stuck}, piece: rawPiece, ours: rawPiece},
		Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour})
	memory := make([]byte, rawPiece)
	_, ended := e.granting(r, 3, memory)
	p := piece{channel: 3, region: 1, number: 1, immediate: 1, length: rawPiece, bytes: rawPiece}
	if _, err := ours.Write(append(p.header(), 'a')); err != nil {
		t.Fatal(err)
	}
	receive(t, stuck.held, "the piece to land")
	e.peer.Close()
	for range 10 {
		e.loop.Call(func() {})
		time.Sleep(time.Millisecond)
	}
	select {
	case <-ended:
		t.Error("the memory is given back while a byte may land")
	default:
	}
	close(stuck.holdRead)
	receive(t, ended, "the end of the grants")
	if memory[0] != 'x' {
		t.Error("nothing landed")
	}
}

// TestChannelLeftWithinWriteLandsAll demands that a write arrives although a side closes the
// channel within the write; the channel ends, and the Peer continues.
func TestChannelLeftWithinWriteLandsAll(t *testing.T) {
	for name, leaves := range map[string]func(sender, receiver *Channel){
		"the receiver": func(_, receiver *Channel) { receiver.peer.loop.Call(receiver.Leave) },
		"the sender":   func(sender, _ *Channel) { sender.peer.loop.Call(sender.Leave) },
	} {
		t.Run(name, func(t *testing.T) {
			noGoroutines(t)
			const length = 64 << 10
			memory := make([]byte, length)
			dialed, accepted := greeted(t, pipes, 1, 8<<10)
			stuck := &counted{Conn: dialed.data[0], hold: make(chan struct{}), held: make(chan struct{}, 100)}
			dialed.data[0] = stuck
			opened, ended := make(chan *Channel, 2), make(chan struct{})
			config := Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour}
			a := newSide(t, dialed, config)
			config.Accept = func(c *Channel, _ wire.Message, _ uint32) {
				if c.number == 3 { // the first channel
					in := c.Receive(func(uint64, uint64) {}, func() { close(ended) })
					in.add(1, memory)
					if err := in.Grant(1, 1, 0, length); err != nil {
						t.Error(err)
					}
				}
				opened <- c
			}
			b := newSide(t, accepted, config)
			left := make(chan error, 1)
			c := a.open(&wire.Done{}, ignore, func(err error) { left <- err })
			theirs := receive(t, opened, "the channel")
			source := bytes.Repeat([]byte("lane"), length/4)
			done := make(chan error, 1)
			a.loop.Call(func() {
				c.Link().Write(transport.Target{Region: 1}, hostPlace(source, 0), length, 1, func(err error) { done <- err })
			})
			receive(t, stuck.held, "the first piece to be sent")
			leaves(c, theirs)
			if name == "the receiver" {
				if err := receive(t, left, "the receiver's leaving"); err != io.EOF {
					t.Error(err)
				}
			}
			// This message follows the messages about the close.
			a.open(&wire.Done{}, ignore, func(error) {})
			receive(t, opened, "a channel after it")
			select {
			case <-ended:
				t.Error("the grants end within the write")
			default:
			}
			close(stuck.hold)
			if err := receive(t, done, "the write's end"); err != nil {
				t.Error(err)
			}
			receive(t, ended, "the end of the grants")
			if !bytes.Equal(memory, source) {
				t.Error("other bytes have come")
			}
			for _, e := range []*side{a, b} {
				testutil.Until(t, "the channel to go", func() (gone bool) {
					e.loop.Call(func() { gone = e.peer.channels[c.number] == nil })
					return gone
				})
				if e.peer.isDying() {
					t.Error(e.died())
				}
			}
		})
	}
}

// TestSendLaterJoinsNextMessage demands that a message of SendLater shares a write with the next
// message, or is sent alone without one.
func TestSendLaterJoinsNextMessage(t *testing.T) {
	got := make(chan uint64, 10)
	dialed, accepted := greeted(t, loopback, 1, 0)
	a := newSide(t, dialed, Config{Heartbeat: time.Hour, Dead: 2 * time.Hour})
	newSide(t, accepted, Config{Heartbeat: time.Hour, Dead: 2 * time.Hour, Accept: func(c *Channel, _ wire.Message,
		_ uint32) {
		c.Handle(func(m wire.Message, _ uint32, _ []int) { got <- m.(*wire.PeerWritten).Grant }, func(error) {})
	}})
	c := a.open(&wire.Done{}, ignore, func(error) {})
	testutil.Until(t, "the first message", func() bool { return a.peer.Figures().Batches == 1 })
	a.loop.Call(func() {
		p := a.peer
		c.SendLater(&wire.PeerWritten{Grant: 1}, 0)
		p.since = p.loop.Now() // the iteration has just begun
		if p.pollSent() {
			t.Error("the first message goes out alone")
		}
		c.Send(&wire.PeerWritten{Grant: 2}, 0)
		if !p.pollSent() {
			t.Error("nothing goes out with the second message")
		}
		c.SendLater(&wire.PeerWritten{Grant: 3}, 0)
	})
	for i := range uint64(3) {
		if n := receive(t, got, "a message"); n != i+1 {
			t.Fatalf("message %d is %d", i+1, n)
		}
	}
	if f := a.peer.Figures(); f.Messages != 4 || f.Batches != 3 {
		t.Errorf("%d messages in %d writes, want 4 in 3", f.Messages, f.Batches)
	}
}
