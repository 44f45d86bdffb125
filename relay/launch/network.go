package launch

import (
	"errors"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/network/clusterkey"
)

// Network configures connections to relays of remote hosts. The relay joins the network when the
// relay also has the cluster key (Secrets).
type Network struct {
	// Addresses are the local addresses of the relay, the best first: per rail of its lanes the
	// relay listens at the first available address.
	Addresses []address.Chosen `json:"addresses"`
	Ports     address.Ports    `json:"ports"`
	// Streams is the number of TCP connections for data per remote relay, in addition to a control
	// connection.
	Streams int `json:"streams"`
	// Slots is a lane's number of host-memory slots of SlotBytes per direction, for remote hosts;
	// Memory limits the sum of the lanes' slots and bounce memory, bytes.
	Slots     int    `json:"slots"`
	SlotBytes uint64 `json:"slotBytes"`
	Memory    uint64 `json:"memory"`
	// Tenant is whose key the relay gets in place of the cluster's; empty for the cluster's.
	Tenant string `json:"tenant,omitempty"`
}

// Bounds of a Network.
const (
	MaxNetworkStreams = 64
	MaxAddresses      = 256
	// MaxRail is the highest number of a rail, as a plan's.
	MaxRail = 1023
)

// Check returns an error for an invalid configuration. A nil Network is valid.
func (n *Network) Check() error {
	switch {
	case n == nil:
	case len(n.Addresses) == 0 || len(n.Addresses) > MaxAddresses:
		return &ValueError{"number of addresses of the network", len(n.Addresses), fmt.Sprintf("1 to %d", MaxAddresses)}
	case slices.ContainsFunc(n.Addresses, func(a address.Chosen) bool {
		return a.Rail < address.NoRail || a.Rail > MaxRail
	}):
		return &ValueError{"rail in", n.Addresses, fmt.Sprintf("0 to %d, and %d for none", MaxRail, address.NoRail)}
	case n.Ports.First == 0 || n.Ports.Last < n.Ports.First:
		return &ValueError{"range of ports", n.Ports, ""}
	case n.Streams < 1 || n.Streams > MaxNetworkStreams:
		return &ValueError{"streams of the network", n.Streams, fmt.Sprintf("1 to %d", MaxNetworkStreams)}
	case n.Slots < 2 || n.Slots > 1024:
		return &ValueError{"slots of the network", n.Slots, "2 to 1024"}
	case n.SlotBytes < 64<<10 || n.SlotBytes > 1<<30 || n.SlotBytes%(64<<10) != 0:
		return &ValueError{"slot size of the network", n.SlotBytes, "a multiple of 64 KiB up to 1 GiB"}
	case n.Tenant != "":
		return clusterkey.CheckTenant(n.Tenant)
	}
	return nil
}

// NetworkReport reports the state of the network.
type NetworkReport struct {
	// Listening is the address in handles, empty without an address, with the cause in Error; Rails
	// have the further addresses.
	Listening string `json:"listening,omitempty"`
	Error     string `json:"error,omitempty"`
	// Rails are the permitted interfaces, with their traffic.
	Rails []NetworkRail `json:"rails,omitempty"`
	// Peers are the relays that connections go to and come from now.
	Peers []NetworkPeer `json:"peers,omitempty"`
	// Verbs is nil if the relay uses no RDMA, or has not needed RDMA yet.
	Verbs *VerbsReport `json:"verbs,omitempty"`
}

// NetworkRail is a local interface, with its traffic since the start of the relay, over every set
// of TCP connections.
type NetworkRail struct {
	// Rail is its number; -1 for none.
	Rail      int    `json:"rail"`
	Interface string `json:"interface"`
	Device    string `json:"device,omitempty"` // of RDMA
	// Listening is where the relay listens on the rail, if it does by this interface.
	Listening string `json:"listening,omitempty"`
	// Down says that the interface is gone, or has no link: nothing goes over it that
	// begins now.
	Down     bool   `json:"down,omitempty"`
	Sent     uint64 `json:"sent"`     // bytes
	Received uint64 `json:"received"` // bytes
}

// NetworkPeer is a remote relay, with the set of TCP connections.
type NetworkPeer struct {
	// Name describes the remote relay: container, host, addresses and interface.
	Name string `json:"name"`
	// Dialed says that this relay made the connections: it sends there.
	Dialed bool `json:"dialed"`
	// Channels is the number of client connections over the set.
	Channels int `json:"channels"`
	// Messages is the number of sent messages, and Batches the number of writes; Writes the number
	// of slot writes, of which Eager travelled with messages.
	Messages uint64 `json:"messages"`
	Batches  uint64 `json:"batches"`
	Writes   uint64 `json:"writes"`
	Eager    uint64 `json:"eager"`
	// Zerocopy describes the use of MSG_ZEROCOPY by the data streams.
	Zerocopy string `json:"zerocopy,omitempty"`
	// Transport carries the data, TransportTCP or TransportVerbs; empty while it is being
	// settled. Way says by which NICs, or why not by RDMA.
	Transport string `json:"transport,omitempty"`
	Way       string `json:"way,omitempty"`
}

// MaxSecret limits a field of Secrets, bytes, so that the fields fit into a datagram.
const MaxSecret = 10 << 10

// Check returns an error for secrets that cannot be sent.
func (s Secrets) Check() error {
	for _, one := range []struct {
		what   string
		secret Secret
	}{{"the cluster key", s.ClusterKey}, {"the certificate", s.Certificate}, {"its key", s.CertificateKey},
		{"the authority", s.Authority}} {
		if n := len(one.secret.Bytes()); n > MaxSecret {
			return fmt.Errorf("%s has %d bytes; at most %d are possible", one.what, n, MaxSecret)
		}
	}
	if has := [3]bool{!s.Certificate.IsZero(), !s.CertificateKey.IsZero(), !s.Authority.IsZero()}; has != [3]bool{} &&
		has != [3]bool{true, true, true} {
		return errors.New("of certificate, its key and the authority all are needed, or none")
	}
	return nil
}
