package demo

import (
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
)

// Baselines are what the exchange is compared with, measured in the same run
// by one process that sees all GPUs.
type Baselines struct {
	// Raw is cuMemcpyPeerAsync from client GPU A to client GPU B, Bounce the same
	// through pinned host memory, pipelined in chunks.
	Raw    []Rate `json:"raw"`
	Bounce []Rate `json:"bounce"`
	// Legs of the staged route, each beside a raw copy in its direction that the
	// same GPU issues.
	Legs []Leg `json:"legs"`
}

// Leg is a part of the staged route.
type Leg struct {
	Name string  `json:"name"`
	Size uint64  `json:"size"` // bytes of a message
	GBs  float64 `json:"gbs"`  // by the relay's own queue, in slots
	Raw  float64 `json:"raw"`  // by cuMemcpyPeerAsync
}

// MeasureOptions name the GPUs, by PCI address.
type MeasureOptions struct {
	ClientA, ServerA, ClientB, ServerB string
	Sizes                              []uint64
	Bytes                              uint64 // moved at each size
	Depth                              int
	Slots                              int
	SlotBytes                          uint64
}

// Measure measures the baselines.
func Measure(o MeasureOptions) (*Baselines, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	d, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	m := &measurer{MeasureOptions: o, driver: d}
	result := &Baselines{}
	a, err := m.open(o.ClientA)
	if err != nil {
		return nil, err
	}
	b, err := m.open(o.ClientB)
	if err != nil {
		return nil, err
	}
	for _, size := range o.Sizes {
		raw, err := m.raw(a, b, a, size)
		if err != nil {
			return nil, fmt.Errorf("raw peer copy of %d bytes: %w", size, err)
		}
		bounce, err := m.bounce(a, b, size)
		if err != nil {
			return nil, fmt.Errorf("copy of %d bytes through host memory: %w", size, err)
		}
		result.Raw = append(result.Raw, Rate{size, raw})
		result.Bounce = append(result.Bounce, Rate{size, bounce})
	}
	serverA, err := m.open(o.ServerA)
	if err != nil {
		return nil, err
	}
	serverB, err := m.open(o.ServerB)
	if err != nil {
		return nil, err
	}
	// Issued by who issues them on the staged route: the relays on the clients'
	// GPUs, the emulated NIC on the receiver's server.
	for _, leg := range []struct {
		name             string
		from, to, issuer *device.Device
	}{
		{"client A to slot", a, serverA, a},
		{"slot to slot, by the NIC", serverA, serverB, serverB},
		{"slot to client B", serverB, b, b},
	} {
		measured, err := m.leg(leg.name, leg.from, leg.to, leg.issuer)
		if err != nil {
			return nil, fmt.Errorf("leg %s: %w", leg.name, err)
		}
		result.Legs = append(result.Legs, measured)
	}
	return result, nil
}

type measurer struct {
	MeasureOptions
	driver *cuda.Driver
}

func (m *measurer) open(busID string) (*device.Device, error) { return device.Open(m.driver, busID) }

func (m *measurer) count(size uint64) int { return int(max(m.Bytes/size, uint64(2*m.Depth))) }

// rate times count messages, after a tenth of them to warm up.
func rate(size uint64, count int, f func(n int) error) (float64, error) {
	if err := f(max(count/10, 2)); err != nil {
		return 0, err
	}
	start := time.Now()
	if err := f(count); err != nil {
		return 0, err
	}
	return float64(size) * float64(count) / time.Since(start).Seconds() / 1e9, nil
}

// raw copies between plain memory of two GPUs, all copies queued on one stream
// of the issuing GPU.
func (m *measurer) raw(from, to, issuer *device.Device, size uint64) (float64, error) {
	d := m.driver
	source, err := m.plain(from, size)
	if err != nil {
		return 0, err
	}
	target, err := m.plain(to, size)
	if err != nil {
		return 0, err
	}
	for _, pair := range [][2]*device.Device{{from, to}, {to, from}} {
		if err := pair[0].Use(); err != nil {
			return 0, err
		}
		if err := d.CtxEnablePeerAccess(pair[1].Context()); err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) && !errors.Is(err, cuda.ErrPeerAccessUnsupported) {
			return 0, err
		}
	}
	if err := issuer.Use(); err != nil {
		return 0, err
	}
	stream, err := d.StreamCreate()
	if err != nil {
		return 0, err
	}
	result, err := rate(size, m.count(size), func(n int) error {
		for range n {
			if err := d.MemcpyPeerAsync(target, to.Context(), source, from.Context(), size, stream); err != nil {
				return err
			}
		}
		return d.StreamSynchronize(stream)
	})
	return result, errors.Join(err, d.StreamDestroy(stream), from.On(func() error { return d.MemFree(source) }), to.On(func() error { return d.MemFree(target) }))
}

func (m *measurer) plain(on *device.Device, size uint64) (cuda.Ptr, error) {
	if err := on.Use(); err != nil {
		return 0, err
	}
	return m.driver.MemAlloc(size)
}

// bounceChunk is small enough to overlap the two halves of a message.
const bounceChunk = 4 << 20

// bounce copies device to host and host to device with pinned memory, the two
// halves overlapping in chunks over two host buffers.
func (m *measurer) bounce(a, b *device.Device, size uint64) (result float64, err error) {
	d := m.driver
	source, err := m.plain(a, size)
	if err != nil {
		return 0, err
	}
	down, err := d.StreamCreate()
	if err != nil {
		return 0, err
	}
	target, err := m.plain(b, size)
	if err != nil {
		return 0, err
	}
	up, err := d.StreamCreate()
	if err != nil {
		return 0, err
	}
	const buffers = 2
	var host [buffers]unsafe.Pointer
	var ready, free [buffers]cuda.Event
	for i := range buffers {
		if host[i], err = d.MemHostAlloc(bounceChunk); err != nil {
			return 0, err
		}
		if err := a.Use(); err != nil {
			return 0, err
		}
		if ready[i], err = d.EventCreate(cuda.EventOptions{}); err != nil {
			return 0, err
		}
		if err := b.Use(); err != nil {
			return 0, err
		}
		if free[i], err = d.EventCreate(cuda.EventOptions{}); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, a.On(func() error { return d.MemHostFree(host[i]) })) }()
	}
	turn := 0
	chunk := func(offset, n uint64) error {
		i := turn % buffers
		turn++
		return errors.Join(
			a.Use(), d.StreamWaitEvent(down, free[i]),
			d.MemcpyDtoHAsync(host[i], source+cuda.Ptr(offset), n, down), d.EventRecord(ready[i], down),
			b.Use(), d.StreamWaitEvent(up, ready[i]),
			d.MemcpyHtoDAsync(target+cuda.Ptr(offset), host[i], n, up), d.EventRecord(free[i], up))
	}
	result, err = rate(size, m.count(size), func(n int) error {
		for range n {
			for offset := uint64(0); offset < size; offset += bounceChunk {
				if err := chunk(offset, min(bounceChunk, size-offset)); err != nil {
					return err
				}
			}
		}
		return d.StreamSynchronize(up)
	})
	return result, errors.Join(err, a.On(func() error { return d.MemFree(source) }), b.On(func() error { return d.MemFree(target) }))
}

// leg moves 64 MiB messages the way relays and emulated NICs do: between
// imported memory of any size and a ring of slots, slot by slot, in a queue of
// theirs.
func (m *measurer) leg(name string, from, to, issuer *device.Device) (leg Leg, err error) {
	leg = Leg{Name: name, Size: maxMessage}
	if leg.Raw, err = m.raw(from, to, issuer, maxMessage); err != nil {
		return leg, err
	}
	if err := issuer.Use(); err != nil {
		return leg, err
	}
	pull := to == issuer
	messageOn, ringOn := from, to
	if pull {
		messageOn, ringOn = to, from
	}
	message, err := m.imported(messageOn, issuer, maxMessage)
	if err != nil {
		return leg, err
	}
	ring, err := m.imported(ringOn, issuer, uint64(m.Slots)*m.SlotBytes)
	if err != nil {
		return leg, errors.Join(err, message.Close())
	}
	queue, err := issuer.NewQueue()
	if err != nil {
		return leg, err
	}
	slot, underWay := uint64(0), 0
	var failed error
	leg.GBs, err = rate(maxMessage, m.count(maxMessage), func(n int) error {
		for range n {
			for offset := uint64(0); offset < maxMessage; offset += m.SlotBytes {
				for underWay == m.Slots {
					queue.Poll()
				}
				target, source := ring.Ptr+cuda.Ptr(slot*m.SlotBytes), message.Ptr+cuda.Ptr(offset)
				if pull {
					target, source = source, target
				}
				slot = (slot + 1) % uint64(m.Slots)
				underWay++
				queue.Copy(target, source, min(m.SlotBytes, maxMessage-offset), func(err error) {
					underWay--
					failed = errors.Join(failed, err)
				})
			}
		}
		for underWay > 0 {
			queue.Poll()
		}
		return failed
	})
	return leg, errors.Join(err, queue.Close(), ring.Close(), message.Close())
}

// imported makes memory as another process would export it, and imports it.
func (m *measurer) imported(on, issuer *device.Device, bytes uint64) (*device.Memory, error) {
	access := cuda.Access{Device: issuer.Ordinal, Write: true}
	exported, err := device.Create(m.driver, on.Ordinal, bytes, access)
	if err != nil {
		return nil, err
	}
	fd, err := exported.Export()
	if err != nil {
		return nil, errors.Join(err, exported.Close())
	}
	memory, err := device.Import(m.driver, fd, exported.Bytes, access)
	// The importer keeps the memory.
	return memory, errors.Join(err, unix.Close(fd), exported.Close())
}
