package relay

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/transport/tcp"
	"github.com/peerlane/peerlane/relay/transport/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Between relays of two hosts the data uses RDMA if both have capable NICs, beside the shared TCP
// connections (remote.go): the messages are the same.

// newFabric returns the relay's RDMA state. Call newFabric on the loop.
func (r *Relay) newFabric() *verbs.Fabric {
	c := verbs.Config{
		NICs: r.nics, Library: r.libibverbs, Slots: uint64(r.config.Network.Slots) * r.config.Network.SlotBytes,
		Flush: r.unordered, Stages: r.stages, Current: r.current,
		Ports: r.config.Network.Ports, Addresses: r.nicAddresses, Reconnect: r.reconnectLimit,
		Time: r.settle,
	}
	if c.Off = r.offRDMA(); c.Off == "" {
		c.Verbs = *r.config.Verbs
	}
	return verbs.New(r.loop, c)
}

// offRDMA returns the reason that the relay uses no RDMA, regardless of NICs; empty where it may.
// Call offRDMA on the loop.
func (r *Relay) offRDMA() string {
	switch {
	case r.config.Transport != launch.TransportAuto && r.config.Transport != launch.TransportVerbs:
		return fmt.Sprintf("relay.transport in config.toml of host %s is %q", hostname(), r.config.Transport)
	case r.config.Verbs == nil:
		return "the supervisor of " + r.name() + " is of a release without RDMA"
	}
	return ""
}

// nics returns the NICs of the lanes. Any goroutine except the loop may call it.
func (r *Relay) nics() (names []string) {
	r.loop.Call(func() { names = r.laneNICs() })
	return names
}

func (r *Relay) laneNICs() (names []string) {
	for _, l := range r.lanes {
		for _, name := range l.spec.NICs {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// extend has a Peer's data go by RDMA, and says in the log which way it goes.
func (h *peerManager) extend(p *tcp.Peer) tcp.Extension {
	r := h.relay
	s := r.fabric.Extend(p)
	s.Settle(func(err error) {
		who := logrus.WithField("relay", p.Name())
		switch {
		case err == nil:
			who.Infof("data goes over verbs: %s", s.Way())
		case r.config.Transport == launch.TransportTCP || len(r.laneNICs()) == 0:
			who.Infof("data goes over tcp: %v", err)
		default:
			who.Warnf("data does not go over RDMA: %v", err)
		}
	})
	return s
}

// senderBy returns the transport of a connection's data: nil for tcp. It waits until that is
// settled, and has the lane's slots registered.
func (r *Relay) senderBy(peer *tcp.Peer, c *connection, config launch.Config) (*verbs.QPGroup, error) {
	settled := make(chan error, 1)
	var by *verbs.QPGroup
	if !r.loop.Call(func() {
		if by = verbs.Of(peer); by == nil {
			settled <- wire.Errorf(wire.StatusUnreachable, "the relay at %s is of a release without RDMA", peer.Name())
			return
		}
		by.Settle(func(err error) { settled <- err })
	}) {
		return nil, errEnding
	}
	var err error
	select {
	case err = <-settled:
	case <-time.After(cmp.Or(r.settle, verbs.SettleTime) + handshakeTimeout):
		return nil, wire.Errorf(wire.StatusUnreachable, "the relay at %s did not say in time whether it has RDMA",
			peer.Name())
	}
	if err == nil {
		if err = r.take(c, by, config.Network, true); err == nil {
			return by, nil
		}
		if wire.StatusOf(err) == wire.StatusNoStaging {
			return nil, err
		}
		if config.Transport != launch.TransportVerbs {
			logrus.WithField("relay", peer.Name()).Warnf("data of a connection goes over tcp: %v", err)
		}
	}
	switch {
	case config.Transport == launch.TransportVerbs:
		return nil, wire.Errorf(wire.StatusUnreachable,
			"relay.transport in config.toml is \"verbs\", and that cannot be: %w", err).On("relay.transport")
	}
	return nil, c.takeTCP(config.Network)
}

// receiverBy returns the transport of the data of a new channel: nil for tcp. Call receiverBy on the
// loop.
func (r *Relay) receiverBy(peer *tcp.Peer) (*verbs.QPGroup, error) {
	by := verbs.Of(peer)
	if by != nil && by.Coming() {
		return by, nil
	}
	if r.config.Transport != launch.TransportVerbs {
		return nil, nil
	}
	why := "its relay is of a release without RDMA"
	if by != nil {
		why = by.Way()
	}
	return nil, wire.Errorf(wire.StatusUnreachable,
		"relay.transport in config.toml of host %s is \"verbs\", and the data would come over tcp: %s", hostname(),
		why).On("relay.transport")
}

// take registers the slots of a connection, out or in, with the NICs, and makes the connection use
// the slots: those on server GPUs, or else those in the host's memory. take may block.
func (r *Relay) take(c *connection, by *verbs.QPGroup, n *launch.Network, sends bool) error {
	way, onGPU, err := r.takeGPU(c, by, sends)
	if err != nil {
		return err
	}
	if err := c.takeHost(n, !onGPU); err != nil {
		return err
	}
	slots := c.in
	if sends {
		slots = c.out
	}
	for _, g := range slots.regions {
		if onGPU {
			break
		}
		if err := by.Register(g.memory, !sends); err != nil {
			return wire.Errorf(wire.StatusUnreachable, "the slots of GPU %s cannot be registered with the NICs: %w",
				c.lane.spec.GPU.BusID, err)
		}
	}
	if !c.lane.spec.Direct { // which has none, and says how memory is known when some is used
		c.lane.logSlots(way)
	}
	c.transport, c.registered, c.onGPUs = launch.TransportVerbs, way, onGPU
	return nil
}

// byVerbs says how the data of a Peer goes. Call byVerbs on the loop.
func (r *Relay) byVerbs(p *tcp.Peer, is *launch.NetworkPeer) {
	is.Transport = launch.TransportTCP
	by := verbs.Of(p)
	switch {
	case by == nil:
		is.Way = "it is of a release without RDMA"
		return
	case by.Using():
		is.Transport = launch.TransportVerbs
	case by.Way() == "":
		is.Transport = ""
	}
	is.Way = by.Way()
}
