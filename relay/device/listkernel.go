package device

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
)

// A copy engine takes 2 to 5 us for each copy of a batch, and two copies by way of host memory take
// 12 us (docs/benchmarks.md). A kernel makes a thousand copies in the time of one, but waits for the
// time slice of another process's kernels, about 2 ms. So a kernel makes lists of at least
// kernelLeast copies; after a kernel that waited, the next kernelRetry lists need kernelBusy copies.
const (
	kernelLeast = 64
	kernelBusy  = 512
	kernelRetry = 63

	kernelTables = 32   // lists under way
	tableCopies  = 2048 // of a table
	slowest      = 20   // GB/s, below which a kernel has waited
)

// listKernel is the kernel of lists in a device's context.
type listKernel struct {
	once  sync.Once
	ready atomic.Pointer[loadedKernel]
	load  sync.WaitGroup
}

// loadedKernel is a loaded kernel with its tables, in pinned host memory.
type loadedKernel struct {
	*kernels.Lists
	memory unsafe.Pointer
	device cuda.Ptr // the address of memory for the device
	mu     sync.Mutex
	idle   []int // numbers of tables
}

const tableBytes = tableCopies * uint64(unsafe.Sizeof(kernels.ListCopy{}))

// PrepareLists loads the kernel of lists, without a wait. Until the kernel is loaded, and if the
// driver cannot load it, copy engines make the copies.
func (g *Device) PrepareLists() {
	g.lists.once.Do(func() {
		g.lists.load.Go(func() {
			_ = g.On(func() error { // without the kernel lists are slower, and correct
				k, err := kernels.LoadLists(g.Driver, g.Ordinal)
				if err != nil {
					return err
				}
				l := &loadedKernel{Lists: k}
				if l.memory, err = g.Driver.MemHostAlloc(kernelTables * tableBytes); err == nil {
					l.device, err = g.Driver.MemHostDevicePtr(l.memory)
				}
				if err != nil {
					return errors.Join(err, l.unload(g.Driver))
				}
				for i := range kernelTables {
					l.idle = append(l.idle, i)
				}
				g.lists.ready.Store(l)
				return nil
			})
		})
	})
}

// ListsPrepared waits for the end of PrepareLists, and reports whether the kernel is loaded.
func (g *Device) ListsPrepared() bool {
	g.lists.load.Wait()
	return g.lists.ready.Load() != nil
}

func (l *loadedKernel) unload(d *cuda.Driver) error {
	err := l.Unload()
	if l.memory != nil {
		err = errors.Join(err, d.MemHostFree(l.memory))
	}
	return err
}

func (g *Device) unloadLists() error {
	if !g.ListsPrepared() {
		return nil
	}
	l := g.lists.ready.Swap(nil)
	return g.On(func() error { return l.unload(g.Driver) })
}

// table takes a table for n copies; nil if none is idle.
func (l *loadedKernel) table() (number int, copies []kernels.ListCopy) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := len(l.idle) - 1
	if last < 0 {
		return 0, nil
	}
	number = l.idle[last]
	l.idle = l.idle[:last]
	at := unsafe.Add(l.memory, uint64(number)*tableBytes)
	return number, unsafe.Slice((*kernels.ListCopy)(at), tableCopies)[:0]
}

func (l *loadedKernel) give(number int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = append(l.idle, number)
}

// fitsKernel reports whether the kernel can make a copy, and makes it faster than an engine.
func fitsKernel(c Copy) bool {
	return c.To.Host == nil && c.From.Host == nil && c.Bytes < largeCopy &&
		(uint64(c.To.Ptr)|uint64(c.From.Ptr)|c.Bytes)%kernels.ListUnit == 0
}

// takesKernel reports whether a kernel makes the copies of a list that fit.
func (q *Queue) takesKernel(list []Copy) bool {
	if len(list) < kernelLeast {
		return false
	}
	fit := 0
	for i := range list {
		if fitsKernel(list[i]) {
			fit++
		}
	}
	if fit < kernelLeast || fit > tableCopies {
		return false
	}
	q.device.PrepareLists()
	if q.device.lists.ready.Load() == nil {
		return false
	}
	if q.slices > 0 && fit < kernelBusy {
		q.slices--
		return false
	}
	return true
}

// issueKernel issues the copies of a list that fit, and an event after them. It reports whether the
// kernel was launched; if so, done is called once.
func (q *Queue) issueKernel(list []Copy, done func(error)) bool {
	alone := q.ended == q.issued && q.gathered.n == 0
	q.flush() // it was asked for before
	l := q.device.lists.ready.Load()
	number, copies := l.table()
	if copies == nil {
		return false
	}
	most, total := uint64(0), uint64(0)
	for _, c := range list {
		if fitsKernel(c) {
			copies = append(copies, kernels.ListCopy{To: c.To.Ptr, From: c.From.Ptr, Bytes: c.Bytes})
			most, total = max(most, c.Bytes), total+c.Bytes
		}
	}
	err := q.device.Use()
	if err == nil {
		err = l.Copy(q.stream, l.device+cuda.Ptr(uint64(number)*tableBytes), len(copies), most)
	}
	if err != nil { // the engines report it, if they have it too
		l.give(number)
		return false
	}
	q.copyEngine = false
	q.count(func(err error) {
		l.give(number)
		done(err)
	})
	q.mark()
	if alone && q.marks.len() > 0 {
		last := q.marks.at(q.marks.tail - 1)
		last.sample = time.Now()
		last.kernel = sliceWait + time.Duration(total/slowest)
		q.looked = last.sample
	}
	return true
}

// judgeKernel sees whether a kernel that was alone on the stream waited for a time slice, as judge
// does for copies.
func (q *Queue) judgeKernel(issued time.Time, enough time.Duration) {
	now := time.Now()
	if now.Sub(q.looked) <= latePoll && now.Sub(issued) > enough {
		q.slices = kernelRetry
	}
}
