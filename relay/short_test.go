package relay_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
)

// player is one of two clients that send each other messages of one size in turn.
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

// take waits for the other's message, and has room for the one after it.
func (p *player) take(ctx context.Context) error {
	if _, err := p.awaited.Wait(ctx); err != nil {
		return err
	}
	return p.await()
}

// BenchmarkShortMessages is a message from one container of a host to another and one
// back, out of host memory into host memory, each when the one before it has come: as
// NCCL's small operations are. Half of that is a hop. Idle connections are as many as
// NCCL has there, 16 in each of six sessions. Two relays and two clients need a processor
// each.
func BenchmarkShortMessages(b *testing.B) {
	for _, idle := range []int{0, 6} {
		for _, n := range []uint64{8, 1024, 4096} {
			b.Run(fmt.Sprintf("%d idle/%d bytes", idle*16, n), func(b *testing.B) {
				h := newHost(b)
				left, right := h.relay("a", launch.RouteDirect, far(0, 1, "nic0")), h.relay("b", launch.RouteDirect, far(3, 2, "nic1"))
				a, c := attach(b, left), attach(b, right)
				first, second := &player{memory: hostMemory(b, a, 0, 2*n), bytes: n}, &player{memory: hostMemory(b, c, 3, 2*n), bytes: n}
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
