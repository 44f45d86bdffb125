package conformance

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
)

func init() {
	children["importer"] = importer
	children["exporter"] = exporter
	children["without access"] = withoutAccess
	children["import hidden"] = importHidden
}

const size = 4 * mib // size of most memory in these tests: two granules

// importer verifies pattern 1 in received memory, writes pattern 2 to the second half, and verifies
// both after the exporter has released the memory.
func importer(p *peer) error {
	if err := p.open(0); err != nil {
		return err
	}
	_, fds, err := p.receive()
	if err != nil {
		return err
	}
	m, err := adopt(p.d, fds[0], size, 0)
	if err != nil {
		return err
	}
	if err := verify(p.d, m.p, size, 1); err != nil {
		return fmt.Errorf("the exporter's bytes: %w", err)
	}
	if err := errors.Join(write(p.d, m.p+size/2, size/2, 2), p.send(message{})); err != nil {
		return err
	}
	if _, _, err = p.receive(); err != nil {
		return err
	}
	half := make([]byte, size)
	fill(half, 1)
	fill(half[size/2:], 2)
	got := make([]byte, size)
	if err := errors.Join(p.d.MemcpyDtoHAsync(address(got), m.p, size, 0), p.d.StreamSynchronize(0)); err != nil {
		return err
	}
	if string(got) != string(half) {
		return errors.New("bytes changed when the exporter released the memory")
	}
	return errors.Join(p.send(message{}), m.free())
}

func TestExportedMemoryIsSharedWithProcess(t *testing.T) {
	use(t, 0)
	m, err := allocate(driver, 0, size, cuda.MemOptions{Exportable: true}, 0)
	check(t, err)
	check(t, write(driver, m.p, size, 1))
	fd, err := driver.MemExportFD(m.handle)
	check(t, err)
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	check(t, err)
	if flags&unix.FD_CLOEXEC == 0 {
		t.Error("the descriptor is not close-on-exec")
	}
	p := child(t, "importer", nil)
	p.mustSend(t, message{}, fd)
	p.mustReceive(t)
	check(t, verify(driver, m.p+size/2, size/2, 2))
	// The importer keeps the memory alive after the exporter has released every reference.
	check(t, errors.Join(m.free(), unix.Close(fd)))
	p.mustSend(t, message{})
	p.mustReceive(t)
}

// exporter sends memory with pattern 3, and waits to be killed.
func exporter(p *peer) error {
	if err := p.open(0); err != nil {
		return err
	}
	m, err := allocate(p.d, 0, size, cuda.MemOptions{Exportable: true}, 0)
	if err != nil {
		return err
	}
	if err := write(p.d, m.p, size, 3); err != nil {
		return err
	}
	fd, err := p.d.MemExportFD(m.handle)
	if err != nil {
		return err
	}
	if err := p.send(message{}, fd); err != nil {
		return err
	}
	p.until()
	return nil
}

func TestMemorySurvivesItsExporter(t *testing.T) {
	use(t, 0)
	p := child(t, "exporter", nil)
	_, fds, err := p.receive()
	check(t, err)
	m, err := adopt(driver, fds[0], size, 0)
	check(t, err)
	check(t, p.cmd.Process.Signal(syscall.SIGKILL))
	if _, _, err := p.receive(); err == nil {
		t.Fatal("the exporter lives")
	}
	check(t, verify(driver, m.p, size, 3))
	check(t, m.free())
}

func TestImportLeavesTheDescriptor(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	check(t, write(driver, m.p, size, 4))
	fd, err := driver.MemExportFD(m.handle)
	check(t, err)
	for range 2 {
		h, err := driver.MemImportFD(fd)
		check(t, err)
		again, err := mapHandle(driver, h, size, 0)
		check(t, err)
		check(t, verify(driver, again.p, size, 4))
		check(t, again.free())
	}
	check(t, unix.Close(fd))
}

func TestImportOfOtherDescriptorIsRefused(t *testing.T) {
	use(t, 0)
	var pipe [2]int
	check(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	file, err := os.CreateTemp(t.TempDir(), "")
	check(t, err)
	memfd, err := unix.MemfdCreate("plain", unix.MFD_CLOEXEC)
	check(t, err)
	check(t, unix.Ftruncate(memfd, size+4096))
	for what, fd := range map[string]int{"a pipe": pipe[0], "a file": int(file.Fd()), "a memfd": memfd,
		"no descriptor": 999} {
		_, err := driver.MemImportFD(fd)
		refused(t, "importing "+what, err)
	}
	check(t, errors.Join(unix.Close(pipe[0]), unix.Close(pipe[1]), file.Close(), unix.Close(memfd)))
}

func TestExportNeedsTheWish(t *testing.T) {
	use(t, 0)
	h, err := driver.MemCreate(0, size, cuda.MemOptions{})
	check(t, err)
	_, err = driver.MemExportFD(h)
	refused(t, "exporting memory that was not made for it", err)
	check(t, driver.MemRelease(h))
}

func TestHandlesReportTheirProperties(t *testing.T) {
	use(t, 0)
	n, err := driver.DeviceCount()
	check(t, err)
	dev := cuda.Device(n - 1)
	for _, want := range []cuda.MemProperties{{Device: 0}, {Device: 0, Exportable: true},
		{Device: dev, Exportable: true}} {
		h, err := driver.MemCreate(want.Device, size, cuda.MemOptions{Exportable: want.Exportable})
		check(t, err)
		got, err := driver.MemProperties(h)
		check(t, err)
		if got.Device != want.Device || got.Exportable != want.Exportable {
			t.Errorf("properties %+v, want %+v", got, want)
		}
		check(t, driver.MemRelease(h))
	}
}

func TestRetainGivesTheMappedMemory(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	check(t, write(driver, m.p, size, 5))
	h, err := driver.MemRetain(m.p + 2*mib + 8) // any address in the mapping
	check(t, err)
	again, err := mapHandle(driver, h, size, 0)
	check(t, err)
	check(t, verify(driver, again.p, size, 5))
	check(t, again.free())
	check(t, verify(driver, m.p, size, 5))

	plain, err := driver.MemAlloc(size)
	check(t, err)
	_, err = driver.MemRetain(plain)
	refused(t, "a handle of cuMemAlloc's memory", err, cuda.ErrInvalidValue)
	check(t, driver.MemFree(plain))
}

func TestPointersKnowTheirDevice(t *testing.T) {
	n, err := driver.DeviceCount()
	check(t, err)
	use(t, 0)
	for i := range n {
		dev := cuda.Device(i)
		m := deviceMemory(t, dev, size, dev)
		got, err := driver.PointerDevice(m.p + 12345)
		check(t, err)
		if got != dev {
			t.Errorf("memory of device %d has device %d by pointer", dev, got)
		}
	}
	// Where the GPU pages host memory by itself (HMM), CUDA knows each address of the host, and the
	// address has no device.
	var local [8]byte
	dev, err := driver.PointerDevice(cuda.Ptr(uintptr(unsafe.Pointer(&local))))
	if err != nil || dev >= 0 {
		refused(t, "the device of an unknown address", err, cuda.ErrInvalidValue)
	}
}

// Memory mapped at the address of earlier memory has another id; so has memory of cuMemAlloc.
func TestPointersKnowTheirMemory(t *testing.T) {
	use(t, 0)
	at, err := driver.MemAddressReserve(size, 0)
	check(t, err)
	seen := map[uint64]bool{}
	different := func(p cuda.Ptr) {
		t.Helper()
		id, err := driver.PointerID(p)
		check(t, err)
		inside, err := driver.PointerID(p + size/2 + 8)
		check(t, err)
		if id == 0 || seen[id] || inside != id {
			t.Errorf("memory at %v is %d, and %d further on, after %v", p, id, inside, seen)
		}
		seen[id] = true
	}
	for range 3 {
		h, err := driver.MemCreate(0, size, cuda.MemOptions{Exportable: true})
		check(t, err)
		check(t, driver.MemMap(at, size, 0, h))
		check(t, driver.MemSetAccess(at, size, cuda.Access{Device: 0, Write: true}))
		different(at)
		check(t, driver.MemUnmap(at, size))
		check(t, driver.MemRelease(h))
	}
	check(t, driver.MemAddressFree(at, size))
	for range 2 {
		p, err := driver.MemAlloc(size)
		check(t, err)
		different(p)
		check(t, driver.MemFree(p))
	}
}

func TestRangeOverAllocationsKeepsItsBytes(t *testing.T) {
	use(t, 0)
	whole, err := driver.MemAddressReserve(2*size, 0)
	check(t, err)
	for i := range cuda.Ptr(2) {
		h, err := driver.MemCreate(0, size, cuda.MemOptions{Exportable: true})
		check(t, err)
		check(t, driver.MemMap(whole+i*size, size, 0, h))
		check(t, driver.MemRelease(h)) // the mapping keeps the memory
	}
	check(t, driver.MemSetAccess(whole, 2*size, cuda.Access{Device: 0, Write: true}))
	check(t, write(driver, whole, 2*size, 6))
	check(t, verify(driver, whole, 2*size, 6))
	for i := range cuda.Ptr(2) {
		base, n, err := driver.MemAddressRange(whole + i*size + 8)
		check(t, err)
		if base != whole+i*size || n != size {
			t.Errorf("allocation %d: range of %d bytes at %#x, want %d at %#x", i, n, base, size, whole+i*size)
		}
	}
	_, _, err = driver.MemAddressRange(whole + 2*size)
	refused(t, "the allocation of an address behind the range", err, cuda.ErrInvalidValue, cuda.ErrNotFound)
	_, err = driver.MemRetain(whole + 2*size)
	if err == nil {
		t.Error("an address behind the range has a handle")
	}
	check(t, driver.MemUnmap(whole, size))
	check(t, driver.MemUnmap(whole+size, size))
	check(t, driver.MemAddressFree(whole, 2*size))
}

// withoutAccess copies to memory that the copying device cannot access. A GPU fault ends a context,
// so the copy runs in a separate process.
func withoutAccess(p *peer) error {
	if err := p.open(0); err != nil {
		return err
	}
	m, _, err := p.receive()
	if err != nil {
		return err
	}
	location := cuda.Device(m.Numbers[0])
	var access []cuda.Device
	for _, dev := range m.Numbers[1:] {
		access = append(access, cuda.Device(dev))
	}
	mine, err := allocate(p.d, 0, size, cuda.MemOptions{}, 0)
	if err != nil {
		return err
	}
	theirs, err := allocate(p.d, location, size, cuda.MemOptions{}, access...)
	if err != nil {
		return err
	}
	s, err := p.d.StreamCreate()
	if err != nil {
		return err
	}
	var answer message
	err = p.d.MemcpyAsync(theirs.p, mine.p, size, s)
	if err == nil {
		err = p.d.StreamSynchronize(s)
	}
	if err != nil {
		answer.fail(err)
	}
	return p.send(answer)
}

// A driver that refuses the copy at the call returns an invalid value; if the GPU faults at the
// address, the result is an illegal address or a failed launch.
func TestCopyNeedsAccess(t *testing.T) {
	for _, c := range []struct {
		name    string
		devices int
		numbers []uint64 // device of the memory, then devices with access
	}{
		{"for no device", 1, []uint64{0}},
		{"for no device, memory of another", 2, []uint64{1}},
		{"for the other device only", 2, []uint64{1, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			needDevices(t, c.devices)
			p := child(t, "without access", nil)
			p.mustSend(t, message{Numbers: c.numbers})
			m, _, err := p.receive()
			check(t, err)
			switch m.Result {
			case cuda.ErrInvalidValue, cuda.ErrIllegalAddress, cuda.ErrLaunchFailed:
				t.Log(m.Error)
			default:
				t.Errorf("%v: %q; want invalid value, illegal address or launch failed", m.Result, m.Error)
			}
		})
	}
}

func TestAccessNeedsMemory(t *testing.T) {
	use(t, 0)
	p, err := driver.MemAddressReserve(size, 0)
	check(t, err)
	err = driver.MemSetAccess(p, size, cuda.Access{Device: 0, Write: true})
	refused(t, "access to addresses without memory", err, cuda.ErrInvalidValue)
	check(t, driver.MemAddressFree(p, size))
}

func TestAllocationBeyondMemoryIsRefused(t *testing.T) {
	use(t, 0)
	total, err := driver.DeviceTotalMem(0)
	check(t, err)
	_, err = driver.MemCreate(0, (total/size+1)*size, cuda.MemOptions{})
	refused(t, "more memory than the device has", err, cuda.ErrOutOfMemory)
}

func TestRDMACapableMemoryIsReported(t *testing.T) {
	use(t, 0)
	rdmaCapable, err := driver.DeviceAttribute(0, cuda.AttributeRDMAWithVMM)
	check(t, err)
	if rdmaCapable == 0 {
		t.Skip("this device has no GPUDirect RDMA with cuMemCreate")
	}
	m, err := allocate(driver, 0, size, cuda.MemOptions{Exportable: true, RDMA: true}, 0)
	check(t, err)
	capable, err := driver.PointerRDMACapable(m.p)
	check(t, err)
	if !capable {
		t.Error("the memory is not RDMA-capable as asked for")
	}
	if dmabuf, err := driver.DeviceAttribute(0, cuda.AttributeDMABuf); err != nil {
		t.Error(err)
	} else if dmabuf == 0 {
		t.Log("no DMA-BUF on this device")
	} else {
		fd, err := driver.MemDMABufFD(m.p, size)
		check(t, err)
		check(t, unix.Close(fd))
		current, err := driver.CtxGetCurrent()
		check(t, err)
		check(t, driver.CtxSetCurrent(0))
		_, without := driver.MemDMABufFD(m.p, size)
		check(t, driver.CtxSetCurrent(current))
		if !errors.Is(without, cuda.ErrInvalidContext) {
			t.Errorf("a DMA-BUF without a current context: %v", without)
		}
	}
	check(t, m.free())
}

func importHidden(p *peer) (err error) {
	_, fds, err := p.receive()
	if err != nil {
		return err
	}
	if err := p.open(0); err != nil {
		return err
	}
	var answer message
	n, err := p.d.DeviceCount()
	if err != nil {
		return err
	}
	answer.Numbers = []uint64{uint64(n)}
	h, err := p.d.MemImportFD(fds[0])
	if err == nil {
		err = p.d.MemRelease(h)
	}
	if err != nil {
		answer.fail(err)
	}
	return p.send(answer)
}

func TestImportFromHiddenDeviceSucceeds(t *testing.T) {
	needDevices(t, 2)
	use(t, 0)
	uuid, err := driver.DeviceUUID(0)
	check(t, err)
	m := deviceMemory(t, 1, size)
	fd, err := driver.MemExportFD(m.handle)
	check(t, err)
	p := child(t, "import hidden", nil, "CUDA_VISIBLE_DEVICES="+uuid)
	p.mustSend(t, message{}, fd)
	check(t, unix.Close(fd))
	if a := p.mustReceive(t); a.Numbers[0] != 1 {
		t.Errorf("the child has %d devices; CUDA_VISIBLE_DEVICES has 1", a.Numbers[0])
	}
}

func TestHostMemoryIsRegisteredOnce(t *testing.T) {
	use(t, 0)
	b, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	check(t, err)
	p := unsafe.Pointer(&b[0])
	refused(t, "unregistering what is not registered", driver.MemHostUnregister(p), cuda.ErrHostMemoryNotRegistered)
	check(t, driver.MemHostRegister(p, 8192))
	refused(t, "registering it again", driver.MemHostRegister(p, 8192), cuda.ErrHostMemoryAlreadyRegistered)
	base, err := driver.MemHostDevicePtr(p)
	check(t, err)
	second, err := driver.MemHostDevicePtr(unsafe.Pointer(&b[4096]))
	check(t, err)
	if second != base+4096 {
		t.Errorf("the second page is at %v, the first at %v", second, base)
	}
	check(t, driver.MemHostUnregister(p))
	check(t, driver.MemHostRegister(p, 8192))
	check(t, driver.MemHostUnregister(p))
	check(t, unix.Munmap(b))
}

// Stores of the CPU into the memory of another process arrive, and a removed mapping leaves no
// object.
func TestApertureMapsExportedMemory(t *testing.T) {
	use(t, 0)
	busID, err := driver.DevicePCIBusID(0)
	check(t, err)
	aperture, err := driver.OpenAperture(busID)
	check(t, err)
	if aperture.Size() < 64*mib {
		t.Errorf("BAR1 has %d bytes", aperture.Size())
	}
	p := child(t, "exporter", nil)
	_, fds, err := p.receive()
	check(t, err)
	fd, err := unix.Dup(fds[0])
	check(t, err)
	m, err := adopt(driver, fds[0], size, 0)
	check(t, err)
	check(t, write(driver, m.p, size, 1))
	for range 20 {
		mapped, err := aperture.Map(fd, 4096, 8192)
		check(t, err)
		if len(mapped.Bytes) != 8192 {
			t.Fatalf("%d bytes are mapped", len(mapped.Bytes))
		}
		for i := range 256 {
			b := mapped.Bytes[i]
			mapped.Bytes[i] = ^b
			mapped.Bytes[i] = b
		}
		check(t, aperture.Unmap(mapped))
	}
	check(t, verify(driver, m.p, size, 1))
	mapped, err := aperture.Map(fd, 0, 4096)
	check(t, err)
	mapped.Bytes[0] = ^mapped.Bytes[0]
	_ = mapped.Bytes[0] // the read drains the buffers that may hold the store
	if verify(driver, m.p, size, 1) == nil {
		t.Error("a copy does not see a store")
	}
	check(t, errors.Join(aperture.Unmap(mapped), m.free(), unix.Close(fd)))
	if _, err := aperture.Map(int(p.cmd.Process.Pid)+1<<20, 0, 4096); err == nil {
		t.Error("no descriptor is mapped")
	}
	aperture.Close()
}
