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

// gpuNodes begins the names of the GPUs' device nodes. Whoever uses a GPU has
// its node open; nvidiactl and nvidia-uvm are open for as long as well.
const gpuNodes = "/dev/nvidia"

// Holder is a process that has GPUs' device nodes open, or that NVML names: the
// driver cannot be unloaded, nor the GPU be reset, before it lets go.
type Holder struct {
	PID int `json:"pid"`
	// Command is the name of the program, /proc/PID/comm; empty where NVML names a
	// process that this /proc does not show.
	Command string `json:"command"`
	// Container is the id of the container that it is in, by the mount namespaces of
	// the containers that have a relay, else by the names that engines give control
	// groups; empty where neither tells.
	Container string `json:"container,omitempty"`
	// Devices are the nodes that it has open.
	Devices []string `json:"devices"`
	// Uses is what NVML knows of it.
	Uses []Use `json:"uses"`
}

// Use is how a process uses a GPU.
type Use struct {
	GPU  int    `json:"gpu"`  // NVML's index
	Kind string `json:"kind"` // compute or graphics
	// Memory is how much of the GPU's memory it has, in bytes; 0 where NVML does not
	// know.
	Memory uint64 `json:"memory,omitempty"`
}

// Holders lists the processes of the host that have a GPU's device node open, as
// links in /proc/PID/fd say, and those that NVML names. Open nodes of other users'
// processes show to root only. The caller is none of them.
func Holders(l paths.Layout, named []topo.GPUProcess) ([]Holder, error) {
	return HoldersOf(l, gpuNodes, named)
}

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
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // it may be ending
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

// containersByMounts are the ids of the containers that have a relay, by their
// mount namespaces.
func containersByMounts(l paths.Layout) map[string]string {
	ids := map[string]string{}
	generations, _ := generation.List(l) // those that can be read
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

// mountNamespace names the one that a process is in, as namespaces(7) says.
func mountNamespace(pid int) (string, error) {
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if errors.Is(err, fs.ErrNotExist) {
		err = process.ErrEnded
	}
	return name, err
}

// containerGroup is what engines call a container's control group: its id, or
// with systemd a scope of that id: docker-ID.scope, libpod-ID.scope,
// cri-containerd-ID.scope. The monitor of podman's, libpod-conmon-ID.scope, is
// beside the container.
// Compiled when somebody asks, which is not before a container.
var containerGroup = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:[a-z]+-|cri-[a-z]+-)?([0-9a-f]{64})(?:\.scope)?$`)
})

// ContainerOfCgroup finds a container's id in the text of /proc/PID/cgroup; the
// innermost counts.
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
