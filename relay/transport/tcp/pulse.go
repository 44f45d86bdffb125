package tcp

import (
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// pulse sends the heartbeats of every Peer of a relay with one timer. The heartbeats of two sets of
// connections between two relays leave and arrive together: an idle relay wakes twice an interval,
// however many sets it has. The zero interval is invalid.
type pulse struct {
	interval time.Duration

	mu    sync.Mutex
	peers map[*Peer]bool
	ended chan struct{} // closed when the last Peer leaves; nil without Peers
	timer *os.File      // of ended's goroutine; nil without Peers, and for a Ticker in its place
	// newTimer is newTimer, except in tests.
	newTimer func(time.Duration) (*os.File, error)
}

func newPulse(interval time.Duration) *pulse {
	return &pulse{interval: interval, peers: map[*Peer]bool{}, newTimer: newTimer}
}

// newTimer makes a timerfd, which is read through the Go runtime's poller. An idle relay wakes for
// little else: a timer of the runtime, or a system call that the runtime knows of, wakes the runtime's
// monitor as well, which naps up to fifty times for 20 µs before it sleeps again.
func newTimer(interval time.Duration) (*os.File, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	every := unix.NsecToTimespec(interval.Nanoseconds())
	// Heartbeats of the two sides at the same moment would come before or after the pulse by chance.
	first := unix.NsecToTimespec((interval/2 + rand.N(interval/2)).Nanoseconds())
	if err := unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: every, Value: first}, nil); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("timerfd_settime", err)
	}
	return os.NewFile(uintptr(fd), "heartbeats"), nil
}

func (u *pulse) add(p *Peer) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.peers[p] = true
	if u.ended == nil {
		u.ended = make(chan struct{})
		var err error
		if u.timer, err = u.newTimer(u.interval); err != nil {
			logrus.WithError(err).Warn(noKernelTimer)
		}
		go u.run(u.ended, u.timer)
	}
}

const noKernelTimer = "heartbeats use a timer of the Go runtime, which takes more processor time"

func (u *pulse) remove(p *Peer) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.peers[p] {
		return
	}
	if delete(u.peers, p); len(u.peers) == 0 {
		close(u.ended)
		if u.timer != nil {
			u.timer.Close()
		}
		u.ended, u.timer = nil, nil
	}
}

func (u *pulse) run(ended chan struct{}, timer *os.File) {
	if timer != nil {
		err := expired(timer)
		for ; err == nil; err = expired(timer) {
			u.tick(ended)
		}
		if !errors.Is(err, os.ErrClosed) {
			logrus.WithError(err).Warn(noKernelTimer)
		}
	}
	// The last Peer has left, or the kernel gives no timer.
	ticks := time.NewTicker(u.interval)
	defer ticks.Stop()
	for {
		select {
		case <-ended:
			return
		case <-ticks.C:
			u.tick(ended)
		}
	}
}

// expired waits for a timerfd. The error is os.ErrClosed after its close.
func expired(timer *os.File) error {
	raw, err := timer.SyscallConn()
	if err != nil {
		return err
	}
	var failed unix.Errno
	err = raw.Read(func(fd uintptr) bool {
		var expirations uint64
		_, _, failed = unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&expirations)), unsafe.Sizeof(expirations))
		return failed != unix.EAGAIN
	})
	if err == nil && failed != 0 {
		err = os.NewSyscallError("read", failed)
	}
	return err
}

// tick does nothing in a goroutine whose Peers have left: a new goroutine has the later Peers.
func (u *pulse) tick(ended chan struct{}) {
	u.mu.Lock()
	if u.ended != ended {
		u.mu.Unlock()
		return
	}
	peers := slices.Collect(maps.Keys(u.peers))
	u.mu.Unlock()
	for _, p := range peers {
		p.beat()
	}
}

// beat checks the peer, and sends a heartbeat if no frame waits. It does not block.
func (p *Peer) beat() {
	p.look()
	p.hearBeats()
	p.watchSilence()
	if p.turns() && !p.outbox.waits() {
		p.sendFrames(heartbeat, 0)
	}
}

var heartbeat = appendFrame(nil, 0, frameBeat)
