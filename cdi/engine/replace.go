package engine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// replace writes a file in one step. With alike, the new file keeps the owner, mode, SELinux label
// and access control list of the present file; otherwise it gets mode.
func replace(path string, text []byte, mode fs.FileMode, alike bool) (err error) {
	var old fs.FileInfo
	if alike {
		old, err = os.Stat(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	// Engines do not read a file of this name as a drop-in.
	tmp, err := os.CreateTemp(filepath.Dir(path), ".peerlane-*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	_, err = tmp.Write(text)
	if err == nil && old != nil {
		mode = old.Mode().Perm()
		owner := old.Sys().(*syscall.Stat_t)
		if int(owner.Uid) != os.Geteuid() || int(owner.Gid) != os.Getegid() {
			err = tmp.Chown(int(owner.Uid), int(owner.Gid))
		}
	}
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if err == nil && old != nil {
		err = copyAttributes(path, tmp.Name()) // after the mode, because chmod changes the list
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// copyAttributes copies the extended attributes that control access from one file to another.
func copyAttributes(from, to string) error {
	for _, name := range []string{"security.selinux", "system.posix_acl_access"} {
		want, err := attribute(from, name)
		if err != nil {
			return err
		}
		existing, err := attribute(to, name)
		switch {
		case err != nil || bytes.Equal(want, existing):
		case want == nil: // it came from the directory's default list
			err = unix.Removexattr(to, name)
		default:
			err = unix.Setxattr(to, name, want, 0)
		}
		if err != nil {
			return fmt.Errorf("%s of %s: %w", name, to, err)
		}
	}
	return nil
}

// attribute returns an extended attribute, nil if the file lacks it.
func attribute(path, name string) ([]byte, error) {
	value := make([]byte, 1<<16) // XATTR_SIZE_MAX of Linux
	n, err := unix.Getxattr(path, name, value)
	switch {
	case errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%s of %s: %w", name, path, err)
	}
	return value[:n], nil
}
