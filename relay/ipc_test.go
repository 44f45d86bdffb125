package relay_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"testing"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// plain is memory of cudaMalloc of this process, which is not the relay's process.
type plain struct {
	t      *testing.T
	gpu    *device.Device
	ptr    cuda.Ptr
	handle cuda.IPCMemHandle
}

func newPlain(t *testing.T, i int, n uint64) *plain {
	t.Helper()
	g, err := device.Open(driver, devices[i].BusID)
	if err != nil {
		t.Fatal(err)
	}
	p := &plain{t: t, gpu: g}
	if err := g.On(func() error {
		if p.ptr, err = driver.MemAlloc(n); err == nil {
			p.handle, err = driver.IPCGetMemHandle(p.ptr)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(g.On(func() error { return driver.MemFree(p.ptr) }), g.Close()); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *plain) copy(offset uint64, b []byte, in bool) {
	p.t.Helper()
	at := p.ptr + cuda.Ptr(offset)
	if err := p.gpu.On(func() error {
		host, err := driver.MemHostAlloc(uint64(len(b)))
		if err != nil {
			return err
		}
		pinned := unsafe.Slice((*byte)(host), len(b))
		if in {
			copy(pinned, b)
			err = driver.MemcpyHtoDAsync(at, host, uint64(len(b)), 0)
		} else {
			err = driver.MemcpyDtoHAsync(host, at, uint64(len(b)), 0)
		}
		err = errors.Join(err, driver.StreamSynchronize(0))
		copy(b, pinned)
		return errors.Join(err, driver.MemHostFree(host))
	}); err != nil {
		p.t.Fatal(err)
	}
}

// export exports memory of cudaMalloc in the good client's session.
func (v *victim) export(p *plain, offset, n uint64) (*client.Memory, error) {
	return v.good.ExportIPC(within(v.t), p.handle, client.Allocation{GPU: uuid(v.t, 0), Offset: offset, Length: n})
}

func TestCudaMallocMemoryTransfersByIPC(t *testing.T) {
	needGPUs(t, 2)
	const n = 5<<20 + 3
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			v := newVictim(t, func(c *launch.Config) { c.Route, c.CUDAIPC = route, true })
			from, to := newPlain(t, 0, 8<<20), newPlain(t, 0, 8<<20)
			source, err := v.export(from, 7, 6<<20)
			if err != nil {
				t.Fatal(err)
			}
			target, err := v.export(to, 0, 8<<20)
			if err != nil {
				t.Fatal(err)
			}
			want := random(t, n)
			from.copy(7+11, want, true)

			// Out of it, on every route.
			vmm := exported(t, v.good, 0, 8<<20)
			move := func(m *client.Memory, at uint64) {
				t.Helper()
				receive, err := v.receiving.Receive(m, at, n)
				if err != nil {
					t.Fatal(err)
				}
				send, err := v.sending.Send(source, 11, n)
				for _, op := range []*client.Operation{send, receive} {
					if moved, err := wait(t, op, err); err != nil || moved != n {
						t.Fatalf("%d bytes, %v", moved, err)
					}
				}
			}
			move(vmm.Memory, 5)
			if !bytes.Equal(vmm.read(5, n), want) {
				t.Error("the bytes are wrong")
			}
			// Receives into the memory, only if no remote relay writes.
			if route == launch.RouteDirect {
				op, err := v.receiving.Receive(target, 0, n)
				_, err = wait(t, op, err)
				demand(t, err, wire.StatusNotPermitted)
			} else {
				move(target, 9)
				got := make([]byte, n)
				to.copy(9, got, false)
				if !bytes.Equal(got, want) {
					t.Error("the bytes that came are wrong")
				}
			}
			op, err := v.sending.Send(source, 1, 6<<20)
			_, err = wait(t, op, err)
			demand(t, err, wire.StatusOutOfRange)
			if err := errors.Join(source.Unexport(within(t)), target.Unexport(within(t)), vmm.Unexport(within(t))); err != nil {
				t.Fatal(err)
			}
			v.recovered()
		})
	}
}

func TestCudaMallocMemoryIsRefused(t *testing.T) {
	v := newVictim(t, func(c *launch.Config) { c.CUDAIPC = true; c.Limits.Memories = 3 })
	p, elsewhere := newPlain(t, 0, 4<<20), newPlain(t, 2, 4<<20)
	for _, c := range []struct{ offset, length uint64 }{{0, 0}, {0, 4<<20 + 1}, {4 << 20, 1}, {1, 4 << 20},
		{1 << 63, 1 << 63}, {8, 1<<64 - 8}} {
		_, err := v.export(p, c.offset, c.length)
		demand(t, err, wire.StatusOutOfRange)
	}
	_, err := v.export(elsewhere, 0, 4<<20)
	demandOf(t, err, wire.StatusWrongGPU, devices[0].UUID)
	for range 100 {
		var handle [64]byte
		if _, err := rand.Read(handle[:]); err != nil {
			t.Fatal(err)
		}
		_, err := v.good.ExportIPC(within(t), handle, client.Allocation{GPU: uuid(t, 0), Length: 8})
		demandOf(t, err, wire.StatusBadDescriptor, "cuIpcOpenMemHandle")
	}
	forged := p.handle
	forged[16] ^= 1 // the nonce
	_, err = v.good.ExportIPC(within(t), forged, client.Allocation{GPU: uuid(t, 0), Length: 8})
	demandOf(t, err, wire.StatusBadDescriptor, "cuIpcOpenMemHandle")
	// An allocation can be exported more than once, up to the limit.
	for range 2 {
		if _, err := v.export(p, 0, 8); err != nil {
			t.Fatal(err)
		}
	}
	_, err = v.export(p, 0, 8)
	demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.memories")
	v.goesOn()

	h := newHost(t)
	socket, r := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	a := attach(t, socket)
	_, err = a.ExportIPC(within(t), p.handle, client.Allocation{GPU: uuid(t, 0), Length: 8})
	demandOf(t, err, wire.StatusNotPermitted, "relay.cuda_ipc")
	if used := r.Report().Used.Memories; used != 0 {
		t.Errorf("%d memories are counted", used)
	}
}

// A client frees exported memory, or dies.
func TestCudaMallocMemoryFreedInFlightHarmsNoOther(t *testing.T) {
	v := newVictim(t, func(c *launch.Config) { c.CUDAIPC = true })
	for round := range 6 {
		s, err := client.Dial(within(t), v.socket)
		if err != nil {
			t.Fatal(err)
		}
		p := newPlain(t, 0, 8<<20)
		m, err := s.ExportIPC(within(t), p.handle, client.Allocation{GPU: uuid(t, 0), Length: 8 << 20})
		if err != nil {
			t.Fatal(err)
		}
		sending, receiving, _ := join(t, s, 0, v.good, 0)
		receive, err := receiving.Receive(v.memory.Memory, 0, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sending.Send(m, 0, 1<<20); err != nil {
			t.Fatal(err)
		}
		if round%2 == 0 {
			if err := m.Unexport(within(t)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		_, _ = wait(t, receive, nil) // done, or the remote side has ended
		if err := receiving.Close(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	v.recovered()
}
