package relay_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// Each message of the test of stopped processes has the same pattern.
const patientBytes = 100 << 10

func patientMessage() []byte { return bytes.Repeat([]byte("patience"), patientBytes/8) }

// playReceiver is a client in its own process, which sends its handle, receives messages one after
// another, and reports each with a byte.
func playReceiver() error {
	ctx := context.Background()
	out := os.NewFile(3, "answers")
	gpu, err := wire.ParseGPU(os.Getenv("PEERLANE_TEST_GPU"))
	if err != nil {
		return err
	}
	s, err := client.Dial(ctx, os.Getenv("PEERLANE_TEST_SOCKET"))
	if err != nil {
		return err
	}
	m, err := s.HostMemory(ctx, client.HostMemory{Bytes: patientBytes, GPU: gpu})
	if err != nil {
		return err
	}
	l, err := s.Listen(ctx, gpu)
	if err != nil {
		return err
	}
	handle := l.Handle()
	if _, err := out.Write(handle[:]); err != nil {
		return err
	}
	c, err := l.Accept(ctx)
	for err == nil {
		clear(m.Data)
		var op *client.Operation
		if op, err = c.Receive(m, 0, patientBytes); err == nil {
			_, err = op.Wait(ctx)
		}
		if err == nil && !bytes.Equal(m.Data, patientMessage()) {
			err = errWrongBytes
		}
		if err == nil {
			_, err = out.Write([]byte{1})
		}
	}
	return err
}

// Nothing healthy is killed: a client or relay stopped during an operation is not taken for dead,
// for longer than the detection of a death takes. A death is noticed.
//
// PEERLANE_PATIENCE says how long each sleeps; else it is 6 s, of the 5 s after which a
// relay that says nothing would be dead.
func TestStoppedProcessIsNotTakenForDead(t *testing.T) {
	t.Parallel()
	sleep := 6 * time.Second
	if wanted := os.Getenv("PEERLANE_PATIENCE"); wanted != "" {
		var err error
		if sleep, err = time.ParseDuration(wanted); err != nil {
			t.Fatal(err)
		}
	}
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			t.Parallel() // it waits more than it works
			sleep := sleep
			if route == launch.RouteStaged {
				sleep = min(sleep, stagedPatience)
			}
			stopProcesses(t, route, sleep)
		})
	}
}

// stagedPatience is below the 54 s after which a relay treats a silent relay on a network as dead:
// on route staged, relays of one host use verbs and TCP. Locally the kernel reports deaths.
const stagedPatience = 40 * time.Second

func stopProcesses(t *testing.T, route string, sleep time.Duration) {
	s := newStage(t, route)
	relay, err := s.begin(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if said, err := relay.stop(); err != nil || t.Failed() {
			t.Errorf("%v: %s", err, said)
		}
	})
	answers, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer answers.Close()
	sleeper, stdin, err := startRole("receiver", []*os.File{theirs}, os.Stderr, "PEERLANE_TEST_SOCKET="+s.a,
		"PEERLANE_TEST_GPU="+devices[0].UUID)
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	defer func() { _ = sleeper.Process.Kill(); _ = sleeper.Wait() }()
	var handle wire.Handle
	if _, err := io.ReadFull(answers, handle[:]); err != nil {
		t.Fatal(err)
	}
	b := attach(t, s.b)
	m, err := b.HostMemory(within(t), client.HostMemory{Bytes: patientBytes, GPU: s.uuidB})
	if err != nil {
		t.Fatal(err)
	}
	copy(m.Data, patientMessage())
	c, err := b.Connect(within(t), s.uuidB, handle)
	if err != nil {
		t.Fatal(err)
	}
	send := func() *client.Operation {
		t.Helper()
		op, err := c.Send(m, 0, patientBytes)
		if err != nil {
			t.Fatal(err)
		}
		return op
	}
	arrives := func(op *client.Operation) {
		t.Helper()
		if _, err := wait(t, op, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(answers, make([]byte, 1)); err != nil {
			t.Fatalf("the receiver has ended: %v", err)
		}
	}
	arrives(send())
	for _, who := range []struct {
		name string
		pid  int
		// The first message matches the posted receive in any case.
		free int
	}{{"the client", sleeper.Process.Pid, 1}, {"the relay", relay.cmd.Process.Pid, 0}} {
		if err := unix.Kill(who.pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		var ops []*client.Operation
		for range 3 {
			ops = append(ops, send())
		}
		select {
		case <-ops[who.free].Done():
			_, err := ops[who.free].Wait(within(t))
			t.Errorf("%s sleeps, and the message has ended: %v", who.name, err)
		case <-time.After(sleep):
		}
		if err := errors.Join(unix.Kill(who.pid, unix.SIGCONT), c.Err(), b.Err()); err != nil {
			t.Fatalf("%s has slept for %v: %v", who.name, sleep, err)
		}
		for _, op := range ops {
			arrives(op)
		}
	}
	// One message meets the receive that may be posted; the next waits.
	if err := unix.Kill(sleeper.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	send()
	last := send()
	if err := unix.Kill(sleeper.Process.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	died := time.Now()
	_, err = wait(t, last, nil) // for 30 s, or ten times that on slow machines
	demandOf(t, err, wire.StatusPeerClientDied, "container a")
	t.Logf("the death was noticed after %v", time.Since(died))
}
