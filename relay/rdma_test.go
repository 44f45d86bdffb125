package relay_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/wire"
)

// roce are NICs of a software device's host, in one network. NICs' writes into GPU memory are
// visible to further devices only after a flush.
func roce(host int, names ...string) (devices []softdevice.Device) {
	for i, name := range names {
		devices = append(devices, softdevice.Device{Name: name, GUID: uint64(host<<8 | i),
			Address: fmt.Sprintf("10.0.%d.%d", i, host), Holds: true})
	}
	return devices
}

// onRDMA puts a host's relays on the network with RDMA, by a transport.
func (h *host) onRDMA(s *launch.Secrets, transport string, pairs int, rdma softdevice.Host) {
	h.online(s)
	h.rdma = rdma.Library()
	h.nics = []netip.Addr{netip.MustParseAddr("192.0.2.1")} // no NIC's
	for _, d := range slices.Concat(ofA, ofB) {
		h.nics = append(h.nics, netip.MustParseAddr(d.Address))
	}
	change := h.change
	h.change = func(c *launch.Config) {
		change(c)
		v := launch.DefaultVerbs
		v.QueuePairs, v.Timeout = pairs, 14 // 0.5 s with 7 retries
		c.Transport, c.Verbs = transport, &v
	}
}

// byRDMA is two containers on two hosts, and the NICs of both: a software device's NICs reach the
// NICs of the same directory.
type byRDMA struct {
	remotePair
	rdma           softdevice.Host
	devices        []softdevice.Device           // of both hosts; nil for ofA and ofB
	script         []string                      // of the devices before a client attaches
	lane           func(launch.Lane) launch.Lane // has its way with both lanes; nil for none
	reconnectLimit time.Duration                 // as host's
	settle         time.Duration                 // as host's
	more           []launch.Lane                 // of host b's relay, after its first
	change         func(*launch.Config)          // has its way with both relays' configurations; nil for none
	kept           error                         // of the Run of host a's relay, whose NIC keeps memory; nil elsewhere
}

// ofA and ofB are the NICs of two hosts.
var ofA, ofB = roce(1, "mlx5_0", "mlx5_1"), roce(2, "rocep1", "rocep2")

// hostsByRDMA makes two hosts with one or two NICs per host.
func hostsByRDMA(t *testing.T, nics, pairs int) *byRDMA {
	t.Helper()
	return hostsWithReconnectLimit(t, nics, pairs, 0)
}

// hostsWithReconnectLimit sets the time limit of reconnects, 0 for the default.
func hostsWithReconnectLimit(t *testing.T, nics, pairs int, limit time.Duration) *byRDMA {
	t.Helper()
	return hostsBy(t, nics, pairs, limit, roceItIs)
}

func roceItIs(devices []softdevice.Device) []softdevice.Device { return devices }

// iwarp turns devices into iWARP devices.
func iwarp(devices []softdevice.Device) []softdevice.Device {
	devices = slices.Clone(devices)
	for i := range devices {
		devices[i].IWARP = true
	}
	return devices
}

func hostsBy(t *testing.T, nics, pairs int, limit time.Duration,
	kind func([]softdevice.Device) []softdevice.Device) *byRDMA {
	t.Helper()
	p := &byRDMA{reconnectLimit: limit, devices: kind(slices.Concat(ofA, ofB))}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, nics, pairs)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	return p
}

func (p *byRDMA) begin(t *testing.T, a, b string, nics, pairs int) {
	t.Helper()
	key := cluster()
	hostA, hostB := newHost(t), newHost(t)
	hostA.reconnectLimit, hostB.reconnectLimit = p.reconnectLimit, p.reconnectLimit
	hostA.settle, hostB.settle = p.settle, p.settle
	hostA.ends = p.kept
	var err error
	if p.devices == nil {
		p.devices = slices.Concat(ofA, ofB)
	}
	if p.rdma, err = softdevice.New(t.TempDir(), p.devices...); err != nil {
		t.Fatal(err)
	}
	if err := p.rdma.Script(p.script...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.kept == nil {
			allGivenBack(t, p.rdma)
		}
	})
	hostA.onRDMA(key, a, pairs, p.rdma)
	hostB.onRDMA(key, b, pairs, p.rdma)
	if p.change != nil {
		for _, h := range []*host{hostA, hostB} {
			before := h.change
			h.change = func(c *launch.Config) { before(c); p.change(c) }
		}
	}
	laneA, laneB := far(0, 1, "mlx5_0"), far(3, 2, "rocep1")
	if nics == 2 {
		laneA.NICs, laneB.NICs = append(laneA.NICs, "mlx5_1"), append(laneB.NICs, "rocep2")
	}
	if p.lane != nil {
		laneA, laneB = p.lane(laneA), p.lane(laneB)
	}
	p.socketA, p.relayA = hostA.start("a", launch.RouteAuto, -1, laneA)
	p.socketB, p.relayB = hostB.start("b", launch.RouteAuto, -1, append([]launch.Lane{laneB}, p.more...)...)
	p.a, p.b = attach(t, p.socketA), attach(t, p.socketB)
	p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
}

// allGivenBack checks after the end of the relays that every NIC object was destroyed, and none too
// early.
func allGivenBack(t *testing.T, rdma softdevice.Host) {
	t.Helper()
	inOrder(t, rdma)
	for given, made := range map[string][]string{
		"ibv_destroy_qp": {"ibv_create_qp"}, "ibv_destroy_cq": {"ibv_create_cq"}, "ibv_dealloc_pd": {"ibv_alloc_pd"},
		"ibv_dereg_mr": {"ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr"}, "ibv_close_device": {"ibv_open_device"},
		"rdma_destroy_event_channel": {"rdma_create_event_channel"},
	} {
		calls, err := rdma.Calls(append(made, given)...)
		if err != nil {
			t.Fatal(err)
		}
		left := 0
		for _, c := range calls {
			switch {
			case c.Arguments["="] != "0" && c.Name == given:
				t.Errorf("%s: %v", given, c.Arguments)
			case c.Arguments["="] != "0":
			case c.Name == given:
				left--
			default:
				left++
			}
		}
		if left != 0 {
			t.Errorf("%d more calls of %s than of %s", left, made, given)
		}
	}
}

// data says how the data between the two relays goes, at both ends.
func (p *byRDMA) data(t *testing.T) (transport, way string) {
	t.Helper()
	a, b := p.relayA.Report().Network, p.relayB.Report().Network
	if len(a.Peers) != 1 || len(b.Peers) != 1 || a.Peers[0].Transport != b.Peers[0].Transport {
		t.Fatalf("the relays are connected as %+v and %+v", a, b)
	}
	return a.Peers[0].Transport, a.Peers[0].Way
}

// Every byte arrives, for any number of NICs and queue pairs, and no long message uses TCP.
func TestRDMADeliversEveryByte(t *testing.T) {
	for _, of := range []struct {
		nics, pairs int
		iwarp       bool
	}{{1, 1, false}, {2, 4, false}, {1, 1, true}, {2, 4, true}} {
		t.Run(fmt.Sprintf("%d NICs, %d pairs, iWARP %v", of.nics, of.pairs, of.iwarp), func(t *testing.T) {
			kind, by := func(d []softdevice.Device) []softdevice.Device { return d },
				"mlx5_0 (GID 3 (10.0.0.1, RoCE v2)) and rocep1 (10.0.0.2)"
			if of.iwarp {
				kind, by = iwarp, "mlx5_0 (10.0.0.1, iWARP by RDMA CM) and rocep1 (10.0.0.2)"
			}
			p := hostsBy(t, of.nics, of.pairs, 0, kind)
			p.arrive(t, 0, 1, 7, 8, 127, 128, 129, 4096, 4097, 256<<10-1, 256<<10, 256<<10+1, 1<<20+3, 11<<20+5)
			report := p.relayA.Report()
			if c := report.Connections; len(c) != 1 || c[0].Transport != launch.TransportVerbs ||
				!strings.Contains(c[0].Path, "-> GPU "+devices[1].BusID+" -> verbs by mlx5_0") ||
				!strings.HasPrefix(c[0].Registration, "dmabuf: ") || !c[0].GDR {
				t.Errorf("inspect shows %+v", c)
			}
			transport, way := p.data(t)
			if transport != launch.TransportVerbs || !strings.Contains(way, by) || of.nics == 2 != strings.Contains(way,
				"mlx5_1") {
				t.Errorf("data goes over %s, %q", transport, way)
			}
			if n := report.Network.Peers[0]; n.Writes != n.Eager {
				t.Errorf("%d writes went over tcp, and only %d of them were short", n.Writes, n.Eager)
			}
			if n := report.Network.Verbs; n == nil || len(n.NICs) != of.nics ||
				!strings.Contains(n.NICs[0], "mlx5_0 port 1, Ethernet") {
				t.Errorf("inspect shows the NICs %+v", n)
			}
			flushers := 1
			if of.iwarp { // received bytes are in host memory
				flushers = 0
			}
			if calls, err := p.rdma.Calls("ibv_create_qp"); err != nil || len(calls) != 2*of.nics*(of.pairs+flushers) {
				t.Errorf("%d queue pairs were made, %v", len(calls), err)
			}
			if of.pairs == 1 {
				return
			}
			// And in the reverse direction, for messages.
			back := pair{a: p.b, b: p.a, source: exported(t, p.b, 3, pairBytes), target: exported(t, p.a, 0, pairBytes)}
			back.sending, back.receiving, back.handle = join(t, p.b, 3, p.a, 0)
			back.arrive(t, 0, 5000, 3<<20+7)
		})
	}
}

// NICs access host memory in place after registration, and through slots before; the relay
// deregisters the memory before the free.
func TestHostMemoryOverRDMAIsUsedInPlace(t *testing.T) {
	p := hostsByRDMA(t, 1, 1)
	const n = 1<<20 + 5
	from, err := p.a.HostMemory(within(t), client.HostMemory{Bytes: n, GPU: uuid(t, 0)})
	if err != nil {
		t.Fatal(err)
	}
	to, err := p.b.HostMemory(within(t), client.HostMemory{Bytes: n, GPU: uuid(t, 3)})
	if err != nil {
		t.Fatal(err)
	}
	through := func(s *client.Session) (in uint64) {
		t.Helper()
		counters, err := s.Statistics(within(t))
		if err != nil {
			t.Fatal(err)
		}
		return counters.Server[0].In
	}
	want := random(t, n)
	copy(from.Data, want)
	for end := testutil.Begin(); ; {
		clear(to.Data)
		out, in := through(p.a), through(p.b)
		receive, err := p.receiving.Receive(to, 0, n)
		if err != nil {
			t.Fatal(err)
		}
		send, err := p.sending.Send(from, 0, n)
		for _, op := range []*client.Operation{send, receive} {
			if _, err := wait(t, op, err); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(to.Data, want) {
			t.Fatal("wrong bytes")
		}
		if through(p.a) == out && through(p.b) == in {
			break
		}
		if end.Over() {
			t.Fatal("it goes through slots for good")
		}
	}
	registered := func() int {
		t.Helper()
		made, err := p.rdma.Calls("ibv_reg_mr_iova2", "ibv_reg_mr")
		if err != nil {
			t.Fatal(err)
		}
		gone, err := p.rdma.Calls("ibv_dereg_mr")
		if err != nil {
			t.Fatal(err)
		}
		return len(made) - len(gone)
	}
	for _, memory := range []*client.Memory{from, to} {
		before := registered()
		if err := memory.Unexport(within(t)); err != nil {
			t.Fatal(err)
		}
		if after := registered(); after != before-1 {
			t.Errorf("%d regions are registered, %d before the memory was given back", after, before)
		}
	}
}

// Many clients share the queue pairs, with more grants than there are receives for.
func TestManyClientsOverRDMAShareQueuePairs(t *testing.T) {
	p := hostsByRDMA(t, 1, 2)
	const clients, messages, n = 6, 8, 256 << 10
	var all sync.WaitGroup
	for range clients {
		a, b := attach(t, p.socketA), attach(t, p.socketB)
		source, target := exported(t, a, 0, messages*n), exported(t, b, 3, messages*n)
		sending, receiving, _ := join(t, a, 0, b, 3)
		want := random(t, messages*n)
		source.write(0, want)
		all.Go(func() {
			var ops []*client.Operation
			for i := range uint64(messages) {
				receive, err := receiving.Receive(target.Memory, i*n, n, client.Tag(i))
				if err != nil {
					t.Error(err)
					return
				}
				send, err := sending.Send(source.Memory, i*n, n, client.Tag(i))
				if err != nil {
					t.Error(err)
					return
				}
				ops = append(ops, send, receive)
			}
			for _, op := range ops {
				if _, err := op.Wait(within(t)); err != nil {
					t.Error(err)
					return
				}
			}
			if !bytes.Equal(target.read(0, messages*n), want) {
				t.Error("wrong bytes")
			}
		})
	}
	all.Wait()
	if calls, err := p.rdma.Calls("ibv_create_qp"); err != nil || len(calls) != 4+2 {
		t.Errorf("%d queue pairs were made for all, %v", len(calls), err)
	}
}

// Slots and credits are few, and a write that fills a slot needs both: many connections with
// maximal grants complete.
func TestRDMAGrantsOverFewSlotsAllComplete(t *testing.T) {
	p := hostsByRDMA(t, 1, 1)
	const connections, n = 100, 1 << 20 // four grants each, of 256 tickets
	want := random(t, n)
	p.source.write(0, want)
	to := hostMemory(t, p.b, 3, n)
	through := func() uint64 {
		t.Helper()
		counters, err := p.b.Statistics(within(t))
		if err != nil {
			t.Fatal(err)
		}
		return counters.Server[0].In
	}
	for end, before := testutil.Begin(), uint64(0); ; { // until the NICs know it
		before = through()
		receive, err := p.receiving.Receive(to, 0, n)
		if err != nil {
			t.Fatal(err)
		}
		send, err := p.sending.Send(p.source.Memory, 0, n)
		for _, op := range []*client.Operation{send, receive} {
			if _, err := wait(t, op, err); err != nil {
				t.Fatal(err)
			}
		}
		if through() == before {
			break
		}
		if end.Over() {
			t.Fatal("it goes through slots for good")
		}
	}
	clear(to.Data)
	var sendings []*client.Connection
	var ops []*client.Operation
	for range connections {
		sending, receiving, _ := join(t, p.a, 0, p.b, 3)
		sendings = append(sendings, sending)
		for range 4 {
			op, err := receiving.Receive(to, 0, n)
			if err != nil {
				t.Fatal(err)
			}
			ops = append(ops, op)
		}
	}
	for range 4 {
		for _, sending := range sendings {
			op, err := sending.Send(p.source.Memory, 0, n)
			if err != nil {
				t.Fatal(err)
			}
			ops = append(ops, op)
		}
	}
	for _, op := range ops {
		if _, err := op.Wait(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(to.Data, want) {
		t.Error("wrong bytes")
	}
}

// A channel refused for its first message harms neither present connections nor the next one.
func TestRefusedRDMAChannelHarmsNoOtherChannel(t *testing.T) {
	p := hostsByRDMA(t, 1, 1)
	for range 3 {
		demand(t, p.relayA.OpenByRDMA(&wire.Done{}), wire.StatusMalformed)
	}
	p.arrive(t, 1<<20)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
}

// Where RDMA cannot be, data goes over TCP and both relays say why, or the connection is
// refused with that where RDMA was asked for.
func TestRDMAUnavailableUsesTCPOrIsRefused(t *testing.T) {
	down := roce(2, "rocep1")[0]
	down.Down = true
	other := iwarp(roce(2, "rocep1"))
	addressless := slices.Clone(other)
	addressless[0].Address = ""
	both := iwarp(slices.Concat(ofA, ofB))
	const forced, auto = launch.TransportVerbs, launch.TransportAuto
	for name, c := range map[string]struct {
		devices []softdevice.Device // nil for all
		script  []string
		a, b    string
		words   []string
	}{
		"a relay that is told tcp":       {nil, nil, forced, launch.TransportTCP, []string{"relay.transport", `"tcp"`}},
		"a host without NICs":            {ofA, nil, forced, auto, []string{"rocep1", "no such device"}},
		"a host without NICs that sends": {ofB, nil, auto, forced, []string{"mlx5_0", "no such device"}},
		"a port that is down": {append(slices.Clone(ofA), down), nil, forced, auto,
			[]string{"rocep1", "no port is active"}},
		"RoCE and iWARP": {slices.Concat(ofA, other), nil, forced, auto,
			[]string{"no NIC has the kind of a NIC of the peer", "rocep1", "iWARP", "RoCE"}},
		"iWARP and RoCE": {slices.Concat(iwarp(ofA), ofB), nil, forced, auto,
			[]string{"no NIC has the kind of a NIC of the peer", "mlx5_0", "iWARP", "RoCE"}},
		"iWARP without an address": {slices.Concat(iwarp(ofA), addressless), nil, forced, auto,
			[]string{"rocep1", "no address of this host leads to the device"}},
		"no connection manager": {both, []string{"rdma_create_event_channel errno=2"}, forced, auto,
			[]string{"rdma_create_event_channel", "rdma_ucm"}},
		"no port to listen at": {both, []string{"rdma_listen errno=98 device=mlx5_0"}, forced, auto,
			[]string{"mlx5_0", "listen at mlx5_0", "rdma_listen"}},
		"an address that is not found": {both, []string{"rdma_resolve_addr errno=101"}, forced, auto,
			[]string{"rocep1", "10.0.0.1", "ENETUNREACH"}},
		"a way that is not found": {both, []string{"rdma_resolve_route errno=110"}, forced, auto,
			[]string{"rocep1", "10.0.0.1", "ETIMEDOUT"}},
		"a pair that iWARP does not make": {both, []string{"ibv_create_qp errno=12 device=mlx5_0"}, forced, auto,
			[]string{"mlx5_0", "rdma_create_qp", "ENOMEM"}},
		"a NIC that does not accept": {both, []string{"rdma_accept errno=5"}, forced, auto,
			[]string{"mlx5_0", "rdma_accept", "EIO"}},
		"iWARP that carries nothing": {both, []string{"send status=12"}, forced, auto,
			[]string{"first write", "rocep1", "transport retry counter exceeded"}},
		"InfiniBand and RoCE": {append(slices.Clone(ofA), softdevice.Device{Name: "rocep1", InfiniBand: true,
			LID: 7}), nil, forced, auto, []string{"no NIC has the kind of a NIC of the peer"}},
		"queue pairs that cannot be made": {nil, []string{"ibv_create_qp errno=12 device=rocep1"}, forced, auto,
			[]string{"rocep1", "ENOMEM"}},
		"a way that is refused": {nil, []string{"ibv_modify_qp errno=110 device=mlx5_0"}, forced, auto,
			[]string{"mlx5_0", "ETIMEDOUT"}},
		"a network that carries nothing": {nil, []string{"send status=12"}, forced, auto,
			[]string{"first write", "rocep1", "transport retry counter exceeded"}},
		"a network of one direction": {nil, []string{"send status=12 device=mlx5_0"}, forced, auto,
			[]string{"first write", "mlx5_0", "transport retry counter exceeded"}},
		"slots that cannot be registered": {nil, []string{"ibv_reg_mr errno=12 device=mlx5_0",
			"ibv_reg_mr_iova2 errno=12 device=mlx5_0"}, forced, auto, []string{"registered", "ulimit -l"}},
	} {
		for _, asked := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/asked for %v", name, asked), func(t *testing.T) {
				t.Parallel()
				a, b := c.a, c.b
				if !asked {
					if a == forced {
						a = auto
					}
					if b == forced {
						b = auto
					}
				}
				// A loaded machine takes longer than relays allow.
				p := &byRDMA{settle: 10 * time.Minute, devices: c.devices, script: c.script}
				p.begin(t, a, b, 1, 1)
				l, err := p.b.Listen(within(t), uuid(t, 3))
				if err != nil {
					t.Fatal(err)
				}
				if asked {
					_, err = p.a.Connect(within(t), uuid(t, 0), l.Handle())
					demandOf(t, err, wire.StatusUnreachable, "relay.transport")
					demandText(t, err, c.words...)
					return
				}
				if p.sending, err = p.a.Connect(within(t), uuid(t, 0), l.Handle()); err != nil {
					t.Fatal(err)
				}
				if p.receiving, err = l.Accept(within(t)); err != nil {
					t.Fatal(err)
				}
				p.arrive(t, 4097, 1<<20+3)
				transport, way := p.data(t)
				if transport != launch.TransportTCP {
					t.Errorf("data goes over %s", transport)
				}
				for _, word := range c.words {
					if !strings.Contains(way, word) {
						t.Errorf("inspect says %q, and nothing of %q", way, word)
					}
				}
			})
		}
	}
}

// shortReconnectLimit is far below the guaranteed time, for tests of the timeout.
const shortReconnectLimit = 300 * time.Millisecond

// A failure of a NIC's queue pairs, or of a flush of slots on a GPU, loses no message: new queue
// pairs replace the failed pairs, and the relay registers the slots again.
func TestFailedQueuePairsAreReplacedWithoutLoss(t *testing.T) {
	t.Run("RoCE", func(t *testing.T) {
		p := hostsWithReconnectLimit(t, 2, 2, time.Minute)
		queuePairsThatFail(t, p, "rocep1")
		for _, side := range []struct {
			*client.Session
			server int
		}{{p.a, 1}, {p.b, 2}} {
			if gpu, host := throughSlots(t, side.Session, side.server); gpu == 0 || host != 0 {
				t.Errorf("%d bytes went through slots on the server GPU and %d through the host's", gpu, host)
			}
		}
	})
	t.Run("iWARP", func(t *testing.T) { // which flushes nothing, and so goes through the host's memory
		queuePairsThatFail(t, hostsBy(t, 2, 2, time.Minute, iwarp), "mlx5_0")
	})
}

// queuePairsThatFail makes queue pairs fail at one NIC, at every NIC, and at a sending NIC.
func queuePairsThatFail(t *testing.T, p *byRDMA, sends string) {
	p.arrive(t, 1<<20)
	for _, line := range []string{"send status=9 device=mlx5_1", "send status=12", "send status=12 device=" + sends} {
		if err := p.rdma.Script(line); err != nil {
			t.Fatal(err)
		}
		receive, err := p.receiving.Receive(p.target.Memory, 0, pairBytes)
		if err != nil {
			t.Fatal(err)
		}
		want := random(t, pairBytes)
		p.source.write(0, want)
		send, err := p.sending.Send(p.source.Memory, 0, pairBytes)
		if err != nil {
			t.Fatal(err)
		}
		for end := testutil.Begin(); ; time.Sleep(5 * time.Millisecond) {
			if _, way := p.data(t); strings.Contains(way, "RDMA reconnects") {
				break
			}
			if end.Over() {
				t.Fatal("nothing has failed")
			}
		}
		if err := p.rdma.Script(); err != nil {
			t.Fatal(err)
		}
		for _, op := range []*client.Operation{send, receive} {
			if _, err := wait(t, op, nil); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(p.target.read(0, pairBytes), want) {
			t.Error("wrong bytes")
		}
	}
	if _, way := p.data(t); !strings.Contains(way, "reconnected 3 times") {
		t.Errorf("inspect says %q", way)
	}
	// And a connection that is made now.
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 0, 5, 1<<20+3)
}

// A port that goes down costs no message: the second NIC carries the traffic. Only the writing NIC
// can flush the writes into a GPU, so the relay waits for an unfinished flush.
func TestPortDownMovesTrafficToOtherNIC(t *testing.T) {
	const mayWait, mustWait = 1, 2
	for name, of := range map[string]struct {
		down  int
		held  string // whose next request stands still until the fault: a write, or a flush
		waits int
	}{
		"of the sender, with writes under way":   {1, ofA[1].Name, 0},
		"of the sender, with flushes under way":  {1, ofB[1].Name, 0},
		"of the receiver, with writes under way": {len(ofA) + 1, ofA[1].Name, mayWait},
		"of the receiver, with flushes as well":  {len(ofA) + 1, ofB[1].Name, mustWait},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := hostsWithReconnectLimit(t, 2, 2, time.Minute)
			p.arrive(t, 1<<20)
			within := func(what string, is func() bool) {
				t.Helper()
				for end := testutil.Begin(); !is(); time.Sleep(10 * time.Millisecond) {
					if _, way := p.data(t); end.Over() {
						t.Fatalf("%s: not within a minute; data goes over %s", what, way)
					}
				}
			}
			if err := p.rdma.Script("send delay=2", "send hold=1 device="+of.held); err != nil {
				t.Fatal(err)
			}
			receive, err := p.receiving.Receive(p.target.Memory, 0, pairBytes)
			if err != nil {
				t.Fatal(err)
			}
			want := random(t, pairBytes)
			p.source.write(0, want)
			send, err := p.sending.Send(p.source.Memory, 0, pairBytes)
			if err != nil {
				t.Fatal(err)
			}
			within("a request under way", func() bool {
				held, err := p.rdma.Calls("held")
				if err != nil {
					t.Fatal(err)
				}
				return len(held) > 0
			})
			all := slices.Concat(ofA, ofB)
			all[of.down].Down = true
			if err := p.rdma.Set(all...); err != nil {
				t.Fatal(err)
			}
			within("the fault", func() bool {
				_, way := p.data(t)
				return strings.Contains(way, "reconnect")
			})
			if err := p.rdma.Script("send delay=2"); err != nil {
				t.Fatal(err)
			}
			moved := func() bool {
				_, way := p.data(t)
				return strings.Contains(way, "reconnected ") && !strings.Contains(way, "RDMA reconnects") &&
					!strings.Contains(way, all[of.down].Address)
			}
			waits := func() bool {
				_, way := p.data(t)
				return of.waits > 0 && strings.Contains(way, "cannot be flushed")
			}
			waited := false
			within("what comes of it", func() bool {
				waited = waited || waits()
				return waited || moved()
			})
			if of.waits == mustWait && !waited {
				t.Error("what the NIC had written and not flushed was not waited for")
			}
			if err := p.rdma.Script(); err != nil {
				t.Fatal(err)
			}
			if waited {
				if err := p.rdma.Set(slices.Concat(ofA, ofB)...); err != nil {
					t.Fatal(err)
				}
			}
			for _, op := range []*client.Operation{send, receive} {
				if _, err := wait(t, op, nil); err != nil {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(p.target.read(0, pairBytes), want) {
				t.Error("wrong bytes")
			}
			p.arrive(t, 0, 5, 3<<20+3)
		})
	}
}

// A permanent failure of a NIC ends the operations of both sides with an error that names the NIC
// and the cause, and no resource remains; the next connection has new queue pairs.
func TestFailedNICEndsOperationsWithItsName(t *testing.T) {
	p := hostsWithReconnectLimit(t, 1, 2, shortReconnectLimit)
	p.move(t, 1<<20)
	if err := p.rdma.Script("send status=12"); err != nil {
		t.Fatal(err)
	}
	receive, err := p.receiving.Receive(p.target.Memory, 0, 3<<20)
	if err != nil {
		t.Fatal(err)
	}
	send, err := p.sending.Send(p.source.Memory, 0, 3<<20)
	for _, op := range []*client.Operation{send, receive} {
		_, err := wait(t, op, err)
		demandCode(t, err, wire.StatusPeerRelayDied, codes.RDMAFailed, "")
		demandText(t, err, "mlx5_0", "transport retry counter exceeded")
	}
	for _, r := range []*relay.Relay{p.relayA, p.relayB} {
		for end := testutil.Begin(); r.Report().Used.Connections > 0 ||
			len(r.Report().Network.Peers) > 0; time.Sleep(5 * time.Millisecond) {
			if end.Over() {
				t.Fatalf("left: %+v", r.Report().Used)
			}
		}
	}
	if err := p.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
}

// If NICs refuse the sender's slots, the data uses TCP, and RDMA after a later success.
func TestUnregisteredSlotsSendOverTCP(t *testing.T) {
	p := &byRDMA{}
	p.begin(t, launch.TransportAuto, launch.TransportAuto, 1, 1)
	// But not the page of a group.
	if err := p.rdma.Script("ibv_reg_dmabuf_mr errno=95", "ibv_reg_mr errno=12 bytes=65536"); err != nil {
		t.Fatal(err)
	}
	for _, transport := range []string{launch.TransportTCP, launch.TransportVerbs} {
		p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
		p.arrive(t, 1<<20)
		if c := p.relayA.Report().Connections; len(c) != 1 || c[0].Transport != transport {
			t.Errorf("inspect shows %+v; it was to go over %s", c, transport)
		}
		if way, why := p.data(t); way != launch.TransportVerbs {
			t.Errorf("the relays have %s between them: %s", way, why)
		}
		if err := p.sending.Close(within(t)); err != nil {
			t.Fatal(err)
		}
		if err := p.rdma.Script(); err != nil {
			t.Fatal(err)
		}
	}
}

// A permanently pulled cable ends the operations over the cable, on both hosts; the next connection
// goes over TCP, which says why, and over RDMA again when the port is back.
func TestPulledCableEndsOperationsAndNextUsesTCP(t *testing.T) {
	p := &byRDMA{reconnectLimit: shortReconnectLimit}
	p.begin(t, launch.TransportAuto, launch.TransportAuto, 1, 1)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
	if transport, why := p.data(t); transport != launch.TransportVerbs {
		t.Fatalf("data goes over %s: %s", transport, why)
	}
	down := slices.Concat(ofA, ofB)
	down[len(ofA)].Down = true
	if err := p.rdma.Set(down...); err != nil {
		t.Fatal(err)
	}
	// The software device gets the event a little later.
	for end, failed := testutil.Begin(), false; !failed; {
		receive, err := p.receiving.Receive(p.target.Memory, 0, 3<<20)
		if err != nil {
			t.Fatal(err)
		}
		send, err := p.sending.Send(p.source.Memory, 0, 3<<20)
		for _, op := range []*client.Operation{send, receive} {
			if _, err := wait(t, op, err); err != nil {
				failed = true
				demandCode(t, err, wire.StatusPeerRelayDied, codes.RDMAFailed, "")
			}
		}
		if end.Over() {
			t.Fatal("messages go over a cable that is pulled")
		}
	}
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
	if c := p.relayA.Report().Connections; len(c) != 1 || c[0].Transport != launch.TransportTCP {
		t.Errorf("inspect shows %+v", c)
	}
	if err := p.sending.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := p.rdma.Set(slices.Concat(ofA, ofB)...); err != nil {
		t.Fatal(err)
	}
	for end := testutil.Begin(); len(p.relayA.Report().Network.Peers) > 0; time.Sleep(5 * time.Millisecond) {
		if p.relayA.CloseIdle(); end.Over() {
			t.Fatal("the connections of the pulled cable are kept")
		}
	}
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
	if c := p.relayA.Report().Connections; len(c) != 1 || c[0].Transport != launch.TransportVerbs {
		t.Errorf("inspect shows %+v", c)
	}
}

// With transport verbs a connect fails while a port is down. Some seconds after the port is active
// again a connect succeeds: the relays replace the connections that were made without RDMA, before
// these are closed for idleness.
func TestDemandedRDMAComesBackWithThePort(t *testing.T) {
	p := &byRDMA{}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	down := slices.Concat(ofA, ofB)
	down[len(ofA)].Down = true
	if err := p.rdma.Set(down...); err != nil {
		t.Fatal(err)
	}
	l, err := p.b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.a.Connect(within(t), uuid(t, 0), l.Handle())
	demandOf(t, err, wire.StatusUnreachable, "relay.transport")
	demandText(t, err, "no port is active")
	if err := p.rdma.Set(slices.Concat(ofA, ofB)...); err != nil {
		t.Fatal(err)
	}
	// Well below the time after which idle connections are closed.
	for end := testutil.BeginFor(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if p.sending, err = p.a.Connect(within(t), uuid(t, 0), l.Handle()); err == nil {
			break
		}
		if demandOf(t, err, wire.StatusUnreachable, "relay.transport"); end.Over() {
			t.Fatalf("the port is back, and still: %v", err)
		}
	}
	if p.receiving, err = l.Accept(within(t)); err != nil {
		t.Fatal(err)
	}
	p.arrive(t, 1<<20)
	if transport, why := p.data(t); transport != launch.TransportVerbs {
		t.Errorf("data goes over %s: %s", transport, why)
	}
}

// With transport auto a port that was down when two relays connected keeps later connections from RDMA
// only until it is back. A connection that uses TCP meanwhile goes on, and loses nothing. The sending
// relay sees its own port; the other host's it tries after portRetryTime, which is shorter here.
func TestConnectionsReturnToRDMAWithThePort(t *testing.T) {
	for _, c := range []struct {
		name string
		port int // in the list of both hosts' NICs
	}{{"of this host", 0}, {"of the other host", len(ofA)}} {
		t.Run(c.name, func(t *testing.T) { returnsToRDMA(t, c.port) })
	}
}

func returnsToRDMA(t *testing.T, port int) {
	p := &byRDMA{}
	p.begin(t, launch.TransportAuto, launch.TransportAuto, 1, 1)
	down := slices.Concat(ofA, ofB)
	down[port].Down = true
	if err := p.rdma.Set(down...); err != nil {
		t.Fatal(err)
	}
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.arrive(t, 1<<20)
	if c := p.relayA.Report().Connections; len(c) != 1 || c[0].Transport != launch.TransportTCP {
		t.Fatalf("inspect shows %+v, want tcp while the port is down", c)
	}
	if port >= len(ofA) {
		p.relayA.RetryingPorts(time.Second)
	}
	first := pair{a: p.a, b: p.b, sending: p.sending, receiving: p.receiving, source: p.source, target: p.target}
	if err := p.rdma.Set(slices.Concat(ofA, ofB)...); err != nil {
		t.Fatal(err)
	}
	// Well below the time after which idle connections are closed; the first one is open all the time.
	for end := testutil.BeginFor(6 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
		p.arrive(t, 1<<20)
		var by []string
		for _, c := range p.relayA.Report().Connections {
			by = append(by, c.Transport)
		}
		if slices.Contains(by, launch.TransportVerbs) {
			break
		}
		if end.Over() {
			t.Fatalf("the port is back, and the connections use %v", by)
		}
		check(t, p.sending.Close(within(t)))
	}
	first.arrive(t, 1<<20, 5, 3<<20)
}

// Any process dies at any time, under traffic in both directions: operations at the remote host end
// with an error that names the cause, and no resource remains there.
func TestDeathOverRDMAEndsOperations(t *testing.T) {
	halt := func(_ *testing.T, r *relay.Relay, _ *client.Session) { r.Halt() }
	leave := func(t *testing.T, _ *relay.Relay, s *client.Session) {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	hostname, err := os.Hostname()
	check(t, err)
	for name, c := range map[string]struct {
		die      func(*testing.T, *relay.Relay, *client.Session)
		receives bool // who dies
		object   string
	}{
		"the receiver's relay": {halt, true, hostname + ", container b at "},
		"the receiver":         {leave, true, "container b"},
		"the sender's relay":   {halt, false, hostname + ", container a at "},
		"the sender":           {leave, false, "container a"},
	} {
		t.Run(name, func(t *testing.T) {
			const after = 2 // messages that have arrived
			t.Parallel()
			p := hostsByRDMA(t, 2, 2)
			const n = 1<<20 + 5
			var sends, receives []*client.Operation
			for i := range uint64(12) {
				receive, err := p.receiving.Receive(p.target.Memory, 0, n, client.Tag(i))
				if err != nil {
					t.Fatal(err)
				}
				send, err := p.sending.Send(p.source.Memory, 0, n, client.Tag(i))
				if err != nil {
					t.Fatal(err)
				}
				sends, receives = append(sends, send), append(receives, receive)
			}
			for i := range after {
				if _, err := wait(t, receives[i], nil); err != nil {
					t.Fatal(err)
				}
			}
			survivor, memory, ops := p.relayB, p.target.Memory, receives
			if c.receives {
				survivor, memory, ops = p.relayA, p.source.Memory, sends
				c.die(t, p.relayB, p.b)
			} else {
				c.die(t, p.relayA, p.a)
			}
			for _, op := range ops {
				if _, err := op.Wait(within(t)); err != nil && !strings.HasPrefix(wire.ObjectOf(err), c.object) {
					t.Errorf("an operation ended with %v", err)
				}
			}
			if err := memory.Unexport(within(t)); err != nil {
				t.Error(err)
			}
			for end := testutil.Begin(); survivor.Report().Used.Connections > 0; time.Sleep(5 * time.Millisecond) {
				if end.Over() {
					t.Fatalf("left at the other host: %+v", survivor.Report().Used)
				}
			}
		})
	}
}
