package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor/meeting"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/hostnetwork"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
	"github.com/peerlane/peerlane/topo"
)

// Facts returns the facts that this host sends to the doctor of another host. all are the network
// interfaces of the host (address.Host).
func (h *Host) Facts(name, release string, keys network.Keys, all []address.Interface) (meeting.Facts, error) {
	c, err := h.configuration()
	if err != nil {
		return meeting.Facts{}, err
	}
	f := meeting.Facts{
		Host: name, Release: release, Oldest: wire.OldestVersion, Newest: wire.NewestVersion,
		Keys: KeyIDs(keys), TLS: c.Network.TLSCertificate != "", Ports: c.Network.Ports,
		Interfaces: []meeting.Interface{}, Rails: []meeting.Rail{},
	}
	chosen, err := chosenAddresses(c.Network, all)
	if err == nil && c.Network.Address == "" { // an explicit address is a single rail
		err = hostnetwork.SetRails(h.sys(), chosen, c.Network, c.Plan.Rails)
	}
	if err != nil {
		f.Why, chosen = err.Error(), nil
	}
	f.Numbered = len(c.Network.Rails)+len(c.Plan.Rails) > 0
	for _, at := range chosen {
		i := slices.IndexFunc(f.Interfaces, func(own meeting.Interface) bool { return own.Name == at.Interface })
		if i < 0 {
			i = len(f.Interfaces)
			f.Interfaces = append(f.Interfaces, meeting.Interface{
				Name: at.Interface, MTU: h.netNumber(at.Interface, "mtu"), Mbps: max(0, h.netNumber(at.Interface, "speed")),
			})
		}
		f.Interfaces[i].Addresses = append(f.Interfaces[i].Addresses, at.Address.WithZone("").String())
	}
	var nics []topo.NIC
	if p, err := h.readPlan(); err == nil { // a host without GPUs has a network too; other checks report the missing plan
		nics = p.NICs
	}
	for _, at := range chosen {
		name := cmp.Or(at.Device, at.Interface)
		if at.Rail == address.NoRail || slices.ContainsFunc(f.Rails,
			func(own meeting.Rail) bool { return own.NIC == name }) {
			continue
		}
		one := meeting.Rail{Rail: at.Rail, NIC: name, LinkLayer: "Ethernet",
			Gbps: float64(max(0, h.netNumber(at.Interface, "speed"))) / 1000}
		for _, n := range nics {
			if n.Name == at.Device && len(n.Ports) > 0 {
				one.LinkLayer, one.Gbps = n.Ports[0].LinkLayer, n.RateGbps()
			}
		}
		f.Rails = append(f.Rails, one)
	}
	return f, nil
}

// chosenAddresses returns the addresses of relays, chosen as the hook does.
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
		return nil, fmt.Errorf("network.address is %s, which no interface of this host has", c.Address)
	}
	list, err := address.ParseInterfaces(c.Interfaces)
	if err != nil {
		return nil, err
	}
	return list.Choose(all, address.Family(c.Family))
}

// netNumber reads a number from /sys/class/net/NAME; 0 if it is absent or invalid.
func (h *Host) netNumber(name, attribute string) int {
	text, err := read(h.sys("class/net", name, attribute))
	if err != nil {
		return 0 // speed fails with EINVAL on a virtual link or a link that is down
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// KeyIDs returns the ids of a cluster's keys, current key first.
func KeyIDs(keys network.Keys) []string {
	ids := []string{keys.Current.ID.String()}
	if keys.Previous != nil {
		ids = append(ids, keys.Previous.ID.String())
	}
	return ids
}
