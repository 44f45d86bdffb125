package integration_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/integration/across"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// The test binary is also the program in the containers: `TEST role NAME …`. The program prints
// events as JSON lines.

// event is a line of output of a role.
type event struct {
	// listening, connected, moving, checked, round, error, again, child-ended, hello, look,
	// witness, spying, spied, crowd, escaped, flooding
	Kind   string      `json:"kind"`
	Handle wire.Handle `json:"handle"`
	// Key is the key of exposed memory.
	Key    wire.RemoteKey `json:"key,omitzero"`
	Error  string         `json:"error,omitempty"`
	Status wire.Status    `json:"status,omitempty"`
	Peer   string         `json:"peer,omitempty"`
	Look   *look          `json:"look,omitempty"`
	Saw    *witness       `json:"saw,omitempty"`
	// Gap is the longest time between two rounds since the last line.
	Gap time.Duration `json:"gap,omitempty"`
	// At and the next fields are of the role "across".
	At     time.Time     `json:"at,omitzero"`
	Report across.Report `json:"report,omitzero"`
}

// look is a process's view of its container.
type look struct {
	Environment []string
	Nodes       []string // below /dev
	Memlock     string   // the soft limit, as in /proc/self/limits
	Relay       bool     // the relay's socket exists
}

func emit(s event) {
	text, err := json.Marshal(s)
	if err == nil {
		_, err = fmt.Println(string(text))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func fail(err error) { emit(event{Kind: "error", Error: err.Error(), Status: wire.StatusOf(err)}) }

func play(arguments []string) int {
	roles := map[string]func([]string) error{
		"hello":     func([]string) error { return hello() },
		"stream":    stream,
		"export":    func([]string) error { return exportOnly() },
		"parent":    parent,
		"look":      func([]string) error { return lookAround() },
		"stopwatch": stopwatch,
		"swap":      swap,
		"witness":   bearWitness,
		"hoard":     func([]string) error { return hoard() },
		"hold":      func([]string) error { return hold() },
		"verify":    verify,
		"echo":      echo,
		"owner":     func([]string) error { return owner() },
		"remote":    func([]string) error { return remote() },
		"across":    func([]string) error { return across.Serve(os.Stdin, os.Stdout, client.DefaultSocket) },
		"spy":       spy,
		"crowd":     crowd,
		"in-flight": hoardDescriptors,
		"escape":    func([]string) error { return escape() },
		"accept":    func([]string) error { return acceptAll() },
		"connects":  connectOften,
		"flood":     flood,
		"linger":    func([]string) error { return linger() },
		"sleep":     func([]string) error { time.Sleep(time.Minute); return nil },
	}
	role := roles[arguments[0]]
	if role == nil {
		fmt.Fprintf(os.Stderr, "no role %q\n", arguments[0])
		return 2
	}
	if err := role(arguments[1:]); err != nil {
		fail(err)
		return 1
	}
	return 0
}

// hello connects as the first action of its container, and needs no GPU.
func hello() error {
	ctx, cancel := testutil.WithLimit(context.Background(), 20*time.Second)
	defer cancel()
	s, err := client.Dial(ctx, client.DefaultSocket)
	if err != nil {
		return err
	}
	if _, err := s.Statistics(ctx); err != nil {
		return err
	}
	emit(event{Kind: "hello"})
	return s.Close()
}

// hoardLimit bounds the memory that hoard takes from a relay that refuses nothing, in bytes.
const hoardLimit = 192 << 20

// hoard takes sessions and host memory until the relay refuses both, prints the reasons, and waits
// for the end of input.
func hoard() error {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	var gpu wire.UUID
	var sessions []*client.Session
	var refused error
	taken := 0
	for taken < hoardLimit {
		s, err := client.Dial(ctx, client.DefaultSocket)
		if err != nil {
			refused = err
			break
		}
		sessions = append(sessions, s)
		if len(sessions) == 1 {
			lanes, err := s.Lanes(ctx)
			if err != nil {
				return err
			}
			gpu = lanes[0].GPU
		}
		for size := uint64(4 << 20); size >= 64<<10 && taken < hoardLimit; {
			if _, err := s.HostMemory(ctx, client.HostMemory{Bytes: size, GPU: gpu}); err != nil {
				refused = err
				size /= 2
				continue
			}
			taken += int(size)
		}
		if len(sessions) == 300 {
			break
		}
	}
	emit(event{Kind: "hoarded", Error: fmt.Sprint(refused), Status: wire.StatusOf(refused)})
	_, err := io.Copy(io.Discard, os.Stdin)
	runtime.KeepAlive(sessions)
	return err
}

// lookAround prints its view of the container, and waits for the end of input.
func lookAround() error {
	found := &look{Environment: os.Environ()}
	for _, pattern := range []string{"/dev/nvidia*", "/dev/infiniband/*"} {
		nodes, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		found.Nodes = append(found.Nodes, nodes...)
	}
	limits, err := os.ReadFile("/proc/self/limits")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(limits)) {
		if rest, ok := strings.CutPrefix(line, "Max locked memory"); ok {
			found.Memlock = strings.Fields(rest)[0]
		}
	}
	if _, err := os.Stat(client.DefaultSocket); err == nil {
		found.Relay = true
	}
	emit(event{Kind: "look", Look: found})
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// gpuClient is a session with exported memory.
type gpuClient struct {
	session  *client.Session
	gpu      wire.UUID
	out, in  *client.Memory
	listener *client.Listener
}

const streamBytes = 8 << 20

func openGPU() (*cuda.Driver, cuda.Device, wire.UUID, error) {
	var gpu wire.UUID
	d, err := cuda.Open()
	if err != nil {
		return nil, 0, gpu, err
	}
	device, err := d.DeviceGet(0)
	if err != nil {
		return nil, 0, gpu, err
	}
	uuid, err := d.DeviceUUID(device)
	if err != nil {
		return nil, 0, gpu, err
	}
	if gpu, err = wire.ParseGPU(uuid); err != nil {
		return nil, 0, gpu, err
	}
	_, err = d.CtxCreate(device, cuda.CtxOptions{Lean: true})
	return d, device, gpu, err
}

func attach(ctx context.Context, d *cuda.Driver, device cuda.Device, gpu wire.UUID) (*gpuClient, error) {
	s, err := client.Dial(ctx, client.DefaultSocket, gpu)
	if err != nil {
		return nil, err
	}
	c := &gpuClient{session: s, gpu: gpu}
	for _, m := range []**client.Memory{&c.out, &c.in} {
		handle, err := d.MemCreate(device, streamBytes, cuda.MemOptions{Exportable: true})
		if err != nil {
			return nil, err
		}
		fd, err := d.MemExportFD(handle)
		if err != nil {
			return nil, err
		}
		file := os.NewFile(uintptr(fd), "memory")
		*m, err = s.Export(ctx, client.Allocation{FD: fd, Bytes: streamBytes, GPU: gpu})
		if err = errors.Join(err, file.Close(), d.MemRelease(handle)); err != nil {
			return nil, err
		}
	}
	c.listener, err = s.Listen(ctx, gpu)
	return c, err
}

func exportOnly() error {
	runtime.LockOSThread()
	ctx, cancel := testutil.WithLimit(context.Background(), 20*time.Second)
	defer cancel()
	d, device, gpu, err := openGPU()
	if err != nil {
		return client.WithoutGPU(ctx, client.DefaultSocket, err)
	}
	_, err = attach(ctx, d, device, gpu)
	return err
}

// stream exchanges messages in both directions until an error, prints the error, and then attaches
// again to the current relay. With "fork" a child holds the socket open from before the first
// message; with "rounds" stream prints progress; with "hog" it takes all memory after the first
// messages; with "wait" it attaches again on command.
func stream(options []string) error {
	runtime.LockOSThread()
	ctx := context.Background()
	d, device, gpu, err := openGPU()
	if err != nil {
		return err
	}
	c, err := attach(ctx, d, device, gpu)
	if err != nil {
		return err
	}
	if slices.Contains(options, "fork") {
		if err := fork(); err != nil {
			return err
		}
	}
	emit(event{Kind: "listening", Handle: c.listener.Handle()})
	var order event
	orders := json.NewDecoder(os.Stdin)
	if err := orders.Decode(&order); err != nil {
		return err
	}
	sending, err := c.session.Connect(ctx, gpu, order.Handle)
	if err != nil {
		return err
	}
	receiving, err := c.listener.Accept(ctx)
	if err != nil {
		return err
	}
	emit(event{Kind: "connected", Peer: sending.Peer})
	spoke, before, gap := time.Now(), time.Now(), time.Duration(0)
	for round := 0; ; round++ {
		if err := exchange(ctx, c, sending, receiving); err != nil {
			fail(err)
			break
		}
		if round == 3 {
			emit(event{Kind: "moving"})
			if slices.Contains(options, "hog") {
				go hog()
			}
		}
		now := time.Now()
		gap, before = max(gap, now.Sub(before)), now
		if slices.Contains(options, "rounds") && now.Sub(spoke) > 200*time.Millisecond {
			emit(event{Kind: "round", Gap: gap})
			spoke, gap = now, 0
		}
	}
	if slices.Contains(options, "wait") {
		if err := orders.Decode(&order); err != nil {
			return err
		}
	}
	for end := testutil.Begin(); ; time.Sleep(10 * time.Millisecond) {
		_, err := attach(ctx, d, device, gpu)
		if err == nil {
			emit(event{Kind: "again"})
			return nil
		}
		if end.Over() {
			return err
		}
	}
}

func exchange(ctx context.Context, c *gpuClient, sending, receiving *client.Connection) error {
	receive, err := receiving.Receive(c.in, 0, streamBytes)
	if err != nil {
		return err
	}
	send, err := sending.Send(c.out, 0, streamBytes)
	if err != nil {
		return err
	}
	for _, op := range []*client.Operation{send, receive} {
		if _, err := op.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// hog allocates and writes memory until the kernel kills the process.
func hog() {
	for {
		piece := make([]byte, 1<<20)
		for i := range piece {
			piece[i] = 1
		}
		hogged = append(hogged, piece)
	}
}

var hogged [][]byte

// fork starts a child that inherits every socket of this process.
func fork() error {
	child := exec.Command("/proc/self/exe", "role", "sleep")
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return err
	}
	for _, link := range links {
		target, err := os.Readlink(link)
		if err != nil || !strings.HasPrefix(target, "socket:") {
			continue
		}
		var fd int
		if _, err := fmt.Sscanf(filepath.Base(link), "%d", &fd); err != nil {
			return err
		}
		child.ExtraFiles = append(child.ExtraFiles, os.NewFile(uintptr(fd), target))
	}
	if len(child.ExtraFiles) == 0 {
		return errors.New("this process has no socket to inherit")
	}
	if err := child.Start(); err != nil {
		return err
	}
	// The session owns the files: prevent a close by finalizers.
	inherited = append(inherited, child.ExtraFiles...)
	return nil
}

var inherited []*os.File

// parent is an init that outlives its child, which runs the role in the arguments.
func parent(arguments []string) error {
	child := exec.Command("/proc/self/exe", append([]string{"role"}, arguments...)...)
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := child.Run()
	s := event{Kind: "child-ended"}
	if err != nil {
		s.Error = err.Error()
	}
	emit(s)
	// Wait until the test closes the input.
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
	}
	return lines.Err()
}
