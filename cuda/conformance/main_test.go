package conformance

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
)

// driver is the driver under test, opened once.
var driver *cuda.Driver

// contexts holds one context for each device, created on first use.
var contexts = map[cuda.Device]cuda.Context{}

// locked is the running test after use has locked its thread.
var locked testing.TB

func TestMain(m *testing.M) {
	if name := os.Getenv(childVariable); name != "" {
		os.Exit(runChild(name))
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	switch which := os.Getenv("PEERLANE_TEST_CUDA"); which {
	case "driver":
	case "", "sim":
		dir, err := os.MkdirTemp("", "peerlane-conformance-*")
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		if err := simulate(dir); err != nil {
			return 0, err
		}
	default:
		return 0, fmt.Errorf("PEERLANE_TEST_CUDA=%s: want driver or sim", which)
	}
	if driver, err = cuda.Open(); err != nil {
		return 0, err
	}
	if err := describe(); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// simulate creates a simulated host and sets its environment for this process and children.
func simulate(dir string) error {
	var devices []sim.Device
	for i := range 4 {
		devices = append(devices, sim.Device{
			Index: i, Minor: i,
			UUID:   fmt.Sprintf("GPU-5eed0000-0000-4000-8000-00000000000%d", i),
			BusID:  fmt.Sprintf("0000:%02x:00.0", 0x17+i),
			Memory: 8 << 30,
			Name:   "Simulated GPU",
		})
	}
	if err := sim.Write(dir, devices); err != nil {
		return err
	}
	library, err := sim.Library()
	if err != nil {
		return err
	}
	return errors.Join(os.Setenv(cuda.LibraryVariable, library), os.Setenv("PEERLANE_SIM", dir))
}

// describe prints the platform of the suite; a result without the platform has little value.
func describe() error {
	version, err := driver.DriverVersion()
	if err != nil {
		return err
	}
	n, err := driver.DeviceCount()
	if err != nil {
		return err
	}
	fmt.Printf("%s, CUDA %d.%d, %d devices:", driver.Library(), version/1000, version%1000/10, n)
	for i := range n {
		name, err := driver.DeviceName(cuda.Device(i))
		if err != nil {
			return err
		}
		fmt.Printf(" %s;", name)
	}
	fmt.Println()
	return nil
}

// needDevices skips a test on a host with fewer devices.
func needDevices(t testing.TB, n int) {
	t.Helper()
	count, err := driver.DeviceCount()
	check(t, err)
	if count < n {
		t.Skipf("this needs %d GPUs; there is %d", n, count)
	}
}

// use locks the test to its thread and makes a context of the device current. At the test's end use
// detaches the context, because another test may run on the thread.
func use(t testing.TB, dev cuda.Device) cuda.Context {
	t.Helper()
	if locked != t {
		runtime.LockOSThread()
		before := locked
		locked = t
		t.Cleanup(func() {
			check(t, driver.CtxSetCurrent(0))
			locked = before
			runtime.UnlockOSThread()
		})
	}
	ctx, ok := contexts[dev]
	if !ok {
		var err error
		ctx, err = driver.CtxCreate(dev, cuda.CtxOptions{Lean: true})
		check(t, err)
		contexts[dev] = ctx
	}
	check(t, driver.CtxSetCurrent(ctx))
	return ctx
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused requires that err is one of results, or any result of the driver if results is empty.
func refused(t testing.TB, what string, err error, results ...cuda.Result) {
	t.Helper()
	if err == nil {
		t.Errorf("%s succeeded", what)
		return
	}
	for _, r := range results {
		if errors.Is(err, r) {
			t.Logf("%s: %v", what, err)
			return
		}
	}
	if e := (*cuda.CallError)(nil); len(results) == 0 && errors.As(err, &e) {
		t.Logf("%s: %v", what, err)
		return
	}
	t.Errorf("%s: %v; want any of %v", what, err, results)
}
