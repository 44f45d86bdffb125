package relay

import (
	"slices"

	"github.com/peerlane/peerlane/relay/wire"
)

// flushes are a connection's flush operations, which end after the earlier operations: earlier
// messages are delivered then, or the flush has the status of the first failure.
type flushes struct {
	last uint64 // serial of the connection's operations
	open []*flush
	// lost is the first failure that no flush has told of.
	lost wire.Status
}

type flush struct {
	op      *operation
	behind  int  // operations before it that have not ended
	started bool // its own timeline has come
	lost    wire.Status
}

// settle ends a flush without earlier operations.
func (f *flush) settle() {
	if f.started && f.behind == 0 {
		f.op.finish(f.lost)
	}
}

// number numbers an operation that the connection takes, behind so many others.
func (f *flushes) number(op *operation, behind int) {
	f.last++
	op.serial = f.last
	if op.kind == wire.OpFlush {
		f.open = append(f.open, &flush{op: op, behind: behind, lost: f.lost})
		f.lost = wire.StatusOK
	}
}

func (f *flushes) start(op *operation) {
	for _, w := range f.open {
		if w.op == op {
			w.started = true
			w.settle()
			return
		}
	}
}

func (f *flushes) cancel(cookie uint64) {
	for _, w := range f.open {
		if w.op.cookie == cookie {
			w.op.finish(wire.StatusCanceled)
			return
		}
	}
}

// missed is a failure of an operation after the last posted flush.
func (f *flushes) missed(status wire.Status) {
	if f.lost == wire.StatusOK {
		f.lost = status
	}
}

// over removes an ended operation from the later flushes.
func (f *flushes) over(op *operation, status wire.Status) {
	own := op.kind == wire.OpFlush
	if own {
		f.open = slices.DeleteFunc(f.open, func(w *flush) bool { return w.op == op })
	}
	told := own
	var ready []*flush
	for _, w := range f.open {
		if w.op.serial < op.serial {
			continue
		}
		if !own && w.lost == wire.StatusOK {
			w.lost = status
		}
		told = true
		w.behind--
		ready = append(ready, w)
	}
	if !told {
		f.missed(status)
	}
	for _, w := range ready {
		w.settle()
	}
}
