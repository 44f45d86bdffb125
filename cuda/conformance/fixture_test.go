package conformance

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
)

const mib = 1 << 20

// open exceeds every value that these tests wait for, also in the cyclic order of
// StreamWaitValue64.
const open = 1 << 62

// mapping is device memory with an address.
type mapping struct {
	d      *cuda.Driver
	p      cuda.Ptr
	size   uint64
	handle cuda.MemHandle
}

// allocate makes device memory that the devices in access may use.
func allocate(d *cuda.Driver, dev cuda.Device, size uint64, o cuda.MemOptions, access ...cuda.Device) (*mapping,
	error) {
	h, err := d.MemCreate(dev, size, o)
	if err != nil {
		return nil, err
	}
	return mapHandle(d, h, size, access...)
}

// adopt imports and maps the memory of a descriptor, and closes the descriptor.
func adopt(d *cuda.Driver, fd int, size uint64, access ...cuda.Device) (*mapping, error) {
	h, err := d.MemImportFD(fd)
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return nil, err
	}
	return mapHandle(d, h, size, access...)
}

func mapHandle(d *cuda.Driver, h cuda.MemHandle, size uint64, access ...cuda.Device) (*mapping, error) {
	p, err := d.MemAddressReserve(size, 0)
	if err != nil {
		return nil, err
	}
	if err := d.MemMap(p, size, 0, h); err != nil {
		return nil, err
	}
	for _, dev := range access {
		if err := d.MemSetAccess(p, size, cuda.Access{Device: dev, Write: true}); err != nil {
			return nil, err
		}
	}
	return &mapping{d, p, size, h}, nil
}

func (m *mapping) free() error {
	return errors.Join(m.d.MemUnmap(m.p, m.size), m.d.MemAddressFree(m.p, m.size), m.d.MemRelease(m.handle))
}

// deviceMemory calls allocate and frees the memory at the test's end.
func deviceMemory(t testing.TB, dev cuda.Device, size uint64, access ...cuda.Device) *mapping {
	t.Helper()
	m, err := allocate(driver, dev, size, cuda.MemOptions{Exportable: true}, access...)
	check(t, err)
	t.Cleanup(func() { check(t, m.free()) })
	return m
}

// pinned returns host memory for asynchronous copies.
func pinned(t testing.TB, size uint64) []byte {
	t.Helper()
	p, err := driver.MemHostAlloc(size)
	check(t, err)
	t.Cleanup(func() { check(t, driver.MemHostFree(p)) })
	return unsafe.Slice((*byte)(p), size)
}

// page is host memory that processes share and that is registered with CUDA: words that streams and
// CPUs write and wait for.
type page struct {
	d     *cuda.Driver
	bytes []byte
	p     cuda.Ptr
}

func sharedPage(d *cuda.Driver, fd int) (*page, error) {
	b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map a shared page: %w", err)
	}
	if err := d.MemHostRegister(unsafe.Pointer(&b[0]), 4096); err != nil {
		return nil, err
	}
	p, err := d.MemHostDevicePtr(unsafe.Pointer(&b[0]))
	return &page{d, b, p}, err
}

// newPage returns a page and its descriptor. At the test's end every gate in the page opens first,
// or gated work would wait forever.
func newPage(t testing.TB) (*page, int) {
	t.Helper()
	fd, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC)
	check(t, err)
	t.Cleanup(func() { check(t, unix.Close(fd)) })
	check(t, unix.Ftruncate(fd, 4096))
	p, err := sharedPage(driver, fd)
	check(t, err)
	t.Cleanup(func() {
		for i := range 512 {
			p.set(i, open)
		}
		check(t, driver.CtxSynchronize())
		check(t, driver.MemHostUnregister(unsafe.Pointer(&p.bytes[0])))
		check(t, unix.Munmap(p.bytes))
	})
	return p, fd
}

func (p *page) word(i int) *uint64     { return (*uint64)(unsafe.Pointer(&p.bytes[8*i])) }
func (p *page) set(i int, v uint64)    { atomic.StoreUint64(p.word(i), v) }
func (p *page) get(i int) uint64       { return atomic.LoadUint64(p.word(i)) }
func (p *page) address(i int) cuda.Ptr { return p.p + cuda.Ptr(8*i) }
func last(b []byte) uint64             { return atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[len(b)-8]))) }
func address(b []byte) unsafe.Pointer  { return unsafe.Pointer(unsafe.SliceData(b)) }
func words(b []byte) []uint64          { return unsafe.Slice((*uint64)(address(b)), len(b)/8) }

func stream(t testing.TB) cuda.Stream {
	t.Helper()
	s, err := driver.StreamCreate()
	check(t, err)
	t.Cleanup(func() { check(t, driver.StreamDestroy(s)) })
	return s
}

func event(t testing.TB, o cuda.EventOptions) cuda.Event {
	t.Helper()
	e, err := driver.EventCreate(o)
	check(t, err)
	t.Cleanup(func() { check(t, driver.EventDestroy(e)) })
	return e
}

// fill writes a pattern that differs at every word and for every seed.
func fill(b []byte, seed uint64) {
	for i := range words(b) {
		words(b)[i] = pattern(seed, i)
	}
}

func pattern(seed uint64, i int) uint64 {
	x := (seed<<32 + uint64(i) + 1) * 0x9e3779b97f4a7c15
	return x ^ x>>29
}

// wrong returns an error with the first difference between b and fill's pattern.
func wrong(b []byte, seed uint64) error {
	for i, w := range words(b) {
		if want := pattern(seed, i); w != want {
			return fmt.Errorf("word %d is %#x, want %#x", i, w, want)
		}
	}
	return nil
}

// write fills device memory with a pattern, by way of pageable memory.
func write(d *cuda.Driver, p cuda.Ptr, size, seed uint64) error {
	b := make([]byte, size)
	fill(b, seed)
	return errors.Join(d.MemcpyHtoDAsync(p, address(b), size, 0), d.StreamSynchronize(0))
}

// verify copies device memory to the host and compares the bytes with a pattern.
func verify(d *cuda.Driver, p cuda.Ptr, size, seed uint64) error {
	b := make([]byte, size)
	if err := errors.Join(d.MemcpyDtoHAsync(address(b), p, size, 0), d.StreamSynchronize(0)); err != nil {
		return err
	}
	return wrong(b, seed)
}

// eventually waits until a query returns true.
func eventually(t testing.TB, what string, query func() (bool, error)) {
	t.Helper()
	for deadline := testutil.Begin(); ; time.Sleep(50 * time.Microsecond) {
		done, err := query()
		check(t, err)
		if done {
			return
		}
		if deadline.Over() {
			t.Fatalf("%s: not after %v", what, patient)
		}
	}
}

// pending requires that a query returns false.
func pending(t testing.TB, what string, query func() (bool, error)) {
	t.Helper()
	done, err := query()
	check(t, err)
	if done {
		t.Errorf("%s is complete behind a closed gate", what)
	}
}
