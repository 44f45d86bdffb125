package integration_test

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config/paths"
)

// A demo interrupted by Ctrl-C in a terminal or by SIGTERM ends its containers, relays and software
// devices, removes its files, and reports the interruption.
func TestDemoInterruptedLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		runtime, step string
		signal        unix.Signal
		group         bool // the whole process group, as a terminal does
	}{
		{demo.RuntimeNone, "exchanging verified messages", unix.SIGTERM, false},
		{demo.RuntimeNone, "exchanging verified messages", unix.SIGINT, true},
		{demo.RuntimeNone, "measuring raw copies", unix.SIGTERM, false},
		{"runc", "starting the containers", unix.SIGTERM, false},
		{"runc", "exchanging verified messages", unix.SIGINT, true},
		{"crun", "exchanging verified messages", unix.SIGTERM, false},
	} {
		t.Run(fmt.Sprintf("%s/%s/%v", c.runtime, strings.ReplaceAll(c.step, " ", "-"), unix.SignalName(c.signal)),
			func(t *testing.T) {
				demoOptions(t, c.runtime, "")
				temporary, err := os.MkdirTemp("/tmp", "d") // short: socket paths have at most 107 bytes
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { os.RemoveAll(temporary) })
				if err := os.Chmod(temporary, 0o711); err != nil {
					t.Fatal(err)
				}
				cmd := exec.Command(filepath.Join(binaries, "peerlane"), "demo", "--runtime", c.runtime, "--gpus",
					testbed.GPUsSimulated, "--rates", "--bytes", "4GiB")
				if c.step == "measuring raw copies" {
					cmd.Args[len(cmd.Args)-1] = "1MiB"
				}
				cmd.Env = append(os.Environ(), "TMPDIR="+temporary)
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				stderr, err := cmd.StderrPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				pid := cmd.Process.Pid
				limit := time.AfterFunc(5*time.Minute, func() { _ = cmd.Process.Kill() })
				defer limit.Stop()
				var all strings.Builder
				roots, signalled := []string{}, false
				lines := bufio.NewScanner(stderr)
				for lines.Scan() {
					all.WriteString(lines.Text() + "\n")
					if signalled || !strings.HasPrefix(lines.Text(), c.step) {
						continue
					}
					signalled = true
					if roots, err = filepath.Glob(filepath.Join(temporary, "pldemo-*")); err != nil || len(roots) != 1 {
						t.Errorf("%v %v", roots, err)
					}
					target := pid
					if c.group {
						target = -pid
					}
					if err := unix.Kill(target, c.signal); err != nil {
						t.Error(err)
					}
				}
				if err := cmd.Wait(); err == nil || !cmd.ProcessState.Exited() || !signalled {
					t.Errorf("signalled: %v; exit: %v", signalled, err)
				}
				if text := all.String(); !strings.Contains(text, "the demo was interrupted") ||
					strings.Contains(text, "left on the host") {
					t.Errorf("it says\n%s", text)
				}
				for _, root := range roots {
					h := &testbed.Host{Root: root, Layout: paths.New(root), Binaries: filepath.Join(root, "none")}
					left, err := h.Look()
					if err != nil {
						t.Error(err)
					}
					for thing := range left {
						t.Errorf("left: %s", thing)
					}
				}
				if files, err := os.ReadDir(temporary); err != nil || len(files) > 0 {
					t.Errorf("left in TMPDIR: %v %v", files, err)
				}
				err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
					if err == nil && d.IsDir() && strings.Contains(path, fmt.Sprintf("peerlane-testbed-%d-", pid)) {
						t.Errorf("left: cgroup %s", path)
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
	}
}
