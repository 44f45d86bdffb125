package relay_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// A send waits for an event of another process's stream; and a process killed during the wait
// leaves nothing.
func TestSendsAfterEventWaitForEvent(t *testing.T) {
	for _, allowed := range []bool{true, false} {
		t.Run(fmt.Sprintf("allowed: %v", allowed), func(t *testing.T) {
			h := newHost(t)
			h.change = func(c *launch.Config) { c.IPCEvents = allowed }
			socket, r := h.start("a", launch.RouteDirect, -1, copying(far(0, 1, "nic0")))
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), "PEERLANE_TEST_ROLE=events", "PEERLANE_TEST_SOCKET="+socket,
				"PEERLANE_TEST_GPU="+devices[0].UUID)
			var said bytes.Buffer
			cmd.Stderr = &said
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() }) // the process may have ended
			line, _ := bufio.NewReader(out).ReadString('\n')
			if !allowed {
				if err := cmd.Wait(); err == nil || !bytes.Contains(said.Bytes(), []byte(`relay.events in config.toml does not say "ipc"`)) {
					t.Errorf("%v: %s", err, said.Bytes())
				}
				testutil.Until(t, "the use of the relay's resources", func() bool { return r.Report().Used == (launch.Limits{}) })
				return
			}
			if line != "a send waits\n" {
				_ = cmd.Wait() // the process ends by itself
				t.Fatalf("the process says %q, %s", line, said.Bytes())
			}
			if used := r.Report().Used.Descriptors; used != 6+1+2+2*3+1 {
				t.Errorf("%d files are counted for it", used)
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // killed
			testutil.Until(t, "the use of the relay's resources", func() bool { return r.Report().Used == (launch.Limits{}) })
		})
	}
}

// playEvents is a client that sends to itself after events.
func playEvents() error {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	id, err := wire.ParseGPU(os.Getenv("PEERLANE_TEST_GPU"))
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	device, err := d.DeviceGet(0)
	if err == nil {
		_, err = d.CtxCreate(device, cuda.CtxOptions{})
	}
	if err != nil {
		return err
	}
	stream, err := d.StreamCreate()
	if err != nil {
		return err
	}
	event, err := d.EventCreate(cuda.EventOptions{Interprocess: true})
	if err != nil {
		return err
	}
	handle, err := d.IPCGetEventHandle(event)
	if err != nil {
		return err
	}
	s, err := client.Dial(ctx, os.Getenv("PEERLANE_TEST_SOCKET"), id)
	if err != nil {
		return err
	}
	opened, err := s.Event(ctx, id, handle)
	if err != nil {
		return errors.Join(err, s.Close())
	}
	source, err := s.Staging(ctx, d, client.Staging{Bytes: mib, GPU: id})
	if err != nil {
		return err
	}
	target, err := s.HostMemory(ctx, client.HostMemory{Bytes: mib, GPU: id})
	if err != nil {
		return err
	}
	listener, err := s.Listen(ctx, id)
	if err != nil {
		return err
	}
	sending, err := s.Connect(ctx, id, listener.Handle())
	if err != nil {
		return err
	}
	receiving, err := listener.Accept(ctx)
	if err != nil {
		return err
	}
	gate, err := s.Timeline(0)
	if err != nil {
		return err
	}
	streams, err := s.RegisterTimelines(d)
	if err != nil {
		return err
	}
	written, err := d.MemHostAlloc(mib)
	if err != nil {
		return err
	}
	onGPU, err := d.MemAlloc(mib)
	if err != nil {
		return err
	}
	for round := range uint64(20) {
		// The stream copies the sent bytes, behind the gate.
		text := unsafe.Slice((*byte)(written), mib)
		for i := range text {
			text[i] = byte(round + 1)
		}
		receive, err := receiving.Receive(target, 0, mib)
		if err == nil {
			err = errors.Join(streams.Wait(stream, gate, round+1), d.MemcpyHtoDAsync(onGPU, written, mib, stream),
				d.MemcpyAsync(source.Ptr, onGPU, mib, stream), d.EventRecord(event, stream))
		}
		var send *client.Operation
		if err == nil {
			send, err = sending.Send(source, 0, mib, client.AfterEvent(opened))
		}
		if err != nil {
			return err
		}
		if round == 19 {
			fmt.Println("a send waits")
			time.Sleep(time.Hour)
		}
		select {
		case <-send.Done():
			return errors.New("the send did not wait")
		case <-time.After(2 * time.Millisecond):
		}
		gate.Advance(round + 1)
		for _, op := range []*client.Operation{send, receive} {
			if _, err := op.Wait(ctx); err != nil {
				return err
			}
		}
		if !bytes.Equal(target.Data, text) {
			return fmt.Errorf("round %d: the bytes were sent before they were there", round)
		}
	}
	return nil
}
