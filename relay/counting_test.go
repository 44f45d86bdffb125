package relay

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestHistogramsKeepBucketOrder(t *testing.T) {
	var h histogram
	for d := time.Duration(0); d < 2*time.Minute; d = d*5/4 + 1 {
		before := h
		h.add(d)
		for i := range h {
			if h[i] == before[i] {
				continue
			}
			if i > 0 && d < bound(i) || i < buckets-1 && d >= bound(i+1) {
				t.Errorf("%v is in the bucket from %v to %v", d, bound(i), bound(i+1))
			}
		}
	}
	for i := range buckets - 1 {
		if bound(i+1) <= bound(i) {
			t.Errorf("bucket %d ends at %v and begins at %v", i, bound(i+1), bound(i))
		}
	}
}

// A report of very many busy lanes and connections fits into a datagram.
func TestReportOfManyLanesFitsDatagram(t *testing.T) {
	busy := launch.Figures{Operations: 1 << 62, Bytes: 1 << 62, InFlight: 1024}
	for i := range buckets - 1 {
		busy.Latency = append(busy.Latency, launch.Bucket{From: bound(i), To: bound(i + 1), Count: 1 << 40})
	}
	for _, lanes := range []int{1, 8, 64} {
		r := &launch.Report{}
		for range lanes {
			r.Lanes = append(r.Lanes, launch.LaneFigures{GPU: "0000:17:00.0", Sent: busy, Received: busy})
		}
		for range maxReportedConnections {
			r.Connections = append(r.Connections, launch.ConnectionFigures{Peer: "container of a name", Figures: busy})
		}
		fit(r)
		text, err := json.Marshal(r)
		if err != nil || len(text) > launch.MaxDatagram {
			t.Errorf("%d lanes: %d bytes, %v", lanes, len(text), err)
		}
		if len(r.Lanes) != lanes || len(r.Connections)+r.MoreConnections != maxReportedConnections {
			t.Errorf("%d lanes: %d are shown, and %d connections and %d more", lanes, len(r.Lanes), len(r.Connections),
				r.MoreConnections)
		}
		if kept := len(r.Lanes[0].Sent.Latency) > 0; kept != (lanes == 1) {
			t.Errorf("%d lanes: how long operations took is kept: %v", lanes, kept)
		}
	}
}

// So does a report of more clients than fit.
func TestReportOfManyClientsFitsDatagram(t *testing.T) {
	r := &launch.Report{Clients: make([]launch.Client, toldClients)}
	for i := range r.Clients {
		r.Clients[i] = launch.Client{PID: 1<<22 - toldClients + i, Memories: 16384, Bytes: 1 << 40, HostMemory: 1 << 40,
			Connections: 4096, Program: launch.ProgramNCCL}
	}
	fit(r)
	text, err := json.Marshal(r)
	if err != nil || len(text) > launch.MaxDatagram {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	if len(r.Clients) < 256 || len(r.Clients)+r.MoreClients != toldClients {
		t.Errorf("%d are shown, and %d more", len(r.Clients), r.MoreClients)
	}
}

// counting is a connection that only counts.
func counting(tb testing.TB) (*connection, *operation) {
	l, err := poll.New()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Stop(); l.Run() }) // which closes its descriptors
	c := &connection{session: &session{relay: &Relay{loop: l}}, lane: &lane{ended: newDirections()},
		side: &sender{}}
	return c, &operation{moved: 8}
}

// count makes the counts of an operation with two waits.
func (c *connection) count(op *operation) {
	c.begun()
	c.stalled(noGrant, 0)
	c.stalled(noSlot, 0)
	c.over(op, wire.StatusOK)
}

func TestCountersAddAllocatesNothing(t *testing.T) {
	c, op := counting(t)
	if n := testing.AllocsPerRun(100, func() { c.count(op) }); n != 0 {
		t.Errorf("counting an operation allocates %v times", n)
	}
}

// BenchmarkCounting measures the cost of counters per operation. An operation of 8 bytes takes some
// 6.5 µs on the fastest measured GPUs (docs/benchmarks.md).
func BenchmarkCounting(b *testing.B) {
	c, op := counting(b)
	b.ReportAllocs()
	for b.Loop() {
		c.count(op)
	}
	const operation = 6500 * time.Nanosecond
	b.ReportMetric(100*float64(b.Elapsed())/float64(b.N)/float64(operation), "%-of-a-copy")
}
