package planner

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
)

// Explain returns sentences with the reasons for the lane of a GPU. name is an index, a UUID, a
// PCI address, or an index as in "gpu3".
func (p *Plan) Explain(h *topo.Host, name string) ([]string, error) {
	gpu, err := p.GPU(name)
	if err != nil {
		index, ok := strings.CutPrefix(strings.ToLower(name), "gpu")
		byIndex, unknown := p.GPU(index)
		if _, notNumber := strconv.Atoi(index); !ok || notNumber != nil || unknown != nil {
			return nil, err
		}
		gpu = byIndex
	}
	lane, err := p.Lane(gpu.BusID)
	if err != nil {
		return nil, err
	}
	e := explanation{h: h, plan: p, gpu: gpu, lane: lane}
	e.who()
	if lane.Role == RoleRefused {
		return e.sentences, nil
	}
	e.paths()
	e.add("Its lane: %s.", lane.Reason)
	e.legs()
	if err := e.rates(); err != nil {
		return nil, err
	}
	e.others()
	return e.sentences, nil
}

type explanation struct {
	h         *topo.Host
	plan      *Plan
	gpu       topo.GPU
	lane      Lane
	sentences []string
}

func (e *explanation) add(format string, args ...any) {
	e.sentences = append(e.sentences, fmt.Sprintf(format, args...))
}

func (e *explanation) who() {
	what := e.gpu.BusID
	if e.gpu.Name != "" {
		what += ", " + e.gpu.Name
	}
	who := fmt.Sprintf("GPU %d (%s) is %s", e.gpu.Index, what, e.lane.Role)
	switch e.lane.Role {
	case RoleNear:
		e.add("%s: a NIC may read and write its memory directly.", who)
	case RoleRefused:
		e.add("%s, so it has no lane and serves no lane: %s.", who, e.lane.Reason)
	default:
		e.add("%s: no NIC that can carry a lane is within gdr.max_path.", who)
	}
}

// paths names the paths from the GPU to the NICs.
func (e *explanation) paths() {
	var paths, nowhere, useless []string
	of := topo.Owners(e.plan.NICs)
	for i, pair := range graph.ToNICs(e.h, e.gpu, e.plan.NICs) {
		nic := e.plan.NICs[i]
		if of[i] != i && !slices.Contains(e.lane.NICs, nic.Name) {
			continue // the list has the NIC that owns the port
		}
		switch {
		case nic.Refusal() != "":
			useless = append(useless, fmt.Sprintf("%s (%s)", nic.Name, nic.Refusal()))
		case !nic.Active():
			useless = append(useless, fmt.Sprintf("%s (no port is active: %s)", nic.Name, states(nic)))
		case pair.Type == topo.DIS:
			nowhere = append(nowhere, nic.Name)
		case e.h.Matrix != nil:
			paths = append(paths, fmt.Sprintf("%s (%s)", nic.Name, describe(pair.Path)))
		default:
			paths = append(paths, fmt.Sprintf("%s by %s (%s)", nic.Name, pair.Reason, describe(pair.Path)))
		}
	}
	if len(paths) > 0 {
		e.add("Without a relay it reaches %s.", some(paths))
	}
	if len(nowhere) > 0 {
		e.add("No path leads to %s.", some(nowhere))
	}
	if len(useless) > 0 && len(e.lane.NICs) > 0 { // otherwise the lane's reason names the devices
		e.add("No lane can use %s.", some(useless))
	}
}

// maxListed is the maximum number of devices in a sentence.
const maxListed = 8

// some joins the names of devices, up to maxListed names.
func some(names []string) string {
	if len(names) <= maxListed {
		return list(names)
	}
	return list(append(slices.Clone(names[:maxListed]), fmt.Sprintf("%d more", len(names)-maxListed)))
}

// legs are the two parts of a relayed lane.
func (e *explanation) legs() {
	if !e.lane.Relay {
		return
	}
	sentence := fmt.Sprintf("The relay copies between it and %s (%s)", e.indices(e.lane.Servers), describe(*e.lane.Copy))
	if e.lane.Network != nil {
		verbs := "reads and writes"
		if len(e.lane.NICs) > 1 {
			verbs = "read and write"
		}
		sentence += fmt.Sprintf(", and %s %s there (%s)", list(e.lane.NICs), verbs, describe(*e.lane.Network))
	}
	e.add("%s; unless copies use NVLink, each byte crosses the link of a server GPU twice.", sentence)
}

func (e *explanation) rates() error {
	all, err := e.plan.Estimate(e.h)
	if errors.Is(err, ErrNoBandwidths) {
		e.add("No estimate: the source does not state the bandwidth of every link.")
		return nil
	}
	if err != nil {
		return err
	}
	for _, g := range all.GPUs {
		if g.GPU != e.gpu.BusID {
			continue
		}
		busy := fmt.Sprintf("While all GPUs are busy it carries %s in each direction", gbs(g.Relay))
		if g.Limit != "" {
			busy += ", because " + g.Limit + " is full"
		}
		e.add("%s; with NCCL's defaults it would be %s, with GPUDirect RDMA off everywhere %s.", busy, gbs(g.NCCL),
			gbs(g.HostMemory))
		if all.PXN {
			e.add("With PXN, where the GPUs share a container, NCCL would send %s and receive %s, all GPUs busy; as planned "+
				"it sends %s and receives %s.",
				gbs(g.Send.PXN), gbs(g.Receive.PXN), gbs(g.Send.Relay), gbs(g.Receive.Relay))
		}
		e.add("Alone it carries %s; with NCCL's defaults %s, with GPUDirect RDMA off everywhere %s.", gbs(g.Alone.Relay),
			gbs(g.Alone.NCCL), gbs(g.Alone.HostMemory))
	}
	return nil
}

// others names the GPUs that share a NIC with the lane, and the GPUs that this GPU serves.
func (e *explanation) others() {
	with := map[string][]string{} // NICs by the GPUs that share the NICs
	for _, nic := range e.lane.NICs {
		var sharing []string
		for _, l := range e.plan.Lanes {
			if l.GPU != e.gpu.BusID && slices.Contains(l.NICs, nic) {
				sharing = append(sharing, l.GPU)
			}
		}
		if len(sharing) > 0 {
			gpus := e.indices(sharing)
			with[gpus] = append(with[gpus], nic)
		}
	}
	if len(with) > maxListed {
		e.add("It shares %d of its NICs with other GPUs.", len(with))
		clear(with)
	}
	for _, gpus := range slices.SortedFunc(maps.Keys(with), func(a, b string) int {
		return slices.Index(e.lane.NICs, with[a][0]) - slices.Index(e.lane.NICs, with[b][0])
	}) {
		e.add("It shares %s with %s.", some(with[gpus]), gpus)
	}
	var served []string
	for _, l := range e.plan.Lanes {
		if slices.Contains(l.Servers, e.gpu.BusID) {
			served = append(served, l.GPU)
		}
	}
	if len(served) > 0 {
		e.add("It serves %s.", e.indices(served))
	}
}

// indices returns the indices of GPUs as words.
func (e *explanation) indices(busIDs []string) string {
	var numbers []int
	for _, id := range busIDs {
		if g, err := e.plan.GPU(id); err == nil {
			numbers = append(numbers, g.Index)
		}
	}
	return gpuNames(numbers)
}

// list joins words as a sentence does: "a", "a and b", "a, b and c".
func list(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " and " + words[last]
}
