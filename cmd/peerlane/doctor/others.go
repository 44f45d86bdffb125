package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor/meeting"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

// Others returns the checks of `peerlane doctor --connect`, which involve another host.
func Others() []Check { return slices.Clone(otherChecks) }

const otherHosts = "other hosts"

var otherChecks = []Check{
	{
		Name: "reached", subject: otherHosts,
		source: "a connection to the other host's doctor (peerlane doctor --serve), by TCP, on a port of the relays' range",
		why:    "relays connect in the same way",
		remedy: "run peerlane doctor --serve there; let network.ports through every firewall between the hosts; ip route " +
			"get ADDRESS shows the route of the packets",
		run: each(checkReached),
	},
	{
		Name: "cluster-keys", subject: otherHosts,
		source: "the handshake by which relays of two hosts prove the cluster key, and the ids of the keys on both " +
			"(peerlane key show)",
		why: "relays with different keys refuse connections silently",
		remedy: "compare peerlane key show on both hosts; copy /etc/peerlane/cluster.key of one host to the other, as " +
			"root, mode 600",
		run: each(checkKeys),
	},
	{
		Name: "certificates", subject: otherHosts,
		source: "whether both hosts have network.tls_certificate, and trust each other's certificate",
		why:    "relays with certificates and relays without certificates refuse connections",
		remedy: "give every host a certificate of the same authority, or no host: network.tls_certificate, " +
			"tls_key and " +
			"tls_authority in config.toml",
		run: each(checkCertificates),
	},
	{
		Name: "protocol", subject: otherHosts,
		source: "the versions of the protocol between relays that the releases on both hosts speak",
		why:    "relays without a common version refuse connections",
		remedy: "install the same release on both hosts",
		run:    each(checkProtocol),
	},
	{
		Name: "clock-skew", subject: otherHosts,
		source: "both hosts' clocks, read eight times over the connection",
		why:    "certificates and logs depend on the clocks",
		remedy: "synchronize both clocks with the same source: systemctl enable --now chronyd, or systemd-timesyncd; " +
			"chronyc tracking shows the difference",
		run: each(checkClock),
	},
	{
		Name: "ports", subject: otherHosts,
		source: "network.ports on both hosts",
		why:    "relays connect only to ports of the configured range",
		remedy: "set the same network.ports in /etc/peerlane/config.toml of every host",
		run:    each(checkPorts),
	},
	{
		Name: "interfaces", subject: otherHosts,
		source: "the interfaces and addresses that relays use on both hosts (network.interfaces, network.family)",
		why:    "relays connect by addresses of a family that both hosts have",
		remedy: "set network.interfaces and network.family so that both hosts have addresses of the same network",
		run:    each(checkInterfaces),
	},
	{
		Name: "mtu", subject: otherHosts,
		source: "the MTU of the interfaces at both ends of the connection, that of the path (TCP_INFO), and 1 MiB " +
			"per direction",
		why: "if full packets do not pass, short messages arrive and long messages hang",
		remedy: "ip link set NETDEV mtu N, the same on both hosts and on every switch port between the hosts; tracepath " +
			"ADDRESS shows where it changes",
		run: each(checkMTU),
	},
	{
		Name: "rails", subject: otherHosts,
		source: "the NICs that relays of both hosts use, by rail number (network.rails, plan.rails), and their link layer",
		why:    "hosts that number NICs differently cross switches; InfiniBand does not reach Ethernet",
		remedy: "number the NICs alike by network.rails or plan.rails in config.toml of both hosts, and use one kind of " +
			"link",
		run: each(checkRails),
	},
	{
		Name: "link-rate", subject: otherHosts,
		source: "the rate of the NICs per rail, and of the interfaces of the connection, on both hosts",
		why:    "the slower end limits a transfer, and the slowest host a job",
		remedy: "check the cable, the transceiver and the switch port at the slower end; peerlane doctor there has " +
			"the check port-rate",
		run: each(checkLinkRate),
	},
}

// Other is another host to connect to.
type Other struct {
	Name string
	// Addresses are the candidate addresses of the host's doctor; the first that answers counts.
	// Err is the reason for an empty list.
	Addresses []netip.AddrPort
	Err       error
}

// Meetings are the connections to other hosts. The first check that uses them connects.
type Meetings struct {
	Others []Other
	// Ours are this host's facts, and Side is its side of a meeting. NoSide is the reason for a
	// missing Side, such as a missing cluster key.
	Ours   meeting.Facts
	Side   meeting.Side
	NoSide error
	// Meet is usually meeting.Meet.
	Meet func(context.Context, meeting.Side, []netip.AddrPort) meeting.Meeting

	once sync.Once
	held []meeting.Meeting
	done chan struct{}
}

// hold connects to every other host concurrently.
func (m *Meetings) hold(ctx context.Context) ([]meeting.Meeting, error) {
	m.once.Do(func() {
		m.done = make(chan struct{})
		m.held = make([]meeting.Meeting, len(m.Others))
		go func() {
			defer close(m.done)
			var all sync.WaitGroup
			for i, o := range m.Others {
				all.Go(func() {
					if o.Err == nil {
						m.held[i] = m.Meet(context.WithoutCancel(ctx), m.Side, o.Addresses)
					}
				})
			}
			all.Wait()
		}()
	})
	select {
	case <-m.done:
		return m.held, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// each returns a check that calls look for the meeting with every other host.
func each(look func(ours meeting.Facts, o Other, m meeting.Meeting) Finding) func(context.Context, *Host) []Finding {
	return func(ctx context.Context, h *Host) (list []Finding) {
		if h.Meetings == nil {
			return []Finding{unknown("host", "no other host is named").remedy("peerlane doctor --connect HOST")}
		}
		if err := h.Meetings.NoSide; err != nil {
			return []Finding{unknown("host", "without a cluster key this host can meet no other: %s",
				denied(err)).remedy("peerlane key generate, or copy the cluster's, as root; see docs/network.md")}
		}
		held, err := h.Meetings.hold(ctx)
		if err != nil {
			return []Finding{unknown("host", "the other hosts gave no answer in time")}
		}
		for i, o := range h.Meetings.Others {
			f := look(h.Meetings.Ours, o, held[i])
			f.On = o.Name
			list = append(list, f)
		}
		return list
	}
}

// unmet returns the finding of the other checks if the host was unreachable.
func unmet(m meeting.Meeting) Finding {
	return unknown("", "host unreachable").remedy("see the checks reached, cluster-keys and certificates")
}

func checkReached(_ meeting.Facts, o Other, m meeting.Meeting) Finding {
	switch {
	case o.Err != nil:
		return failure("", "%v", o.Err)
	case !m.Connected && m.Err != nil:
		return failure("", "%s", oneLine(m.Err))
	case m.Err != nil && m.Proven && wire.StatusOf(m.Err) == wire.StatusBadHandle:
		return unknown("", "a relay answers at %v, and no doctor",
			m.At).remedy("connect to the address that peerlane doctor --serve prints there")
	case m.Err != nil && m.Proven && wire.StatusOf(m.Err) != wire.StatusVersion &&
		wire.StatusOf(m.Err) != wire.StatusUnreachable:
		return failure("", "%s", oneLine(m.Err))
	}
	return ok("", "it answers at %v", m.At)
}

func checkKeys(ours meeting.Facts, o Other, m meeting.Meeting) Finding {
	switch {
	case o.Err != nil || !m.Connected:
		return unknown("", "it was not reached").remedy("see the check reached")
	case errors.Is(m.Err, network.ErrSilent):
		return failure("", "it closed the connection without a word: it has not %s, or no room for now",
			strings.Join(ours.Keys, " and not "))
	case m.Err != nil && !m.Proven:
		return failure("", "%s", oneLine(m.Err))
	case m.Err != nil:
		return ok("", "it has the cluster key")
	case len(ours.Keys) == 0 || len(m.Theirs.Keys) == 0:
		return unknown("", "it does not say which keys it has")
	case ours.Keys[0] != m.Theirs.Keys[0]:
		return warning("", "here %s is in use, and there %s: a rotation is under way", ours.Keys[0], m.Theirs.Keys[0]).
			remedy("copy the newer cluster.key to the host that has the older one; then peerlane key rotate --finish on each")
	case len(ours.Keys) != len(m.Theirs.Keys):
		return warning("", "both use %s, and one of them still believes the key before it",
			ours.Keys[0]).remedy("peerlane key rotate --finish on the host where a rotation is under way (peerlane key show)")
	}
	return ok("", "both use %s", ours.Keys[0])
}

func checkCertificates(ours meeting.Facts, o Other, m meeting.Meeting) Finding {
	switch {
	case o.Err != nil || !m.Connected || errors.Is(m.Err, network.ErrSilent):
		return unmet(m)
	case m.Err != nil && (wire.StatusOf(m.Err) == wire.StatusUnreachable || ours.TLS && !m.Proven):
		return failure("", "%s", oneLine(m.Err))
	case m.Err != nil:
		return unmet(m)
	case ours.TLS:
		return ok("", "both have certificates, and believe each other's")
	}
	return ok("", "neither has any")
}

func checkProtocol(ours meeting.Facts, _ Other, m meeting.Meeting) Finding {
	if m.Err != nil && wire.StatusOf(m.Err) == wire.StatusVersion {
		return failure("", "the doctors have no common version: %s", oneLine(m.Err))
	}
	if m.Peer == "" || m.Err != nil {
		return unmet(m)
	}
	if min(ours.Newest, m.Theirs.Newest) < max(ours.Oldest, m.Theirs.Oldest) {
		return failure("", "%s there speaks versions %d to %d, and %s here %d to %d", m.Theirs.Release, m.Theirs.Oldest,
			m.Theirs.Newest, ours.Release, ours.Oldest, ours.Newest)
	}
	return ok("", "version %d, of %s there and %s here", min(ours.Newest, m.Theirs.Newest), m.Theirs.Release, ours.Release)
}

// maxSkew is the maximum difference between two clocks.
const maxSkew = time.Second

func checkClock(_ meeting.Facts, _ Other, m meeting.Meeting) Finding {
	if m.Peer == "" || m.Err != nil {
		return unmet(m)
	}
	off := m.Offset.Abs().Round(time.Millisecond / 10)
	unsure := m.Uncertainty.Round(time.Millisecond / 10)
	switch {
	case m.Offset.Abs()-m.Uncertainty > maxSkew:
		return warning("", "its clock is %v %s this one, give or take %v", off,
			map[bool]string{true: "ahead of", false: "behind"}[m.Offset > 0], unsure)
	case m.Uncertainty > maxSkew:
		return unknown("", "its answers take %v, too long to tell", 2*unsure)
	}
	return ok("", "the clocks are %v apart, give or take %v", off, unsure)
}

func checkPorts(ours meeting.Facts, _ Other, m meeting.Meeting) Finding {
	if m.Peer == "" || m.Err != nil {
		return unmet(m)
	}
	if ours.Ports != m.Theirs.Ports {
		return failure("", "network.ports is %s here and %s there", ours.Ports, m.Theirs.Ports)
	}
	return ok("", "%s on both", ours.Ports)
}

func checkInterfaces(ours meeting.Facts, _ Other, m meeting.Meeting) Finding {
	if m.Peer == "" || m.Err != nil {
		return unmet(m)
	}
	for where, f := range map[string]meeting.Facts{"here": ours, "there": m.Theirs} {
		if len(f.Interfaces) == 0 {
			return failure("", "relays %s use no interface: %s", where, cmp.Or(f.Why, "network.listen is off"))
		}
	}
	if a, b := families(ours), families(m.Theirs); a&b == 0 {
		return failure("", "relays here have %s addresses, and there %s", familyWords[a], familyWords[b])
	}
	if found, ok := interfaceOf(ours, m.Ours); !ok {
		return warning("", "the way there leaves by %v, which is no address of an interface that relays use (%s)", m.Ours,
			found).
			remedy("ip route get %v shows the interface; name it in network.interfaces, or connect to an address in the "+
				"network of the interfaces that are used", m.At.Addr())
	}
	if found, ok := interfaceOf(m.Theirs, m.At.Addr()); !ok {
		return warning("", "%v is no address of an interface that relays use there (%s)", m.At.Addr(),
			found).remedy("connect to one of these; or set network.interfaces there")
	}
	return ok("", "%s here and %s there", interfaceNames(ours), interfaceNames(m.Theirs))
}

var familyWords = []string{"no", "IPv4", "IPv6", "both kinds of"}

// families returns the address families of the interfaces: bit 0 for IPv4 and bit 1 for IPv6.
func families(f meeting.Facts) (bits int) {
	for _, i := range f.Interfaces {
		for _, text := range i.Addresses {
			if a, err := netip.ParseAddr(text); err == nil && a.Is4() {
				bits |= 1
			} else if err == nil {
				bits |= 2
			}
		}
	}
	return bits
}

// interfaceOf returns the name of the interface with an address, or the names of every interface.
func interfaceOf(f meeting.Facts, at netip.Addr) (string, bool) {
	if i := findInterface(f, at); i != nil {
		return i.Name, true
	}
	return interfaceNames(f), false
}

func findInterface(f meeting.Facts, at netip.Addr) *meeting.Interface {
	for i, one := range f.Interfaces {
		for _, text := range one.Addresses {
			if a, err := netip.ParseAddr(text); err == nil && a.WithZone("") == at.WithZone("") {
				return &f.Interfaces[i]
			}
		}
	}
	return nil
}

func interfaceNames(f meeting.Facts) string {
	var names []string
	for _, i := range f.Interfaces {
		names = append(names, i.Name)
	}
	return strings.Join(slices.Compact(names), ", ")
}

func checkMTU(ours meeting.Facts, _ Other, m meeting.Meeting) Finding {
	if m.Peer == "" || m.Err != nil {
		return unmet(m)
	}
	local, remote := findInterface(ours, m.Ours), findInterface(m.Theirs, m.At.Addr())
	var sizes []string
	for where, i := range map[string]*meeting.Interface{"here": local, "there": remote} {
		if i != nil {
			sizes = append(sizes, fmt.Sprintf("%s has %d %s", i.Name, i.MTU, where))
		}
	}
	slices.Sort(sizes)
	sizesText := strings.Join(sizes, ", ")
	switch {
	case m.Stuck != nil && !errors.Is(m.Stuck, os.ErrDeadlineExceeded):
		return failure("", "%s", oneLine(m.Stuck)).remedy("run it again; if it fails again, look for a firewall that ends " +
			"connections, and at the messages of peerlane doctor --serve there")
	case m.Stuck != nil:
		return failure("", "%s; %s: packets of full size do not get through", oneLine(m.Stuck),
			cmp.Or(sizesText, "the ends' MTU is not known"))
	case local == nil || remote == nil:
		return unknown("", "1 MiB each way arrived; which interfaces the connection has is not known").remedy(
			"see the check interfaces")
	case local.MTU != remote.MTU:
		return warning("", "%s", sizesText)
	case m.PathMTU > 0 && m.PathMTU < local.MTU:
		return warning("", "%s, and the path between them %d", sizesText, m.PathMTU)
	}
	return ok("", "%s, and 1 MiB per direction arrived", sizesText)
}

func checkRails(ours meeting.Facts, _ Other, m meeting.Meeting) Finding {
	if m.Peer == "" || m.Err != nil {
		return unmet(m)
	}
	a, b := byRail(ours), byRail(m.Theirs)
	if len(a) == 0 && len(b) == 0 {
		return ok("", "relays of neither host have a rail")
	}
	if len(a) != len(b) {
		return warning("", "relays here have %d rails, and there %d", len(a), len(b))
	}
	var wrong []string
	for n, local := range a {
		remote, found := b[n]
		switch {
		case !found:
			wrong = append(wrong, fmt.Sprintf("rail %d (%s) is not there", n, local.NIC))
		case local.LinkLayer != remote.LinkLayer:
			return failure("", "rail %d is %s here (%s) and %s there (%s)", n, local.LinkLayer, local.NIC, remote.LinkLayer,
				remote.NIC)
		case local.NIC != remote.NIC && len(a) > 1 && !ours.Numbered && !m.Theirs.Numbered:
			wrong = append(wrong, fmt.Sprintf("rail %d is %s here and %s there", n, local.NIC, remote.NIC))
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return warning("", "%s", strings.Join(wrong, "; "))
	}
	return ok("", "%d rails on both", len(a))
}

func byRail(f meeting.Facts) map[int]meeting.Rail {
	all := map[int]meeting.Rail{}
	for _, r := range f.Rails {
		if _, found := all[r.Rail]; !found {
			all[r.Rail] = r
		}
	}
	return all
}

func checkLinkRate(ours meeting.Facts, _ Other, m meeting.Meeting) Finding {
	if m.Peer == "" || m.Err != nil {
		return unmet(m)
	}
	var wrong []string
	compared := 0
	b := byRail(m.Theirs)
	for n, local := range byRail(ours) {
		remote, found := b[n]
		if !found || local.Gbps == 0 || remote.Gbps == 0 {
			continue
		}
		if compared++; local.Gbps != remote.Gbps {
			wrong = append(wrong, fmt.Sprintf("rail %d has %g Gb/s here (%s) and %g there (%s)", n, local.Gbps, local.NIC,
				remote.Gbps, remote.NIC))
		}
	}
	local, remote := findInterface(ours, m.Ours), findInterface(m.Theirs, m.At.Addr())
	if local != nil && remote != nil && local.Mbps > 0 && remote.Mbps > 0 {
		if compared++; local.Mbps != remote.Mbps {
			wrong = append(wrong, fmt.Sprintf("%s has %d Mb/s here and %s %d there", local.Name, local.Mbps, remote.Name,
				remote.Mbps))
		}
	}
	switch {
	case len(wrong) > 0:
		slices.Sort(wrong)
		return warning("", "%s", strings.Join(wrong, "; "))
	case compared == 0:
		return unknown("",
			"the kernel tells no rate of the interfaces, as of virtual ones, and of no rail do both hosts know one")
	}
	return ok("", "the same on both")
}
