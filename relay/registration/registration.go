// Package registration registers GPU memory with NICs, by the first working method:
//
//  1. DMA-BUF, of memory of cuMemCreate that is GPUDirect RDMA capable;
//  2. nvidia-peermem, which is ibv_reg_mr on the GPU's address, of the same memory, and
//     where that is EFAULT, of memory of cuMemAlloc, of which DMA-BUF is tried first, too;
//  3. none: data goes through host memory (bounce).
//
// The NICs of a lane get the same memory. The result keeps the tried methods with errors, for
// reports.
package registration

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
)

// Way is how a NIC reaches memory.
type Way int

// Methods, the best first.
const (
	DMABuf Way = iota
	Peermem
	Bounce
)

func (w Way) String() string { return [...]string{"DMA-BUF", "nvidia-peermem", "bounce"}[w] }

// Word is the way as PEERLANE_REGISTRATION has it (docs/containers.md).
func (w Way) Word() string { return [...]string{"dmabuf", "peermem", "bounce"}[w] }

// Kind is how memory was allocated.
type Kind int

// Kinds of memory.
const (
	VMM       Kind = iota // cuMemCreate
	Allocated             // cuMemAlloc
)

func (k Kind) String() string { return [...]string{"cuMemCreate", "cuMemAlloc"}[k] }

// Memory is a GPU's, device.Memory.
type Memory interface {
	Address() uintptr
	Size() uint64 // bytes
	// DMABuf makes a descriptor of the whole memory, which the caller closes.
	DMABuf() (int, error)
	// DMABufPCIe makes a DMA-BUF of a mapping over PCIe, for Data Direct.
	DMABufPCIe() (int, error)
	Close() error
}

// Allocator makes memory of a GPU.
type Allocator interface {
	// Make makes memory of a kind, of at least so many bytes.
	Make(kind Kind, bytes uint64) (Memory, error)
	// Capable reports whether the driver permits access of NICs to the memory.
	Capable(Memory) (bool, error)
}

// Domain is a protection domain, verbs.Domain.
type Domain interface {
	Register(memory uintptr, n, iova uint64, access verbs.Access) (*verbs.Region, error)
	RegisterDMABuf(fd int, offset, n, iova uint64, access verbs.Access) (*verbs.Region, error)
	RegisterDataDirect(fd int, offset, n, iova uint64, access verbs.Access) (*verbs.Region, error)
}

// NIC is an RDMA device with a protection domain.
type NIC struct {
	Name   string
	Domain Domain
	// DataDirect tries the NIC's Data Direct function before DMA-BUF over the usual path.
	DataDirect bool
}

// Step is an attempt.
type Step struct {
	nic  string
	Way  Way
	Kind Kind
	Err  error // nil for success
}

func (s Step) String() string {
	if s.Way == Bounce {
		return "through host memory (bounce)"
	}
	what := fmt.Sprintf("%s: %s, memory of %s", s.nic, s.Way, s.Kind)
	if s.Err != nil {
		return what + ": " + s.Err.Error()
	}
	return what
}

// Registered is memory registered with NICs, or the reasons of the failure.
type Registered struct {
	// Memory is nil where the way is Bounce.
	Memory Memory
	Kind   Kind
	// Regions are the NICs', in their order; the regions' addresses are the memory's addresses.
	Regions []*verbs.Region
	// Steps are the attempts, in order.
	Steps []Step
}

// Way is the worst method of the NICs.
func (r *Registered) Way() Way {
	if r.Memory == nil {
		return Bounce
	}
	worst := DMABuf
	for _, s := range r.Steps {
		if s.Err == nil && s.Kind == r.Kind {
			worst = max(worst, s.Way)
		}
	}
	return worst
}

// String describes the attempt.
func (r *Registered) String() string {
	steps := make([]string, len(r.Steps))
	for i, s := range r.Steps {
		steps[i] = s.String()
	}
	return strings.Join(steps, "; ")
}

// Close ends the registrations, and then frees the memory: in this order, because nvidia-peermem is
// not told when memory goes. A registration that does not end keeps the memory.
func (r *Registered) Close() error {
	err := closeAll(r.Regions)
	if err != nil || r.Memory == nil {
		return err
	}
	r.Regions = nil
	return r.Memory.Close()
}

// closeAll ends registrations, and keeps failed registrations in the list, so that no registration
// ends twice.
func closeAll(regions []*verbs.Region) error {
	var err error
	for i, region := range regions {
		if region == nil {
			continue
		}
		if why := region.Close(); why != nil {
			err = errors.Join(err, why)
			continue
		}
		regions[i] = nil
	}
	return err
}

// errNotCapable is the driver's no.
var errNotCapable = errors.New(
	"the CUDA driver lets no NIC have this memory (CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE is 0)",
)

// Make makes memory of at least so many bytes, registered with every NIC. Without an error its way
// may be Bounce; an error means that no memory could be made, or memory could not be freed.
func Make(from Allocator, bytes uint64, nics []NIC, access verbs.Access) (*Registered, error) {
	r := &Registered{}
	for _, kind := range []Kind{VMM, Allocated} {
		memory, err := from.Make(kind, bytes)
		if err != nil {
			if kind == VMM {
				return nil, err
			}
			// The GPU has room, but not for a context of this process, for one.
			r.Steps = append(r.Steps, Step{nic: "all NICs", Way: Peermem, Kind: kind, Err: err})
			break
		}
		regions, another, err := r.try(from, memory, kind, nics, access)
		if err == nil && regions != nil {
			r.Memory, r.Kind, r.Regions = memory, kind, regions
			return r, nil
		}
		if err = errors.Join(err, memory.Close()); err != nil {
			return nil, err
		}
		if !another {
			break
		}
	}
	r.Steps = append(r.Steps, Step{Way: Bounce})
	return r, nil
}

// try registers memory with every NIC, or returns no regions; another says that memory of another
// kind may do.
func (r *Registered) try(
	from Allocator,
	memory Memory,
	kind Kind,
	nics []NIC,
	access verbs.Access,
) (regions []*verbs.Region, another bool, err error) {
	capable, err := from.Capable(memory)
	if err == nil && !capable {
		err = errNotCapable
	}
	if err != nil {
		for _, nic := range nics {
			r.Steps = append(r.Steps, Step{nic: nic.Name, Way: DMABuf, Kind: kind, Err: err})
		}
		return nil, true, nil
	}
	for _, nic := range nics {
		region, steps, why := With(memory, kind, nic, access)
		r.Steps = append(r.Steps, steps...)
		if region == nil {
			return nil, errors.Is(why, syscall.EFAULT), closeAll(regions)
		}
		regions = append(regions, region)
	}
	return regions, false, nil
}

// With registers existing memory with a NIC, by DMA-BUF or else by nvidia-peermem. The steps are
// the attempts, the last of which worked; without a region err is of the last, and EFAULT says that
// memory of another kind may do.
func With(memory Memory, kind Kind, nic NIC, access verbs.Access) (region *verbs.Region, steps []Step, err error) {
	for _, way := range []Way{DMABuf, Peermem} {
		if way == DMABuf {
			region, err = byDMABuf(memory, nic, access)
		} else {
			region, err = nic.Domain.Register(memory.Address(), memory.Size(), uint64(memory.Address()), access)
		}
		steps = append(steps, Step{nic: nic.Name, Way: way, Kind: kind, Err: err})
		if err == nil {
			return region, steps, nil
		}
	}
	return nil, steps, err
}

func byDMABuf(memory Memory, nic NIC, access verbs.Access) (*verbs.Region, error) {
	if !nic.DataDirect {
		return byDescriptor(memory, memory.DMABuf, nic.Domain.RegisterDMABuf, access)
	}
	region, direct := byDescriptor(memory, memory.DMABufPCIe, nic.Domain.RegisterDataDirect, access)
	if direct == nil {
		return region, nil
	}
	region, err := byDescriptor(memory, memory.DMABuf, nic.Domain.RegisterDMABuf, access)
	if err != nil {
		err = errors.Join(fmt.Errorf("by Data Direct: %w", direct), err)
	}
	return region, err
}

func byDescriptor(
	memory Memory,
	export func() (int, error),
	register func(int, uint64, uint64, uint64, verbs.Access) (*verbs.Region, error),
	access verbs.Access,
) (*verbs.Region, error) {
	fd, err := export()
	if err != nil {
		return nil, err
	}
	region, err := register(fd, 0, memory.Size(), uint64(memory.Address()), access)
	// The registration holds the buffer itself.
	if closed := unix.Close(fd); closed != nil && region != nil {
		return nil, errors.Join(closed, region.Close())
	}
	return region, err
}

// Client registers memory of a foreign process with a NIC, only by the owner's descriptor: n bytes
// from offset, under the addresses from iova on.
func Client(fd int, offset, n, iova uint64, nic NIC, access verbs.Access) (*verbs.Region, error) {
	return nic.Domain.RegisterDMABuf(fd, offset, n, iova, access)
}
