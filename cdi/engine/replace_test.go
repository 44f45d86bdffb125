package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// accessList returns an access control list in the kernel's form that lets a user read a file, in
// addition to its owner.
func accessList(user uint32) []byte {
	const nobody = 1<<32 - 1
	list := binary.LittleEndian.AppendUint32(nil, 2)
	for _, entry := range []struct {
		tag, perm uint16
		id        uint32
	}{{0x01, 6, nobody}, {0x02, 4, user}, {0x04, 0, nobody}, {0x10, 4, nobody}, {0x20, 0, nobody}} {
		list = binary.LittleEndian.AppendUint16(list, entry.tag)
		list = binary.LittleEndian.AppendUint16(list, entry.perm)
		list = binary.LittleEndian.AppendUint32(list, entry.id)
	}
	return list
}

// The same users may read the file before and after the change.
func TestAccessListsAreKept(t *testing.T) {
	root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
	path := filepath.Join(root, daemonJSON)
	put(t, path, "{}")
	list := accessList(12345)
	if err := unix.Setxattr(path, "system.posix_acl_access", list, 0); errors.Is(err, unix.ENOTSUP) {
		list = nil // a file system without access control lists
	} else if err != nil {
		t.Fatal(err)
	}
	h := Host{Root: root, Version: "25.0.0"}
	change, _, err := h.Configure(context.Background(), store, docker, Wanted{})
	if err == nil {
		err = change.Apply()
	}
	if err != nil {
		t.Fatal(err)
	}
	if got, err := attribute(path, "system.posix_acl_access"); err != nil || !cmp.Equal(list, got) {
		t.Errorf("the list is %x, %v, want %x", got, err, list)
	}
	if list == nil {
		return
	}
	// The default list of the directory does not apply to the file.
	if err := unix.Removexattr(path, "system.posix_acl_access"); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(filepath.Dir(path), "system.posix_acl_default", list, 0); err != nil {
		t.Fatal(err)
	}
	back, err := Remove(store, docker)
	if err == nil {
		err = back.Apply()
	}
	if got, failed := attribute(path, "system.posix_acl_access"); err != nil || failed != nil || got != nil {
		t.Errorf("the list is %x, %v, %v, want none", got, err, failed)
	}
}

// A path that has become a link is not replaced, and its target is not changed.
func TestRemoveRefusesAnotherFile(t *testing.T) {
	root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
	path, other := filepath.Join(root, daemonJSON), filepath.Join(root, "srv/daemon.json")
	change, _, err := Host{Root: root, Version: "25.0.0"}.Configure(context.Background(), store, docker, Wanted{})
	if err == nil {
		err = change.Apply()
	}
	if err == nil {
		err = os.MkdirAll(filepath.Dir(other), 0o755)
	}
	if err == nil {
		err = os.Rename(path, other)
	}
	if err == nil {
		err = os.Symlink(other, path)
	}
	if err != nil {
		t.Fatal(err)
	}
	before := files(t, root)
	if _, err := Remove(store, docker); !errors.Is(err, errOtherFile) {
		t.Errorf("error %v, want %v", err, errOtherFile)
	}
	if diff := cmp.Diff(before, files(t, root)); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

// Remove recognises a file that Configure created in new directories below a link.
func TestRemoveFindsFileInNewDirectoriesBelowLink(t *testing.T) {
	root, store := t.TempDir(), filepath.Join(t.TempDir(), "engines")
	if err := os.Mkdir(filepath.Join(root, "disk"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("disk", filepath.Join(root, "etc")); err != nil {
		t.Fatal(err)
	}
	before := files(t, root)
	for _, w := range []Wanted{{}, {SpecDirs: []string{"/opt/cdi"}}} {
		change, _, err := Host{Root: root, Version: "25.0.0"}.Configure(context.Background(), store, docker, w)
		if err == nil {
			err = change.Apply()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	back, err := Remove(store, docker)
	if err == nil {
		err = back.Apply()
	}
	if diff := cmp.Diff(before, files(t, root)); err != nil || diff != "" {
		t.Errorf("%v (-before +after):\n%s", err, diff)
	}
}
