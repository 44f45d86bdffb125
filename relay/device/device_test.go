package device_test

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
)

// leg is a part of the staged route: GPUs 0 and 3 are clients, 1 and 2 servers.
type leg struct {
	name             string
	from, to, issuer int
}

// BenchmarkLegsAtOnce runs the three legs of the staged route as independent endless streams of
// copies: the upper limit of the route's rate. The benchmark reports GB/s per leg.
func BenchmarkLegsAtOnce(b *testing.B) {
	if os.Getenv("PEERLANE_TEST_CUDA") != "driver" {
		b.Skip("needs four real GPUs: set PEERLANE_TEST_CUDA=driver")
	}
	d, err := cuda.Open()
	if err != nil {
		b.Fatal(err)
	}
	if n, err := d.DeviceCount(); err != nil || n < 4 {
		b.Skipf("needs four GPUs, found %d (%v)", n, err)
	}
	var gpus []*device.Device
	for i := range 4 {
		ordinal, err := d.DeviceGet(i)
		if err != nil {
			b.Fatal(err)
		}
		busID, err := d.DevicePCIBusID(ordinal)
		if err != nil {
			b.Fatal(err)
		}
		g, err := device.Open(d, busID)
		if err != nil {
			b.Fatal(err)
		}
		gpus = append(gpus, g)
	}
	in, out := leg{"client-slot", 0, 1, 0}, leg{"slot-client", 2, 3, 3}
	push, pull := leg{"slot-slot", 1, 2, 1}, leg{"slot-slot", 1, 2, 2}
	for _, chunk := range []uint64{8 << 20, 32 << 20} {
		for _, c := range []struct {
			name string
			legs []leg
		}{
			{"alone/in", []leg{in}}, {"alone/push", []leg{push}}, {"alone/pull", []leg{pull}}, {"alone/out", []leg{out}},
			{"all/push", []leg{in, push, out}}, {"all/pull", []leg{in, pull, out}},
		} {
			b.Run(fmt.Sprintf("%dMiB/%s", chunk>>20, c.name), func(b *testing.B) {
				rates, errs := make([]float64, len(c.legs)), make([]error, len(c.legs))
				for b.Loop() {
					var wait sync.WaitGroup
					for i, l := range c.legs {
						wait.Add(1)
						go func() {
							defer wait.Done()
							rates[i], errs[i] = stream(gpus, l, chunk, time.Second)
						}()
					}
					wait.Wait()
				}
				for i, l := range c.legs {
					if errs[i] != nil {
						b.Fatal(errs[i])
					}
					b.ReportMetric(rates[i], l.name+"-GB/s")
				}
			})
		}
	}
}

// stream copies for a while and returns GB/s.
func stream(gpus []*device.Device, l leg, chunk uint64, duration time.Duration) (float64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const depth = 4
	issuer := gpus[l.issuer]
	access := cuda.Access{Device: issuer.Ordinal, Write: true}
	source, err := device.Create(issuer.Driver, gpus[l.from].Ordinal, depth*chunk, access)
	if err != nil {
		return 0, err
	}
	target, err := device.Create(issuer.Driver, gpus[l.to].Ordinal, depth*chunk, access)
	if err != nil {
		return 0, err
	}
	queue, err := issuer.NewQueue()
	if err != nil {
		return 0, err
	}
	var failed error
	done, underWay, next := 0, 0, uint64(0)
	start := time.Now()
	for time.Since(start) < duration && failed == nil {
		for ; underWay < depth; next++ {
			at := cuda.Ptr(next % depth * chunk)
			underWay++
			queue.Copy(target.Ptr+at, source.Ptr+at, chunk, func(err error) {
				underWay--
				done++
				failed = err
			})
		}
		queue.Poll()
	}
	rate := float64(chunk) * float64(done) / time.Since(start).Seconds() / 1e9
	for underWay > 0 {
		queue.Poll()
	}
	for _, err := range []error{failed, queue.Close(), source.Close(), target.Close()} {
		if err != nil {
			return 0, err
		}
	}
	return rate, nil
}
