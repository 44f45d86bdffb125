package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/earlier"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/wire"
)

// Containers that the programs of an earlier commit have started, with hooks, mounts and library of
// that commit, while the programs of this commit replace them.
func TestUpgradeKeepsContainersOfEarlierCommit(t *testing.T) {
	beside(t)
	for _, c := range []struct{ runtime, route string }{{"runc", launch.RouteStaged}, {"crun", launch.RouteDirect}} {
		t.Run(c.runtime, func(t *testing.T) {
			u := newUpgrade(t, c.runtime, c.route)
			a, z := u.start(0), u.start(1)
			introduce(t, a, z, earlier.NewestVersion)
			relays := []int{u.relay(a).Status.Relay.PID, u.relay(z).Status.Relay.PID}

			u.install()
			for range 3 {
				a.next("moving")
				z.next("moving")
			}
			if now := []int{u.relay(a).Status.Relay.PID, u.relay(z).Status.Relay.PID}; !slices.Equal(now, relays) {
				t.Errorf("relays %v became %v by the installation", relays, now)
			}

			// The first relay of this commit beside a relay of the earlier commit, then two.
			for i, c := range []*earlierContainer{a, z} {
				kill(t, relays[i])
				for _, other := range []*earlierContainer{a, z} {
					want := wire.StatusPeerRelayDied
					if other == c {
						want = wire.StatusRelayDied
					}
					status, text, _ := strings.Cut(other.next("error"), " ")
					if status != fmt.Sprint(uint32(want)) {
						t.Errorf("after the end of a relay the client of %s has status %s, not %d: %s", other.id, status, want, text)
					}
				}
				introduce(t, a, z, earlier.NewestVersion)
				u.runsNewRelay(c)
			}

			// What `podman stop` and `podman start` do: the stored container has the earlier hooks.
			for i, c := range []*earlierContainer{a, z} {
				c.end()
				if i == 0 {
					a = u.start(0)
				} else {
					z = u.start(1)
				}
			}
			// The earlier program loads the library of this commit.
			introduce(t, a, z, wire.NewestVersion)
			u.runsNewRelay(a)
			u.runsNewRelay(z)
		})
	}
}

// upgrade is a host that the programs of the earlier commit have prepared.
type upgrade struct {
	*testing.T
	host    *testbed.Host
	runtime *bundle.Runtime
	bundles []string // directories
	library string   // in the place from which it is mounted
	count   int
}

func newUpgrade(t *testing.T, runtimeName, route string) *upgrade {
	t.Helper()
	root := newRoot(t)
	built, err := earlier.Build()
	programs.MustHave(t, err)
	installed, err := os.MkdirTemp(filepath.Dir(binaries), "plbin")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(installed); err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{programs.Hook, programs.Relay} {
		install(t, filepath.Join(built, name), filepath.Join(installed, name))
	}
	u := &upgrade{T: t, host: &testbed.Host{Root: root, Layout: paths.New(root), Binaries: installed}}
	if u.runtime, err = bundle.FindRuntime(runtimeName, u.host.RuntimeState()); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(u.host.RuntimeState(), 0o700); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(filepath.Join(built, earlier.Host), root, installed, filepath.Join(built, earlier.Library),
		filepath.Join(built, earlier.Client), route)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), c.Wait()); err != nil {
			t.Errorf("%v: %s", err, &stderr)
		}
	})
	var made struct {
		Bundles []string
		Library string
	}
	if err := json.NewDecoder(out).Decode(&made); err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	u.bundles, u.library = made.Bundles, made.Library
	before, err := u.host.Look()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		left, err := u.host.Left(before, patience)
		if err != nil {
			t.Fatal(err)
		}
		for _, thing := range left {
			t.Errorf("left on the host: %s", thing)
		}
	})
	return u
}

// install replaces the files of the packages, and mounts the anchor, as their scripts do.
func (u *upgrade) install() {
	u.Helper()
	for _, name := range []string{programs.Hook, programs.Relay} {
		install(u.T, filepath.Join(binaries, name), filepath.Join(u.host.Binaries, name))
	}
	dir := u.TempDir()
	if err := libpeerlane.Build(dir); err != nil {
		u.Fatal(err)
	}
	install(u.T, filepath.Join(dir, libpeerlane.Name), u.library)
	testbed.UnmountAnchor(u, u.host.Layout)
	if err := u.host.Layout.MountAnchor(); err != nil {
		u.Fatal(err)
	}
}

// earlierContainer is a container with the program of package earlier.
type earlierContainer struct {
	*upgrade
	id     string
	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  chan string
	last   []string // the last lines
	stderr bytes.Buffer
	ended  bool
}

func (u *upgrade) start(i int) *earlierContainer {
	u.Helper()
	u.count++
	c := &earlierContainer{upgrade: u, id: u.host.ContainerID(fmt.Sprint("earlier-", u.count)),
		lines: make(chan string, 1000)}
	c.cmd = u.runtime.Command(context.Background(), "run", "--bundle", u.bundles[i], c.id)
	c.cmd.Stderr = &c.stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		u.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		u.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		u.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			c.lines <- lines.Text()
		}
		close(c.lines)
	}()
	u.Cleanup(c.end)
	return c
}

// end ends and removes the container: the runtime calls the poststop hook.
func (c *earlierContainer) end() {
	if c.ended {
		return
	}
	c.ended = true
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	if err := errors.Join(c.in.Close(), c.runtime.Delete(ctx, c.id)); err != nil {
		c.Error(err)
	}
	for range c.lines {
	}
	c.cmd.Wait() // killed
}

// next waits for a line that begins with a word, and returns the rest. It discards other lines.
func (c *earlierContainer) next(word string) string {
	c.Helper()
	deadline := testutil.After(patience)
	for {
		select {
		case line, ok := <-c.lines:
			c.last = append(c.last[max(0, len(c.last)-9):], line)
			if !ok {
				c.Fatalf("container %s ended before %q, after %q: %s", c.id, word, c.last, &c.stderr)
			}
			if rest, is := strings.CutPrefix(line, word+" "); is {
				return rest
			}
			if strings.HasPrefix(line, "corrupt") {
				c.Fatalf("container %s: %s", c.id, line)
			}
		case <-deadline:
			c.Fatalf("container %s does not come to %q, after %q", c.id, word, c.last)
		}
	}
}

// introduce connects two containers, whose sessions must have a version of the protocol, and waits
// for verified messages.
func introduce(t *testing.T, a, z *earlierContainer, version int) {
	t.Helper()
	handles := map[*earlierContainer]string{}
	for _, c := range []*earlierContainer{a, z} {
		spoken, handle, _ := strings.Cut(c.next("listening"), " ")
		if spoken != fmt.Sprint(version) {
			t.Errorf("container %s speaks version %s with its relay, not %d", c.id, spoken, version)
		}
		handles[c] = handle
	}
	fmt.Fprintln(a.in, handles[z])
	fmt.Fprintln(z.in, handles[a])
	a.next("moving")
	z.next("moving")
}

// relay returns the relay of a container, read by the code of this commit.
func (u *upgrade) relay(c *earlierContainer) *generation.Info {
	u.Helper()
	list, err := generation.List(u.host.Layout)
	if err != nil {
		u.Fatal(err)
	}
	for _, g := range list {
		if g.Container.ID == c.id && g.Status.Relay != nil {
			return &g
		}
	}
	u.Fatalf("container %s has no relay among %+v", c.id, list)
	return nil
}

// runsNewRelay requires that a container's relay is the installed program of this commit.
func (u *upgrade) runsNewRelay(c *earlierContainer) {
	u.Helper()
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", u.relay(c).Status.Relay.PID))
	if err != nil || exe != filepath.Join(u.host.Binaries, programs.Relay) {
		u.Errorf("the relay of %s runs %s, %v", c.id, exe, err)
	}
}
