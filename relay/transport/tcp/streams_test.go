package tcp

import (
	"sync"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
)

// newSendQueue returns a queue whose writers only take pieces, until the end of the queue.
func newSendQueue(t *testing.T, writers int, spinners int32) (s *sendQueue, taken chan piece) {
	s, taken = &sendQueue{piece: 100, maxSpinners: spinners}, make(chan piece, 1000)
	s.wake.L = &s.mu
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for {
				w, p, _ := s.take()
				if w == nil {
					return
				}
				taken <- p
			}
		})
	}
	t.Cleanup(func() { s.end(); all.Wait() })
	return s, taken
}

func ofLength(n uint64) *write { return &write{piece: piece{length: n}, from: make([]byte, n)} }

// sleepers waits until a number of writers sleep.
func (s *sendQueue) sleepers(t *testing.T, n int) {
	testutil.Until(t, "the writers to sleep", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.sleeping == n && s.wakeups == 0 && s.spinning == 0
	})
}

// TestWritersWakeOncePerPiece demands that the queue wakes at most as many writers as there are
// pieces without another writer.
func TestWritersWakeOncePerPiece(t *testing.T) {
	for _, c := range []struct {
		name                                  string
		called, looking                       int
		waiting                               uint64 // pieces
		length                                uint64
		wantCalled, wantAsleep, asleepAtFirst int
	}{
		{name: "two pieces", length: 200, wantCalled: 2, asleepAtFirst: 8, wantAsleep: 6},
		{name: "and a bit", length: 201, wantCalled: 3, asleepAtFirst: 8, wantAsleep: 5},
		{name: "more than writers", length: 10_000, wantCalled: 8, asleepAtFirst: 8},
		{name: "one looks", length: 200, looking: 1, wantCalled: 1, asleepAtFirst: 8, wantAsleep: 7},
		{name: "one is called", length: 100, called: 1, waiting: 1, wantCalled: 2, asleepAtFirst: 7, wantAsleep: 6},
		{name: "enough look", length: 200, looking: 2, asleepAtFirst: 8, wantAsleep: 8},
	} {
		s := &sendQueue{piece: 100, wakeups: c.called, spinning: c.looking, sleeping: c.asleepAtFirst, pieces: c.waiting}
		s.wake.L = &s.mu
		s.put(ofLength(c.length))
		if s.wakeups != c.wantCalled || s.sleeping != c.wantAsleep || !s.ready.Load() {
			t.Errorf("%s: %d are called and %d asleep, want %d and %d", c.name, s.wakeups, s.sleeping, c.wantCalled,
				c.wantAsleep)
		}
	}
}

// TestPiecesAreTakenOnce demands that each piece is taken once, with sleeping and spinning writers,
// and that every writer ends.
func TestPiecesAreTakenOnce(t *testing.T) {
	for _, spinners := range []int32{0, 1, 8} {
		s, taken := newSendQueue(t, 8, spinners)
		for round := range 200 {
			if round%10 == 0 {
				s.sleepers(t, 8)
			}
			s.put(ofLength(250))
			s.put(ofLength(1))
			bytes := uint64(0)
			for range 4 {
				bytes += uint64(receive(t, taken, "a piece").bytes)
			}
			if bytes != 251 {
				t.Fatalf("%d spinners: pieces of %d bytes came, want 251", spinners, bytes)
			}
		}
		s.sleepers(t, 8)
		if s.ready.Load() || s.pieces != 0 || len(s.queue) != 0 {
			t.Errorf("%d spinners: %d pieces are left", spinners, s.pieces)
		}
	}
}
