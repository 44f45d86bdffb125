package doctor

import (
	"context"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/planner"
)

// RDMAJob returns the job of an active RDMA test on this host. It tests the NICs of each lane with
// host memory, and with memory of the lane's server GPUs or, for a direct lane, of its own GPU.
func (h *Host) RDMAJob() (launch.RDMAJob, error) {
	p, err := h.readPlan()
	if err != nil {
		return launch.RDMAJob{}, err
	}
	c, err := h.configuration()
	if err != nil {
		return launch.RDMAJob{}, err
	}
	job := launch.RDMAJob{Verbs: c.Verbs.Launch()}
	if job.Triples, err = selftest.PlannedTriples(p, c); err != nil {
		return launch.RDMAJob{}, err
	}
	for _, n := range p.NICs {
		nic := launch.RDMANIC{Name: n.Name}
		for _, l := range p.Lanes {
			if !slices.Contains(l.NICs, n.Name) {
				continue
			}
			holders := l.Servers
			if l.Kind == planner.KindDirect {
				holders = []string{l.GPU}
			}
			for _, busID := range holders {
				g, err := p.GPU(busID)
				if err != nil {
					return launch.RDMAJob{}, err
				}
				gpu := launch.GPU{UUID: g.UUID, BusID: g.BusID, Index: g.Index}
				if !slices.Contains(nic.GPUs, gpu) {
					nic.GPUs = append(nic.GPUs, gpu)
				}
			}
		}
		if slices.ContainsFunc(p.Lanes, func(l planner.Lane) bool { return slices.Contains(l.NICs, n.Name) }) {
			job.NICs = append(job.NICs, nic)
		}
	}
	return job, nil
}

// slow is the fraction of the estimate below which a rate is a finding. A NIC in loopback uses its
// PCIe slot in both directions.
const slow = 0.5

// RDMA returns the check of the results of an active test. failed is the error that ended the
// test.
func RDMA(results []launch.RDMAResult, failed error) Check {
	return Check{
		Name: "rdma", subject: "NICs",
		source: "an active test: two queue pairs of the NIC, connected with each other by the GID and partition key that " +
			"relays use (verbs in config.toml), write and read the memory; each byte is compared",
		why:    "relays do the same; what fails here fails between hosts, too, where it looks like a fault of the network",
		remedy: "read the reason; docs/network.md has what RDMA needs",
		run:    func(_ context.Context, h *Host) []Finding { return h.rdma(results, failed) },
	}
}

func (h *Host) rdma(results []launch.RDMAResult, failed error) []Finding {
	var list []Finding
	for _, r := range results {
		if r.Triple != nil {
			list = append(list, tripleFinding(*r.Triple))
			continue
		}
		list = append(list, h.rdmaFinding(r, results))
	}
	if failed != nil {
		list = append(list, unknown("host", "%v", failed))
	}
	if len(list) == 0 {
		list = append(list, ok("host", "no lane has a NIC: there is nothing to test"))
	}
	return list
}

// tripleFinding returns the finding for a GPU, the GPU with its slots, and a NIC.
func tripleFinding(t launch.Triple) Finding {
	on := t.TripleName.String()
	switch t.Verdict {
	case launch.VerdictGood:
		return ok(on, "%d rounds each way are right: %d bytes by %s", t.Rounds, t.Bytes,
			t.Memory).touching([]int{t.GPU.Index})
	case launch.VerdictUntested:
		return unknown(on, "it could not be tested: %s",
			t.Reason).remedy("remove the cause; until then relays bounce data of these through the host's memory").
			touching([]int{t.GPU.Index})
	}
	f := failure(on, "%s", t.Reason)
	f.Why = "the NIC reports success and data arrives damaged; relays bounce data of these through the host's memory"
	return f.remedy("on bare metal boot with iommu=pt and switch ACS redirection off (peerlane doctor names the " +
		"ports); update the NIC's firmware and the driver").touching([]int{t.GPU.Index})
}

func (h *Host) rdmaFinding(r launch.RDMAResult, all []launch.RDMAResult) Finding {
	f := h.rdmaJudged(r, all)
	f.Lanes = h.lanesOfNIC(r.NIC)
	return f
}

func (h *Host) rdmaJudged(r launch.RDMAResult, all []launch.RDMAResult) Finding {
	on := r.NIC + " and host memory"
	if r.GPU != nil {
		on = fmt.Sprintf("%s and memory of GPU %d by %s", r.NIC, r.GPU.Index, r.Memory)
	}
	switch {
	case r.Untested != "":
		return unknown(on, "%s", r.Untested)
	case r.Wrong > 0:
		f := failure(on, "%s by %s: %d of %d bytes are wrong", r.Tried, r.Way, r.Wrong, r.Bytes)
		f.Why = "the NIC reports success and data arrives damaged, in every job that goes this way"
		return f.remedy(
			"on bare metal boot with iommu=pt and switch ACS redirection off (peerlane doctor names the ports); until then " +
				"plan.exclude.pairs in config.toml keeps lanes from this pair")
	case r.Failed != "" && r.GPU != nil && r.Tried == "register":
		return h.unregistered(on, r, all)
	case r.Failed != "" && r.Way != "":
		return failure(on, "%s by %s: %s", r.Tried, r.Way, r.Failed)
	case r.Failed != "":
		return failure(on, "%s: %s", r.Tried, r.Failed)
	}
	found := fmt.Sprintf("%d bytes written and read by %s are right; %.3g GB/s written, %.3g read", r.Bytes, r.Way,
		r.Write, r.Read)
	expected := h.expected(r)
	if slower := min(r.Write, r.Read); expected > 0 && slower < slow*expected {
		f := warning(on, "%s; %.3g GB/s are estimated", found, expected)
		f.Why = "the way between NIC and memory is slower than what it is made of: every lane over it is"
		return f.remedy(
			"see the findings on pcie-link, iommu and ACS; peerlane topo shows the way, and rates while nothing else uses it " +
				"are what counts")
	}
	return ok(on, "%s", found)
}

// unregistered returns the finding for GPU memory that one of two methods cannot register; if the
// other method works, it is a note.
func (h *Host) unregistered(on string, r launch.RDMAResult, all []launch.RDMAResult) Finding {
	other := slices.ContainsFunc(all, func(o launch.RDMAResult) bool {
		return o.NIC == r.NIC && o.GPU != nil && *o.GPU == *r.GPU && o.Memory != r.Memory && o.Failed == "" &&
			o.Untested == "" && o.Wrong == 0
	})
	if other {
		return ok(on, "not this way (%s); the other one works", r.Failed)
	}
	f := warning(on, "register: %s", r.Failed)
	f.Why = "without DMA-BUF and without nvidia-peermem the NIC does not reach the GPU's memory: data goes through the " +
		"CPU's, at a part of the rate"
	return f.remedy(
		"DMA-BUF: NVIDIA's open kernel modules, Linux 5.12 and rdma-core 34 or newer; else modprobe nvidia-peermem")
}

// expected returns the estimated rate between NIC and memory in GB/s in one direction; 0 without
// an estimate, for example for software RDMA.
func (h *Host) expected(r launch.RDMAResult) float64 {
	t, err := h.topology()
	if err != nil {
		return 0
	}
	i := slices.IndexFunc(t.NICs, func(n topo.NIC) bool { return n.Name == r.NIC })
	if i < 0 || t.NICs[i].Software {
		return 0
	}
	estimate := t.NICs[i].Link
	if rate := t.NICs[i].RateGbps() / 8; rate > 0 && (estimate == 0 || rate < estimate) {
		estimate = rate
	}
	if r.GPU == nil {
		return estimate
	}
	for p := range graph.Each(t, topo.RulesNCCL) {
		if p.From == r.GPU.BusID && p.To == r.NIC {
			return min(estimate, p.Bandwidth)
		}
	}
	return estimate
}
