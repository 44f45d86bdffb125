package tcp

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

// carrier is an Extension that records its messages.
type carrier struct {
	heard chan string
	gone  chan func()
	left  chan uint32
	err   error
	alive atomic.Int64 // a duration
}

func newCarrier() *carrier {
	return &carrier{heard: make(chan string, 10), gone: make(chan func(), 1), left: make(chan uint32, 10)}
}

func (e *carrier) HandleMessage(c *Channel, payload []byte) error {
	at := "all"
	if c != nil {
		at = fmt.Sprint(c.number)
	}
	e.heard <- at + ": " + string(payload)
	return e.err
}

func (e *carrier) Alive(time.Duration) time.Duration { return time.Duration(e.alive.Load()) }

func (e *carrier) ChannelClosed(c *Channel)  { e.left <- c.number }
func (e *carrier) Down(_ error, gone func()) { e.gone <- gone }

// extended returns two Peers with extensions. The channels of the second Peer record their messages
// in the carrier of the second extension.
func extended(t *testing.T) (a, b *side, at *carrier) {
	t.Helper()
	at = newCarrier()
	dialed, accepted := greeted(t, pipes, 1, 0)
	b = newSide(t, accepted, Config{
		Extend: func(*Peer) Extension { return at },
		Accept: func(c *Channel, _ wire.Message, _ uint32) {
			c.Handle(func(m wire.Message, _ uint32, _ []int) { at.heard <- fmt.Sprintf("%T", m) }, func(error) {})
		},
	})
	a = newSide(t, dialed, Config{Extend: func(*Peer) Extension { return newCarrier() }})
	return a, b, at
}

// TestExtensionMessagesKeepTheirOrder demands that a message of an extension keeps its place among
// the messages, and names its channel.
func TestExtensionMessagesKeepTheirOrder(t *testing.T) {
	a, b, at := extended(t)
	a.loop.Call(func() { a.peer.SendExtension([]byte("one")) })
	c := a.open(&wire.Done{}, ignore, func(error) {})
	a.loop.Call(func() {
		c.SendExtension([]byte("two"))
		c.Send(&wire.PeerWithdraw{}, 0)
		c.SendExtension([]byte(strings.Repeat("3", MaxExtension)))
		c.Leave()
		c.SendExtension([]byte("nobody hears"))
	})
	for _, want := range []string{"all: one", "3: two", "*wire.PeerWithdraw", "3: " + strings.Repeat("3", MaxExtension)} {
		if got := receive(t, at.heard, "a message"); got != want {
			t.Errorf("heard %.20q where %.20q was said", got, want)
		}
	}
	if n := receive(t, at.left, "the end of the channel"); n != 3 {
		t.Errorf("channel %d is left", n)
	}
	refusal := errors.New("unheard of")
	b.loop.Call(func() { at.err = refusal })
	a.loop.Call(func() { a.peer.SendExtension([]byte("four")) })
	receive(t, at.heard, "the last message")
	b.loop.Call(receive(t, at.gone, "the extension's end"))
	if err := b.died(); !errors.Is(err, refusal) {
		t.Error(err)
	}
}

// TestExtensionEndsBeforeChannels demands that channels learn of a Peer's death after the extension
// accesses no memory.
func TestExtensionEndsBeforeChannels(t *testing.T) {
	a, b, at := extended(t)
	ended := make(chan error, 1)
	a.open(&wire.Done{}, ignore, func(error) {})
	b.loop.Call(func() {})
	testutil.Until(t, "the channel", func() (there bool) {
		b.loop.Call(func() {
			for _, c := range b.peer.channels {
				c.ended, there = func(err error) { ended <- err }, true
			}
		})
		return there
	})
	fault := errors.New("a NIC failed")
	b.peer.Fail(fault)
	gone := receive(t, at.gone, "the extension's end")
	b.loop.Call(func() {}) // the loop has handled earlier functions
	select {
	case err := <-ended:
		t.Errorf("a channel ended (%v) before the extension did", err)
	default:
	}
	b.loop.Call(gone)
	if err := receive(t, ended, "the channel's end"); !errors.Is(err, fault) {
		t.Error(err)
	}
}

// TestPeerWithoutExtensionGetsNoExtensionMessage demands that a relay of an earlier release without
// extensions gets no message of an extension.
func TestPeerWithoutExtensionGetsNoExtensionMessage(t *testing.T) {
	ours, theirs := net.Pipe()
	gathering := &Gathering{Time: waitTime}
	made, accepting := make(chan *Streams, 2), make(chan net.Conn, 2)
	go func() {
		for range 2 {
			s, err := gathering.Add(<-accepting, "an earlier release")
			if err != nil {
				t.Error(err)
			}
			if s != nil {
				made <- s
			}
		}
	}()
	dataOurs, dataTheirs := net.Pipe()
	accepting <- theirs
	accepting <- dataTheirs
	for i, c := range []net.Conn{ours, dataOurs} {
		g := greeting{oldest: 1, newest: 1, streams: 1, stream: uint32(i), piece: defaultPiece}
		if _, err := c.Write(g.bytes()); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []net.Conn{ours, dataOurs} {
		go func() { _, _ = c.Read(make([]byte, greetingBytes)) }()
	}
	s := receive(t, made, "the connections")
	e := newSide(t, s, Config{Extend: func(*Peer) Extension { t.Error("extended"); return newCarrier() }})
	if e.peer.Extension() != nil {
		t.Error("it has an extension")
	}
	ours.Close()
	dataOurs.Close()
}

// TestSilentPeerWithLiveExtensionSurvives demands that a silent control connection ends a Peer only
// after the extension no longer reports the peer alive.
func TestSilentPeerWithLiveExtensionSurvives(t *testing.T) {
	at := newCarrier()
	at.alive.Store(int64(50 * time.Millisecond))
	dialed, _ := greeted(t, pipes, 1, 0) // the opposite side sends nothing
	a := newSide(t, dialed, Config{Dead: 200 * time.Millisecond, Extend: func(*Peer) Extension { return at }})
	select {
	case <-at.gone:
		t.Error("a Peer has ended whose extension vouched for the other side")
	case <-time.After(time.Second): // five times the limit without an extension
	}
	at.alive.Store(0)
	a.loop.Call(receive(t, at.gone, "the Peer's end"))
	if err := a.died(); !errors.Is(err, errSaidNothing) {
		t.Error(err)
	}
}
