//go:build vm

// Package full_test runs in the full image: a host of an operator, with systemd, cgroup v2 and a
// container engine.
package full_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/relay/launch"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 6 && os.Args[1] == "attack" {
		if err := beAttacker(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if err := inside.SystemIsUp(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

func TestHostHasSystemdAndCgroupV2(t *testing.T) {
	if got := read(t, "/proc/1/comm"); got != "systemd" {
		t.Errorf("process 1 is %s", got)
	}
	if got := read(t, "/sys/module/apparmor/parameters/enabled"); got != "Y" {
		t.Errorf("AppArmor enabled: %s", got)
	}
	// "shared:N" is in the sixth field and following (proc_pid_mountinfo(5)).
	shared := false
	for line := range strings.Lines(read(t, "/proc/self/mountinfo")) {
		f := strings.Fields(line)
		shared = shared || f[4] == "/run" && slices.ContainsFunc(f[6:],
			func(s string) bool { return strings.HasPrefix(s, "shared:") })
	}
	if !shared {
		t.Error("/run is not a shared mount")
	}
	const sysResource = 24 // capabilities(7), <linux/capability.h>
	for line := range strings.Lines(read(t, "/proc/self/status")) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			caps, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if err != nil || caps&(1<<sysResource) == 0 {
				t.Errorf("CAP_SYS_RESOURCE is not among %s (%v)", value, err)
			}
		}
	}
}

func TestControlGroupsAreV2Alone(t *testing.T) {
	var kinds []string
	for line := range strings.Lines(read(t, "/proc/self/mountinfo")) {
		_, after, _ := strings.Cut(line, " - ")
		if kind := strings.Fields(after)[0]; strings.HasPrefix(kind, "cgroup") {
			kinds = append(kinds, kind)
		}
	}
	if !slices.Equal(kinds, []string{"cgroup2"}) {
		t.Errorf("the control group mounts are %q", kinds)
	}
	controllers := strings.Fields(read(t, "/sys/fs/cgroup/cgroup.controllers"))
	for _, controller := range []string{"cpuset", "cpu", "io", "memory", "hugetlb", "pids", "rdma"} {
		if !slices.Contains(controllers, controller) {
			t.Errorf("there is no controller %s among %q", controller, controllers)
		}
	}
}

func TestTrainerHasLingeringSession(t *testing.T) {
	// No user has logged in.
	inside.Eventually(t, "trainer's own systemd runs", func() (bool, string) {
		out, err := exec.Command("systemctl", "is-active", "user@1000.service").CombinedOutput()
		return err == nil, string(out)
	})
	out := inside.Command(t, "runuser", "-u", "trainer", "--", "env", "XDG_RUNTIME_DIR=/run/user/1000", "systemctl",
		"--user", "show", "--property=Version", "--value")
	if strings.TrimSpace(out) == "" {
		t.Error("trainer's systemd does not answer")
	}
	if out := inside.Command(t, "runuser", "-u", "trainer", "--", "id", "-u"); strings.TrimSpace(out) != "1000" {
		t.Errorf("trainer is user %s", out)
	}
}

func TestDemoVerifiesMessages(t *testing.T) {
	for _, name := range []string{demo.RuntimeRunc, demo.RuntimeCrun} {
		t.Run(name, func(t *testing.T) {
			var report demo.Report
			out := inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), "demo", "--runtime", name, "--bytes", "32MiB",
				"-o", "json")
			if err := json.Unmarshal([]byte(out), &report); err != nil {
				t.Fatal(err)
			}
			if !report.OK() || report.Runtime != name || report.Route != launch.RouteStaged {
				t.Errorf("%s, %s: %q %q", report.Runtime, report.Route, report.Problems, report.Left)
			}
			for _, c := range report.Containers {
				if !c.Client.Verified || c.Client.VerifiedBytes < 32<<20 {
					t.Errorf("container %s verified %d bytes", c.Name, c.Client.VerifiedBytes)
				}
			}
		})
	}
}

// Podman runs a container, as root and as trainer: later cases rely on both.
func TestPodmanRunsAContainer(t *testing.T) {
	busybox := bundle.File{Host: "/bin/busybox", Container: "/bin/busybox"}
	for _, user := range []string{"root", "trainer"} {
		t.Run(user, func(t *testing.T) {
			dir := "/var/tmp/rootfs-" + user
			if err := bundle.RootFS(dir, []bundle.File{busybox}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			inside.Command(t, "chown", "-R", user, dir)
			argv := []string{"podman", "run", "--rm", "--network", "none", "--rootfs", dir, "/bin/busybox", "sh", "-c",
				"/bin/busybox cat /proc/1/comm"}
			if user != "root" {
				argv = append([]string{"runuser", "-u", user, "--", "env", "--chdir=/", "XDG_RUNTIME_DIR=/run/user/1000"}, argv...)
			}
			if out := inside.Command(t, argv[0], argv[1:]...); strings.TrimSpace(out) != "busybox" {
				t.Errorf("process 1 of the container is %q", out)
			}
		})
	}
}
