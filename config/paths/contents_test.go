package paths

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

func TestRemoveContentsRemovesEachType(t *testing.T) { removeAtDepths(t, 0, 1, 2, 20) }

// The number of open descriptors and the length of a path do not limit the depth.
func TestRemoveContentsRemovesEachTypeAtAnyDepth(t *testing.T) { removeAtDepths(t, 80, 1500) }

// removeAtDepths fills the anchor at each depth with files of each type, and empties the anchor.
func removeAtDepths(t *testing.T, depths ...int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes a device node")
	}
	root := t.TempDir()
	l := New(root)
	if err := l.EmptyAnchor(); err != nil { // without an anchor
		t.Error(err)
	}
	outside := filepath.Join(root, "outside")
	if err := errors.Join(l.Create(), os.MkdirAll(filepath.Join(outside, "kept"), 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, depth := range depths {
		dir := filepath.Join(l.Anchor(), strings.Repeat("d/", depth))
		in := func(name string) string { return filepath.Join(dir, name) }
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.MkdirAll(in("removed-0/x/y"), 0o755),
			os.MkdirAll(in("two/x/y"), 0o000),
			os.WriteFile(in("file"), []byte("text"), 0o600), os.Symlink(outside, in("link")), unix.Mkfifo(in("fifo"), 0o600),
			unix.Mknod(in("null"), unix.S_IFCHR|0o666, 0x103), unix.Mknod(in("socket"), unix.S_IFSOCK|0o600, 0)); err != nil {
			t.Fatal(err)
		}
		if err := l.EmptyAnchor(); err != nil {
			t.Errorf("at depth %d: %v", depth, err)
		}
		if left, err := os.ReadDir(l.Anchor()); err != nil || len(left) > 0 {
			t.Fatalf("at depth %d: left are %v, %v", depth, left, err)
		}
	}
	if _, err := os.Stat(filepath.Join(outside, "kept")); err != nil {
		t.Error(err)
	}
}

// The anchor of a hostile image is no way into other mounts.
func TestRemoveContentsEntersNoOtherMount(t *testing.T) {
	l := anchored(t)
	outside, point := filepath.Join(l.Root, "outside"), filepath.Join(l.Anchor(), "a/b")
	if err := errors.Join(os.MkdirAll(filepath.Join(outside, "kept"), 0o755), os.MkdirAll(point, 0o755),
		os.MkdirAll(filepath.Join(l.Anchor(), "c/d/e"), 0o755),
		unix.Mount(outside, point, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(point, unix.MNT_DETACH) })
	var objects []string
	for err := l.EmptyAnchor(); err != nil; {
		failed, ok := errors.AsType[*fault.Error](err)
		if !ok {
			break
		}
		objects, err = append(objects, failed.Object), failed.Cause
	}
	if diff := cmp.Diff([]string{l.Anchor(), `"a"`, `"b"`}, objects); diff != "" {
		t.Errorf("objects of the error (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(filepath.Join(outside, "kept")); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(l.Anchor()); err != nil || len(left) != 1 {
		t.Errorf("left are %v, %v", left, err)
	}
}

func TestIsNotEmptyKnowsBothErrors(t *testing.T) {
	for err, want := range map[error]bool{unix.ENOTEMPTY: true, unix.EEXIST: true, unix.ENOENT: false, nil: false} {
		if got := isNotEmpty(err); got != want {
			t.Errorf("%v: %t", err, got)
		}
	}
}
