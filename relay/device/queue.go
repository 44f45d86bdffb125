package device

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
)

// Queue issues copies in order on a private stream and reports their ends. Queue implements
// poll.Poller and belongs to a single thread.
//
// An event after a copy, or after several small copies, marks the end. A value written by the
// stream would mark the end, too, but the stream drains a copy before the write and starts the next
// copy afterwards (docs/benchmarks.md). After words written by the stream, a written value is
// faster.
type Queue struct {
	device *Device
	stream cuda.Stream
	idle   []cuda.Event

	// Host memory of copyWithin, and of writes (write.go), nil before the first use.
	bounce, own  unsafe.Pointer
	noHostMemory bool      // the driver refused host memory
	slots        []Place   // of own, that are free
	asked        uint64    // polls of a marker without the value
	bounces      int       // large copies within the device left to bounce, and the copy that tries again
	looked       time.Time // when the copy that judge is to judge was last seen under way
	copyEngine   bool      // the stream's last work is a copy engine's: see write

	gathered  batch // small copies that wait to be issued with one call
	issuing   batch // such as are being issued
	unbatched bool  // the driver has no such call
	slices    int   // lists until a kernel is tried again, after a kernel that waited: see listkernel.go
	noWords   bool  // the driver has no call that writes words

	pending fifo[func(error)] // oldest first: a stream ends its copies in order
	marks   fifo[mark]
	issued  uint64
	marked  uint64 // copies that have an event behind them
	ended   uint64

	// Copies that no device makes.
	hosts    int // whose end is not reported
	copiers  sync.WaitGroup
	mu       sync.Mutex
	finished []func(error)
}

// mark is an event, or a marker of words (write.go), and how many copies have ended with it.
type mark struct {
	event  cuda.Event // 0 for a marker
	number uint64
	sample time.Time     // when it was issued, of a copy or kernel that is judged; zero of others
	kernel time.Duration // of a kernel: the time that it needs at most without a wait
}

// A copy of at least largeCopy bytes is issued alone, with an event after it. The queue gathers
// smaller copies up to manyCopies, or up to the end of the loop's iteration; a single call issues
// the copies, followed by an event. The call takes the time: the engines make several small copies
// concurrently.
const (
	largeCopy  = 256 << 10
	manyCopies = 8
)

// An engine pauses 2 us between the copies of two calls, and not between the copies of one call. A
// copy of 4 MiB between two GPUs takes 11 us. So the queue holds copies between GPUs of largeCopy to
// maxHeldCopy bytes while the device has minEvents earlier calls to complete, and issues up to
// maxHeld of them with one call. More streams do not shorten the pause (docs/nccl/HISTORY.md).
const (
	maxHeldCopy = 8 << 20
	maxHeld     = 4
	minEvents   = 2
)

// batch has the copies of a call: either small copies, or held ones.
type batch struct {
	held     bool
	to, from [manyCopies]cuda.Ptr
	sizes    [manyCopies]uint64
	done     [manyCopies]func(error)
	n        int
}

func (b *batch) add(to, from cuda.Ptr, n uint64, done func(error)) {
	b.to[b.n], b.from[b.n], b.sizes[b.n], b.done[b.n] = to, from, n, done
	b.n++
}

// minLinear is the size from which a copy engine makes a copy from host memory, regardless of the
// call; a smaller one has to be a rectangle.
const minLinear = 32 << 10

// Between two addresses of a device the driver copies with an engine that works in the time slices
// of the device's kernels, regardless of the call. Beside another process's kernel such a copy
// takes 2.0 ms up to 64 MiB, else 10 to 50 us. Two copies by way of host memory have engines that
// do not wait: 12 us up to 16 KiB, 55 us for 1 MiB, 1.2 ms for 32 MiB, 2.4 ms for 64 MiB
// (docs/benchmarks.md). So copies of minBounce to maxAlwaysBounce bytes within a device go through
// host memory. Larger copies, up to maxBounce, bounce after a copy that has waited for a slice
// ([Queue.judge]): the next bounceCopies copies bounce, and then the first copy of an empty stream
// tries again. Copies above maxBounce go directly: the wait is shorter than the detour. Copies below
// minBounce bounce, too, as two copies in sequence: a rectangle cannot write 8 bytes at once, and
// the relay has to know a word before the stream writes it ([Queue.throughHost]).
const (
	minBounce       = 16
	maxAlwaysBounce = 1 << 20
	maxBounce       = 48 << 20
	bouncePiece     = 2 << 20 // of it, in host memory at a time
	bounceCopies    = 255
	sliceWait       = 500 * time.Microsecond
	latePoll        = 100 * time.Microsecond
)

// NewQueue makes a queue of copies issued by the device.
func (g *Device) NewQueue() (*Queue, error) {
	q := &Queue{device: g}
	err := g.On(func() error {
		var err error
		q.stream, err = g.Driver.StreamCreate()
		return err
	})
	if err != nil {
		return nil, err
	}
	return q, nil
}

// Copy makes a copy of n bytes. The queue issues the copy by the next Poll at the latest, and a held
// copy when fewer than minEvents earlier calls are incomplete. Poll calls done when the bytes have
// arrived, or with the error; if the driver refuses the copy at once, Copy calls done. Copies that
// are requested between two Polls, and held copies, have no order.
func (q *Queue) Copy(to, from cuda.Ptr, n uint64, done func(error)) {
	q.issue(Place{Ptr: to}, Place{Ptr: from}, n, done)
}

// Move is Copy between any memories. Between two host memories the device is not involved: CUDA
// would wait for the earlier work of the stream, and then copy in the calling thread. A move of at
// most shortMove bytes ends before the return of Move, and done has been called.
func (q *Queue) Move(to, from Place, n uint64, done func(error)) {
	if to.Host == nil || from.Host == nil {
		q.issue(to, from, n, done)
		return
	}
	target, source := unsafe.Slice((*byte)(to.Host), n), unsafe.Slice((*byte)(from.Host), n)
	if n <= shortMove {
		copy(target, source)
		done(nil)
		return
	}
	q.hosts++
	q.copiers.Go(func() {
		processors <- struct{}{}
		for to, from := target, source; len(to) > 0; {
			k := copy(to[:min(len(to), hostPiece)], from)
			to, from = to[k:], from[k:]
		}
		<-processors
		q.mu.Lock()
		defer q.mu.Unlock()
		q.finished = append(q.finished, done)
	})
}

// processors are the turns of copies within the host: of all processors the loop is to find one. A
// copy is not interruptible, and the garbage collector, and so every goroutine, waits for the end
// of a copy; so the thread copies in pieces of hostPiece, bytes.
var processors = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))

const hostPiece = 1 << 20

// shortMove, bytes, takes less time than to have another thread make the copy.
const shortMove = 4 << 10

func (q *Queue) issue(to, from Place, n uint64, done func(error)) {
	within := sameDevice(to, from)
	if within && n < minBounce && q.throughHost(to, from, n, done) {
		return
	}
	if q.gather(to, from, n, done) {
		return
	}
	alone := q.ended == q.issued && q.gathered.n == 0
	bounce := within && q.bouncesWithin(n, alone)
	q.flush() // the earlier copies
	marked, err := q.call(to, from, n, bounce)
	if err != nil {
		done(q.named(err))
		return
	}
	q.count(done)
	switch {
	case marked:
		q.marked = q.issued
		q.marks.push(mark{number: q.issued})
	case within && !bounce:
		q.mark()
		if alone && n <= maxBounce && q.marks.len() > 0 {
			q.looked = time.Now()
			q.marks.at(q.marks.tail - 1).sample = q.looked
		}
	case n >= largeCopy || q.issued-q.marked >= manyCopies:
		q.mark()
	}
}

// isRow reports whether a copy is a write of rows or words (write.go).
func isRow(to, from Place, n uint64) bool {
	return from.Host != nil && to.Host == nil && n < minLinear
}

// gather keeps a copy for a call with others, which flush makes, and reports whether it did: a small
// copy, or a copy that the queue holds. The call has either small copies or held ones.
func (q *Queue) gather(to, from Place, n uint64, done func(error)) bool {
	if sameDevice(to, from) || q.unbatched {
		return false
	}
	held := to.Host == nil && from.Host == nil && q.holds(n)
	if !held && (n >= largeCopy || isRow(to, from, n)) {
		return false
	}
	limit := manyCopies
	if held {
		limit = maxHeld
	}
	if held != q.gathered.held {
		q.flush()
	}
	q.gathered.held = held
	q.gathered.add(to.Ptr, from.Ptr, n, done)
	if q.gathered.n == limit {
		q.flush()
	}
	return true
}

// call issues a copy with calls of its own. marked reports that the stream's marker shows the end.
func (q *Queue) call(to, from Place, n uint64, bounce bool) (marked bool, err error) {
	d := q.device.Driver
	err = q.device.Use()
	switch {
	case err != nil:
	case bounce:
		err = q.settled(q.copyWithin(to.Ptr, from.Ptr, n))
	case isRow(to, from, n):
		marked, err = q.write(to.Ptr, from.Host, n)
		err = q.settled(err)
	default:
		err = d.MemcpyAsync(to.Ptr, from.Ptr, n, q.stream)
		q.copyEngine = !sameDevice(to, from)
	}
	return marked, err
}

// holds reports whether the queue holds a copy of n bytes between two GPUs.
func (q *Queue) holds(n uint64) bool {
	return n >= largeCopy && n <= maxHeldCopy && !q.unbatched && (q.gathered.held || q.marks.len() >= minEvents)
}

// settled waits for the stream if err is that of a copy of several calls: the earlier ones are
// queued, and the caller unmaps the memory or closes the queue after done.
func (q *Queue) settled(err error) error {
	if err == nil {
		return nil
	}
	return errors.Join(err, q.device.Driver.StreamSynchronize(q.stream))
}

// bouncesWithin reports whether a copy within the device goes by way of host memory. alone is
// whether the stream is empty: only then can [Queue.judge] judge the copy that tries again.
func (q *Queue) bouncesWithin(n uint64, alone bool) bool {
	switch {
	case n < minBounce || n > maxBounce || q.noHostMemory:
		return false
	case n <= maxAlwaysBounce:
		return true
	case q.bounces > 1:
		q.bounces--
		return true
	case q.bounces == 1 && !alone:
		return true
	}
	q.bounces = 0
	return false
}

// copyWithin copies within the device by way of host memory. The stream makes copies in sequence,
// so a single buffer suffices.
func (q *Queue) copyWithin(to, from cuda.Ptr, n uint64) error {
	d := q.device.Driver
	if !q.reserve(&q.bounce, bouncePiece) {
		q.copyEngine = false
		return d.MemcpyAsync(to, from, n, q.stream)
	}
	for n > 0 {
		piece := min(n, bouncePiece)
		if rest := n - piece; rest > 0 && rest < minBounce {
			piece -= minBounce
		}
		if err := d.MemcpyDtoHAsync(q.bounce, from, piece, q.stream); err != nil {
			return err
		}
		q.copyEngine = true
		down := d.MemcpyHtoDAsync
		if piece < minLinear {
			down = d.MemcpyRowsHtoDAsync
		}
		if err := down(to, q.bounce, piece, q.stream); err != nil {
			return err
		}
		to, from, n = to+cuda.Ptr(piece), from+cuda.Ptr(piece), n-piece
	}
	return nil
}

// reserve allocates host memory at p, once, and clears it, as the driver does not: the marker of
// words begins at 0. Without the cleared memory copies are slower, and correct. The context is
// current.
func (q *Queue) reserve(p *unsafe.Pointer, bytes uint64) bool {
	if *p == nil && !q.noHostMemory {
		var err error
		*p, err = q.device.Driver.MemHostAlloc(bytes)
		q.noHostMemory = err != nil
		if err == nil {
			clear(unsafe.Slice((*byte)(*p), bytes))
		}
	}
	return *p != nil
}

// count notes a copy that the stream has.
func (q *Queue) count(done func(error)) {
	q.issued++
	q.pending.push(done)
}

// flush issues the gathered copies, and an event after the copies.
func (q *Queue) flush() {
	n := q.gathered.n
	if n == 0 {
		return
	}
	q.issuing, q.gathered = q.gathered, batch{}
	err := q.device.Use()
	issued := false
	if err == nil && n > 1 && !q.unbatched {
		d, b := q.device.Driver, &q.issuing
		err = d.MemcpyBatchAsync(b.to[:n], b.from[:n], b.sizes[:n], q.stream)
		switch {
		case err == nil:
			issued, q.copyEngine = true, true
		case errors.Is(err, cuda.ErrNotSupported):
			q.unbatched, err = true, nil
		default:
			// Some copies may be in flight, so the memory must not be reused. If the stream still
			// works, one of the copies was invalid, for instance because a client's memory is gone.
			// The queue repeats the copies one by one, so that no valid copy fails.
			if waited := d.StreamSynchronize(q.stream); waited != nil {
				err = fmt.Errorf("%w; %w", err, waited)
			} else {
				err = nil
			}
		}
	}
	// A callback of an error may issue more copies.
	for i, b := 0, q.issuing; i < n; i++ {
		one := err
		if one == nil && !issued {
			one = q.device.Driver.MemcpyAsync(b.to[i], b.from[i], b.sizes[i], q.stream)
		}
		if one != nil {
			b.done[i](q.named(one))
			continue
		}
		q.count(b.done[i])
	}
	q.issuing = batch{} // drops references to operations
	if q.marked < q.issued {
		q.mark()
	}
}

// mark issues an event after the issued copies; the context is current.
func (q *Queue) mark() {
	d := q.device.Driver
	event, err := q.event()
	if err == nil {
		if err = d.EventRecord(event, q.stream); err == nil {
			q.marked = q.issued
			q.marks.push(mark{event: event, number: q.issued})
			return
		}
		q.idle = append(q.idle, event)
	}
	// The copies run without an event for the end: wait for the end here, so that no operation
	// reuses the memory too early.
	if waited := d.StreamSynchronize(q.stream); waited != nil {
		err = fmt.Errorf("%w; %w", err, waited)
	}
	for q.marks.len() > 0 {
		q.reuse(q.marks.pop().event)
	}
	q.marked = q.issued
	q.end(q.issued, q.named(err))
}

// named adds the device to an error.
func (q *Queue) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("GPU %s: %w", q.device.BusID, err)
}

// reuse keeps the event of a mark, which a marker lacks.
func (q *Queue) reuse(e cuda.Event) {
	if e != 0 {
		q.idle = append(q.idle, e)
	}
}

func (q *Queue) event() (cuda.Event, error) {
	if n := len(q.idle); n > 0 {
		e := q.idle[n-1]
		q.idle = q.idle[:n-1]
		return e, nil
	}
	return q.device.Driver.EventCreate(cuda.EventOptions{})
}

// end reports the copies up to a number.
func (q *Queue) end(number uint64, err error) {
	for q.ended < number {
		q.ended++
		q.pending.pop()(err) // which may issue more
	}
}

// Poll reports the copies that have ended.
func (q *Queue) Poll() bool {
	if !q.gathered.held {
		q.flush()
	}
	if q.marked < q.issued {
		if err := q.device.Use(); err != nil {
			q.marked = q.issued
			q.end(q.issued, q.named(err))
			return true
		}
		q.mark()
	}
	progress := false
	for q.marks.len() > 0 {
		head := q.marks.first()
		ready, err := q.over(head)
		if err == nil && !ready {
			if !head.sample.IsZero() {
				q.looked = time.Now()
			}
			break
		}
		q.marks.pop()
		q.reuse(head.event)
		progress = true
		switch {
		case head.kernel > 0:
			q.judgeKernel(head.sample, head.kernel)
		case !head.sample.IsZero():
			q.judge(head.sample)
		}
		q.end(head.number, q.named(err))
	}
	if q.gathered.held && q.marks.len() < minEvents {
		q.flush()
	}
	return q.pollHosts() || progress
}

// judge makes the next copies bounce if an ended copy took longer than sliceWait since its issue.
// Such a copy has at most maxBounce bytes and was alone on the stream, so the copy waited for no
// earlier copy, and the bytes take less time. If the previous query was more than latePoll ago, the
// time of the end is too uncertain, and judge draws no conclusion.
func (q *Queue) judge(issued time.Time) {
	now := time.Now()
	if now.Sub(q.looked) <= latePoll && now.Sub(issued) > sliceWait {
		q.bounces = bounceCopies + 1 // with the one that tries again
	}
}

func (q *Queue) pollHosts() bool {
	if q.hosts == 0 {
		return false
	}
	q.mu.Lock()
	finished := q.finished
	q.finished = nil
	q.mu.Unlock()
	q.hosts -= len(finished)
	for _, done := range finished {
		done(nil)
	}
	return len(finished) > 0
}

// Wait waits until no copy is under way that the device's context does not know of.
func (q *Queue) Wait() { q.copiers.Wait() }

// Busy reports whether a copy is under way.
func (q *Queue) Busy() bool { return q.ended < q.issued || q.gathered.n > 0 || q.hosts > 0 }

// Arm has nothing to arm: a queue without copies under way makes no work.
func (q *Queue) Arm() bool { return false }

// Disarm has nothing to undo.
func (q *Queue) Disarm() {}

// Close destroys the stream and events. No copy may be under way.
func (q *Queue) Close() error {
	d := q.device.Driver
	err := q.device.Use()
	if err == nil {
		err = d.StreamDestroy(q.stream)
		for _, p := range []unsafe.Pointer{q.bounce, q.own} {
			if p != nil {
				err = errors.Join(err, d.MemHostFree(p))
			}
		}
	}
	for _, e := range q.idle {
		err = errors.Join(err, d.EventDestroy(e))
	}
	return err
}

// fifo keeps its memory, so that a queue at work allocates nothing.
type fifo[T any] struct {
	list       []T // a power of two of them
	head, tail uint64
}

func (f *fifo[T]) len() int { return int(f.tail - f.head) }

func (f *fifo[T]) at(i uint64) *T { return &f.list[i%uint64(len(f.list))] }

func (f *fifo[T]) push(v T) {
	if f.len() == len(f.list) {
		larger := fifo[T]{list: make([]T, max(16, 2*len(f.list)))}
		for i := f.head; i < f.tail; i++ {
			*larger.at(i) = *f.at(i)
		}
		f.list = larger.list
	}
	*f.at(f.tail) = v
	f.tail++
}

func (f *fifo[T]) first() T { return *f.at(f.head) }

func (f *fifo[T]) pop() T {
	v, none := f.first(), *new(T)
	*f.at(f.head) = none
	f.head++
	return v
}
