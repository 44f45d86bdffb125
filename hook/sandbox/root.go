package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// view is the part of the file system that a program sees.
type view struct{ read, write, devices []string }

// ownRoot moves the thread to a mount namespace with a new root that contains the view and a
// /proc. ownRoot drops every other mount, because otherwise an engine could not unmount the file
// system of another container. ownRoot reports a missing path.
func ownRoot(v view, lacks func(path string, err error)) error {
	before, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/proc/thread-self/ns/mnt", Err: err}
	}
	defer unix.Close(before)
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err = build(v, lacks); err != nil {
		// An incomplete root is worse than none: return to the previous namespace.
		err = errors.Join(err, os.NewSyscallError("setns", unix.Setns(before, unix.CLONE_NEWNS)))
	}
	return err
}

// tree is a detached mount with its destination.
type tree struct {
	path string
	fd   int
	dir  bool
}

func build(v view, lacks func(path string, err error)) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("make the mounts private", err)
	}
	// Clone every tree before a mount hides a path.
	var trees []tree
	defer func() {
		for _, t := range trees {
			unix.Close(t.fd)
		}
	}()
	links := map[string]string{}
	for _, part := range []struct {
		paths []string
		set   uint64
	}{
		{v.read, unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV},
		{v.write, unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC},
		{v.devices, unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC},
	} {
		for _, path := range part.paths {
			// /lib is usr/lib on most systems.
			if to, err := os.Readlink(path); err == nil && strings.Count(path, "/") == 1 &&
				within(filepath.Join("/", to), v.read) {
				links[path] = to
				continue
			}
			t, err := take(path, part.set)
			if err != nil {
				lacks(path, err)
				continue
			}
			trees = append(trees, t)
		}
	}
	root, err := emptyFS()
	if err != nil {
		return err
	}
	defer unix.Close(root)
	// /proc exists on every host: the new root is mounted there, and processFS at proc below it.
	const place = "/proc"
	processes, err := processFS()
	if err != nil {
		return err
	}
	trees = append(trees, processes)
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, place, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return os.NewSyscallError("move_mount of the root", err)
	}
	for path, to := range links {
		if err := os.Symlink(to, filepath.Join(place, path)); err != nil {
			return err
		}
	}
	for _, t := range trees {
		if err := t.attach(place); err != nil {
			if t.path == place {
				return err
			}
			lacks(t.path, err)
		}
	}
	err = unix.MountSetattr(root, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
	})
	if err != nil {
		return os.NewSyscallError("mount_setattr of the root", err)
	}
	// pivot_root(2): with the same directory for both, the old root is mounted over the new one,
	// and is then detached.
	if err := unix.Fchdir(root); err != nil {
		return os.NewSyscallError("fchdir", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return os.NewSyscallError("pivot_root", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return os.NewSyscallError("umount of the old root", err)
	}
	return os.NewSyscallError("chdir", unix.Chdir("/"))
}

// roots returns the paths to clone so that every path of a list is reachable. A path below another
// path is part of that path. If a path is a link, or contains a link, roots returns the target: a
// mount cannot be on a link, and an absolute link leads to the host while the root is set up.
func roots(paths []string) []string {
	var list []string
	for _, path := range paths {
		if within(path, list) {
			path = real(path)
		}
		if !within(path, list) {
			list = append(list, path)
		}
	}
	sortByDepth(list)
	return list
}

// real returns a path with its symbolic links resolved.
func real(path string) string {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		return to
	}
	return path // removed since the lookup
}

// sortByDepth sorts parents before their children.
func sortByDepth(paths []string) {
	slices.SortStableFunc(paths, func(a, b string) int { return strings.Count(a, "/") - strings.Count(b, "/") })
}

// within reports whether a path is in the list, or below a path of the list.
func within(path string, list []string) bool {
	for _, l := range list {
		if path == l || strings.HasPrefix(path, l+"/") {
			return true
		}
	}
	return false
}

// take clones a path with the mounts below it: in a container, the driver's libraries are single
// files mounted into /usr.
func take(path string, set uint64) (tree, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return tree{}, fmt.Errorf("open_tree %s: %w", path, err)
	}
	t := tree{path: path, fd: fd}
	err = unix.MountSetattr(
		fd,
		"",
		unix.AT_EMPTY_PATH|unix.AT_RECURSIVE,
		&unix.MountAttr{Attr_set: set, Propagation: unix.MS_PRIVATE},
	)
	if err != nil {
		unix.Close(fd)
		return tree{}, fmt.Errorf("mount_setattr %s: %w", path, err)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		unix.Close(fd)
		return tree{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	t.dir = stat.Mode&unix.S_IFMT == unix.S_IFDIR
	return t, nil
}

// attach mounts the tree below a directory.
func (t tree) attach(below string) error {
	place := filepath.Join(below, t.path)
	// The path already exists if another tree contains the path.
	if _, err := os.Lstat(place); err != nil {
		if err := os.MkdirAll(filepath.Dir(place), 0o755); err != nil {
			return err
		}
		if t.dir {
			err = os.Mkdir(place, 0o755)
		} else {
			err = os.WriteFile(place, nil, 0o444)
		}
		if err != nil {
			return err
		}
	}
	if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, place, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount %s: %w", t.path, err)
	}
	return nil
}

// emptyFS returns a small file system for the directories of the root.
func emptyFS() (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen tmpfs", err)
	}
	defer unix.Close(fs)
	for key, value := range map[string]string{"source": "peerlane-relay", "mode": "0755", "size": "1m"} {
		if err := unix.FsconfigSetString(fs, key, value); err != nil {
			return -1, fmt.Errorf("fsconfig tmpfs %s=%s: %w", key, value, err)
		}
	}
	return finish(fs, "tmpfs", 0)
}

func finish(fs int, name string, set int) (int, error) {
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("fsconfig %s: %w", name, err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, set)
	if err != nil {
		return -1, fmt.Errorf("fsmount %s: %w", name, err)
	}
	return fd, nil
}

// processFS returns a /proc without the processes of other users, or the host's if the kernel
// refuses.
func processFS() (tree, error) {
	const set = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err == nil {
		defer unix.Close(fs)
		err = unix.FsconfigSetString(fs, "hidepid", "invisible")
		if err == nil {
			var fd int
			if fd, err = finish(fs, "proc", set); err == nil {
				return tree{"/proc", fd, true}, nil
			}
		}
	}
	t, again := take("/proc", set)
	if again != nil {
		return tree{}, errors.Join(fmt.Errorf("proc: %w", err), again)
	}
	return t, nil
}
