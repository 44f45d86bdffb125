package device_test

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
)

func blocks(t *testing.T, fd int) int64 {
	t.Helper()
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		t.Fatal(err)
	}
	return s.Blocks * 512
}

func view(p device.Place, n uint64) []byte { return unsafe.Slice((*byte)(p.Host), n) }

func TestHostMemoryIsAllocatedAndReleased(t *testing.T) {
	made, err := device.CreateHost("test", 5<<20+1)
	if err != nil {
		t.Fatal(err)
	}
	whole := uint64(5<<20 + os.Getpagesize())
	fd, err := made.Export()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if made.Bytes != whole || blocks(t, fd) < int64(whole) {
		t.Errorf("%d bytes, of which %d are there", made.Bytes, blocks(t, fd))
	}
	if unix.Ftruncate(fd, 4096) == nil || unix.Ftruncate(fd, 1<<30) == nil {
		t.Error("its size can be changed")
	}
	again, err := device.ImportHost(fd, whole)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, whole)
	if _, err := rand.Read(want); err != nil {
		t.Fatal(err)
	}
	copy(view(made.At(0), whole), want)
	if !bytes.Equal(view(again.At(3).Plus(4), whole-7), want[7:]) {
		t.Error("the other mapping has other bytes")
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if blocks(t, fd) < int64(whole) {
		t.Error("a mapping that is closed took the pages with it")
	}
	// A process with the descriptor keeps no page.
	if err := made.Close(); err != nil {
		t.Fatal(err)
	}
	if n := blocks(t, fd); n != 0 {
		t.Errorf("%d bytes are left of it", n)
	}
}

func TestImportHostRefusesOtherDescriptors(t *testing.T) {
	const (
		size        = 1 << 20
		noHugePages = -2
	)
	memfd := func(flags int, bytes int64, seals int) int {
		fd, err := unix.MemfdCreate("test", flags|unix.MFD_CLOEXEC)
		if err != nil && flags&unix.MFD_HUGETLB != 0 {
			return noHugePages
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Ftruncate(fd, bytes); err != nil {
			t.Fatal(err)
		}
		if seals != 0 {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
				t.Fatal(err)
			}
		}
		return fd
	}
	const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		fd    int
		bytes uint64
		want  error
	}{
		{"unsealed", memfd(unix.MFD_ALLOW_SEALING, size, 0), size, device.ErrNotHostMemory},
		{"can grow", memfd(unix.MFD_ALLOW_SEALING, size, unix.F_SEAL_SHRINK), size, device.ErrNotHostMemory},
		{"can shrink", memfd(unix.MFD_ALLOW_SEALING, size, unix.F_SEAL_GROW), size, device.ErrNotHostMemory},
		{"longer than announced", memfd(unix.MFD_ALLOW_SEALING, size, sealed), size / 2, &device.HostSizeError{Has: size,
			Announced: size / 2}},
		{"shorter than announced", memfd(unix.MFD_ALLOW_SEALING, size, sealed), 1 << 62, &device.HostSizeError{Has: size,
			Announced: 1 << 62}},
		{"nothing", memfd(unix.MFD_ALLOW_SEALING, 0, sealed), 0, &device.HostSizeError{}},
		{"no whole pages", memfd(unix.MFD_ALLOW_SEALING, 777, sealed), 777, &device.HostSizeError{Has: 777, Announced: 777}},
		{"not to be written", memfd(unix.MFD_ALLOW_SEALING, size, sealed|unix.F_SEAL_WRITE), size,
			os.NewSyscallError("mmap", unix.EPERM)},
		{"huge pages", memfd(unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB, 0, sealed), 0, device.ErrHugePages},
		{"a pipe", pipe[0], size, device.ErrNotHostMemory},
		{"a file", int(file.Fd()), size, device.ErrNotHostMemory},
		{"closed", 1 << 20, size, device.ErrNotHostMemory},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.fd == noHugePages {
				t.Skip("the kernel has no huge pages")
			}
			m, err := device.ImportHost(c.fd, c.bytes)
			if err == nil {
				t.Fatal(m.Close())
			}
			if !testutil.HasError(err, c.want) {
				t.Errorf("the error is not %v: %v", c.want, err)
			}
		})
	}
}

// Between two memories of the host a processor copies, while the queue's owner does
// other things.
func TestMovesWithinHostCopyBytes(t *testing.T) {
	const size = 8 << 20
	var places []device.Place
	for range 2 {
		m, err := device.CreateHost("test", size)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}()
		places = append(places, m.At(0))
	}
	if _, err := rand.Read(view(places[0], size)); err != nil {
		t.Fatal(err)
	}
	var q device.Queue
	ended := 0
	for i := range uint64(4) {
		q.Move(places[1].Plus(i*size/4), places[0].Plus(i*size/4), size/4, func(err error) {
			if err != nil {
				t.Error(err)
			}
			ended++
		})
	}
	if ended != 0 || !q.Busy() {
		t.Errorf("%d have ended before anybody looked, busy is %v", ended, q.Busy())
	}
	for end := testutil.Begin(); q.Busy() && !end.Over(); {
		q.Poll()
	}
	if ended != 4 || q.Poll() || !bytes.Equal(view(places[0], size), view(places[1], size)) {
		t.Errorf("%d have ended", ended)
	}
	q.Wait()
}

// A short one is over at once: another thread would begin later than it ends here.
func TestShortMovesWithinTheHostAreOverAtOnce(t *testing.T) {
	m, err := device.CreateHost("test", 16<<10)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	const n = 4 << 10
	want := view(m.At(3), n)
	if _, err := rand.Read(want); err != nil {
		t.Fatal(err)
	}
	var q device.Queue
	ended := false
	q.Move(m.At(8<<10), m.At(3), n, func(err error) { ended = err == nil })
	if !ended || q.Busy() || !bytes.Equal(view(m.At(8<<10), n), want) {
		t.Errorf("ended: %v, busy: %v", ended, q.Busy())
	}
}

// Huge pages are host memory as any other, of exactly the bytes that were asked for, and the
// description names the kind of pages that the kernel reports.
func TestHugePagesAreHostMemory(t *testing.T) {
	for _, bytes := range []uint64{4 << 20, 3 << 20, 4096} {
		m, err := device.CreateHuge("test", bytes)
		if err != nil {
			t.Fatal(err)
		}
		fd, err := m.Export()
		if err != nil {
			t.Fatal(err)
		}
		if m.Bytes != bytes || blocks(t, fd) < int64(bytes) {
			t.Errorf("%d bytes, of which %d are there; %d were asked for", m.Bytes, blocks(t, fd), bytes)
		}
		data := view(m.At(0), bytes)
		data[0], data[bytes-1] = 1, 2
		if unix.Ftruncate(fd, 4096) == nil && bytes > 4096 {
			t.Error("its size can be changed")
		}
		huge := hugeBytes(t, &data[0])
		switch kind, _, _ := strings.Cut(m.Pages(), ":"); {
		case kind == "transparent huge pages (MADV_HUGEPAGE)":
			if huge < bytes/(2<<20)*(2<<20) {
				t.Errorf("%d of %d bytes are in huge pages: %s", huge, bytes, m.Pages())
			}
		case strings.HasPrefix(kind, "transparent huge pages"):
			if huge == 0 || huge >= bytes {
				t.Errorf("%d of %d bytes are in huge pages: %s", huge, bytes, m.Pages())
			}
		case kind == "small pages":
			if huge != 0 {
				t.Errorf("%d of %d bytes are in huge pages: %s", huge, bytes, m.Pages())
			}
		default:
			t.Errorf("pages %q", m.Pages())
		}
		t.Logf("%d bytes: %s", bytes, m.Pages())
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		unix.Close(fd)
	}
}

// hugeBytes returns how many bytes of the mapping at an address are in huge pages, by
// /proc/self/smaps.
func hugeBytes(t *testing.T, at *byte) (sum uint64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	address, within, known := uint64(uintptr(unsafe.Pointer(at))), false, false
	for line := range strings.Lines(string(text)) {
		var from, to, size uint64
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			within = from <= address && address < to
			known = known || within
			continue
		}
		name, rest, _ := strings.Cut(line, ":")
		if n, _ := fmt.Sscanf(rest, "%d kB", &size); within && n == 1 &&
			(name == "ShmemPmdMapped" || name == "Shared_Hugetlb" || name == "Private_Hugetlb") {
			sum += size << 10
		}
	}
	if !known {
		t.Fatal("the mapping is not in smaps")
	}
	return sum
}
