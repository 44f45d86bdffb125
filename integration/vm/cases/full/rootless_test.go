//go:build vm

package full_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/reader"
)

// trainer is the ordinary user.
const (
	trainerUID = 1000
	trainerRun = "/run/user/1000"
)

// asTrainer returns a command line that runs as trainer.
func asTrainer(argv ...string) []string {
	return append([]string{"runuser", "-u", "trainer", "--", "env", "--chdir=/", "XDG_RUNTIME_DIR=" + trainerRun}, argv...)
}

func runAsTrainer(t testing.TB, argv ...string) string {
	t.Helper()
	argv = asTrainer(argv...)
	return inside.Command(t, argv[0], argv[1:]...)
}

// endAsTrainer runs a command at the end of a test, after the end of the test's context.
func endAsTrainer(t testing.TB, argv ...string) {
	t.Helper()
	argv = asTrainer(argv...)
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", strings.Join(argv, " "), err, out)
	}
}

// giveTrainer makes trainer the owner of a tree.
func giveTrainer(t testing.TB, dir string) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, trainerUID, trainerUID))
	}); err != nil {
		t.Fatal(err)
	}
}

// installFor installs files at the packages' paths until the test ends.
func installFor(t testing.TB, files map[string]string) {
	t.Helper()
	for to, from := range files {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(to), 0o755)
		}
		if err == nil {
			mode := fs.FileMode(0o755)
			if strings.HasPrefix(to, "/etc/") {
				mode = 0o644
			}
			err = os.WriteFile(to, text, mode)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(to); err != nil {
				t.Error(err)
			}
		})
	}
}

// The relay of an ordinary user's container is a unit of the user's systemd, or a child of Podman
// without the socket.
func TestRootlessContainerGetsRelay(t *testing.T) {
	const libexec, userUnits = "/usr/libexec/peerlane/", "/etc/systemd/user/"
	files := map[string]string{
		libexec + "peerlane-hook":   inside.Binaries + "/peerlane-hook",
		libexec + "peerlane-relay":  inside.Binaries + "/peerlane-relay",
		"/usr/bin/peerlane-runtime": inside.Binaries + "/peerlane-runtime",
	}
	for _, unit := range []string{"peerlane-relay.socket", "peerlane-relay@.service", "peerlane-cdi.service"} {
		files[userUnits+unit] = "/source/packaging/systemd/user/" + unit
	}
	installFor(t, files)
	inside.Eventually(t, "trainer's own systemd runs", func() (bool, string) {
		out, err := exec.Command("systemctl", "is-active", "user@1000.service").CombinedOutput()
		return err == nil, string(out)
	})
	verify := asTrainer("systemd-analyze", "verify", "--user", "--man=no", userUnits+"peerlane-relay.socket",
		userUnits+"peerlane-relay@.service")
	if out, err := exec.Command(verify[0], verify[1:]...).CombinedOutput(); err != nil ||
		strings.Contains(string(out), "peerlane") {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	runAsTrainer(t, "systemctl", "--user", "daemon-reload")

	root, err := os.MkdirTemp("/var/tmp", "rootless")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(os.RemoveAll(root), os.RemoveAll(trainerRun+"/peerlane")); err != nil {
			t.Error(err)
		}
	})
	h, err := testbed.New(root, strings.TrimSuffix(libexec, "/"), testbed.GPUsSimulated)
	if err != nil {
		t.Fatal(err)
	}
	h.Layout = paths.New(trainerRun + "/peerlane")
	if err := h.Layout.Create(); err != nil {
		t.Fatal(err)
	}
	if err := h.Configure(func(c *config.Config) { c.Relay.Slots, c.Relay.SlotSize = 4, 1<<20 }); err != nil {
		t.Fatal(err)
	}
	rootfs := filepath.Join(root, "rootfs")
	if err := bundle.RootFS(rootfs, []bundle.File{{Host: "/bin/busybox"}}); err != nil {
		t.Fatal(err)
	}
	hostile := filepath.Join(root, "hostile")
	hostileRootFS(t, hostile)
	giveTrainer(t, root)
	giveTrainer(t, h.Layout.Root)
	t.Cleanup(func() { endAsTrainer(t, "podman", "system", "migrate") })

	for _, by := range []string{"systemd", "podman"} {
		t.Run(by, func(t *testing.T) {
			if by == "systemd" {
				runAsTrainer(t, "systemctl", "--user", "start", "peerlane-relay.socket")
				t.Cleanup(func() { endAsTrainer(t, "systemctl", "--user", "stop", "peerlane-relay.socket") })
			}
			argv := asTrainer("podman", "--runtime", "/usr/bin/peerlane-runtime", "--runtime-flag",
				"peerlane-spec-dir="+h.CDIDir(),
				"--runtime-flag", "peerlane-device=peerlane.dev/lane=0", "run", "--rm", "--interactive", "--network=none",
				"--rootfs", rootfs,
				"/bin/busybox", "sh", "-c", "test -S /run/peerlane/relay.sock && read end; exit 7")
			cmd := exec.Command(argv[0], argv[1:]...)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			defer in.Close()

			var g generation.Info
			// The first Podman of a boot takes most of a minute in an emulated machine.
			for end := testutil.BeginFor(4 * time.Minute); g.Status.State != generation.StateReady; time.Sleep(
				100 * time.Millisecond) {
				select {
				case err := <-ended:
					t.Fatalf("the container ended: %v: %s", err, out.String())
				default:
				}
				all, err := generation.List(h.Layout)
				if end.Over() {
					t.Fatalf("no relay: %+v (%v)", all, err)
				}
				if len(all) == 1 {
					g = all[0]
				}
			}
			ctx, cancel := testutil.WithLimit(t.Context(), time.Minute)
			defer cancel()
			s, err := client.Dial(ctx, filepath.Join(h.Layout.SocketDir(g.ID), paths.SocketName))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Statistics(ctx); err != nil {
				t.Error(err)
			}
			s.Close()

			relay := fmt.Sprintf("/proc/%d", g.Status.Relay.PID)
			info, err := os.Stat(relay)
			if err != nil {
				t.Fatal(err)
			}
			if uid := info.Sys().(*syscall.Stat_t).Uid; uid != trainerUID {
				t.Errorf("the relay is user %d's", uid)
			}
			group := read(t, relay+"/cgroup")
			own, err := os.Readlink(relay + "/ns/user")
			host, errHost := os.Readlink("/proc/self/ns/user")
			if err := errors.Join(err, errHost); err != nil {
				t.Fatal(err)
			}
			unit := strings.Contains(group, "/user@1000.service/") && strings.Contains(group, "/peerlane-relay@")
			if bySystemd := by == "systemd"; unit != bySystemd || (own == host) != bySystemd {
				t.Errorf("the relay is in %s, and in user namespace %s; the host's is %s", group, own, host)
			}

			// newuidmap gives the container the subordinate uids, and no further uid.
			a, end := attackRelay(t, asTrainer("podman"), hostile, g.Status.Relay.PID, 0, 0, 300_000)
			end()
			if a.Outside != syscall.EINVAL.Error() {
				t.Errorf("the attacker takes a uid outside its mapping: %q", a.Outside)
			}

			in.Close()
			select {
			case err := <-ended:
				if cmd.ProcessState.ExitCode() != 7 {
					t.Errorf("the container ended by %v: %s", err, out.String())
				}
			case <-testutil.After(time.Minute):
				t.Fatal("the container does not end")
			}
			inside.Eventually(t, "what is left", func() (bool, string) {
				all, err := generation.List(h.Layout)
				units, _ := exec.Command("systemctl", "--user", "--machine=trainer@", "list-units", "--all", "--plain",
					"--no-legend", "peerlane-relay@*").Output()
				return err == nil && len(all) == 0 && len(units) == 0, fmt.Sprint(all, err, string(units))
			})
		})
	}
}

// The user's unit plans and writes specifications with the user's configuration, and again after a
// change of the configuration.
func TestUserCDIUnitWritesSpecifications(t *testing.T) {
	const unit, own = "peerlane-cdi.service", trainerRun + "/peerlane"
	installFor(t, map[string]string{
		"/usr/bin/peerlane":                    inside.Binaries + "/peerlane",
		"/usr/libexec/peerlane/peerlane-hook":  inside.Binaries + "/peerlane-hook",
		"/usr/libexec/peerlane/peerlane-relay": inside.Binaries + "/peerlane-relay",
		"/etc/systemd/user/" + unit:            "/source/packaging/systemd/user/" + unit,
	})
	inside.NamedTree(t, "two-nics")
	h, err := reader.Sysfs(topo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(h.GPUs) < 2 {
		t.Fatalf("the tree shows %d GPUs", len(h.GPUs))
	}
	inside.Eventually(t, "trainer's own systemd runs", func() (bool, string) {
		out, err := exec.Command("systemctl", "is-active", "user@1000.service").CombinedOutput()
		return err == nil, string(out)
	})
	const home = "/home/trainer/.config/peerlane"
	t.Cleanup(func() {
		endAsTrainer(t, "systemctl", "--user", "stop", unit)
		if err := errors.Join(os.RemoveAll(home), os.RemoveAll(own)); err != nil {
			t.Error(err)
		}
	})
	configure := func(nic string) {
		t.Helper()
		text := fmt.Sprintf("[[plan.lane]]\ngpu = %q\nservers = [%q]\nnics = [%q]\n", h.GPUs[0].BusID, h.GPUs[1].BusID, nic)
		if err := errors.Join(os.MkdirAll(home, 0o755), os.WriteFile(filepath.Join(home, "config.toml"), []byte(text),
			0o644)); err != nil {
			t.Fatal(err)
		}
		giveTrainer(t, home)
	}
	runAsTrainer(t, "systemctl", "--user", "daemon-reload")
	nics := []string{"first", "second"}
	for i, nic := range nics {
		configure(nic)
		argv := asTrainer("systemctl", "--user", "restart", unit)
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			log, _ := exec.Command("journalctl", "--no-pager", "--lines=40", "_SYSTEMD_USER_UNIT="+unit).CombinedOutput()
			t.Fatalf("starting %s: %v: %s\n%s", unit, err, out, log)
		}
		file := own + "/etc/cdi/peerlane.dev-lane.json"
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != trainerUID {
			t.Errorf("%s is user %d's", file, uid)
		}
		spec := read(t, file)
		for _, words := range []string{"@" + h.GPUs[0].BusID, "/usr/libexec/peerlane/peerlane-hook", own} {
			if !strings.Contains(spec, words) {
				t.Errorf("the specification does not have %s: %s", words, spec)
			}
		}
		plan := read(t, own+"/var/lib/peerlane/plan.json")
		if !strings.Contains(plan, `"`+nic+`"`) || strings.Contains(plan, `"`+nics[1-i]+`"`) {
			t.Errorf("the plan is not that of a lane to NIC %s: %s", nic, plan)
		}
	}
}
