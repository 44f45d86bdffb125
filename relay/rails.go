package relay

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/wire"
)

// Versions of the messages between relays of two hosts before the greeting of a set. Version 3 came
// with version 2 of the handshake, which has forward secrecy.
const (
	oldestSession = 3
	newestSession = 3
)

// rails are the interfaces of the relay: listening addresses, interfaces for connects, and traffic
// per interface. Any goroutine may call the methods.
type rails struct {
	addresses []address.Chosen
	links     func() (up func(address.Chosen) bool) // looks at the interfaces
	carried   map[string]*tcp.Carried               // by interface; "" for none of these

	mu        sync.Mutex
	listening []listening // in the order of addresses
	down      map[string]bool
	known     map[string][]network.Rail   // of relays (tcp.Key), as they told last
	places    map[netip.Addr]network.Rail // of relays, for people
	failed    map[failure]time.Time
	silent    map[failure]time.Time  // addresses that timed out while another connected
	refused   map[netip.Addr]refusal // where listening failed
}

// refusal is why listening failed, and when.
type refusal struct {
	why  string
	when time.Time
}

// failure is a way that did not work.
type failure struct {
	by string
	to netip.AddrPort
}

// retryInterval is the time before a failed address is tried again beside further addresses: a try
// takes long if equal rails of two hosts are not connected.
const retryInterval = time.Minute

// listening is an address at which the relay listens.
type listening struct {
	address.Chosen
	endpoint address.Endpoint
}

// maxKnownRails limits the remembered remote relays.
const maxKnownRails = 4096

func newRails(addresses []address.Chosen, w wires) *rails {
	r := &rails{
		addresses: addresses, links: w.links, carried: map[string]*tcp.Carried{"": {}},
		down: map[string]bool{}, known: map[string][]network.Rail{}, places: map[netip.Addr]network.Rail{},
		failed: map[failure]time.Time{}, silent: map[failure]time.Time{}, refused: map[netip.Addr]refusal{},
	}
	if r.links == nil {
		r.links = links
	}
	for _, a := range addresses {
		r.carried[a.Interface] = &tcp.Carried{}
	}
	return r
}

// links looks which interfaces of this host have a link (IFF_UP and IFF_LOWER_UP of netdevice(7),
// by RTM_GETLINK; net.Interfaces is delayed), and their unchanged address. If the kernel does not
// report the carrier, every interface counts.
func links() func(address.Chosen) bool {
	have, err := net.InterfaceAddrs()
	if err != nil {
		return func(address.Chosen) bool { return true }
	}
	linked, err := linkedInterfaces()
	if err != nil {
		return func(address.Chosen) bool { return true }
	}
	return func(c address.Chosen) bool {
		return (c.Interface == "" || linked[c.Interface]) && slices.ContainsFunc(have, func(a net.Addr) bool {
			n, is := a.(*net.IPNet)
			if !is {
				return false
			}
			at, ok := netip.AddrFromSlice(n.IP)
			return ok && at.Unmap() == c.Address.WithZone("")
		})
	}
}

// linkedInterfaces are those that are up and have a carrier.
func linkedInterfaces() (map[string]bool, error) {
	table, err := syscall.NetlinkRIB(unix.RTM_GETLINK, unix.AF_UNSPEC)
	if err != nil {
		return nil, err
	}
	messages, err := syscall.ParseNetlinkMessage(table)
	if err != nil {
		return nil, err
	}
	linked := map[string]bool{}
	for _, m := range messages {
		if m.Header.Type != unix.RTM_NEWLINK || len(m.Data) < unix.SizeofIfInfomsg {
			continue
		}
		attributes, err := syscall.ParseNetlinkRouteAttr(&m)
		if err != nil {
			return nil, err
		}
		const up = unix.IFF_UP | unix.IFF_LOWER_UP
		flags := binary.NativeEndian.Uint32(m.Data[8:]) // ifi_flags of struct ifinfomsg
		for _, a := range attributes {
			if a.Attr.Type == unix.IFLA_IFNAME {
				linked[unix.ByteSliceToString(a.Value)] = flags&up == up
			}
		}
	}
	return linked, nil
}

// look finds out which interfaces can be used now. look may block for milliseconds.
func (r *rails) look() {
	up := r.links()
	down := map[string]bool{}
	for _, a := range r.addresses {
		was, seen := down[a.Interface]
		down[a.Interface] = (was || !seen) && !up(a) // the interface has no address
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, is := range down {
		if is != r.down[name] {
			logrus.Warnf("interface %s, by which relays of other hosts are reached, %s", name,
				map[bool]string{true: "is down, or its address is gone", false: "is up again"}[is])
			clear(r.refused)
		}
	}
	r.down = down
}

// of returns the rails of a lane's NICs: all where it has none here.
func (r *rails) of(l *lane) []int {
	var own, all []int
	for _, a := range r.addresses {
		if a.Rail == address.NoRail {
			continue
		}
		if l != nil && slices.ContainsFunc(l.spec.NICs, func(nic string) bool {
			return nic == a.Device || nic == a.Interface
		}) {
			own = append(own, a.Rail)
		}
		all = append(all, a.Rail)
	}
	if len(own) == 0 {
		own = all
	}
	slices.Sort(own)
	return slices.Compact(own)
}

// listen has the relay listen on an address of each rail that its lanes reach: the first that can
// be had; and on the others that are up while all of a lane's are down. Where none of these can be
// had, on any. refused has an error text per unavailable address; it is not tried again for
// retryInterval, unless an interface has changed: each client's Listen leads here.
func (r *rails) listen(lanes []*lane, g *multiListener, at func(netip.Addr) (net.Listener, error)) (refused []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	try := func(a address.Chosen) {
		if before, is := r.refused[a.Address]; is && time.Since(before.when) <= retryInterval {
			refused = append(refused, before.why)
			return
		}
		l, err := at(a.Address)
		if err != nil {
			r.refused[a.Address] = refusal{err.Error(), time.Now()}
			refused = append(refused, err.Error())
			return
		}
		delete(r.refused, a.Address)
		g.add(l)
		port := uint16(l.Addr().(*net.TCPAddr).Port)
		r.listening = append(r.listening, listening{a, address.Endpoint{Address: a.Address.WithZone(""), Port: port}})
		logrus.Infof("listening for relays of other hosts at %v%s", l.Addr(), where(a))
	}
	var wanted []int
	for _, l := range lanes {
		own := r.of(l)
		wanted = append(wanted, own...)
		if !slices.ContainsFunc(r.addresses, func(a address.Chosen) bool {
			return slices.Contains(own, a.Rail) && !r.down[a.Interface]
		}) {
			for _, a := range r.addresses {
				if !r.down[a.Interface] {
					wanted = append(wanted, a.Rail)
				}
			}
		}
	}
	for _, a := range r.addresses {
		had := slices.ContainsFunc(r.listening, func(l listening) bool { return l.Rail == a.Rail })
		if !had && slices.Contains(wanted, a.Rail) && len(r.listening) < network.MaxRails {
			try(a)
		}
	}
	for i := 0; len(r.listening) == 0 && i < len(r.addresses); i++ {
		if a := r.addresses[i]; !slices.Contains(wanted, a.Rail) {
			try(a)
		}
	}
	slices.SortStableFunc(r.listening, func(a, b listening) int {
		return slices.Index(r.addresses, a.Chosen) - slices.Index(r.addresses, b.Chosen)
	})
	return refused
}

// where names an interface, for people.
func where(a address.Chosen) string {
	switch {
	case a.Interface == "":
		return ""
	case a.Rail == address.NoRail:
		return " by " + a.Interface
	}
	return fmt.Sprintf(" by %s, rail %d", a.Interface, a.Rail)
}

// endpoint is where a lane's listeners are reached: on a rail of the lane whose interface
// is up, or on another, if there is any. One is there once listen has had some.
func (r *rails) endpoint(l *lane) address.Endpoint {
	own := r.of(l)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, good := range []func(listening) bool{
		func(l listening) bool { return slices.Contains(own, l.Rail) && !r.down[l.Interface] },
		func(l listening) bool { return !r.down[l.Interface] },
		func(l listening) bool { return slices.Contains(own, l.Rail) },
	} {
		if i := slices.IndexFunc(r.listening, good); i >= 0 {
			return r.listening[i].endpoint
		}
	}
	return r.listening[0].endpoint
}

// advertise returns the listening addresses for a remote relay, without rails that are down.
func (r *rails) advertise(l *lane) (told []network.Rail) {
	own := r.of(l)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, at := range r.listening {
		if !r.down[at.Interface] {
			told = append(told, network.Rail{Number: at.Rail, Endpoint: at.endpoint, Interface: at.Interface,
				Lane: slices.Contains(own, at.Rail)})
		}
	}
	return told
}

// record stores the rails of a remote relay.
func (r *rails) record(relay string, told []network.Rail) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if relay != "" {
		r.known[relay] = told
	}
	for _, rail := range told {
		r.places[rail.Endpoint.Address] = rail
	}
	forgetSome(r.known)
	forgetSome(r.places)
}

// forgetSome removes entries above the limit.
func forgetSome[K comparable, V any](known map[K]V) {
	for key := range known {
		if len(known) <= maxKnownRails {
			return
		}
		delete(known, key)
	}
}

// fail remembers a way that did not work, or was only silent while another worked: then the path
// may be slow, and data streams still try it.
func (r *rails) fail(w path, silent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	in := r.failed
	if silent {
		in = r.silent
	}
	in[failure{w.by.Interface, w.to[0]}] = time.Now()
	forgetSome(in)
}

// failedNow reports whether a way has just failed, or as a candidate was silent. failedNow needs the lock.
func (r *rails) failedNow(w path) bool {
	way := failure{w.by.Interface, w.to[0]}
	return time.Since(r.failed[way]) <= retryInterval || time.Since(r.silent[way]) <= retryInterval
}

// path is how a connection is made: by an interface of this host, or by the kernel's
// routes, to one of some addresses.
type path struct {
	by address.Chosen // zero for the kernel's routes
	to []netip.AddrPort
}

func (w path) String() string {
	if w.by.Interface == "" {
		return "as the routes say"
	}
	return strings.TrimPrefix(where(w.by), " ")
}

// ways are those for the streams of data of a set: tiers of equally good paths. The rails of the
// destination's lane that the sender's lane reaches, else another that the lane reaches, else any
// that both hosts have; a rail's addresses go with those of the same rail. The last tier is the
// path of the first connection; a host with a single interface has no alternative, and routes need
// not use that interface: an address can be a loopback's.
func (r *rails) ways(from *lane, told []network.Rail) (tiers [][]path) {
	own := r.of(from)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.single() {
		return nil
	}
	seen := map[int]bool{}
	tier := func(good func(network.Rail) bool) {
		var all []path
		for _, t := range told {
			if t.Number == address.NoRail || seen[t.Number] || !good(t) {
				continue
			}
			by, there := r.interfaceOn(t)
			if there && time.Since(r.failed[failure{by.Interface, on(by, t.Endpoint)[0]}]) > retryInterval {
				seen[t.Number] = true
				all = append(all, path{by, on(by, t.Endpoint)})
			}
		}
		if len(all) > 0 {
			tiers = append(tiers, all)
		}
	}
	reached := func(t network.Rail) bool { return slices.Contains(own, t.Number) }
	tier(func(t network.Rail) bool { return t.Lane && reached(t) })
	tier(reached)
	tier(func(t network.Rail) bool { return true })
	return tiers
}

// single reports whether the addresses belong to a single interface.
func (r *rails) single() bool {
	return !slices.ContainsFunc(r.addresses, func(a address.Chosen) bool {
		return a.Interface != r.addresses[0].Interface
	})
}

// interfaceOn is an interface of this host on the rail of another's: one that is up, and
// has an address of the same family. interfaceOn needs the lock.
func (r *rails) interfaceOn(t network.Rail) (address.Chosen, bool) {
	i := slices.IndexFunc(r.addresses, func(a address.Chosen) bool {
		return a.Rail == t.Number && !r.down[a.Interface] && a.Interface != "" && a.Address.Is4() == t.Endpoint.Address.Is4()
	})
	if i < 0 {
		return address.Chosen{}, false
	}
	return r.addresses[i], true
}

// on returns an endpoint for an interface.
func on(by address.Chosen, e address.Endpoint) []netip.AddrPort {
	at := e.Address
	if at.Is6() && at.IsLinkLocalUnicast() {
		at = at.WithZone(by.Interface)
	}
	return []netip.AddrPort{netip.AddrPortFrom(at, e.Port)}
}

// candidates returns the paths for the first connection of a set: first the address of the handle by the
// routes of the kernel; then the listening addresses that the relay has reported, on the same rails, its
// lane's rails first; then the address of the handle by each interface. Recently failed paths come last.
func (r *rails) candidates(relay string, at address.Endpoint) []path {
	r.mu.Lock()
	defer r.mu.Unlock()
	candidates := []path{{to: at.Dials(r.addresses)}}
	if r.single() {
		return candidates
	}
	for _, lane := range []bool{true, false} {
		for _, t := range r.known[relay] {
			if by, there := r.interfaceOn(t); there && t.Endpoint != at && t.Lane == lane {
				candidates = append(candidates, path{by, on(by, t.Endpoint)})
			}
		}
	}
	var tried []string
	for _, a := range r.addresses {
		if a.Interface != "" && !r.down[a.Interface] && !slices.Contains(tried, a.Interface) &&
			a.Address.Is4() == at.Address.Is4() {
			tried = append(tried, a.Interface)
			candidates = append(candidates, path{a, on(a, at)})
		}
	}
	failed := func(d path) int {
		if len(d.to) == 0 || r.failedNow(d) {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(candidates, func(a, b path) int { return failed(a) - failed(b) })
	return candidates
}

// lookAtRails finds out which interfaces a handle can name. lookAtRails may block.
func (r *Relay) lookAtRails() {
	var h *peerManager
	if r.loop.Call(func() { h = r.hosts }) && h != nil {
		h.rails.look()
		r.loop.Call(func() { h.listen() })
	}
}

// --- a set of connections ------------------------------------------------------------

// exchange receives the remote relay's rails, and sends this relay's rails: of a session that this
// side dialed, which its first word has come on.
func (h *peerManager) exchange(s *network.Session, from *lane, relay string) ([]network.Rail, error) {
	told, err := s.HearRails()
	if err == nil {
		err = s.TellRails(h.rails.advertise(from))
	}
	if err == nil {
		h.rails.record(relay, told)
	}
	return told, err
}

// answer is exchange for an accepted session.
func (h *peerManager) answer(s *network.Session) error {
	var l *lane
	if !h.relay.loop.Call(func() {
		if listener := h.relay.listeners[s.Target.Token]; listener != nil {
			l = listener.lane
		}
	}) {
		return errEnding
	}
	err := s.TellRails(h.rails.advertise(l))
	var told []network.Rail
	if err == nil {
		told, err = s.HearRails()
	}
	if err == nil {
		h.rails.record("", told) // only a handle has its rail
	}
	return err
}

// knock opens the first connection of a set, by the first candidate that answers: the next
// addresses are tried beside a silent address (network.Race).
func (h *peerManager) knock(ctx context.Context, target network.Target,
	candidates []path) (*network.Session, path, error) {
	finish := network.Race[*network.Session]{
		Ways: len(candidates), Delay: cmp.Or(h.local.Delay, network.AttemptDelay), Answer: network.AnswerDelay,
		Try: func(ctx context.Context, n int) (*network.Session, error) {
			candidate := candidates[n]
			switch {
			case candidate.by.Interface != "":
				s, err := h.local.DialBy(ctx, candidate.by.Interface, target, candidate.to)
				if err != nil {
					err = fmt.Errorf("%v: %w", candidate, err)
				}
				return s, err
			case len(candidates) > 1:
				return h.local.DialFirst(ctx, target, candidate.to)
			}
			return h.local.Dial(ctx, target, candidate.to)
		},
		Settles: answered,
		Drop:    func(s *network.Session) { s.Conn.Close() },
	}.Run(ctx)
	var failures error
	for n, err := range finish.Errors[:finish.Begun] {
		silent := err == nil && n < finish.Winner
		if len(candidates[n].to) > 0 && (silent || err != nil && !answered(err)) {
			h.rails.fail(candidates[n], silent)
		}
		switch {
		case failures == nil:
			failures = err
		case err != nil:
			failures = fmt.Errorf("%w; %w", failures, err)
		}
	}
	if finish.Winner >= 0 {
		return finish.Won, candidates[finish.Winner], nil
	}
	if failures == nil {
		failures = &fault.Error{Code: fault.Unreachable, Operation: "connecting to another host's relay", Cause: ctx.Err()}
	}
	return nil, path{}, failures
}

// answered reports whether an error is an answer of the listener, which a further address would not
// improve.
func answered(err error) bool {
	return wire.StatusOf(err) != wire.StatusInternal || errors.Is(err, network.ErrSilent)
}

// striping makes the streams of data of a set, in turn over the ways that work.
type striping struct {
	hosts *peerManager
	first *network.Session
	ways  []path
	made  []net.Conn // by the first try of each way
	last  uint32     // stream
	turn  int
}

// stripe tries the paths of a tier at once, and takes the first tier with a working path; otherwise
// every stream uses the path of the first connection.
func (h *peerManager) stripe(ctx context.Context, first *network.Session, went path,
	tiers [][]path) (*striping, error) {
	remote, err := netip.ParseAddrPort(first.Conn.RemoteAddr().String())
	if err != nil {
		return nil, err
	}
	s := &striping{hosts: h, first: first}
	for _, tier := range tiers {
		made := make([]net.Conn, len(tier))
		failed := make([]error, len(tier))
		var trying sync.WaitGroup
		for i, w := range tier {
			s.last++
			number := s.last
			trying.Go(func() { made[i], failed[i] = s.dial(ctx, w, number) })
		}
		trying.Wait()
		for i, w := range tier {
			if failed[i] != nil {
				logrus.Warnf("the connections with %s do without %v: %v", first.Peer, w, failed[i])
				h.rails.fail(w, false)
				continue
			}
			s.ways, s.made = append(s.ways, w), append(s.made, made[i])
		}
		if len(s.ways) > 0 {
			return s, nil
		}
	}
	s.ways = []path{{went.by, []netip.AddrPort{remote}}}
	return s, nil
}

func (s *striping) dial(ctx context.Context, w path, number uint32) (net.Conn, error) {
	joined, err := s.hosts.local.DialStreamBy(ctx, w.by.Interface, s.first, number, w.to[0])
	if err != nil {
		return nil, err
	}
	return joined.Conn, nil
}

// next makes a further stream.
func (s *striping) next(ctx context.Context) (net.Conn, error) {
	if len(s.made) > 0 {
		c := s.made[0]
		s.made = s.made[1:]
		return c, nil
	}
	for {
		n := s.turn % len(s.ways)
		s.last++
		c, err := s.dial(ctx, s.ways[n], s.last)
		if err == nil {
			s.turn++
			return c, nil
		}
		if ctx.Err() != nil || len(s.ways) == 1 {
			return nil, fmt.Errorf("%v: %w", s.ways[n], err)
		}
		logrus.Warnf("the connections with %s have fewer streams %v: %v", s.first.Peer, s.ways[n], err)
		s.ways = slices.Delete(s.ways, n, n+1)
	}
}

// close closes connections without a set.
func (s *striping) close() {
	for _, c := range s.made {
		c.Close()
	}
}

func (s *striping) String() string {
	var all []string
	for _, w := range s.ways {
		all = append(all, w.String())
	}
	return strings.Join(all, "; ")
}

// --- what people are told ---------------------------------------------------------------

// interfaceAt is the interface of an address of this host.
func (r *rails) interfaceAt(local net.Addr) (address.Chosen, bool) {
	at := addressOf(local)
	for _, a := range r.addresses {
		if a.Address.WithZone("") == at {
			return a, true
		}
	}
	return address.Chosen{}, false
}

// count is where the bytes of a connection are counted.
func (r *rails) count(c net.Conn) *tcp.Carried {
	a, _ := r.interfaceAt(c.LocalAddr())
	return r.carried[a.Interface]
}

// route is the way of a connection, for messages.
func (r *rails) route(c net.Conn) string {
	a, _ := r.interfaceAt(c.LocalAddr())
	return fmt.Sprintf("%v to %v%s", c.LocalAddr(), c.RemoteAddr(), where(a))
}

// broken returns the reason that an existing set cannot take a further connection: an interface has
// no link.
func (r *rails) broken(p *tcp.Peer) error {
	control, data := p.Connections()
	find := func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, c := range append([]net.Conn{control}, data...) {
			if a, known := r.interfaceAt(c.LocalAddr()); known && r.down[a.Interface] {
				return wire.Errorf(wire.StatusPeerRelayDied, "%w", &tcp.PeerError{Peer: p.Name(), Route: r.route(c),
					Event: "is unreachable: the interface has no link, or its address is gone"})
			}
		}
		return nil
	}
	if find() == nil {
		return nil
	}
	r.look() // which may be long ago
	return find()
}

// report returns the traffic per interface.
func (r *rails) report() (all []launch.NetworkRail) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.addresses {
		i := slices.IndexFunc(all, func(n launch.NetworkRail) bool { return n.Interface == a.Interface })
		if i < 0 {
			c := r.carried[a.Interface]
			all = append(all, launch.NetworkRail{Rail: a.Rail, Interface: a.Interface, Device: a.Device,
				Down: r.down[a.Interface], Sent: c.Sent.Load(), Received: c.Received.Load()})
			i = len(all) - 1
		}
		for _, l := range r.listening {
			if l.Chosen == a {
				all[i].Listening = netip.AddrPortFrom(a.Address, l.endpoint.Port).String()
			}
		}
	}
	return all[:min(len(all), reportedRails)]
}

// reportedRails bounds the interfaces that a report has room for.
const reportedRails = 32

// pairs are the two ends of a Peer's data streams, or, without data streams, of the control stream.
func (r *rails) pairs(p *tcp.Peer) (all []launch.RailFigures) {
	_, data := p.Connections()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range data {
		own, known := r.interfaceAt(c.LocalAddr())
		if !known {
			own.Rail = address.NoRail
		}
		at := addressOf(c.RemoteAddr())
		f := launch.RailFigures{Rail: own.Rail, Interface: own.Interface, PeerRail: address.NoRail, PeerPlace: at.String()}
		if there, known := r.places[at]; known {
			f.PeerRail, f.PeerPlace = there.Number, fmt.Sprintf("%s (%v)", there.Interface, at)
		}
		i := slices.IndexFunc(all, func(o launch.RailFigures) bool { f.Streams = o.Streams; return o == f })
		if i < 0 {
			f.Streams = 0
			all, i = append(all, f), len(all)
		}
		all[i].Streams++
	}
	return all
}

// registration describes the registration of a connection's memory.
const registrationTCP = "host memory that the relay has pinned for its GPU; the kernel's TCP copies from it and " +
	"to it: a bounce, without GPUDirect RDMA"

// overTCP is the way of a connection's messages to another host, from the sender's GPU to
// the receiver's.
func (c *connection) overTCP() (steps []string, pairs []launch.RailFigures) {
	own := "GPU " + c.lane.spec.GPU.BusID
	if c.remotePeer == nil || c.session.relay.hosts == nil {
		return []string{own, "host memory", "tcp", c.peer}, nil
	}
	pairs = c.session.relay.hosts.rails.pairs(c.remotePeer)
	var here, there []string
	name := func(place string, rail int) string {
		if rail == address.NoRail {
			return place
		}
		return fmt.Sprintf("%s, rail %d", place, rail)
	}
	for _, p := range pairs {
		here, there = append(here, name(p.Interface, p.Rail)), append(there, name(p.PeerPlace, p.PeerRail))
	}
	return []string{own, "host memory", strings.Join(here, " and "), "tcp", strings.Join(there, " and "), "host memory",
		c.peerGPU.GPU(), c.peer}, pairs
}
