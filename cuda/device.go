package cuda

/*
#include <stdlib.h>
#include "driver.h"

#cgo noescape call_cuDeviceGetCount
#cgo nocallback call_cuDeviceGetCount
#cgo noescape call_cuDeviceGet
#cgo nocallback call_cuDeviceGet
#cgo noescape call_cuDeviceGetByPCIBusId
#cgo nocallback call_cuDeviceGetByPCIBusId
#cgo noescape call_cuDeviceGetPCIBusId
#cgo nocallback call_cuDeviceGetPCIBusId
#cgo noescape call_cuDeviceGetName
#cgo nocallback call_cuDeviceGetName
#cgo noescape call_cuDeviceGetUuid
#cgo nocallback call_cuDeviceGetUuid
#cgo noescape call_cuDeviceTotalMem
#cgo nocallback call_cuDeviceTotalMem
#cgo noescape call_cuDeviceGetAttribute
#cgo nocallback call_cuDeviceGetAttribute
#cgo noescape call_cuDeviceCanAccessPeer
#cgo nocallback call_cuDeviceCanAccessPeer
*/
import "C"

import (
	"fmt"
	"strings"
	"unsafe"
)

// Device is a CUdevice: the ordinal among the devices that this process sees. CUDA_VISIBLE_DEVICES
// renumbers devices, so processes name a device to each other by UUID or PCI address.
type Device int32

// Attribute is a CUdevice_attribute.
type Attribute int32

// Attributes that Peerlane reads (CUdevice_attribute_enum of cuda.h).
const (
	AttributeMultiprocessors          Attribute = 16 // number of SMs
	AttributeComputeMode              Attribute = 20 // 0 default, 2 prohibited, 3 exclusive process
	AttributeThreadsPerMultiprocessor Attribute = 39
	AttributeAsyncEngines             Attribute = 40 // number of copy engines
	AttributeUnifiedAddressing        Attribute = 41
	AttributeComputeCapabilityMajor   Attribute = 75
	AttributeComputeCapabilityMinor   Attribute = 76
	AttributeVMM                      Attribute = 102 // cuMemCreate and related calls
	AttributePosixFD                  Attribute = 103 // export as a file descriptor
	AttributeRDMAWithVMM              Attribute = 110 // supports MemOptions.RDMA
	AttributeRDMA                     Attribute = 116
	AttributeRDMAFlush                Attribute = 117 // CUflushGPUDirectRDMAWritesOptions
	// 0: no order, 100: order for the owner, 200: order for every device
	AttributeRDMAWritesOrdering Attribute = 118
	AttributeStreamMemOps64     Attribute = 122 // cuStreamWaitValue64
	AttributeDMABuf             Attribute = 124 // supports MemDMABufFD
)

// DeviceCount returns the number of devices that this process sees.
func (d *Driver) DeviceCount() (int, error) {
	var n C.int
	if r := C.call_cuDeviceGetCount(d.calls, &n); r != 0 {
		return 0, d.newCallError(r, "cuDeviceGetCount", "")
	}
	return int(n), nil
}

// DeviceGet returns the device of an ordinal, or [ErrInvalidDevice].
func (d *Driver) DeviceGet(ordinal int) (Device, error) {
	var dev C.CUdevice
	if r := C.call_cuDeviceGet(d.calls, &dev, C.int(ordinal)); r != 0 {
		return 0, d.newCallError(r, "cuDeviceGet", fmt.Sprintf("ordinal %d", ordinal))
	}
	return Device(dev), nil
}

// DeviceByPCIBusID returns the device at a PCI address, "0000:17:00.0" or "17:00.0". The error is
// [ErrInvalidDevice] if this process sees no device at the address.
func (d *Driver) DeviceByPCIBusID(id string) (Device, error) {
	s := C.CString(id)
	defer C.free(unsafe.Pointer(s))
	var dev C.CUdevice
	if r := C.call_cuDeviceGetByPCIBusId(d.calls, &dev, s); r != 0 {
		return 0, d.newCallError(r, "cuDeviceGetByPCIBusId", id)
	}
	return Device(dev), nil
}

// DeviceName returns the model, "NVIDIA H200".
func (d *Driver) DeviceName(dev Device) (string, error) {
	var name [256]C.char
	if r := C.call_cuDeviceGetName(d.calls, &name[0], C.int(len(name)), C.CUdevice(dev)); r != 0 {
		return "", d.newCallError(r, "cuDeviceGetName", on(dev))
	}
	return C.GoString(&name[0]), nil
}

// DeviceUUID returns NVML's name of the device, "GPU-8-4-4-4-12" hexadecimal digits.
func (d *Driver) DeviceUUID(dev Device) (string, error) {
	var id C.CUuuid
	if r := C.call_cuDeviceGetUuid(d.calls, &id, C.CUdevice(dev)); r != 0 {
		return "", d.newCallError(r, "cuDeviceGetUuid", on(dev))
	}
	b := *(*[16]byte)(unsafe.Pointer(&id))
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16]), nil
}

// DevicePCIBusID returns the PCI address, lower case: "0000:17:00.0".
func (d *Driver) DevicePCIBusID(dev Device) (string, error) {
	var id [32]C.char
	if r := C.call_cuDeviceGetPCIBusId(d.calls, &id[0], C.int(len(id)), C.CUdevice(dev)); r != 0 {
		return "", d.newCallError(r, "cuDeviceGetPCIBusId", on(dev))
	}
	return strings.ToLower(C.GoString(&id[0])), nil
}

// DeviceTotalMem returns the device's memory in bytes.
func (d *Driver) DeviceTotalMem(dev Device) (uint64, error) {
	var n C.size_t
	if r := C.call_cuDeviceTotalMem(d.calls, &n, C.CUdevice(dev)); r != 0 {
		return 0, d.newCallError(r, "cuDeviceTotalMem", on(dev))
	}
	return uint64(n), nil
}

// DeviceAttribute returns the value of an attribute.
func (d *Driver) DeviceAttribute(dev Device, a Attribute) (int, error) {
	var v C.int
	if r := C.call_cuDeviceGetAttribute(d.calls, &v, C.int(a), C.CUdevice(dev)); r != 0 {
		return 0, d.newCallError(r, "cuDeviceGetAttribute", fmt.Sprintf("attribute %d of %s", a, on(dev)))
	}
	return int(v), nil
}

// DeviceCanAccessPeer reports whether dev can address peer's memory, over
// NVLink or PCIe. A device is no peer of itself.
func (d *Driver) DeviceCanAccessPeer(dev, peer Device) (bool, error) {
	var accessible C.int
	if r := C.call_cuDeviceCanAccessPeer(d.calls, &accessible, C.CUdevice(dev), C.CUdevice(peer)); r != 0 {
		return false, d.newCallError(r, "cuDeviceCanAccessPeer", fmt.Sprintf("devices %d and %d", dev, peer))
	}
	return accessible != 0, nil
}

func on(dev Device) string { return fmt.Sprintf("device %d", dev) }
