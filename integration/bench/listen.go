package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/peerlane/peerlane/integration/measure"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

// mostRefused bounds what is said of connections that are refused: strangers can make any
// number.
const mostRefused = 10

// Listen waits at ADDRESS, ADDRESS:PORT, :PORT or, of an empty text, at all addresses for
// one bench that connects and has this cluster key, does as it says, and returns the
// result that it has measured.
func Listen(ctx context.Context, o Options, at string) (report *Report, err error) {
	own, err := local(o.Network)
	if err != nil {
		return nil, err
	}
	host, port, err := hostAndPort(at)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	plain := net.ListenConfig{Control: noticeTheEnd, KeepAliveConfig: keepAlive}
	plain.SetMultipathTCP(false)
	listener, err := plain.Listen(ctx, "tcp", net.JoinHostPort(host, fmt.Sprint(port)))
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	defer listener.Close()
	r, end, err := begin(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	return r.forHost(own, listener)
}

// forHost does what the first bench asks for that connects.
func (r *run) forHost(own *network.Local, listener net.Listener) (*Report, error) {
	// It answers until the run is over, so that who comes late hears why.
	served := make(chan struct{})
	defer func() {
		listener.Close()
		<-served
	}()
	session, err := r.awaitOne(own, listener, served)
	if err != nil {
		return nil, err
	}
	defer session.Conn.Close()
	g := &guest{run: r, name: session.Peer, lines: newLines(session.Conn)}
	return g.serve()
}

// awaitOne is the first bench that comes through; others are told that there is no room
// while this one runs.
func (r *run) awaitOne(own *network.Local, listener net.Listener, served chan<- struct{}) (*network.Session, error) {
	var taken atomic.Bool
	var refused atomic.Int32
	came := make(chan *network.Session, 1)
	server := network.Server{
		Local: own,
		Admit: func(g network.Greeting) error {
			if g.Target != meetingPlace || g.Joined != nil {
				return wire.Errorf(wire.StatusBadHandle, "%s asks for something else than a bench", g.Name)
			}
			if taken.Load() {
				return wire.Errorf(wire.StatusLimit, "another bench is here")
			}
			return nil
		},
		Accept: func(s *network.Session) {
			if taken.Swap(true) {
				s.Conn.Close()
				return
			}
			came <- s
		},
		Refused: func(from net.Addr, err error) {
			if refused.Add(1) <= mostRefused {
				r.progress("%v was refused: %v", from, err)
			}
		},
	}
	go func() {
		server.Serve(listener)
		close(served)
	}()
	r.progress("listening at %v for peerlane bench --connect", listener.Addr())
	select {
	case s := <-came:
		r.progress("%s has connected", s.Peer)
		return s, nil
	case <-r.ctx.Done():
		return nil, context.Cause(r.ctx)
	}
}

// guest is a bench that has connected, and what this one does for it.
type guest struct {
	*run
	*lines
	name   string
	stage  *stage
	client *worker
	plain  *socketJob
}

// socketJob is this side of plain sockets, while it is under way.
type socketJob struct {
	listener *plainListener
	done     chan struct{}
	found    measure.Result
	err      error
}

// serve does what the other bench asks for until it says that this is all.
func (g *guest) serve() (report *Report, err error) {
	ctx, cancel := context.WithCancel(g.ctx)
	defer func() {
		cancel() // what waits for plain sockets
		if g.plain != nil {
			<-g.plain.done
		}
		if g.stage != nil {
			err = errors.Join(err, g.stage.close())
		}
	}()
	defer context.AfterFunc(g.ctx, func() { g.conn.Close() })()
	for {
		line, err := g.next()
		switch {
		case g.ctx.Err() != nil:
			return nil, context.Cause(g.ctx)
		case err != nil:
			return nil, fmt.Errorf("the bench on %s went away before the end: %w", g.name, err)
		}
		var o outcome
		e, err := parseErrand(line)
		if err == nil && e.Task == taskEnd {
			return g.end(e)
		}
		if err == nil {
			o, err = g.do(ctx, e)
		}
		if err != nil {
			o.Error = err.Error()
		}
		if err := g.say(o); err != nil {
			return nil, fmt.Errorf("the bench on %s went away: %w", g.name, err)
		}
	}
}

// end takes the result, and says that it has it.
func (g *guest) end(e errand) (*Report, error) {
	if e.After == nil {
		return nil, fmt.Errorf("the bench on %s gave up: %.1000s", g.name, e.Why)
	}
	if err := e.After.check(); err != nil {
		return nil, fmt.Errorf("the result of the bench on %s: %w", g.name, err)
	}
	return e.After, g.say(outcome{})
}

func (g *guest) do(ctx context.Context, e errand) (o outcome, err error) {
	if e.Task != taskMeet && e.Task != taskAttach && g.client == nil {
		return o, errors.New("there is no client yet")
	}
	switch e.Task {
	case taskMeet:
		side, err := g.side()
		o.Side = &side
		return o, errors.Join(err, side.with(*e.Side))
	case taskAttach:
		return o, g.attach(e)
	case taskSending:
		found, err := g.sending(g.client)
		o.Sending = &found
		return o, err
	case taskPlain:
		return g.beginPlain(ctx, *e.Plain)
	case taskPlainEnd:
		return g.endPlain()
	}
	if e.Size > 0 {
		g.progress("%s messages of %s, %d in flight", e.Do, sizeText(e.Size), e.Depth)
	}
	o.reply, err = g.client.do(e.order)
	return o, err
}

// attach starts the client, with a relay that is on the network.
func (g *guest) attach(e errand) error {
	if g.stage != nil {
		return errors.New("there is a client already")
	}
	g.progress("a relay and a client for %s", g.name)
	s, err := g.networked(e.Transport, g.Network)
	if err != nil {
		return err
	}
	g.stage = s
	lanes, err := g.host.TwoClients()
	if err != nil {
		return err
	}
	w, err := s.attached(lanes[0], nil, e.Bytes)
	if err != nil {
		return err
	}
	if _, err := g.reached(w); err != nil {
		return err
	}
	g.client = w
	return nil
}

func (g *guest) beginPlain(ctx context.Context, p plain) (o outcome, err error) {
	if g.plain != nil {
		return o, errors.New("plain sockets are under way already")
	}
	at, err := g.reached(g.client)
	if err != nil {
		return o, err
	}
	g.progress("plain TCP, threads × sockets: %v", p.Sockets)
	l, err := listenPlain(ctx, at.Addr(), g.Network)
	if err != nil {
		return o, err
	}
	j := &socketJob{listener: l, done: make(chan struct{})}
	go func() {
		defer close(j.done)
		j.found, j.err = l.do(ctx, p)
		l.close()
	}()
	g.plain = j
	o.Address, o.Token = l.address().String(), l.token
	return o, nil
}

func (g *guest) endPlain() (o outcome, err error) {
	j := g.plain
	if j == nil {
		return o, errors.New("no plain sockets are under way")
	}
	<-j.done
	g.plain = nil
	o.GBs, o.Times = j.found.GBs, j.found.Times
	return o, j.err
}
