package relay_test

import (
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/verbs/softdevice/engine"
)

// serveEngine makes the software devices of a directory move bytes on GPUs.
func serveEngine(t *testing.T, dir string) *engine.Engine {
	t.Helper()
	e, err := engine.New()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, engine.SocketName), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- e.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(l.Close(), <-ended); err != nil {
			t.Error(err)
		}
	})
	return e
}

// postedBy returns the bytes of posted writes per NIC.
func postedBy(t *testing.T, rdma softdevice.Host) map[string]uint64 {
	t.Helper()
	calls, err := rdma.Calls("ibv_post_send")
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]uint64{}
	for _, c := range calls {
		n, err := strconv.ParseUint(c.Arguments["length"], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		if c.Arguments["op"] == "0" || c.Arguments["op"] == "1" { // not the reads of flushes
			by[c.Arguments["device"]] += n
		}
	}
	return by
}

// Two NICs with rates of 3 to 1 carry a lane's bytes by the weights of the plan, at most at their
// rates, and after the failure of a NIC the remaining NIC carries the whole.
//
// It also runs on four real GPUs, with PEERLANE_TEST_CUDA=driver: NICs of 7.5 and 2.5 GB/s.
func TestPacedNICsShareByWeights(t *testing.T) {
	needGPUs(t, 4)
	rate, messages, n := 20e6, 48, uint64(1<<20) // bytes a second of the slower NIC
	if realGPUs {
		rate, messages, n = 2.5e9, 1024, 8<<20
	}
	p := &byRDMA{lane: func(l launch.Lane) launch.Lane {
		for i, weight := range []int{3, 1} {
			l.Members = append(l.Members, launch.Member{Server: l.Servers[0].BusID, NIC: l.NICs[i], Weight: weight})
		}
		return l
	}}
	all := slices.Concat(ofA, ofB)
	for i := range all {
		all[i].Holds = false
		all[i].Rate = uint64(rate) * uint64(3-2*(i%2))
	}
	p.devices = all
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 2, 2)
	served := serveEngine(t, p.rdma.Dir)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, n)
	// moved returns the bytes of each NIC, and the rate of both, of messages that are in flight together.
	// The rate is at least 0.95 of that of the ports, less the time that processes queued for processors.
	moved := func(ports float64) (by map[string]uint64, each float64) {
		t.Helper()
		before := postedBy(t, p.rdma)
		bytes := float64(messages) * float64(n)
		start, limit := time.Now(), testutil.BeginFor(time.Duration(bytes/ports/0.95*1e9))
		var ops []*client.Operation
		done := func(op *client.Operation) {
			t.Helper()
			if moved, err := wait(t, op, nil); err != nil || moved != n {
				t.Fatalf("%d bytes moved: %v", moved, err)
			}
		}
		for range messages {
			if len(ops) == 2*48 { // in flight
				done(ops[0])
				done(ops[1])
				ops = ops[2:]
			}
			for _, post := range []func() (*client.Operation, error){
				func() (*client.Operation, error) { return p.receiving.Receive(p.target.Memory, 0, n) },
				func() (*client.Operation, error) { return p.sending.Send(p.source.Memory, 0, n) },
			} {
				op, err := post()
				if err != nil {
					t.Fatal(err)
				}
				ops = append(ops, op)
			}
		}
		for _, op := range ops {
			done(op)
		}
		took := time.Since(start)
		if limit.Over() {
			t.Errorf("ports of together %.0f MB/s moved %.1f MB/s", ports/1e6, bytes/took.Seconds()/1e6)
		}
		by = postedBy(t, p.rdma)
		for nic, bytes := range before {
			by[nic] -= bytes
		}
		return by, bytes / took.Seconds()
	}
	by, both := moved(4 * rate)
	fast, slow := by[ofA[0].Name], by[ofA[1].Name]
	if share := float64(fast) / float64(fast+slow); fast+slow != uint64(messages)*n || share < 0.75*0.95 ||
		share > 0.75*1.05 {
		t.Errorf("of %d MiB %d MiB went by the NIC of weight 3 and %d by that of weight 1", uint64(messages)*n>>20,
			fast>>20, slow>>20)
	}
	if both > 4*rate*1.05 {
		t.Errorf("two NICs of %.0f and %.0f MB/s moved %.0f MB/s", 3*rate/1e6, rate/1e6, both/1e6)
	}
	if f := served.Figures(); f.Done == 0 {
		t.Error("the engine moved nothing")
	}
	all[1].Down = true
	if err := p.rdma.Set(all...); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "queue pairs without mlx5_1", func() bool {
		p.arrive(t, n)
		_, way := p.data(t)
		return strings.Contains(way, "reconnected ") && !strings.Contains(way, "RDMA reconnects")
	})
	by, one := moved(3 * rate)
	if by[ofA[0].Name] != uint64(messages)*n || by[ofA[1].Name] != 0 {
		t.Errorf("without mlx5_1 the NICs carried %v", by)
	}
	if one > 3*rate*1.05 {
		t.Errorf("a NIC of %.0f MB/s moved %.0f MB/s", 3*rate/1e6, one/1e6)
	}
	t.Logf("two NICs: %.1f MB/s, %.3f of it by weight 3 of 4; one: %.1f MB/s", both/1e6,
		float64(fast)/float64(fast+slow), one/1e6)
}
