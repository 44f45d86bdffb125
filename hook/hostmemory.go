package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/internal/cgroup"
)

// A relay allocates host memory for its container: memory of clients, slots and rings. The kernel
// charges the pages that the relay touches first to the relay's control group, to which the
// container's limit does not apply, so the hook derives a limit for the relay from the container's
// limit.

const (
	// minOwnHostMemory is enough for some clients of the smallest container.
	minOwnHostMemory = 4 << 20
	// unknownOwnHostMemory is the limit for a container with an unreadable memory limit.
	unknownOwnHostMemory = 64 << 20
)

// ownHostMemory returns launch.Config.OwnHostMemory for the container of an init process: a
// quarter of its memory limit in bytes, or 0 without a limit.
func ownHostMemory(pid int) uint64 {
	limit, err := memoryLimit("/proc", pid)
	switch {
	case err != nil:
		logrus.WithError(err).
			WithField("pid", pid).
			Warnf("the container's memory limit is unknown: its relay allocates at most %d MiB of host memory",
				unknownOwnHostMemory>>20)
		return unknownOwnHostMemory
	case limit == math.MaxUint64:
		return 0
	}
	return max(limit/4, minOwnHostMemory)
}

// Causes of an unknown memory limit.
var (
	errNoHierarchy = errors.New("no cgroup hierarchy with the memory controller is mounted")
	errOutside     = errors.New("the group is not below")
	errNotMember   = errors.New("the group does not have process")
)

// memoryLimit returns the memory limit of a process in bytes: the smallest limit of its control
// group and the groups above, in cgroup v1 and v2. The result is math.MaxUint64 without a limit.
// Without a mounted hierarchy it is an error.
func memoryLimit(proc string, pid int) (uint64, error) {
	groups, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return 0, err
	}
	mounts, err := os.ReadFile(filepath.Join(proc, "self/mountinfo"))
	if err != nil {
		return 0, err
	}
	lowest, found := uint64(math.MaxUint64), false
	for line := range strings.Lines(string(groups)) { // ID:CONTROLLERS:PATH, cgroups(7)
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		filesystem, file := "cgroup2", "memory.max"
		if fields[1] != "" || fields[0] != "0" {
			if !slices.Contains(strings.Split(fields[1], ","), "memory") {
				continue
			}
			filesystem, file = "cgroup", "memory.limit_in_bytes"
		}
		mount, root, ok := cgroup.Mount(string(mounts), filesystem, "memory")
		if !ok {
			continue
		}
		limit, err := minLimit(mount, root, fields[2], file, pid)
		if err != nil {
			return 0, fmt.Errorf("read the memory limit of process %d: %w", pid, err)
		}
		lowest, found = min(lowest, limit), true
	}
	if !found {
		return 0, fmt.Errorf("read the memory limit of process %d: %w", pid, errNoHierarchy)
	}
	var system unix.Sysinfo_t
	if err := unix.Sysinfo(&system); err != nil {
		return 0, os.NewSyscallError("sysinfo", err)
	}
	if lowest >= uint64(system.Totalram)*uint64(system.Unit) {
		return math.MaxUint64, nil
	}
	return lowest, nil
}

// minLimit returns the smallest limit of a group and the groups above it, up to the mount point.
func minLimit(mount, root, group, file string, pid int) (uint64, error) {
	below, err := filepath.Rel(root, group)
	if err != nil || below == ".." || strings.HasPrefix(below, "../") || strings.HasPrefix(group, "/..") {
		return 0, fmt.Errorf("group %s: %w %s, which is mounted at %s", group, errOutside, root, mount)
	}
	at := filepath.Join(mount, below)
	// The path may come from another cgroup namespace, and name another group here.
	members, err := os.ReadFile(filepath.Join(at, "cgroup.procs"))
	if err != nil {
		return 0, err
	}
	if !slices.Contains(strings.Fields(string(members)), strconv.Itoa(pid)) {
		return 0, fmt.Errorf("%s: %w %d", at, errNotMember, pid)
	}
	lowest := uint64(math.MaxUint64)
	for {
		text, err := os.ReadFile(filepath.Join(at, file))
		switch word := strings.TrimSpace(string(text)); {
		case errors.Is(err, fs.ErrNotExist): // the root of the hierarchy, or a group without the controller
		case err != nil:
			return 0, err
		case word != "max":
			limit, err := strconv.ParseUint(word, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", filepath.Join(at, file), err)
			}
			lowest = min(lowest, limit)
		}
		if at == mount || at == "/" {
			return lowest, nil
		}
		at = filepath.Dir(at)
	}
}
