// Package poll is the event loop of a relay and of a software device's engine: a goroutine on a fixed OS
// thread that owns the state of the data path, so that the state needs no lock and a CUDA context
// stays current.
//
// The loop spins while there is progress and for SpinTime after it, or as long as a spinner
// requests; then it sleeps: in epoll if every event makes a descriptor ready, or for short naps if
// only polling can find an event (a copy's event, a timeline that a GPU advances). A running loop
// queries descriptors only occasionally: that is a system call.
package poll

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// SpinTime is how long the loop looks again and again before it sleeps.
const SpinTime = 50 * time.Microsecond

// A nap is a sixteenth of the wait so far, up to lastNap: the loop notices an event early relative
// to the wait, and a wait of milliseconds costs a few per cent of a core.
const (
	napShare = 16
	lastNap  = 50 * time.Microsecond
)

// lookTime is how long a loop that runs does not ask for descriptors that are ready: the query is
// the only system call of a busy relay, and urgent messages come through memory.
const lookTime = 5 * time.Microsecond

// Poller is something that has to be looked at.
type Poller interface {
	// Poll does the pending work and reports whether there was any.
	Poll() bool
	// Busy reports whether something is under way that only Poll can see.
	Busy() bool
	// Arm is called before the loop sleeps in epoll: from now on new work must
	// make a watched descriptor ready. It reports whether work came meanwhile.
	Arm() bool
	// Disarm is called after the sleep.
	Disarm()
}

// spinner is a Poller that may keep the loop from sleep for longer than SpinTime.
type spinner interface {
	Poller
	// Spin returns how long after the last progress the loop spins.
	Spin() time.Duration
}

// Loop is the event loop. Do, Call and Stop may be called from any goroutine,
// everything else only on the loop.
type Loop struct {
	epoll   int
	wake    int // eventfd
	watched map[int32]func(events uint32)
	pollers []Poller
	stopped bool
	start   time.Time
	now     time.Duration // of this round
	looked  time.Duration // for descriptors, the last time

	mu       sync.Mutex
	tasks    []func()
	sleeping bool
	ended    bool
}

// New makes a loop; Run runs it.
func New() (*Loop, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epoll)
		return nil, os.NewSyscallError("eventfd", err)
	}
	l := &Loop{epoll: epoll, wake: wake, watched: map[int32]func(uint32){}, start: time.Now()}
	if err := l.Watch(wake, func(uint32) { drain(wake) }); err != nil {
		unix.Close(wake)
		unix.Close(epoll)
		return nil, err
	}
	return l, nil
}

// drain takes the count out of a non-blocking eventfd.
func drain(eventfd int) {
	var count [8]byte
	// EAGAIN says that it was empty; nothing else can go wrong with an eventfd.
	_, _ = unix.Read(eventfd, count[:])
}

// Ring adds one to an eventfd.
func Ring(eventfd int) {
	one := [8]byte{1}
	// EAGAIN says that the count is full, so that the reader wakes anyway.
	_, _ = unix.Write(eventfd, one[:])
}

// Do queues f to run on the loop. It reports false when the loop has ended and f will not
// run.
func (l *Loop) Do(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		l.queue(f)
	}
	return !l.ended
}

// queue queues a task; the caller holds the lock, so that the loop does not end and close the
// eventfd.
func (l *Loop) queue(f func()) {
	l.tasks = append(l.tasks, f)
	if l.sleeping {
		l.sleeping = false // it is rung once
		Ring(l.wake)
	}
}

// Lock takes a lock that the loop takes as well, and that everybody holds for an instant only. It
// tries for a while first: parking and waking the loop, which is bound to a thread, takes a hundred
// times as long.
func Lock(m *sync.Mutex) {
	for range lockTries {
		if m.TryLock() {
			return
		}
	}
	m.Lock()
}

// lockTries take some ten microseconds.
const lockTries = 4000

// Call runs f on the loop and waits for it. It reports false when the loop has
// ended and f will not run.
func (l *Loop) Call(f func()) bool {
	done := make(chan bool, 1)
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return false
	}
	l.queue(func() { f(); done <- true })
	l.mu.Unlock()
	return <-done
}

// Stop makes Run return.
func (l *Loop) Stop() { l.Do(func() { l.stopped = true }) }

// Watch calls f with the epoll events whenever fd is readable or hung up.
func (l *Loop) Watch(fd int, f func(events uint32)) error {
	return l.watch(fd, unix.EPOLLIN|unix.EPOLLRDHUP, f)
}

func (l *Loop) watch(fd int, events uint32, f func(uint32)) error {
	event := unix.EpollEvent{Events: events, Fd: int32(fd)}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
		return fmt.Errorf("watching descriptor %d: %w", fd, os.NewSyscallError("epoll_ctl", err))
	}
	l.watched[int32(fd)] = f
	return nil
}

// WatchEdges only ends the loop's sleep, at each write to an eventfd. It does not read: a stranger
// with the eventfd could make the call block.
func (l *Loop) WatchEdges(eventfd int) error {
	return l.watch(eventfd, unix.EPOLLIN|unix.EPOLLET, func(uint32) {})
}

// Unwatch ends Watch and WatchEdges; call it before fd is closed.
func (l *Loop) Unwatch(fd int) {
	if _, ok := l.watched[int32(fd)]; !ok {
		return
	}
	delete(l.watched, int32(fd))
	// The descriptor is open and watched, so that this cannot fail.
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil)
}

// Now is when this round of the loop began, since the loop was made: a clock that
// can be looked at for every operation.
func (l *Loop) Now() time.Duration { return l.now }

// Add registers a poller.
func (l *Loop) Add(p Poller) { l.pollers = append(l.pollers, p) }

// Remove takes a poller away; it may be called from within Poll.
func (l *Loop) Remove(p Poller) {
	kept := make([]Poller, 0, len(l.pollers))
	for _, other := range l.pollers {
		if other != p {
			kept = append(kept, other)
		}
	}
	l.pollers = kept
}

// Run runs the loop on the calling goroutine until Stop.
func (l *Loop) Run() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Naps of microseconds are pointless with the default slack of 50 µs; if the kernel refuses the
	// option, the sleeps are longer, and correct.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0)

	last := time.Since(l.start)
	for !l.stopped {
		l.now = time.Since(l.start)
		progress := l.runTasks()
		for _, p := range l.pollers {
			if p.Poll() {
				progress = true
			}
		}
		if l.now-l.looked >= lookTime && l.dispatch(0) {
			progress = true
		}
		if progress {
			last = l.now
			continue
		}
		// The spin does not yield: for a goroutine bound to a thread a yield costs two wake-ups of
		// threads, longer than the wait. The feeder of the loop may run on the core's sibling
		// thread.
		waited := l.now - last
		if waited < SpinTime || waited < l.spinTime() {
			pause()
			continue
		}
		if l.busy() {
			if l.arm() {
				l.sleepShortly(min(waited/napShare, lastNap))
				l.looked = l.now - lookTime // it may have woken for a descriptor
			}
			l.disarm()
			continue
		}
		if l.arm() {
			l.dispatch(-1)
			last = time.Since(l.start)
		}
		l.disarm()
	}
	l.end()
}

func (l *Loop) runTasks() bool {
	Lock(&l.mu)
	tasks := l.tasks
	l.tasks = nil
	l.mu.Unlock()
	for _, task := range tasks {
		task()
	}
	return len(tasks) > 0
}

func (l *Loop) spinTime() (most time.Duration) {
	for _, p := range l.pollers {
		if s, is := p.(spinner); is {
			most = max(most, s.Spin())
		}
	}
	return most
}

func (l *Loop) busy() bool {
	for _, p := range l.pollers {
		if p.Busy() {
			return true
		}
	}
	return false
}

// arm reports whether the loop may sleep until a descriptor is ready.
func (l *Loop) arm() bool {
	Lock(&l.mu)
	l.sleeping = true
	idle := len(l.tasks) == 0
	l.mu.Unlock()
	for _, p := range l.pollers {
		if p.Arm() {
			idle = false
		}
	}
	return idle
}

func (l *Loop) disarm() {
	Lock(&l.mu)
	l.sleeping = false
	l.mu.Unlock()
	for _, p := range l.pollers {
		p.Disarm()
	}
}

// dispatch waits up to timeout milliseconds (-1: for ever) for descriptors.
func (l *Loop) dispatch(timeout int) bool {
	var events [64]unix.EpollEvent
	n, err := unix.EpollWait(l.epoll, events[:], timeout)
	if err != nil {
		return false // EINTR; the descriptor itself is ours and valid
	}
	if timeout != 0 { // it has slept
		l.now = time.Since(l.start)
	}
	l.looked = l.now
	for _, e := range events[:n] {
		// An earlier handler of this round may have taken the watch away.
		if f := l.watched[e.Fd]; f != nil {
			f(e.Events)
		}
	}
	return n > 0
}

// sleepShortly naps, or wakes earlier for a descriptor.
func (l *Loop) sleepShortly(nap time.Duration) {
	timeout := unix.NsecToTimespec(nap.Nanoseconds())
	fds := []unix.PollFd{{Fd: int32(l.epoll), Events: unix.POLLIN}}
	_, _ = unix.Ppoll(fds, &timeout, nil) // a signal only ends the nap early
}

// end runs the tasks queued before the end, so that no Call waits for ever.
func (l *Loop) end() {
	for {
		l.mu.Lock()
		tasks := l.tasks
		l.tasks = nil
		if len(tasks) == 0 {
			l.ended = true
			l.mu.Unlock()
			break
		}
		l.mu.Unlock()
		for _, task := range tasks {
			task()
		}
	}
	unix.Close(l.wake)
	unix.Close(l.epoll)
}
