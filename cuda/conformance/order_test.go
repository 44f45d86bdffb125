package conformance

import (
	"testing"

	"github.com/peerlane/peerlane/cuda"
)

// These tests create pages after the memory of gated copies: cleanup runs in reverse order, and the
// page's cleanup opens its gates.

const big = 256 * mib

func TestCopyReturnsBeforeItsBytesArrive(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, big, 0)
	to := pinned(t, big)
	gate, _ := newPage(t)
	s := stream(t)
	var word [8]byte
	tail := func(v uint64) { // sets the device's last word
		words(word[:])[0] = v
		check(t, driver.MemcpyHtoDAsync(m.p+big-8, address(word[:]), 8, s))
		check(t, driver.StreamSynchronize(s))
	}
	query := func() (bool, error) { return driver.StreamQuery(s) }

	// The copy cannot start behind a gate; the call must return.
	tail(1)
	check(t, driver.StreamWaitValue64(s, gate.address(0), 1))
	check(t, driver.MemcpyDtoHAsync(address(to), m.p, big, s))
	if v := last(to); v != 0 {
		t.Errorf("the last word is %d before the gate is open", v)
	}
	pending(t, "the gated copy", query)
	gate.set(0, 1)
	check(t, driver.StreamSynchronize(s))
	if v := last(to); v != 1 {
		t.Errorf("the last word is %d after the copy", v)
	}

	// Without a gate a reader may see the old bytes. The race with the copy of 256 MiB must show
	// the old bytes at least once.
	for round := uint64(2); ; round++ {
		tail(round)
		check(t, driver.MemcpyDtoHAsync(address(to), m.p, big, s))
		early := last(to)
		check(t, driver.StreamSynchronize(s))
		if v := last(to); v != round {
			t.Fatalf("round %d: the last word is %d after the copy", round, v)
		}
		if early == round-1 {
			break
		}
		if round == 50 {
			t.Fatal("in every round the bytes were there when the call returned")
		}
	}
}

func TestStreamsWaitForEachOther(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	flags, _ := newPage(t)
	a, b := stream(t), stream(t)
	const rounds = 100
	// Each stream waits for the last value of the other stream, copies, and writes the next value.
	// The work of a is complete before b starts.
	for i := uint64(1); i <= rounds; i++ {
		check(t, driver.StreamWaitValue64(a, flags.address(0), i))
		check(t, driver.MemcpyAsync(m.p, m.p+mib, 64<<10, a))
		check(t, driver.StreamWriteValue64(a, flags.address(1), i))
	}
	for i := uint64(1); i <= rounds; i++ {
		check(t, driver.StreamWriteValue64(b, flags.address(0), i))
		check(t, driver.StreamWaitValue64(b, flags.address(1), i))
		check(t, driver.MemcpyAsync(m.p+mib, m.p, 64<<10, b))
	}
	eventually(t, "the streams' exchange", func() (bool, error) { return driver.StreamQuery(b) })
	eventually(t, "the first stream", func() (bool, error) { return driver.StreamQuery(a) })
	if v := flags.get(1); v != rounds {
		t.Errorf("the last value is %d, want %d", v, rounds)
	}
}

func TestStreamRunsInOrder(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	flags, _ := newPage(t)
	s := stream(t)
	check(t, driver.StreamWaitValue64(s, flags.address(0), 1))
	check(t, driver.StreamWriteValue64(s, flags.address(1), 7))
	check(t, driver.StreamWriteValue64(s, m.p, 11))
	check(t, driver.MemcpyAsync(m.p+8, m.p, 8, s))
	check(t, driver.StreamWriteValue64(s, m.p, 12))
	if v := flags.get(1); v != 0 {
		t.Errorf("a value behind a closed gate was written: %d", v)
	}
	flags.set(0, 1)
	check(t, driver.StreamSynchronize(s))
	got := pinned(t, 16)
	check(t, driver.MemcpyDtoHAsync(address(got), m.p, 16, s))
	check(t, driver.StreamSynchronize(s))
	if w := words(got); flags.get(1) != 7 || w[0] != 12 || w[1] != 11 {
		t.Errorf("values %d, %d, %d; want 7, 12, 11", flags.get(1), w[0], w[1])
	}
}

func TestWaitedValuesAreCyclic(t *testing.T) {
	use(t, 0)
	flags, _ := newPage(t)
	s := stream(t)
	t.Cleanup(func() { flags.set(0, ^uint64(0)) }) // ends the wait below even if the comparison is not cyclic
	query := func() (bool, error) { return driver.StreamQuery(s) }
	flags.set(0, 5)
	check(t, driver.StreamWaitValue64(s, flags.address(0), ^uint64(0))) // -1, which 5 is ahead of
	eventually(t, "a wait for -1 at a value of 5", query)
	flags.set(0, ^uint64(0))
	check(t, driver.StreamWaitValue64(s, flags.address(0), 1))
	pending(t, "a wait for 1 at a value of -1", query)
	flags.set(0, 1)
	check(t, driver.StreamSynchronize(s))
}

func TestEventsAreNotEarly(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, 8*mib, 0)
	from, to := pinned(t, 8*mib), pinned(t, 8*mib)
	gate, _ := newPage(t)
	s, e := stream(t), event(t, cuda.EventOptions{})
	query := func() (bool, error) { return driver.EventQuery(e) }
	if done, err := query(); err != nil || !done {
		t.Errorf("an event that was never recorded: %v, %v; want done", done, err)
	}
	check(t, driver.EventRecord(e, s))
	check(t, driver.EventSynchronize(e))

	// The latest record counts.
	check(t, driver.StreamWaitValue64(s, gate.address(0), 1))
	check(t, driver.EventRecord(e, s))
	pending(t, "an event behind a closed gate", query)
	gate.set(0, 1)
	check(t, driver.EventSynchronize(e))
	if done, err := query(); err != nil || !done {
		t.Errorf("an event that was waited for: %v, %v; want done", done, err)
	}

	for round := uint64(1); round <= 20; round++ {
		fill(from[8*mib-4096:], round)
		check(t, driver.MemcpyHtoDAsync(m.p, address(from), 8*mib, s))
		check(t, driver.MemcpyDtoHAsync(address(to), m.p, 8*mib, s))
		check(t, driver.EventRecord(e, s))
		eventually(t, "the event", query)
		if err := wrong(to[8*mib-4096:], round); err != nil {
			t.Fatalf("round %d: the event is done, and the bytes are not there: %v", round, err)
		}
	}
}

func TestStreamsWaitForEvents(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	gate, _ := newPage(t)
	a, b, e := stream(t), stream(t), event(t, cuda.EventOptions{})
	check(t, driver.StreamWaitEvent(b, e)) // not recorded: nothing to wait for
	check(t, driver.StreamSynchronize(b))
	check(t, write(driver, m.p, mib, 50))
	check(t, driver.StreamWaitValue64(a, gate.address(0), 1))
	check(t, driver.MemcpyAsync(m.p+mib, m.p, mib, a))
	check(t, driver.EventRecord(e, a))
	check(t, driver.StreamWaitEvent(b, e))
	check(t, driver.MemcpyAsync(m.p+2*mib, m.p+mib, mib, b))
	// A record after the wait does not move the wait.
	check(t, driver.StreamWaitValue64(a, gate.address(1), 1))
	check(t, driver.EventRecord(e, a))
	pending(t, "the stream that waits", func() (bool, error) { return driver.StreamQuery(b) })
	gate.set(0, 1)
	eventually(t, "the stream that waits", func() (bool, error) { return driver.StreamQuery(b) })
	pending(t, "the stream that is waited for", func() (bool, error) { return driver.StreamQuery(a) })
	gate.set(1, 1)
	check(t, driver.CtxSynchronize())
	check(t, verify(driver, m.p+2*mib, mib, 50))
}

func TestDestroyedStreamFinishesItsWork(t *testing.T) {
	use(t, 0)
	gate, _ := newPage(t)
	s, err := driver.StreamCreate()
	check(t, err)
	check(t, driver.StreamWaitValue64(s, gate.address(0), 1))
	check(t, driver.StreamWriteValue64(s, gate.address(1), 9))
	check(t, driver.StreamDestroy(s))
	if v := gate.get(1); v != 0 {
		t.Errorf("a value behind a closed gate was written: %d", v)
	}
	gate.set(0, 1)
	eventually(t, "the destroyed stream's work", func() (bool, error) { return gate.get(1) == 9, nil })
}
