package relay_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// world is the model of a program.
type world struct {
	outer *testing.T
	host  *host
	route string

	containers [2]*container
	sessions   []*attached
	pipes      []*link
	program    []string
	abrupt     bool // a session ended without a wait for operations in flight
}

// attached is a client's session with a separate memory.
type attached struct {
	name       string
	at         *container
	session    *client.Session
	place      *allocation
	memory     *client.Memory
	listener   *client.Listener
	used       uint64 // bytes of the memory given to messages
	timelines  uint32 // in use
	gone       string // why the session or its memory has ended
	abrupt     bool   // the session did not wait for operations in flight: docs/errors.md
	unexported bool
	want       []byte // the expected content of the memory; nil entries are in loose
}

// link is a connection.
type link struct {
	name      string
	from, to  *attached
	sending   *client.Connection
	receiving *client.Connection
	ended     string // why errors are expected from now on
	posts     []*post
	sided     []*sided
}

// post is an operation.
type post struct {
	name    string
	pipe    *link
	sends   bool
	bad     wire.Status // the expected status
	tag     uint64
	at, n   uint64
	pattern []byte
	op      *client.Operation
	hold    *hold
	signal  *client.Timeline
	cancel  bool
	moved   uint64
	err     error
	over    bool
	seen    []byte // of a receive: the range at the end
}

type hold struct {
	timeline *client.Timeline
	opens    uint64 // the value at which the operation begins
	released bool
}

func (h *hold) release() {
	h.timeline.Advance(h.opens)
	h.released = true
}

func (w *world) say(t *rapid.T, format string, arguments ...any) {
	line := fmt.Sprintf(format, arguments...)
	w.program = append(w.program, line)
	t.Log(line)
}

// one draws an element by its index, because rapid would print the whole element.
func one[T any](t *rapid.T, of []T, label string) T {
	return of[rapid.IntRange(0, len(of)-1).Draw(t, label)]
}

func soon() (context.Context, context.CancelFunc) {
	return testutil.WithLimit(context.Background(), modelPatience)
}

// empty is the initial content of a session's memory.
func (c *container) empty() []byte {
	if n := len(c.wants); n > 0 {
		b := c.wants[n-1]
		c.wants = c.wants[:n-1]
		return b
	}
	return newModelEmpty()
}

func (w *world) attach(t *rapid.T, at int) {
	c := w.containers[at]
	i := slices.IndexFunc(c.memory, func(m *allocation) bool { return m.used == nil })
	if i < 0 {
		t.Skip("all memory is in use")
	}
	place := c.memory[i]
	s := &attached{name: fmt.Sprintf("%s%d", c.name, len(w.sessions)), at: c, place: place}
	kind := one(t, kinds, "memory")
	w.say(t, "attach %s (its memory: %s)", s.name, kind)
	s.want = c.empty()
	ctx, cancel := soon()
	defer cancel()
	var err error
	if s.session, err = client.Dial(ctx, c.socket); err != nil {
		t.Fatalf("attach: %v", err)
	}
	place.used = s
	w.sessions = append(w.sessions, s)
	id := uuid(w.outer, c.gpu)
	if kind == "staging" {
		w.stage(t, s)
	} else if kind == "host" {
		w.onHost(t, s)
	} else if s.memory, err = s.session.Export(ctx, client.Allocation{FD: place.fd, Bytes: modelBytes, GPU: id}); err !=
		nil {
		t.Fatalf("export: %v", err)
	}
	if s.listener, err = s.session.Listen(ctx, id); err != nil {
		t.Fatalf("listen: %v", err)
	}
}

// stage gives a session staging memory in place of the container's memory, and a view of the
// staging memory that stays when the client's mapping has gone.
func (w *world) stage(t *rapid.T, s *attached) {
	ctx, cancel := soon()
	defer cancel()
	m, err := s.session.Staging(ctx, driver, client.Staging{Bytes: modelBytes, GPU: uuid(w.outer, s.at.gpu)})
	if err != nil {
		t.Fatalf("staging memory: %v", err)
	}
	handle, err := driver.MemRetain(m.Ptr)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := driver.MemExportFD(handle)
	if err = errors.Join(err, driver.MemRelease(handle)); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	view, err := unix.Mmap(fd, 0, modelBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	copy(view, modelEmpty())
	s.place.used = nil
	s.place, s.memory = &allocation{fd: -1, view: view, used: s, mine: true}, m
}

// onHost gives a session host memory in place of the container's memory, and a view of the host
// memory that stays when the client's mapping has gone. The relay frees the pages.
func (w *world) onHost(t *rapid.T, s *attached) {
	ctx, cancel := soon()
	defer cancel()
	m, err := s.session.HostMemory(ctx, client.HostMemory{Bytes: modelBytes, GPU: uuid(w.outer, s.at.gpu)})
	if err != nil {
		t.Fatalf("host memory: %v", err)
	}
	// For shared memory the call creates a second mapping.
	again, err := unix.MremapPtr(unsafe.Pointer(&m.Data[0]), 0, nil, modelBytes, unix.MREMAP_MAYMOVE)
	if err != nil {
		t.Fatal(err)
	}
	view := unsafe.Slice((*byte)(again), modelBytes)
	copy(view, modelEmpty())
	s.place.used = nil
	s.place, s.memory = &allocation{fd: -1, view: view, used: s, mine: true, host: true}, m
}

// freed reports whether the relay has taken the pages of a session's memory.
func (s *attached) freed() bool { return s.place.host && (s.unexported || s.gone != "") }

func (w *world) alive(at *container) []*attached {
	var list []*attached
	for _, s := range w.sessions {
		if s.gone == "" && (at == nil || s.at == at) {
			list = append(list, s)
		}
	}
	return list
}

func (w *world) someConnect(t *rapid.T) {
	if len(w.pipes) >= 6 {
		t.Skip("enough connections")
	}
	from := rapid.IntRange(0, 1).Draw(t, "from")
	senders, receivers := w.alive(w.containers[from]), w.alive(w.containers[1-from])
	if len(senders) == 0 || len(receivers) == 0 {
		t.Skip("nobody is there")
	}
	w.connect(t, one(t, senders, "sender"), one(t, receivers, "receiver"))
}

func (w *world) connect(t *rapid.T, from, to *attached) {
	p := &link{name: fmt.Sprintf("%s>%s#%d", from.name, to.name, len(w.pipes)), from: from, to: to}
	w.say(t, "connect %s", p.name)
	ctx, cancel := soon()
	defer cancel()
	var err error
	if p.sending, err = from.session.Connect(ctx, uuid(w.outer, from.at.gpu), to.listener.Handle()); err != nil {
		t.Fatalf("connect: %v", err)
	}
	if p.receiving, err = to.listener.Accept(ctx); err != nil {
		t.Fatalf("accept: %v", err)
	}
	w.pipes = append(w.pipes, p)
}

func (p *link) end(sends bool) (*attached, *client.Connection) {
	if sends {
		return p.from, p.sending
	}
	return p.to, p.receiving
}

// post posts a send or a receive, which may have to wait for a timeline.
func (w *world) post(t *rapid.T, sends bool, bad wire.Status) {
	var open []*link
	for _, p := range w.pipes {
		if s, _ := p.end(sends); s.gone == "" {
			open = append(open, p)
		}
	}
	if len(open) == 0 {
		t.Skip("no connection")
	}
	p := one(t, open, "connection")
	tag := rapid.Uint64Range(0, 2).Draw(t, "tag")
	n := rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Uint64Range(0, modelLargest),
		rapid.SampledFrom([]uint64{4<<10 - 1, 4 << 10, 4<<10 + 1, modelSlot - 1, modelSlot, modelSlot + 1})).Draw(t, "bytes")
	waits := rapid.IntRange(0, 5).Draw(t, "waits") == 0
	signals := rapid.IntRange(0, 3).Draw(t, "signals") == 0
	w.place(t, p, sends, tag, n, waits, signals, bad)
}

func (w *world) place(t *rapid.T, p *link, sends bool, tag, n uint64, waits, signals bool, bad wire.Status) *post {
	s, connection := p.end(sends)
	const guard = 17
	if s.used+n+guard > modelBytes || s.timelines+2 > wire.Timelines {
		t.Skip("its memory is full")
	}
	o := &post{pipe: p, sends: sends, tag: tag, at: s.used, n: n, bad: bad}
	s.used += n + guard
	kind := "receive"
	if sends {
		kind = "send"
	}
	o.name = fmt.Sprintf("%s %d of %s, tag %d, %d bytes at %d", kind, len(p.posts), p.name, tag, n, o.at)
	options := []client.Option{client.Tag(tag)}
	timeline := func() *client.Timeline {
		line, err := s.session.Timeline(s.timelines)
		if err != nil {
			t.Fatal(err)
		}
		s.timelines++
		return line
	}
	if waits {
		o.hold = &hold{timeline: timeline(), opens: 1}
		if !signals && rapid.Bool().Draw(t, "in turn") {
			h, err := s.session.HandOver(s.timelines-1, wire.TurnStream)
			if err != nil {
				t.Fatal(err)
			}
			o.hold.opens = wire.TurnRelay
			options = append(options, client.InTurn(h))
		} else {
			options = append(options, client.After(o.hold.timeline, o.hold.opens))
		}
	}
	if signals {
		o.signal = timeline()
		options = append(options, client.Signal(o.signal, 1))
	}
	if sends {
		o.pattern = pattern(len(w.program), n)
		copy(s.place.view[o.at:], o.pattern)
		copy(s.want[o.at:], o.pattern)
	}
	offset := o.at
	if bad == wire.StatusOutOfRange {
		offset = modelBytes - n/2
		if n == 0 {
			offset++
		}
	}
	if s.unexported {
		o.bad = wire.StatusUnknownMemory
	}
	var err error
	w.say(t, "%s (waits: %v, signals: %v, must end as %v)", o.name, waits, signals, o.bad)
	if sends {
		o.op, err = connection.Send(s.memory, offset, n, options...)
	} else {
		o.op, err = connection.Receive(s.memory, offset, n, options...)
	}
	if err != nil && o.hold != nil && o.hold.opens == wire.TurnRelay && connection.Err() != nil {
		t.Skip("its hand-over has ended with the connection")
	}
	if err != nil {
		t.Fatalf("%s: %v", o.name, err)
	}
	p.posts = append(p.posts, o)
	return o
}

func pattern(seed int, n uint64) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = r.Read(b)
	return b
}

func (w *world) bad(t *rapid.T) {
	w.post(t, rapid.Bool().Draw(t, "sends"), wire.StatusOutOfRange)
}

func (w *world) release(t *rapid.T) {
	var held []*post
	for _, o := range w.posts() {
		if s, _ := o.pipe.end(o.sends); o.hold != nil && !o.hold.released && s.gone == "" {
			held = append(held, o)
		}
	}
	if len(held) == 0 {
		t.Skip("nothing waits")
	}
	o := one(t, held, "held")
	w.say(t, "release %s", o.name)
	o.hold.release()
}

func (w *world) posts() []*post {
	var list []*post
	for _, p := range w.pipes {
		list = append(list, p.posts...)
	}
	return list
}

func (w *world) cancel(t *rapid.T) {
	var some []*post
	for _, o := range w.posts() {
		if s, _ := o.pipe.end(o.sends); s.gone == "" && !o.cancel && o.bad == wire.StatusOK {
			some = append(some, o)
		}
	}
	if len(some) == 0 {
		t.Skip("nothing to cancel")
	}
	o := one(t, some, "operation")
	w.say(t, "cancel %s", o.name)
	o.cancel = true
	if err := o.op.Cancel(); err != nil {
		t.Fatal(err)
	}
}

func (w *world) pause(t *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(0, 2000).Draw(t, "us")) * time.Microsecond)
}

func (w *world) disconnect(t *rapid.T) {
	var some []*link
	sends := rapid.Bool().Draw(t, "by the sender")
	for _, p := range w.pipes {
		if s, _ := p.end(sends); s.gone == "" && p.ended == "" {
			some = append(some, p)
		}
	}
	if len(some) < 2 { // keep one
		t.Skip("too few connections")
	}
	p := one(t, some, "connection")
	w.say(t, "disconnect %s (by the sender: %v)", p.name, sends)
	_, connection := p.end(sends)
	p.ended = "a side closed it"
	ctx, cancel := soon()
	defer cancel()
	if err := connection.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

func (w *world) unexport(t *rapid.T) {
	var some []*attached
	for _, s := range w.alive(nil) {
		if !s.unexported {
			some = append(some, s)
		}
	}
	if len(some) < 3 {
		t.Skip("too few sessions")
	}
	s := one(t, some, "session")
	w.say(t, "unexport the memory of %s", s.name)
	ctx, cancel := soon()
	defer cancel()
	if err := s.memory.Unexport(ctx); err != nil {
		t.Fatal(err)
	}
	s.unexported = true
}

func (w *world) close(t *rapid.T) {
	some := w.alive(nil)
	if len(some) < 3 {
		t.Skip("too few sessions")
	}
	s := one(t, some, "session")
	w.say(t, "close %s", s.name)
	w.over(s, "its client closed it")
	if err := s.session.Close(); err != nil {
		t.Fatal(err)
	}
}

func (w *world) over(s *attached, why string) {
	s.gone = why
	for _, p := range w.pipes {
		if p.from == s || p.to == s {
			p.ended = why
		}
	}
}

// restart ends a relay, as a death would, and starts a successor.
func (w *world) restart(t *rapid.T) {
	if rapid.IntRange(0, 5).Draw(t, "rarely") > 0 {
		t.Skip("rarely")
	}
	at := rapid.IntRange(0, 1).Draw(t, "container")
	c := w.containers[at]
	// A relay that announces the end waits a while for the receivers.
	atOnce := rapid.IntRange(0, 3).Draw(t, "at once") > 0
	w.say(t, "restart the relay of %s (without a word: %v)", c.name, atOnce)
	for _, s := range w.alive(c) {
		w.over(s, "its relay ended")
		s.abrupt = atOnce
	}
	w.abrupt = w.abrupt || atOnce
	c.end(w.outer, atOnce)
	c.begin(w.host, w.route)
	for _, s := range w.sessions {
		if s.at == c && s.gone == "its relay ended" {
			w.await(t, s.session.Ended(), "the end of "+s.name)
		}
	}
}

func (w *world) await(t *rapid.T, done <-chan struct{}, what string) {
	ctx, cancel := soon()
	defer cancel()
	select {
	case <-done:
	case <-ctx.Done():
		t.Fatalf("%s did not come", what)
	}
}

// result waits for the operation's end and keeps the status.
func (w *world) result(t *rapid.T, o *post) {
	if o.over {
		return
	}
	w.await(t, o.op.Done(), "the end of "+o.name)
	ctx, cancel := soon()
	defer cancel()
	o.moved, o.err = o.op.Wait(ctx)
	o.over = true
	if s, _ := o.pipe.end(o.sends); !o.sends {
		o.seen = slices.Clone(s.place.view[o.at : o.at+o.n])
	}
}
