package topo

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// answer is an NVML that says the same always.
type answer struct {
	gpus []NVMLGPU
	err  error
}

func (a answer) GPUs() ([]NVMLGPU, error) { return a.gpus, a.err }

func readWithNVML(t *testing.T, a answer) *Host {
	t.Helper()
	files := map[string]string{}
	for _, busID := range []string{"0000:00:06.0", "0000:00:07.0"} {
		device(files, "pci0000:00/"+busID, gpuClass, gpuVendor)
		files["proc/driver/nvidia/gpus/"+busID+"/information"] = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-" + busID + "\nDevice Minor: \t 5"
	}
	o := tree(t, files)
	o.NVML = a
	h, err := ReadSysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestNVMLCompletesWhatSysfsTells(t *testing.T) {
	h := readWithNVML(t, answer{gpus: []NVMLGPU{
		{Index: 0, BusID: "00000000:00:07.0", UUID: "GPU-a", Name: "a", Minor: 1, Capability: 90, NVLinks: map[string]int{"": 18}},
		{Index: 1, BusID: "00000000:00:06.0", Minor: -1, MIG: true, Capability: 80, NVLinks: map[string]int{"00000000:00:07.0": 4}},
	}})
	place := Place{HostBridge: "pci0000:00", Link: 12}
	want := []GPU{
		{Index: 0, BusID: "0000:00:07.0", UUID: "GPU-a", Name: "a", Minor: 1, Place: place, Capability: 90, NVLinks: []NVLink{{Count: 18, Bandwidth: 18 * 20.6}}},
		{Index: 1, BusID: "0000:00:06.0", UUID: "GPU-0000:00:06.0", Name: "NVIDIA H200", Minor: 5, Place: place, Capability: 80, MIG: true,
			NVLinks: []NVLink{{"0000:00:07.0", 4, 80}}, Reason: GPU{MIG: true}.refusal()},
	}
	if diff := cmp.Diff(want, h.GPUs, plain); diff != "" {
		t.Error(diff)
	}
	if len(h.Notes) > 0 {
		t.Errorf("notes %q", h.Notes)
	}
	if got, err := h.Path("0000:00:06.0", "0000:00:07.0"); err != nil || got != (Path{NVL, 80}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestHostWithoutNVMLIsRightAndSaysSo(t *testing.T) {
	for _, err := range []error{fmt.Errorf("%w: not installed", ErrNoNVML), errors.New("driver/library version mismatch")} {
		h := readWithNVML(t, answer{err: err})
		if len(h.GPUs) != 2 || h.GPUs[0].BusID != "0000:00:06.0" || h.GPUs[1].Index != 1 {
			t.Errorf("%+v", h.GPUs)
		}
		if len(h.Notes) != 1 || !strings.Contains(h.Notes[0], err.Error()) {
			t.Errorf("notes %q; want one with %q", h.Notes, err)
		}
	}
}

func TestNVMLAndSysfsDisagree(t *testing.T) {
	h := readWithNVML(t, answer{gpus: []NVMLGPU{
		{Index: 0, BusID: "00000000:00:07.0"}, {Index: 1, BusID: "00000000:44:00.0"}, {Index: 2, BusID: "?"},
	}})
	if len(h.GPUs) != 2 || h.GPUs[0].BusID != "0000:00:07.0" || h.GPUs[1].Index != 3 {
		t.Errorf("want 0000:00:07.0 as 0 and 0000:00:06.0 as 3: %+v", h.GPUs)
	}
	notes := strings.Join(h.Notes, "\n")
	for _, part := range []string{"0000:44:00.0", `"?"`, "0000:00:06.0 is unknown to NVML"} {
		if !strings.Contains(notes, part) {
			t.Errorf("no note has %q: %q", part, h.Notes)
		}
	}
}
