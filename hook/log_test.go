package hook_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
)

// The log of a relay that writes without pause is bounded, and the relay keeps running, also
// after the end of the supervisor.
func TestTalkativeRelayLogIsBounded(t *testing.T) {
	t.Parallel()
	for _, by := range []string{config.LauncherFork, config.LauncherSystemd} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			var systemd *launcher
			if by == config.LauncherSystemd {
				systemd = startLauncher(t, h, nil)
			}
			init := startProcess(t)
			g := h.launchBy(t, by, "c", init.Process.Pid, "talks")
			path := filepath.Join(h.layout.GenerationDir(g.ID), "relay.log")
			testutil.Succeeds(t, "the end of what it says", func() error {
				text, err := os.ReadFile(path)
				if err == nil && !strings.Contains(string(text), fmt.Sprintf("test relay: %0986d\n", 19_999)) {
					err = fmt.Errorf("the log ends with %.200q", text[max(0, len(text)-200):])
				}
				return err
			})
			for _, name := range []string{path, path + ".1"} {
				if info, err := os.Stat(name); err != nil {
					t.Error(err)
				} else if info.Size() > 8<<20 {
					t.Errorf("%s has %d bytes", name, info.Size())
				}
			}
			// The supervisor replaces a relay that reports an error before the first success.
			h.state(t, g.ID, generation.StateReady)
			pid, err := h.ask(g.ID)
			if err != nil {
				t.Fatal(err)
			}
			testutil.Succeeds(t, "what it says to its supervisor", func() error {
				text, err := os.ReadFile(path)
				if err == nil && !strings.Contains(string(text), "test relay: a client") {
					err = fmt.Errorf("the log ends with %.200q", text[max(0, len(text)-200):])
				}
				return err
			})
			if s := h.state(t, g.ID, generation.StateReady).Status; s.Error != "" {
				t.Errorf("status %+v", s)
			}
			if systemd != nil {
				systemd.awaitJournal(t, "test relay: a client")
				pid := systemd.started()[0].Process.Pid
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
				waitDead(t, pid)
			} else {
				h.killSupervisor(t, g.ID)
			}
			for range 3 {
				if again, err := h.ask(g.ID); err != nil || again != pid {
					t.Errorf("after the end of the supervisor relay %d answers, want %d: %v", again, pid, err)
				}
			}
			end(init)
			waitDead(t, pid)
			testutil.Succeeds(t, "the end of the supervisor, whose threads end one by one", func() error {
				_, err := collector.Collect(h.layout)
				if left, _ := os.ReadDir(h.layout.Generations()); err == nil && len(left) > 0 {
					err = fmt.Errorf("%v", left)
				}
				return err
			})
			h.gone(t)
		})
	}
}
