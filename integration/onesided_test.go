package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

const sidedBytes = 2 << 20

// gpuMemory is exported memory whose content a role verifies.
type gpuMemory struct {
	*client.Memory
	driver *cuda.Driver
	stream cuda.Stream
	at     cuda.Ptr
	host   []byte // pinned, as large
}

func (c *gpuClient) memory(ctx context.Context, d *cuda.Driver, device cuda.Device) (*gpuMemory, error) {
	m := &gpuMemory{driver: d}
	handle, err := d.MemCreate(device, sidedBytes, cuda.MemOptions{Exportable: true})
	if err != nil {
		return nil, err
	}
	if m.at, err = d.MemAddressReserve(sidedBytes, 0); err != nil {
		return nil, err
	}
	fd, err := d.MemExportFD(handle)
	if err = errors.Join(err, d.MemMap(m.at, sidedBytes, 0, handle),
		d.MemSetAccess(m.at, sidedBytes, cuda.Access{Device: device, Write: true}), d.MemRelease(handle)); err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "memory")
	defer file.Close()
	if m.Memory, err = c.session.Export(ctx, client.Allocation{FD: fd, Bytes: sidedBytes, GPU: c.gpu}); err != nil {
		return nil, err
	}
	if m.stream, err = d.StreamCreate(); err != nil {
		return nil, err
	}
	host, err := d.MemHostAlloc(sidedBytes)
	m.host = unsafe.Slice((*byte)(host), sidedBytes)
	return m, err
}

// sided returns the pattern of a side.
func sided(side byte) []byte {
	b := make([]byte, sidedBytes)
	for i := range b {
		b[i] = byte(i*7+i>>8) ^ side
	}
	return b
}

func (m *gpuMemory) fill(side byte) error {
	copy(m.host, sided(side))
	return errors.Join(m.driver.MemcpyHtoDAsync(m.at, unsafe.Pointer(&m.host[0]), sidedBytes, m.stream),
		m.driver.StreamSynchronize(m.stream))
}

func (m *gpuMemory) check(side byte) error {
	err := errors.Join(m.driver.MemcpyDtoHAsync(unsafe.Pointer(&m.host[0]), m.at, sidedBytes, m.stream),
		m.driver.StreamSynchronize(m.stream))
	if err == nil && !bytes.Equal(m.host, sided(side)) {
		err = fmt.Errorf("the memory does not have the pattern of side %d", side)
	}
	return err
}

// withMemory returns a client with GPU memory registered at its relay.
func withMemory(ctx context.Context) (*gpuClient, *gpuMemory, error) {
	d, device, gpu, err := openGPU()
	if err != nil {
		return nil, nil, err
	}
	c, err := attach(ctx, d, device, gpu)
	if err != nil {
		return nil, nil, err
	}
	m, err := c.memory(ctx, d, device)
	return c, m, err
}

// owner exposes memory, and verifies the memory on command.
func owner() error {
	runtime.LockOSThread()
	ctx := context.Background()
	c, m, err := withMemory(ctx)
	if err != nil {
		return err
	}
	if err := m.fill(1); err != nil {
		return err
	}
	offer, err := c.listener.Expose(ctx, m.Memory, 0, sidedBytes, wire.RemoteRead|wire.RemoteWrite)
	if err != nil {
		return err
	}
	emit(event{Kind: "listening", Handle: c.listener.Handle(), Key: offer.Key()})
	if _, err := c.listener.Accept(ctx); err != nil {
		return err
	}
	var order event
	orders := json.NewDecoder(os.Stdin)
	if err := orders.Decode(&order); err != nil {
		return err
	}
	if err := m.check(2); err != nil {
		return err
	}
	emit(event{Kind: "checked"})
	return orders.Decode(&order) // runs until killed
}

// remote reads and writes the exposed memory of another client, and then reads until an error.
func remote() error {
	runtime.LockOSThread()
	ctx := context.Background()
	c, m, err := withMemory(ctx)
	if err != nil {
		return err
	}
	var order event
	orders := json.NewDecoder(os.Stdin)
	if err := orders.Decode(&order); err != nil {
		return err
	}
	sending, err := c.session.Connect(ctx, c.gpu, order.Handle)
	if err != nil {
		return err
	}
	emit(event{Kind: "connected", Peer: sending.Peer})
	key := order.Key
	if err := orders.Decode(&order); err != nil {
		return err
	}
	end := func(op *client.Operation, err error) error {
		if err == nil {
			_, err = op.Wait(ctx)
		}
		return err
	}
	if err := end(sending.Read(m.Memory, 0, sidedBytes, key, 0)); err != nil {
		return err
	}
	if err := errors.Join(m.check(1), m.fill(2)); err != nil {
		return err
	}
	if err := end(sending.Write(m.Memory, 0, sidedBytes, key, 0)); err != nil {
		return err
	}
	emit(event{Kind: "moving"})
	for {
		if err := errors.Join(end(sending.Read(m.Memory, 0, sidedBytes, key, 0)),
			end(sending.Write(m.Memory, 0, sidedBytes, key, 0))); err != nil {
			return err
		}
	}
}

// A remote client can read and write exposed memory while the owner is stopped; after the owner is
// killed, the remote client gets an error.
func TestOneSidedOperationsBesideStoppedOwnerSucceed(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", func(o *config.Config) { o.Relay.Route = launch.RouteStaged })
	b.nics()
	a, z := b.start(b.lanes[0], "parent", "owner"), b.start(b.lanes[1], "remote")
	z.send(a.next("listening"))
	z.next("connected")
	pid := child(t, a.init())
	stop(t, pid)
	z.send(event{})
	z.next("moving")
	if !stopped(t, pid) {
		t.Error("the owner was not stopped all the time")
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	a.send(event{})
	a.next("checked")
	stop(t, pid)
	z.mustLearn(kill(t, pid), fmt.Sprintf("client process %d", pid), a.id, "died")
}

// stop sends SIGSTOP, and waits until the process is stopped.
func stop(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for end := testutil.Begin(); !stopped(t, pid); time.Sleep(time.Millisecond) {
		if end.Over() {
			t.Fatalf("process %d does not stop", pid)
		}
	}
}

// stopped reports whether every thread of a process is stopped.
func stopped(t *testing.T, pid int) bool {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", pid, task.Name()))
		if err != nil {
			t.Fatal(err)
		}
		// The name in parentheses can contain any bytes.
		if after := string(text[bytes.LastIndexByte(text, ')')+1:]); !strings.HasPrefix(after, " T ") {
			return false
		}
	}
	return true
}
