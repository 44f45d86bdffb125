package hook_test

import (
	"bytes"
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
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
)

// bundle is an OCI bundle that a test edits before the start.
type bundle struct {
	host
	t       *testing.T
	runtime []string
	dir     string
	id      string
	Spec    specs.Spec
}

// runtimes returns the commands of the runtimes that this machine has.
func runtimes(t *testing.T) map[string][]string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: real runtimes")
	}
	found := map[string][]string{}
	if path, err := exec.LookPath("runc"); err == nil {
		found["runc"] = []string{path}
	}
	if path, err := exec.LookPath("crun"); err == nil {
		found["crun"] = []string{path}
		if _, err := os.Stat("/sys/fs/cgroup/unified"); err == nil {
			// crun refuses a host that has both versions of cgroups. Shared mounts stay shared.
			found["crun"] = []string{"unshare", "-m", "--propagation", "unchanged", "sh", "-c",
				`mount --make-rprivate /sys/fs/cgroup && umount /sys/fs/cgroup/unified && exec "$@"`, "sh", path}
		}
	}
	if len(found) == 0 {
		t.Skip("needs runc or crun")
	}
	return found
}

// eachRuntime runs a test with each runtime of the machine.
func eachRuntime(t *testing.T, test func(t *testing.T, runtime []string)) {
	for name, runtime := range runtimes(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, runtime)
		})
	}
}

// newSharedHost returns a host on a separate shared mount: systemd makes / and /run shared too.
func newSharedHost(t *testing.T) host {
	t.Helper()
	h := newHost(t)
	root := h.layout.Root
	for _, err := range []error{
		os.Chmod(filepath.Dir(root), 0o755), // for containers with a user namespace
		unix.Mount("tmpfs", root, "tmpfs", 0, "mode=0755"),
		unix.Mount("", root, "", unix.MS_SHARED, ""),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() { // leave no mount behind on the machine
			_ = unix.Unmount(root, unix.MNT_DETACH)
			return
		}
		// A supervisor that is ending still has its log file open.
		testutil.Succeeds(t, "unmounting", func() error { return unix.Unmount(root, 0) })
	})
	mountAnchor(t, h.layout) // the tmpfs covers the anchor that newHost mounted
	t.Cleanup(func() { h.gone(t) })
	h.install(t)
	return h
}

// newBundle makes a bundle on a shared host. The create hook requests lane 3.
func newBundle(t *testing.T, runtime []string, stay bool) *bundle {
	t.Helper()
	h := newSharedHost(t)
	root := h.layout.Root
	b := &bundle{
		host:    h,
		t:       t,
		runtime: append(slices.Clone(runtime), "--root", filepath.Join(root, "runtime")),
		dir:     filepath.Join(root, "bundle"),
	}
	b.id = fmt.Sprintf("peerlane-hook-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	for _, dir := range []string{"rootfs/out", "rootfs/test", "rootfs/usr", "rootfs/lib", "rootfs/lib64", "rootfs/run"} {
		if err := os.MkdirAll(filepath.Join(b.dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(b.dir, "rootfs/out"), 0o777); err != nil {
		t.Fatal(err)
	}
	spec := exec.Command(runtime[len(runtime)-1], "spec")
	spec.Dir = b.dir
	if out, err := spec.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(b.dir, "config.json"))
	if err == nil {
		err = json.Unmarshal(text, &b.Spec)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := b.Spec.Process
	p.Terminal, p.Rlimits, p.Capabilities.Ambient = false, nil, nil
	p.Args = []string{"/test/peerlane-probe"}
	if stay {
		p.Args = append(p.Args, "stay")
	}
	for caps := range slices.Values([]*[]string{&p.Capabilities.Bounding, &p.Capabilities.Effective,
		&p.Capabilities.Permitted}) {
		*caps = append(*caps, "CAP_SYS_ADMIN") // the probe tries to mount
	}
	b.Spec.Root.Readonly = false
	if b.Spec.Linux.Resources != nil {
		b.Spec.Linux.Resources.Memory = nil
	}
	for _, dir := range []string{"/usr", "/lib", "/lib64"} {
		if _, err := os.Stat(dir); err == nil {
			b.mount(dir, dir, "rbind", "ro")
		}
	}
	// the flags of many /tmp: a user namespace must not clear nodev and nosuid
	b.mount(bin, "/test", "bind", "ro", "nosuid", "nodev")
	b.mount(h.layout.Anchor(), paths.ContainerDir, "bind", "ro", "nosuid", "nodev", "noexec", "rprivate")
	b.Spec.Hooks = &specs.Hooks{Poststop: []specs.Hook{b.hook("remove")}}
	b.Spec.Hooks.CreateRuntime = []specs.Hook{b.hook("create", "--lane", lane(3).GPU.UUID+"@"+lane(3).GPU.BusID)}
	return b
}

func (b *bundle) mount(source, destination string, options ...string) {
	b.Spec.Mounts = append(
		b.Spec.Mounts,
		specs.Mount{Source: source, Destination: destination, Type: "bind", Options: options},
	)
}

func (b *bundle) hook(command string, args ...string) specs.Hook {
	path := filepath.Join(bin, "peerlane-hook")
	return specs.Hook{
		Path: path, Env: []string{"PATH=/usr/bin:/bin", "GORACE=atexit_sleep_ms=0"},
		Args: append([]string{"peerlane-hook", command, "--root", b.layout.Root}, args...),
	}
}

// link makes a symbolic link in the image. If the target is in the image, link makes the target
// directory too.
func (b *bundle) link(to, at string) {
	b.mkdir(filepath.Join("/", filepath.Dir(at), to))
	if filepath.IsAbs(to) {
		b.mkdir(to)
	}
	at = filepath.Join(b.dir, "rootfs", at)
	if err := errors.Join(os.RemoveAll(at), os.Symlink(to, at)); err != nil {
		b.t.Fatal(err)
	}
}

// run runs a command of the runtime for the container and returns the output. It blocks until the
// pipes are closed.
func (b *bundle) run(command string, args ...string) (string, error) {
	b.t.Helper()
	text, err := json.Marshal(b.Spec)
	if err == nil {
		err = os.WriteFile(filepath.Join(b.dir, "config.json"), text, 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	all := append(slices.Clone(b.runtime), command)
	cmd := exec.Command(all[0], append(all[1:], args...)...)
	cmd.Dir = b.dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// start runs the container in the background.
func (b *bundle) start() {
	b.t.Helper()
	// The container inherits standard output of the runtime: a pipe would stay open.
	log := filepath.Join(b.dir, "log")
	f, err := os.Create(log)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	text, err := json.Marshal(b.Spec)
	if err == nil {
		err = os.WriteFile(filepath.Join(b.dir, "config.json"), text, 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	all := append(slices.Clone(b.runtime), "run", "--detach", b.id)
	cmd := exec.Command(all[0], all[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = b.dir, f, f
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(log)
		b.t.Fatalf("%v: %s", err, text)
	}
	b.t.Cleanup(func() { b.run("delete", "--force", b.id) })
}

func (b *bundle) found() (p probe) {
	b.t.Helper()
	testutil.Succeeds(b.t, "the container's word", func() error {
		text, err := os.ReadFile(filepath.Join(b.dir, "rootfs/out/probe"))
		if err == nil {
			err = json.Unmarshal(text, &p)
		}
		return err
	})
	if p.Failure != "" {
		b.t.Errorf("in the container: %s", p.Failure)
	}
	return p
}

// mounts returns the mounts of the host that belong to the test.
func (h host) mounts(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, h.layout.Root) || strings.Contains(line, "peerlane/sockets") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

func (b *bundle) anchor() *specs.Mount {
	i := slices.IndexFunc(b.Spec.Mounts, func(m specs.Mount) bool { return m.Destination == paths.ContainerDir })
	return &b.Spec.Mounts[i]
}

func (b *bundle) dropAnchor() {
	b.Spec.Mounts = slices.DeleteFunc(
		b.Spec.Mounts,
		func(m specs.Mount) bool { return m.Destination == paths.ContainerDir },
	)
}

func (b *bundle) mkdir(path string) {
	if err := os.MkdirAll(filepath.Join(b.dir, "rootfs", path), 0o755); err != nil {
		b.t.Fatal(err)
	}
}

// lanes sets one create hook per lane.
func (b *bundle) lanes(indices ...int) {
	b.Spec.Hooks.CreateRuntime = nil
	for _, i := range indices {
		b.Spec.Hooks.CreateRuntime = append(
			b.Spec.Hooks.CreateRuntime,
			b.hook("create", "--lane", lane(i).GPU.UUID+"@"+lane(i).GPU.BusID),
		)
	}
}

func (b *bundle) configure(text string) {
	if err := os.WriteFile(b.layout.ConfigFile(), []byte(text), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// outside returns a directory of the host that a hostile image targets.
func (b *bundle) outside() string {
	dir := filepath.Join(b.layout.Root, "outside")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	return dir
}

func (b *bundle) untouched() {
	entries, err := os.ReadDir(b.outside())
	if err != nil || len(entries) > 0 {
		b.t.Errorf("the host's directory holds %v, %v", entries, err)
	}
}

// tee makes the hooks write standard error to a log.
func (b *bundle) tee(log string) {
	script := filepath.Join(b.dir, "tee.sh")
	text := fmt.Sprintf("#!/bin/sh\nexec %s/peerlane-hook \"$@\" 2>>%s\n", bin, log)
	if err := programs.Write(script, []byte(text)); err != nil {
		b.t.Fatal(err)
	}
	for _, hooks := range [][]specs.Hook{b.Spec.Hooks.CreateRuntime, b.Spec.Hooks.CreateContainer} {
		for i := range hooks {
			hooks[i].Path = script
			hooks[i].Args[0] = script
		}
	}
}

// install writes a configuration, and a plan of lanes 3 and 4 with the devices of the plan.
func (h host) install(t *testing.T) {
	t.Helper()
	if err := h.layout.Create(); err != nil {
		t.Fatal(err)
	}
	sysfs := filepath.Join(h.layout.Root, "sys")
	plan := planOf(sysfs, 3, 4)
	if err := plan.Write(h.layout.PlanFile()); err != nil {
		t.Fatal(err)
	}
	for _, gpu := range plan.GPUs {
		dir := filepath.Join(sysfs, "bus/pci/devices", gpu.BusID)
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "vendor"), []byte("0x10de\n"),
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "[relay]\nenvironment = [%q]\nsandbox_write = [%q]\n", "TEST_DIR="+h.dir, h.dir)
	if err := os.WriteFile(h.layout.ConfigFile(), text.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
