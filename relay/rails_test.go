package relay

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

func laneOf(nics ...string) *lane { return &lane{spec: launch.Lane{NICs: nics}} }

// chosen reads "name address rail device", with "-" for no device.
func chosen(t *testing.T, texts ...string) (all []address.Chosen) {
	t.Helper()
	for _, text := range texts {
		var c address.Chosen
		var at string
		if _, err := fmt.Sscan(text, &c.Interface, &at, &c.Rail, &c.Device); err != nil {
			t.Fatal(err)
		}
		c.Address, c.Device = netip.MustParseAddr(at), strings.Trim(c.Device, "-")
		all = append(all, c)
	}
	return all
}

// toldRails reads "rail address", with "lane" after it for one of the listener's lane.
func toldRails(t *testing.T, texts ...string) (all []network.Rail) {
	t.Helper()
	for _, text := range texts {
		var r network.Rail
		var at string
		if n, err := fmt.Sscan(text, &r.Number, &at); n != 2 {
			t.Fatal(err)
		}
		r.Endpoint, r.Lane = address.Endpoint{Address: netip.MustParseAddr(at), Port: 7}, strings.HasSuffix(text, " lane")
		all = append(all, r)
	}
	return all
}

// A message uses the rail of the destination's lane if the sender's lane reaches it, else a further
// rail of the lane, else any rail.
func TestPeerRailsPreferRailOfDestinationLane(t *testing.T) {
	four := []string{"eth0 10.0.0.1 0 nic0", "eth1 10.0.1.1 1 nic1", "eth2 10.0.2.1 2 nic2", "eth3 10.0.3.1 3 nic3"}
	for name, c := range map[string]struct {
		own  []string
		down string
		nics []string
		told []string
		want []string // tiers
	}{
		"the destination's rail": {four, "", []string{"nic1"}, []string{"0 10.0.0.2", "1 10.0.1.2 lane"},
			[]string{"eth1 10.0.1.2:7", "eth0 10.0.0.2:7"}},
		"both of its rails": {four, "", []string{"nic0", "nic1", "nic2"},
			[]string{"0 10.0.0.2", "1 10.0.1.2 lane", "2 10.0.2.2 lane"}, []string{"eth1 10.0.1.2:7, eth2 10.0.2.2:7",
				"eth0 10.0.0.2:7"}},
		"it is not reached": {four, "", []string{"nic0"}, []string{"0 10.0.0.2", "1 10.0.1.2 lane"},
			[]string{"eth0 10.0.0.2:7", "eth1 10.0.1.2:7"}},
		"neither has the other's": {four, "", []string{"nic0"}, []string{"1 10.0.1.2 lane"},
			[]string{"eth1 10.0.1.2:7"}},
		"a lane without NICs here": {four, "", []string{"mlx5_9"}, []string{"2 10.0.2.2 lane", "3 10.0.3.2 lane"},
			[]string{"eth2 10.0.2.2:7, eth3 10.0.3.2:7"}},
		"a lane by interface": {four, "", []string{"eth3"}, []string{"2 10.0.2.2 lane", "3 10.0.3.2 lane"},
			[]string{"eth3 10.0.3.2:7", "eth2 10.0.2.2:7"}},
		"its interface is down": {four, "eth1", []string{"nic1"}, []string{"0 10.0.0.2", "1 10.0.1.2 lane"},
			[]string{"eth0 10.0.0.2:7"}},
		"no rail of both":     {four, "", []string{"nic1"}, []string{"7 10.0.7.2 lane"}, nil},
		"nothing is told":     {four, "", []string{"nic1"}, nil, nil},
		"one interface alone": {four[1:2], "", []string{"nic1"}, []string{"1 10.0.1.2 lane"}, nil},
		"what is on no rail": {[]string{"eth0 10.0.0.1 -1 -", "eth1 10.0.1.1 1 -"}, "", nil,
			[]string{"-1 10.0.0.2 lane"}, nil},
		"the same family": {[]string{"eth0 10.0.0.1 0 -", "eth0 2001:db8::1 0 -", "eth1 10.0.1.1 1 -"}, "",
			nil, []string{"0 2001:db8::2 lane"}, []string{"eth0 [2001:db8::2]:7"}},
		"no address of the family": {[]string{"eth0 10.0.0.1 0 -", "eth1 10.0.1.1 1 -"}, "", nil,
			[]string{"0 2001:db8::2 lane"}, nil},
		"a link-local address": {[]string{"eth0 fe80::1%eth0 0 -", "eth1 10.0.1.1 1 -"}, "", nil,
			[]string{"0 fe80::2 lane"}, []string{"eth0 [fe80::2%eth0]:7"}},
		"two addresses on one rail": {four, "", []string{"nic1"}, []string{"1 10.0.1.2 lane", "1 10.9.1.2 lane"},
			[]string{"eth1 10.0.1.2:7"}},
		"another's numbers, ours only": {four[1:3], "", []string{"nic1"}, []string{"0 10.0.0.2 lane", "1 10.0.1.2"},
			[]string{"eth1 10.0.1.2:7"}},
	} {
		r := newRails(chosen(t, c.own...), wires{})
		r.down[c.down] = true
		var got []string
		for _, tier := range r.ways(laneOf(c.nics...), toldRails(t, c.told...)) {
			var all []string
			for _, w := range tier {
				all = append(all, fmt.Sprintf("%s %v", w.by.Interface, w.to[0]))
			}
			got = append(got, strings.Join(all, ", "))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, not %q", name, got, c.want)
		}
	}
}

// A failed address is not retried at once, so that sets do not wait for it.
func TestFailedAddressIsNotRetriedAtOnce(t *testing.T) {
	r := newRails(chosen(t, "eth0 10.0.0.1 0 -", "eth1 10.0.1.1 1 -"), wires{})
	told := toldRails(t, "0 10.0.0.2 lane", "1 10.0.1.2 lane")
	all := r.ways(nil, told)
	if len(all) != 1 || len(all[0]) != 2 {
		t.Fatalf("the ways are %v", all)
	}
	r.fail(all[0][0], false)
	if left := r.ways(nil, told); len(left) != 1 || len(left[0]) != 1 || left[0][0].by.Rail != 1 {
		t.Errorf("then %v", left)
	}
	for key := range r.failed {
		r.failed[key] = time.Now().Add(-2 * retryInterval)
	}
	if again := r.ways(nil, told); len(again) != 1 || len(again[0]) != 2 {
		t.Errorf("later %v", again)
	}
}

// The first connection uses the handle's address, then further known addresses of the relay, then
// further interfaces.
func TestFirstConnectionTriesHandleAddressFirst(t *testing.T) {
	r := newRails(chosen(t, "eth0 10.0.0.1 0 -", "eth0 fe80::1%eth0 0 -", "eth1 10.0.1.1 1 -", "eth2 10.0.2.1 2 -"),
		wires{})
	at := address.Endpoint{Address: netip.MustParseAddr("10.0.0.2"), Port: 7}
	doors := func(r *rails, relay string) (all []string) {
		for _, d := range r.candidates(relay, at) {
			all = append(all, strings.TrimSpace(fmt.Sprint(d.by.Interface, " ", d.to[0])))
		}
		return all
	}
	if got := doors(r, "it"); !slices.Equal(got, []string{"10.0.0.2:7", "eth0 10.0.0.2:7", "eth1 10.0.0.2:7",
		"eth2 10.0.0.2:7"}) {
		t.Errorf("of a relay that nobody knows: %q", got)
	}
	r.record("it", toldRails(t, "0 10.0.0.2", "1 10.0.1.2", "9 10.0.9.2"))
	r.down["eth2"] = true
	if got := doors(r, "it"); !slices.Equal(got, []string{"10.0.0.2:7", "eth1 10.0.1.2:7", "eth0 10.0.0.2:7",
		"eth1 10.0.0.2:7"}) {
		t.Errorf("of one that has told: %q", got)
	}
	r.record("other", toldRails(t, "1 10.0.1.2", "0 10.0.0.9 lane"))
	if got := doors(r, "other"); !slices.Equal(got, []string{"10.0.0.2:7", "eth0 10.0.0.9:7", "eth1 10.0.1.2:7",
		"eth0 10.0.0.2:7", "eth1 10.0.0.2:7"}) {
		t.Errorf("of one whose lane has another rail: %q", got)
	}
	r.fail(path{to: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:7")}}, false)
	if got := doors(r, "it"); !slices.Equal(got, []string{"eth1 10.0.1.2:7", "eth0 10.0.0.2:7", "eth1 10.0.0.2:7",
		"10.0.0.2:7"}) {
		t.Errorf("after the first has failed it tries %v", got)
	}
	if got := doors(newRails(chosen(t, "eth0 10.0.0.1 0 -"), wires{}), "it"); !slices.Equal(got, []string{"10.0.0.2:7"}) {
		t.Errorf("by one interface: %q", got)
	}
	for i := range 2 * maxKnownRails {
		r.record(fmt.Sprint(i), []network.Rail{{Endpoint: address.Endpoint{Address: netip.AddrFrom4([4]byte{11, 0,
			byte(i >> 8), byte(i)})}}})
	}
	if len(r.known) > maxKnownRails || len(r.places) > maxKnownRails {
		t.Errorf("%d relays and %d addresses are remembered", len(r.known), len(r.places))
	}
}

// listen gives the handle of a listener of a lane.
func (f *fleet) listen(t testing.TB, of int, l *lane) wire.HandleLayout {
	t.Helper()
	r, handle := f.relays[of], f.handles[of]
	if _, err := rand.Read(handle.Token[:]); err != nil {
		t.Fatal(err)
	}
	r.lookAtRails()
	r.loop.Call(func() {
		r.listeners[handle.Token] = &listener{lane: l}
		handle.Contact = r.contact(handle.Token, handle.Generation, l)
	})
	return handle
}

// writes is a channel between two relays of a fleet, with memory at both ends.
type writes struct {
	*fleet
	channel  *tcp.Channel
	link     *tcp.Link
	from, to *device.Memory
	landed   chan struct{}
	ended    chan error // the channel's
	grant    func(n uint64)
	number   uint64
	relay    *Relay
	peer     *tcp.Peer
}

// open makes a channel of a lane of relay 0 to a listener of relay 1. A fleet has a single open
// channel at a time.
func (f *fleet) open(t testing.TB, handle wire.HandleLayout, from *lane, bytes uint64) *writes {
	t.Helper()
	w := &writes{fleet: f, relay: f.relays[0], landed: make(chan struct{}, 1), ended: make(chan error, 1)}
	for _, m := range []**device.Memory{&w.from, &w.to} {
		var err error
		if *m, err = device.CreateHost("test", bytes); err != nil {
			t.Fatal(err)
		}
		f.memory = append(f.memory, *m)
	}
	_, _ = rand.Read(w.from.HostBytes())
	there := f.relays[1]
	accepted := make(chan *tcp.Channel, 1)
	there.loop.Call(func() {
		there.hosts.timing = func(c *tcp.Config) {
			c.Dead = time.Minute
			c.Accept = func(ch *tcp.Channel, _ wire.Message, _ uint32) {
				ch.Handle(func(wire.Message, uint32, []int) {}, func(error) {})
				arrivals := ch.Receive(func(uint64, uint64) { w.landed <- struct{}{} }, func() {})
				if err := arrivals.AddMemory(1, w.to); err != nil {
					t.Error(err)
				}
				w.grant = func(n uint64) {
					if err := arrivals.Grant(n, 1, 0, bytes); err != nil {
						t.Error(err)
					}
				}
				accepted <- ch
			}
		}
	})
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	peer, err := w.relay.hosts.reach(ctx, handle, from)
	if err != nil {
		t.Fatal(err)
	}
	w.peer = peer
	w.relay.loop.Call(func() {
		w.channel, err = peer.Open(&wire.Done{}, 0, func(wire.Message, uint32, []int) {}, func(err error) { w.ended <- err })
	})
	if err != nil {
		t.Fatal(err)
	}
	w.link = w.channel.Link()
	select {
	case <-accepted:
	case <-testutil.After(time.Minute):
		t.Fatal("the channel does not arrive")
	}
	return w
}

// write moves the whole memory, and returns the error of the write.
func (w *writes) write(t testing.TB) error {
	t.Helper()
	w.number++
	n, done := w.number, make(chan error, 1)
	w.relays[1].loop.Call(func() { w.grant(n) })
	w.relay.loop.Call(func() {
		w.link.Write(transport.Target{Region: 1}, transport.Source{Place: w.from.At(0)}, w.from.Bytes, n,
			func(err error) { done <- err })
	})
	select {
	case err := <-done:
		if err == nil {
			<-w.landed
		}
		return err
	case <-testutil.After(2 * time.Minute):
		t.Fatal("the write hangs")
		return nil
	}
}

// carriedBy returns a relay's sent bytes per rail.
func carriedBy(r *Relay) map[string]uint64 {
	sent := map[string]uint64{}
	for _, n := range r.hosts.rails.report() {
		sent[n.Interface] = n.Sent
	}
	return sent
}

const railBytesMoved = 2 << 20

// together holds the data senders of a rail until every rail has a sender.
type together struct {
	mu   sync.Mutex
	want int
	came map[netip.Addr]bool
	all  chan struct{}
}

func (m *together) of(rails int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.want, m.came, m.all = rails, map[netip.Addr]bool{}, make(chan struct{})
}

func (m *together) sending(local netip.Addr, bytes int) {
	m.mu.Lock()
	all := m.all
	if bytes >= 64<<10 && all != nil && !m.came[local] {
		m.came[local] = true
		if len(m.came) == m.want {
			close(all)
		}
	}
	m.mu.Unlock()
	if bytes >= 64<<10 && all != nil {
		select {
		case <-all:
		case <-testutil.After(time.Minute):
		}
	}
}

// Bytes use only the interfaces of the lanes; every one of several carries some.
func TestBytesUseTheRailsOfTheLanes(t *testing.T) {
	var all together
	n := &cables{sending: all.sending}
	f := newFleetOn(t, n, 2, 4, 3)
	for _, c := range []struct {
		from, to []string
		want     []string // interfaces
	}{
		{[]string{"nic1"}, []string{"nic1"}, []string{"rail1"}},
		{[]string{"nic0", "nic1", "nic2"}, []string{"nic2"}, []string{"rail2"}},
		{[]string{"nic0", "nic2"}, []string{"nic2", "nic0"}, []string{"rail0", "rail2"}},
		{[]string{"nic0"}, []string{"nic1"}, []string{"rail0"}},
		{nil, nil, []string{"rail0", "rail1", "rail2"}},
	} {
		before := carriedBy(f.relays[0])
		w := f.open(t, f.listen(t, 1, laneOf(c.to...)), laneOf(c.from...), railBytesMoved)
		all.of(len(c.want))
		if err := w.write(t); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(w.from.HostBytes(), w.to.HostBytes()) {
			t.Error("wrong bytes")
		}
		after := carriedBy(f.relays[0])
		var used []string
		var sum uint64
		for _, name := range []string{"rail0", "rail1", "rail2"} {
			n := after[name] - before[name]
			if sum += n; n > 64<<10 { // more than what control says
				used = append(used, name)
			}
		}
		if !slices.Equal(used, c.want) || sum < railBytesMoved || sum > railBytesMoved+256<<10 {
			t.Errorf("lane %v to lane %v: %v were used, %d bytes", c.from, c.to, used, sum)
		}
		var shown []string
		for _, p := range f.relays[0].hosts.rails.pairs(w.peer) {
			if !strings.HasPrefix(p.PeerPlace, p.Interface+" (") || p.Rail != p.PeerRail || p.Streams < 1 {
				t.Errorf("inspect shows %+v", p)
			}
			if all := 4; p.Streams < all/len(c.want) || p.Streams > all/len(c.want)+1 {
				t.Errorf("of %d streams %s has %d", all, p.Interface, p.Streams)
			}
			shown = append(shown, p.Interface)
		}
		if slices.Sort(shown); !slices.Equal(shown, c.want) {
			t.Errorf("lane %v to lane %v: inspect shows %v", c.from, c.to, shown)
		}
		w.relay.loop.Call(w.channel.Leave)
	}
	// The remote side has received the sent bytes, and knows the interfaces.
	there := f.relays[1].hosts.rails
	received := uint64(0)
	for _, n := range there.report() {
		received += n.Received
		if n.Listening == "" || n.Rail < 0 || n.Device == "" {
			t.Errorf("inspect shows %+v", n)
		}
	}
	if received < 5*railBytesMoved {
		t.Errorf("%d bytes were received", received)
	}
	f.relays[1].hosts.peers.Each(func(p *tcp.Peer) {
		for _, pair := range there.pairs(p) {
			if !strings.HasPrefix(pair.PeerPlace, pair.Interface+" (") {
				t.Errorf("the other side shows %+v", pair)
			}
		}
	})
}

func (n *cables) pull(out bool, texts ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, text := range texts {
		n.pulled[netip.MustParseAddr(text)] = out
	}
}

// A set made during a rail's failure uses the remaining rails: whether this host detects the fault,
// or the remote host, or only the try.
func TestPeerWithBrokenRailUsesOtherRails(t *testing.T) {
	for name, c := range map[string]struct {
		pulled []string
		links  bool // the host with the pulled cable detects it
		nics   []string
		want   []string
		known  bool // the relays have met before
	}{
		"a cable here":     {[]string{"11.0.0.0"}, true, nil, []string{"rail0"}, false},
		"a cable there":    {[]string{"11.0.0.1"}, true, nil, []string{"rail0"}, false},
		"a switch between": {[]string{"11.0.0.0"}, false, nil, []string{"rail0"}, false},
		"a lane's only one": {[]string{"11.0.0.0", "11.0.0.1"}, true, []string{"nic1"}, []string{"rail0"},
			false},
		"that of the handle":                  {[]string{"10.0.0.0", "10.0.0.1"}, true, nil, []string{"rail1"}, false},
		"that of a handle, with nobody's eye": {[]string{"10.0.0.0", "10.0.0.1"}, false, nil, []string{"rail1"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			n := &cables{}
			f := newFleetOn(t, n, 2, 2, 2)
			if !c.links {
				for _, r := range f.relays {
					r.hosts.rails.links = func() func(address.Chosen) bool { return func(address.Chosen) bool { return true } }
				}
			}
			if c.known {
				w := f.open(t, f.listen(t, 1, laneOf(c.nics...)), laneOf(c.nics...), 1<<20)
				w.relay.loop.Call(w.peer.Close)
				if err := <-w.ended; err == nil {
					t.Fatal("the channel has no end")
				}
			}
			n.pull(true, c.pulled...)
			before := carriedBy(f.relays[0])
			w := f.open(t, f.listen(t, 1, laneOf(c.nics...)), laneOf(c.nics...), railBytesMoved)
			if err := w.write(t); err != nil || !bytes.Equal(w.from.HostBytes(), w.to.HostBytes()) {
				t.Fatal(err)
			}
			var used []string
			for _, p := range f.relays[0].hosts.rails.pairs(w.peer) {
				used = append(used, p.Interface)
			}
			after := carriedBy(f.relays[0])
			if !slices.Equal(used, c.want) || after[c.want[0]]-before[c.want[0]] < railBytesMoved {
				t.Errorf("%v are used: %v, then %v", used, before, after)
			}
			// After the cable is back the next set uses the interface, too.
			n.pull(false, c.pulled...)
			f.relays[0].hosts.rails.mu.Lock()
			clear(f.relays[0].hosts.rails.failed) // as a minute would
			f.relays[0].hosts.rails.mu.Unlock()
			w.relay.loop.Call(w.peer.Close)
			w = f.open(t, f.listen(t, 1, laneOf(c.nics...)), laneOf(c.nics...), 1<<20)
			used = nil
			for _, p := range f.relays[0].hosts.rails.pairs(w.peer) {
				used = append(used, p.Interface)
			}
			want := []string{"rail0", "rail1"}
			if c.nics != nil {
				want = []string{"rail1"}
			}
			if slices.Sort(used); !slices.Equal(used, want) {
				t.Errorf("with all cables %v are used", used)
			}
		})
	}

	n := &cables{}
	f := newFleetOn(t, n, 2, 1, 2)
	n.pull(true, "10.0.0.0", "11.0.0.0")
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	if _, err := f.relays[0].hosts.reach(ctx, f.listen(t, 1, nil), nil); wire.StatusOf(err) != wire.StatusUnreachable ||
		!errors.Is(err, syscall.EHOSTUNREACH) {
		t.Errorf("without any cable: %v", err)
	}
}

// A stream that fails ends the set with an error that names the interface, and no write
// hangs.
func TestRailFailureNamesItsInterface(t *testing.T) {
	f := newFleetOn(t, &cables{}, 2, 2, 2)
	w := f.open(t, f.listen(t, 1, nil), nil, railBytesMoved)
	if err := w.write(t); err != nil {
		t.Fatal(err)
	}
	_, data := w.peer.Connections()
	i := slices.IndexFunc(data, func(c net.Conn) bool { return strings.Contains(c.LocalAddr().String(), "11.0.0.0") })
	data[i].(cable).Conn.Close()
	var err error
	for err == nil { // until the detection the second rail carries the bytes
		err = w.write(t)
	}
	if wire.StatusOf(err) != wire.StatusPeerRelayDied && wire.StatusOf(err) != wire.StatusPeerClosed {
		t.Errorf("the write: %v", err)
	}
	var of *tcp.PeerError
	if err := <-w.ended; !errors.As(err, &of) || !strings.Contains(of.Route, "by rail1, rail 1") ||
		!strings.Contains(of.Route, "11.0.0.1") {
		t.Errorf("it ends with %v", err)
	}
}

// A connection during the loss of a set's link gets a new set over the remaining rails; the old set
// ends with that reason.
func TestPulledCableReplacesPeer(t *testing.T) {
	n := &cables{}
	f := newFleetOn(t, n, 2, 2, 2)
	handle := f.listen(t, 1, nil)
	old := f.open(t, handle, nil, 1<<20)
	n.pull(true, "11.0.0.0")
	f.relays[0].lookAtRails()
	w := f.open(t, handle, nil, 1<<20)
	if err := w.write(t); err != nil || !bytes.Equal(w.from.HostBytes(), w.to.HostBytes()) {
		t.Fatal(err)
	}
	if pairs := f.relays[0].hosts.rails.pairs(w.peer); len(pairs) != 1 || pairs[0].Interface != "rail0" ||
		w.peer == old.peer {
		t.Errorf("it goes by %+v", pairs)
	}
	var of *tcp.PeerError
	if err := <-old.ended; wire.StatusOf(err) != wire.StatusPeerRelayDied || !errors.As(err, &of) ||
		!strings.Contains(of.Route, "by rail1, rail 1") {
		t.Errorf("the old set ends with %v", err)
	}
	// One that is well is shared.
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	if again, err := f.relays[0].hosts.reach(ctx, handle, nil); err != nil || again != w.peer {
		t.Errorf("another set is made: %v", err)
	}
}

// Any number of silent addresses delays no working address, and the next set does not try them
// first; a slow address stays usable for data.
func TestSilentAddressesDelayNoOtherAddress(t *testing.T) {
	const rails = 8
	f := newFleetOn(t, &cables{}, 2, rails, rails)
	handle := f.listen(t, 1, nil)
	h := f.relays[0].hosts
	h.local.Delay = 10 * time.Millisecond
	connect := h.local.Connect
	var mu sync.Mutex
	tried, first := map[string]int{}, true
	h.local.Connect = func(ctx context.Context, to netip.AddrPort, by string) (net.Conn, error) {
		mu.Lock()
		silent := first && by != fmt.Sprint("rail", rails-1)
		if tried[by]++; by == fmt.Sprint("rail", rails-1) {
			first = false
		}
		mu.Unlock()
		if silent {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return connect(ctx, to, by)
	}
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	one, err := h.reach(ctx, handle, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(h.rails.pairs(one)); n != rails {
		t.Errorf("data goes by %d rails", n)
	}
	before := tried[""]
	h.local.Delay = time.Hour // from now on the first one is waited for
	one.End(errors.New("the test goes on"))
	for again := one; again == one; {
		if again, err = h.reach(ctx, handle, nil); err != nil && ctx.Err() != nil {
			t.Fatal(err)
		}
		if err != nil {
			again = one
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if before != 1 || tried[""] != before {
		t.Errorf("the first way is tried %d times, and then %d times", before, tried[""]-before)
	}
}

// A connection that closes after the proof, as the loser of a race does, frees its place for new
// connections: it is let go at once.
func TestClosedHandshakeFreesItsPlace(t *testing.T) {
	f := newFleetOn(t, &cables{}, 2, 2, 2)
	handle := f.listen(t, 1, nil)
	from, there := f.relays[0].hosts, f.relays[1].hosts
	at, err := from.local.Keys().OpenContact(network.Target{Host: handle.Host, Token: handle.Token}, handle.Generation,
		handle.Contact)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	s, err := from.local.Dial(ctx, network.Target{Host: handle.Host, Token: handle.Token}, at.Dials(from.rails.addresses))
	if err != nil {
		t.Fatal(err)
	}
	if err := expected(s.Conn, time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	meetings := func() int {
		there.mu.Lock()
		defer there.mu.Unlock()
		for _, m := range there.pending {
			m.timer.Stop() // in the end that lets it go, too
		}
		return len(there.pending)
	}
	if n := meetings(); n != 1 {
		t.Fatalf("%d sets are on their way", n)
	}
	s.Conn.Close()
	testutil.Until(t, "the set is still expected", func() bool { return meetings() <= 0 })
}

// A relay listens on the rails of its lanes, on more rails after more lanes, and on any rail if
// these are unavailable.
func TestRelayListensOnRailsOfItsLanes(t *testing.T) {
	f := newFleetOn(t, &cables{}, 1, 1, 3)
	r := f.relays[0]
	at := func(h *rails) (rails []int) {
		for _, l := range h.listening {
			rails = append(rails, l.Rail)
		}
		return rails
	}
	n := &cables{}
	for name, c := range map[string]struct {
		lanes   []*lane
		refused []string
		want    []int
		says    int
		down    string
	}{
		"of a lane":                  {[]*lane{laneOf("nic1")}, nil, []int{1}, 0, ""},
		"of one that is down":        {[]*lane{laneOf("nic1")}, nil, []int{0, 1, 2}, 0, "rail1"},
		"of one of two that is down": {[]*lane{laneOf("nic1", "nic2")}, nil, []int{1, 2}, 0, "rail1"},
		"of two":                     {[]*lane{laneOf("nic2"), laneOf("nic0", "nic2")}, nil, []int{0, 2}, 0, ""},
		"of one that has no NIC":     {[]*lane{laneOf("nic1"), laneOf()}, nil, []int{0, 1, 2}, 0, ""},
		"one that cannot be had":     {[]*lane{laneOf("nic1", "nic2")}, []string{"11.0.0.0"}, []int{2}, 1, ""},
		"the only one, which cannot": {[]*lane{laneOf("nic1")}, []string{"11.0.0.0"}, []int{0}, 1, ""},
		"none":                       {[]*lane{laneOf("nic1")}, []string{"10.0.0.0", "11.0.0.0", "12.0.0.0"}, nil, 3, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n.listening = map[netip.AddrPort]*cableListener{}
			accept := n.of(r.hosts.where.Addresses).accept
			h, g := newRails(r.hosts.where.Addresses, r.wires), newMultiListener()
			defer g.Close()
			h.down[c.down] = true
			said := h.listen(c.lanes, g, func(a netip.Addr) (l net.Listener, err error) {
				if slices.Contains(c.refused, a.String()) {
					return nil, fmt.Errorf("%v is taken", a)
				}
				return accept(a, address.Ports{})
			})
			if !reflect.DeepEqual(at(h), c.want) || len(said) != c.says {
				t.Errorf("it listens on %v, and says %q", at(h), said)
			}
			again := h.listen(c.lanes, g, func(a netip.Addr) (net.Listener, error) {
				return nil, fmt.Errorf("%v is tried again", a)
			})
			if !slices.Equal(again, said) {
				t.Errorf("at once again it says %q, after %q", again, said)
			}
			if len(c.refused) == 0 {
				h.listen([]*lane{laneOf("nic0")}, g, func(a netip.Addr) (net.Listener, error) { return accept(a, address.Ports{}) })
				if got := at(h); !slices.Contains(got, 0) || !slices.IsSorted(got) || len(got) > 3 {
					t.Errorf("then on %v", got)
				}
			}
		})
	}
}

// queued is the permitted delay of a sender without an idle cable: a socket and a NIC have queues,
// and a sleep on a busy machine ends that late.
const queued = 20 * time.Millisecond

// paced limits the rate of sent bytes over every sender.
type paced struct {
	rate float64 // bytes/s
	mu   sync.Mutex
	free time.Time
}

func (p *paced) wait(bytes int) {
	p.mu.Lock()
	if earliest := time.Now().Add(-queued); p.free.Before(earliest) {
		p.free = earliest
	}
	p.free = p.free.Add(time.Duration(float64(bytes) / p.rate * 1e9))
	until := p.free
	p.mu.Unlock()
	time.Sleep(time.Until(until))
}

// BenchmarkRails moves slots between relays of two hosts over cables in memory, each of
// 50 MB/s: with two rails twice as much goes over as with one.
func BenchmarkRails(b *testing.B) {
	const rate = 50e6
	one := 0.0
	for rails := 1; rails <= 4; rails *= 2 {
		b.Run(fmt.Sprintf("%d rails", rails), func(b *testing.B) {
			var of sync.Map // paced, by address
			n := &cables{sending: func(local netip.Addr, bytes int) {
				p, _ := of.LoadOrStore(local, &paced{rate: rate})
				p.(*paced).wait(bytes)
			}}
			f := newFleetOn(b, n, 2, 4, rails)
			w := f.open(b, f.listen(b, 1, nil), nil, 32<<20)
			b.SetBytes(32 << 20)
			began, rounds := time.Now(), 0
			for b.Loop() {
				if err := w.write(b); err != nil {
					b.Fatal(err)
				}
				rounds++
			}
			got := float64(rounds) * (32 << 20) / time.Since(began).Seconds()
			if rails == 1 {
				one = got
			}
			b.ReportMetric(got/rate, "of-one-cable")
			if one > 0 {
				b.ReportMetric(got/one, "of-one-rail")
			}
		})
	}
}
