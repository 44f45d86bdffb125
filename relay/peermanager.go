package relay

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// peerManager has the connections to relays of remote hosts: listening addresses, and the present
// sets of connections. Any goroutine except the loop may call its methods, unless stated otherwise.
type peerManager struct {
	relay    *Relay
	where    launch.Network
	local    *network.Local
	listener *multiListener
	rails    *rails
	timing   func(*tcp.Config)

	peers     *tcp.Peers
	gathering tcp.Gathering
	serving   sync.WaitGroup

	// resting are Peers that had no channel when that was last looked at, and how often
	// before; of the loop.
	resting map[*tcp.Peer]int
	stopped chan struct{}
	// refused is the last logged error of the listeners; of the loop.
	refused string

	mu       sync.Mutex
	pending  map[*network.Session]*pendingSession // whose streams come still
	names    map[tcp.Key]string
	accepted map[tcp.Key]netip.Addr // sets that remote relays have made, with the source addresses
	ended    bool
	last     uint64
}

// pendingSession is a session of a dialing relay, until the set of connections is complete.
type pendingSession struct {
	key    tcp.Key
	from   netip.Addr
	joined uint64 // streams that have come, by number
	forget func()
	timer  *time.Timer
}

// gatherTimeout is how long the connections of a set have to come. The limits bound incomplete and
// accepted sets, per host and in total, because a set takes descriptors. A host is identified by the claimed
// id and the address.
const (
	gatherTimeout        = 10 * time.Second
	maxPendingSessions   = 256
	maxPendingSessionsOf = 64
	maxAccepted          = 4096
	maxAcceptedOf        = 512
	dialTimeout          = 2 * handshakeTimeout
	expecting            = 1 // the byte that says so
	reportedPeers        = 32
	unnamedHostname      = "an unnamed host"
)

// hostname is this host's name for remote relays and errors.
func hostname() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return unnamedHostname
	}
	return name
}

// Secrets takes the cluster key, and the certificates, before the relay goes on the network;
// afterwards a changed key alone, which holds from the next handshake on. A relay that had no key
// joins the network.
func (r *Relay) Secrets(s launch.Secrets) error {
	err := r.secrets(s)
	if err != nil {
		r.loop.Do(func() { r.noKey = err.Error() })
	}
	return err
}

func (r *Relay) secrets(s launch.Secrets) error {
	if err := s.Check(); err != nil {
		return err
	}
	keys, err := network.ParseKeys(s.ClusterKey.Bytes())
	if err != nil {
		return fmt.Errorf("the cluster key: %w", err)
	}
	if !s.Certificate.IsZero() {
		config, err := network.LoadTLS(network.Certificates{Certificate: s.Certificate.Bytes(),
			Key: s.CertificateKey.Bytes(), Authority: s.Authority.Bytes()})
		if err != nil {
			return err // without keys nothing goes in the clear that was to be encrypted
		}
		r.loop.Do(func() { r.tls = config })
	}
	r.keys.Store(&keys)
	r.loop.Do(r.onNetwork) // a relay without a network joins the network
	return nil
}

// onNetwork goes on the network, once, if the configuration says where and there is a key. Call
// onNetwork on the loop. Without a network the relay serves the local host.
func (r *Relay) onNetwork() {
	if r.hosts != nil {
		r.hosts.listen() // for lanes that have come
		return
	}
	if r.config.Network == nil || r.dying != nil {
		return
	}
	if r.keys.Load() == nil {
		r.offNetwork = r.noKey
		return
	}
	h := &peerManager{relay: r, where: *r.config.Network, pending: map[*network.Session]*pendingSession{},
		names: map[tcp.Key]string{}, accepted: map[tcp.Key]netip.Addr{}, stopped: make(chan struct{}),
		gathering: tcp.Gathering{Most: maxPendingSessions, MostOfOne: 1}} // a set has a meeting
	h.listener, h.rails = newMultiListener(), newRails(h.where.Addresses, r.wires)
	if refused := h.listen(); len(h.rails.listening) == 0 {
		r.offNetwork = strings.Join(refused, "; ")
		logrus.Errorf("%s is not on the network: %s", r.name(), r.offNetwork)
		return
	}
	r.offNetwork = ""
	h.local = &network.Local{
		Host: r.host, Name: hostname() + ", " + r.name(), Oldest: oldestSession, Newest: newestSession,
		Keys: func() network.Keys { return *r.keys.Load() }, TLS: r.tls,
		Connect: r.wires.connect,
	}
	r.fabric = r.newFabric()
	h.timing = r.timing
	h.peers = tcp.NewPeers(r.loop, h.peer)
	server := &network.Server{
		Local: h.local, Admit: h.admit, Accept: func(s *network.Session) { go h.met(s) },
		Refused: func(from net.Addr, err error) {
			r.refused(logrus.WithField("from", from), err, "a connection from another host was refused")
		},
	}
	h.serving.Go(func() { server.Serve(h.listener) })
	h.serving.Go(h.rest)
	r.hosts = h
}

// refused logs why a connection came to nothing. A remote side that has left causes no warning: the
// remote relay tries several addresses at a time.
func (r *Relay) refused(log *logrus.Entry, err error, what string) {
	if network.Left(err) {
		log.WithError(err).Debug(what)
		return
	}
	r.warnings.warn(log, err, what)
}

// listen listens on further rails of the lanes. Call listen on the loop. refused has an error text
// per unavailable address.
func (h *peerManager) listen() (refused []string) {
	refused = h.rails.listen(h.relay.lanes, h.listener, func(at netip.Addr) (net.Listener, error) {
		return h.relay.wires.listen(at, h.where.Ports)
	})
	said := h.refused
	h.refused = strings.Join(refused, "; ")
	if h.refused != "" && h.refused != said && len(h.rails.listening) > 0 {
		logrus.Warnf("%s listens on fewer networks than its lanes reach: %s", h.relay.name(), h.refused)
	}
	return refused
}

// contact returns this relay's address in a handle of a lane's listener; zeros without a
// network. Call contact on the loop.
func (r *Relay) contact(token, generation wire.UUID, l *lane) (c [network.ContactBytes]byte) {
	if r.hosts == nil {
		return c
	}
	return r.keys.Load().SealContact(network.Target{Host: r.host, Token: token}, generation, r.hosts.rails.endpoint(l))
}

// close ends the connections to remote hosts, with or without a running loop. At the return no
// connection accesses memory.
func (h *peerManager) close() {
	h.mu.Lock()
	h.ended = true
	for session, m := range h.pending {
		m.end()
		delete(h.pending, session)
	}
	h.mu.Unlock()
	close(h.stopped)
	h.listener.Close()
	h.gathering.Close()
	h.peers.Close()
	h.peers.Wait()
	h.relay.fabric.Close()
	h.serving.Wait()
}

// peer is how a Peer of a key works.
func (h *peerManager) peer(key tcp.Key) tcp.Config {
	h.mu.Lock()
	name := h.names[key]
	h.mu.Unlock()
	c := tcp.Config{
		Name:    name,
		Route:   h.rails.route,
		Carried: h.rails.count,
		Accept:  h.relay.welcomeChannel,
		Extend:  h.extend,
		Down: func(err error) {
			h.forget(key)
			logrus.WithField("reason", err.Error()).Infof("the connections with %s ended", name)
		},
	}
	if h.timing != nil {
		h.timing(&c)
	}
	return c
}

// named records the name and interface of the remote side of a key.
func (h *peerManager) named(key tcp.Key, s *network.Session) {
	name := s.Peer
	if by := h.interfaceOf(s.Conn.LocalAddr()); by != "" {
		name += " by " + by
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.names[key] = name
}

func (h *peerManager) interfaceOf(local net.Addr) string {
	a, known := h.rails.interfaceAt(local)
	switch at := addressOf(local); {
	case known:
		return a.Interface
	case at.IsValid():
		return at.String()
	}
	return ""
}

// admit accepts handshakes for existing listeners, and every stream of a session once.
func (h *peerManager) admit(g network.Greeting) error {
	if g.Joined != nil {
		if g.Stream < 1 || g.Stream > launch.MaxNetworkStreams {
			return wire.Errorf(wire.StatusLimit, "stream %d; a relay has up to %d", g.Stream, launch.MaxNetworkStreams)
		}
		return nil
	}
	var l *listener
	if !h.relay.loop.Call(func() {
		if l = h.relay.listeners[g.Target.Token]; l == nil {
			h.relay.counters.badHandles++
		}
	}) {
		return errEnding
	}
	if l == nil {
		return h.relay.noListener()
	}
	h.relay.prepare(l.lane, false)
	return nil
}

// met takes a remote relay's connection after the handshake.
func (h *peerManager) met(s *network.Session) {
	key, err := h.meet(s)
	if err == nil && s.Joined == nil {
		// The first connection of a set: the remaining connections may come.
		if err = s.Conn.SetWriteDeadline(time.Now().Add(handshakeTimeout)); err == nil {
			_, err = s.Conn.Write([]byte{expecting})
		}
		if err == nil {
			err = s.Conn.SetReadDeadline(time.Now().Add(gatherTimeout))
		}
		if err == nil {
			err = h.answer(s)
		}
	}
	if err != nil {
		s.Conn.Close()
		h.forgetSession(s)
		h.relay.refused(logrus.WithField("from", s.Peer), err, "a relay of another host was refused")
		return
	}
	streams, err := h.gathering.Add(s.Conn, key.Relay)
	if err != nil {
		h.forgetSession(s)
		h.relay.warnings.warn(logrus.WithField("from", s.Peer), err, "a relay of another host did not come through")
		return
	}
	if streams == nil {
		return
	}
	first := s
	if s.Joined != nil {
		first = s.Joined
	}
	h.named(key, first)
	h.mu.Lock()
	h.accepted[key] = addressOf(first.Conn.RemoteAddr()) // before the end of the meeting: either counts
	h.mu.Unlock()
	h.forgetSession(first)
	peer, err := h.peers.Accepted(key, streams)
	if err != nil { // else the end of the set removes the entry
		h.forget(key)
		return
	}
	logrus.Infof("%s has connected over tcp", peer.Name())
}

// forget removes the state of an ended Peer.
func (h *peerManager) forget(key tcp.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.names, key)
	delete(h.accepted, key)
}

// acceptedOf counts the accepted sets of an address. acceptedOf needs the lock.
func (h *peerManager) acceptedOf(from netip.Addr) (n int) {
	for _, a := range h.accepted {
		if a == from {
			n++
		}
	}
	return n
}

// addressOf returns the source address of a connection; zero without TCP.
func addressOf(a net.Addr) netip.Addr {
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return at.Addr().Unmap().WithZone("")
}

// meet finds the set that a connection belongs to.
func (h *peerManager) meet(s *network.Session) (tcp.Key, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return tcp.Key{}, errEnding
	}
	if s.Joined != nil {
		m := h.pending[s.Joined]
		if m == nil {
			return tcp.Key{}, wire.Errorf(wire.StatusLimit, "stream %d comes when its set is complete, or given up", s.Stream)
		}
		bit := uint64(1) << (s.Stream - 1) // 1 to 64: admit has checked
		if m.joined&bit != 0 {
			return tcp.Key{}, wire.Errorf(wire.StatusMalformed, "stream %d has come before", s.Stream)
		}
		m.joined |= bit
		return m.key, nil
	}
	from := addressOf(s.Conn.RemoteAddr())
	of := 0
	for other, m := range h.pending {
		if other.Host == s.Host || m.from == from {
			of++
		}
	}
	if all, here := len(h.accepted), h.acceptedOf(from); all >= maxAccepted || here >= maxAcceptedOf {
		return tcp.Key{}, wire.Errorf(wire.StatusLimit,
			"other relays have made %d sets of connections, %d of them from %v; at most %d and %d can be", all, here, from,
			maxAccepted, maxAcceptedOf)
	}
	if len(h.pending) >= maxPendingSessions || of >= maxPendingSessionsOf {
		return tcp.Key{}, wire.Errorf(wire.StatusLimit,
			"%d sets of connections are incomplete, %d of them of this host; at most %d and %d can be", len(h.pending), of,
			maxPendingSessions, maxPendingSessionsOf)
	}
	h.last++
	// A separate limit: a remote relay's claims cause no connection of this relay.
	m := &pendingSession{
		key: tcp.Key{Relay: fmt.Sprintf("who came %d", h.last), Local: s.Conn.LocalAddr().String(),
			Remote: s.Conn.RemoteAddr().String()},
		from:   from,
		forget: h.local.Expect(s),
	}
	m.timer = time.AfterFunc(gatherTimeout, func() { h.forgetSession(s) })
	h.pending[s] = m
	return m.key, nil
}

// forgetSession removes a pending session.
func (h *peerManager) forgetSession(s *network.Session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m := h.pending[s]; m != nil {
		m.end()
		delete(h.pending, s)
	}
}

func (m *pendingSession) end() {
	m.timer.Stop()
	m.forget()
}

// uselessTime is how long connections without RDMA are kept by a relay that takes nothing else, or whose
// port is active again, and portRetryTime by a relay that takes TCP as well and does not know whether the
// other relay's port is.
const (
	uselessTime   = time.Second
	portRetryTime = 10 * time.Second
)

// useless returns the reason that an existing Peer is to take no channel although a new one may have
// RDMA: it was not to be had when the Peer was made, for instance because a port was down.
func (h *peerManager) useless(p *tcp.Peer) (why error) {
	ask := false
	h.relay.loop.Call(func() {
		by, transport := verbs.Of(p), h.relay.config.Transport
		if by == nil {
			return
		}
		since := by.UnusedSince()
		if since.IsZero() || time.Since(since) < uselessTime {
			return
		}
		waits, here := by.WaitsForPort()
		ask = transport == launch.TransportAuto && waits && here
		if transport == launch.TransportVerbs && p.Channels() == 0 || ask ||
			transport == launch.TransportAuto && waits && time.Since(since) >= cmp.Or(h.relay.portRetry, portRetryTime) {
			why = wire.Errorf(wire.StatusUnreachable, "the connections with the relay at %s are made anew, for RDMA: %s",
				p.Name(), by.Way())
		}
	})
	if ask && !h.relay.fabric.PortActive() {
		return nil
	}
	return why
}

// endUnused ends a Peer without channels. Channels of a Peer with some stay.
func (h *peerManager) endUnused(p *tcp.Peer, why error) (ended bool) {
	h.relay.loop.Call(func() {
		if ended = p.Channels() == 0; ended {
			p.End(why)
		}
	})
	return ended
}

// reach returns connections of a lane to the relay of a handle: existing or new connections. Lanes that
// reach the same rails share connections.
func (h *peerManager) reach(ctx context.Context, handle wire.HandleLayout, from *lane) (*tcp.Peer, error) {
	target := network.Target{Host: handle.Host, Token: handle.Token}
	at, err := h.local.Keys().OpenContact(target, handle.Generation, handle.Contact)
	if errors.Is(err, network.ErrOtherKey) && h.where.Tenant != "" {
		err = fmt.Errorf("connect to another host's relay: this container's relay has the key of tenant %q, and the "+
			"relay of the handle has another tenant's key, or another cluster's: tenants' keys differ "+
			"(network.tenant_annotation); connect containers of one tenant, or compare `peerlane key show` on both hosts: %w",
			h.where.Tenant, err)
	}
	if err != nil {
		return nil, wire.Errorf(wire.StatusUnreachable, "%w", err)
	}
	key := tcp.Key{Relay: handle.Host.String() + "/" + handle.Generation.String(), Local: fmt.Sprint(h.rails.of(from)),
		Remote: netip.AddrPortFrom(at.Address, at.Port).String()}
	for {
		mine := false
		peer, err := h.peers.Reach(ctx, key, func(ctx context.Context) (*tcp.Streams, error) {
			mine = true
			return h.dial(ctx, key, target, at, from)
		})
		if err == nil && !mine {
			if why := h.rails.broken(peer); why != nil {
				peer.End(why) // the set ends in seconds anyway
				continue
			}
			if why := h.useless(peer); why != nil && (h.endUnused(peer, why) || h.peers.Supersede(key, peer)) {
				continue
			}
		}
		if err == nil {
			return peer, nil
		}
		// The dialing relay may have the handle of a closed listener; this handle has another listener.
		if mine || ctx.Err() != nil || wire.StatusOf(err) != wire.StatusBadHandle {
			return nil, h.unreached(err)
		}
	}
}

func (h *peerManager) unreached(err error) error {
	if wire.StatusOf(err) != wire.StatusInternal {
		return err
	}
	return wire.Errorf(wire.StatusUnreachable, "the relay of the other host cannot be reached from %v: %w",
		h.rails.endpoint(nil).Address, err)
}

// Pauses of dial, which double.
const (
	firstPause = 20 * time.Millisecond
	lastPause  = time.Second
)

// dial makes a set of connections. While the remote relay has no room, as when the ranks of a job
// begin at once, dial tries again.
func (h *peerManager) dial(ctx context.Context, key tcp.Key, target network.Target, at address.Endpoint,
	from *lane) (*tcp.Streams, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		streams, err := h.dialSet(ctx, key, target, at, from)
		if err == nil || wire.StatusOf(err) != wire.StatusLimit {
			return streams, err
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return nil, err
		case <-h.stopped:
			return nil, errEnding
		}
	}
}

func (h *peerManager) dialSet(ctx context.Context, key tcp.Key, target network.Target, at address.Endpoint,
	from *lane) (*tcp.Streams, error) {
	until, _ := ctx.Deadline()
	h.rails.look()
	first, went, err := h.knock(ctx, target, h.rails.candidates(key.Relay, at))
	if err != nil {
		return nil, err
	}
	var told []network.Rail
	if err = expected(first.Conn, until); err == nil {
		told, err = h.exchange(first, from, key.Relay)
	}
	var data *striping
	if err == nil {
		data, err = h.stripe(ctx, first, went, h.rails.ways(from, told))
	}
	if err != nil {
		first.Conn.Close()
		return nil, err
	}
	defer data.close()
	control := first.Conn
	connect := func(ctx context.Context) (net.Conn, error) {
		if c := control; c != nil {
			control = nil
			return c, nil
		}
		return data.next(ctx)
	}
	streams, err := tcp.Dial(ctx, until, connect, max(h.where.Streams, len(data.ways)), 0)
	if err != nil {
		return nil, err
	}
	h.named(key, first)
	logrus.Infof("connected to %s over tcp, %d streams for data (%v): it is on another host, or relay.transport says so",
		first.Peer, max(h.where.Streams, len(data.ways)), data)
	return streams, nil
}

// expected waits for the remote side's permission for the streams. A relay without room for a set
// closes the connection.
func expected(c net.Conn, until time.Time) error {
	word := make([]byte, 1)
	err := c.SetReadDeadline(until)
	if err == nil {
		_, err = c.Read(word)
	}
	switch {
	case errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET):
		return wire.Errorf(wire.StatusLimit, "the relay at %v has no room for more connections now", c.RemoteAddr())
	case err != nil:
		return fmt.Errorf("the relay at %v took no connection: %w", c.RemoteAddr(), err)
	case word[0] != expecting:
		return wire.Errorf(wire.StatusMalformed, "the relay at %v says %d where %d was to come", c.RemoteAddr(), word[0],
			expecting)
	}
	return nil
}

// idleTimeout limits the life of connections without a client: of connections that this relay made
// once or twice the time, of accepted connections three or four times.
const idleTimeout = 30 * time.Second

// rest closes connections after idleTimeout.
func (h *peerManager) rest() {
	every := time.NewTicker(idleTimeout)
	defer every.Stop()
	for {
		select {
		case <-h.stopped:
			return
		case <-every.C:
			h.rails.look()
			h.relay.loop.Do(h.closeIdle)
		}
	}
}

// Looks of closeIdle at which a Peer without a channel is closed. Remote relays close accepted
// sets, usually earlier; otherwise this relay closes them.
const (
	looksDialed   = 2
	looksAccepted = 4
)

// closeIdle closes sets without a channel since the last calls. Call closeIdle on the loop, as Open
// does: no channel opens meanwhile.
func (h *peerManager) closeIdle() {
	before := h.resting
	h.resting = map[*tcp.Peer]int{}
	h.peers.Each(func(p *tcp.Peer) {
		if p.Channels() > 0 {
			return
		}
		looks, most := before[p]+1, looksAccepted
		if p.Dialed() {
			most = looksDialed
		}
		if h.resting[p] = looks; looks >= most {
			p.Close()
		}
	})
}

// networkReport returns the network's state for reports. Call networkReport on the loop.
func (r *Relay) networkReport() *launch.NetworkReport {
	h := r.hosts
	if h == nil {
		if why := r.noNetwork(); r.config.Network != nil || r.config.Transport == launch.TransportTCP ||
			r.config.Transport == launch.TransportVerbs {
			return &launch.NetworkReport{Error: why}
		}
		return nil
	}
	n := &launch.NetworkReport{Listening: h.listener.Addr().String(), Rails: h.rails.report(), Verbs: r.fabric.Report()}
	h.peers.Each(func(p *tcp.Peer) {
		f := p.Figures()
		n.Peers = append(n.Peers, launch.NetworkPeer{
			Name: p.Name(), Dialed: p.Dialed(), Channels: p.Channels(),
			Messages: f.Messages, Batches: f.Batches, Writes: f.Writes, Eager: f.Eager,
			Zerocopy: f.Zerocopy.String(),
		})
		r.byVerbs(p, &n.Peers[len(n.Peers)-1])
	})
	slices.SortFunc(n.Peers, func(a, b launch.NetworkPeer) int { return strings.Compare(a.Name, b.Name) })
	n.Peers = n.Peers[:min(len(n.Peers), reportedPeers)]
	return n
}

// noNetwork says why the relay is on no network. Call noNetwork on the loop.
func (r *Relay) noNetwork() string {
	switch {
	case r.offNetwork != "":
		return r.offNetwork
	case r.config.NoNetwork != "":
		return r.config.NoNetwork
	}
	return "it has no cluster key; peerlane key generate makes one"
}

// networkState is a relay's state of the network. Only the loop uses the fields except keys.
type networkState struct {
	hosts      *peerManager  // nil without a network
	fabric     *verbs.Fabric // nil without a network
	offNetwork string        // why there is no network
	noKey      string        // why there is no key
	keys       atomic.Pointer[network.Keys]
	tls        *tls.Config
	welcoming  int // channels whose hello is being answered
	unanswered []*arriving
	// Of tests: the configuration and the connections of a Peer.
	timing func(*tcp.Config)
	wires  wires
	// libibverbs is a path; empty for the host's library.
	libibverbs string
	// nicAddresses are addresses of this host's NICs, if different from the interfaces' addresses.
	nicAddresses func() ([]netip.Addr, error)
	// reconnectLimit limits a reconnect of queue pairs; 0 for the configured limit.
	reconnectLimit time.Duration
	// settle limits the first connection of queue pairs, 0 for verbs.SettleTime.
	settle time.Duration
	// portRetry is portRetryTime, except in tests.
	portRetry time.Duration
}

// wires replaces TCP unless zero.
type wires struct {
	accept  func(netip.Addr, address.Ports) (net.Listener, error)
	connect func(ctx context.Context, to netip.AddrPort, by string) (net.Conn, error)
	links   func() (up func(address.Chosen) bool)
}

func (w wires) listen(at netip.Addr, ports address.Ports) (net.Listener, error) {
	if w.accept != nil {
		return w.accept(at, ports)
	}
	return address.Listen(context.Background(), at, ports)
}
