package openat2

import (
	"strings"

	"golang.org/x/sys/unix"
)

// InRoot opens a path as a process sees it whose root directory is root: no
// symbolic link leads out of it.
func InRoot(root int, path string, flags, resolve uint64) (fd int, err error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | resolve}
	// EAGAIN: something was renamed meanwhile.
	fd, err = -1, unix.EAGAIN
	for try := 0; try < 100 && (err == unix.EAGAIN || err == unix.EINTR); try++ {
		fd, err = unix.Openat2(root, strings.TrimPrefix(path, "/"), &how)
	}
	return fd, err
}
