package device

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
)

// Copy is an element of a list of copies.
type Copy struct {
	To, From Place
	Bytes    uint64
}

// maxBatch bounds the copies of one batch. A batch takes the driver some microseconds per copy
// (docs/benchmarks.md), and the loop serves further operations between two batches of a list.
const maxBatch = 512

// MoveList is Move for many copies, which have no order. done is called once, after the last copy,
// with the first error; before the return of MoveList if the copies have ended by then.
//
// A kernel makes many small copies between devices and within a device (listkernel.go). Otherwise one
// batch call makes up to maxBatch copies between two devices, or from a device to host memory.
// Copies within a device, or from host memory to a device, use the calls that Move chooses, because
// a batch would wait for kernels. A single thread makes the copies between host memories.
func (q *Queue) MoveList(list []Copy, done func(error)) {
	left, failed := 1, error(nil)
	one := func(err error) {
		if failed == nil {
			failed = err
		}
		if left--; left == 0 {
			done(failed)
		}
	}
	var hosts, batched []Copy
	kernel := q.takesKernel(list)
	if kernel {
		left++
		kernel = q.issueKernel(list, one)
		if !kernel {
			left--
		}
	}
	for _, c := range list {
		switch {
		case kernel && fitsKernel(c):
		case c.To.Host != nil && c.From.Host != nil:
			hosts = append(hosts, c)
		case c.Bytes >= largeCopy || sameDevice(c.To, c.From) || c.From.Host != nil || q.unbatched:
			left++
			q.issue(c.To, c.From, c.Bytes, one)
		default:
			batched = append(batched, c)
		}
	}
	if len(hosts) > 0 {
		left++
		q.moveHosts(hosts, one)
	}
	for len(batched) > 0 {
		n := min(len(batched), maxBatch)
		left++
		q.issueBatch(batched[:n], one)
		batched = batched[n:]
	}
	one(nil)
}

// moveHosts makes copies between host memories: at once if all are short.
func (q *Queue) moveHosts(list []Copy, done func(error)) {
	total := uint64(0)
	for _, c := range list {
		total += c.Bytes
	}
	move := func() {
		for _, c := range list {
			to, from := unsafe.Slice((*byte)(c.To.Host), c.Bytes), unsafe.Slice((*byte)(c.From.Host), c.Bytes)
			for len(to) > 0 {
				k := copy(to[:min(len(to), hostPiece)], from)
				to, from = to[k:], from[k:]
			}
		}
	}
	if total <= shortMove {
		move()
		done(nil)
		return
	}
	q.hosts++
	q.copiers.Go(func() {
		processors <- struct{}{}
		move()
		<-processors
		q.mu.Lock()
		defer q.mu.Unlock()
		q.finished = append(q.finished, done)
	})
}

// issueBatch issues copies with a single call, and an event after the copies. done is called once.
func (q *Queue) issueBatch(list []Copy, done func(error)) {
	q.flush() // it was asked for before
	d, n := q.device.Driver, len(list)
	err := q.device.Use()
	if err != nil {
		done(q.named(err))
		return
	}
	to, from, sizes := make([]cuda.Ptr, n), make([]cuda.Ptr, n), make([]uint64, n)
	for i, c := range list {
		to[i], from[i], sizes[i] = c.To.Ptr, c.From.Ptr, c.Bytes
	}
	if err = d.MemcpyBatchAsync(to, from, sizes, q.stream); errors.Is(err, cuda.ErrNotSupported) {
		q.unbatched, err = true, nil
		for i := range list {
			err = errors.Join(err, d.MemcpyAsync(to[i], from[i], sizes[i], q.stream))
		}
	}
	q.copyEngine = true
	if err != nil {
		// Some of the copies may be under way, and the caller frees the memory after done.
		if waited := d.StreamSynchronize(q.stream); waited != nil {
			err = fmt.Errorf("%w; %w", err, waited)
		}
		done(q.named(err))
		return
	}
	q.count(done)
	q.mark()
}
