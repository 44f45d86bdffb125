package address

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

// Ports is a range of TCP ports, both ends in it.
type Ports struct{ First, Last uint16 }

// ParsePorts reads "20000-20999", or a single port, "20000".
func ParsePorts(text string) (Ports, error) {
	from, to, isRange := strings.Cut(text, "-")
	if !isRange {
		to = from
	}
	first, errFirst := strconv.ParseUint(from, 10, 16)
	last, errLast := strconv.ParseUint(to, 10, 16)
	if errFirst != nil || errLast != nil || first < 1 || last < first {
		return Ports{}, fmt.Errorf(`%q is no range of ports; "FIRST-LAST" is possible, two numbers from 1 to 65535`, text)
	}
	return Ports{uint16(first), uint16(last)}, nil
}

func (p Ports) String() string { return fmt.Sprintf("%d-%d", p.First, p.Last) }

// Count is how many ports there are.
func (p Ports) Count() int { return int(p.Last) - int(p.First) + 1 }

// takenError is the cause of a range without a free port.
type takenError struct {
	ports Ports
	at    netip.Addr
}

func (e *takenError) Error() string {
	return fmt.Sprintf("all %d ports of network.ports %v at %v are in use, and each relay takes one", e.ports.Count(),
		e.ports, e.at)
}

// Listen listens on a port of the range at an address, which may have a zone. The ports are tried
// in random order: a host has many relays, which start with the same range.
func Listen(ctx context.Context, at netip.Addr, ports Ports) (*net.TCPListener, error) {
	// Of IPv4 or IPv6 as the address says, never both at once.
	network := "tcp4"
	if at.Is6() {
		network = "tcp6"
	}
	var plain net.ListenConfig
	plain.SetMultipathTCP(false) // which a relay's sandbox denies, and the other side does not ask for
	var refused error
	for _, n := range rand.Perm(ports.Count()) {
		port := ports.First + uint16(n)
		listener, err := plain.Listen(ctx, network, netip.AddrPortFrom(at, port).String())
		switch {
		case err == nil:
			return listener.(*net.TCPListener), nil
		case errors.Is(err, unix.EACCES) && port < 1024:
			refused = err // by net.ipv4.ip_unprivileged_port_start; others may be permitted
		case !errors.Is(err, unix.EADDRINUSE):
			return nil, fmt.Errorf("listening for relays of other hosts: %w", err)
		}
	}
	if refused != nil {
		return nil, fmt.Errorf(
			"listening for relays of other hosts: no port of network.ports %v at %v is free: %w",
			ports,
			at,
			refused,
		)
	}
	return nil, &fault.Error{Code: fault.NoPort, Operation: "listening for relays of other hosts",
		Cause: &takenError{ports, at}, Remedy: "give a larger range in config.toml (ss -ltn shows who has them)"}
}
