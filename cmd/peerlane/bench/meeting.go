package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

// Port is the default port of a listening bench, below the ports of relays.
const Port = 19999

// meetingVersion is the version of the protocol between two benches.
const meetingVersion = 2

// meetingPlace addresses a listening bench. No host of a relay has this name, so a relay and a
// bench cannot be confused. A name has 16 bytes.
var meetingPlace = network.Target{Host: wire.UUID([]byte("peerlane bench 1")),
	Token: wire.UUID([]byte("the only listene"))}

// vanished is the time without an acknowledgement after which the other host counts as dead.
const vanished = 15 * time.Second

// CanMeet returns the reason why this host cannot connect to other hosts: an error of the cluster
// key or of the certificates.
func CanMeet(n config.Network) error {
	_, err := local(n)
	return err
}

// local returns this bench's side of the handshake, with the cluster key and the certificates of
// the configuration.
func local(n config.Network) (*network.Local, error) {
	text, err := paths.ReadSecret(n.Key, network.MaxKeyFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil, &fault.Error{Code: fault.NoClusterKey, Operation: "read the cluster key", Object: n.Key,
			Cause:  os.ErrNotExist,
			Remedy: "run peerlane key generate on one host, and copy the file to the other host"}
	}
	if err != nil {
		return nil, fmt.Errorf("cluster key: %w", err)
	}
	keys, err := network.ParseKeys(text)
	if err != nil {
		return nil, fmt.Errorf("cluster key %s: %w", n.Key, err)
	}
	l := &network.Local{
		// The other bench accepts only the first connection: try one address at a time.
		Delay: 2 * network.HandshakeTime,
		Host:  meetingPlace.Host, Name: hostname() + ", peerlane bench", Oldest: meetingVersion, Newest: meetingVersion,
		Keys: func() network.Keys { return keys },
		Connect: func(ctx context.Context, to netip.AddrPort, _ string) (net.Conn, error) {
			dialer := net.Dialer{Timeout: network.HandshakeTime, Control: noticeTheEnd, KeepAliveConfig: keepAlive}
			return dialer.DialContext(ctx, "tcp", to.String())
		},
	}
	if n.TLSKey == "" {
		return l, nil
	}
	var c network.Certificates
	if c.Key, err = paths.ReadSecret(n.TLSKey, launch.MaxSecret); err != nil {
		return nil, fmt.Errorf("network.tls_key: %w", err)
	}
	if c.Certificate, err = os.ReadFile(n.TLSCertificate); err != nil {
		return nil, fmt.Errorf("network.tls_certificate: %w", err)
	}
	if c.Authority, err = os.ReadFile(n.TLSAuthority); err != nil {
		return nil, fmt.Errorf("network.tls_authority: %w", err)
	}
	l.TLS, err = network.LoadTLS(c)
	return l, err
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "an unnamed host"
	}
	return name
}

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: vanished / 3, Interval: vanished / 3, Count: 2}

// noticeTheEnd limits the time for which data may be unacknowledged. Keep-alives watch an idle
// connection.
func noticeTheEnd(_, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(vanished.Milliseconds()))
	})
	return errors.Join(err, failed)
}

// addresses resolves HOST or HOST:PORT.
func addresses(ctx context.Context, to string) ([]netip.AddrPort, error) {
	host, port, err := hostAndPort(to)
	if err != nil {
		return nil, err
	}
	if host == "" {
		return nil, fmt.Errorf("%q is not a host", to)
	}
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	var list []netip.AddrPort
	for _, at := range found {
		list = append(list, netip.AddrPortFrom(at.Unmap(), port))
	}
	return list, nil
}

// hostAndPort parses HOST, HOST:PORT, :PORT, an IPv6 address with or without brackets, or an empty
// text.
func hostAndPort(text string) (host string, port uint16, err error) {
	if _, err := netip.ParseAddr(text); err == nil || !strings.Contains(text, ":") {
		return text, Port, nil
	}
	host, number, err := net.SplitHostPort(text)
	if err != nil {
		return "", 0, fmt.Errorf("%q is neither HOST nor HOST:PORT: %w", text, err)
	}
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("%q: %q is not a port", text, number)
	}
	return host, uint16(n), nil
}

// Side describes a host of a run between two hosts.
type Side struct {
	// Name is the host name, and Host describes the host in words.
	Name      string   `json:"name"`
	Host      string   `json:"host"`
	GPUs      []string `json:"gpus"`
	Driver    int      `json:"driver"`
	Release   string   `json:"release"`
	Simulated bool     `json:"simulated"`
	// Boot is the id of the kernel's boot (/proc/sys/kernel/random/boot_id), by which relays
	// distinguish hosts. Results omit it.
	Boot string `json:"boot,omitempty"`
}

func (r *run) side() (Side, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return Side{
		Name: hostname(), Host: r.report.Host, GPUs: r.report.GPUs, Driver: r.report.Driver, Release: r.report.Release,
		Simulated: r.report.Simulated,
		Boot:      strings.TrimSpace(string(boot)),
	}, err
}

// with returns the reason why one result cannot have the figures of both sides.
func (s Side) with(other Side) error {
	if s.Simulated == other.Simulated {
		return nil
	}
	return &kindError{s.Name, other.Name, s.Simulated, other.Simulated}
}

// known returns the side without the fields that results omit.
func (s Side) known() Side {
	s.Boot = ""
	return s
}

// Tasks of the other bench, in addition to the orders of its client.
const (
	taskMeet    = "meet"    // describe the host
	taskAttach  = "attach"  // start a relay, and a client with buffers
	taskSending = "sending" // report the sending connection
	taskPlain   = "plain"   // start its side of plain sockets, during the next tasks
	taskEnd     = "end"     // end the run, with the result or the reason in Why
	// taskPlainEnd waits for the end of taskPlain.
	taskPlainEnd = "plain-end"
)

// benchTask is a task of the connecting bench: one line of JSON.
type benchTask struct {
	order         // for the client, if Task is empty
	Task  string  `json:"task,omitempty"`
	Side  *Side   `json:"side,omitempty"`
	Plain *plain  `json:"plain,omitempty"`
	After *Report `json:"report,omitempty"`
	Why   string  `json:"why,omitempty"`
	// Transport is the transport that the relay must use.
	Transport string `json:"transport,omitempty"`
}

// taskResult is the answer to a task: one line of JSON.
type taskResult struct {
	reply
	Side *Side `json:"side,omitempty"`
	// Address and Token are the address and the token of plain sockets.
	Address string `json:"address,omitempty"`
	Token   []byte `json:"token,omitempty"`
	// Sending is the relay's report on the sending connection.
	Sending *launch.ConnectionFigures `json:"sending,omitempty"`
}

// Limits of tasks of another bench.
const (
	maxBytes    = 1 << 30
	maxDuration = time.Minute
	maxDepth    = 256
	maxRounds   = 1 << 20
	maxSockets  = 256
)

// check refuses tasks that no bench sends.
func (e benchTask) check() error {
	o := e.order
	if o.Bytes > maxBytes || o.Size > maxBytes || o.Duration < 0 || o.Duration > maxDuration || o.Depth < 0 ||
		o.Depth > maxDepth || o.Rounds < 0 || o.Rounds > maxRounds {
		return fmt.Errorf("%d bytes, messages of %d, %d in flight, %d rounds, for %v", o.Bytes, o.Size, o.Depth, o.Rounds,
			o.Duration)
	}
	if o.Socket != "" || o.Staging != 0 || o.Handed != 0 || o.Followed {
		return errors.New("an order that is not valid for the client of another host")
	}
	switch e.Task {
	case "":
		return o.checkClient()
	case taskMeet:
		if e.Side == nil {
			return errors.New("missing name of the bench")
		}
	case taskAttach:
		if o.Bytes == 0 || !slices.Contains(Transports(), e.Transport) {
			return fmt.Errorf("buffers of %d bytes, transport %.40q", o.Bytes, e.Transport)
		}
	case taskPlain:
		return e.Plain.check()
	case taskSending, taskPlainEnd, taskEnd:
	default:
		return fmt.Errorf("unknown task %.40q", e.Task)
	}
	return nil
}

// checkClient refuses orders that no client executes.
func (o order) checkClient() error {
	if !slices.Contains([]string{doListen, doConnect, doAccept, doSend, doReceive, doHandOff}, o.Do) {
		return fmt.Errorf("unknown order %.40q for a client", o.Do)
	}
	if stream := o.Do == doSend || o.Do == doReceive; stream && (o.Size == 0 || o.Depth == 0) {
		return errors.New("a stream without messages")
	}
	return nil
}

// check refuses a comparison with plain sockets that is missing or too large.
func (p *plain) check() error {
	// Check the factors first: their product may overflow.
	if p == nil || p.Threads < 1 || p.Threads > maxSockets || p.Each < 1 || p.Each > maxSockets ||
		p.Count() > maxSockets ||
		p.Size > 1<<20 || p.Size > 0 && p.Count() != 1 || p.Duration <= 0 || p.Duration > maxDuration {
		return fmt.Errorf("plain sockets %+v", p)
	}
	return nil
}

// parseTask parses and checks a task of another bench.
func parseTask(line []byte) (e benchTask, err error) {
	if err := json.Unmarshal(line, &e); err != nil {
		return e, err
	}
	return e, e.check()
}

// maxLine is the maximum length of a line in bytes: a line can be a whole result.
const maxLine = 4 << 20

// lines is a connection between two benches, with JSON lines in both directions.
type lines struct {
	conn net.Conn
	in   *bufio.Scanner
}

func newLines(conn net.Conn) *lines {
	in := bufio.NewScanner(conn)
	in.Buffer(nil, maxLine)
	return &lines{conn, in}
}

func (l *lines) send(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = l.conn.Write(append(text, '\n'))
	return err
}

// next returns the next line; io.EOF at the end of the connection.
func (l *lines) next() ([]byte, error) {
	if !l.in.Scan() {
		if err := l.in.Err(); err != nil {
			return nil, err
		}
		return nil, io.EOF
	}
	return l.in.Bytes(), nil
}
