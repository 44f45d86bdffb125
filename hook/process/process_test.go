package process

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
)

// start starts a program, which the test kills at its end.
func start(t *testing.T, program string, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.Command(program, args...)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
	})
	return c
}

// identify returns a running process and its pidfd.
func identify(t *testing.T, pid int) (Process, int) {
	t.Helper()
	p, pidfd, err := Identify(pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pidfd.Close() })
	return p, int(pidfd.Fd())
}

func TestIdentifyProgramWithHostileNameReadsItsStartTime(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), ") 1 2 3 4 (5 6")
	if err := os.WriteFile(path, text, 0o755); err != nil {
		t.Fatal(err)
	}
	c := start(t, path, "1000")
	testutil.Until(t, "the program has its name", func() bool {
		name, err := os.ReadFile("/proc/" + strconv.Itoa(c.Process.Pid) + "/comm")
		return err == nil && strings.HasPrefix(string(name), ") 1 2")
	})
	p, _ := identify(t, c.Process.Pid)
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(c.Process.Pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	// The file has 52 fields, of which the last 50 contain no space.
	fields := strings.Fields(string(stat))
	if want := fields[len(fields)-52+21]; strconv.FormatUint(p.Start, 10) != want {
		t.Errorf("start time %d, not %s", p.Start, want)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil || p.Boot != strings.TrimSpace(string(boot)) || p.PID != c.Process.Pid {
		t.Errorf("%+v, boot %q, %v", p, boot, err)
	}
}

func TestIdentifyEndedProcessReturnsErrEnded(t *testing.T) {
	zombie := start(t, "true")
	_, pidfd, err := Identify(zombie.Process.Pid)
	if err == nil {
		if err := WaitEnd(int(pidfd.Fd())); err != nil {
			t.Fatal(err)
		}
		pidfd.Close()
	}
	if _, _, err := Identify(zombie.Process.Pid); !errors.Is(err, ErrEnded) {
		t.Errorf("a zombie: %v", err)
	}
	if err := zombie.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Identify(zombie.Process.Pid); !errors.Is(err, ErrEnded) {
		t.Errorf("an absent process: %v", err)
	}
	for _, pid := range []int{0, -1} {
		if _, file, err := Identify(pid); err == nil {
			file.Close()
			t.Errorf("process %d was identified", pid)
		}
	}
}

func TestIdentifyThreadReturnsErrEnded(t *testing.T) {
	tid, release := make(chan int), make(chan struct{})
	defer close(release)
	for range 2 { // one of them may have the first thread
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			tid <- unix.Gettid()
			<-release
		}()
	}
	first, second := testutil.Receive(t, "a thread", tid), testutil.Receive(t, "a second thread", tid)
	id := first
	if id == os.Getpid() {
		id = second
	}
	if _, _, err := Identify(id); !errors.Is(err, ErrEnded) {
		t.Errorf("thread %d: %v", id, err)
	}
}

func TestOpenOtherProcessWithTheNumberReturnsErrEnded(t *testing.T) {
	own, _ := identify(t, os.Getpid())
	earlier, boot := own, own
	earlier.Start--
	boot.Boot = "00000000-0000-0000-0000-000000000000"
	for name, p := range map[string]Process{"another start": earlier, "another boot": boot} {
		if pidfd, err := p.Open(); !errors.Is(err, ErrEnded) || pidfd != nil {
			t.Errorf("%s: %v", name, err)
		}
		if lives, err := p.Lives(); lives || err != nil {
			t.Errorf("%s: lives %t, %v", name, lives, err)
		}
		if err := p.End(0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	pidfd, err := own.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer pidfd.Close()
	if lives, err := own.Lives(); !lives || err != nil {
		t.Errorf("this process: lives %t, %v", lives, err)
	}
}

func TestEndRunningProcessIsKilled(t *testing.T) {
	c := start(t, "sleep", "1000")
	p, pidfd := identify(t, c.Process.Pid)
	if EndsWithin(pidfd, time.Millisecond) || Ended(pidfd) {
		t.Fatal("a running process has ended")
	}
	// The limit is for the wait after the kill, too.
	testutil.Succeeds(t, "end of the process", func() error { return p.End(100 * time.Millisecond) })
	if err := WaitEnd(pidfd); err != nil || !Ended(pidfd) {
		t.Errorf("the process has not ended: %v", err)
	}
	_ = c.Wait() // the signal is in the state
	if status := c.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
		t.Errorf("the process ended by %v", status.Signal())
	}
}

// replaceKill replaces KillByPidfd until the end of the test.
func replaceKill(t *testing.T, kill func(pidfd int) error) {
	own := KillByPidfd
	KillByPidfd = kill
	t.Cleanup(func() { KillByPidfd = own })
}

func TestEndEndingProcessIsNotKilled(t *testing.T) {
	replaceKill(t, func(int) error { t.Error("the process was killed"); return nil })
	c := exec.Command("cat")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	ended, err := testutil.StartChild(c)
	if err != nil {
		t.Fatal(err)
	}
	p, _ := identify(t, c.Process.Pid)
	result := make(chan error, 1)
	go func() { result <- p.End(time.Hour) }()
	in.Close()
	if err := testutil.Receive(t, "the end of the process", result); err != nil {
		t.Error(err)
	}
	testutil.Receive(t, "the child", ended)
}

func TestEndSurvivingProcessReturnsUnkillable(t *testing.T) {
	c := start(t, "sleep", "1000")
	p, pidfd := identify(t, c.Process.Pid)
	replaceKill(t, func(int) error { return nil })
	var f *fault.Error
	if err := p.End(time.Millisecond); !errors.As(err, &f) || f.Code != fault.Unkillable ||
		f.Object != strconv.Itoa(p.PID) || f.Remedy == "" {
		t.Errorf("%v", err)
	}
	replaceKill(t, func(int) error { return unix.EPERM })
	if err := p.End(time.Millisecond); !errors.Is(err, unix.EPERM) {
		t.Errorf("without permission: %v", err)
	}
	// The process ends between the wait and the signal.
	replaceKill(t, func(fd int) error {
		if err := errors.Join(unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0), WaitEnd(fd)); err != nil {
			t.Error(err)
		}
		return unix.ESRCH
	})
	if err := p.End(time.Millisecond); err != nil {
		t.Errorf("after the end: %v", err)
	}
	if !Ended(pidfd) {
		t.Error("the process runs")
	}
}
