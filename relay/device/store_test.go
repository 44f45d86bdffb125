package device_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
)

// storeAll stores bytes of many sizes at odd addresses into memory of which a part is mapped, and
// prints which sizes the device took.
func storeAll() error {
	runtime.LockOSThread()
	d, g, err := openFirst()
	if err != nil {
		return err
	}
	if err := g.OpenStores(true); err != nil {
		fmt.Printf("none: %v", errors.Is(err, cuda.ErrNotSupported))
		if g.Writes().NoStores == "" {
			return errors.New("no reason is reported")
		}
		return nil
	}
	memory, err := device.Create(d, g.Ordinal, 2<<20, cuda.Access{Device: g.Ordinal, Write: true})
	if err != nil {
		return err
	}
	fd, err := memory.Export()
	if err != nil {
		return err
	}
	const begin, length = 5000, 20000 // pages 4096 to 28671
	if err := errors.Join(memory.MapStores(g, fd, begin, length), unix.Close(fd)); err != nil {
		return err
	}
	host, err := device.CreateHost("peerlane-test", memory.Bytes)
	if err == nil {
		err = errors.Join(host.Pin(g), g.Use())
	}
	if err != nil {
		return err
	}
	q, err := g.NewQueue()
	if err != nil {
		return err
	}
	for _, n := range []int{1, 2, 7, 8, 9, 16, 100, 4095, 4096, 4097} {
		from := make([]byte, n)
		for i := range from {
			from[i] = byte(i*7 + n)
		}
		for _, at := range []uint64{begin, begin + 3, 8192} {
			stored, err := g.Store(memory.At(at), from)
			if err != nil {
				return err
			}
			if !stored {
				fmt.Print("not ", n, " ")
				break
			}
			q.Move(host.At(0), memory.At(0), 64<<10, func(e error) { err = e })
			for q.Busy() {
				q.Poll()
			}
			if err != nil {
				return err
			}
			if !bytes.Equal(host.HostBytes()[at:at+uint64(n)], from) {
				return fmt.Errorf("%d bytes stored at %d are wrong", n, at)
			}
		}
	}
	for _, at := range []uint64{0, 4095, 28671, 28672, 1 << 20} {
		if stored, err := g.Store(memory.At(at), make([]byte, 8)); stored || err != nil {
			return fmt.Errorf("8 bytes at %d, which are not mapped: %v %v", at, stored, err)
		}
	}
	if stored, err := g.Store(memory.At(begin).Plus(length-8), make([]byte, 8)); !stored || err != nil {
		return fmt.Errorf("the last 8 bytes: %v %v", stored, err)
	}
	return errors.Join(q.Close(), memory.Close(), host.Close(), g.Close())
}

// storeLimits maps memory until the share of BAR1 is in use.
func storeLimits() error {
	d, g, err := openFirst()
	if err != nil {
		return err
	}
	if err := g.OpenStores(false); err != nil {
		return err
	}
	var memories []*device.Memory
	for len(memories) < 10 {
		m, err := device.Create(d, g.Ordinal, 4<<20, cuda.Access{Device: g.Ordinal, Write: true})
		if err != nil {
			return err
		}
		fd, err := m.Export()
		if err != nil {
			return err
		}
		mapped := m.MapStores(g, fd, 0, m.Bytes)
		memories = append(memories, m)
		if err := unix.Close(fd); err != nil {
			return err
		}
		if mapped != nil {
			fmt.Print(len(memories)-1, " ")
			break
		}
	}
	if err := memories[0].Close(); err != nil {
		return err
	}
	last := memories[len(memories)-1]
	fd, err := last.Export()
	if err != nil {
		return err
	}
	fmt.Print(last.MapStores(g, fd, 0, last.Bytes))
	return unix.Close(fd)
}

func TestStoresArriveInMappedMemoryOnly(t *testing.T) {
	for _, c := range []struct{ name, variable, want string }{
		{"beside a kernel", "PEERLANE_SIM_BUSY=refuse", "not 4097 "},
		{"GPU whose writes need a read", "PEERLANE_SIM_WRITES_ORDERING=0", "not 4097 "},
		{"switched off", "PEERLANE_STORES=0", "none: false"},
		{"driver without an aperture", "PEERLANE_SIM_APERTURE=refuse", "none: true"},
	} {
		if out, err := runAlone(t, "stores", c.variable); err != nil || out != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.name, err, out, c.want)
		}
	}
}

// The simulated BAR1 has 1 GiB, of which a relay maps 16 MiB at most.
func TestStoresMapAShareOfBAR1(t *testing.T) {
	if out, err := runAlone(t, "store limits"); err != nil || out != "4 <nil>" {
		t.Errorf("%v: %q", err, out)
	}
}
