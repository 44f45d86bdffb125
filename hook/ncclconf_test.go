package hook_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
)

const (
	defaults = "NCCL_NET_PLUGIN=peerlane\n"
	// The file of a container with one lane on a host without a cluster key.
	oneLane = defaults + "\n# Added by Peerlane's hook: the container has one lane, which reaches only this " +
		"host.\nNCCL_NCHANNELS_PER_NET_PEER=8\n"
	ownDefaults = "NCCL_NET=Socket\n"
	confTarget  = "/run/peerlane/nccl.conf"
)

// image writes a file, and the directory of the file, to the image.
func (b *bundle) image(path, text string) {
	b.t.Helper()
	path = filepath.Join(b.dir, "rootfs", path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		b.t.Fatal(err)
	}
}

// linked returns the target of the link in the image; empty without a link.
func (b *bundle) linked() string {
	to, err := os.Readlink(filepath.Join(b.dir, "rootfs/etc/nccl.conf"))
	if err != nil {
		return ""
	}
	return to
}

// A container without a file gets the NCCL defaults of the host.
func TestNCCLConfContainerWithLaneGetsDefaults(t *testing.T) {
	const none = "open /etc/nccl.conf: no such file or directory"
	for name, test := range map[string]struct {
		edit   func(*bundle)
		text   string // in the container
		file   string // as Inspect reports
		reason string
		linked bool // in the root file system afterwards
	}{
		"absent":    {func(*bundle) {}, oneLane, control.NCCLConfPeerlane, "", true},
		"two hooks": {func(b *bundle) { b.lanes(3, 4) }, defaults, control.NCCLConfPeerlane, "", true},
		"prestart": {func(b *bundle) {
			//lint:ignore SA1019 older engines know no other
			b.Spec.Hooks.Prestart, b.Spec.Hooks.CreateRuntime = b.Spec.Hooks.CreateRuntime, nil
		}, oneLane, control.NCCLConfPeerlane, "", true},
		"read-only root file system": {func(b *bundle) {
			b.Spec.Root.Readonly = true
			b.mount(filepath.Join(b.dir, "rootfs/out"), "/out", "bind")
		}, oneLane, control.NCCLConfPeerlane, "", true},
		"image that was committed from such a container": {func(b *bundle) { b.dangling(confTarget, "etc/nccl.conf") },
			oneLane, control.NCCLConfPeerlane, "", true},
		"link at etc": {func(b *bundle) { b.link("/data", "etc") }, oneLane, control.NCCLConfPeerlane, "", false},
		"file of the image": {func(b *bundle) { b.image("etc/nccl.conf", ownDefaults) }, ownDefaults,
			control.NCCLConfContainer, "", false},
		"link of the image": {func(b *bundle) {
			b.image("data/conf", ownDefaults)
			b.dangling("../data/conf", "etc/nccl.conf")
		}, ownDefaults, control.NCCLConfContainer, "", false},
		"dangling link of the image": {func(b *bundle) { b.dangling("/nowhere", "etc/nccl.conf") }, none,
			control.NCCLConfNone, "dangling symbolic link", false},
		"volume at the file": {func(b *bundle) {
			own := filepath.Join(b.outside(), "..", "own.conf")
			if err := os.WriteFile(own, []byte(ownDefaults), 0o644); err != nil {
				b.t.Fatal(err)
			}
			b.mount(own, "/etc/nccl.conf", "bind", "ro")
		}, ownDefaults, control.NCCLConfContainer, "", false},
		"volume at etc": {func(b *bundle) { b.mount(b.outside(), "/etc", "bind") }, none, control.NCCLConfNone, "is a mount",
			false},
		"link to volume": {func(b *bundle) { b.mount(b.outside(), "/vol", "bind"); b.link("/vol", "etc") }, none,
			control.NCCLConfNone, "is a mount", false},
		"link to the host": {func(b *bundle) {
			if err := errors.Join(os.RemoveAll(filepath.Join(b.dir, "rootfs/etc")),
				os.Symlink("../../../../../.."+b.outside(), filepath.Join(b.dir, "rootfs/etc"))); err != nil {
				b.t.Fatal(err)
			}
		}, none, control.NCCLConfNone, "no directory /etc", false},
		"no directory etc": {func(b *bundle) {
			if err := os.Remove(filepath.Join(b.dir, "rootfs/etc")); err != nil {
				b.t.Fatal(err)
			}
		}, none, control.NCCLConfNone, "no directory /etc", false},
		"file of the host that others can write": {func(b *bundle) {
			if err := os.Chmod(b.layout.NCCLConf(), 0o666); err != nil {
				b.t.Fatal(err)
			}
			b.Spec.Hooks.CreateRuntime[0].Env = append(b.Spec.Hooks.CreateRuntime[0].Env, "TEST_WARNINGS=1")
		}, none, control.NCCLConfNone, "chmod go-w", false},
		"no file of the host": {func(b *bundle) {
			if err := os.Remove(b.layout.NCCLConf()); err != nil {
				b.t.Fatal(err)
			}
		}, none, control.NCCLConfNone, "the host had no ", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRuntime(t, func(t *testing.T, runtime []string) {
				b := newBundle(t, runtime, true)
				if err := os.WriteFile(b.layout.NCCLConf(), []byte(defaults), 0o644); err != nil {
					t.Fatal(err)
				}
				b.mkdir("etc")
				b.Spec.Process.Env = append(b.Spec.Process.Env, "NCCL_CONF_FILE=/mine", "NCCL_DEBUG=INFO", "PROBE_UNCOVERED=1")
				test.edit(b)
				b.start()
				if p := b.found(); p.NCCLConf != test.text {
					t.Errorf("/etc/nccl.conf of the container: %q, want %q", p.NCCLConf, test.text)
				}
				if linked := b.linked() == confTarget; linked != test.linked {
					t.Errorf("the root file system has the link %q", b.linked())
				}
				all, err := generation.List(b.layout)
				if err != nil || len(all) != 1 {
					t.Fatalf("generations %+v, %v", all, err)
				}
				i, err := control.Inspect(b.layout, all[0].ID)
				if err != nil {
					t.Fatal(err)
				}
				if c := i.NCCLConf; c.File != test.file || !strings.Contains(c.Reason, test.reason) ||
					(c.Reason == "") != (c.File != control.NCCLConfNone) ||
					!slices.Equal(c.Environment, []string{"NCCL_CONF_FILE=/mine"}) {
					t.Errorf("inspect reports %+v", c)
				}
				b.untouched()
				if out, err := b.run("kill", b.id, "KILL"); err != nil {
					t.Errorf("%v: %s", err, out)
				}
				b.gone(t)
			})
		})
	}
}

// dangling makes a symbolic link in the image without the target.
func (b *bundle) dangling(to, at string) {
	at = filepath.Join(b.dir, "rootfs", at)
	if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.Symlink(to, at)); err != nil {
		b.t.Fatal(err)
	}
}

// With a user namespace the root user of the container owns the link, so that an engine that
// commits the container can map the owner.
func TestNCCLConfUserNamespaceRootOwnsLink(t *testing.T) {
	eachRuntime(t, func(t *testing.T, runtime []string) {
		b := newBundle(t, runtime, true)
		if err := os.WriteFile(b.layout.NCCLConf(), []byte(defaults), 0o644); err != nil {
			t.Fatal(err)
		}
		b.mkdir("etc")
		b.Spec.Linux.Namespaces = append(b.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		b.Spec.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: 200000, Size: 65536}}
		b.Spec.Linux.GIDMappings = b.Spec.Linux.UIDMappings
		b.Spec.Root.Path = filepath.Join(b.dir, "rootfs")
		if out, err := exec.Command("chown", "-R", "200000:200000",
			filepath.Join(b.dir, "rootfs")).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		b.start()
		if p := b.found(); p.NCCLConf != oneLane {
			t.Errorf("/etc/nccl.conf of the container: %q", p.NCCLConf)
		}
		info, err := os.Lstat(filepath.Join(b.dir, "rootfs/etc/nccl.conf"))
		if err != nil {
			t.Fatal(err)
		}
		if stat := info.Sys().(*syscall.Stat_t); stat.Uid != 200000 || stat.Gid != 200000 {
			t.Errorf("the link belongs to %d:%d", stat.Uid, stat.Gid)
		}
	})
}
