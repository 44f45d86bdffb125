//go:build vm

package pair_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bench"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/relay/launch"
)

// packet is the most data that rxe puts into a packet here: the path MTU of RoCE below the
// Ethernet's.
const packet = 1024

// packets returns the packets that the kernel has sent and received by an RDMA device.
func packets(t *testing.T, device string) (sent, received float64) {
	t.Helper()
	for name, into := range map[string]*float64{"sent_pkts": &sent, "rcvd_pkts": &received} {
		text, err := os.ReadFile(filepath.Join("/sys/class/infiniband", device, "ports/1/hw_counters", name))
		if err != nil {
			t.Fatal(err)
		}
		if *into, err = strconv.ParseFloat(strings.TrimSpace(string(text)), 64); err != nil {
			t.Fatal(err)
		}
	}
	return sent, received
}

// `peerlane bench` between two guests measures a lane of simulated GPUs over each guest's NIC,
// which has no PCI function: the rows have transport RDMA, and the kernel's counters of the NIC
// match the bytes.
func TestBenchOverRoCEMovesCountedBytes(t *testing.T) {
	const nic = "rocep0" // not a name of the recorded host's NICs
	agent := rdmaNamed(t, inside.RoCE, nic)
	known(t)
	key, err := os.ReadFile(clusterKey(t))
	if err != nil {
		t.Fatal(err)
	}
	shared, err := os.MkdirTemp("/share", "bench")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(shared); err != nil {
			t.Error(err)
		}
	})
	own := filepath.Join(shared, "etc/peerlane")
	if err := os.MkdirAll(own, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		// for rxe: docs/network.md
		"cluster.key": string(key), "config.toml": "[network]\ninterfaces = \"=rail0\"\n[verbs]\ntimeout = 20\n",
	} {
		if err := os.WriteFile(filepath.Join(own, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const duration = 100 * time.Millisecond
	program, common := filepath.Join(inside.Binaries, "peerlane"), []string{"bench", "--gpus", "simulated", "--root",
		shared}
	listening := start(t, agent, append([]string{program}, append(common, "--listen")...)...)
	listens(t, agent, bench.Port)
	sentBefore, receivedBefore := packets(t, nic)
	out := inside.Command(t, program, append(common, "--connect", wiring.Address(0, 1), "--transport", "verbs",
		"--sizes", "64KiB", "--depths", "4", "--duration", duration.String(), "-o", "json")...)
	sent, received := packets(t, nic)
	table := listening.wait(t)
	r, err := bench.Read(strings.NewReader(out))
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 5 { // a stream and 8 bytes per direction, and the hand-off
		t.Errorf("%d rows: %+v", len(r.Rows), r.Rows)
	}
	streamed := map[string]float64{} // minimum of bytes, by direction
	for _, row := range r.Rows {
		if row.Transport != launch.TransportVerbs || row.Value <= 0 || !strings.HasPrefix(row.What, "hand-off") &&
			!strings.Contains(row.Note, nic) {
			t.Errorf("a row is %+v", row)
		}
		if row.Unit == bench.GBs {
			streamed[row.What] += row.Value * 1e9 * duration.Seconds()
		}
		ratio, _ := r.Ratio(row)
		t.Logf("emulated: %s, %d bytes, %d in flight: %.4g %s, %.2f of %s", row.What, row.Size, row.Depth, row.Value,
			row.Unit, ratio, row.Baseline)
	}
	for _, c := range []struct {
		direction string
		packets   float64
	}{{"A to B", sent - sentBefore}, {"B to A", received - receivedBefore}} {
		t.Logf("%s: %.0f bytes, %.0f packets of the NIC", c.direction, streamed[c.direction], c.packets)
		if streamed[c.direction] == 0 || c.packets < streamed[c.direction]/packet {
			t.Errorf("%s: %.0f bytes by the rows, and %.0f packets", c.direction, streamed[c.direction], c.packets)
		}
	}
	if n := strings.Count(table, "over verbs"); n < len(r.Rows) || strings.Contains(table, "over tcp") {
		t.Errorf("the other guest's table has %d rows over verbs:\n%s", n, table)
	}
	for _, host := range r.Hosts {
		if !strings.Contains(host.Host, nic) {
			t.Errorf("a host is %+v", host)
		}
	}
	t.Log(fmt.Sprint("emulated: ", r.Summary()))
}
