package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// The client owns an operation's memory again from the end of the operation, successful or not: a
// sender's is overwritten at once, and the receiver still has the message; a receiver's is
// overwritten at once, or taken back and freed, and stays as it is then.
//
// PEERLANE_REUSE is the number of operations per route and kind of memory. The test also runs on
// real GPUs, with PEERLANE_TEST_CUDA=driver and -test.run '^TestMemoryReusedAtOnceKeepsMessages$'.
func TestMemoryReusedAtOnceKeepsMessages(t *testing.T) {
	needGPUs(t, 2)
	messages, patience := int64(200), 500*time.Millisecond // `make soak-reuse` has more
	if wanted := os.Getenv("PEERLANE_REUSE"); wanted != "" {
		var err error
		if messages, err = strconv.ParseInt(wanted, 10, 64); err != nil {
			t.Fatal(err)
		}
		messages, patience = messages/2, 12*time.Hour // a message is two operations
	}
	for _, route := range routes {
		for _, kind := range []string{"GPU", "host"} {
			t.Run(route+"/"+kind, func(t *testing.T) { reuseMemory(t, route, kind, messages, patience) })
		}
	}
}

// The same with copies that end as late as the order permits.
func TestMemoryReusedAtOnceWithLateCopiesKeepsMessages(t *testing.T) {
	run := exec.Command(os.Args[0], "-test.run=^TestMemoryReusedAtOnceKeepsMessages$", "-test.timeout=12h")
	run.Env = append(os.Environ(), "PEERLANE_SIM_LATE_MS=2")
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

const (
	reuseSlot    = 64 << 10 // of the relays, few, so that messages wait for one another
	reuseLargest = reuseSlot*7/2 + 5
	reuseGuard   = 64      // bytes behind a message that nobody may write
	reuseRegion  = 2 << 20 // an allocation of GPU memory
	reuseDepth   = 16      // messages under way of a worker
	reuseWorkers = 4
)

// contents are random bytes. The race detector does not check the memory byte by byte.
var contents = sync.OnceValue(func() []byte {
	b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(err)
	}
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(b)
	return b
})

// pick are n bytes that belong to a number.
func pick(number, n uint64) []byte {
	all := contents()
	at := number * 0x9e3779b97f4a7c15 % (uint64(len(all)) - reuseLargest - reuseGuard)
	return all[at : at+n]
}

// reuse is a test of a route and a kind of memory.
type reuse struct {
	t        *testing.T
	kind     string
	gpus     [2]int // of sender and receiver
	contexts [2]cuda.Context
	sockets  [2]string
	left     atomic.Int64 // messages
	until    time.Time
	numbers  atomic.Uint64

	well, canceled, truncated, broken, replaced atomic.Int64
}

func reuseMemory(t *testing.T, route, kind string, messages int64, patience time.Duration) {
	h := newHost(t)
	h.change = func(c *launch.Config) { c.Slots, c.SlotBytes = 3, reuseSlot }
	second, server := far2()
	h.nic("nic0")
	h.nic("nic1")
	r := &reuse{t: t, kind: kind, gpus: [2]int{0, second}, until: time.Now().Add(patience)}
	r.left.Store(messages)
	r.sockets[0] = h.relay("a", route, far(0, 1, "nic0"))
	r.sockets[1] = h.relay("b", route, far(second, server, "nic1"))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for i, gpu := range r.gpus {
		device, err := driver.DeviceByPCIBusID(devices[gpu].BusID)
		if err == nil {
			r.contexts[i], err = driver.CtxCreate(device, cuda.CtxOptions{Lean: true})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, reuseWorkers)
	for range reuseWorkers {
		go func() { ended <- r.work() }()
	}
	var all error
	for range reuseWorkers {
		all = errors.Join(all, <-ended)
	}
	for _, c := range []cuda.Context{r.contexts[1], r.contexts[0]} { // so that none stays current here
		all = errors.Join(all, driver.CtxDestroy(c))
	}
	if all != nil {
		t.Fatal(all)
	}
	t.Logf("%d messages arrived, %d were canceled, %d too long, %d broken off; %d memories were taken back",
		r.well.Load(), r.canceled.Load(), r.truncated.Load(), r.broken.Load(), r.replaced.Load())
	if messages >= 10000 && min(r.canceled.Load(), r.truncated.Load(), r.broken.Load(), r.replaced.Load()) == 0 {
		t.Error("that is not what the test is for")
	}
}

// reuser has separate sessions, memory and a thread.
type reuser struct {
	*reuse
	sessions           [2]*client.Session
	sending, receiving *client.Connection
	streams            [2]cuda.Stream
	pinned             unsafe.Pointer
	slots              [reuseDepth]*reuseOf
	freed              []*region // as far as the client is concerned
}

// reuseOf is a message under way.
type reuseOf struct {
	at       [2]*region // of sender and receiver
	ops      [2]*client.Operation
	number   uint64
	n        uint64
	short    bool
	canceled int // which end was; -1: none
}

// region is memory of one end with known content.
type region struct {
	end    int
	memory *client.Memory
	ptr    cuda.Ptr
	number uint64
	n      uint64
}

// work is a worker until there are messages enough.
func (r *reuse) work() (err error) {
	runtime.LockOSThread() // it is a thread with CUDA contexts
	w := &reuser{reuse: r}
	for end := range w.streams {
		if err := driver.CtxSetCurrent(r.contexts[end]); err != nil {
			return err
		}
		if w.streams[end], err = driver.StreamCreate(); err != nil {
			return err
		}
	}
	if w.pinned, err = driver.MemHostAlloc(reuseLargest + reuseGuard); err != nil {
		return err
	}
	if err := w.attach(); err != nil {
		return err
	}
	for i := 0; w.left.Add(-1) >= 0 && time.Now().Before(w.until); i++ {
		if err := w.complete(w.slots[i%reuseDepth], false); err != nil {
			return err
		}
		if err := w.disturb(i); err != nil {
			return err
		}
		if err := w.begin(w.slots[i%reuseDepth]); err != nil {
			return err
		}
	}
	for _, slot := range w.slots {
		if err := w.complete(slot, false); err != nil {
			return err
		}
	}
	err = w.detach()
	for _, f := range w.freed {
		err = errors.Join(err, w.release(f))
	}
	return errors.Join(err, driver.StreamDestroy(w.streams[0]), driver.StreamDestroy(w.streams[1]),
		driver.MemHostFree(w.pinned))
}

func (w *reuser) attach() (err error) {
	for end := range w.sessions {
		ctx, cancel := soon()
		defer cancel()
		if w.sessions[end], err = client.Dial(ctx, w.sockets[end]); err != nil {
			return err
		}
	}
	for i := range w.slots {
		w.slots[i] = &reuseOf{}
		for end := range w.sessions {
			if w.slots[i].at[end], err = w.export(end); err != nil {
				return err
			}
		}
	}
	return w.connect()
}

func (w *reuser) connect() error {
	ctx, cancel := soon()
	defer cancel()
	l, err := w.sessions[1].Listen(ctx, uuid(w.t, w.gpus[1]))
	if err != nil {
		return err
	}
	if w.sending, err = w.sessions[0].Connect(ctx, uuid(w.t, w.gpus[0]), l.Handle()); err == nil {
		w.receiving, err = l.Accept(ctx)
	}
	return errors.Join(err, l.Close(ctx))
}

// export allocates and exports memory.
func (w *reuser) export(end int) (*region, error) {
	ctx, cancel := soon()
	defer cancel()
	m := &region{end: end}
	gpu := uuid(w.t, w.gpus[end])
	var err error
	if w.kind == "host" {
		m.memory, err = w.sessions[end].HostMemory(ctx, client.HostMemory{Bytes: reuseLargest + reuseGuard, GPU: gpu})
		return m, err
	}
	device, err := driver.DeviceByPCIBusID(devices[w.gpus[end]].BusID)
	if err != nil {
		return nil, err
	}
	if err := driver.CtxSetCurrent(w.contexts[end]); err != nil {
		return nil, err
	}
	handle, err := driver.MemCreate(device, reuseRegion, cuda.MemOptions{Exportable: true})
	if err != nil {
		return nil, err
	}
	if m.ptr, err = driver.MemAddressReserve(reuseRegion, 0); err != nil {
		return nil, err
	}
	fd, err := driver.MemExportFD(handle)
	if err == nil {
		defer unix.Close(fd)
		err = errors.Join(driver.MemMap(m.ptr, reuseRegion, 0, handle), driver.MemRelease(handle),
			driver.MemSetAccess(m.ptr, reuseRegion, cuda.Access{Device: device, Write: true}))
	}
	if err != nil {
		return nil, err
	}
	m.memory, err = w.sessions[end].Export(ctx, client.Allocation{FD: fd, Bytes: reuseRegion, GPU: gpu})
	return m, err
}

// release checks memory for the last time, and frees the memory.
func (w *reuser) release(m *region) error {
	if w.kind == "host" { // unexporting has unmapped it
		return nil
	}
	err := w.check(m)
	return errors.Join(err, driver.CtxSetCurrent(w.contexts[m.end]), driver.MemUnmap(m.ptr, reuseRegion),
		driver.MemAddressFree(m.ptr, reuseRegion))
}

// put fills memory with the content of a new number.
func (w *reuser) put(m *region, n uint64) (err error) {
	m.number, m.n = w.numbers.Add(1), n
	b := pick(m.number, n)
	if w.kind == "host" {
		copy(m.memory.Data, b)
		return nil
	}
	copy(unsafe.Slice((*byte)(w.pinned), len(b)), b)
	return errors.Join(driver.CtxSetCurrent(w.contexts[m.end]), driver.MemcpyHtoDAsync(m.ptr, w.pinned, n,
		w.streams[m.end]), driver.StreamSynchronize(w.streams[m.end]))
}

// read is the memory's first bytes, until the next use of the worker's memory.
func (w *reuser) read(m *region, n uint64) ([]byte, error) {
	if w.kind == "host" {
		return m.memory.Data[:n], nil
	}
	if n == 0 {
		return nil, nil
	}
	err := errors.Join(driver.CtxSetCurrent(w.contexts[m.end]), driver.MemcpyDtoHAsync(w.pinned, m.ptr, n,
		w.streams[m.end]), driver.StreamSynchronize(w.streams[m.end]))
	return unsafe.Slice((*byte)(w.pinned), n), err
}

// check verifies that memory is unchanged.
func (w *reuser) check(m *region) error {
	if m.n == 0 {
		return nil
	}
	got, err := w.read(m, m.n)
	if err != nil {
		return err
	}
	if want := pick(m.number, m.n); !bytes.Equal(got, want) {
		return fmt.Errorf("memory of end %d that was overwritten when its operation had ended has changed from byte %d "+
			"of %d on", m.end, firstDifference(got, want), m.n)
	}
	return nil
}

func (w *reuser) begin(slot *reuseOf) error {
	if err := errors.Join(w.check(slot.at[0]), w.check(slot.at[1])); err != nil {
		return err
	}
	most := []uint64{300, 300, 300, 300, 4096, 4096, 4096, reuseLargest}[rand.IntN(8)]
	slot.n, slot.short, slot.canceled = rand.Uint64N(most-1)+2, rand.IntN(32) == 0, -1
	if err := errors.Join(w.put(slot.at[0], slot.n), w.put(slot.at[1], slot.n+reuseGuard)); err != nil {
		return err
	}
	slot.number = slot.at[0].number
	room := slot.n
	if slot.short {
		room--
	}
	// Every operation has a separate tag, so a canceled operation matches no further one.
	post := [2]func() error{
		func() (err error) {
			slot.ops[0], err = w.sending.Send(slot.at[0].memory, 0, slot.n, client.Tag(slot.number))
			return err
		},
		func() (err error) {
			slot.ops[1], err = w.receiving.Receive(slot.at[1].memory, 0, room, client.Tag(slot.number))
			return err
		},
	}
	first := rand.IntN(2)
	if err := errors.Join(post[first](), post[1-first]()); err != nil {
		return err
	}
	if rand.IntN(12) == 0 {
		slot.canceled = rand.IntN(2)
		return slot.ops[slot.canceled].Cancel()
	}
	return nil
}

// comesToEnd waits for the end of an operation. The wait keeps no timer of an ended operation: a
// soak has a million.
func comesToEnd(op *client.Operation) bool {
	limit, cancel := testutil.WithLimit(context.Background(), modelPatience)
	defer cancel()
	select {
	case <-op.Done():
		return true
	case <-limit.Done():
		return false
	}
}

// complete takes the results of both ends in sequence, and reuses the memory at once. broken:
// somebody ended the connection.
func (w *reuser) complete(slot *reuseOf, broken bool) error {
	if slot.ops[0] == nil {
		return nil
	}
	first := rand.IntN(2)
	if slot.canceled >= 0 {
		first = slot.canceled
	}
	var results [2]error
	for _, end := range []int{first, 1 - first} {
		if !comesToEnd(slot.ops[end]) {
			return fmt.Errorf("end %d of a message of %d bytes does not end", end, slot.n)
		}
		ctx, cancel := soon()
		_, results[end] = slot.ops[end].Wait(ctx)
		cancel()
		if err := w.ended(slot, end, results[end]); err != nil {
			return err
		}
		if end == slot.canceled && is(results[end], wire.StatusCanceled) {
			if err := slot.ops[1-end].Cancel(); err != nil && !broken {
				return err
			}
		}
	}
	slot.ops = [2]*client.Operation{}
	for end, err := range results {
		switch {
		case err == nil && !slot.short, broken:
		case is(err, wire.StatusTruncated) && slot.short, is(err, wire.StatusCanceled) && slot.canceled >= 0:
		default:
			return fmt.Errorf("end %d of a message of %d bytes (too long: %v): %v", end, slot.n, slot.short, err)
		}
	}
	switch err := errors.Join(results[:]...); {
	case err == nil:
		w.well.Add(1)
	case broken:
		w.broken.Add(1)
	case slot.short:
		w.truncated.Add(1)
	default:
		w.canceled.Add(1)
	}
	return nil
}

// ended uses the memory of an operation that has ended this moment.
func (w *reuser) ended(slot *reuseOf, end int, result error) error {
	m := slot.at[end]
	if end == 1 && result == nil {
		got, err := w.read(m, slot.n+reuseGuard)
		if err != nil {
			return err
		}
		if want := pick(slot.number, slot.n); !bytes.Equal(got[:slot.n], want) {
			return fmt.Errorf("a message of %d bytes arrived wrong from byte %d on", slot.n, firstDifference(got, want))
		}
		if !bytes.Equal(got[slot.n:], pick(m.number, slot.n+reuseGuard)[slot.n:]) {
			return fmt.Errorf("a message of %d bytes was written beyond its end", slot.n)
		}
	}
	if err := w.put(m, slot.n+uint64(end)*reuseGuard); err != nil || rand.IntN(200) > 0 {
		return err
	}
	// Taken back, and freed a little later: until then no process may write the memory.
	ctx, cancel := soon()
	defer cancel()
	if err := m.memory.Unexport(ctx); err != nil && !errors.Is(err, &wire.Error{Status: wire.StatusClosed}) {
		return err
	}
	fresh, err := w.export(end)
	if err != nil {
		return err
	}
	slot.at[end] = fresh
	w.replaced.Add(1)
	if w.freed = append(w.freed, m); len(w.freed) > 8 {
		err = w.release(w.freed[0])
		w.freed = w.freed[1:]
	}
	return err
}

// disturb ends connections and sessions with operations in flight.
func (w *reuser) disturb(i int) error {
	switch {
	case i%41 == 40:
		ctx, cancel := soon()
		defer cancel()
		c := w.sending
		if rand.IntN(2) == 0 {
			c = w.receiving
		}
		if err := c.Close(ctx); err != nil {
			return err
		}
		for _, slot := range w.slots {
			if err := w.complete(slot, true); err != nil {
				return err
			}
		}
		return w.connect()
	case i%211 == 210:
		gone := rand.IntN(2)
		if err := w.sessions[gone].Close(); err != nil {
			return err
		}
		for _, slot := range w.slots {
			if w.kind == "host" {
				slot.at[gone].n = 0 // Close has unmapped it
			} else if err := w.put(slot.at[gone], slot.n+reuseGuard); err != nil {
				return err
			}
			op := slot.ops[1-gone]
			if op == nil {
				continue
			}
			if !comesToEnd(op) {
				return fmt.Errorf("the other's session has ended, and a message of %d bytes does not", slot.n)
			}
			ctx, cancel := soon()
			_, err := op.Wait(ctx)
			cancel()
			if err := w.put(slot.at[1-gone], slot.n+reuseGuard); err != nil {
				return err
			}
			if slot.ops = [2]*client.Operation{}; err != nil {
				w.broken.Add(1)
			}
		}
		for _, f := range w.freed {
			if err := w.release(f); err != nil {
				return err
			}
		}
		w.freed = nil
		if err := w.detach(); err != nil {
			return err
		}
		return w.attach()
	}
	return nil
}

// detach ends the sessions, and frees the memory.
func (w *reuser) detach() (err error) {
	for _, slot := range w.slots {
		for _, m := range slot.at {
			err = errors.Join(err, w.check(m))
		}
	}
	for _, s := range w.sessions {
		if closed := s.Close(); closed != nil && !is(closed, wire.StatusClosed) {
			err = errors.Join(err, closed)
		}
	}
	for _, slot := range w.slots {
		for _, m := range slot.at {
			err = errors.Join(err, w.release(m))
		}
	}
	return err
}
