package relay_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/wire"
)

// direct is a lane of a GPU near the NICs.
func direct(l launch.Lane) launch.Lane {
	return launch.Lane{GPU: l.GPU, Role: "near", Direct: true, Servers: []launch.GPU{}, NICs: l.NICs}
}

// dmabuf makes a DMA-BUF of the memory, for which the driver needs a current context.
func (m *memory) dmabuf() (fd int, err error) {
	onGPU(m.t, m.gpu, func(cuda.Device) error {
		fd, err = driver.MemDMABufFD(m.ptr, m.bytes)
		return nil
	})
	return fd, err
}

// lend exports [offset, offset+n) of memory with a DMA-BUF: the relay's first operation on the
// memory then finds the DMA-BUF. The DMA-BUF message has no answer, and the relay may read the ring
// first; a later request does not overtake the message.
func (m *memory) lend(s *client.Session, offset, n uint64) {
	m.t.Helper()
	var err error
	m.Memory, err = s.Export(within(m.t), client.Allocation{FD: m.fd, Bytes: m.bytes, Offset: offset, Length: n,
		GPU:    uuid(m.t, m.gpu),
		DMABuf: m.dmabuf})
	if err != nil {
		m.t.Fatal(err)
	}
	if _, err := s.Statistics(within(m.t)); err != nil {
		m.t.Fatal(err)
	}
}

// inPlace is how many bytes of a relay's only connection went in place.
func inPlace(t *testing.T, r interface{ Report() *launch.Report }) (uint64, launch.ConnectionFigures) {
	t.Helper()
	c := r.Report().Connections
	if len(c) != 1 {
		t.Fatalf("inspect shows %+v", c)
	}
	return c[0].InPlace, c[0]
}

// moveBetween moves n bytes between the exported ranges of two memories, from their first bytes on,
// and checks the bytes around the ranges.
func (p *pair) moveBetween(t *testing.T, from, to *memory, fromAt, toAt, n uint64) {
	t.Helper()
	want, around := random(t, n), random(t, to.bytes)
	from.write(fromAt, want)
	to.write(0, around)
	receive, err := p.receiving.Receive(to.Memory, 0, n)
	if err != nil {
		t.Fatal(err)
	}
	send, err := p.sending.Send(from.Memory, 0, n)
	for _, op := range []*client.Operation{send, receive} {
		if moved, err := wait(t, op, err); err != nil || moved != n {
			t.Fatalf("%d of %d bytes: %v", moved, n, err)
		}
	}
	copy(around[toAt:], want)
	if !bytes.Equal(to.read(0, to.bytes), around) {
		t.Fatalf("%d bytes arrived wrong, or elsewhere too", n)
	}
}

// NICs read and write exported memory of a near GPU in place, at every capable side, in every size
// and place, and flush received bytes. After any refusal of a NIC, or without a DMA-BUF, the memory
// bounces, and both sides report the method.
func TestNearGPUMemoryTransfersInPlace(t *testing.T) {
	const lentBytes = 1<<20 + 77 // no slots'
	type side struct {
		near  bool
		place bool   // its memory is in place
		says  string // inspect
	}
	place, slots := side{true, true, "dmabuf: the client's own memory, in place"},
		side{false, false, "dmabuf: slots on server GPUs"}
	bounce := func(why string) side {
		return side{true, false, "bounce: host memory, registered by ibv_reg_mr, without GPUDirect RDMA: the client's " +
			"own memory is not reached in place: " + why}
	}
	type refusal struct {
		name      string
		a, b      side
		script    []string
		kind      func([]softdevice.Device) []softdevice.Device
		ask       func(a *client.Allocation)
		unflushed bool // rocep1 has no queue pair for it
	}
	cases := []refusal{
		{name: "both near", a: place, b: place},
		{name: "a near one sends", a: place, b: slots},
		{name: "a near one receives", a: slots, b: place},
		{name: "no DMA-BUF", a: bounce("the client has no DMA-BUF of the memory: the program gave none"),
			b:   bounce("the client has no DMA-BUF of the memory: the program gave none"),
			ask: func(a *client.Allocation) { a.DMABuf = nil }},
		{name: "a DMA-BUF that CUDA does not make", a: bounce("the client has no DMA-BUF of the memory: not supported"),
			b:   bounce("the client has no DMA-BUF of the memory: not supported"),
			ask: func(a *client.Allocation) { a.DMABuf = func() (int, error) { return -1, errors.New("not supported") } }},
		{name: "a descriptor that is none", a: bounce("import the exported descriptor: it is not simulated GPU memory"),
			b: bounce("import the exported descriptor: it is not simulated GPU memory"),
			ask: func(a *client.Allocation) {
				a.DMABuf = func() (int, error) { return unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0) }
			}},
		{name: "what arrives cannot be flushed", a: place,
			b:      bounce("writes of rocep1 into memory of a GPU cannot be flushed"),
			script: []string{"ibv_create_qp errno=12 device=rocep1 call=1 each=1"}, unflushed: true},
		{name: "iWARP", a: place, b: bounce("writes of rocep1 into memory of a GPU cannot be flushed"), kind: iwarp,
			unflushed: true},
	}
	for _, errno := range []syscall.Errno{unix.EINVAL, unix.EOPNOTSUPP} {
		cases = append(cases, refusal{name: unix.ErrnoName(errno), a: bounce("ibv_reg_dmabuf_mr (mlx5_0"), b: place,
			script: []string{fmt.Sprintf("ibv_reg_dmabuf_mr errno=%d device=mlx5_0", int(errno))}})
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := &byRDMA{}
			p.lane = func(l launch.Lane) launch.Lane {
				if s := map[string]side{ofA[0].Name: c.a, ofB[0].Name: c.b}[l.NICs[0]]; s.near {
					return direct(l)
				}
				return l
			}
			if c.kind != nil {
				p.devices = append(c.kind(ofA), c.kind(ofB)...)
			}
			p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 2)
			if err := p.rdma.Script(c.script...); err != nil {
				t.Fatal(err)
			}
			p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
			from, to := allocate(t, 0, 2<<20), allocate(t, 3, 2<<20)
			const fromAt, toAt = 12345, 4099
			for _, m := range []struct {
				*memory
				s  *client.Session
				at uint64
			}{{from, p.a, fromAt}, {to, p.b, toAt}} {
				a := client.Allocation{FD: m.fd, Bytes: m.bytes, Offset: m.at, Length: lentBytes, GPU: uuid(t, m.gpu),
					DMABuf: m.dmabuf}
				if c.ask != nil {
					c.ask(&a)
				}
				var err error
				if m.memory.Memory, err = m.s.Export(within(t), a); err != nil {
					t.Fatal(err)
				}
			}
			says := func() bool { // what the NICs know by then, which they are told beside the loop
				t.Helper()
				p.moveBetween(t, from, to, fromAt, toAt, 64<<10)
				_, a := inPlace(t, p.relayA)
				_, b := inPlace(t, p.relayB)
				return strings.HasPrefix(a.Registration, c.a.says) && strings.HasPrefix(b.Registration, c.b.says)
			}
			for end := testutil.Begin(); !says(); {
				if end.Over() {
					_, a := inPlace(t, p.relayA)
					_, b := inPlace(t, p.relayB)
					t.Fatalf("inspect shows %+v and %+v", a, b)
				}
			}
			beforeA, _ := inPlace(t, p.relayA)
			beforeB, _ := inPlace(t, p.relayB)
			moved := uint64(0)
			for _, n := range []uint64{1, 4097, lentBytes} {
				if p.moveBetween(t, from, to, fromAt, toAt, n); n > 4096 { // short ones go over TCP
					moved += n
				}
			}
			afterA, a := inPlace(t, p.relayA)
			afterB, b := inPlace(t, p.relayB)
			for _, s := range []struct {
				side
				is    launch.ConnectionFigures
				moved uint64
			}{{c.a, a, afterA - beforeA}, {c.b, b, afterB - beforeB}} {
				want := uint64(0)
				if s.place {
					want = moved
				}
				if s.moved != want || s.is.GDR != (s.place || !s.near) ||
					strings.Contains(s.is.Path, "host memory") != (s.near && !s.place) {
					t.Errorf("%d bytes went in place, of %d; inspect shows %+v", s.moved, moved, s.is)
				}
			}
			if !c.unflushed {
				flushed(t, p.rdma, "rocep1", c.b.place || !c.b.near)
			}
			// The NICs deregister the memory before it is freed (allGivenBack).
			for _, m := range []*memory{from, to} {
				if err := m.Unexport(within(t)); err != nil {
					t.Fatal(err)
				}
			}
			for nic, want := range map[string]bool{"mlx5_0": c.a.place, "rocep1": c.b.place} {
				if made, left := lentRegions(t, p.rdma, nic, lentBytes); made > 0 != want || left > 0 {
					t.Errorf("%s was told %d times of lent memory, and %d are left", nic, made, left)
				}
			}
		})
	}
}

// lentRegions returns the numbers of past and present registrations of memory of a size in place.
func lentRegions(t *testing.T, rdma softdevice.Host, nic string, bytes uint64) (made, left int) {
	t.Helper()
	calls, err := rdma.Calls("ibv_reg_dmabuf_mr", "ibv_dereg_mr")
	if err != nil {
		t.Fatal(err)
	}
	keys := map[string]bool{}
	for _, c := range calls {
		switch key := c.Arguments["device"] + c.Arguments["lkey"]; {
		case c.Arguments["device"] != nic || c.Arguments["="] != "0":
		case c.Name == "ibv_dereg_mr":
			delete(keys, key)
		case c.Arguments["length"] == fmt.Sprint(bytes):
			keys[key] = true
			made++
		}
	}
	return made, len(keys)
}

// nearByRDMA is two near GPUs whose whole memory is lent and in place.
func nearByRDMA(t *testing.T) *byRDMA {
	t.Helper()
	return nearWithReconnectLimit(t, 0)
}

// nearWithReconnectLimit sets the time limit of reconnects, 0 for the default.
func nearWithReconnectLimit(t *testing.T, limit time.Duration) *byRDMA {
	t.Helper()
	return (&byRDMA{lane: direct, reconnectLimit: limit}).lendAll(t)
}

func (p *byRDMA) lendAll(t *testing.T) *byRDMA {
	t.Helper()
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 2)
	return p.lendBegun(t)
}

// lendBegun is lendAll of hosts that are there.
func (p *byRDMA) lendBegun(t *testing.T) *byRDMA {
	t.Helper()
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.source.lend(p.a, 0, pairBytes)
	p.target.lend(p.b, 0, pairBytes)
	for end := testutil.Begin(); ; {
		a, _ := inPlace(t, p.relayA)
		b, _ := inPlace(t, p.relayB)
		if a > 0 && b > 0 {
			return p
		}
		p.arrive(t, 1<<20)
		if end.Over() {
			t.Fatal("nothing goes in place")
		}
	}
}

// A NIC reads memory of cudaMalloc in place: a DMA-BUF is of any range that a client owns.
func TestCudaMallocMemoryTransfersInPlace(t *testing.T) {
	p := &byRDMA{lane: direct, change: func(c *launch.Config) { c.CUDAIPC = true }}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	listener, err := p.b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	handle := listener.Handle()
	dying{socket: p.socketA, gpu: 0, handle: hex.EncodeToString(handle[:]), ipc: true}.start(t)
	c, err := listener.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	for end := testutil.Begin(); ; {
		p.target.write(0, random(t, lenderBytes))
		op, err := c.Receive(p.target.Memory, 0, lenderBytes)
		if _, err := wait(t, op, err); err != nil {
			t.Fatal(err)
		}
		if got := p.target.read(0, lenderBytes); !bytes.Equal(got, bytes.Repeat([]byte{lenderByte}, lenderBytes)) {
			t.Fatal("wrong bytes")
		}
		n, is := inPlace(t, p.relayA)
		if n > 0 {
			break
		}
		if end.Over() {
			t.Fatalf("nothing goes in place; inspect shows %+v", is)
		}
	}
	if made, _ := lentRegions(t, p.rdma, "mlx5_0", lenderBytes); made != 1 {
		t.Errorf("the memory is registered %d times", made)
	}
}

// TestOwnerOrderingNeedsNoFlush demands that a near GPU that orders NICs' writes for itself receives in
// place without a flush, also by a NIC of iWARP, which cannot flush.
func TestOwnerOrderingNeedsNoFlush(t *testing.T) {
	t.Setenv("PEERLANE_SIM_WRITES_ORDERING", "100")
	for name, kind := range map[string]func([]softdevice.Device) []softdevice.Device{
		"RoCE": slices.Clone[[]softdevice.Device], "iWARP": iwarp,
	} {
		t.Run(name, func(t *testing.T) {
			p := &byRDMA{lane: direct, devices: kind(slices.Concat(ofA, ofB))}
			for i := range p.devices {
				p.devices[i].Holds = false
			}
			p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 2)
			p.lendBegun(t)
			if name == "RoCE" {
				flushed(t, p.rdma, "rocep1", false)
			}
		})
	}
}

// Bytes from a NIC of a further lane are not received in place: the path from there to the GPU is
// as long as a far GPU's, and untested.
func TestInPlaceMemoryBesideOtherLanesNICBounces(t *testing.T) {
	p := &byRDMA{lane: func(l launch.Lane) launch.Lane {
		if l.NICs[0] == "rocep1" {
			l.NICs = []string{"rocep2"}
		}
		return direct(l)
	}, more: []launch.Lane{direct(far(2, 1, "rocep1"))}}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	p.source.lend(p.a, 0, pairBytes)
	p.target.lend(p.b, 0, pairBytes)
	for end := testutil.Begin(); ; { // until the sender's is in place, which has one NIC
		p.arrive(t, 1<<20)
		if n, _ := inPlace(t, p.relayA); n > 0 {
			break
		}
		if end.Over() {
			t.Fatal("nothing goes in place")
		}
	}
	n, is := inPlace(t, p.relayB)
	if n > 0 || is.GDR || !strings.Contains(is.Registration, "the NIC of the connection is not near the GPU") {
		t.Errorf("%d bytes came in place; inspect shows %+v", n, is)
	}
	if made, _ := lentRegions(t, p.rdma, "rocep1", pairBytes); made > 0 {
		t.Error("that NIC was told of the memory")
	}
}

// Reads and writes of regions are in place, too, and a revoke waits for them.
func TestOneSidedOperationsInPlaceDelayRevoke(t *testing.T) {
	p := nearByRDMA(t)
	before, _ := inPlace(t, p.relayA)
	p.readsAndWrites(t)
	if after, _ := inPlace(t, p.relayA); after == before {
		t.Error("no write went in place")
	}
	o := p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth)
	p.takenBackUnderTraffic(t, o, func() error { return o.Revoke(within(t)) })
	p.target.lend(p.b, 0, pairBytes)
	o = p.offer(t, p.target.Memory, 0, pairBytes, remoteBoth)
	p.takenBackUnderTraffic(t, o, func() error { return p.target.Unexport(within(t)) })
}

// A message that waits for a receive uses memory that the client unexports meanwhile: the NICs
// deregister the memory after the message, not before.
func TestInPlaceMemoryUnexportedInFlightStaysRegistered(t *testing.T) {
	p := nearByRDMA(t)
	want := random(t, 1<<20)
	p.source.write(0, want)
	send, err := p.sending.Send(p.source.Memory, 0, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.source.Unexport(within(t)); err != nil { // which says that no other's is under way
		t.Fatal(err)
	}
	if _, left := lentRegions(t, p.rdma, "mlx5_0", pairBytes); left == 0 {
		t.Error("the NIC has forgotten what is still to be sent")
	}
	receive, err := p.receiving.Receive(p.target.Memory, 0, 1<<20)
	for _, op := range []*client.Operation{send, receive} {
		if _, err := wait(t, op, err); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(p.target.read(0, 1<<20), want) {
		t.Error("wrong bytes")
	}
	testutil.Until(t, "the registrations of lent memory", func() bool {
		_, left := lentRegions(t, p.rdma, "mlx5_0", pairBytes)
		return left == 0
	})
}

// A NIC fails during a message between two memories, with or without an unexport meanwhile: new
// queue pairs, with both memories registered, replace the failed pairs, and the message arrives.
// Freed memory is deregistered then, and remaining memory is in place at once.
func TestInPlaceMemoryUnderFailedNICMovesToOthers(t *testing.T) {
	for _, c := range []struct {
		name, fails string
		unexport    bool
	}{
		{"the sender's", "mlx5_0", false},
		{"the receiver's, that flushes", "rocep1", false},
		{"given back under it", "mlx5_0", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := nearWithReconnectLimit(t, time.Minute)
			const n = 1 << 20
			want := random(t, n)
			p.source.write(0, want)
			p.target.write(0, make([]byte, n))
			if err := p.rdma.Script("send status=12 device=" + c.fails); err != nil {
				t.Fatal(err)
			}
			receive, err := p.receiving.Receive(p.target.Memory, 0, n)
			if err != nil {
				t.Fatal(err)
			}
			send, err := p.sending.Send(p.source.Memory, 0, n)
			if err != nil {
				t.Fatal(err)
			}
			if c.unexport {
				if err := errors.Join(p.source.Unexport(within(t)), p.target.Unexport(within(t))); err != nil {
					t.Fatal(err)
				}
			}
			testutil.Until(t, "a send that fails", func() bool {
				failed, err := p.rdma.Calls("send")
				return err == nil && len(failed) > 0
			})
			if err := p.rdma.Script(); err != nil {
				t.Fatal(err)
			}
			for _, op := range []*client.Operation{send, receive} {
				if moved, err := op.Wait(within(t)); err != nil || moved != n {
					t.Fatalf("%d of %d bytes: %v", moved, n, err)
				}
			}
			if !bytes.Equal(p.target.read(0, n), want) {
				t.Error("wrong bytes")
			}
			if _, way := p.data(t); !strings.Contains(way, "reconnected ") {
				t.Errorf("inspect says %q", way)
			}
			if c.unexport {
				for _, nic := range []string{"mlx5_0", "rocep1"} {
					testutil.Until(t, "the registrations of lent memory", func() bool {
						_, left := lentRegions(t, p.rdma, nic, pairBytes)
						return left == 0
					})
				}
				return
			}
			beforeA, _ := inPlace(t, p.relayA)
			beforeB, _ := inPlace(t, p.relayB)
			p.arrive(t, n)
			afterA, a := inPlace(t, p.relayA)
			afterB, b := inPlace(t, p.relayB)
			if afterA-beforeA != n || afterB-beforeB != n || !a.GDR || !b.GDR {
				t.Errorf("%d and %d bytes of %d went in place; inspect shows %+v and %+v", afterA-beforeA, afterB-beforeB, n, a, b)
			}
		})
	}
}

// A client dies while a NIC reads or writes the client's memory: that stays registered, and the
// GPU's, until the write has ended, and no longer.
func TestOwnerDeathInPlaceKeepsMemoryUntilWriteEnds(t *testing.T) {
	for _, sends := range []bool{true, false} {
		t.Run(map[bool]string{true: "that sends", false: "that receives"}[sends], func(t *testing.T) {
			t.Parallel()
			p := &byRDMA{lane: direct}
			p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
			lender, other, nic := p.relayA, p.relayB, "mlx5_0"
			dies := dying{socket: p.socketA, gpu: 0}
			var listener *client.Listener
			var err error
			if sends {
				if listener, err = p.b.Listen(within(t), uuid(t, 3)); err != nil {
					t.Fatal(err)
				}
				handle := listener.Handle()
				dies.handle = hex.EncodeToString(handle[:])
			} else {
				lender, other, nic = p.relayB, p.relayA, "rocep1"
				dies.socket, dies.gpu = p.socketB, 3
			}
			used := lender.Report().Used
			cmd, said := dies.start(t)
			var c *client.Connection
			if sends {
				c, err = listener.Accept(within(t))
			} else {
				var handle wire.Handle
				raw, bad := hex.DecodeString(strings.TrimSpace(said))
				if copy(handle[:], raw); bad != nil {
					t.Fatal(bad)
				}
				c, err = p.a.Connect(within(t), uuid(t, 0), handle)
			}
			if err != nil {
				t.Fatal(err)
			}
			message := func() *client.Operation {
				t.Helper()
				var op *client.Operation
				if sends {
					op, err = c.Receive(p.target.Memory, 0, lenderBytes)
				} else {
					op, err = c.Send(p.source.Memory, 0, lenderBytes)
				}
				if err != nil {
					t.Fatal(err)
				}
				return op
			}
			for end := testutil.Begin(); ; {
				if _, err := wait(t, message(), nil); err != nil {
					t.Fatal(err)
				}
				if n, _ := inPlace(t, lender); n > 0 {
					break
				}
				if end.Over() {
					t.Fatal("nothing goes in place")
				}
			}
			if err := p.rdma.Script("send hold=1 device=mlx5_0"); err != nil {
				t.Fatal(err)
			}
			op := message()
			testutil.Until(t, "the calls that are held", func() bool {
				held, err := p.rdma.Calls("held")
				return err == nil && len(held) > 0
			})
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // it was killed
			select {
			case <-c.Down():
			case <-testutil.After(time.Minute):
				t.Fatal("the other side does not hear of the death")
			}
			demand(t, c.Err(), wire.StatusPeerClientDied)
			if _, left := lentRegions(t, p.rdma, nic, lenderBytes); left != 1 {
				t.Errorf("%s knows of %d pieces of lent memory while one write is under way", nic, left)
			}
			if err := p.rdma.Script(); err != nil {
				t.Fatal(err)
			}
			if _, err := op.Wait(within(t)); err != nil {
				demand(t, err, wire.StatusPeerClientDied)
			}
			testutil.Until(t, "the use of the relay's resources", func() bool { return lender.Report().Used == used })
			testutil.Until(t, "the end of the connections", func() bool { return other.Report().Used.Connections == 0 })
			if _, left := lentRegions(t, p.rdma, nic, lenderBytes); left != 0 {
				t.Errorf("%d pieces of its memory are left", left)
			}
			if failed, err := p.rdma.Calls("send"); err != nil || len(failed) > 0 {
				t.Errorf("%v, %v", failed, err)
			}
		})
	}
}

// lenderBytes is the size of the dying process's memory, and the length of its messages.
const lenderBytes = 1<<20 + 4096

// dying is a client with memory in place, in a separate process: the process sends to a handle, or
// listens and prints its handle.
type dying struct {
	socket, handle string
	gpu            int
	ipc            bool // its memory is of cudaMalloc
}

// start starts the process, and returns the first line.
func (p dying) start(t *testing.T) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PEERLANE_TEST_ROLE=lender", "GORACE=atexit_sleep_ms=0",
		"PEERLANE_TEST_SOCKET="+p.socket,
		"PEERLANE_TEST_GPU="+devices[p.gpu].UUID, "PEERLANE_TEST_BUS="+devices[p.gpu].BusID,
		"PEERLANE_TEST_HANDLE="+p.handle, fmt.Sprint("PEERLANE_TEST_IPC=", p.ipc))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, where all went well
	var line string
	if _, err := fmt.Fscanln(out, &line); err != nil {
		t.Fatal(err)
	}
	return cmd, line
}

// lenderByte is the content of exported cudaMalloc memory.
const lenderByte = 0x5a

// lendCudaMalloc sends memory of cudaMalloc again and again.
func lendCudaMalloc(ctx context.Context, d *cuda.Driver, id wire.UUID) error {
	gpu, err := device.Open(d, os.Getenv("PEERLANE_TEST_BUS"))
	if err != nil {
		return err
	}
	const all = 2 << 20
	var at cuda.Ptr
	var handle cuda.IPCMemHandle
	err = gpu.On(func() (err error) {
		if at, err = d.MemAlloc(all); err != nil {
			return err
		}
		if handle, err = d.IPCGetMemHandle(at); err != nil {
			return err
		}
		host, err := d.MemHostAlloc(all)
		if err != nil {
			return err
		}
		copy(unsafe.Slice((*byte)(host), all), bytes.Repeat([]byte{lenderByte}, all))
		return errors.Join(d.MemcpyHtoDAsync(at, host, all, 0), d.StreamSynchronize(0))
	})
	if err != nil {
		return err
	}
	s, err := client.Dial(ctx, os.Getenv("PEERLANE_TEST_SOCKET"), id)
	if err != nil {
		return err
	}
	m, err := s.ExportIPC(ctx, handle, client.Allocation{Length: lenderBytes, GPU: id, DMABuf: func() (fd int, err error) {
		err = gpu.On(func() error {
			fd, err = d.MemDMABufFD(at, all)
			return err
		})
		return fd, err
	}})
	if err != nil {
		return err
	}
	var to wire.Handle
	raw, err := hex.DecodeString(os.Getenv("PEERLANE_TEST_HANDLE"))
	if copy(to[:], raw); err != nil {
		return err
	}
	fmt.Println("sends")
	c, err := s.Connect(ctx, id, to)
	for err == nil {
		var op *client.Operation
		if op, err = c.Send(m, 0, lenderBytes); err == nil {
			_, err = op.Wait(ctx)
		}
	}
	return err
}

// playLender is that process.
func playLender() error {
	ctx, cancel := testutil.WithLimit(context.Background(), 5*time.Minute)
	defer cancel()
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	on, err := d.DeviceByPCIBusID(os.Getenv("PEERLANE_TEST_BUS"))
	if err != nil {
		return err
	}
	id, err := wire.ParseGPU(os.Getenv("PEERLANE_TEST_GPU"))
	if err != nil {
		return err
	}
	if os.Getenv("PEERLANE_TEST_IPC") == "true" {
		return lendCudaMalloc(ctx, d, id)
	}
	const all = 2 << 20
	handle, err := d.MemCreate(on, all, cuda.MemOptions{Exportable: true, RDMA: true})
	if err != nil {
		return err
	}
	at, err := d.MemAddressReserve(all, 0)
	if err == nil {
		err = d.MemMap(at, all, 0, handle)
	}
	if err != nil {
		return err
	}
	fd, err := d.MemExportFD(handle)
	if err != nil {
		return err
	}
	s, err := client.Dial(ctx, os.Getenv("PEERLANE_TEST_SOCKET"), id)
	if err != nil {
		return err
	}
	m, err := s.Export(ctx, client.Allocation{FD: fd, Bytes: all, Length: lenderBytes, GPU: id,
		DMABuf: func() (fd int, err error) {
			// The driver makes a DMA-BUF only with a current context.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			current, err := d.CtxCreate(on, cuda.CtxOptions{Lean: true})
			if err != nil {
				return -1, err
			}
			fd, err = d.MemDMABufFD(at, all)
			return fd, errors.Join(err, d.CtxDestroy(current))
		}})
	if err != nil {
		return err
	}
	var c *client.Connection
	if text := os.Getenv("PEERLANE_TEST_HANDLE"); text != "" {
		var to wire.Handle
		raw, err := hex.DecodeString(text)
		if copy(to[:], raw); err != nil {
			return err
		}
		fmt.Println("sends")
		if c, err = s.Connect(ctx, id, to); err != nil {
			return err
		}
	} else {
		l, err := s.Listen(ctx, id)
		if err != nil {
			return err
		}
		own := l.Handle()
		fmt.Println(hex.EncodeToString(own[:]))
		if c, err = l.Accept(ctx); err != nil {
			return err
		}
	}
	post := c.Receive
	if os.Getenv("PEERLANE_TEST_HANDLE") != "" {
		post = c.Send
	}
	for {
		op, err := post(m, 0, lenderBytes)
		if err != nil {
			return err
		}
		if _, err := op.Wait(ctx); err != nil {
			return err
		}
	}
}

// The relay closes an unrequested DMA-BUF, which uses no quota; a repeated DMA-BUF changes nothing.
func TestUnrequestedDMABufIsClosed(t *testing.T) {
	p := &byRDMA{}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1) // a far GPU's, of which nothing is wanted
	asked := false
	m := allocate(t, 0, 2<<20)
	var err error
	if m.Memory, err = p.a.Export(within(t), client.Allocation{FD: m.fd, Bytes: m.bytes, GPU: uuid(t, 0),
		DMABuf: func() (int, error) {
			asked = true
			return -1, errors.ErrUnsupported
		}}); err != nil || asked {
		t.Fatalf("%v; the relay wanted it: %v", err, asked)
	}
	near := newHost(t)
	near.onRDMA(cluster(), launch.TransportVerbs, 1, p.rdma)
	socket, r := near.start("near", launch.RouteAuto, -1, direct(far(0, 1, "mlx5_0")))
	for _, c := range []struct {
		name, socket string
		report       func() *launch.Report
		takes        int // descriptors
	}{{"far", p.socketA, p.relayA.Report, 0}, {"near", socket, r.Report, 1}} {
		before := openOf(t, m.fd)
		raw := attachRaw(t, c.socket)
		ask := func(m wire.Message, fds ...int) wire.Message {
			t.Helper()
			answer, _, err := raw.Exchange(m, time.Minute, fds...)
			if err != nil {
				t.Fatal(err)
			}
			return answer
		}
		exported, is := ask(&wire.Export{Bytes: m.bytes, Length: m.bytes, GPU: uuid(t, 0), Access: wire.AccessSend},
			m.fd).(*wire.Exported)
		if wants := is && exported.Wants == wire.WantsDMABuf; !is || wants != (c.takes == 1) {
			t.Fatalf("%s: the relay answers %+v", c.name, exported)
		}
		took, open := c.report().Used.Descriptors, openOf(t, m.fd)
		dmabuf, err := m.dmabuf()
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			for _, err := range []error{raw.Send(&wire.DMABuf{Memory: exported.Memory}, 0, dmabuf),
				raw.Send(&wire.DMABuf{Memory: exported.Memory}, 0, dmabuf), raw.Send(&wire.DMABuf{Memory: exported.Memory + 1}, 0,
					dmabuf), raw.Send(&wire.DMABuf{Memory: exported.Memory}, 0)} {
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		unix.Close(dmabuf)
		ask(&wire.Lanes{}) // all before it was heard
		if now := c.report().Used.Descriptors; now != took+c.takes {
			t.Errorf("%s: %d descriptors are kept beside %d", c.name, now-took, took)
		}
		if now := openOf(t, m.fd); now != open+c.takes {
			t.Errorf("%s: %d descriptors of it are open, %d before it was lent", c.name, now, open)
		}
		ask(&wire.Unexport{Memory: exported.Memory})
		if now := c.report().Used.Descriptors; now != took-1 {
			t.Errorf("%s: %d descriptors are kept of %d when the memory is gone", c.name, now, took)
		}
		if now := openOf(t, m.fd); now != before {
			t.Errorf("%s: %d descriptors of it are open when it is gone, %d before", c.name, now, before)
		}
	}
}

// An older library does not answer the export's request: the client's memory bounces, and inspect
// has the reason. An answer that comes late is as good as any.
func TestLibraryWithoutInPlaceSupportBounces(t *testing.T) {
	p := &byRDMA{lane: direct}
	p.begin(t, launch.TransportVerbs, launch.TransportVerbs, 1, 1)
	listener, err := p.b.Listen(within(t), uuid(t, 3))
	if err != nil {
		t.Fatal(err)
	}
	c := attachRaw(t, p.socketA)
	ask := func(m wire.Message, fds ...int) wire.Message {
		t.Helper()
		answer, _, err := c.Exchange(m, time.Minute, fds...)
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	const n = 1 << 20
	m := allocate(t, 0, 2<<20)
	memory := ask(&wire.Export{Bytes: m.bytes, Length: m.bytes, GPU: uuid(t, 0), Access: wire.AccessSend},
		m.fd).(*wire.Exported)
	connection := ask(&wire.Connect{GPU: uuid(t, 0), Handle: listener.Handle()}).(*wire.Connected)
	receiving, err := listener.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	move := func() {
		t.Helper()
		wake, err := c.Post(wire.Descriptor{Operation: wire.OpSend, Connection: connection.Connection,
			Memory: memory.Memory, Length: n,
			WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline})
		if err == nil && wake {
			_, err = unix.Write(c.wakeRelay, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		}
		if err != nil {
			t.Fatal(err)
		}
		receive, err := receiving.Receive(p.target.Memory, 0, n)
		if moved, err := wait(t, receive, err); err != nil || moved != n {
			t.Fatalf("%d of %d bytes: %v", moved, n, err)
		}
		testutil.Until(t, "a completion", func() bool { _, ended := c.Next(); return ended })
	}
	move()
	const says = "bounce: host memory, registered by ibv_reg_mr, without GPUDirect RDMA: the client's own memory is " +
		"not reached in place: the client has not sent a DMA-BUF"
	if went, is := inPlace(t, p.relayA); went > 0 || !strings.HasPrefix(is.Registration, says) ||
		!strings.Contains(is.Path, "host memory") {
		t.Errorf("%d bytes went in place; inspect shows %+v", went, is)
	}
	dmabuf, err := m.dmabuf()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(dmabuf)
	if err := c.Send(&wire.DMABuf{Memory: memory.Memory}, 0, dmabuf); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the relay's next state", func() bool {
		move()
		went, is := inPlace(t, p.relayA)
		return went > 0 && strings.HasPrefix(is.Registration, "dmabuf: the client's own memory")
	})
	ask(&wire.Unexport{Memory: memory.Memory})
}

// If a NIC does not deregister memory, the client gets an error, and the relay, whose end alone
// ends the registration, ends without attached clients.
func TestInPlaceMemoryKeptByNICEndsIdleRelay(t *testing.T) {
	p := (&byRDMA{lane: direct, kept: syscall.EBUSY}).lendAll(t)
	if err := p.rdma.Script("ibv_dereg_mr errno=16 device=mlx5_0"); err != nil {
		t.Fatal(err)
	}
	demandOf(t, p.source.Unexport(within(t)), wire.StatusInternal, "ibv_dereg_mr")
	if err := p.rdma.Script(); err != nil {
		t.Fatal(err)
	}
	if err := p.target.Unexport(within(t)); err != nil { // the other side's is given back
		t.Error(err)
	}
	if err := p.a.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the end of the relay", func() bool { return p.relayA.Report() == nil })
}

// However many memories a client lends and gives back at once, few threads wait for NICs.
func TestManyInPlaceMemoriesUseFewThreads(t *testing.T) {
	p := nearByRDMA(t)
	const memories, atOnce, n = 20, 16, 8 << 10
	held := func(call string) (n int) {
		t.Helper()
		calls, err := p.rdma.Calls("held")
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range calls {
			if c.Arguments["call"] == call {
				n++
			}
		}
		return n
	}
	// release continues the held calls at the maximum number; nothing is held after.
	release := func(call string) {
		t.Helper()
		testutil.Until(t, "the calls that are held", func() bool { return held(call) >= atOnce })
		if err := p.rdma.Script(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.rdma.Script("ibv_reg_dmabuf_mr hold=1 device=mlx5_0"); err != nil {
		t.Fatal(err)
	}
	one := allocate(t, 0, 2<<20)
	var all []*client.Memory
	for range memories {
		one.lend(p.a, 0, n)
		all = append(all, one.Memory)
		q := pair{sending: p.sending, receiving: p.receiving, source: one, target: p.target}
		q.move(t, n)
	}
	release("ibv_reg_dmabuf_mr")
	testutil.Until(t, "the registrations of lent memory", func() bool {
		made, _ := lentRegions(t, p.rdma, "mlx5_0", n)
		return made == memories
	})
	if err := p.rdma.Script("ibv_dereg_mr hold=1 device=mlx5_0"); err != nil {
		t.Fatal(err)
	}
	given := make(chan error, memories)
	for _, m := range all {
		go func() { given <- m.Unexport(within(t)) }()
	}
	release("ibv_dereg_mr")
	for range memories {
		if err := <-given; err != nil {
			t.Error(err)
		}
	}
	for _, call := range []string{"ibv_reg_dmabuf_mr", "ibv_dereg_mr"} {
		if was := held(call); was != atOnce {
			t.Errorf("%d threads waited in %s", was, call)
		}
	}
}

// NICs are told of no more than a limit: memory above the limit bounces, with that reason, until
// further memory is freed.
func TestInPlaceMemoryAboveLimitBounces(t *testing.T) {
	p := nearByRDMA(t)
	if before := p.relayA.LendingAtMost(pairBytes + 1<<20); before != 2*(8<<30) {
		t.Errorf("%d bytes can be lent of a GPU that has 8 GiB", before)
	}
	const n = 1<<20 + 1 // one byte too many
	one := allocate(t, 0, 2<<20)
	one.lend(p.a, 0, n)
	q := pair{sending: p.sending, receiving: p.receiving, source: one, target: p.target}
	before, _ := inPlace(t, p.relayA)
	q.move(t, n)
	after, is := inPlace(t, p.relayA)
	if after != before || is.GDR || !strings.Contains(is.Registration, "the limit is") {
		t.Errorf("%d bytes went in place; inspect shows %+v", after-before, is)
	}
	if made, _ := lentRegions(t, p.rdma, "mlx5_0", n); made > 0 {
		t.Error("the NIC was told of it")
	}
	// Bounced memory does not count, nor does freed memory.
	for range 3 {
		if err := errors.Join(one.Unexport(within(t)), p.source.Unexport(within(t))); err != nil {
			t.Fatal(err)
		}
		p.source.lend(p.a, 0, pairBytes-1)
		one.lend(p.a, 0, n)
	}
	testutil.Until(t, "the relay's next state", func() bool {
		q.move(t, n)
		made, _ := lentRegions(t, p.rdma, "mlx5_0", n)
		return made > 0
	})
}

// openOf counts this process's descriptors of a file.
func openOf(t *testing.T, fd int) (n int) {
	t.Helper()
	var want, is unix.Stat_t
	entries, err := os.ReadDir("/proc/self/fd")
	if err := errors.Join(err, unix.Fstat(fd, &want)); err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := unix.Stat("/proc/self/fd/"+e.Name(), &is); err == nil && is.Dev == want.Dev && is.Ino == want.Ino {
			n++
		}
	}
	return n
}

// After the close of a session no NIC accesses the client's memory.
func TestClosedSessionReleasesInPlaceMemory(t *testing.T) {
	p := nearByRDMA(t)
	b, err := client.Dial(within(t), p.socketB)
	if err != nil {
		t.Fatal(err)
	}
	sending, receiving, _ := join(t, p.a, 0, b, 3)
	const n = 2 << 20
	m := allocate(t, 3, n)
	m.lend(b, 0, n)
	q := pair{sending: sending, receiving: receiving, source: p.source, target: m}
	testutil.Until(t, "the relay's next state", func() bool {
		q.move(t, n)
		made, _ := lentRegions(t, p.rdma, "rocep1", n)
		return made > 0
	})
	if err := p.rdma.Script("ibv_dereg_mr delay=200"); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, left := lentRegions(t, p.rdma, "rocep1", n); left > 0 {
		t.Error("a NIC still knows it")
	}
	if err := p.rdma.Script(); err != nil {
		t.Fatal(err)
	}
}
