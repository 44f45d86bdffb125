package topo

import (
	"cmp"
	"errors"
)

// NVML is the part of NVIDIA's management library that topo needs; topo/nvml implements NVML
// with the real library.
type NVML interface {
	// GPUs lists the GPUs that the driver manages. ErrNoNVML reports a host without the
	// library, which is no fault. A list of GPUs beside an error is correct.
	GPUs() ([]NVMLGPU, error)
}

// ErrNoNVML is the error of an NVML on a host without the library.
var ErrNoNVML = errors.New("the NVML library is not installed")

// NVMLGPU is a GPU in NVML.
type NVMLGPU struct {
	Index int // nvmlDeviceGetIndex
	// BusID is nvmlDeviceGetPciInfo's, in any form that ParseBusID reads.
	BusID string
	UUID  string // nvmlDeviceGetUUID
	Name  string // nvmlDeviceGetName
	Minor int    // nvmlDeviceGetMinorNumber, -1 where unknown
	MIG   bool   // nvmlDeviceGetMigMode, the current mode
	VGPU  bool   // nvmlDeviceGetVirtualizationMode: a share, in a guest
	// ComputeMode is nvmlDeviceGetComputeMode's value, in the notation of GPU.ComputeMode;
	// empty for the default.
	ComputeMode string
	// NoP2P reports that nvmlDeviceGetP2PStatus returns OK for no other GPU of the host.
	NoP2P bool
	// Capability is the compute capability times ten, 90 for 9.0.
	Capability int
	// NVLinks counts the active links by peer, a PCI address in any form; ""
	// for NVSwitches (nvmlDeviceGetNvLinkRemoteDeviceType, ..RemotePciInfo).
	NVLinks map[string]int
	// NVLinksCPU counts the links to the CPU (POWER9).
	NVLinksCPU int `json:",omitempty"`
	// C2C counts the active chip-to-chip links to the CPU (NVML_FI_DEV_C2C_LINK_COUNT,
	// .._GET_STATUS). C2CBandwidth is the maximum of a link, MB/s (.._GET_MAX_BW).
	C2C          int `json:",omitempty"`
	C2CBandwidth int `json:",omitempty"`
	// Lost reports that the GPU no longer responds (NVML_ERROR_GPU_IS_LOST).
	Lost bool `json:",omitempty"`
	// Failures are the failed calls, "nvmlDeviceGetUUID: Unknown Error"; the value of a failed
	// call is unknown.
	Failures []string `json:",omitempty"`
}

// GPUProcess is a process that uses a GPU
// (nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses).
type GPUProcess struct {
	GPU      int // nvmlDeviceGetIndex
	PID      int
	Graphics bool   // graphics; false for compute
	Memory   uint64 // bytes of the GPU's memory; 0 where unknown
}

// Options are the sources of reader.Sysfs.
type Options struct {
	// Sysfs is the root of sysfs; empty for "/sys".
	Sysfs string
	// Proc is the root of procfs; empty for "/proc".
	Proc string
	// NVML supplies values that sysfs lacks (index, NVLinks, MIG); nil to omit. NVML describes
	// the running host, and therefore matches only the running host's Sysfs.
	NVML NVML
}

func (o Options) Roots() (sysfs, proc string) {
	return cmp.Or(o.Sysfs, "/sys"), cmp.Or(o.Proc, "/proc")
}
