package sim

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
)

// Tests that depend on the environment run in a child: this binary with the variable, which selects
// a function of children and prints the result to standard output.
const childVariable = "PEERLANE_SIM_CHILD"

var children = map[string]func() error{}

func TestMain(m *testing.M) {
	name := os.Getenv(childVariable)
	if name == "" {
		os.Exit(m.Run())
	}
	runtime.LockOSThread() // contexts are per thread
	if err := children[name](); err != nil {
		fmt.Fprintf(os.Stderr, "child %s: %v\n", name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func devices(n int) []Device {
	var all []Device
	for i := range n {
		all = append(all, Device{
			Index: i, Minor: i,
			UUID:   fmt.Sprintf("GPU-%08x-0000-4000-8000-000000000000", 0xa0+i),
			BusID:  fmt.Sprintf("0000:%02x:00.0", 0x10+i),
			Memory: 1 << 30,
			Name:   "Simulated GPU",
		})
	}
	return all
}

// host creates a simulated host of n devices; command uses its environment.
func host(t testing.TB, n int) string {
	t.Helper()
	dir := t.TempDir()
	check(t, Write(dir, devices(n)))
	return dir
}

func command(t testing.TB, dir, name string, env ...string) *exec.Cmd {
	t.Helper()
	base, err := Environment(dir)
	check(t, err)
	exe, err := os.Executable()
	check(t, err)
	cmd := exec.CommandContext(t.Context(), exe) // the context ends the child with the test
	// By default the race detector delays the exit of a process by a second.
	cmd.Env = append(append(os.Environ(), childVariable+"="+name, "GORACE=atexit_sleep_ms=0"), base...)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = os.Stderr
	return cmd
}

// answer runs a child and returns its output.
func answer(t testing.TB, dir, name string, env ...string) string {
	t.Helper()
	out, err := command(t, dir, name, env...).Output()
	if err != nil {
		t.Fatalf("%s with %v: %v", name, env, err)
	}
	return strings.TrimSpace(string(out))
}

// process is the setup of most children: the driver, a context on device 0, a stream, and memory on
// two devices.
type process struct {
	*cuda.Driver
	ctx  cuda.Context
	s    cuda.Stream
	a, b cuda.Ptr
}

const mib = 1 << 20

func begin(deviceA, deviceB cuda.Device) (p process, err error) {
	if p.Driver, err = cuda.Open(); err != nil {
		return p, err
	}
	if p.ctx, err = p.CtxCreate(0, cuda.CtxOptions{Lean: true}); err != nil {
		return p, err
	}
	if p.s, err = p.StreamCreate(); err != nil {
		return p, err
	}
	if p.a, err = p.memory(deviceA, 4*mib, true); err != nil {
		return p, err
	}
	p.b, err = p.memory(deviceB, 4*mib, true)
	return p, err
}

func (p process) memory(dev cuda.Device, size uint64, write bool) (cuda.Ptr, error) {
	h, err := p.MemCreate(dev, size, cuda.MemOptions{Exportable: true})
	if err != nil {
		return 0, err
	}
	at, err := p.MemAddressReserve(size, 0)
	if err != nil {
		return 0, err
	}
	return at, errors.Join(p.MemMap(at, size, 0, h), p.MemRelease(h),
		p.MemSetAccess(at, size, cuda.Access{Device: 0, Write: write}))
}

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// copyString writes text to device memory; readString reads n bytes of text.
func (p process) copyString(to cuda.Ptr, text string) error {
	b := []byte(text)
	return errors.Join(p.MemcpyHtoDAsync(to, pointer(b), uint64(len(b)), p.s), p.StreamSynchronize(p.s))
}

func (p process) readString(from cuda.Ptr, n int) (string, error) {
	b := make([]byte, n)
	err := p.MemcpyDtoHAsync(pointer(b), from, uint64(n), p.s)
	return string(b), err
}

// nodes creates a directory with nodes of the given minor numbers.
func nodes(t testing.TB, minors ...int) string {
	t.Helper()
	dir := t.TempDir()
	for _, n := range minors {
		check(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("nvidia%d", n)), nil, 0o600))
	}
	return dir
}
