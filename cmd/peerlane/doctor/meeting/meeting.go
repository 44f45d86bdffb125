// Package meeting connects the doctors of two hosts with the handshake of relays, on a port of the
// relays' range, so that a failure shows the obstacles for relays. A peer without the cluster key
// receives no data. Only certificates encrypt the data after the handshake; the data are facts of
// the host, which are not secret.
//
// The connecting side sends one-byte requests, and the other side answers:
//
//	c  →  8 bytes: its clock, nanoseconds since 1970, little-endian
//	f  →  4 bytes: how many follow, and its Facts as JSON
//	b and bulkBytes  →  bulkBytes
package meeting

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

// version is the version of this protocol. Facts have the versions of the protocol between relays.
const version = 2

// target addresses a doctor. No relay's listener has this name, so a relay refuses it.
var target = network.Target{Host: wire.UUID([]byte("peerlane doctor ")), Token: wire.UUID([]byte("peerlane doctor "))}

const (
	// Each side sends bulkBytes to test whether full packets arrive.
	bulkBytes = 1 << 20
	// stepTimeout limits an answer, and bulkTimeout the transfer of bulkBytes.
	stepTimeout = 3 * time.Second
	bulkTimeout = 8 * time.Second
	// meetTimeout limits a meeting, below the time limit of a check.
	meetTimeout = 18 * time.Second
	// readings is the number of readings of the clock; the reading with the shortest round trip
	// counts.
	readings = 8
	// guests is the maximum number of connected doctors, and guestTimeout limits a connection.
	guests       = 16
	guestTimeout = time.Minute
)

// Side is this host's side of a meeting.
type Side struct {
	Name string
	Keys func() network.Keys
	// Certificates are the certificates of the configuration; nil without certificates.
	Certificates *network.Certificates
	// bulkTimeout replaces the constant, unless it is 0.
	bulkTimeout time.Duration
}

func (s Side) local() (*network.Local, error) {
	l := &network.Local{Host: target.Host, Name: s.Name, Oldest: version, Newest: version, Keys: s.Keys}
	if s.Certificates == nil {
		return l, nil
	}
	var err error
	l.TLS, err = network.LoadTLS(*s.Certificates)
	return l, err
}

// Serve answers doctors of other hosts until the listener closes. It calls refused for every
// failed meeting.
func Serve(listener net.Listener, side Side, facts func() Facts, refused func(net.Addr, error)) error {
	local, err := side.local()
	if err != nil {
		return err
	}
	room := make(chan struct{}, guests)
	server := &network.Server{
		Local: local,
		Admit: func(g network.Greeting) error {
			if g.Target != target || g.Joined != nil {
				return wire.Errorf(wire.StatusBadHandle, "%s asks for another listener than a doctor", g.Name)
			}
			return nil
		},
		Accept: func(s *network.Session) {
			select {
			case room <- struct{}{}:
			default:
				s.Conn.Close()
				refused(s.Conn.RemoteAddr(), fmt.Errorf("%d doctors are here already", guests))
				return
			}
			go func() {
				defer func() { <-room }()
				defer s.Conn.Close()
				if err := answer(s.Conn, facts); err != nil {
					refused(s.Conn.RemoteAddr(), err)
				}
			}()
		},
		Refused: refused,
	}
	server.Serve(listener)
	return nil
}

// answer handles the requests of a doctor until the doctor disconnects.
func answer(conn net.Conn, facts func() Facts) error {
	if err := conn.SetDeadline(time.Now().Add(guestTimeout)); err != nil {
		return err
	}
	bulk := make([]byte, 64<<10)
	for question := make([]byte, 1); ; {
		if _, err := io.ReadFull(conn, question); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		var reply []byte
		switch question[0] {
		case 'c':
			reply = binary.LittleEndian.AppendUint64(nil, uint64(time.Now().UnixNano()))
		case 'f':
			text, err := facts().text()
			if err != nil {
				return err
			}
			reply = append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...)
		case 'b':
			if _, err := io.CopyBuffer(io.Discard, onlyReader{io.LimitReader(conn, bulkBytes)}, bulk); err != nil {
				return err
			}
			reply = make([]byte, bulkBytes)
		default:
			return fmt.Errorf("a doctor asks for %q, which this version does not know", question)
		}
		if _, err := conn.Write(reply); err != nil {
			return err
		}
	}
}

// onlyReader hides ReadFrom and WriteTo, which would bypass the buffer of io.CopyBuffer.
type onlyReader struct{ io.Reader }

// Meeting is the result of a meeting.
type Meeting struct {
	// At is the address of the other doctor, and Peer its name.
	At   netip.AddrPort
	Peer string
	// Connected reports that a TCP connection was established.
	Connected bool
	// Err is the reason why Theirs is missing; nil on success.
	Err    error
	Theirs Facts
	// Proven reports that the peer has the cluster key.
	Proven bool
	// Offset is the peer's clock minus the local clock, and Uncertainty the maximum error: half the
	// round trip.
	Offset, Uncertainty time.Duration
	// Ours is the local address of the connection.
	Ours netip.Addr
	// PathMTU is the path MTU that the kernel has discovered, in bytes; 0 if unknown.
	PathMTU int
	// Stuck is the error of the transfer of bulkBytes; nil on success,
	// os.ErrDeadlineExceeded for late bytes.
	Stuck error
}

// Meet meets the doctor at the first address that answers, within meetTimeout.
func Meet(ctx context.Context, side Side, at []netip.AddrPort) Meeting {
	ctx, cancel := context.WithTimeout(ctx, meetTimeout)
	defer cancel()
	m := Meeting{At: at[0]}
	local, err := side.local()
	if err != nil {
		m.Err = err
		return m
	}
	var connected atomic.Bool // the dialer tries several addresses in parallel
	local.Connect = func(ctx context.Context, to netip.AddrPort, _ string) (net.Conn, error) {
		conn, err := (&net.Dialer{Timeout: stepTimeout}).DialContext(ctx, "tcp", to.String())
		if err == nil {
			connected.Store(true)
		}
		return conn, err
	}
	session, err := local.Dial(ctx, target, at)
	m.Connected = connected.Load()
	if err != nil {
		// Only a host with the cluster key sends these statuses.
		m.Proven = wire.StatusOf(err) == wire.StatusBadHandle || wire.StatusOf(err) == wire.StatusVersion ||
			wire.StatusOf(err) == wire.StatusUnreachable
		m.Err = err
		return m
	}
	defer session.Conn.Close()
	stop := context.AfterFunc(ctx, func() { session.Conn.Close() })
	defer stop()
	m.Proven, m.Peer = true, session.Peer
	if theirs, ok := session.Conn.RemoteAddr().(*net.TCPAddr); ok {
		to := theirs.AddrPort()
		m.At = netip.AddrPortFrom(to.Addr().Unmap().WithZone(""), to.Port())
	}
	if ours, ok := session.Conn.LocalAddr().(*net.TCPAddr); ok {
		m.Ours = ours.AddrPort().Addr().Unmap().WithZone("")
	}
	m.Err = m.ask(session.Conn, side)
	return m
}

func (m *Meeting) ask(conn net.Conn, side Side) error {
	m.Uncertainty = time.Duration(1<<63 - 1)
	for range readings {
		begun := time.Now()
		reply, err := exchange(conn, []byte{'c'}, 8, stepTimeout)
		if err != nil {
			return fmt.Errorf("request the clock: %w", err)
		}
		took := time.Since(begun)
		if half := took / 2; half < m.Uncertainty {
			theirs := time.Unix(0, int64(binary.LittleEndian.Uint64(reply)))
			m.Offset, m.Uncertainty = theirs.Sub(begun.Add(half).Round(0)), half
		}
	}
	length, err := exchange(conn, []byte{'f'}, 4, stepTimeout)
	if err != nil {
		return fmt.Errorf("request the facts: %w", err)
	}
	n := binary.LittleEndian.Uint32(length)
	if n > maxFacts {
		return &sizeError{int(n)}
	}
	text, err := exchange(conn, nil, int(n), stepTimeout)
	if err != nil {
		return fmt.Errorf("request the facts: %w", err)
	}
	if m.Theirs, err = parseFacts(text); err != nil {
		return err
	}
	timeout := side.bulkTimeout
	if timeout == 0 {
		timeout = bulkTimeout
	}
	_, err = exchange(conn, append([]byte{'b'}, make([]byte, bulkBytes)...), bulkBytes, timeout)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		m.Stuck = fmt.Errorf("1 MiB in each direction did not arrive within %v: %w", timeout, err)
	case err != nil:
		m.Stuck = fmt.Errorf("transfer 1 MiB in each direction: %w", err)
	}
	m.PathMTU = pathMTU(conn)
	return nil
}

// exchange sends a question and reads an answer of n bytes.
func exchange(conn net.Conn, question []byte, n int, limit time.Duration) ([]byte, error) {
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return nil, err
	}
	if _, err := conn.Write(question); err != nil {
		return nil, err
	}
	reply := make([]byte, n)
	_, err := io.ReadFull(conn, reply)
	return reply, err
}

// pathMTU returns tcpi_pmtu (tcp(7), TCP_INFO).
func pathMTU(conn net.Conn) int {
	if inner, ok := conn.(interface{ NetConn() net.Conn }); ok { // a TLS connection
		conn = inner.NetConn()
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return 0
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0
	}
	mtu := 0
	err = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			mtu = int(info.Pmtu)
		}
	})
	if err != nil {
		return 0
	}
	return mtu
}
