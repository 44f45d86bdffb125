package hostnetwork

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	addresses "github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/network/clusterkey"
)

// Networking is the network configuration of a relay: addresses and secrets.
type Networking struct {
	// Where is nil without a network, and then Why is the reason.
	Where *launch.Network
	Why   string
	// File is the text of the cluster key's file.
	File    []byte
	Secrets launch.Secrets
}

// Slots of a lane for other hosts, in each direction. There are many slots because even a short
// message takes one: NCCL's channels have some thirty messages of at most 512 KiB in flight.
// Larger slots gain nothing over TCP, which sends less than a slot in the time of a copy.
const (
	networkSlots     = 32
	networkSlotBytes = 1 << 20
)

// New reads the configuration and secrets of a relay's network. Without a key, the result has no
// network, and the error is nil.
func New(
	l paths.Layout,
	c config.Network,
	tenant string,
	rails map[string]int,
	memory uint64,
) (n Networking, err error) {
	if c.Listen != config.ListenAuto {
		n.Why = "network.listen in config.toml is off"
		return n, nil
	}
	key := KeyFile(l, c)
	text, err := paths.ReadSecret(key, launch.MaxSecret)
	if errors.Is(err, fs.ErrNotExist) {
		n.Why = fmt.Sprintf("no cluster key, %s; run peerlane key generate", key)
		return n, nil
	}
	if err != nil {
		n.Why = "the cluster key cannot be read: " + err.Error()
		return n, fmt.Errorf("the cluster key: %w", err)
	}
	if err = n.Key(text, c, tenant); err == nil {
		err = n.certificates(c)
	}
	if err == nil {
		n.Where, err = where(c, rails, memory)
	}
	if err == nil {
		n.Where.Tenant = tenant
		// A relay would refuse an invalid network, and the container would have no relay.
		err = n.Where.Check()
	}
	if err != nil {
		n.Why, n.Where = short(err.Error()), nil
	}
	return n, err
}

// maxReason is the maximum length in bytes of the reason for a missing network, which the
// supervisor sends to the relay. Reasons list interfaces; with a thousand interfaces, the rest of
// the relay's configuration would not fit.
const maxReason = 2 << 10

func short(why string) string {
	if len(why) <= maxReason {
		return why
	}
	return strings.ToValidUTF8(why[:maxReason], "") + "… (the log has the whole)"
}

// KeyFile returns the path of the cluster key: network.key, or the default path.
func KeyFile(l paths.Layout, c config.Network) string {
	if c.Key != "" {
		return c.Key
	}
	return l.ClusterKey()
}

// Key sets the key from the text of the cluster key's file: the tenant's key if the configuration
// names an annotation for tenants, and the cluster's key otherwise.
func (n *Networking) Key(text []byte, c config.Network, tenant string) error {
	n.File = text
	if c.TenantAnnotation == "" {
		n.Secrets.ClusterKey = launch.NewSecret(text)
		return nil
	}
	if tenant == "" {
		return fmt.Errorf(
			"the container has no annotation %s, which names the tenant (network.tenant_annotation in config.toml), so the "+
				"relay is on no network; have the engine set the annotation",
			c.TenantAnnotation,
		)
	}
	own, err := clusterkey.Tenant(text, tenant)
	if err != nil {
		return fmt.Errorf("annotation %s: %w", c.TenantAnnotation, err)
	}
	n.Secrets.ClusterKey = launch.NewSecret(own)
	return nil
}

func (n *Networking) certificates(c config.Network) error {
	if c.TLSKey == "" {
		return nil
	}
	key, err := paths.ReadSecret(c.TLSKey, launch.MaxSecret)
	if err != nil {
		return fmt.Errorf("network.tls_key: %w", err)
	}
	n.Secrets.CertificateKey = launch.NewSecret(key)
	for _, file := range []struct {
		key, path string
		to        *launch.Secret
	}{{"tls_certificate", c.TLSCertificate, &n.Secrets.Certificate},
		{"tls_authority", c.TLSAuthority, &n.Secrets.Authority}} {
		if err := paths.CheckTrusted(file.path); err != nil {
			return fmt.Errorf("network.%s: %w", file.key, err)
		}
		text, err := os.ReadFile(file.path)
		if err != nil {
			return fmt.Errorf("network.%s: %w", file.key, err)
		}
		*file.to = launch.NewSecret(text)
	}
	return n.Secrets.Check()
}

// where returns the network of a relay of this host. rails are plan.rails.
func where(c config.Network, rails map[string]int, memory uint64) (*launch.Network, error) {
	all, err := addresses.Host()
	if err != nil {
		return nil, err
	}
	n, err := whereOf(all, c, memory)
	if err != nil || c.Address != "" { // an explicit address is a single rail
		return n, err
	}
	return n, SetRails("/sys", n.Addresses, c, rails)
}

// whereOf returns the network of a host with these interfaces: the best addresses, up to the limit
// of a relay.
func whereOf(all []addresses.Interface, c config.Network, memory uint64) (*launch.Network, error) {
	ports, err := addresses.ParsePorts(c.Ports)
	if err != nil {
		return nil, err
	}
	n := &launch.Network{
		Ports: ports, Streams: c.Streams, Slots: networkSlots, SlotBytes: networkSlotBytes, Memory: memory,
	}
	if c.Address != "" {
		at, err := netip.ParseAddr(c.Address)
		if err != nil {
			return nil, err
		}
		n.Addresses = []addresses.Chosen{{Interface: interfaceOf(all, at), Address: at}}
		return n, nil
	}
	list, err := addresses.ParseInterfaces(c.Interfaces)
	if err != nil {
		return nil, err
	}
	chosen, err := list.Choose(all, addresses.Family(c.Family))
	n.Addresses = chosen[:min(len(chosen), launch.MaxAddresses)]
	return n, err
}

// LimitAddresses removes the last half of the addresses until the configuration fits into a datagram. It
// keeps at least one address.
func LimitAddresses(c launch.Config) launch.Config {
	for c.Network != nil && len(c.Network.Addresses) > 1 {
		if text, err := json.Marshal(c); err != nil || len(text) <= launch.MaxDatagram {
			break
		}
		fewer := *c.Network
		fewer.Addresses = fewer.Addresses[:len(fewer.Addresses)/2]
		c.Network = &fewer
	}
	return c
}

// interfaceOf returns the name of the interface with an address; empty without one.
func interfaceOf(all []addresses.Interface, at netip.Addr) string {
	for _, i := range all {
		for _, a := range i.Addresses {
			if a.WithZone("") == at.WithZone("") {
				return i.Name
			}
		}
	}
	return ""
}

// maxIgnored limits the number of sentences about a job's environment, which the image controls.
const maxIgnored = 16

// IgnoredVariables returns sentences about the NCCL variables of a job that relays ignore.
func IgnoredVariables(environment []string) (sentences []string) {
	for _, i := range addresses.IgnoredVariables(environment) {
		if strings.Trim(i.Name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" || len(i.Name) > 64 {
			continue // not a variable of NCCL
		}
		if len(sentences) == maxIgnored {
			return append(sentences, "and more variables of NCCL's have no effect on Peerlane's relays")
		}
		sentences = append(sentences, i.String())
	}
	return sentences
}
