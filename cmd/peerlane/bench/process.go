package bench

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/topo/planner"
)

func (r *run) cpu() error {
	const size = 16 << 20
	for _, route := range r.Routes {
		s, a, b, err := r.pair(route, size)
		if err == nil {
			err = errors.Join(r.idle(s, a), r.busyRelay(a, b, route, size), s.close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// idle measures the processor time of an idle relay with a client, of a relay without a client,
// and of a process with only a CUDA context.
func (r *run) idle(s *stage, a *worker) error {
	r.progress("processor time of an idle relay, route %s", s.route)
	alone, err := s.client(a.lane, nil) // never attaches
	if err != nil {
		return err
	}
	if _, err := alone.do(order{Do: doContext}); err != nil {
		return err
	}
	relay, err := r.relayOf(a)
	if err != nil {
		return err
	}
	unused, err := r.relayOf(alone)
	if err != nil {
		return err
	}
	settle, idle := 2*time.Second, 10*time.Second
	switch {
	case r.host.Simulated:
		settle, idle = r.Duration, r.Duration
	case r.Quick:
		idle = 5 * time.Second
	}
	time.Sleep(settle) // until spinning and the work of the runtimes after load have ended
	processes := []int{relay, unused, alone.command.Process.Pid}
	var before []processorTimes
	for _, pid := range processes {
		t, err := processorTime(pid)
		if err != nil {
			return err
		}
		before = append(before, t)
	}
	time.Sleep(idle)
	minute := time.Minute.Seconds() / idle.Seconds()
	var took [3]float64 // ms per 60 s
	var threads [3]string
	for i, pid := range processes {
		after, err := processorTime(pid)
		if err != nil {
			return err
		}
		took[i], threads[i] = float64((after.sum-before[i].sum).Microseconds())/1e3*minute, busiest(before[i], after, minute)
	}
	row := Row{Table: "cpu", Route: s.route, Transport: transportOf(s.route), Unit: milliseconds}
	for _, found := range []struct {
		what  string
		value float64
		asked *Bound
		note  string
	}{
		{"idle relay without a client, in 60 s", took[1], atMost(10), threads[1]},
		{"a process with a CUDA context alone, in 60 s", took[2], nil, threads[2]},
		{"idle relay with clients and connections, in 60 s", took[0], atMost(10), threads[0]},
		{"the same, above a CUDA context alone", max(0, took[0]-took[2]), atMost(10), ""},
	} {
		row.What, row.Value, row.Asked, row.Note = found.what, found.value, found.asked, found.note
		r.row(row)
	}
	return nil
}

// busyRelay measures the processor time of the sender's relay at full rate, and the rate.
func (r *run) busyRelay(a, b *worker, route string, size uint64) error {
	r.progress("processor time at full rate, route %s", route)
	pid, err := r.relayOf(a)
	if err != nil {
		return err
	}
	raw, comparable, err := r.rawOf(route, size)
	if err != nil {
		return err
	}
	before, err := processorTime(pid)
	if err != nil {
		return err
	}
	started := time.Now()
	found, err := r.stream(a, b, size, 16)
	if err != nil {
		return err
	}
	after, err := processorTime(pid)
	if err != nil {
		return err
	}
	row := Row{Table: "cpu", Route: route, Transport: transportOf(route), Size: size, Depth: 16}
	row.What, row.Value, row.Unit, row.Asked = "the sender's relay at full rate",
		(after.sum-before.sum).Seconds()/time.Since(started).Seconds(), cores, atMost(1)
	row.Note = busiest(before, after, 1)
	r.row(row)
	row.What, row.Value, row.Unit, row.Asked, row.Note = "the rate meanwhile", found.GBs, GBs, nil, ""
	if row.Baseline = raw; raw != "" && comparable {
		row.Asked = atLeast(0.9)
	}
	r.row(row)
	return nil
}

func (r *run) relayOf(w *worker) (int, error) {
	info, err := control.Inspect(r.host.Layout, w.generation.ID)
	if err != nil {
		return 0, err
	}
	for _, p := range info.Processes {
		if p.Role == "relay" {
			return p.PID, nil
		}
	}
	return 0, fmt.Errorf("client %s has no relay that runs", w.name)
}

// processorTimes are the processor times of a process's threads since their start.
type processorTimes struct {
	sum time.Duration
	// byName maps names of threads to their times.
	byName map[string]time.Duration
}

// busiest returns the threads of a process with the most time, in words. busiest multiplies times by
// factor.
func busiest(before, after processorTimes, factor float64) string {
	spent := func(name string) time.Duration { return after.byName[name] - before.byName[name] }
	var names []string
	for name := range after.byName {
		if spent(name) > 0 {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int { return int(spent(b) - spent(a)) })
	text := ""
	for _, name := range names[:min(len(names), 3)] {
		text += fmt.Sprintf(", %s %.2f ms", name, factor*float64(spent(name).Microseconds())/1e3)
	}
	return strings.TrimPrefix(text, ", ")
}

// processorTime reads /proc/PID/task/*/schedstat.
func processorTime(pid int) (t processorTimes, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		return t, fmt.Errorf("process %d has no /proc/PID/task/*/schedstat: %w", pid, errors.Join(err, os.ErrNotExist))
	}
	t.byName = map[string]time.Duration{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // the thread has ended
		}
		f := strings.Fields(string(text))
		if err != nil || len(f) == 0 {
			return t, fmt.Errorf("%s: %q: %w", file, text, err)
		}
		n, err := strconv.ParseInt(f[0], 10, 64)
		if err != nil {
			return t, fmt.Errorf("%s: %w", file, err)
		}
		t.sum += time.Duration(n)
		name, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "comm")) // fails if the thread ends now
		t.byName[strings.TrimSpace(string(name))] += time.Duration(n)
	}
	return t, nil
}

func (r *run) firstCopy() error {
	for _, route := range r.Routes {
		if err := r.first(route); err != nil {
			return err
		}
	}
	if len(r.pairs) == 0 {
		r.miss("first-copy", "self-test after a boot", "no pair of GPUs was tested")
		return nil
	}
	var verdicts []string
	for _, p := range r.pairs {
		verdicts = append(verdicts, fmt.Sprintf("%s with %s %s", p.GPU.BusID, p.Server.BusID, p.Verdict))
	}
	r.row(Row{
		Table: "first-copy", What: "self-test after a boot, a pair of GPUs", Unit: milliseconds,
		Value: float64(r.testing.Milliseconds()) / float64(len(r.pairs)), Note: "before all this: " +
			strings.Join(verdicts, ", "),
	})
	return nil
}

// first measures the first message. first restarts clients and relays several times, because CUDA
// takes a different time at every start.
func (r *run) first(route string) (err error) {
	s, err := r.stage(route, r.lanes, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	lanes, err := r.host.TwoClients()
	if err != nil {
		return err
	}
	if route == staged {
		// A software device, unlike a NIC, makes its contexts for the first connection.
		if err := r.wake(s, lanes); err != nil {
			return err
		}
	}
	rounds := 5
	if r.Quick || r.host.Simulated {
		rounds = 3
	}
	var ours, theirs []float64
	for i := range rounds {
		r.progress("first message, route %s, %d of %d", route, i+1, rounds)
		o, t, err := r.firstOnce(s, lanes)
		if err != nil {
			return err
		}
		ours, theirs = append(ours, o), append(theirs, t...)
	}
	name := fmt.Sprintf("CUDA's own start in a client, the median of %d, for route %s", len(theirs), route)
	start := median(theirs)
	r.report.Baselines = append(r.report.Baselines, Baseline{Name: name, Value: start, Unit: milliseconds})
	row := Row{Table: "first-copy", Route: route, Transport: transportOf(route), Size: 8, Depth: 1, Unit: milliseconds,
		Note: fmt.Sprintf("the median of %d", rounds)}
	row.What, row.Value, row.Baseline = "attach, connect and first message, relay's context included", median(ours), name
	r.row(row)
	row.What, row.Value, row.Baseline, row.Asked = "the same, above one start of CUDA", max(0, median(ours)-start), "",
		atMost(60)
	r.row(row)
	return nil
}

// firstOnce returns times in ms: of the first of two new clients from attaching to the end of the
// first messages, and of the start of CUDA in both.
func (r *run) firstOnce(s *stage, lanes [2]planner.Lane) (ours float64, theirs []float64, err error) {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	var pair [2]*worker
	for i, lane := range lanes {
		w, err := s.client(lane, nil)
		if err != nil {
			return 0, nil, err
		}
		pair[i] = w
		attached, err := w.do(order{Do: doAttach, Socket: r.host.Socket(w.generation), Bytes: 2 << 20})
		if err != nil {
			return 0, nil, err
		}
		if theirs = append(theirs, ms(attached.CUDA)); i == 0 {
			ours = ms(attached.Ours)
		}
	}
	start := time.Now()
	if err := s.connectBoth(pair[0], pair[1]); err != nil {
		return 0, nil, err
	}
	if _, err := together(map[*worker]order{pair[0]: {Do: doFirst, Tag: 1}, pair[1]: {Do: doFirst, Tag: 1}}); err != nil {
		return 0, nil, err
	}
	return ours + ms(time.Since(start)), theirs, s.end()
}

// median returns the middle of a list, or the mean of the two middle values.
func median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return (list[(len(list)-1)/2] + list[len(list)/2]) / 2
}

// wake makes clients use the software devices, and ends the clients.
func (r *run) wake(s *stage, lanes [2]planner.Lane) error {
	var pair [2]*worker
	for i, lane := range lanes {
		var err error
		if pair[i], err = s.startAttached(lane, nil, 2<<20); err != nil {
			return err
		}
	}
	for i, w := range pair {
		if err := s.connect(w, pair[1-i]); err != nil {
			return err
		}
	}
	return s.end()
}

// free returns the free memory of the host's GPUs in bytes, by PCI address, after this process has
// made its contexts.
func (r *run) free() (map[string]uint64, error) {
	left := map[string]uint64{}
	for range 2 { // the first round makes contexts
		for _, g := range r.host.Topology.GPUs {
			found, err := r.copier.Do(measure.Job{Kind: measure.Free, From: g.BusID})
			if err != nil {
				return nil, err
			}
			left[g.BusID] = found.Bytes
		}
	}
	return left, nil
}

// stableFree returns the free memory of the GPUs once the values are stable: the driver frees the
// contexts of a process a little later than the process ends.
func (r *run) stableFree() (map[string]uint64, error) {
	const quiet, patience = time.Second, 30 * time.Second
	last, err := r.free()
	for begun, since := time.Now(), time.Now(); err == nil && time.Since(since) < quiet && time.Since(begun) < patience; {
		time.Sleep(quiet / 10)
		var left map[string]uint64
		if left, err = r.free(); !maps.Equal(left, last) {
			last, since = left, time.Now()
		}
	}
	return last, err
}

// memory measures the GPU memory of a relay with a connection on route staged. One client connects
// with itself: with two clients on a host of two GPUs, the GPU of one client would be the server
// of the other.
func (r *run) memory() (err error) {
	r.progress("memory of GPUs")
	s, err := r.stage(staged, r.lanes, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	lanes, err := r.host.TwoClients()
	if err != nil {
		return err
	}
	// Exclude the memory of software devices.
	if err := r.wake(s, lanes); err != nil {
		return err
	}
	const bytes = 2 << 20
	w, err := s.client(lanes[0], nil)
	if err != nil {
		return err
	}
	if _, err := w.do(order{Do: doContext}); err != nil {
		return err
	}
	before, err := r.stableFree()
	if err != nil {
		return err
	}
	if _, err := w.do(order{Do: doAttach, Socket: r.host.Socket(w.generation), Bytes: bytes}); err != nil {
		return err
	}
	if err := s.connect(w, w); err != nil {
		return err
	}
	if _, err := w.do(order{Do: doFirst, Tag: 1}); err != nil {
		return err
	}
	after, err := r.stableFree()
	if err != nil {
		return err
	}
	info, err := control.Inspect(r.host.Layout, w.generation.ID)
	if err != nil {
		return err
	}
	if info.Report == nil {
		return fmt.Errorf("the relay does not report its staging: %s", info.NoReport)
	}
	const mib = 1 << 20
	staging := map[string]float64{} // in MiB
	for _, s := range info.Report.Staging {
		staging[s.GPU] += float64(s.Bytes) / mib
	}
	if r.host.Simulated {
		// Previous measurements have used the memory, so the figures would be wrong.
		for _, what := range []string{"of the client's own GPU", "of other GPUs"} {
			r.miss("memory", what, "the simulator counts the GPU memory of a single process only")
		}
		return nil
	}
	for _, g := range r.host.Topology.GPUs {
		took := (float64(before[g.BusID]) - float64(after[g.BusID])) / mib
		row := Row{Table: "memory", State: "GPU " + strconv.Itoa(g.Index), Unit: miB}
		switch {
		case g.BusID == w.gpu.BusID:
			row.What, row.Value, row.Asked = "of the client's own GPU, by its relay", took-2*bytes/mib, atMost(270)
			row.Note = fmt.Sprintf("%.0f MiB less %d MiB that the client made itself", took, 2*bytes/mib)
		case slices.Contains(w.lane.Servers, g.BusID):
			row.What, row.Value, row.Asked = "of a server GPU, besides staging", took-staging[g.BusID], atMost(0)
			row.Note = fmt.Sprintf("%.0f MiB, of which %.0f are staging", took, staging[g.BusID])
		default:
			row.What, row.Value, row.Asked = "of a GPU that is not the container's", took, atMost(0)
		}
		if row.Value < 0 || *row.Asked.Max > 0 && row.Value == 0 {
			// A relay's context uses memory, and a relay frees no memory.
			r.miss("memory", row.What, fmt.Sprintf("other processes released memory of %s meanwhile: it changed by %.0f MiB "+
				"in all",
				row.State, took))
			continue
		}
		r.row(row)
	}
	return r.secondContext(w.lane.Servers[0], after)
}

// secondContext measures the memory of a context like a relay's on a server GPU. Relays have no
// context there; table busy shows the effect of a context.
func (r *run) secondContext(server string, before map[string]uint64) (err error) {
	m, err := r.host.StartMeasuring(r.ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if _, err := m.Do(measure.Job{Kind: measure.Free, From: server}); err != nil {
		return err
	}
	after, err := r.stableFree()
	if err != nil {
		return err
	}
	const mib = 1 << 20
	r.row(Row{Table: "memory", What: "of a server GPU, a second context, which no relay makes", Unit: miB,
		Value: (float64(before[server]) - float64(after[server])) / mib})
	return nil
}
