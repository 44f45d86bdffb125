package bench

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
)

// Values of Options.Busy.
const (
	BusyClient = "client"
	BusyServer = "server"
	BusyBoth   = "both"
)

// loads are the loads of GPUs. slower is the limit for the slowdown of small copies.
var loads = []struct {
	kind, words string
	slower      float64
}{
	{measure.LoadSMs, "SMs held", 2},
	{measure.LoadMemory, "memory-bound", 3},
}

// leg is a copy of a relay, which the client's GPU issues.
type leg struct{ what, from, to string }

// busy measures a relay's copies while the kernels of another process keep GPUs busy, and compares
// the results with the same copies on idle GPUs and with raw copies in the same state. The
// client's GPU issues and executes the raw copies, like the copies of the relay: a copy waits for
// a time slice of the executing GPU. For copies out of a slot, a second raw copy runs on the
// server's GPU, which shows the effect of a relay's context there.
func (r *run) busy() (err error) {
	client, server, _, _, err := r.configurePlan()
	if err != nil {
		return err
	}
	occupied := map[string][]string{BusyClient: {client}, BusyServer: {server}, BusyBoth: {client, server}}
	occupants := map[string]*testbed.Measuring{}
	defer func() {
		for _, m := range occupants {
			err = errors.Join(err, m.Close())
		}
	}()
	for _, busID := range occupied[BusyBoth] {
		if occupants[busID], err = r.host.StartMeasuring(r.ctx); err != nil {
			return err
		}
	}
	legs := []leg{{"client to slot", client, server}, {"slot to client", server, client}}
	idle := r.busyState("idle")
	for _, w := range legs {
		if err := idle.measure(w, nil, 0); err != nil {
			return err
		}
	}
	for _, load := range loads {
		for _, who := range r.busyChoices() {
			state := r.busyState(fmt.Sprintf("%s: %s GPU", load.words, who))
			if who == BusyBoth {
				state.name = load.words + ": both GPUs"
			}
			started := occupied[who]
			for _, busID := range started {
				if _, err := occupants[busID].Do(measure.Job{Kind: measure.Occupy, From: busID, Load: load.kind}); err != nil {
					return err // closing the occupants ends the kernels
				}
			}
			for _, w := range legs {
				err = errors.Join(err, state.measure(w, idle, load.slower))
			}
			for _, busID := range started {
				_, failed := occupants[busID].Do(measure.Job{Kind: measure.Vacate, From: busID})
				err = errors.Join(err, failed)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *run) busyChoices() []string {
	if len(r.Busy) > 0 {
		return r.Busy
	}
	return []string{BusyClient, BusyServer, BusyBoth}
}

// busyState is a state of the GPUs with its measurements by way: small copies in µs, large copies
// in GB/s.
type busyState struct {
	run   *run
	name  string
	small map[string]*measure.Times
	large map[string]float64
}

// largeCopy returns the size of the copies whose rate is measured. The processor executes
// simulated copies, and would be busy with copies of 16 MiB for most of a run.
func (r *run) largeCopy() uint64 {
	if r.host.Simulated {
		return 1 << 20
	}
	return 16 << 20
}

func (r *run) busyState(name string) *busyState {
	return &busyState{r, name, map[string]*measure.Times{}, map[string]float64{}}
}

// measure measures a leg in this state and, unless idle is nil, adds the rows that compare the
// state with the idle state.
func (s *busyState) measure(w leg, idle *busyState, slower float64) error {
	const small = 8
	r := s.run
	large := r.largeCopy()
	r.progress("%s, %s", s.name, w.what)
	client := w.from
	if w.what == "slot to client" {
		client = w.to
	}
	job := r.legJob(w.from, w.to, client, small, 1)
	job.Kind = measure.Queue
	found, err := r.do(job)
	if err != nil {
		return err
	}
	s.small[w.what] = found.Times
	job.Kind, job.Size, job.Depth = measure.Leg, large, 16
	if found, err = r.do(job); err != nil {
		return err
	}
	s.large[w.what] = found.GBs
	if idle == nil {
		return nil
	}
	local, err := r.do(measure.Job{Kind: BaselineLocal, From: w.from, To: w.to, Issuer: client, Size: small, Mapped: true})
	if err != nil {
		return err
	}
	raw, err := r.do(measure.Job{Kind: BaselineRaw, From: w.from, To: w.to, Issuer: client, Size: large, Mapped: true})
	if err != nil {
		return err
	}
	// compared adds a row with its own baseline, if the baselines of this kind are requested.
	compared := func(row Row, kind, of, state string, value float64) {
		row.Table, row.State = "busy", s.name
		if kind == "" || r.wants(kind) {
			row.Baseline = r.compareWith(fmt.Sprintf("%s, %s, %s, %s", of, sizeText(row.Size), w.what, state), value, row.Unit)
		}
		r.row(row)
	}
	times, before := s.small[w.what], idle.small[w.what]
	row := Row{Size: small, Depth: 1, Unit: microseconds, Times: times}
	for _, p := range []struct {
		name             string
		now, idle, local float64
		asked            *Bound
	}{
		{"p50", times.P50, before.P50, local.Times.P50, nil},
		{"p99", times.P99, before.P99, local.Times.P99, atMost(slower)},
	} {
		row.Value, row.What = p.now, w.what+", "+p.name+" of idle"
		row.Asked = p.asked
		compared(row, "", "a relay's copy, "+p.name, "idle", p.idle)
		row.What, row.Asked = w.what+", "+p.name+" of copy and synchronise", nil
		compared(row, BaselineLocal, "copy and synchronise, "+p.name, s.name, p.local)
	}
	row = Row{Size: large, Depth: 16, Unit: GBs, Value: s.large[w.what]}
	row.What, row.Asked = w.what+", rate of raw by the client's GPU", atLeast(0.9)
	compared(row, BaselineRaw, "raw, executed by the client's GPU", s.name, raw.GBs)
	if w.from != client {
		peer, err := r.do(measure.Job{Kind: BaselineRaw, From: w.from, To: w.to, Issuer: client, Size: large})
		if err != nil {
			return err
		}
		row.What, row.Asked = w.what+", rate of raw by the server's GPU", nil
		compared(row, BaselineRaw, "raw, executed by the server's GPU", s.name, peer.GBs)
	}
	row.What, row.Asked = w.what+", rate of idle", nil
	compared(row, "", "a relay's copy, rate", "idle", idle.large[w.what])
	return nil
}

// bystander measures the cost of a relay for the owner of a server GPU: the drop in the rate of
// the owner's kernels while a relay copies to and from its slots there at full rate. Only a
// relay's queue copies. A whole route would add work on that GPU: the context of the software
// device and, on a host with two GPUs, the relay of the other client.
func (r *run) bystander() (err error) {
	size := r.largeCopy()
	client, server, _, _, err := r.configurePlan()
	if err != nil {
		return err
	}
	owner, err := r.host.StartMeasuring(r.ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, owner.Close()) }()
	relay, err := r.host.StartMeasuring(r.ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, relay.Close()) }()
	for _, load := range loads {
		job := measure.Job{Kind: measure.Work, From: server, Load: load.kind, Duration: r.Duration}
		alone, err := works(owner, job)
		if err != nil {
			return err
		}
		for _, w := range []leg{{"client to slot", client, server}, {"slot to client", server, client}} {
			r.progress("bystander, %s, %s", load.words, w.what)
			leg := r.legJob(w.from, w.to, client, size, 16)
			leg.Duration = 5 * r.Duration
			type answer struct {
				measure.Result
				err error
			}
			copied := make(chan answer, 1)
			go func() {
				found, err := relay.Do(leg)
				copied <- answer{found, err}
			}()
			time.Sleep(r.Duration)
			beside, err := works(owner, job)
			copies := <-copied
			if err := errors.Join(err, copies.err); err != nil {
				return err
			}
			state := w.what + ", " + load.words
			row := Row{Table: "bystander", Size: size, Depth: 16, State: state, Unit: perSecond, Value: beside.PerSecond}
			row.Note = fmt.Sprintf("relay at %.1f GB/s", copies.GBs)
			row.What = "rounds of the owner's kernel, of those without a relay"
			row.Baseline = r.compareWith("rounds without a relay, "+state, alone.PerSecond, perSecond)
			if load.kind == measure.LoadMemory {
				share := min(copies.GBs/alone.GBs, 0.99)
				r.row(row)
				row.Note += fmt.Sprintf(", through a memory that gives the kernel %.0f GB/s alone", alone.GBs)
				row.What = "the same, of those less the relay's share of memory bandwidth"
				row.Baseline = r.compareWith("rounds without a relay less its share, "+state, alone.PerSecond*(1-share), perSecond)
			}
			row.Asked = atLeast(0.97)
			r.row(row)
		}
	}
	return nil
}

// works returns the median of three results.
func works(m *testbed.Measuring, j measure.Job) (measure.Result, error) {
	var all []measure.Result
	for range 3 {
		found, err := m.Do(j)
		if err != nil {
			return found, err
		}
		all = append(all, found)
	}
	slices.SortFunc(all, func(a, b measure.Result) int { return int(a.PerSecond - b.PerSecond) })
	return all[1], nil
}
