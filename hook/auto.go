package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/internal/openat2"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// Device numbers of GPUs. The driver has a fixed major number, and minor numbers from
// controlMinors on belong to nvidia-modeset and nvidiactl.
const (
	gpuMajor      = 195
	controlMinors = 254
)

// autoLanes returns the lanes of the GPUs that the engine gives to a container: the nodes of
// linux.devices in config.json, and the nodes that engines without the right to make nodes mount
// one by one. An image can influence neither. An image can set NVIDIA_VISIBLE_DEVICES, so
// autoLanes does not read it.
func autoLanes(plan *planner.Plan, s *ocispec.Spec, c generation.Container, rootfs string) ([]string, error) {
	if slices.ContainsFunc(s.RequestedDevices(), func(a ocispec.Requested) bool { return len(a.GPUs) > 0 }) {
		return nil, errors.New(
			"peerlane.dev/gpu= gives the container the lane of its GPU; leave out peerlane.dev/lane=auto",
		)
	}
	minors, err := gpuMinors(s, c, rootfs)
	if err != nil {
		return nil, fmt.Errorf("peerlane.dev/lane=auto: looking for the container's GPUs: %w", err)
	}
	if len(minors) == 0 {
		if legacyToolkit(s) {
			return nil, errors.New(
				"peerlane.dev/lane=auto: NVIDIA's toolkit is in its legacy mode, in which a prestart hook adds the GPUs later; " +
					"ask for GPUs by --device nvidia.com/gpu=N, or switch the toolkit to CDI (nvidia-ctk config --in-place --set " +
					"nvidia-container-runtime.mode=cdi) and start the container with --runtime nvidia instead of --gpus",
			)
		}
		return nil, errors.New(
			"peerlane.dev/lane=auto: the engine gives the container no GPU (linux.devices of its config.json has none of " +
				"NVIDIA's); add --device nvidia.com/gpu=N, or name the lane: peerlane.dev/lane=N",
		)
	}
	var names []string
	for _, minor := range minors {
		i := slices.IndexFunc(plan.GPUs, func(g topo.GPU) bool { return g.Minor == minor })
		if i < 0 {
			return nil, fmt.Errorf(
				"peerlane.dev/lane=auto: the container has /dev/nvidia%d, and the plan knows no GPU of that number; %s",
				minor,
				lanes.Refresh,
			)
		}
		gpu := plan.GPUs[i]
		if err := stillHasMinor(plan, gpu); err != nil {
			return nil, fmt.Errorf("peerlane.dev/lane=auto: %w", err)
		}
		names = append(names, gpu.UUID+"@"+gpu.BusID)
	}
	return names, nil
}

// stillHasMinor checks that a GPU's minor number in the plan is that of the driver, which can
// change with a boot.
func stillHasMinor(plan *planner.Plan, gpu topo.GPU) error {
	if plan.Source.Sysfs != "/sys" {
		return nil // the host of a test lacks the driver
	}
	path := filepath.Join("/proc/driver/nvidia/gpus", gpu.BusID, "information")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "Device Minor" &&
			strings.TrimSpace(value) != strconv.Itoa(gpu.Minor) {
			return fmt.Errorf(
				"GPU %d (%s) is /dev/nvidia%s by now, and the plan has it as /dev/nvidia%d; %s",
				gpu.Index,
				gpu.BusID,
				strings.TrimSpace(value),
				gpu.Minor,
				lanes.Refresh,
			)
		}
	}
	return nil
}

// gpuMinors returns the minor numbers of the container's GPUs in ascending order, without
// duplicates.
func gpuMinors(s *ocispec.Spec, c generation.Container, rootfs string) ([]int, error) {
	var minors []int
	add := func(major, minor int64) {
		if major == gpuMajor && minor >= 0 && minor < controlMinors && !slices.Contains(minors, int(minor)) {
			minors = append(minors, int(minor))
		}
	}
	for _, d := range s.Devices {
		if d.Type == "c" {
			add(d.Major, d.Minor)
		}
	}
	for _, m := range s.Mounts {
		if !gpuPath.MatchString(filepath.Clean(m.Destination)) || !filepath.IsAbs(m.Source) {
			continue
		}
		var info unix.Stat_t
		if err := unix.Stat(m.Source, &info); err == nil && info.Mode&unix.S_IFMT == unix.S_IFCHR {
			add(int64(unix.Major(info.Rdev)), int64(unix.Minor(info.Rdev)))
		}
	}
	if s.Unread {
		err := mountedGPUs(c, rootfs, add)
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(minors)
	return minors, nil
}

var gpuPath = regexp.MustCompile(`^/dev/nvidia[0-9]+$`)

// mountedGPUs calls found for the GPU nodes in a container's /dev that are mounts: a runtime in a
// user namespace mounts the nodes of the host. An image can contain a node, but not a mount.
func mountedGPUs(c generation.Container, rootfs string, found func(major, minor int64)) error {
	if err := checkMountNamespace(c); err != nil {
		return err
	}
	init, pidfd, err := process.Identify(c.PID)
	if err != nil {
		return err
	}
	defer pidfd.Close()
	ns, err := init.Open()
	if err != nil {
		return err
	}
	defer ns.Close()
	return onDisposableThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("enter the container's mount namespace: %w", err)
		}
		root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: rootfs, Err: err}
		}
		defer unix.Close(root)
		for minor := range controlMinors {
			fd, err := openat2.InRoot(root, fmt.Sprintf("/dev/nvidia%d", minor), unix.O_PATH|unix.O_NOFOLLOW, 0)
			if err != nil {
				continue // the node is absent
			}
			var info unix.Statx_t
			err = unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_TYPE, &info)
			unix.Close(fd)
			if err != nil {
				return os.NewSyscallError("statx", err)
			}
			if info.Mode&unix.S_IFMT == unix.S_IFCHR && info.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
				found(int64(info.Rdev_major), int64(info.Rdev_minor))
			}
		}
		return nil
	})
}

// legacyToolkit reports whether a hook of NVIDIA's toolkit adds the GPUs to the container, which
// happens after all createRuntime hooks have read config.json.
func legacyToolkit(s *ocispec.Spec) bool {
	return slices.ContainsFunc(slices.Concat(s.Hooks.Prestart, s.Hooks.CreateRuntime), func(h ocispec.Hook) bool {
		switch filepath.Base(h.Path) {
		case "nvidia-container-runtime-hook", "nvidia-container-toolkit":
			return true
		}
		return false
	})
}
