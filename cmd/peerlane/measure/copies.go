// Package measure contains the measurements of `peerlane demo` and `peerlane bench`: copies by one
// process that sees every GPU, and messages of a process that is attached to its relay.
package measure

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/rdmatest"
)

// Values of Job.Kind.
const (
	// Raw is cuMemcpyPeerAsync with all copies queued on one stream of the issuer or, with Mapped,
	// cuMemcpyAsync.
	Raw = "raw"
	// Batch is the copies of Raw with eight in one call (cuMemcpyBatchAsync).
	Batch = "batch"
	// Bounce copies through pinned host memory in chunks: the copy of a chunk to host memory overlaps the
	// copy of the chunk before to the target.
	Bounce = "bounce"
	// Leg is a leg of the staged route: copies between imported memory and a ring of slots, slot
	// by slot, in a queue of a relay.
	Leg = "leg"
	// Local is a single copy of Raw and the wait for its end.
	Local = "local"
	// Queue is a single copy in a queue of a relay, until the queue reports the end.
	Queue = "queue"
	// Ring is an operation through the rings of a session and back, without a copy.
	Ring = "ring"
	// PrepareNIC prepares the queue pairs of NIC.
	PrepareNIC = "prepare-nic"
	// NIC is RDMA writes between the memory of two GPUs by a NIC that reaches both directly.
	NIC = "nic"
	// Occupy keeps the GPU From busy with a Load until Vacate.
	Occupy = "occupy"
	Vacate = "vacate"
	// Work runs a Load on the GPU From and returns its rate.
	Work = "work"
	// Free is the free memory of the GPU From (cuMemGetInfo).
	Free = "free"
)

// Job is a measurement. From, To and Issuer are PCI addresses of GPUs.
type Job struct {
	Kind             string
	From, To, Issuer string
	// Size is the size of a message in bytes, and Depth the number of messages in flight.
	Size  uint64
	Depth int
	// Bytes is the minimum number of bytes to copy. With 0, Duration limits the job.
	Bytes    uint64
	Duration time.Duration
	// Slots and SlotBytes are the number and the size of the slots of a Leg.
	Slots     int
	SlotBytes uint64
	// Chunk and Buffers are the size of the pieces and the number of host buffers of a Bounce.
	Chunk   uint64
	Buffers int
	// NIC is the RDMA device of PrepareNIC.
	NIC string
	// Load is LoadSMs or LoadMemory, for Occupy and Work.
	Load string
	// Mapped makes Raw and Local copy with cuMemcpyAsync between memory that the issuer's context
	// has mapped, like a relay: the issuer's GPU executes the copy. Without Mapped the jobs use
	// cuMemcpyPeerAsync, which the GPU of the source executes for any issuer.
	Mapped bool
}

// Result is the result of a Job: a rate, the times of single copies, or a number of bytes.
type Result struct {
	// GBs is in 1e9 bytes per second.
	GBs   float64 `json:"gbs,omitempty"`
	Times *Times  `json:"times,omitempty"`
	Bytes uint64  `json:"bytes,omitempty"`
	// PerSecond is the rate of iterations of a Load, summed over the blocks.
	PerSecond float64 `json:"perSecond,omitempty"`
}

// Times are percentiles in microseconds.
type Times struct {
	Count int     `json:"count"`
	P50   float64 `json:"p50"`
	P90   float64 `json:"p90"`
	P99   float64 `json:"p99"`
	P999  float64 `json:"p999"`
	Max   float64 `json:"max"`
}

// TimesOf returns the percentiles of durations, which it sorts; nil without durations.
func TimesOf(list []time.Duration) *Times {
	if len(list) == 0 {
		return nil
	}
	slices.Sort(list)
	at := func(permille int) float64 {
		return float64(list[min(len(list)*permille/1000, len(list)-1)].Nanoseconds()) / 1e3
	}
	return &Times{Count: len(list), P50: at(500), P90: at(900), P99: at(990), P999: at(999), Max: at(1000)}
}

// copies executes Jobs with contexts of this process on the GPUs.
type copies struct {
	driver *cuda.Driver
	gpus   map[string]*device.Device
	// near is the stream of PrepareNIC; nil before.
	near  *rdmatest.Stream
	loads map[string]*load
}

// newCopies opens the driver.
func newCopies() (*copies, error) {
	d, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	return &copies{driver: d, gpus: map[string]*device.Device{}, loads: map[string]*load{}}, nil
}

// Do executes a Job.
func (c *copies) Do(j Job) (Result, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var r Result
	if j.Kind == Ring {
		var err error
		r.Times, err = ringTimes(j)
		return r, err
	}
	var gpus [3]*device.Device
	for i, busID := range []string{j.From, j.To, j.Issuer} {
		if busID == "" {
			continue
		}
		g, err := c.open(busID)
		if err != nil {
			return r, err
		}
		gpus[i] = g
	}
	from, to, issuer := gpus[0], gpus[1], gpus[2]
	var err error
	switch j.Kind {
	case Raw:
		r.GBs, err = c.raw(j, from, to, issuer)
	case Batch:
		r.GBs, err = c.batch(j, from, to, issuer)
	case Bounce:
		r.GBs, err = c.bounce(j, from, to)
	case Leg:
		r.GBs, err = c.leg(j, from, to, issuer)
	case Local:
		r.Times, err = c.local(j, from, to, issuer)
	case Queue:
		r.Times, err = c.queue(j, from, to, issuer)
	case Occupy:
		err = c.occupy(j, from)
	case Vacate:
		err = c.vacate(from)
	case Work:
		r, err = c.work(j, from)
	case PrepareNIC:
		err = c.prepareNear(j, from, to)
	case NIC:
		r.GBs, err = c.runNear(j)
	case Free:
		err = from.On(func() error {
			var err error
			r.Bytes, _, err = c.driver.MemGetInfo()
			return err
		})
	default:
		err = errors.New("no measurement has this name")
	}
	if err != nil {
		err = fmt.Errorf("measure %s, %d bytes from %s to %s: %w", j.Kind, j.Size, j.From, j.To, err)
	}
	return r, err
}

func (c *copies) open(busID string) (*device.Device, error) {
	if g := c.gpus[busID]; g != nil {
		return g, nil
	}
	g, err := device.Open(c.driver, busID)
	if err == nil {
		c.gpus[busID] = g
	}
	return g, err
}

// rate returns the rate in GB/s of f, which copies n messages, after a warm-up.
func (j Job) rate(f func(n int) error) (float64, error) {
	count := int(max(j.Bytes/j.Size, uint64(2*j.Depth)))
	warm := max(count/10, 2)
	if err := f(warm); err != nil {
		return 0, err
	}
	if j.Bytes == 0 {
		// Measure one more iteration, from which the number for the duration follows.
		start := time.Now()
		if err := f(count); err != nil {
			return 0, err
		}
		count = int(max(float64(count)*j.Duration.Seconds()/time.Since(start).Seconds(), float64(count)))
	}
	start := time.Now()
	if err := f(count); err != nil {
		return 0, err
	}
	return float64(j.Size) * float64(count) / time.Since(start).Seconds() / 1e9, nil
}

// times returns the times of consecutive calls, after a warm-up.
func (j Job) times(f func() error) (*Times, error) {
	const warm, minRounds, maxRounds = 100, 10, 1 << 20
	for i, end := 0, time.Now().Add(j.Duration); i < warm && (i == 0 || time.Now().Before(end)); i++ {
		if err := f(); err != nil {
			return nil, err
		}
	}
	var list []time.Duration
	for end := time.Now().Add(j.Duration); len(list) < minRounds || len(list) < maxRounds && time.Now().Before(end); {
		start := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		list = append(list, time.Since(start))
	}
	return TimesOf(list), nil
}

// plain allocates memory of a GPU with cuMemAlloc.
func (c *copies) plain(on *device.Device, size uint64) (cuda.Ptr, error) {
	if err := on.Use(); err != nil {
		return 0, err
	}
	return c.driver.MemAlloc(size)
}

// peers allocates memory on two GPUs with mutual peer access, and a stream of the issuer, whose
// context stays current. free releases the memory and the stream; after an error, peers has
// released them.
func (c *copies) peers(j Job, from, to, issuer *device.Device) (source, target cuda.Ptr, stream cuda.Stream,
	free func() error, err error) {
	d := c.driver
	var releases []func() error
	free = func() error {
		var failed error
		for _, release := range slices.Backward(releases) {
			failed = errors.Join(failed, release())
		}
		return failed
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, free())
		}
	}()
	if source, err = c.plain(from, j.Size); err != nil {
		return
	}
	releases = append(releases, func() error { return from.On(func() error { return d.MemFree(source) }) })
	if target, err = c.plain(to, j.Size); err != nil {
		return
	}
	releases = append(releases, func() error { return to.On(func() error { return d.MemFree(target) }) })
	for _, pair := range [][2]*device.Device{{from, to}, {to, from}} {
		if from == to {
			break // a GPU has no peer access to itself
		}
		if err = pair[0].Use(); err != nil {
			return
		}
		if err = d.CtxEnablePeerAccess(pair[1].Context()); err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) &&
			!errors.Is(err, cuda.ErrPeerAccessUnsupported) {
			return
		}
	}
	if err = issuer.Use(); err != nil {
		return
	}
	if stream, err = d.StreamCreate(); err != nil {
		return
	}
	releases = append(releases, func() error { return d.StreamDestroy(stream) })
	return
}

// copier returns the copy of a Job on a stream of the issuer, whose context stays current.
func (c *copies) copier(j Job, from, to, issuer *device.Device) (copy func() error, stream cuda.Stream,
	free func() error, err error) {
	d := c.driver
	if !j.Mapped {
		source, target, stream, free, err := c.peers(j, from, to, issuer)
		return func() error {
			return d.MemcpyPeerAsync(target, to.Context(), source, from.Context(), j.Size, stream)
		}, stream, free, err
	}
	if err := issuer.Use(); err != nil {
		return nil, stream, nil, err
	}
	source, err := c.importMemory(from, issuer, j.Size)
	if err != nil {
		return nil, stream, nil, err
	}
	target, err := c.importMemory(to, issuer, j.Size)
	if err != nil {
		return nil, stream, nil, errors.Join(err, source.Close())
	}
	if stream, err = d.StreamCreate(); err != nil {
		return nil, stream, nil, errors.Join(err, source.Close(), target.Close())
	}
	return func() error { return d.MemcpyAsync(target.Ptr, source.Ptr, j.Size, stream) }, stream,
		func() error { return errors.Join(d.StreamDestroy(stream), source.Close(), target.Close()) }, nil
}

func (c *copies) raw(j Job, from, to, issuer *device.Device) (float64, error) {
	copy, stream, free, err := c.copier(j, from, to, issuer)
	if err != nil {
		return 0, err
	}
	result, err := j.rate(func(n int) error {
		for range n {
			if err := copy(); err != nil {
				return err
			}
		}
		return c.driver.StreamSynchronize(stream)
	})
	return result, errors.Join(err, free())
}

// batch copies like Raw, batchCopies in a call, to separate places: the copies of a call have no
// order.
func (c *copies) batch(j Job, from, to, issuer *device.Device) (float64, error) {
	const batchCopies = 8
	d := c.driver
	whole := j
	whole.Size *= batchCopies
	source, target, stream, free, err := c.peers(whole, from, to, issuer)
	if err != nil {
		return 0, err
	}
	var targets, sources []cuda.Ptr
	var sizes []uint64
	for i := range uint64(batchCopies) {
		targets, sources = append(targets, target+cuda.Ptr(i*j.Size)), append(sources, source+cuda.Ptr(i*j.Size))
		sizes = append(sizes, j.Size)
	}
	result, err := j.rate(func(n int) error {
		for n > 0 {
			k := min(n, batchCopies)
			if err := d.MemcpyBatchAsync(targets[:k], sources[:k], sizes[:k], stream); err != nil {
				return err
			}
			n -= k
		}
		return d.StreamSynchronize(stream)
	})
	return result, errors.Join(err, free())
}

func (c *copies) local(j Job, from, to, issuer *device.Device) (*Times, error) {
	copy, stream, free, err := c.copier(j, from, to, issuer)
	if err != nil {
		return nil, err
	}
	result, err := j.times(func() error {
		if err := copy(); err != nil {
			return err
		}
		return c.driver.StreamSynchronize(stream)
	})
	return result, errors.Join(err, free())
}

// bounceChunk is small enough for the two halves of a message to overlap.
const bounceChunk = 4 << 20

func (c *copies) bounce(j Job, a, b *device.Device) (result float64, err error) {
	if j.Chunk == 0 {
		j.Chunk, j.Buffers = bounceChunk, 2
	}
	d := c.driver
	source, err := c.plain(a, j.Size)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, a.On(func() error { return d.MemFree(source) })) }()
	down, err := d.StreamCreate()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, a.On(func() error { return d.StreamDestroy(down) })) }()
	target, err := c.plain(b, j.Size)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.On(func() error { return d.MemFree(target) })) }()
	up, err := d.StreamCreate()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.On(func() error { return d.StreamDestroy(up) })) }()
	type buffer struct {
		memory      unsafe.Pointer
		ready, free cuda.Event
	}
	buffers := make([]buffer, j.Buffers)
	for i := range buffers {
		h := &buffers[i]
		if h.memory, err = d.MemHostAlloc(j.Chunk); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, a.On(func() error { return d.MemHostFree(h.memory) })) }()
		if err = a.Use(); err != nil {
			return 0, err
		}
		if h.ready, err = d.EventCreate(cuda.EventOptions{}); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, d.EventDestroy(h.ready)) }()
		if err = b.Use(); err != nil {
			return 0, err
		}
		if h.free, err = d.EventCreate(cuda.EventOptions{}); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, d.EventDestroy(h.free)) }()
	}
	turn := 0
	chunk := func(offset, n uint64) error {
		h := buffers[turn%len(buffers)]
		turn++
		return errors.Join(
			a.Use(), d.StreamWaitEvent(down, h.free),
			d.MemcpyDtoHAsync(h.memory, source+cuda.Ptr(offset), n, down), d.EventRecord(h.ready, down),
			b.Use(), d.StreamWaitEvent(up, h.ready),
			d.MemcpyHtoDAsync(target+cuda.Ptr(offset), h.memory, n, up), d.EventRecord(h.free, up))
	}
	return j.rate(func(n int) error {
		for range n {
			for offset := uint64(0); offset < j.Size; offset += j.Chunk {
				if err := chunk(offset, min(j.Chunk, j.Size-offset)); err != nil {
					return err
				}
			}
		}
		return d.StreamSynchronize(up)
	})
}

// imports are the objects of a Leg: a message and a ring of slots, imported as if from other
// processes, and a queue.
type imports struct {
	message, ring *device.Memory
	queue         *device.Queue
	// pull reports that the issuer copies to its own memory.
	pull bool
}

func (c *copies) imports(j Job, from, to, issuer *device.Device) (*imports, error) {
	if err := issuer.Use(); err != nil {
		return nil, err
	}
	i := &imports{pull: to == issuer}
	messageOn, ringOn := from, to
	if i.pull {
		messageOn, ringOn = to, from
	}
	var err error
	if i.message, err = c.importMemory(messageOn, issuer, j.Size); err != nil {
		return nil, err
	}
	if i.ring, err = c.importMemory(ringOn, issuer, uint64(j.Slots)*j.SlotBytes); err != nil {
		return nil, errors.Join(err, i.message.Close())
	}
	if i.queue, err = issuer.NewQueue(); err != nil {
		return nil, errors.Join(err, i.ring.Close(), i.message.Close())
	}
	return i, nil
}

func (i *imports) close() error {
	return errors.Join(i.queue.Close(), i.ring.Close(), i.message.Close())
}

// copy queues the copy of a piece of the message to or from the ring.
func (i *imports) copy(offset, slot, n uint64, done func(error)) {
	target, source := i.ring.Ptr+cuda.Ptr(slot), i.message.Ptr+cuda.Ptr(offset)
	if i.pull {
		target, source = source, target
	}
	i.queue.Copy(target, source, n, done)
}

func (c *copies) leg(j Job, from, to, issuer *device.Device) (float64, error) {
	i, err := c.imports(j, from, to, issuer)
	if err != nil {
		return 0, err
	}
	slot, inFlight := uint64(0), 0
	var failed error
	done := func(err error) {
		inFlight--
		failed = errors.Join(failed, err)
	}
	// The number of pieces in flight is limited by the depth in messages and by the slots.
	pieces := int((j.Size + j.SlotBytes - 1) / j.SlotBytes)
	limit := min(j.Slots, max(j.Depth, 1)*pieces)
	result, err := j.rate(func(n int) error {
		for range n {
			for offset := uint64(0); offset < j.Size; offset += j.SlotBytes {
				for inFlight == limit {
					i.queue.Poll()
				}
				inFlight++
				i.copy(offset, slot*j.SlotBytes, min(j.SlotBytes, j.Size-offset), done)
				slot = (slot + 1) % uint64(j.Slots)
			}
		}
		for inFlight > 0 {
			i.queue.Poll()
		}
		return failed
	})
	return result, errors.Join(err, i.close())
}

func (c *copies) queue(j Job, from, to, issuer *device.Device) (*Times, error) {
	i, err := c.imports(j, from, to, issuer)
	if err != nil {
		return nil, err
	}
	over := false
	var failed error
	done := func(err error) { over, failed = true, err }
	result, err := j.times(func() error {
		over = false
		for i.copy(0, 0, j.Size, done); !over; {
			i.queue.Poll()
		}
		return failed
	})
	return result, errors.Join(err, i.close())
}

// importMemory allocates memory, exports it as another process would, and imports the memory.
func (c *copies) importMemory(on, issuer *device.Device, bytes uint64) (*device.Memory, error) {
	access := cuda.Access{Device: issuer.Ordinal, Write: true}
	exported, err := device.Create(c.driver, on.Ordinal, bytes, access)
	if err != nil {
		return nil, err
	}
	fd, err := exported.Export()
	if err != nil {
		return nil, errors.Join(err, exported.Close())
	}
	memory, err := device.Import(c.driver, fd, exported.Bytes, access)
	// The imported memory stays valid.
	return memory, errors.Join(err, unix.Close(fd), exported.Close())
}
