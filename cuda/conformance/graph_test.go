package conformance

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
)

// capture captures the work that the function adds to a stream, and instantiates the graph.
func capture(t testing.TB, s cuda.Stream, work func()) cuda.GraphExec {
	t.Helper()
	check(t, driver.StreamBeginCapture(s, cuda.CaptureGlobal))
	work()
	g, err := driver.StreamEndCapture(s)
	check(t, err)
	e, err := driver.GraphInstantiate(g)
	check(t, err)
	check(t, driver.GraphDestroy(g))
	t.Cleanup(func() { check(t, driver.GraphExecDestroy(e)) })
	return e
}

func status(t testing.TB, s cuda.Stream, want cuda.CaptureStatus) {
	t.Helper()
	got, err := driver.StreamCaptureStatus(s)
	check(t, err)
	if got != want {
		t.Errorf("the stream's state is %d, want %d", got, want)
	}
}

func TestGraphsRepeatCapturedWork(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, 4*mib, 0)
	from, to := pinned(t, mib), pinned(t, 2*mib)
	k := load(t, 0)
	flags, _ := newPage(t)
	s, other := stream(t), stream(t)
	begun, done := event(t, cuda.EventOptions{}), event(t, cuda.EventOptions{})
	pattern := kernels.Pattern{Seed: 77}
	status(t, s, cuda.CaptureNone)
	e := capture(t, s, func() {
		status(t, s, cuda.CaptureActive)
		status(t, other, cuda.CaptureNone)
		check(t, driver.StreamWaitValue64(s, flags.address(0), 1))
		check(t, driver.MemsetAsync(m.p, 0xa5, 4*mib, s))
		check(t, driver.EventRecord(begun, s))
		check(t, driver.StreamWaitEvent(other, begun))
		status(t, other, cuda.CaptureActive)
		check(t, driver.MemcpyHtoDAsync(m.p+mib, address(from), mib, other))
		check(t, driver.EventRecord(done, other))
		check(t, k.Fill(s, m.p, mib, pattern))
		check(t, driver.StreamWaitEvent(s, done))
		check(t, driver.MemcpyDtoHAsync(address(to), m.p, 2*mib, s))
		check(t, driver.StreamWriteValue64(s, flags.address(1), 5))
	})
	status(t, s, cuda.CaptureNone)
	status(t, other, cuda.CaptureNone)
	check(t, driver.StreamSynchronize(s))
	if flags.get(1) != 0 || last(to) != 0 {
		t.Fatal("what was captured was done")
	}
	for round := range uint64(5) {
		fill(from, round)
		flags.set(0, 0)
		flags.set(1, 0)
		check(t, driver.GraphLaunch(e, s))
		pending(t, "a graph behind a closed gate", func() (bool, error) { return driver.StreamQuery(s) })
		flags.set(0, 1)
		check(t, driver.StreamSynchronize(s))
		if d := pattern.Compare(to[:mib]); d.Words != 0 || flags.get(1) != 5 {
			t.Fatalf("round %d: the kernel's half: %v; the value %d", round, d, flags.get(1))
		}
		if err := wrong(to[mib:], round); err != nil {
			t.Fatalf("round %d: the other stream's half: %v", round, err)
		}
	}
	// Bytes that the graph set and no later copy overwrote.
	check(t, driver.MemcpyDtoHAsync(address(to), m.p+2*mib, 2*mib, s))
	check(t, driver.StreamSynchronize(s))
	if v := last(to); v != 0xa5a5a5a5a5a5a5a5 {
		t.Errorf("memory that was set is %#x", v)
	}
}

func TestLaunchesOfAGraphComeOneAfterTheOther(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, 2*mib, 0)
	gate, _ := newPage(t)
	a, b := stream(t), stream(t)
	e := capture(t, a, func() {
		check(t, driver.StreamWaitBits64(a, gate.address(0), 1|open))
		check(t, driver.MemcpyAsync(m.p, m.p+mib, mib, a))
		check(t, driver.StreamWriteValue64(a, gate.address(0), 2))
	})
	check(t, driver.GraphLaunch(e, a))
	check(t, driver.GraphLaunch(e, b))
	gate.set(0, 1)
	eventually(t, "one of the launches", func() (bool, error) { return gate.get(0) == 2, nil })
	first, err := driver.StreamQuery(a)
	check(t, err)
	second, err := driver.StreamQuery(b)
	check(t, err)
	if first && second {
		t.Error("both launches are done")
	}
	gate.set(0, 1)
	check(t, driver.StreamSynchronize(a))
	check(t, driver.StreamSynchronize(b))
}

// A stream waits for the same value in every replay. So the stream waits for a bit and resets the
// value itself: each replay is one turn.
func TestReplaysTakeTurnsWithTheCPU(t *testing.T) {
	use(t, 0)
	const n, replays = 4096, 1000
	m := deviceMemory(t, 0, 2*mib, 0)
	from, to := pinned(t, n), pinned(t, n)
	turns, _ := newPage(t)
	s := stream(t)
	const graphs, cpus = 1, 2
	e := capture(t, s, func() {
		check(t, driver.StreamWaitBits64(s, turns.address(0), graphs|open))
		check(t, driver.MemcpyHtoDAsync(m.p, address(from), n, s))
		check(t, driver.MemcpyDtoHAsync(address(to), m.p, n, s))
		check(t, driver.StreamWriteValue64(s, turns.address(0), cpus))
	})
	turns.set(0, cpus)
	for replay := range uint64(replays) {
		check(t, driver.GraphLaunch(e, s))
		if replay%100 == 0 {
			pending(t, "a replay whose turn it is not", func() (bool, error) { return driver.StreamQuery(s) })
		}
		fill(from, replay)
		turns.set(0, graphs)
		eventually(t, "the graph's turn to end", func() (bool, error) { return turns.get(0) == cpus, nil })
		if err := wrong(to, replay); err != nil {
			t.Fatalf("replay %d: %v", replay, err)
		}
	}
	check(t, driver.StreamSynchronize(s))
}

func TestCaptureRefusesBlockingCalls(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, 2*mib, 0)
	s, other := stream(t), stream(t)
	in, out := event(t, cuda.EventOptions{}), event(t, cuda.EventOptions{})
	check(t, driver.EventRecord(out, other))
	begin := func(s cuda.Stream) { check(t, driver.StreamBeginCapture(s, cuda.CaptureGlobal)) }
	end := func(what string, s cuda.Stream, results ...cuda.Result) {
		t.Helper()
		_, err := driver.StreamEndCapture(s)
		refused(t, what, err, results...)
		status(t, s, cuda.CaptureNone)
	}
	finish := func(s cuda.Stream) { // the driver decides whether the capture is invalid
		t.Helper()
		if g, err := driver.StreamEndCapture(s); err == nil {
			check(t, driver.GraphDestroy(g))
		}
		status(t, s, cuda.CaptureNone)
	}
	invalidates := func(what string, err error, results ...cuda.Result) {
		t.Helper()
		refused(t, what, err, results...)
		status(t, s, cuda.CaptureInvalidated)
		refused(t, "work after "+what, driver.MemcpyAsync(m.p, m.p+mib, 8, s), cuda.ErrStreamCaptureInvalidated)
		end("the end after "+what, s, cuda.ErrStreamCaptureInvalidated)
	}

	end("the end of what was not begun", s, cuda.ErrIllegalState)
	refused(t, "capture of the default stream", driver.StreamBeginCapture(0, cuda.CaptureGlobal),
		cuda.ErrStreamCaptureUnsupported)

	begin(s)
	refused(t, "a second beginning", driver.StreamBeginCapture(s, cuda.CaptureGlobal), cuda.ErrIllegalState)
	finish(s)

	begin(s)
	invalidates("waiting for the stream", driver.StreamSynchronize(s), cuda.ErrStreamCaptureUnsupported)
	begin(s)
	_, err := driver.StreamQuery(s)
	invalidates("asking for the stream", err, cuda.ErrStreamCaptureUnsupported)
	begin(s)
	_, err = driver.MemAlloc(mib)
	invalidates("an allocation", err, cuda.ErrStreamCaptureUnsupported)
	begin(s)
	invalidates("a wait for an event from outside", driver.StreamWaitEvent(s, out), cuda.ErrStreamCaptureIsolation)

	begin(s)
	check(t, driver.EventRecord(in, s))
	_, err = driver.EventQuery(in)
	refused(t, "asking for an event of the capture", err, cuda.ErrCapturedEvent)
	finish(s)

	begin(s)
	check(t, driver.EventRecord(in, s))
	check(t, driver.StreamWaitEvent(other, in))
	check(t, driver.MemcpyAsync(m.p, m.p+mib, 8, other))
	end("the end with work that nobody waited for", s, cuda.ErrStreamCaptureUnjoined)
	status(t, other, cuda.CaptureNone)

	begin(s)
	check(t, driver.EventRecord(in, s))
	check(t, driver.StreamWaitEvent(other, in))
	_, err = driver.StreamEndCapture(other)
	refused(t, "the end in another stream", err, cuda.ErrStreamCaptureUnmatched)
	finish(s)

	begin(s)
	begin(other)
	check(t, driver.EventRecord(in, s))
	refused(t, "a wait for another capture", driver.StreamWaitEvent(other, in), cuda.ErrStreamCaptureMerge)
	end("the end of the one", s, cuda.ErrStreamCaptureInvalidated)
	end("the end of the other", other, cuda.ErrStreamCaptureInvalidated)
}

func TestCaptureEndsInItsThread(t *testing.T) {
	ctx := use(t, 0)
	s := stream(t)
	elsewhere := func() error {
		result := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and so does the context
			err := driver.CtxSetCurrent(ctx)
			if err == nil {
				_, err = driver.StreamEndCapture(s)
			}
			result <- errors.Join(err, driver.CtxSetCurrent(0))
		}()
		return <-result
	}
	check(t, driver.StreamBeginCapture(s, cuda.CaptureThreadLocal))
	refused(t, "the end in another thread", elsewhere(), cuda.ErrStreamCaptureWrongThread)
	if g, err := driver.StreamEndCapture(s); err == nil {
		check(t, driver.GraphDestroy(g))
	}
	check(t, driver.StreamBeginCapture(s, cuda.CaptureRelaxed))
	if err := elsewhere(); err != nil {
		t.Error(fmt.Errorf("the end of a relaxed capture in another thread: %w", err))
	}
}
