package paths

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// ClusterKey returns the path of the key that relays of different hosts share; only root may read
// it.
func (l Layout) ClusterKey() string { return filepath.Join(l.Config(), "cluster.key") }

// ReadSecret reads a file of at most limit bytes. It refuses a file that CheckTrusted refuses,
// and a file that a user other than its owner could have read.
func ReadSecret(path string, limit int64) ([]byte, error) {
	if err := CheckTrusted(path); err != nil {
		return nil, err
	}
	// The file may have been replaced since the check.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
	switch {
	case !info.Mode().IsRegular():
		return nil, newTrustError(path, "replace it", ErrNotRegular)
	case stat.Uid != 0 && int(stat.Uid) != os.Geteuid():
		return nil, newTrustError(path, "chown root "+path, &OwnerError{path, stat.Uid})
	case info.Mode().Perm()&0o077 != 0:
		return nil, newTrustError(path, "chmod 0600 "+path+", and replace the secret",
			&ModeError{Path: path, Mode: info.Mode().Perm(), Secret: true})
	case info.Size() > limit:
		return nil, &SizeError{path, info.Size(), limit}
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = fmt.Errorf("%s grew while it was read", path)
	}
	return text, err
}
