package relay_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// hostMemory has a relay make host memory for the lane of a GPU.
func hostMemory(t testing.TB, s *client.Session, gpu int, n uint64) *client.Memory {
	t.Helper()
	m, err := s.HostMemory(within(t), client.HostMemory{Bytes: n, GPU: uuid(t, gpu)})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// side is memory of either kind at one end of a connection.
type side struct {
	*client.Memory
	write func(offset uint64, b []byte)
	read  func(offset, n uint64) []byte
}

// kinds of memory at an end.
var kinds = []string{"GPU", "host", "staging"}

func sideOf(t *testing.T, s *client.Session, gpu int, kind string, n uint64) side {
	t.Helper()
	if kind != "host" {
		m := exported
		if kind == "staging" {
			m = stagingMemory
		}
		of := m(t, s, gpu, n)
		return side{of.Memory, of.write, of.read}
	}
	m := hostMemory(t, s, gpu, n)
	return side{m,
		func(offset uint64, b []byte) { copy(m.Data[offset:], b) },
		func(offset, n uint64) []byte { return bytes.Clone(m.Data[offset : offset+n]) }}
}

// far2 are a second client's GPU and a server: with two GPUs both serve mutually. These tests, and
// the tests of several allocations and of cudaMalloc, also run on real GPUs, with
// PEERLANE_TEST_CUDA=driver and -test.run 'AtEitherEnd|InFlight|SeveralAllocations|OfCudaMalloc$'.
func far2() (client, server int) {
	if len(devices) < 4 {
		return 1, 0
	}
	return 3, 2
}

// Messages between memories of every kind, on every route.
func TestHostMemoryAtEitherEndTransfersOnEachRoute(t *testing.T) {
	needGPUs(t, 2)
	second, server := far2()
	for _, route := range routes {
		for _, from := range kinds {
			for _, to := range kinds {
				t.Run(fmt.Sprintf("%s/%s to %s", route, from, to), func(t *testing.T) {
					h := newHost(t)
					h.nic("nic0")
					h.nic("nic1")
					a, b := attach(t, h.relay("a", route, copying(far(0, 1, "nic0")))),
						attach(t, h.relay("b", route, copying(far(second, server, "nic1"))))
					source, target := sideOf(t, a, 0, from, pairBytes), sideOf(t, b, second, to, pairBytes)
					sending, receiving, _ := join(t, a, 0, b, second)
					for i, n := range []uint64{0, 1, 7, 8, 4096, 32<<10 - 1, 32 << 10, 1<<20 - 1, 1 << 20, 1<<20 + 1, 5<<20 + 5} {
						offset, at := uint64(3*i), uint64(5*i)
						want := random(t, n)
						source.write(offset, want)
						before := target.read(at+n, 16)
						receive, err := receiving.Receive(target.Memory, at, n+2)
						if err != nil {
							t.Fatal(err)
						}
						send, err := sending.Send(source.Memory, offset, n)
						for _, op := range []*client.Operation{send, receive} {
							if moved, err := wait(t, op, err); err != nil || moved != n {
								t.Fatalf("%d bytes of %d, %v", moved, n, err)
							}
						}
						if !bytes.Equal(target.read(at, n), want) {
							t.Fatalf("%d bytes arrived wrong", n)
						}
						if !bytes.Equal(target.read(at+n, 16), before) {
							t.Fatalf("%d bytes changed what is behind them", n)
						}
					}
				})
			}
		}
	}
}

func TestHostMemoryIsRefused(t *testing.T) {
	h := newHost(t)
	h.change = func(c *launch.Config) {
		c.Limits = launch.Limits{HostMemory: 20 << 20, ClientHostMemory: 16 << 20}
	}
	socket, r := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	a, b := attach(t, socket), attach(t, socket)
	ctx := within(t)
	ask := func(s *client.Session, n uint64) error {
		_, err := s.HostMemory(ctx, client.HostMemory{Bytes: n, GPU: uuid(t, 0)})
		return err
	}
	demand(t, ask(a, 0), wire.StatusOutOfRange)
	for _, n := range []uint64{16<<20 + 1, 1 << 62, math.MaxUint64, math.MaxUint64 - 4095} {
		demandCode(t, ask(a, n), wire.StatusLimit, codes.LimitMet, "relay.limits.client_host_memory")
	}
	_, err := a.HostMemory(ctx, client.HostMemory{Bytes: 8, GPU: uuid(t, 3)})
	demandCode(t, err, wire.StatusWrongGPU, codes.NoLane, devices[3].UUID)
	_, err = a.HostMemory(ctx, client.HostMemory{Bytes: 8, GPU: uuid(t, 0), Access: 4})
	demand(t, err, wire.StatusMalformed)

	first := hostMemory(t, a, 0, 12<<20)
	err = ask(a, 5<<20)
	demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.client_host_memory")
	demandText(t, err, "5.0 MiB", "12 MiB", "16 MiB")
	second := hostMemory(t, b, 0, 6<<20+1) // which are whole pages
	err = ask(b, 3<<20)
	demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.host_memory")
	demandText(t, err, "3.0 MiB", "18 MiB", "20 MiB")
	report := r.Report()
	if used := report.Used; used.HostMemory != 18<<20+uint64(os.Getpagesize()) || used.Memories != 2 ||
		used.Descriptors != 2*6+2*2 {
		t.Errorf("in use are %+v", used)
	}
	if c := report.Clients; len(c) != 2 || c[0].HostMemory+c[1].HostMemory != report.Used.HostMemory {
		t.Errorf("the clients are %+v", c)
	}
	// After the answer the memory is gone.
	for range 20 {
		if err := first.Unexport(ctx); err != nil {
			t.Fatal(err)
		}
		if first.Data != nil {
			t.Fatal("it is still mapped")
		}
		first = hostMemory(t, a, 0, 12<<20)
	}
	if err := errors.Join(second.Unexport(ctx), a.Close()); err != nil {
		t.Fatal(err)
	}
	for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
		used := r.Report().Used
		if used == (launch.Limits{Clients: 1, Descriptors: 6}) {
			break
		}
		if end.Over() {
			t.Fatalf("in use are %+v", used)
		}
	}

	// Too many memories of whole pages.
	const each = 64 << 10
	var many []*client.Memory
	for range 16 << 20 / each {
		m, err := b.HostMemory(ctx, client.HostMemory{Bytes: each - uint64(os.Getpagesize()) + 1, GPU: uuid(t, 0)})
		if err != nil {
			t.Fatalf("after %d: %v", len(many), err)
		}
		many = append(many, m)
	}
	demand(t, ask(b, 1), wire.StatusLimit)
	for _, m := range many {
		if err := m.Unexport(ctx); err != nil {
			t.Fatal(err)
		}
	}
	hostMemory(t, b, 0, 16<<20)
}

func TestInvalidOperationsOnHostMemoryAreRefused(t *testing.T) {
	h := newHost(t)
	a := attach(t, h.relay("a", launch.RouteDirect, far(0, 1, "nic0"), far(3, 1, "nic0")))
	sending, receiving, _ := join(t, a, 0, a, 0)
	m, err := a.HostMemory(within(t), client.HostMemory{Bytes: 5000, GPU: uuid(t, 0), Access: wire.AccessSend})
	if err != nil {
		t.Fatal(err)
	}
	op, err := receiving.Receive(m, 0, 8)
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusNotPermitted)
	// The pages are larger.
	op, err = sending.Send(m, 0, 5001)
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusOutOfRange)
	op, err = sending.Send(hostMemory(t, a, 3, 4096), 0, 8)
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusWrongGPU)
}

// Operations in flight end, and the memory afterwards.
func TestHostMemoryUnexportedInFlightOutlivesOperations(t *testing.T) {
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			socket, r := h.start("a", route, -1, far(0, 1, "nic0"))
			a := attach(t, socket)
			sending, receiving, _ := join(t, a, 0, a, 0)
			const n = 8 << 20
			target := exported(t, a, 0, n)
			for range 5 {
				source := hostMemory(t, a, 0, n)
				want := random(t, n)
				copy(source.Data, want)
				send, err := sending.Send(source, 0, n)
				if err != nil {
					t.Fatal(err)
				}
				if err := source.Unexport(within(t)); err != nil {
					t.Fatal(err)
				}
				again, err := sending.Send(source, 0, 8)
				_, err = wait(t, again, err)
				demand(t, err, wire.StatusUnknownMemory)
				receive, err := receiving.Receive(target.Memory, 0, n)
				for _, op := range []*client.Operation{send, receive} {
					if moved, err := wait(t, op, err); err != nil || moved != n {
						t.Fatalf("%d bytes, %v", moved, err)
					}
				}
				if !bytes.Equal(target.read(0, n), want) {
					t.Fatal("the bytes are wrong")
				}
			}
			for end := testutil.Begin(); r.Report().Used.HostMemory > 0; time.Sleep(10 * time.Millisecond) {
				if end.Over() {
					t.Fatalf("in use are %+v", r.Report().Used)
				}
			}
		})
	}
}

// made requests host memory as a hostile client, which keeps the descriptor.
func (v *victim) made(c interface {
	Exchange(wire.Message, time.Duration, ...int) (wire.Message, []int, error)
}, n uint64) (memory uint32, fd int) {
	v.t.Helper()
	m, fds, err := c.Exchange(&wire.HostMemory{Bytes: n, GPU: uuid(v.t, 0),
		Access: wire.AccessSend | wire.AccessReceive}, time.Minute)
	if err != nil {
		v.t.Fatal(err)
	}
	made, ok := m.(*wire.HostMemoryMade)
	if !ok || len(fds) != 1 {
		v.t.Fatalf("%#v and %d descriptors", m, len(fds))
	}
	return made.Memory, fds[0]
}

// The client allocates the pages of host memory, and no operation uses the memory before. The relay
// allocates the pages for an older client.
func TestHostMemoryBeforeItsPagesIsUnusable(t *testing.T) {
	h := newHost(t)
	socket, r := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	c := attachRaw(t, socket)
	ask := func(m wire.Message) (wire.Message, []int) {
		t.Helper()
		answer, fds, err := c.Exchange(m, time.Minute)
		if err != nil {
			t.Fatalf("%T: %v", m, err)
		}
		return answer, fds
	}
	const n = 1 << 20
	made := func() (memory uint32, fd int) {
		t.Helper()
		answer, fds := ask(&wire.HostMemory{Bytes: n, GPU: uuid(t, 0), Access: wire.AccessSend, Populates: 1})
		m, ok := answer.(*wire.HostMemoryMade)
		if !ok || len(fds) != 1 {
			t.Fatalf("%#v and %d descriptors", answer, len(fds))
		}
		t.Cleanup(func() { unix.Close(fds[0]) })
		return m.Memory, fds[0]
	}
	pages := func(fd int) int64 {
		t.Helper()
		var is unix.Stat_t
		if err := unix.Fstat(fd, &is); err != nil {
			t.Fatal(err)
		}
		return is.Blocks * 512
	}
	refuse := func(m wire.Message, want wire.Status) {
		t.Helper()
		_, fds, err := c.Exchange(m, time.Minute)
		packet.CloseAll(fds)
		demand(t, err, want)
	}
	memory, fd := made()
	if has := pages(fd); has != 0 {
		t.Errorf("the relay has allocated %d bytes before its client", has)
	}
	a := attach(t, socket)
	listener, err := a.Listen(within(t), uuid(t, 0))
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := ask(&wire.Connect{GPU: uuid(t, 0), Handle: listener.Handle()})
	connection, ok := answer.(*wire.Connected)
	if !ok {
		t.Fatalf("%#v", answer)
	}
	send := func() wire.Status {
		t.Helper()
		wake, err := c.Post(wire.Descriptor{Operation: wire.OpSend, Connection: connection.Connection, Memory: memory,
			Length: 8, WaitTimeline: wire.NoTimeline, SignalTimeline: wire.NoTimeline})
		if err != nil {
			t.Fatal(err)
		}
		if one := [8]byte{1}; wake {
			_, _ = unix.Write(c.wakeRelay, one[:]) // a full eventfd has woken the relay already
		}
		for end := testutil.Begin(); ; time.Sleep(time.Millisecond) {
			if done, ok := c.Next(); ok {
				return wire.Status(done.Status)
			}
			if end.Over() {
				t.Fatal("the operation does not end")
			}
		}
	}
	if status := send(); status != wire.StatusUnknownMemory {
		t.Errorf("a send of memory without pages ends with status %d", status)
	}
	refuse(&wire.Expose{Memory: memory, Length: 8, Access: wire.RemoteRead, Connection: connection.Connection},
		wire.StatusUnknownMemory)
	refuse(&wire.HostMemoryPopulated{Memory: memory + 1000}, wire.StatusUnknownMemory)
	if answer, _ := ask(&wire.HostMemoryPopulated{Memory: memory}); pages(fd) != n {
		t.Errorf("%d bytes are allocated after %#v, want %d", pages(fd), answer, n)
	}
	refuse(&wire.HostMemoryPopulated{Memory: memory}, wire.StatusMalformed)
	receiving, err := listener.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	target := hostMemory(t, a, 0, n)
	receive, err := receiving.Receive(target, 0, 8)
	if err != nil {
		t.Fatal(err)
	}
	if status := send(); status != wire.StatusOK {
		t.Errorf("a send of the memory with its pages ends with status %d", status)
	}
	if _, err := wait(t, receive, nil); err != nil {
		t.Error(err)
	}
	// Memory without an answer of the client counts until the session's end.
	if _, fd = made(); pages(fd) != 0 {
		t.Errorf("the relay has allocated %d bytes", pages(fd))
	}
	if used := r.Report().Used.HostMemory; used != 3*n {
		t.Errorf("%d bytes of host memory are counted, want %d", used, 3*n)
	}
	if err := c.Conn.Close(); err != nil {
		t.Fatal(err)
	}
	for end := testutil.Begin(); r.Report().Used.HostMemory != n; time.Sleep(10 * time.Millisecond) {
		if end.Over() {
			t.Fatalf("in use are %+v", r.Report().Used)
		}
	}
}

// Arbitrary changes of a client to its host memory harm no further client, and leave no resource of
// the relay after the client's end.
func TestHostMemoryOfHostileClientHarmsNoOther(t *testing.T) {
	v := newVictim(t, func(c *launch.Config) { c.Limits.HostMemory = 64 << 20 })
	const n = 16 << 20
	blocks := func(fd int) int64 {
		var s unix.Stat_t
		if err := unix.Fstat(fd, &s); err != nil {
			t.Fatal(err)
		}
		return s.Blocks
	}
	emptied := func(fd int) {
		t.Helper()
		for end := testutil.Begin(); blocks(fd) > 0; time.Sleep(10 * time.Millisecond) {
			if end.Over() {
				t.Fatalf("the relay still pays for %d blocks", blocks(fd))
			}
		}
	}
	for round := range 12 {
		c := v.session()
		memory, fd := v.made(c, n)
		for _, size := range []int64{0, 4096, 1 << 30} {
			if unix.Ftruncate(fd, size) == nil {
				t.Errorf("it can be made %d bytes long", size)
			}
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
			t.Error("it can be sealed against the relay")
		}
		kept, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		kept[0], kept[n-1] = 1, 2
		if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, n); err != nil {
			t.Fatal(err)
		}
		kept[n/2] = 3
		v.goesOn()
		switch round % 3 {
		case 0:
			if _, _, err := c.Exchange(&wire.Unexport{Memory: memory}, time.Minute); err != nil {
				t.Fatal(err)
			}
			if left := blocks(fd); left != 0 {
				t.Errorf("after the answer it has %d blocks", left)
			}
			c.Close()
		case 1:
			if err := c.Send(&wire.Goodbye{}, 0); err != nil {
				t.Fatal(err)
			}
			c.Close()
		default:
			c.Close() // without a goodbye
		}
		emptied(fd)
		kept[0] = 4 // is the client's own now
		runtime.KeepAlive(kept)
		if err := errors.Join(unix.Munmap(kept), unix.Close(fd)); err != nil {
			t.Fatal(err)
		}
	}
	// Both at once fill the relay for further clients until they are gone.
	var fds []int
	c := v.session()
	for range 4 {
		_, fd := v.made(c, n)
		fds = append(fds, fd)
	}
	_, err := v.good.HostMemory(within(t), client.HostMemory{Bytes: 4096, GPU: uuid(t, 0)})
	demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.host_memory")
	demandText(t, err, "64 MiB")
	c.Close()
	for _, fd := range fds {
		emptied(fd)
		unix.Close(fd)
	}
	for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
		m, err := v.good.HostMemory(within(t), client.HostMemory{Bytes: 4096, GPU: uuid(t, 0)})
		if err == nil {
			if err := m.Unexport(within(t)); err != nil {
				t.Fatal(err)
			}
			break
		}
		if end.Over() {
			t.Fatal(err)
		}
	}
	v.recovered()
}

// Operations in flight at the client's death end before the memory is unmapped: the remote side
// gets an error or the whole message.
func TestClientDeathWithHostMemoryInFlightEndsOperationsFirst(t *testing.T) {
	needGPUs(t, 2)
	second, server := far2()
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.nic("nic1")
			socketA, ra := h.start("a", route, -1, far(0, 1, "nic0"))
			b := attach(t, h.relay("b", route, far(second, server, "nic1")))
			listener, err := b.Listen(within(t), uuid(t, second))
			if err != nil {
				t.Fatal(err)
			}
			const n = 32 << 20
			target := hostMemory(t, b, second, n)
			for range 4 {
				a, err := client.Dial(within(t), socketA)
				if err != nil {
					t.Fatal(err)
				}
				source := hostMemory(t, a, 0, n)
				sending, err := a.Connect(within(t), uuid(t, 0), listener.Handle())
				if err != nil {
					t.Fatal(err)
				}
				receiving, err := listener.Accept(within(t))
				if err != nil {
					t.Fatal(err)
				}
				receive, err := receiving.Receive(target, 0, n)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := sending.Send(source, 0, n); err != nil {
					t.Fatal(err)
				}
				if err := a.Close(); err != nil {
					t.Fatal(err)
				}
				if moved, err := wait(t, receive, nil); err == nil && moved != n {
					t.Errorf("%d bytes arrived, and no error", moved)
				}
			}
			for end := testutil.Begin(); ra.Report().Used != (launch.Limits{}); time.Sleep(10 * time.Millisecond) {
				if end.Over() {
					t.Fatalf("in use are %+v", ra.Report().Used)
				}
			}
		})
	}
}

// Received bytes in host memory stay after the relay's stop, until the client closes the session:
// the client may be reading.
func TestHostMemoryAfterRelayDeathStaysReadable(t *testing.T) {
	h := newHost(t)
	socket, stopped := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	s := attach(t, socket)
	m := hostMemory(t, s, 0, 1<<20)
	for i := range m.Data {
		m.Data[i] = byte(i*7 + 1)
	}
	stopped.End("was stopped by the administrator")
	<-s.Ended()
	for { // until nobody listens: then the relay has let go of everything
		conn, err := net.Dial("unixpacket", socket)
		if err != nil {
			break
		}
		conn.Close()
		time.Sleep(time.Millisecond)
	}
	for i, b := range m.Data {
		if b != byte(i*7+1) {
			t.Fatalf("after the relay's end byte %d is %d", i, b)
		}
	}
}

// Rings, clients' host memory and slots share an account, which the container's memory limit
// bounds, and release their share at the end.
func TestHostAccountBoundsAllAllocations(t *testing.T) {
	h := newHost(t)
	h.change = func(c *launch.Config) { c.OwnHostMemory = 4 << 20 }
	socket, r := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	a := attach(t, socket)
	ctx := within(t)
	ask := func(s *client.Session, n uint64) error {
		_, err := s.HostMemory(ctx, client.HostMemory{Bytes: n, GPU: uuid(t, 0)})
		return err
	}
	err := ask(a, 4<<20)
	demandCode(t, err, wire.StatusLimit, codes.LimitMet, "container a")
	demandText(t, err, "176 KiB", "whose limit is 4.0 MiB")
	m := hostMemory(t, a, 0, 3<<20)
	var more []*client.Session
	for range 100 {
		s, err := client.Dial(ctx, socket)
		if err != nil {
			demandCode(t, err, wire.StatusLimit, codes.LimitMet, "container a")
			break
		}
		t.Cleanup(func() { s.Close() })
		more = append(more, s)
	}
	if len(more) != 4 { // with a's five times 176 KiB, and 3 MiB
		t.Errorf("%d sessions more were accepted", len(more))
	}
	if err := m.Unexport(ctx); err != nil {
		t.Fatal(err)
	}
	hostMemory(t, more[0], 0, 2<<20)
	demandCode(t, ask(a, 2<<20), wire.StatusLimit, codes.LimitMet, "container a")
	if err := more[0].Close(); err != nil {
		t.Fatal(err)
	}
	for end := testutil.Begin(); r.Report().Used.HostMemory > 0; time.Sleep(10 * time.Millisecond) {
		if end.Over() {
			t.Fatalf("in use are %+v", r.Report().Used)
		}
	}
	hostMemory(t, a, 0, 3<<20)
}

// Host memory is claimed by granules, and given back when unused.
func TestHostMemoryClaimsAndReturnsGranules(t *testing.T) {
	h := newHost(t)
	h.change = func(c *launch.Config) { c.HostAdmission = true }
	var mu sync.Mutex
	var claimed []uint64
	h.ask = func(c launch.Claim) (launch.Admission, error) {
		mu.Lock()
		defer mu.Unlock()
		if c.GPU != launch.HostMemory {
			return launch.Admission{Claim: c.Claim, OK: true}, nil
		}
		claimed = append(claimed, c.Bytes>>20)
		return launch.Admission{Claim: c.Claim, OK: c.Bytes <= 36<<20, Error: "others have it"}, nil
	}
	socket, _ := h.start("a", launch.RouteDirect, -1, far(0, 1, "nic0"))
	a := attach(t, socket)
	first := hostMemory(t, a, 0, 1<<20)
	second := hostMemory(t, a, 0, 15<<20)
	third := hostMemory(t, a, 0, 20<<20) // 48 MiB in granules are not admitted, and 36 MiB are
	_, err := a.HostMemory(within(t), client.HostMemory{Bytes: 4 << 20, GPU: uuid(t, 0)})
	demandOf(t, err, wire.StatusLimit, "host memory")
	for _, m := range []*client.Memory{third, second, first} {
		if err := m.Unexport(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []uint64{16, 48, 36, 48, 40, 16, 0}; !slices.Equal(claimed, want) {
		t.Errorf("the relay claimed %v MiB, want %v", claimed, want)
	}
}
