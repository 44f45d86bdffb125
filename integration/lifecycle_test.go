package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
)

// Operations of engines on a container between start and end.

// do runs a command of the runtime on the container.
func (c *container) do(arguments ...string) {
	c.bed.Helper()
	if out, err := c.bed.runtime.Command(context.Background(), arguments...).CombinedOutput(); err != nil {
		c.bed.Fatalf("%s %s: %v: %s", c.bed.runtime.Name, strings.Join(arguments, " "), err, out)
	}
}

// exec runs a role as another process of the container, and returns the output.
func (c *container) exec(role ...string) []event {
	c.bed.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 2*patience)
	defer cancel()
	cmd := c.bed.runtime.Command(ctx, append([]string{"exec", c.id, "/usr/bin/test", "role"}, role...)...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		c.bed.Fatalf("exec %q in container %s: %v: %s%s", role, c.id, err, out, errs.Bytes())
	}
	var list []event
	for line := range bytes.Lines(out) {
		var s event
		if err := json.Unmarshal(line, &s); err != nil {
			c.bed.Fatalf("exec %q in container %s says %q: %v", role, c.id, line, err)
		}
		list = append(list, s)
	}
	return list
}

// goesOn requires that the container's client has moved data since the call.
func (c *container) goesOn() {
	c.bed.Helper()
	c.drain()
	c.next("round")
}

// drain discards the container's output so far, except errors.
func (c *container) drain() {
	c.bed.Helper()
	for {
		select {
		case s, ok := <-c.lines:
			if !ok || s.Kind == "error" {
				c.bed.Fatalf("container %s: %+v %s", c.id, s, c.stderr.String())
			}
		default:
			return
		}
	}
}

// A paused container is slow, not dead: no operation fails, however long the pause.
func TestPausedContainerFailsNoOperation(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			a, z := b.streaming("stream", "rounds")
			a.do("pause", a.id)
			time.Sleep(time.Second) // pending messages arrive
			a.drain()
			time.Sleep(6 * time.Second) // longer than the delay limit of a peer's heartbeat
			select {
			case s := <-a.lines:
				t.Fatalf("a paused container says %+v", s)
			case s := <-z.lines:
				t.Fatalf("the peer of a paused container says %+v", s)
			default:
			}
			if g := a.generation(); g.Status.State != generation.StateReady {
				t.Errorf("the relay of a paused container is %s", g.Status.State)
			}
			a.do("resume", a.id)
			a.goesOn()
		})
	}
}

// A process started by exec uses the same relay.
func TestExecUsesTheSameRelay(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			a, _ := b.streaming("stream", "rounds")
			if list := a.exec("hello"); len(list) != 1 || list[0].Kind != "hello" {
				t.Errorf("exec says %+v", list)
			}
			if list := a.exec("export"); len(list) != 0 {
				t.Errorf("an export by exec says %+v", list)
			}
			a.goesOn()
			if g := a.generation(); g.Status.Starts != 1 {
				t.Errorf("the relay was started %d times", g.Status.Starts)
			}
		})
	}
}

// Engines change limits of a running container (docker update), and rewrite the list of devices.
func TestUpdateKeepsRelayAndDevices(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			a, _ := b.streaming("stream", "rounds")
			a.do("update", "--pids-limit", "500", a.id)
			a.goesOn()
			if list := a.exec("export"); len(list) != 0 {
				t.Errorf("an export after an update says %+v", list)
			}
		})
	}
}

// The kernel kills a client that exceeds the container's memory limit. The relay is outside the
// container's control group, and survives.
func TestClientOutOfMemoryLeavesRelayRunning(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			limit := int64(256 << 20)
			b.edit = func(built *bundle.Bundle) {
				built.Spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &limit}
			}
			a, z := b.streaming("parent", "stream", "hog")
			z.mustLearn(time.Now(), "client process", a.id, "died")
			if e := a.next("child-ended"); e.Error != "signal: killed" {
				t.Errorf("the client ended by %q", e.Error)
			}
			if g := a.generation(); g.Status.State != generation.StateReady || g.Status.Starts != 1 {
				t.Errorf("the relay is %s after %d starts", g.Status.State, g.Status.Starts)
			}
		})
	}
}

// A package is upgraded between create and start of a container: the hook and the relay are those
// of the old package, and the relay's successor is the new program.
func TestUpgradeBetweenCreateAndStartKeepsHook(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			// Private copies of the programs, which the test replaces.
			installed := t.TempDir()
			upgrade := func() {
				for _, name := range []string{programs.Hook, programs.Relay} {
					install(t, filepath.Join(b.Binaries, name), filepath.Join(installed, name))
				}
			}
			built := b.Binaries
			upgrade()
			configure := func() {
				b.Binaries = installed
				if err := b.Configure(func(c *config.Config) { c.Relay.Slots, c.Relay.SlotSize = 4, 1<<20 }); err != nil {
					t.Fatal(err)
				}
				b.Binaries = built
			}
			configure()
			b.leavesNothing()
			g := b.gpu(b.lanes[0])
			bundle := b.bundle(g, testbed.Devices(g), "parent", "hello")
			id := b.ContainerID("upgraded")
			create := b.runtime.Command(context.Background(), "create", "--bundle", bundle.Dir, id)
			out, err := os.Create(filepath.Join(t.TempDir(), "out"))
			if err != nil {
				t.Fatal(err)
			}
			in, hold, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			create.Stdin, create.Stdout, create.Stderr = in, out, out
			if err := create.Run(); err != nil {
				text, _ := os.ReadFile(out.Name())
				t.Fatalf("create: %v: %s", err, text)
			}
			c := &container{bed: b, id: id}
			t.Cleanup(func() {
				if err := errors.Join(hold.Close(), b.runtime.Delete(context.Background(), id)); err != nil {
					t.Error(err)
				}
			})
			before := c.generation()
			for end := testutil.Begin(); before.Status.State != generation.StateReady; time.Sleep(10 * time.Millisecond) {
				if end.Over() {
					t.Fatalf("the relay is not ready: %+v", before.Status)
				}
				before = c.generation()
			}

			upgrade()
			configure()
			c.do("start", id)
			expect := func(kind string) {
				t.Helper()
				for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
					text, err := os.ReadFile(out.Name())
					if err == nil && strings.Contains(string(text), fmt.Sprintf(`"kind":%q`, kind)) {
						return
					}
					if end.Over() {
						t.Fatalf("the container says %s (%v)", text, err)
					}
				}
			}
			expect("hello")
			expect("child-ended")
			// The old relay dies: the successor runs the new program.
			kill(t, before.Status.Relay.PID)
			if list := c.exec("hello"); len(list) != 1 || list[0].Kind != "hello" {
				t.Errorf("after the upgrade exec says %+v", list)
			}
			after := c.generation()
			exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", after.Status.Relay.PID))
			if err != nil || exe != filepath.Join(installed, programs.Relay) {
				t.Errorf("the successor runs %s, %v", exe, err)
			}
		})
	}
}

// install replaces a file as a package manager does: atomically, and with a new inode.
func install(t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.Command("cp", from, to+".new").CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
	if err := os.Rename(to+".new", to); err != nil {
		t.Fatal(err)
	}
}

// criu refuses a container with an attached client. The container continues. A container without
// clients can be checkpointed; its relay ends, and the hook refuses to restore the container.
func TestCheckpointWithClientIsRefused(t *testing.T) {
	if out, err := exec.Command("criu", "check").CombinedOutput(); err != nil {
		t.Skipf("needs criu, and a kernel that it knows: %v: %s", err, out)
	}
	b := newBed(t, "runc", asItIs)
	b.nics()
	// criu needs iptables to lock the network of a container with a network namespace.
	b.edit = func(built *bundle.Bundle) {
		built.Spec.Linux.Namespaces = slices.DeleteFunc(built.Spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
			return n.Type == specs.NetworkNamespace
		})
	}
	images := t.TempDir()
	criu := func(command string, arguments ...string) (string, error) {
		arguments = append([]string{command, "--image-path", images, "--work-path", images}, arguments...)
		out, err := b.runtime.Command(context.Background(), arguments...).CombinedOutput()
		return string(out), err
	}
	a, z := b.streaming("stream", "rounds")
	if out, err := criu("checkpoint", a.id); err == nil {
		t.Errorf("a container with an attached client was checkpointed: %s", out)
	}
	a.goesOn()
	a.end()
	z.end()

	g := b.gpu(b.lanes[0])
	built := b.bundle(g, testbed.Devices(g), "parent", "hello")
	c := b.run(built)
	c.next("child-ended")
	if out, err := criu("checkpoint", c.id); err != nil {
		t.Fatalf("checkpoint: %v: %s", err, out)
	}
	c.end()
	out, err := criu("restore", "--bundle", built.Dir, "--detach", c.id)
	if err == nil || !strings.Contains(out, "a lane cannot be restored; start a new container") {
		t.Errorf("restore: %v: %s", err, out)
	}
}
