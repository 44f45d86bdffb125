package network

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

var (
	hostA, hostB = wire.UUID{1}, wire.UUID{2}
	toB          = Target{Host: hostB, Token: wire.UUID{0x70}}
)

// patience is a handshake's limit where the test is not about it.
const patience = time.Minute

// relays are two of different hosts with the same key.
func relays(keys Keys) (a, b *Local) {
	a = &Local{Host: hostA, Name: "relay A", Oldest: 1, Newest: 3, Keys: func() Keys { return keys }, Time: patience}
	b = &Local{Host: hostB, Name: "relay B", Oldest: 1, Newest: 3, Keys: func() Keys { return keys }, Time: patience}
	return a, b
}

func newKeys() Keys { return Keys{Current: NewKey(someDay)} }

// admitB admits whom toB names.
func admitB(g Greeting) error {
	if g.Target != toB {
		return wire.Errorf(wire.StatusBadHandle, "no such listener")
	}
	return nil
}

type outcome struct {
	session *Session
	err     error
}

// shake has both sides do their handshake; a side that fails closes its connection, as
// users of the package do.
func shake(initiate, respond func() (*Session, error), ours, theirs net.Conn) (initiator, listener outcome) {
	done := make(chan outcome)
	side := func(conn net.Conn, do func() (*Session, error)) (o outcome) {
		if o.session, o.err = do(); o.err != nil {
			o.session = nil
			conn.Close()
		}
		return o
	}
	go func() { done <- side(theirs, respond) }()
	initiator = side(ours, initiate)
	return initiator, <-done
}

// meet is shake of a with b over a pipe.
func meet(a, b *Local) (initiator, listener outcome) {
	ours, theirs := net.Pipe()
	return shake(
		func() (*Session, error) { return a.Initiate(ours, toB) },
		func() (*Session, error) { return b.Respond(theirs, admitB) },
		ours,
		theirs,
	)
}

// tcp is a connection over this host's loopback.
func tcp(t testing.TB, network, at string) (ours, theirs net.Conn) {
	t.Helper()
	listener, err := net.Listen(network, at)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if ours, err = net.Dial(network, listener.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if theirs, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return ours, theirs
}

func agreed(t *testing.T, initiator, listener outcome) (a, b *Session) {
	t.Helper()
	if initiator.err != nil || listener.err != nil {
		t.Fatalf("initiator %v, listener %v", initiator.err, listener.err)
	}
	a, b = initiator.session, listener.session
	if a.secretBytes() != b.secretBytes() || a.secretBytes() == [32]byte{} || a.version != b.version ||
		a.Target != b.Target ||
		a.Stream != b.Stream {
		t.Fatalf("the two sides of a session differ: %v version %d, %v version %d", a, a.version, b, b.version)
	}
	return a, b
}

func TestHandshakeBetweenTwoHostsSucceeds(t *testing.T) {
	keys := newKeys()
	var before [32]byte
	for _, c := range []struct {
		name string
		pair func(t *testing.T) (net.Conn, net.Conn)
	}{
		{"pipe", func(*testing.T) (net.Conn, net.Conn) { return net.Pipe() }},
		{"IPv4", func(t *testing.T) (net.Conn, net.Conn) { return tcp(t, "tcp4", "127.0.0.1:0") }},
		{"IPv6", func(t *testing.T) (net.Conn, net.Conn) { return tcp(t, "tcp6", "[::1]:0") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := relays(keys)
			ours, theirs := c.pair(t)
			var asked Greeting
			i, l := shake(func() (*Session, error) { return a.Initiate(ours, toB) }, func() (*Session, error) {
				return b.Respond(theirs, func(g Greeting) error { asked = g; return nil })
			}, ours, theirs)
			sa, sb := agreed(t, i, l)
			if sa.secretBytes() == before {
				t.Error("two sessions have one secret")
			}
			before = sa.secretBytes()
			if asked.host != hostA || asked.Name != "relay A" || asked.Target != toB || asked.Joined != nil {
				t.Errorf("the listener was asked by %+v", asked)
			}
			if sa.Host != hostB || sb.Host != hostA || !strings.HasPrefix(sa.Peer, "relay B at ") ||
				!strings.HasPrefix(sb.Peer, "relay A at ") ||
				sa.version != 3 {
				t.Errorf("initiator %q version %d, listener %q", sa.Peer, sa.version, sb.Peer)
			}
			// The following bytes belong to the user.
			go func() { _, _ = sa.Conn.Write([]byte("first bytes")) }()
			got := make([]byte, 11)
			if _, err := io.ReadFull(sb.Conn, got); err != nil || string(got) != "first bytes" {
				t.Errorf("%q, %v after the handshake", got, err)
			}
		})
	}
}

func TestHandshakeVersionsAreNegotiated(t *testing.T) {
	for _, c := range []struct {
		a, b [2]uint32
		want uint32 // 0 for none
	}{
		{[2]uint32{1, 3}, [2]uint32{1, 3}, 3}, {[2]uint32{1, 1}, [2]uint32{1, 3}, 1}, {[2]uint32{1, 3}, [2]uint32{1, 2}, 2},
		{[2]uint32{2, 3}, [2]uint32{1, 2}, 2}, {[2]uint32{3, 4}, [2]uint32{1, 2}, 0}, {[2]uint32{1, 2}, [2]uint32{3, 4}, 0},
	} {
		a, b := relays(newKeys())
		a.Oldest, a.Newest, b.Oldest, b.Newest = c.a[0], c.a[1], c.b[0], c.b[1]
		i, l := meet(a, b)
		if c.want != 0 {
			if s, _ := agreed(t, i, l); s.version != c.want {
				t.Errorf("%v and %v agreed on %d", c.a, c.b, s.version)
			}
			continue
		}
		for want, err := range map[versionsError]error{{peer: "relay B", theirs: c.b, ours: c.a}: i.err,
			{peer: "relay A", theirs: c.a, ours: c.b}: l.err} {
			if wire.StatusOf(err) != wire.StatusVersion || !testutil.HasError(err, &want) {
				t.Errorf("%v and %v: %v", c.a, c.b, err)
			}
		}
	}
}

func TestListenerRefusesInvalidHandshakes(t *testing.T) {
	for _, c := range []struct {
		admit  error
		host   wire.UUID
		status wire.Status
	}{
		{nil, wire.UUID{9}, wire.StatusBadHandle},
		{wire.Errorf(wire.StatusBadHandle, "no such listener"), hostB, wire.StatusBadHandle},
		{wire.Errorf(wire.StatusLimit, "full"), hostB, wire.StatusLimit},
	} {
		a, b := relays(newKeys())
		ours, theirs := net.Pipe()
		i, l := shake(func() (*Session, error) { return a.Initiate(ours, Target{Host: c.host, Token: toB.Token}) },
			func() (*Session, error) { return b.Respond(theirs, func(Greeting) error { return c.admit }) }, ours, theirs)
		if wire.StatusOf(i.err) != c.status || wire.StatusOf(l.err) != c.status {
			t.Errorf("%v: initiator %v, listener %v; want %v", c.admit, i.err, l.err, c.status)
		}
	}
}

// helloOf is a hello for one or two keys.
func helloOf(keys ...Key) []byte {
	hello, _ := newHello(keys, rand.Reader)
	return hello
}

// counted counts read and written bytes of a connection.
type counted struct {
	net.Conn
	read, written int
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.read += n
	return n, err
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.written += n
	return n, err
}

// A stranger sees a closing connection, after at most 512 bytes.
func TestStrangerLearnsNothingFromListener(t *testing.T) {
	keys := rotated(t, newKeys())
	wrong := NewKey(someDay)
	noise := make([]byte, 4096)
	_, _ = rand.Read(noise)
	forged := wrong // the right id on a wrong secret
	forged.ID = keys.Current.ID
	changed := helloOf(keys.all()...)
	changed[ephemeralBytes-1] ^= 1
	for _, c := range []struct {
		name string
		say  []byte
	}{
		{"nothing", nil}, {"one byte", noise[:1]}, {"half a hello", helloOf(keys.all()...)[:helloSize-1]},
		{"noise", noise[:helloSize]}, {"much noise", noise},
		{"a request of HTTP", []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat("x", 400))},
		{"zeros", make([]byte, helloSize)},
		{"another key", helloOf(wrong)}, {"another key under this one's id", helloOf(forged, forged)},
		{"another ephemeral key", changed},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, b := relays(keys)
			stranger, theirs := net.Pipe()
			conn := &counted{Conn: theirs}
			go func() {
				_, _ = stranger.Write(c.say) // fails on a partial read
				if len(c.say) < helloSize {
					stranger.Close()
				}
			}()
			s, err := b.Respond(conn, func(Greeting) error { t.Error("it was admitted"); return nil })
			stranger.Close()
			if s != nil || !errors.Is(err, ErrStranger) {
				t.Errorf("%v, %v", s, err)
			}
			if conn.written != 0 || conn.read > 512 {
				t.Errorf("%d bytes were told to it, %d read", conn.written, conn.read)
			}
		})
	}
}

// The listener does not wait for a slow stranger.
func TestSlowStrangerIsDisconnected(t *testing.T) {
	_, b := relays(newKeys())
	b.Time = 100 * time.Millisecond
	stranger, theirs := net.Pipe()
	ended := make(chan struct{})
	go func() {
		for {
			if _, err := stranger.Write([]byte{0}); err != nil {
				return
			}
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	_, err := b.Respond(theirs, admitB)
	close(ended)
	theirs.Close()
	if !errors.Is(err, ErrStranger) || !isTimeout(err) {
		t.Errorf("%v", err)
	}
}

// A rogue listener, a proxy, another service: the initiator says one hello, in which
// there is nothing to read, and no more.
func TestListenerWithoutKeyGetsOneHello(t *testing.T) {
	wrong, _ := relays(newKeys())
	for _, c := range []struct {
		name   string
		answer func(hello []byte) []byte
		silent bool
	}{
		{"noise", func([]byte) []byte { b := make([]byte, answerSize); _, _ = rand.Read(b); return b }, false},
		{"its own hello", func(hello []byte) []byte { return hello[:answerSize] }, false},
		{"another key", func([]byte) []byte {
			hello, _ := newHello(wrong.Keys().all(), rand.Reader)
			state, _, err := wrong.openHello(hello)
			if err != nil {
				panic(err)
			}
			answer, _, err := newAnswer(state, hello)
			if err != nil {
				panic(err)
			}
			return answer
		}, false},
		{"a key of low order", func([]byte) []byte { return make([]byte, answerSize) }, false},
		{"half an answer", func(hello []byte) []byte { return hello[:answerSize-1] }, false},
		{"nothing", func([]byte) []byte { return nil }, true},
		{"the end before a hello", nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			keys := newKeys()
			a, _ := relays(keys)
			ours, rogue := net.Pipe()
			conn := &counted{Conn: ours}
			if c.answer == nil {
				rogue.Close()
				if s, err := a.Initiate(conn, toB); s != nil || !errors.Is(err, ErrSilent) {
					t.Errorf("%v, %v", s, err)
				}
				return
			}
			go func() {
				hello := make([]byte, helloSize)
				if _, err := io.ReadFull(rogue, hello); err != nil {
					t.Error(err)
				}
				for _, secret := range [][]byte{toB.Token[:4], []byte("relay A"), hostA[:4]} {
					if bytes.Contains(hello, secret) {
						t.Errorf("a hello shows %q", secret)
					}
				}
				_, _ = rogue.Write(c.answer(hello))
				rogue.Close()
			}()
			s, err := a.Initiate(conn, toB)
			if s != nil || err == nil || errors.Is(err, ErrSilent) != c.silent {
				t.Errorf("%v, %v", s, err)
			}
			if conn.written != helloSize {
				t.Errorf("%d bytes were said, a hello has %d", conn.written, helloSize)
			}
		})
	}
}

// Messages, in their order.
var sizes = []int{helloSize, answerSize, requestSize, welcomeSize}

// between connects a and b through an attacker, who passes on the result of alter for every
// message: a shortened message is the last.
func between(a, b *Local, alter func(n int, message []byte) []byte) (initiator, listener outcome) {
	ours, left := net.Pipe()
	right, theirs := net.Pipe()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		defer left.Close()
		defer right.Close()
		ways := [][2]net.Conn{{left, right}, {right, left}, {left, right}, {right, left}}
		for n, way := range ways {
			message := make([]byte, sizes[n])
			if _, err := io.ReadFull(way[0], message); err != nil {
				return
			}
			passed := alter(n, message)
			if _, err := way[1].Write(passed); err != nil || len(passed) < sizes[n] {
				return
			}
		}
	}()
	initiator, listener = shake(
		func() (*Session, error) { return a.Initiate(ours, toB) },
		func() (*Session, error) { return b.Respond(theirs, admitB) },
		ours,
		theirs,
	)
	<-gone
	return initiator, listener
}

func asItIs(_ int, message []byte) []byte { return message }

// After a change of any byte the initiator has no session, and the listener has a session only
// after a change in the last message.
func TestHandshakeWithChangedByteFails(t *testing.T) {
	for _, tt := range []struct {
		keys Keys
		step int // with two keys the same code reads the same bytes: some suffice
	}{{newKeys(), 1}, {rotated(t, newKeys()), 16}} {
		a, b := relays(tt.keys)
		for n, size := range sizes {
			for at := 0; at < size; at += tt.step {
				i, l := between(a, b, func(message int, text []byte) []byte {
					if message == n {
						text[at] ^= 0x40
					}
					return text
				})
				if i.err == nil || l.err == nil && n < 3 {
					t.Errorf("byte %d of message %d was changed: initiator %v, listener %v", at, n, i.err, l.err)
				}
			}
		}
		i, l := between(a, b, asItIs)
		agreed(t, i, l)
	}
}

func TestTruncatedHandshakeFails(t *testing.T) {
	a, b := relays(newKeys())
	for n, size := range sizes {
		for length := range size {
			i, l := between(a, b, func(message int, text []byte) []byte {
				if message == n {
					text = text[:length]
				}
				return text
			})
			if i.err == nil || l.err == nil && n < 3 {
				t.Errorf("message %d ended after %d bytes: initiator %v, listener %v", n, length, i.err, l.err)
			}
		}
	}
}

// Recorded messages of a handshake are useless in a second handshake.
func TestHandshakeReplayIsRefused(t *testing.T) {
	a, b := relays(newKeys())
	var recorded [4][]byte
	i, l := between(a, b, func(n int, message []byte) []byte {
		recorded[n] = slices.Clone(message)
		return message
	})
	agreed(t, i, l)
	for set := 1; set < 1<<len(sizes); set++ {
		i, l := between(a, b, func(n int, message []byte) []byte {
			if set>>n&1 != 0 {
				return recorded[n]
			}
			return message
		})
		if i.err == nil || l.err == nil && set != 1<<3 {
			t.Errorf("messages %04b of another conversation: initiator %v, listener %v", set, i.err, l.err)
		}
	}
	// By somebody who has nothing else.
	stranger, theirs := net.Pipe()
	go func() {
		_, _ = stranger.Write(recorded[0])
		_, _ = io.ReadFull(stranger, make([]byte, answerSize))
		_, _ = stranger.Write(recorded[2])
	}()
	if s, err := b.Respond(theirs, admitB); s != nil || !errors.Is(err, ErrStranger) {
		t.Errorf("a conversation that was recorded: %v, %v", s, err)
	}
}

// A replayed hello reveals nothing about the listener.
func TestReplayedHelloLearnsNothing(t *testing.T) {
	a, b := relays(newKeys())
	var hello []byte
	i, l := between(a, b, func(n int, message []byte) []byte {
		if n == 0 {
			hello = slices.Clone(message)
		}
		return message
	})
	agreed(t, i, l)
	for name, admit := range map[string]func(Greeting) error{"there": admitB, "gone": func(Greeting) error {
		return wire.Errorf(wire.StatusBadHandle, "no such listener")
	}} {
		admit := func(g Greeting) error { t.Error("it was admitted"); return admit(g) }
		stranger, theirs := net.Pipe()
		conn := &counted{Conn: theirs}
		said := make(chan error, 1)
		go func() {
			_, err := stranger.Write(hello)
			if err == nil {
				_, err = io.ReadFull(stranger, make([]byte, answerSize))
			}
			if err == nil {
				_, err = stranger.Write(make([]byte, requestSize))
			}
			said <- err
		}()
		_, err := b.Respond(conn, admit)
		theirs.Close()
		if said := <-said; said != nil || err == nil || conn.written != answerSize || conn.read != helloSize+requestSize {
			t.Errorf("a listener that is %s: %v, %v after %d bytes; %d were told", name, err, said, conn.read, conn.written)
		}
	}
}

// Messages of concurrent handshakes cannot be exchanged.
func TestSplicedHandshakesAreRefused(t *testing.T) {
	for n := range sizes {
		a, b := relays(newKeys())
		one, other := make(chan []byte, 1), make(chan []byte, 1)
		swap := func(give, take chan []byte) func(int, []byte) []byte {
			return func(message int, text []byte) []byte {
				if message != n {
					return text
				}
				give <- text
				return <-take
			}
		}
		first := make(chan [2]outcome)
		go func() {
			i, l := between(a, b, swap(one, other))
			first <- [2]outcome{i, l}
		}()
		i, l := between(a, b, swap(other, one))
		for _, c := range [][2]outcome{{i, l}, <-first} {
			// Swapped hellos make two crossed handshakes, in which a side cannot read the answer.
			if c[0].err == nil || c[1].err == nil && n < 3 {
				t.Errorf("message %d swapped: initiator %v, listener %v", n, c[0].err, c[1].err)
			}
		}
	}
}

// A relay does not trust reflected messages.
func TestReflectedHandshakeIsRefused(t *testing.T) {
	a, _ := relays(newKeys())
	i, l := between(a, a, asItIs) // a's hello, which is for b, at a's own listener
	if wire.StatusOf(i.err) != wire.StatusBadHandle || wire.StatusOf(l.err) != wire.StatusBadHandle {
		t.Errorf("initiator %v, listener %v", i.err, l.err)
	}
}

// A rotation may reach the hosts of a cluster in any order.
func TestKeyRotationInAnyOrderKeepsHandshakes(t *testing.T) {
	old := newKeys()
	both := rotated(t, old)
	last := finished(t, both)
	next := rotated(t, last)
	for _, c := range []struct {
		name string
		a, b Keys
		meet bool
	}{
		{"before", old, old, true},
		{"the initiator was told", both, old, true},
		{"the listener was told", old, both, true},
		{"both were told", both, both, true},
		{"the initiator has finished", last, both, true},
		{"the listener has finished", both, last, true},
		{"both have finished", last, last, true},
		{"the initiator was told of another", next, last, true},
		{"finished where the listener was not told", last, old, false},
		{"finished where the initiator was not told", old, last, false},
		{"two rotations", next, old, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := relays(c.a)
			b.Keys = func() Keys { return c.b }
			i, l := meet(a, b)
			if c.meet {
				agreed(t, i, l)
			} else if !errors.Is(i.err, ErrSilent) || !errors.Is(l.err, ErrStranger) {
				t.Errorf("initiator %v, listener %v", i.err, l.err)
			}
		})
	}
}

func TestStreamOfSessionAuthenticates(t *testing.T) {
	keys := newKeys()
	a, b := relays(keys)
	i, l := meet(a, b)
	sa, sb := agreed(t, i, l)
	join := func(s *Session, stream uint32) (initiator, listener outcome) {
		ours, theirs := net.Pipe()
		return shake(func() (*Session, error) { return a.join(ours, s, stream) }, func() (*Session, error) {
			return b.Respond(theirs, func(g Greeting) error {
				if g.Joined != sb {
					return wire.Errorf(wire.StatusBadHandle, "stream %d of %v", g.Stream, g.Joined)
				}
				return nil
			})
		}, ours, theirs)
	}
	refused := func(what string, i, l outcome) {
		t.Helper()
		if i.err == nil || l.err == nil {
			t.Errorf("%s: initiator %v, listener %v", what, i.err, l.err)
		}
	}
	i, l = join(sa, 1)
	refused("nobody expects it", i, l)
	forget := b.Expect(sb)
	secrets := map[[32]byte]bool{sa.secretBytes(): true}
	for stream := range uint32(3) {
		i, l := join(sa, stream)
		ja, jb := agreed(t, i, l)
		if jb.Joined != sb || ja.Joined != sa || jb.Stream != stream || secrets[ja.secretBytes()] {
			t.Errorf("stream %d: %v of %v", jb.Stream, jb, jb.Joined)
		}
		secrets[ja.secretBytes()] = true
	}
	// The cluster's rotation is not the session's.
	b.Keys = newKeys
	i, l = join(sa, 5)
	agreed(t, i, l)
	b.Keys = func() Keys { return keys }
	stranger := *sa
	secret := sa.secretBytes()
	secret[0] ^= 1
	stranger.secret = func() [32]byte { return secret }
	i, l = join(&stranger, 1)
	refused("another session", i, l)
	elsewhere := *sa
	elsewhere.Target.Token[0] ^= 1
	i, l = join(&elsewhere, 1)
	refused("for another listener", i, l)
	// The cluster key alone joins nothing, and a session's key begins no session.
	a.TLS = &tls.Config{InsecureSkipVerify: true} // this side would use TLS if permitted
	for _, c := range []struct {
		what string
		key  Key
		g    Greeting
	}{
		{"the cluster key", keys.Current, Greeting{purpose: purposeJoin, Target: toB}},
		{"a session's key", sa.joinKey(), Greeting{purpose: purposeConnect, Target: toB}},
		// Nor is there TLS on a stream, nor a number of a session.
		{"a stream with TLS", sa.joinKey(), Greeting{purpose: purposeJoin, Target: toB, Stream: 7, tls: true}},
		{"a session with a number", keys.Current, Greeting{purpose: purposeConnect, Target: toB, Stream: 7}},
	} {
		ours, theirs := net.Pipe()
		i, l = shake(func() (*Session, error) { return a.initiate(ours, []Key{c.key}, c.g) },
			func() (*Session, error) { return b.Respond(theirs, func(Greeting) error { return nil }) }, ours, theirs)
		refused(c.what, i, l)
	}
	forget()
	i, l = join(sa, 6)
	refused("it was forgotten", i, l)
}

// A name that is cut within a letter, or has a terminal's codes, hurts nobody.
func TestForeignNamesAreSanitised(t *testing.T) {
	a, b := relays(newKeys())
	a.Name, b.Name = strings.Repeat("ü", 100), "\x1b[2J"
	i, l := meet(a, b)
	sa, sb := agreed(t, i, l)
	if strings.Contains(sa.Peer, "\x1b") || len(sb.Peer) > 100 || !strings.HasPrefix(sb.Peer, "üüü") {
		t.Errorf("%q, %q", sa.Peer, sb.Peer)
	}
}

// recording is a connection that was prepared: recording reads the given bytes, and counts written
// bytes.
type recording struct {
	bytes.Reader
	written int
}

func (r *recording) Write(p []byte) (int, error)      { r.written += len(p); return len(p), nil }
func (*recording) Close() error                       { return nil }
func (*recording) LocalAddr() net.Addr                { return &net.TCPAddr{} }
func (*recording) RemoteAddr() net.Addr               { return &net.TCPAddr{} }
func (*recording) SetDeadline(time.Time) error        { return nil }
func (*recording) SetReadDeadline(t time.Time) error  { return nil }
func (*recording) SetWriteDeadline(t time.Time) error { return nil }

func prepared(parts ...[]byte) *recording {
	r := &recording{}
	r.Reset(slices.Concat(parts...))
	return r
}

// Nothing that strangers say is answered; a request of a relay that has the key and that
// makes no sense is refused, or answered with a welcome that is no session.
func FuzzListener(f *testing.F) {
	g := Greeting{
		host:    hostA,
		Target:  Target{Host: hostB, Token: wire.UUID{9}},
		Name:    "x",
		purpose: purposeConnect,
		oldest:  1,
		newest:  3,
	}
	keys := Keys{Current: keyOf([keyBytes]byte{1}, someDay)}
	f.Add(helloOf(keys.Current), false)
	f.Add(version1Hello(keys.Current, &g), false)
	f.Add(g.bytes(), true)
	g.oldest, g.newest = 4, 5
	f.Add(g.bytes(), true)
	g.purpose, g.tls = purposeJoin, true
	f.Add(g.bytes(), true)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), false)
	f.Add(make([]byte, helloSize), false)
	_, b := relays(keys)
	f.Fuzz(func(t *testing.T, text []byte, authentic bool) {
		if !authentic {
			conn := prepared(text)
			s, err := b.Respond(conn, admitB)
			if s != nil || err == nil {
				t.Fatalf("%v, %v", s, err)
			}
			known := false
			if len(text) >= helloSize {
				for _, slot := range slots(text) {
					known = known || slot.id == keys.Current.ID
				}
			}
			if conn.written > 0 && !known || conn.written > ephemeralBytes+welcomeSize {
				t.Errorf("%d bytes were answered", conn.written)
			}
			return
		}
		ours, theirs := net.Pipe()
		answered := make(chan error, 1)
		go func() { answered <- ask(ours, keys, text) }()
		s, err := b.Respond(theirs, admitB)
		theirs.Close()
		if err := <-answered; err != nil && len(text) == requestBytes {
			t.Error(err)
		}
		g, bad := parseHello(text)
		if sound := bad == nil && g.Target == toB && g.purpose == purposeConnect && !g.tls && g.oldest <= 3 &&
			g.newest >= 1; (err == nil) != sound {
			t.Errorf("%v, %v of %+v (%v)", s, err, g, bad)
		}
	})
}

// ask runs the initiator's side of a handshake with an arbitrary request, and reads the answer.
func ask(conn net.Conn, keys Keys, request []byte) error {
	defer conn.Close()
	hello, states := newHello(keys.all(), rand.Reader)
	if _, err := conn.Write(hello); err != nil {
		return err
	}
	answer := make([]byte, answerSize)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	c, err := openAnswer(states, hello, answer)
	if err != nil {
		return err
	}
	if _, err := conn.Write(c.seal(request)); err != nil {
		return err
	}
	if len(request) >= requestBytes {
		_, err = io.Copy(io.Discard, conn)
	}
	return err
}

// An initiator believes no welcome that makes no sense, and none that strangers give.
func FuzzInitiator(f *testing.F) {
	w := welcome{version: 3, oldest: 1, newest: 3, host: hostB, name: "x"}
	keys := Keys{Current: keyOf([keyBytes]byte{1}, someDay)}
	f.Add(w.bytes(), true)
	w.version = 2
	f.Add(w.bytes(), true)
	w.outcome = outcomeLimit
	f.Add(w.bytes(), true)
	f.Add(make([]byte, answerSize), false)
	f.Add([]byte("SSH-2.0-x\r\n"), false)
	w = welcome{version: 4, oldest: 1, newest: 4, host: hostB} // no common version
	f.Add(w.bytes(), true)
	w = welcome{version: 2, oldest: 1, newest: 3, host: hostB} // older than both speak
	f.Add(w.bytes(), true)
	w = welcome{version: 3, oldest: 1, newest: 3, host: hostA} // another host
	f.Add(w.bytes(), true)
	a, b := relays(keys)
	f.Fuzz(func(t *testing.T, text []byte, authentic bool) {
		ours, theirs := net.Pipe()
		defer ours.Close()
		go func() {
			defer theirs.Close()
			hello := make([]byte, helloSize)
			if _, err := io.ReadFull(theirs, hello); err != nil {
				return
			}
			if !authentic {
				_, _ = theirs.Write(text) // an overlong message is not read
				return
			}
			state, _, err := b.openHello(hello)
			if err != nil {
				return
			}
			answer, c, err := newAnswer(state, hello)
			if err != nil {
				return
			}
			if _, err := theirs.Write(answer); err != nil {
				return
			}
			request := make([]byte, requestSize)
			if _, err := io.ReadFull(theirs, request); err != nil {
				return
			}
			if _, err := c.open(request); err != nil {
				return
			}
			_, _ = theirs.Write(c.seal(text))
		}()
		s, err := a.Initiate(ours, toB)
		switch {
		case err == nil && !authentic:
			t.Fatalf("%v believes a stranger", s)
		case err == nil && (s.version != min(3, binary.LittleEndian.Uint32(text[12:])) || s.Host != hostB):
			t.Errorf("version %d of host %v", s.version, s.Host)
		}
	})
}
