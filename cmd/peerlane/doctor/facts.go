package doctor

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor/meeting"
	"github.com/peerlane/peerlane/hook/config"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
)

// Facts are what this host tells another one's doctor. All are the network interfaces
// that it has (address.Host).
func (h *Host) Facts(name, release string, keys network.Keys, all []address.Interface) (meeting.Facts, error) {
	c, err := h.configuration()
	if err != nil {
		return meeting.Facts{}, err
	}
	f := meeting.Facts{
		Host: name, Release: release, Oldest: wire.OldestVersion, Newest: wire.NewestVersion,
		Keys: []string{keys.Current.ID.String()}, TLS: c.Network.TLSCertificate != "", Ports: c.Network.Ports,
		Interfaces: []meeting.Interface{}, Rails: []meeting.Rail{},
	}
	if keys.Previous != nil {
		f.Keys = append(f.Keys, keys.Previous.ID.String())
	}
	chosen, err := chosenAddresses(c.Network, all)
	if err != nil {
		f.Why = err.Error()
	}
	for _, at := range chosen {
		i := slices.IndexFunc(f.Interfaces, func(have meeting.Interface) bool { return have.Name == at.Interface })
		if i < 0 {
			i = len(f.Interfaces)
			f.Interfaces = append(f.Interfaces, meeting.Interface{
				Name: at.Interface, MTU: h.netNumber(at.Interface, "mtu"), Mbps: max(0, h.netNumber(at.Interface, "speed")),
			})
		}
		f.Interfaces[i].Addresses = append(f.Interfaces[i].Addresses, at.Address.WithZone("").String())
	}
	p, err := h.Plan()
	if err != nil {
		return f, nil // a host without GPUs has a network all the same, and other checks say the rest
	}
	for _, l := range p.Lanes {
		for _, n := range p.NICs {
			if len(l.NICs) == 0 || n.Name != l.NICs[0] || slices.ContainsFunc(f.Rails, func(have meeting.Rail) bool { return have.NIC == n.Name }) {
				continue
			}
			one := meeting.Rail{Rail: l.Rail, NIC: n.Name, Gbps: n.RateGbps()}
			if len(n.Ports) > 0 {
				one.LinkLayer = n.Ports[0].LinkLayer
			}
			f.Rails = append(f.Rails, one)
		}
	}
	return f, nil
}

// chosenAddresses are those that relays use, as the hook chooses them.
func chosenAddresses(c config.Network, all []address.Interface) ([]address.Chosen, error) {
	if c.Listen == config.ListenOff {
		return nil, fmt.Errorf("network.listen in config.toml is off")
	}
	if c.Address != "" {
		for _, i := range all {
			for _, at := range i.Addresses {
				if at.WithZone("").String() == c.Address || at.String() == c.Address {
					return []address.Chosen{{Interface: i.Name, Address: at}}, nil
				}
			}
		}
		return nil, fmt.Errorf("network.address is %s, and no interface of this host has it", c.Address)
	}
	list, err := address.ParseInterfaces(c.Interfaces)
	if err != nil {
		return nil, err
	}
	return list.Choose(all, address.Family(c.Family))
}

// netNumber is a number of /sys/class/net/NAME; 0 where there is none.
func (h *Host) netNumber(name, attribute string) int {
	text, err := read(h.sys("class/net", name, attribute))
	if err != nil {
		return 0 // speed fails with EINVAL on a link that is down, or virtual
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}
