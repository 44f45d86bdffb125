package conformance

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
)

func init() {
	children["timeline"] = timeline
	children["ipc event"] = ipcEvent
	children["ipc event, private /dev/shm"] = privateShm
}

const rounds = 200

// timeline is the receiving process. In each iteration its stream waits for the sender's word 0 and
// copies the data; timeline verifies the data and advances word 1, alternately by the stream and by
// the CPU.
func timeline(p *peer) error {
	_, fds, err := p.receive()
	if err != nil {
		return err
	}
	if err := p.open(0); err != nil {
		return err
	}
	m, err := adopt(p.d, fds[0], size, 0)
	if err != nil {
		return err
	}
	words, err := sharedPage(p.d, fds[1])
	if err != nil {
		return err
	}
	s, err := p.d.StreamCreate()
	if err != nil {
		return err
	}
	to, err := p.d.MemAlloc(size)
	if err != nil {
		return err
	}
	if err := p.send(message{}); err != nil { // ready
		return err
	}
	for round := uint64(1); round <= rounds; round++ {
		byStream := round%2 == 0
		if err := errors.Join(
			p.d.StreamWaitValue64(s, words.address(0), round),
			p.d.MemcpyAsync(to, m.p, 64<<10, s)); err != nil {
			return err
		}
		if byStream {
			if err := p.d.StreamWriteValue64(s, words.address(1), round); err != nil {
				return err
			}
		}
		if err := p.d.StreamSynchronize(s); err != nil {
			return err
		}
		if err := verify(p.d, to, 64<<10, round); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if !byStream {
			words.set(1, round)
		}
	}
	return p.send(message{})
}

func TestTimelinesAcrossProcessesOrderCopies(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	from := pinned(t, 64<<10)
	words, wordsFD := newPage(t)
	s := stream(t)
	fd, err := driver.MemExportFD(m.handle)
	check(t, err)
	p := child(t, "timeline", nil)
	p.mustSend(t, message{}, fd, wordsFD)
	check(t, unix.Close(fd))
	p.mustReceive(t)
	for round := uint64(1); round <= rounds; round++ {
		fill(from, round)
		check(t, driver.MemcpyHtoDAsync(m.p, address(from), 64<<10, s))
		check(t, driver.StreamWriteValue64(s, words.address(0), round))
		check(t, driver.StreamWaitValue64(s, words.address(1), round))
		eventually(t, fmt.Sprintf("the answer of round %d", round), func() (bool, error) { return driver.StreamQuery(s) })
	}
	p.mustReceive(t)
}

// ipcEvent opens an event of the parent and reports its states.
func ipcEvent(p *peer) error {
	m, _, err := p.receive()
	if err != nil {
		return err
	}
	if err := p.open(0); err != nil {
		return err
	}
	var answer message
	e, err := p.d.IPCOpenEventHandle([64]byte(m.Bytes))
	if err != nil {
		answer.fail(err)
		return p.send(answer)
	}
	done, err := p.d.EventQuery(e)
	if err != nil {
		return err
	}
	if done {
		return p.send(message{Error: "the event is done before its gate is open"})
	}
	s, err := p.d.StreamCreate()
	if err != nil {
		return err
	}
	err = errors.Join(p.d.StreamWaitEvent(s, e), p.send(answer), p.d.EventSynchronize(e), p.d.StreamSynchronize(s))
	return errors.Join(err, p.d.EventDestroy(e), p.send(answer))
}

// gatedEvent returns the handle of an interprocess event behind a gate.
func gatedEvent(t *testing.T) (*page, []byte) {
	gate, _ := newPage(t)
	s, e := stream(t), event(t, cuda.EventOptions{Interprocess: true})
	h, err := driver.IPCGetEventHandle(e)
	check(t, err)
	check(t, driver.StreamWaitValue64(s, gate.address(0), 1))
	check(t, driver.EventRecord(e, s))
	return gate, h[:]
}

func TestIPCEventOrdersProcesses(t *testing.T) {
	use(t, 0)
	gate, handle := gatedEvent(t)
	p := child(t, "ipc event", nil)
	p.mustSend(t, message{Bytes: handle})
	p.mustReceive(t)
	gate.set(0, 1)
	p.mustReceive(t)
}

// privateShm creates a mount namespace with a separate /dev/shm.
func privateShm(p *peer) error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make / private: %w", err)
	}
	if err := unix.Mount("tmpfs", "/dev/shm", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount a tmpfs on /dev/shm: %w", err)
	}
	return ipcEvent(p)
}

func TestIPCEventNeedsASharedDevShm(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a mount namespace of one's own")
	}
	use(t, 0)
	_, handle := gatedEvent(t)
	p := child(t, "ipc event, private /dev/shm", &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS})
	p.mustSend(t, message{Bytes: handle})
	m, _, err := p.receive()
	check(t, err)
	if m.Result != cuda.ErrMapFailed {
		t.Errorf("%v (%s); want CUDA_ERROR_MAP_FAILED", m.Result, m.Error)
	}
}

func TestIPCEventHandleNeedsTheWish(t *testing.T) {
	use(t, 0)
	_, err := driver.IPCGetEventHandle(event(t, cuda.EventOptions{}))
	refused(t, "a handle of an event that was not made for it", err, cuda.ErrInvalidValue, cuda.ErrInvalidHandle,
		cuda.ErrNotSupported)
}
