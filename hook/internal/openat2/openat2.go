package openat2

import (
	"strings"

	"golang.org/x/sys/unix"
)

// InRoot opens a path below a root directory. The kernel resolves symbolic links as for a process
// with that root directory.
func InRoot(root int, path string, flags, resolve uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | resolve}
	// EAGAIN reports a concurrent rename.
	fd, err = -1, unix.EAGAIN
	for try := 0; try < 100 && (err == unix.EAGAIN || err == unix.EINTR); try++ {
		fd, err = unix.Openat2(root, strings.TrimPrefix(path, "/"), &how)
	}
	return fd, err
}
