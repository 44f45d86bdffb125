package reader

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// answer is an NVML with a constant answer.
type answer struct {
	gpus []topo.NVMLGPU
	err  error
}

func (a answer) GPUs() ([]topo.NVMLGPU, error) { return a.gpus, a.err }

func readWithNVML(t *testing.T, a answer) *topo.Host {
	t.Helper()
	files := map[string]string{}
	for _, busID := range []string{"0000:00:06.0", "0000:00:07.0"} {
		topotest.Device(files, "pci0000:00/"+busID, topotest.GPUClass, topotest.GPUVendor)
		files["proc/driver/nvidia/gpus/"+busID+"/information"] = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-" +
			busID + "\nDevice Minor: \t 5"
	}
	o := topotest.Tree(t, files)
	o.NVML = a
	h, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestNVMLAnswerCompletesSysfs(t *testing.T) {
	h := readWithNVML(t, answer{gpus: []topo.NVMLGPU{
		{Index: 0, BusID: "00000000:00:07.0", UUID: "GPU-a", Name: "a", Minor: 1, Capability: 90,
			NVLinks: map[string]int{"": 18}},
		{Index: 1, BusID: "00000000:00:06.0", Minor: -1, MIG: true, Capability: 80,
			NVLinks: map[string]int{"00000000:00:07.0": 4}},
	}})
	place := topo.Place{HostBridge: "pci0000:00", Link: 12}
	want := []topo.GPU{
		{Index: 0, BusID: "0000:00:07.0", UUID: "GPU-a", Name: "a", Minor: 1, Place: place, Capability: 90,
			NVLinks: []topo.NVLink{{Count: 18, Bandwidth: 18 * 20.6}}},
		{Index: 1, BusID: "0000:00:06.0", UUID: "GPU-0000:00:06.0", Name: "NVIDIA H200", Minor: 5, Place: place,
			Capability: 80, MIG: true,
			NVLinks: []topo.NVLink{{Peer: "0000:00:07.0", Count: 4, Bandwidth: 80}}, Reason: topo.GPU{MIG: true}.Refusal()},
	}
	if diff := cmp.Diff(want, h.GPUs, topotest.Plain); diff != "" {
		t.Error(diff)
	}
	if len(h.Notes) > 0 {
		t.Errorf("notes %q", h.Notes)
	}
	if got, err := graph.Between(h, "0000:00:06.0", "0000:00:07.0"); err != nil ||
		got != (topo.Path{Type: topo.NVL, Bandwidth: 80}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestHostWithoutNVMLHasNote(t *testing.T) {
	for _, err := range []error{fmt.Errorf("%w: not installed", topo.ErrNoNVML),
		errors.New("driver/library version mismatch")} {
		h := readWithNVML(t, answer{err: err})
		if len(h.GPUs) != 2 || h.GPUs[0].BusID != "0000:00:06.0" || h.GPUs[1].Index != 1 {
			t.Errorf("%+v", h.GPUs)
		}
		if len(h.Notes) != 1 || !strings.Contains(h.Notes[0], err.Error()) {
			t.Errorf("notes %q; want a note with %q", h.Notes, err)
		}
	}
}

func TestNVMLContradictingSysfsAddsNotes(t *testing.T) {
	h := readWithNVML(t, answer{gpus: []topo.NVMLGPU{
		{Index: 0, BusID: "00000000:00:07.0"}, {Index: 1, BusID: "00000000:44:00.0"}, {Index: 2, BusID: "?"},
	}})
	if len(h.GPUs) != 2 || h.GPUs[0].BusID != "0000:00:07.0" || h.GPUs[1].Index != 3 {
		t.Errorf("want 0000:00:07.0 as 0 and 0000:00:06.0 as 3: %+v", h.GPUs)
	}
	notes := strings.Join(h.Notes, "\n")
	for _, part := range []string{"0000:44:00.0", `"?"`, "NVML does not list GPU 0000:00:06.0"} {
		if !strings.Contains(notes, part) {
			t.Errorf("no note has %q: %q", part, h.Notes)
		}
	}
}

func TestNVMLRefusalBecomesReasonOfGPU(t *testing.T) {
	for word, of := range map[string]topo.NVMLGPU{
		"MIG":            {MIG: true},
		"vGPU":           {VGPU: true},
		"is exclusive":   {ComputeMode: "exclusive-process"},
		"is prohibited":  {ComputeMode: "prohibited"},
		"peer-to-peer":   {NoP2P: true},
		"has lost it":    {Lost: true, Failures: []string{"nvmlDeviceGetUUID: GPU is lost"}},
		"does not list ": {BusID: "00000000:44:00.0"}, // NVML lists another GPU
	} {
		if of.BusID == "" {
			of.BusID = "00000000:00:06.0"
		}
		h := readWithNVML(t, answer{gpus: []topo.NVMLGPU{of, {Index: 1, BusID: "00000000:00:07.0"}}})
		i := slices.IndexFunc(h.GPUs, func(g topo.GPU) bool { return g.BusID == "0000:00:06.0" })
		if g := h.GPUs[i]; !strings.Contains(g.Reason, word) || h.GPUs[1-i].Reason != "" {
			t.Errorf("%+v gives the reason %q, and the second GPU %q", of, g.Reason, h.GPUs[1-i].Reason)
		}
	}
}

func TestNVMLFailureBecomesNote(t *testing.T) {
	h := readWithNVML(t, answer{
		gpus: []topo.NVMLGPU{
			{Index: 0, BusID: "00000000:00:06.0", UUID: "GPU-a", Failures: []string{"nvmlDeviceGetName: Unknown Error"}},
			{Index: 1, Failures: []string{"nvmlDeviceGetHandleByIndex: GPU is lost"}, Lost: true},
		},
		err: errors.New("nvmlShutdown: Unknown Error"),
	})
	if g := h.GPUs[0]; g.UUID != "GPU-a" || g.Name != "NVIDIA H200" || h.GPUs[1].Index != 2 {
		t.Errorf("%+v", h.GPUs)
	}
	notes := strings.Join(h.Notes, "\n")
	for _, part := range []string{
		"NVML: nvmlShutdown: Unknown Error", "GPU 0000:00:06.0: NVML returned only a part of the data: nvmlDeviceGetName",
		"no data for GPU 1: nvmlDeviceGetHandleByIndex: GPU is lost",
	} {
		if !strings.Contains(notes, part) {
			t.Errorf("no note has %q: %q", part, h.Notes)
		}
	}
}

// ncclTopoGetXmlFromGpu and ncclTopoAddNvLinks use the same rule.
func TestNVLinkFarEndFollowsPCIClass(t *testing.T) {
	files := map[string]string{}
	topotest.Device(files, "pci0000:00/0000:00:01.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	topotest.Device(files, "pci0000:00/0000:00:02.0", topotest.GPUClass, topotest.GPUVendor, "numa_node=0")
	topotest.Device(files, "pci0004:00/0004:00:01.0", "class=0x068001", "vendor=0x1014")    // IBM's
	topotest.Device(files, "pci0000:00/0000:00:05.0", "class=0x068000", topotest.GPUVendor) // an NVSwitch
	o := topotest.Tree(t, files)
	o.NVML = answer{gpus: []topo.NVMLGPU{
		{Index: 0, BusID: "00000000:00:01.0", Capability: 70, NVLinksCPU: 1, NVLinks: map[string]int{
			"00000000:00:02.0": 1, "00000004:00:01.0": 2, "00000000:00:05.0": 3, "00000000:77:00.0": 4, "": 5,
		}},
		{Index: 1, BusID: "00000000:00:02.0", Capability: 90, C2C: 10, C2CBandwidth: 45000},
	}}
	h, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]topo.NVLink{{Peer: "", Count: 12, Bandwidth: 240},
		{Peer: "0000:00:02.0", Count: 1, Bandwidth: 20}}, h.GPUs[0].NVLinks); diff != "" {
		t.Errorf("NVLinks (-want +got):\n%s", diff)
	}
	if h.GPUs[0].NVLinkCPU != 60 || h.GPUs[1].C2C != 450 {
		t.Errorf("to the CPU: NVLink %g GB/s, C2C %g; want 60 and 450", h.GPUs[0].NVLinkCPU, h.GPUs[1].C2C)
	}
	sameHost(t, o)
}
