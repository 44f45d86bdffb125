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

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/device"
)

// moveBesideKernels makes the kinds and sizes of a relay's copies, and prints copies that the
// driver refuses or that bring wrong bytes.
func moveBesideKernels() error {
	runtime.LockOSThread()
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	var gpus []*device.Device
	for i := range 2 {
		busID, err := d.DevicePCIBusID(cuda.Device(i))
		if err != nil {
			return err
		}
		g, err := device.Open(d, busID)
		if err != nil {
			return err
		}
		gpus = append(gpus, g)
	}
	const most = 4 << 20
	var memory []*device.Memory // two of GPU 0, one of GPU 1, two of the host
	for _, on := range []int{0, 0, 1} {
		m, err := device.Create(
			d,
			gpus[on].Ordinal,
			most,
			cuda.Access{Device: gpus[0].Ordinal, Write: true},
			cuda.Access{Device: gpus[1].Ordinal, Write: true},
		)
		if err != nil {
			return err
		}
		memory = append(memory, m)
	}
	for range 2 {
		m, err := device.CreateHost("peerlane-test", most)
		if err == nil {
			err = m.Pin(gpus[0])
		}
		if err != nil {
			return err
		}
		memory = append(memory, m)
	}
	source, got := memory[3], memory[4]
	if err := gpus[0].Use(); err != nil {
		return err
	}
	// move makes a copy by a separate queue: the first work of a stream.
	move := func(to, from device.Place, n uint64) (failed error) {
		q, err := gpus[0].NewQueue()
		if err != nil {
			return err
		}
		ended := false
		q.Move(to, from, n, func(err error) { ended, failed = true, err })
		for q.Busy() {
			q.Poll()
		}
		if !ended {
			return errors.New("the queue has nothing to do, and the copy has not ended")
		}
		return errors.Join(failed, q.Close())
	}
	for _, kind := range []struct {
		name     string
		from, to *device.Memory
	}{
		{"host to GPU", nil, memory[0]}, {"within a GPU", memory[0], memory[1]}, {"GPU to GPU", memory[0], memory[2]},
	} {
		for _, n := range []uint64{1, 2, 4, 8, 15, 16, 24, 100, 1000, 16 << 10, 32<<10 - 8, 32 << 10, 64 << 10, 1 << 20,
			4 << 20} {
			for i := range source.HostBytes() {
				source.HostBytes()[i] = byte(uint64(i)*7 + n)
			}
			clear(got.HostBytes())
			from := source
			var problem error
			if kind.from != nil {
				// All of it at once: large copies have copy engines anyway.
				problem, from = move(kind.from.At(0), source.At(0), most), kind.from
			}
			if problem == nil {
				problem = move(kind.to.At(0), from.At(0), n)
			}
			if problem == nil {
				problem = move(got.At(0), kind.to.At(0), n)
			}
			switch {
			case problem != nil:
				fmt.Printf("%s, %d bytes: refused %v; ", kind.name, n, errors.Is(problem, cuda.ErrNotPermitted))
			case !bytes.Equal(got.HostBytes()[:n], source.HostBytes()[:n]):
				fmt.Printf("%s, %d bytes: wrong bytes; ", kind.name, n)
			}
		}
	}
	return nil
}

// Beside a kernel of a foreign process the simulator refuses copies that would wait for a time
// slice, such as copies within a GPU. A relay makes none, but for a single byte, and within a GPU
// the first of more than 1 MiB.
func TestQueueBesideAnotherProcessesKernelNeedsNoTimeSlice(t *testing.T) {
	dir := t.TempDir()
	var devices []sim.Device
	for i := range 2 {
		devices = append(devices, sim.Device{Index: i, Minor: i, Memory: 1 << 30, Name: "NVIDIA H100 80GB HBM3",
			UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d", i+1), BusID: fmt.Sprintf("0000:1%d:00.0", i)})
	}
	if err := sim.Write(dir, devices); err != nil {
		t.Fatal(err)
	}
	environment, err := sim.Environment(dir)
	if err != nil {
		t.Fatal(err)
	}
	const large = "host to GPU, 1 bytes: refused true; within a GPU, 1 bytes: refused true; within a GPU, 4194304 " +
		"bytes: refused true; "
	for _, c := range []struct{ name, variable, want string }{
		{"beside no kernel", "PEERLANE_SIM_BUSY=", ""},
		{"beside a kernel", "PEERLANE_SIM_BUSY=refuse", large},
		{"without host memory", "PEERLANE_SIM_FAULT=cuMemHostAlloc:error=2", ""},
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), append(environment, queueVariable+"=busy", c.variable)...)
		cmd.WaitDelay = time.Minute
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.name, err, out, c.want)
		}
	}
}

// copyWithin makes a sequence of large copies within a GPU.
func copyWithin() error {
	runtime.LockOSThread()
	d, g, err := openFirst()
	if err != nil {
		return err
	}
	const most = 4<<20 + 3 // two pieces, and few bytes more
	var memory []*device.Memory
	for range 2 {
		m, err := device.Create(d, g.Ordinal, most, cuda.Access{Device: g.Ordinal, Write: true})
		if err != nil {
			return err
		}
		memory = append(memory, m)
	}
	host, q, err := pinned(g, 8<<20)
	if err != nil {
		return err
	}
	move := func(to, from device.Place, n uint64) (failed error) {
		q.Move(to, from, n, func(err error) { failed = err })
		for q.Busy() {
			q.Poll()
		}
		return failed
	}
	for i := range 600 {
		n := uint64(1100 << 10)
		if i%100 == 1 {
			n = most
		}
		for k := range host.HostBytes()[:n] {
			host.HostBytes()[k] = byte(k*13 + i)
		}
		want := bytes.Clone(host.HostBytes()[:n])
		err := errors.Join(move(memory[0].At(0), host.At(0), n), move(memory[1].At(0), memory[0].At(0), n))
		clear(host.HostBytes()[:n])
		if err = errors.Join(err, move(host.At(0), memory[1].At(0), n)); err != nil {
			return err
		}
		if !bytes.Equal(host.HostBytes()[:n], want) {
			return fmt.Errorf("copy %d of %d bytes is wrong", i, n)
		}
	}
	return q.Close()
}

// oneDevice opens the only simulated GPU, with memory and a queue.
func oneDevice(bytes uint64) (*device.Memory, *device.Queue, error) {
	runtime.LockOSThread()
	d, g, err := openFirst()
	if err != nil {
		return nil, nil, err
	}
	memory, err := device.Create(d, g.Ordinal, bytes, cuda.Access{Device: g.Ordinal, Write: true})
	if err == nil {
		err = g.Use()
	}
	if err != nil {
		return nil, nil, err
	}
	q, err := g.NewQueue()
	return memory, q, err
}

// failLater makes a copy within a GPU and a copy from host memory, and prints the errors.
func failLater() error {
	const half = 64 << 10
	memory, q, err := oneDevice(2 * half)
	if err != nil {
		return err
	}
	host, err := device.CreateHost("peerlane-test", half)
	if err != nil {
		return err
	}
	report := func(err error) {
		fmt.Println(errors.Is(err, cuda.ErrInvalidValue), errors.Is(err, cuda.ErrOutOfMemory))
	}
	q.Move(memory.At(0), host.At(0), 8, report) // the stream has no copy engine yet
	q.Move(memory.At(half), memory.At(0), half, report)
	return q.Close()
}

// neverBounce makes copies within a GPU that are slow, or seem slow, and then a copy that the queue
// would bounce if the queue took the delay for a wait for a time slice.
func neverBounce(which string) error {
	const small, large = 1100 << 10, 256 << 20
	memory, q, err := oneDevice(2 * large)
	if err != nil {
		return err
	}
	var failed error
	move := func(n uint64) {
		q.Move(memory.At(large), memory.At(0), n, func(err error) { failed = errors.Join(failed, err) })
	}
	drain := func() {
		for q.Busy() {
			q.Poll()
		}
	}
	switch which {
	case "large":
		move(large)
	case "queued":
		move(large)
		for range 20 {
			move(small)
		}
	case "late":
		move(small)
		time.Sleep(20 * time.Millisecond)
	}
	drain()
	move(small)
	drain()
	return errors.Join(failed, q.Close())
}

// alwaysBusy makes a copy within a GPU, and then more than bounceCopies at once.
func alwaysBusy() error {
	const n = 1100 << 10
	memory, q, err := oneDevice(2 * n)
	if err != nil {
		return err
	}
	var failed error
	for _, count := range []int{1, 400} {
		for range count {
			q.Move(memory.At(n), memory.At(0), n, func(err error) { failed = errors.Join(failed, err) })
		}
		for q.Busy() {
			q.Poll()
		}
	}
	return errors.Join(failed, q.Close())
}

// largeBusy makes a copy within a GPU, three of 40 MiB, and one of 64 MiB, each on an empty stream.
func largeBusy() error {
	const largest = 64 << 20
	memory, q, err := oneDevice(2 * largest)
	if err != nil {
		return err
	}
	var failed error
	for _, n := range []uint64{1100 << 10, 40 << 20, 40 << 20, 40 << 20, largest} {
		q.Move(memory.At(largest), memory.At(0), n, func(err error) { failed = errors.Join(failed, err) })
		for q.Busy() {
			q.Poll()
		}
	}
	return errors.Join(failed, q.Close())
}

// runAlone runs this program in a mode, with one simulated GPU.
func runAlone(t *testing.T, mode string, variables ...string) (string, error) {
	t.Helper()
	return runIn(t, t.TempDir(), mode, variables...)
}

func runIn(t *testing.T, dir, mode string, variables ...string) (string, error) {
	t.Helper()
	devices := []sim.Device{
		{
			Memory: 1 << 30,
			Name:   "NVIDIA H100 80GB HBM3",
			UUID:   "GPU-00000000-0000-0000-0000-000000000001",
			BusID:  "0000:10:00.0",
		},
	}
	if err := sim.Write(dir, devices); err != nil {
		t.Fatal(err)
	}
	environment, err := sim.Environment(dir)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), append(environment, queueVariable+"="+mode)...), variables...)
	cmd.WaitDelay = time.Minute
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// A copy of several calls with a failing later call ends after the earlier calls: the queue waits
// for its stream, and reports the error of that, too.
func TestQueueCopyFailsAfterAQueuedPieceEndsBehindIt(t *testing.T) {
	const piece = "PEERLANE_SIM_FAULT=cuMemcpyHtoDAsync:error=1;cuStreamBatchMemOp*:error=1"
	for _, c := range []struct{ faults, want string }{
		{piece, "true false\ntrue false\n"},
		{piece + ";cuStreamSynchronize:error=2", "true true\ntrue true\n"},
	} {
		if out, err := runAlone(t, "fails", c.faults); err != nil || out != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.faults, err, out, c.want)
		}
	}
}

// Without another process's kernel no copy waits for a time slice: neither large copies, nor
// copies behind others, nor late polls have the next copy bounce, which the simulator would
// refuse here.
func TestQueueSlowCopyWithoutAnotherProcessNextDoesNotBounce(t *testing.T) {
	for _, which := range []string{"large", "queued", "late"} {
		if out, err := runAlone(t, which, "PEERLANE_SIM_FAULT=cuMemcpyDtoHAsync:error=1"); err != nil {
			t.Errorf("%s: %v: %s", which, err, out)
		}
	}
}

// A copy that tries again is one that can be judged: behind further copies every copy bounces.
func TestQueueBusyStreamBesideAnotherProcessDoesNotTryAgain(t *testing.T) {
	var slices uint64
	for range 20 { // a late poll spoils the first copy
		dir := t.TempDir()
		if out, err := runIn(t, dir, "always busy", "PEERLANE_SIM_BUSY=2"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		logs, err := sim.ReadLog(dir)
		if err != nil {
			t.Fatal(err)
		}
		if slices = uint64(logs[0].Slices); slices == 1 {
			return
		}
	}
	t.Errorf("%d of 401 copies waited for a time slice, want 1", slices)
}

// After a copy within a GPU that has waited for a time slice, copies of 40 MiB go through host memory,
// in less than a slice. A copy of 64 MiB waits: two copies through host memory take longer.
func TestQueueLargeCopyBesideAnotherProcessBouncesUpTo48MiB(t *testing.T) {
	var slices uint64
	for range 20 { // a late poll spoils the first copy
		dir := t.TempDir()
		if out, err := runIn(t, dir, "large busy", "PEERLANE_SIM_BUSY=2"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		logs, err := sim.ReadLog(dir)
		if err != nil {
			t.Fatal(err)
		}
		if slices = uint64(logs[0].Slices); slices == 2 {
			return
		}
	}
	t.Errorf("%d of 5 copies waited for a time slice, want 2", slices)
}

// After a copy within a GPU that has waited for a time slice, the next 255 go by way of host
// memory. Then one tries again.
func TestQueueCopyWithinWaitedForASliceNextGoByHostMemory(t *testing.T) {
	dir := t.TempDir()
	devices := []sim.Device{
		{
			Memory: 1 << 30,
			Name:   "NVIDIA H100 80GB HBM3",
			UUID:   "GPU-00000000-0000-0000-0000-000000000001",
			BusID:  "0000:10:00.0",
		},
	}
	if err := sim.Write(dir, devices); err != nil {
		t.Fatal(err)
	}
	environment, err := sim.Environment(dir)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), append(environment, queueVariable+"=within", "PEERLANE_SIM_BUSY=2")...)
	cmd.WaitDelay = time.Minute
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	logs, err := sim.ReadLog(dir)
	if err != nil {
		t.Fatal(err)
	}
	// 600 copies: one that waits, 255 that do not, and so on. A busy machine makes polls late, and
	// then the queue tries again.
	if n := logs[0].Slices; n < 3 || n > 60 {
		t.Errorf("%d of 600 copies waited for a time slice, want 3", n)
	}
}
