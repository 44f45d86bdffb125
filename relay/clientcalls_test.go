package relay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// playWatchedClient is a program that uses package client from end to end whenever a line comes in,
// and says how that went. Every call except those of package client precedes the watch.
func playWatchedClient() error {
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	id, err := wire.ParseGPU(os.Getenv("PEERLANE_TEST_GPU"))
	if err != nil {
		return err
	}
	if _, err := d.CtxCreate(0, cuda.CtxOptions{}); err != nil {
		return err
	}
	handle, err := d.MemCreate(0, 2*mib, cuda.MemOptions{Exportable: true})
	if err != nil {
		return err
	}
	fd, err := d.MemExportFD(handle)
	if err != nil {
		return err
	}
	if err := watchedFrom(3); err != nil {
		return err
	}
	for in := []byte{0}; ; {
		if _, err := io.ReadFull(os.Stdin, in); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var result useResult
		if err := useClient(os.Getenv("PEERLANE_TEST_SOCKET"), id, fd); err != nil {
			result = useResult{err.Error(), errors.Is(err, context.DeadlineExceeded)}
		}
		if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
			return err
		}
	}
}

// useResult is the result of useClient in another process.
type useResult struct {
	Text string // of the error; empty without an error
	Late bool   // the error is context.DeadlineExceeded
}

// useClient sends a message from itself to itself.
func useClient(socket string, id wire.UUID, fd int) (err error) {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	s, err := client.Dial(ctx, socket, id)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if _, err := s.Export(ctx, client.Allocation{FD: fd, Bytes: 2 * mib, GPU: id}); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	var memories [2]*client.Memory
	for i := range memories {
		if memories[i], err = s.HostMemory(ctx, client.HostMemory{Bytes: 64 << 10, GPU: id}); err != nil {
			return fmt.Errorf("host memory: %w", err)
		}
	}
	l, err := s.Listen(ctx, id)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	sending, err := s.Connect(ctx, id, l.Handle())
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	receiving, err := l.Accept(ctx)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	copy(memories[0].Data, "a message")
	receive, err := receiving.Receive(memories[1], 0, 4<<10)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	send, err := sending.Send(memories[0], 0, 4<<10)
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	for _, op := range []*client.Operation{send, receive} {
		if _, err := op.Wait(ctx); err != nil {
			return fmt.Errorf("an operation: %w", err)
		}
	}
	if !bytes.Equal(memories[0].Data[:4<<10], memories[1].Data[:4<<10]) {
		return errWrongBytes
	}
	return errors.Join(memories[0].Unexport(ctx), sending.Close(ctx), l.Close(ctx))
}

// watchedClient is such a program.
type watchedClient struct {
	*subject
	out *json.Decoder
}

func startWatchedClient(t *testing.T, socket string) *watchedClient {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(ends[0]), "ours"), os.NewFile(uintptr(ends[1]), "theirs")
	defer theirs.Close()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PEERLANE_TEST_ROLE=watched-client", "GORACE=atexit_sleep_ms=0",
		"PEERLANE_TEST_WATCHED=1", "PEERLANE_TEST_SOCKET="+socket, "PEERLANE_TEST_GPU="+devices[0].UUID)
	cmd.Stderr, cmd.ExtraFiles = log, []*os.File{theirs}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &watchedClient{&subject{cmd: cmd, stdin: in, log: log, ended: make(chan struct{}), control: ours},
		json.NewDecoder(out)}
	go func() {
		c.err = cmd.Wait()
		close(c.ended)
	}()
	t.Cleanup(func() {
		if said, err := c.stop(); err != nil || c.err != nil {
			t.Errorf("%v, %v: %s", err, c.err, said)
		}
	})
	c.watcher, err = watch(cmd.Process.Pid, ours)
	if errors.Is(err, errNotAsked) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// use runs the program once. The result is the error of the program.
func (c *watchedClient) use() (told useResult, err error) {
	if _, err := c.stdin.(io.Writer).Write([]byte{1}); err != nil {
		return told, err
	}
	err = c.out.Decode(&told)
	return told, err
}

// Every system call of package client that can fail fails once per possible error: the program is
// told the cause, in time, its next session works, and nothing is left behind.
//
// PEERLANE_FAULTS=all tries all faults; else there is one of each call.
func TestClientSystemCallFaultsReturnErrors(t *testing.T) {
	h := newHost(t)
	h.nic("nic0")
	c := startWatchedClient(t, h.relay("a", launch.RouteStaged, far(0, 1, "nic0")))
	use := func() useResult {
		told, err := c.use()
		if err != nil {
			said, _ := os.ReadFile(c.log.Name())
			t.Fatalf("the program has ended: %v: %s", err, said)
		}
		return told
	}
	for range 2 { // what comes once comes at the first
		c.watcher.seen()
		if told := use(); told.Text != "" {
			t.Fatalf("without a fault: %s", told.Text)
		}
	}
	calls := c.watcher.seen()
	delete(calls, "clone") // Go's threads, without which the process ends
	idle, err := c.rests()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("calls of a program: %v", calls)
	for _, call := range []string{"socket", "connect", "sendmsg", "sendmsg of descriptors", "recvmsg", "mmap"} {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(calls)), func(name string) bool {
			return strings.HasPrefix(name, call)
		}) {
			t.Errorf("no %s was seen", call)
		}
	}
	all := os.Getenv("PEERLANE_FAULTS") == "all"
	list := callFaults(calls, all)
	if !all {
		list = sample(list, map[string]bool{})
	}
	met := 0
	for _, f := range list {
		if only := os.Getenv("PEERLANE_FAULT"); !strings.HasPrefix(f.String(), only) {
			continue
		}
		c.watcher.arm(f)
		result := use()
		told := result.Text
		struck := c.watcher.hasStruck()
		c.watcher.arm()
		if struck {
			met++
		}
		switch {
		case result.Late:
			t.Errorf("PEERLANE_FAULT=%q: it does not end: %s", f, told)
		case told != "" && (!struck || f.delay > 0 || f.errno == unix.EINTR):
			t.Errorf("PEERLANE_FAULT=%q: that is no error: %s", f, told)
		case f.word() == "epoll_ctl" && strings.Contains(told, "max_user_watches"): // Go keeps the error to itself
		case told != "" && !f.isNamed(told):
			t.Errorf("PEERLANE_FAULT=%q: the program is not told of the call: %s", f, told)
		}
		if told := use().Text; told != "" {
			t.Errorf("PEERLANE_FAULT=%q: the next session fails: %s", f, told)
		}
		if err := c.settles(idle); err != nil {
			t.Errorf("PEERLANE_FAULT=%q: %v", f, err)
		}
	}
	t.Logf("%d faults, of which %d were met", len(list), met)
	if met == 0 {
		t.Error("no fault was met")
	}
}
