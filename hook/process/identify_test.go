package process

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// child starts a program that runs until its standard input ends, and returns the identity of its
// process and a function that ends it.
func child(t *testing.T, program string, arguments ...string) (p Process, pidfd *os.File, end func()) {
	t.Helper()
	c := exec.Command(program, arguments...)
	input, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		_ = input.Close()
		_ = c.Wait() // the test may have killed the process
	})
	t.Cleanup(end)
	p, pidfd, err = Identify(c.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pidfd.Close() })
	return p, pidfd, end
}

// pidfds returns the number of this process's pidfds.
func pidfds(t *testing.T) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.Contains(to, "pidfd") { // otherwise perhaps closed meanwhile
			n++
		}
	}
	return n
}

func TestIdentifyReadsStartOfProgramWithHostileName(t *testing.T) {
	cat, err := exec.LookPath("cat")
	if err != nil {
		t.Fatal(err)
	}
	own, pidfd, err := Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	pidfd.Close()
	for _, name := range []string{"plain", "a b", ") R 1 1", "(((", "x) S"} {
		program := filepath.Join(t.TempDir(), name)
		if err := os.Symlink(cat, program); err != nil {
			t.Fatal(err)
		}
		p, pidfd, _ := child(t, program)
		if p.Boot != own.Boot || p.PID == own.PID || p.Start < own.Start || p.Start > own.Start+100*60*60*24 {
			t.Errorf("%q: %+v; this process is %+v", name, p, own)
		}
		if Ended(int(pidfd.Fd())) {
			t.Errorf("%q has ended", name)
		}
	}
}

func TestStartTimeIsField22(t *testing.T) {
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	want, err := strconv.ParseUint(strings.Fields(string(text))[21], 10, 64) // this program has no blank in its name
	if err != nil {
		t.Fatal(err)
	}
	if got, err := startTime(os.Getpid()); got != want || err != nil {
		t.Errorf("%d, %v; want %d", got, err, want)
	}
	for _, c := range []struct {
		name, stat string
		want       uint64
		valid      bool
	}{
		{"a stat", "1 (a) " + strings.Repeat("x ", 19) + "7 8", 7, true},
		{"no further field", "1 (a) " + strings.Repeat("x ", 19) + "7", 7, true},
		{"too few fields", "1 (a) " + strings.Repeat("x ", 19), 0, false},
		{"no number", "1 (a) " + strings.Repeat("x ", 19) + "y", 0, false},
		{"nothing", "", 0, false},
	} {
		if got, err := parseStart([]byte(c.stat)); got != c.want || (err == nil) != c.valid {
			t.Errorf("%s: %d, %v", c.name, got, err)
		}
	}
}

func TestIdentifyEndedProcessIsErrEnded(t *testing.T) {
	p, pidfd, end := child(t, "cat")
	fd := int(pidfd.Fd())
	if EndsWithin(fd, 0) || EndsWithin(fd, 3*time.Millisecond) {
		t.Error("the process has ended")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector closes files too
	before := pidfds(t)
	if lives, err := p.Lives(); !lives || err != nil {
		t.Errorf("lives: %t, %v", lives, err)
	}
	if n := pidfds(t); n != before {
		t.Errorf("%d pidfds are open, want %d", n, before)
	}
	if err := KillByPidfd(fd); err != nil {
		t.Fatal(err)
	}
	if err := WaitEnd(fd); err != nil {
		t.Fatal(err)
	}
	check := func(name string) {
		before := pidfds(t)
		if !Ended(fd) || !EndsWithin(fd, time.Minute) {
			t.Errorf("%s: the process has not ended", name)
		}
		_, f, err := Identify(p.PID)
		if e, ok := errors.AsType[*fault.Error](err); !errors.Is(err, ErrEnded) || f != nil || !ok ||
			e.Object != strconv.Itoa(p.PID) {
			t.Errorf("%s: %v", name, err)
		}
		if lives, err := p.Lives(); lives || err != nil {
			t.Errorf("%s: lives: %t, %v", name, lives, err)
		}
		if err := p.End(0); err != nil {
			t.Errorf("%s: End: %v", name, err)
		}
		if n := pidfds(t); n != before {
			t.Errorf("%s: %d pidfds are open, want %d", name, n, before)
		}
	}
	check("a zombie")
	end()
	check("a reaped process")
}

func TestIdentifyImpossibleNumberIsErrEnded(t *testing.T) {
	for _, pid := range []int{0, -1, 1 << 30} {
		if p, f, err := Identify(pid); !errors.Is(err, ErrEnded) || f != nil {
			t.Errorf("%d: %+v, %v", pid, p, err)
		}
	}
}

func TestOpenOfReusedNumberIsErrEnded(t *testing.T) {
	p, _, _ := child(t, "cat")
	for name, other := range map[string]Process{
		"another start": {p.PID, p.Start - 1, p.Boot}, "another boot": {p.PID, p.Start, "other"},
	} {
		before := pidfds(t)
		f, err := other.Open()
		if !errors.Is(err, ErrEnded) || f != nil {
			t.Errorf("%s: %v", name, err)
		}
		if lives, err := other.Lives(); lives || err != nil {
			t.Errorf("%s: lives: %t, %v", name, lives, err)
		}
		if err := other.End(0); err != nil {
			t.Errorf("%s: End: %v", name, err)
		}
		if n := pidfds(t); n != before {
			t.Errorf("%s: %d pidfds are open, want %d", name, n, before)
		}
	}
	f, err := p.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if Ended(int(f.Fd())) {
		t.Error("End of another process ended this one")
	}
}

func TestEndKillsProcessThatStays(t *testing.T) {
	p, pidfd, _ := child(t, "cat")
	before := pidfds(t)
	if err := p.End(time.Millisecond); err != nil && !unkillable(err) { // slow to end on a loaded machine
		t.Error(err)
	}
	if n := pidfds(t); n != before {
		t.Errorf("%d pidfds are open, want %d", n, before)
	}
	testutil.Until(t, "the process ends", func() bool { return Ended(int(pidfd.Fd())) })
}

func TestEndWaitsForProcessThatEnds(t *testing.T) {
	p, _, end := child(t, "cat")
	kill := KillByPidfd
	defer func() { KillByPidfd = kill }()
	KillByPidfd = func(int) error {
		t.Error("the process is killed")
		return nil
	}
	go end()
	if err := p.End(time.Minute); err != nil {
		t.Error(err)
	}
}

func unkillable(err error) bool {
	f, ok := errors.AsType[*fault.Error](err)
	return ok && f.Code == fault.Unkillable
}

func TestEndOfProcessThatSurvivesFails(t *testing.T) {
	kill := KillByPidfd
	defer func() { KillByPidfd = kill }()
	p, _, _ := child(t, "cat")
	for _, c := range []struct {
		name string
		kill error
		want func(error) bool
	}{
		{"a call that does not return", nil, unkillable},
		{"a process that ends meanwhile", unix.ESRCH, unkillable},
		{"no permission", unix.EPERM, func(err error) bool { return errors.Is(err, unix.EPERM) }},
	} {
		KillByPidfd = func(int) error { return c.kill }
		if err := p.End(0); !c.want(err) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestBootIDIsOneWord(t *testing.T) {
	id, err := BootID()
	if err != nil || len(id) != 36 || strings.ContainsAny(id, " \n") {
		t.Errorf("%q, %v", id, err)
	}
}

func TestWaitEndOfClosedDescriptorReturns(t *testing.T) {
	// poll(2) reports POLLNVAL for a descriptor that is not open.
	if err := WaitEnd(1 << 20); err != nil {
		t.Error(err)
	}
}
