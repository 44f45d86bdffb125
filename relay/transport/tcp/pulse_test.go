package tcp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/wire"
)

// timedSocket counts the deadlines of a TCP connection.
type timedSocket struct {
	*net.TCPConn
	deadlines *atomic.Int64
}

func (c timedSocket) SetReadDeadline(at time.Time) error {
	c.deadlines.Add(1)
	return c.TCPConn.SetReadDeadline(at)
}

func (c timedSocket) SetWriteDeadline(at time.Time) error {
	c.deadlines.Add(1)
	return c.TCPConn.SetWriteDeadline(at)
}

// TestHeartbeatsSetNoDeadlines demands that an idle Peer sets one deadline, the zero of the first
// wait, and sends heartbeats without deadlines: the runtime wakes the process at the old time of a
// deadline that each heartbeat moves.
func TestHeartbeatsSetNoDeadlines(t *testing.T) {
	ours, theirs := loopback(t)
	var deadlines atomic.Int64
	beats := 0
	config := Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour}
	newSide(t, &Streams{control: timedSocket{theirs.(*net.TCPConn), &deadlines}, piece: rawPiece, ours: rawPiece}, config)
	defer ours.Close()
	header := make([]byte, frameHeader)
	for beats < 20 {
		if _, err := io.ReadFull(ours, header); err != nil {
			t.Fatal(err)
		}
		if f, _, err := nextFrame(header); err != nil || f.kind != frameBeat {
			t.Fatalf("%+v %v", f, err)
		}
		// Two for each interval, so that no interval of a slow host lacks a heartbeat.
		if _, err := ours.Write(append(appendFrame(nil, 0, frameBeat), appendFrame(nil, 0, frameBeat)...)); err != nil {
			t.Fatal(err)
		}
		beats++
	}
	// An interval without an iteration of this process has a wait with deadlines.
	if n := deadlines.Load(); n >= int64(beats) {
		t.Errorf("%d deadlines during %d heartbeats; want fewer than one a heartbeat", n, beats)
	}
}

// TestSilentSocketEndsPeerAfterSilence demands that on a socket the silence of a Peer counts from
// the last received bytes.
func TestSilentSocketEndsPeerAfterSilence(t *testing.T) {
	t.Parallel()
	ours, theirs := loopback(t)
	defer ours.Close()
	config := Config{Heartbeat: 20 * time.Millisecond, Dead: 500 * time.Millisecond}
	e := newSide(t, &Streams{control: theirs, piece: rawPiece, ours: rawPiece}, config)
	var last time.Time
	for range 10 {
		last = time.Now()
		if _, err := ours.Write(appendFrame(nil, 0, frameBeat)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(config.Heartbeat)
	}
	err := e.died()
	if took := time.Since(last); took < config.silence()-config.Heartbeat/10 {
		t.Errorf("dead %v after the last heartbeat, want %v", took, config.silence())
	}
	if wire.StatusOf(err) != wire.StatusPeerRelayDied || !errors.Is(err, errSaidNothing) {
		t.Error(err)
	}
}

// TestPeersShareHeartbeatTimer demands that heartbeats to two sets of connections leave together:
// one timer sends both.
func TestPeersShareHeartbeatTimer(t *testing.T) {
	peers, dial := newPeers(t)
	var made []*Peer
	for _, name := range []string{"node7", "node8"} {
		p, err := peers.Reach(t.Context(), Key{Relay: name}, func(ctx context.Context) (*Streams, error) { return dial(ctx) })
		if err != nil {
			t.Fatal(err)
		}
		made = append(made, p)
	}
	u := made[0].config.pulse
	if made[1].config.pulse != u {
		t.Fatal("each Peer has a timer of its own")
	}
	running := func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		return u.ended != nil
	}
	made[0].Close()
	if !running() {
		t.Error("no heartbeats for the second Peer after the end of the first")
	}
	made[1].Close()
	if running() {
		t.Error("the timer runs without Peers")
	}
}

// The kernel's timer sends heartbeats, and the runtime's where the kernel gives none.
func TestHeartbeatTimerFallsBack(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		interval time.Duration // of the runtime's timer
		newTimer func(time.Duration) (*os.File, error)
		kernel   bool
	}{
		{"timerfd", time.Hour, func(time.Duration) (*os.File, error) { return newTimer(time.Millisecond) }, true},
		{"no timerfd", time.Millisecond, func(time.Duration) (*os.File, error) { return nil, unix.EMFILE }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			ours, theirs := loopback(t)
			defer ours.Close()
			u := newPulse(c.interval)
			u.newTimer = c.newTimer
			config := Config{Heartbeat: time.Hour, Dead: 3 * time.Hour}
			config.pulse = u
			newSide(t, &Streams{control: theirs, piece: rawPiece, ours: rawPiece}, config)
			u.mu.Lock()
			if (u.timer != nil) != c.kernel {
				t.Errorf("the timer is %v", u.timer)
			}
			u.mu.Unlock()
			three := make([]byte, 3*len(heartbeat))
			if err := ours.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(ours, three); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(three, slices.Repeat(heartbeat, 3)) {
				t.Errorf("the peer sent %x", three)
			}
		})
	}
}
