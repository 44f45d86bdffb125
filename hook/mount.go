package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/openat2"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/internal/fault"
)

// Attach mounts the socket directory of a generation into the container, over the anchor that the
// CDI specification mounts at paths.ContainerDir. rootfs is the root file system of the container
// as the host sees it. The mount is read-only, nosuid, nodev, noexec and private, so that mounts
// in the container do not appear on the host. A second Attach has no effect. Attach requires
// CAP_SYS_ADMIN, and runs at createRuntime: the root file system is mounted, and the container has
// not executed a program yet.
func Attach(l paths.Layout, g *generation.Generation, rootfs string) error {
	if err := attach(l, g, rootfs); err != nil {
		return fmt.Errorf(
			"mount the relay's socket at %s in container %q: %w",
			paths.ContainerDir,
			g.Container.ID,
			err,
		)
	}
	return nil
}

func attach(l paths.Layout, g *generation.Generation, rootfs string) error {
	if err := checkMountNamespace(g.Container); err != nil {
		return err
	}
	init, err := g.Init.Open()
	if err != nil {
		return err
	}
	defer init.Close()
	anchor, err := open(l.Anchor())
	if err != nil {
		return fmt.Errorf("the anchor: %w", err)
	}
	defer anchor.Close()
	// In a user namespace no process can mount for the host, and the user owns the directory.
	if !Rootless() {
		if err := paths.CheckAnchor(anchor); err != nil {
			return &fault.Error{
				Code:      fault.AnchorNotMounted,
				Operation: "check the anchor",
				Object:    l.Anchor(),
				Cause:     err,
				Remedy: "run `" + l.AnchorCommand() + "`, and restart an engine that has a mount namespace of its own and " +
					"started before",
			}
		}
	}
	sockets, err := open(l.SocketDir(g.ID))
	if err != nil {
		return err
	}
	defer sockets.Close()
	tree, err := cloneDetached(sockets)
	if err != nil {
		return err
	}
	defer tree.Close()

	return onDisposableThread(func() error { return mount(init, rootfs, anchor, sockets, tree) })
}

// onDisposableThread runs f on a thread that ends afterwards: a thread in a container's mount
// namespace must not run other code. It does not use the main thread, which cannot end, and whose
// namespace is that of /proc/self.
func onDisposableThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			err := onDisposableThread(f) // on another thread: this goroutine occupies the main thread
			runtime.UnlockOSThread()
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

// checkMountNamespace refuses a process in the caller's own mount namespace: mounting for such a process
// would change the host.
func checkMountNamespace(c generation.Container) error {
	own, err := os.Stat("/proc/thread-self/ns/mnt")
	if err != nil {
		return err
	}
	other, err := os.Stat(fmt.Sprintf("/proc/%d/ns/mnt", c.PID))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return &fault.Error{Operation: "find", Object: fmt.Sprintf("process %d, the init of container %q", c.PID, c.ID),
			Cause: process.ErrEnded}
	}
	if err != nil {
		return fmt.Errorf("read the mount namespace of container %q: %w", c.ID, err)
	}
	if os.SameFile(own, other) {
		return fmt.Errorf("process %d is not the init of container %q: %w", c.PID, c.ID, ErrHostNamespace)
	}
	return nil
}

// ErrHostNamespace reports that the runtime has named an init in the mount namespace of the hook.
var ErrHostNamespace = errors.New("it is in the mount namespace of the host")

// open opens a directory with O_PATH, and refuses a path that ends in a symbolic link.
func open(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// cloneDetached clones a directory into a detached mount, and sets its attributes before the mount
// becomes visible. Private is essential: the clone from a shared mount, such as /run with systemd,
// is a peer of that mount.
func cloneDetached(dir *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, newMountError("open_tree", dir.Name(), err)
	}
	tree := os.NewFile(uintptr(fd), dir.Name())
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
		Propagation: unix.MS_PRIVATE,
	})
	if err != nil {
		tree.Close()
		return nil, newMountError("mount_setattr", dir.Name(), err)
	}
	return tree, nil
}

// newMountError adds the remedy, if there is one, to the error of a mount call.
func newMountError(call, path string, err error) error {
	f := &fault.Error{Code: fault.MountNotPermitted, Operation: "mount by " + call, Object: path, Cause: err}
	switch err {
	case unix.EPERM:
		f.Remedy = "this needs CAP_SYS_ADMIN"
	case unix.ENOSYS:
		f.Remedy = "this needs Linux 5.12"
	case unix.EMFILE, unix.ENFILE:
		f.Remedy = "raise the engine's limit of open files (LimitNOFILE= of its unit), or fs.file-max"
	default:
		f.Code = ""
	}
	return f
}

// mount attaches the tree in the mount namespace of init. The calling thread enters that
// namespace.
func mount(init *os.File, rootfs string, anchor, sockets, tree *os.File) error {
	// A thread that shares its root and working directory cannot change its mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(init.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the container's mount namespace: %w", err)
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
	if same, err := isSameFile(found, sockets); err != nil || same {
		return err // an earlier hook of the same container has attached the directory
	}
	if same, err := isSameFile(found, anchor); err != nil {
		return err
	} else if !same {
		where, err := os.Readlink(fmt.Sprintf("/proc/thread-self/fd/%d", place.Fd()))
		if err != nil {
			where = "an unknown place: " + err.Error()
		}
		return &fault.Error{Code: fault.SocketPathLeads, Operation: "resolve " +
			paths.ContainerDir + " in the root file system", Object: rootfs,
			Cause: fmt.Errorf("it leads to %s, which is not the anchor %s: the CDI specification is out of date, another "+
				"mount covers the path, or a symbolic link of the image leads elsewhere", where, anchor.Name()),
			Remedy: "run peerlane cdi refresh, or use another image"}
	}
	// The anchor must be a private mount: mounts on a shared mount would appear on the host.
	if err := unix.MountSetattr(int(place.Fd()), "", unix.AT_EMPTY_PATH,
		&unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return fmt.Errorf("make the anchor private: mount_setattr: %w", err)
	}
	err = unix.MoveMount(
		int(tree.Fd()),
		"",
		int(place.Fd()),
		"",
		unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH,
	)
	return os.NewSyscallError("move_mount", err)
}

// resolve opens paths.ContainerDir as the container will see it: symbolic links of the image stay
// inside its root file system.
func resolve(rootfs string) (*os.File, error) {
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: rootfs, Err: err}
	}
	defer unix.Close(root)
	fd, err := openat2.InRoot(root, paths.ContainerDir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == unix.EXDEV || err == unix.ELOOP {
		return nil, &fault.Error{
			Code:      fault.SocketPathLeads,
			Operation: "resolve " + paths.ContainerDir + " in the root file system",
			Object:    rootfs,
			Cause: fmt.Errorf(
				"%w: a symbolic link of the image leads through /proc or in a circle",
				err,
			),
			Remedy: "use an image without that link",
		}
	}
	if err != nil {
		return nil, fmt.Errorf(
			"resolve %s in the root file system %s: %w; the CDI specification mounts the anchor there",
			paths.ContainerDir,
			rootfs,
			err,
		)
	}
	return os.NewFile(uintptr(fd), paths.ContainerDir), nil
}

func isSameFile(found os.FileInfo, dir *os.File) (bool, error) {
	info, err := dir.Stat()
	if err != nil {
		return false, fmt.Errorf("read the attributes of %s: %w", dir.Name(), err)
	}
	return os.SameFile(found, info), nil
}
