package integration_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/hook/control"
)

// Limits of an idle relay: 10 ms of CPU in 60 s, and 25 MB.
const (
	idleCPU    = 10 * time.Millisecond
	idleTime   = 60 * time.Second
	idleMemory = 25_000_000
)

// onCPU returns the running time of the threads of a process: the first field of
// /proc/PID/task/TID/schedstat, in nanoseconds. Ended threads do not count.
func onCPU(t *testing.T, pid int) time.Duration {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task/*/schedstat"))
	if err != nil || len(files) == 0 {
		t.Fatalf("process %d has no schedstat (%v)", pid, err)
	}
	var sum time.Duration
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += time.Duration(n)
	}
	return sum
}

// An idle relay and its supervisor take almost no CPU. The test measures for a fraction of the
// promise's period, and allows ten times the share.
func TestIdleRelayTakesLittleCPU(t *testing.T) {
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	c := b.start(b.lanes[0], "hold")
	c.next("hello") // a client was attached, and has left
	var inspected []control.Inspection
	look := func() control.Inspection {
		if err := json.Unmarshal([]byte(b.mustPeerlane("relay", "inspect", c.id, "-o", "json")), &inspected); err != nil {
			t.Fatal(err)
		}
		return inspected[0]
	}
	i := look()
	if i.Report == nil || len(i.Report.Contexts) > 0 || len(i.Report.Clients) > 0 || len(i.Report.Staging) > 0 {
		t.Errorf("an idle relay reports %+v (%s)", i.Report, i.NoReport)
	}
	var rates []control.Rates
	if err := json.Unmarshal([]byte(b.mustPeerlane("relay", "top", c.id, "--once", "--interval", "50ms", "-o", "json")),
		&rates); err != nil {
		t.Fatal(err)
	}
	if len(rates) != 1 || rates[0].NoReport != "" || rates[0].Seconds <= 0 || len(rates[0].Lanes) > 0 {
		t.Errorf("the rates of an idle relay are %+v", rates)
	}
	time.Sleep(time.Second) // let work from the start and the inspection finish
	before := map[int]time.Duration{}
	for _, p := range i.Processes {
		before[p.PID] = onCPU(t, p.PID)
	}
	const watched = 4 * time.Second
	time.Sleep(watched)
	for _, p := range i.Processes {
		used := onCPU(t, p.PID) - before[p.PID]
		t.Logf("%s: %v of CPU in %v, so %v in %v; %.1f MB", p.Role, used, watched, used*(idleTime/watched), idleTime,
			float64(p.Resident)/1e6)
		if used > 10*idleCPU/(idleTime/watched) {
			t.Errorf("an idle %s takes %v of CPU in %v", p.Role, used, watched)
		}
		if p.Resident > idleMemory {
			t.Errorf("an idle %s takes %d bytes", p.Role, p.Resident)
		}
	}
	if len(i.Processes) != 2 {
		t.Errorf("processes %+v", i.Processes)
	}
}
