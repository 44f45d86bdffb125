package rdmatest

import (
	"testing"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

// The bytes of the first GPU's memory are in the second GPU's memory after a run.
func TestStreamMovesBytesBetweenGPUs(t *testing.T) {
	h, err := softdevice.New(t.TempDir(), softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1"})
	check(t, err)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	driver, err := openCUDA()
	check(t, err)
	var gpus []*device.Device
	for _, bus := range []string{busID, serverBusID} {
		g, err := device.Open(driver, bus)
		check(t, err)
		defer func() { check(t, g.Close()) }()
		gpus = append(gpus, g)
	}
	const bytes = 1 << 20
	s, err := NewStream(l, "mlx5_0", gpus[0], gpus[1], bytes, 4)
	check(t, err)
	word := func(g *device.Device, at uint64, set byte) (got uint32) {
		check(t, g.On(func() error {
			stream, err := driver.StreamCreate()
			check(t, err)
			if set != 0 {
				check(t, driver.MemsetAsync(cuda.Ptr(at), set, bytes, stream))
			}
			check(t, driver.MemcpyDtoHAsync(unsafe.Pointer(&got), cuda.Ptr(at+bytes-4), 4, stream))
			check(t, driver.StreamSynchronize(stream))
			return driver.StreamDestroy(stream)
		}))
		return got
	}
	word(gpus[0], s.request.Address, 0x5e)
	rate, err := s.Run(10 * time.Millisecond)
	if err != nil || rate <= 0 {
		t.Errorf("%v GB/s, %v", rate, err)
	}
	if got := word(gpus[1], s.request.Remote, 0); got != 0x5e5e5e5e {
		t.Errorf("the last word in the target is %#x", got)
	}
	check(t, s.Close())
}
