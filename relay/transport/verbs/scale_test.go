package verbs

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// crowd is a relay with groups to many peers.
type crowd struct {
	loop   *poll.Loop
	fabric *Fabric
	peers  []*tcp.Peer
	sets   []*QPGroup
	ran    chan struct{}
}

func newCrowd(tb testing.TB, rdma softdevice.Host, nic string) *crowd {
	tb.Helper()
	loop, err := poll.New()
	if err != nil {
		tb.Fatal(err)
	}
	c := &crowd{loop: loop, ran: make(chan struct{})}
	config := Config{Verbs: launch.DefaultVerbs, NICs: func() []string { return []string{nic} }, Library: rdma.Library(),
		Time: waitTime, Reconnect: waitTime}
	c.fabric = New(loop, config)
	go func() { loop.Run(); close(c.ran) }()
	tb.Cleanup(func() {
		for _, p := range c.peers {
			p.Close()
		}
		loop.Stop()
		<-c.ran
		c.fabric.Close()
	})
	return c
}

func (c *crowd) meet(s *tcp.Streams) {
	c.loop.Call(func() {
		c.peers = append(c.peers, tcp.New(c.loop, s, tcp.Config{
			Name: "another", Dead: waitTime, Heartbeat: waitTime / 4,
			Extend: func(p *tcp.Peer) tcp.Extension {
				s := c.fabric.Extend(p)
				c.sets = append(c.sets, s)
				return s
			},
			Down: func(error) {},
		}))
	})
}

// crowds connects two relays by as many groups as the first one has peers.
func crowds(tb testing.TB, peers int) (a, b *crowd) {
	tb.Helper()
	rdma, err := softdevice.New(tb.TempDir(), fabricOf(nil)...)
	if err != nil {
		tb.Fatal(err)
	}
	a, b = newCrowd(tb, rdma, "a0"), newCrowd(tb, rdma, "b0")
	settled := make(chan error, peers)
	for i := range peers {
		dialed, accepted := streams(tb)
		b.meet(accepted)
		a.meet(dialed)
		a.loop.Call(func() { a.sets[i].Settle(func(err error) { settled <- err }) })
		if err := receive(tb, settled, "the queue pairs"); err != nil {
			tb.Fatal(err)
		}
	}
	return a, b
}

// TestGroupsShareACompletionQueue demands one completion queue per NIC, which grows with the
// groups, and an event loop that visits no idle group.
func TestGroupsShareACompletionQueue(t *testing.T) {
	const peers = 10
	a, b := crowds(t, peers)
	for _, c := range []*crowd{a, b} {
		c.loop.Call(func() {
			all := c.fabric.shared[c.fabric.nics[0].context]
			if len(all) != 1 || len(c.fabric.polled) != 1 {
				t.Errorf("%d completion queues, %d polled, want 1", len(all), len(c.fabric.polled))
				return
			}
			q := all[0]
			if each := flushDepth + sendDepth + receives; q.reserved != peers*each || q.room < q.reserved ||
				q.Entries() != q.room {
				t.Errorf("room for %d of %d completions, %d reserved, want %d", q.Entries(), q.room, q.reserved, peers*each)
			}
			if len(q.groups) != peers {
				t.Errorf("%d queue pairs lead to groups, want %d", len(q.groups), peers)
			}
			c.fabric.Poll()
			if c.fabric.Poll(); len(c.fabric.due) != 0 {
				t.Errorf("%d idle groups are looked at", len(c.fabric.due))
			}
		})
	}
}

// TestGroupsLeaveTheDeviceToTheFabric demands that the event loop asks a device once for all groups.
func TestGroupsLeaveTheDeviceToTheFabric(t *testing.T) {
	w := connected(t)
	s := newStream(w)
	s.done = make(chan error, 2)
	w.b.loop.Call(func() {
		for i := range uint64(2) {
			if err := w.arrivals.Grant(i, 7, i*streamBytes, streamBytes); err != nil {
				t.Error(err)
			}
		}
	})
	write := func(i uint64) {
		t.Helper()
		w.a.loop.Call(func() {
			w.link.Write(transport.Target{Region: 7, Offset: i * streamBytes},
				transport.Source{Place: s.from.At(i * streamBytes)}, streamBytes, i, func(err error) { s.done <- err })
		})
		if err := receive(t, s.done, "a write's end"); err != nil {
			t.Fatal(err)
		}
	}
	write(0)
	receive(t, w.arrived, "an arrival")
	var alone, all bool
	stands, written, over := make(chan struct{}), make(chan struct{}), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(written) })
	t.Cleanup(goOn)
	go func() {
		defer close(over)
		w.b.loop.Call(func() { // completions stay in the device meanwhile
			for w.b.fabric.Poll() {
			}
			close(stands)
			<-written
			alone = w.b.set.poll()
			all = w.b.fabric.Poll()
		})
	}()
	receive(t, stands, "the receiver")
	write(1)
	goOn()
	receive(t, over, "the receiver")
	if alone || !all {
		t.Errorf("a group takes completions from the device: %t; the fabric does: %t", alone, all)
	}
	receive(t, w.arrived, "an arrival")
}

// TestNoResizeMakesAnotherCompletionQueue demands that groups connect although a completion queue
// cannot grow.
func TestNoResizeMakesAnotherCompletionQueue(t *testing.T) {
	a, b := deviceA, deviceB
	a.NoResize, b.Entries = true, 4096
	rdma, err := softdevice.New(t.TempDir(), a, b)
	if err != nil {
		t.Fatal(err)
	}
	for nic, want := range map[string][]int{"a0": {4096, 8192}, "b0": {4096, 4096, 4096}} {
		c := newCrowd(t, rdma, nic)
		nics, err := c.fabric.open(false)
		if err != nil {
			t.Fatal(err)
		}
		for range len(want) {
			if _, err := c.fabric.reserve(nics[0], 3000); err != nil {
				t.Fatal(err)
			}
		}
		var rooms []int
		for _, q := range c.fabric.shared[nics[0].context] {
			rooms = append(rooms, q.room)
		}
		if fmt.Sprint(rooms) != fmt.Sprint(want) {
			t.Errorf("%s: completion queues have room for %v, want %v", nic, rooms, want)
		}
	}
}

// BenchmarkGroups measures the cost of groups of queue pairs to many relays: docs/benchmarks/scale.md.
func BenchmarkGroups(b *testing.B) {
	for _, peers := range []int{32, 256, 1024} {
		b.Run(fmt.Sprintf("%d peers", peers), func(b *testing.B) {
			if peers > 32 && os.Getenv("PEERLANE_SCALE") == "" {
				b.Skip("takes thousands of threads and descriptors; PEERLANE_SCALE=1 runs it")
			}
			heap := func() float64 {
				var m runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&m)
				return float64(m.HeapInuse)
			}
			before, began := heap(), time.Now()
			a, other := crowds(b, peers)
			took := time.Since(began)
			after := heap()
			pairs, entries := 0, 0
			a.loop.Call(func() {
				for _, q := range a.fabric.polled {
					pairs += len(q.groups)
					entries += q.room
				}
			})
			// An iteration of the loop: the connections over TCP and the NICs. The shortest of many
			// series counts, because this process has other threads.
			const series, iterations = 50, 200
			cost := func(look func()) float64 {
				best := time.Hour
				for range series {
					a.loop.Call(func() {
						began := time.Now()
						for range iterations {
							look()
							for _, p := range a.peers {
								p.Poll()
							}
							a.fabric.Poll()
						}
						best = min(best, time.Since(began))
					})
				}
				return float64(best.Nanoseconds()) / iterations
			}
			var idle, every float64
			for b.Loop() {
				idle = cost(func() {})
				every = cost(func() {
					for _, s := range a.sets {
						s.touch()
					}
				})
			}
			b.ReportMetric(idle, "ns/iteration")
			b.ReportMetric(every, "ns/iteration-of-all")
			b.ReportMetric((after-before)/float64(2*peers), "B/group")
			b.ReportMetric(float64(pairs), "pairs")
			b.ReportMetric(float64(entries), "entries")
			b.ReportMetric(float64(took.Microseconds())/float64(peers), "us/group")
			b.ReportMetric(0, "ns/op")
			_ = other
		})
	}
}
