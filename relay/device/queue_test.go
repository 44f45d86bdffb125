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
			"writes":             writeAll,
			"lost words":         lostWords,
			"measure":            measureWrites,
			"stores":             storeAll,
			"store limits":       storeLimits,
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
