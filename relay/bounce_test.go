package relay_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

const mib = 1 << 20

// These tests also run on a machine with two GPUs or more, with
// PEERLANE_TEST_CUDA=driver and -test.run 'WithoutRoom|LastResort|Reserve'.

// fillGPU takes a GPU's memory but for so many bytes.
func fillGPU(t *testing.T, i int, leave uint64) {
	t.Helper()
	// The context stays, so the context's memory is allocated before.
	g, err := device.Open(driver, devices[i].BusID)
	if err != nil {
		t.Fatal(err)
	}
	var handle cuda.MemHandle
	var left uint64
	err = g.On(func() error {
		free, _, err := driver.MemGetInfo()
		if err != nil {
			return err
		}
		granule, err := driver.MemGranularity(g.Ordinal)
		if err != nil {
			return err
		}
		if free < leave+granule {
			return fmt.Errorf("GPU %d has %d MiB free, and %d are to be left", i, free/mib, leave/mib)
		}
		// Some granules fewer, because the driver uses more memory than reported.
		for take := (free - leave) / granule * granule; ; take -= granule {
			handle, err = driver.MemCreate(g.Ordinal, take, cuda.MemOptions{})
			if !errors.Is(err, cuda.ErrOutOfMemory) || take == granule {
				break
			}
		}
		if err == nil {
			left, _, err = driver.MemGetInfo()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("GPU %d: %d MiB are left", i, left/mib)
	t.Cleanup(func() {
		if err := errors.Join(driver.MemRelease(handle), g.Close()); err != nil {
			t.Error(err)
		}
	})
}

// fixture is a container on GPU 0 that sends to itself through staging.
type fixture struct {
	relay   *relay.Relay
	socket  string
	gpu     *device.Device
	memory  *device.Memory
	session *client.Session
	export  *client.Memory
	pinned  []byte // host memory that copy keeps; driver.MemHostAlloc takes new pages each time
}

var selves atomic.Int32

const (
	selfBytes  = 68 * mib // in two halves, longer than a configured slot
	shortBytes = 3*mib + 5
)

func newSelf(t *testing.T, h *host, lane launch.Lane) *fixture {
	t.Helper()
	f := &fixture{}
	f.socket, f.relay = h.start(fmt.Sprintf("self%d", selves.Add(1)), launch.RouteStaged, -1, lane)
	var err error
	if f.gpu, err = device.Open(driver, devices[0].BusID); err != nil {
		t.Fatal(err)
	}
	if err := f.gpu.On(func() error {
		f.memory, err = device.Create(driver, f.gpu.Ordinal, selfBytes, cuda.Access{Device: f.gpu.Ordinal, Write: true})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		var err error
		if f.pinned != nil {
			err = f.gpu.On(func() error { return driver.MemHostFree(unsafe.Pointer(&f.pinned[0])) })
		}
		if err := errors.Join(err, f.memory.Close(), f.gpu.Close()); err != nil {
			t.Error(err)
		}
	})
	fd, err := f.memory.Export()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	f.session = attach(t, f.socket)
	if f.export, err = f.session.Export(within(t), client.Allocation{FD: fd, Bytes: f.memory.Bytes,
		GPU: uuid(t, 0)}); err != nil {
		t.Fatal(err)
	}
	return f
}

// copy moves bytes between the host and the GPU.
func (f *fixture) copy(t *testing.T, offset uint64, b []byte, in bool) {
	t.Helper()
	if err := f.gpu.On(func() error {
		stream, err := driver.StreamCreate()
		if err != nil {
			return err
		}
		if len(f.pinned) < len(b) {
			host, err := driver.MemHostAlloc(uint64(len(b)))
			if err != nil {
				return err
			}
			if f.pinned != nil {
				if err := driver.MemHostFree(unsafe.Pointer(&f.pinned[0])); err != nil {
					return err
				}
			}
			f.pinned = unsafe.Slice((*byte)(host), len(b))
		}
		pinned, host := f.pinned[:len(b)], unsafe.Pointer(&f.pinned[0])
		if in {
			copyBytes(pinned, b)
			err = driver.MemcpyHtoDAsync(f.memory.Ptr+cuda.Ptr(offset), host, uint64(len(b)), stream)
		} else {
			err = driver.MemcpyDtoHAsync(host, f.memory.Ptr+cuda.Ptr(offset), uint64(len(b)), stream)
		}
		err = errors.Join(err, driver.StreamSynchronize(stream))
		if !in {
			copyBytes(b, pinned)
		}
		return errors.Join(err, driver.StreamDestroy(stream))
	}); err != nil {
		t.Fatal(err)
	}
}

// connect opens the lane's staging.
func (f *fixture) connect(t *testing.T) (sending, receiving *client.Connection, err error) {
	t.Helper()
	listener, err := f.session.Listen(within(t), uuid(t, 0))
	if err != nil {
		t.Fatal(err)
	}
	if sending, err = f.session.Connect(within(t), uuid(t, 0), listener.Handle()); err != nil {
		return nil, nil, err
	}
	receiving, err = listener.Accept(within(t))
	return sending, receiving, err
}

// move sends shortBytes from the first half of the memory to the second, and compares the bytes.
func (f *fixture) move(t *testing.T) {
	t.Helper()
	f.moveBytes(t, shortBytes)
}

// moveBytes is move with a length of at most half the memory.
func (f *fixture) moveBytes(t *testing.T, n uint64) {
	t.Helper()
	sending, receiving, err := f.connect(t)
	if err != nil {
		t.Fatal(err)
	}
	const half = selfBytes / 2
	want := random(t, n)
	f.copy(t, 0, want, true)
	receive, err := receiving.Receive(f.export, half, n)
	if err != nil {
		t.Fatal(err)
	}
	send, err := sending.Send(f.export, 0, n)
	for _, op := range []*client.Operation{send, receive} {
		if moved, err := wait(t, op, err); err != nil || moved != n {
			t.Fatalf("%d bytes, %v", moved, err)
		}
	}
	got := make([]byte, n)
	f.copy(t, half, got, false)
	if !bytes.Equal(got, want) {
		t.Error("the bytes are wrong")
	}
}

// staging returns the relay's report on a GPU.
func (f *fixture) staging(t *testing.T, i int) launch.Staging {
	t.Helper()
	report := f.relay.Report()
	for _, s := range report.Staging {
		if s.GPU == devices[i].BusID {
			return s
		}
	}
	return launch.Staging{}
}

func needGPUs(t *testing.T, n int) {
	t.Helper()
	if len(devices) < n {
		t.Skipf("it needs %d GPUs, and here are %d", n, len(devices))
	}
}

func asConfigured(c *launch.Config) { c.Slots, c.SlotBytes = 8, 32*mib }

// A training job has taken the server GPU.
func TestFullServerGPUShrinksStaging(t *testing.T) {
	needGPUs(t, 2)
	for _, c := range []struct {
		free, wants uint64
		note        string
	}{
		{600 * mib, 512 * mib, ""},
		{100 * mib, 64 * mib, "2 slots of 16 MiB in place of 8 of 32 MiB: "},
	} {
		t.Run(fmt.Sprintf("%d MiB free", c.free/mib), func(t *testing.T) {
			h := newHost(t)
			h.change = asConfigured
			h.nic("nic0")
			fillGPU(t, 1, c.free)
			f := newSelf(t, h, far(0, 1, "nic0"))
			f.move(t)
			s := f.staging(t, 1)
			t.Logf("staging: %+v", s)
			if s.Wanted != 512*mib || s.Bytes == 0 || s.Bytes > c.free {
				t.Errorf("staging is %+v", s)
			}
			// A real driver needs a part of the free memory.
			if !realGPUs && (s.Bytes != c.wants || !strings.HasPrefix(s.Note, c.note) || c.note == "" && s.Note != "") {
				t.Errorf("staging is %+v", s)
			}
			if s.Bytes < s.Wanted && !strings.Contains(s.Note, "out of memory") {
				t.Errorf("it does not say why: %q", s.Note)
			}
		})
	}
	t.Run("nothing free, and a spare", func(t *testing.T) {
		needGPUs(t, 3)
		h := newHost(t)
		h.change = asConfigured
		h.nic("nic0")
		fillGPU(t, 1, 0)
		lane := far(0, 1, "nic0")
		lane.Spares = []launch.Spare{{GPU: gpu(2), NICs: []string{"spare"}}}
		f := newSelf(t, h, lane)
		f.move(t)
		if s := f.staging(t, 1); s.Bytes != 0 || !strings.Contains(s.Note, "out of memory") {
			t.Errorf("staging on the full GPU is %+v", s)
		}
		if s := f.staging(t, 2); s.Bytes != 512*mib || !strings.Contains(s.Note, "in place of the lane's own servers") {
			t.Errorf("staging on the spare is %+v", s)
		}
	})
}

// said collects this process's log lines at a level or above.
type said struct {
	sync.Mutex
	lines []string
}

func (s *said) Levels() []logrus.Level { return []logrus.Level{logrus.ErrorLevel, logrus.WarnLevel} }

func (s *said) Fire(e *logrus.Entry) error {
	s.Lock()
	defer s.Unlock()
	s.lines = append(s.lines, e.Message)
	return nil
}

func (s *said) count(words string) (n int) {
	s.Lock()
	defer s.Unlock()
	for _, line := range s.lines {
		if strings.Contains(line, words) {
			n++
		}
	}
	return n
}

// listenToLog returns the log's warnings, which the tests do not print.
func listenToLog(t *testing.T) *said {
	t.Helper()
	s := &said{}
	testutil.HookLog(t, logrus.WarnLevel, s)
	return s
}

// bounced returns the relay's report on host memory.
func (f *fixture) bounced() launch.Staging {
	for _, s := range f.relay.Report().Staging {
		if s.Host {
			return s
		}
	}
	return launch.Staging{}
}

// through returns a relay's byte counts of the slots on a GPU, or in host memory, whose UUID is
// zero.
func through(t *testing.T, s *client.Session, server wire.UUID) wire.ServerBytes {
	t.Helper()
	m, err := s.Statistics(within(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range m.Server[:m.Servers] {
		if one.GPU == server {
			return one
		}
	}
	return wire.ServerBytes{}
}

// bouncesBecause returns the reason that the relay's data bounces through host memory.
func (f *fixture) bouncesBecause(t *testing.T) (why string) {
	t.Helper()
	for _, c := range f.relay.Report().Connections {
		if c.GDR || !strings.HasPrefix(c.Registration, "bounce: host memory") {
			t.Errorf("the connection is %+v", c)
		}
		why = c.Registration
	}
	return why
}

// The bytes go through host memory when no server GPU has room, and the report has the route.
func TestFullServerGPUsBounceThroughHostMemory(t *testing.T) {
	needGPUs(t, 2)
	for _, c := range []struct {
		free, gpu uint64 // memory that is free, and staging that is had
	}{{600 * mib, 512 * mib}, {0, 0}} {
		t.Run(fmt.Sprintf("%d MiB free", c.free/mib), func(t *testing.T) {
			h := newHost(t)
			h.change = asConfigured
			h.nic("nic0")
			fillGPU(t, 1, c.free)
			log := listenToLog(t)
			f := newSelf(t, h, far(0, 1, "nic0"))
			f.move(t)
			on, host := f.staging(t, 1), f.bounced()
			if !realGPUs && on.Bytes != c.gpu || on.Wanted != 512*mib || (host.Bytes == 0) != (c.gpu > 0) {
				t.Errorf("staging is %+v and %+v", on, host)
			}
			if c.gpu == 0 {
				if why := f.bouncesBecause(t); !strings.Contains(on.Note, "out of memory") ||
					!strings.Contains(why, "no server GPU has room to stage for GPU "+devices[0].BusID) ||
					!strings.Contains(why, on.Note) {
					t.Errorf("staging is %+v, and the connections bounce because of %q", on, why)
				}
			}
			f.move(t) // nor is it said again
			said := 0
			if c.gpu == 0 {
				said = 1
			}
			if log.count("has no staging: GPU 1") != said || log.count("bounce: host memory") != said {
				t.Errorf("the log says %q", log.lines)
			}
			gpu, ram := through(t, f.session, uuid(t, 1)), through(t, f.session, wire.UUID{})
			const both = 2 * 2 * shortBytes // two messages, both from a slot through a second slot
			if c.gpu == 0 && (gpu.In != 0 || ram.In != both || ram.Out != both) || c.gpu > 0 && (ram.In != 0 || gpu.In != both) {
				t.Errorf("%+v through the GPU's slots, %+v through the host's", gpu, ram)
			}
		})
	}
	t.Run("never", func(t *testing.T) {
		h := newHost(t)
		h.change = func(l *launch.Config) { asConfigured(l); l.Bounce = 0 }
		h.nic("nic0")
		fillGPU(t, 1, 0)
		f := newSelf(t, h, far(0, 1, "nic0"))
		_, _, err := f.connect(t)
		demandCode(t, err, wire.StatusNoStaging, codes.NoStaging, devices[0].BusID)
		f.goesOn(t)
	})
	t.Run("a limit without room", func(t *testing.T) {
		h := newHost(t)
		h.change = func(l *launch.Config) { asConfigured(l); l.Network.Memory = mib / 2 }
		h.nic("nic0")
		fillGPU(t, 1, 0)
		f := newSelf(t, h, far(0, 1, "nic0"))
		_, _, err := f.connect(t)
		demandOf(t, err, wire.StatusNoStaging, devices[0].BusID)
		demandText(t, err, "whose limit is 512 KiB")
		f.goesOn(t)
	})
}

// A lane that the plan has no server GPU for bounces.
func TestLaneWithoutServersBounces(t *testing.T) {
	lane := far(0, 1, "nic0")
	lane.Relay, lane.Servers = false, nil
	for _, role := range []string{launch.RoleFar, "near"} {
		t.Run(role, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			lane.Role = role
			f := newSelf(t, h, lane)
			f.move(t)
			if why := f.bouncesBecause(t); !strings.Contains(why, "the plan has no server GPU for this lane (role "+role+")") {
				t.Errorf("it bounces because of %q", why)
			}
		})
	}
}

// goesOn demands that the relay answers.
func (f *fixture) goesOn(t *testing.T) {
	t.Helper()
	if _, err := f.session.Statistics(within(t)); err != nil {
		t.Fatal(err)
	}
}

// Lanes that bounce, and lanes that do not, on both sides of a connection: the NIC copies between
// memories of both kinds.
func TestBounceAtOneSideTransfers(t *testing.T) {
	const crowded = 1
	for _, c := range []struct {
		name     string
		from, to int // clients' servers
	}{{"out of the host's memory", crowded, 2}, {"into the host's memory", 2, crowded},
		{"through it on both sides", crowded, crowded}} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			fillGPU(t, crowded, 0)
			p := &pair{a: attach(t, h.relay("a", launch.RouteStaged, far(0, c.from, "nic0"))),
				b: attach(t, h.relay("b", launch.RouteStaged, far(3, c.to, "nic0")))}
			p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
			p.sending, p.receiving, _ = join(t, p.a, 0, p.b, 3)
			for i, n := range []uint64{1, 13, 4096, 32<<10 - 1, 32 << 10, 1<<20 + 1, 9<<20 + 5} {
				from, to := uint64(3*i), uint64(5*i)
				want := random(t, n)
				p.source.write(from, want)
				receive, err := p.receiving.Receive(p.target.Memory, to, n)
				if err != nil {
					t.Fatal(err)
				}
				send, err := p.sending.Send(p.source.Memory, from, n)
				for _, op := range []*client.Operation{send, receive} {
					if moved, err := wait(t, op, err); err != nil || moved != n {
						t.Fatalf("%d bytes of %d, %v", moved, n, err)
					}
				}
				if !bytes.Equal(p.target.read(to, n), want) {
					t.Fatalf("%d bytes arrived wrong", n)
				}
			}
			for _, side := range []struct {
				s      *client.Session
				server int
			}{{p.a, c.from}, {p.b, c.to}} {
				if host := through(t, side.s, wire.UUID{}).In > 0; host != (side.server == crowded) {
					t.Errorf("a relay whose server is GPU %d: through the host's memory is %v", side.server, host)
				}
			}
		})
	}
}

// Reserved staging is there before the job that takes the rest.
func TestReservedStagingIsAllocatedAtStart(t *testing.T) {
	needGPUs(t, 2)
	h := newHost(t)
	h.nic("nic0")
	h.change = func(c *launch.Config) {
		asConfigured(c)
		c.Reserve = launch.ReserveStart
	}
	socket, r := h.start("reserved", launch.RouteStaged, -1, far(0, 1, "nic0"))
	for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
		if s := r.Report().Staging; len(s) == 1 && s[0].Bytes == 512*mib {
			break
		}
		if end.Over() {
			t.Fatalf("nothing is reserved: %+v", r.Report())
		}
	}
	fillGPU(t, 1, 0)
	attach(t, socket)
	if s := r.Report(); len(s.Contexts) != 1 || s.Staging[0].Bytes != 512*mib {
		t.Errorf("the relay reports %+v", s)
	}
}

// asker admits so much per GPU.
type asker struct {
	sync.Mutex
	limit  uint64
	claims []launch.Claim
}

func (a *asker) ask(c launch.Claim) (launch.Admission, error) {
	a.Lock()
	defer a.Unlock()
	a.claims = append(a.claims, c)
	if c.Bytes > a.limit {
		return launch.Admission{Claim: c.Claim, Error: "container trainer has the rest"}, nil
	}
	return launch.Admission{Claim: c.Claim, OK: true}, nil
}

func (a *asker) admit(limit uint64) {
	a.Lock()
	defer a.Unlock()
	a.limit = limit
}

func (a *asker) last() launch.Claim {
	a.Lock()
	defer a.Unlock()
	return a.claims[len(a.claims)-1]
}

func (a *asker) count() int {
	a.Lock()
	defer a.Unlock()
	return len(a.claims)
}

// Staging that is not admitted becomes smaller, as staging without free memory does.
func TestStagingAboveHostAccountIsMadeSmaller(t *testing.T) {
	a := &asker{limit: 200 * mib}
	h := newHost(t)
	h.nic("nic0")
	h.ask = a.ask
	h.change = func(c *launch.Config) {
		asConfigured(c)
		c.Admission = true
	}
	f := newSelf(t, h, far(0, 1, "nic0"))
	f.move(t)
	if s := f.staging(t, 1); s.Bytes != 128*mib ||
		!strings.Contains(s.Note, "2 slots of 32 MiB in place of 8 of 32 MiB: not admitted: container trainer has the rest") {
		t.Errorf("staging is %+v", s)
	}
	if c := a.last(); c.GPU != devices[1].BusID || c.Bytes != 128*mib || c.Memory != devices[1].Memory {
		t.Errorf("the last claim is %+v", c)
	}

	a.admit(0)
	before := a.count()
	g := newSelf(t, h, far(0, 1, "nic0"))
	refused := func(why string) {
		t.Helper()
		if _, _, err := g.connect(t); err != nil {
			t.Fatal(err)
		}
		if said := g.bouncesBecause(t); !strings.Contains(said, why) {
			t.Fatalf("it bounces because of %q", said)
		}
	}
	refused("not admitted: container trainer has the rest")

	// For any number of connects, the relay asks once a second.
	each := a.count() - before
	begun := time.Now()
	before = a.count()
	for range 50 {
		refused("not admitted: container trainer has the rest")
	}
	if more, most := a.count()-before, each*int(time.Since(begun)/time.Second+1); more > most {
		t.Errorf("%d claims by 50 clients, and each try has %d", more, each)
	}

	// Admitted memory without an allocation is given back.
	a.admit(512 * mib)
	fillGPU(t, 1, 0)
	last := newSelf(t, h, far(0, 1, "nic0"))
	last.move(t)
	if why := last.bouncesBecause(t); !strings.Contains(why, "out of memory") {
		t.Errorf("it bounces because of %q", why)
	}
	if c := a.last(); c.Bytes != 0 {
		t.Errorf("the last claim is %+v", c)
	}
}

// Two relays whose slots are of different sizes: each message crosses both.
func TestSlotsOfDifferentSizesTransfer(t *testing.T) {
	for _, c := range []struct{ sender, receiver uint64 }{{1 * mib, 3 * mib}, {64 << 10, 1 * mib}, {2 * mib, 64 << 10},
		{192 << 10, 128 << 10}} {
		t.Run(fmt.Sprintf("%d to %d KiB", c.sender>>10, c.receiver>>10), func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.nic("nic1")
			h.change = func(l *launch.Config) { l.SlotBytes = c.sender }
			p := &pair{a: attach(t, h.relay("a", launch.RouteStaged, far(0, 1, "nic0")))}
			h.change = func(l *launch.Config) { l.SlotBytes = c.receiver }
			p.b = attach(t, h.relay("b", launch.RouteStaged, far(3, 2, "nic1")))
			p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
			p.sending, p.receiving, _ = join(t, p.a, 0, p.b, 3)
			var ops []*client.Operation
			const each = 5*mib + 777 // more than the slots hold, in three messages at once
			want := random(t, 3*each)
			p.source.write(0, want)
			for i := range uint64(3) {
				receive, err := p.receiving.Receive(p.target.Memory, i*each, each)
				if err != nil {
					t.Fatal(err)
				}
				send, err := p.sending.Send(p.source.Memory, i*each, each)
				if err != nil {
					t.Fatal(err)
				}
				ops = append(ops, send, receive)
			}
			for _, op := range ops {
				if moved, err := wait(t, op, nil); err != nil || moved != each {
					t.Fatalf("%d bytes, %v", moved, err)
				}
			}
			if !bytes.Equal(p.target.read(0, 3*each), want) {
				t.Error("the bytes are wrong")
			}
		})
	}
}
