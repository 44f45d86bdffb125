package verbs

/*
#include "calls.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"syscall"
)

// Access is the permitted access to registered memory (ibv_access_flags). The NIC may always read
// the memory for local writes and sends.
type Access uint32

// Access flags. RemoteWrite needs LocalWrite. RelaxedOrdering is a request, which providers without
// support ignore; not for polled memory.
const (
	LocalWrite      Access = C.IBV_ACCESS_LOCAL_WRITE // by receives and reads
	RemoteWrite     Access = C.IBV_ACCESS_REMOTE_WRITE
	RemoteRead      Access = C.IBV_ACCESS_REMOTE_READ
	RelaxedOrdering Access = C.IBV_ACCESS_RELAXED_ORDERING
)

// Domain is a protection domain: pairs reach the regions of theirs alone.
type Domain struct {
	c  *Context
	pd *C.struct_ibv_pd
}

// NewDomain makes a domain (ibv_alloc_pd).
func (c *Context) NewDomain() (*Domain, error) {
	d := &Domain{c: c}
	if r := C.peerlane_alloc_pd(c.l.calls, c.c, &d.pd); r != 0 {
		return nil, failed(int32(r), "ibv_alloc_pd", c.name)
	}
	return d, nil
}

// context is the device that it was made on.
func (d *Domain) context() *Context { return d.c }

// Close destroys the domain (ibv_dealloc_pd): EBUSY while the domain has regions or pairs.
func (d *Domain) Close() error {
	return failed(int32(C.peerlane_dealloc_pd(d.c.l.calls, d.pd)), "ibv_dealloc_pd", d.c.name)
}

// Region is registered memory: the NIC accesses the memory until Close.
type Region struct {
	c  *Context
	mr *C.struct_ibv_mr
}

// Register registers n bytes of this process's memory, or of a GPU's where
// nvidia-peermem is loaded, under the addresses from iova on, which is mostly the
// memory's own address (ibv_reg_mr, ibv_reg_mr_iova2). The error is an [*Error].
func (d *Domain) Register(memory uintptr, n, iova uint64, access Access) (*Region, error) {
	m := &Region{c: d.c}
	r := C.peerlane_reg_mr(d.c.l.calls, d.pd, C.uintptr_t(memory), C.size_t(n), C.uint64_t(iova), C.uint(access), &m.mr)
	if r != 0 {
		return nil, failed(int32(r), "ibv_reg_mr", fmt.Sprintf("%s, %d bytes at %#x", d.c.name, n, memory))
	}
	return m, nil
}

// RegisterDMABuf registers n bytes from offset of a DMA-BUF, under the addresses from iova on. The
// caller keeps the descriptor, and may close it at once (ibv_reg_dmabuf_mr). The error is an
// [*Error]: EOPNOTSUPP also where libibverbs is older than the call.
func (d *Domain) RegisterDMABuf(fd int, offset, n, iova uint64, access Access) (*Region, error) {
	m := &Region{c: d.c}
	r := C.peerlane_reg_dmabuf_mr(
		d.c.l.calls,
		d.pd,
		C.uint64_t(offset),
		C.size_t(n),
		C.uint64_t(iova),
		C.int(fd),
		C.uint(access),
		&m.mr,
	)
	if r != 0 {
		return nil, failed(
			int32(r),
			"ibv_reg_dmabuf_mr",
			fmt.Sprintf("%s, %d bytes from %d of descriptor %d", d.c.name, n, offset, fd),
		)
	}
	return m, nil
}

// RegisterDataDirect is RegisterDMABuf by the device's Data Direct function, for a descriptor of a
// mapping over PCIe (mlx5dv_reg_dmabuf_mr with MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT).
func (d *Domain) RegisterDataDirect(fd int, offset, n, iova uint64, access Access) (*Region, error) {
	m := &Region{c: d.c}
	r := C.peerlane_reg_data_direct(
		d.c.l.calls,
		d.pd,
		C.uint64_t(offset),
		C.size_t(n),
		C.uint64_t(iova),
		C.int(fd),
		C.uint(access),
		&m.mr,
	)
	if r != 0 {
		return nil, failed(
			int32(r),
			"mlx5dv_reg_dmabuf_mr",
			fmt.Sprintf("%s, %d bytes from %d of descriptor %d", d.c.name, n, offset, fd),
		)
	}
	return m, nil
}

// DataDirect reports whether the device reaches GPUs by a separate PCIe function
// (mlx5dv_get_data_direct_sysfs_path).
func (c *Context) DataDirect() bool { return C.peerlane_data_direct(c.l.calls, c.c) != 0 }

// LKey is the key for local requests, RKey the key for remote requests.
func (r *Region) LKey() uint32 { return uint32(r.mr.lkey) }

// RKey is the key for the other side's requests.
func (r *Region) RKey() uint32 { return uint32(r.mr.rkey) }

// Close ends the registration: nothing of the NIC touches the memory any more
// (ibv_dereg_mr).
func (r *Region) Close() error {
	return failed(int32(C.peerlane_dereg_mr(r.c.l.calls, r.mr)), "ibv_dereg_mr", r.c.name)
}

// Support is the answer of a probe.
type Support uint8

// Answers of probes.
const (
	Unknown Support = iota // could not tell
	Yes
	No
)

func (s Support) String() string {
	return [...]string{"could not tell", "yes", "no"}[s]
}

// DMABuf reports whether the device registers DMA-BUF descriptors, with the error of the probe: the
// probe registers descriptor -1, which a driver with the call refuses with EBADF, and a driver
// without the call with EOPNOTSUPP or EPROTONOSUPPORT.
func (c *Context) DMABuf() (Support, error) {
	d, err := c.NewDomain()
	if err != nil {
		return Unknown, err
	}
	region, err := d.RegisterDMABuf(-1, 0, 0, 0, 0)
	if err == nil {
		return Unknown, errors.Join(errors.New("ibv_reg_dmabuf_mr took descriptor -1"), region.Close(), d.Close())
	}
	if closed := d.Close(); closed != nil {
		return Unknown, closed
	}
	switch {
	case errors.Is(err, syscall.EBADF):
		return Yes, err
	case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.EPROTONOSUPPORT):
		return No, err
	}
	return Unknown, err
}
