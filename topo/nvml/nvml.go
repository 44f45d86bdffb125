// Package nvml completes a topology with values of NVIDIA's management library: the index of
// nvidia-smi, NVLinks, MIG; and lists the processes that use a GPU. Package nvml needs cgo, but
// no header or library to build: nvml opens libnvidia-ml.so.1 at run time.
package nvml

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/topo"
)

// errNoLibrary is the error on a host without libnvidia-ml.so.1, for example without NVIDIA's
// driver. errNoLibrary wraps topo.ErrNoNVML.
var errNoLibrary error = &fault.Error{Code: fault.NoCUDA, Operation: "open", Object: "libnvidia-ml.so.1",
	Cause: topo.ErrNoNVML,
	Remedy: "install NVIDIA's driver, or run the command on the host in place of a container without the driver's " +
		"libraries"}

// Library is NVML, and implements topo.NVML.
type Library struct{ nvml nvml.Interface }

// New returns a Library; a method call opens libnvidia-ml.so.1.
func New() *Library { return &Library{nvml.New()} }

var _ topo.NVML = (*Library)(nil)

// GPUs lists the GPUs that the driver manages. Without the library the error is topo.ErrNoNVML. A
// failed call for a GPU is in the GPU's Failures.
func (l *Library) GPUs() (gpus []topo.NVMLGPU, err error) {
	err = l.while(func(count int) {
		queries := make([]query, count)
		for i := range queries {
			queries[i] = query{library: l, gpu: topo.NVMLGPU{Index: i, Minor: -1}}
			queries[i].all()
		}
		for i := range queries {
			queries[i].gpu.NoP2P = queries[i].noP2P(queries)
			gpus = append(gpus, queries[i].gpu)
		}
	})
	return gpus, err
}

// Processes lists processes that use GPUs. Without the library the error is topo.ErrNoNVML. A list
// beside another error is correct but incomplete; the error names the GPUs without an answer.
func (l *Library) Processes() (processes []topo.GPUProcess, err error) {
	var silent []error
	err = l.while(func(count int) {
		for i := range count {
			a := query{library: l, gpu: topo.NVMLGPU{Index: i}}
			processes = append(processes, a.processes()...)
			if len(a.gpu.Failures) > 0 {
				silent = append(silent, fmt.Errorf("GPU %d: %s", i, strings.Join(a.gpu.Failures, ", ")))
			}
		}
	})
	return processes, errors.Join(append(silent, err)...)
}

// while opens the library, calls do with the number of GPUs, and closes the library.
func (l *Library) while(do func(count int)) (err error) {
	switch result := l.nvml.Init(); result {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return errNoLibrary
	default:
		return l.failed("nvmlInit", result)
	}
	defer func() {
		if result := l.nvml.Shutdown(); result != nvml.SUCCESS {
			err = errors.Join(err, l.failed("nvmlShutdown", result))
		}
	}()
	count, result := l.nvml.DeviceGetCount()
	if result != nvml.SUCCESS {
		return l.failed("nvmlDeviceGetCount", result)
	}
	do(count)
	return nil
}

func (l *Library) failed(call string, result nvml.Return) error {
	return &callError{call, result, l.nvml.ErrorString(result)}
}

// callError is a failed call of NVML.
type callError struct {
	call   string // nvmlInit
	result nvml.Return
	text   string // NVML's text of the result
}

func (e *callError) Error() string { return e.call + ": " + e.text }

// query collects NVML's answers about a GPU.
type query struct {
	library *Library
	device  nvml.Device // nil without a handle from NVML
	gpu     topo.NVMLGPU
}

// succeeded reports whether a call succeeded, and records a failure. An unsupported call is no
// failure: drivers and GPUs lack features.
func (a *query) succeeded(call string, result nvml.Return) bool {
	switch result {
	case nvml.SUCCESS:
		return true
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		return false
	case nvml.ERROR_GPU_IS_LOST:
		if a.gpu.Lost {
			return false // reported once
		}
		a.gpu.Lost = true
	}
	a.gpu.Failures = append(a.gpu.Failures, a.library.failed(call, result).Error())
	return false
}

// has reports whether the library has a function that older drivers lack; false for a lost GPU.
func (a *query) has(symbol string) bool { return !a.gpu.Lost && a.library.has(symbol) }

func (a *query) all() {
	device, result := a.library.nvml.DeviceGetHandleByIndex(a.gpu.Index)
	if !a.succeeded("nvmlDeviceGetHandleByIndex", result) {
		return
	}
	a.device = device
	if pci, result := device.GetPciInfo(); a.succeeded("nvmlDeviceGetPciInfo", result) {
		a.gpu.BusID = text(pci.BusId[:])
	}
	// Skip further calls to a lost GPU: the calls would only repeat the failure.
	for _, ask := range []func(){a.names, a.modes, a.links, a.chipToChip} {
		if !a.gpu.Lost {
			ask()
		}
	}
}

// processes lists the GPU's compute processes and graphics processes.
func (a *query) processes() (all []topo.GPUProcess) {
	device, result := a.library.nvml.DeviceGetHandleByIndex(a.gpu.Index)
	if !a.succeeded("nvmlDeviceGetHandleByIndex", result) {
		return nil
	}
	for _, kind := range []struct {
		call     string
		ask      func() ([]nvml.ProcessInfo, nvml.Return)
		graphics bool
	}{
		{"nvmlDeviceGetComputeRunningProcesses", device.GetComputeRunningProcesses, false},
		{"nvmlDeviceGetGraphicsRunningProcesses", device.GetGraphicsRunningProcesses, true},
	} {
		if !a.has(kind.call) {
			continue
		}
		running, result := kind.ask()
		if !a.succeeded(kind.call, result) {
			continue
		}
		for _, p := range running {
			memory := p.UsedGpuMemory
			if memory == notAvailable {
				memory = 0
			}
			all = append(all, topo.GPUProcess{GPU: a.gpu.Index, PID: int(p.Pid), Graphics: kind.graphics, Memory: memory})
		}
	}
	return all
}

// notAvailable is NVML_VALUE_NOT_AVAILABLE, (-1) in nvml.h.
const notAvailable = ^uint64(0)

func (a *query) names() {
	uuid, result := a.device.GetUUID()
	if a.succeeded("nvmlDeviceGetUUID", result) {
		a.gpu.UUID = uuid
	}
	name, result := a.device.GetName()
	if a.succeeded("nvmlDeviceGetName", result) {
		a.gpu.Name = name
	}
	minor, result := a.device.GetMinorNumber()
	if a.succeeded("nvmlDeviceGetMinorNumber", result) { // some systems do not number device nodes
		a.gpu.Minor = minor
	}
	major, minor, result := a.device.GetCudaComputeCapability()
	if a.succeeded("nvmlDeviceGetCudaComputeCapability", result) {
		a.gpu.Capability = 10*major + minor
	}
}

// modes reads the modes that prevent sharing of the GPU.
func (a *query) modes() {
	if a.has("nvmlDeviceGetMigMode") {
		current, _, result := a.device.GetMigMode()
		a.gpu.MIG = a.succeeded("nvmlDeviceGetMigMode", result) && current == nvml.DEVICE_MIG_ENABLE
	}
	if a.has("nvmlDeviceGetComputeMode") {
		mode, result := a.device.GetComputeMode()
		switch {
		case !a.succeeded("nvmlDeviceGetComputeMode", result):
		case mode == nvml.COMPUTEMODE_PROHIBITED:
			a.gpu.ComputeMode = "prohibited"
		case mode == nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, mode == nvml.COMPUTEMODE_EXCLUSIVE_THREAD:
			a.gpu.ComputeMode = "exclusive-process"
		}
	}
	if a.has("nvmlDeviceGetVirtualizationMode") {
		mode, result := a.device.GetVirtualizationMode()
		a.gpu.VGPU = a.succeeded("nvmlDeviceGetVirtualizationMode", result) && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
	}
}

// maxLinks returns the number of NVLinks that NCCL queries, by compute capability.
func maxLinks(capability int) int {
	switch {
	case capability < 60:
		return 0
	case capability < 70:
		return 4
	case capability < 80:
		return 6
	case capability < 90:
		return 12
	}
	return 18
}

// links counts the active NVLinks by peer, as ncclTopoGetXmlFromGpu does.
func (a *query) links() {
	peers := map[string]int{}
	for link := range maxLinks(a.gpu.Capability) {
		if a.gpu.Lost {
			break
		}
		if able, result := a.device.GetNvLinkCapability(link,
			nvml.NVLINK_CAP_P2P_SUPPORTED); !a.linkSucceeded("nvmlDeviceGetNvLinkCapability", link, result) || able == 0 {
			continue
		}
		if !a.active(link) {
			continue
		}
		kind := nvml.IntNvLinkDeviceType(nvml.NVLINK_DEVICE_TYPE_UNKNOWN)
		if a.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
			far, result := a.device.GetNvLinkRemoteDeviceType(link)
			if a.linkSucceeded("nvmlDeviceGetNvLinkRemoteDeviceType", link, result) {
				kind = far
			}
		}
		switch kind {
		case nvml.NVLINK_DEVICE_TYPE_IBMNPU:
			a.gpu.NVLinksCPU++
			continue
		case nvml.NVLINK_DEVICE_TYPE_SWITCH:
			peers[""]++
			continue
		}
		if remote, result := a.device.GetNvLinkRemotePciInfo(link); a.linkSucceeded("nvmlDeviceGetNvLinkRemotePciInfo", link,
			result) {
			peers[text(remote.BusId[:])]++
		}
	}
	a.gpu.NVLinks = peers
}

// linkSucceeded is succeeded for a call about a link. A missing link is no failure.
func (a *query) linkSucceeded(call string, link int, result nvml.Return) bool {
	return result != nvml.ERROR_INVALID_ARGUMENT && a.succeeded(fmt.Sprintf("%s of link %d", call, link), result)
}

// active reports whether a link is up. GPUs of compute capability 9.0 and later report the
// state in a field.
func (a *query) active(link int) bool {
	if a.gpu.Capability < 90 {
		state, result := a.device.GetNvLinkState(link)
		return a.linkSucceeded("nvmlDeviceGetNvLinkState", link, result) && state == nvml.FEATURE_ENABLED
	}
	state, ok := a.field(nvml.FI_DEV_NVLINK_GET_STATE, link)
	return ok && state == uint32(nvml.FEATURE_ENABLED)
}

// chipToChip counts the links to the CPU, on GPUs of compute capability 9.0 and later. Like
// NCCL, chipToChip uses the bandwidth of the last link for every link.
func (a *query) chipToChip() {
	if a.gpu.Capability < 90 {
		return
	}
	count, _ := a.field(nvml.FI_DEV_C2C_LINK_COUNT, 0)
	for link := range int(min(count, maxC2C)) {
		up, ok := a.field(nvml.FI_DEV_C2C_LINK_GET_STATUS, link)
		if !ok || up != 1 {
			continue
		}
		if bandwidth, ok := a.field(nvml.FI_DEV_C2C_LINK_GET_MAX_BW, link); ok {
			a.gpu.C2C++
			a.gpu.C2CBandwidth = int(bandwidth)
		}
	}
}

// maxC2C exceeds the links of any GPU; GPUs with C2C have ten.
const maxC2C = 64

// field reads a field of 32 bits.
func (a *query) field(id, scope int) (value uint32, ok bool) {
	if !a.has("nvmlDeviceGetFieldValues") {
		return 0, false
	}
	values := []nvml.FieldValue{{FieldId: uint32(id), ScopeId: uint32(scope)}}
	call := fmt.Sprintf("nvmlDeviceGetFieldValues(%d)", id)
	if !a.linkSucceeded(call, scope, a.device.GetFieldValues(values)) ||
		!a.linkSucceeded(call, scope, nvml.Return(values[0].NvmlReturn)) {
		return 0, false
	}
	return binary.NativeEndian.Uint32(values[0].Value[:]), true
}

// noP2P reports whether the driver denies access to the memory of every other GPU. Access of
// unknown status counts as allowed.
func (a *query) noP2P(all []query) bool {
	refused := 0
	for i := range all {
		peer := &all[i]
		if peer.gpu.Index == a.gpu.Index || peer.device == nil || peer.gpu.Lost {
			continue
		}
		if a.device == nil || !a.has("nvmlDeviceGetP2PStatus") {
			return false
		}
		denied := false
		for _, way := range []nvml.GpuP2PCapsIndex{nvml.P2P_CAPS_INDEX_READ, nvml.P2P_CAPS_INDEX_WRITE} {
			status, result := a.device.GetP2PStatus(peer.device, way)
			lost := a.gpu.Lost // the call does not identify the lost GPU of the two
			ok := a.succeeded(fmt.Sprintf("nvmlDeviceGetP2PStatus to GPU %d", peer.gpu.Index), result)
			a.gpu.Lost = lost
			denied = denied || ok && status != nvml.P2P_STATUS_OK
		}
		if !denied {
			return false
		}
		refused++
	}
	return refused > 0
}

// has reports whether the library has a function that older drivers lack. Calling a missing
// function would end the process.
func (l *Library) has(symbol string) bool {
	return l.nvml.Extensions().LookupSymbol(symbol) == nil
}

// text converts a C string.
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
