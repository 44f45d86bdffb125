package relay_test

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// near are two containers of a host on route direct, with two memories of a kind.
type near struct {
	from, to           side
	sender, receiver   *relay.Relay
	sending, receiving *client.Connection
}

func localPair(t *testing.T, from, to string) *near {
	t.Helper()
	h, n := newHost(t), &near{}
	var left, right string
	left, n.sender = h.start("a", launch.RouteDirect, -1, copying(far(0, 1, "nic0")))
	right, n.receiver = h.start("b", launch.RouteDirect, -1, copying(far(3, 2, "nic1")))
	a, b := attach(t, left), attach(t, right)
	n.from, n.to = sideOf(t, a, 0, from, 2<<20), sideOf(t, b, 3, to, 2<<20)
	n.sending, n.receiving, _ = join(t, a, 0, b, 3)
	n.pass(t, 0) // after the answer the relays have windows
	return n
}

func (n *near) pass(t *testing.T, size uint64) {
	t.Helper()
	n.passTo(t, size, 3)
}

// passTo has a message arrive at an offset of the receiver's memory.
func (n *near) passTo(t *testing.T, size, at uint64) {
	t.Helper()
	want := random(t, size)
	n.from.write(5, want)
	receive, err := n.receiving.Receive(n.to.Memory, at, size)
	if err != nil {
		t.Fatal(err)
	}
	send, err := n.sending.Send(n.from.Memory, 5, size)
	for _, op := range []*client.Operation{send, receive} {
		if moved, err := wait(t, op, err); err != nil || moved != size {
			t.Fatalf("%d of %d bytes: %v", moved, size, err)
		}
	}
	if !bytes.Equal(n.to.read(at, size), want) {
		t.Fatalf("%d bytes arrived wrong", size)
	}
}

// A short message between two host memories is not granted room: the sender's relay has nothing of
// the receiver's memory mapped. It counts as others do. An unreceived message leaves the window to
// further messages.
func TestEagerMessagesNeedNoGrant(t *testing.T) {
	n := localPair(t, "host", "host")
	for range packet.Windows {
		canceled, err := n.sending.Send(n.from.Memory, 0, 8)
		if err == nil {
			err = canceled.Cancel()
		}
		_, err = wait(t, canceled, err)
		demand(t, err, wire.StatusCanceled)
		truncated, err := n.sending.Send(n.from.Memory, 0, 8)
		if err == nil {
			_, err = n.receiving.Receive(n.to.Memory, 0, 7)
		}
		_, err = wait(t, truncated, err)
		demand(t, err, wire.StatusTruncated)
	}
	var moved uint64
	for range 3 * packet.Windows {
		for _, size := range []uint64{1, 8, 1024, packet.WindowBytes} {
			n.pass(t, size)
			moved += size
		}
	}
	if mapped := n.sender.Foreign(); mapped != 0 {
		t.Errorf("the sender's relay has %d bytes of the receiver's memory mapped", mapped)
	}
	n.pass(t, packet.WindowBytes+1)
	moved += packet.WindowBytes + 1
	if n.sender.Foreign() == 0 {
		t.Error("the sender's relay has nothing of the receiver's memory mapped, for a long message")
	}
	for _, s := range []struct {
		sends       bool
		r           *relay.Relay
		told, other uint64
	}{{true, n.sender, n.sender.Report().Sent, n.sender.Report().Received},
		{false, n.receiver, n.receiver.Report().Received, n.receiver.Report().Sent}} {
		report := s.r.Report()
		if s.told != moved || report.Direct != moved || s.other != 0 || report.Staged != 0 {
			t.Errorf("of %d bytes it says that they were sent %d, received %d, direct %d, staged %d", moved, report.Sent,
				report.Received, report.Direct, report.Staged)
		}
	}
}

// A short message into a GPU's memory is not granted room either: the receiver's relay stores or
// writes the message, for any size and address. Without an aperture a single byte, which no call
// writes beside another process's kernel without a wait, is granted room.
func TestEagerMessagesIntoGPUMemoryNeedNoGrant(t *testing.T) {
	for _, c := range []struct {
		aperture string
		targets  int
	}{{"", 0}, {"refuse", 1}} {
		t.Run("aperture "+c.aperture, func(t *testing.T) {
			t.Setenv("PEERLANE_SIM_APERTURE", c.aperture)
			shortIntoGPU(t, c.targets)
		})
	}
}

func shortIntoGPU(t *testing.T, targets int) {
	n := localPair(t, "host", "GPU")
	var moved uint64
	for _, size := range []uint64{2, 7, 8, 15, 16, 17, 24, 64, 100, 1024, packet.WindowBytes - 1, packet.WindowBytes} {
		n.pass(t, size)
		n.passTo(t, size, 8)
		moved += 2 * size
	}
	if told := n.sender.Targets(); told != 0 {
		t.Errorf("the sender's relay was told of %d memories of the receiver", told)
	}
	sent, received := n.sender.Report(), n.receiver.Report()
	if sent.Sent != moved || sent.Direct != moved || received.Received != moved || received.Direct != moved {
		t.Errorf("of %d bytes %d were sent, %d of these direct, %d received, %d of these direct", moved, sent.Sent,
			sent.Direct, received.Received, received.Direct)
	}
	n.pass(t, 1)
	if told := n.sender.Targets(); told != targets {
		t.Errorf("the sender's relay was told of %d memories of the receiver for a single byte, want %d", told, targets)
	}
}

// Short and long messages match receives in order, also more messages than windows, before any
// posted receive, into every kind of memory; a message that does not fit, and a canceled message,
// keep no window.
func TestEagerMessagesKeepOrderWithLongOnes(t *testing.T) {
	for _, to := range kinds {
		t.Run(to, func(t *testing.T) {
			n := localPair(t, "host", to)
			sizes := []uint64{8, packet.WindowBytes, 0, packet.WindowBytes + 1, 1024, 1}
			const (
				count, room         = 4 * packet.Windows, 8 << 10
				truncated, canceled = 6, 10 // of 8 and 1024 bytes
			)
			for range 2 {
				var sends [count]*client.Operation
				var wants [count][]byte
				for i := range sends {
					wants[i] = random(t, sizes[i%len(sizes)])
					n.from.write(uint64(i)*room, wants[i])
					var err error
					if sends[i], err = n.sending.Send(n.from.Memory, uint64(i)*room, uint64(len(wants[i])),
						client.Tag(uint64(i%2))); err != nil {
						t.Fatal(err)
					}
				}
				if err := sends[canceled].Cancel(); err != nil {
					t.Fatal(err)
				}
				_, err := wait(t, sends[canceled], nil)
				demand(t, err, wire.StatusCanceled)
				for _, tag := range []int{1, 0} {
					for i := tag; i < count; i += 2 {
						if i == canceled {
							continue
						}
						size := uint64(len(wants[i]))
						if i == truncated {
							size--
						}
						receive, err := n.receiving.Receive(n.to.Memory, uint64(i)*room, size, client.Tag(uint64(tag)))
						if err != nil {
							t.Fatal(err)
						}
						for _, op := range []*client.Operation{sends[i], receive} {
							moved, err := wait(t, op, nil)
							if i == truncated {
								demand(t, err, wire.StatusTruncated)
							} else if err != nil || moved != uint64(len(wants[i])) {
								t.Fatalf("message %d: %d bytes, %v", i, moved, err)
							}
						}
						if got := n.to.read(uint64(i)*room, size); i != truncated && !bytes.Equal(got, wants[i]) {
							t.Fatalf("message %d of %d bytes arrived wrong", i, size)
						}
					}
				}
			}
			if report := n.sender.Report(); report.Sent != report.Direct || report.Sent != n.receiver.Report().Received {
				t.Errorf("it sent %d, of that direct %d, and %d were received", report.Sent, report.Direct,
					n.receiver.Report().Received)
			}
		})
	}
}

// A relay that knows no windows is not given any, and is not expected to.
func TestOlderRelayGetsNoEagerWindows(t *testing.T) {
	for version, windows := range map[uint32]bool{wire.WindowsVersion - 1: false, wire.WindowsVersion: true} {
		t.Run(fmt.Sprintf("version %d sends", version), func(t *testing.T) {
			h := newHost(t)
			listener, err := attach(t, h.relay("b", launch.RouteDirect, far(3, 2, "nic1"))).Listen(within(t), uuid(t, 3))
			if err != nil {
				t.Fatal(err)
			}
			opaque := listener.Handle()
			handle := opaque.Layout()
			conn, err := packet.Dial(filepath.Join(h.dir, handle.Generation.String()+".sock"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, _, err = conn.Exchange(&wire.PeerHello{
				Magic: wire.Magic, Oldest: 1, Newest: version, Token: handle.Token, Route: wire.RouteDirect, Shares: 1,
			}, time.Minute); err != nil {
				t.Fatal(err)
			}
			m, _, fds, err := conn.Receive()
			if _, is := m.(*wire.PeerShare); !is || len(fds) != 1 {
				t.Fatalf("it says %T with %d descriptors: %v", m, len(fds), err)
			}
			defer unix.Close(fds[0])
			var stat unix.Stat_t
			if err := unix.Fstat(fds[0], &stat); err != nil || stat.Size != packet.SharedBytes(windows) {
				t.Errorf("the memory has %d bytes, want %d: %v", stat.Size, packet.SharedBytes(windows), err)
			}
		})
		for _, gives := range []bool{false, true} {
			t.Run(fmt.Sprintf("version %d receives, with windows: %v", version, gives), func(t *testing.T) {
				s, err := meetOf(t, wire.RouteDirect, version)
				if err != nil {
					t.Fatal(err)
				}
				fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(fd)
				if err = unix.Ftruncate(fd, packet.SharedBytes(gives)); err == nil {
					_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
				}
				if err != nil {
					t.Fatal(err)
				}
				s.say(&wire.PeerShare{}, fd)
				if gives == windows {
					hear[*wire.PeerShared](s)
					return
				}
				select {
				case <-s.sending.Down():
				case <-testutil.After(time.Minute):
					t.Error("it takes the memory")
				}
			})
		}
	}
}

// player is one of two clients that alternate messages of a fixed size.
type player struct {
	memory             *client.Memory
	sending, receiving *client.Connection
	bytes              uint64
	awaited            *client.Operation
}

// await has room for the next message.
func (p *player) await() (err error) {
	p.awaited, err = p.receiving.Receive(p.memory, 0, p.bytes)
	return err
}

func (p *player) play() error {
	_, err := p.sending.Send(p.memory, p.memory.Bytes/2, p.bytes)
	return err
}

// take waits for the remote message, and posts room for the next.
func (p *player) take(ctx context.Context) error {
	if _, err := p.awaited.Wait(ctx); err != nil {
		return err
	}
	return p.await()
}

// BenchmarkEagerMessages measures a ping-pong between two containers of a host, from host memory
// into host memory: as NCCL's small operations are. Half of that is a hop. Idle connections are as
// many as NCCL has there, 16 in each of six sessions. Two relays and two clients need a processor
// each.
func BenchmarkEagerMessages(b *testing.B) {
	for _, idle := range []int{0, 6} {
		for _, n := range []uint64{8, 1024, 4096} {
			b.Run(fmt.Sprintf("%d idle/%d bytes", idle*16, n), func(b *testing.B) {
				h := newHost(b)
				left, right := h.relay("a", launch.RouteDirect, far(0, 1, "nic0")), h.relay("b", launch.RouteDirect,
					far(3, 2, "nic1"))
				a, c := attach(b, left), attach(b, right)
				first, second := &player{memory: hostMemory(b, a, 0, 2*n), bytes: n}, &player{memory: hostMemory(b, c, 3, 2*n),
					bytes: n}
				first.sending, second.receiving, _ = join(b, a, 0, c, 3)
				second.sending, first.receiving, _ = join(b, c, 3, a, 0)
				for range idle {
					a, c := attach(b, left), attach(b, right)
					for range 8 {
						join(b, a, 0, c, 3)
						join(b, c, 3, a, 0)
					}
				}
				ctx, cancel := context.WithCancel(b.Context())
				over := make(chan error, 1)
				go func() {
					err := second.await()
					for err == nil {
						if err = second.take(ctx); err == nil {
							err = second.play()
						}
					}
					over <- err
				}()
				err := first.await()
				pass := func() {
					if err == nil {
						err = first.play()
					}
					if err == nil {
						err = first.take(ctx)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				for range 100 { // until each relay knows the other's memory
					pass()
				}
				for b.Loop() {
					pass()
				}
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/2, "us/hop")
				cancel()
				<-over
			})
		}
	}
}
