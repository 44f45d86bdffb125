package engine

import (
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
)

// mover gives copies to the stream of a GPU. A copy engine loses microseconds between two copies,
// so few copies are in the stream at a time, and adjacent waiting copies become a single copy: the
// parts of one write over several queue pairs do.
type mover struct {
	queue   *device.Queue
	flying  int
	bytes   uint64 // that are flying
	waiting []*job
}

// A stream has up to flyingBytes of copies, and two copies at least.
const (
	flyingCopies = 2
	flyingBytes  = 4 << 20
	mergedBytes  = 64 << 20
	lookedAt     = 8 // of the last jobs that wait, for one that a copy continues
)

// job is a copy for one or more works.
type job struct {
	from, target     *region
	fromAt, targetAt uint64
	bytes            uint64
	works            []*work
}

func (e *Engine) moverOf(q *device.Queue) *mover {
	m := e.movers[q]
	if m == nil {
		m = &mover{queue: q}
		e.movers[q] = m
	}
	return m
}

// add has the bytes of a work copied with the next pump. A copy that joins an earlier one does not pass
// a waiting copy of the same bytes.
func (m *mover) add(w *work) {
	one := &job{w.from, w.target, w.fromAt, w.targetAt, uint64(w.length), []*work{w}}
	at := len(m.waiting)
	for i := at - 1; i >= max(0, len(m.waiting)-lookedAt); i-- {
		joined := m.waiting[i].join(one)
		if joined == nil {
			if one.conflicts(m.waiting[i]) {
				break
			}
			continue
		}
		if at < len(m.waiting) { // the work closes the gap between two jobs
			m.waiting = slices.Delete(m.waiting, at, at+1)
		}
		m.waiting[i] = joined
		one, at = joined, i
	}
	if at == len(m.waiting) {
		m.waiting = append(m.waiting, one)
	}
}

// conflicts reports whether the order of both copies matters: a copy writes bytes that the second copy
// writes or reads, by the same registration. Works of a queue pair have that order.
func (j *job) conflicts(other *job) bool {
	return overlap(j.target, j.targetAt, j.bytes, other.target, other.targetAt, other.bytes) ||
		overlap(j.from, j.fromAt, j.bytes, other.target, other.targetAt, other.bytes) ||
		overlap(j.target, j.targetAt, j.bytes, other.from, other.fromAt, other.bytes)
}

func overlap(a *region, at uint64, bytes uint64, b *region, otherAt, otherBytes uint64) bool {
	return a == b && at < otherAt+otherBytes && otherAt < at+bytes
}

// join returns the copy of both, nil if neither follows the second, or if a copy reads bytes that the
// second copy writes.
func (j *job) join(next *job) *job {
	if j.from != next.from || j.target != next.target || j.bytes+next.bytes > mergedBytes {
		return nil
	}
	first, second := j, next
	if next.fromAt < j.fromAt {
		first, second = next, j
	}
	if first.fromAt+first.bytes != second.fromAt || first.targetAt+first.bytes != second.targetAt || j.conflicts(next) {
		return nil
	}
	return &job{
		first.from,
		first.target,
		first.fromAt,
		first.targetAt,
		first.bytes + second.bytes,
		append(j.works, next.works...),
	}
}

// pump gives waiting copies to the stream.
func (m *mover) pump() {
	for len(m.waiting) > 0 && (m.flying < flyingCopies || m.bytes+m.waiting[0].bytes <= flyingBytes) {
		at := m.next()
		j := m.waiting[at]
		m.waiting = slices.Delete(m.waiting, at, at+1)
		m.flying++
		m.bytes += j.bytes
		j.works[0].pair.owner.engine.figures.Copies++
		m.queue.Move(j.target.At(j.targetAt), j.from.At(j.fromAt), j.bytes, func(err error) {
			m.flying--
			m.bytes -= j.bytes
			j.end(err)
		})
	}
}

// next picks the first waiting job, or for a device with a seed any job without an earlier job of
// its queue pairs: copies of several queue pairs have no order.
func (m *mover) next() int {
	p := m.waiting[0].works[0].pair
	if p.random == 0 {
		return 0
	}
	p.random ^= p.random << 13
	p.random ^= p.random >> 7
	p.random ^= p.random << 17
	var first []int
	seen := map[*pair]bool{}
	for i, j := range m.waiting {
		behind := false
		for _, w := range j.works {
			behind = behind || seen[w.pair]
			seen[w.pair] = true
		}
		if !behind {
			first = append(first, i)
		}
	}
	return first[p.random%uint64(len(first))]
}

func (j *job) end(err error) {
	_ = j.works[0].pair.owner.engine.failed(err)
	var pairs []*pair
	for _, w := range j.works {
		w.end(err)
		if !slices.Contains(pairs, w.pair) {
			pairs = append(pairs, w.pair)
		}
	}
	for _, p := range pairs {
		p.settle()
	}
}

// port is the port of a device with a rate: a token bucket for the queue pairs, which take turns.
// The due time is in memory shared by the processes, so that requests outside the engine count,
// too.
type port struct {
	engine *Engine
	rate   float64 // bytes a second
	due    *uint64
	turn   []*pair // pairs with a waiting work, the next pair first
}

// portBurst is the time of which an idle port keeps the bytes: longer than the loop naps.
const portBurst = 100 * time.Microsecond

// portOf returns the port of a device, with the rate that the process gives.
func (e *Engine) portOf(c *client, node uint32, rate uint64) *port {
	p := e.ports[node]
	if p == nil {
		p = &port{engine: e}
		e.ports[node] = p
	}
	p.rate, p.due = float64(rate), c.rings.dueOf(node)
	return p
}

func (p *port) post(w *work) {
	w.pair.paced = append(w.pair.paced, w)
	if p.engine.waiting++; len(w.pair.paced) == 1 {
		p.turn = append(p.turn, w.pair)
	}
}

func (p *port) remove(w *work) {
	at := slices.Index(w.pair.paced, w)
	if at < 0 {
		return
	}
	w.pair.paced = slices.Delete(w.pair.paced, at, at+1)
	if p.engine.waiting--; len(w.pair.paced) == 0 {
		p.turn = slices.DeleteFunc(p.turn, func(other *pair) bool { return other == w.pair })
	}
}

// next takes the next work whose turn has come.
func (p *port) next(now uint64) *work {
	if len(p.turn) == 0 {
		return nil
	}
	for {
		seen := atomic.LoadUint64(p.due)
		if seen > now {
			return nil
		}
		w := p.turn[0].paced[0]
		begins := max(seen, now-uint64(portBurst))
		if !atomic.CompareAndSwapUint64(p.due, seen, begins+uint64(float64(w.length)/p.rate*1e9)) {
			continue
		}
		owner := w.pair
		p.remove(w)
		if len(owner.paced) > 0 { // after the waiting works
			p.turn = append(p.turn[1:], owner)
		}
		return w
	}
}

// pollPaces begins the works whose turn has come.
func (e *Engine) pollPaces() bool {
	if e.waiting == 0 {
		return false
	}
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return false // cannot fail for this clock
	}
	progress := false
	for _, p := range e.ports {
		for w := p.next(uint64(t.Nano())); w != nil; w = p.next(uint64(t.Nano())) {
			w.begin()
			w.pair.settle()
			progress = true
		}
	}
	return progress
}
