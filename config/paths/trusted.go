package paths

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/peerlane/peerlane/internal/fault"
)

// untrusted returns the error of a file that a user other than root could change or read.
func untrusted(path, remedy string, cause error) error {
	return &fault.Error{Code: fault.UntrustedFile, Operation: "trust", Object: path, Cause: cause, Remedy: remedy}
}

// Trusted refuses a file that a user other than root and the effective user could have written or
// replaced.
func Trusted(path string) error {
	for _, name := range []string{filepath.Dir(path), path} {
		info, err := os.Lstat(name)
		if err != nil {
			return err
		}
		stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
		if name == path && !info.Mode().IsRegular() {
			return untrusted(path, "replace it", errors.New("it is not a regular file"))
		}
		if stat.Uid != 0 && int(stat.Uid) != os.Geteuid() {
			return untrusted(
				path,
				"chown root "+name,
				fmt.Errorf("%s belongs to uid %d, and root acts on the file", name, stat.Uid),
			)
		}
		if info.Mode().Perm()&0o022 != 0 {
			return untrusted(
				path,
				"chmod go-w "+name,
				fmt.Errorf(
					"%s can be written by others than its owner (mode %04o), and root acts on the file",
					name,
					info.Mode().Perm(),
				),
			)
		}
	}
	return nil
}
