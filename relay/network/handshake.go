package network

import (
	"cmp"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// HandshakeTime bounds a whole handshake, of either side.
const HandshakeTime = 5 * time.Second

// Sizes of the messages, bytes. Helloes are all that is read of a stranger.
const (
	nonceBytes   = 32
	tagBytes     = 16 // GCM's
	sealedHello  = helloBytes + tagBytes
	slotBytes    = len(KeyID{}) + sealedHello
	helloSize    = nonceBytes + 2*slotBytes
	welcomeSize  = nonceBytes + welcomeBytes + tagBytes
	confirmSize  = tagBytes
	helloBytes   = 24 + 3*16 + nameBytes
	welcomeBytes = 4*4 + 16 + nameBytes
	nameBytes    = 64
)

// Purposes of a connection.
const (
	purposeConnect = 1 // a session with a listener
	purposeJoin    = 2 // another stream of a session
)

// Outcomes that a welcome tells; an initiator makes the sentence.
const (
	outcomeWelcome = iota
	outcomeVersion
	outcomeTarget
	outcomeTLS
	outcomeLimit
)

// Local is one relay as the relays of other hosts meet it.
type Local struct {
	// Host is what handles have for it.
	Host wire.UUID
	// Name is for messages: at most 63 bytes of it are told.
	Name string
	// Oldest and Newest are the versions of the protocol between hosts that it speaks.
	Oldest, Newest uint32
	// Keys are the cluster's, asked for at each handshake: they rotate under a relay
	// that runs.
	Keys func() Keys
	// TLS, of LoadTLS, is nil where no certificate is configured. Both sides of a
	// session have it, or neither.
	TLS *tls.Config
	// Time bounds a handshake; 0 stands for HandshakeTime.
	Time time.Duration
	// Delay stands for AttemptDelay where it is not 0.
	Delay time.Duration
	// Connect makes connections in place of TCP's, by an interface where one is named; nil
	// is TCP.
	Connect func(ctx context.Context, to netip.AddrPort, by string) (net.Conn, error)

	joins joins
}

// Target is a listener, as its handle names it.
type Target struct{ Host, Token wire.UUID }

// Session is what a handshake comes to.
type Session struct {
	// Conn has no deadline, and its next byte is the first after the handshake. It is a
	// *tls.Conn where Local has certificates.
	Conn net.Conn
	// Version is the newest that both sides speak.
	Version uint32
	// Peer is the other relay's name, and its address.
	Peer string
	// Host is the other relay's.
	Host wire.UUID
	// Target is the listener that it is for.
	Target Target
	// Joined is the session that this is a stream of, and Stream its number; nil and 0
	// for a session itself.
	Joined *Session
	Stream uint32

	initiated bool            // by this side
	secret    func() [32]byte // as Key's
}

// Greeting is what an initiator that has proven the key asks for, before anything is
// promised to it.
type Greeting struct {
	Host   wire.UUID
	Name   string
	Target Target
	Joined *Session // nil for a new session
	Stream uint32

	purpose, oldest, newest uint32
	tls                     bool
}

// ErrSilent is a connection that the other side closed without a word before it had
// proven anything.
var ErrSilent = errors.New("the relay there closed the connection without a word: it does not have this cluster key (compare `peerlane key show` on both hosts), has no room for now, or is none")

// ErrStranger is who has not proven any key: what is read of him is not shown.
var ErrStranger = errors.New("it has not proven the cluster key")

// Initiate does the initiator's side on a connection that it made to the target's
// relay. It leaves the connection to the caller where it fails.
func (l *Local) Initiate(conn net.Conn, to Target) (*Session, error) {
	keys := l.Keys()
	return l.initiate(conn, keys.all(), Greeting{purpose: purposeConnect, Target: to, tls: l.TLS != nil})
}

// Join is Initiate for another stream of a session that this side initiated, which the
// other side must expect. Stream is a number of the caller's.
func (l *Local) Join(conn net.Conn, s *Session, stream uint32) (*Session, error) {
	joined, err := l.initiate(conn, []Key{s.joinKey()}, Greeting{purpose: purposeJoin, Target: s.Target, Stream: stream})
	if err == nil {
		joined.Joined = s
	}
	return joined, err
}

func (l *Local) initiate(conn net.Conn, keys []Key, g Greeting) (*Session, error) {
	defer l.deadline(conn)()
	g.Host, g.Name, g.oldest, g.newest = l.Host, l.Name, l.Oldest, l.Newest
	hello := sealHello(keys, &g)
	if _, err := conn.Write(hello); err != nil {
		if !isTimeout(err) { // closed before it was said
			return nil, fmt.Errorf("%w (%w)", ErrSilent, err)
		}
		return nil, unless(err, "saying hello")
	}
	answer := make([]byte, welcomeSize)
	if n, err := io.ReadFull(conn, answer); err != nil {
		if n == 0 && !isTimeout(err) {
			return nil, fmt.Errorf("%w (%w)", ErrSilent, err)
		}
		return nil, unless(err, "waiting for the answer to hello")
	}
	key, w, err := openWelcome(keys, hello, answer)
	if err != nil {
		return nil, err
	}
	if err := w.check(l, &g); err != nil {
		return nil, err
	}
	confirm := seal(key, "confirm", nil, nil, hello, answer)
	if _, err := conn.Write(confirm); err != nil {
		return nil, unless(err, "confirming")
	}
	s := newSession(conn, key, hello, answer, confirm)
	s.Version, s.Host, s.Target, s.Stream, s.initiated = w.version, w.host, g.Target, g.Stream, true
	s.Peer = peerName(w.name, conn)
	if g.tls {
		err = s.secure(tls.Client(conn, l.TLS), true)
	}
	return s, err
}

// Respond does the listener's side. What admit says, a *wire.Error for BadHandle or
// Limit, reaches the initiator as its status; it is asked once the initiator has
// proven a key, which can be another's hello sent again: what it promises must wait for the
// session. Respond leaves the connection to the caller where it fails.
func (l *Local) Respond(conn net.Conn, admit func(Greeting) error) (*Session, error) {
	return l.respond(conn, admit, func() {})
}

// respond is Respond, and calls proven when the initiator has proven a key.
func (l *Local) respond(conn net.Conn, admit func(Greeting) error, proven func()) (*Session, error) {
	defer l.deadline(conn)()
	hello := make([]byte, helloSize)
	if n, err := io.ReadFull(conn, hello); err != nil {
		return nil, fmt.Errorf("%w: %d of %d bytes came: %w", ErrStranger, n, helloSize, err)
	}
	key, g, err := l.openHello(hello)
	if err != nil {
		return nil, err
	}
	proven()
	w := welcome{oldest: l.Oldest, newest: l.Newest, host: l.Host, name: l.Name}
	refused := l.judge(g, admit, &w)
	answer := make([]byte, nonceBytes, welcomeSize)
	_, _ = rand.Read(answer) // never fails
	answer = seal(key, "welcome", w.bytes(), answer, hello, answer)
	if _, err := conn.Write(answer); err != nil {
		return nil, unless(err, "answering hello")
	}
	// Of who is refused as well: whoever sends another's hello again cannot read the answer,
	// and is not to learn by the connection's end whether the listener is there.
	confirm := make([]byte, confirmSize)
	_, err = io.ReadFull(conn, confirm)
	if refused != nil {
		return nil, refused
	}
	if err != nil {
		return nil, unless(err, "waiting for the confirmation")
	}
	if _, err := open(key, "confirm", confirm, hello, answer); err != nil {
		return nil, fmt.Errorf("%w: its hello is another's, sent again", ErrStranger)
	}
	s := newSession(conn, key, hello, answer, confirm)
	s.Version, s.Host, s.Target, s.Joined, s.Stream = w.version, g.Host, g.Target, g.Joined, g.Stream
	s.Peer = peerName(g.Name, conn)
	if g.tls {
		err = s.secure(tls.Server(conn, l.TLS), false)
	}
	return s, err
}

// judge decides on a hello, into w; the error is why it is refused.
func (l *Local) judge(g *Greeting, admit func(Greeting) error, w *welcome) error {
	if g.Target.Host != l.Host {
		w.outcome = outcomeTarget
		return wire.Errorf(wire.StatusBadHandle, "%s asks for a listener of host %v, and this is %v", g.Name, g.Target.Host, l.Host)
	}
	var ok bool
	if w.version, ok = negotiate(l.Oldest, l.Newest, g.oldest, g.newest); !ok {
		w.outcome = outcomeVersion
		return versionError(g.Name, g.oldest, g.newest, l)
	}
	if g.purpose == purposeConnect && g.tls != (l.TLS != nil) {
		w.outcome = outcomeTLS
		return tlsError(g.Name, g.tls)
	}
	err := admit(*g)
	if err != nil {
		w.outcome = outcomeTarget
		if wire.StatusOf(err) == wire.StatusLimit {
			w.outcome = outcomeLimit
		}
	}
	return err
}

// negotiate picks the newest version that both sides speak.
func negotiate(ourOldest, ourNewest, theirOldest, theirNewest uint32) (uint32, bool) {
	newest := min(ourNewest, theirNewest)
	return newest, newest >= max(ourOldest, theirOldest)
}

func versionError(name string, oldest, newest uint32, l *Local) error {
	return wire.Errorf(wire.StatusVersion, "%s speaks versions %d to %d of the protocol between hosts, and this host %d to %d; install releases that are nearer to each other", name, oldest, newest, l.Oldest, l.Newest)
}

func tlsError(name string, theirs bool) error {
	has, lacks := name, "this host"
	if !theirs {
		has, lacks = lacks, has
	}
	return wire.Errorf(wire.StatusUnreachable, "%s has certificates (network.tls_certificate in config.toml) and %s has none; give them to both or to neither", has, lacks)
}

// check is the initiator's judgement of an authentic welcome.
func (w *welcome) check(l *Local, g *Greeting) error {
	switch w.outcome {
	case outcomeWelcome:
	case outcomeVersion:
		return versionError(w.name, w.oldest, w.newest, l)
	case outcomeTLS:
		return tlsError(w.name, !g.tls)
	case outcomeTarget:
		return wire.Errorf(wire.StatusBadHandle, "%s has no listener with this handle; it was closed, or the handle is not one that a listener gave out", w.name)
	case outcomeLimit:
		return wire.Errorf(wire.StatusLimit, "%s takes no more connections", w.name)
	default:
		return wire.Errorf(wire.StatusMalformed, "%s refused for reason %d, which this version does not know", w.name, w.outcome)
	}
	if newest, ok := negotiate(l.Oldest, l.Newest, w.oldest, w.newest); !ok || newest != w.version {
		return wire.Errorf(wire.StatusMalformed, "%s took version %d, of %d to %d and our %d to %d", w.name, w.version, w.oldest, w.newest, l.Oldest, l.Newest)
	}
	if w.host != g.Target.Host {
		return wire.Errorf(wire.StatusBadHandle, "%s answers for host %v, and the handle is of %v", w.name, w.host, g.Target.Host)
	}
	return nil
}

// deadline sets the handshake's, and returns what takes it away.
func (l *Local) deadline(conn net.Conn) (clear func()) {
	_ = conn.SetDeadline(time.Now().Add(cmp.Or(l.Time, HandshakeTime))) // fails where it is closed, as what follows does
	return func() { _ = conn.SetDeadline(time.Time{}) }
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func unless(err error, doing string) error {
	return fmt.Errorf("handshake with another host's relay: %s: %w", doing, err)
}

func peerName(name string, conn net.Conn) string {
	return fmt.Sprintf("%s at %v", name, conn.RemoteAddr())
}

// newSession makes the session's secret of the whole conversation.
func newSession(conn net.Conn, key Key, conversation ...[]byte) *Session {
	s := &Session{Conn: conn}
	s.derive(key, digest(conversation), "session")
	return s
}

func digest(parts [][]byte) []byte {
	h := sha256.New()
	for _, p := range parts { // of fixed sizes each: no two conversations look alike
		h.Write(p)
	}
	return h.Sum(nil)
}

// once is a cipher for one message: its key depends on all bytes that it is about, so
// that a nonce is not needed.
func once(key Key, label string, about [][]byte) cipher.AEAD {
	block, err := aes.NewCipher(key.derive(digest(about), label, 32))
	if err != nil {
		panic(err) // of a key's length
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err) // of a block's length
	}
	return aead
}

var noNonce [12]byte

// seal appends the sealed text to dst.
func seal(key Key, label string, text, dst []byte, about ...[]byte) []byte {
	return once(key, label, about).Seal(dst, noNonce[:], text, nil)
}

func open(key Key, label string, sealed []byte, about ...[]byte) ([]byte, error) {
	return once(key, label, about).Open(nil, noNonce[:], sealed, nil)
}

// sealHello makes a hello for one or two keys. Noise stands for a second one.
func sealHello(keys []Key, g *Greeting) []byte {
	text := g.bytes()
	hello := make([]byte, nonceBytes, helloSize)
	_, _ = rand.Read(hello)
	nonce := hello[:nonceBytes:nonceBytes]
	for _, key := range keys {
		hello = append(hello, key.ID[:]...)
		hello = seal(key, "hello", text, hello, nonce, key.ID[:])
	}
	_, _ = rand.Read(hello[len(hello):helloSize])
	return hello[:helloSize]
}

// openHello finds the key that a hello was sealed with, and what it says.
func (l *Local) openHello(hello []byte) (Key, *Greeting, error) {
	keys := l.Keys()
	nonce := hello[:nonceBytes]
	var named [2]KeyID
	for i := range named {
		slot := hello[nonceBytes+i*slotBytes:][:slotBytes]
		id, sealed := KeyID(slot[:len(KeyID{})]), slot[len(KeyID{}):]
		named[i] = id
		key, joined := l.find(keys, id)
		text, err := open(key, "hello", sealed, nonce, id[:])
		if err != nil {
			continue
		}
		g, err := parseHello(text)
		if err != nil {
			return Key{}, nil, err
		}
		if (g.purpose == purposeJoin) != (joined != nil) || joined != nil && g.Target != joined.Target {
			return Key{}, nil, wire.Errorf(wire.StatusMalformed, "%s asks for purpose %d with a key for another", g.Name, g.purpose)
		}
		g.Joined = joined
		return key, g, nil
	}
	return Key{}, nil, fmt.Errorf("%w: it names keys %v and %v, and here is %v", ErrStranger, named[0], named[1], keys)
}

// nobodys is a key that nobody has: a hello with an id that is not known takes the
// same time as one with a proof that is wrong.
var nobodys = sync.OnceValue(func() Key { return NewKey(time.Now()) })

// find is the key of an id: the cluster's, that of a session that expects streams, or
// nobody's.
func (l *Local) find(keys Keys, id KeyID) (Key, *Session) {
	for _, key := range keys.all() {
		if key.ID == id {
			return key, nil
		}
	}
	if key, s := l.joins.find(id); s != nil {
		return key, s
	}
	return nobodys(), nil
}

// openWelcome tries the keys of the hello, of which the listener took one that it knows.
func openWelcome(keys []Key, hello, answer []byte) (Key, *welcome, error) {
	nonce, sealed := answer[:nonceBytes], answer[nonceBytes:]
	for _, key := range keys {
		text, err := open(key, "welcome", sealed, hello, nonce)
		if err != nil {
			continue
		}
		w, err := parseWelcome(text)
		return key, w, err
	}
	return Key{}, nil, errors.New("the answer to hello is not from a relay that has the cluster key: something else listens there, or someone in between changes what is sent")
}

// bytes of a hello, before it is sealed.
func (g *Greeting) bytes() []byte {
	b := make([]byte, 0, helloBytes)
	for _, n := range []uint32{g.oldest, g.newest, g.purpose, g.Stream, map[bool]uint32{true: 1}[g.tls], 0} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	b = append(b, g.Target.Host[:]...)
	b = append(b, g.Target.Token[:]...)
	b = append(b, g.Host[:]...)
	return appendName(b, g.Name)
}

func parseHello(text []byte) (*Greeting, error) {
	if len(text) != helloBytes {
		return nil, wire.Errorf(wire.StatusMalformed, "a hello of %d bytes", len(text))
	}
	var n [6]uint32
	for i := range n {
		n[i] = binary.LittleEndian.Uint32(text[4*i:])
	}
	ids := text[24:]
	g := &Greeting{
		oldest: n[0], newest: n[1], purpose: n[2], Stream: n[3], tls: n[4] == 1,
		Target: Target{Host: wire.UUID(ids[:16]), Token: wire.UUID(ids[16:32])}, Host: wire.UUID(ids[32:48]), Name: wire.Text(ids[48:]),
	}
	if g.oldest > g.newest || n[4] > 1 || n[5] != 0 || g.purpose != purposeConnect && g.purpose != purposeJoin {
		return nil, wire.Errorf(wire.StatusMalformed, "a hello of another relay that makes no sense: versions %d to %d, purpose %d", g.oldest, g.newest, g.purpose)
	}
	// A stream of data is not encrypted, whatever its session is; and a session is no stream.
	if g.purpose == purposeJoin && g.tls || g.purpose == purposeConnect && g.Stream != 0 {
		return nil, wire.Errorf(wire.StatusMalformed, "a hello of another relay that makes no sense: purpose %d, stream %d, TLS %v", g.purpose, g.Stream, g.tls)
	}
	return g, nil
}

// welcome is a listener's answer.
type welcome struct {
	outcome, version, oldest, newest uint32
	host                             wire.UUID
	name                             string
}

func (w *welcome) bytes() []byte {
	b := make([]byte, 0, welcomeBytes)
	for _, n := range []uint32{w.outcome, w.version, w.oldest, w.newest} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	b = append(b, w.host[:]...)
	return appendName(b, w.name)
}

func parseWelcome(text []byte) (*welcome, error) {
	if len(text) != welcomeBytes {
		return nil, wire.Errorf(wire.StatusMalformed, "a welcome of %d bytes", len(text))
	}
	w := &welcome{
		outcome: binary.LittleEndian.Uint32(text), version: binary.LittleEndian.Uint32(text[4:]),
		oldest: binary.LittleEndian.Uint32(text[8:]), newest: binary.LittleEndian.Uint32(text[12:]),
		host: wire.UUID(text[16:32]), name: wire.Text(text[32:]),
	}
	return w, nil
}

// appendName appends what nameBytes take of the text.
func appendName(b []byte, name string) []byte {
	var field [nameBytes]byte
	wire.SetText(field[:], name)
	return append(b, field[:]...)
}
