package device

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
)

// Stores are writes by the CPU into GPU memory that is mapped through the GPU's BAR1
// ([cuda.Aperture]). The driver is not involved: a kernel sees the bytes after 1 µs, beside any
// other kernel.

// storesVariable is the environment variable whose value 0 keeps a relay from stores.
const storesVariable = "PEERLANE_STORES"

// maxStore, bytes, is the largest write by stores. The event loop makes it: 0.3 to 0.5 µs.
const maxStore = 4 << 10

// apertureShare is a relay's maximum part of BAR1. The processes of a host share BAR1, which has
// 256 MiB or more.
const apertureShare = 64

// maxMapped, bytes, is the largest memory that is mapped for stores.
const maxMapped = 32 << 20

// aperturePage is the alignment of mappings.
const aperturePage = 4 << 10

// stores is memory that is mapped for stores.
type stores struct {
	device *Device
	mapped *cuda.Mapped
	at     uint64 // of the memory
}

// OpenStores opens the GPU's aperture. With verify the call compares bytes stored by the CPU with
// bytes read by a copy engine. Without the aperture, writes use the driver's calls; the error is
// the reason.
func (g *Device) OpenStores(verify bool) error {
	g.writes.MaxStores, g.writes.NoStores = 0, ""
	err := g.openStores(verify)
	if err != nil {
		g.writes.NoStores = err.Error()
		return err
	}
	g.writes.MaxStores = maxStore
	return nil
}

func (g *Device) openStores(verify bool) error {
	if os.Getenv(storesVariable) == "0" {
		return errors.New(storesVariable + " is 0")
	}
	if !hasFence {
		return fmt.Errorf("no stores on %s", runtime.GOARCH)
	}
	ordering, err := g.Driver.DeviceAttribute(g.Ordinal, cuda.AttributeRDMAWritesOrdering)
	if err != nil {
		return err
	}
	// Writes that arrive over PCIe are visible to the GPU's own kernels from "owner" (100) on.
	// Below that a read has to follow them.
	g.readsBack = ordering < 100
	if g.aperture, err = g.Driver.OpenAperture(g.BusID); err != nil || !verify {
		return err
	}
	memory, err := g.storable(maxStore * 4)
	if err == nil {
		err = errors.Join(g.On(func() error { return g.testStores(memory) }), memory.Close())
	}
	if err != nil {
		g.aperture.Close()
		g.aperture = nil
	}
	return err
}

// storable makes memory that is mapped for stores.
func (g *Device) storable(bytes uint64) (*Memory, error) {
	memory, err := Create(g.Driver, g.Ordinal, bytes, cuda.Access{Device: g.Ordinal, Write: true})
	if err != nil {
		return nil, err
	}
	fd, err := memory.Export()
	if err == nil {
		err = errors.Join(memory.MapStores(g, fd, 0, bytes), os.NewSyscallError("close", unix.Close(fd)))
	}
	if err != nil {
		return nil, errors.Join(err, memory.Close())
	}
	return memory, nil
}

// testStores stores bytes at odd and even addresses, and compares them by a copy.
func (g *Device) testStores(memory *Memory) error {
	pattern := make([]byte, maxStore)
	for i := range pattern {
		pattern[i] = byte(i*7 + i/251 + 1)
	}
	const copied = 2 * maxStore
	d := g.Driver
	host, err := d.MemHostAlloc(copied)
	if err != nil {
		return err
	}
	got := unsafe.Slice((*byte)(host), copied)
	stream, err := d.StreamCreate()
	if err != nil {
		return errors.Join(err, d.MemHostFree(host))
	}
	for _, offset := range []uint64{0, 8, 5} {
		if err = store(memory.At(offset).stores, pattern, true); err != nil {
			break
		}
		if err = d.MemcpyDtoHAsync(host, memory.Ptr, copied, stream); err == nil {
			err = d.StreamSynchronize(stream)
		}
		if err != nil {
			break
		}
		if !bytes.Equal(got[offset:offset+maxStore], pattern) {
			err = errors.New("a copy engine read other bytes than the CPU had stored")
			break
		}
	}
	return errors.Join(err, d.StreamDestroy(stream), d.MemHostFree(host))
}

// OpenLoads opens the GPU's aperture for [Device.Load].
func (g *Device) OpenLoads() (err error) {
	if g.aperture, err = g.Driver.OpenAperture(g.BusID); err != nil {
		g.writes.NoStores = err.Error()
	}
	return err
}

// MapLoads maps a memory of a single allocation for the CPU's loads. fd is the allocation's
// descriptor, and stays the caller's.
func (m *Memory) MapLoads(g *Device, fd int) error { return m.mapAperture(g, fd, 0, m.Bytes, m.Bytes) }

// MapStores maps length bytes of a memory of a single allocation for the CPU's stores. fd is the
// allocation's descriptor, and stays the caller's.
func (m *Memory) MapStores(g *Device, fd int, offset, length uint64) error {
	return m.mapAperture(g, fd, offset, length, maxMapped)
}

func (m *Memory) mapAperture(g *Device, fd int, offset, length, most uint64) error {
	at := offset / aperturePage * aperturePage
	n := (offset+length+aperturePage-1)/aperturePage*aperturePage - at
	switch {
	case g.aperture == nil:
		return errors.New(g.writes.NoStores)
	case len(m.parts) != 1 || m.On != g.Ordinal || length == 0 || at+n > m.Bytes || m.stores != nil:
		return errors.New("not one allocation of this GPU")
	case n > most:
		return fmt.Errorf("%d bytes are more than %d", n, most)
	}
	limit := g.aperture.Size() / apertureShare
	if g.mapped.Add(n) > limit {
		g.mapped.Add(-n)
		return fmt.Errorf("%d bytes of BAR1 are mapped, the limit is %d", g.mapped.Load(), limit)
	}
	mapped, err := g.aperture.Map(fd, at, n)
	if err != nil {
		g.mapped.Add(-n)
		return err
	}
	m.stores = &stores{g, mapped, at}
	return nil
}

func (s *stores) close() error {
	s.device.mapped.Add(-uint64(len(s.mapped.Bytes)))
	return s.device.aperture.Unmap(s.mapped)
}

// from returns the mapping from an offset of the memory on, nil without a mapping.
func (s *stores) from(offset uint64) []byte {
	if s == nil || offset < s.at || offset-s.at >= uint64(len(s.mapped.Bytes)) {
		return nil
	}
	return s.mapped.Bytes[offset-s.at:]
}

// Store writes bytes of the host into the device's memory by the CPU's stores. The bytes have
// arrived at the return. It reports false where it cannot.
func (g *Device) Store(to Place, from []byte) (bool, error) {
	if len(from) == 0 || len(from) > len(to.stores) || uint64(len(from)) > g.writes.MaxStores {
		return false, nil
	}
	return true, store(to.stores, from, g.readsBack)
}

// Load reads bytes of the device's memory by the CPU: 1 µs for a word. The result is false if the
// memory is not mapped. An access to a GPU that was reset or removed faults: that is the error.
func Load(from Place, to []byte) (loaded bool, err error) {
	if len(to) > len(from.stores) {
		return false, nil
	}
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		if fault := recover(); fault != nil {
			err = fmt.Errorf("reading GPU memory: %v", fault)
		}
	}()
	for i := range to {
		to[i] = read(&from.stores[i])
	}
	return true, nil
}

// store writes aligned words in single stores, and the bytes before and after the words. An access
// to a GPU that was reset or removed faults: that is the error.
func store(to, from []byte, readBack bool) (err error) {
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		if fault := recover(); fault != nil {
			err = fmt.Errorf("storing into GPU memory: %v", fault)
		}
	}()
	last := &to[len(from)-1]
	for len(from) > 0 && uintptr(unsafe.Pointer(&to[0]))%wordBytes != 0 {
		to[0] = from[0]
		to, from = to[1:], from[1:]
	}
	for ; len(from) >= wordBytes; to, from = to[wordBytes:], from[wordBytes:] {
		*(*uint64)(unsafe.Pointer(&to[0])) = binary.NativeEndian.Uint64(from)
	}
	copy(to, from)
	fence()
	if readBack {
		read(last)
	}
	return nil
}

// read reads a byte, which the compiler may not leave out.
//
//go:noinline
func read(p *byte) byte { return *p }
