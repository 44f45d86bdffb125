package integration_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/testutil"
)

// faultFiles are files that select the relay with a fault; the simulator reads them at each call.
type faultFiles struct {
	*bed
	dir string
}

// strike injects a fault into a process, or into every process if pid is 0.
func (f faultFiles) strike(fault string, pid int) time.Time {
	f.Helper()
	file := filepath.Join(f.dir, fault)
	err := os.WriteFile(file+".new", fmt.Append(nil, pid), 0o644)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		f.Fatal(err)
	}
	return time.Now()
}

func (f faultFiles) end(fault string) {
	f.Helper()
	if err := os.Remove(filepath.Join(f.dir, fault)); err != nil {
		f.Fatal(err)
	}
}

// simulatorOf returns the directory of the simulated GPUs, which relays can read.
func simulatorOf(environment []string) string {
	for _, e := range environment {
		if dir, ok := strings.CutPrefix(e, "PEERLANE_SIM="); ok {
			return dir
		}
	}
	return ""
}

// longestGap returns the longest time between two messages of a stream, in the lines since drain
// and in the given number of further lines, each about 200 ms.
func (c *container) longestGap(lines int) (longest time.Duration) {
	c.bed.Helper()
	for lines += len(c.lines); lines > 0; lines-- {
		longest = max(longest, c.next("round").Gap)
	}
	return longest
}

// answers waits until the container's relay answers a new client. An ending relay answers with the
// reason. The promise is 2 s; docs/benchmarks.md has the measured time.
func (c *container) answers() time.Time {
	c.bed.Helper()
	for end := testutil.Begin(); ; {
		ctx, cancel := testutil.WithLimit(context.Background(), patience)
		out, err := c.bed.runtime.Command(ctx, "exec", c.id, "/usr/bin/test", "role", "hello").Output()
		cancel()
		now := time.Now()
		if err == nil {
			return now
		}
		if end.Over() {
			c.bed.Fatalf("no relay answers in container %s: %s (%v)", c.id, out, err)
		}
	}
}

// A fault of a GPU in one container's relay (a sticky error, an uncorrectable error, or loss) ends
// that container's operations with the reason. The relay's successor starts soon, and streams of
// other containers on the same GPUs continue. If the GPU stays lost, the successor reports so to
// each client and keeps running.
func TestLostGPUEndsOperationsWithCause(t *testing.T) {
	beside(t)
	faults := []struct{ name, rule, want, cause string }{
		{"illegal-address", "cuMemcpyAsync:process=%s:error=700", "CUDA_ERROR_ILLEGAL_ADDRESS", "sticky CUDA error"},
		{"ecc", "cuMemcpyAsync:process=%s:error=214", "CUDA_ERROR_ECC_UNCORRECTABLE", "lost GPU"},
		{"off-the-bus", "*:process=%s:lost", "CUDA_ERROR_UNKNOWN", "lost GPU"},
	}
	const gone = "gone"
	files := faultFiles{}
	b := newBed(t, "runc", func(c *config.Config) {
		files.dir = simulatorOf(c.Relay.Environment)
		rules := []string{fmt.Sprintf("cuCtxCreate:process=%s:error=46", filepath.Join(files.dir, gone))}
		for _, f := range faults {
			rules = append(rules, fmt.Sprintf(f.rule, filepath.Join(files.dir, f.name)))
		}
		c.Relay.Environment = append(c.Relay.Environment, "PEERLANE_SIM_FAULT="+strings.Join(rules, ";"))
	})
	files.bed = b
	b.nics()
	a, z := b.streaming("stream", "rounds")
	bus := b.gpu(b.lanes[0]).BusID
	a.drain()
	usual := a.longestGap(3)
	for i, f := range faults {
		last := i == len(faults)-1
		v, w := b.introduce(b.start(b.lanes[0], "stream", "wait"), b.start(b.lanes[1], "stream", "wait"))
		if last {
			files.strike(gone, 0)
		}
		a.drain()
		struck := files.strike(f.name, v.generation().Status.Relay.PID)
		// The error names the failed copy or the end of the relay, depending on the order.
		v.mustLearn(struck, "container "+v.id, f.want, bus)
		w.mustLearn(struck, "container "+v.id, f.want, bus)
		t.Logf("%s: the next relay has answered after %v", f.name, v.answers().Sub(struck).Round(time.Millisecond))
		during := a.longestGap(1)
		t.Logf("%s: the longest gap of the others' stream was %v, and is %v", f.name, usual.Round(10*time.Microsecond),
			during.Round(10*time.Microsecond))
		if limit := max(10*usual, 10*time.Second); during > limit {
			t.Errorf("%s: streams of other containers paused for %v, usually at most %v", f.name, during, usual)
		}
		if last {
			b.saysGone(v, bus)
			files.end(gone)
		}
		for c, starts := range map[*container]int{a: 1, z: 1, w: 1, v: 2} {
			if g := c.generation(); g.Status.Starts != starts {
				t.Errorf("%s: relay of %s: %d starts, want %d; state %s", f.name, c.id, g.Status.Starts, starts, g.Status.State)
			}
		}
		v.hasEnded(f.cause)
		v.send(event{}) // ends the containers
		w.send(event{})
		v.next("again")
		w.next("again")
		v.end()
		w.end()
	}
}

// hasEnded requires one line in the log of the container's generation about the end of a relay,
// with the cause.
func (c *container) hasEnded(cause string) {
	c.bed.Helper()
	g := c.generation()
	log, err := os.ReadFile(filepath.Join(c.bed.Layout.GenerationDir(g.ID), "relay.log"))
	if err != nil {
		c.bed.Fatal(err)
	}
	var ends []string
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "event=relay-ended") {
			ends = append(ends, line)
		}
	}
	if len(ends) != 1 || !strings.Contains(ends[0], fmt.Sprintf("cause=%q", cause)) ||
		!strings.Contains(ends[0], "generation="+g.ID) {
		c.bed.Errorf("log of %s: end of a relay with cause %q, want %q, of generation %s", c.id, ends, cause, g.ID)
	}
}

// saysGone requires that every client receives the error that no context can be created on a GPU,
// from a relay that keeps running.
func (b *bed) saysGone(c *container, bus string) {
	b.Helper()
	for range 3 {
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		out, err := b.runtime.Command(ctx, "exec", c.id, "/usr/bin/test", "role", "export").Output()
		cancel()
		if err == nil || !strings.Contains(string(out), "CUDA_ERROR_DEVICE_UNAVAILABLE") ||
			!strings.Contains(string(out), bus) {
			b.Errorf("a client of a GPU that is gone hears %s (%v)", out, err)
		}
	}
}
