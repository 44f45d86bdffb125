package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
)

// TestMain runs confine if a test executes this binary as confine.
func TestMain(m *testing.M) {
	if os.Args[0] == initName || os.Getenv("CONFINE_TEST") != "" {
		os.Unsetenv("CONFINE_TEST")
		main()
	}
	os.Exit(m.Run())
}

func command(t *testing.T, arguments ...string) *exec.Cmd {
	t.Helper()
	c := exec.Command("/proc/self/exe", arguments...)
	c.Env = append(os.Environ(), "CONFINE_TEST=1")
	c.Stderr = os.Stderr
	return c
}

func TestConfineStatusIsTheCommands(t *testing.T) {
	for script, want := range map[string]int{
		"exit 0":        0,
		"exit 3":        3,
		"kill -TERM $$": 128 + int(unix.SIGTERM),
	} {
		c := command(t, "sh", "-c", script)
		out, _ := c.Output()
		if got := c.ProcessState.ExitCode(); got != want {
			t.Errorf("%q: status %d, want %d (output %q)", script, got, want, out)
		}
	}
	c := command(t, "/no/such/command")
	c.Stderr = nil
	if err := c.Run(); err == nil {
		t.Error("a command that does not exist succeeded")
	}
}

func TestConfineCopiesAllOutput(t *testing.T) {
	out, err := command(t, "sh", "-c", "seq 200000").Output()
	if err != nil || strings.Count(string(out), "\n") != 200000 {
		t.Errorf("%d lines, %v", strings.Count(string(out), "\n"), err)
	}
}

// A silent command is killed; a command with occasional output is not.
func TestConfineIdleCommandIsKilled(t *testing.T) {
	c := command(t, "-idle", "300ms", "sh", "-c", "sleep 600")
	c.Stderr = nil
	if _, err := c.Output(); c.ProcessState.ExitCode() != statusIdle {
		t.Errorf("silent command: status %d, %v", c.ProcessState.ExitCode(), err)
	}
	if out, err := command(t, "-idle", "20s", "sh", "-c",
		"for i in 1 2 3; do echo $i; sleep 0.1; done").Output(); err != nil || len(out) == 0 {
		t.Errorf("command with output: %q, %v", out, err)
	}
}

// TestKilledTestBinaryLeavesNothing kills the command's parent, as a terminal or CI would: no
// process with a private session remains.
func TestKilledTestBinaryLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("an ordinary user has no PID namespace")
	}
	for name, kill := range map[string]unix.Signal{"SIGTERM": unix.SIGTERM, "SIGKILL": unix.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			pidFile := filepath.Join(t.TempDir(), "fifo")
			if err := unix.Mkfifo(pidFile, 0o600); err != nil {
				t.Fatal(err)
			}
			// The second process has a private session and holds the FIFO open.
			c := command(t, "sh", "-c", "setsid sh -c 'exec 9<>"+pidFile+"; echo ready; exec sleep 600' & wait")
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
				t.Fatalf("%q, %v", line, err)
			}
			if err := c.Process.Signal(kill); err != nil {
				t.Fatal(err)
			}
			_ = c.Wait() // the signal
			for deadline := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
				fd, err := unix.Open(pidFile, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
				if err == unix.ENXIO {
					return // no process has the file open
				}
				if err == nil {
					unix.Close(fd)
				}
				if deadline.Over() {
					t.Fatal("the process still holds the FIFO " + strconv.Quote(pidFile))
				}
			}
		})
	}
}
