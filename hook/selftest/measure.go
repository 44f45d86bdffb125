package selftest

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// MeasureLoops measures the loopbacks of a plan's NICs with the RDMA test. failed names every NIC
// and memory without a rate, with the reason. After an error the returned rates are valid but
// incomplete.
func (t *Tester) MeasureLoops(ctx context.Context, plan *planner.Plan, loopbacks []planner.Loopback,
	verbs *launch.Verbs) (loops []topo.MeasuredLoop, failed []string, err error) {
	job := launch.RDMAJob{Verbs: verbs}
	for _, l := range loopbacks {
		nic := launch.RDMANIC{Name: l.NIC}
		for _, busID := range l.GPUs {
			g, err := plan.GPU(busID)
			if err != nil {
				return nil, nil, err
			}
			nic.GPUs = append(nic.GPUs, lanes.Identity(g))
		}
		job.NICs = append(job.NICs, nic)
	}
	if len(job.NICs) == 0 {
		return nil, nil, nil
	}
	var results []launch.RDMAResult
	err = t.RDMA(ctx, job, func(r launch.RDMAResult) { results = append(results, r) })
	loops, failed = measuredLoops(results)
	return loops, failed, err
}

// measuredLoops converts results of the RDMA test to rates of the model: the fastest rate if a
// GPU's memory has several registrations. failed lists the results without a rate, unless another
// registration of the same memory has one.
func measuredLoops(results []launch.RDMAResult) (loops []topo.MeasuredLoop, failed []string) {
	reasons := map[topo.MeasuredLoop]string{} // by NIC and GPU
	var order []topo.MeasuredLoop
	for _, r := range results {
		if r.Triple != nil {
			continue
		}
		key, name := topo.MeasuredLoop{NIC: r.NIC}, r.NIC+" and host memory"
		if r.GPU != nil {
			key.GPU, name = r.GPU.BusID, fmt.Sprintf("%s and memory of GPU %d", r.NIC, r.GPU.Index)
		}
		l := key
		l.Out, l.In = r.Read, r.Write
		if r.Untested != "" || r.Failed != "" || r.Wrong > 0 || !(l.Rate() > 0) {
			reason := cmp.Or(r.Untested, r.Failed, "wrong bytes arrived; run peerlane doctor --rdma")
			if _, known := reasons[key]; !known {
				reasons[key], order = name+": "+reason, append(order, key)
			}
			continue
		}
		switch at := indexLoop(loops, key); {
		case at < 0:
			loops = append(loops, l)
		case l.Rate() > loops[at].Rate():
			loops[at] = l
		}
	}
	for _, key := range order {
		if indexLoop(loops, key) < 0 {
			failed = append(failed, reasons[key])
		}
	}
	return loops, failed
}

// indexLoop returns the index of the rates of a NIC and a memory; -1 if there are none.
func indexLoop(loops []topo.MeasuredLoop, key topo.MeasuredLoop) int {
	return slices.IndexFunc(loops, func(l topo.MeasuredLoop) bool { return l.NIC == key.NIC && l.GPU == key.GPU })
}

// MeasuredPairs converts self-tests to rates of the model. It skips pairs that corrupted data,
// because no lane stages on them.
func MeasuredPairs(pairs []launch.Pair) *topo.Measured {
	m := new(topo.Measured)
	memory := map[string]int{}
	for _, p := range pairs {
		if p.Verdict != launch.VerdictGood && p.Verdict != launch.VerdictSlow {
			continue
		}
		if p.Push.Client > 0 && p.Pull.Client > 0 {
			m.Copies = append(m.Copies, topo.MeasuredCopy{GPU: p.GPU.BusID, Peer: p.Server.BusID, Out: p.Push.Client,
				In: p.Pull.Client})
		}
		if p.Push.Bounce > 0 && p.Pull.Bounce > 0 {
			at, known := memory[p.GPU.BusID]
			if !known {
				at = len(m.Memory)
				memory[p.GPU.BusID] = at
				m.Memory = append(m.Memory, topo.MeasuredHost{GPU: p.GPU.BusID})
			}
			// Keep the best of several rates: disturbances only lower a rate.
			m.Memory[at].Out, m.Memory[at].In = max(m.Memory[at].Out, p.Push.Bounce), max(m.Memory[at].In, p.Pull.Bounce)
		}
	}
	return m
}
