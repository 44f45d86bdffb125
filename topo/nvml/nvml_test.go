package nvml

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/reader"
)

func address(s string) (chars [32]int8) {
	for i := range len(s) {
		chars[i] = int8(s[i])
	}
	return chars
}

// link is an NVLink; kind and remote are type and address of the remote end.
type link struct {
	kind   nvml.IntNvLinkDeviceType
	remote string
	down   bool
	noP2P  bool
}

// field is the key of an answer of nvmlDeviceGetFieldValues.
type field struct{ id, scope uint32 }

// device is a GPU of compute capability 9.0 with links.
func device(links []link, mig int) *mock.Device {
	d := &mock.Device{
		GetPciInfoFunc: func() (nvml.PciInfo, nvml.Return) {
			return nvml.PciInfo{BusId: address("00000000:17:00.0")}, nvml.SUCCESS
		},
		GetUUIDFunc:                  func() (string, nvml.Return) { return "GPU-a", nvml.SUCCESS },
		GetNameFunc:                  func() (string, nvml.Return) { return "NVIDIA H200", nvml.SUCCESS },
		GetMinorNumberFunc:           func() (int, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED },
		GetCudaComputeCapabilityFunc: func() (int, int, nvml.Return) { return 9, 0, nvml.SUCCESS },
		GetMigModeFunc: func() (int, int, nvml.Return) {
			if mig < 0 {
				return 0, 0, nvml.ERROR_NOT_SUPPORTED
			}
			return mig, 0, nvml.SUCCESS
		},
		GetComputeModeFunc: func() (nvml.ComputeMode, nvml.Return) { return nvml.COMPUTEMODE_DEFAULT, nvml.SUCCESS },
		GetVirtualizationModeFunc: func() (nvml.GpuVirtualizationMode, nvml.Return) {
			return nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH, nvml.SUCCESS
		},
		GetNvLinkCapabilityFunc: func(i int, capability nvml.NvLinkCapability) (uint32, nvml.Return) {
			if i >= len(links) || capability != nvml.NVLINK_CAP_P2P_SUPPORTED {
				return 0, nvml.ERROR_INVALID_ARGUMENT
			}
			return map[bool]uint32{false: 1}[links[i].noP2P], nvml.SUCCESS
		},
		GetNvLinkStateFunc: func(i int) (nvml.EnableState, nvml.Return) {
			if links[i].down {
				return nvml.FEATURE_DISABLED, nvml.SUCCESS
			}
			return nvml.FEATURE_ENABLED, nvml.SUCCESS
		},
		GetNvLinkRemoteDeviceTypeFunc: func(i int) (nvml.IntNvLinkDeviceType, nvml.Return) {
			return links[i].kind,
				nvml.SUCCESS
		},
		GetNvLinkRemotePciInfoFunc: func(i int) (nvml.PciInfo, nvml.Return) {
			return nvml.PciInfo{BusId: address(links[i].remote)}, nvml.SUCCESS
		},
	}
	known := map[field]uint32{}
	for i, l := range links {
		known[field{nvml.FI_DEV_NVLINK_GET_STATE, uint32(i)}] = map[bool]uint32{false: 1}[l.down]
	}
	fields(d, known)
	return d
}

// fields makes a GPU answer only for the known fields. The value beside a failure has no meaning.
func fields(d *mock.Device, known map[field]uint32) {
	d.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
		for i := range values {
			value, ok := known[field{values[i].FieldId, values[i].ScopeId}]
			binary.NativeEndian.PutUint32(values[i].Value[:], value)
			if !ok {
				binary.NativeEndian.PutUint32(values[i].Value[:], 1)
				values[i].NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
			}
		}
		return nvml.SUCCESS
	}
}

// library has a single GPU, and lacks the functions of lacking.
func library(d nvml.Device, lacking ...string) (*Library, *mock.Interface) {
	m := &mock.Interface{
		InitFunc:                   func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:               func() nvml.Return { return nvml.SUCCESS },
		ErrorStringFunc:            func(r nvml.Return) string { return r.Error() },
		DeviceGetCountFunc:         func() (int, nvml.Return) { return 1, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(int) (nvml.Device, nvml.Return) { return d, nvml.SUCCESS },
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(symbol string) error {
				for _, l := range lacking {
					if l == symbol {
						return errors.New("not there")
					}
				}
				return nil
			}}
		},
	}
	return &Library{m}, m
}

func TestGPUsAreDescribed(t *testing.T) {
	links := []link{
		{kind: nvml.NVLINK_DEVICE_TYPE_SWITCH, remote: "00000000:C3:00.0"},
		{kind: nvml.NVLINK_DEVICE_TYPE_SWITCH, remote: "00000000:C4:00.0"},
		{kind: nvml.NVLINK_DEVICE_TYPE_GPU, remote: "00000000:18:00.0"},
		{kind: nvml.NVLINK_DEVICE_TYPE_GPU, remote: "00000000:18:00.0", down: true},
		{kind: nvml.NVLINK_DEVICE_TYPE_GPU, remote: "00000000:18:00.0", noP2P: true},
		{kind: nvml.NVLINK_DEVICE_TYPE_IBMNPU, remote: "00000000:01:00.0"},
	}
	for _, tt := range []struct {
		name    string
		mig     int
		lacking []string
		wantMIG bool
		want    map[string]int
		toCPU   int
	}{
		{"a current driver", nvml.DEVICE_MIG_ENABLE, nil, true, map[string]int{"": 2, "00000000:18:00.0": 1}, 1},
		{"a GPU without MIG", -1, nil, false, map[string]int{"": 2, "00000000:18:00.0": 1}, 1},
		{"a driver before fields", -1, []string{"nvmlDeviceGetFieldValues"}, false, map[string]int{}, 0},
		{
			"a driver before MIG and NVLink types", nvml.DEVICE_MIG_ENABLE,
			[]string{"nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkRemoteDeviceType"}, false,
			map[string]int{"00000000:C3:00.0": 1, "00000000:C4:00.0": 1, "00000000:18:00.0": 1, "00000000:01:00.0": 1}, 0,
		},
	} {
		l, m := library(device(links, tt.mig), tt.lacking...)
		got, err := l.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		want := []topo.NVMLGPU{{
			BusID: "00000000:17:00.0", UUID: "GPU-a", Name: "NVIDIA H200", Minor: -1, MIG: tt.wantMIG, Capability: 90,
			NVLinks: tt.want, NVLinksCPU: tt.toCPU,
		}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
		if n := len(m.ShutdownCalls()); n != 1 {
			t.Errorf("%s: %d times shut down", tt.name, n)
		}
	}
}

func TestExclusiveModesRefuseGPU(t *testing.T) {
	d := device(nil, -1)
	d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) {
		return nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
			nvml.SUCCESS
	}
	d.GetVirtualizationModeFunc = func() (nvml.GpuVirtualizationMode, nvml.Return) {
		return nvml.GPU_VIRTUALIZATION_MODE_VGPU, nvml.SUCCESS
	}
	allowed := false
	d.GetP2PStatusFunc = func(_ nvml.Device, index nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
		if index == nvml.P2P_CAPS_INDEX_READ || allowed {
			return nvml.P2P_STATUS_OK, nvml.SUCCESS
		}
		return nvml.P2P_STATUS_DISABLED_BY_REGKEY, nvml.SUCCESS
	}
	for _, allowed = range []bool{false, true} {
		l, m := library(d)
		m.DeviceGetCountFunc = func() (int, nvml.Return) { return 2, nvml.SUCCESS }
		got, err := l.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range got {
			if g.ComputeMode != "exclusive-process" || !g.VGPU || g.NoP2P == allowed {
				t.Errorf("P2P allowed: %t; %+v", allowed, g)
			}
		}
	}
}

// Each call fails with each error code: the GPU stays in the list, with the answers of
// successful calls.
func TestFailedCallLosesOnlyItsValues(t *testing.T) {
	whole := topo.NVMLGPU{BusID: "00000000:17:00.0", UUID: "GPU-a", Name: "NVIDIA H200", Minor: -1, Capability: 90,
		NVLinks: map[string]int{"": 1}, C2C: 1, C2CBandwidth: 40000}
	for _, result := range []nvml.Return{nvml.ERROR_UNKNOWN, nvml.ERROR_NO_PERMISSION, nvml.ERROR_NOT_SUPPORTED,
		nvml.ERROR_GPU_IS_LOST, nvml.ERROR_TIMEOUT} {
		for call, c := range map[string]struct {
			fail func(d *mock.Device)
			cost func(g *topo.NVMLGPU)
		}{
			"nvmlDeviceGetPciInfo": {
				func(d *mock.Device) {
					d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{}, result }
				},
				func(g *topo.NVMLGPU) { g.BusID = "" },
			},
			"nvmlDeviceGetUUID": {
				func(d *mock.Device) { d.GetUUIDFunc = func() (string, nvml.Return) { return "x", result } },
				func(g *topo.NVMLGPU) { g.UUID = "" },
			},
			"nvmlDeviceGetName": {
				func(d *mock.Device) { d.GetNameFunc = func() (string, nvml.Return) { return "x", result } },
				func(g *topo.NVMLGPU) { g.Name = "" },
			},
			"nvmlDeviceGetMinorNumber": {
				func(d *mock.Device) { d.GetMinorNumberFunc = func() (int, nvml.Return) { return 7, result } },
				func(*topo.NVMLGPU) {},
			},
			"nvmlDeviceGetCudaComputeCapability": {
				func(d *mock.Device) {
					d.GetCudaComputeCapabilityFunc = func() (int, int, nvml.Return) { return 1, 1, result }
				},
				func(g *topo.NVMLGPU) {
					g.Capability, g.NVLinks, g.C2C, g.C2CBandwidth = 0, map[string]int{}, 0, 0
				},
			},
			"nvmlDeviceGetMigMode": {
				func(d *mock.Device) { d.GetMigModeFunc = func() (int, int, nvml.Return) { return 1, 1, result } },
				func(*topo.NVMLGPU) {},
			},
			"nvmlDeviceGetComputeMode": {
				func(d *mock.Device) {
					d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) { return nvml.COMPUTEMODE_PROHIBITED, result }
				},
				func(*topo.NVMLGPU) {},
			},
			"nvmlDeviceGetVirtualizationMode": {
				func(d *mock.Device) {
					d.GetVirtualizationModeFunc = func() (nvml.GpuVirtualizationMode, nvml.Return) {
						return nvml.GPU_VIRTUALIZATION_MODE_VGPU, result
					}
				},
				func(*topo.NVMLGPU) {},
			},
			"nvmlDeviceGetNvLinkCapability of link 0": {
				func(d *mock.Device) {
					d.GetNvLinkCapabilityFunc = func(int, nvml.NvLinkCapability) (uint32, nvml.Return) { return 1, result }
				},
				func(g *topo.NVMLGPU) { g.NVLinks = map[string]int{} },
			},
			"nvmlDeviceGetNvLinkRemotePciInfo of link 0": {
				func(d *mock.Device) {
					d.GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
						return nvml.NVLINK_DEVICE_TYPE_GPU, nvml.SUCCESS
					}
					d.GetNvLinkRemotePciInfoFunc = func(int) (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{}, result }
				},
				func(g *topo.NVMLGPU) { g.NVLinks = map[string]int{} },
			},
			"nvmlDeviceGetFieldValues(165) of link 0": {
				func(d *mock.Device) {
					d.GetFieldValuesFunc = func([]nvml.FieldValue) nvml.Return { return result }
				},
				func(g *topo.NVMLGPU) { g.NVLinks, g.C2C, g.C2CBandwidth = map[string]int{}, 0, 0 },
			},
		} {
			d := device([]link{{kind: nvml.NVLINK_DEVICE_TYPE_SWITCH}}, -1)
			fields(d, map[field]uint32{
				{nvml.FI_DEV_NVLINK_GET_STATE, 0}: 1,
				{nvml.FI_DEV_C2C_LINK_COUNT, 0}:   1, {nvml.FI_DEV_C2C_LINK_GET_STATUS, 0}: 1,
				{nvml.FI_DEV_C2C_LINK_GET_MAX_BW, 0}: 40000,
			})
			c.fail(d)
			l, m := library(d)
			got, err := l.GPUs()
			if err != nil || len(got) != 1 || len(m.ShutdownCalls()) != 1 {
				t.Fatalf("%s, %s: %d GPUs, %d times shut down, %v", call, result.Error(), len(got), len(m.ShutdownCalls()), err)
			}
			want := whole
			c.cost(&want)
			g := got[0]
			failures := g.Failures
			g.Failures = nil
			if g.Lost != (result == nvml.ERROR_GPU_IS_LOST) {
				t.Errorf("%s, %s: lost is %t", call, result.Error(), g.Lost)
			}
			if g.Lost { // no further calls
				if len(failures) != 1 || !strings.HasPrefix(failures[0], call+": ERROR_GPU_IS_LOST") {
					t.Errorf("%s: failures %q", call, failures)
				}
				continue
			}
			if diff := cmp.Diff(want, g); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", call, result.Error(), diff)
			}
			if silent := result == nvml.ERROR_NOT_SUPPORTED; silent != (len(failures) == 0) || !silent &&
				!strings.HasPrefix(failures[0], call+": "+result.Error()) {
				t.Errorf("%s, %s: failures %q", call, result.Error(), failures)
			}
		}
	}
}

func TestLostGPUKeepsOtherGPUs(t *testing.T) {
	for name, c := range map[string]struct {
		lose func(m *mock.Interface, d *mock.Device)
		lost bool
		want string
	}{
		"before it has a handle": {func(m *mock.Interface, d *mock.Device) {
			m.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
				if i == 1 {
					return nil, nvml.ERROR_GPU_IS_LOST
				}
				return d, nvml.SUCCESS
			}
		}, true, "nvmlDeviceGetHandleByIndex: ERROR_GPU_IS_LOST"},
		"in a container without it": {func(m *mock.Interface, d *mock.Device) {
			m.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
				if i == 1 {
					return nil, nvml.ERROR_NO_PERMISSION
				}
				return d, nvml.SUCCESS
			}
		}, false, "nvmlDeviceGetHandleByIndex: ERROR_NO_PERMISSION"},
		"when P2P is asked for": {func(m *mock.Interface, d *mock.Device) {
			gone := device(nil, -1)
			gone.GetP2PStatusFunc = func(nvml.Device, nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
				return nvml.P2P_STATUS_UNKNOWN, nvml.ERROR_GPU_IS_LOST
			}
			m.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
				return []nvml.Device{d, gone, d}[i], nvml.SUCCESS
			}
		}, false, "nvmlDeviceGetP2PStatus to GPU 0: ERROR_GPU_IS_LOST"},
	} {
		d := device(nil, -1)
		d.GetP2PStatusFunc = func(peer nvml.Device, _ nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
			if peer == nil {
				t.Errorf("%s: asked for P2P with no GPU", name)
			}
			return nvml.P2P_STATUS_DISABLED_BY_REGKEY, nvml.SUCCESS
		}
		l, m := library(d)
		m.DeviceGetCountFunc = func() (int, nvml.Return) { return 3, nvml.SUCCESS }
		c.lose(m, d)
		got, err := l.GPUs()
		if err != nil || len(got) != 3 {
			t.Fatalf("%s: %+v, %v", name, got, err)
		}
		for i, g := range got {
			if i == 1 {
				if g.Lost != c.lost || len(g.Failures) == 0 || g.Failures[0] != c.want {
					t.Errorf("%s: %+v; want lost %t, %q", name, g, c.lost, c.want)
				}
			} else if g.Lost || g.Failures != nil || g.UUID == "" || g.Index != i {
				t.Errorf("%s: another GPU is %+v", name, g)
			}
			if g.NoP2P != (i != 1) {
				t.Errorf("%s: P2P off is %t: %+v", name, g.NoP2P, g)
			}
		}
	}
}

func TestChipToChipLinksAreCountedAsNCCLDoes(t *testing.T) {
	d := device(nil, -1)
	known := map[field]uint32{{nvml.FI_DEV_C2C_LINK_COUNT, 0}: 10}
	for i := range uint32(10) {
		known[field{nvml.FI_DEV_C2C_LINK_GET_STATUS, i}] = 1
		known[field{nvml.FI_DEV_C2C_LINK_GET_MAX_BW, i}] = 44000
	}
	known[field{nvml.FI_DEV_C2C_LINK_GET_STATUS, 3}] = 0 // a link is down
	fields(d, known)
	for _, c := range []struct{ major, links, bandwidth int }{{9, 9, 44000}, {8, 0, 0}} {
		d.GetCudaComputeCapabilityFunc = func() (int, int, nvml.Return) { return c.major, 0, nvml.SUCCESS }
		l, _ := library(d)
		got, err := l.GPUs()
		if err != nil || got[0].C2C != c.links || got[0].C2CBandwidth != c.bandwidth || got[0].Failures != nil {
			t.Errorf("capability %d.0: %+v, %v; want %d links of %d MB/s", c.major, got, err, c.links, c.bandwidth)
		}
	}
}

func TestGPUModesFollowAnswers(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(d *mock.Device)
		want   topo.NVMLGPU // mode and number
	}{
		"default": {func(*mock.Device) {}, topo.NVMLGPU{Minor: -1}},
		"minor": {func(d *mock.Device) {
			d.GetMinorNumberFunc = func() (int, nvml.Return) { return 3, nvml.SUCCESS }
		}, topo.NVMLGPU{Minor: 3}},
		"MIG off": {func(d *mock.Device) {
			d.GetMigModeFunc = func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_DISABLE, 1, nvml.SUCCESS }
		}, topo.NVMLGPU{Minor: -1}},
		"prohibited": {func(d *mock.Device) {
			d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) {
				return nvml.COMPUTEMODE_PROHIBITED, nvml.SUCCESS
			}
		}, topo.NVMLGPU{Minor: -1, ComputeMode: "prohibited"}},
		"exclusive thread": {func(d *mock.Device) {
			d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) {
				return nvml.COMPUTEMODE_EXCLUSIVE_THREAD, nvml.SUCCESS
			}
		}, topo.NVMLGPU{Minor: -1, ComputeMode: "exclusive-process"}},
	} {
		d := device(nil, -1)
		tt.change(d)
		l, _ := library(d)
		gpus, err := l.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		got := topo.NVMLGPU{Minor: gpus[0].Minor, MIG: gpus[0].MIG, VGPU: gpus[0].VGPU, ComputeMode: gpus[0].ComputeMode}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// NCCL queries 4, 6, 12 or 18 links. Drivers report more links for a few GPUs.
func TestLinksOfOlderGPUsAreAskedForByCall(t *testing.T) {
	links := make([]link, 24)
	for i := range links {
		links[i] = link{kind: nvml.NVLINK_DEVICE_TYPE_IBMNPU, remote: "00000004:00:01.0", down: i == 1}
	}
	for capability, want := range map[[2]int]int{{5, 2}: 0, {6, 0}: 4, {6, 9}: 4, {7, 0}: 6, {7, 9}: 6, {8, 0}: 12,
		{8, 9}: 12, {9, 0}: 18} {
		d := device(links, -1)
		d.GetCudaComputeCapabilityFunc = func() (int, int, nvml.Return) { return capability[0], capability[1], nvml.SUCCESS }
		l, _ := library(d)
		got, err := l.GPUs()
		if want = max(0, want-1); err != nil || got[0].NVLinksCPU != want || len(got[0].NVLinks) != 0 { // one is down
			t.Errorf("capability %v: %+v, %v; want %d links to the CPU", capability, got, err, want)
		}
		if got[0].Capability != 10*capability[0]+capability[1] {
			t.Errorf("capability %v: %d", capability, got[0].Capability)
		}
		if byField := len(d.GetFieldValuesCalls()) > 0; byField != (capability[0] >= 9) {
			t.Errorf("capability %v: asked by field is %t", capability, byField)
		}
	}
}

func TestLinkWithoutStateIsDown(t *testing.T) {
	for _, major := range []int{8, 9} {
		d := device([]link{{kind: nvml.NVLINK_DEVICE_TYPE_SWITCH}, {kind: nvml.NVLINK_DEVICE_TYPE_SWITCH}}, -1)
		d.GetCudaComputeCapabilityFunc = func() (int, int, nvml.Return) { return major, 0, nvml.SUCCESS }
		fields(d, map[field]uint32{{nvml.FI_DEV_NVLINK_GET_STATE, 1}: 1})
		d.GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) {
			if link == 0 {
				return nvml.FEATURE_ENABLED, nvml.ERROR_NOT_SUPPORTED
			}
			return nvml.FEATURE_ENABLED, nvml.SUCCESS
		}
		l, _ := library(d)
		got, err := l.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[string]int{"": 1}, got[0].NVLinks); diff != "" {
			t.Errorf("capability %d.0: links (-want +got):\n%s", major, diff)
		}
	}
}

func TestP2PDeniedForEveryPeerSetsNoP2P(t *testing.T) {
	const read, write = nvml.P2P_CAPS_INDEX_READ, nvml.P2P_CAPS_INDEX_WRITE
	for name, tt := range map[string]struct {
		denied map[nvml.GpuP2PCapsIndex]bool
		result nvml.Return
		gpus   int
		want   bool
	}{
		"read":               {map[nvml.GpuP2PCapsIndex]bool{read: true}, nvml.SUCCESS, 2, true},
		"write":              {map[nvml.GpuP2PCapsIndex]bool{write: true}, nvml.SUCCESS, 2, true},
		"neither":            {nil, nvml.SUCCESS, 2, false},
		"no answer":          {map[nvml.GpuP2PCapsIndex]bool{read: true, write: true}, nvml.ERROR_UNKNOWN, 2, false},
		"no other GPU":       {map[nvml.GpuP2PCapsIndex]bool{read: true, write: true}, nvml.SUCCESS, 1, false},
		"several other GPUs": {map[nvml.GpuP2PCapsIndex]bool{read: true}, nvml.SUCCESS, 3, true},
	} {
		d := device(nil, -1)
		d.GetP2PStatusFunc = func(_ nvml.Device, direction nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
			if tt.denied[direction] {
				return nvml.P2P_STATUS_DISABLED_BY_REGKEY, tt.result
			}
			return nvml.P2P_STATUS_OK, tt.result
		}
		l, m := library(d)
		m.DeviceGetCountFunc = func() (int, nvml.Return) { return tt.gpus, nvml.SUCCESS }
		got, err := l.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range got {
			if g.NoP2P != tt.want {
				t.Errorf("%s: GPU %d: %t, want %t", name, g.Index, g.NoP2P, tt.want)
			}
		}
	}
	// An older driver cannot answer.
	l, m := library(device(nil, -1), "nvmlDeviceGetP2PStatus")
	m.DeviceGetCountFunc = func() (int, nvml.Return) { return 2, nvml.SUCCESS }
	if got, err := l.GPUs(); err != nil || got[0].NoP2P {
		t.Errorf("older driver: %+v, %v", got, err)
	}
}

func TestChipToChipLinksHaveMaximum(t *testing.T) {
	d := device(nil, -1)
	known := map[field]uint32{{nvml.FI_DEV_C2C_LINK_COUNT, 0}: 1 << 31}
	for i := range uint32(100) {
		known[field{nvml.FI_DEV_C2C_LINK_GET_STATUS, i}] = 1
		known[field{nvml.FI_DEV_C2C_LINK_GET_MAX_BW, i}] = 44000
	}
	fields(d, known)
	l, _ := library(d)
	if got, err := l.GPUs(); err != nil || got[0].C2C != 64 {
		t.Errorf("%+v, %v; want 64 links", got, err)
	}
}

func TestProcessesAreNamed(t *testing.T) {
	d := device(nil, -1)
	d.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 11, UsedGpuMemory: 512 << 20}, {Pid: 12, UsedGpuMemory: notAvailable}}, nvml.SUCCESS
	}
	d.GetGraphicsRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 11, UsedGpuMemory: 1 << 20}}, nvml.SUCCESS
	}
	silent := device(nil, -1)
	silent.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 13}}, nvml.ERROR_NO_PERMISSION
	}
	silent.GetGraphicsRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 14}}, nvml.ERROR_NOT_SUPPORTED
	}
	l, m := library(d)
	m.DeviceGetCountFunc = func() (int, nvml.Return) { return 3, nvml.SUCCESS }
	m.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		switch i {
		case 0:
			return silent, nvml.SUCCESS
		case 1:
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return d, nvml.SUCCESS
	}
	got, err := l.Processes()
	want := []topo.GPUProcess{{GPU: 2, PID: 11, Memory: 512 << 20}, {GPU: 2, PID: 12},
		{GPU: 2, PID: 11, Graphics: true, Memory: 1 << 20}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	wantErrors := []error{
		&gpuError{0, []string{"nvmlDeviceGetComputeRunningProcesses: " + nvml.ERROR_NO_PERMISSION.Error()}},
		&gpuError{1, []string{"nvmlDeviceGetHandleByIndex: " + nvml.ERROR_GPU_IS_LOST.Error()}},
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("%v is not a join of errors", err)
	}
	if diff := cmp.Diff(wantErrors, joined.Unwrap(), cmp.AllowUnexported(gpuError{})); diff != "" {
		t.Error(diff)
	}
	if n := len(m.ShutdownCalls()); n != 1 {
		t.Errorf("%d times shut down", n)
	}
}

func TestProcessesOfFailingLibraryReturnError(t *testing.T) {
	l, m := library(device(nil, -1))
	m.InitFunc = func() nvml.Return { return nvml.ERROR_DRIVER_NOT_LOADED }
	if got, err := l.Processes(); err == nil || errors.Is(err, topo.ErrNoNVML) || len(got) > 0 {
		t.Errorf("%+v, %v", got, err)
	}
	m.InitFunc = func() nvml.Return { return nvml.ERROR_LIBRARY_NOT_FOUND }
	if _, err := l.Processes(); !errors.Is(err, topo.ErrNoNVML) {
		t.Error(err)
	}
	// A driver before either function.
	l, _ = library(device(nil, -1), "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
	if got, err := l.Processes(); err != nil || len(got) > 0 {
		t.Errorf("%+v, %v", got, err)
	}
}

// isCallError reports whether an error is of a failed call, with a text for users.
func isCallError(err error, call string, result nvml.Return) bool {
	var failed *callError
	return errors.As(err, &failed) && *failed == (callError{call, result, result.Error()})
}

func TestFailingLibraryErrorNamesCall(t *testing.T) {
	for _, result := range []nvml.Return{nvml.ERROR_LIB_RM_VERSION_MISMATCH, nvml.ERROR_DRIVER_NOT_LOADED,
		nvml.ERROR_NO_PERMISSION} {
		l, m := library(device(nil, 0))
		m.InitFunc = func() nvml.Return { return result }
		if _, err := l.GPUs(); errors.Is(err, topo.ErrNoNVML) || !isCallError(err, "nvmlInit", result) {
			t.Error(err)
		}
		l, m = library(device(nil, 0))
		m.DeviceGetCountFunc = func() (int, nvml.Return) { return 0, result }
		if _, err := l.GPUs(); !isCallError(err, "nvmlDeviceGetCount", result) ||
			len(m.ShutdownCalls()) != 1 {
			t.Error(err)
		}
		l, m = library(device(nil, 0))
		m.ShutdownFunc = func() nvml.Return { return result }
		if got, err := l.GPUs(); !isCallError(err, "nvmlShutdown", result) || len(got) != 1 {
			t.Errorf("%+v, %v", got, err)
		}
	}
}

func TestAbsentLibraryIsAPlainAnswer(t *testing.T) {
	l := &Library{nvml.New(nvml.WithLibraryPath("libnvidia-ml-of-no-driver.so.1"))}
	_, err := l.GPUs()
	if !errors.Is(err, errNoLibrary) || !errors.Is(err, topo.ErrNoNVML) {
		t.Error(err)
	}
	var f *fault.Error
	if !errors.As(err, &f) || f.Code != fault.NoCUDA || f.Object != "libnvidia-ml.so.1" || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
}

// On a host with NVIDIA's driver NVML and sysfs must agree.
func TestThisHostsLibraryAgreesWithSysfs(t *testing.T) {
	gpus, err := New().GPUs()
	if errors.Is(err, errNoLibrary) {
		t.Skip(err)
	}
	if _, absent := os.Stat("/proc/driver/nvidia"); err != nil && absent != nil {
		t.Skipf("a library without a driver: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	alone, err := reader.Sysfs(topo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h, err := reader.Sysfs(topo.Options{NVML: New()})
	if err != nil {
		t.Fatal(err)
	}
	if len(h.GPUs) != len(gpus) {
		t.Errorf("NVML has %d GPUs, sysfs %d: %q", len(gpus), len(h.GPUs), h.Notes)
	}
	for i, g := range h.GPUs {
		t.Logf("%+v", g)
		if a := alone.GPUs[i]; a.BusID != g.BusID || a.UUID != g.UUID || a.Minor != g.Minor || a.Name != g.Name {
			t.Errorf("without NVML GPU %d is %+v", i, a)
		}
	}
	for i, a := range h.GPUs {
		for _, b := range h.GPUs[:i] {
			path, err := graph.Between(h, a.BusID, b.BusID)
			t.Logf("%s to %s: %v, %v", a.BusID, b.BusID, path, err)
		}
	}
	t.Logf("notes %q", h.Notes)
}
