package paths

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/peerlane/peerlane/internal/fault"
)

// ErrNotRegular is the cause of a directory, a link or a device in place of a file.
var ErrNotRegular = errors.New("it is not a regular file")

// OwnerError is the cause of a file of a user other than root and the effective user.
type OwnerError struct {
	Path string
	UID  uint32
}

func (e *OwnerError) Error() string { return fmt.Sprintf("%s belongs to uid %d", e.Path, e.UID) }

// ModeError is the cause of a file with a mode that permits access by users other than its owner.
type ModeError struct {
	Path string
	Mode fs.FileMode // permission bits
	// Secret reports that other users may not even read the file.
	Secret bool
}

func (e *ModeError) Error() string {
	access := "write"
	if e.Secret {
		access = "read or write"
	}
	return fmt.Sprintf("users other than its owner can %s %s (mode %04o)", access, e.Path, e.Mode)
}

// SizeError is the cause of a file above a size limit.
type SizeError struct {
	Path         string
	Bytes, Limit int64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("%s has %d bytes, more than %d", e.Path, e.Bytes, e.Limit)
}

// newTrustError returns the error of a file that a user other than root could change or read.
func newTrustError(path, remedy string, cause error) error {
	return &fault.Error{Code: fault.UntrustedFile, Operation: "trust", Object: path, Cause: cause, Remedy: remedy}
}

// CheckTrusted refuses a file that a user other than root and the effective user could have written, or
// replaced in its directory. CheckTrusted checks the file and its directory, not the directories above:
// a user with write access to one of those could replace the checked directory.
func CheckTrusted(path string) error {
	for _, name := range []string{filepath.Dir(path), path} {
		info, err := os.Lstat(name)
		if err != nil {
			return err
		}
		stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
		if name == path && !info.Mode().IsRegular() {
			return newTrustError(path, "replace it", ErrNotRegular)
		}
		if stat.Uid != 0 && int(stat.Uid) != os.Geteuid() {
			return newTrustError(path, "chown root "+name, &OwnerError{name, stat.Uid})
		}
		if info.Mode().Perm()&0o022 != 0 {
			return newTrustError(path, "chmod go-w "+name, &ModeError{Path: name, Mode: info.Mode().Perm()})
		}
	}
	return nil
}
