package integration_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/client"
)

// mount tries four mounts at the socket: over the socket, below that mount, over the parent, and of
// the directory at another place.
func (w *witness) mount() {
	dir, elsewhere := paths.ContainerDir, "/tmp/elsewhere"
	w.Mounts["shared"] = answer(unix.Mount("", dir, "", unix.MS_SHARED|unix.MS_REC, ""))
	w.Mounts["a copy"] = answer(errors.Join(os.Mkdir(elsewhere, 0o700), unix.Mount(dir, elsewhere, "", unix.MS_BIND, "")))
	w.Mounts["over the socket"] = answer(unix.Mount("/proc/self/status", client.DefaultSocket, "", unix.MS_BIND, ""))
	w.Mounts["over the directory"] = answer(unix.Mount(hostileMount, dir, "tmpfs", 0, ""))
	w.Mounts["below that"] = answer(errors.Join(os.Mkdir(dir+"/below", 0o700),
		unix.Mount(hostileMount, dir+"/below", "tmpfs", 0, "")))
	w.Mounts["over its parent"] = answer(unix.Mount(hostileMount, filepath.Dir(dir), "tmpfs", 0, ""))
}

// hostileMount is the name of the file systems that witnesses mount.
const hostileMount = "peerlane-hostile-mount"

// remount clears read-only, nodev, nosuid and noexec of the mount, and tries to write again. A
// container with CAP_SYS_ADMIN on the host, without a user namespace, can remount each of its
// mounts.
func (w *witness) remount() {
	w.Mounts["writable"] = answer(unix.Mount("", paths.ContainerDir, "", unix.MS_REMOUNT|unix.MS_BIND, ""))
	write(w.Remounted)
}

// inUserNamespace runs bearWitness in a new user namespace, with all capabilities there.
func inUserNamespace(options []string) error {
	c := exec.Command("/proc/self/exe", append([]string{"role", "witness"}, options...)...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	return c.Run()
}

// Containers with mount privileges mount around their socket, on a host whose socket tree is
// shared, as under systemd.
func TestHostileMountsLeaveHostUntouched(t *testing.T) {
	for _, c := range []struct {
		name string
		role []string
		edit func(t *testing.T, b *bundle.Bundle)
	}{
		{"CAP_SYS_ADMIN", nil, func(_ *testing.T, b *bundle.Bundle) { admin(b) }},
		{"CAP_SYS_ADMIN and a shared root", nil, func(_ *testing.T, b *bundle.Bundle) {
			admin(b)
			b.Spec.Linux.RootfsPropagation = "shared"
		}},
		{"user namespace", []string{"remount"}, func(t *testing.T, b *bundle.Bundle) {
			admin(b)
			userNamespace(t, b)
		}},
		{"user namespace that it makes", []string{"unshare", "remount"}, func(_ *testing.T, b *bundle.Bundle) {
			b.Spec.Process.User = specs.User{UID: 1000, GID: 1000} // the user may map its ids
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, runtimeName := range runtimes {
				t.Run(runtimeName, func(t *testing.T) {
					h := newHostile(t, runtimeName, asItIs)
					b := h.image(slices.Concat(c.role, []string{"mount", "stay"})...)
					c.edit(t, b)
					if err := b.Write(); err != nil {
						t.Fatal(err)
					}
					running := h.run(b)
					saw := running.next("witness").Saw
					h.mustBeRight(t, result{saw: saw})
					t.Logf("mounting: %v; writing after that: %v", saw.Mounts, saw.Remounted)
					// Without these mounts the test proves nothing.
					for _, what := range []string{"over the socket", "over the directory", "below that", "over its parent"} {
						if saw.Mounts[what] != "done" {
							t.Errorf("mounting %s: %s", what, saw.Mounts[what])
						}
					}
					for what, text := range saw.Remounted {
						if text == "done" {
							t.Errorf("write through a remounted mount, %s: done", what)
						}
					}
					h.mustBeUntouched(t)
					if text, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(text), hostileMount) {
						t.Errorf("a mount of the container is on the host, %v:\n%s", err, text)
					}
					running.end()
					h.mustBeUntouched(t)
				})
			}
		})
	}
}

// admin gives a container the capabilities to mount and to write to files of any owner.
func admin(b *bundle.Bundle) {
	all := []string{"CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_FOWNER", "CAP_MKNOD"}
	b.Spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
}

// userNamespace gives a container a user namespace, and makes root of the namespace the owner of
// the image.
func userNamespace(t *testing.T, b *bundle.Bundle) {
	t.Helper()
	const root = 200000
	b.Spec.Linux.Namespaces = append(b.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	b.Spec.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: root, Size: 65536}}
	b.Spec.Linux.GIDMappings = b.Spec.Linux.UIDMappings
	b.Spec.Linux.Devices = nil // runtimes would look for the simulator's device nodes on the host
	b.Spec.Root.Path = filepath.Join(b.Dir, "rootfs")
	err := filepath.WalkDir(b.Spec.Root.Path, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, root, root))
	})
	if err != nil {
		t.Fatal(err)
	}
}
