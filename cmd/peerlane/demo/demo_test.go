package demo

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

func TestStagedBytesMustCrossAServer(t *testing.T) {
	server := topo.GPU{BusID: "0000:18:00.0", UUID: "GPU-1"}
	for _, c := range []struct {
		name, route string
		// sent and received are the counters of the client.
		sent, received    uint64
		relayIn, relayOut uint64
		problem           string
	}{
		{"all", "staged", 100, 50, 150, 150, ""},
		{"one byte went past it", "staged", 100, 50, 149, 150, "150 staged bytes"},
		{"one byte stayed in it", "staged", 100, 50, 150, 149, "150 staged bytes"},
		{"none", "staged", 100, 50, 0, 0, "150 staged bytes"},
		{"short messages pass beside it", "verbs", 1 << 30, 1 << 30, 2<<30 - 32736, 2<<30 - 32736, ""},
		{"a long one, too", "verbs", 1 << 30, 1 << 30, 2<<30 - 32737, 2<<30 - 32737, "2147483648 staged bytes"},
		{"direct", "direct", 100, 50, 0, 0, ""},
		{"direct, and yet", "direct", 100, 50, 8, 8, "on route direct the relays saw 8 bytes enter and 8 leave"},
		{"direct, and out", "direct", 100, 50, 0, 8, "0 bytes enter and 8 leave"},
	} {
		t.Run(c.name, func(t *testing.T) {
			transport := ""
			if c.route == launch.TransportVerbs {
				c.route, transport = launch.RouteStaged, launch.TransportVerbs
			}
			d := &demo{Options: Options{Route: c.route}, host: &testbed.Host{}, script: Script{Bytes: 1 << 20}, report: &Report{
				Transport: transport,
				Plan:      &planner.Plan{GPUs: []topo.GPU{server}},
				Containers: []Container{{Servers: []string{server.BusID}, Client: &Client{
					Sent: c.sent, Received: c.received,
					Relay: RelayCounters{Servers: []ServerCounter{{GPU: server.UUID, In: c.relayIn, Out: c.relayOut}}},
				}}},
			}}
			if err := d.countServers(nil); err != nil {
				t.Fatal(err)
			}
			got := strings.Join(d.report.Problems, "; ")
			if c.problem == "" && got != "" || !strings.Contains(got, c.problem) {
				t.Errorf("the verdict is %q", got)
			}
		})
	}
}

func TestPatternDiffersAtEveryByte(t *testing.T) {
	p := patternOf(3, "A", 5)
	for _, n := range []int{0, 1, 7, 8, 9, 4099} {
		b := make([]byte, n)
		p.fill(b)
		if err := p.check(b); err != nil {
			t.Fatal(err)
		}
		for i := range b {
			b[i] ^= 1
			if p.check(b) == nil {
				t.Fatalf("byte %d of %d is wrong and not seen", i, n)
			}
			b[i] ^= 1
		}
		if n < 8 {
			continue
		}
		for _, other := range []pattern{patternOf(4, "A", 5), patternOf(3, "B", 5), patternOf(3, "A", 6)} {
			if other.check(b) == nil {
				t.Fatal("two messages have one pattern")
			}
		}
	}
}

func TestScriptCoversMessageSizes(t *testing.T) {
	sizes := Script{Bytes: 256 << 20}.sizes()
	total, smallest, largest, odd := uint64(0), sizes[0], uint64(0), false
	for _, n := range sizes {
		total += n
		smallest, largest = min(smallest, n), max(largest, n)
		odd = odd || n%8 != 0
	}
	if total < 256<<20 || smallest != 8 || largest != 64<<20 || !odd {
		t.Errorf("%d messages: %d bytes, from %d to %d, an odd size: %v", len(sizes), total, smallest, largest, odd)
	}
}

func TestDemoFailureReportsRelayLog(t *testing.T) {
	d := &demo{host: &testbed.Host{Layout: paths.New(t.TempDir())}}
	if logs := d.relayLogs(); logs != "" {
		t.Errorf("without a relay: %q", logs)
	}
	dir := d.host.Layout.GenerationDir("0123")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "relay.log"), []byte(strings.Repeat("x", 5000)+"last words\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	logs := d.relayLogs()
	if !strings.Contains(logs, "last output of relay 0123:\n") || !strings.HasSuffix(logs, "last words\n") ||
		len(logs) > 2100 {
		t.Errorf("%d bytes: %q", len(logs), logs)
	}
}
