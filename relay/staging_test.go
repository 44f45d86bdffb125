package relay_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
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

	"github.com/peerlane/peerlane/cuda"
	codes "github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// TestClientCopiesPipelineWithTransfers and those of memory at either end also run on real GPUs,
// with PEERLANE_TEST_CUDA=driver and -test.run 'AtEitherEnd|ClientCopies'.

// copying is a lane of a container with device nodes of server GPUs.
func copying(lane launch.Lane) launch.Lane {
	lane.Copy = true
	return lane
}

// stagingMemory has a relay make memory on a server GPU of a GPU's lane.
func stagingMemory(t testing.TB, s *client.Session, gpu int, n uint64) *memory {
	t.Helper()
	m, err := s.Staging(within(t), driver, client.Staging{Bytes: n, GPU: uuid(t, gpu)})
	if err != nil {
		t.Fatal(err)
	}
	return &memory{t: t, ptr: m.Ptr, bytes: m.Bytes, gpu: gpu, Memory: m}
}

// lanesInPlace returns the bytes sent and received in place by two relays.
func lanesInPlace(a, b *relay.Relay) (sent, received uint64) {
	for _, l := range a.Report().Lanes {
		sent += l.Sent.InPlace
	}
	for _, l := range b.Report().Lanes {
		received += l.Received.InPlace
	}
	return sent, received
}

// A client copies into a private ring of slots on a stream, which marks a message by a timeline; at
// the remote side a stream waits for a message, and copies out. No thread waits in between, and no
// relay copies on route staged.
func TestClientCopiesPipelineWithTransfers(t *testing.T) {
	needGPUs(t, 2)
	second, server := far2()
	const (
		messages = 24
		depth    = 4
		size     = 3*mib + 5
		room     = 4 * mib // of a slot
	)
	for _, route := range routes {
		t.Run(route, func(t *testing.T) {
			h := newHost(t)
			h.nic("nic0")
			h.nic("nic1")
			socketA, relayA := h.start("a", route, -1, copying(far(0, 1, "nic0")))
			socketB, relayB := h.start("b", route, -1, copying(far(second, server, "nic1")))
			a, b := attach(t, socketA), attach(t, socketB)
			source, target := allocate(t, 0, messages*room), allocate(t, second, messages*room)
			out, in := stagingMemory(t, a, 0, depth*room), stagingMemory(t, b, second, depth*room)
			sending, receiving, _ := join(t, a, 0, b, second)
			var want [messages][]byte
			for i := range want {
				want[i] = random(t, size)
				source.write(uint64(i)*room, want[i])
			}
			var streams [2]*client.StreamTimelines
			var stream [2]cuda.Stream
			// Receives can end out of order: each slot has a timeline.
			var lines [2][depth]*client.Timeline
			for i, s := range []*client.Session{a, b} {
				for slot := range lines[i] {
					var err error
					if lines[i][slot], err = s.Timeline(uint32(3 + slot)); err != nil {
						t.Fatal(err)
					}
				}
			}
			// The memory is registered with NICs at the first use.
			var before [2]wire.ServerBytes
			var lanes [2]launch.LaneFigures
			testutil.Until(t, "messages go in place", func() bool {
				sent, received := lanesInPlace(relayA, relayB)
				p := &pair{sending: sending, receiving: receiving, source: out, target: in}
				p.move(t, size)
				nowSent, nowReceived := lanesInPlace(relayA, relayB)
				return nowSent-sent == size && nowReceived-received == size
			})
			for i, side := range []struct {
				session *client.Session
				relay   *relay.Relay
				server  int
			}{{a, relayA, 1}, {b, relayB, server}} {
				before[i], lanes[i] = through(t, side.session, uuid(t, side.server)), side.relay.Report().Lanes[0]
			}
			// Copies of one side, in its context; the other's is made in between.
			run := func(side int, gpu int, s *client.Session, f func() error) {
				onGPU(t, gpu, func(cuda.Device) (err error) {
					if streams[side], err = s.RegisterTimelines(driver); err != nil {
						return err
					}
					if stream[side], err = driver.StreamCreate(); err != nil {
						return err
					}
					err = f()
					return errors.Join(err, driver.StreamSynchronize(stream[side]), streams[side].Unregister(),
						driver.StreamDestroy(stream[side]))
				})
			}
			var wait sync.WaitGroup
			wait.Go(func() {
				run(0, 0, a, func() error {
					var sends []*client.Operation
					for i := range uint64(messages) {
						if i >= depth { // its slot is free again
							if _, err := sends[i-depth].Wait(within(t)); err != nil {
								return err
							}
						}
						at := i % depth * room
						err := errors.Join(
							driver.MemcpyAsync(out.ptr+cuda.Ptr(at), source.ptr+cuda.Ptr(i*room), size, stream[0]),
							streams[0].Write(stream[0], lines[0][i%depth], i/depth+1))
						op, posted := sending.Send(out.Memory, at, size, client.After(lines[0][i%depth], i/depth+1))
						if err = errors.Join(err, posted); err != nil {
							return err
						}
						sends = append(sends, op)
					}
					for _, op := range sends[messages-depth:] {
						if _, err := op.Wait(within(t)); err != nil {
							return err
						}
					}
					return nil
				})
			})
			run(1, second, b, func() error {
				var copied []cuda.Event
				for i := range uint64(messages) {
					at := i % depth * room
					if i >= depth { // it has been copied out
						if err := driver.EventSynchronize(copied[i-depth]); err != nil {
							return err
						}
					}
					if _, err := receiving.Receive(in.Memory, at, size, client.Signal(lines[1][i%depth], i/depth+1)); err != nil {
						return err
					}
					event, err := driver.EventCreate(cuda.EventOptions{})
					err = errors.Join(err, streams[1].Wait(stream[1], lines[1][i%depth], i/depth+1),
						driver.MemcpyAsync(target.ptr+cuda.Ptr(i*room), in.ptr+cuda.Ptr(at), size, stream[1]),
						driver.EventRecord(event, stream[1]))
					if err != nil {
						return err
					}
					copied = append(copied, event)
				}
				return nil
			})
			wait.Wait()
			for i := range want {
				if !bytes.Equal(target.read(uint64(i)*room, size), want[i]) {
					t.Fatalf("message %d arrived wrong", i)
				}
			}
			for i, side := range []struct {
				session *client.Session
				relay   *relay.Relay
				sends   bool
				server  int
			}{{a, relayA, true, 1}, {b, relayB, false, server}} {
				// What NICs, or the other relay, wrote into it and read out of it: the
				// client's own copies are not the relay's.
				g := through(t, side.session, uuid(t, side.server))
				in, out := g.In-before[i].In, g.Out-before[i].Out
				moved := uint64(messages * size)
				if side.sends && (in != 0 || out != moved) || !side.sends && (in != moved || out != 0) {
					t.Errorf("of %d bytes %d went into the server GPU and %d out", moved, in, out)
				}
				lane := side.relay.Report().Lanes[0]
				sent, received := lane.Sent.Since(lanes[i].Sent), lane.Received.Since(lanes[i].Received)
				if !side.sends && (received.InPlace != moved || received.Bytes != moved || sent.InPlace != 0) {
					t.Errorf("the receiver counts %+v", lane)
				}
				if side.sends && (sent.InPlace != moved || sent.Bytes != moved || received.InPlace != 0) {
					t.Errorf("the sender counts %+v", lane)
				}
			}
		})
	}
}

func TestStagingMemoryIsRefused(t *testing.T) {
	h := newHost(t)
	h.change = func(c *launch.Config) {
		c.Limits = launch.Limits{Staging: 20 * mib, ClientStaging: 16 * mib}
	}
	near := launch.Lane{GPU: gpu(2), Role: "near", Servers: []launch.GPU{}}
	socket, r := h.start("a", launch.RouteDirect, -1, copying(far(0, 1, "nic0")), far(3, 2, "nic1"), copying(near))
	a, b := attach(t, socket), attach(t, socket)
	ask := func(s *client.Session, gpu int, n uint64) error {
		_, err := s.Staging(within(t), driver, client.Staging{Bytes: n, GPU: uuid(t, gpu)})
		return err
	}
	demand(t, ask(a, 0, 0), wire.StatusOutOfRange)
	for _, n := range []uint64{16*mib + 1, 1 << 62, math.MaxUint64, math.MaxUint64 - 4095} {
		demandCode(t, ask(a, 0, n), wire.StatusLimit, codes.LimitMet, "relay.limits.client_staging")
	}
	demandCode(t, ask(a, 1, 8), wire.StatusWrongGPU, codes.NoLane, devices[1].UUID)
	demandOf(t, ask(a, 3, 8), wire.StatusNotPermitted, "peerlane.dev/gpu=3")
	demandOf(t, ask(a, 2, 8), wire.StatusNoStaging, devices[2].BusID)
	_, err := a.Staging(within(t), driver, client.Staging{Bytes: 8, GPU: uuid(t, 0), Access: 4})
	demand(t, err, wire.StatusMalformed)

	first := stagingMemory(t, a, 0, 12*mib)
	err = ask(a, 0, 5*mib)
	demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.client_staging")
	demandText(t, err, "5.0 MiB", "12 MiB", "16 MiB")
	second := stagingMemory(t, b, 0, 5*mib) // which are 6
	if second.Bytes != 6*mib {
		t.Errorf("5 MiB have %d bytes", second.Bytes)
	}
	err = ask(b, 0, 3*mib)
	demandCode(t, err, wire.StatusLimit, codes.LimitMet, "relay.limits.staging")
	demandText(t, err, "4.0 MiB", "18 MiB", "20 MiB")
	report := r.Report()
	if used := report.Used; used.Staging != 18*mib || used.Memories != 2 || used.Descriptors != 2*6+2 {
		t.Errorf("in use are %+v", used)
	}
	if s := report.Staging; len(s) != 1 || s[0] != (launch.Staging{GPU: devices[1].BusID, Clients: 18 * mib}) {
		t.Errorf("staging is %+v", s)
	}
	if c := report.Clients; len(c) != 2 || c[0].Staging+c[1].Staging != 18*mib {
		t.Errorf("the clients are %+v", c)
	}
	// When the answer is there it is gone, and another GPU's stays what it was.
	free := freeOn(t, 1)
	for range 20 {
		if err := first.Unexport(within(t)); err != nil {
			t.Fatal(err)
		}
		if got := freeOn(t, 1); got != free+12*mib {
			t.Fatalf("%d bytes are free on the server GPU, and %d should be", got, free+12*mib)
		}
		first = stagingMemory(t, a, 0, 12*mib)
	}
	if err := errors.Join(second.Unexport(within(t)), a.Close()); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "the use of the relay's resources", func() bool {
		return r.Report().Used == (launch.Limits{Clients: 1, Descriptors: 6})
	})
	if got := freeOn(t, 1); got != free+18*mib {
		t.Errorf("%d bytes are free on the server GPU in the end, and %d should be", got, free+18*mib)
	}
}

// freeOn is a GPU's free memory.
func freeOn(t *testing.T, i int) (free uint64) {
	t.Helper()
	onGPU(t, i, func(cuda.Device) (err error) {
		free, _, err = driver.MemGetInfo()
		return err
	})
	return free
}

// account admits staging as a supervisor does.
type account struct {
	mu     sync.Mutex
	limit  uint64
	held   map[string]uint64
	claims []launch.Claim
}

func (a *account) ask(c launch.Claim) (launch.Admission, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.claims = append(a.claims, c)
	if c.Bytes > a.limit && c.Bytes > a.held[c.GPU] {
		return launch.Admission{Claim: c.Claim, Error: "the host's limit"}, nil
	}
	if a.held == nil {
		a.held = map[string]uint64{}
	}
	a.held[c.GPU] = c.Bytes
	return launch.Admission{Claim: c.Claim, OK: true}, nil
}

func (a *account) has(i int) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.held[devices[i].BusID]
}

// Clients' staging memory is in the host's account as slots are: refused memory is not made, used
// memory stays, and memory of a dead session is freed.
func TestStagingMemoryCountsInHostAccount(t *testing.T) {
	var held account
	held.limit = 30 * mib
	h := newHost(t)
	h.change = func(c *launch.Config) { c.Admission = true }
	h.ask = held.ask
	h.nic("nic0")
	h.nic("nic1")
	socket := h.relay("a", launch.RouteStaged, copying(far(0, 1, "nic0")))
	a, b := attach(t, socket), attach(t, h.relay("b", launch.RouteStaged, far(3, 2, "nic1")))
	sending, receiving, _ := join(t, a, 0, b, 3) // which has the slots made
	slots := held.has(1)
	if slots != 8*mib {
		t.Fatalf("the slots are %d bytes in the account", slots)
	}
	memory := stagingMemory(t, a, 0, 16*mib)
	if got := held.has(1); got != slots+16*mib {
		t.Fatalf("with a client's memory the account has %d", got)
	}
	_, err := a.Staging(within(t), driver, client.Staging{Bytes: 8 * mib, GPU: uuid(t, 0)})
	demandCode(t, err, wire.StatusNoStaging, codes.NoStaging, devices[0].BusID)
	demandText(t, err, devices[1].BusID, "not admitted")

	// A send that waits for a receive uses the memory.
	want := random(t, 5*mib)
	memory.write(0, want)
	send, err := sending.Send(memory.Memory, 0, 5*mib)
	if err != nil {
		t.Fatal(err)
	}
	if err := memory.Unexport(within(t)); err != nil {
		t.Fatal(err)
	}
	if got := held.has(1); got != slots+16*mib {
		t.Errorf("memory of a send that waits is not in the account, which has %d", got)
	}
	_, err = wait(t, must(sending.Send(memory.Memory, 0, 8)), nil)
	demand(t, err, wire.StatusUnknownMemory)
	target := exported(t, b, 3, pairBytes)
	receive, err := receiving.Receive(target.Memory, 0, 5*mib)
	for _, op := range []*client.Operation{receive, send} {
		if _, err := wait(t, op, err); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(target.read(0, 5*mib), want) {
		t.Error("what was taken back under the send arrived wrong")
	}
	testutil.Until(t, "slots of staging", func() bool { return held.has(1) == slots })

	// An ended session frees memory, also during an operation.
	memory = stagingMemory(t, a, 0, 8*mib)
	if _, err := sending.Send(memory.Memory, 0, 8*mib); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "slots of staging", func() bool { return held.has(1) == slots })
	if got := stagingMemory(t, attach(t, socket), 0, 22*mib); got.Bytes != 22*mib {
		t.Errorf("the next client gets %d bytes", got.Bytes)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Without room on a server GPU the lane uses the second server GPU.
func TestStagingMemoryUsesServerGPUWithRoom(t *testing.T) {
	h := newHost(t)
	lane := copying(far(0, 1, "nic0"))
	lane.Servers = append(lane.Servers, gpu(2))
	s := attach(t, h.relay("a", launch.RouteDirect, lane))
	one, two := stagingMemory(t, s, 0, 4*mib), stagingMemory(t, s, 0, 4*mib)
	if one.Server == two.Server {
		t.Errorf("both are on GPU %d", one.ServerIndex)
	}
	if err := errors.Join(one.Unexport(within(t)), two.Unexport(within(t))); err != nil {
		t.Fatal(err)
	}
	fillGPU(t, 1, 8*mib)
	for range 3 {
		if m := stagingMemory(t, s, 0, 16*mib); m.Server != uuid(t, 2) || m.ServerIndex != 2 {
			t.Errorf("it is on GPU %d", m.ServerIndex)
		}
	}
	fillGPU(t, 2, 8*mib)
	_, err := s.Staging(within(t), driver, client.Staging{Bytes: 64 * mib, GPU: uuid(t, 0)})
	demandCode(t, err, wire.StatusNoStaging, codes.NoStaging, devices[0].BusID)
	demandText(t, err, "64 MiB", devices[1].BusID, devices[2].BusID, "CUDA_ERROR_OUT_OF_MEMORY")
}

// Staging does not use a pair with a bad verdict.
func TestStagingMemoryAvoidsPairsThatFailedSelfTest(t *testing.T) {
	h := newHost(t)
	h.change = func(c *launch.Config) {
		c.SelfTest, c.Pairs = launch.SelfTestOnce, []launch.Pair{found(1, launch.VerdictWrong, "a byte arrived wrong")}
	}
	lane := copying(far(0, 1, "nic0"))
	_, err := attach(t, h.relay("a", launch.RouteDirect, lane)).Staging(within(t), driver,
		client.Staging{Bytes: mib, GPU: uuid(t, 0)})
	demandCode(t, err, wire.StatusNoStaging, codes.NoStaging, devices[0].BusID)
	demandText(t, err, devices[1].BusID, "failed its self-test")
	lane.Servers = append(lane.Servers, gpu(2))
	if m := stagingMemory(t, attach(t, h.relay("b", launch.RouteDirect, lane)), 0, mib); m.ServerIndex != 2 {
		t.Errorf("it is on GPU %d", m.ServerIndex)
	}
}

// A client that writes into memory in flight corrupts only its own message.
func TestClientWritingIntoSentMemoryCorruptsOwnMessageOnly(t *testing.T) {
	h := newHost(t)
	h.nic("nic0")
	h.nic("nic1")
	a := attach(t, h.relay("a", launch.RouteStaged, copying(far(0, 1, "nic0"))))
	b := attach(t, h.relay("b", launch.RouteStaged, copying(far(3, 2, "nic1"))))
	other := attach(t, h.relay("c", launch.RouteStaged, copying(far(0, 1, "nic0"))))
	const n = 6*mib + 3
	bad, good := stagingMemory(t, a, 0, 8*mib), stagingMemory(t, other, 0, 8*mib)
	target := stagingMemory(t, b, 3, 32*mib)
	background := bytes.Repeat([]byte{0xa5}, 32*mib)
	target.write(0, background)
	want := random(t, n)
	good.write(0, want)
	badSending, badReceiving, _ := join(t, a, 0, b, 3)
	goodSending, goodReceiving, _ := join(t, other, 0, b, 3)
	stop, stopped := make(chan bool), make(chan bool)
	go func() {
		defer close(stopped)
		for i := byte(0); ; i++ {
			select {
			case <-stop:
				return
			default:
				bad.write(uint64(i)%7*mib, bytes.Repeat([]byte{i}, mib))
			}
		}
	}()
	for range 5 {
		operations := []*client.Operation{
			must(badReceiving.Receive(target.Memory, mib, n)), must(goodReceiving.Receive(target.Memory, 16*mib, n)),
			must(badSending.Send(bad.Memory, 0, n)), must(goodSending.Send(good.Memory, 0, n)),
		}
		for _, op := range operations {
			if moved, err := wait(t, op, nil); err != nil || moved != n {
				t.Fatalf("%d bytes, %v", moved, err)
			}
		}
		got := target.read(0, 32*mib)
		if !bytes.Equal(got[16*mib:16*mib+n], want) {
			t.Fatal("another container's message is wrong")
		}
		for _, around := range [][2]uint64{{0, mib}, {mib + n, 16 * mib}, {16*mib + n, 32 * mib}} {
			if !bytes.Equal(got[around[0]:around[1]], background[around[0]:around[1]]) {
				t.Fatalf("something between byte %d and %d changed", around[0], around[1])
			}
		}
	}
	close(stop)
	<-stopped
}

// Whoever dies: operations end, and the memory is let go of.
func TestStagingMemoryAfterDeathIsReleased(t *testing.T) {
	for _, death := range []string{"the NIC's port", "the receiver's session", "the sender's session", "the connection"} {
		t.Run(death, func(t *testing.T) {
			h := newHost(t)
			h.reconnectLimit = time.Second
			stopNIC := h.nic("nic0")
			h.nic("nic1")
			socketA, relayA := h.start("a", launch.RouteStaged, -1, copying(far(0, 1, "nic0")))
			socketB, relayB := h.start("b", launch.RouteStaged, -1, copying(far(3, 2, "nic1")))
			a, b := attach(t, socketA), attach(t, socketB)
			source, target := stagingMemory(t, a, 0, 64*mib), stagingMemory(t, b, 3, 64*mib)
			sending, receiving, _ := join(t, a, 0, b, 3)
			var operations []*client.Operation
			for range 8 {
				operations = append(operations, must(receiving.Receive(target.Memory, 0, 64*mib)),
					must(sending.Send(source.Memory, 0, 64*mib)))
			}
			if _, err := wait(t, operations[0], nil); err != nil {
				t.Fatal(err)
			}
			switch death {
			case "the NIC's port":
				stopNIC()
			case "the receiver's session":
				if err := b.Close(); err != nil {
					t.Fatal(err)
				}
			case "the sender's session":
				if err := a.Close(); err != nil {
					t.Fatal(err)
				}
			default:
				if err := sending.Close(within(t)); err != nil {
					t.Fatal(err)
				}
			}
			ctx := within(t)
			for _, op := range operations {
				if _, err := op.Wait(ctx); ctx.Err() != nil {
					t.Fatalf("an operation does not end: %v", err)
				}
			}
			for _, m := range []*memory{source, target} {
				if err := m.Unexport(within(t)); err != nil && !errors.Is(err, &wire.Error{Status: wire.StatusClosed}) {
					t.Error(err)
				}
			}
			for _, r := range []*relay.Relay{relayA, relayB} {
				testutil.Until(t, "the relay's next state", func() bool {
					report := r.Report()
					return report.Used.Staging == 0 && report.Used.Memories == 0 &&
						!slices.ContainsFunc(report.Staging, func(s launch.Staging) bool { return s.Clients > 0 })
				})
			}
		})
	}
}

// A container needs the server GPU's device node, and says so; that CUDA hides the GPU
// does not matter.
func TestStagingMemoryWithoutDeviceNodeIsRefused(t *testing.T) {
	h := newHost(t)
	socket, r := h.start("a", launch.RouteDirect, -1, copying(far(0, 1, "nic0")))
	for _, nodes := range []int{1, 2} {
		dev := t.TempDir()
		for i := range nodes {
			if err := os.WriteFile(filepath.Join(dev, fmt.Sprintf("nvidia%d", i)), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		cmd := stagingElsewhere(socket)
		cmd.Env = append(cmd.Env, "PEERLANE_SIM_VISIBLE=nodes", "PEERLANE_SIM_DEV="+dev,
			"CUDA_VISIBLE_DEVICES="+devices[0].UUID)
		out, err := cmd.CombinedOutput()
		said := string(out)
		if nodes == 2 {
			if err != nil || said != "it works\n" {
				t.Errorf("with the node: %v: %s", err, said)
			}
			continue
		}
		if err == nil {
			t.Errorf("without the node it works: %s", said)
		}
		for _, want := range []string{"staging memory on server GPU 1 (" + devices[1].UUID + ")",
			"CUDA_ERROR_INVALID_DEVICE", "--device peerlane.dev/gpu=N"} {
			if !strings.Contains(said, want) {
				t.Errorf("it does not say %q: %s", want, said)
			}
		}
	}
	testutil.Until(t, "the use of the relay's resources", func() bool { return r.Report().Used == (launch.Limits{}) })
}

// Memory of a killed process is freed: not in the account, nor on the GPU.
func TestStagingMemoryOfKilledProcessIsFreed(t *testing.T) {
	h := newHost(t)
	socket, r := h.start("a", launch.RouteDirect, -1, copying(far(0, 1, "nic0")))
	attach(t, socket)
	free := uint64(0)
	for range 3 {
		cmd := stagingElsewhere(socket)
		cmd.Env = append(cmd.Env, "PEERLANE_TEST_STAYS=1")
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "it works\n" {
			t.Fatalf("the process says %q, %v", line, err)
		}
		if used := r.Report().Used.Staging; used != 2*mib {
			t.Errorf("it has %d bytes", used)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed
		testutil.Until(t, "the use of the relay's resources", func() bool {
			return r.Report().Used == (launch.Limits{Clients: 1, Descriptors: 6})
		})
		if now := freeOn(t, 1); free == 0 {
			free = now
		} else if now != free {
			t.Errorf("%d bytes are free on the server GPU, and were %d after the one before", now, free)
		}
	}
}

// stagingElsewhere is playStaging as a process of its own.
func stagingElsewhere(socket string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "PEERLANE_TEST_ROLE=staging", "PEERLANE_TEST_SOCKET="+socket,
		"PEERLANE_TEST_GPU="+devices[0].UUID)
	return cmd
}

// playStaging copies to staging memory and back, in a process of its own.
func playStaging() (err error) {
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	stays := os.Getenv("PEERLANE_TEST_STAYS") != ""
	if n, err := d.DeviceCount(); err != nil || n != 1 && !stays {
		return fmt.Errorf("CUDA shows %d devices, %v", n, err)
	}
	id, err := wire.ParseGPU(os.Getenv("PEERLANE_TEST_GPU"))
	if err != nil {
		return err
	}
	s, err := client.Dial(ctx, os.Getenv("PEERLANE_TEST_SOCKET"), id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	m, err := s.Staging(ctx, d, client.Staging{Bytes: mib, GPU: id})
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	if _, err := d.CtxCreate(0, cuda.CtxOptions{}); err != nil {
		return err
	}
	stream, err := d.StreamCreate()
	if err != nil {
		return err
	}
	source, err := d.MemAlloc(2 * mib)
	if err != nil {
		return err
	}
	host, err := d.MemHostAlloc(2 * mib)
	if err != nil {
		return err
	}
	words := unsafe.Slice((*byte)(host), 2*mib)
	copy(words, "there and back")
	err = errors.Join(d.MemcpyHtoDAsync(source, host, mib, stream), d.MemcpyAsync(m.Ptr, source, mib, stream),
		d.MemcpyAsync(source+mib, m.Ptr, mib, stream), d.MemcpyDtoHAsync(unsafe.Add(host, mib), source+mib, mib, stream),
		d.StreamSynchronize(stream))
	if err == nil && !bytes.Equal(words[:mib], words[mib:]) {
		err = errors.New("the bytes differ")
	}
	if err == nil {
		fmt.Println("it works")
	}
	if stays {
		time.Sleep(time.Hour)
	}
	return err
}

// Grants of memory in place have one window for all messages of a connection.
func TestStagingMemoryGrantsShareOneWindow(t *testing.T) {
	second, server := far2()
	h := newHost(t)
	h.nic("nic0")
	h.nic("nic1")
	h.change = func(l *launch.Config) { l.Slots, l.SlotBytes = 1024, 64<<10 }
	socketA, _ := h.start("a", launch.RouteStaged, -1, copying(far(0, 1, "nic0")))
	socketB, _ := h.start("b", launch.RouteStaged, -1, copying(far(second, server, "nic1")))
	a, b := attach(t, socketA), attach(t, socketB)
	const size, count = 32 * mib, 40 // 20,480 pieces
	out, in := stagingMemory(t, a, 0, size), stagingMemory(t, b, second, size)
	sending, receiving, _ := join(t, a, 0, b, second)
	var sends, receives []*client.Operation
	for range count {
		sends = append(sends, must(sending.Send(out.Memory, 0, size)))
	}
	for range count {
		receives = append(receives, must(receiving.Receive(in.Memory, 0, size)))
	}
	for i := range sends {
		for _, op := range []*client.Operation{sends[i], receives[i]} {
			if n, err := op.Wait(within(t)); err != nil || n != size {
				t.Fatalf("message %d: %d bytes, %v", i, n, err)
			}
		}
	}
}
