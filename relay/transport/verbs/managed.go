package verbs

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/verbs"
)

// Queue pairs of iWARP, and of eRDMA with an iWARP driver, use TCP connections of the NIC or the
// kernel. Only the connection manager (librdmacm) connects such queue pairs, at an address of the
// NIC. The side that accepted the Peer requests the connections and sends first, as iWARP requires.
//
// The two relays exchange two secrets of the group over the control stream: a connection request
// has the first, and the answer has the second. The group rejects a request without the secret and
// sends no data in the rejection. Listeners exist only during a negotiation.

// secretBytes is the length of each secret.
const secretBytes = 32

// requestBytes is the length of the private data of a connection request: the secret, and the number
// of the queue pair (end.Number). Some transports pad the data with zeros, and no queue pair has
// number 0.
const requestBytes = secretBytes + 4

// managed is the state of the connection manager for a NIC.
type managed struct {
	manager *verbs.Manager
	events  *verbs.Events
	id      *verbs.ID // bound to address; the binding opens the device
	address netip.Addr
}

// openManaged opens a device by an address of the host that leads to the device. The context
// belongs to the connection manager.
func openManaged(library *verbs.Library, name string, config Config) (_ *managed, _ *verbs.Context, err error) {
	m := &managed{}
	if m.manager, err = library.Manager(); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	if m.events, err = m.manager.NewEvents(); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	var c *verbs.Context
	if m.id, m.address, err = leading(m.events, name, config); err == nil {
		c, err = m.id.Context()
	}
	return m, c, err
}

// leading finds the host's address that leads to a device, and returns an ID bound to the address.
func leading(events *verbs.Events, name string, config Config) (*verbs.ID, netip.Addr, error) {
	addresses, err := config.Addresses()
	if err != nil {
		return nil, netip.Addr{}, err
	}
	for _, a := range addresses {
		id, err := events.NewID()
		if err != nil {
			return nil, a, fmt.Errorf("%s: %w", name, err)
		}
		// Bind fails for an address without a device.
		if id.Bind(netip.AddrPortFrom(a, 0)) == nil {
			if c, err := id.Context(); err == nil && c.Name() == name {
				return id, a, nil
			}
		}
		if err := id.Close(); err != nil {
			return nil, a, err
		}
	}
	return nil, netip.Addr{}, fmt.Errorf("%s: RDMA CM needs an address, and no address of this host leads "+
		"to the device: %v; assign an address to its network interface", name, addresses)
}

// now returns m with the address that leads to the device now. It blocks.
func (m *managed) now(name string, config Config) (_ *managed, err error) {
	events, err := m.manager.NewEvents()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	defer func() { err = errors.Join(err, events.Close()) }()
	is := *m
	var id *verbs.ID
	if id, is.address, err = leading(events, name, config); err == nil {
		err = id.Close()
	}
	return &is, err
}

func (m *managed) close() error {
	var err error
	if m.id != nil {
		err = m.id.Close()
	}
	return errors.Join(err, m.events.Close())
}

// hostAddresses returns the addresses that a NIC can have, IPv4 first: some drivers support only
// IPv4.
func hostAddresses() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var list []netip.Addr
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if ip := p.Addr(); err == nil && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
			list = append(list, ip)
		}
	}
	slices.SortStableFunc(list, func(a, b netip.Addr) int { return a.BitLen() - b.BitLen() })
	return list, nil
}

// manager is the state of the connection manager for a group.
type manager struct {
	events    *verbs.Events
	listeners []*verbs.ID      // on the side that takes connection requests
	ports     [maxCards]uint16 // of the listeners, by NIC
	own       [secretBytes]byte
	theirs    [secretBytes]byte
	watched   bool
}

// managed reports whether queue pairs come up by the connection manager.
func (s *QPGroup) managed() bool {
	return slices.ContainsFunc(s.links, func(l qpLink) bool { return l.managed })
}

// prepare creates the secret, and the event channel if a link needs the connection manager. It
// blocks.
func (s *QPGroup) prepare() (err error) {
	_, _ = rand.Read(s.cm.own[:]) // never fails
	for _, l := range s.links {
		if l.managed {
			s.cm.events, err = s.nics[l.ours].cm.manager.NewEvents()
			return err
		}
	}
	return nil
}

// listen opens listeners for connection requests, at ports of relays. It blocks.
func (s *QPGroup) listen() error {
	for _, l := range s.links {
		n := s.nics[l.ours]
		if !l.managed || s.cm.ports[l.ours] != 0 {
			continue
		}
		id, err := listenAt(s.cm.events, n.cm.address, s.fabric.config.Ports, maxPairs)
		if err != nil {
			return unreachable("listen at %s of host %s by RDMA CM: %w", n.name, hostname(), err)
		}
		s.cm.listeners = append(s.cm.listeners, id)
		s.cm.ports[l.ours] = id.Port()
	}
	return nil
}

// listenAt listens at one of the ports, in random order, or at a port of the kernel's choice if
// ports is zero.
func listenAt(events *verbs.Events, at netip.Addr, ports address.Ports, backlog int) (*verbs.ID, error) {
	var last error
	for _, i := range mathrand.Perm(ports.Count()) {
		id, err := events.NewID()
		if err != nil {
			return nil, err
		}
		if last = id.Listen(netip.AddrPortFrom(at, ports.First+uint16(i)), backlog); last == nil {
			return id, nil
		}
		if err := id.Close(); err != nil {
			return nil, err
		}
		if !errors.Is(last, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, last
}

// eventPause is the interval of checks for the end of ctx.
const eventPause = 50 * time.Millisecond

// next waits for an event of a connection. It blocks until the end of ctx.
func next(ctx context.Context, events *verbs.Events) (verbs.ConnectionEvent, error) {
	fds := []unix.PollFd{{Fd: int32(events.FD()), Events: unix.POLLIN}}
	for {
		if err := ctx.Err(); err != nil {
			return verbs.ConnectionEvent{}, err
		}
		e, ok, err := events.Next()
		if ok || err != nil {
			return e, err
		}
		if _, err := unix.Poll(fds, int(eventPause.Milliseconds())); err != nil && err != unix.EINTR {
			return verbs.ConnectionEvent{}, err
		}
	}
}

// connection returns the parameters of a connection request or answer with a secret.
func (s *QPGroup) connection(private []byte) verbs.Connection {
	c := s.fabric.config
	return verbs.Connection{Private: private, Retries: uint8(min(c.Retries, 7)), ReceiverRetries: 7, AnswerReads: 1,
		InitiateReads: 1}
}

// pairBy creates the queue pair of a connection. It blocks.
func (s *QPGroup) pairBy(i int, id *verbs.ID) (err error) {
	p := s.pairs[i]
	if p.Pair, err = id.NewPair(p.queue.nic.domain, p.queue.config(sendDepth, receives)); err != nil {
		return err
	}
	p.queue.join(p.Number(), p.queue)
	s.number[key{p.queue, p.Number()}] = i
	p.fill()
	return s.again(p)
}

// failedBy returns the error of a queue pair that does not connect.
func (s *QPGroup) failedBy(i int, err error) error {
	p := s.pairs[i]
	t := &s.theirs[s.links[p.link].theirs]
	return &ofLink{p.link, unreachable("%w", &connectError{p.queue.nic.name, p.queue.nic.cm.address.String(), hostname(),
		t.name(), t.address(), err})}
}

// requestConnections requests the connections of every managed queue pair from the listeners of the peer. It
// blocks.
func (s *QPGroup) requestConnections(ports [maxCards]uint16) error {
	of, left := map[*verbs.ID]int{}, 0
	limit := s.fabric.config.Time
	for i, p := range s.pairs {
		l := s.links[p.link]
		if !l.managed {
			continue
		}
		t := &s.theirs[l.theirs]
		to := netip.AddrPortFrom(verbs.GID{GID: t.GID}.Address(), ports[l.theirs])
		// A relay connects only to ports of relays.
		if c := s.fabric.config.Ports; to.Port() == 0 || c != (address.Ports{}) && (to.Port() < c.First ||
			to.Port() > c.Last) {
			return malformed("%w", &portError{t.name(), to.Port(), c})
		}
		id, err := s.cm.events.NewID()
		if err != nil {
			return err
		}
		p.id, of[id] = id, i
		left++
		if err := id.ResolveAddress(netip.AddrPortFrom(p.queue.nic.cm.address, 0), to, limit); err != nil {
			return s.failedBy(i, err)
		}
	}
	for left > 0 {
		e, err := next(s.bringing, s.cm.events)
		if err != nil {
			return err
		}
		i, known := of[e.ID]
		if !known {
			continue
		}
		if err = e.Err(); err == nil {
			switch e.Kind {
			case verbs.AddressResolved:
				err = e.ID.ResolveRoute(limit)
			case verbs.RouteResolved:
				if err = s.pairBy(i, e.ID); err == nil {
					err = e.ID.Connect(s.connection(binary.LittleEndian.AppendUint32(slices.Clone(s.cm.theirs[:]), uint32(i)+1)))
				}
			case verbs.Established:
				if !isSecret(e.Private, s.cm.own) {
					err = errWrongSecret
				}
				left--
			}
		}
		if err != nil {
			return s.failedBy(i, err)
		}
	}
	return nil
}

// isSecret compares the private data of a connection with a secret in constant time.
func isSecret(private []byte, secret [secretBytes]byte) bool {
	return len(private) >= secretBytes && subtle.ConstantTimeCompare(private[:secretBytes], secret[:]) == 1
}

// acceptConnections accepts a connection for each managed queue pair and rejects other requests. It blocks.
func (s *QPGroup) acceptConnections() error {
	of, left := map[*verbs.ID]int{}, 0
	for _, p := range s.pairs {
		if s.links[p.link].managed {
			left++
		}
	}
	for left > 0 {
		e, err := next(s.bringing, s.cm.events)
		if err != nil {
			return err
		}
		if e.Kind == verbs.ConnectRequest {
			i, ok := s.requestedQP(e)
			if !ok {
				// Without data: a sender without the secret learns nothing.
				if err := e.ID.Reject(nil); err != nil {
					// fails if the sender has closed the connection; the number of senders is not
					// limited
					logrus.WithError(err).Debug("reject a connection request without the secret")
				}
				logged(e.ID.Close())
				continue
			}
			s.pairs[i].id, of[e.ID] = e.ID, i
			if err = s.pairBy(i, e.ID); err == nil {
				err = e.ID.Accept(s.connection(s.cm.theirs[:]))
			}
			if err != nil {
				return s.failedBy(i, err)
			}
			continue
		}
		i, known := of[e.ID]
		if !known {
			continue
		}
		if err := e.Err(); err != nil {
			return s.failedBy(i, err)
		}
		if e.Kind == verbs.Established {
			left--
		}
	}
	s.closeListeners()
	return nil
}

// requestedQP returns the queue pair of a connection request. ok is false without the secret and for an
// invalid request.
func (s *QPGroup) requestedQP(e verbs.ConnectionEvent) (i int, ok bool) {
	if e.ID == nil || !isSecret(e.Private, s.cm.own) || len(e.Private) < requestBytes {
		return 0, false
	}
	n := binary.LittleEndian.Uint32(e.Private[secretBytes:])
	if n == 0 || n > uint32(len(s.pairs)) {
		return 0, false
	}
	p := s.pairs[n-1]
	c, err := e.ID.Context()
	return int(n) - 1, err == nil && s.links[p.link].managed && p.id == nil && c.Name() == p.queue.nic.name
}

// closeListeners closes the listeners after the last expected connection.
func (p *resources) closeListeners() {
	for _, id := range p.cm.listeners {
		logged(id.Close())
	}
	p.cm.listeners = nil
}

// partTime is the wait for the Peer's own end after the connection of a queue pair has ended: the
// connections of an ending relay close in any order, and earlier messages must still be read.
const partTime = 100 * time.Millisecond

// handleConnectionEvents handles events of connections on the event loop.
func (s *QPGroup) handleConnectionEvents() {
	for s.cm.events != nil {
		e, ok, err := s.cm.events.Next()
		if !ok && err == nil {
			return
		}
		n := s.pairs[0].queue.nic
		for _, p := range s.pairs {
			if err == nil && p.id == e.ID && p.id != nil {
				n = p.queue.nic
			}
		}
		what := "the connection of a queue pair has ended: "
		if err == nil {
			if err = e.Err(); err == nil {
				continue
			}
		}
		s.lost(n, what+err.Error())
		return
	}
}

// lost calls fault after partTime for a queue pair whose connection has ended.
func (s *QPGroup) lost(n *nic, what string) {
	if s.parting || s.resetting() {
		return
	}
	s.parting = true
	epoch := s.protocol.epoch
	time.AfterFunc(partTime, func() {
		s.fabric.loop.Do(func() {
			if s.parting && s.protocol.epoch == epoch {
				s.fault(n, what)
			}
		})
	})
}

// unposted resets the group after a queue pair has refused a request. After the end of a connection
// the queue pair may fail before the event of the connection manager.
func (s *QPGroup) unposted(p *qp, err error) {
	if s.links[p.link].managed {
		s.lost(p.queue.nic, err.Error())
		return
	}
	s.fault(p.queue.nic, err.Error())
}

// happened handles the failure event of a queue pair.
func (s *QPGroup) happened(n *nic, e verbs.Event) {
	for _, p := range s.pairs {
		if p.Pair != nil && p.queue.nic.context == n.context && p.Number() == e.Pair && s.links[p.link].managed {
			s.lost(n, e.String())
			return
		}
	}
	s.fault(n, e.String())
}

// watchManaged adds the events of the connection manager to the event loop.
func (s *QPGroup) watchManaged() error {
	if s.cm.events == nil {
		return nil
	}
	s.cm.watched = true
	return s.fabric.loop.Watch(s.cm.events.FD(), func(uint32) { s.handleConnectionEvents() })
}

// closeManaged releases the objects of the connection manager, after the queue pairs. It blocks.
func (p *resources) closeManaged() {
	for _, pair := range p.pairs {
		if pair.id != nil {
			logged(pair.id.Close())
		}
	}
	p.closeListeners()
	if p.cm.events != nil {
		logged(p.cm.events.Close())
		p.cm.events = nil
	}
}
