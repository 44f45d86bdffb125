package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/network"
)

// far is the bench on the other host, as the connecting side sees it.
type far struct {
	name string
	*lines
}

// ask sends a task to the other bench and waits for the result.
func (f *far) ask(e benchTask) (taskResult, error) {
	limit := patience + 2*e.Duration
	if e.Plain != nil {
		limit += 2 * e.Plain.Duration
	}
	err := f.conn.SetDeadline(time.Now().Add(limit))
	if err == nil {
		err = f.send(e)
	}
	var line []byte
	if err == nil {
		line, err = f.next()
	}
	var o taskResult
	if err != nil {
		return o, &lostError{f.name, "before its answer (" + cmp.Or(e.Task, e.Do) + ")", err}
	}
	if err := json.Unmarshal(line, &o); err != nil {
		return o, fmt.Errorf("unknown answer of the bench on %s (%s): %w", f.name, cmp.Or(e.Task, e.Do), err)
	}
	if o.Error != "" {
		return o, &remoteError{f.name, o.Error}
	}
	return o, nil
}

// order sends an order to the client of the other bench and waits for the reply.
func (f *far) order(o order) (reply, error) {
	done, err := f.ask(benchTask{order: o})
	return done.reply, err
}

// abandon disconnects, which ends every task that the other bench executes for this bench.
func (f *far) abandon() { f.conn.Close() }

// Connect measures lanes to another host, HOST or HOST:PORT, on which Listen waits. The other
// bench executes the tasks of this bench, and gets the result at the end.
func Connect(ctx context.Context, o Options, to string) (report *Report, err error) {
	own, err := local(o.Network)
	if err != nil {
		return nil, err
	}
	f, err := meet(ctx, o, own, to)
	if err != nil {
		return nil, err
	}
	defer f.conn.Close()
	r, end, err := beginBetween(ctx, o)
	if err != nil {
		return nil, f.giveUp(err)
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := r.withHost(f); err != nil {
		return nil, f.giveUp(errors.Join(context.Cause(ctx), err))
	}
	return r.report, nil
}

// outward is a lane to other hosts: its GPU by PCI address, and the [plan] that makes the lane.
type outward struct {
	gpu  string
	plan config.Plan
}

// beginBetween is begin for a run with another host.
func beginBetween(ctx context.Context, o Options) (r *run, end func() error, err error) {
	if r, end, err = begin(ctx, o); err != nil {
		return nil, nil, err
	}
	nic := ""
	if r.outward.gpu, r.outward.plan, nic, err = r.host.Outward(o.Plan); err != nil {
		return nil, nil, errors.Join(err, end())
	}
	if nic != "" {
		r.report.Host += "; RDMA by this machine's own " + nic
	}
	return r, end, nil
}

// startRemote starts a client, and a relay that connects to the other host over a transport.
func (r *run) startRemote(transport string, bytes uint64) (*stage, *worker, error) {
	s, err := r.networkStage(transport, r.Network, r.outward.plan)
	if err != nil {
		return nil, nil, err
	}
	lane, err := r.host.Plan.Lane(r.outward.gpu)
	if err != nil {
		return s, nil, err
	}
	w, err := s.startAttached(lane, nil, bytes)
	if err == nil {
		_, err = r.addressOf(w)
	}
	return s, w, err
}

// meet connects to the bench on another host.
func meet(ctx context.Context, o Options, own *network.Local, to string) (*far, error) {
	at, err := addresses(ctx, to)
	if err != nil {
		return nil, fmt.Errorf("--connect: %w", err)
	}
	progress(o, "connecting to %s", to)
	session, err := own.Dial(ctx, meetingPlace, at)
	if err != nil {
		return nil, &fault.Error{Operation: "no peerlane bench --listen answers at", Object: to, Cause: err}
	}
	return &far{session.Peer, newLines(session.Conn)}, nil
}

// giveUp sends the other bench the reason why this bench ends the run, and returns the reason.
func (f *far) giveUp(why error) error {
	// Ignore errors: if the other bench has ended, the returned error reports the end.
	_ = f.conn.SetDeadline(time.Now().Add(network.HandshakeTime))
	_ = f.send(benchTask{Task: taskEnd, Why: why.Error()})
	return why
}

// withHost measures with the bench on another host.
func (r *run) withHost(f *far) (err error) {
	// An interrupted run does not wait for the other side.
	defer context.AfterFunc(r.ctx, f.abandon)()
	side, err := r.side()
	if err != nil {
		return err
	}
	met, err := f.ask(benchTask{Task: taskMeet, Side: &side})
	if err != nil {
		return err
	}
	if met.Side == nil {
		return fmt.Errorf("the bench on %s: %w", f.name, errNoName)
	}
	if err := side.with(*met.Side); err != nil {
		return err
	}
	if side.Boot == met.Side.Boot && cmp.Or(r.Transport, launch.TransportAuto) == launch.TransportAuto {
		return errOneHost
	}
	r.report.Hosts = []Side{side.known(), met.Side.known()}
	r.report.Host = fmt.Sprintf("A is %s, %s; B is %s, %s", side.Name, side.Host, met.Side.Name, met.Side.Host)
	r.progress("a relay and a client on both hosts")
	bytes := slices.Max(append(r.sizesOfNetwork(), 1<<20))
	s, here, err := r.startRemote(r.Transport, bytes)
	if s != nil {
		defer func() { err = errors.Join(err, s.close()) }()
	}
	if err != nil {
		return err
	}
	b, err := r.acrossHosts(s, f, here, bytes)
	if err != nil {
		return err
	}
	start := time.Now()
	if err := r.between(b); err != nil {
		return err
	}
	r.report.Seconds[tableHosts] = time.Since(start).Round(100 * time.Millisecond).Seconds()
	if err := r.report.check(); err != nil {
		return err
	}
	if r.Measured != nil {
		if err := r.Measured(r.report); err != nil {
			return err
		}
	}
	_, err = f.ask(benchTask{Task: taskEnd, After: r.report})
	return err
}

func (s *stage) transport() string { return s.run.host.Config.Relay.Transport }

// acrossHosts starts a client on the other host, and connects it with the client of this host in
// both directions.
func (r *run) acrossHosts(s *stage, f *far, here *worker, bytes uint64) (b between, err error) {
	remote := &worker{name: "of " + f.name, far: f}
	if _, err := f.ask(benchTask{Task: taskAttach, Transport: s.transport(), order: order{Bytes: bytes}}); err != nil {
		return b, err
	}
	if err := errors.Join(s.connect(here, remote), s.connect(remote, here)); err != nil {
		return b, fmt.Errorf("lanes between the hosts: %w", err)
	}
	return between{table: tableHosts, ends: [2]*worker{here, remote}, names: [2]string{"A", "B"},
		plain: func(_ int, p plain) (measure.Result, error) { return r.plainWith(f, p) },
		look:  func() ([2]launch.ConnectionFigures, error) { return r.lookWith(f, here) }}, nil
}

// lookWith returns the reports of both relays on their sending connections.
func (r *run) lookWith(f *far, here *worker) (sees [2]launch.ConnectionFigures, err error) {
	if sees[0], err = r.sending(here); err != nil {
		return sees, err
	}
	seen, err := f.ask(benchTask{Task: taskSending})
	if err == nil && seen.Sending == nil {
		err = fmt.Errorf("the bench on %s does not report its sending connection", f.name)
	}
	if err == nil {
		sees[1] = *seen.Sending
	}
	return sees, err
}

// plainWith measures plain sockets to the address of the relay on the other host.
func (r *run) plainWith(f *far, p plain) (measure.Result, error) {
	remote, err := f.ask(benchTask{Task: taskPlain, Plain: &p})
	if err != nil {
		return measure.Result{}, err
	}
	at, err := netip.ParseAddrPort(remote.Address)
	if err != nil || len(remote.Token) != tokenBytes {
		return measure.Result{}, fmt.Errorf("the bench on %s has plain sockets at %q, with a token of %d bytes", f.name,
			remote.Address, len(remote.Token))
	}
	if zone, err := netip.ParseAddrPort(f.conn.RemoteAddr().String()); err == nil && at.Addr().Is6() &&
		at.Addr().IsLinkLocalUnicast() {
		// The zone of the other host has no meaning on this host.
		at = netip.AddrPortFrom(at.Addr().WithZone(zone.Addr().Zone()), at.Port())
	}
	ours, err := dialPlain(r.ctx, at, remote.Token, p)
	if err != nil {
		err = fmt.Errorf("to %v: %w", at, err)
	}
	done, endErr := f.ask(benchTask{Task: taskPlainEnd}) // also detects the end of the other bench
	if p.receives(false) {
		ours = measure.Result{GBs: done.GBs, Times: done.Times}
	}
	return ours, errors.Join(err, endErr)
}
