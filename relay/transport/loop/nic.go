package loop

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/wire"
)

// NIC is an emulated NIC: contexts on GPUs, and a connection for every sender.
// A write is issued by the GPU that its target is on: a GPU that is read from
// takes what is pushed into it more slowly than what it pulls itself
// (docs/benchmarks.md has the figures). Slots in the host's memory, of relays that
// found no room on a server GPU, need no GPU here: between two such a processor
// copies, so that a NIC works whose GPUs have no room for a context either.
type NIC struct {
	loop   *poll.Loop
	busIDs []string
	log    *logrus.Entry

	driver  *cuda.Driver
	gpus    map[cuda.Device]*gpu
	senders map[*sender]bool
	pace    *pace // nil for none
	// processor copies between memories of the host.
	processor *device.Queue
	listener  *net.UnixListener
	// dying is why this process can serve nobody any more; worn, why it cannot give
	// something back but by its end, which comes when it has no sender.
	dying, worn error
}

type gpu struct {
	*device.Device
	queue *device.Queue
}

// NewNIC makes an emulated NIC beside the GPUs at these PCI addresses. It
// touches no GPU before the first sender comes. Rate bounds the bytes a second of
// all its writes; 0 leaves them as fast as they are.
func NewNIC(name string, busIDs []string, rate float64) (*NIC, error) {
	if len(busIDs) == 0 {
		return nil, errors.New("an emulated NIC needs a GPU beside it (--gpu PCI-ADDRESS)")
	}
	l, err := poll.New()
	if err != nil {
		return nil, err
	}
	n := &NIC{loop: l, busIDs: busIDs, log: logrus.WithField("nic", name), gpus: map[cuda.Device]*gpu{}, senders: map[*sender]bool{}, processor: &device.Queue{}}
	l.Add(n.processor)
	if rate > 0 {
		n.pace = &pace{perSecond: rate}
		l.Add(n.pace)
	}
	return n, nil
}

// Serve accepts senders until the listener is closed, or a CUDA error after which this
// process cannot go on: then it closes the listener itself, and returns the error.
func (n *NIC) Serve(listener *net.UnixListener) (err error) {
	ended := make(chan struct{})
	n.listener = listener
	go func() { n.loop.Run(); close(ended) }()
	defer func() {
		n.loop.Call(func() {
			for s := range n.senders {
				s.port.Close()
				s.ended(net.ErrClosed)
			}
		})
		n.settled()
		n.loop.Stop()
		<-ended
		err = n.dying
	}()
	for {
		conn, err := listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		fd := -1
		if err == nil {
			sender := packet.Conn{UnixConn: conn}
			if fd, err = sender.Detach(); err != nil {
				_ = sender.Send(wire.NewFailure(err), 0) // it has gone, or is told by the end
				sender.Close()
			}
		}
		if err != nil {
			// No descriptor left, say; senders may close theirs.
			n.log.WithError(err).Error("accepting a sender")
			time.Sleep(100 * time.Millisecond)
			continue
		}
		n.loop.Do(func() { n.accept(fd) })
	}
}

// failed looks at an error. After a sticky one every further call fails, so that only
// a new process can serve.
func (n *NIC) failed(err error) {
	if cuda.Sticky(err) {
		n.end(fmt.Errorf("the emulated NIC ends after a CUDA error: %w", err))
	}
}

// wear remembers that something could not be given back.
func (n *NIC) wear(err error, what string) {
	n.log.WithError(err).Error(what + "; this process ends when it has no sender, and a new one can begin")
	if n.worn == nil {
		n.worn = fmt.Errorf("the emulated NIC ends, because it could not give something back: %s: %w", what, err)
	}
	n.failed(err)
	n.rest()
}

// rest ends a worn NIC that serves nobody.
func (n *NIC) rest() {
	if n.worn != nil && len(n.senders) == 0 {
		n.end(n.worn)
	}
}

func (n *NIC) end(why error) {
	if n.dying != nil {
		return
	}
	n.dying = why
	for s := range n.senders {
		s.refuse(wire.Errorf(wire.StatusNICDied, "%v", why))
	}
	n.listener.Close()
}

// endTime is more than writes take that are under way when the NIC ends.
const endTime = 5 * time.Second

// settled waits for the writes that are under way: what they write is not given back
// before.
func (n *NIC) settled() {
	for end := time.Now().Add(endTime); time.Now().Before(end); time.Sleep(time.Millisecond) {
		var left int
		if !n.loop.Call(func() { left = len(n.senders) }) || left == 0 {
			return
		}
	}
}

func (n *NIC) accept(fd int) {
	if n.dying != nil {
		unix.Close(fd)
		return
	}
	s := &sender{nic: n, regions: map[uint32]*region{}}
	port, err := packet.NewPort(n.loop, fd, s.receive, s.ended)
	if err != nil {
		n.log.WithError(err).Error("a sender could not be watched")
		unix.Close(fd)
		return
	}
	s.port = port
	n.senders[s] = true
}

// open makes the contexts on the GPUs beside the NIC, those that are not there:
// a try that failed half-way goes on where it ended.
func (n *NIC) open() error {
	if n.driver == nil {
		d, err := cuda.Open()
		if err != nil {
			return wire.Errorf(wire.StatusNoCUDA, "%w", err)
		}
		n.driver = d
	}
	for _, id := range n.busIDs {
		ordinal, err := n.driver.DeviceByPCIBusID(id)
		if err == nil && n.gpus[ordinal] == nil {
			err = n.add(id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// add makes a context on a GPU, and lets it reach all that is registered.
func (n *NIC) add(busID string) error {
	g, err := device.Open(n.driver, busID)
	if err != nil {
		return err
	}
	q, err := g.NewQueue()
	if err != nil {
		return errors.Join(err, g.Close())
	}
	access := cuda.Access{Device: g.Ordinal, Write: true}
	for s := range n.senders {
		for _, m := range s.regions {
			if err := m.Allow(access); err != nil {
				return errors.Join(err, q.Close(), g.Close())
			}
		}
	}
	n.loop.Add(q)
	n.gpus[g.Ordinal] = &gpu{g, q}
	return nil
}

// sender is one relay's connection to the NIC.
type sender struct {
	nic  *NIC
	port *packet.Port
	// immediates are sent through a port, so that a receiver that is slow to
	// read holds nobody up.
	immediates *packet.Port
	regions    map[uint32]*region
	queue      []queued // of the pace
	underWay   int      // also what is queued
	gone       bool
}

// region is memory that a sender's relay has registered.
type region struct {
	*device.Memory
	number   uint32
	underWay int  // writes that name it
	retired  bool // no more will; it goes with the last of them
}

func (s *sender) receive(m wire.Message, _ uint32, fds []int) {
	defer func() { packet.CloseAll(fds) }()
	var err error
	switch m := m.(type) {
	case *wire.NICHello:
		err = s.hello(m, &fds)
	case *wire.NICRegion:
		err = s.register(m, fds)
	case *wire.NICWrite:
		err = s.write(m)
	case *wire.NICForget:
		err = s.forget(m.Region)
	default:
		err = wire.Errorf(wire.StatusMalformed, "a %T is nothing for a NIC", m)
	}
	if err != nil {
		s.nic.log.WithError(err).Warn("a sender's request failed; its connection is closed")
		s.refuse(err)
		if len(s.nic.gpus) == 0 {
			s.nic.failed(err)
		}
		// A context that cannot be made on a GPU is no reason to end those of others.
		for _, g := range s.nic.gpus {
			if lost := g.Lost(); lost != nil {
				s.nic.failed(fmt.Errorf("%w, seen after: %v", lost, err))
			}
		}
	}
}

// refuse ends the connection of a sender, which is told why.
func (s *sender) refuse(err error) {
	if s.gone {
		return
	}
	s.port.Send(wire.NewFailure(err), 0)
	s.port.Close()
	s.ended(err)
}

func (s *sender) hello(m *wire.NICHello, fds *[]int) error {
	if m.Magic != wire.Magic || len(*fds) != 1 || s.immediates != nil {
		return wire.Errorf(wire.StatusMalformed, "no hello to a NIC")
	}
	if _, err := wire.Negotiate("sender's relay", m.Oldest, m.Newest); err != nil {
		return err
	}
	// The receiver says nothing here; when it closes, the sender is told by the
	// receiver's relay.
	port, err := packet.NewPort(s.nic.loop, (*fds)[0],
		func(_ wire.Message, _ uint32, fds []int) { packet.CloseAll(fds) }, func(err error) {
			if err != io.EOF {
				s.refuse(err) // or the receiver would take it for the end of all writes
			}
		})
	if err != nil {
		return err
	}
	s.immediates, *fds = port, nil
	if m.Shares == 1 {
		for _, p := range []*packet.Port{s.port, s.immediates} {
			if err := p.Share(false); err != nil {
				s.nic.log.WithError(err).Warn("no memory is shared with a relay; the socket does alone")
			}
		}
	}
	return nil
}

func (s *sender) register(m *wire.NICRegion, fds []int) error {
	if len(fds) != 1 || s.immediates == nil || s.regions[m.Region] != nil {
		return wire.Errorf(wire.StatusMalformed, "region %d: no descriptor, no hello before it, or registered already", m.Region)
	}
	if m.Kind == wire.MemoryHost {
		memory, err := device.ImportHost(fds[0], m.Bytes)
		if err != nil {
			return wire.Errorf(wire.StatusBadDescriptor, "registering region %d: %v", m.Region, err)
		}
		s.regions[m.Region] = &region{Memory: memory, number: m.Region}
		return nil
	}
	if err := s.nic.open(); err != nil {
		return err
	}
	var access []cuda.Access
	for _, g := range s.nic.gpus {
		access = append(access, cuda.Access{Device: g.Ordinal, Write: true})
	}
	memory, err := device.Import(s.nic.driver, fds[0], m.Bytes, access...)
	if err != nil {
		// It wraps nothing: the descriptor is a stranger's, and what it causes says
		// nothing of our contexts.
		return wire.Errorf(wire.StatusCUDA, "registering region %d: %v", m.Region, err)
	}
	s.regions[m.Region] = &region{Memory: memory, number: m.Region}
	if m.Region&targetRegion == 0 || s.nic.gpus[memory.On] != nil {
		return nil
	}
	// Memory of another NIC's GPU: it has to issue the writes.
	busID, err := s.nic.driver.DevicePCIBusID(memory.On)
	if err == nil {
		err = s.nic.add(busID)
	}
	if err != nil {
		return wire.Errorf(wire.StatusCUDA, "registering region %d: %v", m.Region, err)
	}
	return nil
}

// forget lets go of a region when no write names it any more: a relay can say so
// under one.
func (s *sender) forget(number uint32) error {
	r := s.regions[number]
	if r == nil || r.retired {
		return wire.Errorf(wire.StatusUnknownMemory, "region %#x is to be forgotten, and is not registered", number)
	}
	r.retired = true
	s.settle(r)
	return nil
}

// settle unmaps a region that has been forgotten once it is in no write.
func (s *sender) settle(r *region) {
	if !r.retired || r.underWay > 0 || s.regions[r.number] != r {
		return // a write can name one region as both
	}
	delete(s.regions, r.number)
	if err := r.Close(); err != nil {
		s.nic.wear(err, "unmapping a region that is forgotten")
	}
}

// mostWrites bounds those of one sender that have not ended. A relay has one for each
// slot at most, of which there are fewer.
const mostWrites = 4096

func (s *sender) write(m *wire.NICWrite) error {
	if s.underWay >= mostWrites {
		return wire.Errorf(wire.StatusLimit, "%d writes of one sender are under way, which is the limit", s.underWay)
	}
	source, target := s.regions[m.Source], s.regions[m.Target]
	if source == nil || target == nil || source.retired || target.retired || m.Target&targetRegion == 0 {
		return wire.Errorf(wire.StatusUnknownMemory, "a write from region %#x to %#x: not registered", m.Source, m.Target)
	}
	for _, side := range []struct {
		memory *region
		offset uint64
	}{{source, m.SourceOffset}, {target, m.TargetOffset}} {
		if side.offset > side.memory.Bytes || m.Length > side.memory.Bytes-side.offset {
			return wire.Errorf(wire.StatusOutOfRange, "a write of %d bytes at offset %d of a region of %d", m.Length, side.offset, side.memory.Bytes)
		}
	}
	queue, err := s.nic.issuer(target.Memory, source.Memory)
	if err != nil {
		return wire.Errorf(wire.StatusCUDA, "a write from region %#x to %#x: %w", m.Source, m.Target, err)
	}
	s.underWay++
	source.underWay++
	target.underWay++
	if s.nic.pace == nil {
		s.issue(queue, m, source, target, 0)
	} else {
		s.nic.pace.post(s, queued{m.Length, time.Now(), func(waited time.Duration) { s.issue(queue, m, source, target, waited) }})
	}
	return nil
}

func (s *sender) issue(queue *device.Queue, m *wire.NICWrite, source, target *region, waited time.Duration) {
	queue.Move(target.At(m.TargetOffset), source.At(m.SourceOffset), m.Length, func(err error) {
		s.underWay--
		source.underWay--
		target.underWay--
		s.settle(source)
		s.settle(target)
		if err != nil {
			// Of a connection with a hole nothing is of use any more.
			s.nic.log.WithError(err).Error("a write failed; the sender's connection is closed")
			s.refuse(wire.Errorf(wire.StatusCUDA, "a write of %d bytes failed: %v", m.Length, err))
			s.nic.failed(err)
		} else {
			s.immediates.Send(&wire.NICImmediate{Immediate: m.Immediate, Length: m.Length}, 0)
			s.port.Send(&wire.NICWritten{Immediate: m.Immediate, Paced: uint32(min(waited.Microseconds(), math.MaxUint32))}, 0)
		}
		s.release()
	})
}

// issuer is the queue of a write: of the GPU that the target is on, or the source
// where the target is the host's.
func (n *NIC) issuer(target, source *device.Memory) (*device.Queue, error) {
	on, host := target, source
	switch {
	case target.Host() && source.Host():
		return n.processor, nil
	case target.Host():
		on, host = source, target
	}
	g := n.gpus[on.On]
	if g == nil { // a source of another NIC's GPU
		for _, g = range n.gpus {
			break
		}
	}
	if host.Host() {
		if err := host.Pin(g.Device); err != nil {
			return nil, err
		}
	}
	return g.queue, nil
}

func (s *sender) ended(error) {
	s.gone = true
	s.underWay -= len(s.queue) // what has not begun does not begin any more
	s.queue = nil
	s.release()
}

// release lets the regions go once the sender is gone and no write runs, and
// only then closes the receiver's socket: that tells the receiver that nothing
// can write its slots any more.
func (s *sender) release() {
	if !s.gone || s.underWay > 0 || s.regions == nil {
		return
	}
	for number, m := range s.regions {
		if err := m.Close(); err != nil {
			s.nic.wear(err, fmt.Sprintf("unmapping region %d", number))
		}
	}
	s.regions = nil
	delete(s.nic.senders, s)
	if s.immediates != nil {
		s.immediates.Close()
	}
	s.nic.rest()
}
