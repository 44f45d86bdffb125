//go:build !front

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/cmd/peerlane/doctor/meeting"
	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/network/address"
)

// cluster returns this host's side of a meeting, and its facts. Each meeting reads the key file
// again, like relays during a rotation. If that fails, the meeting uses the last valid keys.
func (a *app) cluster(h *doctor.Host) (meeting.Side, meeting.Facts, error) {
	c, err := config.Load(a.layout.ConfigFile())
	if err != nil {
		return meeting.Side{}, meeting.Facts{}, err
	}
	path := cmp.Or(c.Network.Key, a.layout.ClusterKey())
	keys, err := readKeys(path)
	if err != nil {
		return meeting.Side{}, meeting.Facts{}, err
	}
	name, err := os.Hostname()
	if err != nil {
		name = "a host without a name"
	}
	var last atomic.Pointer[network.Keys]
	last.Store(keys)
	var unreadable atomic.Bool // warn once: any unauthenticated peer can cause a read
	side := meeting.Side{Name: name, Keys: func() network.Keys {
		if now, err := readKeys(path); err == nil {
			last.Store(now)
			unreadable.Store(false)
		} else if !unreadable.Swap(true) {
			a.log.WithError(err).Warn("the cluster key cannot be read again; the one before is used")
		}
		return *last.Load()
	}}
	if side.Certificates, err = certificates(c.Network); err != nil {
		return side, meeting.Facts{}, err
	}
	all, err := address.Host()
	if err != nil {
		return side, meeting.Facts{}, err
	}
	facts, err := h.Facts(name, version.Get().Version, *keys, all)
	return side, facts, err
}

// certificates returns the TLS files of the configuration, or nil if none are configured.
func certificates(c config.Network) (*network.Certificates, error) {
	if c.TLSKey == "" {
		return nil, nil
	}
	var err error
	var list network.Certificates
	if list.Key, err = paths.ReadSecret(c.TLSKey, launch.MaxSecret); err != nil {
		return nil, fmt.Errorf("network.tls_key: %w", err)
	}
	if list.Certificate, err = os.ReadFile(c.TLSCertificate); err != nil {
		return nil, fmt.Errorf("network.tls_certificate: %w", err)
	}
	if list.Authority, err = os.ReadFile(c.TLSAuthority); err != nil {
		return nil, fmt.Errorf("network.tls_authority: %w", err)
	}
	return &list, nil
}

// doctorPort returns the default port of the doctor: the last port of the relays' range, because
// firewalls admit that range.
func (a *app) doctorPort() (uint16, error) {
	c, err := config.Load(a.layout.ConfigFile())
	if err != nil {
		return 0, err
	}
	ports, err := address.ParsePorts(c.Network.Ports)
	return ports.Last, err
}

// meetings returns the meetings with the named hosts.
func (a *app) meetings(ctx context.Context, h *doctor.Host, names []string) (*doctor.Meetings, error) {
	port, err := a.doctorPort()
	if err != nil {
		return nil, err
	}
	m := &doctor.Meetings{Meet: meeting.Meet}
	m.Side, m.Ours, m.NoSide = a.cluster(h)
	for _, name := range names {
		o := doctor.Other{Name: name}
		o.Addresses, o.Err = resolve(ctx, name, port)
		m.Others = append(m.Others, o)
	}
	return m, nil
}

// resolve returns the addresses of HOST, HOST:PORT or [ADDRESS]:PORT, at least one.
func resolve(ctx context.Context, name string, port uint16) ([]netip.AddrPort, error) {
	if at, err := netip.ParseAddrPort(name); err == nil {
		return []netip.AddrPort{at}, nil
	}
	if at, err := netip.ParseAddr(name); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(at, port)}, nil
	}
	host := name
	if h, p, err := net.SplitHostPort(name); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("%q is not a port", p)
		}
		host, port = h, uint16(n)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("resolve the name: %w", err)
	}
	var all []netip.AddrPort
	for _, at := range found {
		all = append(all, netip.AddrPortFrom(at.Unmap(), port))
	}
	return all, nil
}

// maxRefused limits the log lines about refused doctors: an unauthenticated peer can connect any
// number of times.
const maxRefused = 10

// serveDoctor answers doctors of other hosts until ctx ends.
func (a *app) serveDoctor(ctx context.Context, h *doctor.Host, at string) error {
	side, facts, err := a.cluster(h)
	if err != nil {
		return asRoot(fmt.Errorf("listen for doctors of other hosts: %w", err))
	}
	port, err := a.doctorPort()
	if err != nil {
		return err
	}
	address, err := servedAt(ctx, at, port, facts)
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address.String())
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf(
			"listen for doctors of other hosts: %v is in use; choose another port with --serve ADDRESS:PORT", address)
	}
	if err != nil {
		return fmt.Errorf("listen for doctors of other hosts: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	a.out.Printf("On other hosts, until this one is interrupted: peerlane doctor --connect %v\n", listener.Addr())
	var refused atomic.Int32
	return meeting.Serve(listener, side, func() meeting.Facts {
		facts := facts
		facts.Keys = doctor.KeyIDs(side.Keys())
		return facts
	}, func(from net.Addr, err error) {
		if !network.Left(err) && refused.Add(1) <= maxRefused {
			a.log.WithField("from", from).WithError(err).Warn("another host's doctor was not answered")
		}
	})
}

// servedAt returns the address to listen on: at, or the best address of the relays.
func servedAt(ctx context.Context, at string, port uint16, facts meeting.Facts) (netip.AddrPort, error) {
	if at != serveAuto {
		all, err := resolve(ctx, at, port)
		if err != nil {
			return netip.AddrPort{}, err
		}
		return all[0], nil
	}
	for _, i := range facts.Interfaces {
		for _, text := range i.Addresses {
			if a, err := netip.ParseAddr(text); err == nil && !a.IsLinkLocalUnicast() {
				return netip.AddrPortFrom(a, port), nil
			}
		}
	}
	return netip.AddrPort{}, fmt.Errorf("listen for doctors of other hosts: %s; name an address with --serve ADDRESS",
		cmp.Or(facts.Why, "relays use no address"))
}

// serveAuto is the value of --serve without an address.
const serveAuto = "auto"

// untilInterrupted returns a context that ends with SIGINT or SIGTERM.
func untilInterrupted(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
}
