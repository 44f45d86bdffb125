package relay_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/launch"
)

// errnos are the possible errors of a system call. Calls that cannot fail have no errors: a munmap
// of a whole mapping, epoll_ctl to remove, F_GET_SEALS of a memfd.
var errnos = map[string][]unix.Errno{
	"memfd_create":    {unix.EMFILE, unix.ENFILE, unix.ENOMEM},
	"ftruncate":       {unix.ENOMEM, unix.ENOSPC},
	"fallocate":       {unix.ENOSPC, unix.ENOMEM, unix.EINTR},
	"mmap":            {unix.ENOMEM, unix.EAGAIN, unix.ENFILE},
	"F_DUPFD_CLOEXEC": {unix.EMFILE, unix.ENOMEM},
	"F_ADD_SEALS":     {unix.EBUSY, unix.ENOMEM},
	"statx":           {unix.ENOMEM, unix.EIO},
	"fstat":           {unix.ENOMEM, unix.EIO},
	"fstatfs":         {unix.ENOMEM, unix.EIO},
	"eventfd2":        {unix.EMFILE, unix.ENFILE, unix.ENOMEM},
	"pipe2":           {unix.EMFILE, unix.ENFILE},
	"epoll_create1":   {unix.EMFILE, unix.ENFILE, unix.ENOMEM},
	"epoll_ctl":       {unix.ENOSPC, unix.ENOMEM},
	"sendmsg":         {unix.ENOBUFS, unix.ENOMEM, unix.EINTR},
	// Beside the errors of messages.
	"sendmsg of descriptors": {unix.ETOOMANYREFS},
	"recvmsg":                {unix.ENOMEM, unix.ECONNRESET, unix.EINTR},
	"socketpair":             {unix.EMFILE, unix.ENFILE, unix.ENOMEM},
	"socket":                 {unix.EMFILE, unix.ENFILE, unix.ENOBUFS},
	"connect":                {unix.EAGAIN, unix.ECONNREFUSED, unix.ENOMEM},
	"accept4":                {unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ECONNABORTED, unix.EINTR},
	"setsockopt":             {unix.ENOMEM},
	"shutdown":               {unix.ENOTCONN},
	"SO_PEERPIDFD":           {unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOPROTOOPT},
	"pidfd_open":             {unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ESRCH},
	"openat":                 {unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EIO},
	"prctl":                  {unix.EINVAL},
	"write":                  {unix.ENOSPC, unix.EIO},
	"clone":                  {unix.EAGAIN, unix.ENOMEM},
}

// word returns the name of the call, without the object.
func (f *callFault) word() string {
	word, _, _ := strings.Cut(f.call, " ")
	return word
}

// isNamed reports whether a text names the fault.
func (f *callFault) isNamed(text string) bool {
	if f.errno == unix.ECONNREFUSED { // of a socket without a listener
		return strings.Contains(text, "has ended") || strings.Contains(text, "connection refused")
	}
	return f.errno != 0 && strings.Contains(strings.ToLower(text), f.errno.Error())
}

// atTheDoor reports whether the call takes a socket from the backlog. Only the log reports the
// failure of such a call.
func (f *callFault) atTheDoor() bool { return f.word() == "accept4" || f.word() == "epoll_ctl" }

// mayEnd reports whether a process may end: if the process cannot begin, and if only the end of
// the process frees memory. Go ends a process without a thread.
func (f *callFault) mayEnd(cold bool) bool {
	switch f.word() {
	case "fallocate", "clone":
		return true
	case "epoll_create1", "eventfd2", "epoll_ctl", "openat", "F_DUPFD_CLOEXEC":
		return cold
	}
	return false
}

// callFaults returns faults of recorded calls, every error and a delay, at the first and the last
// call of a name, and with everything at some calls between.
func callFaults(calls map[string]int, all bool) (list []*callFault) {
	for _, name := range slices.Sorted(maps.Keys(calls)) {
		n := calls[name]
		some := []int{0, n - 1}
		if all {
			some = append(some, 1, 2, 3, 5, 8, n/4, n/2, n*3/4)
		}
		slices.Sort(some)
		f := callFault{call: name, times: 1}
		for _, f.after = range slices.Compact(some) {
			if f.after >= n {
				continue
			}
			can := errnos[f.word()]
			if name != f.word() {
				can = slices.Concat(can, errnos[name])
			}
			for _, f.errno = range can {
				list = append(list, new(f))
			}
			f.errno, f.delay = 0, 200*time.Millisecond
			list = append(list, new(f))
			f.delay = 0
		}
	}
	return list
}

// beginWatched starts the process of a stage, and answers the kernel's notifications.
func (s *stage) beginWatched(log string, faults ...*callFault) (*subject, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(ends[0]), "ours"), os.NewFile(uintptr(ends[1]), "theirs")
	own := *s
	own.files = append(slices.Clone(s.files), theirs)
	p, err := own.begin(log, "PEERLANE_TEST_WATCHED=1")
	theirs.Close()
	if err != nil {
		ours.Close()
		return nil, err
	}
	p.control = ours
	if p.watcher, err = watch(p.cmd.Process.Pid, ours, faults...); err != nil {
		said, stopped := p.stop()
		return nil, errors.Join(fmt.Errorf("%w: %s", err, said), stopped)
	}
	return p, nil
}

// watchedFrom makes the process at the remote end of a descriptor watch this process, if the
// environment requests it.
func watchedFrom(control int) error {
	if os.Getenv("PEERLANE_TEST_WATCHED") == "" {
		return nil
	}
	unix.CloseOnExec(control)
	return beWatched(control)
}

// sitting is a process with a sequence of faults, and the successors of the process.
type sitting struct {
	keeper
	stage *stage
	fault *callFault
	cold  bool
}

// sit starts a process with faults from the first call on.
func (s *stage) sit(log string, faults ...*callFault) (*sitting, error) {
	p, err := s.beginWatched(log, faults...)
	if err != nil {
		return nil, err
	}
	k := &sitting{stage: s}
	if len(faults) > 0 {
		k.fault, k.cold = faults[len(faults)-1], true
	}
	k.successor = func() (*subject, error) { return s.beginWatched(log) }
	k.isNamed = func(text string) bool { return k.fault != nil && k.fault.isNamed(text) }
	k.mayEnd = func() bool { return k.fault.mayEnd(k.cold) }
	k.keep(p)
	return k, nil
}

// arm has the process meet a fault from now on.
func (k *sitting) arm(f *callFault) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fault, k.cold, k.ends = f, false, 0
	k.now.watcher.arm(f)
}

// pass runs the program until a fault has struck, if a fault does, and then until the program works
// again.
func (k *sitting) pass(f *callFault) (struck bool, err error) {
	var told error
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\nthe clients were told: %v", err, told)
		}
	}()
	first, _, _ := k.current()
	var failedAt time.Time
	for good := 0; ; {
		p, replaced, err := k.current()
		if err != nil {
			return true, err
		}
		failed := k.stage.exercise()
		told = errors.Join(told, failed)
		struck = replaced || first.watcher.hasStruck()
		switch {
		case failed == nil:
			if good++; struck && (good > 1 || told != nil) || good > 2 {
				return struck, k.look(p, f, told)
			}
			continue
		case errors.Is(failed, context.DeadlineExceeded):
			return struck, errors.New("it does not end")
		case errors.Is(failed, errWrongBytes):
			return struck, failed
		case f.delay > 0 || f.errno == unix.EINTR:
			return struck, errors.New("that is no error")
		}
		if good = 0; failedAt.IsZero() {
			failedAt = time.Now()
		}
		if time.Since(failedAt) > endTimeout {
			return struck, errors.New("it does not work again")
		}
		// A lane without staging is not tried again for a second.
		time.Sleep(20 * time.Millisecond)
	}
}

// look checks for leftovers.
func (k *sitting) look(p *subject, f *callFault, told error) error {
	if told != nil && !f.isNamed(told.Error()) && !f.mayEnd(k.cold) {
		if !f.atTheDoor() {
			return errors.New("no client is told of the call")
		}
	}
	if now, replaced, err := k.current(); err != nil || replaced || now != p {
		return err
	}
	err := p.settles(k.stage.idle)
	if err != nil && p.hasEnded(time.Second) {
		return nil // next looks why
	}
	return err
}

// Every fallible system call of a relay fails once with every possible error: the program ends, the
// caller gets the cause, the next program works with the right bytes, and no descriptor, mapping,
// goroutine or stream is left. A run without faults records the calls.
//
// PEERLANE_FAULTS=all tries every fault; the default is a fault of every call.
func TestRelaySystemCallFaultsEndOperationsWithErrors(t *testing.T) {
	tried := map[string]bool{}
	all := os.Getenv("PEERLANE_FAULTS") == "all"
	only := os.Getenv("PEERLANE_FAULT")
	for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
		s := newStage(t, route)
		t.Run(s.String(), func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "log")
			k, err := s.sit(log)
			if errors.Is(err, errNotAsked) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			// One-time calls of the first program, and calls of every program.
			var once, each map[string]int
			if err = s.exercise(); err == nil {
				once = k.now.watcher.seen()
				err = errors.Join(s.exercise(), s.exercise())
				each = k.now.watcher.seen()
			}
			if err == nil {
				s.idle, err = k.now.rests()
			}
			if err != nil {
				said, stopped := k.stop()
				t.Fatalf("%v, %v: %s", err, stopped, said)
			}
			for name := range each {
				each[name] /= 2 // of a single program
				delete(once, name)
			}
			t.Logf("calls at the first program %v, at each %v", once, each)
			warm, cold := callFaults(each, all), callFaults(once, all)
			if !all {
				warm, cold = sample(warm, tried), sample(cold, tried)
			}
			met := 0
			count := func(struck bool) {
				if struck {
					met++
				}
			}
			for _, f := range warm {
				if !strings.HasPrefix(f.String(), only) {
					continue
				}
				k.arm(f)
				struck, err := k.pass(f)
				count(struck)
				if err == nil {
					continue
				}
				said, stopped := k.stop()
				t.Errorf("PEERLANE_FAULT=%q: %v\n%v\nits log: %.4000s", f, err, stopped, said)
				if k, err = s.sit(log); err != nil {
					t.Fatal(err)
				}
			}
			if said, err := k.stop(); err != nil {
				t.Errorf("%v: %s", err, said)
			}
			for _, f := range cold {
				if !strings.HasPrefix(f.String(), only) {
					continue
				}
				k, err := s.sit(log, f)
				if err != nil {
					t.Fatal(err)
				}
				struck, err := k.pass(f)
				count(struck)
				said, stopped := k.stop()
				if err = errors.Join(err, stopped); err != nil {
					t.Errorf("PEERLANE_FAULT=%q: %v\nits log: %.4000s", f, err, said)
				}
			}
			t.Logf("%d faults, of which %d were met", len(warm)+len(cold), met)
			if met == 0 {
				t.Error("no fault was met")
			}
		})
	}
}

// sample returns a fault of every call without a tried fault, at least three faults. The errors
// vary.
func sample(list []*callFault, tried map[string]bool) (some []*callFault) {
	random := rand.New(rand.NewPCG(9, 4)) // the same in every run
	random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	for _, f := range list {
		if f.delay == 0 && !tried[f.word()] {
			tried[f.word()] = true
			some = append(some, f)
		}
	}
	for _, f := range list[:min(3, len(list))] {
		if len(some) < 3 && !slices.Contains(some, f) {
			some = append(some, f)
		}
	}
	return some
}

// goroutines asks a watched process for the number of goroutines.
func (p *subject) goroutines() (n int, err error) {
	if _, err := p.control.Write([]byte{1}); err != nil {
		return 0, err
	}
	var count [4]byte
	if _, err := p.control.Read(count[:]); err != nil {
		return 0, err
	}
	return int(count[0]) | int(count[1])<<8, nil
}
