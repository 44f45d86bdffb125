//go:build engines

package engines

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// The test binary is also the program in the containers. `test client NAME` writes its view and
// results to the file NAME in the directory of reports, and exits; `test server NAME` runs until
// signalled, `test attached NAME` too, with a connection to its relay; `test look NAME` uses no
// relay, `test another NAME` is a second process of a container, `test hog` allocates memory
// without limit, and `test nothing` exits. A list of GPUs follows the name.

// reportsDir is the directory of reports in a container.
const reportsDir = "/reports"

// report is the result of a container's program.
type report struct {
	Error string `json:"error,omitempty"`
	// GPUs are the UUIDs of the GPUs that CUDA shows. Moved is the number of bytes that each GPU
	// sent to the next through the relay, received in order and intact.
	GPUs  []string `json:"gpus"`
	Moved uint64   `json:"moved"`
	// Staged is the part of Moved that the relay sent through server GPUs.
	Staged uint64 `json:"staged"`
	// Nodes are the device nodes of GPUs and RDMA devices.
	Nodes       []string          `json:"nodes"`
	Environment map[string]string `json:"environment"`
	UID         int               `json:"uid"`
	// UserNamespace reports that root of the container is not root of the host.
	UserNamespace bool `json:"userNamespace"`
	ReadOnly      bool `json:"readOnly"`
	// Filtered reports a seccomp filter of the engine.
	Filtered bool `json:"filtered"`
}

func play(arguments []string) int {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	switch arguments[0] {
	case "nothing":
		return 0
	case "hog":
		return hog()
	case "attack":
		go func() {
			<-ended
			os.Exit(0) // engines wait ten seconds for the end after SIGTERM
		}()
		return playAttack(arguments[1], arguments[2])
	case "another":
		// Some engines omit CDI's environment from exec.
		if err := inherit(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	r := work(arguments[0], arguments[2])
	if arguments[0] == "attached" && r.Error == "" {
		ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
		defer cancel()
		session, err := client.Dial(ctx, client.DefaultSocket)
		if err != nil {
			r.Error = err.Error()
		} else {
			defer session.Close()
		}
	}
	text, err := json.Marshal(r)
	if err == nil {
		err = writeLine(filepath.Join(reportsDir, arguments[1]), append(text, '\n'))
	}
	if err = errors.Join(err, errorOf(r)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if arguments[0] == "server" || arguments[0] == "attached" {
		<-ended
	}
	return 0
}

// hog takes four times the memory limit of the test's container.
func hog() int {
	var all [][]byte
	for range 64 {
		some := make([]byte, 16<<20)
		for i := 0; i < len(some); i += 4096 {
			some[i] = 1
		}
		all = append(all, some)
	}
	fmt.Fprintf(os.Stderr, "%d times 16 MiB, and nobody minds\n", len(all))
	return 0
}

// inherit adds missing variables from the container's first process to the environment.
func inherit() error {
	text, err := os.ReadFile("/proc/1/environ")
	if err != nil {
		return err
	}
	for _, variable := range strings.Split(string(text), "\x00") {
		name, value, _ := strings.Cut(variable, "=")
		if _, set := os.LookupEnv(name); name == "" || set {
			continue
		}
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}

func errorOf(r report) error {
	if r.Error == "" {
		return nil
	}
	return errors.New(r.Error)
}

// writeLine appends a report to the reports of earlier runs of the container.
func writeLine(path string, line []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o666)
	if err != nil {
		return err
	}
	_, err = f.Write(line)
	return errors.Join(err, f.Close())
}

func work(role, list string) report {
	r := report{UID: os.Getuid(), Environment: map[string]string{}}
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	// The first action is an attach: the relay need not exist yet.
	var err error
	if role != "look" {
		err = r.exchange(ctx, list)
	}
	if err = errors.Join(err, r.lookAround()); err != nil {
		r.Error = err.Error()
	}
	return r
}

func (r *report) lookAround() error {
	for _, variable := range os.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		r.Environment[name] = value
	}
	for _, pattern := range []string{"/dev/nvidia*", "/dev/infiniband/*", "/dev/thing*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		r.Nodes = append(r.Nodes, found...)
	}
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	r.UserNamespace = strings.Fields(string(ids))[1] != "0"
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	r.Filtered = strings.Contains(string(status), "\nSeccomp:\t2\n")
	err = os.WriteFile("/written", nil, 0o644)
	r.ReadOnly = errors.Is(err, syscall.EROFS)
	return nil
}

// gpu is a GPU of this container, with memory that the relay has mapped.
type gpu struct {
	uuid    wire.UUID
	context cuda.Context
	stream  cuda.Stream
	ptr     [2]cuda.Ptr
	memory  [2]*client.Memory
	listen  *client.Listener
}

// Indices of the memory of a GPU.
const (
	outgoing = iota
	incoming
)

const messageBytes = 3 << 20

// exchange sends a message from each GPU to the next, or from a single GPU to itself, through the
// relay, and compares the data.
func (r *report) exchange(ctx context.Context, list string) error {
	runtime.LockOSThread()
	session, err := client.Dial(ctx, client.DefaultSocket)
	if err != nil {
		return err
	}
	d, err := cuda.Open()
	if err != nil {
		return errors.Join(err, session.Close())
	}
	return errors.Join(r.exchangeAll(ctx, d, session, list), session.Close())
}

func (r *report) exchangeAll(ctx context.Context, d *cuda.Driver, session *client.Session, list string) error {
	n, err := d.DeviceCount()
	if err != nil {
		return err
	}
	if n == 0 {
		return errors.New("CUDA shows no GPU in this container")
	}
	var gpus []*gpu
	for i := range n {
		g, err := open(ctx, d, session, i)
		if err != nil {
			return fmt.Errorf("GPU %d: %w", i, err)
		}
		gpus = append(gpus, g)
		uuid, err := d.DeviceUUID(cuda.Device(i))
		if err != nil {
			return err
		}
		r.GPUs = append(r.GPUs, uuid)
	}
	if list != "" {
		var some []*gpu
		for _, number := range strings.Split(list, ",") {
			i, err := strconv.Atoi(number)
			if err != nil || i >= n {
				return fmt.Errorf("GPU %q of %d: %v", number, n, err)
			}
			some = append(some, gpus[i])
		}
		gpus = some
	}
	for i, from := range gpus {
		if err := message(ctx, d, session, from, gpus[(i+1)%len(gpus)], uint64(i)); err != nil {
			return fmt.Errorf("from GPU %d to the next: %w", i, err)
		}
		r.Moved += messageBytes
	}
	statistics, err := session.Statistics(ctx)
	if err != nil {
		return err
	}
	r.Staged = statistics.Staged
	return nil
}

func open(ctx context.Context, d *cuda.Driver, session *client.Session, index int) (*gpu, error) {
	device, err := d.DeviceGet(index)
	if err != nil {
		return nil, err
	}
	g := &gpu{}
	uuid, err := d.DeviceUUID(device)
	if err != nil {
		return nil, err
	}
	if g.uuid, err = wire.ParseGPU(uuid); err != nil {
		return nil, err
	}
	if g.context, err = d.CtxCreate(device, cuda.CtxOptions{Lean: true}); err != nil {
		return nil, err
	}
	if g.stream, err = d.StreamCreate(); err != nil {
		return nil, err
	}
	granularity, err := d.MemGranularity(device)
	if err != nil {
		return nil, err
	}
	size := (messageBytes + granularity - 1) / granularity * granularity
	for i := range g.memory {
		handle, err := d.MemCreate(device, size, cuda.MemOptions{Exportable: true})
		if err != nil {
			return nil, err
		}
		if g.ptr[i], err = d.MemAddressReserve(size, 0); err != nil {
			return nil, err
		}
		if err := d.MemMap(g.ptr[i], size, 0, handle); err != nil {
			return nil, err
		}
		if err := d.MemSetAccess(g.ptr[i], size, cuda.Access{Device: device, Write: true}); err != nil {
			return nil, err
		}
		fd, err := d.MemExportFD(handle)
		if err != nil {
			return nil, err
		}
		file := os.NewFile(uintptr(fd), "memory")
		g.memory[i], err = session.Export(ctx, client.Allocation{FD: fd, Bytes: size, GPU: g.uuid})
		if err = errors.Join(err, file.Close()); err != nil {
			return nil, err
		}
	}
	g.listen, err = session.Listen(ctx, g.uuid)
	return g, err
}

func message(ctx context.Context, d *cuda.Driver, session *client.Session, from, to *gpu, seed uint64) error {
	host, err := d.MemHostAlloc(messageBytes)
	if err != nil {
		return err
	}
	bytes := unsafe.Slice((*byte)(host), messageBytes)
	for i := 0; i < len(bytes); i += 8 {
		binary.LittleEndian.PutUint64(bytes[i:], (seed<<32+uint64(i))*0x9e3779b97f4a7c15)
	}
	want := slices.Clone(bytes)
	if err := errors.Join(
		d.CtxSetCurrent(from.context),
		d.MemcpyHtoDAsync(from.ptr[outgoing], host, messageBytes, from.stream),
		d.StreamSynchronize(from.stream),
	); err != nil {
		return err
	}
	sending, err := session.Connect(ctx, from.uuid, to.listen.Handle())
	if err != nil {
		return err
	}
	receiving, err := to.listen.Accept(ctx)
	if err != nil {
		return err
	}
	receive, err := receiving.Receive(to.memory[incoming], 0, messageBytes)
	if err != nil {
		return err
	}
	send, err := sending.Send(from.memory[outgoing], 0, messageBytes)
	if err != nil {
		return err
	}
	for _, op := range []*client.Operation{send, receive} {
		if moved, err := op.Wait(ctx); err != nil || moved != messageBytes {
			return fmt.Errorf("%d of %d bytes moved: %v", moved, messageBytes, err)
		}
	}
	clear(bytes)
	if err := errors.Join(
		d.CtxSetCurrent(to.context),
		d.MemcpyDtoHAsync(host, to.ptr[incoming], messageBytes, to.stream),
		d.StreamSynchronize(to.stream),
	); err != nil {
		return err
	}
	for i := range bytes {
		if bytes[i] != want[i] {
			return fmt.Errorf("byte %d is %#x and was sent as %#x", i, bytes[i], want[i])
		}
	}
	return nil
}
