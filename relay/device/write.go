package device

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
)

// Writes are copies of less than minLinear out of host memory. With the usual calls the driver
// copies by the device's SMs, which wait 2 ms for a time slice beside a foreign process's kernel.
// Two methods do not wait: words written by the stream (cuStreamBatchMemOp), whose time grows per
// word, and a rectangle of two rows (cuMemcpy2DAsync), which a copy engine moves.

// The memory of own: the value of prime, the marker of words, and slots.
const (
	markerAt   = 64
	slotsAt    = 4 << 10
	writeSlots = 32
	ownBytes   = slotsAt + writeSlots*shortMove
)

// wordBytes are those of a word.
const wordBytes = 8

// defaultMaxWords, bytes, is the size of the largest write made as words before the first measurement.
const defaultMaxWords = 16

// Writes is the method of writes by size, from [Device.MeasureWrites].
type Writes struct {
	// MaxWords is the largest write, bytes, that is words.
	MaxWords uint64
	// MaxStores is the largest write by CPU stores into mapped memory, bytes; 0 without, for the
	// reason NoStores.
	MaxStores uint64
	NoStores  string
	Measured  []WriteTime // by size; empty where nothing was measured
}

// WriteTime is the duration of a write of so many bytes per method, from the call until the end is
// known: the median. 0 is a method that cannot write so many, or that this device has not.
type WriteTime struct {
	Bytes               uint64
	Words, Rows, Stores time.Duration
}

// inWords reports whether a write is words.
func (q *Queue) inWords(to cuda.Ptr, n uint64) bool {
	return n%wordBytes == 0 && to%wordBytes == 0 && n <= q.device.writes.MaxWords && !q.noWords
}

// Write copies bytes of the host into device memory, as Move does. The bytes may change after the
// return. It reports false where it cannot: done is not called, and Move can.
func (q *Queue) Write(to cuda.Ptr, from []byte, done func(error)) bool {
	n := uint64(len(from))
	// Every call of the driver that writes a single byte waits for a time slice.
	if n < 2 || n > shortMove || q.device.Use() != nil || !q.reserve(&q.own, ownBytes) {
		return false
	}
	if q.inWords(to, n) {
		q.issue(Place{Ptr: to}, Place{Host: unsafe.Pointer(&from[0])}, n, done)
		return true
	}
	slot, ok := q.takeSlot()
	if !ok {
		return false
	}
	copy(unsafe.Slice((*byte)(slot.Host), n), from)
	q.issue(Place{Ptr: to}, slot, n, func(err error) {
		q.giveSlot(slot)
		done(err)
	})
	return true
}

// takeSlot takes a slot of own, which is there.
func (q *Queue) takeSlot() (Place, bool) {
	if q.slots == nil {
		for i := range writeSlots {
			at := unsafe.Add(q.own, slotsAt+i*shortMove)
			q.slots = append(q.slots, Place{Ptr: cuda.Ptr(uintptr(at)), Host: at})
		}
	}
	last := len(q.slots) - 1
	if last < 0 {
		return Place{}, false
	}
	slot := q.slots[last]
	q.slots = q.slots[:last]
	return slot, true
}

func (q *Queue) giveSlot(slot Place) { q.slots = append(q.slots, slot) }

// throughHost copies less than minBounce within the device as two copies, by way of a slot. It
// reports false where it cannot: done is not called.
func (q *Queue) throughHost(to, from Place, n uint64, done func(error)) bool {
	if n < 2 || q.device.Use() != nil || !q.reserve(&q.own, ownBytes) {
		return false
	}
	slot, ok := q.takeSlot()
	if !ok {
		return false
	}
	q.issue(slot, from, n, func(err error) {
		if err != nil {
			q.giveSlot(slot)
			done(err)
			return
		}
		q.issue(to, slot, n, func(err error) {
			q.giveSlot(slot)
			done(err)
		})
	})
	return true
}

// write makes a write. marked reports that the stream's marker shows the end.
func (q *Queue) write(to cuda.Ptr, from unsafe.Pointer, n uint64) (marked bool, err error) {
	if !q.inWords(to, n) || !q.reserve(&q.own, ownBytes) {
		q.copyEngine = true
		return false, q.device.Driver.MemcpyRowsHtoDAsync(to, from, n, q.stream)
	}
	if err := q.prime(to); err != nil {
		return false, err
	}
	err = q.device.Driver.StreamWriteWords(
		q.stream,
		to,
		from,
		int(n/wordBytes),
		cuda.Ptr(uintptr(unsafe.Pointer(q.marker()))),
		q.issued+1,
	)
	if errors.Is(err, cuda.ErrNotSupported) {
		q.noWords = true
		return q.write(to, from, n)
	}
	return err == nil, err
}

// prime has words be written by a copy engine: the stream writes the words by the engine of the
// stream's last work. Without one, and behind a copy within the device, that is the engine which
// waits for time slices, 1.5 ms beside another process's kernel. A copy into host memory precedes
// them then.
func (q *Queue) prime(from cuda.Ptr) error {
	if q.copyEngine {
		return nil
	}
	q.copyEngine = true
	return q.device.Driver.MemcpyDtoHAsync(q.own, from, wordBytes, q.stream)
}

// marker is how many copies of the stream had been issued when the stream wrote the last words.
func (q *Queue) marker() *uint64 { return (*uint64)(unsafe.Add(q.own, markerAt)) }

// markerLooks is how often a marker is looked for until the driver is asked: a stream that has
// failed writes none.
const markerLooks = 1 << 10

// over reports whether the copies of a mark have ended.
func (q *Queue) over(m mark) (bool, error) {
	if m.event != 0 {
		return q.device.Driver.EventQuery(m.event)
	}
	if atomic.LoadUint64(q.marker()) >= m.number {
		return true, nil
	}
	if q.asked++; q.asked%markerLooks != 0 {
		return false, nil
	}
	if err := q.device.Use(); err != nil {
		return false, err
	}
	return q.device.Driver.StreamQuery(q.stream)
}

// Writes returns the methods of writes.
func (g *Device) Writes() Writes { return g.writes }

// measureRounds are the writes of a size by each method.
const measureRounds = 15

// measureLimit is the time limit of MeasureWrites. Tests change it.
var measureLimit = 500 * time.Millisecond

// MeasureWrites measures both methods of writes with this device and driver; later queues write
// words up to the largest size at which words are not slower. Without memory or time it changes
// nothing. The measurement takes some 2 ms.
func (g *Device) MeasureWrites() error {
	var memory *Memory
	var err error
	if g.aperture != nil {
		memory, err = g.storable(64 << 10)
	} else {
		memory, err = Create(g.Driver, g.Ordinal, 64<<10, cuda.Access{Device: g.Ordinal, Write: true})
	}
	if err != nil {
		return err
	}
	defer func() { _ = memory.Close() }() // of a context that is lost
	q, err := g.NewQueue()
	if err != nil {
		return err
	}
	var found Writes
	err = g.On(func() error {
		var err error
		found, err = q.measure(memory.At(0))
		if synchronized := g.Driver.StreamSynchronize(q.stream); err == nil {
			err = synchronized
		}
		if closed := q.Close(); err == nil {
			err = closed
		}
		return err
	})
	if err == nil && len(found.Measured) > 0 {
		g.writes = found
	}
	return err
}

// measure does the work of MeasureWrites on a separate queue. Without a result time or the driver's
// call lacks.
func (q *Queue) measure(at Place) (Writes, error) {
	to := at.Ptr
	if !q.reserve(&q.own, ownBytes) {
		return Writes{}, nil
	}
	if err := q.prime(to); err != nil {
		return Writes{}, err
	}
	d, from, begun := q.device.Driver, unsafe.Add(q.own, slotsAt), time.Now()
	marker := cuda.Ptr(uintptr(unsafe.Pointer(q.marker())))
	event, err := q.event()
	if err != nil {
		return Writes{}, err
	}
	q.idle = append(q.idle, event)
	number := uint64(0)
	words := func(n uint64) (func() (bool, error), error) {
		number++
		return func() (bool, error) { return atomic.LoadUint64(q.marker()) == number, nil },
			d.StreamWriteWords(q.stream, to, from, int(n/wordBytes), marker, number)
	}
	rows := func(n uint64) (func() (bool, error), error) {
		if n == wordBytes { // which MemcpyRowsHtoDAsync writes as a word
			n++
		}
		err := d.MemcpyRowsHtoDAsync(to, from, n, q.stream)
		if err == nil {
			err = d.EventRecord(event, q.stream)
		}
		return func() (bool, error) { return d.EventQuery(event) }, err
	}
	median := func(n uint64, write func(uint64) (func() (bool, error), error)) (time.Duration, error) {
		return medianOf(begun, func() (func() (bool, error), error) { return write(n) })
	}
	stored := func(n uint64) (func() (bool, error), error) {
		return func() (bool, error) { return true, nil }, store(at.stores, unsafe.Slice((*byte)(from), n), true)
	}
	found := Writes{NoStores: q.device.writes.NoStores}
	const maxMeasuredWords = cuda.MaxWords * wordBytes
	for n := uint64(wordBytes); n <= maxMeasuredWords || (at.stores != nil && n <= maxStore); n *= 2 {
		t := WriteTime{Bytes: n}
		if n <= maxMeasuredWords {
			t.Words, err = median(n, words)
		}
		if err == nil {
			t.Rows, err = median(n, rows)
		}
		if errors.Is(err, cuda.ErrNotSupported) {
			return Writes{}, nil
		}
		if err == nil && at.stores != nil {
			t.Stores, err = median(n, stored)
		}
		if err != nil || (t.Words == 0 && n <= maxMeasuredWords) || t.Rows == 0 {
			return Writes{}, err
		}
		found.Measured = append(found.Measured, t)
		found.choose(t)
	}
	return found, nil
}

// choose takes the next larger size into account: a method is used up to the largest size below
// which none was faster.
func (w *Writes) choose(t WriteTime) {
	n := t.Bytes
	// A message of 8 bytes has to arrive as a whole.
	if n == wordBytes || (t.Words != 0 && t.Words <= t.Rows && w.MaxWords == n/2) {
		w.MaxWords = n
	}
	fastest := t.Rows
	if t.Words != 0 {
		fastest = min(fastest, t.Words)
	}
	if t.Stores != 0 && t.Stores <= fastest && (n == wordBytes || w.MaxStores == n/2) {
		w.MaxStores = n
	}
}

// medianOf is the median time of measureRounds writes until each is over; 0 if measureLimit has
// passed since begun.
func medianOf(begun time.Time, write func() (func() (bool, error), error)) (time.Duration, error) {
	var times []time.Duration
	for range measureRounds {
		since := time.Now()
		over, err := write()
		for ready := false; err == nil && !ready; {
			if time.Since(begun) > measureLimit {
				return 0, nil
			}
			ready, err = over()
		}
		if err != nil {
			return 0, err
		}
		times = append(times, time.Since(since))
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}
