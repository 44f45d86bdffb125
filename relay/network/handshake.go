package network

import (
	"bytes"
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
	"slices"
	"sync"
	"time"

	"github.com/flynn/noise"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/wire"
)

// HandshakeTime bounds a whole handshake, of either side.
const HandshakeTime = 5 * time.Second

// Sizes of the messages, bytes. A listener reads only a hello of a stranger. The length is that of
// version 1 of the handshake (version1.go), so that a listener reads both versions alike.
const (
	ephemeralBytes = 32 // an X25519 public key
	tagBytes       = 16 // ChaCha20-Poly1305's
	helloBytes     = 24 + 3*16 + nameBytes
	sealedHello    = helloBytes + tagBytes
	slotBytes      = len(KeyID{}) + sealedHello
	helloSize      = ephemeralBytes + 2*slotBytes
	answerSize     = ephemeralBytes + tagBytes
	requestBytes   = helloBytes
	requestSize    = requestBytes + tagBytes
	welcomeBytes   = 4*4 + 16 + nameBytes
	welcomeSize    = welcomeBytes + tagBytes
	nameBytes      = 64
)

// handshakeVersion is the first thing that a hello says.
const handshakeVersion = 2

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

// Local describes a relay to the relays of remote hosts.
type Local struct {
	// Host is the relay's id in handles.
	Host wire.UUID
	// Name is for messages: at most 63 bytes of it are told.
	Name string
	// Oldest and Newest are the relay's versions of the protocol between hosts.
	Oldest, Newest uint32
	// Keys returns the cluster's keys, called at every handshake, because keys rotate under a
	// running relay.
	Keys func() Keys
	// TLS, of LoadTLS, is nil where no certificate is configured. Both sides of a session have TLS,
	// or neither.
	TLS *tls.Config
	// Time bounds a handshake; 0 stands for HandshakeTime.
	Time time.Duration
	// Delay replaces AttemptDelay unless 0.
	Delay time.Duration
	// Connect replaces TCP connects, by an interface if named; nil is TCP.
	Connect func(ctx context.Context, to netip.AddrPort, by string) (net.Conn, error)

	joins joins
}

// Target is a listener, as named by a handle.
type Target struct{ Host, Token wire.UUID }

// Session is the result of a handshake.
type Session struct {
	// Conn has no deadline, and its next byte is the first after the handshake. Conn is a *tls.Conn
	// if Local has certificates.
	Conn net.Conn
	// version is the newest protocol version of both sides.
	version uint32
	// Peer is name and address of the remote relay.
	Peer string
	// Host is the remote relay's host id.
	Host wire.UUID
	// Target is the requested listener.
	Target Target
	// Joined is the session of this stream, and Stream the stream's number; nil and 0 for a session
	// itself.
	Joined *Session
	Stream uint32

	initiated bool            // by this side
	secret    func() [32]byte // as Key's
}

// Greeting is the request of an initiator with a proven key.
type Greeting struct {
	host   wire.UUID
	Name   string
	Target Target
	Joined *Session // nil for a new session
	Stream uint32

	purpose, oldest, newest uint32
	tls                     bool
}

// ErrSilent: the remote side closed the connection without a proof.
var ErrSilent error = &fault.Error{
	Code:      fault.KeyNotProven,
	Operation: "the relay there closed the connection without a word",
	Cause: fmt.Errorf(
		"it does not have this cluster key (compare `peerlane key show` on both hosts), speaks version %d of the "+
			"handshake between hosts and this host version %d (install the same release on both), has no room for now, or "+
			"is none",
		handshakeVersion-1, handshakeVersion,
	),
}

// ErrStranger: the remote side has not proven a key; errors do not show received bytes.
var ErrStranger = errors.New("it has not proven the cluster key")

// Initiate does the initiator's side on a connection to the target's relay. After an error the
// caller owns the connection.
func (l *Local) Initiate(conn net.Conn, to Target) (*Session, error) {
	keys := l.Keys()
	return l.initiate(conn, keys.all(), Greeting{purpose: purposeConnect, Target: to, tls: l.TLS != nil})
}

// join is Initiate for a further stream of an initiated session, which the remote side must expect.
// Stream is a number of the caller's.
func (l *Local) join(conn net.Conn, s *Session, stream uint32) (*Session, error) {
	joined, err := l.initiate(conn, []Key{s.joinKey()}, Greeting{purpose: purposeJoin, Target: s.Target, Stream: stream})
	if err == nil {
		joined.Joined = s
	}
	return joined, err
}

func (l *Local) initiate(conn net.Conn, keys []Key, g Greeting) (*Session, error) {
	defer l.deadline(conn)()
	g.host, g.Name, g.oldest, g.newest = l.Host, l.Name, l.Oldest, l.Newest
	hello, states := newHello(keys, rand.Reader)
	if _, err := conn.Write(hello); err != nil {
		if !isTimeout(err) { // closed before it was said
			return nil, fmt.Errorf("%w (%w)", ErrSilent, err)
		}
		return nil, unless(err, "saying hello")
	}
	answer := make([]byte, answerSize)
	if n, err := io.ReadFull(conn, answer); err != nil {
		if n == 0 && !isTimeout(err) {
			return nil, fmt.Errorf("%w (%w)", ErrSilent, err)
		}
		return nil, unless(err, "waiting for the answer to hello")
	}
	c, err := openAnswer(states, hello, answer)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(c.seal(g.bytes())); err != nil {
		return nil, unless(err, "asking for a session")
	}
	sealed := make([]byte, welcomeSize)
	if n, err := io.ReadFull(conn, sealed); err != nil {
		if n == 0 && !isTimeout(err) {
			return nil, wire.Errorf(
				wire.StatusLimit,
				"the relay at %v has the cluster key, and closed the connection within the handshake: it has no room for now (%v)",
				conn.RemoteAddr(),
				err,
			)
		}
		return nil, unless(err, "waiting for the welcome")
	}
	text, err := c.open(sealed)
	if err != nil {
		return nil, errChanged
	}
	w, err := parseWelcome(text)
	if err != nil {
		return nil, err
	}
	if err := w.check(l, &g); err != nil {
		return nil, err
	}
	s := c.session(conn)
	s.version, s.Host, s.Target, s.Stream, s.initiated = w.version, w.host, g.Target, g.Stream, true
	s.Peer = peerName(w.name, conn)
	if g.tls {
		err = s.secure(tls.Client(conn, l.TLS), true)
	}
	return s, err
}

// Respond does the listener's side. The initiator gets the status of admit's error, a *wire.Error
// for BadHandle or Limit. Respond calls admit after the initiator has answered this side's
// ephemeral key, so that no recorded message leads to the call. Respond leaves the connection to
// the caller where it fails.
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
	state, joined, err := l.openHello(hello)
	if err != nil {
		if answer, old := l.answerVersion1(hello); answer != nil {
			proven()
			if _, err := conn.Write(answer); err != nil {
				return nil, unless(err, "answering hello")
			}
			return nil, old
		}
		return nil, err
	}
	proven()
	answer, c, err := newAnswer(state, hello)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStranger, err)
	}
	if _, err := conn.Write(answer); err != nil {
		return nil, unless(err, "answering hello")
	}
	sealed := make([]byte, requestSize)
	if _, err := io.ReadFull(conn, sealed); err != nil {
		return nil, unless(err, "waiting for the request")
	}
	text, err := c.open(sealed)
	if err != nil {
		return nil, fmt.Errorf("%w: its hello is another's, sent again", ErrStranger)
	}
	g, err := parseHello(text)
	if err != nil {
		return nil, err
	}
	if (g.purpose == purposeJoin) != (joined != nil) || joined != nil && g.Target != joined.Target {
		return nil, wire.Errorf(wire.StatusMalformed, "%s asks for purpose %d with a key for another", g.Name, g.purpose)
	}
	g.Joined = joined
	w := welcome{oldest: l.Oldest, newest: l.Newest, host: l.Host, name: l.Name}
	refused := l.judge(g, admit, &w)
	if _, err := conn.Write(c.seal(w.bytes())); err != nil && refused == nil {
		return nil, unless(err, "saying welcome")
	}
	if refused != nil {
		return nil, refused
	}
	s := c.session(conn)
	s.version, s.Host, s.Target, s.Joined, s.Stream = w.version, g.host, g.Target, g.Joined, g.Stream
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
		return wire.Errorf(
			wire.StatusBadHandle,
			"%s asks for a listener of host %v, and this is %v",
			g.Name,
			g.Target.Host,
			l.Host,
		)
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
	return wire.Errorf(wire.StatusVersion, "%w", &versionsError{peer: name, theirs: [2]uint32{oldest, newest},
		ours: [2]uint32{l.Oldest, l.Newest}})
}

func tlsError(name string, theirs bool) error {
	has, lacks := name, "this host"
	if !theirs {
		has, lacks = lacks, has
	}
	return wire.Errorf(wire.StatusUnreachable, "%w", &certificateError{has, lacks}).On("network.tls_certificate")
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
		return wire.Errorf(
			wire.StatusBadHandle,
			"%s has no listener with this handle; it was closed, or the handle is not one that a listener gave out",
			w.name,
		)
	case outcomeLimit:
		return wire.Errorf(wire.StatusLimit, "%s takes no more connections", w.name)
	default:
		return wire.Errorf(
			wire.StatusMalformed,
			"%s refused for reason %d, which this version does not know",
			w.name,
			w.outcome,
		)
	}
	if newest, ok := negotiate(l.Oldest, l.Newest, w.oldest, w.newest); !ok || newest != w.version {
		return wire.Errorf(
			wire.StatusMalformed,
			"%s took version %d, of %d to %d and our %d to %d",
			w.name,
			w.version,
			w.oldest,
			w.newest,
			l.Oldest,
			l.Newest,
		)
	}
	if w.host != g.Target.Host {
		return wire.Errorf(
			wire.StatusBadHandle,
			"%s answers for host %v, and the handle is of %v",
			w.name,
			w.host,
			g.Target.Host,
		)
	}
	return nil
}

// deadline sets the handshake's deadline, and returns a function that removes it.
func (l *Local) deadline(conn net.Conn) (clear func()) {
	_ = conn.SetDeadline(
		time.Now().Add(cmp.Or(l.Time, HandshakeTime)),
	) // fails on a closed connection, as the following calls do
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

func digest(parts [][]byte) []byte {
	h := sha256.New()
	for _, p := range parts { // of fixed sizes each: no two conversations look alike
		h.Write(p)
	}
	return h.Sum(nil)
}

// once is a cipher for a single message: the key depends on the sealed bytes, so that no nonce is
// needed.
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

// suite is the Noise protocol's.
var suite = noise.NewCipherSuite(noise.DH25519, noise.CipherChaChaPoly, noise.HashSHA256)

// noise is one side of Noise_NNpsk0_25519_ChaChaPoly_SHA256 with a key; the ephemeral key is made
// from random.
func (k Key) noise(initiator bool, random io.Reader) *noise.HandshakeState {
	state, err := noise.NewHandshakeState(noise.Config{
		CipherSuite: suite, Random: random, Pattern: noise.HandshakeNN, Initiator: initiator,
		Prologue: append([]byte("peerlane network 2 "), k.ID[:]...), PresharedKey: k.derive(nil, "noise psk", 32),
	})
	if err != nil {
		panic(err) // of a key's length
	}
	return state
}

// newHello returns an initiator's hello for one or two keys, and the states for the answers. The
// states share an ephemeral key. Random bytes stand for a second key.
func newHello(keys []Key, random io.Reader) ([]byte, []*noise.HandshakeState) {
	var seed [ephemeralBytes]byte
	_, _ = io.ReadFull(random, seed[:]) // never fails
	text := make([]byte, helloBytes)
	binary.LittleEndian.PutUint32(text, handshakeVersion)
	var hello []byte
	var states []*noise.HandshakeState
	for _, key := range keys {
		state := key.noise(true, bytes.NewReader(seed[:]))
		message, _, _, err := state.WriteMessage(nil, text)
		if err != nil {
			panic(err) // of a message's length
		}
		if hello == nil {
			hello = append(make([]byte, 0, helloSize), message[:ephemeralBytes]...)
		}
		hello = append(append(hello, key.ID[:]...), message[ephemeralBytes:]...)
		states = append(states, state)
	}
	_, _ = io.ReadFull(random, hello[len(hello):helloSize])
	return hello[:helloSize], states
}

// openHello finds the proven key of a hello, and returns the listener's state for the answer, and,
// for a session's key, the session.
func (l *Local) openHello(hello []byte) (*noise.HandshakeState, *Session, error) {
	keys := l.Keys()
	var named [2]KeyID
	for i, slot := range slots(hello) {
		named[i] = slot.id
		key, joined := l.find(keys, slot.id)
		state := key.noise(false, rand.Reader)
		text, _, _, err := state.ReadMessage(nil, slices.Concat(hello[:ephemeralBytes], slot.sealed))
		if err != nil {
			continue
		}
		if version := binary.LittleEndian.Uint32(text); version != handshakeVersion {
			return nil, nil, wire.Errorf(
				wire.StatusVersion,
				"another relay speaks version %d of the handshake between hosts, and this host version %d; install the same "+
					"release on both",
				version,
				handshakeVersion,
			)
		}
		return state, joined, nil
	}
	return nil, nil, fmt.Errorf("%w: it names keys %v and %v, and here is %v", ErrStranger, named[0], named[1], keys)
}

// slot is the part of a hello for a key.
type slot struct {
	id     KeyID
	sealed []byte
}

func slots(hello []byte) (s [2]slot) {
	for i := range s {
		part := hello[ephemeralBytes+i*slotBytes:][:slotBytes]
		s[i] = slot{KeyID(part[:len(KeyID{})]), part[len(KeyID{}):]}
	}
	return s
}

// newAnswer is the listener's answer to a hello, and the channel that follows.
func newAnswer(state *noise.HandshakeState, hello []byte) ([]byte, *channel, error) {
	answer, toListener, toInitiator, err := state.WriteMessage(nil, nil)
	if err != nil { // an ephemeral key of low order
		return nil, nil, err
	}
	return answer, newChannel(toInitiator, toListener, false, hello, answer), nil
}

// openAnswer tries the keys of the hello: the listener took a known key.
func openAnswer(states []*noise.HandshakeState, hello, answer []byte) (*channel, error) {
	for _, state := range states {
		if _, toListener, toInitiator, err := state.ReadMessage(nil, answer); err == nil {
			return newChannel(toListener, toInitiator, true, hello, answer), nil
		}
	}
	return nil, errChanged
}

var errChanged = errors.New(
	"the answer to hello is not from a relay that has the cluster key: something else listens there, or someone in " +
		"between changes what is sent",
)

// channel seals the messages after the Noise messages, with the whole preceding conversation as
// associated data.
type channel struct {
	out, in      *noise.CipherState
	secret       [32]byte // of both cipher states, when they began
	conversation [][]byte
}

func newChannel(out, in *noise.CipherState, initiator bool, conversation ...[]byte) *channel {
	first, second := out.UnsafeKey(), in.UnsafeKey()
	if !initiator {
		first, second = second, first
	}
	return &channel{
		out:          out,
		in:           in,
		secret:       sha256.Sum256(slices.Concat(first[:], second[:])),
		conversation: conversation,
	}
}

func (c *channel) seal(text []byte) []byte {
	sealed, err := c.out.Encrypt(nil, digest(c.conversation), text)
	if err != nil {
		panic(err) // after 2^64 messages
	}
	c.conversation = append(c.conversation, sealed)
	return sealed
}

func (c *channel) open(sealed []byte) ([]byte, error) {
	text, err := c.in.Decrypt(nil, digest(c.conversation), sealed)
	c.conversation = append(c.conversation, sealed)
	return text, err
}

// session makes a session's secret of the channel's and of the whole conversation.
func (c *channel) session(conn net.Conn) *Session {
	s := &Session{Conn: conn}
	s.derive(keyOf(c.secret, time.Time{}), digest(c.conversation), "session")
	return s
}

// dummyKey is a key of no host: a hello with an unknown id takes the same time as a hello with
// a wrong proof.
var dummyKey = sync.OnceValue(func() Key { return NewKey(time.Now()) })

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
	return dummyKey(), nil
}

// bytes of a request, before it is sealed.
func (g *Greeting) bytes() []byte {
	b := make([]byte, 0, helloBytes)
	for _, n := range []uint32{g.oldest, g.newest, g.purpose, g.Stream, map[bool]uint32{true: 1}[g.tls], 0} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	b = append(b, g.Target.Host[:]...)
	b = append(b, g.Target.Token[:]...)
	b = append(b, g.host[:]...)
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
		Target: Target{
			Host:  wire.UUID(ids[:16]),
			Token: wire.UUID(ids[16:32]),
		}, host: wire.UUID(ids[32:48]), Name: wire.Text(ids[48:]),
	}
	if g.oldest > g.newest || n[4] > 1 || n[5] != 0 || g.purpose != purposeConnect && g.purpose != purposeJoin {
		return nil, wire.Errorf(
			wire.StatusMalformed,
			"a hello of another relay that makes no sense: versions %d to %d, purpose %d",
			g.oldest,
			g.newest,
			g.purpose,
		)
	}
	// A stream of data is never encrypted, also in a session with TLS; and a session is no stream.
	if g.purpose == purposeJoin && g.tls || g.purpose == purposeConnect && g.Stream != 0 {
		return nil, wire.Errorf(
			wire.StatusMalformed,
			"a hello of another relay that makes no sense: purpose %d, stream %d, TLS %v",
			g.purpose,
			g.Stream,
			g.tls,
		)
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

// appendName appends the text, cut to nameBytes.
func appendName(b []byte, name string) []byte {
	var field [nameBytes]byte
	wire.SetText(field[:], name)
	return append(b, field[:]...)
}
