package device_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/device"
)

// listsVariable has the number of lists and of the copies of each.
const listsVariable = "PEERLANE_TEST_LISTS"

// moveLists copies lists of random ranges from GPU 0 to itself and to GPU 1, and compares all bytes.
// It prints whether the kernel was loaded.
func moveLists() error {
	runtime.LockOSThread()
	var count, copies int
	if _, err := fmt.Sscan(os.Getenv(listsVariable), &count, &copies); err != nil {
		return err
	}
	d, g, err := openFirst()
	if err != nil {
		return err
	}
	const apart, behind = 40 << 10, 2 << 20
	bytesOf := (uint64(copies)*apart + 2*behind) / behind * behind
	both := []cuda.Access{{Device: g.Ordinal, Write: true}, {Device: 1, Write: true}}
	source, err := device.Create(d, g.Ordinal, bytesOf, both...)
	if err != nil {
		return err
	}
	host, q, err := pinned(g, bytesOf)
	if err != nil {
		return err
	}
	move := func(list []device.Copy) (failed error) {
		ends := 0
		q.MoveList(list, func(err error) { failed, ends = err, ends+1 })
		for q.Busy() {
			q.Poll()
		}
		if ends != 1 {
			return fmt.Errorf("a list has ended %d times", ends)
		}
		return failed
	}
	all := func(to, from device.Place) []device.Copy { return []device.Copy{{To: to, From: from, Bytes: bytesOf}} }
	content := make([]byte, bytesOf)
	for i := range content {
		content[i] = byte(i>>12 + i*7)
	}
	copy(host.HostBytes(), content)
	if err := move(all(source.At(0), host.At(0))); err != nil {
		return err
	}
	g.PrepareLists()
	fmt.Print(g.ListsPrepared())
	random := rand.New(rand.NewPCG(1, 2))
	for on := range cuda.Device(2) {
		target, err := device.Create(d, on, bytesOf, both...)
		if err != nil {
			return err
		}
		want := bytes.Repeat([]byte{0xee}, int(bytesOf))
		copy(host.HostBytes(), want)
		if err := move(all(target.At(0), host.At(0))); err != nil {
			return err
		}
		for range count {
			var list []device.Copy
			for i := range uint64(copies) {
				n, at, from := 16*(1+random.Uint64N(2048)), i*apart+16*random.Uint64N(100), i*apart+16*random.Uint64N(100)
				list = append(list, device.Copy{To: target.At(at), From: source.At(from), Bytes: n})
				copy(want[at:at+n], content[from:])
			}
			// Copies that the kernel does not make.
			for i, n := range []uint64{300 << 10, 20, 4099} {
				at := bytesOf - behind + uint64(i)<<19 + uint64(i)
				list = append(list, device.Copy{To: target.At(at), From: source.At(at), Bytes: n})
				copy(want[at:at+n], content[at:])
			}
			if err := move(list); err != nil {
				return err
			}
		}
		if err := move(all(host.At(0), target.At(0))); err != nil {
			return err
		}
		if !bytes.Equal(host.HostBytes()[:bytesOf], want) {
			return fmt.Errorf("wrong bytes in memory of GPU %d", on)
		}
		if err := target.Close(); err != nil {
			return err
		}
	}
	return errors.Join(q.Close(), source.Close(), host.Close(), g.Close())
}

// runLists runs moveLists, and returns its output and the works that took a time slice of GPU 0.
func runLists(t *testing.T, count, copies int, variable string) (loaded string, slices int) {
	t.Helper()
	dir := t.TempDir()
	var devices []sim.Device
	for i := range 2 {
		devices = append(devices, sim.Device{Index: i, Minor: i, Memory: 4 << 30, Name: "NVIDIA H100 80GB HBM3",
			UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d", i+1), BusID: fmt.Sprintf("0000:1%d:00.0", i)})
	}
	if err := sim.Write(dir, devices); err != nil {
		t.Fatal(err)
	}
	environment, err := sim.Environment(dir)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), environment...), queueVariable+"=lists", variable,
		listsVariable+"="+strconv.Itoa(count)+" "+strconv.Itoa(copies))
	cmd.WaitDelay = time.Minute
	text, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	logs, err := sim.ReadLog(dir)
	if err != nil {
		t.Fatal(err)
	}
	return string(text), int(logs[0].Slices)
}

func TestMoveListOfManyCopiesIsOneKernel(t *testing.T) {
	for _, c := range []struct {
		what     string
		copies   int
		variable string
		loaded   string
		slices   int // of three lists on each of two GPUs
	}{
		{"many copies", 512, "PEERLANE_SIM_BUSY=", "true", 6},
		{"few copies", 60, "PEERLANE_SIM_BUSY=", "true", 0},
		{"no kernel", 512, "PEERLANE_SIM_FAULT=cuModuleLoadDataEx:error=221", "false", 0},
		{"no table", 512, "PEERLANE_SIM_FAULT=cuMemHostAlloc:times=1:error=2", "false", 0},
		{"a launch fails", 512, "PEERLANE_SIM_FAULT=cuLaunchKernel:times=1:error=701", "true", 5},
		{"no slice for a kernel", 512, "PEERLANE_SIM_BUSY=refuse", "true", 6},
	} {
		if out, slices := runLists(t, 3, c.copies, c.variable); out != c.loaded || slices != c.slices {
			t.Errorf("%s: loaded %s, %d kernels; want %s and %d", c.what, out, slices, c.loaded, c.slices)
		}
	}
}

// After a kernel that waited for a time slice, engines make the next lists of few copies. A late poll
// spoils the judgement of a kernel; then the next list has a kernel again.
func TestMoveListKernelWaitedForASliceNextGoByEngines(t *testing.T) {
	if _, slices := runLists(t, 30, 64, "PEERLANE_SIM_BUSY=4"); slices == 0 || slices >= 30 {
		t.Errorf("%d kernels for 60 lists of 64 copies, want few", slices)
	}
}
