// Package selftest tests pairs of GPUs before a relay stages one's bytes on the other: whether
// copies arrive bit by bit, also at odd sizes and places, and how fast they are beside the bounce
// through the host's memory. From the rates it chooses the size of pieces, the number in flight,
// and the number of streams.
//
// It works with memory as relays have it: imported client memory of two adjacent allocations, and
// server memory created by a process with a context on the client's GPU. In addition the test has a
// context on the server's GPU, to read the bytes there without a copy between the GPUs, and to run
// a kernel that reads during a copy.
package selftest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
)

// Memory of a test: on each GPU and of the host, bytes. The client's is two
// allocations of half.
const (
	memory     = 32 << 20
	half       = memory / 2
	hostMemory = 8<<20 + 64<<10
)

// limits are the maximum durations of a copy between two GPUs, and of a pair's whole test. The hook
// ends a tester that has not ended itself.
type limits struct{ copy, pair time.Duration }

// Those of GPUs, and of simulated ones, whose copies wait for this host's processors.
var (
	realLimits      = limits{copy: 20 * time.Second, pair: 40 * time.Second}
	simulatedLimits = limits{copy: 2 * time.Minute, pair: 4 * time.Minute}
)

// Run tests pairs in sequence, and reports every result. The error is of the driver as a whole, and
// nothing is told then. After a CUDA error that loses a context, or a copy that does not end, the
// pairs that are left are not told of: a new process can test them. stuck is called from another
// goroutine, last.
func Run(d *cuda.Driver, job launch.PairJob, tell, stuck func(launch.Pair)) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	t := &tester{driver: d, job: job, devices: map[string]*device.Device{}, kernels: map[*device.Device]*kernels.Kernels{}}
	defer t.close(nil)
	within := realLimits
	if d.Simulated() {
		within = simulatedLimits
	}
	for i, name := range job.Pairs {
		begun := time.Now()
		end := func(p launch.Pair) launch.Pair {
			p.Milliseconds, p.At = time.Since(begun).Milliseconds(), time.Now().Unix()
			p.Reason = bounded(p.Reason)
			return p
		}
		stop := make(chan struct{})
		go t.watch(within, stop, func(verdict, reason string) {
			stuck(end(launch.Pair{PairName: name, Verdict: verdict, Reason: reason}))
		})
		p := t.pair(name)
		close(stop)
		tell(end(p))
		if t.lost {
			return nil
		}
		// Nothing is held that is not needed any more.
		if err := t.close(job.Pairs[i+1:]); err != nil {
			return err
		}
	}
	return nil
}

// watch calls stuck where a pair's test does not end. A copy that is under way and does not end
// speaks against the pair, and cannot be taken back, so that the process has to end. Further slow
// steps, such as making contexts on a busy host, do not count.
//
// The watch counts iterations, and reads no clock: while this process was stopped, or had no
// processor, no copy was looked for.
func (t *tester) watch(within limits, stop <-chan struct{}, stuck func(verdict, reason string)) {
	const turn = 100 * time.Millisecond
	turns := time.NewTicker(turn)
	defer turns.Stop()
	var last uint64
	for all, same := time.Duration(0), time.Duration(0); ; all += turn {
		select {
		case <-stop:
			return
		case <-turns.C:
		}
		if now := t.copies.step.Load(); now != last || !t.copies.underWay.Load() {
			last, same = now, 0
		} else {
			same += turn
		}
		switch {
		case same >= within.copy:
			stuck(launch.VerdictWrong, fmt.Sprintf("a copy does not end within %v", within.copy))
			return
		case all >= within.pair:
			stuck(launch.VerdictUntested, fmt.Sprintf("the test has not ended within %v, and no copy is to blame", within.pair))
			return
		}
	}
}

// copies are the copies between the two GPUs in view of watch.
type copies struct {
	step     atomic.Uint64 // changes with every begin and end of a copy
	underWay atomic.Bool
}

// await marks copies as in flight while f issues the copies and waits for their ends.
func (c *copies) await(f func()) {
	c.step.Add(1)
	c.underWay.Store(true)
	defer c.underWay.Store(false)
	f()
}

// bounded is a reason that fits in a launch.Pair, on one line.
func bounded(text string) string {
	text = strings.Join(
		strings.FieldsFunc(
			strings.ToValidUTF8(text, "?"),
			func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) },
		),
		" ",
	)
	const most = 400
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}

type tester struct {
	driver  *cuda.Driver
	job     launch.PairJob
	devices map[string]*device.Device
	kernels map[*device.Device]*kernels.Kernels
	lost    bool // a context
	copies  copies
}

func (t *tester) open(g launch.GPU) (*device.Device, error) {
	d := t.devices[g.BusID]
	if d == nil {
		if err := t.shared(g); err != nil {
			return nil, err
		}
		var err error
		if d, err = device.Open(t.driver, g.BusID); err != nil {
			return nil, err
		}
		t.devices[g.BusID] = d
	}
	if g.UUID != "" && g.UUID != d.UUID {
		return nil, &fault.Error{
			Code:      fault.StaleSpecification,
			Operation: "use GPU",
			Object:    g.BusID,
			Cause:     fmt.Errorf("it is %s now, the plan says %s", d.UUID, g.UUID),
			Remedy:    "run peerlane cdi refresh",
		}
	}
	return d, nil
}

// minFreeBytes is the free memory that a GPU must keep beside the test's context and memory, bytes:
// a job that fills the GPU must not fail because of a test.
const minFreeBytes = 256 << 20

// shared refuses a GPU in exclusive mode, which belongs to a foreign process.
func (t *tester) shared(g launch.GPU) error {
	ordinal, err := t.driver.DeviceByPCIBusID(g.BusID)
	if err != nil {
		return nil // device.Open says it better
	}
	mode, err := t.driver.DeviceAttribute(ordinal, cuda.AttributeComputeMode)
	if err == nil && mode != 0 {
		err = fmt.Errorf("GPU %s is in compute mode %d, in which a test would keep others from it", g.BusID, mode)
	}
	return err
}

// room refuses a GPU that is nearly full.
func (t *tester) room(d *device.Device) error {
	return d.On(func() error {
		free, _, err := t.driver.MemGetInfo()
		if err == nil && free < minFreeBytes+memory {
			err = fmt.Errorf(
				"GPU %s has %d MiB free, and a test leaves those be that have less than %d",
				d.BusID,
				free>>20,
				(minFreeBytes+memory)>>20,
			)
		}
		return err
	})
}

// close lets go of the devices that no pair of a list has.
func (t *tester) close(but []launch.PairName) error {
	if t.lost {
		return nil // the process ends
	}
	var err error
	for busID, d := range t.devices {
		if !slices.ContainsFunc(
			but,
			func(n launch.PairName) bool { return n.GPU.BusID == busID || n.Server.BusID == busID },
		) {
			err = errors.Join(err, d.Close()) // and its kernels go
			delete(t.devices, busID)
			delete(t.kernels, d)
		}
	}
	return err
}

// wrongError speaks against a pair; other errors say that it could not be tested.
type wrongError struct{ error }

func (e wrongError) Unwrap() error { return e.error }

func wrong(format string, arguments ...any) error {
	return wrongError{fmt.Errorf(format, arguments...)}
}

func (t *tester) pair(name launch.PairName) launch.Pair {
	p := launch.Pair{PairName: name}
	err := t.test(&p)
	t.lost = t.lost || sticky(err)
	var speaks wrongError
	switch {
	case err == nil:
		p.Verdict = launch.VerdictGood
		if why := t.slow(&p); why != "" {
			p.Verdict, p.Reason = launch.VerdictSlow, why
		}
	case errors.As(err, &speaks) || t.lost:
		p.Verdict, p.Reason = launch.VerdictWrong, err.Error()
	default:
		p.Verdict, p.Reason = launch.VerdictUntested, err.Error()
	}
	return p
}

// slow says by which of its rates a pair is slower than the bounce; empty for none.
func (t *tester) slow(p *launch.Pair) string {
	for _, way := range []struct {
		name string
		rate launch.PairRate
	}{{"out of the client's GPU", p.Push}, {"into the client's GPU", p.Pull}} {
		if r := way.rate; r.Client < t.least(r.Bounce) {
			return fmt.Sprintf(
				"%s copies make %.1f GB/s, and the bounce through the host's memory %.1f",
				way.name,
				r.Client,
				r.Bounce,
			)
		}
	}
	return ""
}

// least is the rate that a pair must make beside a bounce's, GB/s. Two copies over the same PCIe
// link differ by some percent. Times of simulated GPUs depend on the host's processors, which
// further processes share: they say something where a copy of the test's memory takes a third of a
// second.
func (t *tester) least(bounce float64) float64 {
	if t.driver.Simulated() {
		return min(bounce/10, 0.1)
	}
	return 0.9 * bounce
}

// bench has the objects of a pair's test.
type bench struct {
	*tester
	client, server *device.Device
	mine           *device.Memory // on the client's GPU
	slots          *device.Memory // on the server's
	queues         []*device.Queue
	view           []byte // pinned memory of the host
	streams        map[*device.Device]cuda.Stream
	undo           []func() error
}

func (t *tester) test(p *launch.Pair) (err error) {
	b := &bench{tester: t, streams: map[*device.Device]cuda.Stream{}}
	if b.client, err = t.open(p.GPU); err != nil {
		return err
	}
	if b.server, err = t.open(p.Server); err != nil {
		return err
	}
	p.GPU.UUID, p.Server.UUID = b.client.UUID, b.server.UUID
	if err := errors.Join(t.room(b.client), t.room(b.server)); err != nil {
		return err
	}
	defer func() {
		if !t.lost && !sticky(err) {
			err = errors.Join(err, b.free())
		}
	}()
	if err = b.allocate(); err != nil {
		return err
	}
	if p.Bytes, err = b.exact(); err != nil {
		return err
	}
	if err = b.running(p); err != nil {
		return err
	}
	if err = b.rates(p); err != nil {
		return err
	}
	if b.slow(p) != "" {
		return nil // nothing is staged on it
	}
	return b.calibrate(p)
}

func sticky(err error) bool {
	var call *cuda.CallError
	return errors.As(err, &call) && call.Result.Sticky()
}

func (b *bench) free() error {
	var err error
	for _, f := range slices.Backward(b.undo) {
		err = errors.Join(err, f())
	}
	return err
}

// most streams that the calibration tries.
const maxStreams = 2

func (b *bench) allocate() error {
	d := b.driver
	can, err := d.DeviceCanAccessPeer(b.client.Ordinal, b.server.Ordinal)
	if err != nil {
		return err
	}
	if !can {
		return wrong("the driver offers no peer-to-peer path between the two")
	}
	if err := b.client.Use(); err != nil {
		return err
	}
	own := cuda.Access{Device: b.client.Ordinal, Write: true}
	var parts []device.Part
	for range 2 {
		m, err := device.Create(d, b.client.Ordinal, half, own)
		if err != nil {
			return err
		}
		fd, err := m.Export()
		// The import keeps the memory.
		if err = errors.Join(err, m.Close()); err != nil {
			return err
		}
		defer unix.Close(fd)
		parts = append(parts, device.Part{FD: fd, Bytes: half})
	}
	if b.mine, err = device.ImportParts(d, parts, own); err != nil {
		return err
	}
	b.undo = append(b.undo, b.mine.Close)
	if b.slots, err = device.Create(d, b.server.Ordinal, memory, own); err != nil {
		return err
	}
	b.undo = append(b.undo, b.slots.Close)
	if err := b.slots.Allow(cuda.Access{Device: b.server.Ordinal, Write: true}); err != nil {
		return err
	}
	for range maxStreams {
		q, err := b.client.NewQueue()
		if err != nil {
			return err
		}
		b.queues = append(b.queues, q)
		b.undo = append(b.undo, q.Close)
	}
	for _, g := range []*device.Device{b.client, b.server} {
		if err := g.Use(); err != nil {
			return err
		}
		s, err := d.StreamCreate()
		if err != nil {
			return err
		}
		b.streams[g] = s
		b.undo = append(b.undo, func() error { return errors.Join(g.Use(), d.StreamDestroy(s)) })
	}
	at, err := d.MemHostAlloc(hostMemory)
	if err != nil {
		return err
	}
	b.undo = append(b.undo, func() error { return errors.Join(b.client.Use(), d.MemHostFree(at)) })
	b.view = unsafe.Slice((*byte)(at), hostMemory)
	return nil
}

// span is the range of a copy: n bytes between a place in the client's memory and one in the slots.
type span struct{ client, slot, n uint64 }

// spans are odd ranges, and ranges across boundaries of drivers and links: 64 bytes, pages, 2 MiB,
// and the two allocations of the client's memory.
var spans = []span{
	{0, 0, 1}, {1, 0, 1}, {3, 5, 7}, {8, 0, 8}, {63, 1, 2},
	{half - 1, 63, 2}, {half - 3, 2<<20 - 2, 5}, {7, 0, 4095}, {0, 4097, 4096}, {half - 4096, 0, 8192},
	{half - 32767, 1, 64<<10 + 1}, {5, 2<<20 - 3, 1<<20 + 1}, {half - 1<<20 - 1, 2<<20 - 7, 2<<20 + 9},
	{memory - 3, memory - 3, 3}, {memory - 1<<20, memory - 1<<20, 1 << 20}, {half - 4<<20, 0, 8 << 20},
}

// guard is how much around a span is looked at, bytes: it must not change.
const guard = 64

// exact makes copies of all spans in both directions and compares.
func (b *bench) exact() (checked uint64, err error) {
	seed := rand.Uint64()
	for i, s := range spans {
		for _, pull := range []bool{false, true} {
			from, to := ends{b.client, b.mine, s.client}, ends{b.server, b.slots, s.slot}
			if pull {
				from, to = to, from
			}
			if err := b.one(from, to, s.n, seed+uint64(2*i)); err != nil {
				return checked, err
			}
			checked += s.n
		}
	}
	return checked, nil
}

// ends is a place in memory, and the GPU that has it.
type ends struct {
	on     *device.Device
	memory *device.Memory
	at     uint64
}

// window is the span at a place with its guards: the begin, and the lengths of the guard before the
// range and of the whole.
func (e ends) window(n uint64) (begin, before, all uint64) {
	before = min(e.at, guard)
	begin = e.at - before
	return begin, before, min(e.at+n+guard, e.memory.Bytes) - begin
}

// one copies n bytes of a pattern into another pattern.
func (b *bench) one(from, to ends, n, seed uint64) error {
	begin, before, all := from.window(n)
	pattern(b.view[:all], seed)
	sent := bytes.Clone(b.view[before : before+n])
	if err := b.fill(from.on, from.memory.Ptr+cuda.Ptr(begin), all); err != nil {
		return err
	}
	begin, before, all = to.window(n)
	pattern(b.view[:all], seed+1)
	expected := bytes.Clone(b.view[:all])
	if err := b.fill(to.on, to.memory.Ptr+cuda.Ptr(begin), all); err != nil {
		return err
	}
	if err := b.copy(to.memory.At(to.at), from.memory.At(from.at), n); err != nil {
		return wrong("a copy of %d bytes from %s to %s failed: %w", n, from.on.BusID, to.on.BusID, err)
	}
	clear(b.view[:all])
	if err := b.look(to.on, to.memory.Ptr+cuda.Ptr(begin), all); err != nil {
		return err
	}
	copy(expected[before:], sent)
	return compare(b.view[:all], expected, before, n, from, to)
}

// compare returns an error for wrong received bytes.
func compare(got, expected []byte, before, n uint64, from, to ends) error {
	if bytes.Equal(got, expected) {
		return nil
	}
	count, first := uint64(0), -1
	outside := uint64(0)
	for i := range got {
		if got[i] != expected[i] {
			count++
			if first < 0 {
				first = i
			}
			if uint64(i) < before || uint64(i) >= before+n {
				outside++
			}
		}
	}
	return wrong(
		"of %d bytes from %s (at %d) to %s (at %d) %d arrived wrong, and %d beside them have changed, the first at %d",
		n,
		from.on.BusID,
		from.at,
		to.on.BusID,
		to.at,
		count-outside,
		outside,
		first-int(before),
	)
}

// pattern fills memory with bytes that are never the same twice (splitmix64).
func pattern(to []byte, seed uint64) {
	x := seed * 0x9e3779b97f4a7c15
	for i := 0; i < len(to); i += 8 {
		x += 0x9e3779b97f4a7c15
		z := x
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		for j := range min(8, len(to)-i) {
			to[i+j] = byte(z >> (8 * j))
		}
	}
}

// fill copies pinned host memory to a GPU, by the GPU's stream.
func (b *bench) fill(by *device.Device, to cuda.Ptr, n uint64) error {
	return b.byItself(
		by,
		func(s cuda.Stream) error { return b.driver.MemcpyHtoDAsync(to, unsafe.Pointer(&b.view[0]), n, s) },
	)
}

// look copies GPU memory into pinned host memory, by the GPU's stream.
func (b *bench) look(by *device.Device, from cuda.Ptr, n uint64) error {
	return b.byItself(
		by,
		func(s cuda.Stream) error { return b.driver.MemcpyDtoHAsync(unsafe.Pointer(&b.view[0]), from, n, s) },
	)
}

// byItself runs calls on a GPU's stream, and waits for the issued work.
func (b *bench) byItself(by *device.Device, calls func(cuda.Stream) error) error {
	if err := by.Use(); err != nil {
		return err
	}
	if err := calls(b.streams[by]); err != nil {
		return err
	}
	return b.driver.StreamSynchronize(b.streams[by])
}

// together is from which size on a relay issues a copy by itself.
const together = 256 << 10

// copy makes a copy as a relay does: a relay batches small copies, so a small copy is two copies
// here.
func (b *bench) copy(to, from device.Place, n uint64) error {
	underWay := 0
	var err error
	move := func(at, n uint64) {
		underWay++
		b.queues[0].Move(to.Plus(at), from.Plus(at), n, func(e error) { underWay--; err = errors.Join(err, e) })
	}
	b.copies.await(func() {
		if half := n / 2; half > 0 && n < together {
			move(0, half)
			move(half, n-half)
		} else {
			move(0, n)
		}
		for underWay > 0 {
			b.queues[0].Poll()
		}
	})
	return err
}
