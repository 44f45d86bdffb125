package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
)

// Tables of lanes over the network.
const (
	tableNetwork = "network" // between two relays of this host
	tableHosts   = "hosts"   // between two hosts
)

// plain is a measurement of plain TCP sockets: a stream over several sockets or, with a Size,
// messages with an answer to every message.
type plain struct {
	measure.Sockets
	Size     uint64        `json:"size,omitempty"`
	Duration time.Duration `json:"duration"`
	// Back reports that the accepting side sends.
	Back bool `json:"back,omitempty"`
}

// do executes this side of the measurement on established connections. The side that neither
// receives nor asks has no result.
func (p plain) do(conns []*net.TCPConn, sends bool) (r measure.Result, err error) {
	end := time.Now().Add(patience + 2*p.Duration)
	for _, c := range conns {
		if err := c.SetDeadline(end); err != nil {
			return r, err
		}
	}
	var times []time.Duration
	switch {
	case p.Size > 0 && sends:
		times, err = measure.AskSocket(conns[0], p.Size, p.Duration)
		r.Times = measure.TimesOf(times)
	case p.Size > 0:
		err = measure.AnswerSocket(conns[0], p.Size)
	case sends:
		err = p.Send(conns, p.Duration)
	default:
		r.GBs, err = measure.ReceiveAll(conns, p.Duration)
	}
	return r, err
}

// between is a pair of clients whose relays connect over the network, with the other measurements
// between their hosts.
type between struct {
	table string
	ends  [2]*worker
	names [2]string
	// look returns the reports of both relays on their sending connections.
	look func() ([2]launch.ConnectionFigures, error)
	// plain measures plain sockets between the ends.
	plain func(from int, p plain) (measure.Result, error)
}

// socketSets returns the numbers of threads and sockets to try.
func (r *run) socketSets() (list []measure.Sockets) {
	threads, each := []int{1, 2, 4, 8}, []int{1, 4}
	if r.Quick || r.host.Simulated {
		threads, each = []int{1, 4}, []int{1, 2}
	}
	for _, t := range threads {
		for _, e := range each {
			list = append(list, measure.Sockets{Threads: t, Each: e})
		}
	}
	return list
}

// bestSockets adds the best rate of plain sockets between the ends as a baseline.
func (r *run) bestSockets(b between, from int, direction string) (string, error) {
	var best measure.Result
	var how measure.Sockets
	for _, set := range r.socketSets() {
		r.progress("plain TCP %s, threads × sockets: %v", direction, set)
		found, err := b.plain(from, plain{Sockets: set, Duration: r.Duration, Back: from == 1})
		if err != nil {
			return "", fmt.Errorf("plain TCP %s: %w", direction, err)
		}
		if found.GBs > best.GBs {
			best, how = found, set
		}
	}
	name := fmt.Sprintf("plain TCP %s, the best of threads × sockets: %v", direction, how)
	r.keep(name, best)
	return name, nil
}

// sizesOfNetwork returns the message sizes in bytes of the tables of lanes over the network.
func (r *run) sizesOfNetwork() []uint64 { return r.sizes(64<<10, 1<<20, 16<<20, 256<<20) }

// between measures both directions, and compares the rates with plain sockets in the same direction.
func (r *run) between(b between) error {
	sees, err := b.look()
	if err != nil {
		return err
	}
	for from, name := range b.names {
		title := name + " to " + b.names[1-from]
		a, other, seen := b.ends[from], b.ends[1-from], sees[from]
		row := Row{Table: b.table, What: title, Route: seen.Route, Transport: seen.Transport, Note: seen.Path}
		stream, err := r.bestSockets(b, from, title)
		if err != nil {
			return err
		}
		for _, size := range r.sizesOfNetwork() {
			for _, depth := range r.depths(1, 16) {
				r.progress("%s over %s, %s, %d in flight", title, seen.Transport, sizeText(size), depth)
				found, err := r.stream(a, other, size, depth)
				if err != nil {
					return err
				}
				row := row
				row.Size, row.Depth, row.Value, row.Unit, row.Times, row.Baseline = size, depth, found.GBs, GBs, found.Times, stream
				r.row(row)
			}
		}
		if err := r.shortMessages(b, from, row); err != nil {
			return err
		}
	}
	title := transports(sees)
	r.progress("hand-off over %s", title)
	times, err := r.handOff(b.ends[0], b.ends[1])
	if err != nil {
		return err
	}
	r.row(Row{Table: b.table, What: "hand-off by timelines, half of to and fro", Route: sees[0].Route, Transport: title,
		Size: 8, Depth: 1, Value: times.P50, Unit: microseconds, Times: times, Note: "stream to stream"})
	after, err := b.look()
	if err != nil {
		return err
	}
	return checkTransports(b.names, sees, after)
}

// transports returns the transports of both directions in words.
func transports(sees [2]launch.ConnectionFigures) string {
	if sees[0].Transport == sees[1].Transport {
		return sees[0].Transport
	}
	return sees[0].Transport + " there, " + sees[1].Transport + " back"
}

// checkTransports checks that each direction kept its transport during a measurement, because a row
// names one transport.
func checkTransports(names [2]string, before, after [2]launch.ConnectionFigures) error {
	for from, name := range names {
		if old, current := before[from].Transport, after[from].Transport; old != current {
			return &transportError{name, names[1-from], old, current}
		}
	}
	return nil
}

// shortMessages measures the time of a message of 8 bytes, and compares the time with 8 bytes on a
// plain socket and an answer of one byte.
func (r *run) shortMessages(b between, from int, row Row) error {
	const size = 8
	r.progress("%s over %s, %s", row.What, row.Transport, sizeText(size))
	asked, err := b.plain(from, plain{Sockets: measure.Sockets{Threads: 1, Each: 1}, Size: size, Duration: r.Duration,
		Back: from == 1})
	if err != nil {
		return fmt.Errorf("plain TCP %s: %w", row.What, err)
	}
	found, err := r.stream(b.ends[from], b.ends[1-from], size, 1)
	if err != nil {
		return err
	}
	if asked.Times == nil || found.Times == nil {
		return fmt.Errorf("%s: no message of %d bytes ended within %v", row.What, size, r.Duration)
	}
	name := fmt.Sprintf("plain TCP %s, %s and the byte that answers", row.What, sizeText(size))
	r.keep(name, asked)
	row.What += ", from post to completion"
	row.Size, row.Depth, row.Value, row.Unit, row.Times, row.Baseline = size, 1, found.Times.P50, microseconds,
		found.Times, name
	r.row(row)
	return nil
}

// sending returns the report of a client's relay on the sending connection.
func (r *run) sending(w *worker) (launch.ConnectionFigures, error) {
	report, err := r.reportOf(w)
	if err != nil {
		return launch.ConnectionFigures{}, err
	}
	for _, c := range report.Connections {
		if c.Sends {
			return c, nil
		}
	}
	return launch.ConnectionFigures{}, fmt.Errorf("the relay of client %s has no connection that sends", w.name)
}

// reportOf returns the report of a client's relay. reportOf waits, because the supervisor may
// learn of the start of the relay later than the client.
func (r *run) reportOf(w *worker) (*launch.Report, error) {
	info, err := control.Inspect(r.host.Layout, w.generation.ID)
	for err == nil && info.Report == nil && info.Status.State == generation.StateStarting {
		select {
		case <-r.ctx.Done():
			return nil, context.Cause(r.ctx)
		case <-time.After(20 * time.Millisecond):
		}
		info, err = control.Inspect(r.host.Layout, w.generation.ID)
	}
	if err == nil && info.Report == nil {
		err = fmt.Errorf("the relay of client %s does not report its traffic: %s", w.name, info.NoReport)
	}
	return info.Report, err
}

// addressOf returns the network address of a client's relay.
func (r *run) addressOf(w *worker) (netip.AddrPort, error) {
	report, err := r.reportOf(w)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if n := report.Network; n == nil || n.Listening == "" {
		why := "its configuration has no address"
		if n != nil {
			why = n.Error
		}
		return netip.AddrPort{}, fmt.Errorf("the relay of this bench is on no network: %s", why)
	}
	return netip.ParseAddrPort(report.Network.Listening)
}

// networkStage returns a stage whose relays use these network settings, a transport and the lanes of
// a plan.
func (r *run) networkStage(transport string, n config.Network, plan config.Plan) (*stage, error) {
	if err := r.configure(r.lanes, func(c *config.Config) {
		c.Relay.Route, c.Relay.Transport = launch.RouteAuto, cmp.Or(transport, launch.TransportAuto)
		c.Network, c.Plan = n, plan
		if r.Verbs != nil {
			c.Verbs = *r.Verbs
		}
	}); err != nil {
		return nil, err
	}
	return &stage{run: r, route: staged, stop: func() error { return nil }}, nil
}

// network measures two relays of this host over TCP on loopback, with a private cluster key.
func (r *run) network() (err error) {
	n := config.Default().Network
	// The search for plain sockets includes 16 sockets.
	n.Interfaces, n.Family, n.Streams = "=lo", "ipv4", 16
	s, err := r.networkStage(launch.TransportTCP, n, config.Plan{Lanes: r.lanes})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := os.WriteFile(r.host.Layout.ClusterKey(), network.Keys{Current: network.NewKey(time.Now())}.Text(),
		0o600); err != nil {
		return err
	}
	// Relays of other tables use no network, or another key.
	defer func() { err = errors.Join(err, os.Remove(r.host.Layout.ClusterKey())) }()
	one, other, err := s.pair(slices.Max(append(r.sizesOfNetwork(), 1<<20)))
	if err != nil {
		return err
	}
	return r.between(between{table: tableNetwork, ends: [2]*worker{one, other}, names: [2]string{"relay A", "relay B"},
		plain: r.onLoopback,
		look: func() (sees [2]launch.ConnectionFigures, err error) {
			if sees[0], err = r.sending(one); err == nil {
				sees[1], err = r.sending(other)
			}
			return sees, err
		}})
}

// onLoopback executes both sides of plain sockets.
func (r *run) onLoopback(_ int, p plain) (measure.Result, error) {
	l, err := listenPlain(r.ctx, netip.MustParseAddr("127.0.0.1"), config.Default().Network)
	if err != nil {
		return measure.Result{}, err
	}
	defer l.close()
	type answer struct {
		measure.Result
		err error
	}
	accepted := make(chan answer, 1)
	go func() {
		found, err := l.do(r.ctx, p)
		accepted <- answer{found, err}
	}()
	ours, err := dialPlain(r.ctx, l.address(), l.token, p)
	theirs := <-accepted
	if p.receives(false) {
		ours = theirs.Result
	}
	return ours, errors.Join(err, theirs.err)
}

// receives reports whether the dialing side (dials), or else the accepting side, has the result.
func (p plain) receives(dials bool) bool {
	asks := p.Size > 0
	dialerSends := !p.Back
	return dials == (dialerSends == asks)
}

// dialPlain executes the connecting side of plain sockets.
func dialPlain(ctx context.Context, to netip.AddrPort, token []byte, p plain) (r measure.Result, err error) {
	var conns []*net.TCPConn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	dialer := net.Dialer{Timeout: plainTimeout}
	dialer.SetMultipathTCP(false)
	for range p.Count() {
		c, err := dialer.DialContext(ctx, "tcp", to.String())
		if err != nil {
			return r, err
		}
		conns = append(conns, c.(*net.TCPConn))
		if _, err := c.Write(token); err != nil {
			return r, err
		}
	}
	defer context.AfterFunc(ctx, func() {
		for _, c := range conns {
			c.Close()
		}
	})()
	return p.do(conns, !p.Back)
}
