package control

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/topo"
)

// gpuNodes is the prefix of the GPUs' device nodes. A process that uses a GPU has its node open,
// and also nvidiactl and nvidia-uvm.
const gpuNodes = "/dev/nvidia"

// Holder is a process that has device nodes of GPUs open, or that NVML names. Until the process
// releases them, the driver cannot be unloaded and the GPU cannot be reset.
type Holder struct {
	PID int `json:"pid"`
	// Command is the name of the program, /proc/PID/comm; empty for a process of NVML that this
	// /proc does not show.
	Command string `json:"command"`
	// Container is the id of the process's container, found by the mount namespaces of the
	// containers with a relay, or else by the names of control groups; empty if unknown.
	Container string `json:"container,omitempty"`
	// Devices are the open nodes.
	Devices []string `json:"devices"`
	// Uses is NVML's report.
	Uses []Use `json:"uses"`
}

// Use describes how a process uses a GPU.
type Use struct {
	// GPU is the index of NVML, and Kind is compute or graphics.
	GPU  int    `json:"gpu"`
	Kind string `json:"kind"`
	// Memory is the used memory of the GPU in bytes; 0 if NVML does not know it.
	Memory uint64 `json:"memory,omitempty"`
}

// Holders lists the processes of the host that have a device node of a GPU open (links in
// /proc/PID/fd), and the processes that NVML names. Only root sees open nodes of other users'
// processes. The list omits the caller.
func Holders(l paths.Layout, named []topo.GPUProcess) ([]Holder, error) {
	return HoldersOf(l, gpuNodes, named)
}

// HoldersOf is Holders for device nodes whose names begin with nodes.
func HoldersOf(l paths.Layout, nodes string, named []topo.GPUProcess) ([]Holder, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	found := map[int]*Holder{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if devices := openNodes(pid, nodes); len(devices) > 0 {
			found[pid] = &Holder{PID: pid, Devices: devices, Uses: []Use{}}
		}
	}
	for _, p := range named {
		if p.PID == os.Getpid() {
			continue
		}
		if found[p.PID] == nil {
			found[p.PID] = &Holder{PID: p.PID, Devices: []string{}}
		}
		kind := "compute"
		if p.Graphics {
			kind = "graphics"
		}
		found[p.PID].Uses = append(found[p.PID].Uses, Use{p.GPU, kind, p.Memory})
	}
	inside := containersByMounts(l)
	list := []Holder{}
	for _, pid := range slices.Sorted(maps.Keys(found)) {
		h := found[pid]
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // fails if the process is ending
		h.Command = strings.TrimSpace(string(name))
		mounts, _ := mountNamespace(pid)
		if h.Container = inside[mounts]; h.Container == "" {
			groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			h.Container = ContainerOfCgroup(string(groups))
		}
		list = append(list, *h)
	}
	return list, nil
}

// containersByMounts maps mount namespaces to the ids of containers with a relay.
func containersByMounts(l paths.Layout) map[string]string {
	ids := map[string]string{}
	generations, _ := generation.List(l) // the readable generations
	own, err := mountNamespace(os.Getpid())
	if err != nil {
		return ids
	}
	for _, g := range generations {
		if !g.Alive {
			continue
		}
		if mounts, err := mountNamespace(g.Init.PID); err == nil && mounts != own {
			ids[mounts] = g.Container.ID
		}
	}
	return ids
}

// mountNamespace returns the name of the mount namespace of a process (namespaces(7)).
func mountNamespace(pid int) (string, error) {
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if errors.Is(err, fs.ErrNotExist) {
		err = process.ErrEnded
	}
	return name, err
}

// containerGroup matches the names that engines give a container's control group: the id or, with
// systemd, a scope of the id: docker-ID.scope, libpod-ID.scope, cri-containerd-ID.scope. Podman's
// monitor, libpod-conmon-ID.scope, is outside the container. The first use compiles it, because
// hooks do not use it.
var containerGroup = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:[a-z]+-|cri-[a-z]+-)?([0-9a-f]{64})(?:\.scope)?$`)
})

// ContainerOfCgroup returns the id of the innermost container in the text of /proc/PID/cgroup.
func ContainerOfCgroup(text string) string {
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		for _, name := range slices.Backward(strings.Split(fields[2], "/")) {
			if m := containerGroup().FindStringSubmatch(name); m != nil {
				return m[1]
			}
		}
	}
	return ""
}
