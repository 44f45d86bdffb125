package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/verbs/softdevice/engine"
)

const mib = 1 << 20

var (
	simulator string
	driver    *cuda.Driver
	gpus      [2]*device.Device
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	if simulator, err = os.MkdirTemp("", "peerlane-engine-*"); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(simulator)) }()
	var devices []sim.Device
	for i := range gpus {
		devices = append(
			devices,
			sim.Device{
				Index:  i,
				Minor:  i,
				UUID:   fmt.Sprintf("GPU-5eed0000-0000-4000-8000-00000000000%d", i),
				BusID:  fmt.Sprintf("0000:1%d:00.0", i+7),
				Memory: 256 * mib,
				Name:   "Simulated GPU",
			},
		)
	}
	if err := sim.Use(simulator, devices); err != nil {
		return 0, err
	}
	if driver, err = cuda.Open(); err != nil {
		return 0, err
	}
	for i := range gpus {
		if gpus[i], err = device.Open(driver, devices[i].BusID); err != nil {
			return 0, err
		}
	}
	return m.Run(), nil
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// serve starts an engine for a host of software devices.
func serve(t *testing.T, dir string) *engine.Engine {
	t.Helper()
	e, err := engine.New()
	check(t, err)
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, engine.SocketName), Net: "unixpacket"})
	check(t, err)
	ended := make(chan error, 1)
	go func() { ended <- e.Serve(l) }()
	t.Cleanup(func() {
		l.Close()
		check(t, <-ended)
	})
	return e
}

// end is a queue pair with GPU memory and host memory.
type end struct {
	t         *testing.T
	gpu       *device.Device
	context   *verbs.Context
	domain    *verbs.Domain
	queue     *verbs.Queue
	pair      *verbs.Pair
	memory    *device.Memory
	region    *verbs.Region
	host      []byte
	hostKnown *verbs.Region
	gid       verbs.GID
}

func newEnd(t *testing.T, l *verbs.Library, name string, gpu *device.Device) *end {
	t.Helper()
	e := &end{t: t, gpu: gpu, host: make([]byte, 2*mib)}
	var err error
	e.context, err = l.OpenDevice(name)
	check(t, err)
	e.domain, err = e.context.NewDomain()
	check(t, err)
	e.queue, err = e.context.NewQueue(16)
	check(t, err)
	access := verbs.LocalWrite | verbs.RemoteWrite | verbs.RemoteRead
	e.memory, err = device.Create(driver, gpu.Ordinal, 2*mib, cuda.Access{Device: gpu.Ordinal, Write: true})
	check(t, err)
	check(t, gpu.On(func() (err error) { // as relays register
		fd, err := e.memory.DMABuf()
		check(t, err)
		defer unix.Close(fd)
		e.region, err = e.domain.RegisterDMABuf(fd, 0, e.memory.Bytes, uint64(e.memory.Address()), access)
		return err
	}))
	e.hostKnown, err = e.domain.Register(
		uintptr(unsafe.Pointer(unsafe.SliceData(e.host))),
		uint64(len(e.host)),
		e.hostAt(),
		access,
	)
	check(t, err)
	e.pair, err = e.domain.NewPair(verbs.PairConfig{Send: e.queue, Recv: e.queue, SendDepth: 8, RecvDepth: 8})
	check(t, err)
	check(t, e.pair.Init(1, 0, access))
	gids, err := e.context.GIDs(1)
	check(t, err)
	e.gid, err = verbs.ChooseGID(gids, verbs.Choice{Index: verbs.AnyIndex})
	check(t, err)
	t.Cleanup(func() {
		check(
			t,
			errors.Join(
				e.pair.Close(),
				e.region.Close(),
				e.hostKnown.Close(),
				e.queue.Close(),
				e.domain.Close(),
				e.context.Close(),
				e.memory.Close(),
			),
		)
	})
	return e
}

func (e *end) hostAt() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(e.host)))) }

func (e *end) connect(to *end) {
	e.t.Helper()
	check(
		e.t,
		e.pair.ReadyToReceive(
			verbs.Route{
				Pair:          to.pair.Number(),
				MTU:           verbs.MTU1024,
				Global:        true,
				GID:           to.gid.GID,
				SourceIndex:   uint8(e.gid.Index),
				HopLimit:      64,
				Port:          1,
				Reads:         1,
				ReceiverTimer: 12,
			},
		),
	)
	check(e.t, e.pair.ReadyToSend(verbs.Sending{Timeout: 14, Retries: 7, ReceiverRetries: 7, Reads: 1}))
}

// does posts a request and waits for its completion.
func (e *end) does(s verbs.Send) verbs.Completion {
	e.t.Helper()
	s.Flags |= verbs.Signaled
	_, err := e.pair.PostSend([]verbs.Send{s})
	check(e.t, err)
	return e.completes()
}

func (e *end) completes() verbs.Completion {
	e.t.Helper()
	var one [1]verbs.Completion
	for until := time.Now().Add(time.Minute); time.Now().Before(until); time.Sleep(100 * time.Microsecond) {
		n, err := e.queue.Poll(one[:])
		check(e.t, err)
		if n == 1 {
			return one[0]
		}
	}
	e.t.Fatal("no completion within a minute")
	return one[0]
}

// content copies the GPU memory out by CUDA.
func (e *end) content(n int) []byte {
	e.t.Helper()
	b := make([]byte, n)
	check(e.t, e.gpu.On(func() error {
		return errors.Join(
			driver.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(b)), e.memory.Ptr, uint64(n), 0),
			driver.StreamSynchronize(0),
		)
	}))
	return b
}

func (e *end) fill(b []byte) {
	e.t.Helper()
	check(e.t, e.gpu.On(func() error {
		return errors.Join(
			driver.MemcpyHtoDAsync(e.memory.Ptr, unsafe.Pointer(unsafe.SliceData(b)), uint64(len(b)), 0),
			driver.StreamSynchronize(0),
		)
	}))
}

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) + seed
	}
	return b
}

// copied returns the bytes that each simulated GPU has copied in.
func copied(t *testing.T) (in [2]uint64) {
	t.Helper()
	logs, err := sim.ReadLog(simulator)
	check(t, err)
	for i := range in {
		in[i] = logs[i].BytesIn
	}
	return in
}

func twoEnds(t *testing.T) (a, b *end, h softdevice.Host) {
	t.Helper()
	a, b, h, _ = servedEnds(t, 0)
	return a, b, h
}

// servedEnds returns two connected ends, of devices with a rate, and the engine.
func servedEnds(t *testing.T, rate uint64) (a, b *end, h softdevice.Host, served *engine.Engine) {
	t.Helper()
	h, err := softdevice.New(
		t.TempDir(),
		softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Rate: rate},
		softdevice.Device{Name: "mlx5_1", GUID: 2, Address: "192.0.2.2", Rate: rate},
	)
	check(t, err)
	served = serve(t, h.Dir)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	a, b = newEnd(t, l, "mlx5_0", gpus[0]), newEnd(t, l, "mlx5_1", gpus[1])
	a.connect(b)
	b.connect(a)
	return a, b, h, served
}

func TestWriteBetweenGPUsIsOneCopyOfTheEngine(t *testing.T) {
	a, b, _, served := servedEnds(t, 0)
	want := pattern(mib+13, 3)
	a.fill(want)
	_, err := b.pair.PostRecv([]verbs.Recv{{ID: 9}})
	check(t, err)
	before := copied(t)
	write := verbs.Send{
		ID:        1,
		Op:        verbs.WriteImmediate,
		Immediate: 77,
		Address:   uint64(a.memory.Address()),
		LKey:      a.region.LKey(),
		Length:    uint32(len(want)),
		Remote:    uint64(b.memory.Address()),
		RKey:      b.region.RKey(),
	}
	if c := a.does(write); c.Err() != nil || c.ID != 1 {
		t.Fatalf("%+v (%v)", c, c.Err())
	}
	if c := b.completes(); c.Err() != nil || c.Immediate != 77 || c.Bytes != write.Length {
		t.Errorf("the receiver's completion is %+v (%v)", c, c.Err())
	}
	after := copied(t)
	if in := after[1] - before[1]; in != uint64(write.Length) {
		t.Errorf("the target's GPU logged %d bytes in, want %d by one copy", in, write.Length)
	}
	if !bytes.Equal(b.content(len(want)), want) {
		t.Error("the bytes on the target are others")
	}
	if f := served.Figures(); f != (engine.Figures{Done: 1, Copies: 1}) {
		t.Errorf("the engine counts %+v, want one write and one copy", f)
	}
}

func TestEngineMergesPartsThatFollowEachOther(t *testing.T) {
	a, b, _, served := servedEnds(t, 0)
	const parts, each = 8, 128 << 10
	want := pattern(parts*each, 9)
	a.fill(want)
	var list []verbs.Send
	for i := range uint64(parts) {
		list = append(
			list,
			verbs.Send{
				ID:      i,
				Op:      verbs.Write,
				Address: uint64(a.memory.Address()) + i*each,
				LKey:    a.region.LKey(),
				Length:  each,
				Remote:  uint64(b.memory.Address()) + i*each,
				RKey:    b.region.RKey(),
			},
		)
	}
	list[parts-1].Flags = verbs.Signaled
	merged := uint64(parts)
	for try := 0; merged == parts && try < 100; try++ { // the engine may take each at once
		before := served.Figures()
		if n, err := a.pair.PostSend(list); n != parts || err != nil {
			t.Fatalf("%d posted: %v", n, err)
		}
		if c := a.completes(); c.Err() != nil || c.ID != parts-1 {
			t.Fatalf("%+v (%v)", c, c.Err())
		}
		after := served.Figures()
		if after.Done-before.Done != parts {
			t.Fatalf("the engine did %d writes of %d", after.Done-before.Done, parts)
		}
		merged = after.Copies - before.Copies
	}
	if merged >= parts {
		t.Errorf("%d writes of adjacent bytes took %d copies", parts, merged)
	}
	if !bytes.Equal(b.content(len(want)), want) {
		t.Error("the bytes on the target are others")
	}
}

// The report of an unsignaled write wakes the process, which has no completion then, and the next report
// has to wake it again.
func TestArmedQueueReportsCompletionBehindUnsignaledWrite(t *testing.T) {
	a, b, _, served := servedEnds(t, 0)
	check(t, a.queue.Arm())
	write := verbs.Send{
		ID:      1,
		Op:      verbs.Write,
		Address: uint64(a.memory.Address()),
		LKey:    a.region.LKey(),
		Length:  4096,
		Remote:  uint64(b.memory.Address()),
		RKey:    b.region.RKey(),
	}
	for i := range uint64(4) {
		_, err := a.pair.PostSend([]verbs.Send{write})
		check(t, err)
		testutil.Until(t, "the engine to do an unsignaled write", func() bool { return served.Figures().Done == i+1 })
		time.Sleep(20 * time.Millisecond) // the process takes the report
	}
	write.ID, write.Flags = 2, verbs.Signaled
	_, err := a.pair.PostSend([]verbs.Send{write})
	check(t, err)
	ready := []unix.PollFd{{Fd: int32(a.queue.FD()), Events: unix.POLLIN}}
	if n, err := unix.Poll(ready, 20_000); n != 1 {
		t.Fatalf("no event of an armed queue in 20 s: %v", err)
	}
	check(t, a.queue.Acknowledge())
	if c := a.completes(); c.Err() != nil || c.ID != 2 {
		t.Fatalf("%+v (%v)", c, c.Err())
	}
}

// The process handles requests of host memory, and immediates keep a common order.
func TestImmediatesOfEngineAndProcessKeepTheirOrder(t *testing.T) {
	a, b, _, served := servedEnds(t, 0)
	var receives []verbs.Recv
	for i := range uint64(8) {
		receives = append(receives, verbs.Recv{ID: i})
	}
	const rounds = 40
	for round := range uint32(rounds) {
		_, err := b.pair.PostRecv(receives)
		check(t, err)
		for i := range uint32(8) {
			s := verbs.Send{
				ID:        uint64(i),
				Op:        verbs.WriteImmediate,
				Flags:     verbs.Signaled,
				Immediate: round<<8 | i,
				Address:   uint64(a.memory.Address()),
				LKey:      a.region.LKey(),
				Length:    4096,
				Remote:    uint64(b.memory.Address()),
				RKey:      b.region.RKey(),
			}
			if (round+i)%3 == 0 {
				s.Address, s.LKey, s.Remote, s.RKey = a.hostAt(), a.hostKnown.LKey(), b.hostAt(), b.hostKnown.RKey()
			}
			_, err := a.pair.PostSend([]verbs.Send{s})
			check(t, err)
		}
		for i := range uint32(8) {
			if c := a.completes(); c.Err() != nil || c.ID != uint64(i) {
				t.Fatalf("round %d: completion %+v (%v) in place of request %d", round, c, c.Err(), i)
			}
			if c := b.completes(); c.Err() != nil || c.Immediate != round<<8|i {
				t.Fatalf("round %d: immediate %#x in place of %#x (%v)", round, c.Immediate, round<<8|i, c.Err())
			}
		}
	}
	if f := served.Figures(); f.Done == 0 {
		t.Error("the engine did none of them")
	}
}

// A sender gets success only for writes whose immediates the receiver gets.
func TestReceiverThatFailsHasEachImmediateThatSucceeded(t *testing.T) {
	for try := range 10 {
		a, b, _ := twoEnds(t)
		const n = 8
		_, err := b.pair.PostRecv(make([]verbs.Recv, n))
		check(t, err)
		for i := range uint64(n) {
			_, err := a.pair.PostSend(
				[]verbs.Send{
					{
						ID:      i,
						Op:      verbs.WriteImmediate,
						Flags:   verbs.Signaled,
						Address: uint64(a.memory.Address()),
						LKey:    a.region.LKey(),
						Length:  64 << 10,
						Remote:  uint64(b.memory.Address()),
						RKey:    b.region.RKey(),
					},
				},
			)
			check(t, err)
		}
		time.Sleep(time.Duration(try) * 50 * time.Microsecond)
		check(t, b.pair.Fail())
		sent, got := 0, 0
		for range n {
			if c := a.completes(); c.Err() == nil {
				sent++
			}
			if c := b.completes(); c.Err() == nil {
				got++
			}
		}
		if sent != got {
			t.Fatalf("%d writes succeeded at the sender and %d at the receiver", sent, got)
		}
	}
}

func TestRateIsOfAllQueuePairsOfADevice(t *testing.T) {
	const rate, each, writes = 100e6, mib, 10
	a, b, h, served := servedEnds(t, rate)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	c, d := newEnd(t, l, "mlx5_0", gpus[0]), newEnd(t, l, "mlx5_1", gpus[1])
	c.connect(d)
	d.connect(c)
	start := time.Now()
	for range writes / 2 {
		for _, e := range [][2]*end{{a, b}, {c, d}} {
			from, to := e[0], e[1]
			_, err := from.pair.PostSend(
				[]verbs.Send{
					{
						Op:      verbs.Write,
						Flags:   verbs.Signaled,
						Address: uint64(from.memory.Address()),
						LKey:    from.region.LKey(),
						Length:  each,
						Remote:  uint64(to.memory.Address()),
						RKey:    to.region.RKey(),
					},
				},
			)
			check(t, err)
		}
	}
	for range writes / 2 {
		for _, e := range []*end{a, c} {
			if one := e.completes(); one.Err() != nil {
				t.Fatal(one.Err())
			}
		}
	}
	// The last write needs no time after it.
	if took, least := time.Since(start), time.Duration((writes-1)*each*int64(time.Second)/rate)-time.Millisecond; took <
		least {
		t.Errorf("%d MiB at %d MB/s took %v, want at least %v", writes, int(rate/1e6), took, least)
	}
	if f := served.Figures(); f.Done != writes {
		t.Errorf("the engine did %d writes of %d", f.Done, writes)
	}
}

// A queue pair with two writes does not wait for the eight that another has posted before: queue
// pairs of a device with a rate take turns.
func TestQueuePairsOfAPacedDeviceTakeTurns(t *testing.T) {
	const rate, each, many, few = 20e6, mib, 8, 2
	greedy, to, h, _ := servedEnds(t, rate)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	modest, other := newEnd(t, l, "mlx5_0", gpus[0]), newEnd(t, l, "mlx5_1", gpus[1])
	modest.connect(other)
	other.connect(modest)
	post := func(from, to *end) {
		_, err := from.pair.PostSend([]verbs.Send{{Op: verbs.Write, Flags: verbs.Signaled,
			Address: uint64(from.memory.Address()), LKey: from.region.LKey(), Length: each,
			Remote: uint64(to.memory.Address()), RKey: to.region.RKey()}})
		check(t, err)
	}
	for range many {
		post(greedy, to)
	}
	for range few {
		post(modest, other)
	}
	for range few {
		one := modest.completes()
		check(t, one.Err())
	}
	done, err := greedy.queue.Poll(make([]verbs.Completion, many))
	check(t, err)
	if most := few + 2; done > most { // one that was under way, and one of the last turn
		t.Errorf("%d of %d earlier writes of the other queue pair ended first, want at most %d", done, many, most)
	}
	for ; done < many; done++ {
		one := greedy.completes()
		check(t, one.Err())
	}
}

func TestGPUAndHostMemoryExchangeByTheEngine(t *testing.T) {
	a, b, _ := twoEnds(t)
	in := pattern(mib+100, 5) // more than passes through at a time
	copy(a.host, in)
	write := verbs.Send{
		Op:      verbs.Write,
		Address: a.hostAt(),
		LKey:    a.hostKnown.LKey(),
		Length:  uint32(len(in)),
		Remote:  uint64(b.memory.Address()),
		RKey:    b.region.RKey(),
	}
	if c := a.does(write); c.Err() != nil {
		t.Fatalf("host to GPU: %v", c.Err())
	}
	if !bytes.Equal(b.content(len(in)), in) {
		t.Error("host to GPU: the bytes are others")
	}
	out := verbs.Send{
		Op:      verbs.Write,
		Address: uint64(b.memory.Address()),
		LKey:    b.region.LKey(),
		Length:  uint32(len(in)),
		Remote:  a.hostAt(),
		RKey:    a.hostKnown.RKey(),
	}
	clear(a.host)
	if c := b.does(out); c.Err() != nil {
		t.Fatalf("GPU to host: %v", c.Err())
	}
	if !bytes.Equal(a.host[:len(in)], in) {
		t.Error("GPU to host: the bytes are others")
	}
}

// Reads flush a NIC's writes. The CPU reads through BAR1, and a copy engine does where BAR1 has no room.
func TestShortReadTakesNoCopyWithAperture(t *testing.T) {
	for name, c := range map[string]struct {
		aperture string
		copies   uint64
	}{"aperture": {"", 0}, "no aperture": {"refuse", 1}} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("PEERLANE_SIM_APERTURE", c.aperture)
			a, b, _, served := servedEnds(t, 0)
			in := pattern(64, 5)
			b.fill(in)
			before, copied := served.Figures(), copiesOf(t)
			read := verbs.Send{
				Op:      verbs.Read,
				Address: a.hostAt(),
				LKey:    a.hostKnown.LKey(),
				Length:  17,
				Remote:  uint64(b.memory.Address()) + 7,
				RKey:    b.region.RKey(),
			}
			if c := a.does(read); c.Err() != nil || !bytes.Equal(a.host[:17], in[7:24]) {
				t.Errorf("read: %v, bytes %v, want %v", c.Err(), a.host[:17], in[7:24])
			}
			if after := served.Figures(); after.Done != before.Done+1 {
				t.Errorf("the engine did not do the read: %+v", after)
			}
			if copies := copiesOf(t) - copied; copies != c.copies {
				t.Errorf("the read took %d copies, want %d", copies, c.copies)
			}
		})
	}
}

// copiesOf returns the number of copies of the second simulated GPU.
func copiesOf(t *testing.T) uint64 {
	t.Helper()
	logs, err := sim.ReadLog(simulator)
	check(t, err)
	return logs[1].Copies
}

func TestEngineRefusesAccessBeyondKeys(t *testing.T) {
	for name, change := range map[string]func(*verbs.Send, *end){
		"beyond the region": func(s *verbs.Send, b *end) { s.Remote = uint64(b.memory.Address()) + b.memory.Bytes - 4 },
		"no such key":       func(s *verbs.Send, b *end) { s.RKey = b.region.RKey() + 1<<20 },
		"a local key":       func(s *verbs.Send, b *end) { s.RKey = b.region.LKey() },
	} {
		t.Run(name, func(t *testing.T) {
			a, b, _ := twoEnds(t)
			b.fill(make([]byte, 64))
			a.fill(pattern(64, 1))
			write := verbs.Send{
				Op:      verbs.Write,
				Address: uint64(a.memory.Address()),
				LKey:    a.region.LKey(),
				Length:  64,
				Remote:  uint64(b.memory.Address()),
				RKey:    b.region.RKey(),
			}
			change(&write, b)
			if c := a.does(write); c.Status != verbs.RemoteAccessError {
				t.Errorf("%+v, want %v", c, verbs.RemoteAccessError)
			}
			if !bytes.Equal(b.content(64), make([]byte, 64)) {
				t.Error("bytes were written")
			}
		})
	}
}

// A device with a fault of GPU memory handles that memory in its process.
func TestFaultyDeviceDoesNotUseTheEngine(t *testing.T) {
	h, err := softdevice.New(
		t.TempDir(),
		softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Fault: softdevice.FaultLostTail},
	)
	check(t, err)
	serve(t, h.Dir)
	l, err := verbs.OpenLibrary(h.Library())
	check(t, err)
	newEnd(t, l, "mlx5_0", gpus[0])
	if calls, err := h.Calls("engine"); err != nil || len(calls) > 0 {
		t.Errorf("the engine was asked: %+v, %v", calls, err)
	}
}
