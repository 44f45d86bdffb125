// Package ring is the shared memory of a client and a relay: a ring of descriptors and the
// timelines, which the client writes, and a ring of completions, which the relay alone can write.
//
// For the relay the submit memory is hostile input: the relay copies a descriptor once and uses
// only the copy, keeps private positions, and reads from the memory only the client's tail, the
// client's position in the completions, and timelines.
package ring

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/wire"
)

type shared struct {
	submit, complete []byte
	submitPage       *wire.SubmitPage
	completePage     *wire.CompletePage
	descriptors      []wire.Descriptor
	completions      []wire.Completion
}

func view(submit, complete []byte) shared {
	return shared{
		submit:       submit,
		complete:     complete,
		submitPage:   (*wire.SubmitPage)(unsafe.Pointer(&submit[0])),
		completePage: (*wire.CompletePage)(unsafe.Pointer(&complete[0])),
		descriptors:  unsafe.Slice((*wire.Descriptor)(unsafe.Pointer(&submit[wire.SubmitEntries])), wire.RingEntries),
		completions:  unsafe.Slice((*wire.Completion)(unsafe.Pointer(&complete[wire.CompleteEntries])), wire.RingEntries),
	}
}

func (s *shared) timeline(i uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&s.submit[wire.SubmitTimelines+i*wire.TimelineStride]))
}

func (s *shared) unmap() error {
	err := os.NewSyscallError("munmap", errors.Join(unix.Munmap(s.submit), unix.Munmap(s.complete)))
	*s = shared{}
	return err
}

// Reached reports whether a timeline that stands at `now` has reached `value`;
// the comparison is cyclic, as cuStreamWaitValue64's is.
func Reached(now, value uint64) bool { return int64(now-value) >= 0 }

// publish writes a position before the writer's next read: either the writer reads that the remote
// side sleeps, or the remote side reads the position in the last check before the sleep. A store
// would do, were it not for the race detector: its stores can come after loads that follow them.
func publish(position *uint64, value uint64) { _ = atomic.SwapUint64(position, value) }

// Relay is the relay's side.
type Relay struct {
	shared
	submitFD, completeFD int
	taken                uint64 // descriptors copied out
	written              uint64 // completions written
	reserved             uint64 // descriptors taken: each will need a completion
}

// NewRelay makes the memory of a session.
func NewRelay() (*Relay, error) {
	r := &Relay{submitFD: -1, completeFD: -1}
	var err error
	var submit, complete []byte
	if r.submitFD, submit, err = memory("peerlane-submit", wire.SubmitBytes); err != nil {
		return nil, err
	}
	if r.completeFD, complete, err = memory("peerlane-complete", wire.CompleteBytes); err != nil {
		return nil, errors.Join(err, unix.Munmap(submit), unix.Close(r.submitFD))
	}
	r.shared = view(submit, complete)
	// From here on only this process can write the completions.
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	_, err = unix.FcntlInt(uintptr(r.completeFD), unix.F_ADD_SEALS, seals|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(r.submitFD), unix.F_ADD_SEALS, seals|unix.F_SEAL_SEAL)
	}
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("F_ADD_SEALS", err), r.Close())
	}
	return r, nil
}

func memory(name string, bytes int) (int, []byte, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, nil, os.NewSyscallError("memfd_create", err)
	}
	if err := unix.Ftruncate(fd, int64(bytes)); err != nil {
		unix.Close(fd)
		return -1, nil, os.NewSyscallError("ftruncate", err)
	}
	m, err := unix.Mmap(fd, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return -1, nil, os.NewSyscallError("mmap", err)
	}
	return fd, m, nil
}

// FDs are the descriptors to send to the client: submit, complete.
func (r *Relay) FDs() (submit, complete int) { return r.submitFD, r.completeFD }

// Close unmaps the memory and closes the descriptors.
func (r *Relay) Close() error {
	return errors.Join(r.unmap(), unix.Close(r.submitFD), unix.Close(r.completeFD))
}

// Take copies out the next descriptor, if there is one. Take stops without room for completions, so
// a client that reads no completions waits.
func (r *Relay) Take() (d wire.Descriptor, ok bool, err error) {
	tail := atomic.LoadUint64(&r.submitPage.Tail)
	if tail == r.taken {
		return d, false, nil
	}
	if tail-r.taken > wire.RingEntries {
		return d, false, wire.Errorf(
			wire.StatusBadRing,
			"the client's tail %d is %d entries ahead of the relay's head %d; the ring has %d",
			tail,
			tail-r.taken,
			r.taken,
			wire.RingEntries,
		)
	}
	read := atomic.LoadUint64(&r.submitPage.CompletedHead)
	if r.written-read > wire.RingEntries {
		return d, false, wire.Errorf(
			wire.StatusBadRing,
			"the client says it has read %d completions; %d were written",
			read,
			r.written,
		)
	}
	if r.reserved-read >= wire.RingEntries {
		return d, false, nil
	}
	d = r.descriptors[r.taken%wire.RingEntries]
	r.taken++
	r.reserved++
	atomic.StoreUint64(&r.completePage.TakenHead, r.taken)
	return d, true, nil
}

// Full reports whether descriptors wait for room for completions.
func (r *Relay) Full() bool {
	return atomic.LoadUint64(&r.submitPage.Tail) != r.taken &&
		r.reserved-atomic.LoadUint64(&r.submitPage.CompletedHead) >= wire.RingEntries
}

// Complete ends an operation that Take has returned. An operation may end once.
func (r *Relay) Complete(c wire.Completion) {
	r.completions[r.written%wire.RingEntries] = c
	r.written++
	publish(&r.completePage.Tail, r.written)
}

// ClientSleeps reports whether the client waits to be woken.
func (r *Relay) ClientSleeps() bool { return atomic.LoadUint32(&r.submitPage.ClientSleeps) != 0 }

// Sleep says that the relay waits on its eventfd, and reports whether
// descriptors came before the client could know.
func (r *Relay) Sleep() bool {
	_ = atomic.SwapUint32(&r.completePage.RelaySleeps, 1)
	tail := atomic.LoadUint64(&r.submitPage.Tail)
	read := atomic.LoadUint64(&r.submitPage.CompletedHead)
	return tail != r.taken && r.reserved-read < wire.RingEntries
}

// Awake ends Sleep.
func (r *Relay) Awake() { atomic.StoreUint32(&r.completePage.RelaySleeps, 0) }

// Timeline reads a timeline.
func (r *Relay) Timeline(i uint32) uint64 { return atomic.LoadUint64(r.timeline(i)) }

// Advance sets a timeline. The relay never depends on reading the value back.
func (r *Relay) Advance(i uint32, value uint64) { atomic.StoreUint64(r.timeline(i), value) }

// Client is the client's side. The methods are not safe for concurrent use, except Post beside
// Next.
type Client struct {
	shared
	posted   uint64
	finished uint64
}

// ErrFull says that the ring holds RingEntries operations that have not ended.
var ErrFull = errors.New("the ring is full: operations that were posted have to end first")

// OpenClient maps the memory of a Welcome. The descriptors stay the caller's.
func OpenClient(submitFD, completeFD int) (*Client, error) {
	for fd, bytes := range map[int]int64{submitFD: wire.SubmitBytes, completeFD: wire.CompleteBytes} {
		var stat unix.Stat_t
		if err := unix.Fstat(fd, &stat); err != nil {
			return nil, os.NewSyscallError("fstat", err)
		}
		if stat.Size != bytes {
			return nil, wire.Errorf(wire.StatusMalformed, "the relay's shared memory has %d bytes, not %d", stat.Size, bytes)
		}
	}
	submit, err := unix.Mmap(submitFD, 0, wire.SubmitBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping the submit memory: %w", err)
	}
	complete, err := unix.Mmap(completeFD, 0, wire.CompleteBytes, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mapping the complete memory: %w", err), unix.Munmap(submit))
	}
	// Of the client's control group, as far as the relay has not touched them.
	if err := errors.Join(Populate(submit, true), Populate(complete, false)); err != nil {
		return nil, errors.Join(err, unix.Munmap(submit), unix.Munmap(complete))
	}
	return &Client{shared: view(submit, complete)}, nil
}

// Populate allocates the pages of shared memory that are missing, so that the kernel charges them
// to this process's control group. Populate keeps the bytes, and only reads read-only memory.
func Populate(memory []byte, writable bool) error {
	advice := unix.MADV_POPULATE_READ
	if writable {
		advice = unix.MADV_POPULATE_WRITE
	}
	for {
		switch err := unix.Madvise(memory, advice); err {
		case nil:
			return nil
		case unix.EINTR, unix.EAGAIN: // a signal, or a race of the kernel's: it keeps what it has allocated
		case unix.EINVAL: // before Linux 5.14
			touch(memory, writable)
			return nil
		default:
			return fmt.Errorf(
				"allocating %d bytes of memory shared with the relay: %w; raise the container's memory limit",
				len(memory),
				err,
			)
		}
	}
}

// touch accesses a word per page.
func touch(memory []byte, writable bool) {
	for at := 0; at < len(memory); at += os.Getpagesize() {
		word := (*uint32)(unsafe.Pointer(&memory[at]))
		if writable {
			atomic.AddUint32(word, 0)
		} else {
			atomic.LoadUint32(word)
		}
	}
}

// Close unmaps the memory.
func (c *Client) Close() error { return c.unmap() }

// Post publishes a descriptor and reports whether the relay has to be woken.
func (c *Client) Post(d wire.Descriptor) (wake bool, err error) {
	if c.posted-atomic.LoadUint64(&c.completePage.TakenHead) >= wire.RingEntries {
		return false, ErrFull
	}
	c.descriptors[c.posted%wire.RingEntries] = d
	c.posted++
	publish(&c.submitPage.Tail, c.posted)
	return atomic.LoadUint32(&c.completePage.RelaySleeps) != 0, nil
}

// Next takes the next completion, if there is one.
func (c *Client) Next() (wire.Completion, bool) {
	if atomic.LoadUint64(&c.completePage.Tail) == c.finished {
		return wire.Completion{}, false
	}
	completion := c.completions[c.finished%wire.RingEntries]
	c.finished++
	publish(&c.submitPage.CompletedHead, c.finished)
	return completion, true
}

// RelaySleeps reports whether the relay waits on its eventfd.
func (c *Client) RelaySleeps() bool { return atomic.LoadUint32(&c.completePage.RelaySleeps) != 0 }

// SetSleeps says whether the client waits to be woken.
func (c *Client) SetSleeps(sleeps bool) {
	var word uint32
	if sleeps {
		word = 1
	}
	_ = atomic.SwapUint32(&c.submitPage.ClientSleeps, word)
}

// Timeline reads a timeline.
func (c *Client) Timeline(i uint32) uint64 { return atomic.LoadUint64(c.timeline(i)) }

// Advance sets a timeline.
func (c *Client) Advance(i uint32, value uint64) { atomic.StoreUint64(c.timeline(i), value) }

// Timelines is the memory of the timelines, for registration with CUDA.
func (c *Client) Timelines() []byte {
	return c.submit[wire.SubmitTimelines : wire.SubmitTimelines+wire.Timelines*wire.TimelineStride]
}
