// Package relay is the process that serves a container: it takes exports and operations from the
// container's clients, owns staging memory on server GPUs, and moves bytes to and from the relays
// of further containers.
//
// The state of the data path belongs to a single event loop (package poll). Blocking work, such as
// CUDA's imports and handshakes with remote relays, runs on separate goroutines, which return the
// result to the loop.
//
//	session   one client process: its ring, memories, connections, listeners
//	lane      one GPU: a context, copy queues, staging
//	sender    one connection's sending end
//	receiver  one connection's receiving end
package relay

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// handshakeTimeout limits steps that only a misbehaving client can delay: the first message after a
// connect, and the answer of another relay.
const handshakeTimeout = 5 * time.Second

// Relay serves a container.
type Relay struct {
	loop    *poll.Loop
	clients *net.UnixListener
	peers   *net.UnixListener
	init    int // pidfd of the container's init, -1 for none
	host    wire.UUID
	// container is the configuration's, a string, for messages of any goroutine.
	container atomic.Value

	// Of the loop.
	config      launch.Config
	configs     int // how many configurations came
	lanes       []*lane
	sessions    map[uint64]*session
	lastSession uint64
	listeners   map[wire.UUID]*listener      // by token
	regions     map[wire.UUID]*exposedRegion // by key
	dying       *wire.Error
	cause       string // of dying: one of package launch
	counters    counters
	limits      launch.Limits
	used        quota

	networkState

	claims     claims
	takingBack chan struct{} // of who frees lent memory
	bounced    atomic.Uint64 // bytes of host memory that lanes stage in
	own        hostAccount
	// worn is the error of memory that could not be released. The event loop owns worn.
	worn error
	// lists: a client makes list operations, or will.
	lists atomic.Bool
	// examining: the contexts are being asked whether they work.
	examining atomic.Bool

	warnings   rateLimitedLogger
	driverLock sync.Mutex
	driver     *cuda.Driver
}

// counters are the relay's own, in bytes but for the last.
type counters struct {
	sent, received, direct, staged uint64
	badHandles                     uint64 // senders that had no listener's handle
}

// New makes a relay that serves on the listeners. It ends when the process
// behind the pidfd ends (-1: none).
func New(clients, peers *net.UnixListener, init int) (*Relay, error) {
	host, err := bootID()
	if err != nil {
		return nil, err
	}
	l, err := poll.New()
	if err != nil {
		return nil, err
	}
	r := &Relay{
		loop: l, clients: clients, peers: peers, init: init, host: host,
		sessions:   map[uint64]*session{},
		listeners:  map[wire.UUID]*listener{},
		regions:    map[wire.UUID]*exposedRegion{},
		claims:     claims{held: map[string]uint64{}},
		takingBack: make(chan struct{}, takingBackAtOnce),
	}
	if init >= 0 {
		if err := l.Watch(init, func(uint32) { r.end(launch.EndContainer, r.containerEnded()) }); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// bootID identifies a host and its boot.
func bootID() (wire.UUID, error) {
	const file = "/proc/sys/kernel/random/boot_id"
	text, err := os.ReadFile(file)
	if err != nil {
		return wire.UUID{}, err
	}
	id, err := wire.ParseGPU(string(text[:min(36, len(text))]))
	if err != nil {
		return id, fmt.Errorf("%s: %w", file, err)
	}
	return id, nil
}

// Configure sets or extends the relay's lanes. Lanes are only ever added. Configure may be called
// before and during Run.
func (r *Relay) Configure(c launch.Config) error {
	if err := c.Check(); err != nil {
		return err
	}
	// The loop may not run yet: then it runs this first.
	r.loop.Do(func() {
		r.config = c
		r.configs++
		r.limit(c.Limits)
		r.own.setLimit(c.OwnHostMemory)
		r.claims.admitHost(c.HostAdmission)
		r.container.Store(c.Container)
		for _, spec := range c.Lanes {
			i := slices.IndexFunc(r.lanes, func(l *lane) bool { return l.spec.GPU.BusID == spec.GPU.BusID })
			if i < 0 {
				i = len(r.lanes)
				r.lanes = append(r.lanes, &lane{relay: r, spec: spec, ended: newDirections()})
			}
			r.lanes[i].copies = r.lanes[i].copies || spec.Copy
		}
		r.endIfWrong()
		r.onNetwork()
		if c.Reserve == launch.ReserveStart {
			for _, l := range r.lanes {
				go l.reserve()
			}
		}
	})
	return nil
}

// Run serves until the container ends, Stop, or a CUDA error after which this
// process cannot go on.
func (r *Relay) Run() error {
	go r.accept(r.clients, &pendingHandshakes{from: packet.Clients}, r.greetClient)
	go r.accept(r.peers, &pendingHandshakes{from: packet.Relays}, r.greetPeer)
	r.loop.Run()
	r.clients.Close()
	r.peers.Close()
	if r.hosts != nil {
		r.hosts.close()
	}
	// The loop has ended, and with it every user of these fields. A socket that closes says that
	// nothing is written any more.
	for _, l := range r.lanes {
		if l.device == nil {
			continue
		}
		for _, q := range slices.Concat(l.push.queues, l.pull.queues) {
			q.Wait()
		}
		if err := l.device.On(l.device.Driver.CtxSynchronize); err != nil {
			logrus.WithError(err).Warn("waiting for the last copies")
		}
	}
	for _, s := range r.sessions {
		for _, c := range s.connections {
			c.port.Close()
			c.side.free()
		}
		r.farewell(s)
		s.port.Close()
	}
	if r.dying != nil && r.dying.Status == wire.StatusCUDA {
		return r.dying
	}
	return nil
}

// Ending is the cause of the relay's end, after the return of Run; a zero one where it did not
// begin to.
func (r *Relay) Ending() launch.Ending {
	if r.dying == nil {
		return launch.Ending{}
	}
	return launch.Ending{Cause: r.cause, Reason: r.dying.Reason}
}

// Stop ends the relay: clients and peers are told why. Where the container has ended that is the
// reason: a process that stops the relay then has only detected the end earlier.
func (r *Relay) Stop(why string) {
	r.loop.Do(func() {
		if r.initEnded() {
			r.end(launch.EndContainer, r.containerEnded())
			return
		}
		r.end(launch.EndSignal, wire.Errorf(wire.StatusPeerRelayDied, "the relay of %s was stopped: %s", r.name(),
			why).On(r.name()))
	})
}

// End is Stop for the administrator's reason, which clients hear as well.
func (r *Relay) End(reason string) {
	r.loop.Do(func() {
		r.end(launch.EndRequest, wire.Errorf(wire.StatusPeerRelayDied, "the relay of %s %s", r.name(), reason).On(r.name()))
	})
}

// farewell sends the last message to a client, after the last write into the client's memory.
func (r *Relay) farewell(s *session) {
	if r.dying == nil {
		return
	}
	own := *r.dying
	if own.Status == wire.StatusPeerRelayDied {
		own.Status = wire.StatusRelayDied
	}
	s.port.Send(wire.NewFailure(&own), 0)
}

// end tells everybody and leaves once that is sent.
func (r *Relay) end(cause string, why *wire.Error) {
	if r.dying != nil {
		return
	}
	r.dying, r.cause = why, cause
	if r.init >= 0 {
		r.loop.Unwatch(r.init)
	}
	logrus.WithFields(logrus.Fields{"cause": cause, "reason": why.Reason}).Info("ending")
	for _, s := range r.sessions {
		s.end(why)
	}
	// Messages leave meanwhile; Run waits for our own copies.
	time.AfterFunc(100*time.Millisecond, r.loop.Stop)
}

// failed looks at a CUDA error. After a sticky error every further call fails, so that only a new
// process can serve this container. That ends when the loop comes to it: the caller is in the
// middle of an operation.
func (r *Relay) failed(err error) {
	if cuda.Sticky(err) {
		cause := launch.EndCUDA
		if cuda.DeviceLost(err) {
			cause = launch.EndGPU
		}
		r.loop.Do(func() {
			r.end(cause, wire.Errorf(wire.StatusCUDA, "the relay of %s ends after a CUDA error: %v", r.name(), err))
		})
	}
}

// examine looks whether an error says that this process cannot go on. examine may block, and is not
// called on the loop. The contexts report the loss, regardless of the error: a context that cannot
// be made on a GPU does not end lanes of further GPUs.
func (r *Relay) examine(err error) {
	if err == nil {
		return
	}
	var devices []*device.Device
	r.loop.Call(func() {
		for _, l := range r.lanes {
			if l.device != nil {
				devices = append(devices, l.device)
			}
		}
		if len(devices) == 0 {
			r.failed(err)
		}
	})
	// One at a time: a driver may be slow to answer, and the next failure checks again.
	if !r.examining.CompareAndSwap(false, true) {
		return
	}
	defer r.examining.Store(false)
	for _, d := range devices {
		if lost := d.Lost(); lost != nil {
			r.loop.Do(func() { r.failed(fmt.Errorf("%w, seen after: %v", lost, err)) })
		}
	}
}

// wear records that the relay could not release memory, for example pinned client memory. Only
// the end of this process frees the memory, so the relay ends when no client is attached.
func (r *Relay) wear(err error) {
	logrus.WithError(err).Error("memory is not released; this relay ends when no client is attached, and " +
		"the supervisor starts another")
	if r.worn == nil {
		r.worn = err
	}
	r.failed(err)
	r.rest()
}

// rest ends a worn relay without clients.
func (r *Relay) rest() {
	if r.worn != nil && len(r.sessions) == 0 {
		r.end(launch.EndKept, wire.Errorf(wire.StatusCUDA,
			"the relay of %s ends, because it could not release memory: %w", r.name(), r.worn))
	}
}

func (r *Relay) accept(listener *net.UnixListener, silent *pendingHandshakes,
	greet func(packet.Conn, *pendingHandshakes)) {
	for {
		for silent.from.Crowded() { // the backlog holds new clients
			time.Sleep(10 * time.Millisecond)
		}
		conn, err := listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// No descriptor left, say. Others may close theirs; a listener that is
			// given up serves nobody ever again.
			r.warnings.warn(logrus.NewEntry(logrus.StandardLogger()), err, "accepting a connection")
			time.Sleep(100 * time.Millisecond)
			continue
		}
		greeted := packet.Conn{UnixConn: conn}
		silent.begin(greeted)
		go greet(greeted, silent)
	}
}

// cuda opens the driver at its first use, and tries again after a failure: it
// may have been loaded since.
func (r *Relay) cuda() (*cuda.Driver, error) {
	r.driverLock.Lock()
	defer r.driverLock.Unlock()
	if r.driver == nil {
		d, err := cuda.Open()
		if err != nil {
			return nil, wire.Errorf(wire.StatusNoCUDA, "%w", &fault.Error{Code: fault.NoCUDA,
				Operation: "the relay cannot use the CUDA driver", Cause: err})
		}
		r.driver = d
	}
	return r.driver, nil
}

// laneOf finds the lane of a GPU. laneOf may block for the driver.
func (r *Relay) laneOf(gpu wire.UUID) (*lane, error) {
	var lanes []*lane
	if !r.loop.Call(func() { lanes = r.lanes }) {
		return nil, errEnding
	}
	var given []string
	for _, l := range lanes {
		id, err := l.identity()
		if err != nil {
			return nil, err
		}
		if id == gpu {
			return l, nil
		}
		given = append(given, fmt.Sprintf("%s (%s)", id.GPU(), l.spec.GPU.BusID))
	}
	return nil, wire.Errorf(wire.StatusWrongGPU, "%w", &fault.Error{Code: fault.NoLane,
		Operation: gpu.GPU() + " has no lane in this container",
		Cause:     errors.New("it was given the lane of " + join(given)),
		Remedy:    "start it with --device peerlane.dev/lane=" + gpu.GPU()}).On(gpu.GPU())
}

func join(list []string) string {
	switch len(list) {
	case 0:
		return "no GPU"
	case 1:
		return list[0]
	}
	text := list[0]
	for _, item := range list[1 : len(list)-1] {
		text += ", " + item
	}
	return text + " and " + list[len(list)-1]
}

var errEnding = wire.Errorf(wire.StatusRelayDied, "the relay is ending")

// name is this relay's name for remote sides.
func (r *Relay) name() string {
	container, _ := r.container.Load().(string) // none before the first configuration
	return "container " + container
}

func (r *Relay) containerEnded() *wire.Error {
	return wire.Errorf(wire.StatusPeerContainerDied, "%s ended", r.name()).On(r.name())
}

// initEnded reports whether the container's init is known to have ended.
func (r *Relay) initEnded() bool {
	if r.init < 0 {
		return false
	}
	fds := []unix.PollFd{{Fd: int32(r.init), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}
