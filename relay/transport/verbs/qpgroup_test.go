package verbs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/wire"
)

// waitTime is much longer than any expected wait.
const waitTime = 2 * time.Minute

// side is a Peer with a group, on its own loop.
type side struct {
	t      *testing.T
	loop   *poll.Loop
	fabric *Fabric
	peer   *tcp.Peer
	set    *QPGroup
	down   chan error
	end    func()
}

// hears replaces the receiver of messages of a group; nil for none.
type hears func(nic string, s *QPGroup) tcp.Extension

func newSide(t *testing.T, s *tcp.Streams, rdma softdevice.Host, nic string, accept func(*QPGroup, *tcp.Channel),
	by hears, changes ...func(string, *Config)) *side {
	t.Helper()
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	e := &side{t: t, loop: loop, down: make(chan error, 1)}
	v := launch.DefaultVerbs
	v.QueuePairs, v.Timeout = 2, 14 // 0.5 s with 7 retries
	config := Config{Verbs: v, NICs: func() []string { return []string{nic} }, Library: rdma.Library(), Time: waitTime,
		Reconnect: waitTime, PortWait: time.Millisecond, minPairPart: minLinkPart}
	for _, change := range changes {
		change(nic, &config)
	}
	e.fabric = New(loop, config)
	ran := make(chan struct{})
	go func() { loop.Run(); close(ran) }()
	loop.Call(func() {
		e.peer = tcp.New(loop, s, tcp.Config{
			Name: "the other of " + nic, Dead: waitTime,
			Extend: func(p *tcp.Peer) tcp.Extension {
				if e.set = e.fabric.Extend(p); by != nil {
					return by(nic, e.set)
				}
				return e.set
			},
			Accept: func(c *tcp.Channel, _ wire.Message, _ uint32) { accept(e.set, c) },
			Down:   func(err error) { e.down <- err },
		})
	})
	ended := false
	e.end = func() {
		if !ended {
			ended = true
			e.peer.Close()
			loop.Stop()
			<-ran
			e.fabric.Close()
		}
	}
	t.Cleanup(e.end)
	return e
}

// refusal returns the error with which the side has ended the negotiation.
func (e *side) refusal() (err error) {
	e.loop.Call(func() { err = e.set.err })
	return err
}

// reason returns the text of an error of package wire. A text is all that one relay tells another of a
// cause.
func reason(err error) string {
	var e *wire.Error
	if !errors.As(err, &e) {
		return ""
	}
	return e.Reason
}

func receive[T any](t testing.TB, from <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-testutil.After(waitTime):
		t.Fatalf("%s: not within %v", what, waitTime)
		return *new(T)
	}
}

// streams returns the connections of two Peers.
func streams(t testing.TB) (dialed, accepted *tcp.Streams) {
	t.Helper()
	gathering := &tcp.Gathering{Time: waitTime}
	both := make(chan *tcp.Streams, 2)
	dialed, err := tcp.Dial(context.Background(), time.Now().Add(waitTime), func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		go func() {
			s, err := gathering.Add(b, "dialer")
			if err != nil {
				t.Errorf("gathering: %v", err)
			}
			if s != nil || err != nil {
				both <- s
			}
		}()
		return a, nil
	}, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	return dialed, receive(t, both, "the accepted connections")
}

// two are both sides of a channel with data over RDMA.
type two struct {
	a, b     *side
	rdma     softdevice.Host
	iwarp    bool
	link     *Link
	channel  *tcp.Channel
	made     chan *Arrivals
	arrivals *Arrivals
	arrived  chan [2]uint64
	ended    chan error // of the channel at b
}

const slot = 64 << 10

var (
	deviceA = softdevice.Device{Name: "a0", GUID: 1, Address: "10.0.0.1"}
	deviceB = softdevice.Device{Name: "b0", GUID: 2, Address: "10.0.0.2"}
	deviceC = softdevice.Device{Name: "c0", GUID: 3, Address: "10.0.0.3"}
	deviceD = softdevice.Device{Name: "d0", GUID: 4, Address: "10.0.0.4"}
)

// ofKind sets devices to RoCE or iWARP.
func ofKind(iwarp bool, devices ...softdevice.Device) []softdevice.Device {
	for i := range devices {
		devices[i].IWARP = iwarp
	}
	return devices
}

// TestRelayOfAnEarlierReleaseGetsNoRDMA demands TCP for data of a peer of an earlier release, which
// computes another number of parts for a write.
func TestRelayOfAnEarlierReleaseGetsNoRDMA(t *testing.T) {
	for _, earlier := range [][]string{{"a0", "b0"}, {"a0"}, {"b0"}} {
		t.Run(strings.Join(earlier, " "), func(t *testing.T) {
			w, settled := joining(t, false, nil, func(nic string, c *Config) { c.earlier = slices.Contains(earlier, nic) })
			if err := receive(t, settled, "the refusal"); !errors.Is(err, &wire.Error{Status: wire.StatusUnreachable}) {
				t.Errorf("RDMA is not refused: %v", err)
			}
			if moved, err := w.rdma.Calls("ibv_modify_qp"); err != nil ||
				slices.ContainsFunc(moved, func(c softdevice.Call) bool { return c.Arguments["state"] == "2" }) {
				t.Errorf("a queue pair was connected: %v, %v", moved, err)
			}
		})
	}
}

func connected(t *testing.T, changes ...func(string, *Config)) *two {
	t.Helper()
	return connectedBy(t, false, changes...)
}

// connectedBy connects two sides over devices of RoCE or of iWARP.
func connectedBy(t *testing.T, iwarp bool, changes ...func(string, *Config)) *two {
	t.Helper()
	w, settled := joining(t, iwarp, nil, changes...)
	if err := receive(t, settled, "the queue pairs"); err != nil {
		t.Fatal(err)
	}
	w.open(t)
	return w
}

// joining returns two sides during the negotiation, with RoCE or iWARP; no side uses the devices c0
// and d0.
func joining(t *testing.T, iwarp bool, by hears, changes ...func(string, *Config)) (w *two, settled chan error) {
	t.Helper()
	return joiningOf(t, ofKind(iwarp, deviceA, deviceB, deviceC, deviceD), by, changes...)
}

// connectedOf connects two sides over devices a0 and b0 of devices.
func connectedOf(t *testing.T, devices []softdevice.Device, changes ...func(string, *Config)) *two {
	t.Helper()
	w, settled := joiningOf(t, devices, nil, changes...)
	if err := receive(t, settled, "the queue pairs"); err != nil {
		t.Fatal(err)
	}
	w.open(t)
	return w
}

func joiningOf(t *testing.T, devices []softdevice.Device, by hears,
	changes ...func(string, *Config)) (w *two, settled chan error) {
	t.Helper()
	rdma, err := softdevice.New(t.TempDir(), devices...)
	if err != nil {
		t.Fatal(err)
	}
	changes = append(changes, func(_ string, c *Config) {
		c.Addresses = func() ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("10.0.0.4"),
				netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1")}, nil
		}
	})
	w = &two{rdma: rdma, iwarp: devices[0].IWARP, made: make(chan *Arrivals, 1), arrived: make(chan [2]uint64, 1000),
		ended: make(chan error, 1)}
	dialed, accepted := streams(t)
	w.b = newSide(t, accepted, rdma, "b0", func(s *QPGroup, c *tcp.Channel) {
		c.Handle(func(wire.Message, uint32, []int) {}, func(err error) { w.ended <- err })
		var a *Arrivals
		if s.Coming() {
			a = s.Receive(c, func(grant, length uint64) { w.arrived <- [2]uint64{grant, length} })
			c.Receive(func(uint64, uint64) {}, func() { a.End(func() {}) })
		}
		w.made <- a
	}, by, changes...)
	w.a = newSide(t, dialed, rdma, "a0", func(*QPGroup, *tcp.Channel) {}, by, changes...)
	settled = make(chan error, 1)
	w.a.loop.Call(func() { w.a.set.Settle(func(err error) { settled <- err }) })
	return w, settled
}

// open opens the channel.
func (w *two) open(t *testing.T) {
	t.Helper()
	var err error
	w.a.loop.Call(func() {
		w.channel, w.link, err = w.a.set.Open(&wire.Done{}, func(wire.Message, uint32, []int) {}, func(error) {}, nil, slot)
	})
	if err != nil {
		t.Fatal(err)
	}
	if w.arrivals = receive(t, w.made, "the channel"); w.arrivals == nil {
		t.Fatal("the channel has its data over tcp")
	}
}

// memory allocates host memory and registers it on one side.
func (e *side) memory(bytes uint64) *device.Memory {
	e.t.Helper()
	return e.memoryThat(bytes, func(*device.Memory) {})
}

func (e *side) memoryThat(bytes uint64, change func(*device.Memory)) *device.Memory {
	e.t.Helper()
	m, err := device.CreateHost("test", bytes)
	if err != nil {
		e.t.Fatal(err)
	}
	change(m)
	for _, target := range []bool{false, true} {
		if err := e.set.Register(m, target); err != nil {
			e.t.Fatal(err)
		}
	}
	e.t.Cleanup(func() {
		e.end() // first: no NIC may write the memory
		if err := m.Close(); err != nil {
			e.t.Error(err)
		}
	})
	return m
}

// TestTicketsNeverExceedReceives demands at most as many outstanding tickets as receives, and that
// every write waits for its ticket and arrives once.
func TestTicketsNeverExceedReceives(t *testing.T) {
	t.Run("RoCE", func(t *testing.T) { ticketsNeverExceedReceives(t, connected(t)) })
	t.Run("iWARP", func(t *testing.T) { ticketsNeverExceedReceives(t, byIWARP(t)) })
}

func ticketsNeverExceedReceives(t *testing.T, w *two) {
	const n, grants = 4 << 10, 2*receives + 50 // more than the receives of both queue pairs
	from, to := w.a.memory(grants*n), w.b.memory(grants*n)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(from.HostBytes())
	w.b.loop.Call(func() {
		if err := w.arrivals.AddMemory(7, to); err != nil {
			t.Error(err)
		}
		for i := range uint64(grants) {
			if err := w.arrivals.Grant(i, 7, i*n, n); err != nil {
				t.Error(err)
			}
		}
		if out, queued := len(w.b.set.tickets), len(w.b.set.queued); out != credits || queued != grants-credits {
			t.Errorf("%d tickets are out and %d wait; there are %d receives", out, queued, receives)
		}
	})
	done := make(chan error, grants)
	ready := make(chan error, 1)
	// The keys have arrived when the loop has processed them.
	for end := testutil.BeginFor(waitTime); ; time.Sleep(time.Millisecond) {
		known := false
		w.a.loop.Call(func() { known = w.link.regions[7] != nil })
		if known {
			break
		}
		if end.Over() {
			t.Fatal("no keys came")
		}
	}
	w.a.loop.Call(func() {
		w.link.AddTarget(7, wire.MemoryRemote, nil, func(err error) { ready <- err })
		for i := range uint64(grants) {
			w.link.Write(transport.Target{Region: 7, Offset: i * n}, transport.Source{Place: from.At(i * n)}, n, i,
				func(err error) { done <- err })
		}
	})
	if err := receive(t, ready, "the target"); err != nil {
		t.Error(err)
	}
	seen := map[uint64]bool{}
	for range grants {
		if err := receive(t, done, "a write's end"); err != nil {
			t.Fatal(err)
		}
		one := receive(t, w.arrived, "an arrival")
		if seen[one[0]] || one[1] != n {
			t.Fatalf("grant %d has arrived twice, or %d bytes", one[0], one[1])
		}
		seen[one[0]] = true
	}
	if !bytes.Equal(from.HostBytes(), to.HostBytes()) {
		t.Error("wrong bytes")
	}
	w.b.loop.Call(func() {
		if out := len(w.b.set.tickets) + len(w.b.set.queued) + len(w.arrivals.open); out != 0 {
			t.Errorf("%d tickets are left", out)
		}
	})
}

// TestImpossibleWritesAreRejected demands an error and no data for an invalid write or grant.
func TestImpossibleWritesAreRejected(t *testing.T) {
	w := connected(t)
	from, to := w.a.memory(slot), w.b.memory(slot)
	w.b.loop.Call(func() {
		if err := w.arrivals.AddMemory(7, to); err != nil {
			t.Error(err)
		}
		for what, err := range map[string]error{
			"a region that is none":   w.arrivals.Grant(1, 8, 0, 1),
			"bytes beyond the region": w.arrivals.Grant(1, 7, slot-1, 2),
			"no bytes":                w.arrivals.Grant(1, 7, 0, 0),
		} {
			if err == nil {
				t.Errorf("%s are granted", what)
			}
		}
		if err := w.arrivals.Grant(1, 7, 0, slot); err != nil {
			t.Error(err)
		}
	})
	for end := testutil.BeginFor(waitTime); ; time.Sleep(time.Millisecond) {
		there := false
		w.a.loop.Call(func() { _, there = w.link.tickets[1] })
		if there {
			break
		}
		if end.Over() {
			t.Fatal("no ticket came")
		}
	}
	elsewhere := make([]byte, slot)
	foreign, err := device.CreateHost("test", slot)
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	copy(foreign.HostBytes(), elsewhere)
	w.a.loop.Call(func() {
		for what, write := range map[string]func(func(error)){
			"memory that is not registered": func(done func(error)) {
				w.link.Write(transport.Target{Region: 7}, transport.Source{Place: foreign.At(0)}, slot, 1, done)
			},
			"a region that is none": func(done func(error)) {
				w.link.Write(transport.Target{Region: 8}, transport.Source{Place: from.At(0)}, slot, 1, done)
			},
			"bytes beyond the target": func(done func(error)) {
				w.link.Write(transport.Target{Region: 7, Offset: 1}, transport.Source{Place: from.At(0)}, slot, 1, done)
			},
			"bytes beyond the source": func(done func(error)) {
				w.link.Write(transport.Target{Region: 7}, transport.Source{Place: from.At(1)}, slot, 1, done)
			},
		} {
			var err error
			write(func(e error) { err = e })
			if err == nil {
				t.Errorf("%s is written", what)
			}
		}
	})
}

// TestEndOfChannelAndPeerEndsWrites demands that the end of a channel releases its tickets, and
// that the end of the Peer ends waiting and outstanding writes.
func TestEndOfChannelAndPeerEndsWrites(t *testing.T) {
	w := connected(t)
	from, to := w.a.memory(slot), w.b.memory(slot)
	w.b.loop.Call(func() {
		if err := w.arrivals.AddMemory(7, to); err != nil {
			t.Error(err)
		}
		for i := range uint64(credits + 3) {
			if err := w.arrivals.Grant(i, 7, 0, slot); err != nil {
				t.Error(err)
			}
		}
	})
	w.a.loop.Call(func() { w.channel.Leave() })
	if err := receive(t, w.ended, "the channel's end"); err != io.EOF {
		t.Error(err)
	}
	w.b.loop.Call(func() {
		w.b.set.issue()
		if out := len(w.b.set.tickets) + len(w.b.set.queued); out != 0 || len(w.b.set.channels) != 0 {
			t.Errorf("%d tickets are left of a channel that has ended, and %d channels", out, len(w.b.set.channels))
		}
	})
	var err error
	var link *Link
	w.a.loop.Call(func() {
		if _, link, err = w.a.set.Open(&wire.Done{}, func(wire.Message, uint32, []int) {}, func(error) {}, nil,
			slot); err == nil {
			link.regions[7] = &regionKeys{Region: 7, Address: 1 << 40, Bytes: slot}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	w.a.loop.Call(func() {
		link.Write(transport.Target{Region: 7}, transport.Source{Place: from.At(0)}, slot, 5, func(err error) { done <- err })
	})
	w.b.peer.Fail(fmt.Errorf("a cable was pulled"))
	if err := receive(t, done, "the write's end"); !strings.Contains(reason(err), "a cable was pulled") {
		t.Errorf("the write ended with %v", err)
	}
	for _, e := range []*side{w.a, w.b} {
		receive(t, e.down, "the Peer's end")
	}
}

// TestUnexpectedMessagesEndPeer demands that an unexpected message ends the Peer and the expected
// message does not.
func TestUnexpectedMessagesEndPeer(t *testing.T) {
	for name, m := range map[string]any{
		"an offer of the one who accepted": &offer{Kind: kindOffer, Cards: 1, Pairs: 1, Card: [maxCards]portInfo{somePort()}},
		"a second answer": &answer{Kind: kindAnswer, Cards: 1, Links: 1, Pairs: 1,
			Card: [maxCards]portInfo{somePort()}, End: [maxPairs]end{{Number: 17, PSN: 5}}},
		"a connect":                      &connect{Kind: kindConnect, Ends: 1, End: [maxPairs]end{{Number: 17, PSN: 5}}},
		"ready again":                    &short{Kind: kindReady},
		"use":                            &short{Kind: kindUse},
		"a refusal":                      &refusal{Kind: kindRefuse},
		"a path of no channel":           &path{Kind: kindPath, Links: 1, Most: 1},
		"a fall of other queue pairs":    &reset{Kind: kindReset, Epoch: 1},
		"an end of what has not failed":  &resetAck{Kind: kindResetAck},
		"paths of the first queue pairs": &step{Kind: kindResume},
		"tickets of other queue pairs":   &step{Kind: kindGranted, Epoch: 7},
		"nothing":                        &short{Kind: 77},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := connected(t)
			w.b.loop.Call(func() { w.b.peer.SendExtension(encode(m)) })
			if err := receive(t, w.a.down, "the Peer's end"); wire.StatusOf(err) != wire.StatusMalformed {
				t.Errorf("the Peer ended with %v", err)
			}
		})
	}
	t.Run("a write with a ticket that is not out", func(t *testing.T) {
		w := connected(t)
		from, to := w.a.memory(slot), w.b.memory(slot)
		r := w.b.fabric.memories[purpose{to, true}]
		w.a.loop.Call(func() {
			w.link.regions[7] = &regionKeys{Region: 7, Address: r.base, Bytes: slot,
				Keys: [maxCards]uint32{r.region(w.b.set.nics[0]).RKey()}}
			w.link.tickets[5] = 99
			w.link.Write(transport.Target{Region: 7}, transport.Source{Place: from.At(0)}, 1, 5, func(error) {})
		})
		w.b.loop.Call(func() {
			err := w.arrivals.AddMemory(7, to)
			if err == nil {
				err = w.arrivals.Grant(1, 7, 0, 1) // so that the side polls
			}
			if err != nil {
				t.Error(err)
			}
		})
		var bad *ticketError
		if err := receive(t, w.b.down, "the Peer's end"); !errors.As(err, &bad) || bad.Ticket != 99 ||
			!errors.Is(err, errNotOutstanding) {
			t.Errorf("the Peer ended with %v", err)
		}
	})
}

// TestMTUIsMinimumOfBothSides demands the smallest MTU of both ports and configurations on both
// sides: a queue pair drops packets of another MTU.
func TestMTUIsMinimumOfBothSides(t *testing.T) {
	w := connected(t, func(nic string, c *Config) {
		if nic == "b0" {
			c.MTU = 1024
		}
	})
	for _, e := range []*side{w.a, w.b} {
		var bytes int
		e.loop.Call(func() { bytes = e.set.mtu(0).Bytes() })
		if bytes != 1024 {
			t.Errorf("%s has MTU %d", e.peer.Name(), bytes)
		}
	}
}

// TestLostNICEndsItsGroups demands that the loss of a NIC ends its groups and the watch of its
// events, and that the next group opens the NIC again.
func TestLostNICEndsItsGroups(t *testing.T) {
	w := connected(t)
	f := w.a.fabric
	var old *nic
	w.a.loop.Call(func() {
		old = f.nics[0]
		f.events(old, unix.EPOLLERR)
	})
	var lost *nicError
	if err := receive(t, w.a.down, "the Peer's end"); wire.StatusOf(err) != wire.StatusPeerRelayDied ||
		!errors.As(err, &lost) || lost.NIC != "a0" {
		t.Errorf("the Peer ended with %v", err)
	}
	for range 2 {
		nics, err := f.active()
		if err != nil {
			t.Fatal(err)
		}
		if len(nics) != 1 || nics[0].name != "a0" || nics[0].context == old.context {
			t.Errorf("the NICs are %v", nics)
		}
	}
	if r := f.Report(); len(r.NICs) != 1 {
		t.Errorf("the report has %v", r.NICs)
	}
}

// refusingMemory returns connected groups, and host memory that the NIC a0 does not register until the
// next Script.
func refusingMemory(t *testing.T) (*two, *device.Memory) {
	t.Helper()
	w := connected(t)
	m, err := device.CreateHost("test", slot)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.a.end()
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := w.rdma.Script("ibv_reg_mr errno=12 device=a0", "ibv_reg_mr_iova2 errno=12 device=a0"); err != nil {
		t.Fatal(err)
	}
	return w, m
}

// TestFailedRegistrationIsRetried demands another try of a failed registration for the next
// connection, and remote write access only for targets.
func TestFailedRegistrationIsRetried(t *testing.T) {
	w, m := refusingMemory(t)
	if err := w.a.set.Register(m, false); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("it was registered, %v", err)
	}
	if err := w.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	for _, target := range []bool{false, true} {
		if err := w.a.set.Register(m, target); err != nil {
			t.Fatal(err)
		}
		if !w.a.set.Known(m, target) {
			t.Error("it is not known")
		}
		made, err := w.rdma.Calls("ibv_reg_mr", "ibv_reg_mr_iova2")
		if err != nil {
			t.Fatal(err)
		}
		last := made[len(made)-1]
		access, err := strconv.ParseUint(last.Arguments["access"], 0, 32)
		if err != nil {
			t.Fatalf("%v: %v", last, err)
		}
		if written := verbs.Access(access)&(verbs.LocalWrite|verbs.RemoteWrite) != 0; written != target {
			t.Errorf("target %v is registered with %#x", target, access)
		}
	}
	w.a.end()
	if err := w.a.set.Register(m, false); err == nil {
		t.Error("memory is registered after the end")
	}
}

// TestFlushOutlivesItsChannel demands that a channel ends for its memory only after the flushes of
// its writes, or with the Peer.
func TestFlushOutlivesItsChannel(t *testing.T) {
	for _, dies := range []bool{false, true} {
		t.Run(fmt.Sprintf("the Peer dies %v", dies), func(t *testing.T) {
			w := connected(t, func(_ string, c *Config) {
				c.Flush, c.Stages = func(*device.Memory) bool { return true }, func() bool { return true }
			})
			write := w.granted(t, 1)
			ended := make(chan struct{})
			w.b.loop.Call(func() {
				s := w.b.set
				region := w.arrivals.regions[7] // host memory, which needs no flush
				list := slices.Clone(*region.regions.Load())
				known, err := s.queues[0].nic.domain.Register(uintptr(region.base), region.bytes, region.base,
					s.fabric.access(true)|verbs.RemoteRead)
				if err != nil {
					t.Error(err)
					return
				}
				defer func(old *verbs.Region) {
					if err := old.Close(); err != nil {
						t.Error(err)
					}
				}(list[0])
				list[0], region.flush = known, true
				region.regions.Store(&list)
				done := make(chan error, 1)
				w.a.loop.Call(func() {
					keys := *w.link.regions[7]
					keys.Keys[0] = known.RKey()
					w.link.regions[7] = &keys
					write(func(err error) { done <- err })
				})
				if err := receive(t, done, "the write's end"); err != nil {
					t.Error(err)
				}
				w.arrivals.End(func() { close(ended) })
				select {
				case <-ended:
					t.Errorf("the channel has ended, and %d flushes are under way", s.flushes)
				default:
				}
				if dies {
					s.peer.Fail(fmt.Errorf("a cable was pulled"))
					s.queues[0].flusher.posted[0].tickets[0].unflushed++ // the completion is ignored
				}
			})
			receive(t, ended, "the end of what is flushed")
			if len(w.arrived) != 0 {
				t.Error("something has arrived on a channel that has ended")
			}
		})
	}
}

// TestMemoryForgottenEarlyIsNotRegistered demands that memory that is forgotten before the
// registration of Known begins is neither registered nor found as a source.
func TestMemoryForgottenEarlyIsNotRegistered(t *testing.T) {
	w := connected(t)
	f := w.a.fabric
	for range 100 {
		m, err := device.CreateHost("test", slot)
		if err != nil {
			t.Fatal(err)
		}
		w.a.set.Known(m, false)
		f.Forget(m)
		at := m.At(0)
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		f.building.Wait()
		if r := f.at(at, 1); r != nil || len(f.memories) != 0 {
			t.Fatalf("%d registrations are left, and a source %v", len(f.memories), r)
		}
	}
}

// TestStaleTicketsAreForgottenByAge demands that the group forgets the oldest stale tickets first
// above the limit.
func TestStaleTicketsAreForgottenByAge(t *testing.T) {
	s := &QPGroup{}
	for i := range uint32(maxStale + 10) {
		s.markStale(&ticket{number: i + 1, parts: 1})
	}
	_, oldest := s.stale[10]
	_, kept := s.stale[11]
	if len(s.stale) != maxStale || oldest || !kept {
		t.Errorf("%d tickets are remembered; the 10th %v, the 11th %v", len(s.stale), oldest, kept)
	}
}
