package conformance

import (
	"errors"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cuda"
)

func TestDevicesHaveNames(t *testing.T) {
	n, err := driver.DeviceCount()
	check(t, err)
	uuids := map[string]bool{}
	for i := range n {
		dev, err := driver.DeviceGet(i)
		check(t, err)
		uuid, err := driver.DeviceUUID(dev)
		check(t, err)
		if !regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(uuid) || uuids[uuid] {
			t.Errorf("device %d: UUID %q is malformed or another's", i, uuid)
		}
		uuids[uuid] = true
		bus, err := driver.DevicePCIBusID(dev)
		check(t, err)
		if !regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`).MatchString(bus) {
			t.Errorf("device %d: PCI address %q", i, bus)
		}
		for _, id := range []string{bus, strings.ToUpper(bus)} {
			back, err := driver.DeviceByPCIBusID(id)
			check(t, err)
			if back != dev {
				t.Errorf("the device at %s is %d, want %d", id, back, dev)
			}
		}
	}
	_, err = driver.DeviceGet(n)
	refused(t, "a device too many", err, cuda.ErrInvalidDevice)
	_, err = driver.DeviceByPCIBusID("0000:fe:1f.0")
	refused(t, "a device at an address without one", err, cuda.ErrInvalidDevice, cuda.ErrInvalidValue)
}

func TestDevicesHaveNeededAttributes(t *testing.T) {
	n, err := driver.DeviceCount()
	check(t, err)
	for i := range n {
		dev := cuda.Device(i)
		for name, a := range map[string]cuda.Attribute{
			"unified addressing":  cuda.AttributeUnifiedAddressing,
			"memory management":   cuda.AttributeVMM,
			"export":              cuda.AttributePosixFD,
			"64-bit stream waits": cuda.AttributeStreamMemOps64,
		} {
			v, err := driver.DeviceAttribute(dev, a)
			check(t, err)
			if v != 1 {
				t.Errorf("device %d: %s: %d, want 1", i, name, v)
			}
		}
		granularity, err := driver.MemGranularity(dev)
		check(t, err)
		if granularity == 0 || 2*mib%granularity != 0 {
			t.Errorf("device %d: granularity %d does not divide 2 MiB", i, granularity)
		}
		for j := range n {
			canExport, err := driver.DeviceCanAccessPeer(dev, cuda.Device(j))
			check(t, err)
			if i == j && canExport {
				t.Errorf("device %d can access itself as a peer", i)
			}
		}
	}
}

func TestContextsArePerThread(t *testing.T) {
	ctx := use(t, 0)
	if now, err := driver.CtxGetCurrent(); err != nil || now != ctx {
		t.Errorf("the current context is %#x, %v; want %#x", now, err, ctx)
	}
	type answer struct {
		ctx cuda.Context
		err error
	}
	other := make(chan answer)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this function
		now, err := driver.CtxGetCurrent()
		if err == nil {
			_, err = driver.StreamCreate()
		}
		other <- answer{now, err}
	}()
	a := <-other
	if a.ctx != 0 {
		t.Errorf("a new thread has the context %#x", a.ctx)
	}
	refused(t, "a stream on a thread without a context", a.err, cuda.ErrInvalidContext)
}

func TestContextIsCurrentAfterItsCreation(t *testing.T) {
	use(t, 0)
	ctx, err := driver.CtxCreate(0, cuda.CtxOptions{})
	check(t, err)
	if now, err := driver.CtxGetCurrent(); err != nil || now != ctx {
		t.Errorf("current context %#x, %v; want the new context %#x", now, err, ctx)
	}
	free, total, err := driver.MemGetInfo()
	check(t, err)
	device, err := driver.DeviceTotalMem(0)
	check(t, err)
	if free == 0 || free > total || total > device {
		t.Errorf("%d bytes free of %d, on a device of %d", free, total, device)
	}
	check(t, driver.CtxDestroy(ctx))
}

func TestErrorsHaveTheirNames(t *testing.T) {
	known := 0
	for r := cuda.Result(1); r < 1000; r++ {
		name, text := driver.Describe(r)
		ours := r.Error()
		if !strings.HasPrefix(ours, "CUDA_ERROR_") {
			continue // no constant of the binding
		}
		known++
		if name == "" || text == "" || !strings.HasPrefix(ours, name+" (") {
			t.Errorf("result %d: the driver says %q, %q; the binding says %q", r, name, text, ours)
		}
	}
	if known < 30 {
		t.Errorf("the binding names only %d results", known)
	}
	if name, _ := driver.Describe(12345); name != "" {
		t.Errorf("result 12345 has the name %q", name)
	}
}

func TestCallErrorHasCallObjectAndResult(t *testing.T) {
	use(t, 0)
	_, err := driver.MemCreate(0, 4097, cuda.MemOptions{})
	var e *cuda.CallError
	if !errors.As(err, &e) {
		t.Fatalf("memory of 4097 bytes: %v; want a CallError", err)
	}
	if e.Call != "cuMemCreate" || e.On != "4.0 KiB on device 0" || e.Result != cuda.ErrInvalidValue ||
		e.Name != "CUDA_ERROR_INVALID_VALUE" || e.Text == "" {
		t.Errorf("%#v", e)
	}
}
