package integration_test

import (
	"context"
	"fmt"
	"os"
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

// The programs of an earlier commit have started containers, with hooks, mounts and library of that
// commit; the programs of this commit replace them meanwhile.
func TestUpgradeKeepsContainersOfEarlierCommit(t *testing.T) {
	beside(t)
	for _, c := range []struct{ runtime, route string }{{"runc", launch.RouteDirect}, {"crun", launch.RouteDirect}} {
		t.Run(c.runtime, func(t *testing.T) {
			u := newUpgrade(t, c.runtime, c.route)
			a, z := u.start(0), u.start(1)
			earlier.Introduce(a.Container, z.Container, earlier.NewestVersion, earlier.NewestVersion, patience)
			relays := []int{u.relay(a).Status.Relay.PID, u.relay(z).Status.Relay.PID}

			u.install()
			for range 3 {
				a.Next("moving", patience)
				z.Next("moving", patience)
			}
			if now := []int{u.relay(a).Status.Relay.PID, u.relay(z).Status.Relay.PID}; !slices.Equal(now, relays) {
				t.Errorf("relays %v became %v by the installation", relays, now)
			}

			// First a relay of this commit beside a relay of the earlier commit, then two relays of
			// this commit.
			for i, c := range []*earlierContainer{a, z} {
				kill(t, relays[i])
				for _, other := range []*earlierContainer{a, z} {
					want := wire.StatusPeerRelayDied
					if other == c {
						want = wire.StatusRelayDied
					}
					status, text, _ := strings.Cut(other.Next("error", patience), " ")
					if status != fmt.Sprint(uint32(want)) {
						t.Errorf("after the end of a relay the client of %s has status %s, not %d: %s", other.ID, status, want, text)
					}
				}
				earlier.Introduce(a.Container, z.Container, earlier.NewestVersion, earlier.NewestVersion, patience)
				u.runsNewRelay(c)
			}

			// The operations of `podman stop` and `podman start`: the stored container has the
			// earlier hooks.
			for i, c := range []*earlierContainer{a, z} {
				c.end()
				if i == 0 {
					a = u.start(0)
				} else {
					z = u.start(1)
				}
			}
			// The earlier program loads the library of this commit.
			earlier.Introduce(a.Container, z.Container, wire.NewestVersion, wire.NewestVersion, patience)
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
	library string   // at the path of the mount
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
	made := earlier.StartHost(t, built, root, installed, route)
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

// install replaces the files of the packages, and mounts the anchor, as the scripts of the packages
// do.
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
	*earlier.Container
	runtime *bundle.Runtime
	ended   bool
}

func (u *upgrade) start(i int) *earlierContainer {
	u.Helper()
	u.count++
	id := u.host.ContainerID(fmt.Sprint("earlier-", u.count))
	c := &earlierContainer{runtime: u.runtime, Container: earlier.Start(u, id,
		u.runtime.Command(context.Background(), "run", "--bundle", u.bundles[i], id))}
	u.Cleanup(c.end)
	return c
}

// end ends and removes the container: the runtime calls the poststop hook.
func (c *earlierContainer) end() {
	if c.ended {
		return
	}
	c.ended = true
	c.End(func() error {
		ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
		defer cancel()
		return c.runtime.Delete(ctx, c.ID)
	})
}

// relay returns the relay of a container, read by the code of this commit.
func (u *upgrade) relay(c *earlierContainer) *generation.Info {
	u.Helper()
	list, err := generation.List(u.host.Layout)
	if err != nil {
		u.Fatal(err)
	}
	for _, g := range list {
		if g.Container.ID == c.ID && g.Status.Relay != nil {
			return &g
		}
	}
	u.Fatalf("container %s has no relay among %+v", c.ID, list)
	return nil
}

// runsNewRelay requires that a container's relay is the installed program of this commit.
func (u *upgrade) runsNewRelay(c *earlierContainer) {
	u.Helper()
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", u.relay(c).Status.Relay.PID))
	if err != nil || exe != filepath.Join(u.host.Binaries, programs.Relay) {
		u.Errorf("the relay of %s runs %s, %v", c.ID, exe, err)
	}
}
