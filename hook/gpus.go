package hook

import (
	"fmt"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo/planner"
)

// visibleDevices is the variable by which a device peerlane.dev/gpu= keeps its
// server GPUs from CUDA. Of several devices that set it, the last one wins.
const visibleDevices = "CUDA_VISIBLE_DEVICES"

// requested holds the devices that one hook of a container requests: the GPUs of a device
// peerlane.dev/gpu=, or those of a peerlane.dev/lane=.
type requested struct{ gpus, lanes []string }

// requestedDevices returns the devices that the hooks of this program request, in order.
// That package cdi writes each option and its value apart is enough to know:
// other programs' hooks have no such arguments.
func (s *spec) requestedDevices() []requested {
	var all []requested
	for _, hook := range slices.Concat(s.Hooks.Prestart, s.Hooks.CreateRuntime) {
		if len(hook.Args) < 2 || hook.Args[1] != "create" {
			continue
		}
		var a requested
		for i := 2; i+1 < len(hook.Args); i++ {
			switch hook.Args[i] {
			case "--gpu":
				a.gpus = append(a.gpus, hook.Args[i+1])
			case "--lane":
				a.lanes = append(a.lanes, hook.Args[i+1])
			}
		}
		if len(a.gpus)+len(a.lanes) > 0 {
			all = append(all, a)
		}
	}
	return all
}

// visible is the value that package cdi gives visibleDevices for these GPUs.
func (a requested) visible() string {
	var uuids []string
	for _, gpu := range a.gpus {
		uuid, _, _ := strings.Cut(gpu, "@")
		uuids = append(uuids, uuid)
	}
	return strings.Join(uuids, ",")
}

// checkVisibleDevices refuses a container one of whose devices peerlane.dev/gpu= hides
// the GPU of another device from CUDA. A value that none of them has set is
// somebody's intention, and left alone.
func checkVisibleDevices(plan *planner.Plan, s *spec) error {
	value, set := "", false
	for _, e := range s.Process.Env {
		if v, found := strings.CutPrefix(e, visibleDevices+"="); found {
			value, set = v, true
		}
	}
	all := s.requestedDevices()
	won := slices.IndexFunc(all, func(a requested) bool { return len(a.gpus) > 0 && a.visible() == value })
	if !set || won < 0 {
		return nil
	}
	var hidden []string
	for i, a := range all {
		for _, gpu := range slices.Concat(a.gpus, a.lanes) {
			if i != won && !slices.Contains(all[won].gpus, gpu) && !slices.Contains(hidden, gpu) {
				hidden = append(hidden, gpu)
			}
		}
	}
	if len(hidden) == 0 {
		return nil
	}
	wanted := slices.Concat(all[won].gpus, hidden)
	ways := []string{"peerlane.dev/gpu=all"}
	for _, group := range plan.Groups {
		if !slices.ContainsFunc(wanted, func(gpu string) bool { return !slices.Contains(group.GPUs, address(gpu)) }) {
			ways = append(ways, "peerlane.dev/gpu="+group.Name)
		}
	}
	if len(ways) == 1 {
		ways = append(ways, "a group of [groups] in config.toml")
	}
	return &fault.Error{Code: fault.HiddenGPU, Operation: "check " + visibleDevices + " of", Object: "peerlane.dev/gpu=" + numbers(plan, all[won].gpus),
		Cause:  fmt.Errorf("it would hide GPU %s from CUDA", numbers(plan, hidden)),
		Remedy: "ask for all of them by one device (" + strings.Join(ways, ", or ") + "), or for each by --device nvidia.com/gpu=N --device peerlane.dev/lane=N"}
}

// address is the PCI address of a GPU that is named as "UUID@PCI address".
func address(gpu string) string {
	_, busID, _ := strings.Cut(gpu, "@")
	return busID
}

// numbers names GPUs as users do.
func numbers(plan *planner.Plan, gpus []string) string {
	var list []string
	for _, name := range gpus {
		if gpu, err := plan.GPU(address(name)); err == nil {
			name = fmt.Sprint(gpu.Index)
		}
		list = append(list, name)
	}
	return strings.Join(list, ",")
}
