package verbs

/*
#include "calls.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"
)

// Transport is the protocol of a device (ibv_transport_type).
type Transport int32

// Transports that Peerlane knows.
const (
	IB    Transport = C.IBV_TRANSPORT_IB    // InfiniBand and RoCE
	IWARP Transport = C.IBV_TRANSPORT_IWARP // over TCP: connected by the connection manager only
)

func (t Transport) String() string {
	switch t {
	case IB:
		return "IB"
	case IWARP:
		return "iWARP"
	}
	return fmt.Sprintf("transport %d", int32(t))
}

// Device is an RDMA device of this host, as ibv_devices lists it.
type Device struct {
	Name      string // "mlx5_0", of /sys/class/infiniband
	Node      string // "uverbs0", of /dev/infiniband
	NodeGUID  uint64
	Transport Transport
}

// Devices lists the devices that a provider of rdma-core knows (ibv_get_device_list). A host
// without devices has an empty list, without error.
func (l *Library) Devices() ([]Device, error) {
	var devices []Device
	err := l.eachDevice(func(d *C.struct_ibv_device) error {
		devices = append(devices, Device{
			Name:      C.GoString(&d.name[0]),
			Node:      C.GoString(&d.dev_name[0]),
			NodeGUID:  uint64(C.peerlane_guid(l.calls, d)),
			Transport: Transport(d.transport_type),
		})
		return nil
	})
	return devices, err
}

func (l *Library) eachDevice(see func(*C.struct_ibv_device) error) error {
	var list **C.struct_ibv_device
	var n C.int
	if r := C.peerlane_devices(l.calls, &list, &n); r != 0 {
		return failed(int32(r), "ibv_get_device_list", "")
	}
	defer C.peerlane_free_devices(l.calls, list)
	for _, d := range unsafe.Slice(list, n) {
		if err := see(d); err != nil {
			return err
		}
	}
	return nil
}

// Context is an opened device.
type Context struct {
	l    *Library
	c    *C.struct_ibv_context
	name string
	// lent: librdmacm has opened the device, and keeps it.
	lent bool
}

// errFound ends a walk over devices.
var errFound = errors.New("found")

// OpenDevice opens the device of that name (ibv_open_device). The error of a missing device is an
// [*Error] with ENODEV.
func (l *Library) OpenDevice(name string) (*Context, error) {
	c := &Context{l: l, name: name}
	err := l.eachDevice(func(d *C.struct_ibv_device) error {
		if C.GoString(&d.name[0]) != name {
			return nil
		}
		if r := C.peerlane_open_device(l.calls, d, &c.c); r != 0 {
			return failed(int32(r), "ibv_open_device", name)
		}
		if r := C.peerlane_unblock(c.c.async_fd); r != 0 {
			return errors.Join(failed(int32(r), "fcntl", "the events of "+name), c.Close())
		}
		return errFound
	})
	switch {
	case err == nil:
		return nil, failed(int32(syscall.ENODEV), "ibv_open_device", name)
	case errors.Is(err, errFound):
		return c, nil
	}
	return nil, err
}

// Name is the device's.
func (c *Context) Name() string { return c.name }

// Close gives the device back (ibv_close_device).
func (c *Context) Close() error {
	if c.lent {
		return nil
	}
	return failed(int32(C.peerlane_close_device(c.l.calls, c.c)), "ibv_close_device", c.name)
}

// Attributes are the properties and limits of a device (ibv_device_attr). Limits are maxima.
type Attributes struct {
	Firmware        string
	NodeGUID        uint64
	SystemImageGUID uint64
	VendorID        uint32 // "0x02c9" is Mellanox, by IEEE OUI
	PartID          uint32
	HardwareVersion uint32
	Ports           int

	RegionBytes   uint64 // of one region
	Regions       int
	Domains       int
	Pairs         int
	PairRequests  int // posted to one queue of a pair
	Segments      int // of one request; Peerlane uses one
	ReadSegments  int
	Queues        int
	QueueEntries  int
	PairReads     int    // outstanding reads that a pair answers
	InitiateReads int    // outstanding reads that a pair asks for
	Flags         uint32 // ibv_device_cap_flags
}

// Attributes asks the device (ibv_query_device).
func (c *Context) Attributes() (Attributes, error) {
	var a C.struct_ibv_device_attr
	if r := C.peerlane_query_device(c.l.calls, c.c, &a); r != 0 {
		return Attributes{}, failed(int32(r), "ibv_query_device", c.name)
	}
	return Attributes{
		Firmware:        C.GoString(&a.fw_ver[0]),
		NodeGUID:        uint64(a.node_guid),
		SystemImageGUID: uint64(a.sys_image_guid),
		VendorID:        uint32(a.vendor_id),
		PartID:          uint32(a.vendor_part_id),
		HardwareVersion: uint32(a.hw_ver),
		Ports:           int(a.phys_port_cnt),
		RegionBytes:     uint64(a.max_mr_size),
		Regions:         int(a.max_mr),
		Domains:         int(a.max_pd),
		Pairs:           int(a.max_qp),
		PairRequests:    int(a.max_qp_wr),
		Segments:        int(a.max_sge),
		ReadSegments:    int(a.max_sge_rd),
		Queues:          int(a.max_cq),
		QueueEntries:    int(a.max_cqe),
		PairReads:       int(a.max_qp_rd_atom),
		InitiateReads:   int(a.max_qp_init_rd_atom),
		Flags:           uint32(a.device_cap_flags),
	}, nil
}
