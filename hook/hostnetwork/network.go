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

// Networking is what a relay is told to be on the network: where, and the secrets.
type Networking struct {
	Where   *launch.Network // nil where it is on none
	Why     string          // and why
	File    []byte          // the cluster key's text
	Secrets launch.Secrets
}

// slots of a lane for other hosts, in each direction. A message has one, however short it
// is, so that there are many: NCCL's channels have some thirty messages of at most 512 KiB
// under way. TCP needs no larger ones: what it moves in the time of a copy is less.
const (
	networkSlots     = 32
	networkSlotBytes = 1 << 20
)

// New reads what a relay needs for the network. Without a key that is nothing,
// and no error.
func New(l paths.Layout, c config.Network, tenant string, rails map[string]int, memory uint64) (n Networking, err error) {
	if c.Listen != config.ListenAuto {
		n.Why = "network.listen in config.toml is off"
		return n, nil
	}
	key := KeyFile(l, c)
	text, err := paths.ReadSecret(key, launch.MaxSecret)
	if errors.Is(err, fs.ErrNotExist) {
		n.Why = fmt.Sprintf("there is no cluster key, %s; peerlane key generate makes one", key)
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
		// Of a relay that refuses its network the container would have no relay at all.
		err = n.Where.Check()
	}
	if err != nil {
		n.Why, n.Where = short(err.Error()), nil
	}
	return n, err
}

// maxReason is the maximum length, in bytes, of the reason that the supervisor gives a relay
// for having no network. Reasons list interfaces; those of a host with a thousand interfaces
// would leave no room for the rest of the relay's configuration.
const maxReason = 2 << 10

func short(why string) string {
	if len(why) <= maxReason {
		return why
	}
	return strings.ToValidUTF8(why[:maxReason], "") + "… (the log has the whole)"
}

func KeyFile(l paths.Layout, c config.Network) string {
	if c.Key != "" {
		return c.Key
	}
	return l.ClusterKey()
}

// Key takes the text of the cluster key's file: the relay gets its tenant's key where the
// configuration names an annotation for tenants, else the cluster's.
func (n *Networking) Key(text []byte, c config.Network, tenant string) error {
	n.File = text
	if c.TenantAnnotation == "" {
		n.Secrets.ClusterKey = launch.NewSecret(text)
		return nil
	}
	if tenant == "" {
		return fmt.Errorf("the container has no annotation %s, which names its tenant (network.tenant_annotation in config.toml); have the engine set it, or its relay is on no network", c.TenantAnnotation)
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
	}{{"tls_certificate", c.TLSCertificate, &n.Secrets.Certificate}, {"tls_authority", c.TLSAuthority, &n.Secrets.Authority}} {
		if err := paths.Trusted(file.path); err != nil {
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

// where says where a relay of this host goes on the network. rails are plan.rails.
func where(c config.Network, rails map[string]int, memory uint64) (*launch.Network, error) {
	all, err := addresses.Host()
	if err != nil {
		return nil, err
	}
	n, err := whereOf(all, c, memory)
	if err != nil || c.Address != "" { // which is one rail
		return n, err
	}
	return n, SetRails("/sys", n.Addresses, c, rails)
}

// whereOf is where on a host with these interfaces. Of more addresses than a relay takes
// they are the best.
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

// Fitting is a configuration with as many of its addresses, the best, as a datagram has
// room for beside the lanes; at least one.
func Fitting(c launch.Config) launch.Config {
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

// interfaceOf names the interface of an address; an empty name where it has none now.
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

// maxIgnored bounds what is said of a job's environment, which is the image's.
const maxIgnored = 16

// IgnoredVariables says which variables of a job relays do not go by.
func IgnoredVariables(environment []string) (sentences []string) {
	for _, i := range addresses.IgnoredVariables(environment) {
		if strings.Trim(i.Name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" || len(i.Name) > 64 {
			continue // none of NCCL's
		}
		if len(sentences) == maxIgnored {
			return append(sentences, "and more variables of NCCL's have no effect on Peerlane's relays")
		}
		sentences = append(sentences, i.String())
	}
	return sentences
}
