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
			q := query{library: l, gpu: topo.NVMLGPU{Index: i}}
			processes = append(processes, q.processes()...)
			if len(q.gpu.Failures) > 0 {
				silent = append(silent, &gpuError{i, q.gpu.Failures})
			}
		}
	})
	return processes, errors.Join(append(silent, err)...)
}

// gpuError is the error of a GPU for which calls failed.
type gpuError struct {
	index    int
	failures []string // as in NVMLGPU.Failures
}

func (e *gpuError) Error() string {
	return fmt.Sprintf("GPU %d: %s", e.index, strings.Join(e.failures, ", "))
}

// while opens the library, calls do with the number of GPUs, and closes the library.
func (l *Library) while(do func(count int)) (err error) {
	switch result := l.nvml.Init(); result {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return errNoLibrary
	default:
		return l.newCallError("nvmlInit", result)
	}
	defer func() {
		if result := l.nvml.Shutdown(); result != nvml.SUCCESS {
			err = errors.Join(err, l.newCallError("nvmlShutdown", result))
		}
	}()
	count, result := l.nvml.DeviceGetCount()
	if result != nvml.SUCCESS {
		return l.newCallError("nvmlDeviceGetCount", result)
	}
	do(count)
	return nil
}

func (l *Library) newCallError(call string, result nvml.Return) error {
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
func (q *query) succeeded(call string, result nvml.Return) bool {
	switch result {
	case nvml.SUCCESS:
		return true
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		return false
	case nvml.ERROR_GPU_IS_LOST:
		if q.gpu.Lost {
			return false // reported once
		}
		q.gpu.Lost = true
	}
	q.gpu.Failures = append(q.gpu.Failures, q.library.newCallError(call, result).Error())
	return false
}

// supports reports whether the library has a function that older drivers lack; false for a lost GPU.
func (q *query) supports(symbol string) bool { return !q.gpu.Lost && q.library.supports(symbol) }

func (q *query) all() {
	device, result := q.library.nvml.DeviceGetHandleByIndex(q.gpu.Index)
	if !q.succeeded("nvmlDeviceGetHandleByIndex", result) {
		return
	}
	q.device = device
	if pci, result := device.GetPciInfo(); q.succeeded("nvmlDeviceGetPciInfo", result) {
		q.gpu.BusID = text(pci.BusId[:])
	}
	// Skip further calls to a lost GPU: the calls would only repeat the failure.
	for _, ask := range []func(){q.names, q.modes, q.links, q.chipToChip} {
		if !q.gpu.Lost {
			ask()
		}
	}
}

// processes lists the GPU's compute processes and graphics processes.
func (q *query) processes() (all []topo.GPUProcess) {
	device, result := q.library.nvml.DeviceGetHandleByIndex(q.gpu.Index)
	if !q.succeeded("nvmlDeviceGetHandleByIndex", result) {
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
		if !q.supports(kind.call) {
			continue
		}
		running, result := kind.ask()
		if !q.succeeded(kind.call, result) {
			continue
		}
		for _, p := range running {
			memory := p.UsedGpuMemory
			if memory == notAvailable {
				memory = 0
			}
			all = append(all, topo.GPUProcess{GPU: q.gpu.Index, PID: int(p.Pid), Graphics: kind.graphics, Memory: memory})
		}
	}
	return all
}

// notAvailable is NVML_VALUE_NOT_AVAILABLE, (-1) in nvml.h.
const notAvailable = ^uint64(0)

func (q *query) names() {
	uuid, result := q.device.GetUUID()
	if q.succeeded("nvmlDeviceGetUUID", result) {
		q.gpu.UUID = uuid
	}
	name, result := q.device.GetName()
	if q.succeeded("nvmlDeviceGetName", result) {
		q.gpu.Name = name
	}
	minor, result := q.device.GetMinorNumber()
	if q.succeeded("nvmlDeviceGetMinorNumber", result) { // some systems do not number device nodes
		q.gpu.Minor = minor
	}
	major, minor, result := q.device.GetCudaComputeCapability()
	if q.succeeded("nvmlDeviceGetCudaComputeCapability", result) {
		q.gpu.Capability = 10*major + minor
	}
}

// modes reads the modes that prevent sharing of the GPU.
func (q *query) modes() {
	if q.supports("nvmlDeviceGetMigMode") {
		current, _, result := q.device.GetMigMode()
		q.gpu.MIG = q.succeeded("nvmlDeviceGetMigMode", result) && current == nvml.DEVICE_MIG_ENABLE
	}
	if q.supports("nvmlDeviceGetComputeMode") {
		mode, result := q.device.GetComputeMode()
		switch {
		case !q.succeeded("nvmlDeviceGetComputeMode", result):
		case mode == nvml.COMPUTEMODE_PROHIBITED:
			q.gpu.ComputeMode = "prohibited"
		case mode == nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, mode == nvml.COMPUTEMODE_EXCLUSIVE_THREAD:
			q.gpu.ComputeMode = "exclusive-process"
		}
	}
	if q.supports("nvmlDeviceGetVirtualizationMode") {
		mode, result := q.device.GetVirtualizationMode()
		q.gpu.VGPU = q.succeeded("nvmlDeviceGetVirtualizationMode", result) && mode == nvml.GPU_VIRTUALIZATION_MODE_VGPU
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
func (q *query) links() {
	peers := map[string]int{}
	for link := range maxLinks(q.gpu.Capability) {
		if q.gpu.Lost {
			break
		}
		if able, result := q.device.GetNvLinkCapability(link,
			nvml.NVLINK_CAP_P2P_SUPPORTED); !q.linkSucceeded("nvmlDeviceGetNvLinkCapability", link, result) || able == 0 {
			continue
		}
		if !q.active(link) {
			continue
		}
		kind := nvml.IntNvLinkDeviceType(nvml.NVLINK_DEVICE_TYPE_UNKNOWN)
		if q.supports("nvmlDeviceGetNvLinkRemoteDeviceType") {
			far, result := q.device.GetNvLinkRemoteDeviceType(link)
			if q.linkSucceeded("nvmlDeviceGetNvLinkRemoteDeviceType", link, result) {
				kind = far
			}
		}
		switch kind {
		case nvml.NVLINK_DEVICE_TYPE_IBMNPU:
			q.gpu.NVLinksCPU++
			continue
		case nvml.NVLINK_DEVICE_TYPE_SWITCH:
			peers[""]++
			continue
		}
		if remote, result := q.device.GetNvLinkRemotePciInfo(link); q.linkSucceeded("nvmlDeviceGetNvLinkRemotePciInfo", link,
			result) {
			peers[text(remote.BusId[:])]++
		}
	}
	q.gpu.NVLinks = peers
}

// linkSucceeded is succeeded for a call about a link. A missing link is no failure.
func (q *query) linkSucceeded(call string, link int, result nvml.Return) bool {
	return result != nvml.ERROR_INVALID_ARGUMENT && q.succeeded(fmt.Sprintf("%s of link %d", call, link), result)
}

// active reports whether a link is up. GPUs of compute capability 9.0 and later report the
// state in a field.
func (q *query) active(link int) bool {
	if q.gpu.Capability < 90 {
		state, result := q.device.GetNvLinkState(link)
		return q.linkSucceeded("nvmlDeviceGetNvLinkState", link, result) && state == nvml.FEATURE_ENABLED
	}
	state, _ := q.field(nvml.FI_DEV_NVLINK_GET_STATE, link)
	return state == uint32(nvml.FEATURE_ENABLED)
}

// chipToChip counts the links to the CPU, on GPUs of compute capability 9.0 and later. Like
// NCCL, chipToChip uses the bandwidth of the last link for every link.
func (q *query) chipToChip() {
	if q.gpu.Capability < 90 {
		return
	}
	count, _ := q.field(nvml.FI_DEV_C2C_LINK_COUNT, 0)
	for link := range int(min(count, maxC2C)) {
		if up, _ := q.field(nvml.FI_DEV_C2C_LINK_GET_STATUS, link); up != 1 {
			continue
		}
		if bandwidth, ok := q.field(nvml.FI_DEV_C2C_LINK_GET_MAX_BW, link); ok {
			q.gpu.C2C++
			q.gpu.C2CBandwidth = int(bandwidth)
		}
	}
}

// maxC2C exceeds the links of any GPU; GPUs with C2C have ten.
const maxC2C = 64

// field reads a field of 32 bits; 0 without an answer.
func (q *query) field(id, scope int) (value uint32, ok bool) {
	if !q.supports("nvmlDeviceGetFieldValues") {
		return 0, false
	}
	values := []nvml.FieldValue{{FieldId: uint32(id), ScopeId: uint32(scope)}}
	call := fmt.Sprintf("nvmlDeviceGetFieldValues(%d)", id)
	if !q.linkSucceeded(call, scope, q.device.GetFieldValues(values)) ||
		!q.linkSucceeded(call, scope, nvml.Return(values[0].NvmlReturn)) {
		return 0, false
	}
	return binary.NativeEndian.Uint32(values[0].Value[:]), true
}

// noP2P reports whether the driver denies access to the memory of every other GPU. Access of
// unknown status counts as allowed.
func (q *query) noP2P(all []query) bool {
	refused := 0
	for i := range all {
		peer := &all[i]
		if peer.gpu.Index == q.gpu.Index || peer.device == nil || peer.gpu.Lost {
			continue
		}
		if q.device == nil || !q.supports("nvmlDeviceGetP2PStatus") {
			return false
		}
		denied := false
		for _, index := range []nvml.GpuP2PCapsIndex{nvml.P2P_CAPS_INDEX_READ, nvml.P2P_CAPS_INDEX_WRITE} {
			status, result := q.device.GetP2PStatus(peer.device, index)
			lost := q.gpu.Lost // the call does not identify the lost GPU of the two
			ok := q.succeeded(fmt.Sprintf("nvmlDeviceGetP2PStatus to GPU %d", peer.gpu.Index), result)
			q.gpu.Lost = lost
			denied = denied || ok && status != nvml.P2P_STATUS_OK
		}
		if !denied {
			return false
		}
		refused++
	}
	return refused > 0
}

// supports reports whether the library has a function that older drivers lack. Calling a missing
// function would end the process.
func (l *Library) supports(symbol string) bool {
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
