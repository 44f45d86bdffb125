package relay_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/launch"
)

// Random programs of two containers' clients are compared with a model of delivery: per connection
// and tag the k-th message matches the k-th receive, whole and once, one-sided operations are
// whole, and without an ended object there is no error. Nothing else of any memory changes, ever. A
// failure is shrunk, and prints the program.
//
// PEERLANE_MODEL_PROGRAMS is the number of programs per route; -rapid.seed repeats a failure.
func TestModelMessagesMatchReceives(t *testing.T) {
	setFlag(t, "rapid.checks", strconv.Itoa(modelBatch))
	setFlag(t, "rapid.steps", "40")
	setFlag(t, "rapid.nofailfile", "true")
	programs, patience := 30, 25*time.Second // `make soak-model` runs 10,000
	if wanted := os.Getenv("PEERLANE_MODEL_PROGRAMS"); wanted != "" {
		var err error
		if programs, err = strconv.Atoi(wanted); err != nil {
			t.Fatal(err)
		}
		patience = 12 * time.Hour
	}
	for ; programs > modelProcess; programs -= modelProcess {
		run := exec.Command(os.Args[0], "-test.run=^TestModelMessagesMatchReceives$", "-test.v", "-test.timeout=12h")
		run.Env = append(os.Environ(), "PEERLANE_MODEL_PROGRAMS="+strconv.Itoa(modelProcess))
		run.Stdout, run.Stderr = os.Stdout, os.Stderr
		if err := run.Run(); err != nil {
			t.Fatal(err)
		}
	}
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			t.Parallel() // they wait more than they work
			runModel(t, route, programs, patience)
		})
	}
}

// modelProcess is the number of programs of a process, because a relay that has ended leaves streams,
// which are threads of the simulator, to the end of the process.
const modelProcess = 500

// modelBatch is the number of programs between two checks of the time: an emulated machine runs
// few.
const modelBatch = 15

// The same with copies that end as late as the order permits.
func TestModelLateCopiesMatchReceives(t *testing.T) {
	if out, err := modelElsewhere("15", "PEERLANE_SIM_LATE_MS=2"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// The simulator corrupts a byte in every copy after the second, for any call; the model reports the
// byte.
func TestModelReportsCorruptByte(t *testing.T) {
	out, err := modelElsewhere("30", "PEERLANE_SIM_FAULT=cuMemcpy*:after=2:corrupt=1")
	if err == nil || !bytes.Contains(out, []byte("the bytes differ from byte")) {
		t.Fatalf("%v\n%s", err, out)
	}
}

// modelElsewhere runs so many programs in a process whose simulator is told more.
func modelElsewhere(programs, simulator string) ([]byte, error) {
	run := exec.Command(os.Args[0], "-test.run=^TestModelMessagesMatchReceives$", "-test.timeout=10m",
		"-rapid.shrinktime=1ms")
	run.Env = append(os.Environ(), simulator)
	if os.Getenv("PEERLANE_MODEL_PROGRAMS") == "" {
		run.Env = append(run.Env, "PEERLANE_MODEL_PROGRAMS="+programs)
	}
	return run.CombinedOutput()
}

func setFlag(t *testing.T, name, value string) {
	t.Helper()
	f := flag.Lookup(name)
	before := f.Value.String()
	if err := f.Value.Set(value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Value.Set(before); err != nil {
			t.Error(err)
		}
	})
}

// The sizes of the model's world: messages of up to three and a half slots over few slots, so that
// messages wait for slots.
const (
	modelSlot       = 64 << 10
	modelSlots      = 3
	modelLargest    = modelSlot*7/2 + 5
	modelBytes      = 2 << 20
	modelMemory     = 3 // allocations per container, and so the most sessions
	modelBackground = 0xa5
	modelPatience   = time.Minute
)

// modelEmpty is a memory before the first message.
var modelEmpty = sync.OnceValue(newModelEmpty)

// newModelEmpty makes an equal memory that the race detector does not check byte by byte: that
// would be most of the work.
func newModelEmpty() []byte {
	b, err := unix.Mmap(-1, 0, modelBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(err)
	}
	for i := range b {
		b[i] = modelBackground
	}
	return b
}

// container is a container with a replaceable relay.
type container struct {
	name   string
	gpu    int
	lane   launch.Lane
	socket string
	relay  *relay.Relay
	ended  chan error
	memory []*allocation // for sessions to export
	wants  [][]byte      // like modelEmpty, for the expected content of sessions
}

// allocation is GPU memory, seen without CUDA: the simulator's is a file.
type allocation struct {
	fd   int
	view []byte // of memory that no session uses: like modelEmpty
	// window is in place of view on real GPUs.
	window *window
	used   *attached
	mine   bool // of the session alone: staging memory, or the host's
	host   bool
}

func (h *host) container(name, route string, client, server int, nic string) *container {
	h.t.Helper()
	c := &container{name: name, gpu: client, lane: copying(far(client, server, nic))}
	for range modelMemory {
		m := viewed(h.t, client, modelBytes)
		copy(m.view, modelEmpty())
		c.memory = append(c.memory, m)
	}
	c.begin(h, route)
	h.t.Cleanup(func() { c.end(h.t, false) })
	return c
}

func (c *container) begin(h *host, route string) {
	h.t.Helper()
	generation := fmt.Sprintf("%032x", rand.Uint64())
	c.socket = filepath.Join(h.dir, c.name)
	r, err := relay.New(listen(h.t, c.socket), listen(h.t, filepath.Join(h.dir, generation+".sock")), -1)
	if err != nil {
		h.t.Fatal(err)
	}
	config := launch.Config{
		Generation: generation, Container: c.name, Lanes: []launch.Lane{c.lane}, Route: route,
		Transport: launch.TransportAuto,
		Slots:     modelSlots, SlotBytes: modelSlot, Peers: h.dir,
	}
	if h.soft != nil && route != launch.RouteDirect {
		err = h.useNICs(r, &config)
	}
	if err = errors.Join(err, r.Configure(config)); err != nil {
		h.t.Fatal(err)
	}
	c.relay, c.ended = r, make(chan error, 1)
	go func() { c.ended <- r.Run() }()
}

// end ends the relay: the relay sends a reason, or is just gone, as after a kill.
func (c *container) end(t testing.TB, atOnce bool) {
	t.Helper()
	if atOnce {
		c.relay.HaltAtRest()
	} else {
		c.relay.Stop("the model ends it")
	}
	select {
	case err := <-c.ended:
		if err != nil {
			t.Error(err)
		}
		c.relay.Free()
		c.relay.Forget()
	case <-testutil.After(modelPatience):
		t.Fatalf("the relay of %s did not end", c.name)
	}
}

// quiet waits until the relay holds nothing any more.
func (c *container) quiet() error {
	for end := testutil.Begin(); ; time.Sleep(time.Millisecond) {
		r := c.relay.Report()
		if r == nil {
			return fmt.Errorf("the relay of %s ends", c.name)
		}
		if len(r.Clients) == 0 && r.Used == (launch.Limits{}) {
			return nil
		}
		if end.Over() {
			return fmt.Errorf("the relay of %s holds %+v, of the clients %+v", c.name, r.Used, r.Clients)
		}
	}
}

func runModel(t *testing.T, route string, most int, patience time.Duration) {
	h := newHost(t)
	h.nic("nic0")
	h.nic("nic1")
	a := h.container("a", route, 0, 1, "nic0")
	b := h.container("b", route, 3, 2, "nic1")
	programs, start := 0, time.Now()
	program := func(rt *rapid.T) {
		programs++
		w := &world{outer: t, host: h, route: route, containers: [2]*container{a, b}}
		defer w.leave(rt)
		w.attach(rt, 0)
		w.attach(rt, 1)
		w.connect(rt, w.sessions[0], w.sessions[1])
		rt.Repeat(map[string]func(*rapid.T){
			"attach":     func(t *rapid.T) { w.attach(t, rapid.IntRange(0, 1).Draw(t, "container")) },
			"connect":    w.someConnect,
			"send":       func(t *rapid.T) { w.post(t, true, 0) },
			"send 2":     func(t *rapid.T) { w.post(t, true, 0) },
			"send 3":     func(t *rapid.T) { w.post(t, true, 0) },
			"receive":    func(t *rapid.T) { w.post(t, false, 0) },
			"receive 2":  func(t *rapid.T) { w.post(t, false, 0) },
			"receive 3":  func(t *rapid.T) { w.post(t, false, 0) },
			"one-sided":  w.oneSided,
			"bad":        w.bad,
			"release":    w.release,
			"cancel":     w.cancel,
			"pause":      w.pause,
			"disconnect": w.disconnect,
			"unexport":   w.unexport,
			"close":      w.close,
			"restart":    w.restart,
		})
		w.finish(rt)
	}
	for programs < most && time.Since(start) < patience && !t.Failed() {
		rapid.Check(t, program)
	}
	for _, c := range []*container{a, b} {
		if err := c.quiet(); err != nil {
			t.Fatalf("after all programs: %v", err)
		}
	}
	t.Logf("%d programs", programs)
}
