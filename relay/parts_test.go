package relay_test

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// allocateParts makes a range of adjacent allocations of so many granules, as PyTorch's expandable
// segments.
func allocateParts(t *testing.T, i int, granules ...uint64) (*memory, []client.Part) {
	t.Helper()
	const granule = 2 << 20
	m := &memory{t: t, gpu: i, fd: -1}
	for _, n := range granules {
		m.bytes += n * granule
	}
	var parts []client.Part
	onGPU(t, i, func(device cuda.Device) error {
		var err error
		if m.ptr, err = driver.MemAddressReserve(m.bytes, 0); err != nil {
			return err
		}
		var at uint64
		for _, n := range granules {
			handle, err := driver.MemCreate(device, n*granule, cuda.MemOptions{Exportable: true})
			if err != nil {
				return err
			}
			fd, err := driver.MemExportFD(handle)
			if err := errors.Join(err, driver.MemMap(m.ptr+cuda.Ptr(at), n*granule, 0, handle),
				driver.MemRelease(handle)); err != nil {
				return err
			}
			t.Cleanup(func() { unix.Close(fd) })
			(&memory{t: t, ptr: m.ptr + cuda.Ptr(at), bytes: n * granule}).goesWithTest()
			parts = append(parts, client.Part{FD: fd, Bytes: n * granule, Offset: at})
			at += n * granule
		}
		return driver.MemSetAccess(m.ptr, m.bytes, cuda.Access{Device: device, Write: true})
	})
	return m, parts
}

// Messages across the boundary of allocations, on every route.
func TestRangeOfSeveralAllocationsTransfers(t *testing.T) {
	needGPUs(t, 2)
	second, server := far2()
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.nic("nic1")
			socket, ra := h.start("a", route, -1, far(0, 1, "nic0"))
			a := attach(t, socket)
			socket, rb := h.start("b", route, -1, far(second, server, "nic1"))
			b := attach(t, socket)
			source, from := allocateParts(t, 0, 1, 2, 1, 3)
			target, to := allocateParts(t, second, 2, 1, 4)
			var err error
			if source.Memory, err = a.Export(within(t), client.Allocation{Parts: from, GPU: uuid(t, 0)}); err != nil {
				t.Fatal(err)
			}
			// A part of the range, which begins within the first allocation and ends
			// within the last.
			const skip = 1<<20 + 3
			if target.Memory, err = b.Export(within(t), client.Allocation{Parts: to, Offset: skip, Length: 12 << 20,
				GPU: uuid(t, second)}); err != nil {
				t.Fatal(err)
			}
			if n := ra.Report().Used.Descriptors; n != 6+4 {
				t.Errorf("%d files are counted", n)
			}
			sending, receiving, _ := join(t, a, 0, b, second)
			for _, m := range []struct{ from, to, n uint64 }{{2<<20 - 4, 0, 8}, {0, 0, 12 << 20}, {1<<20 + 5, 3, 11<<20 + 1},
				{6<<20 - 1, 3<<20 - 7, 2}} {
				want := random(t, m.n)
				source.write(m.from, want)
				receive, err := receiving.Receive(target.Memory, m.to, m.n)
				if err != nil {
					t.Fatal(err)
				}
				send, err := sending.Send(source.Memory, m.from, m.n)
				for _, op := range []*client.Operation{send, receive} {
					if moved, err := wait(t, op, err); err != nil || moved != m.n {
						t.Fatalf("%d bytes of %d, %v", moved, m.n, err)
					}
				}
				if !bytes.Equal(target.read(skip+m.to, m.n), want) {
					t.Fatalf("%d bytes arrived wrong", m.n)
				}
			}
			op, err := receiving.Receive(target.Memory, 0, 12<<20+1)
			_, err = wait(t, op, err)
			demand(t, err, wire.StatusOutOfRange)
			if err := errors.Join(source.Unexport(within(t)), target.Unexport(within(t)), sending.Close(within(t)), a.Close(),
				b.Close()); err != nil {
				t.Fatal(err)
			}
			for end := testutil.Begin(); ra.Report().Used != (launch.Limits{}) ||
				rb.Report().Used != (launch.Limits{}); time.Sleep(10 * time.Millisecond) {
				if end.Over() {
					t.Fatalf("in use are %+v and %+v", ra.Report().Used, rb.Report().Used)
				}
			}
		})
	}
}

func TestInvalidRangesOfAllocationsAreRefused(t *testing.T) {
	h := newHost(t)
	h.change = func(c *launch.Config) { c.Limits.Descriptors = 20 }
	socket, r := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	a := attach(t, socket)
	_, good := allocateParts(t, 0, 1, 2, 1)
	_, theirs := allocateParts(t, 2, 1, 1)
	unsealed, err := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(unsealed)
	const g = 2 << 20
	part := func(from []client.Part, i int, offset, bytes uint64) client.Part {
		return client.Part{FD: from[i].FD, Bytes: bytes, Offset: offset}
	}
	many := make([]client.Part, 30)
	for i := range many {
		many[i] = part(good, 0, uint64(i)*g, g)
	}
	for _, c := range []struct {
		name   string
		parts  []client.Part
		status wire.Status
		object string
	}{
		{"that overlap", []client.Part{part(good, 0, 0, g), part(good, 1, g-4096, 2*g)}, wire.StatusOutOfRange,
			"allocation 2 of 2"},
		{"in another order", []client.Part{part(good, 1, g, 2*g), part(good, 0, 0, g)}, wire.StatusOutOfRange,
			"allocation 1 of 2"},
		{"with a hole", []client.Part{part(good, 0, 0, g), part(good, 1, 2*g, 2*g)}, wire.StatusOutOfRange,
			"allocation 2 of 2"},
		{"of no bytes", []client.Part{part(good, 0, 0, g), part(good, 1, g, 0)}, wire.StatusOutOfRange, "allocation 2 of 2"},
		{"beyond 2^64", []client.Part{part(good, 0, 0, 1<<63), part(good, 1, 1<<63, 1<<63)}, wire.StatusOutOfRange, ""},
		{"not of whole granules", []client.Part{part(good, 0, 0, g/2), part(good, 1, g/2, 2*g)}, wire.StatusOutOfRange,
			"allocation 1 of 2"},
		{"larger than they are", []client.Part{part(good, 0, 0, g), part(good, 2, g, 2*g)}, wire.StatusBadDescriptor,
			"cuMemMap"},
		{"of several GPUs", []client.Part{part(good, 0, 0, g), part(theirs, 0, g, g)}, wire.StatusWrongGPU, ""},
		{"of another GPU", []client.Part{part(theirs, 0, 0, g), part(theirs, 1, g, g)}, wire.StatusWrongGPU, devices[2].UUID},
		{"that are none", []client.Part{part(good, 0, 0, g), {FD: unsealed, Bytes: g, Offset: g}}, wire.StatusBadDescriptor,
			""},
		{"too many files", many, wire.StatusLimit, "relay.limits.descriptors"},
		{"too many", make([]client.Part, wire.MaxParts+1), wire.StatusLimit, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := a.Export(within(t), client.Allocation{Parts: c.parts, GPU: uuid(t, 0)})
			demandOf(t, err, c.status, c.object)
			for end := testutil.Begin(); r.Report().Used != (launch.Limits{Clients: 1,
				Descriptors: 6}); time.Sleep(10 * time.Millisecond) {
				if end.Over() {
					t.Fatalf("in use are %+v", r.Report().Used)
				}
			}
			m, err := a.Export(within(t), client.Allocation{Parts: good, GPU: uuid(t, 0)})
			if err != nil {
				t.Fatalf("after it a good one fails: %v", err)
			}
			if err := m.Unexport(within(t)); err != nil {
				t.Fatal(err)
			}
		})
	}
	// A descriptor that is none: the next range is not given the first's.
	_, err = a.Export(within(t), client.Allocation{Parts: []client.Part{good[0], {FD: 1 << 20, Bytes: g, Offset: g}},
		GPU: uuid(t, 0)})
	if err == nil || !errors.Is(err, unix.EBADF) {
		t.Errorf("a closed descriptor: %v", err)
	}
	if _, err := a.Export(within(t), client.Allocation{Parts: good, GPU: uuid(t, 0)}); err != nil {
		t.Error(err)
	}
}

// Invalid allocations of a client, and allocations without an export.
func TestInvalidAllocationsOfHostileClientAreRefused(t *testing.T) {
	v := newVictim(t, func(c *launch.Config) { c.Limits.Descriptors = 4000 })
	_, parts := allocateParts(t, 0, 1, 1)
	const g = 2 << 20
	export := func(n uint32, bytes uint64) *wire.Export {
		return &wire.Export{Bytes: bytes, Length: bytes, GPU: uuid(t, 0), Access: wire.AccessSend, Parts: n}
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	const malformed = wire.StatusMalformed
	for _, c := range []struct {
		name   string
		parts  int
		fds    []int
		export *wire.Export
		own    []int
		status wire.Status
		words  string
	}{
		{"fewer than announced", 2, []int{parts[0].FD}, export(3, 2*g), nil, malformed, "3 allocations, of which 2 came"},
		{"more than announced", 2, []int{parts[0].FD}, export(1, g), nil, malformed, "1 allocations, of which 2 came"},
		{"none", 0, nil, export(2, 2*g), nil, malformed, "of which 0 came"},
		{"a descriptor of its own", 2, []int{parts[0].FD}, export(2, 2*g), []int{parts[0].FD}, malformed,
			"1 descriptors of its own"},
		{"without descriptors", 2, nil, export(2, 2*g), nil, malformed, "an allocation with 0 descriptors"},
		{"two descriptors each", 2, []int{parts[0].FD, parts[1].FD}, export(2, 2*g), nil, malformed,
			"an allocation with 2 descriptors"},
		{"of another device", 2, []int{int(null.Fd())}, export(2, 2*g), nil, wire.StatusBadDescriptor, "sealed memfd"},
		{"too many", wire.MaxParts + 100, []int{parts[0].FD}, export(wire.MaxParts+100, (wire.MaxParts+100)*g), nil,
			wire.StatusLimit, "more than 2048 allocations"},
		{"a sum that is not theirs", 2, []int{parts[0].FD}, export(2, 3*g), nil, wire.StatusOutOfRange,
			"2 allocations have 4194304 bytes together, in a range of 6291456"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := v.session()
			defer s.Close()
			for i := range c.parts {
				if err := s.Send(&wire.ExportPart{Bytes: g, Offset: uint64(i) * g}, 0, c.fds...); err != nil {
					t.Fatal(err)
				}
			}
			_, _, err := s.Exchange(c.export, time.Minute, c.own...)
			demand(t, err, c.status)
			demandText(t, err, c.words)
			// The session goes on.
			for i, p := range parts {
				if err := s.Send(&wire.ExportPart{Bytes: g, Offset: uint64(i) * g}, 0, p.FD); err != nil {
					t.Fatal(err)
				}
			}
			if _, _, err := s.Exchange(export(2, 2*g), time.Minute); err != nil {
				t.Error(err)
			}
		})
	}
	for range 4 { // each with as many as there may be, when the last has gone
		v.closes()
		s := v.session()
		for i := range wire.MaxParts - 1 {
			if err := s.Send(&wire.ExportPart{Bytes: g, Offset: uint64(i) * g}, 0, parts[0].FD); err != nil {
				t.Fatal(err)
			}
		}
		if now := v.takes(); now.files > v.before.files+wire.MaxParts+4*moreFiles {
			t.Errorf("the relay has %d files open", now.files)
		}
		v.goesOn()
		s.Close()
	}
	v.recovered()
}

// Invalid allocations of a receiver's relay.
func TestInvalidAllocationsOfReceivingRelayEndConnection(t *testing.T) {
	const g = 2 << 20
	_, parts := allocateParts(t, 3, 1, 1)
	for _, c := range []struct {
		name   string
		parts  int
		part   wire.PeerRegionPart
		region wire.PeerRegion
		status wire.Status
	}{
		{"a larger sum", 2, wire.PeerRegionPart{Region: 9, Bytes: g}, wire.PeerRegion{Region: 9, Kind: wire.MemoryParts,
			Bytes: 3 * g}, wire.StatusMalformed},
		{"a smaller sum", 2, wire.PeerRegionPart{Region: 9, Bytes: g}, wire.PeerRegion{Region: 9, Kind: wire.MemoryParts,
			Bytes: g}, wire.StatusMalformed},
		{"a sum beyond 2^64", 2, wire.PeerRegionPart{Region: 9, Bytes: 1 << 63},
			wire.PeerRegion{Region: 9, Kind: wire.MemoryParts}, wire.StatusMalformed},
		{"of another region", 2, wire.PeerRegionPart{Region: 8, Bytes: g},
			wire.PeerRegion{Region: 9, Kind: wire.MemoryParts, Bytes: 2 * g}, wire.StatusMalformed},
		{"none", 0, wire.PeerRegionPart{}, wire.PeerRegion{Region: 9, Kind: wire.MemoryParts}, wire.StatusMalformed},
		{"larger than they are", 2, wire.PeerRegionPart{Region: 9, Bytes: 2 * g},
			wire.PeerRegion{Region: 9, Kind: wire.MemoryParts, Bytes: 4 * g}, wire.StatusCUDA},
		{"too many", wire.MaxParts + 1, wire.PeerRegionPart{Region: 9, Bytes: g}, wire.PeerRegion{}, wire.StatusLimit},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := meet(t, wire.RouteDirect)
			if err != nil {
				t.Fatal(err)
			}
			source := exported(t, s.a, 0, g)
			op, err := s.sending.Send(source.Memory, 0, 4096)
			if err != nil {
				t.Fatal(err)
			}
			hear[*wire.PeerSend](s)
			for range c.parts {
				if err := s.Send(&c.part, 0, parts[0].FD); err != nil && c.parts < 3 {
					t.Fatal(err)
				}
			}
			if c.region.Kind == wire.MemoryParts {
				s.say(&c.region)
			}
			_, err = wait(t, op, nil)
			demand(t, err, c.status)
			attach(t, s.socket)
		})
	}
	t.Run("that never become a region", func(t *testing.T) {
		s, err := meet(t, wire.RouteDirect)
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			s.say(&wire.PeerRegionPart{Region: 9, Bytes: g}, parts[0].FD)
		}
		counted := func() int { return s.relay.Report().Used.Descriptors }
		for end := testutil.Begin(); counted() < 100; time.Sleep(10 * time.Millisecond) {
			if end.Over() {
				t.Fatalf("%d files are counted", counted())
			}
		}
		s.Close()
		for end := testutil.Begin(); counted() > 9; time.Sleep(10 * time.Millisecond) {
			if end.Over() {
				t.Fatalf("%d files are still counted", counted())
			}
		}
	})
}
