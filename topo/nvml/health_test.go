package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"
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
