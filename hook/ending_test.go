package hook_test

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// endAs ends the relay of a test as the file "do" demands.
func endAs(supervisor net.Conn) {
	for name := filepath.Join(os.Getenv("TEST_DIR"), "do"); ; time.Sleep(10 * time.Millisecond) {
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		if err := os.Remove(name); err != nil {
			fatal(err)
		}
		what, more, _ := strings.Cut(string(text), ":")
		switch what {
		case "panic":
			panic(more)
		case "exit":
			fmt.Fprintln(os.Stderr, more)
			syscall.Exit(4)
		case "farewell":
			word, err := json.Marshal(map[string]launch.Ending{"ending": {Cause: more, Reason: "peerlane-test"}})
			if err == nil {
				_, err = supervisor.Write(word)
			}
			if err != nil {
				fatal(err)
			}
			syscall.Exit(1)
		case "eat":
			for all := [][]byte{}; ; { // until the kernel kills the process
				part := make([]byte, 1<<20)
				for i := 0; i < len(part); i += 4096 {
					part[i] = 1
				}
				all = append(all, part)
			}
		}
	}
}

// do makes the relay of a host end in a given way.
func (h host) do(t *testing.T, what string) {
	t.Helper()
	name := filepath.Join(h.dir, "do")
	if err := os.WriteFile(name+".new", []byte(what), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		t.Fatal(err)
	}
}

// journal listens on the journal socket of a host. nextEnd returns the next entry about the end
// of a relay.
func (h host) journal(t *testing.T) (nextEnd func() string) {
	t.Helper()
	path := filepath.Join(h.layout.Root, "run/systemd/journal/socket")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return func() string {
		t.Helper()
		if err := conn.SetReadDeadline(testutil.Deadline()); err != nil {
			t.Fatal(err)
		}
		for text := make([]byte, 64<<10); ; {
			n, err := conn.Read(text)
			if err != nil {
				t.Fatalf("the host's log hears of no end: %v", err)
			}
			if strings.Contains(string(text[:n]), "PEERLANE_CAUSE=") {
				return string(text[:n])
			}
		}
	}
}

// For an ended relay the journal of the host has one entry with cause, generation and container.
// The log of the generation, while the generation exists, has one line.
func TestEachEndLeavesOneLine(t *testing.T) {
	t.Parallel()
	another := unix.SIGHUP
	if signal.Ignored(another) { // by nohup
		another = unix.SIGINT
	}
	for _, c := range []struct {
		name, cause, want string
		end               func(t *testing.T, h host, g *generation.Generation, relay int)
		// gone: the container ends too, so the log of the generation is removed.
		gone bool
	}{
		{"signal", "killed", "signal 9 (killed)", func(t *testing.T, _ host, _ *generation.Generation,
			relay int) {
			kill(t, relay, unix.SIGKILL)
		}, false},
		{"another signal", "killed", fmt.Sprintf("signal %d (", another),
			func(t *testing.T, _ host, _ *generation.Generation, relay int) { kill(t, relay, another) }, false},
		{"panic", "panic", "panic: peerlane-test", func(t *testing.T, h host, _ *generation.Generation,
			_ int) {
			h.do(t, "panic:peerlane-test")
		}, false},
		{"status", "failed", "exit status 4: no libcuda",
			func(t *testing.T, h host, _ *generation.Generation, _ int) { h.do(t, "exit:no libcuda") }, false},
		{"lost GPU", "lost GPU", "peerlane-test", func(t *testing.T, h host, _ *generation.Generation,
			_ int) {
			h.do(t, "farewell:"+launch.EndGPU)
		}, false},
		{"CUDA", "sticky CUDA error", "peerlane-test", func(t *testing.T, h host, _ *generation.Generation,
			_ int) {
			h.do(t, "farewell:"+launch.EndCUDA)
		}, false},
		{"drain", "drained", "by the administrator", func(t *testing.T, h host, g *generation.Generation,
			_ int) {
			h.hold(t, g, control.Drain)
		}, false},
		{"stop", "stopped", "by the administrator", func(t *testing.T, h host, g *generation.Generation,
			_ int) {
			h.hold(t, g, control.Stop)
		}, false},
		{"container", "container ended", "the container has ended",
			func(t *testing.T, _ host, g *generation.Generation, _ int) { kill(t, g.Init.PID, unix.SIGKILL) }, true},
		{"supervisor stopped", "supervisor stopped", "was stopped",
			func(t *testing.T, _ host, g *generation.Generation, _ int) {
				kill(t, supervisorPID(t, g.ID), unix.SIGTERM)
			}, true},
		{"supervisor gone", "supervisor gone", "after the end of the supervisor",
			func(t *testing.T, h host, g *generation.Generation, relay int) {
				h.killSupervisor(t, g.ID)
				kill(t, g.Init.PID, unix.SIGKILL)
				waitDead(t, g.Init.PID)
				waitDead(t, relay)
				if _, err := collector.Collect(h.layout); err != nil {
					t.Fatal(err)
				}
			}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			nextEnd := h.journal(t)
			init := startProcess(t)
			g := h.launch(t, "the-container", init.Process.Pid, "ends")
			relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
			c.end(t, h, g, relay)
			entry := nextEnd()
			for _, want := range []string{
				"PEERLANE_CAUSE=" + c.cause + "\n", "PEERLANE_GENERATION=" + g.ID + "\n", "PEERLANE_CONTAINER=the-container\n",
				fmt.Sprintf("relay %d has ended: %s: ", relay, c.cause), c.want,
			} {
				if !strings.Contains(entry, want) {
					t.Errorf("the host's log lacks %q:\n%s", want, entry)
				}
			}
			if !c.gone {
				text, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(g.ID), "relay.log"))
				if err != nil {
					t.Fatal(err)
				}
				lines := regexp.MustCompile(`(?m)^.*event=relay-ended.*$`).FindAllString(string(text), -1)
				if len(lines) != 1 || !strings.Contains(lines[0], fmt.Sprintf("relay=%d", relay)) ||
					!strings.Contains(lines[0], "generation="+g.ID) ||
					!strings.Contains(lines[0], c.cause) {
					t.Errorf("the log of the generation has %q of:\n%s", lines, text)
				}
			}
			end(init)
			h.gone(t)
		})
	}
}

func kill(t *testing.T, pid int, signal unix.Signal) {
	t.Helper()
	if err := unix.Kill(pid, signal); err != nil {
		t.Fatal(err)
	}
}

func (h host) hold(t *testing.T, g *generation.Generation, how func(paths.Layout, string) error) {
	t.Helper()
	if err := how(h.layout, g.ID); err != nil {
		t.Fatal(err)
	}
}

// With log.format = "json" a line of the log of a generation is a JSON document with the
// generation and the container. The panic message of the Go runtime is such a document too.
func TestJSONLogHasDocumentPerLine(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	r := h.request("c", init.Process.Pid, "ends", lane(3))
	r.Config.Log.Format = config.LogJSON
	g, err := hook.Launch(h.layout, r)
	if err != nil {
		t.Fatal(err)
	}
	h.state(t, g.ID, generation.StateReady)
	h.do(t, "panic:peerlane-test")
	testutil.Succeeds(t, "the next relay", func() error {
		if s := h.info(t, g.ID).Status; s.Starts != 2 || s.State != generation.StateReady {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	for _, start := range reports[relayStart](t, h.dir, "start") {
		if !strings.Contains(strings.Join(start.Args, " "), "serve --log-format json") {
			t.Errorf("a relay was started with %q", start.Args)
		}
	}
	text, err := os.ReadFile(filepath.Join(h.layout.GenerationDir(g.ID), "relay.log"))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		var entry struct{ Msg, Generation, Container, Cause, Level, Time string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Errorf("%q: %v", line, err)
			continue
		}
		if entry.Generation != g.ID || entry.Container != "c" || entry.Level == "" || entry.Time == "" {
			t.Errorf("%s is not whole", line)
		}
		found[entry.Msg] = true
		found["cause "+entry.Cause] = true
	}
	for _, want := range []string{"panic: peerlane-test", "the relay has ended", "cause panic"} {
		if !found[want] {
			t.Errorf("no entry %q:\n%s", want, text)
		}
	}
	end(init)
	h.gone(t)
}

// The kernel kills a relay above the memory limit of the control group, and the log names that
// cause. Where cgroup2 has no memory controller, the limit is in cgroup version 1.
func TestRelayOutOfMemoryIsLogged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a control group")
	}
	h := newHost(t)
	nextEnd := h.journal(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "ends")
	relay := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	narrow(t, h, g, relay)
	// The next relay starts in the control group, where narrow moved the relay.
	kill(t, relay, unix.SIGKILL)
	nextEnd()
	testutil.Succeeds(t, "the next relay", func() error {
		if s := h.info(t, g.ID).Status; s.Starts != 2 || s.State != generation.StateReady {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	h.do(t, "eat")
	entry := nextEnd()
	if !strings.Contains(entry, "PEERLANE_CAUSE=out of memory\n") || !strings.Contains(entry, "relay.memory") {
		t.Errorf("the host's log has\n%s", entry)
	}
	testutil.Succeeds(t, "the one after it", func() error {
		if s := h.info(t, g.ID).Status; s.Starts != 3 || s.State != generation.StateReady {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	end(init)
	h.gone(t)
}

// narrow limits the memory of a supervisor and of the child processes of the supervisor.
func narrow(t *testing.T, h host, g *generation.Generation, relay int) {
	t.Helper()
	const maxBytes = "100000000" // a test relay uses about 30 MB
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		group := filepath.Join(root, h.layout.Cgroup(), g.ID)
		if os.WriteFile(filepath.Join(group, "memory.max"), []byte(maxBytes), 0) != nil {
			continue
		}
		// A host without swap lacks the file.
		if err := os.WriteFile(filepath.Join(group, "memory.swap.max"), []byte("0"), 0); err != nil &&
			!os.IsNotExist(err) {
			t.Fatal(err)
		}
		return
	}
	group := "/sys/fs/cgroup/memory/peerlane-test-" + g.ID
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skipf("no memory controller to be had: %v", err)
	}
	t.Cleanup(func() {
		testutil.Succeeds(t, "the control group", func() error { return os.Remove(group) })
	})
	for _, set := range [][2]string{
		{"memory.limit_in_bytes", maxBytes}, {"memory.swappiness", "0"}, {"cgroup.procs", fmt.Sprint(supervisorPID(t, g.ID))},
		{"cgroup.procs", fmt.Sprint(relay)},
	} {
		if err := os.WriteFile(filepath.Join(group, set[0]), []byte(set[1]), 0); err != nil {
			t.Skipf("no memory controller to be had: %v", err)
		}
	}
}
