package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/peerlane/peerlane/topo"
)

// Health has values of the driver and the GPUs that no plan needs, but that explain a plan's
// failure.
type Health struct {
	// Driver is the version of the user-space driver (nvmlSystemGetDriverVersion).
	Driver string
	// CUDA is the newest CUDA version of the driver, 1000 × major + 10 × minor
	// (nvmlSystemGetCudaDriverVersion_v2); 0 where unknown.
	CUDA int
	GPUs []GPUHealth
	// Failures are the calls about the driver that gave no answer.
	Failures []string
}

// GPUHealth is the health of a GPU. Sizes are bytes, 0 where unknown.
type GPUHealth struct {
	Index int
	// BusID is a PCI address in the form of topo.ParseBusID.
	BusID string
	// BAR1 is the size of the window through which other devices access the GPU's memory
	// (nvmlDeviceGetBAR1MemoryInfo).
	BAR1, BAR1Free uint64
	// Memory is the size of the GPU's memory (nvmlDeviceGetMemoryInfo).
	Memory, MemoryFree uint64
	// Persistence is the persistence mode (nvmlDeviceGetPersistenceMode); nil where unknown.
	Persistence *bool
	// NoP2P has the driver's reason (nvmlDeviceGetP2PStatus) for each GPU whose memory this GPU
	// cannot read or write, by PCI address.
	NoP2P map[string]string
	// Failures are the calls that gave no answer.
	Failures []string
}

// Health reads the health of driver and GPUs. Without the library the error is topo.ErrNoNVML.
func (l *Library) Health() (h Health, err error) {
	err = l.while(func(count int) {
		version, result := l.nvml.SystemGetDriverVersion()
		if result == nvml.SUCCESS {
			h.Driver = version
		} else {
			h.Failures = append(h.Failures, l.newCallError("nvmlSystemGetDriverVersion", result).Error())
		}
		cuda, result := l.nvml.SystemGetCudaDriverVersion_v2()
		if result == nvml.SUCCESS {
			h.CUDA = cuda
		} else {
			h.Failures = append(h.Failures, l.newCallError("nvmlSystemGetCudaDriverVersion", result).Error())
		}
		queries := make([]query, count)
		for i := range queries {
			queries[i] = query{library: l, gpu: topo.NVMLGPU{Index: i}}
			queries[i].place()
		}
		for i := range queries {
			h.GPUs = append(h.GPUs, queries[i].health(queries))
		}
	})
	return h, err
}

// place reads only the address.
func (q *query) place() {
	device, result := q.library.nvml.DeviceGetHandleByIndex(q.gpu.Index)
	if !q.succeeded("nvmlDeviceGetHandleByIndex", result) {
		return
	}
	q.device = device
	if pci, result := device.GetPciInfo(); q.succeeded("nvmlDeviceGetPciInfo", result) {
		busID, err := topo.ParseBusID(text(pci.BusId[:]))
		if err != nil {
			q.gpu.Failures = append(q.gpu.Failures, fmt.Sprintf("nvmlDeviceGetPciInfo: %v", err))
		}
		q.gpu.BusID = busID
	}
}

func (q *query) health(all []query) GPUHealth {
	h := GPUHealth{Index: q.gpu.Index, BusID: q.gpu.BusID, NoP2P: map[string]string{}}
	if q.device != nil && !q.gpu.Lost {
		if bar, result := q.device.GetBAR1MemoryInfo(); q.succeeded("nvmlDeviceGetBAR1MemoryInfo", result) {
			h.BAR1, h.BAR1Free = bar.Bar1Total, bar.Bar1Free
		}
		if memory, result := q.device.GetMemoryInfo(); q.succeeded("nvmlDeviceGetMemoryInfo", result) {
			h.Memory, h.MemoryFree = memory.Total, memory.Free
		}
		if mode, result := q.device.GetPersistenceMode(); q.succeeded("nvmlDeviceGetPersistenceMode", result) {
			on := mode == nvml.FEATURE_ENABLED
			h.Persistence = &on
		}
		q.refused(all, h.NoP2P)
	}
	h.Failures = q.gpu.Failures
	return h
}

// refused adds the GPUs that deny this GPU peer-to-peer access.
func (q *query) refused(all []query, why map[string]string) {
	for i := range all {
		peer := &all[i]
		if peer.gpu.Index == q.gpu.Index || peer.device == nil || peer.gpu.BusID == "" ||
			!q.supports("nvmlDeviceGetP2PStatus") {
			continue
		}
		for _, direction := range []struct {
			index nvml.GpuP2PCapsIndex
			verb  string
		}{{nvml.P2P_CAPS_INDEX_READ, "read"}, {nvml.P2P_CAPS_INDEX_WRITE, "write"}} {
			status, result := q.device.GetP2PStatus(peer.device, direction.index)
			lost := q.gpu.Lost // the call does not identify the lost GPU of the two
			ok := q.succeeded(fmt.Sprintf("nvmlDeviceGetP2PStatus to GPU %d", peer.gpu.Index), result)
			q.gpu.Lost = lost
			if ok && status != nvml.P2P_STATUS_OK {
				reason := direction.verb + ": " + p2pWords(status)
				if before := why[peer.gpu.BusID]; before != "" {
					reason = before + "; " + reason
				}
				why[peer.gpu.BusID] = reason
			}
		}
	}
}

// p2pWords maps values of nvmlGpuP2PStatus_t to descriptions.
func p2pWords(s nvml.GpuP2PStatus) string {
	switch s {
	case nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED:
		return "the chipset does not support it"
	case nvml.P2P_STATUS_GPU_NOT_SUPPORTED:
		return "the GPU does not support it"
	case nvml.P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED:
		return "the topology does not support it"
	case nvml.P2P_STATUS_DISABLED_BY_REGKEY:
		return "it is disabled by a registry key of the driver"
	case nvml.P2P_STATUS_NOT_SUPPORTED:
		return "it is not supported"
	}
	return fmt.Sprintf("status %d", s)
}
