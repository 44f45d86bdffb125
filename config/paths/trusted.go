package paths

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

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
			return fmt.Errorf("%s is no regular file, and so not to be trusted; replace it", name)
		}
		if stat.Uid != 0 && int(stat.Uid) != os.Geteuid() {
			return fmt.Errorf("%s belongs to uid %d, who could write anything into what root acts on; chown root %s", path, stat.Uid, name)
		}
		if info.Mode().Perm()&0o022 != 0 {
			return fmt.Errorf("%s can be written by others than its owner (mode %04o), and root acts on it; chmod go-w %s", path, info.Mode().Perm(), name)
		}
	}
	return nil
}
