package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

// Limits of the connections that have not proven a key. A guest takes a descriptor, a goroutine and
// a few KiB, for HandshakeTime at most. Up to maxGuests further connections may have proven a key
// without the end of the handshake.
const (
	maxGuests          = 256 // in all
	maxGuestsOfASource = 128 // of one IPv4 address, or one IPv6 network of 64 bits
)

// Server accepts connections on a listener, and does the handshakes.
type Server struct {
	Local *Local
	// Admit is Respond's; many goroutines call the function.
	Admit func(Greeting) error
	// Accept takes a session over, and has to return soon. Streams of the session before the call
	// of Local.Expect are refused.
	Accept func(*Session)
	// Refused is called for every failed connection. Strangers can cause any number of calls: the
	// callback must limit its log.
	Refused func(from net.Addr, err error)
	// guests and guestsOfASource replace maxGuests and maxGuestsOfASource if
	// not 0.
	guests, guestsOfASource int
}

// Left reports whether the error means that the remote side has closed the connection. A remote
// side with a proven key has usually won by a different address (Race).
func Left(err error) bool {
	return !errors.Is(err, ErrStranger) &&
		(errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.ECONNRESET) ||
			errors.Is(err, unix.EPIPE))
}

// errCrowded is why a guest had to go.
var errCrowded = errors.New("it had not come to the end of its handshake when too many others came")

// Serve works until the listener is closed, and returns after the end of its goroutines. Accept's
// sessions live on.
func (s *Server) Serve(listener net.Listener) {
	waiting := &guests{all: cmp.Or(s.guests, maxGuests), of: cmp.Or(s.guestsOfASource, maxGuestsOfASource)}
	// An evicted connection counts until the end of its goroutine.
	room := make(chan struct{}, 3*waiting.all)
	var running sync.WaitGroup
	defer running.Wait()
	defer waiting.close()
	for {
		room <- struct{}{}
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// No descriptor left, say. Others may close theirs.
			s.Refused(listener.Addr(), fmt.Errorf("accepting a connection: %w", err))
			time.Sleep(100 * time.Millisecond)
			<-room
			continue
		}
		g := waiting.begin(conn)
		running.Go(func() {
			defer func() { <-room }()
			s.greet(g, waiting)
		})
	}
}

func (s *Server) greet(g *guest, waiting *guests) {
	session, err := s.Local.respond(g.conn, s.Admit, func() { waiting.prove(g) })
	if !waiting.end(g) {
		err = errCrowded
	}
	if err != nil {
		g.conn.Close()
		s.Refused(g.conn.RemoteAddr(), err)
		return
	}
	s.Accept(session)
}

// guest is a connection in its handshake.
type guest struct {
	conn   net.Conn
	source netip.Addr
	proven bool // its hello was sealed with a key
	left   bool // it had to go, or has come to its end
}

// guests are those at a time, oldest first. Too many guests of a source evict that source's oldest;
// too many in total evict the oldest of the source with the most. A relay sends its hello at once,
// so that silent connections keep no host out; a connection with unread bytes is not silent.
type guests struct {
	all, of int

	mu      sync.Mutex
	waiting []*guest
	closed  bool
}

func (w *guests) begin(conn net.Conn) *guest {
	w.mu.Lock()
	defer w.mu.Unlock()
	g := &guest{conn: conn, source: source(conn.RemoteAddr())}
	w.waiting = append(w.waiting, g)
	if w.closed {
		w.dismiss(g)
		return g
	}
	count, _, all := w.count(false)
	if count[g.source] > w.of {
		w.dismissOldest(false, g.source)
	} else if all > w.all {
		w.dismissMost(false)
	}
	return g
}

// prove records that a guest has proven a key. His host's may all come at once.
func (w *guests) prove(g *guest) {
	w.mu.Lock()
	defer w.mu.Unlock()
	g.proven = true
	if _, _, all := w.count(true); all > w.all {
		w.dismissMost(true)
	}
}

// count counts guests with, or without, a proven key by source.
func (w *guests) count(proven bool) (of map[netip.Addr]int, most netip.Addr, all int) {
	of = map[netip.Addr]int{}
	for _, g := range w.waiting {
		if g.proven != proven {
			continue
		}
		all++
		of[g.source]++
		if of[g.source] > of[most] {
			most = g.source
		}
	}
	return of, most, all
}

func (w *guests) dismissMost(proven bool) {
	_, most, _ := w.count(proven)
	w.dismissOldest(proven, most)
}

func (w *guests) dismissOldest(proven bool, source netip.Addr) {
	for _, g := range w.waiting {
		if g.proven == proven && g.source == source && !unread(g.conn) {
			w.dismiss(g)
			return
		}
	}
}

// unread says whether something has come on a connection that nobody has read yet.
func unread(conn net.Conn) bool {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		n, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) // of 0 bytes where it fails
	})
	return err == nil && n > 0
}

// dismiss ends a guest's handshake, whose goroutine closes the connection.
func (w *guests) dismiss(g *guest) {
	w.remove(g)
	g.conn.Close()
}

func (w *guests) remove(g *guest) {
	g.left = true
	for i, other := range w.waiting {
		if other == g {
			w.waiting = append(w.waiting[:i:i], w.waiting[i+1:]...)
			return
		}
	}
}

// end removes an ended guest. It reports false where he had to go before.
func (w *guests) end(g *guest) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g.left {
		return false
	}
	w.remove(g)
	return true
}

func (w *guests) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	for len(w.waiting) > 0 {
		w.dismiss(w.waiting[0])
	}
}

// source returns the origin for the limits: of IPv6 a host has a whole network.
func source(from net.Addr) netip.Addr {
	tcp, ok := from.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	a := tcp.AddrPort().Addr().Unmap().WithZone("")
	if a.Is6() {
		a = netip.PrefixFrom(a, 64).Masked().Addr()
	}
	return a
}

// Tries of Dial, and the wait after the first try.
const (
	dialTries = 5
	dialPause = 20 * time.Millisecond
)

// Dial connects to the first answering address (Race), and does the initiator's side. A listener
// that closes without a word may only have had no room, so that is tried a few times, for under a
// second.
func (l *Local) Dial(ctx context.Context, to Target, addresses []netip.AddrPort) (*Session, error) {
	return l.DialBy(ctx, "", to, addresses)
}

// DialFirst is Dial for callers with alternatives to the kernel's routes, and does not wait long
// for a connection.
func (l *Local) DialFirst(ctx context.Context, to Target, addresses []netip.AddrPort) (*Session, error) {
	return l.dialAny(ctx, "", true, to, addresses)
}

// DialBy is Dial by an interface of this host, regardless of routes.
func (l *Local) DialBy(ctx context.Context, by string, to Target, addresses []netip.AddrPort) (*Session, error) {
	return l.dialAny(ctx, by, by != "", to, addresses)
}

func (l *Local) dialAny(
	ctx context.Context,
	by string,
	others bool,
	to Target,
	addresses []netip.AddrPort,
) (*Session, error) {
	if len(addresses) == 0 {
		return nil, errNoAddress
	}
	finish := Race[*Session]{
		Ways: len(addresses), Delay: cmp.Or(l.Delay, AttemptDelay), Answer: AnswerDelay,
		Try: func(ctx context.Context, way int) (*Session, error) {
			return l.dialOne(
				ctx,
				by,
				others,
				addresses[way],
				func(conn net.Conn) (*Session, error) { return l.Initiate(conn, to) },
			)
		},
		Drop: func(s *Session) { s.Conn.Close() },
	}.Run(ctx)
	if finish.Winner >= 0 {
		return finish.Won, nil
	}
	failed := slices.DeleteFunc(finish.Errors, func(err error) bool { return err == nil })
	if ctx.Err() != nil {
		// The connections were closed here: such errors do not concern the remote side.
		failed = append(failed, unreached(fmt.Sprint("at ", addresses), ctx.Err()))
	}
	return nil, errors.Join(failed...)
}

// dialStream connects to an address, and adds a stream to the session.
func (l *Local) dialStream(ctx context.Context, s *Session, stream uint32, at netip.AddrPort) (*Session, error) {
	return l.DialStreamBy(ctx, "", s, stream, at)
}

// DialStreamBy is dialStream by an interface of this host.
func (l *Local) DialStreamBy(
	ctx context.Context,
	by string,
	s *Session,
	stream uint32,
	at netip.AddrPort,
) (*Session, error) {
	return l.dialOne(ctx, by, by != "", at, func(conn net.Conn) (*Session, error) { return l.join(conn, s, stream) })
}

// interfaceTimeout limits a connect if further interfaces exist: the kernel's second try of it is
// among that.
const interfaceTimeout = 2500 * time.Millisecond

// byInterface binds a connection to an interface (SO_BINDTODEVICE of socket(7)), whose address the
// connection has then. A kernel before Linux 5.7, which requires a privilege for that, uses its
// routes.
func byInterface(by string) func(network, address string, c syscall.RawConn) error {
	if by == "" {
		return nil
	}
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if failed := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), by) }); failed != nil {
			return failed
		}
		if err != nil && !errors.Is(err, unix.EPERM) {
			return &interfaceError{by, err}
		}
		return nil
	}
}

// unreached returns the error of a relay of another host that does not answer.
func unreached(at string, cause error) error {
	return &fault.Error{Code: fault.Unreachable, Operation: "connecting to another host's relay", Object: at, Cause: cause}
}

func (l *Local) dialOne(
	ctx context.Context,
	by string,
	others bool,
	address netip.AddrPort,
	shake func(net.Conn) (*Session, error),
) (*Session, error) {
	connect := l.Connect
	if connect == nil {
		connect = func(ctx context.Context, to netip.AddrPort, by string) (net.Conn, error) {
			dialer := net.Dialer{Control: byInterface(by)}
			return dialer.DialContext(ctx, "tcp", to.String())
		}
	}
	limit := cmp.Or(l.Time, HandshakeTime)
	if others {
		limit = min(limit, interfaceTimeout)
	}
	for try := 1; ; try++ {
		connecting, cancel := context.WithTimeout(ctx, limit)
		conn, err := connect(connecting, address, by)
		cancel()
		if err != nil {
			return nil, unreached("", err)
		}
		reportMet(ctx)
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		s, err := shake(conn)
		if !stop() && err == nil {
			err = ctx.Err()
		}
		if err == nil {
			return s, nil
		}
		conn.Close()
		if ctx.Err() != nil {
			// The connection was closed here: such an error does not concern the remote side.
			return nil, unreached(fmt.Sprint("at ", address), ctx.Err())
		}
		if !errors.Is(err, ErrSilent) || try == dialTries {
			return nil, &addressError{address, err}
		}
		pause := dialPause << (try - 1)
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
		}
	}
}
