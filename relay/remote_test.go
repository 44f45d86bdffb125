package relay_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/softhost"
	"github.com/peerlane/peerlane/relay/wire"
)

// cluster is the key that hosts of a test share.
func cluster() *launch.Secrets {
	return &launch.Secrets{ClusterKey: launch.NewSecret(network.Keys{Current: network.NewKey(time.Now())}.Text())}
}

// online connects the relays of a host to the network, and makes them use only the network, also
// within the host.
func (h *host) online(s *launch.Secrets) {
	h.secrets = s
	h.change = func(c *launch.Config) {
		c.Transport = launch.TransportTCP
		c.Network = softhost.Network()
	}
}

// remotePair is two containers on two hosts.
type remotePair struct {
	pair
	relayA, relayB   *relay.Relay
	socketA, socketB string
}

func newRemotePair(t *testing.T) *remotePair {
	t.Helper()
	key := cluster()
	hostA, hostB := newHost(t), newHost(t)
	hostA.online(key)
	hostB.online(key)
	p := &remotePair{}
	p.socketA, p.relayA = hostA.start("a", launch.RouteAuto, -1, far(0, 1, "nic0"))
	p.socketB, p.relayB = hostB.start("b", launch.RouteAuto, -1, far(3, 2, "nic1"))
	p.a, p.b = attach(t, p.socketA), attach(t, p.socketB)
	p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	return p
}

func TestSendBetweenHostsDeliversEveryByte(t *testing.T) {
	p := newRemotePair(t)
	// Sizes around the eager limit (4 KiB), a piece and a slot (256 KiB), and the total of slots.
	p.arrive(t, 0, 1, 7, 8, 4096, 4097, 256<<10-1, 256<<10, 256<<10+1, 1<<20+3, 11<<20+5)
	report := p.relayA.Report()
	if len(report.Connections) != 1 || report.Connections[0].Transport != launch.TransportTCP ||
		!strings.Contains(report.Connections[0].Path, "-> tcp -> ") {
		t.Errorf("inspect shows %+v", report.Connections)
	}
	if n := report.Network; n == nil || len(n.Peers) != 1 || !n.Peers[0].Dialed || n.Peers[0].Channels != 1 ||
		!strings.Contains(n.Peers[0].Name, "container b") || !strings.Contains(n.Peers[0].Name, "by lo") {
		t.Errorf("inspect shows the network %+v", n)
	} else if z := n.Peers[0].Zerocopy; !strings.Contains(z, " of 2 data streams; ") ||
		strings.Contains(z, "; 0 sends") || !strings.Contains(z, ", 0 wait for their notification") {
		t.Errorf("inspect shows of MSG_ZEROCOPY %q", z)
	}
	for _, s := range report.Staging {
		if s.Transport == launch.TransportTCP && !strings.Contains(s.Pages, "pages") {
			t.Errorf("inspect shows the pages of slots as %q", s.Pages)
		}
	}
}

// Host memory is sent and received in place, without a slot.
func TestHostMemoryBetweenHostsUsesNoSlot(t *testing.T) {
	p := newRemotePair(t)
	const n = 3<<20 + 5
	from, err := p.a.HostMemory(within(t), client.HostMemory{Bytes: n, GPU: uuid(t, 0)})
	if err != nil {
		t.Fatal(err)
	}
	to, err := p.b.HostMemory(within(t), client.HostMemory{Bytes: n, GPU: uuid(t, 3)})
	if err != nil {
		t.Fatal(err)
	}
	want := random(t, n)
	copy(from.Data, want)
	slots := func(s *client.Session) (in uint64) {
		t.Helper()
		counters, err := s.Statistics(within(t))
		if err != nil {
			t.Fatal(err)
		}
		return counters.Server[0].In
	}
	for _, way := range []struct {
		name     string
		from, to *client.Memory
		read     func() []byte
		out, in  uint64 // bytes through slots
	}{
		{"host to host", from, to, func() []byte { return to.Data }, 0, 0},
		{"host to GPU", from, p.target.Memory, func() []byte { return p.target.read(0, n) }, 0, n},
		{"GPU to host", p.source.Memory, to, func() []byte { return to.Data }, n, 0},
	} {
		t.Run(way.name, func(t *testing.T) {
			clear(to.Data)
			p.source.write(0, want)
			out, in := slots(p.a), slots(p.b)
			receive, err := p.receiving.Receive(way.to, 0, n)
			if err != nil {
				t.Fatal(err)
			}
			send, err := p.sending.Send(way.from, 0, n)
			for _, op := range []*client.Operation{send, receive} {
				if _, err := wait(t, op, err); err != nil {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(way.read(), want) {
				t.Error("wrong bytes")
			}
			if out, in = slots(p.a)-out, slots(p.b)-in; out != way.out || in != way.in {
				t.Errorf("%d bytes went through slots to be sent and %d to be received, not %d and %d", out, in, way.out, way.in)
			}
		})
	}
}

// Connections between two relays share a set of TCP connections.
func TestRelaysOfTwoHostsShareOnePeer(t *testing.T) {
	p := newRemotePair(t)
	for range 5 {
		join(t, p.a, 0, p.b, 3)
	}
	second := attach(t, p.socketA)
	join(t, second, 0, p.b, 3)
	if n := p.relayA.Report().Network; len(n.Peers) != 1 || n.Peers[0].Channels != 7 {
		t.Errorf("there are %+v", n.Peers)
	}
}

// Unused sets end, and the next connection gets a new set.
func TestIdlePeerIsClosedAndReplaced(t *testing.T) {
	p := newRemotePair(t)
	p.relayA.CloseIdle()
	p.relayA.CloseIdle()
	if n := p.relayA.Report().Network; len(n.Peers) != 1 {
		t.Fatalf("connections in use were closed: %+v", n)
	}
	if err := p.sending.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	peers := func(r *relay.Relay, n int) {
		t.Helper()
		for end := testutil.Begin(); len(r.Report().Network.Peers) != n; time.Sleep(5 * time.Millisecond) {
			if end.Over() {
				t.Fatalf("there are %+v, not %d", r.Report().Network.Peers, n)
			}
		}
	}
	testutil.Until(t, "the channel is still there", func() bool {
		return p.relayA.Report().Network.Peers[0].Channels <= 0
	})
	p.relayA.CloseIdle()
	if n := p.relayA.Report().Network; len(n.Peers) != 1 {
		t.Fatalf("they were closed at once: %+v", n)
	}
	for range 3 {
		p.relayB.CloseIdle() // which has not made them
	}
	peers(p.relayB, 1)
	peers(p.relayA, 1)
	p.relayA.CloseIdle()
	peers(p.relayA, 0)
	peers(p.relayB, 0)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.move(t, 1<<20)
	peers(p.relayA, 1)
	// A dialing relay that does not end a set keeps none here.
	if err := p.sending.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the channel is still there", func() bool {
		return p.relayB.Report().Network.Peers[0].Channels <= 0
	})
	release := make(chan struct{})
	defer close(release)
	p.relayA.Do(func() { <-release }) // it closes none itself
	for range 4 {
		p.relayB.CloseIdle()
	}
	peers(p.relayB, 0)
}

func TestHandleOfUnreachableHostIsRefusedWithReason(t *testing.T) {
	key := cluster()
	online, other, off := newHost(t), newHost(t), newHost(t)
	online.online(key)
	other.online(cluster())
	off.change = func(c *launch.Config) {
		c.Transport, c.NoNetwork = launch.TransportTCP, "network.listen is off"
	}
	start := func(h *host, name string) (*client.Session, wire.Handle) {
		t.Helper()
		s := attach(t, h.relay(name, launch.RouteAuto, far(0, 1, "nic0")))
		l, err := s.Listen(within(t), uuid(t, 0))
		if err != nil {
			t.Fatal(err)
		}
		return s, l.Handle()
	}
	on, handle := start(online, "on")
	stranger, strangers := start(other, "stranger")
	without, none := start(off, "off")

	_, err := on.Connect(within(t), uuid(t, 0), strangers)
	demandCode(t, err, wire.StatusUnreachable, codes.KeyNotProven, "")
	_, err = stranger.Connect(within(t), uuid(t, 0), handle)
	demandCode(t, err, wire.StatusUnreachable, codes.KeyNotProven, "")
	_, err = on.Connect(within(t), uuid(t, 0), none)
	demandCode(t, err, wire.StatusUnreachable, codes.NoNetwork, "")
	_, err = without.Connect(within(t), uuid(t, 0), handle)
	demandCode(t, err, wire.StatusUnreachable, codes.NoNetwork, "")

	forged := handle.Layout()
	forged.Token[3] ^= 1
	_, err = on.Connect(within(t), uuid(t, 0), forged.Handle())
	demandCode(t, err, wire.StatusUnreachable, codes.KeyNotProven, "")
}

// A closed listener is unavailable to remote hosts, for the first connection of a set or a later
// one.
func TestConnectToClosedListenerOfOtherHostFails(t *testing.T) {
	for _, connected := range []bool{false, true} {
		t.Run(fmt.Sprint("connected ", connected), func(t *testing.T) {
			t.Parallel()
			key := cluster()
			hostA, hostB := newHost(t), newHost(t)
			hostA.online(key)
			hostB.online(key)
			a := attach(t, hostA.relay("a", launch.RouteAuto, far(0, 1, "nic0")))
			socket, relayB := hostB.start("b", launch.RouteAuto, -1, far(3, 2, "nic1"))
			b := attach(t, socket)
			if connected {
				join(t, a, 0, b, 3)
			}
			l, err := b.Listen(within(t), uuid(t, 3))
			if err == nil {
				err = l.Close(within(t))
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = a.Connect(within(t), uuid(t, 0), l.Handle())
			demand(t, err, wire.StatusBadHandle)
			if r := relayB.Report(); r.BadHandles != 1 || !connected && len(r.Network.Peers) > 0 {
				t.Errorf("of wrong handles %d are counted, and there are %+v", r.BadHandles, r.Network.Peers)
			}
		})
	}
}

// After any end at one host, operations at the remote host end with an error that names the cause,
// and no resource remains there: no connection, and no use of the client's memory.
func TestDeathOnOtherHostEndsOperations(t *testing.T) {
	halt := func(_ *testing.T, r *relay.Relay, _ *client.Session) { r.Halt() }
	stop := func(_ *testing.T, r *relay.Relay, _ *client.Session) { r.Stop("for a test") }
	leave := func(t *testing.T, _ *relay.Relay, s *client.Session) {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	hostname, err := os.Hostname()
	check(t, err)
	for name, c := range map[string]struct {
		die      func(*testing.T, *relay.Relay, *client.Session)
		receives bool // who dies
		status   wire.Status
		object   string // the beginning of it
	}{
		"the receiver's relay": {halt, true, wire.StatusPeerRelayDied,
			hostname + ", container b at 127.0.0.1:"},
		"the receiver's relay that is stopped": {stop, true, wire.StatusPeerRelayDied, "container b"},
		"the receiver":                         {leave, true, wire.StatusPeerClosed, "container b"},
		"the sender's relay": {halt, false, wire.StatusPeerRelayDied,
			hostname + ", container a at 127.0.0.1:"},
		"the sender's relay that is stopped": {stop, false, wire.StatusPeerRelayDied, "container a"},
		"the sender":                         {leave, false, wire.StatusPeerClosed, "container a"},
	} {
		for _, bytes := range []uint64{1000, 1 << 20} { // without a grant, and with
			t.Run(fmt.Sprintf("%s/%d bytes", name, bytes), func(t *testing.T) {
				t.Parallel()
				p := newRemotePair(t)
				var ops []*client.Operation
				for i := range 20 {
					var op *client.Operation
					var err error
					if c.receives {
						op, err = p.sending.Send(p.source.Memory, 0, bytes)
					} else {
						op, err = p.receiving.Receive(p.target.Memory, 0, bytes, client.Tag(uint64(i)))
					}
					if err != nil {
						t.Fatal(err)
					}
					ops = append(ops, op)
				}
				survivor, memory := p.relayB, p.target.Memory
				if c.receives {
					survivor, memory = p.relayA, p.source.Memory
					c.die(t, p.relayB, p.b)
				} else {
					c.die(t, p.relayA, p.a)
				}
				for _, op := range ops {
					_, err := op.Wait(within(t))
					if demand(t, err, c.status); !strings.HasPrefix(wire.ObjectOf(err), c.object) {
						t.Errorf("the error is of %q, not of %s: %v", wire.ObjectOf(err), c.object, err)
					}
				}
				if err := memory.Unexport(within(t)); err != nil {
					t.Error(err)
				}
				for end := testutil.Begin(); ; time.Sleep(5 * time.Millisecond) {
					used := survivor.Report().Used
					if used.Connections == 0 && used.Memories == 0 {
						break
					}
					if end.Over() {
						t.Fatalf("left at the other host: %+v", used)
					}
				}
			})
		}
	}
}

// A stopped sender's relay, or one that does not leave, keeps no resource at the remote host after
// that host has closed the connection.
func TestStoppedRelayOfOtherHostKeepsNoResources(t *testing.T) {
	key := cluster()
	p := hostsWith(t, key, key, "127.0.0.1")
	p.relayB.Leaving(100 * time.Millisecond)
	p.exchange(t)
	host, err := p.b.HostMemory(within(t), client.HostMemory{Bytes: 1 << 20, GPU: uuid(t, 3)})
	if err != nil {
		t.Fatal(err)
	}
	standing, release := make(chan struct{}), make(chan struct{})
	p.relayA.Do(func() { close(standing); <-release })
	defer close(release)
	<-standing
	receive, err := p.receiving.Receive(host, 0, 1<<20)
	if err == nil {
		err = p.receiving.Close(within(t))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err = wait(t, receive, nil); wire.StatusOf(err) != wire.StatusPeerClosed {
		t.Errorf("the receive: %v", err)
	}
	for end := testutil.Begin(); p.relayB.Report().Used.Connections > 0; time.Sleep(5 * time.Millisecond) {
		if end.Over() {
			t.Fatalf("left: %+v", p.relayB.Report().Used)
		}
	}
}

// hostsWith connects two hosts with secrets and addresses, and moves a message.
func hostsWith(t *testing.T, a, b *launch.Secrets, at string) *remotePair {
	t.Helper()
	p := &remotePair{}
	for i, s := range []*launch.Secrets{a, b} {
		h := newHost(t)
		h.online(s)
		change := h.change
		h.change = func(c *launch.Config) {
			change(c)
			c.Network.Addresses[0].Address = netip.MustParseAddr(at)
		}
		if i == 0 {
			p.socketA, p.relayA = h.start("a", launch.RouteAuto, -1, far(0, 1, "nic0"))
			p.a = attach(t, p.socketA)
			p.source = exported(t, p.a, 0, pairBytes)
		} else {
			p.socketB, p.relayB = h.start("b", launch.RouteAuto, -1, far(3, 2, "nic1"))
			p.b = attach(t, p.socketB)
			p.target = exported(t, p.b, 3, pairBytes)
		}
	}
	return p
}

func (p *remotePair) exchange(t *testing.T) {
	t.Helper()
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.move(t, 1<<20+5)
}

// Both hosts need the same, and may be at different steps of a rotation.
func TestHostsDuringKeyRotationConnect(t *testing.T) {
	old := network.Keys{Current: network.NewKey(time.Now())}
	rotated, err := old.Rotate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	finished, err := rotated.Finish()
	if err != nil {
		t.Fatal(err)
	}
	key := func(k network.Keys) *launch.Secrets {
		return &launch.Secrets{ClusterKey: launch.NewSecret(k.Text())}
	}
	certified := certificates(t)
	for name, c := range map[string]struct {
		a, b *launch.Secrets
		at   string
	}{
		"IPv6":                {key(old), key(old), "::1"},
		"TLS":                 {certified(key(old)), certified(key(old)), "127.0.0.1"},
		"told of the new key": {key(old), key(rotated), "127.0.0.1"},
		"not told yet":        {key(rotated), key(old), "127.0.0.1"},
		"one has finished":    {key(finished), key(rotated), "127.0.0.1"},
		"the other one has":   {key(rotated), key(finished), "127.0.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // the ends of relays take time
			hostsWith(t, c.a, c.b, c.at).exchange(t)
		})
	}

	t.Run("certificates on one host", func(t *testing.T) {
		p := hostsWith(t, certified(key(old)), key(old), "127.0.0.1")
		l, err := p.b.Listen(within(t), uuid(t, 3))
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.a.Connect(within(t), uuid(t, 0), l.Handle())
		demandOf(t, err, wire.StatusUnreachable, "network.tls_certificate")
	})

	t.Run("a rotation under running relays", func(t *testing.T) {
		p := hostsWith(t, key(old), key(old), "127.0.0.1")
		p.exchange(t)
		for _, step := range []network.Keys{rotated, finished} {
			for _, r := range []*relay.Relay{p.relayA, p.relayB} {
				if err := r.Secrets(*key(step)); err != nil {
					t.Fatal(err)
				}
				p.move(t, 1<<10) // what is connected stays so
				if err := p.sending.Close(within(t)); err != nil {
					t.Fatal(err)
				}
				p.exchange(t)
			}
		}
		// They have the new key alone: a host without alternatives uses these.
		h := newHost(t)
		h.online(key(finished))
		third := attach(t, h.relay("third", launch.RouteAuto, far(0, 1, "nic0")))
		join(t, third, 0, p.b, 3)
		// A host that was told nothing is cut off.
		q := hostsWith(t, key(old), key(finished), "127.0.0.1")
		l, err := q.b.Listen(within(t), uuid(t, 3))
		if err != nil {
			t.Fatal(err)
		}
		_, err = q.a.Connect(within(t), uuid(t, 0), l.Handle())
		demandCode(t, err, wire.StatusUnreachable, codes.KeyNotProven, "")
	})
}

// certificates adds certificates of a single authority.
func certificates(t *testing.T) func(*launch.Secrets) *launch.Secrets {
	t.Helper()
	make := func(template, parent *x509.Certificate, signer any) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if parent == nil {
			parent, signer = template, key
		}
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
		if err != nil {
			t.Fatal(err)
		}
		made, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return made, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	authority, signer, root := make(&x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, nil)
	return func(s *launch.Secrets) *launch.Secrets {
		_, key, own := make(&x509.Certificate{
			SerialNumber: big.NewInt(2), KeyUsage: x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}, authority, signer)
		der, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		s.Certificate, s.Authority = launch.NewSecret(own), launch.NewSecret(root)
		s.CertificateKey = launch.NewSecret(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
		return s
	}
}

// Short messages go without a grant, as many as the sender has windows: further messages wait for a
// receive. The windows become free again, for any end of the messages.
func TestEagerMessagesBetweenHostsNeedNoGrant(t *testing.T) {
	p := newRemotePair(t)
	const n, windows, more = 1000, 8, 5
	host, err := p.a.HostMemory(within(t), client.HostMemory{Bytes: pairBytes, GPU: uuid(t, 0)})
	if err != nil {
		t.Fatal(err)
	}
	want := random(t, n*(windows+more))
	copy(host.Data, want)
	p.source.write(0, want)
	send := func(memory *client.Memory, message, bytes int) *client.Operation {
		t.Helper()
		op, err := p.sending.Send(memory, uint64(message*n), uint64(bytes))
		if err != nil {
			t.Fatal(err)
		}
		return op
	}
	var sent uint64
	gone := func(bytes uint64) {
		t.Helper()
		for end := testutil.Begin(); p.relayA.Report().Sent < sent+bytes; time.Sleep(5 * time.Millisecond) {
			if end.Over() {
				t.Fatalf("%d bytes went without a receive, not %d", p.relayA.Report().Sent-sent, bytes)
			}
		}
		if got := p.relayA.Report().Sent - sent; got != bytes {
			t.Fatalf("%d bytes went without a receive, not %d", got, bytes)
		}
	}
	for name, memory := range map[string]*client.Memory{"GPU": p.source.Memory, "host": host} {
		t.Run(name, func(t *testing.T) {
			sent = p.relayA.Report().Sent
			var ops []*client.Operation
			for i := range windows + more {
				ops = append(ops, send(memory, i, n))
			}
			gone(windows * n)
			for i := range windows + more { // of one tag: in their order
				op, err := p.receiving.Receive(p.target.Memory, uint64(i*n), n)
				if moved, err := wait(t, op, err); err != nil || moved != n {
					t.Fatalf("receive %d: %d, %v", i, moved, err)
				}
			}
			for i, op := range ops {
				if moved, err := wait(t, op, nil); err != nil || moved != n {
					t.Fatalf("send %d: %d, %v", i, moved, err)
				}
			}
			if !bytes.Equal(p.target.read(0, uint64(len(want))), want) {
				t.Error("wrong bytes, or in another order")
			}
		})
	}
	for range windows + more {
		op := send(p.source.Memory, 0, n)
		receive, err := p.receiving.Receive(p.target.Memory, 0, n-1)
		_, err = wait(t, receive, err)
		demand(t, err, wire.StatusTruncated)
		_, err = wait(t, op, nil)
		demand(t, err, wire.StatusTruncated)

		op = send(p.source.Memory, 0, n)
		if err := op.Cancel(); err != nil {
			t.Fatal(err)
		}
		_, err = wait(t, op, nil)
		demand(t, err, wire.StatusCanceled)
	}
	// All windows are there again.
	sent = p.relayA.Report().Sent
	for i := range windows + more {
		send(host, i, n)
	}
	gone(windows * n)
}

// A relay without a valid first key joins the network with the next key.
func TestClusterKeyAddedLaterOpensNetwork(t *testing.T) {
	h := newHost(t)
	h.online(nil)
	_, r := h.start("late", launch.RouteAuto, -1, far(0, 1, "nic0"))
	if err := r.Secrets(launch.Secrets{ClusterKey: launch.NewSecret([]byte("no key"))}); err == nil {
		t.Fatal("what is no key was taken")
	}
	if n := r.Report().Network; n == nil || n.Error == "" || n.Listening != "" {
		t.Fatalf("without a key: %+v", n)
	}
	if err := r.Secrets(*cluster()); err != nil {
		t.Fatal(err)
	}
	if n := r.Report().Network; n == nil || n.Error != "" || n.Listening == "" {
		t.Fatalf("with one: %+v", n)
	}
}
