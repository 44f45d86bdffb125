package sim

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cuda"
)

func init() {
	children["graph faults"] = graphFaults
	children["graph late"] = graphLate
	children["graph misuse"] = graphMisuse
}

// graph captures one copy of b to a.
func (p process) graph() (cuda.GraphExec, error) {
	if err := errors.Join(p.StreamBeginCapture(p.s, cuda.CaptureGlobal), p.MemcpyAsync(p.a, p.b, 8, p.s)); err != nil {
		return 0, err
	}
	g, err := p.StreamEndCapture(p.s)
	if err != nil {
		return 0, err
	}
	e, err := p.GraphInstantiate(g)
	return e, errors.Join(err, p.GraphDestroy(g))
}

// graphFaults prints the results of three launches and synchronizations under faults, and the
// copied data.
func graphFaults() error {
	p, err := begin(0, 0)
	if err != nil {
		return err
	}
	if err := p.copyString(p.b, "abcdefgh"); err != nil {
		return err
	}
	e, err := p.graph()
	if err != nil {
		fmt.Print("graph ", result(err))
		return nil
	}
	for range 3 {
		fmt.Print(result(p.GraphLaunch(e, p.s)), " ", result(p.StreamSynchronize(p.s)))
		text, err := p.readString(p.a, 8)
		fmt.Printf(" %.8s%s; ", text, result(err))
	}
	return nil
}

func TestInjectedGraphFaultsChangeResults(t *testing.T) {
	dir := host(t, 1)
	const good, bad = "0 0 abcdefgh0;", "0 0 abcd\x3ffgh0;"
	for _, c := range []struct{ fault, want string }{
		{"", good + " " + good + " " + good},
		{"cuMemcpyAsync:corrupt=1", bad + " " + bad + " " + bad}, // a replay repeats the captured fault
		{"cuMemcpyAsync:error=2", "graph 2"},
		{"cuGraphInstantiate:oom", "graph 2"},
		{"cuGraphLaunch:after=1:times=1:error=1", good + " 1 0 abcdefgh0; " + good},
	} {
		if got := answer(t, dir, "graph faults", "PEERLANE_SIM_FAULT="+c.fault); got != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.fault, got, c.want)
		}
	}
}

// graphLate queries a replay without synchronization.
func graphLate() error {
	p, err := begin(0, 0)
	if err != nil {
		return err
	}
	e, err := p.graph()
	if err != nil {
		return err
	}
	if err := p.GraphLaunch(e, p.s); err != nil {
		return err
	}
	time.Sleep(20 * time.Millisecond)
	if done, err := p.StreamQuery(p.s); err != nil || done {
		return fmt.Errorf("a replay completed without synchronization: %v, %w", done, err)
	}
	return p.StreamSynchronize(p.s)
}

func TestLateGraphNeedsSynchronization(t *testing.T) {
	answer(t, host(t, 1), "graph late", "PEERLANE_SIM_LATE_MS=3600000")
}

func graphMisuse() error {
	p, err := begin(0, 0)
	if err != nil {
		return err
	}
	var wrong []error
	expect := func(what string, err error, want cuda.Result) {
		if want == 0 && err != nil || want != 0 && !errors.Is(err, want) {
			wrong = append(wrong, fmt.Errorf("%s: %v, want %v", what, err, want))
		}
	}
	e, err := p.graph()
	expect("a graph", err, 0)
	expect("a launch", p.GraphLaunch(e, p.s), 0)
	expect("its end while it is under way", p.GraphExecDestroy(e), 0)
	expect("its second end", p.GraphExecDestroy(e), cuda.ErrInvalidHandle)
	expect("a launch of it", p.GraphLaunch(e, p.s), cuda.ErrInvalidHandle)
	expect("the end of no graph", p.GraphDestroy(1), cuda.ErrInvalidHandle)
	_, err = p.GraphInstantiate(1)
	expect("no graph made launchable", err, cuda.ErrInvalidHandle)

	// Destroy streams during a capture.
	other, err := p.StreamCreate()
	expect("another stream", err, 0)
	event, err := p.EventCreate(cuda.EventOptions{})
	expect("an event", err, 0)
	expect("a capture", p.StreamBeginCapture(p.s, cuda.CaptureRelaxed), 0)
	expect("an allocation in a relaxed one", second(p.MemAlloc(8)), 0)
	expect("its fork", errors.Join(p.EventRecord(event, p.s), p.StreamWaitEvent(other, event)), 0)
	expect("the end of the other stream", p.StreamDestroy(other), 0)
	_, err = p.StreamEndCapture(p.s)
	expect("the end of the capture", err, cuda.ErrStreamCaptureInvalidated)
	expect("a wait for its event", p.StreamWaitEvent(p.s, event), cuda.ErrCapturedEvent)
	lost, err := p.StreamCreate()
	expect("one more stream", err, 0)
	expect("its capture", p.StreamBeginCapture(lost, cuda.CaptureGlobal), 0)
	expect("its end", p.StreamDestroy(lost), 0)
	expect("an allocation after that", second(p.MemAlloc(8)), 0)

	// A context can be destroyed while a stream is in capture, and while a replay waits for a value
	// that no stream writes.
	expect("a capture to be left", p.StreamBeginCapture(p.s, cuda.CaptureGlobal), 0)
	expect("a wait", p.StreamWaitBits64(p.s, p.a, 1), 0)
	expect("the context's end", p.CtxDestroy(p.ctx), 0)
	p, err = begin(0, 0)
	expect("another context", err, 0)
	expect("a second capture", p.StreamBeginCapture(p.s, cuda.CaptureGlobal), 0)
	expect("a wait that is captured", p.StreamWaitBits64(p.s, p.a, 1), 0)
	g, err := p.StreamEndCapture(p.s)
	expect("its graph", err, 0)
	e, err = p.GraphInstantiate(g)
	expect("made launchable", err, 0)
	expect("launched", p.GraphLaunch(e, p.s), 0)
	expect("the other context's end", p.CtxDestroy(p.ctx), 0)
	return errors.Join(wrong...)
}

func second[T any](_ T, err error) error { return err }

func TestMisuseOfGraphsReturnsErrors(t *testing.T) { answer(t, host(t, 1), "graph misuse") }
