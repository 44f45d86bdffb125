package conformance

import (
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
)

// long limits kernels that a flag ends, so that a failed test ends too.
const long = 30 * time.Second

func init() { children["kernel on a wrong address"] = wrongAddress }

// wrongAddress reports the results after a kernel wrote to an unmapped address.
func wrongAddress(p *peer) error {
	if err := p.open(0); err != nil {
		return err
	}
	k, err := kernels.Load(p.d, 0)
	if err != nil {
		return err
	}
	addresses, err := p.d.MemAddressReserve(2*mib, 0)
	if err != nil {
		return err
	}
	for _, err := range []error{
		k.Fill(0, addresses, mib, kernels.Pattern{}), p.d.StreamSynchronize(0), k.Fill(0, addresses, mib, kernels.Pattern{}),
	} {
		var m message
		if err != nil {
			m.fail(err)
		}
		if err := p.send(m); err != nil {
			return err
		}
	}
	p.until()
	return nil
}

func TestKernelAtWrongAddressLosesContext(t *testing.T) {
	p := child(t, "kernel on a wrong address", nil)
	p.mustReceive(t) // the launch itself succeeds
	for _, call := range []string{"waiting for it", "the next launch"} {
		m, _, err := p.receive()
		check(t, err)
		if m.Result != cuda.ErrIllegalAddress || !m.Result.Sticky() {
			t.Errorf("%s: %v; want %v", call, m.Error, cuda.ErrIllegalAddress)
		}
	}
}

// load makes the kernels in the current context of the device.
func load(t testing.TB, dev cuda.Device) *kernels.Kernels {
	t.Helper()
	k, err := kernels.Load(driver, dev)
	check(t, err)
	t.Cleanup(func() { check(t, k.Unload()) })
	return k
}

// kernelPage returns a page for kernels. At the test's end the page's flag ends kernels that wait.
func kernelPage(t testing.TB, k *kernels.Kernels) *kernels.Page {
	t.Helper()
	p, err := k.NewPage()
	check(t, err)
	t.Cleanup(func() {
		p.SetFlag(open)
		check(t, driver.CtxSynchronize())
		check(t, p.Free())
	})
	return p
}

func TestModuleLoadsAndUnloads(t *testing.T) {
	use(t, 0)
	_, err := driver.ModuleLoadPTX(".version 6.0\n.target sm_60\n.address_size 64\n.visible .entry broken() { brea; }\n")
	refused(t, "PTX that does not compile", err, cuda.ErrInvalidPTX, cuda.ErrInvalidImage)
	if e, ok := errors.AsType[*cuda.ModuleError](err); !ok || e.Log == "" {
		t.Errorf("%q has no log of the compiler", err)
	}
	_, err = driver.ModuleLoadPTX("this is no PTX")
	refused(t, "text that is no PTX", err, cuda.ErrInvalidPTX, cuda.ErrInvalidImage)
	_, err = driver.ModuleLoadPTX("a\x00b")
	if err == nil {
		t.Error("PTX with a zero byte was loaded")
	}

	// A module without a kernel: only the first lines of the kernels' PTX.
	m, err := driver.ModuleLoadPTX(".version 6.0\n.target sm_60\n.address_size 64\n")
	check(t, err)
	_, err = driver.ModuleGetFunction(m, "peerlane_fill")
	refused(t, "a kernel that the module does not have", err, cuda.ErrNotFound)
	check(t, driver.ModuleUnload(m))
}

func TestKernelsWriteAndCompareThePattern(t *testing.T) {
	use(t, 0)
	const n = 3*mib + 24 // no multiple of a block's share
	m := deviceMemory(t, 0, 4*mib, 0)
	b := pinned(t, n)
	k := load(t, 0)
	page := kernelPage(t, k)
	s := stream(t)
	get := func(p cuda.Ptr, size uint64) []byte {
		check(t, driver.MemcpyDtoHAsync(address(b), p, size, s))
		check(t, driver.StreamSynchronize(s))
		return b[:size]
	}
	compare := func(p cuda.Ptr, size uint64, pattern kernels.Pattern) kernels.Difference {
		check(t, k.Compare(s, p, size, pattern, page))
		check(t, driver.StreamSynchronize(s))
		return page.Difference()
	}
	for _, pattern := range []kernels.Pattern{{}, {Seed: 1}, {Seed: 0xfedcba9876543210, First: 1 << 40}} {
		check(t, k.Fill(s, m.p, n, pattern))
		if d := pattern.Compare(get(m.p, n)); d.Words != 0 {
			t.Errorf("%+v: written by the kernel, compared by the host: %v", pattern, d)
		}
		pattern.First += 5
		if d := pattern.Compare(get(m.p+40, n-40)); d.Words != 0 {
			t.Errorf("%+v: the host finds behind the fifth word: %v", pattern, d)
		}
		if d := compare(m.p+40, n-40, pattern); d.Words != 0 {
			t.Errorf("%+v: written and compared by the kernel: %v", pattern, d)
		}
	}

	pattern := kernels.Pattern{Seed: 3}
	pattern.Fill(b)
	check(t, driver.MemcpyHtoDAsync(m.p, address(b), n, s))
	if d := compare(m.p, n, pattern); d.Words != 0 {
		t.Errorf("written by the host, compared by the kernel: %v", d)
	}
	if d := compare(m.p, n, kernels.Pattern{Seed: 4}); d != (kernels.Difference{Words: n / 8, First: 0}) {
		t.Errorf("another seed's pattern: %v", d)
	}
	if d := compare(m.p, n, kernels.Pattern{Seed: 3, First: 1}); d.Words != n/8 {
		t.Errorf("pattern shifted by a word: %v", d)
	}
	// Flip a bit in three words, the first outside the first block's share.
	for _, offset := range []uint64{n - 8, 2*mib + 16, mib - 8} {
		words(b)[offset/8] ^= 1
	}
	check(t, driver.MemcpyHtoDAsync(m.p, address(b), n, s))
	if d := compare(m.p, n, pattern); d != (kernels.Difference{Words: 3, First: mib - 8}) {
		t.Errorf("three wrong words, the first at %d: %v", mib-8, d)
	}
	if d := compare(m.p, 0, pattern); d.Words != 0 {
		t.Errorf("no bytes: %v", d)
	}
	if err := k.Fill(s, m.p+4, 8, pattern); err == nil {
		t.Error("an address that is no multiple of 8 was taken")
	}
}

// The kernel of lists copies every range and no byte beside it, to another device if possible.
func TestListKernelCopiesRangesOnly(t *testing.T) {
	use(t, 0)
	const n, apart = 200, 128 << 10
	sizes := []uint64{16, 512, 2048, 8192, 8208, 45056, 65520, 100_000}
	count, err := driver.DeviceCount()
	check(t, err)
	target := cuda.Device(count - 1)
	if reaches, err := driver.DeviceCanAccessPeer(0, target); err != nil || !reaches {
		target = 0
	}
	source, to := deviceMemory(t, 0, 32*mib, 0), deviceMemory(t, target, 32*mib, 0)
	l, err := kernels.LoadLists(driver, 0)
	check(t, err)
	t.Cleanup(func() { check(t, l.Unload()) })
	table := pinned(t, n*uint64(unsafe.Sizeof(kernels.ListCopy{})))
	at, err := driver.MemHostDevicePtr(address(table))
	check(t, err)
	check(t, errors.Join(write(driver, source.p, n*apart, 3), write(driver, to.p, n*apart, 4)))
	from, want, got := make([]byte, n*apart), make([]byte, n*apart), make([]byte, n*apart)
	fill(from, 3)
	fill(want, 4)
	copies := unsafe.Slice((*kernels.ListCopy)(address(table)), n)
	for i := range copies {
		fromOffset, toOffset := uint64(i)*apart+16*uint64(i%5), uint64(n-1-i)*apart+16*uint64(i%7)
		size := sizes[i%len(sizes)]
		copies[i] = kernels.ListCopy{To: to.p + cuda.Ptr(toOffset), From: source.p + cuda.Ptr(fromOffset), Bytes: size}
		copy(want[toOffset:toOffset+size], from[fromOffset:])
	}
	s := stream(t)
	check(t, errors.Join(l.Copy(s, at, n, 100_000), driver.StreamSynchronize(s)))
	check(t, errors.Join(driver.MemcpyDtoHAsync(address(got), to.p, n*apart, s), driver.StreamSynchronize(s)))
	for i := range words(got) {
		if words(got)[i] != words(want)[i] {
			t.Fatalf("the first wrong bytes are at %d", 8*i)
		}
	}
}

// read starts a reader and waits until the kernel runs.
func read(t testing.TB, k *kernels.Kernels, s cuda.Stream, r kernels.Reading, page *kernels.Page) {
	t.Helper()
	check(t, k.Read(s, r, page))
	eventually(t, "the reader", func() (bool, error) { return page.Progress().Running, nil })
}

// compared waits until the reader has compared n rounds.
func compared(t testing.TB, page *kernels.Page, n uint64) {
	t.Helper()
	eventually(t, fmt.Sprintf("round %d of the reader", n), func() (bool, error) {
		return page.Progress().Rounds >= n, nil
	})
}

func TestReaderSeesDataWhileRunning(t *testing.T) {
	use(t, 0)
	const n, total = 4 * mib, 40
	m := deviceMemory(t, 0, n, 0)
	b := pinned(t, n)
	k := load(t, 0)
	page := kernelPage(t, k)
	copies, s := stream(t), stream(t)
	read(t, k, s, kernels.Reading{Value: 100, Rounds: total, Address: m.p, Size: n, Seed: 7}, page)
	for round := range uint64(total) {
		if p := page.Progress(); p.Ended || p.Rounds != round {
			t.Fatalf("before round %d: %+v", round, p)
		}
		kernels.Pattern{Seed: 7 + round}.Fill(b)
		check(t, driver.MemcpyHtoDAsync(m.p, address(b), n, copies))
		if round%2 == 0 { // the flag is set by the CPU and by the stream, in turn
			check(t, driver.StreamSynchronize(copies))
			page.SetFlag(100 + round)
		} else {
			check(t, driver.StreamWriteValue64(copies, page.Flag(), 100+round))
			eventually(t, "the flag", func() (bool, error) { return driver.StreamQuery(copies) })
		}
		compared(t, page, round+1)
	}
	check(t, driver.StreamSynchronize(s))
	want := kernels.Progress{Running: true, Rounds: total, Ended: true}
	if p := page.Progress(); p != want {
		t.Errorf("%+v, want %+v", p, want)
	}
}

func TestReaderFindsWrongData(t *testing.T) {
	use(t, 0)
	const n = mib
	m := deviceMemory(t, 0, 2*mib, 0)
	b := pinned(t, n)
	k := load(t, 0)
	page := kernelPage(t, k)
	copies, s := stream(t), stream(t)
	read(t, k, s, kernels.Reading{Value: 1, Rounds: 4, Address: m.p, Size: n, Seed: 50}, page)
	for round := range uint64(4) {
		kernels.Pattern{Seed: 50 + round}.Fill(b)
		switch round {
		case 1:
			words(b)[1000] ^= 1 << 63
			words(b)[n/8-1] ^= 1
		case 3:
			words(b)[2] ^= 1
		}
		check(t, driver.MemcpyHtoDAsync(m.p, address(b), n, copies))
		check(t, driver.StreamSynchronize(copies))
		page.SetFlag(1 + round)
		compared(t, page, round+1)
	}
	check(t, driver.StreamSynchronize(s))
	want := kernels.Progress{Running: true, Rounds: 4, Ended: true, Difference: kernels.Difference{Words: 3, First: 8000},
		Round: 1}
	if p := page.Progress(); p != want {
		t.Errorf("%+v, want %+v", p, want)
	}
}

func TestReaderWithoutFlagGivesUp(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, 2*mib, 0)
	k := load(t, 0)
	page := kernelPage(t, k)
	s := stream(t)
	page.SetFlag(4)
	check(t, k.Read(s, kernels.Reading{Value: 5, Polls: 100, Address: m.p, Size: mib}, page))
	check(t, driver.StreamSynchronize(s))
	want := kernels.Progress{Running: true, Ended: true, GaveUp: true}
	if p := page.Progress(); p != want {
		t.Errorf("%+v, want %+v", p, want)
	}
}

func TestKernelsOfLoadEnd(t *testing.T) {
	use(t, 0)
	const n = 64 * mib
	m := deviceMemory(t, 0, 2*n, 0)
	b := pinned(t, mib)
	k := load(t, 0)
	page := kernelPage(t, k)
	copies, s := stream(t), stream(t)
	start := map[string]func(d time.Duration) error{
		"spin":   func(d time.Duration) error { return k.Spin(s, d, page) },
		"stream": func(d time.Duration) error { return k.Stream(s, m.p, n, d, page) },
	}
	for name, launch := range start {
		t.Run(name+" by the flag", func(t *testing.T) {
			use(t, 0)
			page.SetFlag(0)
			check(t, launch(long))
			for seed := range uint64(10) { // copies overtake the reader
				kernels.Pattern{Seed: seed}.Fill(b)
				check(t, driver.MemcpyHtoDAsync(m.p+n, address(b), mib, copies))
				clear(b)
				check(t, driver.MemcpyDtoHAsync(address(b), m.p+n, mib, copies))
				check(t, driver.StreamSynchronize(copies))
			}
			pending(t, "the kernel whose flag is not set", func() (bool, error) { return driver.StreamQuery(s) })
			page.SetFlag(1)
			check(t, driver.StreamSynchronize(s))
			if page.Rounds() < uint64(k.Blocks()) {
				t.Errorf("%d rounds of %d blocks", page.Rounds(), k.Blocks())
			}
		})
		t.Run(name+" by the time", func(t *testing.T) {
			use(t, 0)
			page.SetFlag(0)
			check(t, launch(20*time.Millisecond))
			check(t, driver.StreamSynchronize(s))
			if page.Rounds() < uint64(k.Blocks()) {
				t.Errorf("%d rounds of %d blocks", page.Rounds(), k.Blocks())
			}
		})
	}
}

func TestStreamWritesAllOfItsMemory(t *testing.T) {
	use(t, 0)
	const n = 2*mib + 16
	m := deviceMemory(t, 0, 4*mib, 0)
	b := pinned(t, 4*mib)
	k := load(t, 0)
	page := kernelPage(t, k)
	s := stream(t)
	clear(b)
	check(t, driver.MemcpyHtoDAsync(m.p, address(b), 4*mib, s))
	check(t, k.Stream(s, m.p, n, time.Millisecond, page))
	check(t, driver.MemcpyDtoHAsync(address(b), m.p, 4*mib, s))
	check(t, driver.StreamSynchronize(s))
	for i, w := range words(b) {
		if i < n/8 && (w == 0 || w > page.Rounds()) {
			t.Fatalf("word %d was raised by %d in %d rounds", i, w, page.Rounds())
		}
		if i >= n/8 && w != 0 {
			t.Fatalf("word %d, behind the memory, is %d", i, w)
		}
	}
}
