package libpeerlane_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/softhost"
	"github.com/peerlane/peerlane/relay/wire"
)

// The tests' host: GPUs 0 to 7 are clients, 8 and 9 servers beside NICs.
const (
	clients = 8
	servers = 2
)

var devices = func() (list []sim.Device) {
	for i := range clients + servers {
		list = append(list, sim.Device{
			Index: i, Minor: i, Memory: 8 << 30, Name: "NVIDIA H100 80GB HBM3",
			UUID:  fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%x", i),
			BusID: fmt.Sprintf("0000:%02x:00.0", i+0x10),
		})
	}
	return list
}()

// driver is the simulator, in this process.
var driver *cuda.Driver

// roleVariable has this program be another process of a test.
const roleVariable = "PEERLANE_TEST_ROLE"

func TestMain(m *testing.M) {
	logrus.SetLevel(logrus.ErrorLevel)
	if os.Getenv(roleVariable) == "relay" {
		os.Exit(playRelay())
	}
	dir, err := os.MkdirTemp("", "peerlane-clib-test-")
	if err == nil {
		err = simulate(filepath.Join(dir, "host"))
	}
	if err == nil {
		err = softhost.Use(filepath.Join(dir, "rdma"), "nic0", "nic1")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "preparing the simulator:", err)
		os.Exit(1)
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func simulate(dir string) (err error) {
	if err = sim.Use(dir, devices); err == nil {
		driver, err = cuda.Open()
	}
	return err
}

// --- the host -----------------------------------------------------------------

// host is a directory for the sockets of relays and NICs.
type host struct {
	*testing.T
	dir string
	// ipc are the containers whose relays take memory of cudaMalloc, copying the containers with
	// device nodes of server GPUs.
	ipc, copying []string
	// events are the containers whose relays take CUDA IPC events.
	events []string
	slots  int // of 64 KiB, in each direction; 0: 4 of 1 MiB
	relays []*relay.Relay
}

func newHost(t *testing.T) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "pl") // short, for the length of a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return &host{T: t, dir: dir}
}

func listen(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// config returns a relay's configuration, with the lanes of the GPUs over a single server.
func (h *host) config(name, route string, server int, gpus ...int) launch.Config {
	h.Helper()
	gpu := func(i int) launch.GPU { return launch.GPU{UUID: devices[i].UUID, BusID: devices[i].BusID, Index: i} }
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		h.Fatal(err)
	}
	c := launch.Config{
		Generation: hex.EncodeToString(id[:]), Container: name, Route: route, Transport: launch.TransportAuto,
		Slots: 4, SlotBytes: 1 << 20, Peers: h.dir, CUDAIPC: slices.Contains(h.ipc, name),
		IPCEvents: slices.Contains(h.events, name),
	}
	if route != launch.RouteDirect {
		softhost.Configure(&c)
	}
	if h.slots > 0 {
		c.Slots, c.SlotBytes = h.slots, 64<<10
	}
	for _, i := range gpus {
		c.Lanes = append(
			c.Lanes,
			launch.Lane{
				GPU:     gpu(i),
				Role:    "far",
				Relay:   true,
				Servers: []launch.GPU{gpu(clients + server)},
				NICs:    []string{fmt.Sprintf("nic%d", server)},
				NIC: &launch.NIC{
					Name: fmt.Sprintf("nic%d", server),
					GUID: 0xfeedf00d12345678,
					Mbps: 400000,
					Port: 2,
				},
				Copy: slices.Contains(h.copying, name),
			},
		)
	}
	return c
}

// relay starts a relay in this process and returns the socket for clients.
func (h *host) relay(name, route string, server int, gpus ...int) (socket string) {
	h.Helper()
	c := h.config(name, route, server, gpus...)
	socket = filepath.Join(h.dir, name)
	r, err := relay.New(listen(h.T, socket), listen(h.T, filepath.Join(h.dir, c.Generation+".sock")), -1)
	if err != nil {
		h.Fatal(err)
	}
	if err := errors.Join(softhost.Join(r.Secrets), r.Configure(c)); err != nil {
		h.Fatal(err)
	}
	h.relays = append(h.relays, r)
	ended := make(chan error, 1)
	go func() { ended <- r.Run() }()
	h.Cleanup(func() {
		r.Stop("the test is over")
		select {
		case err := <-ended:
			if err != nil {
				h.Error(err)
			}
		case <-testutil.After(time.Minute):
			h.Error("the relay did not end")
		}
	})
	return socket
}

// pair are the relays of two containers, with the lanes of the same GPUs.
func (h *host) pair(route string, gpus ...int) (a, b string) {
	h.Helper()
	return h.relay("a", route, 0, gpus...), h.relay("b", route, 1, gpus...)
}

var routes = []string{launch.RouteStaged, launch.RouteDirect}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// --- C ------------------------------------------------------------------------

// kind is how C is compiled.
type kind string

const (
	plain   kind = ""
	address kind = "address,undefined"
	thread  kind = "thread"
)

// buildKey is that of everything that the tests compile.
var buildKey = sync.OnceValues(func() (string, error) {
	return programs.Key(
		"*.go",
		"source/*",
		"tests/*",
		"examples/*",
		"../wire/*.h",
		"../../cuda/sim/*.go",
		"../../cuda/sim/libcuda/*",
	)
})

// library is a directory with the library and the headers.
func library(t *testing.T) string {
	t.Helper()
	_, err := libpeerlane.Compiler()
	programs.MustHave(t, err)
	dir := once(t, "library", func(dir string) error {
		if err := libpeerlane.Build(dir); err != nil {
			return err
		}
		_, err := libpeerlane.Unpack(dir)
		return err
	})
	return dir
}

// once builds files for several tests, unless an earlier run built them from the same sources.
func once(t *testing.T, name string, build func(dir string) error) string {
	t.Helper()
	key, err := buildKey()
	if err != nil {
		t.Fatal(err)
	}
	return programs.Built(t, key, name, build)
}

// cc runs the C compiler.
func cc(dir string, args ...string) error {
	compiler, err := libpeerlane.Compiler()
	if err != nil {
		return err
	}
	c := exec.Command(compiler[0], append(compiler[1:], args...)...)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w\n%s", c.Args, err, out)
	}
	return nil
}

// watched are the C flags of a sanitizer.
func watched(k kind) []string {
	return []string{
		"-fsanitize=" + string(k),
		"-fno-sanitize-recover=all",
		"-DPEERLANE_UNBOUND",
		"-std=gnu11",
		"-O1",
		"-g",
		"-pthread",
	}
}

// program compiles a C program: against the library or, with sanitizers, together
// with the library's source. The folder is examples or tests.
func program(t *testing.T, folder, name string, k kind) string {
	t.Helper()
	headers := library(t)
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{
		"-Wall",
		"-Wextra",
		"-Werror",
		"-I",
		headers,
		"-I",
		filepath.Join(here, "examples"),
		"-o",
		name,
		filepath.Join(here, folder, name+".c"),
	}
	if k == plain {
		args = append([]string{"-std=gnu11", "-O1", "-g", "-pthread"}, args...)
		args = append(args, "-L", headers, "-lpeerlane", "-Wl,-rpath,"+headers)
	} else {
		objects := once(t, "objects-"+string(k), func(dir string) error {
			files, err := libpeerlane.Unpack(dir)
			if err != nil {
				return err
			}
			return cc(dir, append(append(watched(k), "-c"), files...)...)
		})
		compiled, err := filepath.Glob(filepath.Join(objects, "*.o"))
		if err != nil {
			t.Fatal(err)
		}
		args = append(append(watched(k), args...), compiled...)
	}
	dir := once(t, "programs-"+string(k)+"-"+name, func(dir string) error { return cc(dir, append(args, "-ldl")...) })
	return filepath.Join(dir, name)
}

// process is a C program that runs.
type process struct {
	*testing.T
	*exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
	name   string
	waited bool
}

func start(t *testing.T, path string, args ...string) *process {
	t.Helper()
	return startIn(t, nil, path, args...)
}

// startIn starts a program with more in its environment.
func startIn(t *testing.T, environment []string, path string, args ...string) *process {
	t.Helper()
	p := &process{T: t, Cmd: exec.Command(path, args...), name: filepath.Base(path)}
	p.Env = append(os.Environ(), environment...)
	var err error
	if p.in, err = p.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	p.Stderr = &p.stderr
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	// Nothing hangs: the reads below end.
	timer := time.AfterFunc(4*time.Minute, func() { p.Process.Kill() })
	t.Cleanup(func() {
		timer.Stop()
		if !p.waited {
			p.Process.Kill()
			p.Wait()
		}
	})
	return p
}

// line is the next line that the program writes.
func (p *process) line() string {
	p.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		p.Process.Kill()
		p.Wait()
		p.waited = true
		p.Fatalf("%s: %v: %s%s", p.name, err, line, p.stderr.String())
	}
	return strings.TrimSuffix(line, "\n")
}

// demand reads a line with the given words.
func (p *process) demand(words ...string) {
	p.Helper()
	line := p.line()
	for _, w := range words {
		if !strings.Contains(line, w) {
			p.Errorf("%s says %q, without %q", p.name, line, w)
		}
	}
}

// say writes a line to the program.
func (p *process) say(line string) {
	p.Helper()
	if _, err := io.WriteString(p.in, line+"\n"); err != nil {
		p.Fatalf("%s: %v: %s", p.name, err, p.stderr.String())
	}
}

// end waits for the program's successful end, and returns its last line.
func (p *process) end() string {
	p.Helper()
	p.in.Close()
	rest, err := io.ReadAll(p.out)
	p.waited = true
	if err := errors.Join(err, p.Wait()); err != nil {
		p.Fatalf("%s: %v\n%s%s", p.name, err, rest, p.stderr.String())
	}
	return string(rest)
}

func receiver(t *testing.T, path, socket string, gpu int, args ...any) (p *process, handle string) {
	t.Helper()
	p = start(t, path, append([]string{socket, devices[gpu].UUID, "receive"}, texts(args)...)...)
	return p, p.line()
}

func sender(t *testing.T, path, socket string, gpu int, handle string, args ...any) *process {
	t.Helper()
	return start(t, path, append([]string{socket, devices[gpu].UUID, "send", handle}, texts(args)...)...)
}

func texts(args []any) (list []string) {
	for _, a := range args {
		list = append(list, fmt.Sprint(a))
	}
	return list
}

// --- memory of this process -----------------------------------------------------

// contents are those of examples/transfer.c's fill.
func contents(n, seed, message uint64) []byte {
	b := make([]byte, (n+7)/8*8)
	for i := range (n + 7) / 8 {
		binary.LittleEndian.PutUint64(b[8*i:], seed+message*0x9e3779b97f4a7c15+i*0xbf58476d1ce4e5b9)
	}
	return b[:n]
}

func onGPU(t *testing.T, i int, f func(device cuda.Device) error) {
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

func copyGPU(t *testing.T, i int, p cuda.Ptr, b []byte, in bool) {
	t.Helper()
	onGPU(t, i, func(cuda.Device) error {
		stream, err := driver.StreamCreate()
		if err != nil {
			return err
		}
		host, err := driver.MemHostAlloc(uint64(len(b))) // memory that the garbage collector does not know
		if err != nil {
			return err
		}
		pinned := unsafe.Slice((*byte)(host), len(b))
		if in {
			copy(pinned, b)
			err = driver.MemcpyHtoDAsync(p, host, uint64(len(b)), stream)
		} else {
			err = driver.MemcpyDtoHAsync(host, p, uint64(len(b)), stream)
		}
		err = errors.Join(err, driver.StreamSynchronize(stream))
		copy(b, pinned)
		return errors.Join(err, driver.MemHostFree(host), driver.StreamDestroy(stream))
	})
}

// goSide is a Go client with memory of a GPU.
type goSide struct {
	session *client.Session
	memory  *client.Memory
	ptr     cuda.Ptr
	gpu     wire.UUID
}

func attach(t *testing.T, socket string, i int, bytes uint64) *goSide {
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
	g := &goSide{session: s}
	if g.gpu, err = wire.ParseGPU(devices[i].UUID); err != nil {
		t.Fatal(err)
	}
	fd := -1
	onGPU(t, i, func(device cuda.Device) error {
		handle, err := driver.MemCreate(device, bytes, cuda.MemOptions{Exportable: true})
		if err != nil {
			return err
		}
		if g.ptr, err = driver.MemAddressReserve(bytes, 0); err != nil {
			return err
		}
		fd, err = driver.MemExportFD(handle)
		return errors.Join(err, driver.MemMap(g.ptr, bytes, 0, handle),
			driver.MemSetAccess(g.ptr, bytes, cuda.Access{Device: device, Write: true}), driver.MemRelease(handle))
	})
	f := os.NewFile(uintptr(fd), "memory")
	defer f.Close()
	if g.memory, err = s.Export(within(t), client.Allocation{FD: fd, Bytes: bytes, GPU: g.gpu}); err != nil {
		t.Fatal(err)
	}
	return g
}

// --- tests ----------------------------------------------------------------------

func TestTwoCProgramsTransfer(t *testing.T) {
	transfer := program(t, "examples", "transfer", plain)
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			a, b := newHost(t).pair(route, 0, 1)
			for _, c := range []struct{ bytes, count uint64 }{{1, 1}, {0, 2}, {8, 100}, {4096 + 3, 16}, {1<<20 + 1, 9},
				{11<<20 + 5, 2}} {
				receives, handle := receiver(t, transfer, b, 1, c.bytes, c.count, 7)
				sends := sender(t, transfer, a, 0, handle, c.bytes, c.count, 7)
				want := fmt.Sprintf("%d messages of %d bytes\n", c.count, c.bytes)
				if got := sends.end(); got != "sent "+want {
					t.Errorf("the sender says %q", got)
				}
				if got := receives.end(); got != "received "+want {
					t.Errorf("the receiver says %q", got)
				}
			}
		})
	}
}

// The seed is the contents': a receiver that expects others must notice.
func TestExampleDetectsWrongBytes(t *testing.T) {
	transfer := program(t, "examples", "transfer", plain)
	a, b := newHost(t).pair(launch.RouteDirect, 0)
	receives, handle := receiver(t, transfer, b, 0, 4096, 3, 7)
	sender(t, transfer, a, 0, handle, 4096, 3, 8).end()
	receives.in.Close()
	_, _ = io.ReadAll(receives.out)
	receives.waited = true
	if err := receives.Wait(); err == nil || !strings.Contains(receives.stderr.String(), "arrived wrong") {
		t.Errorf("wrong bytes: %v, %s", err, receives.stderr.String())
	}
}

func TestGoAndCProgramsTransfer(t *testing.T) {
	transfer := program(t, "examples", "transfer", plain)
	const n, count, seed = 1<<20 + 9, 5, 99
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			a, b := newHost(t).pair(route, 0, 1)

			receives, handle := receiver(t, transfer, b, 1, n, count, seed)
			g := attach(t, a, 0, 8<<20)
			var parsed wire.Handle
			if _, err := hex.Decode(parsed[:], []byte(handle)); err != nil {
				t.Fatal(err)
			}
			sending, err := g.session.Connect(within(t), g.gpu, parsed)
			if err != nil {
				t.Fatal(err)
			}
			for i := range uint64(count) {
				copyGPU(t, 0, g.ptr+cuda.Ptr(i*n), contents(n, seed, i), true)
				op, err := sending.Send(g.memory, i*n, n, client.Tag(i))
				if err != nil {
					t.Fatal(err)
				}
				if moved, err := op.Wait(within(t)); err != nil || moved != n {
					t.Fatalf("a send to C: %d bytes, %v", moved, err)
				}
			}
			receives.end()

			listener, err := g.session.Listen(within(t), g.gpu)
			if err != nil {
				t.Fatal(err)
			}
			own := listener.Handle()
			sends := sender(t, transfer, b, 1, hex.EncodeToString(own[:]), n, count, seed+1)
			receiving, err := listener.Accept(within(t))
			if err != nil {
				t.Fatal(err)
			}
			for i := range uint64(count) {
				op, err := receiving.Receive(g.memory, i*n, n, client.Tag(i))
				if err != nil {
					t.Fatal(err)
				}
				if moved, err := op.Wait(within(t)); err != nil || moved != n {
					t.Fatalf("a receive from C: %d bytes, %v", moved, err)
				}
				got := make([]byte, n)
				copyGPU(t, 0, g.ptr+cuda.Ptr(i*n), got, false)
				if !bytes.Equal(got, contents(n, seed+1, i)) {
					t.Errorf("message %d of C arrived wrong", i)
				}
			}
			sends.end()
		})
	}
}

// Eight processes of a GPU send to eight processes of a second GPU.
func TestEightProcessesToEightTransfer(t *testing.T) {
	transfer := program(t, "examples", "transfer", plain)
	a, b := newHost(t).pair(launch.RouteStaged, 0, 1)
	var all []*process
	for i := range 8 {
		receives, handle := receiver(t, transfer, b, 1, 300_001, 6, i)
		all = append(all, receives, sender(t, transfer, a, 0, handle, 300_001, 6, i))
	}
	for _, p := range all {
		p.end()
	}
}
