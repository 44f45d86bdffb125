package ring

import (
	"errors"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/wire"
)

func pair(t *testing.T) (*Relay, *Client) {
	t.Helper()
	r, err := NewRelay()
	if err != nil {
		t.Fatal(err)
	}
	c, err := OpenClient(r.FDs())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(c.Close(), r.Close()); err != nil {
			t.Error(err)
		}
	})
	return r, c
}

func TestDescriptorsAndCompletionsKeepTheirOrder(t *testing.T) {
	r, c := pair(t)
	const rounds = 5*wire.RingEntries + 7
	posted, taken, finished := uint64(0), uint64(0), uint64(0)
	for finished < rounds {
		for posted < rounds {
			if _, err := c.Post(wire.Descriptor{Cookie: posted}); err != nil {
				break
			}
			posted++
		}
		for {
			d, ok, err := r.Take()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if d.Cookie != taken {
				t.Fatalf("descriptor %d came as number %d", d.Cookie, taken)
			}
			taken++
			r.Complete(wire.Completion{Cookie: d.Cookie})
		}
		for {
			e, ok := c.Next()
			if !ok {
				break
			}
			if e.Cookie != finished {
				t.Fatalf("completion %d came as number %d", e.Cookie, finished)
			}
			finished++
		}
	}
}

func TestClientThatReadsNoCompletionsIsHeldBack(t *testing.T) {
	r, c := pair(t)
	for i := range uint64(wire.RingEntries) {
		if _, err := c.Post(wire.Descriptor{Cookie: i}); err != nil {
			t.Fatal(err)
		}
		if _, ok, err := r.Take(); !ok || err != nil {
			t.Fatalf("descriptor %d: %v %v", i, ok, err)
		}
	}
	if _, err := c.Post(wire.Descriptor{}); err != nil {
		t.Fatal(err)
	}
	if _, ok, _ := r.Take(); ok {
		t.Fatal("the relay took a descriptor without room for its completion")
	}
	r.Complete(wire.Completion{})
	if _, ok, _ := r.Take(); ok {
		t.Fatal("the relay took a descriptor while the completion was unread")
	}
	if _, ok := c.Next(); !ok {
		t.Fatal("no completion")
	}
	if _, ok, err := r.Take(); !ok || err != nil {
		t.Fatalf("the relay did not go on: %v %v", ok, err)
	}
}

func TestHostileRingIsRefused(t *testing.T) {
	bad := &wire.Error{Status: wire.StatusBadRing}
	r, c := pair(t)
	atomic.StoreUint64(&c.submitPage.Tail, wire.RingEntries+1)
	if _, _, err := r.Take(); !errors.Is(err, bad) {
		t.Errorf("a tail too far ahead: %v", err)
	}
	r, c = pair(t)
	if _, err := c.Post(wire.Descriptor{}); err != nil {
		t.Fatal(err)
	}
	atomic.StoreUint64(&c.submitPage.CompletedHead, 1)
	if _, _, err := r.Take(); !errors.Is(err, bad) {
		t.Errorf("completions read that were never written: %v", err)
	}
}

func TestClientCannotWriteCompletionsOrResizeMemory(t *testing.T) {
	r, _ := pair(t)
	submit, complete := r.FDs()
	if _, err := unix.Mmap(complete, 0, wire.CompleteBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("the complete memory can be mapped for writing")
	}
	if _, err := unix.Pwrite(complete, []byte{1}, 0); err == nil {
		t.Error("the complete memory can be written")
	}
	for _, fd := range []int{submit, complete} {
		if err := unix.Ftruncate(fd, 0); err == nil {
			t.Error("the memory can be shrunk")
		}
	}
}

func TestReachedComparesCyclically(t *testing.T) {
	for _, c := range []struct {
		now, value uint64
		want       bool
	}{{0, 0, true}, {0, 1, false}, {2, 1, true}, {1, ^uint64(0), true}, {^uint64(0), 1, false},
		{wire.TimelineEnd, 1 << 40, true}} {
		if got := Reached(c.now, c.value); got != c.want {
			t.Errorf("Reached(%#x, %#x) = %v", c.now, c.value, got)
		}
	}
}
