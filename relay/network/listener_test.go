package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

// served is a listener of relay B.
type served struct {
	*Server
	at       netip.AddrPort
	sessions chan *Session
	refused  chan error
}

func serve(t *testing.T, b *Local, guests, ofASource int) *served {
	t.Helper()
	return serveAt(t, b, "127.0.0.1:0", guests, ofASource)
}

func serveAt(t *testing.T, b *Local, at string, guests, ofASource int) *served {
	t.Helper()
	listener, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	s := &served{
		at:       netip.MustParseAddrPort(listener.Addr().String()),
		sessions: make(chan *Session, 1024),
		refused:  make(chan error, 4096),
	}
	s.Server = &Server{
		Local: b, Admit: admitB, guests: guests, guestsOfASource: ofASource,
		Accept: func(session *Session) { s.sessions <- session },
		Refused: func(_ net.Addr, err error) {
			select {
			case s.refused <- err:
			default: // a test that has many of them
			}
		},
	}
	ended := make(chan struct{})
	go func() { defer close(ended); s.Serve(listener) }()
	t.Cleanup(func() {
		listener.Close()
		await(t, ended)
		for len(s.sessions) > 0 {
			(<-s.sessions).Conn.Close()
		}
	})
	return s
}

func await[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-testutil.After(time.Minute):
		t.Fatal("it did not come within a minute")
	}
	return v
}

// from connects from an address of this host.
func from(t *testing.T, source string, to netip.AddrPort) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
	conn, err := d.Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func isClosed(conn net.Conn) bool {
	_ = conn.SetReadDeadline(testutil.Deadline())
	_, err := conn.Read(make([]byte, 1))
	return err != nil && !isTimeout(err)
}

func TestDialReachesServingListener(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		a, b := relays(newKeys())
		s := serveAt(t, b, at, 0, 0)
		ours, err := a.Dial(t.Context(), toB, []netip.AddrPort{s.at})
		if err != nil {
			t.Fatal(err)
		}
		defer ours.Conn.Close()
		theirs := await(t, s.sessions)
		defer b.Expect(theirs)()
		stream, err := a.dialStream(t.Context(), ours, 7, s.at)
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Conn.Close()
		if joined := await(t, s.sessions); joined.Joined != theirs || joined.Stream != 7 ||
			joined.secretBytes() != stream.secretBytes() {
			t.Errorf("stream %d of %v", joined.Stream, joined.Joined)
		}
	}
}

// Dial reports an accepted connection before the handshake, and reports none without a listener.
func TestDialReportsAcceptedConnection(t *testing.T) {
	a, b := relays(newKeys())
	s := serve(t, b, 0, 0)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := netip.MustParseAddrPort(closed.Addr().String())
	closed.Close()
	met := 0
	ctx := context.WithValue(t.Context(), meeting{}, func() { met++ })
	if _, err := a.Dial(ctx, toB, []netip.AddrPort{nobody}); err == nil || met != 0 {
		t.Errorf("%v; %d were met", err, met)
	}
	if _, err := a.Dial(ctx, Target{Host: hostA}, []netip.AddrPort{s.at}); err == nil || met != 1 {
		t.Errorf("%v; %d were met", err, met)
	}
}

// An address where nobody listens does not keep from the next; no answer reveals the key.
func TestDialTriesEachAddress(t *testing.T) {
	a, b := relays(newKeys())
	s := serve(t, b, 0, 0)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := netip.MustParseAddrPort(closed.Addr().String())
	closed.Close()
	session, err := a.Dial(t.Context(), toB, []netip.AddrPort{nobody, s.at})
	if err != nil {
		t.Fatal(err)
	}
	session.Conn.Close()
	var failed *net.OpError
	if _, err := a.Dial(t.Context(), toB, []netip.AddrPort{nobody}); !errors.As(err, &failed) ||
		failed.Addr.String() != nobody.String() {
		t.Errorf("%v", err)
	}
	if _, err := a.Dial(t.Context(), toB, nil); !errors.Is(err, errNoAddress) {
		t.Errorf("%v", err)
	}
}

// A listener that had no room is asked again; one without the key a few times.
func TestDialRetriesRefusedHandshakes(t *testing.T) {
	a, b := relays(newKeys())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	at := []netip.AddrPort{netip.MustParseAddrPort(listener.Addr().String())}
	var closes, asked atomic.Int32
	closes.Store(2)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if asked.Add(1) > closes.Load() {
				go func() { _, _ = b.Respond(conn, admitB) }()
			} else {
				conn.Close()
			}
		}
	}()
	session, err := a.Dial(t.Context(), toB, at)
	if err != nil {
		t.Fatal(err)
	}
	session.Conn.Close()
	if asked.Load() != 3 {
		t.Errorf("it took %d times", asked.Load())
	}
	closes.Store(1000)
	asked.Store(0)
	if _, err = a.Dial(t.Context(), toB, at); !errors.Is(err, ErrSilent) || asked.Load() != dialTries {
		t.Errorf("%v after %d times", err, asked.Load())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err = a.Dial(ctx, toB, at); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	// Dial does not retry after a refusal with a reason.
	closes.Store(0)
	asked.Store(0)
	if _, err = a.Dial(t.Context(), Target{Host: hostB}, at); wire.StatusOf(err) != wire.StatusBadHandle ||
		asked.Load() != 1 {
		t.Errorf("%v after %d times", err, asked.Load())
	}
}

// A canceled Dial returns the context's error, and not ErrSilent.
func TestDialCanceledReturnsContextError(t *testing.T) {
	a, _ := relays(newKeys())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		_, _ = io.ReadFull(conn, make([]byte, helloSize))
		cancel()
		_, _ = io.Copy(io.Discard, conn) // until the other side closes
		conn.Close()
	}()
	_, err = a.Dial(ctx, toB, []netip.AddrPort{netip.MustParseAddrPort(listener.Addr().String())})
	var at *fault.Error
	if !errors.Is(err, context.Canceled) || errors.Is(err, ErrSilent) || !errors.As(err, &at) ||
		at.Object != fmt.Sprintf("at [%v]", listener.Addr()) {
		t.Error(err)
	}
	await(t, ended)
}

// Silent connections keep no host out, and never exceed the limits.
func TestSilentStrangersBlockNoHost(t *testing.T) {
	const all, ofASource, strangers = 8, 4, 100
	a, b := relays(newKeys())
	before := runtime.NumGoroutine()
	s := serve(t, b, all, ofASource)
	for n := range strangers {
		from(t, []string{"127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"}[n%4], s.at)
	}
	// Each that had to go was told to Refused, and has ended.
	for range strangers - all {
		if err := await(t, s.refused); !errors.Is(err, errCrowded) {
			t.Fatalf("%v", err)
		}
	}
	if n := runtime.NumGoroutine() - before; n > 3*all+4 {
		t.Errorf("%d goroutines for strangers, of whom %d may be there", n, all)
	}
	session, err := a.Dial(t.Context(), toB, []netip.AddrPort{s.at})
	if err != nil {
		t.Fatal(err)
	}
	session.Conn.Close()
}

// A source that is crowded loses its own oldest, not another's.
func TestListenerEvictsOldestHandshakeOfCrowdedSource(t *testing.T) {
	_, b := relays(newKeys())
	s := serve(t, b, 5, 3)
	honest := from(t, "127.0.0.9", s.at)
	var crowd []net.Conn
	for range 4 { // one too many of a source
		crowd = append(crowd, from(t, "127.0.0.2", s.at))
	}
	if !isClosed(crowd[0]) {
		t.Error("the oldest of a crowded source stays")
	}
	await(t, s.refused)
	other := from(t, "127.0.0.3", s.at) // five in all
	late := from(t, "127.0.0.4", s.at)  // six: the source that has most loses one
	if !isClosed(crowd[1]) {
		t.Error("the oldest of the source that has most stays")
	}
	await(t, s.refused)
	// The others are still waited for: the next to go is not one of them.
	from(t, "127.0.0.5", s.at)
	if !isClosed(crowd[2]) {
		t.Error("another had to go")
	}
	await(t, s.refused)
	for _, conn := range []net.Conn{honest, other, late, crowd[3]} {
		if _, err := conn.Write(helloOf(b.Keys().all()...)); err != nil {
			t.Errorf("%v", err)
		}
		if _, err := io.ReadFull(conn, make([]byte, answerSize)); err != nil {
			t.Errorf("who was not too many is not answered: %v", err)
		}
	}
}

// Every relay with the key connects, also if as many connect at once as a host may have.
func TestManyHostsAtOnceConnect(t *testing.T) {
	a, b := relays(newKeys())
	s := serve(t, b, 0, 0)
	var all sync.WaitGroup
	const many = 100
	for range many {
		all.Go(func() {
			session, err := a.Dial(t.Context(), toB, []netip.AddrPort{s.at})
			if err != nil {
				t.Error(err)
				return
			}
			session.Conn.Close()
		})
	}
	all.Wait()
	secrets := map[[32]byte]bool{}
	for range many {
		session := await(t, s.sessions)
		session.Conn.Close()
		secrets[session.secretBytes()] = true
	}
	if len(secrets) != many {
		t.Errorf("%d secrets for %d sessions", len(secrets), many)
	}
}

// A listener allocates at most 16 KiB for a hello of random bytes. TotalAlloc counts the
// whole process, so the test takes the least of several batches.
func TestRespondToNoiseAllocatesLittle(t *testing.T) {
	_, b := relays(rotated(t, newKeys()))
	noise := make([]byte, helloSize)
	const strangers, batches = 100, 5
	least := uint64(math.MaxUint64)
	for range batches {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range strangers {
			if _, err := b.Respond(prepared(noise), admitB); err == nil {
				t.Fatal("Respond accepted a hello of random bytes")
			}
		}
		runtime.ReadMemStats(&after)
		least = min(least, (after.TotalAlloc-before.TotalAlloc)/strangers)
	}
	if least > 16<<10 {
		t.Errorf("Respond allocates %d bytes for a hello of random bytes, more than 16 KiB", least)
	}
}

// The end of a listener is the end of all that is in a handshake.
func TestServeEndClosesHandshakes(t *testing.T) {
	_, b := relays(newKeys())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	begun := make(chan error, 2)
	s := &Server{Local: b, Admit: admitB, Accept: func(*Session) {}, Refused: func(_ net.Addr, err error) { begun <- err }}
	ended := make(chan struct{})
	go func() { defer close(ended); s.Serve(listener) }()
	silent := from(t, "127.0.0.1", netip.MustParseAddrPort(listener.Addr().String()))
	noisy := from(t, "127.0.0.1", netip.MustParseAddrPort(listener.Addr().String()))
	if _, err := noisy.Write(make([]byte, helloSize)); err != nil {
		t.Fatal(err)
	}
	await(t, begun) // so the test waits for the earlier silent connection
	listener.Close()
	await(t, ended)
	if !isClosed(silent) {
		t.Error("who was silent is still connected")
	}
}

func TestSourceOfAddressIsItsPrefix(t *testing.T) {
	for _, c := range []struct {
		one, other string
		same       bool
	}{
		{"10.0.0.1", "10.0.0.1", true}, {"10.0.0.1", "10.0.0.2", false}, {"::ffff:10.0.0.1", "10.0.0.1", true},
		{"2001:db8::1", "2001:db8::ffff:1", true}, {"2001:db8::1", "2001:db8:0:1::1", false},
	} {
		at := func(ip string) netip.Addr { return source(&net.TCPAddr{IP: net.ParseIP(ip), Port: 1}) }
		if (at(c.one) == at(c.other)) != c.same {
			t.Errorf("%s and %s are one source: %v", c.one, c.other, !c.same)
		}
	}
}

// A connection closed after a proof, as by a race's loser, differs from a refusal; a connection
// without a proof does not.
func TestClosedAfterProofDiffersFromRefusal(t *testing.T) {
	a, b := relays(newKeys())
	s := serve(t, b, 0, 0)
	nowhere := Greeting{host: hostA, Target: Target{Host: hostB}, purpose: purposeConnect, oldest: 1, newest: 3}
	for name, c := range map[string]struct {
		play func(net.Conn)
		left bool
	}{
		"without a word":    {func(net.Conn) {}, false},
		"within its hello":  {func(conn net.Conn) { _, _ = conn.Write(make([]byte, helloSize/2)) }, false},
		"without the key":   {func(conn net.Conn) { _, _ = conn.Write(make([]byte, helloSize)) }, false},
		"before the answer": {func(conn net.Conn) { _, _ = conn.Write(helloOf(a.Keys().all()...)) }, true},
		"after a reset": {func(conn net.Conn) {
			_, _ = conn.Write(helloOf(a.Keys().all()...))
			_ = conn.(*net.TCPConn).SetLinger(0)
		}, true},
		"within the answer": {func(conn net.Conn) { greetAndRead(conn, a, 1) }, true},
		"after the answer":  {func(conn net.Conn) { greetAndRead(conn, a, answerSize) }, true},
		"with a wrong request": {func(conn net.Conn) {
			greetAndRead(conn, a, answerSize)
			_, _ = conn.Write(make([]byte, requestSize))
		}, false},
		"for a listener that is not": {func(conn net.Conn) { _ = ask(conn, a.Keys(), nowhere.bytes()) }, false},
	} {
		conn := from(t, "127.0.0.1", s.at)
		c.play(conn)
		conn.Close()
		if err := await(t, s.refused); Left(err) != c.left {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// greetAndRead says a hello, and reads so much of the answer.
func greetAndRead(conn net.Conn, a *Local, n int) {
	_, _ = conn.Write(helloOf(a.Keys().all()...))
	_, _ = io.ReadFull(conn, make([]byte, n))
}
