//go:build vm

// Package units_test runs in the full image: relays as services of systemd, as packages install
// them.
package units_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
)

// Paths of the packages' files.
const (
	installed    = "/usr/libexec/peerlane"
	units        = "/etc/systemd/system"
	relaySocket  = "peerlane-relay.socket"
	relayService = "peerlane-relay@.service"
	relayUnits   = "peerlane-relay@*"
	relaySlice   = `/system.slice/system-peerlane\x2drelay.slice/peerlane-relay@`
	dropInFolder = "/run/systemd/system/" + relaySocket + ".d"
)

func TestMain(m *testing.M) {
	if err := inside.SystemIsUp(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := uninstall(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// uninstall reverts install, because later tests in the guest install packages.
func uninstall() error {
	if _, err := os.Stat(installed); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	out, err := exec.Command("systemctl", "disable", "--now", relaySocket).CombinedOutput()
	if err != nil {
		return fmt.Errorf("systemctl disable: %w: %s", err, out)
	}
	for _, path := range []string{installed, filepath.Join(units, relaySocket), filepath.Join(units, relayService),
		dropInFolder, "/run/peerlane"} {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if out, failed := exec.Command("systemctl", "daemon-reload").CombinedOutput(); failed != nil {
		err = errors.Join(err, fmt.Errorf("systemctl daemon-reload: %w: %s", failed, out))
	}
	return err
}

func read(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// install installs files as a package does. A reload of systemd takes seconds here, so tests share
// the installation until uninstall.
func install(t testing.TB) {
	t.Helper()
	once.Do(func() {
		for _, name := range []string{"peerlane-hook", "peerlane-relay"} {
			place(t, filepath.Join(inside.Binaries, name), filepath.Join(installed, name), 0o755)
		}
		for _, name := range []string{relaySocket, relayService} {
			place(t, filepath.Join("/source/packaging/systemd", name), filepath.Join(units, name), 0o644)
		}
		inside.Command(t, "systemctl", "enable", relaySocket) // enable reloads too
	})
	inside.Command(t, "systemctl", "start", relaySocket)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := exec.Command("journalctl", "--no-pager", "--lines=60", "--unit="+relaySocket,
				"--unit="+relayUnits).CombinedOutput()
			t.Logf("%s", out)
		}
	})
}

var once sync.Once

// reload makes systemd read its units again, even after the test's context has ended.
func reload(t testing.TB) {
	t.Helper()
	if out, err := exec.Command("systemctl", "daemon-reload").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// place copies a file and renames it into place, as a package manager does.
func place(t testing.TB, from, to string, mode fs.FileMode) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if err == nil {
		err = os.WriteFile(to+".new", text, mode)
	}
	if err == nil {
		err = os.Rename(to+".new", to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// operator is a host with Peerlane installed and configured, and containers.
type operator struct {
	testing.TB
	*testbed.Host
	runtime *bundle.Runtime
	bundle  *bundle.Bundle
	count   int
	mutex   sync.Mutex
}

func newOperator(t testing.TB, change func(*config.Config)) *operator {
	t.Helper()
	install(t)
	root, err := os.MkdirTemp("/var/tmp", "operator")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	h, err := testbed.New(root, installed, testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	h.Layout = paths.New("/")
	if err := h.Layout.Create(); err != nil {
		t.Fatal(err)
	}
	if err := h.Configure(func(c *config.Config) {
		c.Relay.Slots, c.Relay.SlotSize = 4, 1<<20
		change(c)
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, path := range []string{h.Layout.State(), h.Layout.Config()} {
			if err := os.RemoveAll(path); err != nil {
				t.Error(err)
			}
		}
	})
	testbed.MountAnchor(t, h.Layout)
	o := &operator{TB: t, Host: h}
	if o.runtime, err = bundle.FindRuntime("runc", h.RuntimeState()); err != nil {
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
	if o.bundle, err = h.Bundle("c", busybox, testbed.Devices(gpu), "sh", "-c", "read end"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.nothingIsLeft() })
	return o
}

func asItIs(*config.Config) {}

// container is a container that waits for the end of input.
type container struct {
	id     string
	in     io.Closer
	ended  chan error
	stderr bytes.Buffer
	once   sync.Once
}

// begin starts a container without waiting until it runs.
func (o *operator) begin() (*container, error) {
	o.mutex.Lock()
	o.count++
	c := &container{id: o.ContainerID(fmt.Sprint(o.count)), ended: make(chan error, 1)}
	o.mutex.Unlock()
	cmd := o.runtime.Run(context.Background(), o.bundle, c.id)
	cmd.Stderr = &c.stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	c.in = in
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { c.ended <- cmd.Wait() }()
	o.Cleanup(func() { o.end(c) })
	return c, nil
}

// start starts a container and returns its generation.
func (o *operator) start() (*container, generation.Info) {
	o.Helper()
	c, err := o.begin()
	if err != nil {
		o.Fatal(err)
	}
	return c, o.ready(c)
}

// patience is the limit for twenty concurrent containers on an emulated, possibly shared processor,
// on which a start takes seconds.
const patience = 6 * time.Minute

// ready waits until a container's relay answers.
func (o *operator) ready(c *container) (found generation.Info) {
	o.Helper()
	for end := testutil.BeginFor(patience); ; time.Sleep(200 * time.Millisecond) {
		select {
		case err := <-c.ended:
			c.once.Do(func() {}) // the container has no process to end
			o.Fatalf("container %s ended: %v: %s", c.id, err, c.stderr.String())
		default:
		}
		all, err := generation.List(o.Layout)
		if err != nil {
			o.Fatal(err)
		}
		i := slices.IndexFunc(all, func(i generation.Info) bool { return i.Container.ID == c.id })
		if i >= 0 && all[i].Status.State == generation.StateReady {
			return all[i]
		}
		if end.Over() {
			o.Fatalf("container %s has no relay; there are %+v", c.id, all)
		}
	}
}

// end ends a container by closing the input.
func (o *operator) end(c *container) {
	c.once.Do(func() {
		c.in.Close()
		select {
		case err := <-c.ended:
			// 1 is the exit status of read at the end of input.
			if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() != 1) {
				o.Errorf("container %s: %v: %s", c.id, err, c.stderr.String())
			}
		case <-testutil.After(time.Minute):
			o.Errorf("container %s does not end", c.id)
		}
	})
}

// serves queries a generation's relay as a client does.
func (o *operator) serves(g generation.Info) {
	o.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 30*time.Second)
	defer cancel()
	s, err := client.Dial(ctx, filepath.Join(o.Layout.SocketDir(g.ID), paths.SocketName))
	if err != nil {
		o.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Statistics(ctx); err != nil {
		o.Error(err)
	}
}

// groupOf returns the control group of a process, or "" after its end.
func groupOf(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return strings.TrimPrefix(strings.TrimSpace(string(text)), "0::")
}

// parent returns the pid of a process's parent.
func parent(t testing.TB, pid int) int {
	t.Helper()
	var number int
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/status", pid))) {
		if value, ok := strings.CutPrefix(line, "PPid:"); ok {
			if _, err := fmt.Sscan(value, &number); err != nil {
				t.Fatal(err)
			}
		}
	}
	return number
}

// unitOf returns the unit of a relay and its supervisor.
func (o *operator) unitOf(g generation.Info) string {
	o.Helper()
	group := groupOf(g.Status.Relay.PID)
	if !strings.HasPrefix(group, relaySlice) && !strings.HasPrefix(group,
		strings.TrimPrefix(relaySlice, "/system.slice")) {
		o.Fatalf("the relay is in %s", group)
	}
	if of := groupOf(parent(o.TB, g.Status.Relay.PID)); of != group {
		o.Errorf("the relay is in %s, its supervisor in %s", group, of)
	}
	return filepath.Base(group)
}

// running lists the units of relays, including failed units.
func running(t testing.TB) []string {
	t.Helper()
	var names []string
	// Independent of the test's context, which may have ended.
	out, err := exec.Command("systemctl", "list-units", "--all", "--plain", "--no-legend", relayUnits).Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		names = append(names, strings.TrimSpace(line))
	}
	return names
}

// nothingIsLeft waits until no object of a container is left.
func (o *operator) nothingIsLeft() {
	o.Helper()
	inside.Eventually(o.TB, "what is left", func() (bool, string) {
		left := running(o.TB)
		for _, dir := range []string{o.Layout.Generations(), o.Layout.Sockets(), o.Layout.Peers(),
			"/sys/fs/cgroup/peerlane"} {
			entries, err := os.ReadDir(dir)
			if err != nil && !os.IsNotExist(err) {
				return false, err.Error()
			}
			for _, e := range entries {
				if dir != "/sys/fs/cgroup/peerlane" || e.IsDir() {
					left = append(left, filepath.Join(dir, e.Name()))
				}
			}
		}
		names, _ := filepath.Glob("/proc/[0-9]*/exe")
		for _, name := range names {
			if program, _ := os.Readlink(name); strings.HasPrefix(program, installed) {
				left = append(left, name+" is "+program)
			}
		}
		return len(left) == 0, strings.Join(left, "\n")
	})
}

func TestUnitsAreValid(t *testing.T) {
	install(t)
	// Verify together with the units that boot before sockets, so that an ordering cycle is found.
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", filepath.Join(units, relaySocket),
		filepath.Join(units, relayService), "basic.target").CombinedOutput()
	if err != nil || strings.Contains(string(out), "peerlane") || strings.Contains(string(out), "cycle") {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	if got := strings.TrimSpace(inside.Command(t, "systemctl", "is-enabled", "peerlane-relay@.service")); got != "static" {
		t.Errorf("peerlane-relay@.service is %s", got)
	}
	info, err := os.Stat("/run/peerlane/launcher.sock")
	if err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the launcher's socket: %v, %v", info, err)
	}
	out, err = exec.Command("systemd-analyze", "security", "--no-pager", "peerlane-relay@x.service").CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
	// docs/security.md lists the remaining exposure; this call checks that the tool can read the
	// unit.
	if !strings.Contains(string(out), "Overall exposure level for peerlane-relay@x.service") {
		t.Errorf("%s", out)
	}
}

func TestRelayIsSystemdUnit(t *testing.T) {
	o := newOperator(t, asItIs)
	c, g := o.start()
	unit := o.unitOf(g)
	o.serves(g)
	if _, err := os.Stat("/sys/fs/cgroup/peerlane"); !os.IsNotExist(err) {
		t.Errorf("the hook made a control group: %v", err)
	}
	if text := inside.Command(t, "journalctl", "--no-pager", "--unit="+unit); !strings.Contains(text, c.id) ||
		!strings.Contains(text, "is ready") {
		t.Errorf("the journal of %s does not name %s:\n%s", unit, c.id, text)
	}
	if text := read(t, filepath.Join(o.Layout.GenerationDir(g.ID), "relay.log")); !strings.Contains(text, "is ready") {
		t.Errorf("relay.log:\n%s", text)
	}
	if limits := read(t, fmt.Sprintf("/proc/%d/limits", g.Status.Relay.PID)); !strings.Contains(
		strings.Join(strings.Fields(limits), " "), "Max locked memory unlimited unlimited") {
		t.Errorf("the relay's limits:\n%s", limits)
	}

	// An operator's commands to systemd do not affect a relay.
	for _, verb := range [][]string{{"daemon-reload"}, {"daemon-reexec"}, {"restart", relaySocket},
		{"reload-or-restart", relaySocket}} {
		inside.Command(t, "systemctl", verb...)
		if now := o.ready(c); now.Status.Starts != 1 || now.Status.Relay.PID != g.Status.Relay.PID {
			t.Errorf("after %v: %+v", verb, now.Status)
		}
		o.serves(g)
		if got := o.unitOf(g); got != unit {
			t.Errorf("after %v the relay is in %s", verb, got)
		}
		next, second := o.start()
		o.unitOf(second)
		o.end(next)
	}

	// An upgrade does not affect a relay either: the next container has the new program, and so has
	// a restarted relay.
	for _, name := range []string{"peerlane-hook", "peerlane-relay"} {
		place(t, filepath.Join(inside.Binaries, name), filepath.Join(installed, name), 0o755)
	}
	o.serves(g)
	next, second := o.start()
	o.unitOf(second)
	o.end(next)
	inside.Command(t, "kill", "-KILL", fmt.Sprint(g.Status.Relay.PID))
	inside.Eventually(t, "the next relay", func() (bool, string) {
		now := o.ready(c)
		return now.Status.Starts == 2, fmt.Sprintf("%+v", now.Status)
	})
	o.serves(g)
	if got := o.unitOf(o.ready(c)); got != unit {
		t.Errorf("the next relay is in %s", got)
	}

	o.end(c)
	o.nothingIsLeft()
}

func TestTwentyContainersGetOneUnitEach(t *testing.T) {
	o := newOperator(t, func(c *config.Config) { c.Relay.Launcher = config.LauncherSystemd })
	const n = 20
	var all []*container
	for range n {
		c, err := o.begin()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	seen := map[string]bool{}
	for _, c := range all {
		g := o.ready(c)
		o.serves(g)
		seen[o.unitOf(g)] = true
	}
	if len(seen) != n {
		t.Errorf("%d units for %d containers", len(seen), n)
	}
	for _, c := range all {
		o.end(c)
	}
	o.nothingIsLeft()
}

// The relay survives its supervisor, ends with its container, and the hook collects it at poststop.
func TestUnitSupervisorKilledKeepsRelay(t *testing.T) {
	o := newOperator(t, asItIs)
	c, g := o.start()
	o.unitOf(g)
	watcher := parent(t, g.Status.Relay.PID)
	inside.Command(t, "kill", "-KILL", fmt.Sprint(watcher))
	inside.Eventually(t, "the supervisor ends", func() (bool, string) { return groupOf(watcher) == "", groupOf(watcher) })
	time.Sleep(time.Second) // systemd would have killed the relay by now
	o.serves(g)
	o.end(c)
	o.nothingIsLeft()
}

// A stop by the administrator ends the relay, not the container.
func TestStoppedUnitsEndRelays(t *testing.T) {
	o := newOperator(t, asItIs)
	c, g := o.start()
	o.unitOf(g)
	inside.Command(t, "systemctl", "stop", relayUnits)
	if got := running(t); len(got) > 0 {
		t.Errorf("units after the stop: %q", got)
	}
	if alive, err := generation.List(o.Layout); err != nil || len(alive) != 0 {
		t.Errorf("generations after the stop: %+v, %v", alive, err)
	}
	if group := groupOf(g.Init.PID); group == "" {
		t.Error("the container has ended with its relay")
	}
	o.end(c)
	o.nothingIsLeft()
}

// Without the socket the hook starts relays itself, or refuses the container.
func TestHookWithoutSocketFollowsLauncher(t *testing.T) {
	o := newOperator(t, asItIs)
	inside.Command(t, "systemctl", "stop", relaySocket)
	c, g := o.start()
	if group := groupOf(g.Status.Relay.PID); group != "/peerlane/"+g.ID {
		t.Errorf("the relay is in %s", group)
	}
	o.serves(g)
	o.end(c)
	o.nothingIsLeft()

	if err := o.Configure(func(c *config.Config) { c.Relay.Launcher = config.LauncherSystemd }); err != nil {
		t.Fatal(err)
	}
	c, err := o.begin()
	if err != nil {
		t.Fatal(err)
	}
	if err := <-c.ended; err == nil || !strings.Contains(c.stderr.String(),
		"systemctl enable --now peerlane-relay.socket") {
		t.Errorf("a container without a relay: %v\n%s", err, c.stderr.String())
	}
	c.once.Do(func() {})
}

// If the service fails to start, the hook starts the relay itself.
func TestServiceFailingToStartFallsBack(t *testing.T) {
	o := newOperator(t, asItIs)
	if err := os.Remove(filepath.Join(units, relayService)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		place(t, filepath.Join("/source/packaging/systemd", relayService), filepath.Join(units, relayService), 0o644)
		reload(t)
		// systemd stops the socket too.
		if out, err := exec.Command("systemctl", "restart", relaySocket).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	reload(t)
	c, g := o.start()
	if group := groupOf(g.Status.Relay.PID); group != "/peerlane/"+g.ID {
		t.Errorf("the relay is in %s", group)
	}
	if log := read(t, filepath.Join(o.Layout.GenerationDir(g.ID), "relay.log")); !strings.Contains(log,
		"systemd starts no relay") {
		t.Errorf("relay.log:\n%s", log)
	}
	o.end(c)
}

// The demo's relays are units too, on a host with the socket.
func TestDemoBySystemdVerifiesMessages(t *testing.T) {
	install(t)
	const root = "/var/tmp/demo"
	socket := paths.New(root).Launcher()
	if err := os.MkdirAll(dropInFolder, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dropInFolder); err != nil {
			t.Error(err)
		}
		reload(t)
		if out, err := exec.Command("systemctl", "restart", relaySocket).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	if err := os.WriteFile(filepath.Join(dropInFolder, "demo.conf"),
		[]byte("[Socket]\nListenSequentialPacket=\nListenSequentialPacket="+socket+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// A layout with another root detects systemd as process 1 by this directory.
	if err := os.MkdirAll(filepath.Join(root, "run/systemd/system"), 0o755); err != nil {
		t.Fatal(err)
	}
	reload(t)
	inside.Command(t, "systemctl", "restart", relaySocket)
	since := strings.TrimSpace(inside.Command(t, "date", "+%s"))
	report, err := demo.Run(t.Context(), demo.Options{
		Runtime: demo.RuntimeRunc, Route: launch.RouteStaged, GPUs: testbed.GPUsSimulated, Bytes: 8 << 20, Seed: 1,
		Binaries: inside.Binaries, Root: root,
	})
	if err != nil {
		t.Fatal(err)
	}
	if !report.OK() {
		t.Errorf("%q %q", report.Problems, report.Left)
	}
	journal := inside.Command(t, "journalctl", "--no-pager", "--since=@"+since, "--unit="+relayUnits)
	for _, c := range report.Containers {
		if !c.Client.Verified || !strings.Contains(journal, c.ID) {
			t.Errorf("container %s: verified %d bytes; the journal:\n%s", c.ID, c.Client.VerifiedBytes, journal)
		}
	}
}
