package paths

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/fault"
)

// anchorMode is the mode of the anchor, as a directory and as a mount.
const anchorMode = 0o555

// anchorSource is the source of the anchor's mount in /proc/self/mountinfo.
const anchorSource = "peerlane-anchor"

// Anchor is the empty, root-owned directory that CDI mounts at ContainerDir. As root of the host,
// the anchor is a mount of MountAnchor: crun makes mount points below it before the container's
// copy is read-only, and an image chooses their names. On a host without root, the anchor is a
// plain directory of the user.
func (l Layout) Anchor() string { return filepath.Join(l.State(), "anchor") }

// MountsAnchor reports whether this process is root of the host, so that the anchor is a mount.
func MountsAnchor() bool { return os.Geteuid() == 0 && !InUserNamespace() }

// InUserNamespace reports whether this process is in a user namespace that does not map all users
// of the host, like the processes of a rootless engine.
func InUserNamespace() bool {
	uids, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && !slices.Equal(strings.Fields(string(uids)), []string{"0", "0", "4294967295"})
}

// AnchorCommand returns the command that mounts the anchor.
func (l Layout) AnchorCommand() string {
	if l.IsDefault() {
		return "peerlane cdi anchor"
	}
	return "peerlane --root " + l.Root + " cdi anchor"
}

// ErrAnchorHidden reports that process 1 does not see the mount of the anchor.
var ErrAnchorHidden = errors.New(
	"it is mounted in the mount namespace of this command but not in that of process 1, where engines start; run it " +
		"outside of unshare, of a container and of a unit with PrivateMounts= or ProtectSystem=",
)

// MountAnchor mounts the anchor if the mount is missing: a read-only tmpfs with one inode, its
// root, so that the anchor cannot hold any file. The mount requires CAP_SYS_ADMIN. MountAnchor
// removes the files that earlier releases left in the directory below the mount. With the error
// ErrAnchorHidden, the mount exists.
func (l Layout) MountAnchor() error {
	if err := l.mountAnchor(); err != nil {
		return &fault.Error{Code: fault.AnchorNotMounted, Operation: "mount the anchor", Object: l.Anchor(), Cause: err}
	}
	return nil
}

func (l Layout) mountAnchor() error {
	if err := l.CreateState(); err != nil {
		return err
	}
	if err := directory(l.Anchor(), anchorMode); err != nil {
		return err
	}
	below, err := l.openAnchor()
	if err != nil {
		return err
	}
	defer below.Close()
	if CheckAnchor(below) == nil {
		return seenByInit(below)
	}
	if err := mountTmpfs(below); err != nil {
		return err
	}
	// A mount on a shared mount is shared too, and systemd makes / shared.
	if err := unix.Mount("", l.Anchor(), "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make it private: %w", err)
	}
	mounted, err := l.openAnchor()
	if err != nil {
		return err
	}
	defer mounted.Close()
	if err := CheckAnchor(mounted); err != nil {
		return err
	}
	// Keep other mounts below the anchor: Peerlane did not make the mounts.
	if own, err := isMount(below); err == nil && !own {
		if err := removeContents(int(below.Fd())); err != nil {
			return fmt.Errorf("it is mounted; removing the files in the directory below the mount: %w", err)
		}
	}
	return seenByInit(mounted)
}

// openAnchor opens the anchor for reading, and follows no symbolic link.
func (l Layout) openAnchor() (*os.File, error) {
	fd, err := unix.Open(l.Anchor(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: l.Anchor(), Err: err}
	}
	return os.NewFile(uintptr(fd), l.Anchor()), nil
}

// mountTmpfs mounts the tmpfs on a directory. With SELinux, the mount gets the label of the
// directory if the policy permits it.
func mountTmpfs(dir *os.File) error {
	const flags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	target := dir.Name() // only root can replace the directory
	data := fmt.Sprintf("nr_inodes=1,mode=%#o", anchorMode)
	if label := selinuxLabel(dir); label != "" {
		if unix.Mount(anchorSource, target, "tmpfs", flags, data+`,rootcontext="`+label+`"`) == nil {
			return nil
		}
	}
	err := unix.Mount(anchorSource, target, "tmpfs", flags, data)
	if err == unix.EPERM {
		return fmt.Errorf("mount: %w, without CAP_SYS_ADMIN", err)
	}
	return os.NewSyscallError("mount", err)
}

// selinuxFile exists if the kernel has SELinux; a test replaces the path.
var selinuxFile = "/sys/fs/selinux/enforce"

// selinuxLabel returns the label of a directory; empty if the kernel has no SELinux.
func selinuxLabel(dir *os.File) string {
	if _, err := os.Stat(selinuxFile); err != nil {
		return ""
	}
	var label [256]byte
	n, err := unix.Fgetxattr(int(dir.Fd()), "security.selinux", label[:])
	if err != nil {
		return ""
	}
	return string(bytes.TrimRight(label[:n], "\x00"))
}

// Causes of a directory that is not a mount of MountAnchor.
var (
	errNotMount      = errors.New("it is a directory instead of a mount, so a runtime could write to it")
	errWritableMount = errors.New("the mount is not read-only")
)

// mountTypeError is the cause of a file system other than tmpfs. magic is f_type of statfs(2).
type mountTypeError struct{ magic int64 }

func (e *mountTypeError) Error() string {
	return fmt.Sprintf("the file system mounted there is of type %#x, not a tmpfs", e.magic)
}

// inodesError is the cause of a tmpfs that can hold files.
type inodesError struct{ inodes uint64 }

func (e *inodesError) Error() string {
	return fmt.Sprintf("the tmpfs mounted there is for %d inodes, not for 1", e.inodes)
}

// CheckAnchor returns the reason why the anchor is not a mount of MountAnchor, or nil.
func (l Layout) CheckAnchor() error {
	dir, err := l.openAnchor()
	if err != nil {
		return err
	}
	defer dir.Close()
	return CheckAnchor(dir)
}

// CheckAnchor returns the reason why a directory is not a mount of MountAnchor, or nil.
func CheckAnchor(dir *os.File) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &fs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	mount, err := isMount(dir)
	if err != nil {
		return err
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &stat); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	switch {
	case !mount:
		return errNotMount
	case fs.Type != unix.TMPFS_MAGIC:
		return &mountTypeError{fs.Type}
	case fs.Files != 1:
		return &inodesError{fs.Files}
	case fs.Flags&unix.ST_RDONLY == 0:
		return errWritableMount
	case stat.Uid != 0:
		return &OwnerError{dir.Name(), stat.Uid}
	}
	return nil
}

// isMount reports whether a directory is the root of a mount.
func isMount(dir *os.File) (bool, error) {
	var stat unix.Statx_t
	if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &stat); err != nil {
		return false, os.NewSyscallError("statx", err)
	}
	if stat.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return false, errors.New("statx does not report mount points; Linux 5.12 or newer is needed")
	}
	return stat.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// seenByInit checks that process 1 has a mount in its mount namespace. It returns nil if this
// process may not read that. A copy of the mount in that namespace has the same device number.
func seenByInit(dir *os.File) error {
	mounts, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return nil // no /proc, or no ptrace access to process 1
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &stat); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if !hasDevice(string(mounts), fmt.Sprintf("%d:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev))) {
		return ErrAnchorHidden
	}
	return nil
}

// hasDevice reports whether a mountinfo has a mount of a device.
func hasDevice(mountinfo, device string) bool {
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == device {
			return true
		}
	}
	return false
}

// UnmountAnchor unmounts the anchor and reports whether the anchor was mounted. Running containers
// keep their copies of the mount.
func (l Layout) UnmountAnchor() (unmounted bool, err error) {
	for {
		if l.CheckAnchor() != nil {
			return unmounted, nil // no mount, or another program's mount
		}
		if err := unix.Unmount(l.Anchor(), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return unmounted, fmt.Errorf("unmount the anchor %s: %w", l.Anchor(), err)
		}
		unmounted = true
	}
}

// EmptyAnchor removes the files that runtimes made in an anchor that is a plain directory: on a
// host without root, or from an earlier release. No process uses these files.
func (l Layout) EmptyAnchor() error {
	dir, err := l.openAnchor()
	if errors.Is(err, os.ErrNotExist) {
		return nil // Attach reports the error
	}
	if err == nil {
		defer dir.Close()
		err = removeContents(int(dir.Fd()))
	}
	if err != nil {
		return &fault.Error{Operation: "remove the files in the anchor", Object: l.Anchor(), Cause: err}
	}
	return nil
}
