package device_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/wire"
)

// The simulator reads faults when it is loaded, so every case is a process.
const queueVariable = "PEERLANE_TEST_QUEUE"

func TestMain(m *testing.M) {
	if mode := os.Getenv(queueVariable); mode != "" {
		works := map[string]func() error{
			"busy":               moveBesideKernels,
			"within":             copyWithin,
			"fails":              failLater,
			"always busy":        alwaysBusy,
			"large busy":         largeBusy,
			"held":               copyLarge,
			"writes":             writeAll,
			"lost words":         lostWords,
			"measure":            measureWrites,
			"stores":             storeAll,
			"store limits":       storeLimits,
			"lists":              moveLists,
			"measure at leisure": func() error { device.AllowMeasuring(time.Minute); return measureWrites() },
		}
		for _, which := range []string{"large", "queued", "late"} {
			works[which] = func() error { return neverBounce(which) }
		}
		work, ok := works[mode]
		if !ok {
			work = copySix
		}
		if err := work(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

const queued = 6

// openFirst opens the driver and its first GPU, in a process that the test has started.
func openFirst() (*cuda.Driver, *device.Device, error) {
	d, err := cuda.Open()
	if err != nil {
		return nil, nil, err
	}
	busID, err := d.DevicePCIBusID(0)
	if err != nil {
		return nil, nil, err
	}
	g, err := device.Open(d, busID)
	return d, g, err
}

// copySix makes six small copies at once, and an additional copy per failure; it prints the results
// in the order of the callbacks.
func copySix() error {
	runtime.LockOSThread()
	d, g, err := openFirst()
	if err != nil {
		return err
	}
	const bytesOf = 1000
	memory, err := device.Create(d, g.Ordinal, 4*queued*bytesOf, cuda.Access{Device: g.Ordinal, Write: true})
	if err != nil {
		return err
	}
	if err := g.Use(); err != nil {
		return err
	}
	host, err := d.MemHostAlloc(memory.Bytes)
	if err != nil {
		return err
	}
	s, err := d.StreamCreate()
	if err != nil {
		return err
	}
	content := unsafe.Slice((*byte)(host), memory.Bytes)
	for i := range queued * bytesOf {
		content[i] = byte(i/bytesOf + 1)
	}
	if err := errors.Join(d.MemcpyHtoDAsync(memory.Ptr, host, memory.Bytes, s), d.StreamSynchronize(s)); err != nil {
		return err
	}
	q, err := g.NewQueue()
	if err != nil {
		return err
	}
	underWay := 0
	var begin func(from, to int)
	begin = func(from, to int) {
		underWay++
		q.Copy(memory.Ptr+cuda.Ptr(to*bytesOf), memory.Ptr+cuda.Ptr(from*bytesOf), bytesOf, func(err error) {
			underWay--
			if err == nil {
				fmt.Print(to, " ")
				return
			}
			fmt.Print(to, " ", wire.ObjectOf(err), " ")
			if to < 2*queued {
				begin(from, to+queued)
			}
		})
	}
	for i := range queued {
		begin(i, i+queued)
	}
	for q.Busy() {
		q.Poll()
	}
	if underWay != 0 {
		return fmt.Errorf("the queue has nothing to do, and %d copies have not ended", underWay)
	}
	if err := errors.Join(d.MemcpyDtoHAsync(host, memory.Ptr, memory.Bytes, s), d.StreamSynchronize(s)); err != nil {
		return err
	}
	for to := queued; to < 3*queued; to++ {
		want := byte(to%queued + 1)
		fmt.Print(
			map[bool]string{true: "=", false: "."}[bytes.Count(content[to*bytesOf:(to+1)*bytesOf], []byte{want}) == bytesOf],
		)
	}
	return q.Close()
}

// pinned makes host memory that the GPU accesses, and a queue.
func pinned(g *device.Device, n uint64) (host *device.Memory, q *device.Queue, err error) {
	if host, err = device.CreateHost("peerlane-test", n); err != nil {
		return nil, nil, err
	}
	if err = host.Pin(g); err == nil {
		err = g.Use()
	}
	if err == nil {
		q, err = g.NewQueue()
	}
	return host, q, err
}

// copyLarge makes twelve large copies and a small one at once, and prints the copies whose bytes
// arrived, in the order of the callbacks.
func copyLarge() error {
	const largeBytes, larges, smallBytes = 512 << 10, 12, 1000
	const all = (larges + 1) * largeBytes
	runtime.LockOSThread()
	d, g, err := openFirst()
	if err != nil {
		return err
	}
	memory, err := device.Create(d, g.Ordinal, 2*all, cuda.Access{Device: g.Ordinal, Write: true})
	if err != nil {
		return err
	}
	if err := g.Use(); err != nil {
		return err
	}
	host, err := d.MemHostAlloc(all)
	if err != nil {
		return err
	}
	s, err := d.StreamCreate()
	if err != nil {
		return err
	}
	content := unsafe.Slice((*byte)(host), all)
	for i := range content {
		content[i] = byte(i/largeBytes + 1)
	}
	if err := errors.Join(d.MemcpyHtoDAsync(memory.Ptr, host, all, s), d.StreamSynchronize(s)); err != nil {
		return err
	}
	q, err := g.NewQueue()
	if err != nil {
		return err
	}
	var failed error
	var order []int
	bytesOf := func(i int) int {
		if i == larges {
			return smallBytes
		}
		return largeBytes
	}
	for i := range larges + 1 {
		at := memory.Ptr + cuda.Ptr(i*largeBytes)
		q.Copy(at+all, at, uint64(bytesOf(i)), func(err error) {
			failed, order = errors.Join(failed, err), append(order, i)
		})
	}
	for q.Busy() {
		q.Poll()
	}
	if err := errors.Join(failed, d.MemcpyDtoHAsync(host, memory.Ptr+all, all, s), d.StreamSynchronize(s)); err != nil {
		return err
	}
	for _, i := range order {
		if bytes.Count(content[i*largeBytes:][:bytesOf(i)], []byte{byte(i + 1)}) == bytesOf(i) {
			fmt.Print(i, " ")
		}
	}
	return q.Close()
}

// Behind two incomplete calls the queue holds large copies and issues four with one call. A small
// copy does not wait for held copies.
func TestQueueLargeCopiesBehindTwoCallsShareCalls(t *testing.T) {
	const all = "0 1 2 3 4 5 6 7 8 9 10 11 12 "
	for _, c := range []struct{ what, fault, want string }{
		{"two copies and the small one have calls", "cuMemcpyAsync:after=3:error=1", all},
		{"ten copies have three calls", "cuMemcpyBatchAsync:after=3:error=1", all},
		{"a driver without batches", "cuMemcpyBatchAsync:error=801", all},
		{"a batch is refused, and no copy alone", "cuMemcpyBatchAsync:times=1:error=1", all},
	} {
		out, err := runAlone(t, "held", "PEERLANE_SIM_FAULT="+c.fault)
		if err != nil || out != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.what, err, out, c.want)
		}
	}
	for _, fault := range []string{
		"cuMemcpyAsync:after=2:error=1",
		"cuMemcpyBatchAsync:after=2:times=1:error=1;cuMemcpyAsync:after=2:error=1",
	} {
		if _, err := runAlone(t, "held", "PEERLANE_SIM_FAULT="+fault); err == nil {
			t.Errorf("%s: no call failed", fault)
		}
	}
}

func TestSmallCopiesGoTogether(t *testing.T) {
	dir := t.TempDir()
	if err := sim.Write(dir, []sim.Device{{Memory: 1 << 30, Name: "NVIDIA H100 80GB HBM3",
		UUID: "GPU-00000000-0000-0000-0000-000000000001", BusID: "0000:10:00.0"}}); err != nil {
		t.Fatal(err)
	}
	environment, err := sim.Environment(dir)
	if err != nil {
		t.Fatal(err)
	}
	const single, batch = "cuMemcpyAsync", "cuMemcpyBatchAsync"
	for _, c := range []struct{ what, fault, want string }{
		{"each ends, in order", "", "6 7 8 9 10 11 ======......"},
		{"no copy is issued by itself", single + ":error=1", "6 7 8 9 10 11 ======......"},
		{"a driver that knows no batches", batch + ":error=801", "6 7 8 9 10 11 ======......"},
		{"a batch is refused, and none of it by itself", batch + ":times=1:error=1", "6 7 8 9 10 11 ======......"},
		{"a batch is refused, and one of it by itself", batch + ":times=1:error=1;" + single + ":after=1:times=1:error=1",
			"7 " + single + " 6 8 9 10 11 13 =.====.=...."},
		{"the first batch fails, and its stream; what is asked for then does not",
			batch + ":times=1:error=1;cuStreamSynchronize:after=1:times=1:error=1",
			"6 " + batch + " 7 " + batch + " 8 " + batch + " 9 " + batch + " 10 " + batch + " 11 " + batch +
				" 12 13 14 15 16 17 ......======"},
		{"no batches, and one copy fails", batch + ":error=801;" + single + ":after=1:times=1:error=1",
			"7 " + single + " 6 13 8 9 10 11 =.====.=...."},
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), append(environment, queueVariable+"=1", "PEERLANE_SIM_FAULT="+c.fault)...)
		cmd.WaitDelay = time.Minute
		out, err := cmd.CombinedOutput()
		if got := string(out); err != nil || got != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.what, err, got, c.want)
		}
	}
}
