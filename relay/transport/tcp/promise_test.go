package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// TestPeerDeathIsReportedWithinLimit demands that the channels learn of the peer's death within
// Dead: no wait begins so late that the wait ends after Dead, and no wait is so short that late
// heartbeats count as missing.
func TestPeerDeathIsReportedWithinLimit(t *testing.T) {
	cases := map[string]struct {
		config  Config
		silence time.Duration
	}{
		"as it comes":   {Config{}, 4500 * time.Millisecond},
		"slow networks": {Config{Dead: time.Minute}, 54 * time.Second},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			config := c.config.filled()
			if got := config.silence(); got != c.silence {
				t.Errorf("silence of %v is death, want %v", got, c.silence)
			}
			// A lost packet is sent again after 0.2 s (TCP_RTO_MIN of Linux), 0.6 s, 1.4 s and 3 s,
			// and the kernel counts from the first retransmission.
			if again := 200 * time.Millisecond; config.silence()+again >= config.Dead ||
				config.silence() < 3*config.Heartbeat+again {
				t.Errorf("of %v to a death %v are silence, with a heartbeat each %v", config.Dead, config.silence(),
					config.Heartbeat)
			}
		})
	}
}

// deadlines is a connection that records the length of its deadlines, except deadlines of an ended
// Peer.
type deadlines struct {
	net.Conn
	ahead chan time.Duration
}

func (c *deadlines) keep(at time.Time) {
	if left := time.Until(at); left > 0 {
		c.ahead <- left
	}
}

func (c *deadlines) SetReadDeadline(at time.Time) error {
	c.keep(at)
	return c.Conn.SetReadDeadline(at)
}

func (c *deadlines) SetWriteDeadline(at time.Time) error {
	c.keep(at)
	return c.Conn.SetWriteDeadline(at)
}

func (c *deadlines) NetConn() net.Conn { return c.Conn }

// TestWaitsForPeerEqualSilenceLimit demands that each wait for the peer lasts as long as the
// silence, including the kernel's wait.
func TestWaitsForPeerEqualSilenceLimit(t *testing.T) {
	ahead := make(chan time.Duration, 10_000)
	dialed, accepted := greeted(t, loopback, 1, 64<<10)
	sockets := []*net.TCPConn{dialed.control.(*net.TCPConn), dialed.data[0].(*net.TCPConn)}
	dialed.control, dialed.data[0] = &deadlines{dialed.control, ahead}, &deadlines{dialed.data[0], ahead}
	const dead = time.Hour
	config := Config{Dead: dead, Accept: func(c *Channel, _ wire.Message, _ uint32) {
		in := c.Receive(func(uint64, uint64) {}, func() {})
		in.add(1, make([]byte, 64<<10))
		if err := in.Grant(1, 1, 0, 64<<10); err != nil {
			t.Error(err)
		}
		c.Send(&wire.Done{}, 0)
	}}
	a, b := newSide(t, dialed, config), newSide(t, accepted, config)
	exchange := func(from *side) {
		ready, done := make(chan struct{}), make(chan error, 1)
		c := from.open(&wire.Done{}, func(wire.Message, uint32, []int) { close(ready) }, func(error) {})
		receive(t, ready, "the grant")
		from.loop.Call(func() {
			c.write(transport.Target{Region: 1}, make([]byte, 64<<10), 1, func(err error) { done <- err })
		})
		if err := receive(t, done, "the write's end"); err != nil {
			t.Error(err)
		}
	}
	exchange(a)
	exchange(b)
	if len(ahead) < 4 {
		t.Errorf("%d deadlines were set: reads and writes of control and data have some", len(ahead))
	}
	silence := config.silence()
	for range len(ahead) {
		if left := <-ahead; left > silence {
			t.Errorf("a wait of %v, where %v are silence", left, silence)
		}
	}
	for _, c := range sockets {
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var kernels int
		if failed := raw.Control(func(fd uintptr) {
			kernels, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		}); failed != nil || err != nil {
			t.Fatal(failed, err)
		}
		if got := time.Duration(kernels) * time.Millisecond; got != silence {
			t.Errorf("the kernel waits for %v, and silence is %v", got, silence)
		}
	}
}

// timeless is a connection without deadlines.
type timeless struct{ net.Conn }

func (timeless) SetDeadline(time.Time) error      { return nil }
func (timeless) SetReadDeadline(time.Time) error  { return nil }
func (timeless) SetWriteDeadline(time.Time) error { return nil }

// TestChannelsEndBeforeFarewellIsSent demands that the channels learn of a death at once. The
// farewell takes longer if the peer accepts no bytes; the channels do not wait for the farewell,
// and the Peer still sends it.
func TestChannelsEndBeforeFarewellIsSent(t *testing.T) {
	noGoroutines(t)
	e, r := against(t, 1, Config{Dead: time.Hour}, func(c net.Conn) net.Conn { return timeless{c} })
	ended := make(chan error, 1)
	e.open(&wire.Done{}, ignore, func(err error) { ended <- err })
	why := wire.Errorf(wire.StatusPeerRelayDied, "it is dead")
	e.peer.End(why)
	if err := receive(t, ended, "the channel's end"); err != why {
		t.Errorf("%v, not %v", err, why)
	}
	for f := range r.listens().frames {
		if f.kind == frameGoodbye {
			return
		}
	}
	t.Error("the other side was not told")
}

// fails is a connection whose reads fail.
type fails struct {
	net.Conn
	with error
}

func (c fails) Read([]byte) (int, error) { return 0, c.with }

// TestConnectionAbortedByKernelEndsAtOnce demands that a Peer does not wait for a farewell of the
// peer after an error of the kernel: the wait is only for connections that the peer has ended.
func TestConnectionAbortedByKernelEndsAtOnce(t *testing.T) {
	for _, with := range []error{unix.ETIMEDOUT, unix.EHOSTUNREACH, unix.ENETUNREACH} {
		control := true
		e, r := against(t, 1, Config{Heartbeat: time.Hour, Dead: 100 * time.Hour}, func(c net.Conn) net.Conn {
			if control {
				control = false
				return c
			}
			return fails{c, &net.OpError{Op: "read", Net: "tcp", Err: with}}
		})
		r.listens()
		if err := e.died(); !errors.Is(err, with) || wire.StatusOf(err) != wire.StatusPeerRelayDied {
			t.Errorf("%v", err)
		}
	}
}

// numbered is a connection with a number for messages.
type numbered struct {
	net.Conn
	number int
}

// TestEndedStreamIsNamedToOtherSide demands that the control stream names an ended data stream to
// the peer, which would otherwise only see the end of the control stream.
func TestEndedStreamIsNamedToOtherSide(t *testing.T) {
	next := -1 // the control stream is 0
	e, r := against(t, 2, Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour, Route: func(c net.Conn) string {
		return fmt.Sprint("connection ", c.(numbered).number)
	}}, func(c net.Conn) net.Conn {
		next++
		return numbered{c, next}
	})
	r.listens()
	r.data[1].Close()
	if told := receive(t, r.frames, "a goodbye"); told.kind != frameGoodbye ||
		!bytes.Contains(told.payload, []byte("connection 2")) {
		t.Errorf("the other side is told %q by a frame of kind %d", told.payload, told.kind)
	}
	r.close()
	var of *PeerError
	if err := e.died(); !errors.As(err, &of) || of.Route != "connection 2" {
		t.Error(err)
	}
}
