package verbs

import (
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// newFlushedStream returns a stream into memory that needs flushes, as memory of a GPU.
func newFlushedStream(t *testing.T) *stream {
	t.Helper()
	return newStreamFlushedWhile(t, func() bool { return true })
}

// newStreamFlushedWhile returns a stream into such memory. The NICs have flushers if can is true
// during their creation.
func newStreamFlushedWhile(t *testing.T, can func() bool) *stream {
	t.Helper()
	w := connected(t, func(_ string, c *Config) {
		c.Flush, c.Stages = func(*device.Memory) bool { return true }, can
	})
	return newStreamInto(w, func(m *device.Memory) {
		f := w.b.fabric
		f.mu.Lock()
		defer f.mu.Unlock()
		f.registration(purpose{m, true}).flush = true
	})
}

func number(t *testing.T, c softdevice.Call, argument string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(c.Arguments[argument], 0, 64)
	if err != nil {
		t.Fatalf("%s %v: %v", c.Name, c.Arguments, err)
	}
	return n
}

// TestDoubtfulWritesAreFlushedFirst demands a flush of a doubtful write before another grant of its
// place: a part may be on the way into memory of a GPU, and another NIC, or another message, may
// write the place.
func TestDoubtfulWritesAreFlushedFirst(t *testing.T) {
	s := newFlushedStream(t)
	if err := s.rdma.Script("send delay=5"); err != nil { // keeps many writes outstanding
		t.Fatal(err)
	}
	s.begin()
	receive(t, s.done, "the first write")
	s.done <- nil
	s.a.loop.Call(func() { s.a.set.fault(s.a.set.nics[0], "a test's fault") })
	if err := s.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	s.mustEnd(t)

	calls, err := s.rdma.Calls("ibv_create_qp", "ibv_post_send", "ibv_destroy_qp")
	if err != nil {
		t.Fatal(err)
	}
	const writeImmediate, read = 1, 4
	old, destroyed := map[uint64]bool{}, false
	before, flushed := map[uint64]bool{}, map[uint64]bool{} // slots
	base := placeOf(s.to.At(0))
	doubts := 0
	for _, c := range calls {
		qp := number(t, c, "qp")
		switch c.Name {
		case "ibv_create_qp":
			old[qp] = old[qp] || !destroyed
		case "ibv_destroy_qp":
			destroyed = true
		case "ibv_post_send":
			remote := number(t, c, "remote")
			if remote < base || remote >= base+s.to.Bytes {
				continue
			}
			switch at := (remote - base) / streamBytes; {
			case number(t, c, "op") == read && !old[qp]:
				flushed[at] = true
			case number(t, c, "op") == writeImmediate && old[qp]:
				before[at] = true
			case number(t, c, "op") == writeImmediate && before[at]:
				doubts++
				if !flushed[at] {
					t.Fatalf("slot %d is written again before it was flushed", at)
				}
			}
		}
	}
	if doubts == 0 {
		t.Error("no write was in doubt")
	}
}

// TestFlushingNICsReplaceFlushingNICs demands that only NICs with flushers replace NICs with
// flushers, if there are any: one NIC of iWARP would disable flushes.
func TestFlushingNICsReplaceFlushingNICs(t *testing.T) {
	roce, iwarp := &nic{name: "a0"}, &nic{name: "c0", cm: &managed{}}
	if got := thatFlush([]*nic{iwarp, roce}); !slices.Equal(got, []*nic{roce}) {
		t.Errorf("of both kinds %d are taken", len(got))
	}
	if got := thatFlush([]*nic{iwarp}); !slices.Equal(got, []*nic{iwarp}) {
		t.Errorf("of one that cannot %d are taken", len(got))
	}
}

// TestReconnectWithoutFlushIsRetried demands that a reconnect that cannot flush earlier writes or
// writes to repeat is a failed try, and that further tries follow.
func TestReconnectWithoutFlushIsRetried(t *testing.T) {
	for name, fail := range map[string]func(*stream) error{
		"what was kept": func(s *stream) error {
			err := s.rdma.Script("send status=12 device=b0") // b0 sends only flushes
			s.begin()
			s.b.until("flushes that are kept", func(s *QPGroup) bool { return len(s.kept) > 0 })
			return err
		},
		"what comes again": func(s *stream) error {
			err := s.rdma.Script("send status=12 device=a0")
			s.begin()
			s.b.until("a fault, and tries that fail", func(s *QPGroup) bool { return s.protocol.epoch > 1 })
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var can atomic.Bool
			can.Store(true)
			s := newStreamFlushedWhile(t, can.Load)
			if err := fail(s); err != nil {
				t.Fatal(err)
			}
			can.Store(false)
			if err := s.rdma.Script(); err != nil {
				t.Fatal(err)
			}
			epoch := uint32(0)
			s.b.loop.Call(func() { epoch = s.b.set.protocol.epoch })
			s.b.until("tries that fail", func(s *QPGroup) bool {
				return s.gone != nil || s.protocol.epoch > epoch+2 && strings.Contains(s.lastFault, "nothing can be flushed")
			})
			can.Store(true)
			s.mustEnd(t)
		})
	}
}

// TestFailedFirstWritesLeaveNoState demands that a fault of the first writes of a reconnect, with
// others in the same batch of completions, leaves nothing to wait for.
func TestFailedFirstWritesLeaveNoState(t *testing.T) {
	w := connected(t)
	s := newStream(w)
	s.begin()
	if err := breaking("send status=12 device=b0")(w); err != nil {
		t.Fatal(err)
	}
	w.a.until("tries that fail", func(s *QPGroup) bool { return s.protocol.epoch > 2 || s.gone != nil })
	if err := w.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	s.mustEnd(t)
}

// TestArrivalsOfARegionShareFlushes demands that writes that arrive during flushes of their region
// share the next flush: each flush costs the NIC and the relay a request and a completion.
func TestArrivalsOfARegionShareFlushes(t *testing.T) {
	s := newFlushedStream(t)
	if err := s.rdma.Script("send delay=2 device=b0", "send delay=2 device=b1"); err != nil { // only flushes
		t.Fatal(err)
	}
	s.begin()
	s.mustEnd(t)
	calls, err := s.rdma.Calls("ibv_post_send")
	if err != nil {
		t.Fatal(err)
	}
	const writeImmediate, read = 1, 4
	base := placeOf(s.to.At(0))
	writes, flushes := 0, 0
	for _, c := range calls {
		if remote := number(t, c, "remote"); remote < base || remote >= base+s.to.Bytes {
			continue
		}
		switch number(t, c, "op") {
		case writeImmediate:
			writes++
		case read:
			flushes++
		}
	}
	if flushes == 0 || flushes > writes/4 {
		t.Errorf("%d flushes of %d writes, want at most a quarter", flushes, writes)
	}
}

// TestLostNICWithKeptFlushesEndsPeer demands that the loss of a NIC with kept flushes ends the Peer
// at once, without tries to reconnect.
func TestLostNICWithKeptFlushesEndsPeer(t *testing.T) {
	w := connected(t, func(_ string, c *Config) {
		c.Reconnect = time.Hour
		c.Flush, c.Stages = func(*device.Memory) bool { return true }, func() bool { return true }
	})
	s := newStreamInto(w, func(m *device.Memory) {
		f := w.b.fabric
		f.mu.Lock()
		defer f.mu.Unlock()
		f.registration(purpose{m, true}).flush = true
	})
	if err := s.rdma.Script("send status=12 device=b0"); err != nil { // b0 sends only flushes
		t.Fatal(err)
	}
	s.begin()
	s.b.until("flushes that are kept", func(s *QPGroup) bool { return len(s.kept) > 0 })
	s.b.loop.Call(func() {
		for _, k := range s.b.set.kept {
			if !k.nic.dead.Load() {
				s.b.fabric.died(k.nic, "a test's word")
			}
		}
	})
	for range streamWrites {
		if err := receive(t, s.done, "a write's end"); err != nil {
			return
		}
	}
	t.Error("every write has succeeded")
}
