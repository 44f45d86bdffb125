package hook

import (
	"fmt"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo/planner"
)

// visibleDevices is the variable with which a device peerlane.dev/gpu= hides the server GPUs from
// CUDA. If several devices set the variable, the last one wins.
const visibleDevices = "CUDA_VISIBLE_DEVICES"

// visible returns the value of visibleDevices that package cdi writes for these GPUs.
func visible(a ocispec.Requested) string {
	var uuids []string
	for _, gpu := range a.GPUs {
		uuid, _, _ := strings.Cut(gpu, "@")
		uuids = append(uuids, uuid)
	}
	return strings.Join(uuids, ",")
}

// checkVisibleDevices refuses a container if one device peerlane.dev/gpu= hides the GPU of another
// device from CUDA. It accepts any other value, which the user has set intentionally.
func checkVisibleDevices(plan *planner.Plan, s *ocispec.Spec) error {
	value, set := "", false
	for _, e := range s.Process.Env {
		if v, found := strings.CutPrefix(e, visibleDevices+"="); found {
			value, set = v, true
		}
	}
	all := s.RequestedDevices()
	won := slices.IndexFunc(all, func(a ocispec.Requested) bool { return len(a.GPUs) > 0 && visible(a) == value })
	if !set || won < 0 {
		return nil
	}
	var hidden []string
	for i, a := range all {
		for _, gpu := range slices.Concat(a.GPUs, a.Lanes) {
			if i != won && !slices.Contains(all[won].GPUs, gpu) && !slices.Contains(hidden, gpu) {
				hidden = append(hidden, gpu)
			}
		}
	}
	if len(hidden) == 0 {
		return nil
	}
	wanted := slices.Concat(all[won].GPUs, hidden)
	devices := []string{"peerlane.dev/gpu=all"}
	for _, group := range plan.Groups {
		if !slices.ContainsFunc(wanted, func(gpu string) bool { return !slices.Contains(group.GPUs, address(gpu)) }) {
			devices = append(devices, "peerlane.dev/gpu="+group.Name)
		}
	}
	if len(devices) == 1 {
		devices = append(devices, "a group of [groups] in config.toml")
	}
	return &fault.Error{
		Code:      fault.HiddenGPU,
		Operation: "check " + visibleDevices + " of",
		Object:    "peerlane.dev/gpu=" + numbers(plan, all[won].GPUs),
		Cause:     &hiddenError{numbers(plan, hidden)},
		Remedy: "ask for all of them by one device (" + strings.Join(
			devices,
			", or ",
		) + "), or for each by --device nvidia.com/gpu=N --device peerlane.dev/lane=N",
	}
}

// hiddenError is the cause of a device that hides GPUs.
type hiddenError struct{ gpus string } // as numbers returns them

func (e *hiddenError) Error() string { return fmt.Sprintf("it would hide GPU %s from CUDA", e.gpus) }

// address returns the PCI address of a GPU in the form "UUID@PCI address".
func address(gpu string) string {
	_, busID, _ := strings.Cut(gpu, "@")
	return busID
}

// numbers returns the names of GPUs for users.
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
