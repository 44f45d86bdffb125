package tcp

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// TestRelayPairSharesOnePeer demands that the clients of a relay share one Peer for each peer relay
// and pair of NICs. A Peer that was unreachable or has died is dialed again.
func TestRelayPairSharesOnePeer(t *testing.T) {
	noGoroutines(t)
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan struct{})
	go func() { loop.Run(); close(ran) }()
	defer func() { loop.Stop(); <-ran }()
	down := make(chan error, 10)
	peers := NewPeers(loop, func(k Key) Config {
		return Config{Name: k.Relay, Heartbeat: 20 * time.Millisecond, Dead: time.Hour, Down: func(err error) { down <- err }}
	})
	var dialed atomic.Int64
	var others []*Streams
	dial := func(context.Context) (*Streams, error) {
		dialed.Add(1)
		mine, theirs := greeted(t, pipes, 1, 0)
		others = append(others, theirs)
		return mine, nil
	}
	defer func() {
		for _, s := range others {
			s.close()
		}
	}()
	refuses := errors.New("no route to host")
	key := Key{"node7", "10.0.0.1", "10.0.0.7"}
	if _, err := peers.Reach(t.Context(), key, func(context.Context) (*Streams, error) { return nil, refuses }); err !=
		refuses {
		t.Error(err)
	}
	reach := func(k Key) *Peer {
		p, err := peers.Reach(t.Context(), k, dial)
		if err != nil {
			t.Error(err)
		}
		return p
	}
	got := make([]*Peer, 20)
	var all sync.WaitGroup
	for i := range got {
		all.Go(func() { got[i] = reach(key) })
	}
	all.Wait()
	for _, p := range got {
		if p == nil || p != got[0] {
			t.Fatal("clients have several peers")
		}
	}
	if dialed.Load() != 1 {
		t.Errorf("dialed %d times", dialed.Load())
	}
	other := reach(Key{"node7", "10.1.0.1", "10.1.0.7"})
	if other == got[0] {
		t.Error("another pair of NICs has the same peer")
	}
	got[0].Close()
	receive(t, down, "the peer's end")
	again := reach(key)
	if again == got[0] {
		t.Error("a dead peer is given")
	}
	for range 2 {
		again.Close()
		other.Close()
		receive(t, down, "a peer's end")
	}
	mine, theirs := greeted(t, pipes, 1, 0)
	others = append(others, theirs)
	accepted, err := peers.Accepted(key, mine)
	if err != nil {
		t.Fatal(err)
	}
	before := dialed.Load()
	if reach(key) != accepted || dialed.Load() != before {
		t.Error("what the other side dialed is not used")
	}
	peers.Close()
	receive(t, down, "the peer's end")
	if _, err := peers.Reach(t.Context(), key, dial); wire.StatusOf(err) != wire.StatusRelayDied {
		t.Errorf("after the end: %v", err)
	}
}

// newPeers returns Peers on their own loop, and a dial function.
func newPeers(t *testing.T) (peers *Peers, dial func(context.Context) (*Streams, error)) {
	t.Helper()
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan struct{})
	go func() { loop.Run(); close(ran) }()
	t.Cleanup(func() { loop.Stop(); <-ran })
	down := make(chan error, 10)
	made := 0
	peers = NewPeers(loop, func(k Key) Config {
		made++
		return Config{Name: k.Relay, Heartbeat: 20 * time.Millisecond, Dead: time.Hour, Down: func(err error) { down <- err }}
	})
	var others []*Streams
	t.Cleanup(func() {
		peers.Close()
		for range made {
			receive(t, down, "a peer's end")
		}
		for _, s := range others {
			s.close()
		}
	})
	return peers, func(context.Context) (*Streams, error) {
		mine, theirs := greeted(t, pipes, 1, 0)
		others = append(others, theirs)
		return mine, nil
	}
}

// TestEndingPeerIsNotReused demands another Peer for a call during the end of a Peer, which lasts
// as long as its connections are in use.
func TestEndingPeerIsNotReused(t *testing.T) {
	peers, dial := newPeers(t)
	key := Key{Relay: "node7"}
	first, err := peers.Reach(t.Context(), key, dial)
	if err != nil {
		t.Fatal(err)
	}
	first.users.Add(1) // a user of the connections
	first.Close()
	second, err := peers.Reach(t.Context(), key, dial)
	if err != nil || second == first {
		t.Errorf("%p after %p: %v", second, first, err)
	}
	first.users.Done()
	if third, err := peers.Reach(t.Context(), key, dial); err != nil || third != second {
		t.Errorf("%p after %p: %v", third, second, err)
	}
}

// asked is a context that reports the first wait for its end.
type asked struct {
	context.Context
	once sync.Once
	by   chan struct{}
}

func (a *asked) Done() <-chan struct{} {
	a.once.Do(func() { close(a.by) })
	return a.Context.Done()
}

// TestCanceledDialLeavesOtherWaiters demands that a canceled dial does not fail the calls that wait
// for the dial.
func TestCanceledDialLeavesOtherWaiters(t *testing.T) {
	peers, dial := newPeers(t)
	key := Key{Relay: "node7"}
	impatient, cancel := context.WithCancel(t.Context())
	dialing := make(chan struct{})
	gaveUp := make(chan error, 1)
	go func() {
		_, err := peers.Reach(impatient, key, func(ctx context.Context) (*Streams, error) {
			close(dialing)
			<-ctx.Done()
			return nil, ctx.Err()
		})
		gaveUp <- err
	}()
	receive(t, dialing, "the first one's dialing")
	patient := &asked{Context: t.Context(), by: make(chan struct{})}
	reached := make(chan error, 1)
	go func() {
		_, err := peers.Reach(patient, key, dial)
		reached <- err
	}()
	receive(t, patient.by, "the second one's waiting")
	cancel()
	if err := receive(t, gaveUp, "the first one"); err != context.Canceled {
		t.Error(err)
	}
	if err := receive(t, reached, "the second one"); err != nil {
		t.Error(err)
	}
}
