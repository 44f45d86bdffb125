// Package engine moves the bytes of software devices (package softdevice) on GPUs: a separate
// process with a context on every GPU with registered memory. A process with a software device
// registers GPU memory here by CUDA's export of the allocation, and requests copies between regions
// of the host's processes. The copy engine of a GPU copies, as a NIC reads and writes GPU memory
// without the GPU's processors.
//
// Work requests and completions travel over rings in shared memory (rings.go): the engine is the
// NIC of the queue pairs that processes connect to it (pair.go). Registrations, and copies for
// requests that the engine refuses, go by one message per order and per answer on a seqpacket
// socket; libibverbs/engine.c is the other side. Numbers of regions are the keys of verbs: an even
// key (lkey) names a region of the asking process, an odd key (rkey) a region that any process may
// write.
package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
)

// SocketName is the name of the engine's socket in the directory of a software device's host.
const SocketName = "engine"

// Kinds of orders.
const (
	orderRegisterGPU  = 1 // with the descriptor of an allocation
	orderRegisterHost = 2 // with a memfd
	orderForget       = 3
	orderMove         = 4
	orderShare        = 5 // with the descriptors of the rings
	orderConnect      = 6
	orderDisconnect   = 7
)

// Access of a region, as ibv_access_flags.
const (
	localWrite  = 1
	remoteWrite = 2
)

const (
	orderBytes  = 64
	answerBytes = 16
	// maxDescriptors is how many a message has at most.
	maxDescriptors = 4
	// maxMoves bounds the unfinished copies of a process.
	maxMoves = 4096
)

// order is a message of a process. Addresses are the region's own, as in work requests.
type order struct {
	kind, access uint32
	id           uint64
	from, to     uint32 // keys; a registration has the lkey in from
	// source and target are addresses. A registration has the region's address in source and the offset in the
	// allocation in target.
	source, target uint64
	bytes, size    uint64 // of the region or copy, and of the allocation
	domain         uint64 // the protection domain of a registration or queue pair
}

func parse(b []byte) (o order, ok bool) {
	if len(b) != orderBytes {
		return o, false
	}
	e := binary.LittleEndian
	return order{
		kind: e.Uint32(b), access: e.Uint32(b[4:]), id: e.Uint64(b[8:]), from: e.Uint32(b[16:]), to: e.Uint32(b[20:]),
		source: e.Uint64(
			b[24:],
		), target: e.Uint64(b[32:]), bytes: e.Uint64(b[40:]), size: e.Uint64(b[48:]), domain: e.Uint64(b[56:]),
	}, true
}

// Engine serves the processes of a host. The fields belong to the loop.
type Engine struct {
	loop      *poll.Loop
	driver    *cuda.Driver
	gpus      map[cuda.Device]*gpu
	regions   map[uint32]*region // by lkey
	clients   map[*client]bool
	processor *device.Queue // copies between host memory
	listener  *net.UnixListener
	awake     awake
	pairs     map[uint32]*pair
	movers    map[*device.Queue]*mover
	ports     map[uint32]*port // by number of the device
	waiting   int              // works that wait for a port
	doubtful  []*pair          // with a doubtful work
	small     *device.Memory   // of reads, nil before the first
	places    []uint64         // in small, that are free
	figures   Figures
	// lost is the sticky CUDA error after which this process can serve nobody.
	lost error
}

type gpu struct {
	*device.Device
	queue *device.Queue
	// reads do not wait for the writes of other queue pairs.
	reads *device.Queue
}

// client is a process with a software device.
type client struct {
	engine *Engine
	fd     int
	moves  int // unfinished
	gone   bool
	rings  *rings // nil for a process without shared memory
}

// region is memory that a process has registered.
type region struct {
	*device.Memory
	owner   *client
	key     uint32
	access  uint32
	address uint64 // the address of the first byte in work requests
	at      uint64 // the place of that byte in the allocation
	bytes   uint64
	domain  uint64
	moves   int // unfinished copies of the region
	retired bool
	// forgotten is called when no copy uses the retired region any more.
	forgotten func()
}

// New makes an engine.
func New() (*Engine, error) {
	l, err := poll.New()
	if err != nil {
		return nil, err
	}
	e := &Engine{
		loop:      l,
		gpus:      map[cuda.Device]*gpu{},
		regions:   map[uint32]*region{},
		clients:   map[*client]bool{},
		processor: &device.Queue{},
		pairs:     map[uint32]*pair{},
		movers:    map[*device.Queue]*mover{},
		ports:     map[uint32]*port{},
	}
	l.Add(nic{e})
	l.Add(e.processor)
	if runtime.NumCPU() >= manyProcessors {
		l.Add(&e.awake)
	}
	return e, nil
}

// Figures counts the work requests and copies of an engine since its start.
type Figures struct {
	Done    uint64 // completed work requests
	refused uint64 // work requests that the engine left to the posting process
	Copies  uint64 // copy calls for completed writes
}

// Figures returns the counters since the engine's start. Figures is safe to call from any goroutine
// while Serve runs.
func (e *Engine) Figures() (f Figures) {
	e.loop.Call(func() { f = e.figures })
	return f
}

// awake keeps the loop from sleep for a time after an order, on machines with many processors: to wake
// a thread of an idle processor takes longer than a small copy. It implements poll.Poller.
type awake struct{ until time.Time }

const (
	manyProcessors = 16
	awakeTime      = 200 * time.Microsecond
)

func (a *awake) extend() { a.until = time.Now().Add(awakeTime) }

func (a *awake) Poll() bool { return time.Now().Before(a.until) }
func (a *awake) Busy() bool { return false }
func (a *awake) Arm() bool  { return false }
func (a *awake) Disarm()    {}

// drainTimeout limits the wait for unfinished copies at the end.
const drainTimeout = 5 * time.Second

// Serve serves until the listener is closed, or until a CUDA error after which this process cannot
// continue: then Serve returns that error.
func (e *Engine) Serve(listener *net.UnixListener) error {
	ended := make(chan struct{})
	e.listener = listener
	go func() { e.loop.Run(); close(ended) }()
	var failed error
	for {
		conn, err := listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			break
		}
		if err == nil {
			var fd int
			if fd, err = detach(conn); err == nil {
				e.loop.Do(func() { e.accept(fd) })
			}
		}
		if err != nil {
			logrus.WithError(err).Error("accept a process with a software device")
			time.Sleep(100 * time.Millisecond)
		}
	}
	e.loop.Call(func() {
		for c := range e.clients {
			c.end()
		}
	})
	for end := time.Now().Add(drainTimeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		left := 0
		if !e.loop.Call(func() { left, failed = len(e.clients), e.lost }) || left == 0 {
			break
		}
	}
	e.loop.Stop()
	<-ended
	return failed
}

// detach returns the socket of a connection as a non-blocking descriptor.
func detach(conn *net.UnixConn) (int, error) {
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	var duplicate error
	err = raw.Control(func(socket uintptr) { fd, duplicate = unix.FcntlInt(socket, unix.F_DUPFD_CLOEXEC, 3) })
	return fd, errors.Join(err, os.NewSyscallError("F_DUPFD_CLOEXEC", duplicate))
}

func (e *Engine) accept(fd int) {
	c := &client{engine: e, fd: fd}
	if err := e.loop.Watch(fd, func(uint32) { c.read() }); err != nil {
		logrus.WithError(err).Error("watch the socket of a process with a software device")
		unix.Close(fd)
		return
	}
	e.clients[c] = true
}

// read takes the orders that have arrived.
func (c *client) read() {
	buffer, control := make([]byte, orderBytes), make([]byte, unix.CmsgSpace(4*maxDescriptors))
	for !c.gone {
		n, oobn, flags, _, err := unix.Recvmsg(c.fd, buffer, control, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if err == unix.EAGAIN || err == unix.EINTR {
			return
		}
		fds := descriptors(control[:oobn])
		o, ok := parse(buffer[:max(n, 0)])
		if err != nil || !ok || flags&unix.MSG_CTRUNC != 0 {
			closeAll(fds)
			c.end()
			return
		}
		c.do(o, fds)
		closeAll(fds)
	}
}

// descriptors returns the descriptors of a message.
func descriptors(control []byte) []int {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) == 0 {
		return nil
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil
	}
	return fds
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// do executes an order and answers; the answer of a copy follows the copy.
func (c *client) do(o order, fds []int) {
	c.engine.awake.extend()
	var err error
	switch o.kind {
	case orderRegisterGPU, orderRegisterHost:
		err = c.register(o, fds)
	case orderForget:
		if err = c.forget(o.from, func() { c.answer(o.id, nil) }); err == nil {
			return
		}
	case orderMove:
		if err = c.move(o); err == nil {
			return
		}
	case orderShare:
		err = unix.EINVAL
		if c.rings == nil {
			err = c.share(fds, o.size)
		}
	case orderConnect:
		err = c.connect(o)
	case orderDisconnect:
		if err = c.disconnect(o.from, func() { c.answer(o.id, nil) }); err == nil {
			return
		}
	default:
		err = unix.EINVAL
	}
	c.answer(o.id, err)
}

// answer sends the result of an order. A process that does not read loses the connection.
func (c *client) answer(id uint64, err error) {
	if c.gone {
		return
	}
	status := unix.Errno(0)
	if err != nil && !errors.As(err, &status) {
		status = unix.EIO
	}
	if err != nil && status == unix.EIO {
		logrus.WithError(err).Error("an order of a software device failed")
	}
	b := binary.LittleEndian.AppendUint64(nil, id)
	b = binary.LittleEndian.AppendUint32(b, uint32(status))
	b = append(b, make([]byte, answerBytes-len(b))...)
	if err := unix.Sendmsg(c.fd, b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
		c.end()
	}
}

// share maps the rings of the process.
func (c *client) share(fds []int, bytes uint64) error {
	r, err := openRings(fds, bytes)
	if err != nil {
		return err
	}
	if err := c.engine.loop.WatchEdges(r.wakesEngine); err != nil {
		r.close()
		return err
	}
	c.rings = r
	return nil
}

func (c *client) register(o order, fds []int) (err error) {
	e := c.engine
	if len(fds) != 1 || o.from&1 != 0 || e.regions[o.from] != nil || o.target > o.size || o.bytes > o.size-o.target ||
		o.bytes == 0 {
		return unix.EINVAL
	}
	r := &region{
		owner:   c,
		key:     o.from,
		access:  o.access,
		address: o.source,
		at:      o.target,
		bytes:   o.bytes,
		domain:  o.domain,
	}
	if o.kind == orderRegisterHost {
		r.Memory, err = device.ImportHost(fds[0], o.size)
	} else {
		r.Memory, err = e.importGPU(fds[0], o.size)
	}
	if err != nil {
		return fmt.Errorf("register %d bytes: %w", o.bytes, err)
	}
	if o.kind == orderRegisterGPU && o.access&remoteRead != 0 {
		if err := r.MapLoads(e.gpus[r.On].Device, fds[0]); err != nil {
			logrus.WithError(err).Debug("a GPU copies short reads of a region of a software device")
		}
	}
	e.regions[r.key] = r
	return nil
}

// importGPU maps an allocation, with access for the engine's GPUs, and makes a context on the
// allocation's GPU if missing.
func (e *Engine) importGPU(fd int, bytes uint64) (*device.Memory, error) {
	if e.driver == nil {
		d, err := cuda.Open()
		if err != nil {
			return nil, err
		}
		e.driver = d
	}
	var access []cuda.Access
	for on := range e.gpus {
		access = append(access, cuda.Access{Device: on, Write: true})
	}
	if len(access) == 0 { // Import needs an access; the context comes with it
		if err := e.firstGPU(); err != nil {
			return nil, err
		}
		for on := range e.gpus {
			access = append(access, cuda.Access{Device: on, Write: true})
		}
	}
	m, err := device.Import(e.driver, fd, bytes, access...)
	if err != nil {
		return nil, e.failed(err)
	}
	if e.gpus[m.On] == nil {
		busID, err := e.driver.DevicePCIBusID(m.On)
		if err == nil {
			err = e.add(busID)
		}
		if err == nil {
			err = m.Allow(cuda.Access{Device: m.On, Write: true})
		}
		if err != nil {
			return nil, errors.Join(e.failed(err), m.Close())
		}
	}
	return m, nil
}

// firstGPU makes the first context, on the driver's first GPU.
func (e *Engine) firstGPU() error {
	busID, err := e.driver.DevicePCIBusID(0)
	if err != nil {
		return err
	}
	return e.add(busID)
}

// add makes a context on a GPU, and gives the GPU access to every region.
func (e *Engine) add(busID string) error {
	g, err := device.Open(e.driver, busID)
	if err != nil {
		return err
	}
	if err := g.OpenLoads(); err != nil {
		logrus.WithError(err).Debug("a GPU copies short reads of software devices")
	}
	q, err := g.NewQueue()
	if err != nil {
		return errors.Join(err, g.Close())
	}
	reads, err := g.NewQueue()
	if err != nil {
		return errors.Join(err, q.Close(), g.Close())
	}
	for _, r := range e.regions {
		if err := r.Allow(cuda.Access{Device: g.Ordinal, Write: true}); err != nil {
			return errors.Join(err, reads.Close(), q.Close(), g.Close())
		}
	}
	e.loop.Add(q)
	e.loop.Add(reads)
	e.gpus[g.Ordinal] = &gpu{g, q, reads}
	return nil
}

// failed ends the engine after a sticky CUDA error, and returns err.
func (e *Engine) failed(err error) error {
	if cuda.Sticky(err) && e.lost == nil {
		e.lost = fmt.Errorf("the engine of software devices ends after a CUDA error: %w", err)
		e.listener.Close()
	}
	return err
}

// forget ends a registration. The answer follows the last copy that uses the region: then nothing
// reads or writes the memory for this process's devices.
func (c *client) forget(key uint32, answer func()) error {
	r := c.engine.regions[key]
	if r == nil || r.owner != c || r.retired {
		return unix.ENOENT
	}
	r.retired, r.forgotten = true, answer
	c.engine.settle(r)
	return nil
}

// settle unmaps a retired region that no copy uses.
func (e *Engine) settle(r *region) {
	if !r.retired || r.moves > 0 || e.regions[r.key] != r {
		return
	}
	delete(e.regions, r.key)
	if err := e.failed(r.Close()); err != nil {
		logrus.WithError(err).Error("unmap a region of a software device")
	}
	if r.forgotten != nil {
		r.forgotten()
	}
}

// find returns the region of a key that has a range, and the range's place in the allocation.
func (c *client) find(key uint32, address, bytes uint64, access uint32) (*region, uint64, error) {
	r := c.engine.regions[key&^1]
	switch {
	case r == nil || r.retired || key&1 == 0 && r.owner != c:
		return nil, 0, unix.ENOENT
	case r.access&access != access || address < r.address || bytes > r.bytes || address-r.address > r.bytes-bytes:
		return nil, 0, unix.EACCES
	}
	return r, r.at + address - r.address, nil
}

// move issues a copy from a region of the process to a region of the process, or to a remotely
// writable region.
func (c *client) move(o order) error {
	access := uint32(localWrite)
	if o.to&1 != 0 {
		access = remoteWrite
	}
	from, source, err := c.find(o.from&^1, o.source, o.bytes, 0)
	if err != nil {
		return err
	}
	to, target, err := c.find(o.to, o.target, o.bytes, access)
	if err != nil {
		return err
	}
	if c.moves >= maxMoves {
		return unix.EBUSY
	}
	queue, err := c.engine.issuer(to.Memory, from.Memory)
	if err != nil {
		return err
	}
	c.moves++
	from.moves++
	to.moves++
	queue.Move(to.At(target), from.At(source), o.bytes, func(err error) {
		c.moves--
		from.moves--
		to.moves--
		c.engine.settle(from)
		c.engine.settle(to)
		c.answer(o.id, c.engine.failed(err))
		c.release()
	})
	return nil
}

// issuer returns the queue of a copy: of the target's GPU, or of the source's where the target is
// host memory.
func (e *Engine) issuer(target, source *device.Memory) (*device.Queue, error) {
	on, host := target, source
	switch {
	case target.Host() && source.Host():
		return e.processor, nil
	case target.Host():
		on, host = source, target
	}
	g := e.gpus[on.On]
	if host.Host() {
		if err := host.Pin(g.Device); err != nil {
			return nil, e.failed(err)
		}
	}
	return g.queue, nil
}

// end closes the connection of a process. Regions end after the last copy.
func (c *client) end() {
	if c.gone {
		return
	}
	c.gone = true
	c.engine.loop.Unwatch(c.fd)
	unix.Close(c.fd)
	for _, p := range c.engine.pairs {
		if p.owner == c {
			c.engine.drop(p)
		}
	}
	for _, r := range c.engine.regions {
		if r.owner == c && !r.retired {
			r.retired = true
			c.engine.settle(r)
		}
	}
	c.release()
}

func (c *client) release() {
	if c.gone && c.moves == 0 && c.engine.clients[c] {
		delete(c.engine.clients, c)
		if c.rings != nil {
			c.engine.loop.Unwatch(c.rings.wakesEngine)
			c.rings.close()
		}
	}
}
