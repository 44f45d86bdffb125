package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
)

// Group is the control group of a supervisor and its relay in the cgroup2 hierarchy. Without it,
// the group of the hook's caller would charge, limit and kill both.
type Group struct {
	// root is the mount point of cgroup2.
	root string
	// family is the parent of the groups of one layout.
	family string
	// id is the generation.
	id string
}

// Find returns the group of a generation; ok is false on a host without a cgroup2 mount.
func Find(l paths.Layout, id string) (Group, bool, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return Group{}, false, err
	}
	root, _, ok := Mount(string(text), "cgroup2", "")
	return Group{root, l.Cgroup(), id}, ok, nil
}

// Remove removes a generation's group. In a mount namespace without cgroup2 it uses a detached
// mount, because a supervisor in another mount namespace may have made the group. If it may not
// mount, Remove fails if the supervisor reported a group.
func Remove(l paths.Layout, id string, reported bool) error {
	group, ok, err := Find(l, id)
	if err != nil {
		return err
	}
	return group.removeIn(ok, reported, detachedCgroups)
}

// removeIn is Remove with a function that mounts cgroup2, for a process without such a mount (mounted).
func (c Group) removeIn(mounted, reported bool, detached func() (*os.File, error)) error {
	if !mounted {
		mount, err := detached()
		if err == unix.ENODEV || err == unix.EPERM && !reported {
			return nil // the kernel has no cgroup2, or the generation has no group
		}
		if err != nil {
			return fmt.Errorf("mount cgroup2 to remove the control group %s: %w; "+
				"run peerlane relay gc with CAP_SYS_ADMIN, or where cgroup2 is mounted", filepath.Join(c.family, c.id), err)
		}
		defer mount.Close()
		c.root = fmt.Sprintf("/proc/self/fd/%d", mount.Fd())
	}
	return c.remove()
}

// detachedCgroups returns a detached mount of cgroup2.
func detachedCgroups() (*os.File, error) {
	context, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return nil, err
	}
	mount, err := unix.Fsmount(
		context,
		unix.FSMOUNT_CLOEXEC,
		unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC,
	)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(mount), "cgroup2"), nil
}

// Make makes a generation's group, and opens it for the start of a process. The result is nil on a
// host without cgroup2.
func Make(l paths.Layout, id string) (*os.File, error) {
	group, ok, err := Find(l, id)
	if err != nil || !ok {
		return nil, err
	}
	dir, err := group.create()
	if err != nil {
		return nil, errors.Join(err, group.remove())
	}
	return dir, nil
}

// Parent returns the path of the directory of all groups of a layout.
func (c Group) Parent() string { return filepath.Join(c.root, c.family) }

// Path returns the path of the group.
func (c Group) Path() string { return filepath.Join(c.Parent(), c.id) }

// leaving returns the path of the group for ending supervisors that have left their own groups.
func (c Group) leaving() string { return filepath.Join(c.Parent(), "ending") }

// create makes the group and opens it for the start of a process.
func (c Group) create() (*os.File, error) {
	// The end of another generation may remove the parent at any moment.
	if err := untilFound(func() error { return os.MkdirAll(c.Path(), 0o755) }); err != nil {
		return nil, err
	}
	return os.Open(c.Path())
}

// Limit sets the limits of the group, if the hierarchy has the controllers: on many hosts they are
// in cgroup version 1.
func (c Group) Limit(l generation.Limits) error {
	const period = 100_000 // microseconds, the default of the kernel
	var errs []error
	for _, set := range []struct{ controller, file, value string }{
		{"memory", "memory.max", fmt.Sprint(l.Memory)},
		{"pids", "pids.max", fmt.Sprint(l.Tasks)},
		{"cpu", "cpu.max", fmt.Sprint(l.CPUs*period, " ", period)},
	} {
		path := filepath.Join(c.Path(), set.file)
		if _, err := os.Stat(path); err != nil {
			if err := c.delegate(set.controller); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		if err := os.WriteFile(path, []byte(set.value), 0); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// delegate enables a controller in the groups of this layout.
func (c Group) delegate(controller string) error {
	for _, group := range []string{c.root, c.Parent()} {
		if err := os.WriteFile(filepath.Join(group, "cgroup.subtree_control"), []byte("+"+controller), 0); err != nil {
			return fmt.Errorf("no controller %s: %w", controller, err)
		}
	}
	return nil
}

// Limited reports the limits of a control group that the kernel enforces.
type Limited struct{ Tasks, Memory bool }

// ReadLimited reports the limits of the control group that contains only the calling supervisor
// and its relay: the group of the generation, or of the unit. The limits of a group with other
// processes do not count.
func ReadLimited(proc, id string, unit bool) Limited {
	return Limited{
		Tasks:  limits(proc, id, unit, "pids", "pids.max", "pids.max"),
		Memory: limits(proc, id, unit, "memory", "memory.max", "memory.limit_in_bytes"),
	}
}

// limits reports whether a file of a controller contains a limit: file in cgroup v2, fileV1 in v1.
func limits(proc, id string, unit bool, controller, file, fileV1 string) bool {
	groups, err := os.ReadFile(filepath.Join(proc, "self/cgroup"))
	if err != nil {
		return false
	}
	mounts, err := os.ReadFile(filepath.Join(proc, "self/mountinfo"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(groups)) { // ID:CONTROLLERS:PATH, cgroups(7)
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 || !unit && filepath.Base(fields[2]) != id {
			continue
		}
		filesystem, name := "cgroup2", file
		if fields[1] != "" || fields[0] != "0" {
			if !slices.Contains(strings.Split(fields[1], ","), controller) {
				continue
			}
			filesystem, name = "cgroup", fileV1
		}
		mount, _, _ := Mount(string(mounts), filesystem, controller)
		dir, ok := directory(string(mounts), filesystem, controller, fields[2])
		if !ok || dir == filepath.Clean(mount) {
			continue
		}
		text, _ := os.ReadFile(filepath.Join(dir, name)) // empty without the controller
		// Without a limit the text is "max" or, for memory in v1, LONG_MAX rounded down to pages.
		if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil && n < 1<<62 {
			return true
		}
	}
	return false
}

// Leave moves the calling process out of the group, to the root of the hierarchy. The root of a
// cgroup namespace and the parent of the groups may not contain processes while controllers are
// enabled below them. Leave then uses a sibling group.
func (c Group) Leave() error {
	if _, err := os.Stat(c.Path()); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if enter(c.root) == nil {
		return nil
	}
	// The end of another generation may remove the group at any moment.
	return untilFound(func() error {
		if err := os.MkdirAll(c.leaving(), 0o755); err != nil {
			return err
		}
		return enter(c.leaving())
	})
}

// maxTries limits the calls of untilFound.
const maxTries = 100

// untilFound calls f until the error is not fs.ErrNotExist.
func untilFound(f func() error) (err error) {
	for range maxTries {
		if err = f(); !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return err
}

func enter(group string) error {
	return os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte("0"), 0)
}

// kill kills the processes of the group. The error is fs.ErrNotExist on a kernel without cgroup.kill:
// with O_CREATE it would be EACCES.
func (c Group) kill() error {
	f, err := os.OpenFile(filepath.Join(c.Path(), "cgroup.kill"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("1")
	return errors.Join(err, f.Close())
}

// remove kills the processes of the group and removes the group, if it exists.
func (c Group) remove() error {
	if err := c.kill(); err != nil && !errors.Is(err, os.ErrNotExist) { // no group, or a kernel before 5.14
		return fmt.Errorf("kill the remaining processes of %s: %w", c.Path(), err)
	}
	deadline := time.Now().Add(2 * time.Second)
	for {
		err := unix.Rmdir(c.Path())
		if err == unix.EBUSY && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond) // the killed processes are still ending
			continue
		}
		if err != nil && err != unix.ENOENT {
			return &os.PathError{Op: "rmdir", Path: c.Path(), Err: err}
		}
		break
	}
	// The last generation removes the parent. If the last supervisor is still in the group, the
	// next removal does.
	for _, group := range []string{c.leaving(), c.Parent()} {
		if err := unix.Rmdir(group); err != nil && err != unix.ENOENT && err != unix.ENOTEMPTY && err != unix.EBUSY {
			return &os.PathError{Op: "rmdir", Path: group, Err: err}
		}
	}
	return nil
}

// Mount returns the mount point of cgroup2, or of a controller of cgroup v1, and the group that is
// mounted there. mountinfo is the text of a proc_pid_mountinfo(5) file.
func Mount(mountinfo, filesystem, controller string) (mount, root string, ok bool) {
	for line := range strings.Lines(mountinfo) {
		before, after, _ := strings.Cut(line, " - ")
		fields, super := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || len(super) < 3 || super[0] != filesystem {
			continue
		}
		if filesystem == "cgroup" && !slices.Contains(strings.Split(super[2], ","), controller) {
			continue
		}
		return fields[4], fields[3], true
	}
	return "", "", false
}
