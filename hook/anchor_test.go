package hook_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/testutil"
)

// Runtimes make device nodes and mount points at paths that the image chooses. In the anchor these
// calls fail, so the host gets no file.
func TestImageThatHasTheRuntimeWriteInTheAnchorFails(t *testing.T) {
	for name, edit := range map[string]func(*bundle){
		"link to dev": func(b *bundle) { b.link("/dev", "run/peerlane") },
		"deep volume": func(b *bundle) {
			b.link("/run/peerlane", "volume") // hides the path from the hook
			b.mount(b.outside(), "/volume/"+strings.Repeat("d/", 80)+"v", "bind")
		},
		"file as volume": func(b *bundle) {
			b.link("/run/peerlane", "volume")
			b.mount("/dev/null", "/volume/file", "bind")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachRuntime(t, func(t *testing.T, runtime []string) {
				b := newBundle(t, runtime, false)
				edit(b)
				if out, err := b.run("run", b.id); err == nil {
					t.Errorf("the container started: %s", out)
				}
				b.gone(t)
				b.run("delete", "--force", b.id) // some runtimes have deleted the container already
				for _, dir := range []string{"mount", "directory below the mount"} {
					if left, err := os.ReadDir(b.layout.Anchor()); err != nil || len(left) > 0 {
						t.Errorf("the anchor's %s has %v, %v", dir, left, err)
					}
					if unmounted, err := b.layout.UnmountAnchor(); err != nil || unmounted != (dir == "mount") {
						t.Errorf("unmounting: %v, %v", unmounted, err)
					}
				}
			})
		})
	}
}

// The error names the command that repairs the host.
func TestAnchorThatIsNotMountedIsRefused(t *testing.T) {
	eachRuntime(t, func(t *testing.T, runtime []string) {
		b := newBundle(t, runtime, false)
		log := filepath.Join(b.dir, "hook.log")
		b.tee(log)
		if _, err := b.layout.UnmountAnchor(); err != nil {
			t.Fatal(err)
		}
		out, err := b.run("run", b.id)
		if err == nil {
			t.Errorf("the container started: %s", out)
		}
		text, _ := os.ReadFile(log)
		if out += string(text); !strings.Contains(out, "it is a directory instead of a mount") ||
			!strings.Contains(out, b.layout.AnchorCommand()) {
			t.Errorf("the error is %q", out)
		}
		b.gone(t)
		b.run("delete", "--force", b.id)
		if err := b.layout.MountAnchor(); err != nil {
			t.Fatal(err)
		}
		if out, err := b.run("run", b.id); err != nil {
			t.Errorf("with the anchor mounted: %v: %s", err, out)
		}
	})
}

// A container of an earlier release has the plain directory below the socket, and keeps that
// socket when the upgrade mounts the anchor.
func TestContainerOfEarlierReleaseKeepsItsSocket(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mount namespaces")
	}
	h := newSharedHost(t)
	if _, err := h.layout.UnmountAnchor(); err != nil {
		t.Fatal(err)
	}
	beside := startProcess(t)
	g := h.launch(t, "c", beside.Process.Pid, "")
	place, ready := filepath.Join(h.layout.Root, "place"), filepath.Join(h.layout.Root, "ready")
	if err := os.Mkdir(place, 0o755); err != nil {
		t.Fatal(err)
	}
	init := exec.Command(
		"unshare",
		"-m",
		"--propagation",
		"slave",
		"sh",
		"-c",
		`mount --bind "$0" "$1" && mount --bind "$2" "$1" && touch "$3" && exec sleep 1000000`,
		h.layout.Anchor(),
		place,
		h.layout.SocketDir(g.ID),
		ready,
	)
	if err := init.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(init) })
	testutil.Succeeds(t, "the container", func() error { _, err := os.Stat(ready); return err })
	if err := h.layout.MountAnchor(); err != nil {
		t.Fatal(err)
	}
	socket := fmt.Sprintf("/proc/%d/root%s", init.Process.Pid, filepath.Join(place, paths.SocketName))
	if info, err := os.Stat(socket); err != nil || info.Mode().Type() != os.ModeSocket {
		t.Errorf("the container's socket: %v, %v", info, err)
	}
}
