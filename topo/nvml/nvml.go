// Package nvml completes a topology with what NVIDIA's management library
// knows: the index of nvidia-smi, NVLinks, MIG. It needs cgo, and no header or
// library to build; libnvidia-ml.so.1 is opened at run time.
package nvml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/peerlane/peerlane/topo"
)

// ErrNoLibrary says that this host has no libnvidia-ml.so.1, as any host
// without NVIDIA's driver. It is a topo.ErrNoNVML.
var ErrNoLibrary = fmt.Errorf("%w: libnvidia-ml.so.1 is not installed", topo.ErrNoNVML)

// Library is NVML. It implements topo.NVML.
type Library struct{ nvml nvml.Interface }

// New names the library; it is opened when it is asked something.
func New() *Library { return &Library{nvml.New()} }

var _ topo.NVML = (*Library)(nil)

// GPUs lists the GPUs that the driver manages. Where the library is absent the
// error is ErrNoLibrary.
func (l *Library) GPUs() (gpus []topo.NVMLGPU, err error) {
	switch result := l.nvml.Init(); result {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return nil, ErrNoLibrary
	default:
		return nil, l.failed("nvmlInit", "", result)
	}
	defer func() {
		if result := l.nvml.Shutdown(); result != nvml.SUCCESS {
			err = errors.Join(err, l.failed("nvmlShutdown", "", result))
		}
	}()
	count, result := l.nvml.DeviceGetCount()
	if result != nvml.SUCCESS {
		return nil, l.failed("nvmlDeviceGetCount", "", result)
	}
	for i := range count {
		gpu, err := l.gpu(i)
		if err != nil {
			return nil, err
		}
		gpus = append(gpus, gpu)
	}
	for i := range gpus {
		if gpus[i].NoP2P, err = l.noP2P(i, count); err != nil {
			return nil, err
		}
	}
	return gpus, nil
}

// noP2P says whether the driver lets a GPU reach none of the others. What it
// does not tell counts as allowed.
func (l *Library) noP2P(index, count int) (bool, error) {
	if count < 2 || !l.has("nvmlDeviceGetP2PStatus") {
		return false, nil
	}
	name := fmt.Sprint(index)
	device, result := l.nvml.DeviceGetHandleByIndex(index)
	if result != nvml.SUCCESS {
		return false, l.failed("nvmlDeviceGetHandleByIndex", name, result)
	}
	for i := range count {
		if i == index {
			continue
		}
		peer, result := l.nvml.DeviceGetHandleByIndex(i)
		if result != nvml.SUCCESS {
			return false, l.failed("nvmlDeviceGetHandleByIndex", fmt.Sprint(i), result)
		}
		refused := false
		for _, way := range []nvml.GpuP2PCapsIndex{nvml.P2P_CAPS_INDEX_READ, nvml.P2P_CAPS_INDEX_WRITE} {
			status, result := device.GetP2PStatus(peer, way)
			refused = refused || result == nvml.SUCCESS && status != nvml.P2P_STATUS_OK
		}
		if !refused {
			return false, nil
		}
	}
	return true, nil
}

func (l *Library) failed(call, device string, result nvml.Return) error {
	if device != "" {
		device = " of GPU " + device
	}
	return fmt.Errorf("%s%s: %s", call, device, l.nvml.ErrorString(result))
}

func (l *Library) gpu(index int) (topo.NVMLGPU, error) {
	gpu := topo.NVMLGPU{Index: index}
	name := fmt.Sprint(index)
	device, result := l.nvml.DeviceGetHandleByIndex(index)
	if result != nvml.SUCCESS {
		return gpu, l.failed("nvmlDeviceGetHandleByIndex", name, result)
	}
	pci, result := device.GetPciInfo()
	if result != nvml.SUCCESS {
		return gpu, l.failed("nvmlDeviceGetPciInfo", name, result)
	}
	gpu.BusID = text(pci.BusId[:])
	if gpu.UUID, result = device.GetUUID(); result != nvml.SUCCESS {
		return gpu, l.failed("nvmlDeviceGetUUID", name, result)
	}
	if gpu.Name, result = device.GetName(); result != nvml.SUCCESS {
		return gpu, l.failed("nvmlDeviceGetName", name, result)
	}
	if gpu.Minor, result = device.GetMinorNumber(); result != nvml.SUCCESS {
		gpu.Minor = -1 // not every system numbers device nodes
	}
	major, minor, result := device.GetCudaComputeCapability()
	if result != nvml.SUCCESS {
		return gpu, l.failed("nvmlDeviceGetCudaComputeCapability", name, result)
	}
	gpu.Capability = 10*major + minor
	if l.has("nvmlDeviceGetMigMode") {
		current, _, result := device.GetMigMode()
		if result != nvml.SUCCESS && result != nvml.ERROR_NOT_SUPPORTED {
			return gpu, l.failed("nvmlDeviceGetMigMode", name, result)
		}
		gpu.MIG = result == nvml.SUCCESS && current == nvml.DEVICE_MIG_ENABLE
	}
	l.modes(device, &gpu)
	var err error
	gpu.NVLinks, err = l.links(device, name)
	return gpu, err
}

// modes learns what keeps programs from sharing the GPU. Not every driver and
// GPU has these modes; one that does not tell has none.
func (l *Library) modes(device nvml.Device, gpu *topo.NVMLGPU) {
	if l.has("nvmlDeviceGetComputeMode") {
		switch mode, result := device.GetComputeMode(); {
		case result != nvml.SUCCESS:
		case mode == nvml.COMPUTEMODE_PROHIBITED:
			gpu.ComputeMode = "prohibited"
		case mode == nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, mode == nvml.COMPUTEMODE_EXCLUSIVE_THREAD:
			gpu.ComputeMode = "exclusive-process"
		}
	}
	if l.has("nvmlDeviceGetVirtualizationMode") {
		mode, result := device.GetVirtualizationMode()
		gpu.VGPU = result == nvml.SUCCESS && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
}

// links counts the active NVLinks by peer.
func (l *Library) links(device nvml.Device, name string) (map[string]int, error) {
	peers := map[string]int{}
	for link := range nvml.NVLINK_MAX_LINKS {
		state, result := device.GetNvLinkState(link)
		if result != nvml.SUCCESS || state != nvml.FEATURE_ENABLED {
			continue // no such link, no NVLink at all, or one that is down
		}
		kind := nvml.IntNvLinkDeviceType(nvml.NVLINK_DEVICE_TYPE_UNKNOWN)
		if l.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
			if kind, result = device.GetNvLinkRemoteDeviceType(link); result != nvml.SUCCESS {
				kind = nvml.NVLINK_DEVICE_TYPE_UNKNOWN
			}
		}
		switch kind {
		case nvml.NVLINK_DEVICE_TYPE_IBMNPU:
			continue
		case nvml.NVLINK_DEVICE_TYPE_SWITCH:
			peers[""]++
			continue
		}
		remote, result := device.GetNvLinkRemotePciInfo(link)
		if result != nvml.SUCCESS {
			return nil, l.failed(fmt.Sprintf("nvmlDeviceGetNvLinkRemotePciInfo of link %d", link), name, result)
		}
		peers[text(remote.BusId[:])]++
	}
	return peers, nil
}

// has asks for a function that older drivers lack. A call of one that is
// absent would end the process.
func (l *Library) has(symbol string) bool {
	return l.nvml.Extensions().LookupSymbol(symbol) == nil
}

// text is a C string.
func text(chars []int8) string {
	var b strings.Builder
	for _, c := range chars {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}
