package softdevice_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
)

const page = 4096

func opened(t testing.TB, l *verbs.Library, name string) (*verbs.Context, *verbs.Domain) {
	t.Helper()
	c, err := l.OpenDevice(name)
	check(t, err)
	d, err := c.NewDomain()
	check(t, err)
	t.Cleanup(func() { check(t, errors.Join(d.Close(), c.Close())) })
	return c, d
}

func memfd(t testing.TB, bytes int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("softdevice", unix.MFD_CLOEXEC)
	check(t, err)
	t.Cleanup(func() { check(t, unix.Close(fd)) })
	check(t, unix.Ftruncate(fd, bytes))
	return fd
}

// last is the last call of a name.
func last(t testing.TB, h softdevice.Host, name string) softdevice.Call {
	t.Helper()
	calls, err := h.Calls(name)
	check(t, err)
	if len(calls) == 0 {
		t.Fatalf("%s was not called", name)
	}
	return calls[len(calls)-1]
}

func wantArguments(t testing.TB, c softdevice.Call, want map[string]string) {
	t.Helper()
	for name, value := range want {
		if c.Arguments[name] != value {
			t.Errorf("%s: %s is %q, want %q", c.Name, name, c.Arguments[name], value)
		}
	}
}

func TestRegistrationRequestsGivenAccess(t *testing.T) {
	h, l := host(t, softdevice.Device{Name: "mlx5_0"})
	_, d := opened(t, l, "mlx5_0")
	fd := memfd(t, 8*page)
	var st unix.Stat_t
	check(t, unix.Fstat(fd, &st))

	r, err := d.RegisterDMABuf(
		fd,
		2*page,
		3*page,
		0x7f0000002000,
		verbs.LocalWrite|verbs.RemoteWrite|verbs.RelaxedOrdering,
	)
	check(t, err)
	wantArguments(t, last(t, h, "ibv_reg_dmabuf_mr"), map[string]string{
		"device": "mlx5_0", "fd": fmt.Sprint(fd), "inode": fmt.Sprint(st.Ino), "offset": "0x2000", "length": "12288",
		"iova": "0x7f0000002000", "access": "0x100003", "lkey": fmt.Sprintf("%#x", r.LKey()),
		"rkey": fmt.Sprintf("%#x", r.RKey()), "=": "0",
	})
	check(t, r.Close())
	wantArguments(t, last(t, h, "ibv_dereg_mr"), map[string]string{"lkey": fmt.Sprintf("%#x", r.LKey()), "=": "0"})

	memory := make([]byte, 2*page)
	at := uintptr(unsafe.Pointer(unsafe.SliceData(memory)))
	for _, c := range []struct {
		call   string
		iova   uint64
		access verbs.Access
	}{
		{"ibv_reg_mr", uint64(at), verbs.LocalWrite},
		// The older call has neither.
		{"ibv_reg_mr_iova2", uint64(at), verbs.LocalWrite | verbs.RelaxedOrdering},
		{"ibv_reg_mr_iova2", 0x10000, verbs.LocalWrite},
	} {
		r, err := d.Register(at, 2*page, c.iova, c.access)
		check(t, err)
		wantArguments(t, last(t, h, c.call), map[string]string{
			"memory": fmt.Sprintf(
				"%#x",
				at,
			), "length": "8192", "iova": fmt.Sprintf("%#x", c.iova), "access": fmt.Sprintf("%#x", uint32(c.access)), "=": "0",
		})
		check(t, r.Close())
	}
}

func TestOpenRefusesTheSoftwareDeviceWithoutPermission(t *testing.T) {
	h, _ := host(t)
	t.Setenv(verbs.LibraryVariable, h.Library())
	for _, value := range []string{"", "yes"} {
		t.Setenv(verbs.SoftwareVariable, value)
		if _, err := verbs.Open(); !errors.Is(err, verbs.ErrSoftwareDevice) {
			t.Errorf("%s=%q: %v", verbs.SoftwareVariable, value, err)
		}
	}
	t.Setenv(verbs.SoftwareVariable, verbs.SoftwareAllowed)
	if l, err := verbs.Open(); err != nil || !l.Software() {
		t.Errorf("with permission: %v", err)
	}
}

func TestRefusalsOfDeviceAreReported(t *testing.T) {
	h, l := host(t, softdevice.Device{Name: "mlx5_0"})
	c, d := opened(t, l, "mlx5_0")
	queue, err := c.NewQueue(4)
	check(t, err)
	memory := make([]byte, page)
	at := uintptr(unsafe.Pointer(unsafe.SliceData(memory)))
	fd := memfd(t, page)
	calls := map[string]func() error{
		"ibv_get_device_list":     func() error { _, err := l.Devices(); return err },
		"ibv_open_device":         func() error { _, err := l.OpenDevice("mlx5_0"); return err },
		"ibv_query_device":        func() error { _, err := c.Attributes(); return err },
		"ibv_query_port":          func() error { _, err := c.Port(1); return err },
		"ibv_alloc_pd":            func() error { _, err := c.NewDomain(); return err },
		"ibv_reg_mr":              func() error { _, err := d.Register(at, page, uint64(at), 0); return err },
		"ibv_reg_dmabuf_mr":       func() error { _, err := d.RegisterDMABuf(fd, 0, page, 0, 0); return err },
		"ibv_create_cq":           func() error { _, err := c.NewQueue(4); return err },
		"ibv_create_comp_channel": func() error { _, err := c.NewQueue(4); return err },
		"ibv_create_qp": func() error {
			_, err := d.NewPair(verbs.PairConfig{Send: queue, Recv: queue, SendDepth: 1, RecvDepth: 1})
			return err
		},
	}
	for call, do := range calls {
		for _, errno := range []syscall.Errno{syscall.ENOMEM, syscall.EFAULT, syscall.EOPNOTSUPP, syscall.EACCES,
			syscall.EIO} {
			check(t, h.Script(fmt.Sprintf("%s errno=%d", call, errno)))
			err := do()
			var e *verbs.Error
			if !errors.As(err, &e) || e.Errno != errno {
				t.Errorf("%s that fails with %v: %v", call, errno, err)
				continue
			}
			// Two calls make a queue, and the error names the object.
			if e.Call != call && call != "ibv_create_comp_channel" {
				t.Errorf("%s: the error says %v", call, err)
			}
		}
	}
	check(t, h.Script())
	check(t, queue.Close())
	// After any failure no object remains: the context closes.
}

func TestProbeReportsDMABufSupport(t *testing.T) {
	h, l := host(t, softdevice.Device{Name: "yes"}, softdevice.Device{Name: "no", NoDMABuf: true})
	for name, want := range map[string]verbs.Support{"yes": verbs.Yes, "no": verbs.No} {
		c, _ := opened(t, l, name)
		if got, why := c.DMABuf(); got != want {
			t.Errorf("%s: %v (%v), want %v", name, got, why, want)
		}
	}
	for errno, want := range map[syscall.Errno]verbs.Support{syscall.EPROTONOSUPPORT: verbs.No,
		syscall.EPERM: verbs.Unknown} {
		c, _ := opened(t, l, "yes")
		check(t, h.Script(fmt.Sprintf("ibv_reg_dmabuf_mr errno=%d", errno)))
		if got, why := c.DMABuf(); got != want || !errors.Is(why, errno) {
			t.Errorf("%v: %v (%v), want %v", errno, got, why, want)
		}
	}
}

// An early destruction is refused by name, and the object stays.
func TestReleaseOutOfOrderIsRefused(t *testing.T) {
	h, l := host(t, softdevice.Device{Name: "mlx5_0"})
	c, err := l.OpenDevice("mlx5_0")
	check(t, err)
	d, err := c.NewDomain()
	check(t, err)
	q, err := c.NewQueue(4)
	check(t, err)
	memory := make([]byte, page)
	at := uintptr(unsafe.Pointer(unsafe.SliceData(memory)))
	r, err := d.Register(at, page, uint64(at), 0)
	check(t, err)
	p, err := d.NewPair(verbs.PairConfig{Send: q, Recv: q, SendDepth: 1, RecvDepth: 1})
	check(t, err)
	early := func(call string, what interface{ Close() error }) {
		t.Helper()
		var failed *verbs.Error
		if err := what.Close(); !errors.Is(err, syscall.EBUSY) || !errors.As(err, &failed) || failed.Call != call {
			t.Errorf("%s too early: %v", call, err)
		}
		wantArguments(t, last(t, h, call), map[string]string{"=": fmt.Sprint(int(syscall.EBUSY))})
	}
	early("ibv_close_device", c)
	early("ibv_dealloc_pd", d)
	early("ibv_destroy_cq", q)
	check(t, p.Close())
	early("ibv_dealloc_pd", d)
	check(t, r.Close())
	check(t, d.Close())
	early("ibv_close_device", c)
	check(t, q.Close())
	check(t, c.Close())
}

const childVariable = "PEERLANE_SOFTDEVICE_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		if err := child(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// side is a pair with a page of memory, connected to another process's.
type side struct {
	context *verbs.Context
	domain  *verbs.Domain
	pair    *verbs.Pair
	queue   *verbs.Queue
	region  *verbs.Region
	memory  []byte
	gid     verbs.GID
}

func newSide(l *verbs.Library, name string) (s *side, err error) {
	c, err := l.OpenDevice(name)
	if err != nil {
		return nil, err
	}
	d, err := c.NewDomain()
	if err != nil {
		return nil, err
	}
	s = &side{context: c, domain: d}
	if s.queue, err = c.NewQueue(8); err != nil {
		return nil, err
	}
	if s.memory, err = unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, err
	}
	if s.region, err = d.Register(s.at(), page, uint64(s.at()), verbs.LocalWrite|verbs.RemoteWrite); err != nil {
		return nil, err
	}
	if s.pair, err = d.NewPair(verbs.PairConfig{Send: s.queue, Recv: s.queue, SendDepth: 4, RecvDepth: 4}); err != nil {
		return nil, err
	}
	gids, err := c.GIDs(1)
	if err != nil {
		return nil, err
	}
	if s.gid, err = verbs.ChooseGID(gids, verbs.Choice{Index: verbs.AnyIndex}); err != nil {
		return nil, err
	}
	return s, s.pair.Init(1, 0, verbs.LocalWrite|verbs.RemoteWrite)
}

func (s *side) close() error {
	return errors.Join(
		s.pair.Close(),
		s.region.Close(),
		s.queue.Close(),
		s.domain.Close(),
		s.context.Close(),
		unix.Munmap(s.memory),
	)
}

func (s *side) at() uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(s.memory))) }

func (s *side) connect(to uint32) error {
	return errors.Join(
		s.pair.ReadyToReceive(
			verbs.Route{
				Pair:          to,
				MTU:           verbs.MTU1024,
				Global:        true,
				GID:           s.gid.GID,
				SourceIndex:   uint8(s.gid.Index),
				HopLimit:      64,
				Port:          1,
				Reads:         1,
				ReceiverTimer: 12,
			},
		),
		s.pair.ReadyToSend(verbs.Sending{Timeout: 14, Retries: 7, ReceiverRetries: 7, Reads: 1}),
	)
}

// completion polls until one comes, as only a test may.
func (s *side) completion() (verbs.Completion, error) {
	var one [1]verbs.Completion
	for {
		if n, err := s.queue.Poll(one[:]); n == 1 || err != nil {
			return one[0], err
		}
		if err := s.queue.Arm(); err != nil {
			return one[0], err
		}
		if n, err := s.queue.Poll(one[:]); n == 1 || err != nil {
			return one[0], err
		}
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(s.queue.FD()), Events: unix.POLLIN}}, 60_000); n == 0 {
			return one[0], errors.Join(err, errors.New("no completion within a minute"))
		}
		if err := s.queue.Acknowledge(); err != nil {
			return one[0], err
		}
	}
}

// child is the other process: the process exchanges addresses, waits for a write, and sends the
// bytes back. Then it waits to be killed.
func child() error {
	l, err := verbs.Open()
	if err != nil {
		return err
	}
	s, err := newSide(l, "mlx5_1")
	if err != nil {
		return err
	}
	if _, err := s.pair.PostRecv([]verbs.Recv{{ID: 1}}); err != nil {
		return err
	}
	fmt.Println(s.pair.Number(), uint64(s.at()), s.region.RKey())
	var number, key uint32
	var at uint64
	if _, err := fmt.Scan(&number, &at, &key); err != nil {
		return err
	}
	if err := s.connect(number); err != nil {
		return err
	}
	c, err := s.completion()
	if err != nil || c.Err() != nil || !c.HasImmediate {
		return fmt.Errorf("%+v, %w", c, err)
	}
	_, err = s.pair.PostSend(
		[]verbs.Send{
			{
				Op:        verbs.WriteImmediate,
				Address:   uint64(s.at()),
				LKey:      s.region.LKey(),
				Length:    c.Bytes,
				Remote:    at,
				RKey:      key,
				Immediate: c.Immediate + 1,
			},
		},
	)
	if err != nil {
		return err
	}
	select {}
}

func TestTwoProcessesExchangeWrites(t *testing.T) {
	h, l := host(
		t,
		softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1"},
		softdevice.Device{Name: "mlx5_1", GUID: 2, Address: "192.0.2.2"},
	)
	exe, err := os.Executable()
	check(t, err)
	c := exec.CommandContext(t.Context(), exe)
	c.Env = append(append(os.Environ(), childVariable+"=1"), h.Environment()...)
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	check(t, err)
	out, err := c.StdoutPipe()
	check(t, err)
	check(t, c.Start())
	ended := false
	end := func() {
		if !ended {
			ended = true
			_ = c.Process.Kill()
			_ = c.Wait() // killed
		}
	}
	defer end()

	var number, key uint32
	var at uint64
	_, err = fmt.Fscan(out, &number, &at, &key)
	check(t, err)
	s, err := newSide(l, "mlx5_0")
	check(t, err)
	defer func() { check(t, s.close()) }()
	check(t, s.connect(number))
	_, err = s.pair.PostRecv([]verbs.Recv{{ID: 5}})
	check(t, err)
	_, err = fmt.Fprintln(in, s.pair.Number(), uint64(s.at())+200, s.region.RKey())
	check(t, err)
	copy(s.memory, "there and back")
	write := verbs.Send{
		ID:        3,
		Op:        verbs.WriteImmediate,
		Flags:     verbs.Signaled,
		Address:   uint64(s.at()),
		LKey:      s.region.LKey(),
		Length:    14,
		Remote:    at + 100,
		RKey:      key,
		Immediate: 41,
	}
	// The reply is of the beginning of the other's memory.
	both := write
	both.Op, both.Flags, both.Remote = verbs.Write, 0, at
	_, err = s.pair.PostSend([]verbs.Send{both, write})
	check(t, err)
	want := map[uint64]verbs.Completion{
		3: {ID: 3, Op: verbs.WriteDone},
		5: {ID: 5, Op: verbs.ReceivedImmediate, Bytes: 14, Immediate: 42, HasImmediate: true},
	}
	for range 2 { // in any order
		got, err := s.completion()
		check(t, err)
		pair := got.Pair
		got.Pair = 0
		if got != want[got.ID] || pair != s.pair.Number() {
			t.Fatalf("%+v (%v), want %+v", got, got.Err(), want[got.ID])
		}
	}
	if got := string(s.memory[200:214]); got != "there and back" {
		t.Errorf("what came back: %q", got)
	}
	// The process is gone, so no answer arrives.
	end()
	_, err = s.pair.PostSend([]verbs.Send{write})
	check(t, err)
	if got, err := s.completion(); err != nil || got.Status != verbs.RetryExceeded {
		t.Errorf("%+v, %v; want %v", got, err, verbs.RetryExceeded)
	}
}

// A connecting side may destroy the pair before the answer, which then finds no pair.
func TestAnswerToDestroyedQueuePairIsDropped(t *testing.T) {
	at := netip.MustParseAddr("192.0.2.1")
	_, l := host(t, softdevice.Device{Name: "siw_0", GUID: 1, Address: at.String(), IWARP: true})
	m, err := l.Manager()
	check(t, err)
	events, err := m.NewEvents()
	check(t, err)
	closes := func(c interface{ Close() error }) { t.Cleanup(func() { check(t, c.Close()) }) }
	closes(events)
	newID := func() *verbs.ID {
		id, err := events.NewID()
		check(t, err)
		closes(id)
		return id
	}
	next := func(want verbs.ConnectionKind) verbs.ConnectionEvent {
		e, ok, err := events.Next()
		for ; !ok && err == nil; e, ok, err = events.Next() {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(events.FD()), Events: unix.POLLIN}}, -1)
			if err != unix.EINTR {
				check(t, err)
			}
		}
		check(t, err)
		if e.Kind != want {
			t.Fatalf("%v, want %v", e.Kind, want)
		}
		return e
	}
	paired := func(id *verbs.ID) *verbs.Pair {
		c, err := id.Context()
		check(t, err)
		d, err := c.NewDomain()
		check(t, err)
		closes(d)
		q, err := c.NewQueue(4)
		check(t, err)
		closes(q)
		p, err := id.NewPair(d, verbs.PairConfig{Send: q, Recv: q, SendDepth: 1, RecvDepth: 1})
		check(t, err)
		return p
	}
	listener, asks := newID(), newID()
	check(t, listener.Listen(netip.AddrPortFrom(at, 0), 1))
	check(t, asks.ResolveAddress(netip.AddrPort{}, netip.AddrPortFrom(at, listener.Port()), time.Minute))
	next(verbs.AddressResolved)
	check(t, asks.ResolveRoute(time.Minute))
	next(verbs.RouteResolved)
	given := paired(asks)
	check(t, asks.Connect(verbs.Connection{}))
	answers := next(verbs.ConnectRequest).ID
	closes(answers)
	check(t, given.Close())
	closes(paired(answers))
	check(t, answers.Accept(verbs.Connection{}))
	for range 2 {
		next(verbs.Established)
	}
}

// With a seed, relaxed writes of one queue pair may be in the memory in any order until a receive
// completes. Writes to further regions keep their order.
func TestSeedReordersRelaxedWritesUntilReceiveCompletes(t *testing.T) {
	for _, c := range []struct {
		name   string
		seed   uint64
		access verbs.Access
		want   bool
	}{
		{"seed and relaxed ordering", 7, verbs.RelaxedOrdering, true},
		{"seed alone", 7, 0, false},
		{"relaxed ordering alone", 0, verbs.RelaxedOrdering, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, l := host(t, softdevice.Device{Name: "mlx5_0", GUID: 1, Address: "192.0.2.1", Seed: c.seed})
			a, err := newSide(l, "mlx5_0")
			check(t, err)
			b, err := newSide(l, "mlx5_0")
			check(t, err)
			target, err := b.domain.Register(b.at(), page, uint64(b.at()), verbs.LocalWrite|verbs.RemoteWrite|c.access)
			check(t, err)
			defer func() { check(t, errors.Join(target.Close(), a.close(), b.close())) }()
			check(t, errors.Join(a.connect(b.pair.Number()), b.connect(a.pair.Number())))
			write := func(op verbs.Op, at uint64) {
				t.Helper()
				_, err := a.pair.PostSend([]verbs.Send{{
					Op: op, Flags: verbs.Signaled, Immediate: 5, Address: uint64(a.at()), LKey: a.region.LKey(), Length: 1,
					Remote: uint64(b.at()) + at, RKey: target.RKey(),
				}})
				check(t, err)
				if one, err := a.completion(); err != nil || one.Err() != nil {
					t.Fatal(one.Err(), err)
				}
			}
			passed := false
			for round := range byte(40) {
				_, err := b.pair.PostRecv([]verbs.Recv{{}})
				check(t, err)
				a.memory[0] = round + 1
				write(verbs.Write, 0)
				write(verbs.Write, 64)
				// Both have completed at the sender. The first one may be on its way.
				if b.memory[64] == round+1 && b.memory[0] != round+1 {
					passed = true
				}
				write(verbs.WriteImmediate, 128)
				if one, err := b.completion(); err != nil || one.Err() != nil || b.memory[0] != round+1 || b.memory[64] != round+1 {
					t.Fatalf(
						"round %d: a receive completed (%v, %v), and the memory has %d and %d",
						round,
						one.Err(),
						err,
						b.memory[0],
						b.memory[64],
					)
				}
			}
			if passed != c.want {
				t.Errorf("a write passed the one before it: %v, want %v", passed, c.want)
			}
		})
	}
}
