package paths

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

// removeContents removes files of any type at any depth from the directory with the descriptor
// top. removeContents enters no other mount and follows no link. At any depth, removeContents
// holds two descriptors: it moves the entries of a directory that is not empty up into top, and
// removes the directory.
func removeContents(top int) error {
	moved := 0
	for {
		names, err := entries(top, ".")
		if err != nil {
			return err
		}
		var errs []error
		again := false
		for _, name := range names {
			err := removeEntry(top, name)
			if isNotEmpty(err) {
				if err = raise(top, name, &moved); err == nil {
					again = true
				}
			}
			if err != nil {
				errs = append(errs, notRemoved(name, err))
			}
		}
		if !again {
			return errors.Join(errs...)
		}
	}
}

// notRemoved returns the error of an entry, whose name an image may have chosen.
func notRemoved(name string, cause error) error {
	return &fault.Error{Operation: "remove", Object: fmt.Sprintf("%.200q", name), Cause: cause}
}

// entries lists a directory of this mount.
func entries(top int, name string) ([]string, error) {
	dir, err := openBeneath(top, name)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return dir.Readdirnames(-1)
}

func openBeneath(top int, name string) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS,
	}
	fd, err := unix.Openat2(top, name, &how)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// removeEntry removes a file or an empty directory. Another hook may have removed the entry.
func removeEntry(dir int, name string) error {
	err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	if err == unix.ENOTDIR {
		err = unix.Unlinkat(dir, name, 0)
	}
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// isNotEmpty reports whether an error says that a directory is not empty (rmdir(2)).
func isNotEmpty(err error) bool { return err == unix.ENOTEMPTY || err == unix.EEXIST }

// raise removes a directory of top. raise moves subdirectories that are not empty to top, under
// names that it counts in moved.
func raise(top int, name string, moved *int) error {
	dir, err := openBeneath(top, name)
	if err != nil {
		return err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, child := range names {
		err := removeEntry(int(dir.Fd()), child)
		if isNotEmpty(err) {
			for err = unix.EEXIST; err == unix.EEXIST; *moved++ {
				err = unix.Renameat2(int(dir.Fd()), child, top, fmt.Sprintf("removed-%d", *moved), unix.RENAME_NOREPLACE)
			}
		}
		if err != nil && err != unix.ENOENT {
			return notRemoved(child, err)
		}
	}
	err = removeEntry(top, name)
	if isNotEmpty(err) {
		return nil // a runtime has made another entry; the next pass removes the entry
	}
	return err
}
