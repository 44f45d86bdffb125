//go:build packages

package packages

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/topo/recorded"
)

// tree is a private root file system above a clean root file system.
type tree struct {
	testing.TB
	root string
}

// plant creates a tree of a Debian. With kernel the tree has the kernel's file systems, as on a
// machine; without kernel it resembles a minimal image build.
func plant(t testing.TB, suite string, kernel bool) *tree {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"upper", "work", "merged"} {
		check(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	base := strings.TrimSpace(run(t, source+"/packaging/trees"))
	r := &tree{t, filepath.Join(dir, "merged")}
	r.mount("overlay", r.root, "overlay", fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", filepath.Join(base, suite),
		filepath.Join(dir, "upper"), filepath.Join(dir, "work")))
	for _, d := range []string{"packages", "older", "host"} {
		check(t, os.Mkdir(filepath.Join(r.root, d), 0o755))
	}
	if kernel {
		r.mount("proc", filepath.Join(r.root, "proc"), "proc", "")
		r.mount("tmpfs", filepath.Join(r.root, "run"), "tmpfs", "mode=755")
		r.mount("tmpfs", filepath.Join(r.root, "dev/shm"), "tmpfs", "mode=1777")
	}
	r.bind(dist, "packages")
	return r
}

func (r *tree) mount(what, where, kind, options string) {
	r.Helper()
	check(r, os.MkdirAll(where, 0o755))
	if err := syscall.Mount(what, where, kind, 0, options); err != nil {
		r.Fatalf("mounting %s at %s: %v", kind, where, err)
	}
	r.Cleanup(func() {
		if err := syscall.Unmount(where, syscall.MNT_DETACH); err != nil {
			r.Errorf("%s: %v", where, err)
		}
	})
}

func (r *tree) bind(from, to string) {
	r.Helper()
	to = filepath.Join(r.root, to)
	if err := syscall.Mount(from, to, "", syscall.MS_BIND, ""); err != nil {
		r.Fatalf("mounting %s at %s: %v", from, to, err)
	}
	r.Cleanup(func() {
		if err := syscall.Unmount(to, syscall.MNT_DETACH); err != nil {
			r.Errorf("%s: %v", to, err)
		}
	})
}

// try runs a shell command in the tree.
func (r *tree) try(line string) (string, error) {
	c := exec.CommandContext(r.Context(), "chroot", r.root, "/bin/sh", "-euc", line)
	c.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root",
		"DEBIAN_FRONTEND=noninteractive", "LC_ALL=C"}
	out, err := c.CombinedOutput()
	return string(out), err
}

func (r *tree) run(line string) string {
	r.Helper()
	out, err := r.try(line)
	if err != nil {
		r.Fatalf("%s: %v\n%s", line, err, out)
	}
	return out
}

// apt is apt-get for local packages, without downloads.
const apt = "apt-get --no-install-recommends --yes -o Dpkg::Options::=--force-confold -o " +
	"Dpkg::Options::=--force-unsafe-io -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=/dev/null "

func (r *tree) read(path string) string {
	r.Helper()
	text, err := os.ReadFile(filepath.Join(r.root, path))
	check(r, err)
	return string(text)
}

func (r *tree) exists(path string) bool {
	_, err := os.Lstat(filepath.Join(r.root, path))
	return err == nil
}

// files returns every path except those of package managers.
func (r *tree) files() (paths []string) {
	r.Helper()
	own := []string{"/var/lib/dpkg", "/var/lib/apt", "/var/lib/rpm", "/var/cache", "/var/log", "/proc", "/packages",
		"/older", "/host", "/dev", "/etc/ld.so.cache", "/tmp"}
	check(r, filepath.WalkDir(r.root, func(path string, d fs.DirEntry, err error) error {
		name := "/" + strings.TrimPrefix(strings.TrimPrefix(path, r.root), "/")
		if slices.Contains(own, name) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		paths = append(paths, name)
		return err
	}))
	return paths
}

// older is the directory of the same packages in an earlier version.
const older = dist + "/work/older"

// works runs the installed programs.
func (r *tree) works() {
	r.Helper()
	for line, want := range map[string]string{
		"peerlane version":                                    "peerlane v",
		"peerlane topo":                                       "No GPU",
		"peerlane plan":                                       "",
		"peerlane cdi list":                                   "",
		"peerlane relay list":                                 "",
		"peerlane cdi refresh":                                "",
		"peerlane-runtime --peerlane-version":                 "v",
		"/usr/libexec/peerlane/peerlane-hook help":            "peerlane-hook",
		"/usr/libexec/peerlane/peerlane-relay version":        "v",
		"gzip -dc /usr/share/man/man1/peerlane.1.gz":          ".TH",
		"cat /usr/share/bash-completion/completions/peerlane": "__start_peerlane",
	} {
		if out := r.run(line); !strings.Contains(out, want) {
			r.Errorf("%s says %q", line, out)
		}
	}
}

// generate creates CDI specifications of the recorded host, and checks that the files in them are
// installed.
func (r *tree) generate() (specifications string) {
	r.Helper()
	if !r.exists("host/sys") {
		_, _, err := recorded.Unpack(filepath.Join(r.root, "host"))
		check(r, err)
	}
	r.run("peerlane cdi generate --sysfs /host/sys --proc /host/proc --spec-dir /etc/cdi")
	specifications = r.read("/etc/cdi/peerlane.dev-lane.json")
	var spec specs.Spec
	check(r, json.Unmarshal([]byte(specifications), &spec))
	hooks, mounts := 0, 0
	edits := []specs.ContainerEdits{spec.ContainerEdits}
	for _, d := range spec.Devices {
		edits = append(edits, d.ContainerEdits)
	}
	for _, e := range edits {
		for _, h := range e.Hooks {
			hooks++
			if h.Path != "/usr/libexec/peerlane/peerlane-hook" || !r.exists(h.Path) {
				r.Errorf("the hook in the specification is %s instead of the installed hook", h.Path)
			}
		}
		for _, m := range e.Mounts {
			mounts++
			if !r.exists(m.HostPath) {
				r.Errorf("the specification's %s is not there", m.HostPath)
			}
		}
	}
	if hooks == 0 || mounts == 0 || !strings.Contains(specifications, "/usr/lib/peerlane/libpeerlane.so.0") ||
		!strings.Contains(specifications, "/usr/lib/peerlane/libnccl-net-peerlane.so") ||
		!strings.Contains(specifications, "/usr/lib/peerlane/nixl/libplugin_PEERLANE.so") {
		r.Errorf("the specification has %d hooks and %d mounts:\n%s", hooks, mounts, specifications)
	}
	if !r.exists("/usr/libexec/peerlane/peerlane-relay") {
		r.Error("there is no relay beside the hook")
	}
	return specifications
}

// configured is the configuration of an administrator.
const configured = "# mine\n[staging]\nbounce = \"never\"\n"

func (r *tree) configure() {
	r.Helper()
	check(r, os.WriteFile(filepath.Join(r.root, "etc/peerlane/config.toml"), []byte(configured), 0o644))
}

func (r *tree) isConfigured(after string) {
	r.Helper()
	if text := r.read("/etc/peerlane/config.toml"); text != configured {
		r.Errorf("after the %s the configuration is\n%s", after, text)
	}
}

func TestDebianInstallsUpgradesAndPurges(t *testing.T) {
	for _, suite := range []string{"bookworm", "trixie"} {
		t.Run(suite, func(t *testing.T) {
			r := plant(t, suite, true)
			r.bind(older, "older")
			version := func() string { return r.run("dpkg-query -W -f '${Version}' peerlane") }
			before := r.files()

			r.run(apt + "install /older/peerlane_*.deb /older/libpeerlane_*.deb /older/libpeerlane-dev_*.deb")
			if v := version(); v != "0.0.9-1" {
				t.Errorf("the older version is %s", v)
			}
			r.configure()
			specification := r.generate()

			out := r.run(apt +
				"install /packages/peerlane_*_amd64.deb /packages/libpeerlane_*_amd64.deb /packages/libpeerlane-dev_*.deb")
			newer := version()
			if newer == "0.0.9-1" {
				t.Errorf("not upgraded: %s", out)
			}
			r.isConfigured("upgrade")
			if now := r.read("/etc/cdi/peerlane.dev-lane.json"); now != specification {
				t.Errorf("an upgrade changes the specification (-before +after):\n%s", cmp.Diff(specification, now))
			}
			r.generate()

			r.run(apt + "install --allow-downgrades /older/peerlane_*.deb /older/libpeerlane_*.deb /older/libpeerlane-dev_*.deb")
			if v := version(); v != "0.0.9-1" {
				t.Errorf("after the downgrade the version is %s", v)
			}
			r.isConfigured("downgrade")
			r.generate()

			r.run(apt + "remove peerlane")
			r.isConfigured("removal")
			for _, gone := range []string{"/usr/bin/peerlane", "/usr/libexec/peerlane", "/etc/cdi/peerlane.dev-lane.json",
				"/usr/lib/udev/rules.d/90-peerlane.rules"} {
				if r.exists(gone) {
					t.Errorf("after the removal there is still %s", gone)
				}
			}
			r.run(apt + "install /packages/peerlane_*_amd64.deb")
			r.isConfigured("second installation")
			r.works()

			r.run(apt + "purge peerlane libpeerlane libpeerlane-dev")
			check(t, removeEmpty(filepath.Join(r.root, "etc/cdi")))
			if diff := cmp.Diff(before, r.files()); diff != "" {
				t.Errorf("files before installation and after the purge (-before +after):\n%s", diff)
			}

			r.run(apt + "install /packages/peerlane_*_amd64.deb")
			alive := r.live()
			r.outlives(alive, r.run(apt+"purge peerlane"))
			check(t, removeEmpty(filepath.Join(r.root, "etc/cdi")))
			if diff := cmp.Diff(before, r.files()); diff != "" {
				t.Errorf("files before installation and after a purge beside a container (-before +after):\n%s", diff)
			}
		})
	}
}

// removeEmpty removes an empty directory for specifications of several vendors, which no package
// owns.
func removeEmpty(dir string) error {
	if _, err := os.Stat(dir); err != nil {
		return nil
	}
	return os.Remove(dir)
}

// Without /proc, /sys, /run and device nodes, as in a build of an image.
func TestImageBuildInstallsPackages(t *testing.T) {
	r := plant(t, "bookworm", false)
	before := r.files()
	if out := r.run(apt + "install /packages/peerlane_*_amd64.deb /packages/libpeerlane_*_amd64.deb"); strings.Contains(
		out, "rror") {
		t.Errorf("apt-get says %s", out)
	}
	r.run("peerlane version")
	r.run(apt + "purge peerlane libpeerlane")
	if diff := cmp.Diff(before, r.files()); diff != "" {
		t.Errorf("files before installation and after the purge (-before +after):\n%s", diff)
	}
}

// The anchor is mounted while containers start, and a mount point cannot be removed.
func TestPurgeUnmountsTheAnchor(t *testing.T) {
	r := plant(t, "bookworm", true)
	r.run("dpkg --force-unsafe-io --install /packages/peerlane_*_amd64.deb")
	r.run("peerlane cdi anchor")
	anchor := paths.New(r.root)
	if err := anchor.CheckAnchor(); err != nil {
		t.Fatal(err)
	}
	r.run("dpkg --force-unsafe-io --remove peerlane")
	if anchor.CheckAnchor() == nil {
		t.Error("the removal leaves the anchor mounted")
	}
	// The start of a container mounts the anchor again after the removal.
	check(t, anchor.MountAnchor())
	out := r.run("dpkg --force-unsafe-io --purge peerlane 2>&1")
	if r.exists("/var/lib/peerlane") {
		t.Errorf("the purge leaves %s, and says\n%s",
			r.run("find /var/lib/peerlane; grep peerlane /proc/self/mountinfo || true"), out)
	}
}

// A purge keeps the records of peerlane runtime configure, without which the change could not be
// reverted, and prints how to revert.
func TestPurgeKeepsRecordsOfEngines(t *testing.T) {
	r := plant(t, "bookworm", true)
	r.run("dpkg --force-unsafe-io --install /packages/peerlane_*_amd64.deb")
	r.run(`printf '#!/bin/sh\necho podman version 4.0.0\n' >/usr/local/bin/podman; chmod 755 /usr/local/bin/podman; mkdir -p /etc/containers; peerlane runtime configure --runtime podman`)
	record := "/var/lib/peerlane/engines/podman/record.json"
	if !r.exists(record) {
		t.Fatalf("runtime configure writes no %s", record)
	}
	out := r.run("dpkg --force-unsafe-io --purge peerlane 2>&1")
	if !r.exists(record) || !strings.Contains(out, "run peerlane runtime remove --runtime podman") {
		t.Errorf("record exists: %v; output of the purge:\n%s", r.exists(record), out)
	}
	r.run("dpkg --force-unsafe-io --install /packages/peerlane_*_amd64.deb; peerlane runtime remove --runtime podman; " +
		"dpkg --force-unsafe-io --purge peerlane")
	if r.exists("/var/lib/peerlane") || r.exists("/etc/containers/containers.conf.d/99-peerlane.conf") {
		t.Error("after remove and purge something is left")
	}
}

// The installed programs find one another and the simulator.
func TestInstalledDemoSucceeds(t *testing.T) {
	r := plant(t, "bookworm", true)
	r.run(apt + "install /packages/peerlane_*_amd64.deb")
	if out := r.run("peerlane demo --runtime none --gpus simulated --bytes 1MiB"); !strings.Contains(out, "simulator") {
		t.Errorf("peerlane demo says\n%s", out)
	}
}

// rpm runs rpm with a database in the tree.
func (r *tree) rpm(arguments ...string) string {
	r.Helper()
	c := exec.CommandContext(r.Context(), "rpm", append([]string{"--root", r.root, "--nosignature"}, arguments...)...)
	out, err := c.CombinedOutput()
	if err != nil || strings.Contains(string(out), "scriptlet failed") {
		r.Fatalf("%s: %v\n%s", strings.Join(c.Args, " "), err, out)
	}
	return string(out)
}

// live creates the files of a running container and returns the paths.
func (r *tree) live() (paths []string) {
	r.Helper()
	for _, dir := range []string{"/var/lib/peerlane/generations/0123456789abcdef0123456789abcdef",
		"/run/peerlane/sockets/0123456789abcdef0123456789abcdef", "/var/lib/peerlane/anchor"} {
		check(r, os.MkdirAll(filepath.Join(r.root, dir), 0o755))
		paths = append(paths, dir)
	}
	return paths
}

// outlives requires that a container's files still exist, and follows the printed instructions for
// removal.
func (r *tree) outlives(paths []string, out string) {
	r.Helper()
	for _, path := range paths {
		if !r.exists(path) {
			r.Errorf("a container that lives has lost %s", path)
		}
	}
	_, command, found := strings.Cut(out, "after their end: ")
	if !found {
		r.Fatalf("nothing says how to remove it later: %s", out)
	}
	command, _, _ = strings.Cut(command, "\n")
	r.run(command)
}

// A root of rpm, whose database lists only a glibc and a shell.
func TestRPMInstallsAndRemoves(t *testing.T) {
	r := plant(t, "bookworm", true)
	r.bind(older, "older")
	// A package that satisfies the dependencies of the packages.
	stand := t.TempDir()
	check(t, os.WriteFile(filepath.Join(stand, "host.yaml"), []byte(`
name: host
arch: amd64
version: 1.0.0
maintainer: Peerlane <packages@peerlane.dev>
description: stands for a system
provides: ["libc.so.6(GLIBC_2.34)(64bit)", "libc.so.6(GLIBC_2.28)(64bit)", /bin/sh, /usr/bin/pkg-config, policycoreutils]
`), 0o644))
	run(t, dist+"/tools/nfpm", "package", "-f", filepath.Join(stand, "host.yaml"), "-p", "rpm", "-t", stand+"/")
	of := func(dir string) (paths []string) {
		for _, name := range names {
			paths = append(paths, rpm(t, dir, name, "amd64"))
		}
		return paths
	}
	r.rpm("--initdb")
	before := r.files()
	if out, err := exec.CommandContext(t.Context(), "rpm",
		append([]string{"--root", r.root, "--nosignature", "-i"}, of(dist)...)...).CombinedOutput(); err == nil {
		t.Errorf("installed without glibc: %s", out)
	}
	r.rpm("-i", one(t, stand, "host-*.rpm"))
	version := func() string { return r.rpm("-q", "--qf", "%{VERSION}", "peerlane") }

	r.rpm(append([]string{"-i"}, of(older)...)...)
	if v := version(); v != "0.0.9" {
		t.Errorf("the older version is %s", v)
	}
	r.works()
	r.configure()
	specification := r.generate()
	r.rpm(append([]string{"-U"}, of(dist)...)...)
	if v := version(); v == "0.0.9" {
		t.Error("it is not upgraded")
	}
	r.isConfigured("upgrade")
	if now := r.read("/etc/cdi/peerlane.dev-lane.json"); now != specification {
		t.Errorf("an upgrade changes the specification (-before +after):\n%s", cmp.Diff(specification, now))
	}
	r.works()
	r.generate()
	r.rpm(append([]string{"-U", "--oldpackage"}, of(older)...)...)
	if v := version(); v != "0.0.9" {
		t.Errorf("after the downgrade the version is %s", v)
	}
	r.isConfigured("downgrade")
	alive := r.live()
	r.outlives(alive, r.rpm("-e", "peerlane", "peerlane-selinux"))
	r.rpm("-i", rpm(t, dist, "peerlane", "amd64"))
	r.run("mkdir -p /var/lib/peerlane/generations /run/peerlane")
	r.rpm("-e", "peerlane", "libpeerlane", "libpeerlane-devel", "host")
	if text := r.read("/etc/peerlane/config.toml.rpmsave"); text != configured {
		t.Errorf("after the removal the saved configuration is\n%s", text)
	}
	check(t, os.RemoveAll(filepath.Join(r.root, "etc/peerlane")))
	check(t, removeEmpty(filepath.Join(r.root, "etc/cdi")))
	// RPM leaves directories that no package owns; on real systems other packages own them.
	after := slices.DeleteFunc(r.files(), func(path string) bool {
		info, err := os.Lstat(filepath.Join(r.root, path))
		return err == nil && info.IsDir() && !slices.Contains(before, path) && !strings.Contains(path, "peerlane")
	})
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("files before installation and after the removal (-before +after):\n%s", diff)
	}
}
