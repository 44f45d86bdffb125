package traffic

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// Options are the options of a Fleet.
type Options struct {
	// number of GPUs with lanes; 0 for every GPU
	GPUs int
	// PerGPU is the number of containers per GPU and route.
	PerGPU int
	NICs   int // software devices
	rails  int // NICs of a lane; 0 for one
	// Change changes the host's configuration.
	Change func(*config.Config)
}

// Fleet runs containers with relays, software devices as NICs, and clients. A container of a fleet
// is an idle process; clients are plain processes.
type Fleet struct {
	Options
	ctx        context.Context
	host       *testbed.Host
	Containers []*container
	nics       []string
	stop       func() error // ends the engine of the NICs

	mu      sync.Mutex
	clients int
	victims map[*victim]bool
	deaths  []*death
	flaps   []*death // of NICs' ports
	report  Report
}

// Report is the result of a Fleet.
type Report struct {
	Transfers int            // messages that were received and verified
	Bytes     uint64         // of the messages
	Routes    map[string]int // messages by route
	Hands     map[string]int // messages by hand-over
	Sizes     Decades        // the same, by size
	Pairs     map[string]int // the same, by the GPUs' numbers, "0 to 1"
	Rounds    int            // that ended well
	Lives     int            // of two clients, from attach to leave
	Kills     map[string]int // by kind of the killed process
	Stops     int            // of clients, by SIGSTOP
	Flaps     int            // of NICs' ports
	Explained map[string]int // ends of lives that the kill of a process explains, by the error's name
	Wrong     int            // messages
	Problems  []string       // unexplained errors, hangs, wrong bytes
}

// maxProblems limits the problems in words.
const maxProblems = 20

func (r *Report) problem(text string) {
	if len(r.Problems) < maxProblems {
		r.Problems = append(r.Problems, text)
	}
}

// death is a killed process, until the process has ended or a successor works.
type death struct {
	what     string
	from, to time.Time // to is zero until the end
}

// container is a container with a lane, and a relay with one route.
type container struct {
	Name   string
	Number int
	Route  string
	gpu    topo.GPU
	nics   []string // of its lane

	mu         sync.Mutex
	life       int
	init       *exec.Cmd
	generation *generation.Generation
	kills      []time.Time // kills of the relay

	ending bool // guarded by the fleet's lock: no life begins in an ending container
}

// Generation returns the generation of the container's present life.
func (c *container) Generation() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.generation.ID
}

// NewFleet starts containers and NICs on a host.
func NewFleet(ctx context.Context, h *testbed.Host, o Options) (f *Fleet, err error) {
	f = &Fleet{Options: o, ctx: ctx, host: h, victims: map[*victim]bool{}, report: Report{
		Routes: map[string]int{}, Hands: map[string]int{}, Pairs: map[string]int{}, Kills: map[string]int{},
		Explained: map[string]int{},
	}}
	gpus := h.Topology.GPUs
	if o.GPUs > 0 {
		gpus = gpus[:min(o.GPUs, len(gpus))]
	}
	if len(gpus) < 2 {
		return nil, fmt.Errorf("%d GPUs: two are needed", len(gpus))
	}
	h.Lanes = nil
	for i := range max(o.NICs, o.rails, 1) {
		f.nics = append(f.nics, fmt.Sprintf("software%d", i))
	}
	for i, g := range gpus {
		// A GPU stages on the next GPU.
		server := gpus[(i+1)%len(gpus)].BusID
		var nics []string
		for k := range max(o.rails, 1) {
			nics = append(nics, f.nics[(i+k)%len(f.nics)])
		}
		h.Lanes = append(h.Lanes, planner.Assignment{GPU: g.BusID, Servers: []string{server}, NICs: nics})
	}
	if err := h.Configure(func(c *config.Config) {
		c.Relay.Route = launch.RouteStaged
		o.Change(c)
	}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if f.stop, err = h.StartNICs(ctx, h.Plan.Lanes...); err != nil {
		return nil, err
	}
	for _, route := range []string{launch.RouteStaged, launch.RouteDirect} {
		for k := range max(o.PerGPU, 1) {
			for i := range gpus {
				g, err := h.Plan.GPU(gpus[i].BusID)
				if err != nil {
					return nil, err
				}
				c := &container{Name: fmt.Sprintf("%s-%d-%d", route, i, k), Number: k, Route: route, gpu: g, nics: h.Lanes[i].NICs}
				f.Containers = append(f.Containers, c)
				if err := f.startContainer(c); err != nil {
					return nil, err
				}
			}
		}
	}
	return f, nil
}

func (f *Fleet) startContainer(c *container) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.life++
	c.kills = nil
	init := exec.Command("sleep", "86400")
	if err := init.Start(); err != nil {
		return err
	}
	// The route is that of the configuration at the start of the container.
	h := *f.host
	if h.Config.Relay.Route = c.Route; c.Route == launch.RouteDirect {
		h.Config.Relay.Transport = launch.TransportAuto
	}
	g, err := h.Launch(h.ContainerID(fmt.Sprintf("%s-%d", c.Name, c.life)), c.gpu, init.Process.Pid)
	if err != nil {
		return errors.Join(err, init.Process.Kill(), ignoreExit(init.Wait()))
	}
	c.init, c.generation = init, g
	return nil
}

// ignoreExit returns nil for a process that was killed.
func ignoreExit(err error) error {
	var status *exec.ExitError
	if errors.As(err, &status) {
		return nil
	}
	return err
}

// killed records a death in advance; the caller calls over when the process has ended, or a
// successor works.
func (f *Fleet) killed(kind string, what ...string) (over func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.killedLocked(kind, what...)
}

// killedLocked is killed for a caller that holds the fleet's lock.
func (f *Fleet) killedLocked(kind string, what ...string) (over func()) {
	f.report.Kills[kind]++
	var list []*death
	for _, w := range what {
		list = append(list, &death{what: w, from: time.Now()})
	}
	f.deaths = append(f.deaths, list...)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, d := range list {
			d.to = time.Now()
		}
	}
}

// explained reports whether any of things died between begin and now.
func (f *Fleet) explained(begin time.Time, things []string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return died(f.deaths, begin, things)
}

// KillClient kills a client; any chooses among n.
func (f *Fleet) KillClient(any func(n int) int) bool {
	v := f.pick(any)
	if v == nil {
		return false
	}
	over := f.killed("client", v.name)
	_ = v.command.Process.Kill() // may have ended
	<-v.ended
	over()
	return true
}

// StopClient stops a client for a while. The stop must cause no failure.
func (f *Fleet) StopClient(any func(n int) int, d time.Duration) bool {
	v := f.pick(any)
	if v == nil || v.command.Process.Signal(syscall.SIGSTOP) != nil {
		return false
	}
	select {
	case <-v.ended:
	case <-time.After(d):
	}
	_ = v.command.Process.Signal(syscall.SIGCONT) // may have been killed
	f.mu.Lock()
	defer f.mu.Unlock()
	f.report.Stops++
	return true
}

func (f *Fleet) pick(any func(n int) int) *victim {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.victims) == 0 {
		return nil
	}
	var list []*victim
	for v := range f.victims {
		list = append(list, v)
	}
	slices.SortFunc(list, func(a, b *victim) int { return strings.Compare(a.name, b.name) })
	return list[any(len(list))]
}

// A supervisor restarts a relay that fails less often than five times a minute.
const killsAMinute = 4

// KillRelay kills the relay of a container, unless the relay would then stay down, or does not
// serve yet.
func (f *Fleet) KillRelay(c *container) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kills = slices.DeleteFunc(c.kills, func(t time.Time) bool { return time.Since(t) > 65*time.Second })
	if len(c.kills) >= killsAMinute {
		return false, nil
	}
	pid, err := f.relay(c)
	if err != nil || pid == 0 {
		return false, err
	}
	process, err := os.FindProcess(pid) // a pidfd: the pid cannot be reused
	if err != nil {
		return false, nil
	}
	defer process.Release()
	if again, err := f.relay(c); err != nil || again != pid {
		return false, err
	}
	c.kills = append(c.kills, time.Now())
	over := f.killed("relay", c.Name)
	if err := process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return false, err
	}
	// The supervisor reaps the process, so no zombie remains.
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if err := process.Signal(syscall.Signal(0)); err != nil {
			break
		}
		if time.Now().After(end) {
			return false, fmt.Errorf("the relay of %s does not die", c.Name)
		}
	}
	over()
	return true, nil
}

// relay returns the process of a container's relay; 0 without a relay.
func (f *Fleet) relay(c *container) (int, error) {
	infos, err := control.Find(f.host.Layout, c.generation.ID)
	if err != nil {
		return 0, err
	}
	if infos[0].Status.Relay == nil {
		return 0, nil
	}
	return infos[0].Status.Relay.PID, nil
}

// KillContainer ends a container, and starts a replacement. As in a PID namespace, the other
// processes die before the end of init is visible: a relay that detects the end reclaims the host
// memory.
func (f *Fleet) KillContainer(c *container) error {
	f.mu.Lock()
	c.ending = true
	var clients []*victim
	names := []string{c.Name}
	for v := range f.victims {
		if v.in == c {
			clients, names = append(clients, v), append(names, v.name)
		}
	}
	over := f.killedLocked("container", names...) // before a process detects the end
	f.mu.Unlock()
	defer over()
	for _, v := range clients {
		_ = v.command.Process.Kill() // may have ended
		<-v.ended
	}
	err := f.endContainer(c)
	if err == nil {
		err = f.startContainer(c)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c.ending = false
	return err
}

func (f *Fleet) endContainer(c *container) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.init == nil {
		return nil
	}
	err := errors.Join(c.init.Process.Kill(), ignoreExit(c.init.Wait()))
	c.init = nil
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if _, missing := os.Stat(f.host.Layout.GenerationDir(c.generation.ID)); missing != nil {
			return err
		}
		if time.Now().After(end) {
			return errors.Join(err, fmt.Errorf("the generation of %s, which has ended, is still there", c.Name))
		}
	}
}

// FlapNIC takes the port of a NIC down for a while. The loss must fail no connection, but relays
// without another NIC make no connection meanwhile.
func (f *Fleet) FlapNIC(i int, d time.Duration) error {
	flap := &death{what: f.nics[i], from: time.Now()}
	f.mu.Lock()
	f.flaps = append(f.flaps, flap)
	f.report.Flaps++
	f.mu.Unlock()
	err := f.host.SetPort(f.nics[i], true)
	if err == nil {
		time.Sleep(d)
		err = f.host.SetPort(f.nics[i], false)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	flap.to = time.Now().Add(portPause)
	return err
}

// portPause exceeds the time in which relays detect that a port is up again.
const portPause = 5 * time.Second

// flapped reports whether the port of a NIC among things was down between begin and now.
func (f *Fleet) flapped(begin time.Time, things []string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return died(f.flaps, begin, things)
}

// died reports whether any of things is among deaths that had not ended at begin.
func died(deaths []*death, begin time.Time, things []string) bool {
	return slices.ContainsFunc(deaths, func(d *death) bool {
		return slices.Contains(things, d.what) && (d.to.IsZero() || d.to.After(begin))
	})
}

// NICs returns the pid of the process that moves the bytes of the NICs.
func (f *Fleet) NICs() int { return f.host.EnginePID() }

// Close ends containers and NICs. All clients must have ended.
func (f *Fleet) Close() error {
	var wait sync.WaitGroup
	failed := make([]error, len(f.Containers))
	for i, c := range f.Containers {
		wait.Go(func() { failed[i] = f.endContainer(c) })
	}
	wait.Wait()
	err := errors.Join(failed...)
	if f.stop != nil {
		err = errors.Join(err, f.stop())
	}
	return err
}

// Report returns the result so far.
func (f *Fleet) Report() Report {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.report
	for _, m := range []*map[string]int{&r.Routes, &r.Hands, &r.Pairs, &r.Kills, &r.Explained} {
		copied := map[string]int{}
		for k, v := range *m {
			copied[k] = v
		}
		*m = copied
	}
	r.Problems = slices.Clone(r.Problems)
	return r
}

// ofDeaths are the statuses that report a death.
var ofDeaths = []wire.Status{
	wire.StatusRelayDied, wire.StatusPeerRelayDied, wire.StatusPeerClientDied, wire.StatusPeerClosed,
	wire.StatusPeerContainerDied,
	wire.StatusBadHandle, wire.StatusUnreachable,
}

// failed judges the error that ended a life with the given dependencies.
func (f *Fleet) failed(err error, begin time.Time, things []string) {
	explained, flapped := f.explained(begin, things), f.flapped(begin, things)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, one := range parts(err) {
		var how *failure
		known := errors.As(one, &how)
		switch {
		case flapped && known && how.status == wire.StatusUnreachable:
			f.report.Explained["a port was down"]++
		case known && how.hangs, !explained:
			f.report.problem(one.Error())
		case known && how.killed:
			f.report.Explained["the client itself was killed"]++
		case known && how.late:
			f.report.Explained["the client's container had ended"]++
		case known && slices.Contains(ofDeaths, how.status):
			f.report.Explained[how.status.String()]++
		default:
			f.report.problem("although something was killed: " + one.Error())
		}
	}
}

// parts returns the errors of a joined error.
func parts(err error) []error {
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		var list []error
		for _, e := range all.Unwrap() {
			list = append(list, parts(e)...)
		}
		return list
	}
	return []error{err}
}

// Any returns a container whose index of GPU and route satisfies wanted.
func (f *Fleet) Any(r *rand.Rand, wanted func(number int) bool) *container {
	var list []*container
	for _, c := range f.Containers {
		if wanted(c.Number) {
			list = append(list, c)
		}
	}
	return anyOf(r, list)
}

// Pair returns a function that always picks the containers of the first two GPUs with a number and
// a route.
func (f *Fleet) Pair(route string, number int) func(*rand.Rand) [2]*container {
	var list []*container
	for _, c := range f.Containers {
		if c.Route == route && c.Number == number {
			list = append(list, c)
		}
	}
	return func(*rand.Rand) [2]*container { return [2]*container(list) }
}

// Across returns a function for each of the first two GPUs that always picks the container of this
// GPU with the number one, and the container of the other GPU with the number other.
func (f *Fleet) Across(route string, one, other int) (pairs [2]func(*rand.Rand) [2]*container) {
	a, b := f.Pair(route, one)(nil), f.Pair(route, other)(nil)
	for i := range a {
		pairs[i] = func(*rand.Rand) [2]*container { return [2]*container{a[i], b[1-i]} }
	}
	return pairs
}

// AnyPair returns two containers of different GPUs with the same route.
func (f *Fleet) AnyPair(r *rand.Rand) [2]*container {
	a := anyOf(r, f.Containers)
	for {
		b := anyOf(r, f.Containers)
		if b.Route == a.Route && b.gpu.BusID != a.gpu.BusID {
			return [2]*container{a, b}
		}
	}
}
