package integration_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// reserved returns a relay's staging memory after the reservation.
func (b *bed) reserved(c *container) (inspection control.Inspection, bytes uint64) {
	b.Helper()
	for end := testutil.Begin(); ; time.Sleep(20 * time.Millisecond) {
		var list []control.Inspection
		if err := json.Unmarshal([]byte(b.mustPeerlane("relay", "inspect", c.id, "-o", "json")), &list); err != nil {
			b.Fatal(err)
		}
		if r := list[0].Report; r != nil && len(r.Staging) > 0 {
			for _, s := range r.Staging {
				bytes += s.Bytes
			}
			return list[0], bytes
		}
		if end.Over() {
			b.Fatalf("container %s has no staging: %+v (%s)", c.id, list[0].Report, list[0].NoReport)
		}
	}
}

// All relays of the host share the admission limit of a server GPU: the first relay gets its full
// request, the next relay less, the third relay another lane's server, and the memory of a killed
// relay is free again.
func TestStagingOfManyContainersSharesLimit(t *testing.T) {
	beside(t)
	const mib = 1 << 20
	limit := config.Size(300 * mib) // a relay requests 256 MiB on each of two GPUs
	b := newBed(t, "runc", func(c *config.Config) {
		c.Relay.Slots, c.Relay.SlotSize = 8, 32*mib
		c.Staging.Limit = &limit
		c.Relay.Reserve = launch.ReserveStart
	})
	b.leavesNothing()
	lane := b.lanes[0]
	if len(lane.Servers) != 2 {
		t.Fatalf("the lane has the servers %v, and this test wants two", lane.Servers)
	}
	want := []struct{ each, all uint64 }{{256 * mib, 512 * mib}, {32 * mib, 64 * mib}, {0, 256 * mib}}
	var containers []*container
	for i, bytes := range want {
		c := b.start(lane, "hold")
		c.next("hello")
		containers = append(containers, c)
		found, got := b.reserved(c)
		s := found.Report.Staging[0]
		if got != bytes.all || s.Bytes != bytes.each || s.Wanted != 256*mib || len(found.Report.Contexts) != 1 {
			t.Errorf("container %d has %+v, and contexts on %v", i, found.Report.Staging, found.Report.Contexts)
		}
		if i == 0 {
			if s.Note != "" {
				t.Errorf("the first relay has its full request, and a note: %s", s.Note)
			}
			continue
		}
		table := b.mustPeerlane("relay", "inspect", c.id)
		for _, wants := range []string{"of 256 MiB on " + lane.Servers[0], "not admitted", "300 MiB (staging.limit)",
			"container " + containers[0].id + " 256 MiB"} {
			if !strings.Contains(table, wants) {
				t.Errorf("peerlane relay inspect does not say %q:\n%s", wants, table)
			}
		}
		replaced := strings.Contains(table, "it serves in place of the lane's own servers")
		if replaced != (bytes.each == 0) {
			t.Errorf("container %d: another lane's server serves: %v", i, replaced)
		}
		testutil.Until(t, "the log says that memory is not admitted", func() bool {
			found, _ := b.reserved(c) // the log may follow the report
			return strings.Contains(strings.Join(found.LogTail, "\n"), "not admitted")
		})
	}
	// The successor of a killed relay gets its memory.
	kill(t, containers[0].generation().Status.Relay.PID)
	for end := testutil.Begin(); ; time.Sleep(50 * time.Millisecond) {
		found, got := b.reserved(containers[0])
		if found.Status.Starts == 2 && got == 512*mib {
			break
		}
		if end.Over() {
			t.Fatalf("the relay after the killed one has %+v", found.Report)
		}
	}
}

// The start of the first container of a boot tests the container's pairs, and the next container
// uses the results. A failed pair is replaced, and relays, supervisors and the command report the
// pair.
func TestPairFailingSelfTestIsReplaced(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", func(c *config.Config) {
		c.Relay.Slots, c.Relay.SlotSize = 8, 1<<20
		c.Relay.Reserve = launch.ReserveStart
		c.Relay.SelfTest = launch.SelfTestOnce
		// Only the self-test makes this call: the first read from the first server's memory is
		// corrupt.
		c.Relay.Environment = append(c.Relay.Environment, "PEERLANE_SIM_FAULT=cuMemcpyDtoHAsync:times=1:corrupt=1")
	})
	lane := b.lanes[0]
	if len(lane.Servers) != 2 {
		t.Fatalf("the lane has the servers %v, and this test wants two", lane.Servers)
	}
	for i := range 2 {
		c := b.start(lane, "hold")
		c.next("hello")
		found, _ := b.reserved(c)
		// The first relay did not wait for the spares; the second relay reports its staging before
		// the log line.
		log := b.finds(c, []string{"the self-test of 4 pairs of GPUs took",
			"staging of GPU " + lane.GPU + " is not as configured"}[i])
		on := map[string]launch.Staging{}
		for _, s := range found.Report.Staging {
			on[s.GPU] = s
		}
		if bad := on[lane.Servers[0]]; bad.Bytes != 0 || !strings.Contains(bad.Note, "the pair failed its self-test: ") {
			t.Errorf("on the server of the failed pair: %+v", bad)
		}
		if good := on[lane.Servers[1]]; good.Bytes != 8<<20 || good.Note != "" {
			t.Errorf("on the other server: %+v", good)
		}
		if len(found.Pairs) < 2 || found.Pairs[0].Verdict != launch.VerdictWrong ||
			found.Pairs[1].Verdict != launch.VerdictGood || found.Pairs[1].Reader != "passed" {
			t.Errorf("container %d knows %+v", i, found.Pairs)
		}
		table := b.mustPeerlane("relay", "inspect", c.id)
		for _, want := range []string{"wrong: of 1 bytes from", "good; out ",
			"issued by the client's GPU, chunk by the pair's calibration"} {
			if !strings.Contains(table, want) {
				t.Errorf("peerlane relay inspect does not say %q:\n%s", want, table)
			}
		}
		if tested := strings.Contains(log, "pairs of GPUs"); tested != (i == 0) {
			t.Errorf("container %d has tested: %v\n%s", i, tested, log)
		}
	}
}

// finds waits for words in the log of a container's relay.
func (b *bed) finds(c *container, words string) string {
	b.Helper()
	for end := testutil.Begin(); ; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(filepath.Join(b.Layout.GenerationDir(c.generation().ID), "relay.log"))
		if err != nil {
			b.Fatal(err)
		}
		if strings.Contains(string(text), words) {
			return string(text)
		}
		if end.Over() {
			b.Fatalf("no %q in %s", words, text)
		}
	}
}
