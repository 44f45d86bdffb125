package device_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
)

// writeAll makes writes of many sizes at once, more than there are slots, and compares them. It
// prints how many the queue took.
func writeAll() error {
	const each = 8 << 10
	sizes := []uint64{2, 7, 8, 9, 16, 24, 64, 100, 1000, 4096}
	const rounds = 6
	runtime.LockOSThread()
	d, g, err := openFirst()
	if err != nil {
		return err
	}
	memory, err := device.Create(d, g.Ordinal, uint64(rounds*len(sizes))*each, cuda.Access{Device: g.Ordinal, Write: true})
	if err == nil {
		err = g.Use()
	}
	if err != nil {
		return err
	}
	q, err := g.NewQueue()
	if err != nil {
		return err
	}
	var failed error
	taken := map[uint64][]byte{}
	from := make([]byte, 4096)
	for i := range rounds * len(sizes) {
		n, at := sizes[i%len(sizes)], uint64(i)*each+uint64(i/len(sizes))
		for k := range from {
			from[k] = byte(k*7 + i)
		}
		if q.Write(memory.Ptr+cuda.Ptr(at), from[:n], func(err error) { failed = errors.Join(failed, err) }) {
			taken[at] = bytes.Clone(from[:n])
		}
		clear(from) // it may change now
	}
	for _, n := range []uint64{0, 1, 4097} {
		if q.Write(memory.Ptr, make([]byte, n), func(error) {}) {
			return fmt.Errorf("it takes a write of %d bytes", n)
		}
	}
	for q.Busy() {
		q.Poll()
	}
	host, err := device.CreateHost("peerlane-test", memory.Bytes)
	if err == nil {
		err = host.Pin(g)
	}
	if err != nil {
		return err
	}
	q.Move(host.At(0), memory.At(0), memory.Bytes, func(err error) { failed = errors.Join(failed, err) })
	for q.Busy() {
		q.Poll()
	}
	for at, want := range taken {
		if !bytes.Equal(host.HostBytes()[at:at+uint64(len(want))], want) {
			return fmt.Errorf("a write of %d bytes at %d is wrong", len(want), at)
		}
	}
	fmt.Print(len(taken))
	return errors.Join(failed, q.Close())
}

// lostWords makes a write whose stream fails before its marker.
func lostWords() error {
	memory, q, err := oneDevice(64 << 10)
	if err != nil {
		return err
	}
	ended := false
	q.Write(memory.Ptr, make([]byte, 16), func(err error) {
		ended = true
		fmt.Print(cuda.Sticky(err))
	})
	for q.Busy() {
		q.Poll()
	}
	if !ended {
		return errors.New("the queue has nothing to do, and the write has not ended")
	}
	return nil
}

// measureWrites prints the measurement, and whether the method follows from the result.
func measureWrites() error {
	_, g, err := openFirst()
	if err != nil {
		return err
	}
	before := g.Writes()
	if err := g.MeasureWrites(); err != nil {
		return err
	}
	w := g.Writes()
	if len(w.Measured) == 0 {
		fmt.Print(before.MaxWords, w.MaxWords)
		return nil
	}
	words, wins := uint64(0), true
	for _, m := range w.Measured {
		if m.Words <= 0 || m.Rows <= 0 {
			return fmt.Errorf("%d bytes take %v and %v", m.Bytes, m.Words, m.Rows)
		}
		if wins = wins && (m.Words <= m.Rows || m.Bytes == 8); wins {
			words = m.Bytes
		}
		fmt.Print(m.Bytes, " ")
	}
	fmt.Print(words == w.MaxWords)
	return nil
}

func TestQueueWritesShortCopiesWithoutASlice(t *testing.T) {
	for _, c := range []struct{ name, variable, want string }{
		// Two are words, and 32 slots there are. Without words the first has no slot.
		{"beside a kernel", "PEERLANE_SIM_BUSY=refuse", "34"},
		{"a driver without words", "PEERLANE_SIM_FAULT=cuStreamBatchMemOp:error=801", "33"},
		{"without host memory", "PEERLANE_SIM_FAULT=cuMemHostAlloc:error=2", "0"},
	} {
		if out, err := runAlone(t, "writes", c.variable); err != nil || out != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.name, err, out, c.want)
		}
	}
}

// A marker is not written by a stream that has failed: the end is known nevertheless.
func TestQueueStreamFailsBeforeItsMarkerWriteEnds(t *testing.T) {
	if out, err := runAlone(t, "lost words", "PEERLANE_SIM_FAULT=cuStreamBatchMemOp:error=700"); err != nil ||
		out != "true" {
		t.Errorf("%v: %q", err, out)
	}
}

func TestMeasureWritesChoosesWordsWhileTheyAreNotSlower(t *testing.T) {
	for _, c := range []struct{ name, mode, variable, want string }{
		{"on the simulator", "measure at leisure", "PEERLANE_SIM_BUSY=", "8 16 32 64 true"},
		{"a driver without words", "measure", "PEERLANE_SIM_FAULT=cuStreamBatchMemOp:error=801", "16 16"},
		{"copies that take too long", "measure", "PEERLANE_SIM_FAULT=cuMemcpy2DAsync:delay=60", "16 16"},
	} {
		out, err := runAlone(t, c.mode, c.variable)
		if err != nil || out != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.name, err, out, c.want)
		}
	}
}
