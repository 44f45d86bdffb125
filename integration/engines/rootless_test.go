//go:build engines

package engines

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
)

// trainer is an ordinary user: uid and gid.
const trainer = 1000

// ofTrainer moves the host's directories to the directories of an unprivileged user, below
// $XDG_RUNTIME_DIR, and makes the programs and the simulator's library accessible. ofTrainer
// returns the empty system-wide directory of specifications.
func (b *bed) ofTrainer() (specifications string) {
	b.Helper()
	b.Layout = paths.New(filepath.Join(b.mkdir("user"), "peerlane"))
	if err := errors.Join(b.Layout.Create(), os.Chmod(b.Binaries, 0o755)); err != nil {
		b.Fatal(err)
	}
	dir := b.mkdir("library")
	for i, library := range b.Libraries {
		text, err := os.ReadFile(library)
		own := filepath.Join(dir, filepath.Base(library))
		if err = errors.Join(err, os.WriteFile(own, text, 0o644)); err != nil {
			b.Fatal(err)
		}
		b.Libraries[i] = own
		for j := range b.Environment {
			b.Environment[j] = strings.ReplaceAll(b.Environment[j], library, own)
		}
	}
	return b.mkdir("nothing")
}

// giveTrainer gives the user all files of the host and the software devices, and sets the home
// directory.
func (b *bed) giveTrainer() {
	b.Helper()
	b.mkdir("home")
	b.mkdir("podman")
	for _, name := range []string{"user", "home", "podman", "simulator"} {
		if err := filepath.WalkDir(filepath.Join(b.Root, name), func(path string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(path, trainer, trainer))
		}); err != nil {
			b.Fatal(err)
		}
	}
	b.ground.environment = append(b.ground.environment, "HOME="+filepath.Join(b.Root, "home"),
		"XDG_RUNTIME_DIR="+filepath.Join(b.Root, "user"),
		// The test machine has only cgroup v1.
		"PODMAN_IGNORE_CGROUPSV1_WARNING=1")
}

// rootlessPodman reads only specifications of the administrator, so that peerlane-runtime applies
// the user's specifications.
func rootlessPodman(version string) func(*bed) engine {
	return func(b *bed) engine {
		e := podman(version, filepath.Join(b.Binaries, "peerlane-runtime"))(b).(*cli)
		e.program = append(e.program, "--runtime-flag", "peerlane-spec-dir="+b.CDIDir())
		e.devices = byVariable
		return e
	}
}

// mustBeTrainers requires that a relay belongs to the user, in a user namespace of the user.
func (b *bed) mustBeTrainers(g generation.Info) {
	b.Helper()
	// The container's client was served, so the relay runs; the supervisor may still write the
	// state.
	for end := testutil.Begin(); g.Status.Relay == nil; time.Sleep(20 * time.Millisecond) {
		if end.Over() {
			b.Fatalf("there is no relay: %+v", g.Status)
		}
		g = b.generation()
	}
	relay := fmt.Sprintf("/proc/%d", g.Status.Relay.PID)
	info, err := os.Stat(relay)
	if err != nil {
		b.Fatal(err)
	}
	if uid := info.Sys().(*syscall.Stat_t).Uid; uid != trainer {
		b.Errorf("the relay is user %d's", uid)
	}
	own, err := os.Readlink(relay + "/ns/user")
	host, errHost := os.Readlink("/proc/self/ns/user")
	if err := errors.Join(err, errHost); err != nil || own == host {
		b.Errorf("the relay is in user namespace %s, the host's is %s (%v)", own, host, err)
	}
}

// Podman of an unprivileged user provides lanes, from a relay with only the user's privileges. The
// hook refuses requests that need root of the host, with a reason that crun drops.
func TestRootlessPodmanProvidesLanes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: an engine gets a mount namespace of its own")
	}
	t.Parallel()
	path := map[string]string{"runc": "/usr/sbin/runc", "crun": "/usr/bin/crun"}
	for below, mute := range map[string]bool{"runc": false, "crun": true} {
		t.Run(below, func(t *testing.T) {
			r := row{name: "podman-5.4-rootless", containers: podmans, next: true, cgroups: v1, rootless: true,
				filters: true, below: path[below], mute: mute, open: rootlessPodman(podman54)}
			r.takeTurn(t)
			b := newBed(t, r, v1, false)
			for _, c := range checks {
				switch c.name {
				case "one-lane", "two-lanes", "lane-auto", "read-only-root", "restart", "attacks":
				case "group", "gpu", "nic":
					c.refused = []string{"an engine that runs without root", "[PL1208]", "request peerlane.dev/lane="}
					c.byHook = true
				default:
					continue
				}
				t.Run(c.name, func(t *testing.T) { b.try(t, c) })
			}
		})
	}
}
