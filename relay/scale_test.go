package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

// cables connect the relays of a process, by addresses as TCP would, through pipes in memory.
type cables struct {
	mu        sync.Mutex
	last      uint16
	listening map[netip.AddrPort]*cableListener
	pulled    map[netip.Addr]bool
	sending   func(local netip.Addr, bytes int) // called before a write; nil for no call
}

type cableListener struct {
	cables *cables
	at     netip.AddrPort
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *cableListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *cableListener) Close() error {
	l.once.Do(func() {
		l.cables.mu.Lock()
		delete(l.cables.listening, l.at)
		l.cables.mu.Unlock()
		close(l.closed)
	})
	return nil
}

func (l *cableListener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.at) }

// cable is one end of a pipe.
type cable struct {
	net.Conn
	local, remote netip.AddrPort
	sending       *func(netip.Addr, int)
}

// A pipe with a closed remote end accepts no deadline, unlike a TCP connection: there the next call
// returns the error.
func (c cable) SetDeadline(t time.Time) error      { return taken(c.Conn.SetDeadline(t)) }
func (c cable) SetReadDeadline(t time.Time) error  { return taken(c.Conn.SetReadDeadline(t)) }
func (c cable) SetWriteDeadline(t time.Time) error { return taken(c.Conn.SetWriteDeadline(t)) }

func taken(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return nil
	}
	return err
}

func (c cable) Write(b []byte) (int, error) {
	if *c.sending != nil {
		(*c.sending)(c.local.Addr(), len(b))
	}
	return c.Conn.Write(b)
}

func (c cable) LocalAddr() net.Addr  { return net.TCPAddrFromAddrPort(c.local) }
func (c cable) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.remote) }

// of returns the cables of a host, one per interface.
func (n *cables) of(host []address.Chosen) wires {
	return wires{
		links: func() func(address.Chosen) bool {
			return func(a address.Chosen) bool { n.mu.Lock(); defer n.mu.Unlock(); return !n.pulled[a.Address] }
		},
		accept: func(at netip.Addr, _ address.Ports) (net.Listener, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			l := &cableListener{cables: n, at: netip.AddrPortFrom(at, 20000), conns: make(chan net.Conn),
				closed: make(chan struct{})}
			n.listening[l.at] = l
			return l, nil
		},
		connect: func(ctx context.Context, to netip.AddrPort, by string) (net.Conn, error) {
			own := host[0]
			for _, a := range host {
				if a.Interface == by || by == "" && a.Address.As4()[0] == to.Addr().As4()[0] { // on one network
					own = a
				}
			}
			refused := func(why error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: why} }
			n.mu.Lock()
			l, cut := n.listening[to], n.pulled[own.Address] || n.pulled[to.Addr()]
			n.last++
			from := netip.AddrPortFrom(own.Address, n.last)
			n.mu.Unlock()
			switch {
			case cut:
				return nil, refused(syscall.EHOSTUNREACH)
			case l == nil:
				return nil, refused(errors.New("connection refused"))
			}
			ours, theirs := net.Pipe()
			select {
			case l.conns <- n.cable(theirs, to, from):
				return n.cable(ours, from, to), nil
			case <-l.closed:
				return nil, refused(errors.New("connection refused"))
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
	}
}

func (n *cables) cable(end net.Conn, local, remote netip.AddrPort) net.Conn {
	return cable{end, local, remote, &n.sending}
}

// fleet has the relays of several hosts, without clients: the relays accept messages on channels.
type fleet struct {
	relays  []*Relay
	handles []wire.HandleLayout
	ran     sync.WaitGroup
	heard   chan struct{} // a value for each received message
	memory  []*device.Memory
}

func newFleet(tb testing.TB, hosts, streams int) *fleet {
	tb.Helper()
	return newFleetOn(tb, &cables{}, hosts, streams, 1)
}

// newFleetOn is newFleet with a number of rails: interface "railN" of host I has the address
// 1N.x.x.I, and belongs to the RDMA device "nicN".
func newFleetOn(tb testing.TB, n *cables, hosts, streams, rails int) *fleet {
	tb.Helper()
	logrus.SetLevel(logrus.ErrorLevel)
	dir, err := os.MkdirTemp("", "pl")
	if err != nil {
		tb.Fatal(err)
	}
	f := &fleet{heard: make(chan struct{}, 1<<16)}
	n.listening, n.pulled = map[netip.AddrPort]*cableListener{}, map[netip.Addr]bool{}
	key := launch.Secrets{ClusterKey: launch.NewSecret(network.Keys{Current: network.NewKey(time.Now())}.Text())}
	tb.Cleanup(func() {
		for _, r := range f.relays {
			r.Stop("the test is over")
		}
		f.ran.Wait()
		for _, m := range f.memory { // no relay reads or writes the memory any more
			if err := m.Close(); err != nil {
				tb.Error(err)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	for i := range hosts {
		var addresses []address.Chosen
		for rail := range rails {
			addresses = append(addresses, address.Chosen{
				Interface: fmt.Sprint("rail", rail), Device: fmt.Sprint("nic", rail), Rail: rail,
				Address: netip.AddrFrom4([4]byte{byte(10 + rail), byte(i >> 16), byte(i >> 8), byte(i)}),
			})
		}
		sockets := make([]*net.UnixListener, 2)
		for j := range sockets {
			if sockets[j], err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, fmt.Sprint(i, "-", j)),
				Net: "unixpacket"}); err != nil {
				tb.Fatal(err)
			}
		}
		r, err := New(sockets[0], sockets[1], -1)
		if err != nil {
			tb.Fatal(err)
		}
		copy(r.host[:], fmt.Sprintf("host%012d", i))
		r.wires = n.of(addresses)
		r.timing = func(c *tcp.Config) {
			c.Dead = time.Minute // two processors run every host
			c.Accept = func(ch *tcp.Channel, _ wire.Message, _ uint32) {
				ch.Handle(func(wire.Message, uint32, []int) { f.heard <- struct{}{} }, func(error) {})
			}
		}
		if err := r.Secrets(key); err != nil {
			tb.Fatal(err)
		}
		generation := wire.UUID{byte(i), byte(i >> 8), byte(i >> 16), 1}
		if err := r.Configure(launch.Config{
			Generation: generation.String(), Container: fmt.Sprint(i), Route: launch.RouteAuto, Transport: launch.TransportTCP,
			Slots: 2, SlotBytes: 64 << 10,
			Lanes: []launch.Lane{{GPU: launch.GPU{BusID: "0000:17:00.0"}}},
			Network: &launch.Network{
				Addresses: addresses, Ports: address.Ports{First: 20000, Last: 20999},
				Streams: streams, Slots: 2, SlotBytes: 64 << 10,
			},
		}); err != nil {
			tb.Fatal(err)
		}
		f.ran.Go(func() {
			if err := r.Run(); err != nil {
				tb.Error(err)
			}
		})
		token := wire.UUID{byte(i), byte(i >> 8), byte(i >> 16), 2}
		handle := wire.HandleLayout{Magic: handleMagic, Token: token, Generation: generation, Host: r.host}
		if !r.loop.Call(func() {
			r.listeners[token] = &listener{}
			handle.Contact = r.contact(token, generation, nil)
		}) || r.hosts == nil {
			tb.Fatal("a relay is not on the network")
		}
		f.relays, f.handles = append(f.relays, r), append(f.handles, handle)
	}
	return f
}

// connect opens a number of channels from every relay to the following relays.
func (f *fleet) connect(tb testing.TB, each, atOnce int) [][]*tcp.Channel {
	tb.Helper()
	channels := make([][]*tcp.Channel, len(f.relays))
	var wait sync.WaitGroup
	turns := make(chan struct{}, atOnce)
	for i, r := range f.relays {
		channels[i] = make([]*tcp.Channel, each)
		for j := range each {
			turns <- struct{}{}
			wait.Go(func() {
				defer func() { <-turns }()
				ctx, cancel := testutil.WithLimit(context.Background(), 2*time.Minute)
				defer cancel()
				peer, err := r.hosts.reach(ctx, f.handles[(i+j+1)%len(f.relays)], nil)
				if err == nil {
					r.loop.Call(func() {
						channels[i][j], err = peer.Open(&wire.Done{}, 0, func(wire.Message, uint32, []int) {}, func(error) {})
					})
				}
				if err != nil {
					tb.Errorf("relay %d: %v", i, err)
				}
			})
		}
	}
	wait.Wait()
	if tb.Failed() {
		tb.FailNow()
	}
	return channels
}

// round sends a number of messages per channel and waits for their arrival.
func (f *fleet) round(channels [][]*tcp.Channel, messages int) {
	all := 0
	for i, r := range f.relays {
		all += len(channels[i]) * messages
		r.loop.Do(func() {
			for _, ch := range channels[i] {
				for range messages {
					ch.Send(&wire.PeerDelivered{Send: 1}, 0)
				}
			}
		})
	}
	for range all {
		<-f.heard
	}
}

// Relays of several hosts in a single process connect and exchange messages with adjacent relays.
func TestRelaysOfManyHostsConnect(t *testing.T) {
	f := newFleet(t, 5, 1)
	f.round(f.connect(t, 3, 8), 10)
	for i, r := range f.relays {
		peers := 0
		r.hosts.peers.Each(func(*tcp.Peer) { peers++ })
		if peers != 6 { // 3 to others, and 3 from others
			t.Errorf("relay %d has %d sets of connections", i, peers)
		}
	}
}

// Sets that find no room come when there is some: here relays of a remote host use the whole room
// until two relays were refused.
func TestRelaysWithoutRoomRetryPeers(t *testing.T) {
	f := newFleet(t, 3, 1)
	h := f.relays[0].hosts
	dialed := make(chan struct{}, 1000)
	for _, r := range f.relays[1:] {
		connect := r.hosts.local.Connect
		r.hosts.local.Connect = func(ctx context.Context, to netip.AddrPort, by string) (net.Conn, error) {
			dialed <- struct{}{}
			return connect(ctx, to, by)
		}
	}
	h.mu.Lock()
	for range maxPendingSessions {
		h.pending[&network.Session{}] = &pendingSession{timer: time.NewTimer(time.Hour), forget: func() {}}
	}
	h.mu.Unlock()
	ended := make(chan error, 2)
	for _, r := range f.relays[1:] {
		go func() {
			_, err := r.hosts.reach(context.Background(), f.handles[0], nil)
			ended <- err
		}()
	}
	for range 4 { // two of each, or three of one
		select {
		case <-dialed:
		case err := <-ended:
			t.Fatalf("it was given up: %v", err)
		case <-testutil.After(time.Minute):
			t.Fatal("it is not tried again")
		}
	}
	h.mu.Lock()
	for s, m := range h.pending {
		m.end()
		delete(h.pending, s)
	}
	h.mu.Unlock()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// Accepted sets use no more descriptors than the limits, regardless of the claimed host, and ended
// sets do not count.
func TestPeersOfOtherRelaysAreBounded(t *testing.T) {
	f := newFleet(t, 2, 2)
	h, from := f.relays[0].hosts, f.relays[1].hosts.rails.endpoint(nil).Address
	session := func(at netip.Addr, host byte) *network.Session {
		ours, theirs := net.Pipe()
		t.Cleanup(func() { ours.Close(); theirs.Close() })
		who := &network.Local{Host: wire.UUID{host}, Name: "test", Oldest: wire.OldestVersion, Newest: wire.NewestVersion,
			Keys: h.local.Keys}
		go func() { _, _ = who.Initiate(theirs, network.Target{Host: f.relays[0].host, Token: f.handles[0].Token}) }()
		s, err := h.local.Respond(cable{ours, netip.AddrPortFrom(from, 2), netip.AddrPortFrom(at, 1),
			new(func(netip.Addr, int))}, func(network.Greeting) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	accepted := func() int { h.mu.Lock(); defer h.mu.Unlock(); return len(h.accepted) }

	f.connect(t, 1, 1)
	if n := accepted(); n != 1 {
		t.Fatalf("%d sets are counted of 1", n)
	}
	h.mu.Lock()
	for i := range maxAcceptedOf - 1 {
		h.accepted[tcp.Key{Relay: fmt.Sprint("test ", i)}] = from
	}
	h.mu.Unlock()
	if _, err := h.meet(session(from, 9)); wire.StatusOf(err) != wire.StatusLimit {
		t.Errorf("one more of an address: %v", err)
	}
	other := netip.MustParseAddr("10.200.0.1")
	if _, err := h.meet(session(other, 9)); err != nil {
		t.Errorf("one of another address: %v", err)
	}
	h.mu.Lock()
	for i := range maxAccepted {
		h.accepted[tcp.Key{Relay: fmt.Sprint("test ", i)}] = netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)})
	}
	h.mu.Unlock()
	if _, err := h.meet(session(other, 9)); wire.StatusOf(err) != wire.StatusLimit {
		t.Errorf("one more in all: %v", err)
	}
	for i := range maxAccepted {
		h.forget(tcp.Key{Relay: fmt.Sprint("test ", i)})
	}
	f.relays[1].hosts.peers.Close()
	for end := testutil.Begin(); accepted() > 0; time.Sleep(time.Millisecond) {
		if end.Over() {
			t.Fatalf("%d sets are counted of none", accepted())
		}
	}

	// Sets that are incomplete: an address counts as a single host, regardless of its claims.
	h.mu.Lock()
	for range maxPendingSessionsOf {
		h.pending[&network.Session{}] = &pendingSession{from: from, timer: time.NewTimer(time.Hour), forget: func() {}}
	}
	h.mu.Unlock()
	if _, err := h.meet(session(from, 255)); wire.StatusOf(err) != wire.StatusLimit {
		t.Errorf("one more incomplete set: %v", err)
	}
	// A stream comes once.
	first := session(other, 10)
	if _, err := h.meet(first); err != nil {
		t.Fatal(err)
	}
	for i, stream := range []uint32{1, 64, 1, 64} {
		s := session(other, 10)
		s.Joined, s.Stream = first, stream
		if _, err := h.meet(s); (wire.StatusOf(err) == wire.StatusMalformed) != (i >= 2) {
			t.Errorf("stream %d: %v", stream, err)
		}
	}
}

// Senders above the number of concurrent answers wait, up to a limit.
func TestSendersOfOtherHostsQueueForAccept(t *testing.T) {
	f := newFleet(t, 2, 1)
	r := f.relays[1]
	l := f.relays[0]
	l.loop.Call(func() {
		l.hosts.timing = func(c *tcp.Config) { c.Dead = time.Minute }
		l.welcoming = maxWelcoming
	})
	peer, err := r.hosts.reach(context.Background(), f.handles[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	answers := make(chan error, 10)
	say := func() {
		r.loop.Call(func() {
			_, err = peer.Open(&wire.PeerHello{Magic: wire.Magic, Oldest: wire.OldestVersion, Newest: wire.NewestVersion,
				Token: wire.UUID{1}}, 0, func(m wire.Message, _ uint32, _ []int) {
				if failure, ok := m.(*wire.Failure); ok {
					answers <- failure.Err()
				} else {
					answers <- fmt.Errorf("it answers with a %T", m)
				}
			}, func(error) {})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	answer := func(want wire.Status) {
		t.Helper()
		select {
		case err := <-answers:
			if wire.StatusOf(err) != want {
				t.Fatalf("%v, not %v", err, want)
			}
		case <-testutil.After(time.Minute):
			t.Fatal("no answer comes")
		}
	}
	const senders = 3
	for range senders {
		say()
	}
	waiting := func() (n int) { l.loop.Call(func() { n = len(l.unanswered) }); return n }
	for end := testutil.Begin(); waiting() < senders; time.Sleep(time.Millisecond) {
		if end.Over() {
			t.Fatalf("%d wait of %d", waiting(), senders)
		}
	}
	l.loop.Call(func() { l.welcoming -= maxWelcoming - 1; l.welcomeNext() })
	for range senders {
		answer(wire.StatusBadHandle) // each sender gets an answer: the listener does not exist
	}
	l.loop.Call(func() {
		l.welcoming += maxWelcoming
		for range maxUnanswered {
			l.unanswered = append(l.unanswered, &arriving{left: true})
		}
	})
	say()
	answer(wire.StatusLimit)
	l.loop.Call(func() { l.welcoming -= maxWelcoming + 1; l.welcomeNext() })
	if n := waiting(); n > 0 {
		t.Errorf("%d that have left wait still", n)
	}
}

// BenchmarkHosts starts relays of many hosts in a process, connected as rings, trees or all-to-all
// need, and measures concurrent messages. docs/benchmarks/scale.md has its figures.
func BenchmarkHosts(b *testing.B) {
	for _, size := range []struct{ hosts, each int }{{8, 7}, {100, 8}, {1000, 2}, {1000, 8}} {
		for _, streams := range []int{1, 4} {
			b.Run(fmt.Sprintf("%d hosts/%d each/%d streams", size.hosts, size.each, streams), func(b *testing.B) {
				if size.hosts*size.each*streams > 20000 && os.Getenv("PEERLANE_SCALE") == "" {
					b.Skip("takes gigabytes; PEERLANE_SCALE=1 runs it")
				}
				f := newFleet(b, size.hosts, streams)
				before := used()
				began := time.Now()
				channels := f.connect(b, size.each, 64)
				took := time.Since(began)
				after := used()
				sets := float64(size.hosts * size.each)
				const messages = 100
				rounds := 0
				began = time.Now()
				for b.Loop() {
					f.round(channels, messages)
					rounds++
				}
				spent := time.Since(began).Seconds()
				b.ReportMetric(took.Seconds(), "s-bootstrap")
				b.ReportMetric(float64(took.Microseconds())/sets, "us/set")
				// Both ends of every set are in this process.
				b.ReportMetric((after.memory-before.memory)/sets/2, "B/end")
				b.ReportMetric(float64(after.goroutines-before.goroutines)/sets/2, "goroutines/end")
				b.ReportMetric(float64(rounds*messages)*sets/spent, "messages/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

type usage struct {
	memory     float64 // of the heap and of stacks, bytes
	goroutines int
}

func used() usage {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return usage{float64(m.HeapInuse + m.StackInuse), runtime.NumGoroutine()}
}
