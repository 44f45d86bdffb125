package device

import (
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

// hugePage is the size of a huge page on both architectures, bytes.
const hugePage = 2 << 20

// collapseTime bounds how long CreateHuge gathers small pages into huge ones: the kernel may have
// to move other memory for each.
const collapseTime = 300 * time.Millisecond

// CreateHuge is CreateHost in huge pages, of which the kernel pins, for a send or a NIC, one in place of
// 512. It has the kernel gather its small pages (MADV_HUGEPAGE, MADV_COLLAPSE), and keeps the small pages
// that are left. Pages reports the result. Pages that the administrator has reserved (vm.nr_hugepages) are
// for other programs.
func CreateHuge(name string, bytes uint64) (*Memory, error) {
	m, err := CreateHost(name, bytes)
	if err != nil {
		return nil, err
	}
	if err := m.align(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	m.pages = m.collapse()
	return m, nil
}

// align maps the memory anew, at an address where a huge page can begin: the kernel aligns no mapping of a
// memfd of small pages.
func (m *Memory) align() error {
	length := uintptr(m.Bytes)
	space, err := unix.MmapPtr(-1, 0, nil, length+hugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	before := -uintptr(space) % hugePage
	at, err := unix.MmapPtr(
		m.fd,
		0,
		unsafe.Add(space, before),
		length,
		unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_FIXED,
	)
	if err != nil {
		return errors.Join(os.NewSyscallError("mmap", err), unix.MunmapPtr(space, length+hugePage))
	}
	if before > 0 {
		err = unix.MunmapPtr(space, before)
	}
	page := uintptr(os.Getpagesize())
	if end := (before + length + page - 1) / page * page; end < length+hugePage {
		err = errors.Join(err, unix.MunmapPtr(unsafe.Add(space, end), length+hugePage-end))
	}
	err = errors.Join(err, unix.MunmapPtr(unsafe.Pointer(&m.host[0]), length))
	m.host = unsafe.Slice((*byte)(at), m.Bytes)
	return os.NewSyscallError("munmap", err)
}

// collapse gathers small pages into huge ones, and describes the result.
func (m *Memory) collapse() string {
	begun, gathered := time.Now(), uint64(0)
	err := os.NewSyscallError("MADV_HUGEPAGE", unix.Madvise(m.host, unix.MADV_HUGEPAGE))
	for at := uint64(0); err == nil && at+hugePage <= m.Bytes; at += hugePage {
		if time.Since(begun) > collapseTime {
			err = fmt.Errorf("it takes longer than %v", collapseTime)
			break
		}
		if err = os.NewSyscallError("MADV_COLLAPSE", unix.Madvise(m.host[at:at+hugePage], unix.MADV_COLLAPSE)); err == nil {
			gathered += hugePage
		}
	}
	switch {
	case err == nil && gathered > 0:
		return "transparent huge pages (MADV_HUGEPAGE)"
	case err == nil:
		return fmt.Sprintf("small pages: less than %s", humanize.IBytes(hugePage))
	case gathered > 0:
		return fmt.Sprintf(
			"transparent huge pages (MADV_HUGEPAGE) for %s of %s: %v",
			humanize.IBytes(gathered),
			humanize.IBytes(m.Bytes),
			err,
		)
	}
	return fmt.Sprintf("small pages: %v", err)
}

// Pages describes the pages of memory that CreateHuge made; it is empty for other memory.
func (m *Memory) Pages() string { return m.pages }
