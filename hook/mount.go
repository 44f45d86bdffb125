package hook

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/layout"
)

// Attach mounts the socket directory of a generation into its container, over
// the anchor that the CDI specification mounts at layout.ContainerDir in rootfs,
// the container's root file system as the host sees it:
// read-only, nosuid, nodev, noexec, and private, so that nothing which is
// mounted in the container appears on the host. A container that has it already
// is left as it is. Attach needs CAP_SYS_ADMIN, and belongs at createRuntime:
// the container's root file system is mounted and no program of it runs.
func Attach(l layout.Layout, g *Generation, rootfs string) error {
	if err := attach(l, g, rootfs); err != nil {
		return fmt.Errorf("mounting the relay's socket at %s in container %q: %w", layout.ContainerDir, g.Container.ID, err)
	}
	return nil
}

func attach(l layout.Layout, g *Generation, rootfs string) error {
	if err := isolated(g.Container); err != nil {
		return err
	}
	init, err := g.Init.open()
	if err != nil {
		return err
	}
	defer init.Close()
	anchor, err := open(l.Anchor())
	if err != nil {
		return fmt.Errorf("the anchor: %w", err)
	}
	defer anchor.Close()
	sockets, err := open(l.SocketDir(g.ID))
	if err != nil {
		return err
	}
	defer sockets.Close()
	tree, err := detached(sockets)
	if err != nil {
		return err
	}
	defer tree.Close()

	return onThreadToWaste(func() error { return mount(init, rootfs, anchor, sockets, tree) })
}

// onThreadToWaste runs f on a thread that then ends: one that has entered a
// container's mount namespace must not run anything else. It is never the
// process's first thread, which cannot end, and whose namespace /proc/self and
// the process itself have.
func onThreadToWaste(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			err := onThreadToWaste(f) // another one: this goroutine occupies the first
			runtime.UnlockOSThread()
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

// isolated refuses a process in the caller's own mount namespace: it is no
// container's, and mounting for it would mount on the host.
func isolated(c Container) error {
	own, err := os.Stat("/proc/thread-self/ns/mnt")
	if err != nil {
		return err
	}
	other, err := os.Stat(fmt.Sprintf("/proc/%d/ns/mnt", c.PID))
	if err != nil {
		return fmt.Errorf("looking at the mount namespace of container %q: %w", c.ID, err)
	}
	if os.SameFile(own, other) {
		return fmt.Errorf("process %d is in the mount namespace of the host, so it is not the init of container %q", c.PID, c.ID)
	}
	return nil
}

// open opens a directory as a place, following no symbolic link at its end.
func open(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// detached clones a directory into a mount that is nowhere yet. Its attributes
// are set before anybody can see it; private is the important one, because a
// clone from a shared mount, as /run is on a host with systemd, is its peer.
func detached(dir *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("open_tree %s: %w; this needs CAP_SYS_ADMIN and Linux 5.12", dir.Name(), err)
	}
	tree := os.NewFile(uintptr(fd), dir.Name())
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
		Propagation: unix.MS_PRIVATE,
	})
	if err != nil {
		tree.Close()
		return nil, fmt.Errorf("mount_setattr %s: %w; this needs Linux 5.12", dir.Name(), err)
	}
	return tree, nil
}

// mount moves the tree to its place in the mount namespace of init. It changes
// the namespace of the calling thread.
func mount(init *os.File, rootfs string, anchor, sockets, tree *os.File) error {
	// Threads share root and working directory, and a namespace cannot be
	// changed under those who share them.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(init.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering its mount namespace: %w", err)
	}
	place, err := resolve(rootfs)
	if err != nil {
		return err
	}
	defer place.Close()
	found, err := place.Stat()
	if err != nil {
		return err
	}
	if same, err := is(found, sockets); err != nil || same {
		return err // an earlier hook of the same container was here
	}
	if same, err := is(found, anchor); err != nil {
		return err
	} else if !same {
		where, err := os.Readlink(fmt.Sprintf("/proc/thread-self/fd/%d", place.Fd()))
		if err != nil {
			where = "a place that cannot be told: " + err.Error()
		}
		return fmt.Errorf("in the root file system %s that path leads to %s, which is not the anchor %s; the CDI specification mounts the anchor there, so it is out of date, another mount covers it, or a symbolic link of the image leads elsewhere", rootfs, where, anchor.Name())
	}
	// The anchor must be a mount, and private as well: what is mounted on a
	// shared one appears on the host's.
	if err := unix.MountSetattr(int(place.Fd()), "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return fmt.Errorf("making the anchor private: mount_setattr: %w", err)
	}
	err = unix.MoveMount(int(tree.Fd()), "", int(place.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	return os.NewSyscallError("move_mount", err)
}

// resolve opens layout.ContainerDir as the container will see it: whatever
// symbolic links the image has, the way does not leave its root file system.
func resolve(rootfs string) (*os.File, error) {
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: rootfs, Err: err}
	}
	defer unix.Close(root)
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
	fd := -1
	// EAGAIN: something was renamed meanwhile, and the kernel cannot tell
	// whether the way stayed inside.
	err = unix.EAGAIN
	for try := 0; try < 100 && (err == unix.EAGAIN || err == unix.EINTR); try++ {
		fd, err = unix.Openat2(root, strings.TrimPrefix(layout.ContainerDir, "/"), &how)
	}
	if err != nil {
		return nil, fmt.Errorf("resolving %s in the root file system %s: %w; the CDI specification mounts the anchor there", layout.ContainerDir, rootfs, err)
	}
	return os.NewFile(uintptr(fd), layout.ContainerDir), nil
}

func is(found os.FileInfo, dir *os.File) (bool, error) {
	info, err := dir.Stat()
	if err != nil {
		return false, errors.Join(fmt.Errorf("looking at %s", dir.Name()), err)
	}
	return os.SameFile(found, info), nil
}

// tidy removes from the anchor what runtimes have made there: crun makes a mount
// point below it while the anchor can still be written, and so on the host. An
// image can ask for one by the name of a volume, through a link of its own even
// where spec.nothingBelow sees none. No file of the anchor is anybody's.
func tidy(l layout.Layout) error {
	fail := func(err error) error { return fmt.Errorf("removing what is in the anchor %s: %w", l.Anchor(), err) }
	fd, err := unix.Open(l.Anchor(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil // it cannot be attached to either, which says more
	}
	if err != nil {
		return fail(err)
	}
	if err := empty(fd, 0); err != nil {
		return fail(err)
	}
	return nil
}

// deepest is how far below the anchor mount points are removed.
const deepest = 64

// empty removes mount points from a directory, which it closes: directories, and
// files without a byte. It enters no other mount and follows no link.
func empty(fd, depth int) error {
	dir := os.NewFile(uintptr(fd), "")
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		err := unix.Unlinkat(fd, name, unix.AT_REMOVEDIR)
		switch err {
		case unix.ENOTDIR:
			var info unix.Stat_t
			if err = unix.Fstatat(fd, name, &info, unix.AT_SYMLINK_NOFOLLOW); err == nil && (info.Mode&unix.S_IFMT != unix.S_IFREG || info.Size > 0) {
				err = errors.New("it is no mount point")
			}
			if err == nil {
				err = unix.Unlinkat(fd, name, 0)
			}
		case unix.ENOTEMPTY, unix.EEXIST:
			var below int
			if depth == deepest {
				break
			}
			how := unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS}
			if below, err = unix.Openat2(fd, name, &how); err == nil {
				err = empty(below, depth+1)
			}
			if err == nil {
				err = unix.Unlinkat(fd, name, unix.AT_REMOVEDIR)
			}
		}
		if err != nil && err != unix.ENOENT { // another hook was quicker
			errs = append(errs, fmt.Errorf("%.200q: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
