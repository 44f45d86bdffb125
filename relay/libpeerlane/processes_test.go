package libpeerlane_test

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// Random programs of client processes that stop, continue, fork, and are killed at any point,
// compared with a model of delivery: as relay.TestModelMessagesMatchReceives, whose clients are in
// the test's process. A living process gets PeerClientDied for undelivered messages of a dead
// process, and delivered messages are there; a stopped process is not taken for dead; a forked
// child has no effect, also with the inherited descriptors.
//
// PEERLANE_MODEL_PROGRAMS is the number of programs per kind and route; -rapid.seed repeats a
// failure.
func TestProcessesModelMessagesMatchReceives(t *testing.T) {
	for _, f := range []struct{ name, value string }{{"rapid.checks", "2"}, {"rapid.steps", "40"},
		{"rapid.nofailfile", "true"}, {"rapid.shrinktime", "5s"}} {
		before := flag.Lookup(f.name).Value.String()
		if err := flag.Set(f.name, f.value); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = flag.Set(f.name, before) })
	}
	programs, patience := 12, 1500*time.Millisecond // `make sanitize` has more
	if wanted := os.Getenv("PEERLANE_MODEL_PROGRAMS"); wanted != "" {
		var err error
		if programs, err = strconv.Atoi(wanted); err != nil {
			t.Fatal(err)
		}
		patience = 12 * time.Hour
	}
	eachKind(t, "player", func(t *testing.T, path string) {
		patience := patience
		if kindOf[path] != plain {
			patience /= 5
		}
		for _, route := range routes {
			t.Run(route, func(t *testing.T) { runProcesses(t, path, route, programs, patience) })
		}
	})
}

// The sizes of the model's world.
const (
	playerSlots      = 3
	playerSlot       = 64 << 10
	playerLargest    = playerSlot*7/2 + 5
	playerBytes      = 2 << 20
	playerBackground = 0xa5
	playerPatience   = 2 * time.Minute
)

// room is GPU memory that players export, seen without CUDA.
type room struct {
	file *os.File
	view []byte
	want []byte
	used bool
}

func newRoom(t *testing.T, gpu int) *room {
	t.Helper()
	r := &room{want: make([]byte, playerBytes)}
	onGPU(t, gpu, func(device cuda.Device) error {
		handle, err := driver.MemCreate(device, playerBytes, cuda.MemOptions{Exportable: true})
		if err != nil {
			return err
		}
		fd, err := driver.MemExportFD(handle)
		if err == nil {
			r.file = os.NewFile(uintptr(fd), "memory")
			r.view, err = unix.Mmap(fd, 0, playerBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		}
		return errors.Join(err, driver.MemRelease(handle))
	})
	t.Cleanup(func() {
		_ = unix.Munmap(r.view)
		r.file.Close()
	})
	return r
}

// player is a process of tests/player.c.
type player struct {
	name     string
	at       int // its container
	cmd      *exec.Cmd
	in       io.Writer
	out      *os.File
	lines    *bufio.Reader
	log      *os.File
	room     *room
	used     uint64
	handle   string
	stopped  bool
	gone     wire.Status // the effects on further processes; OK while it is there
	children []int
}

// way is a connection.
type way struct {
	name      string
	from, to  *player
	numbers   [2]uint64 // at the receiver, at the sender
	closed    bool
	transfers []*transfer
}

// transfer is a send or a receive.
type transfer struct {
	name     string
	way      *way
	sends    bool
	sure     bool // it was posted; else its player was killed meanwhile
	tag      uint64
	at, n    uint64
	pattern  []byte
	number   uint64
	canceled bool
	over     bool
	status   wire.Status
	moved    uint64
	seen     []byte // of a receive, its range when it had ended
}

func (o *transfer) player() *player {
	if o.sends {
		return o.way.from
	}
	return o.way.to
}

// stageOfProcesses is the model of a program.
type stageOfProcesses struct {
	host    *host
	path    string
	sockets [2]string
	rooms   [2][]*room
	players []*player
	ways    []*way
	posted  int
}

func runProcesses(t *testing.T, path, route string, most int, patience time.Duration) {
	h := newHost(t)
	h.slots = playerSlots
	var world stageOfProcesses
	world.host, world.path = h, path
	world.sockets[0], world.sockets[1] = h.pair(route, 0, 1)
	for i := range world.rooms {
		for range 3 {
			world.rooms[i] = append(world.rooms[i], newRoom(t, i))
		}
	}
	programs, start := 0, time.Now()
	for programs < most && time.Since(start) < patience && !t.Failed() {
		rapid.Check(t, func(rt *rapid.T) {
			programs++
			w := world
			defer w.leave(rt)
			w.start(rt, 0)
			w.start(rt, 1)
			w.connect(rt, w.players[0], w.players[1])
			rt.Repeat(map[string]func(*rapid.T){
				"start":      func(t *rapid.T) { w.start(t, rapid.IntRange(0, 1).Draw(t, "container")) },
				"connect":    w.someConnect,
				"send":       func(t *rapid.T) { w.post(t, true) },
				"send 2":     func(t *rapid.T) { w.post(t, true) },
				"send 3":     func(t *rapid.T) { w.post(t, true) },
				"receive":    func(t *rapid.T) { w.post(t, false) },
				"receive 2":  func(t *rapid.T) { w.post(t, false) },
				"receive 3":  func(t *rapid.T) { w.post(t, false) },
				"look":       w.look,
				"cancel":     w.cancel,
				"disconnect": w.disconnect,
				"pause":      func(t *rapid.T) { pause(t) },
				"stop":       w.stop,
				"go on":      w.goOn,
				"fork":       w.fork,
				"kill":       w.kill,
			})
			w.finish(rt)
		})
	}
	t.Logf("%d programs", programs)
}

func pause(t *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(0, 1000).Draw(t, "us")) * time.Microsecond)
}

func (w *stageOfProcesses) start(t *rapid.T, at int) {
	i := slices.IndexFunc(w.rooms[at], func(r *room) bool { return !r.used })
	if i < 0 {
		t.Skip("all memory is in use")
	}
	p := &player{name: fmt.Sprintf("%c%d", 'a'+at, len(w.players)), at: at, room: w.rooms[at][i]}
	t.Logf("start %s", p.name)
	for i := range p.room.view {
		p.room.view[i] = playerBackground
	}
	copy(p.room.want, p.room.view)
	var err error
	if p.log, err = os.CreateTemp("", "peerlane-player-"); err != nil {
		t.Fatal(err)
	}
	p.cmd = exec.Command(w.path, w.sockets[at], devices[at].UUID, strconv.Itoa(playerBytes))
	p.cmd.ExtraFiles, p.cmd.Stderr = []*os.File{p.room.file}, p.log
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	p.out, p.lines = out.(*os.File), bufio.NewReader(out)
	p.room.used = true
	w.players = append(w.players, p)
	p.handle = p.line(t)
}

func (p *player) line(t *rapid.T) string {
	if err := p.out.SetReadDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	line, err := p.lines.ReadString('\n')
	if err != nil {
		said, _ := os.ReadFile(p.log.Name())
		t.Fatalf("%s: %v: %s%s", p.name, err, line, said)
	}
	return line[:len(line)-1]
}

// tell sends a command to a player without a wait for the answer.
func (p *player) tell(t *rapid.T, format string, arguments ...any) {
	if _, err := fmt.Fprintf(p.in, format+"\n", arguments...); err != nil {
		said, _ := os.ReadFile(p.log.Name())
		t.Fatalf("%s: %v: %s", p.name, err, said)
	}
}

func (p *player) ask(t *rapid.T, format string, arguments ...any) (status wire.Status, number, moved uint64) {
	p.tell(t, format, arguments...)
	line := p.line(t)
	if _, err := fmt.Sscanf(line, "%d %d %d", &status, &number, &moved); err != nil {
		t.Fatalf("%s answers %q", p.name, line)
	}
	return status, number, moved
}

// must is ask for calls that must succeed.
func (p *player) must(t *rapid.T, format string, arguments ...any) uint64 {
	status, number, _ := p.ask(t, format, arguments...)
	if status != wire.StatusOK {
		t.Fatalf("%s: "+format+": %v", append(append([]any{p.name}, arguments...), status)...)
	}
	return number
}

func (p *player) there() bool { return p.gone == wire.StatusOK && !p.stopped }

// one draws one of the good elements, and skips without one.
func one[T any](t *rapid.T, of []T, good func(T) bool, label string) T {
	var some []T
	for _, x := range of {
		if good(x) {
			some = append(some, x)
		}
	}
	if len(some) == 0 {
		t.Skip("no " + label)
	}
	return some[rapid.IntRange(0, len(some)-1).Draw(t, label)]
}

func (w *stageOfProcesses) someConnect(t *rapid.T) {
	if len(w.ways) >= 6 {
		t.Skip("enough connections")
	}
	from := one(t, w.players, (*player).there, "sender")
	to := one(t, w.players, func(p *player) bool { return p.there() && p.at != from.at }, "receiver")
	w.connect(t, from, to)
}

func (w *stageOfProcesses) connect(t *rapid.T, from, to *player) {
	c := &way{name: fmt.Sprintf("%s>%s#%d", from.name, to.name, len(w.ways)), from: from, to: to}
	t.Logf("connect %s", c.name)
	c.numbers[1] = from.must(t, "connect %s", to.handle)
	c.numbers[0] = to.must(t, "accept")
	w.ways = append(w.ways, c)
}

func (w *stageOfProcesses) post(t *rapid.T, sends bool) {
	c := one(t, w.ways, func(c *way) bool { return !c.closed && c.end(sends).there() }, "connection")
	w.transfer(t, c, sends, rapid.Uint64Range(0, 1).Draw(t, "tag"), size(t), true)
}

func size(t *rapid.T) uint64 {
	return rapid.OneOf(
		rapid.Uint64Range(0, 300),
		rapid.Uint64Range(0, playerLargest),
		rapid.SampledFrom([]uint64{playerSlot - 1, playerSlot, playerSlot + 1}),
	).Draw(
		t,
		"bytes",
	)
}

func (c *way) end(sends bool) *player {
	if sends {
		return c.from
	}
	return c.to
}

// transfer posts an operation, and waits for the post if requested.
func (w *stageOfProcesses) transfer(t *rapid.T, c *way, sends bool, tag, n uint64, sure bool) {
	p := c.end(sends)
	const guard = 17
	if p.used+n+guard > playerBytes {
		t.Skip("its memory is full")
	}
	o := &transfer{way: c, sends: sends, sure: sure, tag: tag, at: p.used, n: n}
	p.used += n + guard
	kind, side := "receive", 0
	if sends {
		kind, side = "send", 1
		w.posted++
		o.pattern = fresh(w.posted, n)
		p.overwrite(o, o.pattern)
	}
	o.name = fmt.Sprintf("%s %d of %s, tag %d, %d bytes at %d", kind, len(c.transfers), c.name, tag, n, o.at)
	t.Logf("%s (waits for it: %v)", o.name, sure)
	c.transfers = append(c.transfers, o)
	if !sure {
		p.tell(t, "%s %d %d %d %d", kind, c.numbers[side], o.at, n, tag)
		return
	}
	o.number = p.must(t, "%s %d %d %d %d", kind, c.numbers[side], o.at, n, tag)
}

// fresh returns unique bytes.
func fresh(seed int, n uint64) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)}).Read(b)
	return b
}

func (p *player) overwrite(o *transfer, b []byte) {
	copy(p.room.view[o.at:], b)
	copy(p.room.want[o.at:], b)
}

func (w *stageOfProcesses) transfers() (list []*transfer) {
	for _, c := range w.ways {
		list = append(list, c.transfers...)
	}
	return list
}

// result takes an operation's end. From then on the client reuses the memory.
func (w *stageOfProcesses) result(o *transfer, status wire.Status, moved uint64) {
	o.over, o.status, o.moved = true, status, moved
	if !o.sends {
		o.seen = slices.Clone(o.player().room.view[o.at : o.at+o.n])
	}
	w.posted++
	o.player().overwrite(o, fresh(w.posted, o.n))
}

// statusPending is PEERLANE_STATUS_PENDING of the library.
const statusPending = 1000

func (w *stageOfProcesses) look(t *rapid.T) {
	o := one(t, w.transfers(), func(o *transfer) bool { return !o.over && o.player().there() }, "operation")
	status, _, moved := o.player().ask(t, "test %d", o.number)
	if t.Logf("look at %s: %d", o.name, status); status != statusPending {
		w.result(o, status, moved)
	}
}

func (w *stageOfProcesses) wait(t *rapid.T, o *transfer) {
	status, _, moved := o.player().ask(t, "wait %d", o.number)
	if status == timedOut {
		t.Fatalf("%s does not end", o.name)
	}
	w.result(o, status, moved)
}

// cancel waits for the end, which is independent of the remote side.
func (w *stageOfProcesses) cancel(t *rapid.T) {
	o := one(t, w.transfers(), func(o *transfer) bool { return !o.over && o.player().there() }, "operation")
	t.Logf("cancel %s", o.name)
	o.canceled = true
	o.player().must(t, "cancel %d", o.number)
	w.wait(t, o)
}

func (w *stageOfProcesses) disconnect(t *rapid.T) {
	sends := rapid.Bool().Draw(t, "by the sender")
	c := one(t, w.ways, func(c *way) bool { return !c.closed && c.end(sends).there() && len(w.ways) > 1 }, "connection")
	t.Logf("disconnect %s (by the sender: %v)", c.name, sends)
	side := 0
	if sends {
		side = 1
	}
	c.closed = true
	c.end(sends).must(t, "disconnect %d", c.numbers[side])
}

func (w *stageOfProcesses) stop(t *rapid.T) {
	p := one(t, w.players, (*player).there, "player")
	t.Logf("stop %s", p.name)
	if err := p.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.stopped = true
}

func (w *stageOfProcesses) goOn(t *rapid.T) {
	p := one(t, w.players, func(p *player) bool { return p.gone == wire.StatusOK && p.stopped }, "player")
	t.Logf("%s goes on", p.name)
	p.goOn(t)
}

func (p *player) goOn(t *rapid.T) {
	if err := p.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	p.stopped = false
}

// fork leaves a child, of which libpeerlane may know nothing.
func (w *stageOfProcesses) fork(t *rapid.T) {
	p := one(t, w.players, func(p *player) bool { return p.there() && len(p.children) < 2 }, "player")
	raw := rapid.IntRange(0, 1).Draw(t, "behind the library's back")
	t.Logf("%s forks (behind the library's back: %v)", p.name, raw == 1)
	p.children = append(p.children, int(p.must(t, "fork %d %d", raw, w.ways[0].numbers[0])))
}

// kill kills a player, maybe in the middle of something.
func (w *stageOfProcesses) kill(t *rapid.T) {
	if rapid.IntRange(0, 1).Draw(t, "rarely") > 0 {
		t.Skip("rarely")
	}
	p := one(t, w.players, func(p *player) bool { return p.gone == wire.StatusOK }, "player")
	if !p.stopped {
		for range rapid.IntRange(0, 4).Draw(t, "more operations") {
			sends := rapid.Bool().Draw(t, "sends")
			c := slices.IndexFunc(w.ways, func(c *way) bool { return !c.closed && c.end(sends) == p })
			if c >= 0 && p.used+2*playerLargest < playerBytes {
				w.transfer(t, w.ways[c], sends, rapid.Uint64Range(0, 1).Draw(t, "tag"), size(t), false)
			}
		}
		pause(t)
	}
	t.Logf("kill %s", p.name)
	p.kill(wire.StatusPeerClientDied)
}

func (p *player) kill(gone wire.Status) {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	p.gone = gone
}

// finish ends open operations of the program, and judges.
func (w *stageOfProcesses) finish(t *rapid.T) {
	for _, p := range w.players {
		if p.gone == wire.StatusOK && p.stopped {
			p.goOn(t)
		}
	}
	for _, c := range w.ways {
		if !c.closed && c.from.there() && c.to.there() {
			for tag := range uint64(2) {
				sends, receives := c.meeting(tag)
				for _, o := range sends[min(len(receives), len(sends)):] {
					w.partner(t, o)
				}
				for _, o := range receives[min(len(receives), len(sends)):] {
					w.partner(t, o)
				}
			}
		}
		for _, o := range c.transfers {
			if !o.over && o.player().there() {
				w.wait(t, o)
			}
		}
	}
	for _, p := range w.players {
		if p.there() {
			p.must(t, "close")
			if err := p.cmd.Wait(); err != nil {
				said, _ := os.ReadFile(p.log.Name())
				t.Fatalf("%s: %v: %s", p.name, err, said)
			}
			p.gone = wire.StatusPeerClosed
		}
	}
	// With any children: the relays hold nothing any more.
	for i, r := range w.host.relays {
		for end := testutil.BeginFor(playerPatience); ; time.Sleep(time.Millisecond) {
			if r := r.Report(); len(r.Clients) == 0 && r.Used == (launch.Limits{}) {
				break
			}
			if end.Over() {
				t.Fatalf("relay %d holds %+v", i, r.Report().Used)
			}
		}
	}
	for _, p := range w.players {
		for _, pid := range p.children {
			if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err != nil || bytes.Contains(state, []byte(") Z")) {
				t.Fatalf("a child of %s found what it should not have (%v: %.60s)", p.name, err, state)
			}
		}
	}
	for _, c := range w.ways {
		w.judge(t, c)
	}
	for _, p := range w.players {
		if !bytes.Equal(p.room.view, p.room.want) {
			at := slices.IndexFunc(numbers(playerBytes), func(i int) bool { return p.room.view[i] != p.room.want[i] })
			t.Fatalf("byte %d of %s changed late or by nobody's leave", at, p.name)
		}
	}
}

// partner posts the counterpart of an operation.
func (w *stageOfProcesses) partner(t *rapid.T, o *transfer) {
	w.transfer(t, o.way, !o.sends, o.tag, o.n, true)
}

// meeting returns the operations of a tag that take part in matching, in order.
func (c *way) meeting(tag uint64) (sends, receives []*transfer) {
	for _, o := range c.transfers {
		switch {
		case o.tag != tag || o.over && o.status == wire.StatusCanceled:
		case o.sends:
			sends = append(sends, o)
		default:
			receives = append(receives, o)
		}
	}
	return sends, receives
}

func (w *stageOfProcesses) judge(t *rapid.T, c *way) {
	for _, o := range c.transfers {
		// Those of a way that a side closed or died on.
		died := c.from.gone == wire.StatusPeerClientDied || c.to.gone == wire.StatusPeerClientDied
		switch {
		case !o.over:
			if o.player().gone != wire.StatusPeerClientDied {
				t.Fatalf("%s has not ended", o.name)
			}
		case o.status == wire.StatusOK || o.status == wire.StatusTruncated:
		case o.status == wire.StatusCanceled && o.canceled:
		case died && o.status == wire.StatusPeerClientDied:
		case c.closed && slices.Contains([]wire.Status{wire.StatusPeerClosed, wire.StatusClosed,
			wire.StatusUnknownConnection}, o.status):
		default:
			t.Fatalf("%s ended as %v (closed: %v, somebody died: %v)", o.name, o.status, c.closed, died)
		}
	}
	for tag := range uint64(2) {
		sends, receives := c.meeting(tag)
		for i := range max(len(sends), len(receives)) {
			switch {
			case i >= len(sends):
				w.alone(t, receives[i])
			case i >= len(receives):
				w.alone(t, sends[i])
			default:
				w.met(t, sends[i], receives[i])
			}
		}
	}
}

func (w *stageOfProcesses) alone(t *rapid.T, o *transfer) {
	if o.over && o.status == wire.StatusOK {
		t.Fatalf("%s ended well and had nobody to meet", o.name)
	}
	if !o.over && !o.sends {
		w.settle(t, o, nil)
	}
}

// met judges a message and the matched receive.
func (w *stageOfProcesses) met(t *rapid.T, send, receive *transfer) {
	truncated := send.n > receive.n
	for _, o := range []*transfer{send, receive} {
		if o.over && (truncated && o.status == wire.StatusOK || !truncated && o.status == wire.StatusTruncated) {
			t.Fatalf("%s ended as %v, and met %s and %s", o.name, o.status, send.name, receive.name)
		}
		if o.over && o.status == wire.StatusOK && o.moved != send.n {
			t.Fatalf("%s moved %d of %s", o.name, o.moved, send.name)
		}
	}
	well := send.over && send.status == wire.StatusOK || receive.over && receive.status == wire.StatusOK
	if !receive.over { // its process was killed, and the bytes are in its memory
		if well {
			if got := receive.player().room.view[receive.at : receive.at+send.n]; !bytes.Equal(got, send.pattern) {
				t.Fatalf("%s ended well, and the bytes are not in %s", send.name, receive.name)
			}
		}
		w.settle(t, receive, send.pattern)
		return
	}
	if well && !bytes.Equal(receive.seen[:send.n], send.pattern) {
		t.Fatalf("%s ended as %v, %s as %v, and the bytes differ", send.name, send.status, receive.name, receive.status)
	}
}

// settle looks at a receive of a killed player: a byte is unchanged, or belongs to the message.
func (w *stageOfProcesses) settle(t *rapid.T, o *transfer, message []byte) {
	got := o.player().room.view[o.at : o.at+o.n]
	for i, b := range got {
		if b != playerBackground && (i >= len(message) || b != message[i]) {
			t.Fatalf("byte %d of %s is nobody's", i, o.name)
		}
	}
	copy(o.player().room.want[o.at:], got)
}

// leave ends the processes.
func (w *stageOfProcesses) leave(t *rapid.T) {
	for _, p := range w.players {
		if p.gone == wire.StatusOK {
			p.kill(wire.StatusPeerClientDied)
		}
		for _, pid := range p.children {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		p.log.Close()
		if err := os.Remove(p.log.Name()); err != nil {
			t.Error(err)
		}
		p.room.used = false
	}
}
