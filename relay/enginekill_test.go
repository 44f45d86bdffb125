package relay_test

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs/softdevice"
	"github.com/peerlane/peerlane/relay/verbs/softdevice/engine"
)

// playEngine is the engine of a host's software devices.
func playEngine() error {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: os.Getenv("PEERLANE_TEST_SOCKET"), Net: "unixpacket"})
	if err != nil {
		return err
	}
	e, err := engine.New()
	if err != nil {
		return err
	}
	return e.Serve(l)
}

// engineProcess starts the engine as a process.
func (h *host) engineProcess() *os.Process {
	h.t.Helper()
	socket := filepath.Join(h.soft.Dir, engine.SocketName)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "PEERLANE_TEST_ROLE=engine", "GORACE=atexit_sleep_ms=0", "PEERLANE_TEST_SOCKET="+socket)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have been killed
		_ = cmd.Wait()
	})
	testutil.Until(h.t, "the engine's socket", func() bool { _, err := os.Stat(socket); return err == nil })
	return cmd.Process
}

// The engine is the NIC of software devices. Its death ends every operation of both clients in bounded
// time, and the relays go on.
func TestKilledEngineEndsTransfers(t *testing.T) {
	t.Parallel()
	const limit = 20 * time.Second
	h := newHost(t)
	h.reconnectLimit = 10 * time.Minute // a death is no fault that passes
	h.nic("nic0")
	h.nic("nic1")
	for i := range h.devices {
		h.devices[i].Holds = false // else relays map GPU memory themselves
	}
	if err := h.soft.Set(h.devices...); err != nil {
		t.Fatal(err)
	}
	process := h.engineProcess()
	p := &pair{a: attach(t, h.relay("a", launch.RouteStaged, far(0, 1, "nic0"))),
		b: attach(t, h.relay("b", launch.RouteStaged, far(3, 2, "nic1")))}
	p.source, p.target = exported(t, p.a, 0, pairBytes), exported(t, p.b, 3, pairBytes)
	p.sending, p.receiving, p.handle = join(t, p.a, 0, p.b, 3)
	const bytes, inFlight, killAfter = 1 << 20, 8, 16
	p.move(t, bytes)
	ctx, cancel := testutil.WithLimit(context.Background(), limit)
	defer cancel()
	var operations []*client.Operation
	post := func() error {
		receive, err := p.receiving.Receive(p.target.Memory, 0, bytes)
		if err != nil {
			return err
		}
		operations = append(operations, receive)
		send, err := p.sending.Send(p.source.Memory, 0, bytes)
		if err == nil {
			operations = append(operations, send)
		}
		return err
	}
	// The relays may go on without the engine, on the simulator: then as many messages arrive.
	for done := range 2 * killAfter {
		if done == killAfter {
			shared, err := h.soft.Calls("engine_share")
			if err != nil || !slices.ContainsFunc(shared, func(c softdevice.Call) bool { return c.Arguments["="] == "0" }) {
				t.Fatalf("no relay uses the engine: %v, %v", shared, err)
			}
			if err := process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		for len(operations) < 2*inFlight {
			if err := post(); err != nil {
				break // the connection has ended
			}
		}
		for range min(2, len(operations)) {
			op := operations[0]
			operations = operations[1:]
			if _, err := op.Wait(ctx); errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("an operation has not ended after %v", limit)
			} else if err != nil && done < killAfter {
				t.Fatal(err)
			}
		}
	}
	for _, op := range operations {
		if _, err := op.Wait(ctx); errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("an operation has not ended after %v", limit)
		}
	}
	for _, s := range []*client.Session{p.a, p.b} {
		if _, err := s.Statistics(within(t)); err != nil {
			t.Error(err)
		}
	}
}
