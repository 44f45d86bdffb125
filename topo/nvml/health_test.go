package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
)

func TestHealthReadsDriverAndGPUs(t *testing.T) {
	mode := []nvml.EnableState{nvml.FEATURE_ENABLED, nvml.FEATURE_DISABLED}
	var devices []nvml.Device
	for i, busID := range []string{"00000000:17:00.0", "00000000:3B:00.0"} {
		d := device(nil, 0)
		d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{BusId: address(busID)}, nvml.SUCCESS }
		d.GetBAR1MemoryInfoFunc = func() (nvml.BAR1Memory, nvml.Return) {
			return nvml.BAR1Memory{Bar1Total: 256 << 20, Bar1Free: 250 << 20}, nvml.SUCCESS
		}
		d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) {
			if i == 1 {
				return nvml.Memory{}, nvml.ERROR_UNKNOWN
			}
			return nvml.Memory{Total: 80 << 30, Free: 79 << 30}, nvml.SUCCESS
		}
		d.GetPersistenceModeFunc = func() (nvml.EnableState, nvml.Return) { return mode[i], nvml.SUCCESS }
		d.GetP2PStatusFunc = func(_ nvml.Device, index nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
			switch {
			case i == 0 && index == nvml.P2P_CAPS_INDEX_WRITE:
				return nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED, nvml.SUCCESS
			case i == 0 && index == nvml.P2P_CAPS_INDEX_READ:
				return nvml.P2P_STATUS_DISABLED_BY_REGKEY, nvml.SUCCESS
			}
			return nvml.P2P_STATUS_OK, nvml.SUCCESS
		}
		devices = append(devices, d)
	}
	library := &Library{&mock.Interface{
		InitFunc:        func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:    func() nvml.Return { return nvml.SUCCESS },
		ErrorStringFunc: func(r nvml.Return) string { return "Unknown Error" },
		ExtensionsFunc: func() nvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(string) error { return nil }}
		},
		DeviceGetCountFunc:                func() (int, nvml.Return) { return len(devices), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc:        func(i int) (nvml.Device, nvml.Return) { return devices[i], nvml.SUCCESS },
		SystemGetDriverVersionFunc:        func() (string, nvml.Return) { return "580.95.05", nvml.SUCCESS },
		SystemGetCudaDriverVersion_v2Func: func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN },
	}}
	got, err := library.Health()
	if err != nil {
		t.Fatal(err)
	}
	on, off := true, false
	want := Health{
		Driver: "580.95.05", Failures: []string{"nvmlSystemGetCudaDriverVersion: Unknown Error"},
		GPUs: []GPUHealth{
			{Index: 0, BusID: "0000:17:00.0", BAR1: 256 << 20, BAR1Free: 250 << 20, Memory: 80 << 30, MemoryFree: 79 << 30,
				Persistence: &on,
				NoP2P: map[string]string{"0000:3b:00.0": "read: it is disabled by a registry key of the driver; " +
					"write: the chipset does not support it"}},
			{Index: 1, BusID: "0000:3b:00.0", BAR1: 256 << 20, BAR1Free: 250 << 20, Persistence: &off,
				NoP2P:    map[string]string{},
				Failures: []string{"nvmlDeviceGetMemoryInfo: Unknown Error"}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
}

// deviceAt is a GPU at an address that answers every call of Health.
func deviceAt(busID string) *mock.Device {
	d := device(nil, 0)
	d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{BusId: address(busID)}, nvml.SUCCESS }
	d.GetBAR1MemoryInfoFunc = func() (nvml.BAR1Memory, nvml.Return) {
		return nvml.BAR1Memory{Bar1Total: 2, Bar1Free: 1}, nvml.SUCCESS
	}
	d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: 4, Free: 3}, nvml.SUCCESS }
	d.GetPersistenceModeFunc = func() (nvml.EnableState, nvml.Return) { return nvml.FEATURE_DISABLED, nvml.SUCCESS }
	d.GetP2PStatusFunc = func(nvml.Device, nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
		return nvml.P2P_STATUS_NOT_SUPPORTED, nvml.SUCCESS
	}
	return d
}

func TestHealthFailedCallKeepsOtherValues(t *testing.T) {
	off := false
	whole := func(index int, busID string, noP2P ...string) GPUHealth {
		h := GPUHealth{Index: index, BusID: busID, BAR1: 2, BAR1Free: 1, Memory: 4, MemoryFree: 3, Persistence: &off,
			NoP2P: map[string]string{}}
		for _, peer := range noP2P {
			h.NoP2P[peer] = "read: it is not supported; write: it is not supported"
		}
		return h
	}
	failing := func(g GPUHealth, failures ...string) GPUHealth {
		g.Failures = failures
		return g
	}
	const a, b = "0000:17:00.0", "0000:3b:00.0"
	const calls = nvml.ERROR_UNKNOWN
	for name, tt := range map[string]struct {
		change func(m *mock.Interface, d *mock.Device) // d is the second GPU
		want   Health
	}{
		"no failure": {func(*mock.Interface, *mock.Device) {},
			Health{Driver: "580", CUDA: 13000, GPUs: []GPUHealth{whole(0, a, b), whole(1, b, a)}}},
		"versions": {
			func(m *mock.Interface, _ *mock.Device) {
				m.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return "x", calls }
				m.SystemGetCudaDriverVersion_v2Func = func() (int, nvml.Return) { return 1, calls }
			},
			Health{GPUs: []GPUHealth{whole(0, a, b), whole(1, b, a)}, Failures: []string{
				"nvmlSystemGetDriverVersion: " + calls.Error(), "nvmlSystemGetCudaDriverVersion: " + calls.Error()}},
		},
		"handle": {
			func(m *mock.Interface, _ *mock.Device) {
				first, _ := m.DeviceGetHandleByIndexFunc(0)
				m.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
					if i == 1 {
						return nil, calls
					}
					return first, nvml.SUCCESS
				}
			},
			Health{Driver: "580", CUDA: 13000, GPUs: []GPUHealth{whole(0, a), {Index: 1, NoP2P: map[string]string{},
				Failures: []string{"nvmlDeviceGetHandleByIndex: " + calls.Error()}}}},
		},
		"address": {
			func(_ *mock.Interface, d *mock.Device) {
				d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{BusId: address("x")}, nvml.SUCCESS }
			},
			Health{Driver: "580", CUDA: 13000, GPUs: []GPUHealth{whole(0, a), failing(whole(1, "", a),
				"nvmlDeviceGetPciInfo: "+(&topo.BusIDError{Text: "x"}).Error())}},
		},
		"lost": {
			func(_ *mock.Interface, d *mock.Device) {
				d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{}, nvml.ERROR_GPU_IS_LOST }
				d.GetMemoryInfoFunc = nil // no further call
			},
			Health{Driver: "580", CUDA: 13000, GPUs: []GPUHealth{whole(0, a), {Index: 1, NoP2P: map[string]string{},
				Failures: []string{"nvmlDeviceGetPciInfo: " + nvml.ERROR_GPU_IS_LOST.Error()}}}},
		},
		"P2P of a lost GPU": {
			func(_ *mock.Interface, d *mock.Device) {
				d.GetP2PStatusFunc = func(nvml.Device, nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
					return nvml.P2P_STATUS_UNKNOWN, nvml.ERROR_GPU_IS_LOST
				}
			},
			Health{Driver: "580", CUDA: 13000, GPUs: []GPUHealth{whole(0, a, b), failing(whole(1, b),
				"nvmlDeviceGetP2PStatus to GPU 0: "+nvml.ERROR_GPU_IS_LOST.Error(),
				"nvmlDeviceGetP2PStatus to GPU 0: "+nvml.ERROR_GPU_IS_LOST.Error())}},
		},
	} {
		first, second := deviceAt("00000000:17:00.0"), deviceAt("00000000:3B:00.0")
		l, m := library(first)
		m.DeviceGetCountFunc = func() (int, nvml.Return) { return 2, nvml.SUCCESS }
		m.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
			return []nvml.Device{first, second}[i], nvml.SUCCESS
		}
		m.SystemGetDriverVersionFunc = func() (string, nvml.Return) { return "580", nvml.SUCCESS }
		m.SystemGetCudaDriverVersion_v2Func = func() (int, nvml.Return) { return 13000, nvml.SUCCESS }
		tt.change(m, second)
		got, err := l.Health()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
