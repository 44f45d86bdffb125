//go:build vm

// Package packages_test runs in the full image: the packages of `make packages`, installed on a
// host with systemd.
package packages_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
)

const (
	newer = "/source/dist"
	older = newer + "/work/older"
)

// engines are units in place of container engines.
var engines = []string{"docker.service", "containerd.service"}

func TestMain(m *testing.M) {
	if err := inside.SystemIsUp(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// dpkg installs the packages of a directory.
func dpkg(t testing.TB, dir string) {
	t.Helper()
	arguments := []string{"--install", "--force-confold", "--force-unsafe-io"}
	for _, name := range []string{"peerlane", "libpeerlane"} {
		found, err := filepath.Glob(filepath.Join(dir, name+"_*_amd64.deb"))
		if err != nil || len(found) != 1 {
			t.Fatalf("%s has %v (%v); `make packages` makes them", dir, found, err)
		}
		arguments = append(arguments, found...)
	}
	inside.Command(t, "dpkg", append([]string{"--force-downgrade"}, arguments...)...)
	// Wait for the refreshes that the installation started, each of which replaces the refresh
	// before; a disabled unit has no refresh.
	inside.Eventually(t, "the refresh", func() (bool, string) {
		if jobs := inside.Command(t, "systemctl", "list-jobs", "--no-legend"); strings.Contains(jobs,
			"peerlane-cdi-refresh.service") {
			return false, jobs
		}
		got := property(t, "peerlane-cdi-refresh.service", "ActiveState")
		return got == "inactive", got
	})
	if result := property(t, "peerlane-cdi-refresh.service", "Result"); result != "success" {
		t.Errorf("the refresh ends with %s", result)
	}
}

func property(t testing.TB, unit, name string) string {
	t.Helper()
	return strings.TrimSpace(inside.Command(t, "systemctl", "show", "--value", "--property="+name, unit))
}

// invocations returns the invocation ids of units that must not restart.
func invocations(t testing.TB, units ...string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, unit := range append(slices.Clone(engines), units...) {
		if all[unit] = property(t, unit, "InvocationID"); all[unit] == "" {
			t.Errorf("%s does not run", unit)
		}
	}
	return all
}

// host has Peerlane installed, the recorded GPUs on the simulator, and containers.
type host struct {
	testing.TB
	*testbed.Host
	runtime *bundle.Runtime
	bundle  *bundle.Bundle
}

func newHost(t testing.TB) *host {
	t.Helper()
	root, err := os.MkdirTemp("/var/tmp", "packages")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	h := &host{TB: t}
	if h.Host, err = testbed.New(root, "/usr/libexec/peerlane", testbed.GPUsSimulated); err != nil {
		t.Fatal(err)
	}
	h.Layout = paths.New("/")
	if err := h.Configure(func(c *config.Config) { c.Relay.Slots, c.Relay.SlotSize = 4, 1<<20 }); err != nil {
		t.Fatal(err)
	}
	if h.runtime, err = bundle.FindRuntime("runc", h.RuntimeState()); err != nil {
		t.Fatal(err)
	}
	lanes, err := h.TwoClients()
	if err != nil {
		t.Fatal(err)
	}
	gpu, err := h.Plan.GPU(lanes[0].GPU)
	if err != nil {
		t.Fatal(err)
	}
	busybox := bundle.File{Host: "/bin/busybox", Container: "/bin/busybox"}
	if h.bundle, err = h.Bundle("c", busybox, testbed.Devices(gpu), "sh", "-c", "read end"); err != nil {
		t.Fatal(err)
	}
	return h
}

// container is a container that runs until end is called; the bundle exists in advance.
type container struct {
	h      *host
	id     string
	in     io.Closer
	ended  chan error
	output bytes.Buffer
}

// patience is ten times the duration of a start in an emulated machine.
const patience = 3 * time.Minute

// start starts a container and waits until its relay serves.
func (h *host) start(name string) (*container, generation.Info) {
	h.Helper()
	c := &container{h: h, id: h.ContainerID(name), ended: make(chan error, 1)}
	cmd := h.runtime.Run(context.Background(), h.bundle, c.id)
	cmd.Stderr = &c.output
	in, err := cmd.StdinPipe()
	if err != nil {
		h.Fatal(err)
	}
	c.in = in
	if err := cmd.Start(); err != nil {
		h.Fatal(err)
	}
	go func() { c.ended <- cmd.Wait() }()
	for end := testutil.BeginFor(patience); ; time.Sleep(200 * time.Millisecond) {
		select {
		case err := <-c.ended:
			h.Fatalf("container %s ended: %v: %s", c.id, err, c.output.String())
		default:
		}
		if g, ok := c.generation(); ok && g.Status.State == generation.StateReady {
			return c, g
		}
		if end.Over() {
			c.in.Close()
			h.Fatalf("container %s has no relay", c.id)
		}
	}
}

func (c *container) generation() (generation.Info, bool) {
	c.h.Helper()
	all, err := generation.List(c.h.Layout)
	if err != nil {
		c.h.Fatal(err)
	}
	i := slices.IndexFunc(all, func(i generation.Info) bool { return i.Container.ID == c.id })
	if i < 0 {
		return generation.Info{}, false
	}
	return all[i], true
}

func (c *container) end() {
	c.h.Helper()
	c.in.Close()
	select {
	case <-c.ended:
	case <-testutil.After(patience):
		c.h.Errorf("container %s does not end", c.id)
	}
}

// goesOn requires that a container has the same relay as before, and that the relay serves.
func (c *container) goesOn(t *testing.T, before generation.Info) {
	t.Helper()
	current, ok := c.generation()
	if !ok || current.Status.Relay.PID != before.Status.Relay.PID || current.ID != before.ID {
		t.Fatalf("container %s had relay %+v, and has %+v", c.id, before.Status, current.Status)
	}
	ctx, cancel := testutil.WithLimit(t.Context(), patience)
	defer cancel()
	s, err := client.Dial(ctx, filepath.Join(c.h.Layout.SocketDir(current.ID), paths.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Statistics(ctx); err != nil {
		t.Error(err)
	}
}

// ownFiles lists the paths with Peerlane's name.
func ownFiles(t testing.TB) []string {
	t.Helper()
	// dpkg keeps lists of installed files; the tests' own files are elsewhere.
	return strings.Fields(inside.Command(t, "find", "/etc", "/usr", "/var/lib", "/run", "-xdev", "-name", "*peerlane*",
		"-not", "-path", "/var/lib/dpkg/*", "-not", "-name", "peerlane-vm*"))
}

func TestPackageUnderSystemdKeepsRelays(t *testing.T) {
	for _, unit := range engines {
		text := "[Service]\nExecStart=/bin/sleep infinity\n"
		if err := os.WriteFile(filepath.Join("/etc/systemd/system", unit), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	inside.Command(t, "systemctl", "daemon-reload")
	inside.Command(t, "systemctl", append([]string{"start"}, engines...)...)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := exec.Command("journalctl", "--no-pager", "--lines=80").CombinedOutput()
			t.Logf("%s", out)
		}
	})
	before := ownFiles(t)
	running := invocations(t)

	dpkg(t, older)
	enabled := []string{"peerlane-anchor.service", "peerlane-relay.socket", "peerlane-cdi-refresh.service",
		"peerlane-cdi-refresh.path"}
	if got := strings.Fields(inside.Command(t, "systemctl", append([]string{"is-enabled"}, enabled...)...)); !slices.Equal(
		got, []string{"enabled", "enabled", "enabled", "enabled"}) {
		t.Errorf("%v are %v", enabled, got)
	}
	inside.Command(t, "systemctl", "is-active", "peerlane-relay.socket", "peerlane-cdi-refresh.path")
	if err := paths.New("/").CheckAnchor(); err != nil {
		t.Errorf("after the installation the anchor is not mounted: %v", err)
	}
	if out, err := exec.Command("systemctl", "is-system-running").CombinedOutput(); err != nil {
		t.Errorf("without a GPU the system is %s", out)
	}
	if group := inside.Command(t, "getent", "group", "peerlane-relay"); !strings.Contains(group, ":2130706432:") {
		t.Errorf("the group of relays is %s", group)
	}
	if softdep := inside.Command(t, "modprobe", "--showconfig"); !strings.Contains(softdep,
		"softdep nvidia post: nvidia-peermem") && !strings.Contains(softdep, "softdep nvidia post: nvidia_peermem") {
		t.Error("modprobe does not know of nvidia-peermem")
	}
	order := property(t, "peerlane-cdi-refresh.service", "Before") + " " + property(t, "peerlane-cdi-refresh.service",
		"After")
	for _, unit := range append(slices.Clone(engines), "podman-restart.service", "openibd.service",
		"systemd-modules-load.service") {
		if !slices.Contains(strings.Fields(order), unit) {
			t.Errorf("the refresh has no order with %s: %s", unit, order)
		}
	}

	t.Run("retry", func(t *testing.T) {
		configuration := "/etc/peerlane/config.toml"
		text, err := os.ReadFile(configuration)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(configuration, []byte("[nothing]\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := exec.Command("systemctl", "start", "peerlane-cdi-refresh.service").Run(); err == nil {
			t.Error("a refresh succeeds with a configuration that cannot be")
		}
		inside.Eventually(t, "another attempt", func() (bool, string) {
			got := property(t, "peerlane-cdi-retry.service", "ActiveState")
			return got == "activating", got
		})
		if err := os.WriteFile(configuration, text, 0o644); err != nil {
			t.Fatal(err)
		}
		inside.Command(t, "systemctl", "stop", "peerlane-cdi-retry.service")
		inside.Command(t, "systemctl", "start", "peerlane-cdi-refresh.service")
	})

	// The plan of the recorded host differs from the plan of this machine: disable the refresh, as
	// an administrator would, so that the plan stays.
	inside.Command(t, "systemctl", "disable", "--now", "peerlane-cdi-refresh.service", "peerlane-cdi-refresh.path")
	h := newHost(t)
	first, started := h.start("first")
	socket := property(t, "peerlane-relay.socket", "InvocationID")
	configuration, err := os.ReadFile(h.Layout.ConfigFile())
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ name, dir string }{{"upgrade", newer}, {"downgrade", older}} {
		t.Run(step.name, func(t *testing.T) {
			dpkg(t, step.dir)
			first.goesOn(t, started)
			if program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", started.Status.Relay.PID)); err != nil ||
				program != "/usr/libexec/peerlane/peerlane-relay (deleted)" {
				t.Errorf("program of the relay: %s (%v); a package did not replace it", program, err)
			}
			second, _ := h.start(step.name)
			second.end()
			if now, err := os.ReadFile(h.Layout.ConfigFile()); err != nil || !bytes.Equal(now, configuration) {
				t.Errorf("the configuration has changed (%v)", err)
			}
			if got := property(t, "peerlane-relay.socket", "InvocationID"); got != socket {
				t.Error("the socket was restarted")
			}
			if diff := cmp.Diff(running, invocations(t)); diff != "" {
				t.Errorf("engines were restarted (-before +after):\n%s", diff)
			}
			out, _ := exec.Command("systemctl", "is-enabled", "peerlane-cdi-refresh.service").Output()
			if got := strings.TrimSpace(string(out)); got != "disabled" {
				t.Errorf("a disabled unit is %s", got)
			}
		})
	}

	t.Run("removal", func(t *testing.T) {
		inside.Command(t, "dpkg", "--force-unsafe-io", "--remove", "peerlane")
		first.goesOn(t, started)
		if got := property(t, "peerlane-relay.socket", "ActiveState"); got != "inactive" {
			t.Errorf("the socket is %s", got)
		}
		output := inside.Command(t, "sh", "-c", "dpkg --force-unsafe-io --purge peerlane libpeerlane 2>&1")
		if paths.New("/").CheckAnchor() == nil {
			t.Error("the purge leaves the anchor mounted")
		}
		first.goesOn(t, started)
		_, later, found := strings.Cut(output, "after their end: ")
		if !found {
			t.Fatalf("a purge beside a container does not say how to remove its state later: %s", output)
		}
		later, _, _ = strings.Cut(later, "\n")
		first.end()
		inside.Eventually(t, "the relay's end", func() (bool, string) {
			g, ok := first.generation()
			return !ok, fmt.Sprintf("%+v", g)
		})
		inside.Command(t, "sh", "-c", later)
		if diff := cmp.Diff(before, ownFiles(t)); diff != "" {
			t.Errorf("files before installation and after the purge (-before +after):\n%s", diff)
		}
		if exec.Command("getent", "group", "peerlane-relay").Run() == nil {
			t.Error("the group of relays is still there")
		}
		if diff := cmp.Diff(running, invocations(t)); diff != "" {
			t.Errorf("engines were restarted (-before +after):\n%s", diff)
		}
		if failed := inside.Command(t, "systemctl", "--failed", "--no-legend"); failed != "" {
			t.Errorf("units have failed: %s", failed)
		}
	})
}
