package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/relay/wire"
)

// maxRefused limits the log of refused connections: an unauthenticated peer can connect any number
// of times.
const maxRefused = 10

// Listen waits at ADDRESS, ADDRESS:PORT or :PORT, or with an empty text at every address, for a
// bench with this cluster key, executes its tasks, and returns its result.
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
	r, end, err := beginBetween(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	return r.forHost(own, listener)
}

// forHost executes the tasks of the first bench that connects.
func (r *run) forHost(own *network.Local, listener net.Listener) (*Report, error) {
	// The listener answers until the end of the run, so that later benches get an error.
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
	return r.guest(session.Peer, session.Conn).serve()
}

// awaitOne returns the session of the first bench that passes the handshake. Later benches get the
// error that another bench is connected.
func (r *run) awaitOne(own *network.Local, listener net.Listener, served chan<- struct{}) (*network.Session, error) {
	var taken atomic.Bool
	var refused atomic.Int32
	came := make(chan *network.Session, 1)
	server := network.Server{
		Local: own,
		Admit: func(g network.Greeting) error {
			if g.Target != meetingPlace || g.Joined != nil {
				return wire.Errorf(wire.StatusBadHandle, "%s requests a service other than a bench", g.Name)
			}
			if taken.Load() {
				return wire.Errorf(wire.StatusLimit, "another bench is connected")
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
			if refused.Add(1) <= maxRefused {
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

// guest is the connected bench with its tasks on this host.
type guest struct {
	*run
	*lines
	name   string
	stage  *stage
	client *worker
	plain  *socketJob
	// here is canceled when the other bench disconnects, which ends the tasks. gone cancels the
	// context.
	here context.Context
	gone func()
	// spare keeps the client alive when here is canceled.
	spare func() bool
}

func (r *run) guest(name string, conn net.Conn) *guest {
	g := &guest{run: r, name: name, lines: newLines(conn)}
	g.here, g.gone = context.WithCancel(r.ctx)
	return g
}

// socketJob is this side of plain sockets while taskPlain runs.
type socketJob struct {
	listener *plainListener
	done     chan struct{}
	found    measure.Result
	err      error
}

// serve executes the other bench's tasks until that bench ends the run.
func (g *guest) serve() (report *Report, err error) {
	over, received := make(chan struct{}), make(chan line, 1) // buffered, to detect the end during a task
	go g.readLines(received, over)
	defer func() {
		close(over)
		if g.spare != nil {
			g.spare() // stage.close ends the client, even if the other bench disconnects now
		}
		g.gone() // ends plain sockets
		if g.plain != nil {
			<-g.plain.done
		}
		if g.stage != nil {
			err = errors.Join(err, g.stage.close())
		}
	}()
	defer context.AfterFunc(g.ctx, func() { g.conn.Close() })()
	for {
		l := <-received
		switch {
		case g.ctx.Err() != nil:
			return nil, context.Cause(g.ctx)
		case l.err != nil:
			return nil, &lostError{g.name, "before the end", l.err}
		}
		var o taskResult
		e, err := parseTask(l.text)
		if err == nil && e.Task == taskEnd {
			return g.end(e)
		}
		if err == nil {
			o, err = g.do(e)
		}
		if err != nil {
			o.Error = err.Error()
		}
		if err := g.send(o); err != nil {
			return nil, &lostError{bench: g.name, err: err}
		}
	}
}

// line is a line of the other bench, or the error that ended the connection.
type line struct {
	text []byte
	err  error
}

// readLines reads the other bench's lines, even during a task, to detect its end.
func (g *guest) readLines(received chan<- line, over <-chan struct{}) {
	for {
		text, err := g.next()
		if err != nil {
			g.gone()
		}
		select {
		case received <- line{bytes.Clone(text), err}:
		case <-over:
			return
		}
		if err != nil {
			return
		}
	}
}

// end receives the result and acknowledges the receipt.
func (g *guest) end(e benchTask) (*Report, error) {
	if e.After == nil {
		return nil, &abortError{g.name, e.Why}
	}
	if err := e.After.check(); err != nil {
		return nil, fmt.Errorf("the result of the bench on %s: %w", g.name, err)
	}
	return e.After, g.send(taskResult{})
}

func (g *guest) do(e benchTask) (o taskResult, err error) {
	if e.Task != taskMeet && e.Task != taskAttach && g.client == nil {
		return o, errors.New("no client has been started")
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
		return g.beginPlain(*e.Plain)
	case taskPlainEnd:
		return g.endPlain()
	}
	if e.Size > 0 {
		g.progress("%s messages of %s, %d in flight", e.Do, sizeText(e.Size), e.Depth)
	}
	o.reply, err = g.client.do(e.order)
	return o, err
}

// attach starts the client, and a relay that connects to the other host.
func (g *guest) attach(e benchTask) error {
	if g.stage != nil {
		return errors.New("a client is already running")
	}
	g.progress("a relay and a client for %s", g.name)
	s, w, err := g.startRemote(e.Transport, e.Bytes)
	g.stage = s
	if err == nil {
		g.register(w)
	}
	return err
}

// register registers the client. If the other bench disconnects, the client ends its work.
func (g *guest) register(w *worker) {
	g.client, g.spare = w, context.AfterFunc(g.here, w.abandon)
}

func (g *guest) beginPlain(p plain) (o taskResult, err error) {
	if g.plain != nil {
		return o, errors.New("plain sockets are already in use")
	}
	at, err := g.addressOf(g.client)
	if err != nil {
		return o, err
	}
	g.progress("plain TCP, threads × sockets: %v", p.Sockets)
	l, err := listenPlain(g.here, at.Addr(), g.Network)
	if err != nil {
		return o, err
	}
	g.accepts(l, p)
	o.Address, o.Token = l.address().String(), l.token
	return o, nil
}

// accepts accepts the other bench's plain sockets.
func (g *guest) accepts(l *plainListener, p plain) {
	j := &socketJob{listener: l, done: make(chan struct{})}
	go func() {
		defer close(j.done)
		j.found, j.err = l.do(g.here, p)
		l.close()
	}()
	g.plain = j
}

func (g *guest) endPlain() (o taskResult, err error) {
	j := g.plain
	if j == nil {
		return o, errors.New("no plain sockets are in use")
	}
	<-j.done
	g.plain = nil
	o.GBs, o.Times = j.found.GBs, j.found.Times
	return o, j.err
}
