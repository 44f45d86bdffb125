//go:build vm

package vm_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/vm"
	"github.com/peerlane/peerlane/integration/vm/control"
)

// A fault in a guest must become an error with the end of the console's text within bounded time;
// otherwise a run of tests would hang or end without a cause.

func options(t *testing.T) vm.Options {
	t.Helper()
	builder := vm.Builder{Progress: t.Logf}
	image, err := builder.Image(t.Context(), vm.Small)
	if err != nil {
		t.Fatal(err)
	}
	// t.TempDir's path is too long for a socket.
	dir, err := os.MkdirTemp("", "vm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	o := vm.Options{Image: image, Dir: dir, Agent: filepath.Join(dir, "guest"), Share: t.TempDir(), Source: t.TempDir(),
		MemoryMiB: 1024}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", o.Agent,
		"github.com/peerlane/peerlane/integration/vm/guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return o
}

func start(t *testing.T, o vm.Options) *vm.Machine {
	t.Helper()
	m, err := vm.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Stop)
	return m
}

func demand(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

// forever is a process that does not end by itself.
func forever() control.Command { return control.Command{Argv: []string{"sleep", "infinity"}} }

func TestGuestPanicIsError(t *testing.T) {
	m := start(t, options(t))
	err := m.Run(t.Context(), control.Command{Argv: []string{"sh", "-c", "echo c > /proc/sysrq-trigger; sleep infinity"}},
		nil, nil, nil)
	demand(t, err, "the machine ended", "Kernel panic")
}

func TestGuestHangIsError(t *testing.T) {
	o := options(t)
	o.HangTimeout = 12 * time.Second
	m := start(t, o)
	if err := m.Freeze(); err != nil {
		t.Fatal(err)
	}
	demand(t, m.Run(t.Context(), forever(), nil, nil, nil), "hung", "the console's end")
}

func TestEndlessProcessIsError(t *testing.T) {
	m := start(t, options(t))
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("time limit reached"))
	defer cancel()
	demand(t, m.Run(ctx, forever(), nil, nil, nil), "sleep", "time limit reached", "the console's end")
	// The machine still works.
	var status *control.ExitError
	if err := m.Run(t.Context(), control.Command{Argv: []string{"pgrep", "sleep"}}, nil, nil, nil); !errors.As(err,
		&status) || status.Status != 1 {
		t.Errorf("looking for remaining processes (pgrep exits with 1 if none match): %v", err)
	}
}

func TestFullDiskIsError(t *testing.T) {
	m := start(t, options(t))
	sh := func(line string) (string, error) {
		var out bytes.Buffer
		err := m.Run(t.Context(), control.Command{Argv: []string{"sh", "-c", line}}, nil, &out, &out)
		return out.String(), err
	}
	for _, dir := range []string{"/var/tmp", "/tmp"} { // the disk, and memory
		out, err := sh("cd " + dir +
			"; fallocate -l $(df -B 1 --output=avail . | tail -n 1) full; dd if=/dev/zero of=more bs=64k count=16")
		var status *control.ExitError
		if !errors.As(err, &status) || !strings.Contains(out, "No space left on device") {
			t.Errorf("%s is full: %v\n%s", dir, err, out)
		}
		if out, err := sh("cd " + dir + "; rm full; echo more > more && cat more"); err != nil || out != "more\n" {
			t.Errorf("%s after that: %v\n%s", dir, err, out)
		}
	}
}

func TestMachineWithoutBootIsError(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*vm.Image)
		words  []string
	}{
		{"no kernel", func(i *vm.Image) { i.Kernel = empty }, []string{"QEMU said"}},
		{"no root file system", func(i *vm.Image) { i.Disk = empty }, []string{"the machine ended", "mount /dev/vda"}},
		{"no disk", func(i *vm.Image) { i.Disk = empty + "/none" }, []string{"QEMU said", "none"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := options(t)
			c.change(o.Image)
			m, err := vm.Start(t.Context(), o)
			if err == nil {
				m.Stop()
			}
			demand(t, err, c.words...)
		})
	}
}

func TestStoppingLeavesNoProcess(t *testing.T) {
	o := options(t)
	m := start(t, o)
	m.Stop()
	// Command lines of processes from this machine's folder contain its path.
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(lines) == 0 {
		t.Fatalf("%d processes: %v", len(lines), err)
	}
	for _, file := range lines {
		text, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(text), o.Dir+"/") { // otherwise the process has ended
			t.Errorf("%s is left: %q", filepath.Dir(file), text)
		}
	}
	if err := m.Run(t.Context(), forever(), nil, nil, nil); err == nil {
		t.Error("a process ran in a machine that was stopped")
	}
}
