// Package rdmatest tests a NIC on a single host, with the calls of relays: the test connects two
// queue pairs of the NIC, moves data from host memory to host or GPU memory and back, compares
// every byte, and measures the rate.
package rdmatest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs"
)

const (
	memory = 2 << 20 // bytes of each memory, which is the granularity of a GPU's
	piece  = 1 << 20 // of a timed request
	depth  = 4       // outstanding requests
	// limit is the maximum duration of a completion.
	limit  = 30 * time.Second
	remote = verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead
)

// RateTime is the duration of a measurement of a rate.
const RateTime = 100 * time.Millisecond

// Run tests the NICs in sequence. openCUDA opens the driver for GPUs' memory; each rate is measured
// for a time, and at least once.
func Run(
	l *verbs.Library,
	openCUDA func() (*cuda.Driver, error),
	job launch.RDMAJob,
	each time.Duration,
	tell func(launch.RDMAResult),
) {
	config := cmp.Or(job.Verbs, &launch.DefaultVerbs)
	triples(l, openCUDA, job.Triples, config, func(t launch.Triple) { tell(launch.RDMAResult{NIC: t.NIC, Triple: &t}) })
	for _, nic := range job.NICs {
		r := launch.RDMAResult{NIC: nic.Name, Memory: launch.MemoryHost, Tried: "open"}
		b, err := newBench(l, nic.Name, config, each)
		if err != nil {
			var not untested
			if errors.As(err, &not) {
				r.Untested = string(not)
			} else {
				r.Failed = err.Error()
			}
			tell(r)
			continue
		}
		tell(b.run(r, func() (*target, error) { return b.host() }))
		for i := range nic.GPUs {
			for _, way := range []string{launch.MemoryDMABuf, launch.MemoryPeermem} {
				r := launch.RDMAResult{NIC: nic.Name, GPU: &nic.GPUs[i], Memory: way}
				tell(b.run(r, func() (*target, error) { return b.gpu(openCUDA, nic.GPUs[i].BusID, way) }))
			}
		}
		if err := b.close(); err != nil {
			tell(launch.RDMAResult{NIC: nic.Name, Memory: launch.MemoryHost, Tried: "close", Failed: err.Error()})
		}
	}
}

// untested is the reason for a missing test.
type untested string

func (u untested) Error() string { return string(u) }

// bench is an open NIC with host memory as source and target of data.
type bench struct {
	context *verbs.Context
	domain  *verbs.Domain
	bytes   []byte
	region  *verbs.Region
	config  *launch.Verbs
	each    time.Duration
	undo    []func() error // in reverse
}

func (b *bench) close() error {
	var err error
	for i := len(b.undo) - 1; i >= 0; i-- {
		err = errors.Join(err, b.undo[i]())
	}
	b.undo = nil
	return err
}

func (b *bench) later(undo func() error) { b.undo = append(b.undo, undo) }

func newBench(l *verbs.Library, name string, config *launch.Verbs, each time.Duration) (_ *bench, err error) {
	b := &bench{config: config, each: each}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	devices, err := l.Devices()
	if err != nil {
		return nil, err
	}
	for _, d := range devices {
		if d.Name == name && d.Transport == verbs.IWARP {
			return nil, untested("iWARP connects by addresses of two hosts, and is not tested on one")
		}
	}
	if b.context, err = l.OpenDevice(name); err != nil {
		return nil, err
	}
	b.later(b.context.Close)
	if b.domain, err = b.context.NewDomain(); err != nil {
		return nil, err
	}
	b.later(b.domain.Close)
	if b.bytes, err = anonymous(2 * memory); err != nil {
		return nil, err
	}
	b.later(func() error { return unix.Munmap(b.bytes) })
	pattern(b.bytes[:memory])
	if b.region, err = b.domain.Register(address(b.bytes), 2*memory, uint64(address(b.bytes)), remote); err != nil {
		return nil, err
	}
	b.later(b.region.Close)
	return b, nil
}

func anonymous(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", n, err)
	}
	return b, nil
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// target is registered memory that the NIC writes and reads.
type target struct {
	address uint64
	region  *verbs.Region
	// content returns a copy of the memory's bytes, as the owner reads them.
	content func(into []byte) error
	free    func() error
}

func (b *bench) host() (*target, error) {
	m, err := anonymous(memory)
	if err != nil {
		return nil, err
	}
	region, err := b.domain.Register(address(m), memory, uint64(address(m)), remote)
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(m))
	}
	return &target{
		address: uint64(address(m)), region: region,
		content: func(into []byte) error { copy(into, m); return nil },
		free:    func() error { return errors.Join(region.Close(), unix.Munmap(m)) },
	}, nil
}

func (b *bench) gpu(openCUDA func() (*cuda.Driver, error), busID, way string) (_ *target, err error) {
	driver, err := openCUDA()
	if err != nil {
		return nil, untested(err.Error())
	}
	g, err := device.Open(driver, busID)
	if err != nil {
		return nil, err
	}
	t := &target{free: g.Close}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.free())
		}
	}()
	m, err := device.Create(driver, g.Ordinal, memory, cuda.Access{Device: g.Ordinal, Write: true})
	if err != nil {
		return nil, err
	}
	if way == launch.MemoryDMABuf {
		// The driver makes a DMA-BUF only with a current context.
		err = g.On(func() (err error) {
			t.region, err = b.byDMABuf(m, memory)
			return err
		})
	} else {
		t.region, err = b.domain.Register(m.Address(), memory, uint64(m.Address()), remote)
		if errors.Is(err, unix.EFAULT) { // older modules know memory of cuMemAlloc alone
			if err = m.Close(); err != nil {
				return nil, err
			}
			if m, err = g.Allocate(memory); err != nil {
				return nil, err
			}
			t.region, err = b.domain.Register(m.Address(), memory, uint64(m.Address()), remote)
		}
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	t.address = uint64(m.Ptr)
	t.free = func() error { return errors.Join(t.region.Close(), m.Close(), g.Close()) }
	t.content = func(into []byte) error {
		return g.On(func() error {
			s, err := driver.StreamCreate()
			if err != nil {
				return err
			}
			return errors.Join(driver.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(into)), m.Ptr, memory, s),
				driver.StreamSynchronize(s), driver.StreamDestroy(s))
		})
	}
	return t, nil
}

func (b *bench) byDMABuf(m *device.Memory, bytes uint64) (*verbs.Region, error) {
	fd, err := m.DMABuf()
	if err != nil {
		return nil, err
	}
	region, err := b.domain.RegisterDMABuf(fd, 0, bytes, uint64(m.Ptr), remote)
	return region, errors.Join(err, unix.Close(fd))
}

// run is one test.
func (b *bench) run(r launch.RDMAResult, register func() (*target, error)) launch.RDMAResult {
	r.Tried = "register"
	t, err := register()
	if err == nil {
		err = errors.Join(b.moves(&r, t), t.free())
	}
	var not untested
	switch {
	case errors.As(err, &not):
		r.Untested = string(not)
	case err != nil:
		r.Failed = err.Error()
	}
	return r
}

func (b *bench) moves(r *launch.RDMAResult, t *target) (err error) {
	r.Tried = "connect"
	p, err := b.connect(r, depth)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	out, back := b.bytes[:memory], b.bytes[memory:]
	send := verbs.Send{
		Flags:   verbs.Signaled,
		Op:      verbs.Write,
		Address: uint64(address(out)),
		LKey:    b.region.LKey(),
		Remote:  t.address,
		RKey:    t.region.RKey(),
		Length:  memory,
	}
	receive := send
	receive.Op, receive.Address = verbs.Read, uint64(address(back))
	found := make([]byte, memory)
	for _, step := range []struct {
		name    string
		request verbs.Send
		content func() error
		rate    *float64
	}{
		{"write", send, func() error { return t.content(found) }, &r.Write},
		{"read", receive, func() error { copy(found, back); return nil }, &r.Read},
	} {
		r.Tried = step.name
		if err := p.do(step.request, 1); err != nil {
			return err
		}
		if err := step.content(); err != nil {
			return err
		}
		r.Bytes += memory
		if r.Wrong = differ(out, found); r.Wrong > 0 {
			return nil
		}
		if *step.rate, err = p.rate(step.request, b.each); err != nil {
			return err
		}
	}
	return nil
}

// pattern returns bytes in which every aligned eight bytes differ.
func pattern(b []byte) {
	x := uint64(0x9e3779b97f4a7c15)
	for i := 0; i < len(b); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.NativeEndian.PutUint64(b[i:], x)
	}
}

func differ(a, b []byte) (n uint64) {
	if bytes.Equal(a, b) {
		return 0
	}
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

// loop has two connected queue pairs of a NIC.
type loop struct {
	queue *verbs.Queue
	pairs []*verbs.Pair // requests are posted to the first
	depth int           // outstanding requests
}

func (p *loop) close() error {
	var err error
	for _, pair := range p.pairs {
		err = errors.Join(err, pair.Close())
	}
	return errors.Join(err, p.queue.Close())
}

// endpoint is a NIC's port as queue pairs connect to it.
type endpoint struct {
	number uint8
	port   verbs.Port
	gid    verbs.GID
	mtu    verbs.MTU
}

// endpoint picks the first active port, with the configuration's GID.
func (b *bench) endpoint() (*endpoint, error) {
	c := b.context
	limits, err := c.Attributes()
	if err != nil {
		return nil, err
	}
	at := &endpoint{number: 1}
	for ; ; at.number++ {
		if at.port, err = c.Port(at.number); err != nil {
			return nil, err
		}
		if at.port.State == verbs.PortActive {
			break
		}
		if int(at.number) >= limits.Ports {
			return nil, fmt.Errorf("port %d of %s is %s", at.number, c.Name(), at.port.State)
		}
	}
	gids, err := c.GIDs(at.number)
	if err != nil {
		return nil, err
	}
	index := b.config.GIDIndex
	if index < 0 {
		index = verbs.AnyIndex
	}
	if at.gid, err = verbs.ChooseGID(gids, verbs.Choice{Index: index}); err != nil {
		return nil, err
	}
	at.mtu = at.port.MTU
	if most, ok := verbs.MTUOf(b.config.MTU); ok {
		at.mtu = min(at.mtu, most)
	}
	return at, nil
}

// lead connects a pair with a second pair of the same port.
func (b *bench) lead(pair, to *verbs.Pair, at *endpoint) error {
	err := pair.ReadyToReceive(verbs.Route{
		Pair: to.Number(), MTU: at.mtu, LID: at.port.LID, Port: at.number, Reads: 1, ReceiverTimer: 12,
		Global: at.port.LinkLayer == verbs.Ethernet, GID: at.gid.GID, SourceIndex: uint8(at.gid.Index), HopLimit: 64,
		TrafficClass: uint8(b.config.TrafficClass), ServiceLevel: uint8(b.config.ServiceLevel),
	})
	if err == nil {
		err = pair.ReadyToSend(verbs.Sending{Timeout: 18, Retries: 7, ReceiverRetries: 7, Reads: 1})
	}
	return err
}

// connect creates the pairs for depth outstanding requests, and connects them as relays do.
func (b *bench) connect(r *launch.RDMAResult, depth int) (_ *loop, err error) {
	at, err := b.endpoint()
	if err != nil {
		return nil, err
	}
	r.Way = fmt.Sprintf("port %d, %v, pkey index %d", at.number, at.gid, b.config.PKey)
	p := &loop{depth: depth}
	if p.queue, err = b.context.NewQueue(2 * depth); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	for range 2 {
		pair, err := b.domain.NewPair(verbs.PairConfig{Send: p.queue, Recv: p.queue, SendDepth: depth, RecvDepth: 1})
		if err != nil {
			return nil, err
		}
		p.pairs = append(p.pairs, pair)
		if err := pair.Init(at.number, uint16(b.config.PKey), remote); err != nil {
			return nil, err
		}
	}
	for i, pair := range p.pairs {
		if err := b.lead(pair, p.pairs[1-i], at); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// do makes n requests, with at most depth outstanding.
func (p *loop) do(request verbs.Send, n int) error {
	done := make([]verbs.Completion, p.depth)
	for posted, ended := 0, 0; ended < n; {
		for posted < n && posted-ended < p.depth {
			if _, err := p.pairs[0].PostSend([]verbs.Send{request}); err != nil {
				return err
			}
			posted++
		}
		got, err := p.completed(done)
		if err != nil {
			return err
		}
		ended += got
	}
	return nil
}

// completed waits for completions, and returns their number or the error of a failed completion.
func (p *loop) completed(done []verbs.Completion) (int, error) {
	n, err := p.wait(done)
	for _, c := range done[:n] {
		if err := c.Err(); err != nil {
			return 0, err
		}
	}
	return n, err
}

func (p *loop) wait(into []verbs.Completion) (int, error) {
	for {
		if n, err := p.queue.Poll(into); n > 0 || err != nil {
			return n, err
		}
		if err := p.queue.Arm(); err != nil {
			return 0, err
		}
		// Earlier completions have no event.
		if n, err := p.queue.Poll(into); n > 0 || err != nil {
			return n, err
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.queue.FD()), Events: unix.POLLIN}}, int(limit.Milliseconds()))
		if n == 0 && err == nil {
			return 0, fmt.Errorf("no completion within %v", limit)
		}
		if err := p.queue.Acknowledge(); err != nil {
			return 0, err
		}
	}
}

// rate returns the rate of requests, GB/s.
func (p *loop) rate(request verbs.Send, each time.Duration) (float64, error) {
	request.Length = piece
	moved, begun := 0, time.Now()
	for moved == 0 || time.Since(begun) < each {
		if err := p.do(request, depth); err != nil {
			return 0, err
		}
		moved += depth * piece
	}
	return float64(moved) / time.Since(begun).Seconds() / 1e9, nil
}
