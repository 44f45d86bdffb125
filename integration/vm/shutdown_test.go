//go:build vm

package vm_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/vm"
	"github.com/peerlane/peerlane/integration/vm/control"
)

// A host with relays as systemd units and running containers shuts down.
func TestHostWithRelaysShutsDown(t *testing.T) {
	source, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	o := options(t)
	builder := vm.Builder{Progress: t.Logf}
	if o.Image, err = builder.Image(t.Context(), vm.Full); err != nil {
		t.Fatal(err)
	}
	o.Source, o.MemoryMiB = source, 0
	for _, dir := range []string{"bin", "test"} {
		if err := os.Mkdir(filepath.Join(o.Share, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	run := func(name string, arguments ...string) {
		t.Helper()
		c := exec.CommandContext(t.Context(), name, arguments...)
		c.Dir = source
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%s %q: %v\n%s", name, arguments, err, out)
		}
	}
	// `make test-vm` has built these files.
	run("cp", "bin/peerlane-hook", "bin/peerlane-relay", filepath.Join(o.Share, "bin"))
	run("cp", "bin/libpeerlane-cuda-sim.so", filepath.Join(o.Share, "test"))
	test := filepath.Join(o.Share, "test/units.test")
	run("go", "test", "-c", "-tags", "vm", "-vet=off", "-o", test, "./integration/vm/cases/units")

	m := start(t, o)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 6*time.Minute, errors.New("no shutdown"))
	defer cancel()
	err = m.Run(ctx, control.Command{
		Argv: []string{"/share/test/units.test", "-test.run=^TestPowerOffWithRelaysCompletes$", "-test.v"},
		Env: []string{"PEERLANE_VM_POWEROFF=1", "PEERLANE_TEST_BINARIES=/share/bin",
			"HOME=/root"}, Dir: "/source/integration/vm/cases/units",
	}, nil, t.Output(), t.Output())
	// QEMU exits during the conversation, so the error varies.
	if err == nil || ctx.Err() != nil {
		t.Fatalf("it goes on: %v", err)
	}
	// The console has systemd's messages.
	console, err := os.ReadFile(filepath.Join(o.Dir, "console.log"))
	if err != nil {
		t.Fatal(err)
	}
	if bad := regexp.MustCompile(`(?m)^.*peerlane-relay.*(timed out|Killing|SIGKILL).*$`).FindAll(console,
		-1); len(bad) > 0 {
		t.Errorf("systemd had to insist: %s", bad)
	}
	if !regexp.MustCompile(`(?i)power.?off|power down`).Match(console) {
		t.Errorf("the machine ended, but not by a power-off; the console:\n%s", console)
	}
}
