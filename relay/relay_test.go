package relay_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/softhost"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/verbs/softdevice/engine"
	"github.com/peerlane/peerlane/relay/wire"
)

// The tests' host: GPUs 0 and 3 are clients, 1 and 2 servers beside NICs.
var devices = func() (list []sim.Device) {
	for i := range 4 {
		list = append(list, sim.Device{
			Index: i, Minor: i, Memory: 8 << 30, Name: "NVIDIA H100 80GB HBM3",
			UUID:  fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d", i),
			BusID: fmt.Sprintf("0000:%d7:00.0", i+1),
		})
	}
	return list
}()

var (
	driver *cuda.Driver
	simDir string
)

func TestMain(m *testing.M) {
	if role := os.Getenv("PEERLANE_TEST_ROLE"); role != "" {
		os.Exit(play(role))
	}
	logrus.SetLevel(logrus.ErrorLevel)
	dir, err := os.MkdirTemp("", "peerlane-relay-test-")
	switch {
	case err != nil:
	case realGPUs:
		err = findGPUs()
	default:
		err = simulate(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "preparing the simulator:", err)
		os.Exit(1)
	}
	// The software devices of tests keep their writes back from everybody until a flush (Holds).
	if err := os.Setenv("PEERLANE_SIM_WRITES_ORDERING", "0"); err != nil {
		panic(err)
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// realGPUs has the test find the machine's GPUs. Few tests can do with them, and
// say so.
var realGPUs = os.Getenv("PEERLANE_TEST_CUDA") == "driver"

func findGPUs() error {
	var err error
	if driver, err = cuda.Open(); err != nil {
		return err
	}
	n, err := driver.DeviceCount()
	if err != nil {
		return err
	}
	devices = nil
	for i := range n {
		ordinal, err := driver.DeviceGet(i)
		if err != nil {
			return err
		}
		d := sim.Device{Index: i, Minor: i}
		if d.UUID, err = driver.DeviceUUID(ordinal); err == nil {
			d.BusID, err = driver.DevicePCIBusID(ordinal)
		}
		if err != nil {
			return err
		}
		devices = append(devices, d)
	}
	return nil
}

func simulate(dir string) (err error) {
	simDir = filepath.Join(dir, "host")
	if err = sim.Use(simDir, devices); err == nil {
		driver, err = cuda.Open()
	}
	return err
}

func gpu(i int) launch.GPU {
	return launch.GPU{UUID: devices[i].UUID, BusID: devices[i].BusID, Index: i}
}

func uuid(t testing.TB, i int) wire.UUID {
	t.Helper()
	u, err := wire.ParseGPU(devices[i].UUID)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// host is a directory for the sockets of relays and NICs.
type host struct {
	t   testing.TB
	dir string
	// change modifies the configuration of relays; nil for none.
	change func(*launch.Config)
	// ask admits their staging; nil where nobody does.
	ask relay.Asker
	// secrets connect relays to the network; nil where they are on none.
	secrets *launch.Secrets
	ends    error // of the relays' Run
	// rdma is the libibverbs of its relays; empty for those that have
	// the machine's, and are of one host.
	rdma string
	nics []netip.Addr // and addresses of its NICs
	// reconnectLimit limits a reconnect of their queue pairs; 0 for the configured limit.
	reconnectLimit time.Duration
	// settle limits the first connection of the relays' queue pairs; 0 for what relays allow.
	settle time.Duration
	// soft has the software devices of the host's NICs; nil before the first.
	soft    *softdevice.Host
	names   []string
	devices []softdevice.Device
	key     string // of the cluster of the relays with these NICs
}

func newHost(t testing.TB) *host {
	t.Helper()
	// Short, for the length of a socket's path.
	dir, err := os.MkdirTemp("", "pl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return &host{t: t, dir: dir}
}

func listen(t testing.TB, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// nic adds a software device to the host, and returns a function that ends its port. Relays that are
// started later have the host's devices, by which staged data goes.
func (h *host) nic(name string) (stop func()) {
	h.t.Helper()
	if h.soft == nil {
		soft, err := softdevice.New(filepath.Join(h.dir, "rdma"))
		if err != nil {
			h.t.Fatal(err)
		}
		h.soft = &soft
		h.key = softhost.NewKey()
		if realGPUs {
			h.engine()
		}
	}
	i := len(h.devices)
	h.names = append(h.names, name)
	h.devices = append(h.devices, softhost.Devices(!realGPUs, h.names...)[i])
	if err := h.soft.Set(h.devices...); err != nil {
		h.t.Fatal(err)
	}
	return func() {
		h.devices[i].Down = true
		if err := h.soft.Set(h.devices...); err != nil {
			h.t.Fatal(err)
		}
	}
}

// engine starts the engine of software devices, which moves bytes on real GPUs.
func (h *host) engine() {
	h.t.Helper()
	e, err := engine.New()
	if err != nil {
		h.t.Fatal(err)
	}
	l := listen(h.t, filepath.Join(h.soft.Dir, engine.SocketName))
	ended := make(chan error, 1)
	go func() { ended <- e.Serve(l) }()
	h.t.Cleanup(func() {
		l.Close()
		if err := <-ended; err != nil {
			h.t.Error(err)
		}
	})
}

// useNICs has a relay use the host's software devices for staged data.
func (h *host) useNICs(r *relay.Relay, c *launch.Config) error {
	h.withNICs(c)
	var addresses []netip.Addr
	for _, d := range h.devices {
		addresses = append(addresses, netip.MustParseAddr(d.Address))
	}
	r.Devices(h.soft.Library(), addresses...)
	r.SetReconnectLimit(h.reconnectLimit)
	r.Patient(time.Minute)
	return r.Secrets(softhost.Secrets(h.key))
}

// withNICs puts the network and RDMA into a relay's configuration. The result is the environment of
// a relay in a separate process.
func (h *host) withNICs(c *launch.Config) (environment []string) {
	softhost.Configure(c)
	return append(h.soft.Environment(), softhost.KeyVariable+"="+h.key)
}

// relay starts a relay in this process and returns the socket for clients.
func (h *host) relay(name, route string, lanes ...launch.Lane) (socket string) {
	h.t.Helper()
	socket, _ = h.start(name, route, -1, lanes...)
	return socket
}

// start starts the relay of a container whose init has a pidfd (-1: none).
func (h *host) start(name, route string, init int, lanes ...launch.Lane) (socket string, r *relay.Relay) {
	h.t.Helper()
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		h.t.Fatal(err)
	}
	generation := hex.EncodeToString(id[:])
	socket = filepath.Join(h.dir, name)
	r, err := relay.New(listen(h.t, socket), listen(h.t, filepath.Join(h.dir, generation+".sock")), init)
	if err != nil {
		h.t.Fatal(err)
	}
	c := launch.Config{
		Generation: generation, Container: name, Lanes: lanes, Route: route, Transport: launch.TransportAuto,
		Slots: 4, SlotBytes: 1 << 20, Peers: h.dir, Bounce: 1 << 30,
	}
	if h.soft != nil && route != launch.RouteDirect {
		if err := h.useNICs(r, &c); err != nil {
			h.t.Fatal(err)
		}
	}
	if h.change != nil {
		h.change(&c)
	}
	if h.ask != nil {
		r.AskBy(h.ask)
	}
	if h.rdma != "" {
		r.Elsewhere(id, h.rdma, h.nics...)
		r.SetReconnectLimit(h.reconnectLimit)
		r.Settling(h.settle)
	}
	if h.secrets != nil {
		r.Patient(time.Minute)
		if err := r.Secrets(*h.secrets); err != nil {
			h.t.Fatal(err)
		}
	}
	if err := r.Configure(c); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- r.Run() }()
	h.t.Cleanup(func() {
		r.Stop("the test is over")
		select {
		case err := <-ended:
			if !testutil.HasError(err, h.ends) {
				h.t.Errorf("the relay ended with %v, want %v", err, h.ends)
			}
			r.Free()
		case <-testutil.After(30 * time.Second):
			h.t.Error("the relay did not end")
		}
	})
	return socket, r
}

func far(client int, server int, nic string) launch.Lane {
	return launch.Lane{GPU: gpu(client), Role: "far", Relay: true, Servers: []launch.GPU{gpu(server)}, NICs: []string{nic}}
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func attach(t testing.TB, socket string) *client.Session {
	t.Helper()
	s, err := client.Dial(within(t), socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// memory is GPU memory of the test, filled and read through a context.
type memory struct {
	t     testing.TB
	ptr   cuda.Ptr
	bytes uint64
	fd    int
	gpu   int
	*client.Memory
}

func onGPU(t testing.TB, i int, f func(device cuda.Device) error) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	device, err := driver.DeviceByPCIBusID(devices[i].BusID)
	if err != nil {
		t.Fatal(err)
	}
	ctx, err := driver.CtxCreate(device, cuda.CtxOptions{Lean: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f(device), driver.CtxDestroy(ctx)); err != nil {
		t.Fatal(err)
	}
}

func allocate(t testing.TB, i int, bytes uint64) *memory {
	t.Helper()
	m := &memory{t: t, bytes: bytes, gpu: i}
	onGPU(t, i, func(device cuda.Device) error {
		handle, err := driver.MemCreate(device, bytes, cuda.MemOptions{Exportable: true})
		if err != nil {
			return err
		}
		if m.ptr, err = driver.MemAddressReserve(bytes, 0); err != nil {
			return err
		}
		m.fd, err = driver.MemExportFD(handle)
		t.Cleanup(func() { unix.Close(m.fd) })
		return errors.Join(err, driver.MemMap(m.ptr, bytes, 0, handle),
			driver.MemSetAccess(m.ptr, bytes, cuda.Access{Device: device, Write: true}), driver.MemRelease(handle))
	})
	m.goesWithTest()
	return m
}

// goesWithTest unmaps the memory at the test's end: a small machine has less than the sum of the
// tests. Addresses are plenty.
func (m *memory) goesWithTest() {
	m.t.Cleanup(func() {
		if err := driver.MemUnmap(m.ptr, m.bytes); err != nil {
			m.t.Error(err)
		}
	})
}

// exported allocates and exports memory.
func exported(t testing.TB, s *client.Session, i int, bytes uint64) *memory {
	t.Helper()
	m := allocate(t, i, bytes)
	var err error
	m.Memory, err = s.Export(within(t), client.Allocation{FD: m.fd, Bytes: bytes, GPU: uuid(t, i)})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *memory) write(offset uint64, b []byte) { m.copy(offset, b, true) }

func (m *memory) read(offset, n uint64) []byte {
	b := make([]byte, n)
	m.copy(offset, b, false)
	return b
}

func (m *memory) copy(offset uint64, b []byte, in bool) {
	m.t.Helper()
	if len(b) == 0 {
		return
	}
	onGPU(m.t, m.gpu, func(cuda.Device) error {
		stream, err := driver.StreamCreate()
		if err != nil {
			return err
		}
		// CUDA needs memory that the garbage collector does not know. A reused small block costs
		// less than new pages for every byte.
		const block = 1 << 20
		host, err := driver.MemHostAlloc(min(block, uint64(len(b))))
		if err != nil {
			return err
		}
		for at := uint64(0); at < uint64(len(b)) && err == nil; at += block {
			part := b[at:min(at+block, uint64(len(b)))]
			pinned := unsafe.Slice((*byte)(host), len(part))
			gpu := m.ptr + cuda.Ptr(offset+at)
			if in {
				copyBytes(pinned, part)
				err = driver.MemcpyHtoDAsync(gpu, host, uint64(len(part)), stream)
			} else {
				err = driver.MemcpyDtoHAsync(host, gpu, uint64(len(part)), stream)
			}
			err = errors.Join(err, driver.StreamSynchronize(stream))
			if !in {
				copyBytes(part, pinned)
			}
		}
		return errors.Join(err, driver.MemHostFree(host), driver.StreamDestroy(stream))
	})
}

// copyBytes copies payload. The race detector would check every word, which takes a third of the
// time of some tests.
//
//go:norace
func copyBytes(to, from []byte) { copy(to, from) }

// pair is two containers, connected in one direction.
type pair struct {
	a, b               *client.Session
	sending, receiving *client.Connection
	source, target     *memory
	handle             wire.Handle
}

const pairBytes = 16 << 20

func connected(t *testing.T, route string) *pair {
	t.Helper()
	h := newHost(t)
	client, server := [2]int{0, 3}, [2]int{1, 2}
	if len(devices) < 4 { // of two real GPUs each is the other's server
		client, server = [2]int{0, 1}, [2]int{1, 0}
	}
	p := &pair{}
	h.nic("nic0")
	h.nic("nic1")
	p.a = attach(t, h.relay("a", route, far(client[0], server[0], "nic0")))
	p.b = attach(t, h.relay("b", route, far(client[1], server[1], "nic1")))
	p.source, p.target = exported(t, p.a, client[0], pairBytes), exported(t, p.b, client[1], pairBytes)
	p.sending, p.receiving, p.handle = join(t, p.a, client[0], p.b, client[1])
	return p
}

func join(t testing.TB, a *client.Session, gpuA int, b *client.Session,
	gpuB int) (sending, receiving *client.Connection, handle wire.Handle) {
	t.Helper()
	listener, err := b.Listen(within(t), uuid(t, gpuB))
	if err != nil {
		t.Fatal(err)
	}
	if sending, err = a.Connect(within(t), uuid(t, gpuA), listener.Handle()); err != nil {
		t.Fatal(err)
	}
	if receiving, err = listener.Accept(within(t)); err != nil {
		t.Fatal(err)
	}
	return sending, receiving, listener.Handle()
}

// move sends a message of n bytes.
func (p *pair) move(t *testing.T, n uint64) {
	t.Helper()
	receive, err := p.receiving.Receive(p.target.Memory, 0, n)
	if err != nil {
		t.Fatal(err)
	}
	send, err := p.sending.Send(p.source.Memory, 0, n)
	for _, op := range []*client.Operation{send, receive} {
		if _, err := wait(t, op, err); err != nil {
			t.Fatal(err)
		}
	}
}

// random returns n bytes. The random part repeats after a prime number of bytes, so that
// a chunk at another chunk's place is seen, and large messages cost no generator's time.
func random(t *testing.T, n uint64) []byte {
	t.Helper()
	const period = 65521
	b := make([]byte, n)
	if _, err := rand.Read(b[:min(n, period)]); err != nil {
		t.Fatal(err)
	}
	for done := uint64(period); done < n; done *= 2 {
		copyBytes(b[done:], b[:min(done, n-done)])
	}
	return b
}

func wait(t testing.TB, op *client.Operation, err error) (uint64, error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return op.Wait(within(t))
}

// demandCode is demand for an error with a code, of an object unless object is empty.
func demandCode(t *testing.T, err error, status wire.Status, code codes.Code, object string) {
	t.Helper()
	if !errors.Is(err, code) {
		t.Errorf("%v has not the code %s", err, code)
	}
	demandOf(t, err, status, object)
}

// demand ends the test unless err has the status.
func demand(t *testing.T, err error, status wire.Status) {
	t.Helper()
	if !errors.Is(err, &wire.Error{Status: status}) {
		t.Fatalf("the error is %v (status %d), not %v", err, wire.StatusOf(err), status)
	}
}

// demandOf is demand for an error of an object.
func demandOf(t *testing.T, err error, status wire.Status, object string) {
	t.Helper()
	if demand(t, err, status); !errors.Is(err, &wire.Error{Status: status, Object: object}) {
		t.Errorf("the error is of %q, not of %q: %v", wire.ObjectOf(err), object, err)
	}
}

// demandText demands parts of an error's text that the relay sends in no other form: the figures of a
// limit, and the diagnosis of a NIC.
func demandText(t *testing.T, err error, words ...string) {
	t.Helper()
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not say %q: %v", w, err)
		}
	}
}

var routes = []string{launch.RouteStaged, launch.RouteDirect}

// arrive sends a message per size, at unaligned places.
func (p *pair) arrive(t *testing.T, sizes ...uint64) {
	t.Helper()
	for i, n := range sizes {
		from, to := uint64(3*i), uint64(5*i)
		want := random(t, n)
		p.source.write(from, want)
		receive, err := p.receiving.Receive(p.target.Memory, to, n+2, client.Tag(uint64(i)))
		if err != nil {
			t.Fatal(err)
		}
		send, err := p.sending.Send(p.source.Memory, from, n, client.Tag(uint64(i)))
		if moved, err := wait(t, send, err); err != nil || moved != n {
			t.Fatalf("send of %d: %d, %v", n, moved, err)
		}
		if moved, err := wait(t, receive, nil); err != nil || moved != n {
			t.Fatalf("receive of %d: %d, %v", n, moved, err)
		}
		if !bytes.Equal(p.target.read(to, n), want) {
			t.Fatalf("%d bytes arrived wrong", n)
		}
	}
}

func TestSendDeliversEveryByte(t *testing.T) {
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			p := connected(t, route)
			// Around the size of a slot (1 MiB), and around the size of the slots together.
			p.arrive(t, 0, 1, 7, 8, 4096, 1<<20-1, 1<<20, 1<<20+1, 4<<20+3, 11<<20+5)
		})
	}
}

func TestStagedRouteAloneCrossesServers(t *testing.T) {
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			p := connected(t, route)
			const first, n = 8, 5 << 20
			p.move(t, first) // after it everything is there
			before, err := sim.ReadLog(simDir)
			if err != nil {
				t.Fatal(err)
			}
			p.move(t, n)
			after, err := sim.ReadLog(simDir)
			if err != nil {
				t.Fatal(err)
			}
			want := uint64(0)
			if route == launch.RouteStaged {
				want = n
			}
			for _, server := range []int{1, 2} {
				in, out := after[server].BytesIn-before[server].BytesIn, after[server].BytesOut-before[server].BytesOut
				copied := map[int]uint64{1: in, 2: out}[server] // the NICs read and write the rest without CUDA
				if copied != want || in+out != want {
					t.Errorf("GPU %d's log has %d bytes in and %d out, not %d", server, in, out, want)
				}
				if after[server].Contexts-before[server].Contexts > 0 {
					t.Errorf("somebody made a context on server GPU %d during the transfer", server)
				}
			}
			for name, s := range map[string]*client.Session{"sender": p.a, "receiver": p.b} {
				counters, err := s.Statistics(within(t))
				if err != nil {
					t.Fatal(err)
				}
				if counters.Server[0].In != want || counters.Server[0].Out != want {
					t.Errorf("the %s's relay counts %d in and %d out, not %d", name, counters.Server[0].In, counters.Server[0].Out,
						want)
				}
				if counters.Contexts != 1 {
					t.Errorf("the %s's relay has %d contexts", name, counters.Contexts)
				}
			}
		})
	}
}

func TestRelayBeforeFirstExportHasNoContext(t *testing.T) {
	h := newHost(t)
	before, err := sim.ReadLog(simDir)
	if err != nil {
		t.Fatal(err)
	}
	s := attach(t, h.relay("idle", launch.RouteStaged, far(0, 1, "nic0")))
	if _, err := s.Statistics(within(t)); err != nil {
		t.Fatal(err)
	}
	after, err := sim.ReadLog(simDir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range after {
		if after[i].Contexts != before[i].Contexts || after[i].Allocated != before[i].Allocated {
			t.Errorf("GPU %d was touched before a client needed it", i)
		}
	}
}

func TestMessagesMatchReceivesByTag(t *testing.T) {
	p := connected(t, launch.RouteStaged)
	const n = 1000
	want := map[uint64][]byte{}
	var sends []*client.Operation
	for tag := range uint64(4) {
		want[tag] = random(t, n)
		p.source.write(tag*n, want[tag])
		op, err := p.sending.Send(p.source.Memory, tag*n, n, client.Tag(tag))
		if err != nil {
			t.Fatal(err)
		}
		sends = append(sends, op)
	}
	for _, tag := range []uint64{3, 0, 2, 1} {
		receive, err := p.receiving.Receive(p.target.Memory, tag*n, n, client.Tag(tag))
		if _, err := wait(t, receive, err); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p.target.read(tag*n, n), want[tag]) {
			t.Errorf("the message of tag %d arrived wrong", tag)
		}
	}
	for _, op := range sends {
		if _, err := wait(t, op, nil); err != nil {
			t.Error(err)
		}
	}
}

func TestTimelinesHoldAndRelease(t *testing.T) {
	p := connected(t, launch.RouteStaged)
	filled, err := p.a.Timeline(0)
	if err != nil {
		t.Fatal(err)
	}
	arrived, err := p.b.Timeline(7)
	if err != nil {
		t.Fatal(err)
	}
	receive, err := p.receiving.Receive(p.target.Memory, 0, 8, client.Signal(arrived, 3))
	if err != nil {
		t.Fatal(err)
	}
	send, err := p.sending.Send(p.source.Memory, 0, 8, client.After(filled, 2))
	if err != nil {
		t.Fatal(err)
	}
	filled.Advance(1)
	select {
	case <-send.Done():
		t.Fatal("the send went before its timeline")
	case <-time.After(50 * time.Millisecond):
	}
	if arrived.Reached(3) {
		t.Fatal("the receive's timeline advanced before the message")
	}
	want := random(t, 8)
	p.source.write(0, want)
	filled.Advance(2)
	for end := testutil.Begin(); !arrived.Reached(3); {
		if end.Over() {
			t.Fatal("the receive's timeline does not advance")
		}
		time.Sleep(time.Millisecond)
	}
	if !bytes.Equal(p.target.read(0, 8), want) {
		t.Error("the timeline advanced before the bytes were there")
	}
	for _, op := range []*client.Operation{send, receive} {
		if _, err := wait(t, op, nil); err != nil {
			t.Error(err)
		}
	}
}

func TestInvalidOperationsAreRefused(t *testing.T) {
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			p := connected(t, route)
			onlySend, err := p.a.Export(within(t), client.Allocation{FD: p.source.fd, Bytes: pairBytes, Offset: 4096,
				Length: 8192, GPU: uuid(t, 0), Access: wire.AccessReceive})
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range []struct {
				name   string
				post   func() (*client.Operation, error)
				status wire.Status
			}{
				{"beyond the end", func() (*client.Operation, error) {
					return p.sending.Send(p.source.Memory, pairBytes-7, 8)
				}, wire.StatusOutOfRange},
				{"an offset that wraps", func() (*client.Operation, error) {
					return p.sending.Send(p.source.Memory, ^uint64(0)-3, 8)
				}, wire.StatusOutOfRange},
				{"receive beyond the end", func() (*client.Operation, error) {
					return p.receiving.Receive(p.target.Memory, 1, pairBytes)
				}, wire.StatusOutOfRange},
				{"memory for receiving", func() (*client.Operation, error) {
					return p.sending.Send(onlySend, 0, 8)
				}, wire.StatusNotPermitted},
				{"a buffered receive", func() (*client.Operation, error) {
					return p.receiving.Receive(p.target.Memory, 0, 8, client.Buffered())
				}, wire.StatusMalformed},
				{"a receive on a sending connection", func() (*client.Operation, error) {
					return p.sending.Receive(p.source.Memory, 0, 8)
				}, wire.StatusMalformed},
			} {
				op, err := c.post()
				_, err = wait(t, op, err)
				t.Log(c.name)
				demand(t, err, c.status)
			}
			if err := onlySend.Unexport(within(t)); err != nil {
				t.Fatal(err)
			}
			op, err := p.sending.Send(onlySend, 0, 8)
			_, err = wait(t, op, err)
			demand(t, err, wire.StatusUnknownMemory)

			// A message that is too long fails on both sides, and the connection goes on.
			receive, err := p.receiving.Receive(p.target.Memory, 0, 9)
			if err != nil {
				t.Fatal(err)
			}
			send, err := p.sending.Send(p.source.Memory, 0, 10)
			_, err = wait(t, send, err)
			demand(t, err, wire.StatusTruncated)
			_, err = wait(t, receive, nil)
			demand(t, err, wire.StatusTruncated)

			// So do canceled ones.
			receive, err = p.receiving.Receive(p.target.Memory, 0, 9)
			if err != nil {
				t.Fatal(err)
			}
			if err := receive.Cancel(); err != nil {
				t.Fatal(err)
			}
			_, err = wait(t, receive, nil)
			demand(t, err, wire.StatusCanceled)
			send, err = p.sending.Send(p.source.Memory, 0, 10)
			if err != nil {
				t.Fatal(err)
			}
			if err := send.Cancel(); err != nil {
				t.Fatal(err)
			}
			_, err = wait(t, send, nil)
			demand(t, err, wire.StatusCanceled)

			receive, err = p.receiving.Receive(p.target.Memory, 0, 9)
			if err != nil {
				t.Fatal(err)
			}
			send, err = p.sending.Send(p.source.Memory, 0, 9)
			for _, op := range []*client.Operation{send, receive} {
				if _, err := wait(t, op, err); err != nil {
					t.Fatalf("the connection did not go on: %v", err)
				}
			}
		})
	}
}

func TestInvalidExportsAreRefused(t *testing.T) {
	h := newHost(t)
	s := attach(t, h.relay("a", launch.RouteAuto, far(0, 1, "nic0")))
	own, other := allocate(t, 0, 2<<20), allocate(t, 2, 2<<20)
	ctx := within(t)

	_, err := s.Export(ctx, client.Allocation{FD: other.fd, Bytes: 2 << 20, GPU: uuid(t, 2)})
	demandCode(t, err, wire.StatusWrongGPU, codes.NoLane, devices[2].UUID)
	_, err = s.Export(ctx, client.Allocation{FD: other.fd, Bytes: 2 << 20, GPU: uuid(t, 0)})
	demandOf(t, err, wire.StatusWrongGPU, devices[2].UUID)
	_, err = s.Export(ctx, client.Allocation{FD: own.fd, Bytes: 4 << 20, GPU: uuid(t, 0)})
	demand(t, err, wire.StatusBadDescriptor)
	_, err = s.Export(ctx, client.Allocation{FD: own.fd, Bytes: 2 << 20, Offset: 1 << 20, Length: 2 << 20,
		GPU: uuid(t, 0)})
	demand(t, err, wire.StatusOutOfRange)

	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	_, err = s.Export(ctx, client.Allocation{FD: int(file.Fd()), Bytes: 2 << 20, GPU: uuid(t, 0)})
	demand(t, err, wire.StatusBadDescriptor)
	unsealed, err := unix.MemfdCreate("unsealed", unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(unsealed)
	_, err = s.Export(ctx, client.Allocation{FD: unsealed, Bytes: 2 << 20, GPU: uuid(t, 0)})
	demand(t, err, wire.StatusBadDescriptor)

	if m, err := s.Export(ctx, client.Allocation{FD: own.fd, Bytes: 2 << 20, GPU: uuid(t, 0)}); err != nil {
		t.Errorf("after all that a good export fails: %v", err)
	} else if err := m.Unexport(ctx); err != nil {
		t.Error(err)
	}
}

func TestConnectWithWrongHandleIsRefused(t *testing.T) {
	p := connected(t, launch.RouteDirect)
	ctx := within(t)
	var garbage wire.Handle
	copy(garbage[:], random(t, 128))
	_, err := p.a.Connect(ctx, uuid(t, 0), garbage)
	demand(t, err, wire.StatusBadHandle)

	guessed := p.handle.Layout()
	guessed.Token[5] ^= 1
	_, err = p.a.Connect(ctx, uuid(t, 0), guessed.Handle())
	demandOf(t, err, wire.StatusBadHandle, "container b")

	gone := p.handle.Layout()
	gone.Generation[0] ^= 1
	_, err = p.a.Connect(ctx, uuid(t, 0), gone.Handle())
	demandOf(t, err, wire.StatusUnreachable, gone.Generation.String()+".sock")

	elsewhere := p.handle.Layout()
	elsewhere.Host[0] ^= 1
	_, err = p.a.Connect(ctx, uuid(t, 0), elsewhere.Handle())
	demandCode(t, err, wire.StatusUnreachable, codes.NoNetwork, "")
}

func TestStrangersOnSocketAreRefusedWithReason(t *testing.T) {
	h := newHost(t)
	socket := h.relay("a", launch.RouteAuto, far(0, 1, "nic0"))
	say := func(datagram []byte) error {
		t.Helper()
		c, err := packet.Dial(socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.SetDeadline(testutil.Deadline()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(datagram); err != nil {
			t.Fatal(err)
		}
		m, _, fds, err := c.Receive()
		if err != nil {
			t.Fatal(err)
		}
		packet.CloseAll(fds)
		failure, ok := m.(*wire.Failure)
		if !ok {
			t.Fatalf("the relay answered with a %T", m)
		}
		return failure.Err()
	}
	hello := func(oldest, newest uint32) []byte {
		return wire.Encode(&wire.Hello{Magic: wire.Magic, Oldest: oldest, Newest: newest}, 1)
	}
	demand(t, say([]byte{1}), wire.StatusMalformed)
	demand(t, say([]byte("GET / HTTP/1.1\r\n\r\n")), wire.StatusMalformed)
	demand(t, say(hello(1, 1)[:20]), wire.StatusMalformed)
	demand(t, say(bytes.Repeat([]byte{7}, 5000)), wire.StatusMalformed)
	demand(t, say(wire.Encode(&wire.Statistics{}, 1)), wire.StatusMalformed)
	demand(t, say(hello(wire.NewestVersion+1, wire.NewestVersion+9)), wire.StatusVersion)
	demand(t, say(hello(0, 0)), wire.StatusVersion)
	demand(t, say(hello(9, 1)), wire.StatusVersion)
	attach(t, socket) // it goes on
}

func TestReportNamesProgramsOfClients(t *testing.T) {
	h := newHost(t)
	socket, r := h.start("a", launch.RouteAuto, -1, far(0, 1, "nic0"))
	for _, program := range []uint64{wire.ProgramNIXL, wire.ProgramNCCL, 0, 1 << 40} {
		c, err := packet.Dial(socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		hello := &wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion, Program: program}
		_, fds, err := c.Exchange(hello, 20*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		packet.CloseAll(fds)
	}
	var got []string
	for _, c := range r.Report().Clients {
		got = append(got, c.Program)
	}
	slices.Sort(got)
	if want := []string{"", "", launch.ProgramNCCL, launch.ProgramNIXL}; !slices.Equal(got, want) {
		t.Errorf("the programs are %q, want %q", got, want)
	}
}

func TestSessionGarbageEndsThatSessionOnly(t *testing.T) {
	h := newHost(t)
	socket := h.relay("a", launch.RouteAuto, far(0, 1, "nic0"))
	good := attach(t, socket)
	c, err := packet.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, fds, err := c.Exchange(&wire.Hello{Magic: wire.Magic, Oldest: 1, Newest: wire.NewestVersion}, 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	packet.CloseAll(fds)
	_, _, err = c.Exchange(&wire.PeerSend{Send: 1}, 20*time.Second)
	demand(t, err, wire.StatusMalformed)
	if _, err := c.Write(random(t, 333)); err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	demand(t, ends(t, c), wire.StatusMalformed)
	if _, err := good.Statistics(within(t)); err != nil {
		t.Errorf("the other session: %v", err)
	}
}

func TestConnectionEndReachesBothSides(t *testing.T) {
	for _, route := range routes {
		for _, c := range []struct {
			name   string
			end    func(t *testing.T, p *pair)
			status wire.Status
		}{
			{"the sender disconnects", func(t *testing.T, p *pair) {
				if err := p.sending.Close(within(t)); err != nil {
					t.Error(err)
				}
			}, wire.StatusPeerClosed},
			{"the sender's session ends", func(t *testing.T, p *pair) {
				if err := p.a.Close(); err != nil {
					t.Error(err)
				}
			}, wire.StatusPeerClosed},
		} {
			t.Run(route+"/"+c.name, func(t *testing.T) {
				p := connected(t, route)
				op, err := p.receiving.Receive(p.target.Memory, 0, 8)
				if err != nil {
					t.Fatal(err)
				}
				c.end(t, p)
				_, err = wait(t, op, nil)
				demandOf(t, err, c.status, "container a")
				_, err = p.receiving.Receive(p.target.Memory, 0, 8)
				if err != nil {
					t.Errorf("posting to a connection that is down: %v", err)
				}
			})
		}
	}
}

// The supervisor that sees the end of a container before the relay does stops
// the relay; the reason stays the container's end.
func TestRelayStoppedAfterContainerEndReportsContainerEnd(t *testing.T) {
	for _, c := range []struct {
		name   string
		ended  bool
		status wire.Status
	}{
		{"the container lives", false, wire.StatusPeerRelayDied},
		{"the container has ended", true, wire.StatusPeerContainerDied},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			init := exec.Command("sleep", "1000")
			if err := init.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { init.Process.Kill(); init.Wait() })
			pidfd, err := unix.PidfdOpen(init.Process.Pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { unix.Close(pidfd) })
			socket, stopped := h.start("a", launch.RouteStaged, pidfd, far(0, 1, "nic0"))
			a := attach(t, socket)
			b := attach(t, h.relay("b", launch.RouteStaged, far(3, 2, "nic0")))
			_, receiving, _ := join(t, a, 0, b, 3)
			target := exported(t, b, 3, 2<<20)
			receive, err := receiving.Receive(target.Memory, 0, 8)
			if err != nil {
				t.Fatal(err)
			}
			// While the relay is busy both are queued, so the relay handles the stop before the
			// end.
			queued := make(chan bool)
			stopped.Do(func() { <-queued })
			stopped.Do(func() {
				if c.ended {
					init.Process.Kill()
					init.Wait()
				}
			})
			stopped.Stop("terminated")
			close(queued)
			_, err = wait(t, receive, nil)
			demandOf(t, err, c.status, "container a")
		})
	}
}

func TestUnexportedMemoryIsUnmappedAfterLastOperation(t *testing.T) {
	p := connected(t, launch.RouteDirect)
	receive, err := p.receiving.Receive(p.target.Memory, 0, 8)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.target.Unexport(within(t)); err != nil {
		t.Fatal(err)
	}
	want := random(t, 8)
	p.source.write(0, want)
	send, err := p.sending.Send(p.source.Memory, 0, 8)
	for _, op := range []*client.Operation{send, receive} {
		if _, err := wait(t, op, err); err != nil {
			t.Fatalf("an operation that was posted before the unexport: %v", err)
		}
	}
	if !bytes.Equal(p.target.read(0, 8), want) {
		t.Error("the bytes are wrong")
	}
}

func TestManyConnectionsOverSmallSlotsComplete(t *testing.T) {
	// More messages than slots, received in the opposite order: nothing may
	// wait for a slot that only another waiting message could free.
	p := connected(t, launch.RouteStaged)
	const connections, n = 8, 1<<20 + 77
	var all []*client.Operation
	var receives []func()
	var check []func()
	for i := range uint64(connections) {
		sending, receiving, _ := join(t, p.a, 0, p.b, 3)
		want := random(t, n)
		p.source.write(i*n, want)
		op, err := sending.Send(p.source.Memory, i*n, n)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, op)
		receives = append(receives, func() {
			op, err := receiving.Receive(p.target.Memory, i*n, n)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, op)
		})
		check = append(check, func() {
			if !bytes.Equal(p.target.read(i*n, n), want) {
				t.Errorf("message %d arrived wrong", i)
			}
		})
	}
	for i := range receives {
		receives[len(receives)-1-i]()
	}
	for _, op := range all {
		if _, err := wait(t, op, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range check {
		f()
	}
}

// play is another process of a test.
func play(role string) int {
	var err error
	switch role {
	case "relay":
		err = playRelay()
	case "events":
		err = playEvents()
	case "staging":
		err = playStaging()
	case "lender":
		err = playLender()
	case "client":
		err = playClient()
	case "watched-client":
		err = playWatchedClient()
	case "receiver":
		err = playReceiver()
	case "engine":
		err = playEngine()
	case "flooder":
		err = playFlooder()
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
