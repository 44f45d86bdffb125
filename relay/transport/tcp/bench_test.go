package tcp

import (
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// BenchmarkBandwidth measures the bandwidth of writes of 4 MiB slots over loopback, by numbers of
// streams and sizes of pieces, and the ratio to io.Copy of as many bytes over as many sockets.
func BenchmarkBandwidth(b *testing.B) {
	for _, streams := range []int{1, 2, 4, 8} {
		for _, piece := range []int{64 << 10, 256 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%d streams/%d KiB", streams, piece>>10), func(b *testing.B) {
				const slot, slots = 4 << 20, 8
				memory, source := make([]byte, slots*slot), make([]byte, slots*slot)
				ready := make(chan *Arrivals, 1)
				sender, receiver := pair(b, loopback, streams, piece, Config{}, func(c *Channel, _ wire.Message, _ uint32) {
					in := c.Receive(func(uint64, uint64) {}, func() {})
					in.add(1, memory)
					ready <- in
				})
				c := sender.open(&wire.Done{}, ignore, func(error) {})
				in := receive(b, ready, "the channel")
				free := make(chan int, slots)
				for i := range slots {
					free <- i
				}
				n := uint64(0)
				// The two alternate, so that other load of the machine affects both.
				const turn = 32 // slots
				var ours, plain, ratios []float64
				for b.Loop() {
					began := time.Now()
					for range turn {
						i := <-free
						n++
						number := n
						receiver.loop.Call(func() {
							if err := in.Grant(number, 1, uint64(i)*slot, slot); err != nil {
								b.Error(err)
							}
						})
						sender.loop.Do(func() {
							c.Link().Write(transport.Target{Region: 1, Offset: uint64(i) * slot}, hostPlace(source, i*slot), slot, number,
								func(err error) {
									if err != nil {
										b.Error(err)
									}
									free <- i
								})
						})
					}
					for range slots {
						<-free
					}
					rate := turn * slot / time.Since(began).Seconds()
					for i := range slots {
						free <- i
					}
					raw := copied(b, streams, turn*slot, piece)
					ours, plain, ratios = append(ours, rate/1e9), append(plain, raw/1e9), append(ratios, rate/raw)
				}
				b.ReportMetric(median(ours), "GB/s")
				b.ReportMetric(median(plain), "GB/s-io.Copy")
				b.ReportMetric(median(ratios), "ratio")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// copied returns the bandwidth of io.Copy over a number of sockets, bytes per second.
func copied(b *testing.B, sockets int, total int64, piece int) float64 {
	var both sync.WaitGroup
	began := time.Now()
	for range sockets {
		to, from := loopback(b)
		both.Go(func() {
			defer to.Close()
			_, err := io.CopyBuffer(struct{ io.Writer }{to}, io.LimitReader(zeros{}, total/int64(sockets)), make([]byte, piece))
			if err != nil {
				b.Error(err)
			}
		})
		both.Go(func() {
			defer from.Close()
			if _, err := io.CopyBuffer(nothing{}, struct{ io.Reader }{from}, make([]byte, piece)); err != nil {
				b.Error(err)
			}
		})
	}
	both.Wait()
	return float64(total) / time.Since(began).Seconds()
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

type nothing struct{}

func (nothing) Write(b []byte) (int, error) { return len(b), nil }

// BenchmarkSockets measures the bandwidth of this machine's kernel over loopback, in total over
// sixteen sockets, in one and in both directions: of memory that fits into the processors' caches,
// and of larger memory, as data of GPUs.
func BenchmarkSockets(b *testing.B) {
	const sockets, piece = 16, 1 << 20
	for _, ways := range []int{1, 2} {
		for _, area := range []int{1 << 20, 64 << 20} {
			b.Run(fmt.Sprintf("%d ways/%d MiB each", ways, area>>20), func(b *testing.B) {
				var moved atomic.Int64
				var ends []net.Conn
				var all sync.WaitGroup
				through := func(c net.Conn, do func([]byte) (int, error)) {
					ends = append(ends, c)
					all.Go(func() {
						memory := make([]byte, area)
						for at := 0; ; at = (at + piece) % area {
							n, err := do(memory[at:][:piece])
							if err != nil {
								return
							}
							moved.Add(int64(n))
						}
					})
				}
				for range ways * sockets {
					to, from := loopback(b)
					through(to, to.Write)
					through(from, func(p []byte) (int, error) { _, err := io.ReadFull(from, p); return 0, err })
				}
				time.Sleep(300 * time.Millisecond) // each socket has used its memory
				before := moved.Load()
				for b.Loop() {
					time.Sleep(time.Second)
				}
				b.ReportMetric(float64(moved.Load()-before)/b.Elapsed().Seconds()/1e9, "GB/s")
				b.ReportMetric(0, "ns/op")
				for _, c := range ends {
					c.Close()
				}
				all.Wait()
			})
		}
	}
}

// BenchmarkMessages measures messages per second over loopback: 64 messages of 8 channels in an
// iteration of the loop, in one write and in separate writes.
func BenchmarkMessages(b *testing.B) {
	for _, alone := range []bool{false, true} {
		b.Run(fmt.Sprintf("alone=%v", alone), func(b *testing.B) {
			const channels, turn = 8, 64
			got := make(chan struct{}, 1)
			count := 0
			dialed, accepted := greeted(b, loopback, 1, 0)
			sender := newSide(b, dialed, Config{Alone: alone})
			newSide(b, accepted, Config{Accept: func(c *Channel, _ wire.Message, _ uint32) {
				c.Handle(func(wire.Message, uint32, []int) {
					if count++; count%turn == 0 {
						got <- struct{}{}
					}
				}, func(error) {})
			}})
			var opened [channels]*Channel
			for i := range opened {
				opened[i] = sender.open(&wire.Done{}, ignore, func(error) {})
			}
			turns := 0
			for b.Loop() {
				turns++
				sender.loop.Do(func() {
					for i := range turn {
						opened[i%channels].Send(&wire.PeerSend{}, 0)
					}
				})
				<-got
			}
			f := sender.peer.Figures()
			b.ReportMetric(float64(turns)*turn/b.Elapsed().Seconds(), "messages/s")
			b.ReportMetric(float64(f.Messages)/float64(f.Batches), "messages/write")
		})
	}
}
