package conformance

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
)

func init() {
	children["relay"] = relay
	children["registrar"] = registrar
}

func TestCopyEverySizeBothDirectionsKeepsBytes(t *testing.T) {
	use(t, 0)
	const maxBytes = 4 * mib
	m := deviceMemory(t, 0, maxBytes, 0)
	other, err := driver.MemAlloc(maxBytes)
	check(t, err)
	from, to := pinned(t, maxBytes), pinned(t, maxBytes)
	s := stream(t)
	for i, n := range []uint64{8, 4096, 32 << 10, 64<<10 + 8, mib, maxBytes} {
		fill(from[:n], uint64(10+i))
		offset := cuda.Ptr(maxBytes - n)
		check(t, driver.MemcpyHtoDAsync(m.p+offset, address(from), n, s))
		check(t, driver.MemcpyAsync(other+offset, m.p+offset, n, s))
		check(t, driver.MemcpyDtoHAsync(address(to), other+offset, n, s))
		check(t, driver.StreamSynchronize(s))
		if err := wrong(to[:n], uint64(10+i)); err != nil {
			t.Errorf("%d bytes there and back: %v", n, err)
		}
	}
	check(t, driver.MemFree(other))
}

// A batch copies any sizes, also between two devices, before later work of the stream.
func TestBatchOfCopiesIsComplete(t *testing.T) {
	use(t, 0)
	const each = 512 << 10
	sizes := []uint64{8, each, 4096, 64 << 10, each}
	from := pinned(t, each)
	m, s := deviceMemory(t, 0, 4*mib, 0), stream(t)
	other, err := driver.MemAlloc(uint64(len(sizes)) * each)
	check(t, err)
	var to, source []cuda.Ptr
	for i, n := range sizes {
		fill(from[:n], uint64(60+i))
		at := cuda.Ptr(i) * each
		check(t, errors.Join(driver.MemcpyHtoDAsync(m.p+at, address(from), n, s), driver.StreamSynchronize(s)))
		// Reverse the order of the destinations.
		source, to = append(source, m.p+at), append(to, other+cuda.Ptr(len(sizes)-1-i)*each)
	}
	err = driver.MemcpyBatchAsync(to, source, sizes, s)
	if errors.Is(err, cuda.ErrNotSupported) && !driver.Simulated() {
		t.Skip(err)
	}
	check(t, err)
	back := pinned(t, each)
	for i, n := range sizes {
		check(t, errors.Join(driver.MemcpyDtoHAsync(address(back), to[i], n, s), driver.StreamSynchronize(s)))
		if err := wrong(back[:n], uint64(60+i)); err != nil {
			t.Errorf("copy %d of %d bytes: %v", i, n, err)
		}
	}
	for _, bad := range []struct{ to, source int }{{0, 0}, {1, 2}} {
		if err := driver.MemcpyBatchAsync(to[:bad.to], source[:bad.source], sizes[:bad.to], s); err == nil {
			t.Errorf("a batch to %d addresses from %d is taken", bad.to, bad.source)
		}
	}
	check(t, driver.MemFree(other))
}

// Small copies from the host are made as rectangles, which copy engines move.
func TestRowsFromHostOfEverySizeArrive(t *testing.T) {
	use(t, 0)
	const maxBytes = 64 << 10
	m := deviceMemory(t, 0, size, 0)
	from := pinned(t, maxBytes)
	s := stream(t)
	for i, n := range []uint64{8, 64, 4096, 16<<10 + 8, 32<<10 - 8, 32 << 10, maxBytes} {
		check(t, write(driver, m.p, 2*maxBytes, 19)) // bytes around a row must not change
		fill(from[:n], uint64(20+i))
		check(t, driver.MemcpyRowsHtoDAsync(m.p+8, address(from), n, s))
		check(t, driver.StreamSynchronize(s))
		if err := verify(driver, m.p+8, n, uint64(20+i)); err != nil {
			t.Errorf("a row of %d bytes: %v", n, err)
		}
		around := make([]byte, 2*maxBytes)
		fill(around, 19)
		got := make([]byte, 2*maxBytes)
		check(t, errors.Join(driver.MemcpyDtoHAsync(address(got), m.p, 2*maxBytes, s), driver.StreamSynchronize(s)))
		if string(got[:8]) != string(around[:8]) || string(got[8+n:]) != string(around[8+n:]) {
			t.Errorf("a row of %d bytes changed bytes around the row", n)
		}
	}
	// Bytes that fill no word.
	fill(from, 40)
	check(t, driver.MemcpyRowsHtoDAsync(m.p+3, address(from), 13, s))
	check(t, driver.StreamSynchronize(s))
	got := make([]byte, 13)
	check(t, errors.Join(driver.MemcpyDtoHAsync(address(got), m.p+3, 13, s), driver.StreamSynchronize(s)))
	if string(got) != string(from[:13]) {
		t.Errorf("13 bytes at 3 are %x, not %x", got, from[:13])
	}
}

// registrar registers the memory of a memfd that the parent registers too, as relay and NIC do with
// host slots, and relay and client with the client's host memory.
func registrar(p *peer) error {
	if err := p.open(0); err != nil {
		return err
	}
	_, fds, err := p.receive()
	if err != nil {
		return err
	}
	b, err := registered(p.d, fds[0], size)
	if err != nil {
		return err
	}
	m, err := allocate(p.d, 0, size, cuda.MemOptions{}, 0)
	if err != nil {
		return err
	}
	at, err := p.d.MemHostDevicePtr(address(b))
	if err != nil {
		return err
	}
	// The device copies from and to the shared memory.
	if err := errors.Join(p.d.MemcpyAsync(m.p, at, size, 0), p.d.StreamSynchronize(0), verify(p.d, m.p, size, 50),
		write(p.d, m.p, size, 51),
		p.d.MemcpyAsync(at, m.p, size, 0), p.d.StreamSynchronize(0)); err != nil {
		return err
	}
	return errors.Join(m.free(), p.d.MemHostUnregister(address(b)), unix.Munmap(b), p.send(message{}))
}

func registered(d *cuda.Driver, fd int, n int) ([]byte, error) {
	b, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return b, d.MemHostRegister(address(b), uint64(n))
}

func TestHostMemoryOfTwoProcessesIsShared(t *testing.T) {
	use(t, 0)
	fd, err := unix.MemfdCreate("slots", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	check(t, err)
	check(t, unix.Ftruncate(fd, size))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	check(t, err)
	b, err := registered(driver, fd, size)
	check(t, err)
	fill(b, 50)
	p := child(t, "registrar", nil)
	p.mustSend(t, message{}, fd)
	p.mustReceive(t)
	if err := wrong(b, 51); err != nil {
		t.Errorf("data written by the other process's device: %v", err)
	}
	// Pages punched out of the file stay pinned by their registrations, and copies go on.
	check(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size))
	m := deviceMemory(t, 0, size, 0)
	check(t, write(driver, m.p, size, 52))
	s := stream(t)
	at, err := driver.MemHostDevicePtr(address(b))
	check(t, err)
	check(t, errors.Join(driver.MemcpyAsync(at, m.p, size, s), driver.MemcpyAsync(m.p, at, size, s),
		driver.StreamSynchronize(s)))
	check(t, verify(driver, m.p, size, 52))
	check(t, errors.Join(driver.MemHostUnregister(address(b)), unix.Munmap(b), unix.Close(fd)))
}

func TestPageableMemoryIsFreeAgainAtOnce(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	s := stream(t)
	b := make([]byte, size)
	fill(b, 20)
	check(t, driver.MemcpyHtoDAsync(m.p, address(b), size, s))
	clear(b)
	check(t, driver.MemcpyDtoHAsync(address(b), m.p, size, s))
	if err := wrong(b, 20); err != nil { // without waiting
		t.Error(err)
	}
	check(t, driver.StreamSynchronize(s))
}

func TestPeerCopyNeedsOneContextPerEnd(t *testing.T) {
	needDevices(t, 2)
	theirCtx := use(t, 1)
	ourCtx := use(t, 0)
	ours, theirs := deviceMemory(t, 0, size, 0), deviceMemory(t, 1, size, 1)
	s := stream(t)

	// Each context needs access to memory of its own device only.
	check(t, write(driver, ours.p, size, 30))
	check(t, driver.MemcpyPeerAsync(theirs.p, theirCtx, ours.p, ourCtx, size, s))
	check(t, driver.StreamSynchronize(s))
	check(t, driver.CtxSetCurrent(theirCtx))
	check(t, verify(driver, theirs.p, size, 30))
	check(t, write(driver, theirs.p, size, 31))
	check(t, driver.CtxSetCurrent(ourCtx))
	check(t, driver.MemcpyPeerAsync(ours.p, ourCtx, theirs.p, theirCtx, size, s))
	check(t, driver.StreamSynchronize(s))
	check(t, verify(driver, ours.p, size, 31))

	// With access for both ends the stream's device copies by address.
	if canAccess, err := driver.DeviceCanAccessPeer(0, 1); err != nil || !canAccess {
		t.Skipf("device 0 cannot address device 1: %v", err)
	}
	check(t, driver.MemSetAccess(theirs.p, size, cuda.Access{Device: 0, Write: true}))
	check(t, write(driver, ours.p, size, 32))
	check(t, driver.MemcpyAsync(theirs.p, ours.p, size, s))
	check(t, driver.StreamSynchronize(s))
	check(t, verify(driver, theirs.p, size, 32))
}

// staging is memory on a device without a context of this process, as in a relay, whose one context
// is on the client's GPU.
type staging struct {
	client, server *mapping
	d              *cuda.Driver
	s              cuda.Stream
}

func newStaging(d *cuda.Driver, client *mapping, server cuda.Device, n uint64) (*staging, error) {
	m, err := allocate(d, server, n, cuda.MemOptions{Exportable: true, RDMA: true}, 0)
	if err != nil {
		return nil, err
	}
	s, err := d.StreamCreate()
	return &staging{client, m, d, s}, err
}

func (s *staging) push() error {
	return errors.Join(s.d.MemcpyAsync(s.server.p, s.client.p, s.server.size, s.s), s.d.StreamSynchronize(s.s))
}

func (s *staging) pull() error {
	return errors.Join(s.d.MemcpyAsync(s.client.p, s.server.p, s.server.size, s.s), s.d.StreamSynchronize(s.s))
}

const staged = 64 * mib

// relay imports a client's memory on device 0, and moves the data through staging memory on device
// 1, without a context on device 1.
func relay(p *peer) error {
	_, fds, err := p.receive()
	if err != nil {
		return err
	}
	if err := p.open(0); err != nil {
		return err
	}
	client, err := adopt(p.d, fds[0], 2*staged, 0)
	if err != nil {
		return err
	}
	s, err := newStaging(p.d, &mapping{d: p.d, p: client.p, size: staged}, 1, staged)
	if err != nil {
		return err
	}
	if err := s.push(); err != nil {
		return err
	}
	s.client.p += staged // back into the second half
	if err := s.pull(); err != nil {
		return err
	}
	properties, err := p.d.MemProperties(s.server.handle)
	if err != nil {
		return err
	}
	located, err := p.d.PointerDevice(s.server.p)
	if err != nil {
		return err
	}
	capable, err := p.d.PointerRDMACapable(s.server.p)
	if err != nil {
		return err
	}
	answer := message{Numbers: []uint64{uint64(properties.Device), uint64(located), 0}}
	if capable {
		answer.Numbers[2] = 1
	}
	fd, err := p.d.MemExportFD(s.server.handle)
	if err != nil {
		return err
	}
	if err := errors.Join(p.send(answer, fd), unix.Close(fd)); err != nil {
		return err
	}
	p.until()
	return nil
}

func TestRelayStagesOnADeviceWithoutAContext(t *testing.T) {
	needDevices(t, 2)
	if canAccess, err := driver.DeviceCanAccessPeer(0, 1); err != nil || !canAccess {
		t.Skipf("device 0 cannot address device 1: %v", err)
	}
	server := use(t, 1) // context of the parent; the child has none
	before, _, err := driver.MemGetInfo()
	check(t, err)
	ctx := use(t, 0)
	client := deviceMemory(t, 0, 2*staged, 0)
	check(t, write(driver, client.p, staged, 40))
	fd, err := driver.MemExportFD(client.handle)
	check(t, err)
	contextsBefore := simulatedContexts(t, 1)
	p := child(t, "relay", nil)
	p.mustSend(t, message{}, fd)
	check(t, unix.Close(fd))
	m, fds, err := p.receive()
	check(t, err)
	if m.Numbers[0] != 1 || m.Numbers[1] != 1 {
		t.Errorf("staging memory is on device %d by handle and %d by address; want 1", m.Numbers[0], m.Numbers[1])
	}
	if rdma, err := driver.DeviceAttribute(1, cuda.AttributeRDMAWithVMM); err != nil || uint64(rdma) != m.Numbers[2] {
		t.Errorf("RDMA-capable: %d; the device's attribute says %d, %v", m.Numbers[2], rdma, err)
	}
	if err := verify(driver, client.p+staged, staged, 40); err != nil {
		t.Errorf("data returned to the client: %v", err)
	}
	// The server GPU must lose the size of the staging memory and no context: the smallest context
	// takes 265 MiB.
	check(t, driver.CtxSetCurrent(server))
	after, _, err := driver.MemGetInfo()
	check(t, err)
	if after < before && before-after > staged+128*mib {
		t.Errorf("the server GPU lost %d MiB for staging of %d MiB", (before-after)/mib, staged/mib)
	}
	if driver.Simulated() && simulatedContexts(t, 1) != contextsBefore {
		t.Errorf("the relay made a context on the server GPU")
	}
	// Content of the slot, read by a process with a context on the slot's device.
	slot, err := adopt(driver, fds[0], staged, 1)
	check(t, err)
	if err := verify(driver, slot.p, staged, 40); err != nil {
		t.Errorf("content of the slot: %v", err)
	}
	check(t, slot.free())
	check(t, driver.CtxSetCurrent(ctx))
}

// simulatedContexts returns the number of contexts that a simulated device ever had.
func simulatedContexts(t *testing.T, index int) uint64 {
	t.Helper()
	if !driver.Simulated() {
		return 0
	}
	log, err := sim.ReadLog(os.Getenv("PEERLANE_SIM"))
	check(t, err)
	return log[index].Contexts
}

// BenchmarkCopy64MiB compares the relay's copies with the same copy between two contexts of one
// process.
func BenchmarkCopy64MiB(b *testing.B) {
	needDevices(b, 2)
	theirCtx := use(b, 1)
	ourCtx := use(b, 0)
	client := deviceMemory(b, 0, staged, 0)
	theirs := deviceMemory(b, 1, staged, 1)
	raw := stream(b)
	s, err := newStaging(driver, client, 1, staged)
	check(b, err)
	b.Cleanup(func() { check(b, errors.Join(driver.StreamDestroy(s.s), s.server.free())) })
	for _, c := range []struct {
		name string
		copy func() error
	}{
		{"peer", func() error {
			return errors.Join(driver.MemcpyPeerAsync(theirs.p, theirCtx, client.p, ourCtx, staged, raw),
				driver.StreamSynchronize(raw))
		}},
		{"push", s.push},
		{"pull", s.pull},
	} {
		b.Run(c.name, func(b *testing.B) {
			use(b, 0)
			check(b, c.copy()) // pages of a simulated device come with the first touch
			b.SetBytes(staged)
			for b.Loop() {
				check(b, c.copy())
			}
		})
	}
}
