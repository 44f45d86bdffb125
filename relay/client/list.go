package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// ListEntry is a range of a list: Length bytes at Offset of a memory of this process, and from byte
// At on of the region with the key. Length is at least 1.
type ListEntry struct {
	Memory         *Memory
	Offset, Length uint64
	Key            wire.RemoteKey
	At             uint64
}

// WriteList writes the entries of a list to regions of the remote side, in a single operation. The
// operation ends when the bytes are in the remote memory; Wait returns the number of bytes. The
// relays move neighbouring entries together. Entries have no order: no byte of a destination may be
// in two of them.
//
// If an entry fails, no further entries begin, and Wait returns the status of the first entry that
// failed; Failed is its index. The remaining entries have been moved completely or not at all. If
// the connection goes down, an entry may be moved in part. The memories stay exported until the
// operation has ended. Cancel ends a list with entries that have not started.
//
// A session has wire.MaxListEntries entries of lists that have not ended: for more WriteList
// returns ErrListsFull. The first list of a session asks the relay for memory, at most until ctx
// ends. A relay of an older release has no lists: the error has wire.StatusVersion; if the remote
// relay is too old, the operation has that error.
func (c *Connection) WriteList(ctx context.Context, entries []ListEntry, options ...Option) (*Operation, error) {
	return c.list(ctx, wire.OpWriteList, entries, options)
}

// ReadList reads the entries of a list from regions of the remote side; the rest is as with
// WriteList and Read.
func (c *Connection) ReadList(ctx context.Context, entries []ListEntry, options ...Option) (*Operation, error) {
	return c.list(ctx, wire.OpReadList, entries, options)
}

// Failed is the index of the first failed entry, after Wait returned an error of an entry; 0 of
// other operations.
func (op *Operation) Failed() int { return int(op.failed) }

// ErrListsFull says that the entries of lists that have not ended leave too little room.
var ErrListsFull = fmt.Errorf(
	"the session's lists are full: they have %d entries, and lists that were posted have to end first",
	wire.MaxListEntries,
)

// lists is the session's list memory, with the used spans.
type lists struct {
	memory    *Memory // nil before the first list
	asking    chan struct{}
	used      []*span // sorted
	populated uint64  // entries from the first on whose pages are there
}

// span is entries of list memory, of one operation.
type span struct{ first, n uint64 }

const entryBytes = uint64(unsafe.Sizeof(wire.ListEntryLayout{}))

func (c *Connection) list(ctx context.Context, kind uint32, entries []ListEntry, options []Option) (*Operation, error) {
	n := uint64(len(entries))
	if n == 0 || n > wire.MaxListEntries {
		return nil, wire.Errorf(wire.StatusOutOfRange, "a list of %d entries: it has 1 to %d", n, wire.MaxListEntries)
	}
	keys := make([]wire.UUID, n)
	for i := range entries {
		k, ok := entries[i].Key.Layout()
		switch {
		case !ok:
			return nil, wire.Errorf(
				wire.StatusBadKey,
				"entry %d: these %d bytes are not the key of a region",
				i,
				len(entries[i].Key),
			)
		case entries[i].Memory == nil || entries[i].Length == 0:
			return nil, wire.Errorf(wire.StatusOutOfRange, "entry %d has no memory, or no bytes", i)
		}
		keys[i] = k.Key
	}
	s := c.session
	if err := s.openLists(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	at, err := s.lists.take(n)
	if err == nil {
		err = s.lists.populate(at.first + n)
	}
	if err != nil {
		if at != nil {
			s.lists.release(at)
		}
		if s.broken != nil {
			err = s.broken
		}
		s.mu.Unlock()
		return nil, err
	}
	to := unsafe.Slice((*wire.ListEntryLayout)(unsafe.Pointer(&s.lists.memory.Data[at.first*entryBytes])), n)
	for i := range entries {
		e := &entries[i]
		to[i] = wire.ListEntryLayout{Memory: e.Memory.number, Offset: e.Offset, Length: e.Length, At: e.At, Key: keys[i]}
	}
	s.mu.Unlock()
	d := wire.Descriptor{
		Operation: kind, Connection: c.number, Offset: at.first * entryBytes, Length: n,
		WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline,
	}
	for _, o := range options {
		o(&d)
	}
	return c.submitList(d, at)
}

// submitList is submit for a list. Its span is the operation's, or given back.
func (c *Connection) submitList(d wire.Descriptor, at *span) (*Operation, error) {
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	op, wake, err := c.postLocked(d)
	if err != nil {
		s.lists.release(at)
		return nil, err
	}
	op.span = at
	if wake {
		poll.Ring(s.wakeRelay)
	}
	return op, nil
}

// openLists asks the relay for list memory, once.
func (s *Session) openLists(ctx context.Context) error {
	if s.version < wire.ListVersion {
		return wire.Errorf(
			wire.StatusVersion,
			"the relay has no list operations: it speaks version %d of Peerlane's protocol, and they came with version "+
				"%d; install the same release of Peerlane in the image and on the host",
			s.version,
			wire.ListVersion,
		)
	}
	for {
		s.mu.Lock()
		asking := s.lists.asking
		switch {
		case s.broken != nil:
			err := s.broken
			s.mu.Unlock()
			return err
		case s.lists.memory != nil:
			s.mu.Unlock()
			return nil
		case asking == nil:
			asking = make(chan struct{})
			s.lists.asking = asking
			s.mu.Unlock()
			m, err := s.askLists(ctx)
			s.mu.Lock()
			s.lists.memory, s.lists.asking = m, nil
			s.mu.Unlock()
			close(asking)
			return err
		}
		s.mu.Unlock()
		select {
		case <-asking: // another goroutine has asked
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Session) askLists(ctx context.Context) (*Memory, error) {
	answer, fds, err := s.exchange(ctx, &wire.ListMemory{})
	if err != nil {
		return nil, err
	}
	defer packet.CloseAll(fds)
	const bytes = wire.MaxListEntries * entryBytes
	made, ok := answer.(*wire.ListMemoryMade)
	if !ok || len(fds) != 1 || made.Bytes != bytes {
		return nil, wire.Errorf(
			wire.StatusMalformed,
			"the relay answered for list memory with a %T and %d descriptors",
			answer,
			len(fds),
		)
	}
	data, err := unix.Mmap(fds[0], 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("list memory: %w", os.NewSyscallError("mmap", err))
	}
	return s.keep(
		&Memory{
			session: s,
			Bytes:   bytes,
			Data:    data,
			unmap:   func() error { return os.NewSyscallError("munmap", unix.Munmap(data)) },
		},
	)
}

// take finds room for n entries. The session's lock is held.
func (l *lists) take(n uint64) (*span, error) {
	if l.memory == nil || l.memory.Data == nil {
		return nil, errors.New("the session was closed")
	}
	first, i := uint64(0), 0
	for ; i < len(l.used) && l.used[i].first-first < n; i++ {
		first = l.used[i].first + l.used[i].n
	}
	if n > wire.MaxListEntries-first {
		return nil, ErrListsFull
	}
	at := &span{first, n}
	l.used = append(l.used, nil)
	copy(l.used[i+1:], l.used[i:])
	l.used[i] = at
	return at, nil
}

// release ends take. The session's lock is held.
func (l *lists) release(at *span) {
	for i, used := range l.used {
		if used == at {
			l.used = append(l.used[:i], l.used[i+1:]...)
			return
		}
	}
}

// populate allocates the pages of the first n entries, so that the kernel charges them to this
// process's control group.
func (l *lists) populate(n uint64) error {
	if n <= l.populated {
		return nil
	}
	page := uint64(os.Getpagesize())
	from := l.populated * entryBytes / page * page
	if err := ring.Populate(l.memory.Data[from:n*entryBytes], true); err != nil {
		return err
	}
	l.populated = n
	return nil
}
