package engine

import (
	"errors"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
)

// The engine is the NIC of the queue pairs that processes connect to it. The engine does writes,
// writes with an immediate and short reads between known regions, and reports completions in the
// order of the queue pair. It reports success only: the engine refuses a work request that it
// cannot finish, with later requests of the queue pair until the process has taken the refusal
// (submission.epoch); the process finds the status of the request.

// remoteRead is an access of a region, as ibv_access_flags.
const remoteRead = 4

// pair is a queue pair.
type pair struct {
	owner        *client
	number, peer uint32
	access       uint32
	domain       uint64
	slot         uint32 // number of the slot in the shared memory
	port         *port  // nil for a device without a rate
	random       uint64 // the generator of the order of copies, 0 for the order of the works
	// works has the accepted works without a report, oldest first.
	works []*work
	paced []*work // works that wait for the port
	// refusing is whether works of the epoch are refused.
	refusing bool
	epoch    uint32
	consumed uint32 // receives that accepted works of the peer take
	reported uint32 // immediates that were reported to the owner
	copying  int    // unfinished copies from or to memory of the owner for the pair
	gone     bool
	settling bool
	again    bool // settle was called while settling
	// disconnected is called when no byte moves for the pair any more.
	disconnected func()
}

// work is an accepted work request.
type work struct {
	pair, to *pair
	submission
	from, target     *region
	fromAt, targetAt uint64 // places in the allocations
	waits            bool   // for an earlier work, or for the port
	ended            bool
	err              error
	read             uint64 // a read's place in Engine.small
	// doubtful: the receiver's process may not have taken the immediate.
	doubtful bool
	position uint64 // of that report
}

var errGone = errors.New("the queue pair has been disconnected")

func (w *work) immediate() bool { return w.opcode == opWriteImmediate }

// connect makes a queue pair known.
func (c *client) connect(o order) error {
	e := c.engine
	if c.rings == nil || o.source >= ringSlots || o.target >= devices || e.pairs[o.from] != nil || o.from == 0 {
		return unix.EINVAL
	}
	p := &pair{
		owner:  c,
		number: o.from,
		peer:   o.to,
		access: o.access,
		domain: o.domain,
		slot:   uint32(o.source),
		random: o.size,
	}
	if o.bytes > 0 {
		p.port = e.portOf(c, uint32(o.target), o.bytes)
	}
	e.pairs[o.from] = p
	return nil
}

// disconnect ends that. answer is called when no byte moves for the queue pair any more.
func (c *client) disconnect(number uint32, answer func()) error {
	p := c.engine.pairs[number]
	if p == nil || p.owner != c {
		return unix.ENOENT
	}
	p.disconnected = answer
	c.engine.drop(p)
	return nil
}

// drop ends a queue pair: copies that have not begun do not begin.
func (e *Engine) drop(p *pair) {
	p.gone = true
	delete(e.pairs, p.number)
	dead := func(w *work) bool { return w.pair.gone || w.to.gone }
	for _, m := range e.movers {
		m.waiting = slices.DeleteFunc(m.waiting, func(j *job) bool {
			if slices.ContainsFunc(j.works, func(w *work) bool { return !dead(w) }) {
				return false
			}
			for _, w := range j.works {
				w.end(errGone)
			}
			return true
		})
	}
	owners := []*pair{p}
	if peer := e.pairs[p.peer]; peer != nil {
		owners = append(owners, peer)
	}
	for _, owner := range owners {
		for _, w := range slices.Clone(owner.paced) {
			if dead(w) {
				w.end(errGone)
			}
		}
		owner.settle()
	}
	p.rest()
}

// rest calls disconnected when it is time.
func (p *pair) rest() {
	if p.gone && p.copying == 0 && p.disconnected != nil {
		answer := p.disconnected
		p.disconnected = nil
		answer()
	}
}

// receives reports whether writes to the queue pair may be reported.
func (p *pair) receives() bool {
	return !p.gone && !p.owner.gone && atomic.LoadUint32(&p.owner.rings.slot(p.slot).ready) != 0
}

// work accepts a work request, or refuses it.
func (c *client) work(s *submission) {
	p := c.engine.pairs[s.pair]
	if p == nil || p.owner != c {
		return
	}
	if p.refusing && p.epoch == s.epoch {
		p.tellRefused(s)
		return
	}
	p.refusing = false
	w := p.prepare(s)
	if w == nil {
		p.refuse(s)
		return
	}
	p.works = append(p.works, w)
	switch {
	case s.length == 0:
		w.ended = true
	case s.opcode == opRead:
		w.waits = true // settle begins it
	case p.port != nil:
		w.waits = true
		p.port.post(w)
	default:
		w.begin()
	}
	p.settle()
}

func (p *pair) refuse(s *submission) {
	p.refusing, p.epoch = true, s.epoch
	p.tellRefused(s)
}

func (p *pair) tellRefused(s *submission) {
	p.owner.engine.figures.refused++
	if !p.gone && !p.owner.gone {
		p.owner.rings.report(report{kind: reportRefused, pair: p.number, slot: p.slot, serial: s.serial, length: s.length})
	}
}

// prepare checks a work request as both NICs do, and returns nil for a request outside the engine.
func (p *pair) prepare(s *submission) *work {
	e := p.owner.engine
	to := e.pairs[p.peer]
	if to == nil || to.peer != p.number || !to.receives() || p.owner.moves >= maxMoves {
		return nil
	}
	w := &work{pair: p, to: to, submission: *s}
	access := uint32(remoteWrite)
	switch s.opcode {
	case opWrite:
	case opWriteImmediate:
		at := to.owner.rings.slot(to.slot)
		if int32(atomic.LoadUint32(&at.posted)-atomic.LoadUint32(&at.used)-to.consumed) <= 0 {
			return nil
		}
	case opRead:
		if access = remoteRead; s.length > reportRead || !e.reserve(w) {
			return nil
		}
	default:
		return nil
	}
	if s.length > 0 {
		n := uint64(s.length)
		remote, at, err := to.owner.find(s.rkey, s.remote, n, access)
		if err != nil || s.rkey&1 == 0 || remote.owner != to.owner || remote.domain != to.domain || to.access&access == 0 {
			e.unreserve(w)
			return nil
		}
		if s.opcode == opRead {
			w.from, w.fromAt = remote, at
		} else {
			local, from, err := p.owner.find(s.lkey&^1, s.address, n, 0)
			if err != nil || local.domain != p.domain {
				return nil
			}
			w.from, w.fromAt, w.target, w.targetAt = local, from, remote, at
		}
		for _, r := range []*region{w.from, w.target} {
			if r != nil {
				r.moves++
			}
		}
		p.owner.moves++
		p.copying++
		to.copying++
	}
	if w.immediate() {
		to.consumed++
	}
	return w
}

// begin has the bytes copied.
func (w *work) begin() {
	e := w.pair.owner.engine
	w.waits = false
	if w.opcode == opRead {
		g := e.gpus[w.from.On]
		if w.from.Host() {
			w.end(unix.EINVAL) // the engine reads for flushes of GPU memory
			return
		}
		loaded, err := device.Load(w.from.At(w.fromAt), e.small.HostBytes()[w.read:w.read+uint64(w.length)])
		if loaded {
			w.end(err)
			return
		}
		if err := e.small.Pin(g.Device); err != nil {
			w.end(e.failed(err))
			return
		}
		g.reads.Move(e.small.At(w.read), w.from.At(w.fromAt), uint64(w.length), func(err error) {
			w.end(e.failed(err))
			w.pair.settle()
		})
		return
	}
	queue, err := e.issuer(w.target.Memory, w.from.Memory)
	if err != nil {
		w.end(err)
		return
	}
	e.moverOf(queue).add(w)
}

// end is the end of a work's bytes. The caller calls settle.
func (w *work) end(err error) {
	e := w.pair.owner.engine
	if w.ended {
		return
	}
	if w.waits && w.pair.port != nil && w.opcode != opRead {
		w.pair.port.remove(w)
	}
	w.waits, w.ended, w.err = false, true, err
	for _, r := range []*region{w.from, w.target} {
		if r != nil {
			r.moves--
			e.settle(r)
		}
	}
	w.pair.owner.moves--
	for _, p := range []*pair{w.pair, w.to} {
		p.copying--
		p.rest()
	}
	w.pair.owner.release()
}

// settle reports the works at the head that have ended, in order.
func (p *pair) settle() {
	p.again = true
	if p.settling { // the ended job has called it
		return
	}
	p.settling = true
	for p.again {
		p.again = false
		p.advance()
	}
	p.settling = false
}

func (p *pair) advance() {
	e := p.owner.engine
	for i, w := range p.works { // reads begin behind the writes before them
		if w.opcode == opRead && w.waits {
			w.begin()
		}
		if !w.ended && w.opcode != opRead || i >= ringEntries {
			break
		}
	}
	for len(p.works) > 0 {
		w := p.works[0]
		if !w.ended || w.doubtful && !w.taken() {
			return
		}
		refused := w.err != nil || p.refusing && p.epoch == w.epoch || w.immediate() && !w.doubtful && !w.to.receives()
		if w.immediate() && !refused && !w.doubtful {
			to := w.to
			to.owner.rings.report(
				report{kind: reportArrived, pair: to.number, slot: to.slot, immediate: w.submission.immediate, length: w.length},
			)
			to.reported++
			if !to.receives() { // since when nobody says
				w.doubtful, w.position = true, to.owner.rings.position()
				e.doubtful = append(e.doubtful, p)
				continue
			}
		}
		p.works[0] = nil
		p.works = p.works[1:]
		if refused {
			if w.immediate() {
				w.to.consumed--
			}
			p.refuse(&w.submission)
		} else if !p.gone && !p.owner.gone {
			one := report{kind: reportDone, pair: p.number, slot: p.slot, serial: w.serial, length: w.length}
			if w.opcode == opRead {
				copy(one.data[:w.length], e.small.HostBytes()[w.read:])
			}
			p.owner.rings.report(one)
			e.figures.Done++
		}
		e.unreserve(w)
	}
}

// taken reports whether it is known if the process of the receiver took a doubtful immediate. If the
// process did not, the work has failed.
func (w *work) taken() bool {
	to := w.to
	switch {
	case to.gone || to.owner.gone:
		w.err = errGone
		return true
	case int64(atomic.LoadUint64(to.owner.rings.read)-w.position) < 0:
		return false
	}
	if atomic.LoadUint32(&to.owner.rings.slot(to.slot).taken) != to.reported {
		to.reported--
		w.err = errGone
	}
	return true
}

// pollDoubtful asks again for the queue pairs with a doubtful work at the head.
func (e *Engine) pollDoubtful() bool {
	asked := e.doubtful
	e.doubtful = nil
	for _, p := range asked {
		if len(p.works) == 0 || !p.works[0].doubtful {
			continue
		}
		if p.settle(); len(p.works) > 0 && p.works[0].doubtful && !slices.Contains(e.doubtful, p) {
			e.doubtful = append(e.doubtful, p)
		}
	}
	return len(e.doubtful) < len(asked)
}

// smallBytes is the host memory that reads go to, reportRead bytes for each.
const smallBytes = 64 << 10

// reserve finds the place of a read.
func (e *Engine) reserve(w *work) bool {
	if e.small == nil {
		m, err := device.CreateHost("softdevice-reads", smallBytes)
		if err != nil {
			return false
		}
		e.small = m
		for at := uint64(0); at < smallBytes; at += reportRead {
			e.places = append(e.places, at)
		}
	}
	n := len(e.places)
	if n == 0 {
		return false
	}
	w.read, e.places = e.places[n-1], e.places[:n-1]
	return true
}

func (e *Engine) unreserve(w *work) {
	if w.opcode == opRead {
		e.places = append(e.places, w.read)
	}
}
