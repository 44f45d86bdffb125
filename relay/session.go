package relay

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// maxBlocking limits the requests of a session that wait for CUDA or for a remote relay, because a
// request holds a goroutine.
const maxBlocking = 32

// maxUnread bounds the answers that a client has not read.
const maxUnread = 4096

// takeAtOnce limits the operations of a session before the next session.
const takeAtOnce = 64

// session is a client process. A session implements poll.Poller.
type session struct {
	relay *Relay
	id    uint64
	log   *logrus.Entry

	port  *packet.Port
	pid   int
	pidfd int
	// program is that of the client's Hello, for reports.
	program uint64

	ring       *ring.Relay
	wakeRelay  int // eventfd that the client rings
	wakeClient int // pipe that the relay writes into
	clientEnd  int // and that the client reads; -1 once the client has the descriptor

	memories    map[uint32]*memory
	connections map[uint32]*connection
	listeners   map[uint32]*listener
	events      map[uint32]*event
	regions     map[uint32]*exposedRegion
	lists       *os.File  // the memory of lists (list.go); nil until the client requests the memory
	listParts   int       // under way
	wantParts   []*sender // that wait for the end of a part
	// waits are the connections whose next operation waits for a timeline or an event.
	waits map[*connection]bool
	// turns are the timelines whose turn an operation under way has taken.
	turns map[uint32]bool

	parts []part // of the export that will come
	// refusedParts is the reason that the relay will refuse the export.
	refusedParts error
	host         uint64 // bytes of host memory for the client
	staging      uint64 // and of memory on server GPUs
	// fullSince is when the relay stopped for want of room for completions; 0 for
	// never.
	fullSince time.Duration

	last     uint32 // number given out
	blocking int
	opening  int      // reverse connections, beside the client's requests (reverse.go)
	waiting  []func() // to open a reverse connection
	counted  bool     // in the relay's use
	ended    *wire.Error
	parting  bool // the client waits for the socket's end
	bringing int  // requests that bring memory
}

// greetClient reads the first message of a client.
func (r *Relay) greetClient(conn packet.Conn, silent *pendingHandshakes) {
	defer silent.from.HangUp(conn)
	refuse := func(err error) {
		r.warnings.warn(logrus.NewEntry(logrus.StandardLogger()), err, "a client was refused")
		if sent := conn.Send(wire.NewFailure(err), 1); sent != nil {
			logrus.WithError(sent).Debug("the refusal could not be sent")
		}
	}
	pid, pidfd, err := process(conn)
	if err != nil {
		silent.end(conn)
		refuse(wire.Errorf(wire.StatusInternal, "the relay cannot watch its client: %v", err))
		return
	}
	m, err := silent.receive(conn)
	hello, ok := m.(*wire.Hello)
	switch {
	case errors.Is(err, io.EOF):
		unix.Close(pidfd)
		return // a check whether the socket answers
	case err == nil && (!ok || hello.Magic != wire.Magic):
		err = wire.Errorf(wire.StatusMalformed,
			"the first message is not Peerlane's hello; is this program a Peerlane client?")
	}
	var version uint32
	if err == nil {
		version, err = wire.Negotiate("client", hello.Oldest, hello.Newest)
	}
	if err != nil {
		unix.Close(pidfd)
		refuse(err)
		return
	}
	s := &session{
		relay: r, pid: pid, pidfd: pidfd, program: hello.Program, wakeRelay: -1, wakeClient: -1, clientEnd: -1,
		log:         logrus.WithField("client", pid),
		memories:    map[uint32]*memory{},
		connections: map[uint32]*connection{},
		listeners:   map[uint32]*listener{},
		events:      map[uint32]*event{},
		regions:     map[uint32]*exposedRegion{},
		waits:       map[*connection]bool{},
		turns:       map[uint32]bool{},
	}
	if err := s.shareMemory(); err != nil {
		s.free()
		refuse(err)
		return
	}
	fd, err := conn.Detach()
	if err != nil {
		s.free()
		refuse(err)
		return
	}
	r.loop.Do(func() {
		if s.program == wire.ProgramNIXL { // also a client whose memory other clients read and write
			r.expectLists()
		}
		s.begin(fd, version)
	})
}

func (s *session) shareMemory() (err error) {
	if s.ring, err = ring.NewRelay(); err != nil {
		return err
	}
	if s.wakeRelay, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return os.NewSyscallError("eventfd", err)
	}
	// A holder of an eventfd can make writes block for every process. The ends of a pipe are apart:
	// the client cannot reach this end.
	var pipe [2]int
	if err = unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return os.NewSyscallError("pipe2", err)
	}
	s.clientEnd, s.wakeClient = pipe[0], pipe[1]
	return nil
}

// soPeerPIDFD is SO_PEERPIDFD of Linux 6.5, the same on amd64 and arm64.
const soPeerPIDFD = 77

// process identifies the process at the remote end of a socket during its life. A forked child
// keeps the socket open after the death of its parent, so only the pidfd reports the death.
func process(conn packet.Conn) (pid, pidfd int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, -1, err
	}
	pidfd = -1
	controlled := raw.Control(func(fd uintptr) {
		var who *unix.Ucred
		if who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		pid = int(who.Pid)
		pidfd, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPIDFD)
		if errors.Is(err, unix.ENOPROTOOPT) {
			// An older kernel. The process may have ended since the connect, and a new process may
			// have its number; then the relay watches the new process's death; the socket's end,
			// which a process without children always causes, covers the old process.
			pidfd, err = unix.PidfdOpen(pid, 0)
		}
	})
	if err = errors.Join(controlled, err); err != nil {
		return pid, -1, fmt.Errorf("process %d: %w", pid, err)
	}
	unix.CloseOnExec(pidfd)
	return pid, pidfd, nil
}

// begin takes the session into the loop and welcomes the client.
func (s *session) begin(fd int, version uint32) {
	r := s.relay
	port, err := packet.NewPort(r.loop, fd, s.receive, s.hungUp)
	if err != nil {
		s.log.WithError(err).Error("a client could not be watched")
		packet.Refuse(fd, err, 1)
		unix.Close(fd)
		s.free()
		return
	}
	port.From(packet.Clients)
	s.port = port
	switch {
	case r.dying != nil:
		err = r.dying
	case len(r.sessions) >= r.limits.Clients:
		err = limitMet("relay.limits.clients", "%d sessions of %s are open, which is the limit", len(r.sessions),
			r.name())
	default:
		err = r.reserve(ofSession)
		s.counted = err == nil
	}
	if err == nil {
		err = r.loop.Watch(s.pidfd, func(uint32) { s.died() })
	}
	if err == nil {
		err = r.loop.WatchEdges(s.wakeRelay)
	}
	if err != nil {
		port.Send(wire.NewFailure(err), 1)
		port.Close()
		s.forget()
		return
	}
	r.lastSession++
	s.id = r.lastSession
	r.sessions[s.id] = s
	r.loop.Add(s)
	submit, complete := s.ring.FDs()
	s.port.Send(&wire.Welcome{Version: version, Session: s.id}, 1, submit, complete, s.wakeRelay, s.clientEnd)
	unix.Close(s.clientEnd)
	s.clientEnd = -1
	s.log.Debug("a client came")
	r.openNICs()
}

// deathGrace is the wait for a process's death after its socket closed without a goodbye: the
// kernel closes a dying process's files first.
const deathGrace = 200 * time.Millisecond

// hungUp is the end of the client's socket.
func (s *session) hungUp(err error) {
	r := s.relay
	if !errors.Is(err, io.EOF) {
		s.end(wire.Errorf(wire.StatusPeerClosed, "the session of client process %d of %s broke off: %v", s.pid, r.name(),
			err).On(r.name()))
		return
	}
	time.AfterFunc(deathGrace, func() {
		r.loop.Do(func() {
			s.end(wire.Errorf(wire.StatusPeerClosed, "client process %d of %s lives and closed its socket to the relay", s.pid,
				r.name()).On(r.name()))
		})
	})
}

func (s *session) died() {
	s.relay.loop.Unwatch(s.pidfd) // which stays readable for as long as anything is under way
	why := wire.Errorf(wire.StatusPeerClientDied, "client process %d of %s died", s.pid, s.relay.name()).On(s.relay.name())
	if s.relay.initEnded() {
		why = s.relay.containerEnded()
	}
	s.end(why)
}

// end closes everything that the client has. Memory is unmapped after the last copy.
func (s *session) end(why *wire.Error) {
	if s.ended != nil {
		return
	}
	s.ended = why
	s.log.WithField("reason", why.Reason).Debug("a session ends")
	// No stream of the client's waits in vain. From here on no operation advances
	// a timeline: an advance would lower the value.
	for i := range uint32(wire.Timelines) {
		s.ring.Advance(i, wire.TimelineEnd)
	}
	for _, l := range s.listeners {
		l.close()
	}
	for _, c := range s.connections {
		c.shutdown(why)
	}
	for _, m := range s.memories {
		m.retire()
	}
	for number, e := range s.events {
		delete(s.events, number)
		e.retire()
	}
	s.dropParts()
	s.relay.loop.Remove(s)
	if s.relay.dying == nil && !s.parting {
		s.port.Close()
	}
	s.settle()
}

// settle frees the session after the last operation.
func (s *session) settle() {
	if s.parting && len(s.memories) == 0 && s.bringing == 0 {
		s.port.Close() // operations in flight do not access the client's memory
	}
	if s.ended == nil || len(s.connections) > 0 || len(s.memories) > 0 || s.blocking+s.opening+s.bringing > 0 ||
		s.relay.sessions[s.id] != s {
		return
	}
	delete(s.relay.sessions, s.id)
	s.relay.farewell(s)
	s.port.Close()
	s.forget()
	s.log.Debug("a session is gone")
	s.relay.rest()
}

func (s *session) forget() {
	s.relay.loop.Unwatch(s.pidfd)
	s.relay.loop.Unwatch(s.wakeRelay)
	if s.counted {
		s.relay.release(ofSession)
	}
	s.free()
}

// free closes a session's resources outside the loop.
func (s *session) free() {
	if s.lists != nil {
		if err := s.lists.Close(); err != nil {
			s.log.WithError(err).Warn("closing a session's list memory")
		}
		s.relay.release(ofPart)
	}
	for _, fd := range []int{s.pidfd, s.wakeRelay, s.wakeClient, s.clientEnd} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if s.ring != nil {
		if err := s.ring.Close(); err != nil {
			s.log.WithError(err).Warn("unmapping a session's rings")
		}
	}
}

// --- requests -------------------------------------------------------------------

func (s *session) receive(m wire.Message, sequence uint32, fds []int) {
	if s.ended != nil {
		s.port.CloseAll(fds)
		return
	}
	// Operations posted before this message precede it; later posts of the client follow.
	for n := 0; n <= wire.RingEntries/takeAtOnce && s.takeSome(); n++ {
	}
	if s.ended != nil {
		s.port.CloseAll(fds)
		return
	}
	switch m := m.(type) {
	case *wire.Export:
		s.export(m, sequence, fds)
		return // which owns the descriptors
	case *wire.ExportPart:
		s.exportPart(m, fds)
		return // the same
	case *wire.DMABuf:
		s.registerInPlace(m, fds)
		return // the same
	case *wire.ExportIPC:
		s.exportIPC(m, sequence)
	case *wire.HostMemory:
		s.hostMemory(m, sequence)
	case *wire.HostMemoryPopulated:
		s.populated(m.Memory, sequence)
	case *wire.Staging:
		s.stagingMemory(m, sequence)
	case *wire.Event:
		s.openEvent(m, sequence)
	case *wire.EventClose:
		s.answer(sequence, s.closeEvent(m.Event))
	case *wire.Expose:
		s.expose(m, sequence)
	case *wire.Revoke:
		s.revoke(m.Region, sequence)
	case *wire.Unexport:
		s.unexport(m.Memory, sequence)
	case *wire.Listen:
		s.listen(m, sequence)
	case *wire.Unlisten:
		s.answer(sequence, s.unlisten(m.Listener))
	case *wire.Accept:
		s.accept(m, sequence)
	case *wire.Connect:
		s.connect(m, sequence)
	case *wire.Disconnect:
		s.answer(sequence, s.disconnect(m.Connection))
	case *wire.Goodbye:
		// The socket's end may not come: a forked child of the client also has it. The client waits
		// for the relay's goodbye, which means that no access to its memory remains.
		s.parting = true
		s.end(wire.Errorf(wire.StatusPeerClosed, "client process %d of %s ended its session", s.pid,
			s.relay.name()).On(s.relay.name()))
	case *wire.ListMemory:
		s.listMemory(sequence)
	default:
		s.query(m, sequence)
	}
	s.port.CloseAll(fds)
}

// query answers a request that changes nothing.
func (s *session) query(m wire.Message, sequence uint32) {
	switch m := m.(type) {
	case *wire.Statistics:
		s.reply(s.relay.statistics(), sequence)
	case *wire.Lanes:
		s.reply(s.relay.given(), sequence)
	case *wire.LaneNIC:
		if answer, err := s.relay.nicOf(m.GPU); err != nil {
			s.answer(sequence, err)
		} else {
			s.reply(answer, sequence)
		}
	default:
		s.answer(sequence, wire.Errorf(wire.StatusMalformed, "a %T is no request of a client", m))
	}
}

// answer replies with Done or a Failure.
func (s *session) answer(sequence uint32, err error) {
	if err != nil {
		s.reply(wire.NewFailure(err), sequence)
		return
	}
	s.reply(&wire.Done{}, sequence)
}

func (s *session) reply(m wire.Message, sequence uint32, fds ...int) {
	if s.ended != nil && s.relay.dying == nil {
		return
	}
	s.port.Send(m, sequence, fds...)
	if s.port.Waiting() > maxUnread && s.ended == nil {
		s.end(wire.Errorf(wire.StatusLimit, "client process %d of %s left %d answers unread", s.pid, s.relay.name(),
			maxUnread))
	}
}

// block runs a slow request on a goroutine, and then the second half on the loop; the session may
// have ended meanwhile.
func (s *session) block(sequence uint32, work func() error, then func(error)) {
	if s.blocking >= maxBlocking {
		then(wire.Errorf(wire.StatusLimit, "%d requests of this client are under way, which is the limit", maxBlocking))
		return
	}
	s.beside(&s.blocking, work, then)
}

// beside is block for counted work.
func (s *session) beside(count *int, work func() error, then func(error)) {
	*count++
	go func() {
		err := work()
		s.relay.loop.Do(func() {
			*count--
			then(err)
			s.settle()
		})
		s.relay.examine(err) // after the answer, which names the operation
	}()
}

// bring is block for a request that brings memory.
func (s *session) bring(sequence uint32, work func() error, then func(error)) {
	s.bringing++
	s.block(sequence, work, func(err error) {
		s.bringing--
		then(err)
	})
}

func (s *session) number() uint32 {
	s.last++
	return s.last
}

// --- the ring ---------------------------------------------------------------------

// Poll takes operations and starts operations with a reached timeline.
func (s *session) Poll() bool {
	progress := s.takeSome()
	for c := range s.waits {
		if c.advance() {
			progress = true
		}
	}
	return progress
}

func (s *session) takeSome() bool {
	if s.ended != nil {
		return false // by another poller of the same round
	}
	for n := range takeAtOnce {
		d, ok, err := s.ring.Take()
		if err != nil {
			var bad *wire.Error
			errors.As(err, &bad)
			s.breakOff(bad)
			return false
		}
		if !ok {
			if full := s.ring.Full(); full && s.fullSince == 0 {
				s.fullSince = s.relay.loop.Now()
			}
			return n > 0
		}
		if s.fullSince > 0 {
			s.wasFull()
		}
		s.take(d)
	}
	return true
}

// wasFull counts the time for which the ring of completions had no room, for every connection: the
// client's posts have waited.
func (s *session) wasFull() {
	for _, c := range s.connections {
		if !c.hidden {
			c.stalled(ringFull, s.fullSince)
		}
	}
	s.fullSince = 0
}

// breakOff ends a session after a protocol violation of the client.
func (s *session) breakOff(why *wire.Error) {
	s.relay.warnings.warn(s.log, why, "a client is cut off")
	s.port.Send(wire.NewFailure(why), 0)
	s.end(wire.Errorf(why.Status, "client process %d of %s: %s", s.pid, s.relay.name(), why.Reason))
}

// Busy reports whether a timeline or an event is waited for: a GPU advances a timeline without a
// wake-up.
func (s *session) Busy() bool { return len(s.waits) > 0 }

// Arm asks the client to ring.
func (s *session) Arm() bool { return s.ring.Sleep() }

// Disarm ends Arm.
func (s *session) Disarm() { s.ring.Awake() }

func (s *session) take(d wire.Descriptor) {
	op := &operation{
		session: s, kind: d.Operation, cookie: d.Cookie, tag: d.Tag, offset: d.Offset, length: d.Length,
		wait: d.WaitTimeline, waitValue: d.WaitValue, signal: d.SignalTimeline, signalValue: d.SignalValue,
		remote: remote{d.Key, d.RemoteOffset},
	}
	c := s.visible(d.Connection)
	if !timelinesOf(d) {
		op.signal = wire.NoTimeline
		c.refuse(op, wire.StatusMalformed)
		return
	}
	op.inTurn, op.mayBuffer = d.Flags&wire.InTurn != 0, d.Flags&wire.BufferedSend != 0
	switch {
	case c == nil || c.isDown() && d.Operation == wire.OpCancel:
		op.finish(wire.StatusUnknownConnection)
	case c.isDown():
		op.finish(c.down.Status)
	case d.Operation == wire.OpCancel:
		c.cancel(op)
	default:
		status := wire.StatusOK
		switch {
		case isList(op.kind):
			status = op.bindList(c)
		case op.kind != wire.OpFlush:
			status = op.bind(d.Memory, c)
		}
		if status == wire.StatusOK {
			status = op.waitFor(d.WaitEvent, c)
		}
		if status != wire.StatusOK {
			c.refuse(op, status)
			return
		}
		c.post(op)
	}
}

// timelinesOf reports whether a descriptor's timelines are valid.
func timelinesOf(d wire.Descriptor) bool {
	for _, timeline := range []uint32{d.WaitTimeline, d.SignalTimeline} {
		if timeline != wire.NoTimeline && timeline >= wire.Timelines {
			return false
		}
	}
	switch d.Flags {
	case wire.InTurn:
		return d.WaitTimeline != wire.NoTimeline && d.SignalTimeline == wire.NoTimeline
	case wire.BufferedSend:
		return d.Operation == wire.OpSend
	}
	return d.Flags == 0
}
