package device_test

import (
	"runtime"
	"testing"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay/device"
)

// Objects of a device's context belong to the caller, also if the previous context cannot become
// current again.
func TestFailedContextSwitchKeepsObjects(t *testing.T) {
	if err := sim.Use(t.TempDir(), []sim.Device{
		{Memory: 1 << 30, Name: "NVIDIA H100 80GB HBM3", UUID: "GPU-00000000-0000-0000-0000-000000000001",
			BusID: "0000:10:00.0"},
		{Memory: 1 << 30, Name: "NVIDIA H100 80GB HBM3", UUID: "GPU-00000000-0000-0000-0000-000000000002",
			BusID: "0000:20:00.0", Minor: 1},
	}); err != nil {
		t.Fatal(err)
	}
	d, err := cuda.Open()
	if err != nil {
		t.Fatal(err)
	}
	var gpus [2]*device.Device
	for i := range gpus {
		ordinal, err := d.DeviceGet(i)
		if err != nil {
			t.Fatal(err)
		}
		busID, err := d.DevicePCIBusID(ordinal)
		if err != nil {
			t.Fatal(err)
		}
		if gpus[i], err = device.Open(d, busID); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // it ends with this goroutine
		if err := gpus[1].Use(); err != nil {
			ended <- err
			return
		}
		ended <- gpus[0].On(gpus[1].Close)
	}()
	if err := <-ended; err != nil {
		t.Errorf("what was done is told as undone: %v", err)
	}
	if err := gpus[0].Close(); err != nil {
		t.Error(err)
	}
}
