package relay_test

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// stage is a small world with a faulty process: the relay of container a. All others are healthy.
type stage struct {
	route   string
	host    *host
	config  launch.Config // of relay a
	a, b    string        // sockets of clients
	files   []*os.File    // listeners of the process
	memoryA *allocation
	memoryB *allocation
	uuidA   wire.UUID
	uuidB   wire.UUID
	idle    holding // of the process without a fault, when nobody is attached
	// environment is the process's.
	environment []string
}

func (s *stage) String() string {
	return "relay, route " + s.route
}

const stageBytes = 2 << 20

func newStage(t *testing.T, route string) *stage {
	t.Helper()
	h := newHost(t)
	h.change = func(c *launch.Config) { c.Slots, c.SlotBytes = 2, 64<<10 }
	s := &stage{route: route, host: h, uuidA: uuid(t, 0), uuidB: uuid(t, 3),
		memoryA: viewed(t, 0, stageBytes), memoryB: viewed(t, 3, stageBytes)}
	if route == launch.RouteStaged {
		h.nic("nic0")
		h.nic("nic1")
	}
	s.b = h.relay("b", route, far(3, 2, "nic1"))
	s.a = filepath.Join(h.dir, "a")
	id := hex.EncodeToString(random(t, 16))
	s.config = launch.Config{
		Generation: id, Container: "a", Lanes: []launch.Lane{far(0, 1, "nic0")}, Route: route,
		Transport: launch.TransportAuto,
		Slots:     2, SlotBytes: 64 << 10, Peers: h.dir,
	}
	if route == launch.RouteStaged {
		s.environment = h.withNICs(&s.config)
	}
	s.files = relayListeners(t, s.a, filepath.Join(h.dir, id+".sock"))
	t.Cleanup(func() { closeFiles(s.files) })
	return s
}

// viewed allocates GPU memory that is seen without CUDA: the simulator's is a file.
func viewed(t testing.TB, gpu int, bytes uint64) *allocation {
	t.Helper()
	m := allocate(t, gpu, bytes)
	if realGPUs {
		return &allocation{fd: m.fd, window: newWindow(t, m)}
	}
	view, err := unix.Mmap(m.fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(view) })
	return &allocation{fd: m.fd, view: view}
}

// window reads and writes memory of a real GPU through a buffer of the host.
type window struct {
	memory *memory
	ctx    cuda.Context
	stream cuda.Stream
	buffer []byte // pinned
}

const windowBytes = 256 << 10

func newWindow(t testing.TB, m *memory) *window {
	t.Helper()
	w := &window{memory: m}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	device, err := driver.DeviceByPCIBusID(devices[m.gpu].BusID)
	if err == nil {
		w.ctx, err = driver.CtxCreate(device, cuda.CtxOptions{Lean: true})
	}
	if err == nil {
		w.stream, err = driver.StreamCreate()
	}
	var pinned unsafe.Pointer
	if err == nil {
		pinned, err = driver.MemHostAlloc(windowBytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	w.buffer = unsafe.Slice((*byte)(pinned), windowBytes)
	t.Cleanup(func() {
		if err := w.use(func() error { return driver.CtxDestroy(w.ctx) }); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *window) use(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return errors.Join(driver.CtxSetCurrent(w.ctx), f())
}

func (w *window) write(at uint64, b []byte) error {
	copyBytes(w.buffer[:len(b)], b)
	return w.use(func() error {
		return errors.Join(driver.MemcpyHtoDAsync(w.memory.ptr+cuda.Ptr(at), unsafe.Pointer(&w.buffer[0]), uint64(len(b)),
			w.stream),
			driver.StreamSynchronize(w.stream))
	})
}

func (w *window) read(at uint64, b []byte) error {
	err := w.use(func() error {
		return errors.Join(driver.MemcpyDtoHAsync(unsafe.Pointer(&w.buffer[0]), w.memory.ptr+cuda.Ptr(at), uint64(len(b)),
			w.stream),
			driver.StreamSynchronize(w.stream))
	})
	copyBytes(b, w.buffer[:len(b)])
	return err
}

// write puts bytes into GPU memory, and read gets them.
func (m *allocation) write(at uint64, b []byte) error {
	if m.window != nil {
		return m.window.write(at, b)
	}
	copy(m.view[at:], b)
	return nil
}

func (m *allocation) read(at uint64, b []byte) error {
	if m.window != nil {
		return m.window.read(at, b)
	}
	copy(b, m.view[at:])
	return nil
}

// subject is the process that has faults.
type subject struct {
	cmd   *exec.Cmd
	stdin io.Closer
	log   *os.File
	ended chan struct{}
	err   error // how it ended
	// Of one whose system calls are watched.
	control *os.File
	watcher *watcher
}

func (s *stage) begin(log string, environment ...string) (*subject, error) {
	file, err := os.OpenFile(log, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	p := &subject{log: file, ended: make(chan struct{})}
	p.cmd, p.stdin, err = startRelay(s.config, s.files, file, append(environment, s.environment...)...)
	if err != nil {
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

func (p *subject) hasEnded(within time.Duration) bool {
	select {
	case <-p.ended:
		return true
	case <-time.After(within):
		return false
	}
}

// stop ends the process, and returns the output.
func (p *subject) stop() (said string, err error) {
	p.stdin.Close()
	if !p.hasEnded(time.Minute) {
		_ = p.cmd.Process.Kill()
		<-p.ended
		err = errors.New("the process does not end")
	}
	text, read := os.ReadFile(p.log.Name())
	p.log.Close()
	if p.watcher != nil {
		p.watcher.over.Wait()
		p.control.Close()
	}
	return string(text), errors.Join(err, read)
}

// holding counts the resources of a process, without the Go runtime's resources.
type holding struct {
	files, mappings, streams int
	slots, slotFiles         int // mappings and files of slots in host memory, which are not among the others
	goroutines               int // 0: nobody knows
	gpuBytes                 uint64
	list                     []string // of the files
}

// hostSlots are the mappings of a lane whose slots on server GPUs have failed once: two of each memory
// for short messages and for slots, out and in. The lane keeps them.
const hostSlots = 8

const hostSlotsFile = "/memfd:peerlane-slots"

func (h holding) within(most holding) bool {
	return h.files <= most.files && h.slots <= max(most.slots, hostSlots) &&
		h.slotFiles <= max(most.slotFiles, hostSlots/2) && h.mappings <= most.mappings &&
		h.streams <= most.streams && h.gpuBytes <= most.gpuBytes && h.goroutines <= most.goroutines
}

func (h holding) String() string {
	return fmt.Sprintf("%d files, %d files and %d mappings of slots, %d of shared memory with %d bytes of GPU memory, "+
		"%d streams, %d goroutines; files: %s",
		h.files, h.slotFiles, h.slots, h.mappings, h.gpuBytes, h.streams, h.goroutines, strings.Join(h.list, " "))
}

func (p *subject) holds() (h holding, err error) {
	proc := fmt.Sprintf("/proc/%d", p.cmd.Process.Pid)
	files, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return h, err
	}
	for _, f := range files {
		to, err := os.Readlink(proc + "/fd/" + f.Name())
		if err == nil && !(realGPUs && strings.HasPrefix(to, "/dev/nvidia")) { // it may have been closed
			if strings.HasPrefix(to, hostSlotsFile) {
				h.slotFiles++
			} else {
				h.files++
			}
			h.list = append(h.list, to)
		}
	}
	slices.Sort(h.list)
	mapped, err := os.ReadFile(proc + "/maps")
	if err != nil {
		return h, err
	}
	for line := range strings.Lines(string(mapped)) {
		if !strings.Contains(line, "/memfd:") {
			continue
		}
		if strings.Contains(line, hostSlotsFile) {
			h.slots++
			continue
		}
		h.mappings++
		var from, to uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err == nil && strings.Contains(line, "peerlane-sim-gpu") {
			h.gpuBytes += to - from
		}
	}
	if p.watcher != nil {
		if h.goroutines, err = p.goroutines(); err != nil {
			return h, err
		}
	}
	threads, err := filepath.Glob(proc + "/task/*/comm")
	for _, t := range threads {
		if name, err := os.ReadFile(t); err == nil && string(name) == "sim-stream\n" {
			h.streams++
		}
	}
	return h, err
}

// rests waits for the end of a session's resources, and returns the rest.
func (p *subject) rests() (h holding, err error) {
	for last := -1; err == nil; time.Sleep(300 * time.Millisecond) {
		if h, err = p.holds(); h.files+h.mappings+h.goroutines == last {
			break
		}
		last = h.files + h.mappings + h.goroutines
	}
	return h, err
}

// settles waits until the process holds no more than without a fault.
func (p *subject) settles(most holding) error {
	for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
		h, err := p.holds()
		if err != nil || h.within(most) {
			return err
		}
		if end.Over() {
			return fmt.Errorf("it leaks: it holds %v\nand without a fault %v", h, most)
		}
	}
}

// errWrongBytes: the delivered bytes differ from the sent bytes.
var errWrongBytes = errors.New("wrong bytes were delivered")

// party is a client in the program that is run with faults.
type party struct {
	session *client.Session
	gpu     *client.Memory
	host    *client.Memory
	place   *allocation // the GPU's memory
}

func attachParty(ctx context.Context, socket string, gpu wire.UUID, m *allocation) (p party, err error) {
	if p.session, err = client.Dial(ctx, socket); err != nil {
		return p, fmt.Errorf("dial: %w", err)
	}
	p.place = m
	if p.gpu, err = p.session.Export(ctx, client.Allocation{FD: m.fd, Bytes: stageBytes, GPU: gpu}); err != nil {
		return p, fmt.Errorf("export: %w", err)
	}
	if p.host, err = p.session.HostMemory(ctx, client.HostMemory{Bytes: 256 << 10, GPU: gpu}); err != nil {
		return p, fmt.Errorf("host memory: %w", err)
	}
	return p, nil
}

// exercise is a small program with every function of relays: memory of GPUs and of the
// host, messages either way of a few bytes and of several slots.
func (s *stage) exercise() (err error) {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	a, err := attachParty(ctx, s.a, s.uuidA, s.memoryA)
	if a.session != nil {
		defer a.session.Close()
	}
	if err != nil {
		return fmt.Errorf("client of a: %w", err)
	}
	b, err := attachParty(ctx, s.b, s.uuidB, s.memoryB)
	if b.session != nil {
		defer b.session.Close()
	}
	if err != nil {
		return fmt.Errorf("client of b: %w", err)
	}
	for _, way := range []struct {
		name     string
		from, to *party
		by, at   wire.UUID
	}{{"a to b", &a, &b, s.uuidA, s.uuidB}, {"b to a", &b, &a, s.uuidB, s.uuidA}} {
		if err := passAll(ctx, way.from, way.to, way.by, way.at); err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
	}
	for _, m := range []*client.Memory{a.gpu, a.host, b.gpu, b.host} {
		if err := m.Unexport(ctx); err != nil {
			return fmt.Errorf("unexport: %w", err)
		}
	}
	return nil
}

// passAll connects two parties, and sends between every kind of memory.
func passAll(ctx context.Context, from, to *party, by, at wire.UUID) error {
	listener, err := to.session.Listen(ctx, at)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	sending, err := from.session.Connect(ctx, by, listener.Handle())
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	receiving, err := listener.Accept(ctx)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	for _, m := range []struct {
		n                uint64
		fromHost, toHost bool
	}{{8, false, false}, {160 << 10, false, false}, {5000, true, false}, {200 << 10, false, true},
		{70 << 10, true, true}} {
		source, target, offset := from.gpu, to.gpu, uint64(1<<20)
		sent, got := make([]byte, m.n), make([]byte, m.n)
		crand.Read(sent)
		if m.fromHost {
			source = from.host
			copy(from.host.Data, sent)
		} else if err := from.place.write(0, sent); err != nil {
			return err
		}
		if m.toHost {
			target, offset = to.host, 0
			clear(to.host.Data[:m.n])
		} else if err := to.place.write(offset, got); err != nil {
			return err
		}
		what := fmt.Sprintf("%d bytes, host memory %v to %v", m.n, m.fromHost, m.toHost)
		receive, err := receiving.Receive(target, offset, m.n)
		if err != nil {
			return fmt.Errorf("%s: receive: %w", what, err)
		}
		send, err := sending.Send(source, 0, m.n)
		if err != nil {
			return fmt.Errorf("%s: send: %w", what, err)
		}
		_, failedSend := send.Wait(ctx)
		_, failed := receive.Wait(ctx)
		if m.toHost {
			copy(got, to.host.Data)
		} else if err := to.place.read(offset, got); err != nil {
			return err
		}
		if failed == nil && !bytes.Equal(sent, got) {
			return fmt.Errorf("%s: %w", what, errWrongBytes)
		}
		if err := errors.Join(failedSend, failed); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return errors.Join(sending.Close(ctx), receiving.Close(ctx), listener.Close(ctx))
}

// forwarding is the library of cuda/sim/forward, which gives calls of a real driver faults.
var forwarding = os.Getenv("PEERLANE_TEST_FAULTS_LIBRARY")

// faulty is the environment of a process that meets a fault, and lists its CUDA calls in a file.
func faulty(fault, calls string) []string {
	if realGPUs {
		return []string{cuda.LibraryVariable + "=" + forwarding, "PEERLANE_FORWARD_FAULT=" + fault,
			"PEERLANE_FORWARD_CALLS=" + calls}
	}
	return []string{"PEERLANE_SIM_FAULT=" + fault, "PEERLANE_SIM_CALLS=" + calls}
}

// needForwarding ends a test that gives faults to calls of a real driver without the library.
func needForwarding(t *testing.T) {
	t.Helper()
	if realGPUs && forwarding == "" {
		t.Fatal("PEERLANE_TEST_FAULTS_LIBRARY is not set: set it to bin/libpeerlane-cuda-faults.so")
	}
}

// measure runs the program without a fault, and returns which calls the process makes.
func (s *stage) measure(t *testing.T, dir string) (calls map[string]int) {
	t.Helper()
	list := filepath.Join(dir, "calls")
	p, err := s.begin(filepath.Join(dir, "log"), faulty("", list)...)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err = s.exercise(); err != nil {
			break
		}
	}
	if err == nil {
		s.idle, err = p.rests()
	}
	said, stopped := p.stop()
	if err = errors.Join(err, stopped, p.err); err != nil {
		t.Fatalf("%v, without a fault: %v\n%s", s, err, said)
	}
	if calls, err = callsIn(list); err != nil {
		t.Fatal(err)
	}
	return calls
}

// callsIn counts the calls in the simulator's list.
func callsIn(list string) (map[string]int, error) {
	text, err := os.ReadFile(list)
	calls := map[string]int{}
	for name := range strings.Lines(string(text)) {
		calls[strings.TrimSpace(name)]++
	}
	return calls, err
}

// fault is a single fault of a process, in the call after so many calls of that name.
type fault struct {
	call   string
	after  int
	effect string
}

func (f fault) String() string {
	return fmt.Sprintf("%s:after=%d:times=1:%s", f.call, f.after, f.effect)
}

// ends reports whether a process that meets the fault cannot go on. A context is lost
// only where one is current.
func (f fault) ends() bool { return f.effect == "lost" }

// isNamed reports whether a text names the fault: the call, or, if a different call first detected
// the loss of the context, that call's result.
func (f fault) isNamed(text string) bool {
	result := map[string]string{"error=700": "CUDA_ERROR_ILLEGAL_ADDRESS", "lost": "CUDA_ERROR_UNKNOWN"}[f.effect]
	return strings.Contains(text, f.call) || result != "" && strings.Contains(text, result)
}

// mayEnd reports whether the fault may end the process: where something cannot be given back but by
// that.
func (f fault) mayEnd() bool {
	switch f.call {
	case "cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuMemHostUnregister", "cuCtxSetCurrent", "cuCtxGetCurrent":
		return true
	}
	return f.ends() || f.effect == "error=700"
}

var effects = []string{"error=304", "error=700", "oom", "lost", "delay=200", "corrupt=1"}

// faults returns faults for the calls of a process: per effect, at the first call, the last, and
// some between.
func faults(calls map[string]int, all bool) (first, more []fault) {
	for _, call := range slices.Sorted(maps.Keys(calls)) {
		n := calls[call]
		some := []int{0, 1, n / 2, n - 1}
		if all {
			some = append(some, 2, 3, 5, 8, n/3, n*2/3)
		}
		slices.Sort(some)
		some = slices.Compact(some)
		for _, effect := range effects {
			switch {
			case effect == "corrupt=1" && (realGPUs || !strings.HasPrefix(call, "cuMemcpy")):
				continue // a real driver's copies stay right
			case effect == "lost" && call == "cuInit":
				continue // a driver that cannot be opened is no reason to end: it is told to each client
			}
			for _, after := range some {
				f := fault{call, after, effect}
				switch {
				case after >= n:
				case after == 0 && effect == effects[0]:
					first = append(first, f)
				default:
					more = append(more, f)
				}
			}
		}
	}
	return first, more
}

// endTimeout is how long the end of a process may take that cannot go on. It takes less
// than a second; a slow machine more.
const endTimeout = 20 * time.Second

// keeper starts a process with a fault, and a successor after its end, as a supervisor does.
type keeper struct {
	successor func() (*subject, error)
	isNamed   func(text string) bool // whether what a process said names its fault
	mayEnd    func() bool

	mu       sync.Mutex // held for all three
	now      *subject
	ends     int
	said     string
	err      error
	stopping bool
	over     sync.WaitGroup
}

func (s *stage) keep(f fault, log string) (*keeper, error) {
	first, err := s.begin(log, faulty(f.String(), log+".calls")...)
	if err != nil {
		return nil, err
	}
	k := &keeper{successor: func() (*subject, error) { return s.begin(log) }, isNamed: f.isNamed, mayEnd: f.mayEnd}
	k.keep(first)
	return k, nil
}

// keep begins with the first process.
func (k *keeper) keep(first *subject) {
	k.now = first
	k.over.Go(func() {
		for p := first; p != nil; {
			<-p.ended
			p = k.next(p)
		}
	})
}

// next replaces a process that has ended; nil where there is to be none.
func (k *keeper) next(p *subject) *subject {
	k.mu.Lock()
	defer k.mu.Unlock()
	text, err := p.stop()
	k.said += text
	k.ends++
	switch {
	case err != nil:
		k.err = err
	case k.stopping && p.err == nil:
		return nil
	case p.err == nil || !k.isNamed(text):
		k.err = fmt.Errorf("the process ended with %v and does not name the call", p.err)
	case !k.mayEnd() || k.ends > 1:
		k.err = fmt.Errorf("the process ended for the %d. time with %v, and could go on", k.ends, p.err)
	}
	if k.err != nil || k.stopping {
		return nil
	}
	if k.now, k.err = k.successor(); k.err != nil {
		return nil
	}
	return k.now
}

// current is the present process, and whether the process is a successor.
func (k *keeper) current() (p *subject, replaced bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now, k.ends > 0, k.err
}

func (k *keeper) stop() (said string, err error) {
	k.mu.Lock()
	k.stopping = true
	if k.now != nil {
		k.now.stdin.Close()
	}
	k.mu.Unlock()
	k.over.Wait()
	return k.said, k.err
}

// meet runs the program in a world with a faulty process, and then until the program works again.
func (s *stage) meet(f fault, log string) (err error) {
	if err := os.RemoveAll(log + ".calls"); err != nil {
		return err
	}
	k, err := s.keep(f, log)
	if err != nil {
		return err
	}
	var told error
	defer func() {
		said, stopped := k.stop()
		if err = errors.Join(err, stopped); err != nil {
			err = fmt.Errorf("%w\nthe clients were told: %v\nits log: %s", err, told, said)
		}
	}()
	var first time.Time // when it failed
	for good := 0; good < 2; {
		if _, _, err := k.current(); err != nil {
			return err
		}
		failed := s.exercise()
		told = errors.Join(told, failed)
		switch {
		case failed == nil:
			good++
			continue
		case errors.Is(failed, context.DeadlineExceeded):
			return errors.New("it does not end")
		case errors.Is(failed, errWrongBytes) != (f.effect == "corrupt=1"):
			return errors.New("the bytes")
		case strings.HasPrefix(f.effect, "delay="):
			return errors.New("a delay is no error")
		}
		if good = 0; first.IsZero() {
			first = time.Now()
		}
		if time.Since(first) > endTimeout {
			return errors.New("it does not work again")
		}
		if p, replaced, _ := k.current(); f.ends() && !replaced && !p.hasEnded(endTimeout) {
			return errors.New("the process cannot go on, and does not end")
		}
		// A lane without staging is not tried again for a second.
		time.Sleep(100 * time.Millisecond)
	}
	switch {
	case f.effect == "corrupt=1" && told == nil:
		// How copies are gathered is another time otherwise, and so how many there are.
		if calls, err := callsIn(log + ".calls"); err != nil || calls[f.call] > f.after {
			return errors.Join(errors.New("a wrong byte was not seen"), err)
		}
	case told != nil && f.effect != "corrupt=1" && !f.isNamed(told.Error()):
		return errors.New("no client is told of the call")
	}
	return s.returnsToRest(k, f)
}

// returnsToRest waits until the process of k has released the resources of the fault's program, unless a
// new process has replaced it.
func (s *stage) returnsToRest(k *keeper, f fault) error {
	p, replaced, err := k.current()
	if err != nil || replaced {
		return err
	}
	err = s.leavesNothing(p, f)
	if err != nil && p.hasEnded(time.Second) {
		return nil // the keeper has looked why
	}
	return err
}

// Every CUDA call of a relay in a small program meets every fault: the program ends, the error
// names the call, delivered bytes are right, the next program works in the same or in the next
// process, and no resource remains. The calls are those that the simulator has seen.
//
// PEERLANE_FAULTS=all, as in `make soak-faults`, tries all faults; else there is one of each
// call, and PEERLANE_FAULTS more.
//
// It also runs on four real GPUs, with PEERLANE_TEST_CUDA=driver and PEERLANE_TEST_FAULTS_LIBRARY.
func TestRelayCUDAFaultsEndOperationsWithErrors(t *testing.T) {
	needGPUs(t, 4)
	needForwarding(t)
	all := os.Getenv("PEERLANE_FAULTS") == "all"
	only, further := os.Getenv("PEERLANE_FAULT"), moreFaults
	if n, err := strconv.Atoi(os.Getenv("PEERLANE_FAULTS")); err == nil {
		further = n
	}
	seen := map[string]bool{}
	for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
		s := newStage(t, route)
		t.Run(s.String(), func(t *testing.T) {
			dir := t.TempDir()
			calls := s.measure(t, dir)
			if len(calls) < 5 {
				t.Fatalf("it makes only these calls: %v", calls)
			}
			first, more := faults(calls, all)
			if !all && only == "" { // the rest has the same calls of an earlier stage
				first = slices.DeleteFunc(first, func(f fault) bool {
					known := seen[f.call]
					seen[f.call] = true
					return known
				})
			}
			// The same in each run: the soak finds the rest.
			rand.New(rand.NewPCG(9, 4)).Shuffle(len(more), func(i, j int) { more[i], more[j] = more[j], more[i] })
			stages := []*stage{s}
			for range 2 { // the programs of a stage would share memory; a driver starts three about as fast as more
				other := newStage(t, route)
				other.idle = s.idle
				stages = append(stages, other)
			}
			var mu sync.Mutex
			list, tried := append(first, more...), 0
			next := func() (f fault, ok bool) {
				mu.Lock()
				defer mu.Unlock()
				for tried < len(list) && (all || tried < len(first)+further) {
					f = list[tried]
					tried++
					if only == "" || strings.HasPrefix(f.String(), only) {
						return f, true
					}
				}
				return f, false
			}
			var group sync.WaitGroup
			for i, s := range stages {
				group.Go(func() {
					for {
						f, ok := next()
						if !ok {
							return
						}
						if err := s.meet(f, filepath.Join(dir, fmt.Sprintf("log%d", i))); err != nil {
							t.Errorf("PEERLANE_FAULT=%v: %v", f, err)
						}
					}
				})
			}
			group.Wait()
			t.Logf("%d of %d faults were tried, at the calls %v", tried, len(list), calls)
		})
	}
}

// leavesNothing checks that a process that has met a fault holds no more than one without. On real
// GPUs a lane that has found another way may hold more, but no more with each program.
func (s *stage) leavesNothing(p *subject, f fault) error {
	if !realGPUs {
		return p.settles(s.idle)
	}
	most, err := p.rests()
	if err != nil {
		return err
	}
	if err := s.exercise(); err != nil && !f.isNamed(err.Error()) { // it may be the first to meet the fault
		return err
	}
	return p.settles(most)
}

// moreFaults are tried in addition to the first fault per call, by default.
const moreFaults = 3
