package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
)

func device(t *testing.T, f Fixture) {
	devices, err := f.Library.Devices()
	check(t, err)
	i := slices.IndexFunc(devices, func(d verbs.Device) bool { return d.Name == f.Device })
	if i < 0 {
		t.Fatalf("%s is not among %+v", f.Device, devices)
	}
	d := devices[i]
	if d.NodeGUID == 0 || !strings.HasPrefix(d.Node, "uverbs") || (d.Transport == verbs.IWARP) != f.managed() {
		t.Errorf("%+v", d)
	}
	if _, err := f.Library.OpenDevice("no-such-nic"); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("opening a device that is not there: %v", err)
	}
	c := open(t, f)
	a, err := c.Attributes()
	check(t, err)
	if a.NodeGUID != d.NodeGUID || a.Ports != 1 || a.Pairs == 0 || a.PairRequests == 0 || a.Segments == 0 ||
		a.QueueEntries == 0 ||
		a.RegionBytes == 0 {
		t.Errorf("%+v", a)
	}
	p, err := c.Port(1)
	check(t, err)
	if p.State != verbs.PortActive || p.LinkLayer != verbs.Ethernet || p.MTU.Bytes() < 256 || p.MTU > p.MaxMTU ||
		p.GIDs == 0 {
		t.Errorf("%+v", p)
	}
	if _, err := c.Port(9); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("port 9: %v", err)
	}
	gids, err := c.GIDs(1)
	check(t, err)
	if f.managed() {
		return // siw has a GID, of the card's address
	}
	gid, err := verbs.ChooseGID(gids, verbs.Choice{Index: verbs.AnyIndex})
	check(t, err)
	if gid.Kind != verbs.RoCEv2 || !gid.Address().Is4() || gid.Interface == 0 {
		t.Errorf("chosen: %v of interface %d, among %v", gid, gid.Interface, gids)
	}
}

func memory(t *testing.T, f Fixture) {
	c := open(t, f)
	d, err := c.NewDomain()
	check(t, err)
	closes(t, d)
	fd, err := unix.MemfdCreate("conformance", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	check(t, err)
	defer unix.Close(fd)
	check(t, unix.Ftruncate(fd, 4*page))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	check(t, err)
	sealed, err := unix.Mmap(fd, 0, 4*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	check(t, err)
	unmaps(t, sealed)
	readOnly, err := unix.Mmap(fd, 0, 4*page, unix.PROT_READ, unix.MAP_SHARED)
	check(t, err)
	unmaps(t, readOnly)
	plain := anonymous(t, 4*page)
	for _, c := range []struct {
		name   string
		bytes  []byte
		access verbs.Access
		want   error
	}{
		{"anonymous", plain, remote, nil},
		{"not at a page's begin", plain[100 : page+200], remote, nil},
		{"sealed memfd", sealed, remote, nil},
		{"read-only, for reading", readOnly, 0, nil},
		{"read-only, for writing from afar", readOnly, remote, syscall.EFAULT},
		{"relaxed ordering", plain, remote | verbs.RelaxedOrdering, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := d.Register(address(c.bytes), uint64(len(c.bytes)), uint64(address(c.bytes)), c.access)
			if !errors.Is(err, c.want) {
				t.Fatalf("%v, want %v", err, c.want)
			}
			if err != nil {
				if text := err.Error(); !strings.Contains(text, "ibv_reg_mr ("+f.Device) || !strings.Contains(text, "(EFAULT)") {
					t.Errorf("the error says %q", text)
				}
				return
			}
			if r.LKey() == 0 && r.RKey() == 0 {
				t.Error("it has no keys")
			}
			check(t, r.Close())
		})
	}
	support, why := c.DMABuf()
	if support != f.dmabuf {
		t.Errorf("DMA-BUF: %v (%v), want %v", support, why, f.dmabuf)
	}
}

// release checks that an object is not destroyed before its dependents.
func release(t *testing.T, f Fixture) {
	c := open(t, f)
	e := equip(t, c)
	if err := e.domain.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Fatalf("closing a domain that has a region: %v", err)
	}
	if f.managed() {
		return
	}
	pair, err := e.domain.NewPair(e.config())
	check(t, err)
	closes(t, pair)
	if err := e.queue.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Fatalf("closing a queue that has a pair: %v", err)
	}
}

// pattern fills bytes so that no two pages are alike.
func pattern(b []byte, seed byte) {
	for i := range b {
		b[i] = seed + byte(i) + byte(i/page)
	}
}

func transfers(t *testing.T, f Fixture) {
	a, b := connected(t, f, usual)
	pattern(a.bytes[:half], 1)

	const n = 3*page + 5 // several packets
	write := verbs.Send{
		ID:      1,
		Op:      verbs.Write,
		Flags:   verbs.Signaled,
		Address: a.at(0),
		LKey:    a.region.LKey(),
		Remote:  b.at(half),
		RKey:    b.region.RKey(),
		Length:  n,
	}
	a.post(write)
	a.want(verbs.Completion{ID: 1, Op: verbs.WriteDone})
	same := func(what string, got, want []byte) {
		t.Helper()
		if !bytes.Equal(got, want) {
			t.Fatalf("%s: wrong bytes", what)
		}
	}
	if f.managed() {
		// A write of iWARP ends when it is sent; a later request on the same pair shows the
		// arrival.
		b.receive(verbs.Recv{ID: 9, Address: b.at(0), Length: page, LKey: b.region.LKey()})
		a.post(
			verbs.Send{ID: 2, Op: verbs.SendMessage, Flags: verbs.Signaled, Address: a.at(0), LKey: a.region.LKey(), Length: 16},
		)
		a.want(verbs.Completion{ID: 2, Op: verbs.SendDone})
		b.want(verbs.Completion{ID: 9, Op: verbs.Received, Bytes: 16})
		same("send", b.bytes[:16], a.bytes[:16])
	}
	same("write", b.bytes[half:half+n], a.bytes[:n])
	if b.bytes[half+n] != 0 {
		t.Error("the write is longer than it is")
	}

	read := verbs.Send{
		ID:      3,
		Op:      verbs.Read,
		Flags:   verbs.Signaled,
		Address: a.at(half),
		LKey:    a.region.LKey(),
		Remote:  b.at(half),
		RKey:    b.region.RKey(),
		Length:  n,
	}
	a.post(read)
	a.want(verbs.Completion{ID: 3, Op: verbs.ReadDone})
	same("read", a.bytes[half:half+n], a.bytes[:n])

	immediate := verbs.Send{
		ID:        4,
		Op:        verbs.WriteImmediate,
		Flags:     verbs.Signaled,
		Address:   a.at(page),
		LKey:      a.region.LKey(),
		Remote:    b.at(half + 32*page),
		RKey:      b.region.RKey(),
		Length:    n,
		Immediate: 0x01020304,
	}
	if f.managed() {
		if n, err := a.pair.PostSend([]verbs.Send{immediate}); n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Errorf("a write with an immediate over iWARP: %d, %v", n, err)
		}
		return
	}
	// Earlier unsignalled requests end with it; of no bytes is the last.
	b.receive(
		verbs.Recv{ID: 10},
		verbs.Recv{ID: 11},
		verbs.Recv{ID: 12, Address: b.at(0), Length: page, LKey: b.region.LKey()},
	)
	unsignalled, empty := immediate, immediate
	unsignalled.Flags, unsignalled.Immediate, unsignalled.ID = 0, 7, 5
	empty.Length, empty.Immediate, empty.Address, empty.LKey = 0, 0xfffffffe, 0, 0
	a.post(unsignalled, empty)
	a.want(verbs.Completion{ID: 4, Op: verbs.WriteDone})
	b.want(verbs.Completion{ID: 10, Op: verbs.ReceivedImmediate, Bytes: n, Immediate: 7, HasImmediate: true})
	b.want(verbs.Completion{ID: 11, Op: verbs.ReceivedImmediate, Immediate: 0xfffffffe, HasImmediate: true})
	same("write with an immediate", b.bytes[half+32*page:half+32*page+n], a.bytes[page:page+n])

	// Inline bytes need no region, and are the caller's at once.
	text := []byte("inline bytes")
	a.post(
		verbs.Send{
			ID:        6,
			Op:        verbs.SendMessageImmediate,
			Flags:     verbs.Signaled | verbs.Inline,
			Address:   uint64(address(text)),
			Length:    uint32(len(text)),
			Immediate: 1,
		},
	)
	clear(text)
	a.want(verbs.Completion{ID: 6, Op: verbs.SendDone})
	b.want(verbs.Completion{ID: 12, Op: verbs.Received, Bytes: 12, Immediate: 1, HasImmediate: true})
	same("send", b.bytes[:12], []byte("inline bytes"))

	// A full queue takes no more, and says how many it took.
	many := slices.Repeat([]verbs.Send{write}, 4096)
	posted, err := a.pair.PostSend(many)
	if posted < 16 || posted >= len(many) || !errors.Is(err, syscall.ENOMEM) {
		t.Fatalf("posting %d requests: %d posted, %v", len(many), posted, err)
	}
	for i := range posted {
		if c := a.completes(); c.Status != verbs.Success {
			t.Fatalf("request %d of %d: %v", i, posted, c.Err())
		}
	}
}

func allocations(t *testing.T, f Fixture) {
	a, b := connected(t, f, usual)
	into := make([]verbs.Completion, 4)
	sends := []verbs.Send{
		{
			Op:      verbs.Write,
			Flags:   verbs.Signaled,
			Address: a.at(0),
			LKey:    a.region.LKey(),
			Remote:  b.at(half),
			RKey:    b.region.RKey(),
			Length:  64,
		},
	}
	receives := []verbs.Recv{{Address: b.at(0), Length: page, LKey: b.region.LKey()}}
	var failed error
	n := testing.AllocsPerRun(4, func() {
		_, e1 := a.pair.PostSend(sends)
		_, e2 := b.pair.PostRecv(receives)
		e3 := a.queue.Arm()
		for got := 0; got == 0 && failed == nil; {
			got, failed = a.queue.Poll(into)
		}
		failed = errors.Join(failed, e1, e2, e3, a.queue.Acknowledge())
	})
	check(t, failed)
	if n != 0 {
		t.Errorf("a turn allocates %v times", n)
	}
}

func localProtection(t *testing.T, f Fixture) {
	a, b := connected(t, f, usual)
	a.post(
		verbs.Send{
			ID:      1,
			Op:      verbs.Write,
			Flags:   verbs.Signaled,
			Address: a.at(2 * half),
			LKey:    a.region.LKey(),
			Remote:  b.at(half),
			RKey:    b.region.RKey(),
			Length:  page,
		},
	)
	a.fails(1, f.localProtection)
	a.failed(f)
}

// failed waits until the pair has failed, which rxe lets it do after the completion that says so. A
// pair of siw follows the TCP connection.
func (e *end) failed(f Fixture) {
	e.t.Helper()
	for deadline := time.Now().Add(patience); !f.managed(); time.Sleep(time.Millisecond) {
		state, err := e.pair.State()
		check(e.t, err)
		if state == verbs.Failed {
			return
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("the pair is %v", state)
		}
	}
}

// fails checks the first completion.
func (e *end) fails(id uint64, want verbs.Status, words ...string) {
	e.t.Helper()
	c := e.completes()
	if c.ID != id || c.Status != want {
		e.t.Fatalf("completion %+v (%v), want status %d (%v)", c, c.Err(), want, want)
	}
	for _, w := range append(words, fmt.Sprintf("queue pair %d", e.pair.Number())) {
		if !strings.Contains(c.Err().Error(), w) {
			e.t.Errorf("the error says %q, and not %q", c.Err(), w)
		}
	}
}

func remoteAccess(t *testing.T, f Fixture) {
	if f.managed() {
		return // siw ends a write when it is sent; see retryExceeded
	}
	for _, op := range []verbs.Op{verbs.Write, verbs.Read} {
		for name, change := range map[string]func(*verbs.Send, *end){
			"key":    func(s *verbs.Send, b *end) { s.RKey ^= 0xff00 },
			"bounds": func(s *verbs.Send, b *end) { s.Remote = b.at(2*half - page + 1) },
		} {
			t.Run(fmt.Sprintf("%d %s", op, name), func(t *testing.T) {
				a, b := connected(t, f, usual)
				s := verbs.Send{
					ID:      1,
					Op:      op,
					Flags:   verbs.Signaled,
					Address: a.at(0),
					LKey:    a.region.LKey(),
					Remote:  b.at(0),
					RKey:    b.region.RKey(),
					Length:  page,
				}
				change(&s, b)
				a.post(s)
				a.fails(1, verbs.RemoteAccessError, "remote access error", "has not registered that memory")
				a.failed(f)
			})
		}
	}
}

func retryExceeded(t *testing.T, f Fixture) {
	if f.managed() {
		return // TCP has its own patience
	}
	a, b := connected(t, f, quick)
	check(t, b.pair.Fail())
	a.post(
		verbs.Send{
			ID:      1,
			Op:      verbs.Write,
			Flags:   verbs.Signaled,
			Address: a.at(0),
			LKey:    a.region.LKey(),
			Remote:  b.at(0),
			RKey:    b.region.RKey(),
			Length:  page,
		},
	)
	a.fails(1, verbs.RetryExceeded, "retry counter exceeded", "does not answer")
	a.failed(f)
}

func flushed(t *testing.T, f Fixture) {
	a, _ := connected(t, f, usual)
	a.receive(
		verbs.Recv{ID: 1, Address: a.at(0), Length: page, LKey: a.region.LKey()},
		verbs.Recv{ID: 2, Address: a.at(0), Length: page, LKey: a.region.LKey()},
	)
	check(t, a.pair.Fail())
	for id := range uint64(2) {
		a.fails(id+1, verbs.Flushed, "work request flushed")
	}
}

func refused(t *testing.T, f Fixture) {
	if !f.managed() {
		return
	}
	events := manager(t, f)
	_, _, asks, answers := asked(t, f, events, nil)
	check(t, answers.Reject([]byte("full")))
	e := next(t, events, verbs.Rejected)
	if e.ID != asks || e.Err() == nil || !bytes.HasPrefix(e.Private, []byte("full")) {
		t.Errorf("%+v: %v", e, e.Err())
	}
	if err := asks.Connect(verbs.Connection{Private: make([]byte, verbs.MaxPrivate+1)}); err == nil {
		t.Error("too much private data is taken")
	}
}

func portEvents(t *testing.T, f Fixture) {
	c := open(t, f)
	if e, ok, err := c.NextAsync(); ok || err != nil {
		t.Fatalf("there is an event at the begin: %v, %v", e, err)
	}
	if f.Port == nil {
		return
	}
	for _, step := range []struct {
		plugged bool
		kind    verbs.EventKind
		words   string
		state   verbs.PortState
	}{
		{false, verbs.PortLost, "port error (port 1)", verbs.PortDown},
		{true, verbs.PortUp, "port active (port 1)", verbs.PortActive},
	} {
		f.Port(t, step.plugged)
		for {
			readable(t, step.kind.String(), c.AsyncFD())
			e, ok, err := c.NextAsync()
			check(t, err)
			if !ok || e.Kind == verbs.GIDsChanged {
				continue // addresses come and go with a port
			}
			if e.Kind != step.kind || e.Port != 1 || e.String() != step.words || e.Kind.Fatal() {
				t.Fatalf("%v, want %v", e, step.words)
			}
			break
		}
		p, err := c.Port(1)
		check(t, err)
		if p.State != step.state {
			t.Errorf("after %v the port is %v", step.kind, p.State)
		}
	}
}
