package openat2

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// tree makes DIR/outside/name and DIR/root/name, and returns DIR/root and a descriptor of it.
func tree(t *testing.T) (dir string, fd int) {
	t.Helper()
	top := t.TempDir()
	for name, text := range map[string]string{"outside/name": "outside", "root/name": "inside", "name": "outside"} {
		path := filepath.Join(top, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	dir = filepath.Join(top, "root")
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return dir, fd
}

// content returns the content of a path in the root, and closes the descriptor.
func content(t *testing.T, root int, path string) string {
	t.Helper()
	fd, err := InRoot(root, path, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	text := make([]byte, 16)
	n, err := f.Read(text)
	if err != nil {
		t.Fatal(err)
	}
	return string(text[:n])
}

func TestInRootPathsAboveTheRootStayInTheRoot(t *testing.T) {
	dir, root := tree(t)
	outside := filepath.Join(filepath.Dir(dir), "outside")
	for link, target := range map[string]string{"absolute": "/", "relative": "..", "deep": "../../../../../..",
		"chain": "absolute/relative"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"name", "/name", "///name", "../name", "/../../name", "absolute/name",
		"relative/name", "deep/name", "chain/name"} {
		if text := content(t, root, path); text != "inside" {
			t.Errorf("%s leads to a file with %q", path, text)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "host")); err != nil {
		t.Fatal(err)
	}
	if fd, err := InRoot(root, "host/name", unix.O_RDONLY, 0); !errors.Is(err, unix.ENOENT) {
		unix.Close(fd)
		t.Errorf("a link to a path of the host returned %d, %v", fd, err)
	}
}

func TestInRootWithoutSymlinksRefusesLinks(t *testing.T) {
	dir, root := tree(t)
	if err := os.Symlink("name", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if fd, err := InRoot(root, "/link", unix.O_RDONLY, unix.RESOLVE_NO_SYMLINKS); !errors.Is(err, unix.ELOOP) {
		unix.Close(fd)
		t.Errorf("a link returned %d, %v", fd, err)
	}
	if text := content(t, root, "/link"); text != "inside" {
		t.Errorf("the link leads to a file with %q", text)
	}
}

func TestInRootDescriptorIsCloseOnExec(t *testing.T) {
	_, root := tree(t)
	fd, err := InRoot(root, "/name", unix.O_PATH, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("the flags of the descriptor are %#x, %v", flags, err)
	}
	if _, err := unix.Read(fd, make([]byte, 1)); err != unix.EBADF {
		t.Errorf("a descriptor with O_PATH can be read: %v", err)
	}
}

func TestInRootAbsentPathReturnsTheKernelError(t *testing.T) {
	_, root := tree(t)
	for path, want := range map[string]error{"/absent": unix.ENOENT, "/name/below": unix.ENOTDIR} {
		if fd, err := InRoot(root, path, unix.O_RDONLY, 0); fd != -1 || !errors.Is(err, want) {
			t.Errorf("%s returned %d, %v, not %v", path, fd, err, want)
		}
	}
}
