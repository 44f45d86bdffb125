package measure

import (
	"errors"
	"fmt"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
	"github.com/peerlane/peerlane/relay/device"
)

// Loads that keep a GPU busy.
const (
	LoadSMs    = "sms"    // a kernel that occupies every SM and never yields
	LoadMemory = "memory" // a kernel that reads and writes more memory than a cache has
)

// loadBytes is the memory of LoadMemory in bytes; the simulator uses simulatedLoadBytes.
const loadBytes, simulatedLoadBytes = 1 << 30, 1 << 20

// neverEnds is longer than any measurement.
const neverEnds = time.Hour

// load holds the kernels that keep a GPU busy.
type load struct {
	on      *device.Device
	kernels *kernels.Kernels
	page    *kernels.Page
	stream  cuda.Stream
	memory  cuda.Ptr
	bytes   uint64
	running bool
}

// load prepares the kernels on a GPU, unless they are already prepared.
func (c *copies) load(on *device.Device) (*load, error) {
	if l := c.loads[on.BusID]; l != nil {
		return l, nil
	}
	d := c.driver
	l := &load{on: on, bytes: loadBytes}
	if d.Simulated() {
		l.bytes = simulatedLoadBytes
	}
	err := on.Use()
	if err == nil {
		l.kernels, err = kernels.Load(d, on.Ordinal)
	}
	if err == nil {
		l.page, err = l.kernels.NewPage()
	}
	if err == nil {
		l.stream, err = d.StreamCreate()
	}
	if err == nil {
		l.memory, err = d.MemAlloc(l.bytes)
	}
	if err != nil {
		return nil, fmt.Errorf("kernels for GPU %s: %w", on.BusID, err)
	}
	c.loads[on.BusID] = l
	return l, nil
}

// launch starts a kernel that runs for a duration, or until the flag in the page is set.
func (l *load) launch(kind string, d time.Duration) error {
	if l.running {
		return errors.New("a kernel runs there already")
	}
	switch kind {
	case LoadSMs:
		return l.kernels.Spin(l.stream, d, l.page)
	case LoadMemory:
		return l.kernels.Stream(l.stream, l.memory, l.bytes, d, l.page)
	}
	return fmt.Errorf("%q is no load", kind)
}

// occupy starts a kernel that runs until vacate.
func (c *copies) occupy(j Job, on *device.Device) error {
	l, err := c.load(on)
	if err != nil {
		return err
	}
	if err := on.Use(); err != nil {
		return err
	}
	if err := l.launch(j.Load, neverEnds); err != nil {
		return err
	}
	l.running = true
	// No event reports the start of a kernel; an idle GPU starts the kernel within this time.
	time.Sleep(20 * time.Millisecond)
	return nil
}

// vacate ends the kernel of occupy.
func (c *copies) vacate(on *device.Device) error {
	l := c.loads[on.BusID]
	if l == nil || !l.running {
		return errors.New("no kernel runs there")
	}
	l.running = false
	l.page.SetFlag(1)
	err := errors.Join(on.Use(), c.driver.StreamSynchronize(l.stream))
	l.page.SetFlag(0)
	return err
}

// work runs a kernel for a duration and returns its rate: iterations per second and, for
// LoadMemory, GB/s of reads and writes.
func (c *copies) work(j Job, on *device.Device) (r Result, err error) {
	l, err := c.load(on)
	if err != nil {
		return r, err
	}
	if err := on.Use(); err != nil {
		return r, err
	}
	start := time.Now()
	if err := l.launch(j.Load, j.Duration); err != nil {
		return r, err
	}
	if err := c.driver.StreamSynchronize(l.stream); err != nil {
		return r, err
	}
	took := time.Since(start).Seconds()
	rounds := float64(l.page.Rounds())
	r.PerSecond = rounds / took
	if j.Load == LoadMemory {
		r.GBs = 2 * float64(l.bytes) * rounds / float64(l.kernels.Blocks()) / took / 1e9
	}
	return r, nil
}
