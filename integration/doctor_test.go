package integration_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/internal/testutil"
)

// diagnosis returns the findings of peerlane doctor on this host, by check.
func (b *bed) diagnosis() map[string][]doctor.Finding {
	b.Helper()
	cmd := exec.Command(filepath.Join(binaries, "peerlane"), "doctor", "-o", "json", "--interval", "10ms", "--root",
		b.Root)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	var status *exec.ExitError
	// exit status 5 to 7 encodes the worst finding
	if err != nil && (!errors.As(err, &status) || status.ExitCode() < 5) {
		b.Fatalf("peerlane doctor: %v: %s", err, errOut.String())
	}
	var report struct{ Findings []doctor.Finding }
	if err := json.Unmarshal(out, &report); err != nil {
		b.Fatal(err)
	}
	by := map[string][]doctor.Finding{}
	for _, f := range report.Findings {
		by[f.Check] = append(by[f.Check], f)
	}
	for _, c := range doctor.All() {
		if len(by[c.Name]) == 0 {
			b.Errorf("no finding of %s", c.Name)
		}
	}
	return by
}

// wants requires a check's worst status, and words of its findings.
func (b *bed) wants(found map[string][]doctor.Finding, check string, status doctor.Status, words ...string) {
	b.Helper()
	var text strings.Builder
	for _, f := range found[check] {
		text.WriteString(f.On + ": " + f.Found + "; " + f.Remedy + "\n")
	}
	if got := doctor.Worst(found[check]); got != status {
		b.Errorf("%s is %v, want %v: %s", check, got, status, text.String())
	}
	for _, w := range words {
		if !strings.Contains(text.String(), w) {
			b.Errorf("%s does not say %q: %s", check, w, text.String())
		}
	}
}

// Doctor finds an orphaned relay and the relay's files, and the printed remedies remove both.
func TestDoctorFindsOrphanedRelay(t *testing.T) {
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	b.nics()
	c := b.start(b.lanes[0], "stream") // alone: the supervisor of another container would collect
	c.next("listening")
	var found map[string][]doctor.Finding
	// The relay serves before its supervisor has written the state ready.
	b.eventually("the relay is ready", func() bool {
		found = b.diagnosis()
		return doctor.Worst(found["relays"]) == doctor.OK
	})
	b.wants(found, "relays", doctor.OK, "containers with a relay: 1,")
	b.wants(found, "leftovers", doctor.OK)
	b.wants(found, "configuration", doctor.OK)

	g := c.generation()
	kill(t, supervisor(t, g.Status.Relay.PID))
	b.eventually("the supervisor is missed", func() bool {
		found = b.diagnosis()
		return doctor.Worst(found["relays"]) == doctor.Failure
	})
	b.wants(found, "relays", doctor.Failure, "container "+c.id, "restart the container")
	b.wants(found, "leftovers", doctor.OK)

	// Kill the runtime: otherwise it would run the container's poststop hook, which collects.
	init := c.init()
	kill(t, c.cmd.Process.Pid)
	// The end of the runtime can end init.
	if err := syscall.Kill(init, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
		t.Fatal(err)
	}
	b.eventually("its files are left", func() bool {
		found = b.diagnosis()
		return doctor.Worst(found["leftovers"]) == doctor.Warning
	})
	b.wants(found, "leftovers", doctor.Warning, "generation "+g.ID, "peerlane relay gc")
	b.mustPeerlane("relay", "gc")
	b.wants(b.diagnosis(), "leftovers", doctor.OK)
	c.end()
	found = b.diagnosis()
	b.wants(found, "relays", doctor.OK, "containers with a relay: 0,")
	b.wants(found, "leftovers", doctor.OK)
}

func (b *bed) eventually(what string, condition func() bool) {
	b.Helper()
	testutil.Until(b.T, what, condition)
}

// The exporter's counters of a lane equal the relay's transfers.
func TestExporterCountersEqualTransfers(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.nics()
	a, z := b.streaming("stream")
	value := func(text, metric string, labels ...string) float64 {
		for line := range strings.Lines(text) {
			name, rest, _ := strings.Cut(line, "{")
			inside, number, ok := strings.Cut(rest, "} ")
			found := ok && name == metric
			for _, l := range labels {
				found = found && strings.Contains(","+inside+",", ","+l+",")
			}
			if found {
				v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
				if err != nil {
					t.Fatal(err)
				}
				return v
			}
		}
		return -1
	}
	lane := func(c *container, i int, direction string) []string {
		return []string{`container="` + c.id + `"`, `gpu="` + b.lanes[i].GPU + `"`,
			`nic="` + strings.Join(b.lanes[i].NICs, ",") + `"`, `direction="` + direction + `"`}
	}
	first := b.mustPeerlane("exporter", "--once", "--container-labels")
	if n := value(first, "peerlane_relays", `state="ready"`); n != 2 {
		t.Errorf("%g relays are ready", n)
	}
	before := value(first, "peerlane_lane_bytes_total", lane(a, 0, "sent")...)
	if before < 0 {
		t.Fatalf("the metrics lack the lane of %s:\n%s", a.id, first)
	}
	var last string
	b.eventually("bytes rise at both ends", func() bool {
		last = b.mustPeerlane("exporter", "--once", "--container-labels")
		return value(last, "peerlane_lane_bytes_total", lane(a, 0, "sent")...) > before &&
			value(last, "peerlane_lane_bytes_total", lane(z, 1, "received")...) > 0
	})
	// Log lines of relay and supervisor name the container.
	i := b.inspection(a)
	log, err := os.ReadFile(i.Log) // its last lines are those of the transfers
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(log), "\n")
	for _, line := range []string{"staging is ready", " is ready\""} {
		if !slices.ContainsFunc(lines, func(l string) bool {
			return strings.Contains(l, line) && strings.Contains(l, "generation="+i.ID) && strings.Contains(l, "container="+a.id)
		}) {
			t.Errorf("no line on %q with generation and container in\n%s", line, log)
		}
	}
	operations := value(last, "peerlane_lane_operations_total", lane(a, 0, "sent")...)
	if timed := value(last, "peerlane_lane_operation_duration_seconds_count", lane(a, 0, "sent")...); operations <= 0 ||
		timed <= 0 || timed > operations {
		t.Errorf("%g operations, of which %g were timed", operations, timed)
	}
	if s := value(last, "peerlane_staging_bytes", `container="`+a.id+`"`, `memory="gpu"`); s <= 0 {
		t.Errorf("%g bytes are staged by %s:\n%s", s, a.id, last)
	}
}
