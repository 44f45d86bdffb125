// Package client connects a process in a container to the container's relay: export GPU memory
// once, or have the relay make host memory, connect, then send and receive without a system call or
// a CUDA call per operation.
//
//	session, err := client.Dial(ctx, client.DefaultSocket)
//	memory, err := session.Export(ctx, client.Allocation{FD: fd, Bytes: n, GPU: uuid})
//	listener, err := session.Listen(ctx, uuid)    // here: give listener.Handle() away
//	receiving, err := listener.Accept(ctx)
//	sending, err := session.Connect(ctx, uuid, handle) // there
//	op, err := sending.Send(memory, 0, n)
//	moved, err := op.Wait(ctx)
//
// All methods are safe for concurrent use. After the relay's death every operation fails with
// wire.StatusRelayDied, every timeline has its end value, so that no stream waits for ever, and a
// new Dial reaches the next relay.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// DefaultSocket is the path of the relay's socket in a container.
const DefaultSocket = paths.ContainerDir + "/" + paths.SocketName

// replyTimeout bounds the answer to a request that no other client can delay: the time includes the
// creation of a CUDA context and of staging memory.
const replyTimeout = 60 * time.Second

// Session connects a client to the relay.
type Session struct {
	conn    packet.Conn
	version uint32

	wakeRelay  int
	wakeClient *os.File
	ended      chan struct{} // closed when nothing is under way any more; broken says why
	closing    sync.Once

	mu          sync.Mutex
	broken      error // why nothing new begins
	sequence    uint32
	replies     map[uint32]chan reply
	operations  map[uint64]*Operation
	cookie      uint64
	connections map[uint32]*Connection
	mapped      map[*Memory]bool // here, with Data or Ptr
	handOvers   map[uint32]*HandOver
	keeping     bool         // a goroutine keeps ended timelines at the end value
	ring        *ring.Client // nil once closed
	lists       lists

	exports  sync.Mutex // held while the allocations of a range are sent
	spinners atomic.Int32
	readers  sync.WaitGroup
}

type reply struct {
	message wire.Message
	fds     []int
}

// Dial connects to a relay's socket. gpus are the GPUs whose memory the program will export, if
// already known: without a relay, the error names their lanes. While the relay's queue of
// connections is full Dial waits, until the context's deadline or for a minute; then the error has
// StatusBusy.
func Dial(ctx context.Context, socket string, gpus ...wire.UUID) (*Session, error) {
	return dial(ctx, socket, wire.OldestVersion, wire.NewestVersion, gpus...)
}

func dial(ctx context.Context, socket string, oldest, newest uint32, gpus ...wire.UUID) (*Session, error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(replyTimeout)
	}
	begin := time.Now()
	connecting, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	conn, err := packet.DialContext(connecting, socket)
	if errors.Is(err, packet.ErrQueueFull) {
		return nil, wire.Errorf(
			wire.StatusBusy,
			"the relay at %s accepts no connection: its queue was full for %v; peerlane relay list on the host shows its state",
			socket,
			time.Since(begin).Round(time.Millisecond),
		).On(
			socket,
		)
	}
	if err != nil {
		return nil, noRelay(socket, err, gpus)
	}
	timeout := time.Until(deadline)
	answer, fds, err := conn.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: oldest, Newest: newest}, timeout)
	if err != nil {
		conn.Close()
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
			return nil, wire.Errorf(wire.StatusRelayDied, "the relay at %s %w", socket, errClosedSilently).On(socket)
		}
		return nil, fmt.Errorf("the relay at %s: %w", socket, err)
	}
	welcome, ok := answer.(*wire.Welcome)
	if !ok || len(fds) != 4 {
		packet.CloseAll(fds)
		conn.Close()
		return nil, wire.Errorf(
			wire.StatusMalformed,
			"the relay at %s answered hello with a %T and %d descriptors",
			socket,
			answer,
			len(fds),
		)
	}
	if welcome.Version < oldest || welcome.Version > newest {
		packet.CloseAll(fds)
		conn.Close()
		return nil, wire.Errorf(wire.StatusVersion, "%w", &versionError{socket, welcome.Version, oldest, newest})
	}
	wake := os.NewFile(uintptr(fds[3]), "peerlane-wake")
	// SetDeadline fails if Go cannot wait for the descriptor; each read would fail.
	if err := wake.SetReadDeadline(time.Time{}); err != nil {
		packet.CloseAll(fds[:3])
		wake.Close()
		conn.Close()
		return nil, fmt.Errorf(
			"the pipe by which the relay wakes this program cannot be waited for: epoll takes no more descriptors "+
				"(fs.epoll.max_user_watches), or memory is short: %w",
			err,
		)
	}
	shared, err := ring.OpenClient(fds[0], fds[1])
	packet.CloseAll(fds[:2])
	if err != nil {
		packet.CloseAll(fds[2:3])
		wake.Close()
		conn.Close()
		return nil, err
	}
	s := &Session{
		conn: conn, version: welcome.Version, ring: shared,
		wakeRelay: fds[2], wakeClient: wake,
		ended:       make(chan struct{}),
		replies:     map[uint32]chan reply{},
		operations:  map[uint64]*Operation{},
		connections: map[uint32]*Connection{},
		mapped:      map[*Memory]bool{},
		handOvers:   map[uint32]*HandOver{},
	}
	shared.SetSleeps(true)
	s.readers.Add(2)
	go s.readSocket()
	go s.readWakes()
	return s, nil
}

// Version is the protocol's that both sides agreed on.
func (s *Session) Version() uint32 { return s.version }

// closeTimeout bounds how long Close waits for the relay: for copies in flight, and for granted
// writes of remote relays.
const closeTimeout = 30 * time.Second

// Close ends the session and returns when the relay no longer reads or writes the exported memory:
// then the program may free the memory. Operations that have not ended fail, and host memory and
// staging memory are unmapped: streams must not use the timelines afterwards. Where the relay does
// not let go within 30 seconds, the error says so, and copies may still be under way; as they may
// of a session that ended by itself.
func (s *Session) Close() (err error) {
	s.closing.Do(func() { err = s.close() })
	return err
}

func (s *Session) close() error {
	err := s.leave(wire.Errorf(wire.StatusClosed, "the session was closed"))
	err = errors.Join(err, s.conn.Close())
	s.readers.Wait()
	s.mu.Lock()
	err = errors.Join(err, s.ring.Close(), s.wakeClient.Close(), unix.Close(s.wakeRelay))
	s.ring = nil
	var mapped []func() error
	for m := range s.mapped {
		mapped = append(mapped, m.forget())
	}
	s.mu.Unlock()
	for _, unmap := range mapped {
		err = errors.Join(err, unmap())
	}
	return err
}

// leave ends a session that works: no operation starts, and operations in flight end. The relay
// closes the socket when that is so.
func (s *Session) leave(why error) error {
	end := time.Now().Add(closeTimeout)
	// Before the lock, which a request holds that the relay makes no room for.
	_ = s.conn.SetWriteDeadline(end)
	s.mu.Lock()
	if s.broken != nil {
		s.mu.Unlock()
		return nil
	}
	s.broken = why
	for _, c := range s.connections {
		c.takeDown(why)
	}
	s.mu.Unlock()
	told := s.conn.Send(&wire.Goodbye{}, 0)
	wait := time.Until(end)
	if told != nil { // a relay that is dead, which the reader is about to notice, or that hears nothing
		wait = min(wait, time.Second)
	}
	select {
	case <-s.ended:
		return nil
	case <-time.After(wait):
		s.fail(why)
		return fmt.Errorf(
			"the session was closed, and the relay did not let go of its memory within %v (%w): copies may still be under way",
			closeTimeout,
			errors.Join(told, os.ErrDeadlineExceeded),
		)
	}
}

// Err is nil while the session works, and afterwards the cause of its end.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// Ended is closed when the session has ended.
func (s *Session) Ended() <-chan struct{} { return s.ended }

// fail ends the session: once, for everything that waits.
func (s *Session) fail(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over() {
		return
	}
	if s.broken == nil {
		s.broken = why
	}
	why = s.broken // which may be that it was closed
	close(s.ended)
	if s.ring != nil {
		s.drain()
		for i := range uint32(wire.Timelines) {
			s.ring.Advance(i, wire.TimelineEnd)
		}
		s.endHandOvers(nil, why)
	}
	for _, op := range s.operations {
		op.end(0, why)
	}
	clear(s.operations)
	for _, c := range s.connections {
		c.takeDown(why)
	}
	// A read of the pipe returns at once from now on. Without contact to the relay, operations end
	// with the session.
	_ = s.wakeClient.SetReadDeadline(time.Unix(1, 0))
}

func (s *Session) over() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// readSocket takes replies and events until the relay is gone.
func (s *Session) readSocket() {
	defer s.readers.Done()
	for {
		m, sequence, fds, err := s.conn.Receive()
		if err != nil {
			packet.CloseAll(fds)
			s.fail(
				wire.Errorf(
					wire.StatusRelayDied,
					"the relay of this container died%s; connect to it again, its successor is there within seconds",
					unexpected(err),
				),
			)
			return
		}
		switch event := m.(type) {
		case *wire.ConnectionDown:
			packet.CloseAll(fds)
			s.connectionDown(event)
			continue
		case *wire.Failure:
			if sequence == 0 {
				packet.CloseAll(fds)
				s.fail(event.Err())
				continue
			}
		}
		s.mu.Lock()
		waiting := s.replies[sequence]
		delete(s.replies, sequence)
		s.mu.Unlock()
		if waiting == nil { // the request was given up
			packet.CloseAll(fds)
			s.release(m)
			continue
		}
		waiting <- reply{m, fds}
	}
}

// unexpected returns the details of an error other than the closed connection.
func unexpected(err error) string {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
		return ""
	}
	return fmt.Sprintf(" (%v)", err)
}

// request sends a message and waits for the answer.
func (s *Session) request(ctx context.Context, m wire.Message, fds ...int) (wire.Message, error) {
	answer, received, err := s.exchange(ctx, m, fds...)
	packet.CloseAll(received)
	return answer, err
}

// exchange is request for answers with descriptors, which are the caller's.
func (s *Session) exchange(ctx context.Context, m wire.Message, fds ...int) (wire.Message, []int, error) {
	answer := make(chan reply, 1)
	s.mu.Lock()
	if s.broken != nil {
		defer s.mu.Unlock()
		return nil, nil, s.broken
	}
	s.sequence++
	if s.sequence == 0 {
		s.sequence = 1 // 0 is for events
	}
	sequence := s.sequence
	s.replies[sequence] = answer
	err := s.conn.Send(m, sequence, fds...)
	s.mu.Unlock()
	if err != nil {
		s.giveUp(sequence)
		select {
		case <-s.ended:
		case <-time.After(time.Second): // the reader learns why the socket broke
		}
		return nil, nil, errors.Join(s.Err(), err)
	}
	var r reply
	select {
	case r = <-answer:
	case <-s.ended:
		if !s.giveUp(sequence) {
			packet.CloseAll((<-answer).fds)
		}
		return nil, nil, s.Err()
	case <-ctx.Done():
		if s.giveUp(sequence) {
			return nil, nil, ctx.Err()
		}
		r = <-answer // it came meanwhile
	}
	if failure, ok := r.message.(*wire.Failure); ok {
		packet.CloseAll(r.fds)
		return nil, nil, failure.Err()
	}
	return r.message, r.fds, nil
}

// giveUp reports false when the answer is there already.
func (s *Session) giveUp(sequence uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, waiting := s.replies[sequence]
	delete(s.replies, sequence)
	return waiting
}

// release releases the object that a late answer to an abandoned request brought: no caller knows
// the object.
func (s *Session) release(m wire.Message) {
	var request wire.Message
	switch m := m.(type) {
	case *wire.Exported:
		request = &wire.Unexport{Memory: m.Memory}
	case *wire.HostMemoryMade:
		request = &wire.Unexport{Memory: m.Memory}
	case *wire.EventOpened:
		request = &wire.EventClose{Event: m.Event}
	case *wire.StagingMade:
		request = &wire.Unexport{Memory: m.Memory}
	case *wire.Listening:
		request = &wire.Unlisten{Listener: m.Listener}
	case *wire.Exposed:
		request = &wire.Revoke{Region: m.Region}
	case *wire.Connected:
		request = &wire.Disconnect{Connection: m.Connection}
	default:
		return
	}
	// The release fails if the session has ended, which also releases the object.
	go func() { _, _ = s.request(context.Background(), request) }()
}

// ask is request for answers of a single type.
func ask[Answer wire.Message](ctx context.Context, s *Session, m wire.Message, fds ...int) (Answer, error) {
	var none Answer
	answer, err := s.request(ctx, m, fds...)
	if err != nil {
		return none, err
	}
	typed, ok := answer.(Answer)
	if !ok {
		return none, wire.Errorf(wire.StatusMalformed, "the relay answered a %T with a %T", m, answer)
	}
	return typed, nil
}

// Statistics are the counters of the container's relay.
func (s *Session) Statistics(ctx context.Context) (*wire.StatisticsReply, error) {
	return ask[*wire.StatisticsReply](ctx, s, &wire.Statistics{})
}

// Allocation is memory to export.
type Allocation struct {
	// FD is the POSIX file descriptor of a CUDA VMM allocation; it stays the
	// caller's.
	FD int
	// Bytes is the whole allocation's size.
	Bytes uint64
	// Parts are adjacent allocations in place of FD, at most wire.MaxParts: a range of PyTorch's
	// expandable segments, say. FD and Bytes are not used then.
	Parts []Part
	// Offset and Length are the range that is exported; a Length of 0 is all.
	Offset, Length uint64
	// GPU is the device that the memory is on.
	GPU wire.UUID
	// Access is wire.AccessSend, wire.AccessReceive or both; 0 is both.
	Access uint32
	// DMABuf makes a DMA-BUF descriptor of the whole FD, or of the adjacent Parts
	// (cuda.Driver.MemDMABufFD); Export closes the descriptor. Export calls DMABuf if the GPU is
	// near the NICs, which then read and write the memory in place. nil means no DMA-BUF; the relay
	// gets the error of a failure: then the data is copied. DMABuf should fail for memory without
	// cuda.Driver.PointerRDMACapable, of which CUDA nevertheless makes a DMA-BUF.
	DMABuf func() (int, error)
}

// Part is an allocation of a range, in order.
type Part struct {
	FD     int    // as Allocation's
	Bytes  uint64 // a multiple of the GPU's granularity, 2 MiB on those of today
	Offset uint64 // in the range: at the end of the previous part
}

// Memory is memory that the relay has mapped.
type Memory struct {
	session *Session
	number  uint32
	// Bytes is the exported range's length.
	Bytes uint64
	// Data is this process's mapping of host memory, until Unexport or the session's Close; nil of
	// a GPU's. Operations send from the memory and receive into the memory in the order of their
	// posts: ordinary memory, without a CUDA call.
	Data []byte
	// Ptr is the address of staging memory for streams of the requested GPU, valid until Unexport
	// or the session's Close.
	Ptr cuda.Ptr
	// Server is the GPU with the staging memory, ServerIndex the GPU's number on the host.
	Server      wire.UUID
	ServerIndex int
	unmap       func() error // ends Data or Ptr; of the session's lock
}

// Export lets the relay map memory of this process.
func (s *Session) Export(ctx context.Context, a Allocation) (*Memory, error) {
	if len(a.Parts) > 0 {
		a.Bytes = 0
		for _, p := range a.Parts {
			if p.Bytes > math.MaxUint64-a.Bytes {
				return nil, wire.Errorf(wire.StatusOutOfRange, "allocations of more than 2^64 bytes")
			}
			a.Bytes += p.Bytes
		}
	}
	if a.Length == 0 {
		a.Length = a.Bytes - min(a.Offset, a.Bytes)
	}
	if a.Access == 0 {
		a.Access = wire.AccessSend | wire.AccessReceive
	}
	request := &wire.Export{Bytes: a.Bytes, Offset: a.Offset, Length: a.Length, GPU: a.GPU, Access: a.Access}
	var m *wire.Exported
	var err error
	if len(a.Parts) == 0 {
		m, err = ask[*wire.Exported](ctx, s, request, a.FD)
	} else {
		m, err = s.exportParts(ctx, request, a.Parts)
	}
	if err != nil {
		return nil, err
	}
	if m.Wants == wire.WantsDMABuf {
		if err := s.lend(m.Memory, a.DMABuf); err != nil {
			s.release(m)
			return nil, err
		}
	}
	return &Memory{session: s, number: m.Memory, Bytes: a.Length}, nil
}

// lend sends the relay a DMA-BUF of exported memory, or the reason for its absence.
func (s *Session) lend(memory uint32, dmabuf func() (int, error)) error {
	request := &wire.DMABuf{Memory: memory}
	if dmabuf == nil {
		wire.SetText(request.Reason[:], "the program gave none")
		return s.tell(request)
	}
	fd, err := dmabuf()
	if err != nil {
		wire.SetText(request.Reason[:], err.Error())
		return s.tell(request)
	}
	return errors.Join(s.tell(request, fd), os.NewSyscallError("close", unix.Close(fd)))
}

// exportParts sends the allocations one by one, and then the export: one range at a time.
func (s *Session) exportParts(ctx context.Context, request *wire.Export, parts []Part) (*wire.Exported, error) {
	if len(parts) > wire.MaxParts {
		return nil, wire.Errorf(
			wire.StatusLimit,
			"a range of %d allocations; %d are possible: export it in several ranges",
			len(parts),
			wire.MaxParts,
		)
	}
	s.exports.Lock()
	defer s.exports.Unlock()
	for _, p := range parts {
		if err := s.sendPart(p); err != nil {
			// The sent allocations belong to no second range.
			_, dropped := s.request(ctx, &wire.Export{Parts: wire.MaxParts + 1})
			if wire.StatusOf(dropped) != wire.StatusMalformed {
				err = errors.Join(err, dropped)
			}
			return nil, fmt.Errorf("exporting %d allocations: %w", len(parts), err)
		}
	}
	request.Parts = uint32(len(parts))
	return ask[*wire.Exported](ctx, s, request)
}

// sendPart sends an allocation's descriptor.
func (s *Session) sendPart(p Part) error {
	return s.tell(&wire.ExportPart{Bytes: p.Bytes, Offset: p.Offset}, p.FD)
}

// tell sends a message without an answer. The kernel limits the descriptors in flight: then the
// send waits until the relay has read some.
func (s *Session) tell(m wire.Message, fds ...int) error {
	for end := time.Now().Add(replyTimeout); ; time.Sleep(time.Millisecond) {
		err := s.conn.Send(m, 0, fds...)
		if !errors.Is(err, unix.ETOOMANYREFS) || time.Now().After(end) {
			return err
		}
	}
}

// ExportIPC is Export for memory of cudaMalloc (cuMemAlloc), if the administrator (relay.cuda_ipc)
// and the driver permit CUDA IPC: by the handle that cuIpcGetMemHandle gives. FD and Bytes are not
// used; Offset is in the allocation (cuMemGetAddressRange), and Length is needed. DMABuf makes a
// descriptor of the whole allocation. On route direct the memory cannot be a receive buffer. Free
// the memory only after Unexport has returned and the memory's operations have ended.
func (s *Session) ExportIPC(ctx context.Context, handle [64]byte, a Allocation) (*Memory, error) {
	if a.Access == 0 {
		a.Access = wire.AccessSend | wire.AccessReceive
	}
	m, err := ask[*wire.Exported](
		ctx,
		s,
		&wire.ExportIPC{Offset: a.Offset, Length: a.Length, GPU: a.GPU, Access: a.Access, Handle: handle},
	)
	if err != nil {
		return nil, err
	}
	if m.Wants == wire.WantsDMABuf {
		if err := s.lend(m.Memory, a.DMABuf); err != nil {
			s.release(m)
			return nil, err
		}
	}
	return &Memory{session: s, number: m.Memory, Bytes: a.Length}, nil
}

// HostMemory is host memory to be made.
type HostMemory struct {
	Bytes uint64
	// GPU names the lane of the memory: connections of that lane send from and receive into the
	// memory; the remote side may use GPU memory or host memory.
	GPU wire.UUID
	// Access is wire.AccessSend, wire.AccessReceive or both; 0 is both.
	Access uint32
}

// HostMemory has the relay make zeroed host memory, and maps the memory here. This process
// allocates the pages, so the kernel charges the container. The container needs only the lane's
// GPU.
func (s *Session) HostMemory(ctx context.Context, h HostMemory) (*Memory, error) {
	if h.Access == 0 {
		h.Access = wire.AccessSend | wire.AccessReceive
	}
	request := &wire.HostMemory{Bytes: h.Bytes, GPU: h.GPU, Access: h.Access}
	if s.version >= wire.PopulateVersion {
		request.Populates = 1
	}
	answer, fds, err := s.exchange(ctx, request)
	if err != nil {
		return nil, err
	}
	defer packet.CloseAll(fds)
	made, ok := answer.(*wire.HostMemoryMade)
	if !ok || len(fds) != 1 || made.Bytes < h.Bytes || made.Bytes > math.MaxInt {
		return nil, wire.Errorf(
			wire.StatusMalformed,
			"the relay answered for host memory with a %T and %d descriptors",
			answer,
			len(fds),
		)
	}
	data, err := unix.Mmap(fds[0], 0, int(made.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		s.release(made)
		return nil, fmt.Errorf("host memory: %w", os.NewSyscallError("mmap", err))
	}
	if request.Populates == 1 {
		// The kernel charges the pages to the control group of this process, not to the relay's.
		err := ring.Populate(data, true)
		if err == nil {
			_, err = ask[*wire.Done](ctx, s, &wire.HostMemoryPopulated{Memory: made.Memory})
		}
		if err != nil {
			s.release(made)
			return nil, errors.Join(fmt.Errorf("host memory: %w", err), os.NewSyscallError("munmap", unix.Munmap(data)))
		}
	}
	return s.keep(&Memory{session: s, number: made.Memory, Bytes: h.Bytes, Data: data[:h.Bytes:h.Bytes],
		unmap: func() error { return os.NewSyscallError("munmap", unix.Munmap(data)) }})
}

// keep has the session's Close unmap a memory.
func (s *Session) keep(m *Memory) (*Memory, error) {
	s.mu.Lock()
	if s.ring != nil {
		defer s.mu.Unlock()
		s.mapped[m] = true
		return m, nil
	}
	broken, unmap := s.broken, m.forget() // it was closed meanwhile
	s.mu.Unlock()
	return nil, errors.Join(broken, unmap())
}

// forget clears Data and Ptr, and returns a function that unmaps the memory. The caller holds the
// session's lock for forget, and not for the returned function: a driver may take its time.
func (m *Memory) forget() (unmap func() error) {
	delete(m.session.mapped, m)
	unmap, m.unmap, m.Data, m.Ptr = m.unmap, nil, nil, 0
	if unmap == nil {
		unmap = func() error { return nil }
	}
	return unmap
}

// Unexport takes memory back: no new operation can use the memory, and the relay unmaps the memory
// when operations in flight have ended. Unexport revokes the memory's regions, and returns when no
// operation of a remote program accesses the memory; the program knows the ends of local
// operations. No stream of this process may use staging memory any more.
func (m *Memory) Unexport(ctx context.Context) error {
	m.session.mu.Lock()
	unmap := m.forget()
	m.session.mu.Unlock()
	err := unmap() // first, so that this process keeps no memory that the relay frees
	_, asked := ask[*wire.Done](ctx, m.session, &wire.Unexport{Memory: m.number})
	return errors.Join(asked, err)
}

// Listener waits for senders.
type Listener struct {
	session *Session
	number  uint32
	gpu     wire.UUID
	handle  wire.Handle

	mu sync.Mutex
	// asked are requests whose Accept was given up, or did not wait: the next sender is the next
	// Accept's.
	asked []chan accepted
}

type accepted struct {
	connection *Connection
	err        error
}

// Listen makes a listener whose connections receive into memory of this GPU.
func (s *Session) Listen(ctx context.Context, gpu wire.UUID) (*Listener, error) {
	m, err := ask[*wire.Listening](ctx, s, &wire.Listen{GPU: gpu})
	if err != nil {
		return nil, err
	}
	return &Listener{session: s, number: m.Listener, gpu: gpu, handle: m.Handle}, nil
}

// Handle has the address and the secret of the listener. A program with the handle can connect.
func (l *Listener) Handle() wire.Handle { return l.handle }

// Accept waits for a sender.
func (l *Listener) Accept(ctx context.Context) (*Connection, error) {
	answer := l.ask()
	select {
	case a := <-answer:
		return a.connection, a.err
	case <-ctx.Done():
		l.later(answer)
		return nil, ctx.Err()
	}
}

// TryAccept is Accept that does not wait: nil where no sender is known yet. The request continues,
// and a later Accept gets the answer.
func (l *Listener) TryAccept() (*Connection, error) {
	answer := l.ask()
	select {
	case a := <-answer:
		return a.connection, a.err
	default:
		l.later(answer)
		return nil, nil
	}
}

// ask asks the relay for the next sender, if that has not been done.
func (l *Listener) ask() chan accepted {
	l.mu.Lock()
	var answer chan accepted
	if len(l.asked) > 0 {
		answer, l.asked = l.asked[0], l.asked[1:]
	}
	l.mu.Unlock()
	if answer == nil {
		answer = make(chan accepted, 1)
		go func() {
			m, err := ask[*wire.Connected](context.Background(), l.session, &wire.Accept{Listener: l.number})
			if err != nil {
				answer <- accepted{err: err}
				return
			}
			answer <- accepted{connection: l.session.connection(m)}
		}()
	}
	return answer
}

// later passes a pending answer to the next caller.
func (l *Listener) later(answer chan accepted) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = append(l.asked, answer)
}

// Close ends the listener; accepted connections stay.
func (l *Listener) Close(ctx context.Context) error {
	_, err := ask[*wire.Done](ctx, l.session, &wire.Unlisten{Listener: l.number})
	return err
}
