// Package bench measures the rates and the cost of a relay, and compares the figures with raw
// copies, with the bounce through host memory and with copies of one process. `peerlane bench`
// runs the package. Every client is a separate process with one GPU, and with a relay that starts
// like a container's relay.
package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo/planner"
)

// Values of Options.Routes.
const (
	direct = launch.RouteDirect
	staged = launch.RouteStaged
)

// Values of Options.Baselines.
const (
	BaselineRaw    = measure.Raw
	BaselineBounce = measure.Bounce
	BaselineLocal  = measure.Local
)

// Options are the options of a run.
type Options struct {
	// Tables are names of Tables.
	Tables []string
	// Sizes are the sizes of messages in bytes, and Depths the numbers of messages in flight;
	// empty for the values of the table.
	Sizes     []uint64
	Depths    []int
	Routes    []string
	Baselines []string
	// Busy lists the GPUs that table busy keeps busy, such as BusyClient; empty for every GPU in
	// turn.
	Busy []string
	// Pace is the rate of software devices in GB/s; empty for the rates of the table.
	Pace []float64
	// GPUsPerNIC is the number of GPUs that share a NIC in table uniformity, half of them near the
	// NIC: an even number; 0 means PerNIC.
	GPUsPerNIC int
	// Duration is the duration of a measurement; 0 for the default of the host.
	Duration time.Duration
	// Transport carries messages to another host: launch.TransportAuto for the choice of the
	// relays, or a transport that the relays must use.
	Transport string
	// Network are the network settings of this host, for Listen and Connect.
	Network config.Network
	// Verbs are the RDMA settings of that transport; nil for the default.
	Verbs *config.Verbs
	// Plan is the configured plan of lanes, for that transport with real GPUs.
	Plan config.Plan
	// Quick measures fewer sizes, for a shorter time.
	Quick bool
	// GPUs is a value of package testbed.
	GPUs string
	// Binaries is the directory of peerlane, peerlane-hook and peerlane-relay.
	Binaries string
	Release  string
	Command  []string
	// Progress is called with the name of the measurement.
	Progress func(string)
	// Measured is called after every table with the result so far, because a run may be
	// interrupted.
	Measured func(*Report) error
}

// table is a set of related measurements.
type table struct {
	name, what string
	run        func(*run) error
	// two reports that the table requires two GPUs.
	two bool
}

// tables returns the tables in the order of a run.
func tables() []table {
	return []table{
		{"copy", "a relay's copies, client to slot and slot to client, and raw peer copies", (*run).copies, true},
		{"latency", "8 bytes: a relay's copy, hand-off by timelines, rings", (*run).latency, false},
		{"routes", "whole routes from client to client, by size and depth", (*run).routes, false},
		{"bounce", "whole routes, and the best bounce through host memory", (*run).bounce, false},
		{"client-copy", "clients that copy to the slots on their own streams", (*run).clientCopy, true},
		{"busy", "a relay's copies while other processes' kernels keep GPUs busy", (*run).busy, true},
		{"bystander", "kernels of a server GPU's owner, with and without a relay at full rate", (*run).bystander, true},
		{"uniformity", "one stream per GPU through paced software devices", (*run).uniformity, true},
		{"many-clients", "concurrent clients of one relay, and of several relays", (*run).manyClients, false},
		{"cpu", "processor time of a relay, idle and busy", (*run).cpu, false},
		{"kv", "lists of a KV cache's blocks: time, post, processor time for an entry", (*run).kv, false},
		{"memory", "memory of a relay on its client's GPU and on server GPUs", (*run).memory, true},
		{"first-copy", "from a client's first call to its first message", (*run).firstCopy, false},
		{tableNetwork, "two relays of this host over TCP, and plain sockets on loopback", (*run).network, false},
	}
}

// Tables returns the names of the tables, and the descriptions.
func Tables() (names, what []string) {
	for _, t := range tables() {
		names, what = append(names, t.name), append(what, t.what)
	}
	return names, what
}

// Transports returns the values of Options.Transport.
func Transports() []string {
	return []string{launch.TransportAuto, launch.TransportTCP, launch.TransportVerbs}
}

// Check returns an error for options that exclude one another or are out of range.
func (o Options) Check() error {
	names, _ := Tables()
	for _, list := range []struct {
		flag             string
		measured, choice []string
	}{
		{"table", o.Tables, names},
		{"routes", o.Routes, []string{direct, staged}},
		{"baselines", o.Baselines, []string{BaselineRaw, BaselineBounce, BaselineLocal}},
		{"busy", o.Busy, []string{BusyClient, BusyServer, BusyBoth}},
		{"transport", []string{cmp.Or(o.Transport, launch.TransportAuto)}, Transports()},
		{"gpus", []string{o.GPUs}, []string{testbed.GPUsAuto, testbed.GPUsReal, testbed.GPUsSimulated, testbed.GPUsOne}},
	} {
		for _, name := range list.measured {
			if !slices.Contains(list.choice, name) {
				return &flagError{list.flag, name, "unknown value; use " + strings.Join(list.choice, ", ")}
			}
		}
	}
	for flag, twice := range map[string]bool{
		"table": repeats(o.Tables), "busy": repeats(o.Busy), "routes": repeats(o.Routes), "sizes": repeats(o.Sizes),
		"depths": repeats(o.Depths), "pace": repeats(o.Pace),
	} {
		if twice {
			return &flagError{flag, nil, "has a duplicate value"}
		}
	}
	for _, n := range o.Sizes {
		if n == 0 || n > 1<<30 {
			return &flagError{"sizes", n, "must be 1 byte to 1 GiB"}
		}
	}
	for _, n := range o.Depths {
		if n < 1 || n > 256 {
			return &flagError{"depths", n, "must be 1 to 256 messages in flight"}
		}
	}
	for _, n := range o.Pace {
		if n <= 0 {
			return &flagError{"pace", n, "must be positive"}
		}
	}
	if o.GPUsPerNIC < 0 || o.GPUsPerNIC%2 != 0 {
		return &flagError{"gpus-per-nic", o.GPUsPerNIC, "must be an even number"}
	}
	if o.Duration < 0 || o.Duration > time.Minute {
		return &flagError{"duration", o.Duration, "must be at most a minute"}
	}
	return nil
}

func repeats[T cmp.Ordered](list []T) bool {
	list = slices.Sorted(slices.Values(list))
	return len(slices.Compact(list)) < len(list)
}

// run holds the state of a run.
type run struct {
	Options
	ctx    context.Context
	host   *testbed.Host
	report *Report
	copier *testbed.Measuring
	// known has the names of the measured baselines.
	known map[string]bool
	lanes []planner.Assignment
	// clients is the number of clients that have been started.
	clients int
	// outward is the lane to another host.
	outward outward
	// pairs are the tested pairs of GPUs, and testing is the duration of the tests.
	pairs   []launch.Pair
	testing time.Duration
	// untestable reports that the self-test itself has failed, so that the run does not repeat the
	// test.
	untestable bool
}

// Run measures the tables of o. A table that fails is a problem in the report.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	r, end, err := begin(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	if r.copier, err = r.host.StartMeasuring(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.copier.Close()) }()
	for _, t := range tables() {
		if !slices.Contains(o.Tables, t.name) {
			continue
		}
		if t.two && r.host.OneGPU() {
			r.miss(t.name, t.what, needsTwo)
			continue
		}
		start := time.Now()
		if err := t.run(r); err != nil {
			// Keep the remaining tables.
			r.report.Problems = append(r.report.Problems, fmt.Sprintf("table %s: %v", t.name, err))
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		r.report.Seconds[t.name] = math.Round(time.Since(start).Seconds()*10) / 10
		r.progress("table %s took %.1f s", t.name, r.report.Seconds[t.name])
		if o.Measured != nil {
			if err := o.Measured(r.report); err != nil {
				return nil, err
			}
		}
	}
	return r.report, r.report.check()
}

// begin makes a run on its own host, in a directory that end removes.
func begin(ctx context.Context, o Options) (r *run, end func() error, err error) {
	if err := o.Check(); err != nil {
		return nil, nil, err
	}
	root, err := os.MkdirTemp("", "plbench-") // short, because a socket's path has at most 107 bytes
	if err != nil {
		return nil, nil, err
	}
	// A return with an error sets end to nil before the deferred call.
	remove := func() error { return os.RemoveAll(root) }
	defer func() {
		if err != nil {
			err = errors.Join(err, remove())
		}
	}()
	// Relays are not root, and traverse the directory unless they have a private root.
	if err := os.Chmod(root, 0o711); err != nil {
		return nil, nil, err
	}
	r = &run{Options: o, ctx: ctx, known: map[string]bool{}}
	if r.host, err = testbed.New(root, o.Binaries, o.GPUs); err != nil {
		return nil, nil, err
	}
	if err := r.chooseRoutes(); err != nil {
		return nil, nil, err
	}
	r.lanes = r.host.Lanes
	r.report = &Report{
		Version: version, Date: time.Now().UTC().Truncate(time.Second), Release: o.Release, Command: o.Command,
		Host: r.host.Words, Simulated: r.host.Simulated, Rows: []Row{}, Baselines: []Baseline{},
		Seconds: map[string]float64{},
	}
	for _, g := range r.host.Topology.GPUs {
		r.report.GPUs = append(r.report.GPUs, g.Name)
	}
	if r.report.Driver, err = driverVersion(r.host); err != nil {
		return nil, nil, err
	}
	if r.Duration == 0 {
		r.Duration = time.Second
		if r.host.Simulated || r.Quick {
			r.Duration = 200 * time.Millisecond
		}
	}
	return r, remove, nil
}

// ErrOneGPU is the cause of a bench of route staged only, on a host with one GPU.
var ErrOneGPU = errors.New("route staged needs a second GPU to stage on; this host has 1 GPU: use --routes direct, " +
	"or --gpus simulated")

// chooseRoutes omits route staged on a host with one GPU.
func (r *run) chooseRoutes() error {
	if !r.host.OneGPU() {
		return nil
	}
	r.Routes = slices.DeleteFunc(slices.Clone(r.Routes), func(route string) bool { return route == staged })
	if len(r.Routes) == 0 {
		return ErrOneGPU
	}
	return nil
}

// needsTwo is the reason why a host with one GPU does not measure a table, or a part of it.
const needsTwo = "this host has 1 GPU; 2 GPUs are needed"

// driverVersion returns the version of CUDA; 0 on the simulator.
func driverVersion(h *testbed.Host) (int, error) {
	if h.Simulated {
		return 0, nil
	}
	d, err := cuda.Open()
	if err != nil {
		return 0, err
	}
	return d.DriverVersion()
}

// sizes returns the requested sizes, or else the sizes of the table.
func (r *run) sizes(own ...uint64) []uint64 {
	if len(r.Sizes) > 0 {
		return r.Sizes
	}
	return slices.DeleteFunc(own, func(n uint64) bool {
		return r.host.Simulated && n > 16<<20 || r.Quick && (n == 4<<10 || n == 256<<10)
	})
}

func (r *run) depths(own ...int) []int {
	if len(r.Depths) > 0 {
		return r.Depths
	}
	return own
}

func (r *run) wants(baseline string) bool { return slices.Contains(r.Baselines, baseline) }

func (r *run) progress(format string, arguments ...any) { progress(r.Options, format, arguments...) }

func progress(o Options, format string, arguments ...any) {
	if o.Progress != nil {
		o.Progress(fmt.Sprintf(format, arguments...))
	}
}

func (r *run) row(row Row) { r.report.Rows = append(r.report.Rows, row) }

// miss records a part of a table that this run cannot measure.
func (r *run) miss(table, what, why string) {
	r.report.Missing = append(r.report.Missing, Missing{table, what, why})
}

// baseline measures a job as a baseline, once per run, and returns the name of the baseline; empty
// if the baselines of this kind were not requested.
func (r *run) baseline(j measure.Job) (string, error) {
	if !r.wants(j.Kind) {
		return "", nil
	}
	name := fmt.Sprintf("%s %s, %s to %s", j.Kind, sizeText(j.Size), j.From, j.To)
	if j.Issuer != "" && j.Issuer != j.From {
		name += ", issued by " + j.Issuer
	}
	if r.known[name] {
		return name, nil
	}
	found, err := r.do(j)
	if err != nil {
		return "", err
	}
	r.keep(name, found)
	return name, nil
}

// keep adds a measured result as a baseline.
func (r *run) keep(name string, found measure.Result) {
	b := Baseline{Name: name, Value: found.GBs, Unit: GBs, Times: found.Times}
	if found.Times != nil {
		b.Value, b.Unit = found.Times.P50, microseconds
	}
	r.known[name] = true
	r.report.Baselines = append(r.report.Baselines, b)
}

// compareWith adds a value as a baseline, once per name, and returns the name.
func (r *run) compareWith(name string, value float64, unit string) string {
	if !r.known[name] {
		r.known[name] = true
		r.report.Baselines = append(r.report.Baselines, Baseline{Name: name, Value: value, Unit: unit})
	}
	return name
}

// do measures a job. A rate is the median of three measurements, each for a third of the duration.
func (r *run) do(j measure.Job) (measure.Result, error) {
	r.progress("%s, %s", j.Kind, sizeText(j.Size))
	if j.Depth == 0 {
		j.Depth = 16
	}
	j.Duration = r.Duration
	if j.Kind == measure.Local || j.Kind == measure.Queue || j.Kind == measure.Ring {
		return r.copier.Do(j)
	}
	const times = 3
	j.Duration /= times
	var all []measure.Result
	for range times {
		found, err := r.copier.Do(j)
		if err != nil {
			return found, err
		}
		all = append(all, found)
	}
	slices.SortFunc(all, func(a, b measure.Result) int {
		switch {
		case a.GBs < b.GBs:
			return -1
		case a.GBs > b.GBs:
			return 1
		}
		return 0
	})
	return all[times/2], nil
}

// stage is a set of clients with their relays, and with software devices as NICs.
type stage struct {
	run   *run
	route string
	// staging is the staging memory of clients that copy themselves, in bytes per direction.
	staging uint64
	workers []*worker
	// connection describes the first connection of a pair over software devices.
	connection string
	stop       func() error
}

// stage configures the host for a route, and starts software devices if the route requires NICs.
// With pace 0 the rate of the devices is unlimited.
func (r *run) stage(route string, lanes []planner.Assignment, pace float64) (*stage, error) {
	return r.stageWith(route, lanes, pace, func(*config.Config) {})
}

// stageWith is stage with another change of the configuration.
func (r *run) stageWith(route string, lanes []planner.Assignment, pace float64,
	change func(*config.Config)) (*stage, error) {
	r.host.Pace = pace
	if err := r.configure(lanes, func(c *config.Config) {
		c.Relay.Route = route
		change(c)
	}); err != nil {
		return nil, err
	}
	if !r.untestable {
		if err := r.selfTest(); err != nil {
			// Relays also stage without the test.
			r.untestable = true
			r.report.Problems = append(r.report.Problems, fmt.Sprintf("the self-test: %v", err))
		}
	}
	s := &stage{run: r, route: route, stop: func() error { return nil }}
	if route == staged {
		var err error
		if s.stop, err = r.host.StartNICs(r.ctx, r.host.Plan.Lanes...); err != nil {
			return nil, err
		}
		for _, t := range r.host.Triples {
			r.progress("%v: %s %s", t.TripleName, t.Verdict, t.Reason)
		}
	}
	return s, nil
}

// configure writes the host's configuration with these lanes, and its plan.
func (r *run) configure(lanes []planner.Assignment, change func(*config.Config)) error {
	r.host.Lanes = lanes
	return r.host.Configure(func(c *config.Config) {
		if r.host.Simulated {
			c.Relay.Slots, c.Relay.SlotSize = 8, 4<<20 // staging is host memory here
			c.Relay.SelfTest = launch.SelfTestOff      // many pairs, and no fault to find
		}
		change(c)
	})
}

// selfTest tests the untested pairs of GPUs that the lanes can stage on. Otherwise the supervisor
// of the first relay would test the pairs during the measurement.
func (r *run) selfTest() error {
	names, err := selftest.PlannedPairs(r.host.Plan, r.host.Config)
	if err != nil {
		return err
	}
	if r.host.Simulated {
		names = names[:min(len(names), 1)]
	}
	tester, err := selftest.NewTester(r.host.Layout, r.host.Config, r.host.HookBinary())
	if err != nil {
		return err
	}
	start, before := time.Now(), len(r.pairs)
	ctx, cancel := context.WithTimeoutCause(r.ctx, patience, fmt.Errorf("it takes more than %v", patience))
	defer cancel()
	err = tester.Test(ctx, names, false, func(_ launch.PairHost, p launch.Pair) {
		if launch.FindPair(r.pairs, p.PairName) == nil {
			r.pairs = append(r.pairs, p)
			r.progress("self-test of %s with %s: %s", p.GPU.BusID, p.Server.BusID, p.Verdict)
		}
	})
	if len(r.pairs) > before {
		r.testing += time.Since(start)
	}
	return err
}

// close ends the clients, their relays and the software devices.
func (s *stage) close() error { return errors.Join(s.end(), s.stop()) }

// end ends the clients, and waits for their relays, so that no relay disturbs the next
// measurement.
func (s *stage) end() error {
	var err error
	for _, w := range s.workers {
		err = errors.Join(err, w.stop())
	}
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		left, globbed := filepath.Glob(s.run.host.Layout.GenerationDir("*"))
		if err = errors.Join(err, globbed); len(left) == 0 {
			break
		}
		if time.Now().After(end) {
			err = errors.Join(err, fmt.Errorf("%d relays did not end", len(left)))
			break
		}
	}
	s.workers = nil
	return err
}

// client starts a client on a lane. With beside, the client shares the relay of beside. The client
// does not attach yet.
func (s *stage) client(lane planner.Lane, beside *worker) (*worker, error) {
	h := s.run.host
	g, err := h.Plan.GPU(lane.GPU)
	if err != nil {
		return nil, err
	}
	s.run.clients++
	w := &worker{name: fmt.Sprint(s.run.clients), lane: lane, gpu: g}
	if w.command, err = h.Process(s.run.ctx, g, "bench-client"); err != nil {
		return nil, err
	}
	w.command.Stderr = &w.errors
	if w.in, err = w.command.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := w.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.out = json.NewDecoder(out)
	if err := w.command.Start(); err != nil {
		return nil, err
	}
	s.workers = append(s.workers, w)
	if beside != nil {
		w.generation = beside.generation
		return w, nil
	}
	w.generation, err = h.Launch(h.ContainerID("bench-"+w.name), g, w.command.Process.Pid)
	return w, err
}

// startAttached starts a client that attaches with buffers of this size.
func (s *stage) startAttached(lane planner.Lane, beside *worker, bytes uint64) (*worker, error) {
	w, err := s.client(lane, beside)
	if err != nil {
		return nil, err
	}
	_, err = w.do(order{Do: doAttach, Socket: s.run.host.Socket(w.generation), Bytes: bytes, Staging: s.staging})
	return w, err
}

// connect connects a to b.
func (s *stage) connect(a, b *worker) error {
	listening, err := b.do(order{Do: doListen})
	if err != nil {
		return err
	}
	connected, err := a.do(order{Do: doConnect, Handle: listening.Handle})
	if err != nil {
		return err
	}
	if err := s.hasRoute(connected); err != nil {
		return err
	}
	_, err = b.do(order{Do: doAccept})
	return err
}

// hasRoute returns an error for a connection by another route.
func (s *stage) hasRoute(connected reply) error {
	if connected.Route != s.route {
		return fmt.Errorf("route %s was requested, but the relays chose %s", s.route, connected.Route)
	}
	return nil
}

// connectBoth connects two clients in both directions at the same time, as ranks do.
func (s *stage) connectBoth(a, b *worker) error {
	listening, err := together(map[*worker]order{a: {Do: doListen}, b: {Do: doListen}})
	if err != nil {
		return err
	}
	connected, err := together(map[*worker]order{
		a: {Do: doConnect, Handle: listening[b].Handle}, b: {Do: doConnect, Handle: listening[a].Handle},
	})
	if err != nil {
		return err
	}
	if err := errors.Join(s.hasRoute(connected[a]), s.hasRoute(connected[b])); err != nil {
		return err
	}
	_, err = together(map[*worker]order{a: {Do: doAccept}, b: {Do: doAccept}})
	return err
}

// pair returns two attached clients on the host's two lanes, connected in both directions.
func (r *run) pair(route string, bytes uint64) (s *stage, a, b *worker, err error) {
	if s, err = r.stage(route, r.lanes, 0); err != nil {
		return nil, nil, nil, err
	}
	a, b, err = s.pair(bytes)
	if err != nil {
		err = errors.Join(err, s.close())
	}
	return s, a, b, err
}

func (s *stage) pair(bytes uint64) (a, b *worker, err error) {
	lanes, err := s.run.host.TwoClients()
	if err != nil {
		return nil, nil, err
	}
	if a, err = s.startAttached(lanes[0], nil, bytes); err != nil {
		return nil, nil, err
	}
	if b, err = s.startAttached(lanes[1], nil, bytes); err != nil {
		return nil, nil, err
	}
	if err := errors.Join(s.connect(a, b), s.connect(b, a)); err != nil || !s.run.host.Software() {
		return a, b, err
	}
	s.connection, err = s.run.softwareConnection(a)
	return a, b, err
}

// transportOf returns the transport of a route between two relays of one host.
func transportOf(route string) string {
	if route == staged {
		return launch.TransportVerbs
	}
	return launch.TransportLocal
}

// stream sends from a to b, and returns the rate and the time of every message.
func (r *run) stream(a, b *worker, size uint64, depth int) (reply, error) {
	return r.streamFor(a, b, size, depth, r.Duration)
}

// streamFor is stream with a duration.
func (r *run) streamFor(a, b *worker, size uint64, depth int, duration time.Duration) (reply, error) {
	return r.sendAs(a, b, order{Size: size, Depth: depth, Duration: duration})
}

// sendAs makes a send and b receive according to an order.
func (r *run) sendAs(a, b *worker, o order) (reply, error) {
	a.tags++
	o.Do, o.Tag = doSend, a.tags
	receive := o
	receive.Do = doReceive
	if o.Handed > 0 {
		receive.Size = o.Handed
	}
	replies, err := together(map[*worker]order{a: o, b: receive})
	return replies[a], err
}
