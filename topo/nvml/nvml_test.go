package nvml

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
)

func address(s string) (chars [32]int8) {
	for i := range len(s) {
		chars[i] = int8(s[i])
	}
	return chars
}

// device is a GPU with links: their far ends by type and address.
type link struct {
	kind   nvml.IntNvLinkDeviceType
	remote string
	down   bool
}

func device(links []link, mig int) *mock.Device {
	return &mock.Device{
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
		GetNvLinkStateFunc: func(i int) (nvml.EnableState, nvml.Return) {
			switch {
			case i >= len(links):
				return 0, nvml.ERROR_INVALID_ARGUMENT
			case links[i].down:
				return nvml.FEATURE_DISABLED, nvml.SUCCESS
			}
			return nvml.FEATURE_ENABLED, nvml.SUCCESS
		},
		GetNvLinkRemoteDeviceTypeFunc: func(i int) (nvml.IntNvLinkDeviceType, nvml.Return) { return links[i].kind, nvml.SUCCESS },
		GetNvLinkRemotePciInfoFunc: func(i int) (nvml.PciInfo, nvml.Return) {
			return nvml.PciInfo{BusId: address(links[i].remote)}, nvml.SUCCESS
		},
	}
}

// library has one GPU, and the functions of lacking not.
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
		{kind: nvml.NVLINK_DEVICE_TYPE_IBMNPU, remote: "00000000:01:00.0"},
	}
	for _, tt := range []struct {
		name    string
		mig     int
		lacking []string
		wantMIG bool
		want    map[string]int
	}{
		{"a current driver", nvml.DEVICE_MIG_ENABLE, nil, true, map[string]int{"": 2, "00000000:18:00.0": 1}},
		{"a GPU without MIG", -1, nil, false, map[string]int{"": 2, "00000000:18:00.0": 1}},
		{
			"a driver before MIG and NVLink types", nvml.DEVICE_MIG_ENABLE,
			[]string{"nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkRemoteDeviceType"}, false,
			map[string]int{"00000000:C3:00.0": 1, "00000000:C4:00.0": 1, "00000000:18:00.0": 1, "00000000:01:00.0": 1},
		},
	} {
		l, m := library(device(links, tt.mig), tt.lacking...)
		got, err := l.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		want := []topo.NVMLGPU{{
			BusID: "00000000:17:00.0", UUID: "GPU-a", Name: "NVIDIA H200", Minor: -1, MIG: tt.wantMIG, Capability: 90, NVLinks: tt.want,
		}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
		if n := len(m.ShutdownCalls()); n != 1 {
			t.Errorf("%s: %d times shut down", tt.name, n)
		}
	}
}

func TestModesThatKeepAGPUFromBeingShared(t *testing.T) {
	d := device(nil, -1)
	d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) { return nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.SUCCESS }
	d.GetVirtualizationModeFunc = func() (nvml.GpuVirtualizationMode, nvml.Return) {
		return nvml.GPU_VIRTUALIZATION_MODE_VGPU, nvml.SUCCESS
	}
	allowed := false
	d.GetP2PStatusFunc = func(_ nvml.Device, way nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
		if way == nvml.P2P_CAPS_INDEX_READ || allowed {
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

func TestFailureNamesCallAndGPU(t *testing.T) {
	d := device(nil, 0)
	d.GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST }
	l, m := library(d)
	if _, err := l.GPUs(); err == nil || !strings.Contains(err.Error(), "nvmlDeviceGetUUID of GPU 0") {
		t.Error(err)
	}
	if len(m.ShutdownCalls()) != 1 {
		t.Error("NVML is left open")
	}
	m.InitFunc = func() nvml.Return { return nvml.ERROR_LIB_RM_VERSION_MISMATCH }
	if _, err := l.GPUs(); err == nil || errors.Is(err, topo.ErrNoNVML) || !strings.Contains(err.Error(), "nvmlInit") {
		t.Error(err)
	}
}

func TestAbsentLibraryIsAPlainAnswer(t *testing.T) {
	l := &Library{nvml.New(nvml.WithLibraryPath("libnvidia-ml-of-no-driver.so.1"))}
	_, err := l.GPUs()
	if !errors.Is(err, ErrNoLibrary) || !errors.Is(err, topo.ErrNoNVML) {
		t.Error(err)
	}
}

// On a host with NVIDIA's driver NVML and sysfs must tell the same story.
func TestThisHostsLibraryAgreesWithSysfs(t *testing.T) {
	gpus, err := New().GPUs()
	if errors.Is(err, ErrNoLibrary) {
		t.Skip(err)
	}
	if _, absent := os.Stat("/proc/driver/nvidia"); err != nil && absent != nil {
		t.Skipf("a library without a driver: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	alone, err := topo.ReadSysfs(topo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h, err := topo.ReadSysfs(topo.Options{NVML: New()})
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
			path, err := h.Path(a.BusID, b.BusID)
			t.Logf("%s to %s: %v, %v", a.BusID, b.BusID, path, err)
		}
	}
	t.Logf("notes %q", h.Notes)
}
