package paths

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// modes returns the modes of the directories below a root, by path.
func modes(t *testing.T, root string) map[string]fs.FileMode {
	t.Helper()
	found := map[string]fs.FileMode{}
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		info, err := d.Info()
		if err == nil {
			found[strings.TrimPrefix(path, root+"/")] = info.Mode().Perm()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

// Missing parents of Peerlane's directories are accessible to other users, and Peerlane's
// directories have stricter modes. Both hold in any order of creation, and with any umask.
func TestCreatedDirectoriesHaveStrictModes(t *testing.T) {
	state := map[string]fs.FileMode{"var": 0o755, "var/lib": 0o755, "var/lib/peerlane": 0o700}
	all := map[string]fs.FileMode{
		"var": 0o755, "var/lib": 0o755, "var/lib/peerlane": 0o700, "var/lib/peerlane/anchor": 0o555,
		"var/lib/peerlane/generations": 0o700, "var/lib/peerlane/uids": 0o700,
		"run": 0o755, "run/peerlane": 0o755, "run/peerlane/sockets": 0o700, "run/peerlane/peers": 0o711,
		"etc": 0o755, "etc/peerlane": 0o755,
	}
	for _, umask := range []int{0, 0o022, 0o077} {
		before := unix.Umask(umask)
		t.Cleanup(func() { unix.Umask(before) })
		for _, order := range []struct {
			name string
			do   []func(Layout) error
			want map[string]fs.FileMode
		}{
			{"the state alone", []func(Layout) error{Layout.CreateState}, state},
			{"everything", []func(Layout) error{Layout.Create}, all},
			{"the state, then everything", []func(Layout) error{Layout.CreateState, Layout.Create}, all},
			{"everything, twice, then the state", []func(Layout) error{Layout.Create, Layout.Create, Layout.CreateState}, all},
		} {
			l := New(filepath.Join(t.TempDir(), "not", "there"))
			for _, do := range order.do {
				if err := do(l); err != nil {
					t.Fatalf("%s: %v", order.name, err)
				}
			}
			if diff := cmp.Diff(order.want, modes(t, l.Root)); diff != "" {
				t.Errorf("umask %#o, %s: %s", umask, order.name, diff)
			}
		}
	}
}

// Create corrects the modes of its directories, with any present modes, and changes no further
// modes.
func TestCreateCorrectsModesOfItsDirectories(t *testing.T) {
	l := New(t.TempDir())
	if err := os.MkdirAll(l.State(), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := l.CreateState(); err != nil {
		t.Fatal(err)
	}
	if got := modes(t, l.Root)["var/lib/peerlane"]; got != 0o750 {
		t.Errorf("a directory that was there has mode %#o now", got)
	}
	if err := l.Create(); err != nil {
		t.Fatal(err)
	}
	if got := modes(t, l.Root); got["var/lib/peerlane"] != 0o700 || got["var/lib"] != 0o750 {
		t.Errorf("modes are %v", got)
	}
}

func TestCreateStateOverFileFails(t *testing.T) {
	l := New(t.TempDir())
	if err := os.WriteFile(filepath.Join(l.Root, "var"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{l.Create(), l.CreateState()} {
		var failed *fs.PathError
		if !errors.As(err, &failed) || !strings.HasPrefix(failed.Path, l.Root+"/var") {
			t.Errorf("a file instead of a directory: %v", err)
		}
	}
}

func TestCreateCorrectsSpecialBitsAndRefusesFile(t *testing.T) {
	l := New(t.TempDir())
	for _, bit := range []fs.FileMode{fs.ModeSticky, fs.ModeSetgid, fs.ModeSetuid} {
		if err := l.Create(); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(l.Run(), 0o755|bit); err != nil {
			t.Fatal(err)
		}
		if err := l.Create(); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(l.Run()); err != nil || info.Mode() != fs.ModeDir|0o755 {
			t.Errorf("%v: mode %v, %v", bit, info.Mode(), err)
		}
	}
	if err := os.Remove(l.UIDs()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.UIDs(), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := l.Create(); err == nil {
		t.Error("a file with the mode of the directory is taken for it")
	}
}

func TestCgroupOfEachLayoutDiffers(t *testing.T) {
	if got := New("/").Cgroup(); got != "peerlane" {
		t.Errorf("the host's group is %q", got)
	}
	if a, b := New("/a").Cgroup(), New("/b").Cgroup(); a == b || a == "peerlane" || !strings.HasPrefix(a, "peerlane-") {
		t.Errorf("other layouts have %q and %q", a, b)
	}
}

func TestNewWithoutRootIsHost(t *testing.T) {
	if got := New(""); got != New("/") {
		t.Errorf("%+v", got)
	}
}
