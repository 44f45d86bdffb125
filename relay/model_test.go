package relay_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// Random programs of two containers' clients, against a model of what must be
// delivered: per connection and tag the k-th message meets the k-th receive, whole,
// once, and unless somebody ended something there is no error. Nothing else of any
// memory changes, ever. A failure is shrunk, and prints the program.
//
// PEERLANE_MODEL_PROGRAMS says how many programs of each route; -rapid.seed repeats a
// failure.
func TestModel(t *testing.T) {
	setFlag(t, "rapid.checks", strconv.Itoa(modelBatch))
	setFlag(t, "rapid.steps", "40")
	setFlag(t, "rapid.nofailfile", "true")
	programs, patience := 75, 15*time.Second
	if wanted := os.Getenv("PEERLANE_MODEL_PROGRAMS"); wanted != "" {
		var err error
		if programs, err = strconv.Atoi(wanted); err != nil {
			t.Fatal(err)
		}
		patience = time.Hour
	}
	for _, route := range routes {
		t.Run(route, func(t *testing.T) { runModel(t, route, programs, patience) })
	}
}

// modelBatch is how many programs run before it is looked whether there is time for
// more: an emulated machine runs few.
const modelBatch = 15

// The same where each copy ends as late as its order allows.
func TestModelWithLateCopies(t *testing.T) {
	if out, err := modelElsewhere("30", "PEERLANE_SIM_LATE_MS=2"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// A model that finds nothing may have looked at nothing: one byte in each copy but the first twenty.
func TestModelSeesAWrongByte(t *testing.T) {
	out, err := modelElsewhere("30", "PEERLANE_SIM_FAULT=cuMemcpyAsync:after=20:corrupt=1")
	if err == nil || !bytes.Contains(out, []byte("the bytes differ from byte")) {
		t.Fatalf("%v\n%s", err, out)
	}
}

// modelElsewhere runs so many programs in a process whose simulator is told more.
func modelElsewhere(programs, simulator string) ([]byte, error) {
	run := exec.Command(os.Args[0], "-test.run=^TestModel$", "-test.timeout=10m", "-rapid.shrinktime=1ms")
	run.Env = append(os.Environ(), simulator)
	if os.Getenv("PEERLANE_MODEL_PROGRAMS") == "" {
		run.Env = append(run.Env, "PEERLANE_MODEL_PROGRAMS="+programs)
	}
	return run.CombinedOutput()
}

func setFlag(t *testing.T, name, value string) {
	t.Helper()
	f := flag.Lookup(name)
	before := f.Value.String()
	if err := f.Value.Set(value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Value.Set(before); err != nil {
			t.Error(err)
		}
	})
}

// The sizes of the model's world: messages of up to three slots and a half over few
// slots, so that they wait for one another.
const (
	modelSlot       = 64 << 10
	modelSlots      = 3
	modelLargest    = modelSlot*7/2 + 5
	modelBytes      = 4 << 20
	modelMemory     = 3 // allocations of each container, and so the most sessions
	modelBackground = 0xa5
	modelPatience   = time.Minute
)

// modelEmpty is a memory before its first message.
var modelEmpty = bytes.Repeat([]byte{modelBackground}, modelBytes)

// container is one of the two, with a relay that can be replaced.
type container struct {
	name   string
	gpu    int
	lane   launch.Lane
	socket string
	relay  *relay.Relay
	ended  chan error
	memory []*allocation // for sessions to export
}

// allocation is GPU memory, seen without CUDA: the simulator's is a file.
type allocation struct {
	fd   int
	view []byte
	used *attached
	mine bool // of the session alone: staging memory
}

func (h *host) container(name, route string, client, server int, nic string) *container {
	h.t.Helper()
	c := &container{name: name, gpu: client, lane: copying(far(client, server, nic))}
	for range modelMemory {
		c.memory = append(c.memory, viewed(h.t, client, modelBytes))
	}
	c.begin(h, route)
	h.t.Cleanup(func() { c.end(h.t) })
	return c
}

func (c *container) begin(h *host, route string) {
	h.t.Helper()
	generation := fmt.Sprintf("%032x", rand.Uint64())
	c.socket = filepath.Join(h.dir, c.name)
	r, err := relay.New(listen(h.t, c.socket), listen(h.t, filepath.Join(h.dir, generation+".sock")), -1)
	if err != nil {
		h.t.Fatal(err)
	}
	config := launch.Config{
		Generation: generation, Container: c.name, Lanes: []launch.Lane{c.lane}, Route: route, Transport: launch.TransportAuto,
		Slots: modelSlots, SlotBytes: modelSlot, Peers: h.dir, NICs: h.dir,
	}
	if err := r.Configure(config); err != nil {
		h.t.Fatal(err)
	}
	c.relay, c.ended = r, make(chan error, 1)
	go func() { c.ended <- r.Run() }()
}

func (c *container) end(t *testing.T) {
	t.Helper()
	c.relay.Stop("the model ends it")
	select {
	case err := <-c.ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(modelPatience):
		t.Fatalf("the relay of %s did not end", c.name)
	}
}

// world is the model of one program.
type world struct {
	outer *testing.T
	host  *host
	route string

	containers [2]*container
	sessions   []*attached
	pipes      []*link
	program    []string
}

// attached is a client's session with a memory of its own.
type attached struct {
	name       string
	at         *container
	session    *client.Session
	place      *allocation
	memory     *client.Memory
	listener   *client.Listener
	used       uint64 // bytes of the memory given to messages
	timelines  uint32 // given out
	gone       string // why it is over, or its memory is
	unexported bool
	want       []byte // what its memory must be; nil entries are in loose
}

// link is a connection.
type link struct {
	name      string
	from, to  *attached
	sending   *client.Connection
	receiving *client.Connection
	ended     string // why errors are no fault from now on
	posts     []*post
}

// post is an operation.
type post struct {
	name    string
	pipe    *link
	sends   bool
	bad     wire.Status // it must end so
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
	seen    []byte // of a receive, its range when it had ended
}

type hold struct {
	timeline *client.Timeline
	opens    uint64 // the value that the operation begins at
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

// one draws an element by its place: what it is would be printed whole.
func one[T any](t *rapid.T, of []T, label string) T {
	return of[rapid.IntRange(0, len(of)-1).Draw(t, label)]
}

func soon() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), modelPatience)
}

func runModel(t *testing.T, route string, most int, patience time.Duration) {
	h := newHost(t)
	h.nic("nic0", 1)
	h.nic("nic1", 2)
	a := h.container("a", route, 0, 1, "nic0")
	b := h.container("b", route, 3, 2, "nic1")
	programs, start := 0, time.Now()
	program := func(rt *rapid.T) {
		programs++
		w := &world{outer: t, host: h, route: route, containers: [2]*container{a, b}}
		defer w.leave(rt)
		w.attach(rt, 0)
		w.attach(rt, 1)
		w.connect(rt, w.sessions[0], w.sessions[1])
		rt.Repeat(map[string]func(*rapid.T){
			"attach":     func(t *rapid.T) { w.attach(t, rapid.IntRange(0, 1).Draw(t, "container")) },
			"connect":    w.someConnect,
			"send":       func(t *rapid.T) { w.post(t, true, 0) },
			"send 2":     func(t *rapid.T) { w.post(t, true, 0) },
			"send 3":     func(t *rapid.T) { w.post(t, true, 0) },
			"receive":    func(t *rapid.T) { w.post(t, false, 0) },
			"receive 2":  func(t *rapid.T) { w.post(t, false, 0) },
			"receive 3":  func(t *rapid.T) { w.post(t, false, 0) },
			"bad":        w.bad,
			"release":    w.release,
			"cancel":     w.cancel,
			"pause":      w.pause,
			"disconnect": w.disconnect,
			"unexport":   w.unexport,
			"close":      w.close,
			"restart":    w.restart,
		})
		w.finish(rt)
	}
	for programs < most && time.Since(start) < patience && !t.Failed() {
		rapid.Check(t, program)
	}
	// Whatever the programs did: the relays hold nothing any more.
	for _, c := range []*container{a, b} {
		end := time.Now().Add(modelPatience)
		for {
			r := c.relay.Report()
			if r == nil {
				t.Fatalf("the relay of %s ends", c.name)
			}
			if len(r.Clients) == 0 && r.Used == (launch.Limits{}) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("after all programs the relay of %s holds %+v of %d clients", c.name, r.Used, len(r.Clients))
			}
			time.Sleep(time.Millisecond)
		}
	}
	t.Logf("%d programs", programs)
}

func (w *world) attach(t *rapid.T, at int) {
	c := w.containers[at]
	i := slices.IndexFunc(c.memory, func(m *allocation) bool { return m.used == nil })
	if i < 0 {
		t.Skip("all memory is in use")
	}
	place := c.memory[i]
	s := &attached{name: fmt.Sprintf("%s%d", c.name, len(w.sessions)), at: c, place: place}
	staged := rapid.IntRange(0, 2).Draw(t, "staging memory") == 0
	w.say(t, "attach %s (with staging memory: %v)", s.name, staged)
	s.want = slices.Clone(modelEmpty)
	ctx, cancel := soon()
	defer cancel()
	var err error
	if s.session, err = client.Dial(ctx, c.socket); err != nil {
		t.Fatalf("attach: %v", err)
	}
	place.used = s
	w.sessions = append(w.sessions, s)
	id := uuid(w.outer, c.gpu)
	if staged {
		w.stage(t, s)
	} else if s.memory, err = s.session.Export(ctx, client.Allocation{FD: place.fd, Bytes: modelBytes, GPU: id}); err != nil {
		t.Fatalf("export: %v", err)
	}
	copy(s.place.view, modelEmpty)
	if s.listener, err = s.session.Listen(ctx, id); err != nil {
		t.Fatalf("listen: %v", err)
	}
}

// stage gives a session staging memory in place of the container's, and a view of it
// that stays when the client's own has gone.
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
	s.place.used = nil
	s.place, s.memory = &allocation{fd: -1, view: view, used: s, mine: true}, m
}

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
	n := rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Uint64Range(0, modelLargest), rapid.SampledFrom([]uint64{modelSlot - 1, modelSlot, modelSlot + 1})).Draw(t, "bytes")
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

// restart ends a relay, as a death would, and starts its successor.
func (w *world) restart(t *rapid.T) {
	if rapid.IntRange(0, 3).Draw(t, "rarely") > 0 {
		t.Skip("rarely")
	}
	at := rapid.IntRange(0, 1).Draw(t, "container")
	c := w.containers[at]
	w.say(t, "restart the relay of %s", c.name)
	for _, s := range w.alive(c) {
		w.over(s, "its relay ended")
	}
	c.end(w.outer)
	c.begin(w.host, w.route)
	for _, s := range w.sessions {
		if s.at == c && s.gone == "its relay ended" {
			w.await(t, s.session.Ended(), "the end of "+s.name)
		}
	}
}

func (w *world) await(t *rapid.T, done <-chan struct{}, what string) {
	select {
	case <-done:
	case <-time.After(modelPatience):
		t.Fatalf("%s did not come", what)
	}
}

// result waits for the operation's end and keeps how it was.
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

// finish ends what the program left open, and judges.
func (w *world) finish(t *rapid.T) {
	for _, o := range w.posts() {
		if s, _ := o.pipe.end(o.sends); o.hold != nil && !o.hold.released && s.gone == "" {
			o.hold.release()
		}
	}
	for _, p := range w.pipes {
		w.complete(t, p)
	}
	for _, p := range w.pipes {
		w.judge(t, p)
	}
	for _, s := range w.sessions {
		w.look(t, s)
	}
}

// complete gives each message its receive and each receive its message, and waits
// until all has ended.
func (w *world) complete(t *rapid.T, p *link) {
	for _, o := range p.posts {
		if o.cancel || o.bad != wire.StatusOK || p.ended != "" {
			w.result(t, o)
		}
	}
	if p.ended == "" {
		for tag := range uint64(3) {
			sends, receives := p.meeting(tag)
			for i := len(receives); i < len(sends); i++ {
				w.partner(t, sends[i])
			}
			for i := len(sends); i < len(receives); i++ {
				w.partner(t, receives[i])
			}
		}
	}
	for _, o := range p.posts {
		w.result(t, o)
	}
}

// partner posts what an operation waits for, or cancels it where the other side has
// taken its memory back.
func (w *world) partner(t *rapid.T, o *post) {
	if s, _ := o.pipe.end(!o.sends); !s.unexported {
		w.place(t, o.pipe, !o.sends, o.tag, o.n, false, false, wire.StatusOK)
		return
	}
	w.say(t, "cancel %s, which nobody can meet", o.name)
	o.cancel = true
	if err := o.op.Cancel(); err != nil {
		t.Fatal(err)
	}
}

// meeting are the operations of a tag that take part in matching, in their order.
func (p *link) meeting(tag uint64) (sends, receives []*post) {
	for _, o := range p.posts {
		switch {
		case o.tag != tag || o.bad != wire.StatusOK || o.over && is(o.err, wire.StatusCanceled):
		case o.sends:
			sends = append(sends, o)
		default:
			receives = append(receives, o)
		}
	}
	return sends, receives
}

func is(err error, status wire.Status) bool { return errors.Is(err, &wire.Error{Status: status}) }

func (w *world) judge(t *rapid.T, p *link) {
	for _, o := range p.posts {
		switch {
		case is(o.err, wire.StatusCanceled) && !o.cancel && p.ended == "":
			t.Fatalf("%s was canceled by nobody", o.name)
		case o.bad != wire.StatusOK && o.err == nil, o.bad != wire.StatusOK && p.ended == "" && !is(o.err, o.bad):
			t.Fatalf("%s ended as %v, not as %v", o.name, o.err, o.bad)
		}
		if o.hold != nil && o.hold.opens == wire.TurnRelay && o.err == nil {
			if v := o.hold.timeline.Value(); v != wire.TurnStream && v != wire.TimelineEnd {
				t.Fatalf("%s has ended well and the turn is %d's", o.name, v)
			}
		}
		if o.signal != nil && !o.signal.Reached(1) {
			t.Fatalf("%s has ended and its timeline stands at %d", o.name, o.signal.Value())
		}
	}
	for tag := range uint64(3) {
		sends, receives := p.meeting(tag)
		if p.ended == "" && len(sends) != len(receives) {
			t.Fatalf("%s, tag %d: %d messages and %d receives ended", p.name, tag, len(sends), len(receives))
		}
		for i := range min(len(sends), len(receives)) {
			w.met(t, p, sends[i], receives[i])
		}
		for _, o := range append(sends[min(len(sends), len(receives)):], receives[min(len(sends), len(receives)):]...) {
			if o.err == nil {
				t.Fatalf("%s ended well and had nobody to meet", o.name)
			}
		}
	}
}

// met judges a message and the receive that it met.
func (w *world) met(t *rapid.T, p *link, send, receive *post) {
	truncated := send.n > receive.n
	if p.ended == "" {
		want := wire.StatusOK
		if truncated {
			want = wire.StatusTruncated
		}
		for _, o := range []*post{send, receive} {
			if want == wire.StatusOK && o.err != nil || want != wire.StatusOK && !is(o.err, want) {
				t.Fatalf("%s ended as %v, not as %v, and met %s and %s", o.name, o.err, want, send.name, receive.name)
			}
		}
	}
	if truncated && (send.err == nil || receive.err == nil) {
		t.Fatalf("%s does not fit into %s, and they ended as %v and %v", send.name, receive.name, send.err, receive.err)
	}
	if send.err == nil && send.moved != send.n {
		t.Fatalf("%s moved %d", send.name, send.moved)
	}
	if receive.err == nil && receive.moved != send.n {
		t.Fatalf("%s moved %d of %s", receive.name, receive.moved, send.name)
	}
	if send.err != nil && receive.err != nil {
		return
	}
	// One of them said that the bytes are there.
	if !bytes.Equal(receive.seen[:send.n], send.pattern) {
		t.Fatalf("%s ended as %v, %s as %v, and the bytes differ from byte %d on",
			send.name, send.err, receive.name, receive.err, firstDifference(receive.seen, send.pattern))
	}
	for i, b := range receive.seen[send.n:] {
		if b != modelBackground {
			t.Fatalf("%s wrote byte %d of %s", send.name, uint64(i)+send.n, receive.name)
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// look compares all of a memory: what no receive had, and what receives had when
// they ended, is as it was.
func (w *world) look(t *rapid.T, s *attached) {
	for _, p := range w.pipes {
		if p.to != s {
			continue
		}
		for _, o := range p.posts {
			if !o.sends {
				copy(s.want[o.at:], o.seen)
			}
		}
	}
	if !bytes.Equal(s.place.view, s.want) {
		at := firstDifference(s.place.view, s.want)
		near := "nothing"
		for _, o := range w.posts() {
			if end, _ := o.pipe.end(o.sends); end == s && uint64(at) >= o.at && uint64(at) < o.at+o.n {
				near = fmt.Sprintf("%s, which ended as %v", o.name, o.err)
			}
		}
		t.Fatalf("byte %d of %s changed late or by nobody's leave: it belongs to %s", at, s.name, near)
	}
}

// leave closes what there is, so that the next program finds the world as this one
// did.
func (w *world) leave(t *rapid.T) {
	for _, s := range w.sessions {
		if err := s.session.Close(); err != nil && !strings.Contains(err.Error(), "closed") {
			t.Errorf("closing %s: %v", s.name, err)
		}
		s.place.used = nil
		if s.place.mine {
			if err := unix.Munmap(s.place.view); err != nil {
				t.Error(err)
			}
		}
	}
}
