package address

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/internal/fault"
)

// Interfaces is a choice of network interfaces by name. The zero value is the standard choice.
type Interfaces struct {
	named, excluded []pattern
}

type pattern struct {
	name  string
	exact bool
}

func (p pattern) matches(name string) bool {
	return name == p.name || !p.exact && strings.HasPrefix(name, p.name)
}

// maxPatterns and maxName (IFNAMSIZ of linux/if.h, less the zero) bound a list.
const (
	maxPatterns = 64
	maxName     = 15
)

// ParseInterfaces reads a list as NCCL reads NCCL_SOCKET_IFNAME: prefixes of names, with commas
// between them; "=" before the list means whole names, "^" excludes the matches, "^=" both. Beyond
// NCCL, a list without such a prefix can have the prefixes before single names: "eth,^eth9".
func ParseInterfaces(text string) (Interfaces, error) {
	var list Interfaces
	if text == "" {
		return list, nil
	}
	excludes, exact, text := modifiers(text)
	items := strings.Split(text, ",")
	if len(items) > maxPatterns {
		return list, fmt.Errorf("%d interfaces are listed; up to %d are possible", len(items), maxPatterns)
	}
	for n, item := range items {
		no, whole, name := modifiers(item)
		if n == 0 && (no || whole) || name == "" || len(name) > maxName ||
			strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("^=/:", r) }) {
			return Interfaces{}, fmt.Errorf(
				`%q is no interface's name or the beginning of one; a list looks like "eth,ib", "=ens1f0" or "^docker"`,
				item,
			)
		}
		p := pattern{name, exact || whole}
		if excludes || no {
			list.excluded = append(list.excluded, p)
		} else {
			list.named = append(list.named, p)
		}
	}
	return list, nil
}

// modifiers takes "^", "=" or both off the front of a text.
func modifiers(text string) (excludes, exact bool, rest string) {
	rest, excludes = strings.CutPrefix(text, "^")
	rest, exact = strings.CutPrefix(rest, "=")
	return excludes, exact, rest
}

// Interface is a network interface of a host.
type Interface struct {
	Name         string
	Up, Loopback bool
	// Link-local IPv6 addresses have the interface's name as the zone.
	Addresses []netip.Addr
}

// Host reads this host's interfaces (rtnetlink), in the order of the kernel's numbers.
func Host() ([]Interface, error) {
	found, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("reading the network interfaces: %w", err)
	}
	slices.SortFunc(found, func(a, b net.Interface) int { return cmp.Compare(a.Index, b.Index) })
	var all []Interface
	for _, i := range found {
		one := Interface{Name: i.Name, Up: i.Flags&net.FlagUp != 0, Loopback: i.Flags&net.FlagLoopback != 0}
		addresses, err := i.Addrs()
		if err != nil {
			continue // it went meanwhile
		}
		for _, a := range addresses {
			n, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			at, ok := netip.AddrFromSlice(n.IP)
			if !ok {
				continue
			}
			if at = at.Unmap(); at.Is6() && at.IsLinkLocalUnicast() {
				at = at.WithZone(i.Name)
			}
			one.Addresses = append(one.Addresses, at)
		}
		all = append(all, one)
	}
	return all, nil
}

// Family is which addresses are used.
type Family string

// Families.
const (
	FamilyAuto Family = "auto" // both, IPv4 first
	FamilyIPv4 Family = "ipv4"
	FamilyIPv6 Family = "ipv6"
)

func (f Family) allows(a netip.Addr) bool {
	switch f {
	case FamilyIPv4:
		return a.Is4()
	case FamilyIPv6:
		return a.Is6()
	}
	return true
}

// Chosen is an address for relays, with the interface.
type Chosen struct {
	Interface string
	Address   netip.Addr
	// Rail is the number of the network in the cluster, from 0: NICs of the same rail have the best
	// paths. NoRail is none.
	Rail int
	// Device is the RDMA device of the interface; empty without a device.
	Device string `json:",omitempty"`
}

// NoRail is the rail of an address that is on none.
const NoRail = -1

// Used only by name, as in NCCL: bridges of containers and of virtual machines, whose addresses
// every host has.
var bridges = []string{"docker", "virbr"}

// passedError is the cause of a host without a usable interface.
type passedError struct{ interfaces []string } // "NAME: reason" each

func (e *passedError) Error() string { return cmp.Or(strings.Join(e.interfaces, "; "), "it has none") }

// Choose lists the addresses to use, the best first: of the listed interfaces that are up, in the
// list's order; addresses of an interface are in the kernel's order. Without a listed name the
// interfaces are the rest without excluded names, loopback, docker* and virbr*, and ib* comes
// first. IPv4 precedes IPv6 in an interface, and link-local addresses are last. If no interface
// matches, the error lists the interfaces.
func (l Interfaces) Choose(all []Interface, f Family) ([]Chosen, error) {
	type ranked struct {
		Chosen
		place, kind int
	}
	var found []ranked
	var passed []string
	for _, i := range all {
		place, why := l.place(i)
		if why == "" && !i.Up {
			why = "down"
		}
		if why != "" {
			passed = append(passed, i.Name+": "+why)
			continue
		}
		before := len(found)
		for _, a := range i.Addresses {
			if kind, ok := kindOf(a); ok && f.allows(a) {
				found = append(found, ranked{Chosen{Interface: i.Name, Address: a}, place, kind})
			}
		}
		if len(found) == before {
			passed = append(passed, fmt.Sprintf("%s: no address of network.family %s", i.Name, cmp.Or(f, FamilyAuto)))
		}
	}
	if len(found) == 0 {
		return nil, &fault.Error{Code: fault.NoInterface, Operation: "no network interface of this host is usable by relays",
			Cause: &passedError{passed}, Remedy: "set network.interfaces or network.family in config.toml"}
	}
	// Interfaces of equal rank keep the order, and stay together.
	order := map[string]int{}
	for n, i := range all {
		order[i.Name] = n
	}
	slices.SortStableFunc(found, func(a, b ranked) int {
		return cmp.Or(
			cmp.Compare(a.place, b.place),
			cmp.Compare(order[a.Interface], order[b.Interface]),
			cmp.Compare(a.kind, b.kind),
		)
	})
	chosen := make([]Chosen, len(found))
	for n, r := range found {
		chosen[n] = r.Chosen
	}
	return chosen, nil
}

// place is the position of an interface in the list, or the reason of its absence.
func (l Interfaces) place(i Interface) (int, string) {
	matches := func(p pattern) bool { return p.matches(i.Name) }
	if slices.ContainsFunc(l.excluded, matches) {
		return 0, "excluded by network.interfaces"
	}
	if len(l.named) > 0 {
		if place := slices.IndexFunc(l.named, matches); place >= 0 {
			return place, ""
		}
		return 0, "not in network.interfaces"
	}
	if i.Loopback {
		return 0, "loopback, which has to be named"
	}
	for _, b := range bridges {
		if strings.HasPrefix(i.Name, b) {
			return 0, "a bridge, which has to be named"
		}
	}
	if strings.HasPrefix(i.Name, "ib") {
		return 0, ""
	}
	return 1, ""
}

// kindOf returns the rank of an address, 0 best, and whether the address is usable.
func kindOf(a netip.Addr) (int, bool) {
	switch {
	case !Usable(a):
		return 0, false
	case a.IsLinkLocalUnicast() && a.Is4():
		return 2, true
	case a.IsLinkLocalUnicast():
		return 3, a.Zone() != ""
	case a.Is6():
		return 1, true
	}
	return 0, true
}

// Usable reports whether a host can have the address. With a zone, :: is not unspecified for netip.
func Usable(a netip.Addr) bool {
	return a.IsValid() && !a.WithZone("").IsUnspecified() && !a.IsMulticast()
}
