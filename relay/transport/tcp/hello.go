package tcp

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/wire"
)

// Versions of this transport, without the wire messages.
const (
	oldestVersion = 1
	newestVersion = 3

	extensions = 2 // the first version with extensions
)

// PartsVersion is the first version in which both relays split RDMA writes into the same parts. The
// receiver computes their number, so relays of earlier versions exchange data over TCP.
const PartsVersion = 3

// maxStreams is the maximum number of data streams of a Peer.
const maxStreams = 64

// defaultPiece is the default length of a piece, bytes.
const defaultPiece = 512 << 10

// Limits of the peer's pieces, bytes.
const (
	minPiece = 4 << 10
	maxPiece = 64 << 20
)

// Streams are the connections of a future Peer.
type Streams struct {
	control net.Conn
	data    []net.Conn
	piece   int // size of the peer's pieces, bytes
	ours    int
	dialed  bool
	version uint32
}

// close closes the connections.
func (s *Streams) close() {
	for _, c := range append([]net.Conn{s.control}, s.data...) {
		if c != nil {
			c.Close()
		}
	}
}

// greeting is the first message of each side on each connection.
type greeting struct {
	oldest, newest uint32
	set            [16]byte // random number of the dialing side, shared by the connections of a Peer
	stream         uint32   // 0 for control, 1 … for data
	streams        uint32   // number of data streams
	piece          uint32   // size of the sender's pieces, bytes
	refusal        uint32   // cause of a refusal: a wire.Status
}

const (
	greetingBytes = 48
	greetingMark  = 0x31504354454e414c // "LANETCP1"; constant in every version
)

func (g *greeting) bytes() []byte {
	b := binary.LittleEndian.AppendUint64(nil, greetingMark)
	b = binary.LittleEndian.AppendUint32(b, g.oldest)
	b = binary.LittleEndian.AppendUint32(b, g.newest)
	b = append(b, g.set[:]...)
	for _, v := range []uint32{g.stream, g.streams, g.piece, g.refusal} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

func readGreeting(b []byte) (*greeting, error) {
	word := binary.LittleEndian.Uint32
	if len(b) != greetingBytes || binary.LittleEndian.Uint64(b) != greetingMark {
		return nil, refused("invalid greeting")
	}
	g := &greeting{oldest: word(b[8:]), newest: word(b[12:]), stream: word(b[32:]), streams: word(b[36:]),
		piece: word(b[40:]), refusal: word(b[44:])}
	copy(g.set[:], b[16:])
	switch {
	case g.oldest > g.newest || g.newest < oldestVersion || g.oldest > newestVersion:
		return g, wire.Errorf(wire.StatusVersion,
			"the other relay speaks versions %d to %d of the TCP transport, this one %d to %d; install the same release "+
				"of Peerlane on both hosts",
			g.oldest, g.newest, oldestVersion, newestVersion)
	case g.refusal != 0:
		return g, &wire.Error{Status: wire.Status(g.refusal),
			Reason: "the other relay takes no connection: " + wire.Status(g.refusal).String()}
	case g.streams < 1 || g.streams > maxStreams || g.stream > g.streams:
		return g, refused("stream %d of %d", g.stream, g.streams)
	case g.piece < minPiece || g.piece > maxPiece:
		return g, refused("pieces of %d bytes", g.piece)
	}
	return g, nil
}

// greet sends a greeting and then reads a greeting.
func greet(c net.Conn, until time.Time, ours *greeting) (*greeting, error) {
	b := make([]byte, greetingBytes)
	err := c.SetDeadline(until)
	if err == nil {
		_, err = c.Write(ours.bytes())
	}
	if err == nil {
		_, err = io.ReadFull(c, b)
	}
	if err != nil {
		return nil, fmt.Errorf("greeting (%s): %w", route(c), err)
	}
	return readGreeting(b)
}

// Dial opens the connections of a Peer: one control connection and streams data connections.
// connect opens an authenticated connection. until limits the whole call. pieces is the size of
// pieces in bytes; 0 for the default.
func Dial(ctx context.Context, until time.Time, connect func(context.Context) (net.Conn, error), streams,
	pieces int) (_ *Streams, err error) {
	if streams < 1 || streams > maxStreams {
		return nil, wire.Errorf(wire.StatusLimit, "%d data streams; there can be 1 to %d", streams, maxStreams)
	}
	if pieces == 0 {
		pieces = defaultPiece
	}
	s := &Streams{data: make([]net.Conn, streams), ours: pieces, dialed: true}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	ours := greeting{oldest: oldestVersion, newest: newestVersion, streams: uint32(streams), piece: uint32(pieces)}
	if _, err := rand.Read(ours.set[:]); err != nil {
		return nil, err
	}
	// The peer answers after the last connection.
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	all := make([]net.Conn, streams+1)
	for i := range all {
		if all[i], err = connect(ctx); err != nil {
			break
		}
		if i == 0 {
			s.control = all[i]
		} else {
			s.data[i-1] = all[i]
		}
	}
	if err != nil {
		return nil, err
	}
	answers := make(chan error, len(all))
	pieceOf, newestOf := make([]uint32, len(all)), make([]uint32, len(all))
	for i, c := range all {
		mine := ours
		mine.stream = uint32(i)
		go func() {
			theirs, err := greet(c, until, &mine)
			if err == nil && (theirs.set != ours.set || theirs.stream != mine.stream || theirs.streams != ours.streams) {
				err = refused("answer on stream %d: for stream %d of %d, or for another set of connections", i, theirs.stream,
					theirs.streams)
			}
			if err == nil {
				pieceOf[i], newestOf[i] = theirs.piece, theirs.newest
			}
			answers <- err
		}()
	}
	for range all {
		if failed := <-answers; failed != nil && err == nil {
			err = failed
			s.close() // ends the remaining goroutines
		}
	}
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if err := c.SetDeadline(time.Time{}); err != nil {
			return nil, err
		}
	}
	s.piece, s.version = int(pieceOf[0]), min(newestOf[0], newestVersion)
	return s, nil
}

// Gathering collects accepted connections into sets, one for each Peer. Any goroutine may call Add.
type Gathering struct {
	// Time is the limit for a complete set (10 s), Most the maximum number of incomplete sets (64),
	// MostOfOne the maximum of one dialer (16), and Pieces the size of pieces as in Dial.
	Time            time.Duration
	Most, MostOfOne int
	Pieces          int

	mu   sync.Mutex
	sets map[member]*gathered
}

// member identifies a set. A relay cannot add a connection to the set of another relay.
type member struct {
	who string
	set [16]byte
}

type gathered struct {
	conns  []net.Conn // by stream
	theirs *greeting
	left   int
	timer  *time.Timer
}

// Add takes a connection whose other side is authenticated as who. With the last connection of a
// set, Add returns the set after the greetings; before, nil.
func (g *Gathering) Add(c net.Conn, who string) (*Streams, error) {
	patience := g.Time
	if patience == 0 {
		patience = 10 * time.Second
	}
	pieces := g.Pieces
	if pieces == 0 {
		pieces = defaultPiece
	}
	b := make([]byte, greetingBytes)
	until := time.Now().Add(patience)
	err := c.SetDeadline(until)
	if err == nil {
		_, err = io.ReadFull(c, b)
	}
	var theirs *greeting
	if err == nil {
		theirs, err = readGreeting(b)
	}
	if err != nil {
		if theirs != nil && theirs.refusal == 0 {
			err = errors.Join(err, refuse(c, theirs, pieces, err))
		}
		c.Close()
		return nil, fmt.Errorf("accept the relay at %v: %w", c.RemoteAddr(), err)
	}
	set, err := g.join(c, member{who, theirs.set}, theirs, patience)
	if err != nil {
		err = errors.Join(err, refuse(c, theirs, pieces, err))
		c.Close()
		return nil, err
	}
	if set == nil {
		return nil, nil
	}
	s := &Streams{control: set.conns[0], data: set.conns[1:], piece: int(theirs.piece), ours: pieces,
		version: min(theirs.newest, newestVersion)}
	for i, c := range set.conns {
		answer := greeting{oldest: oldestVersion, newest: newestVersion, set: theirs.set, stream: uint32(i),
			streams: theirs.streams, piece: uint32(pieces)}
		err := c.SetDeadline(until)
		if err == nil {
			_, err = c.Write(answer.bytes())
		}
		if err == nil {
			err = c.SetDeadline(time.Time{})
		}
		if err != nil {
			s.close()
			return nil, fmt.Errorf("greeting (%s): %w", route(c), err)
		}
	}
	return s, nil
}

// refuse sends the cause to the dialer.
func refuse(c net.Conn, theirs *greeting, pieces int, why error) error {
	status := wire.StatusOf(why)
	answer := greeting{oldest: oldestVersion, newest: newestVersion, set: theirs.set, stream: theirs.stream,
		streams: theirs.streams, piece: uint32(pieces), refusal: uint32(status)}
	_, err := c.Write(answer.bytes())
	return err
}

// join adds a connection to its set, and returns a complete set.
func (g *Gathering) join(c net.Conn, key member, theirs *greeting, patience time.Duration) (*gathered, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	set := g.sets[key]
	if set == nil {
		if most := cmp.Or(g.Most, 64); len(g.sets) >= most {
			return nil, wire.Errorf(wire.StatusLimit, "limit of incomplete sets of connections (%d) reached", most)
		}
		// The limit keeps a dialer with incomplete sets from excluding other dialers.
		if most := cmp.Or(g.MostOfOne, 16); g.incomplete(key.who) >= most {
			return nil, wire.Errorf(wire.StatusLimit, "limit of incomplete sets of connections of %s (%d) reached", key.who,
				most)
		}
		n := int(theirs.streams) + 1
		set = &gathered{conns: make([]net.Conn, n), theirs: theirs, left: n}
		if g.sets == nil {
			g.sets = map[member]*gathered{}
		}
		g.sets[key] = set
		set.timer = time.AfterFunc(patience, func() { g.drop(key, set) })
	}
	if theirs.streams != set.theirs.streams || theirs.piece != set.theirs.piece || set.conns[theirs.stream] != nil {
		return nil, refused("stream %d of %d differs from the set", theirs.stream, theirs.streams)
	}
	set.conns[theirs.stream] = c
	if set.left--; set.left > 0 {
		return nil, nil
	}
	set.timer.Stop()
	delete(g.sets, key)
	return set, nil
}

// incomplete counts the sets of a dialer.
func (g *Gathering) incomplete(who string) (n int) {
	for key := range g.sets {
		if key.who == who {
			n++
		}
	}
	return n
}

// drop closes a set that is incomplete at its limit.
func (g *Gathering) drop(key member, set *gathered) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sets[key] != set {
		return
	}
	delete(g.sets, key)
	for _, c := range set.conns {
		if c != nil {
			c.Close()
		}
	}
}

// Close closes the incomplete sets.
func (g *Gathering) Close() {
	g.mu.Lock()
	sets := g.sets
	g.sets = nil
	g.mu.Unlock()
	for _, set := range sets {
		set.timer.Stop()
		for _, c := range set.conns {
			if c != nil {
				c.Close()
			}
		}
	}
}

// tune makes the kernel end a connection without acknowledgements as late as the Peer would. It
// ignores connections that are not TCP.
func tune(c net.Conn, silence time.Duration) {
	for {
		inner, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = inner.NetConn()
	}
	t, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	// Without the options the Peer detects a dead peer itself.
	_ = t.SetNoDelay(true)
	if raw, err := t.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
		})
	}
}
