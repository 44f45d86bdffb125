package traffic

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/relay/launch"
)

// Torture exchanges messages between every two GPUs of a host, by both routes and in both
// directions, while kernels of other processes run on every GPU, and clients and relays are killed.
type Torture struct {
	GPUs      string // a value of package testbed
	MaxGPUs   int    // GPUs; 0 for every GPU
	Binaries  string // the directory of peerlane, peerlane-hook and peerlane-relay
	Seed      uint64
	Transfers int           // minimum, half by each route
	Limit     time.Duration // maximum time
	// Containers per GPU and route; 0 for two.
	Containers int
	// Pairs of clients per two GPUs and route; 0 for enough to keep the GPUs busy.
	Pairs    int
	Bytes    uint64 // per buffer of a client
	Largest  uint64 // message
	Memory   []string
	Load     string        // a value of Loads
	KillEach time.Duration // on average; 0 for never
	Kills    int           // at most; 0 for no bound
	// Rails are the NICs of a lane; 0 for one. With two, half of the kills take a NIC's port down.
	Rails    int
	Change   func(*config.Config)
	Progress func(string)
}

// Loads lists the kinds of load that keep every GPU busy.
var Loads = []string{"both", measure.LoadMemory, measure.LoadSMs, "none"}

// Result is the result of a Torture.
type Result struct {
	Host      string
	Simulated bool
	GPUs      int
	Seed      uint64
	Seconds   float64 // of the transfers
	PerSecond float64 // transfers
	Load      string
	// Computed is the share of the time in which a GPU's kernels ran, the minimum of the GPUs.
	Computed float64
	Report
	Left []string // on the host
	// Logs has the ends of the logs of relays, after a failure.
	Logs map[string]string `json:",omitempty"`
}

// OK reports whether the result has the requested size and no problem.
func (r *Result) OK(t Torture) bool {
	return r.Transfers >= t.Transfers && 2*min(r.Routes[launch.RouteStaged],
		r.Routes[launch.RouteDirect]) >= t.Transfers && r.Wrong == 0 && len(r.Problems) == 0 && len(r.Left) == 0
}

// Run runs the messages. An error means that the run was impossible.
func (t Torture) Run(ctx context.Context) (result *Result, err error) {
	root, err := os.MkdirTemp("", "pl") // short, for the length of a socket's path
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	// Unprivileged relays traverse the directory if the host has no private root.
	if err := os.Chmod(root, 0o711); err != nil {
		return nil, err
	}
	h, err := testbed.New(root, t.Binaries, t.GPUs)
	if err != nil {
		return nil, err
	}
	h.ClientCopy = true
	if err := h.Configure(func(*config.Config) {}); err != nil {
		return nil, err
	}
	before, err := h.Look()
	if err != nil {
		return nil, err
	}
	fleet, err := NewFleet(ctx, h, Options{GPUs: t.MaxGPUs, PerGPU: cmp.Or(t.Containers, 2), NICs: cmp.Or(t.Containers, 2),
		rails: t.Rails,
		Change: func(c *config.Config) {
			if h.Simulated {
				c.Relay.Slots, c.Relay.SlotSize = 4, 256<<10 // staging is host memory here
			}
			if t.Change != nil {
				t.Change(c)
			}
		}})
	if err != nil {
		return nil, err
	}
	result = &Result{Host: h.Words, Simulated: h.Simulated, GPUs: len(h.Lanes), Seed: t.Seed, Load: t.Load}
	err = t.run(ctx, fleet, result)
	if len(fleet.Report().Problems) > 0 {
		result.Logs = fleet.logs()
	}
	if err = errors.Join(err, fleet.Close()); err != nil {
		return nil, err
	}
	result.Report = fleet.Report()
	result.PerSecond = float64(result.Transfers) / result.Seconds
	result.Left, err = h.Left(before, time.Minute)
	return result, err
}

func (t Torture) run(ctx context.Context, f *Fleet, result *Result) (err error) {
	ctx, cancel := context.WithTimeout(ctx, t.Limit)
	defer cancel()
	ended := make(chan struct{})
	var beside sync.WaitGroup
	failures := make(chan error, len(f.host.Lanes)+1)
	shares := make([]float64, len(f.host.Lanes))
	begin := time.Now()
	for i, lane := range f.host.Lanes {
		if t.Load == "none" {
			break
		}
		beside.Go(func() {
			var err error
			shares[i], err = t.compute(f, lane.GPU, ended)
			failures <- err
		})
	}
	beside.Go(func() { failures <- t.kill(f, ended) })
	beside.Go(func() {
		for t.Progress != nil {
			select {
			case <-ended:
				return
			case <-time.After(5 * time.Second):
				r := f.Report()
				t.Progress(fmt.Sprintf("%.0f s: %d transfers, %d by route staged, %d by route direct; killed %v, wrong %d, "+
					"problems %d",
					time.Since(begin).Seconds(), r.Transfers, r.Routes[launch.RouteStaged], r.Routes[launch.RouteDirect], r.Kills,
					r.Wrong, len(r.Problems)))
			}
		}
	})
	var slots sync.WaitGroup
	for i, pair := range t.pairs(f) {
		slot := f.NewSlot(rand.New(rand.NewPCG(t.Seed, uint64(i))), func(*rand.Rand) [2]*container { return pair }, Life{
			Bytes: t.Bytes, Messages: atOnce, Largest: t.Largest, Rounds: 100, Memory: t.Memory, Stays: true,
			Hands: []string{HandPlain, HandTimeline, HandOver},
		})
		over := func() bool {
			r := f.Report()
			return ctx.Err() != nil || 2*r.Routes[pair[0].Route] >= t.Transfers || len(r.Problems) > 0
		}
		slots.Go(func() {
			for !over() {
				slot.Live(over)
			}
			things := f.names(pair, slot) // before leave, which removes the clients
			if err := slot.leave(); err != nil {
				f.failed(err, begin, things)
			}
		})
	}
	slots.Wait()
	result.Seconds = time.Since(begin).Seconds()
	close(ended)
	beside.Wait()
	close(failures)
	for failed := range failures {
		err = errors.Join(err, failed)
	}
	result.Computed = 1
	for _, share := range shares {
		result.Computed = min(result.Computed, share/time.Since(begin).Seconds())
	}
	return err
}

// logs returns the tails of the logs of relays and supervisors, by container.
func (f *Fleet) logs() map[string]string {
	all := map[string]string{}
	for _, c := range f.Containers {
		text, err := os.ReadFile(filepath.Join(f.host.Layout.GenerationDir(c.Generation()), "relay.log"))
		if err != nil {
			all[c.Name] = err.Error()
			continue
		}
		all[c.Name] = string(text[max(0, len(text)-4000):])
	}
	return all
}

// pairs returns the containers of connected clients, repeated, per two GPUs and route.
func (t Torture) pairs(f *Fleet) (list [][2]*container) {
	const busy = 8 // pairs
	var once [][2]*container
	for _, a := range f.Containers {
		for _, b := range f.Containers {
			if a.Route == b.Route && a.gpu.Index < b.gpu.Index && a.Number == 0 && b.Number == 0 {
				once = append(once, [2]*container{a, b})
			}
		}
	}
	times := t.Pairs
	if times == 0 {
		times = max(1, busy/len(once))
	}
	for k := range times {
		for _, pair := range once {
			for i, c := range pair {
				pair[i] = f.same(c, (k+i*(k/2))%f.PerGPU)
			}
			list = append(list, pair)
		}
	}
	return list
}

// same returns the container with the GPU and the route of c and another number.
func (f *Fleet) same(c *container, number int) *container {
	for _, other := range f.Containers {
		if other.gpu.BusID == c.gpu.BusID && other.Route == c.Route && other.Number == number {
			return other
		}
	}
	return c
}

// compute keeps a GPU's SMs and memory busy with consecutive kernels of a separate process, and
// returns the kernels' running time in seconds.
func (t Torture) compute(f *Fleet, busID string, ended <-chan struct{}) (seconds float64, err error) {
	m, err := f.host.StartMeasuring(context.Background())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	for turn := 0; ; turn++ {
		select {
		case <-ended:
			return seconds, nil
		default:
		}
		job := measure.Job{Kind: measure.Work, From: busID, Load: t.Load, Duration: 200 * time.Millisecond}
		if t.Load == "both" {
			job.Load = measure.LoadMemory
			if turn%2 > 0 {
				job.Load, job.Duration = measure.LoadSMs, 50*time.Millisecond
			}
		}
		if _, err := m.Do(job); err != nil {
			return seconds, err
		}
		seconds += job.Duration.Seconds()
	}
}

// kill kills clients and relays, and sometimes takes a NIC's port down, until the end.
func (t Torture) kill(f *Fleet, ended <-chan struct{}) error {
	if t.KillEach == 0 {
		return nil
	}
	random := rand.New(rand.NewPCG(t.Seed, 1<<32))
	for n := 0; t.Kills == 0 || n < t.Kills; n++ {
		select {
		case <-ended:
			return nil
		case <-time.After(time.Duration(random.Int64N(int64(2*t.KillEach) + 1))):
		}
		var err error
		switch n := random.IntN(10); {
		case t.Rails > 1 && n < 5:
			err = f.FlapNIC(random.IntN(len(f.nics)), time.Duration(random.Int64N(int64(time.Second))))
		case n < 4:
			f.KillClient(random.IntN)
		case n < 9:
			_, err = f.KillRelay(anyOf(random, f.Containers))
		default:
			err = f.FlapNIC(random.IntN(len(f.nics)), time.Duration(random.Int64N(int64(time.Second))))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
