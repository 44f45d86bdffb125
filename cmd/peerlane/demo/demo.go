// Package demo runs two containers with GPUs far from every NIC, which exchange data through their
// relays. `peerlane demo` runs the package, on real GPUs or on the simulator.
package demo

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// Values of Options.Runtime.
const (
	RuntimeRunc = "runc"
	RuntimeCrun = "crun"
	RuntimeNone = "none" // plain processes, which require no root
)

// Values of Options.Copy: the process that copies between a client's GPU and its server GPU.
const (
	CopyRelay  = "relay"
	CopyClient = "client" // on its own stream; containers get peerlane.dev/gpu=
)

// Options are the options of a run.
type Options struct {
	// Runtime is RuntimeRunc, RuntimeCrun or RuntimeNone.
	Runtime string
	// Route is launch.RouteStaged, launch.RouteDirect or launch.RouteAuto: staged if the host has
	// two GPUs, direct if both containers share a single GPU.
	Route string
	// Copy is CopyRelay (the default) or CopyClient.
	Copy string
	// GPUs is a value of package testbed.
	GPUs string
	// Bytes is the minimum to send and verify in each direction.
	Bytes uint64
	Seed  uint64
	// Binaries is the directory of peerlane, peerlane-hook and peerlane-relay.
	Binaries string
	// Root is the directory of the demo's host, which the demo removes at the end; empty for a
	// temporary directory.
	Root string
	// Slots and SlotBytes override the configuration's defaults; 0 keeps the default.
	Slots     int
	SlotBytes uint64
	// RelayEnvironment lists variables ("NAME=value") for relays. Tests use the variables to make
	// relays fail.
	RelayEnvironment []string
	// Rates measures rates and hand-off on the simulator too; on real GPUs the demo always
	// measures.
	Rates bool
	// Quick limits messages to 8 MiB on simulated GPUs, and measures the rates of one size with
	// few bytes, for tests.
	Quick bool
	// Progress is called at every step.
	Progress func(Progress)
}

// Progress is a step of the demo.
type Progress struct {
	Step string
	// Done and Total are bytes; Total is 0 for a step without bytes.
	Done, Total uint64
}

// Report is the result of a run.
type Report struct {
	// Host describes the host in words.
	Host      string `json:"host"`
	Simulated bool   `json:"simulated"`
	Runtime   string `json:"runtime"`
	Route     string `json:"route"`
	// Transport is the transport of route staged; empty on route direct.
	Transport string        `json:"transport,omitempty"`
	Copy      string        `json:"copy"`
	Topology  *topo.Host    `json:"topology"`
	Plan      *planner.Plan `json:"plan"`
	// Estimate is the estimate of the plan; nil if the bandwidths of the host are unknown.
	Estimate   *planner.Estimate `json:"estimate,omitempty"`
	Containers []Container       `json:"containers"`
	Servers    []Server          `json:"servers"`
	// Triples are the tests of GPUs and NICs before the exchange, and Connections describe the RDMA
	// connections between the relays. Both are empty unless the transport is verbs.
	Triples     []launch.Triple `json:"triples,omitempty"`
	Connections []string        `json:"connections,omitempty"`
	Baselines   *baselines      `json:"baselines"`
	// Left lists the objects that the run left on the host.
	Left     []string `json:"left"`
	Problems []string `json:"problems"`
}

// OK reports whether the run verified everything and left nothing on the host.
func (r *Report) OK() bool { return len(r.Problems) == 0 && len(r.Left) == 0 }

// WholeRoute returns the rates of the largest messages over the staged route and over its slowest
// leg in GB/s; ok is false on another route.
func (r *Report) WholeRoute() (whole, slowest float64, ok bool) {
	rates := r.Containers[0].Client.Rates
	if r.Baselines == nil || len(r.Baselines.Legs) == 0 || len(rates) == 0 || r.Route != launch.RouteStaged {
		return 0, 0, false
	}
	slowest = r.Baselines.Legs[0].GBs
	for _, l := range r.Baselines.Legs {
		slowest = min(slowest, l.GBs)
	}
	return rates[len(rates)-1].GBs, slowest, true
}

// baselines are the rates to compare the exchange with. One process that sees every GPU measures
// them in the same run.
type baselines struct {
	// Raw is cuMemcpyPeerAsync from client GPU A to client GPU B, and Bounce is a copy through
	// pinned host memory, pipelined in chunks.
	Raw    []Rate `json:"raw"`
	Bounce []Rate `json:"bounce"`
	// Legs are the legs of the staged route, each with a raw copy in its direction by the same
	// GPU.
	Legs []leg `json:"legs"`
}

// leg is a leg of the staged route.
type leg struct {
	Name string  `json:"name"`
	Size uint64  `json:"size"` // bytes per message
	GBs  float64 `json:"gbs"`  // by a relay's queue, in slots
	Raw  float64 `json:"raw"`  // by cuMemcpyPeerAsync
}

// Container is one of the two containers.
type Container struct {
	Name string   `json:"name"`
	ID   string   `json:"id"`
	GPU  topo.GPU `json:"gpu"`
	// Servers are the PCI addresses of the lane's server GPUs.
	Servers  []string  `json:"servers"`
	Injected *Injected `json:"injected"`
	Client   *Client   `json:"client"`
}

// Server is a server GPU with the bytes of the exchange: as the relays counted them and, in the
// simulator, as the device's log has them.
type Server struct {
	GPU      topo.GPU `json:"gpu"`
	RelayIn  uint64   `json:"relayIn"`
	RelayOut uint64   `json:"relayOut"`
	// DeviceIn and DeviceOut are -1 on real GPUs, which have no such log.
	DeviceIn  int64 `json:"deviceIn"`
	DeviceOut int64 `json:"deviceOut"`
}

// Run runs the demo. An error means that the demo could not run; if the Report is not OK, the demo
// ran and found a fault.
func Run(ctx context.Context, o Options) (*Report, error) {
	if o.Runtime != RuntimeNone && os.Geteuid() != 0 {
		return nil, fmt.Errorf("the demo with %s needs root: an OCI runtime makes namespaces and cgroups, and its hook "+
			"mounts the relay's socket; run it with sudo, or with --runtime none for plain processes", o.Runtime)
	}
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	root := o.Root
	if root == "" {
		var err error
		if root, err = os.MkdirTemp("", "pldemo-"); err != nil {
			return nil, err
		}
		// Relays are not root, and traverse the directory unless they have a private root.
		if err := os.Chmod(root, 0o711); err != nil {
			return nil, err
		}
	}
	o.Copy = cmp.Or(o.Copy, CopyRelay)
	d := &demo{Options: o, report: &Report{Runtime: o.Runtime, Route: o.Route, Copy: o.Copy}}
	err := d.run(ctx, root)
	if d.host != nil {
		_, unmounted := d.host.Layout.UnmountAnchor()
		err = errors.Join(err, unmounted)
	}
	if removed := os.RemoveAll(root); removed != nil {
		d.report.Left = append(d.report.Left, removed.Error())
	}
	if err != nil {
		return nil, err
	}
	return d.report, nil
}

type demo struct {
	Options
	report  *Report
	host    *testbed.Host
	lanes   [2]planner.Lane
	runtime *bundle.Runtime
	script  Script
}

func (d *demo) run(ctx context.Context, root string) (err error) {
	d.Progress(Progress{Step: "reading the host"})
	if d.host, err = d.newHost(root); err != nil {
		return err
	}
	if err := d.chooseRoute(); err != nil {
		return err
	}
	if d.Runtime != RuntimeNone {
		if d.runtime, err = bundle.FindRuntime(d.Runtime, d.host.RuntimeState()); err != nil {
			return err
		}
		if err := d.host.Layout.MountAnchor(); err != nil {
			return err
		}
	}
	if err := d.configure(); err != nil {
		return err
	}
	before, err := d.host.Look()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = d.clear(before, err, ctx.Err() != nil)
		}
	}()
	if d.host.Software() {
		d.Progress(Progress{Step: "starting software devices, and testing them with GPUs"})
	}
	stop, err := d.host.StartNICs(ctx, d.lanes[:]...)
	if err != nil {
		return err
	}
	if d.report.Triples = d.host.Triples; len(d.report.Triples) > 0 {
		if before, err = d.host.Look(); err != nil { // includes the file of the self-test results
			return errors.Join(err, stop())
		}
	}
	logs, err := d.host.Log()
	if err == nil {
		err = d.exchange(ctx)
	}
	if err == nil {
		err = d.countServers(logs)
	}
	if err = errors.Join(err, stop()); err != nil {
		return err
	}
	if len(d.script.RateSizes) > 0 {
		d.Progress(Progress{Step: "measuring raw copies and the bounce through host memory"})
		if err := d.measure(ctx); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	d.Progress(Progress{Step: "looking for remaining objects"})
	// An empty directory of the runtime is not a leftover of a container.
	if err := os.Remove(d.host.RuntimeState()); err != nil && !os.IsNotExist(err) {
		d.report.Problems = append(d.report.Problems, err.Error())
	}
	d.report.Left, err = d.host.Left(before, time.Minute)
	return err
}

// newHost makes the host: with simulated GPUs the half-populated host, on which lanes gain most.
func (d *demo) newHost(root string) (*testbed.Host, error) {
	switch d.GPUs {
	case testbed.GPUsSimulated:
		return testbed.New(root, d.Binaries, testbed.GPUsHalf)
	case testbed.GPUsAuto, "":
		if h, err := testbed.New(root, d.Binaries, testbed.GPUsReal); err == nil {
			return h, nil
		}
		return testbed.New(root, d.Binaries, testbed.GPUsHalf)
	}
	return testbed.New(root, d.Binaries, d.GPUs)
}

// clear removes the containers, mounts and processes of a failed or interrupted run, and waits
// until supervisors and relays have ended. After an interruption, its error replaces the error of
// the run, whose processes fail because they are killed.
func (d *demo) clear(before testbed.Snapshot, cause error, interrupted bool) error {
	if interrupted {
		d.Progress(Progress{Step: "interrupted: removing containers and relays"})
		cause = errors.New("the demo was interrupted")
	}
	// A killed hook leaves a generation that no supervisor removes.
	_, collected := collector.Collect(d.host.Layout)
	removed := os.Remove(d.host.RuntimeState())
	if errors.Is(removed, fs.ErrNotExist) {
		removed = nil
	}
	left, err := d.host.Left(before, time.Minute)
	if len(left) > 0 {
		cause = fmt.Errorf("%w; left on the host: %s", cause, strings.Join(left, "; "))
	}
	return errors.Join(cause, collected, removed, err)
}

// Causes of options that a host with one GPU refuses.
var (
	ErrOneGPUForStaging = errors.New("route staged needs a second GPU to stage on; this host has 1 GPU: use --route " +
		"direct, or --gpus simulated")
	ErrOneGPUForCopies = errors.New("--copy client needs a second GPU to copy to; this host has 1 GPU: use --copy " +
		"relay, or --gpus simulated")
)

// chooseRoute resolves route auto, and refuses options that require a second GPU.
func (d *demo) chooseRoute() error {
	one := d.host.OneGPU()
	switch {
	case one && d.Route == launch.RouteStaged:
		return ErrOneGPUForStaging
	case one && d.Copy == CopyClient:
		return ErrOneGPUForCopies
	case d.Route != "" && d.Route != launch.RouteAuto:
	case one:
		d.Route = launch.RouteDirect
	default:
		d.Route = launch.RouteStaged
	}
	d.report.Route = d.Route
	if d.Route == launch.RouteStaged {
		d.report.Transport = launch.TransportVerbs
	}
	return nil
}

func (d *demo) configure() error {
	if d.host.Simulated {
		d.script = Script{RateSizes: []uint64{1 << 20, 16 << 20, 64 << 20}, RateBytes: 256 << 20, Depth: 4, Rounds: 200}
		if d.Quick {
			d.script.Largest, d.script.RateSizes, d.script.RateBytes, d.script.Rounds = 8<<20, []uint64{1 << 20}, 16<<20, 10
		}
		// Here staging is host memory: use no more than the overlap of copies requires.
		if d.Slots == 0 && d.SlotBytes == 0 {
			d.Slots, d.SlotBytes = 8, 4<<20
		}
	} else {
		d.script = Script{RateSizes: []uint64{64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20}, RateBytes: 16 << 30, Depth: 16,
			Rounds: 1000}
	}
	if d.host.Simulated && !d.Rates {
		d.script.RateSizes, d.script.Rounds = nil, 0
	}
	if d.Copy == CopyClient {
		d.host.ClientCopy = true
		// Provide slots for the largest message, so that copies overlap with the NIC.
		d.script.Staging = 2 * d.script.largest()
		if !d.host.Simulated {
			d.script.Staging = 8 * d.script.largest()
		}
	}
	d.script.Seed, d.script.Bytes, d.script.Timeout = d.Seed, d.Bytes, 5*time.Minute
	if err := d.write(); err != nil {
		return err
	}
	if d.host.Simulated && d.host.Software() {
		if err := d.pinLanes(); err != nil {
			return err
		}
	}
	d.report.Topology, d.report.Plan, d.report.Simulated, d.report.Host = d.host.Topology, d.host.Plan, d.host.Simulated,
		d.host.Words
	var err error
	if d.report.Estimate, err = d.host.Plan.Estimate(d.host.Topology); err != nil &&
		!errors.Is(err, planner.ErrNoBandwidths) {
		return err
	}
	if d.lanes, err = d.host.TwoClients(); err != nil {
		return err
	}
	for i, lane := range d.lanes {
		g, err := d.report.Plan.GPU(lane.GPU)
		if err != nil {
			return err
		}
		d.report.Containers = append(d.report.Containers, Container{
			Name: string(rune('A' + i)), ID: d.host.ContainerID(fmt.Sprintf("demo-%c", 'a'+i)), GPU: g, Servers: lane.Servers,
		})
	}
	return nil
}

// pinLanes configures the clients' lanes as planned. A configured lane has no other GPUs in
// reserve, whose tests would take most of the demo's time.
func (d *demo) pinLanes() error {
	lanes, err := d.host.TwoClients()
	if err != nil {
		return err
	}
	for _, l := range lanes {
		d.host.Lanes = append(d.host.Lanes, planner.Assignment{GPU: l.GPU, Servers: l.Servers, NICs: l.NICs})
	}
	return d.write()
}

// write writes the configuration and the plan.
func (d *demo) write() error {
	return d.host.Configure(func(c *config.Config) {
		c.Relay.Route = d.Route
		if d.Route == launch.RouteStaged && !d.Quick {
			c.Relay.SelfTest = launch.SelfTestOnce
		}
		c.Staging.Bounce = config.BounceNever // the figures are about server GPUs
		c.Relay.Environment = append(slices.Clone(c.Relay.Environment), d.RelayEnvironment...)
		if d.Slots > 0 {
			c.Relay.Slots = d.Slots
		}
		if d.SlotBytes > 0 {
			c.Relay.SlotSize = config.Size(d.SlotBytes)
		}
	})
}

// exchange runs both containers until they end.
func (d *demo) exchange(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	d.Progress(Progress{Step: "starting the containers"})
	clients := make([]*running, 2)
	for i := range clients {
		c, err := d.start(ctx, &d.report.Containers[i])
		if err != nil {
			for _, other := range clients[:i] {
				err = errors.Join(err, other.stop(context.WithoutCancel(ctx)))
			}
			return err
		}
		clients[i] = c
	}
	var handles [2]chan event
	for i := range handles {
		handles[i] = make(chan event, 1)
	}
	var wait sync.WaitGroup
	problems := make([]error, 2)
	var progress sync.Mutex
	var moved [2]uint64
	var logs string
	var once sync.Once
	for i, c := range clients {
		wait.Add(1)
		go func() {
			defer wait.Done()
			problems[i] = c.follow(func(e event) error {
				switch e.Kind {
				case "injected":
					d.report.Containers[i].Injected = e.Injected
				case "listening":
					handles[i] <- e
					select {
					case other := <-handles[1-i]:
						return c.send(order{Connect: other.Handle})
					case <-ctx.Done():
						return ctx.Err()
					}
				case "connected":
					if e.Route != d.Route {
						return fmt.Errorf("container %s is connected by route %s instead of %s", c.container.Name, e.Route, d.Route)
					}
				case "progress":
					progress.Lock()
					defer progress.Unlock()
					moved[i] = max(moved[i], e.Bytes)
					total := uint64(0)
					if e.Bytes > 0 {
						total = 2 * d.Bytes
					}
					d.Progress(Progress{Step: e.Step, Done: min(moved[0]+moved[1], 2*d.Bytes), Total: total})
					if d.host.Software() && d.report.Connections == nil {
						return d.look(c.container)
					}
				case "done":
					d.report.Containers[i].Client = e.Result
				}
				return nil
			})
			if problems[i] != nil {
				// Read the logs before anything is removed.
				once.Do(func() { logs = d.relayLogs() })
				cancel() // the other container waits for this container
			}
		}()
	}
	wait.Wait()
	var failed error
	for i, c := range clients {
		err := errors.Join(problems[i], c.stop(context.WithoutCancel(ctx)))
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("container %s: %w%s", c.container.Name, err, c.standardError()))
		}
	}
	if failed != nil {
		return fmt.Errorf("%w%s", failed, logs)
	}
	for _, c := range d.report.Containers {
		if c.Client == nil || !c.Client.Verified || c.Client.VerifiedBytes < d.Bytes {
			d.report.Problems = append(d.report.Problems, fmt.Sprintf("container %s did not verify the %d bytes that were "+
				"asked for", c.Name, d.Bytes))
		}
	}
	return nil
}

// look adds the RDMA connections of a container's relay to the report, and checks that the data
// uses NICs and GPU memory.
func (d *demo) look(c *Container) error {
	list, err := control.Find(d.host.Layout, c.ID)
	if err != nil {
		return err
	}
	info, err := control.Inspect(d.host.Layout, list[0].ID)
	if err != nil {
		return err
	}
	if info.Report == nil || info.Report.Network == nil {
		return fmt.Errorf("the relay of container %s does not report its network: %s", c.Name, info.NoReport)
	}
	d.report.Connections = []string{}
	for _, p := range info.Report.Network.Peers {
		d.report.Connections = append(d.report.Connections, p.Way)
	}
	for _, f := range info.Report.Connections {
		if f.Transport != launch.TransportVerbs || !f.GDR {
			d.report.Problems = append(d.report.Problems, fmt.Sprintf("a connection of container %s goes by transport "+
				"%s, %s", c.Name, f.Transport, f.Registration))
		}
	}
	return nil
}

// relayLogs returns the ends of the logs of relays and their supervisors whose containers are
// running.
func (d *demo) relayLogs() string {
	files, err := filepath.Glob(filepath.Join(d.host.Layout.GenerationDir("*"), "relay.log"))
	if err != nil {
		return "\n" + err.Error()
	}
	var all strings.Builder
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the log was removed with its generation
		}
		text = text[max(0, len(text)-2000):]
		fmt.Fprintf(&all, "\nlast output of relay %s:\n%s", filepath.Base(filepath.Dir(file)), text)
	}
	return all.String()
}

// running is a container, or a plain process, of the demo.
type running struct {
	demo      *demo
	container *Container
	command   *exec.Cmd
	in        io.WriteCloser
	out       io.ReadCloser
	errors    bytes.Buffer
}

// start starts a client in a container, through the runtime and its hooks, or as a plain process.
func (d *demo) start(ctx context.Context, c *Container) (*running, error) {
	script, err := json.Marshal(d.script)
	if err != nil {
		return nil, err
	}
	r := &running{demo: d, container: c}
	arguments := []string{"demo-client", "--name", c.Name, "--script", string(script)}
	if d.Runtime == RuntimeNone {
		r.command, err = d.process(ctx, c, arguments)
	} else {
		r.command, err = d.bundle(ctx, c, arguments)
	}
	if err != nil {
		return nil, err
	}
	r.command.Stderr = &r.errors
	// The terminal sends Ctrl-C to the whole process group, which would interrupt runtimes and
	// hooks. An interrupted demo ends the processes itself.
	r.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if d.runtime != nil {
		r.command.Cancel = func() error { return r.cancel(context.WithoutCancel(ctx)) }
	}
	if r.in, err = r.command.StdinPipe(); err != nil {
		return nil, err
	}
	if r.out, err = r.command.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := r.command.Start(); err != nil {
		return nil, err
	}
	if d.Runtime == RuntimeNone {
		if err := d.launch(c, r); err != nil {
			return nil, errors.Join(err, r.command.Process.Kill(), r.command.Wait())
		}
	}
	return r, nil
}

func (d *demo) bundle(ctx context.Context, c *Container, arguments []string) (*exec.Cmd, error) {
	program := bundle.File{Host: filepath.Join(d.Binaries, "peerlane"), Container: "/usr/bin/peerlane"}
	devices := testbed.Devices(c.GPU)
	if d.Copy == CopyClient {
		devices = testbed.DevicesWithServers(c.GPU)
	}
	b, err := d.host.Bundle(c.Name, program, devices, arguments...)
	if err != nil {
		return nil, err
	}
	return d.runtime.Run(ctx, b, c.ID), nil
}

// process returns the command of a client without a container. The client reads the path of the
// socket from standard input, because the relay starts later.
func (d *demo) process(ctx context.Context, c *Container, arguments []string) (*exec.Cmd, error) {
	return d.host.Process(ctx, c.GPU, append(arguments, "--socket", "-")...)
}

// launch starts the relay of a plain process, as the hook does for a container, and sends the path
// of the socket to the process.
func (d *demo) launch(c *Container, r *running) error {
	g, err := d.host.Launch(c.ID, c.GPU, r.command.Process.Pid)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(r.in, d.host.Socket(g))
	return err
}

func (r *running) send(o order) error { return json.NewEncoder(r.in).Encode(o) }

// follow reads the client's lines until the client is done.
func (r *running) follow(act func(event) error) error {
	lines := bufio.NewScanner(r.out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return fmt.Errorf("its output was %q: %w", lines.Text(), err)
		}
		if e.Kind == "failed" {
			return errors.New(e.Error)
		}
		if err := act(e); err != nil {
			return err
		}
		if e.Kind == "done" {
			return nil
		}
	}
	return errors.Join(errors.New("it ended before it was done"), lines.Err())
}

// stop waits until the process ends, and kills it after 10 s.
func (r *running) stop(ctx context.Context) error {
	r.in.Close()
	ended := make(chan error, 1)
	go func() {
		// Drain the remaining output: a full pipe would block the process.
		_, drained := io.Copy(io.Discard, r.out)
		ended <- errors.Join(drained, r.command.Wait())
	}()
	select {
	case err := <-ended:
		return errors.Join(err, r.remove(ctx))
	case <-time.After(10 * time.Second):
		killed := r.remove(ctx)
		if r.demo.runtime == nil {
			killed = r.command.Process.Kill()
		}
		return errors.Join(errors.New("it did not end by itself"), killed, <-ended)
	}
}

// cancel removes the container, so that `run` exits by itself: a killed `run` could leave an
// incomplete container.
func (r *running) cancel(ctx context.Context) error {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err := r.remove(ctx); err != nil {
			break
		}
		var u unix.Siginfo
		// Wait reaps a zombie.
		if err := unix.Waitid(unix.P_PID, r.command.Process.Pid, &u, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT,
			nil); err != nil || u.Signo != 0 {
			return os.ErrProcessDone
		}
	}
	return r.command.Process.Kill()
}

func (r *running) remove(ctx context.Context) error {
	if r.demo.runtime == nil {
		return nil
	}
	return r.demo.runtime.Delete(ctx, r.container.ID)
}

// standardError returns the standard error of the client, its runtime and its hooks.
func (r *running) standardError() string {
	text := strings.TrimSpace(r.errors.String())
	if text == "" {
		return ""
	}
	return "\n" + text
}

// measure runs the baselines in a separate process, whose contexts end with it.
func (d *demo) measure(ctx context.Context) (err error) {
	a, b := d.report.Containers[0], d.report.Containers[1]
	m, err := d.host.StartMeasuring(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	result := &baselines{}
	job := measure.Job{From: a.GPU.BusID, To: b.GPU.BusID, Issuer: a.GPU.BusID, Bytes: d.script.RateBytes,
		Depth: d.script.Depth}
	for _, job.Size = range d.script.RateSizes {
		for kind, list := range map[string]*[]Rate{measure.Raw: &result.Raw, measure.Bounce: &result.Bounce} {
			job.Kind = kind
			found, err := m.Do(job)
			if err != nil {
				return err
			}
			*list = append(*list, Rate{job.Size, found.GBs})
		}
	}
	d.report.Baselines = result
	if d.host.OneGPU() {
		return nil // no GPU stages for another GPU
	}
	serverA, serverB := a.Servers[0], b.Servers[0]
	// The issuers of the staged route: relays on the clients' GPUs, and the software devices on
	// the receiver's server.
	for _, c := range []struct{ name, from, to, issuer string }{
		{"client A to slot", a.GPU.BusID, serverA, a.GPU.BusID},
		{"slot to slot, by the NIC", serverA, serverB, serverB},
		{"slot to client B", serverB, b.GPU.BusID, b.GPU.BusID},
	} {
		job := measure.Job{
			Kind: measure.Raw, From: c.from, To: c.to, Issuer: c.issuer, Size: slices.Max(d.script.RateSizes),
			Bytes: d.script.RateBytes, Depth: d.script.Depth,
			Slots: d.host.Config.Relay.Slots, SlotBytes: uint64(d.host.Config.Relay.SlotSize),
		}
		raw, err := m.Do(job)
		if err != nil {
			return err
		}
		job.Kind = measure.Leg
		found, err := m.Do(job)
		if err != nil {
			return err
		}
		result.Legs = append(result.Legs, leg{Name: c.name, Size: job.Size, GBs: found.GBs, Raw: raw.GBs})
	}
	return nil
}

// countServers compares the counters of the relays with the logs of the devices, and checks that
// every staged byte passed a server GPU.
func (d *demo) countServers(before map[string]testbed.Bytes) error {
	after, err := d.host.Log()
	if err != nil {
		return err
	}
	relays, devices, err := d.listServers(before, after)
	if err != nil {
		return err
	}
	sent, received := uint64(0), uint64(0)
	for _, c := range d.report.Containers {
		sent += c.Client.Sent
		received += c.Client.Received
	}
	staged := sent + received
	// Sent bytes enter and leave the sender's server, received bytes the receiver's server. Short
	// messages may bypass the server GPUs.
	eager := uint64(0)
	if d.report.Transport == launch.TransportVerbs {
		eager = d.eager()
	}
	wrong := func(seen, all, eager uint64) bool { return seen > all || seen < all-eager }
	wrongLog := len(after) > 0 && !d.sharedServers() && min(devices.In, devices.Out) < staged-eager
	problem := func(format string, arguments ...any) {
		d.report.Problems = append(d.report.Problems, fmt.Sprintf(format, arguments...))
	}
	switch {
	case d.Copy == CopyClient:
		// Relays do not count a client's own copies: on both routes, relays see sent bytes only
		// leave a server GPU, and received bytes only enter one.
		if wrong(relays.Out, sent, eager/2) || wrong(relays.In, received, eager/2) {
			problem("of %d bytes sent out of server GPUs and %d received into them the relays saw %d leave and %d enter", sent,
				received, relays.Out, relays.In)
		}
	case d.Route == launch.RouteDirect:
		if relays.In+relays.Out > 0 {
			problem("on route direct the relays saw %d bytes enter and %d leave server GPUs", relays.In, relays.Out)
		}
		return nil
	case wrong(relays.In, staged, eager) || wrong(relays.Out, staged, eager):
		problem("of %d staged bytes the relays saw %d enter and %d leave server GPUs", staged, relays.In, relays.Out)
		return nil
	}
	if wrongLog {
		problem("of %d staged bytes the server GPUs' own logs show %d in and %d out", staged, devices.In, devices.Out)
	}
	return nil
}

// listServers adds the server GPUs to the report, and returns the sums of the bytes that relays and
// the devices' logs counted.
func (d *demo) listServers(before, after map[string]testbed.Bytes) (relays, devices testbed.Bytes, err error) {
	list := map[string]*Server{}
	var order []string
	for _, c := range d.report.Containers {
		for _, bus := range c.Servers {
			if list[bus] == nil {
				g, err := d.report.Plan.GPU(bus)
				if err != nil {
					return relays, devices, err
				}
				list[bus] = &Server{GPU: g, DeviceIn: -1, DeviceOut: -1}
				order = append(order, bus)
			}
		}
		for _, counter := range c.Client.Relay.Servers {
			for _, s := range list {
				if s.GPU.UUID == counter.GPU {
					s.RelayIn += counter.In
					s.RelayOut += counter.Out
				}
			}
		}
	}
	for _, bus := range order {
		s := list[bus]
		if end, known := after[bus]; known {
			s.DeviceIn, s.DeviceOut = int64(end.In-before[bus].In), int64(end.Out-before[bus].Out)
			devices.In += uint64(s.DeviceIn)
			devices.Out += uint64(s.DeviceOut)
		}
		relays.In += s.RelayIn
		relays.Out += s.RelayOut
		d.report.Servers = append(d.report.Servers, *s)
	}
	return relays, devices, nil
}

// eager returns the maximum of the bytes that transport verbs may send inside the relays'
// messages: short messages, and the messages of the hand-off with its warm-up. Sender and receiver
// both count a message.
func (d *demo) eager() (n uint64) {
	n = uint64(2*len(d.report.Containers)) * 8 * 2 * uint64(d.script.Rounds)
	for _, size := range d.script.sizes() {
		if size <= maxEager {
			n += uint64(2*len(d.report.Containers)) * size
		}
	}
	return n
}

// maxEager is the maximum size of such a message (the default of Eager of tcp.Config).
const maxEager = 4 << 10

// sharedServers reports whether both clients stage on one GPU. Then the NIC copies within the GPU,
// and the log of the GPU does not contain the copy.
func (d *demo) sharedServers() bool {
	for _, s := range d.lanes[0].Servers {
		if slices.Contains(d.lanes[1].Servers, s) {
			return true
		}
	}
	return false
}
