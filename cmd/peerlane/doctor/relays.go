package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

var relayChecks = []Check{
	{
		Name: "relays", subject: "relays", source: "the state of each container's relay (peerlane relay list), and " +
			"whether those that are ready answer",
		why:    "a container's lane needs a running relay; without a supervisor a dead relay does not restart",
		remedy: "peerlane relay inspect CONTAINER shows its log",
		run:    checkRelays,
	},
	{
		Name: "leftovers", subject: "relays", source: "generations, sockets and uids whose container has ended, and " +
			"generations of another machine, in var/lib/peerlane and run/peerlane",
		why:    "remains of a killed supervisor occupy a uid, a socket, and possibly GPU memory",
		remedy: "peerlane relay gc",
		run:    checkLeftovers,
	},
	{
		Name: "staging", subject: "relays", source: "the staging of all lanes on each GPU (peerlane plan), the GPU's " +
			"limit (staging.limit), and its free memory (nvmlDeviceGetMemoryInfo)",
		why: "without room on its server GPUs a relay uses smaller slots, another server, or the CPU's memory",
		remedy: "free memory on that GPU; or relay.reserve = \"start\", so that relays allocate slots before jobs " +
			"fill the GPU; " +
			"or lower relay.slots and relay.slot_size in config.toml",
		run: checkStaging,
	},
}

// lanesOf returns the lanes of a generation.
func lanesOf(g generation.Info) []int {
	lanes := []int{}
	for _, l := range g.Config.Lanes {
		lanes = append(lanes, l.GPU.Index)
	}
	return lanes
}

// answerTimeout limits the answers of all relays together, below timeout.
const answerTimeout = 5 * time.Second

func checkRelays(_ context.Context, h *Host) []Finding {
	generations, err := h.generations()
	var list []Finding
	if err != nil {
		list = append(list, unknown("host", "%s", denied(err)))
	}
	var ready []generation.Info
	for _, g := range generations {
		if !g.Alive {
			continue // without a supervisor, or ending
		}
		on, because := "container "+cut(g.Container.ID), ""
		if g.Status.Error != "" {
			because = ": " + cut(g.Status.Error)
		}
		lanes := lanesOf(g)
		switch {
		case !g.Supervised:
			list = append(list, failure(on, "nothing looks after its relay: the supervisor was killed").remedy(
				"restart the container").touching(lanes))
		case g.Status.State == generation.StateReady:
			ready = append(ready, g)
		case g.Status.State == generation.StateDown:
			list = append(list, failure(on, "its relay has died too often, and is not started again%s", because).
				remedy("peerlane relay inspect %s; then peerlane relay resume %s", g.ID, g.ID).touching(lanes))
		case g.Status.State == generation.StateWaiting:
			list = append(list, warning(on, "its relay has died, and will be started again%s",
				because).remedy("peerlane relay inspect %s", g.ID).touching(lanes))
		case slices.Contains([]string{generation.StateStopping, generation.StateStopped, generation.StateDraining,
			generation.StateDrained}, g.Status.State):
			list = append(list, warning(on, "its relay is %s by somebody's command",
				g.Status.State).remedy("peerlane relay resume %s", g.ID).touching(lanes))
		case g.Status.State != generation.StateEnding:
			list = append(list, unknown(on, "its relay starts%s",
				because).remedy("ask again; where it still starts then, peerlane relay inspect %s", g.ID).touching(lanes))
		}
	}
	sessions, more := map[string]int{}, ""
	if len(ready) > 0 {
		silent, notShown := h.silent(ready, sessions)
		list = append(list, silent...)
		if notShown > 0 {
			more = fmt.Sprintf(", and %d more not shown", notShown)
		}
	}
	return orFine(list, "containers with a relay: %d, each has answered; sessions: NCCL %d, NIXL %d%s", len(ready),
		sessions[launch.ProgramNCCL], sessions[launch.ProgramNIXL], more)
}

// silent returns a finding for each relay that should be ready and does not answer, and counts the
// sessions of the others by program. notShown is the number of sessions without room in the reports.
func (h *Host) silent(ready []generation.Info, sessions map[string]int) (list []Finding, notShown int) {
	reports := h.Ask(h.Layout, ready, answerTimeout)
	for _, g := range ready {
		answer := reports[g.ID]
		if answer.Report != nil {
			for _, c := range answer.Report.Clients {
				sessions[c.Program]++
			}
			notShown += answer.Report.MoreClients
			continue
		}
		list = append(list, failure("container "+cut(g.Container.ID), "its relay is ready, and did not answer: %s",
			cut(answer.NoReport)).
			remedy("peerlane relay inspect %s; restart the container where that gets no answer either",
				g.ID).touching(lanesOf(g)))
	}
	return list, notShown
}

func checkLeftovers(_ context.Context, h *Host) []Finding {
	generations, err := h.generations()
	var list []Finding
	if err != nil {
		list = append(list, unknown("host", "%s", denied(err)))
	}
	known := map[string]bool{}
	for _, g := range generations {
		known[g.ID] = true
		if g.Foreign(h.Layout) {
			list = append(list,
				failure("generation "+g.ID,
					"it is of the machine %s, and not of this one: the state of relays is on a shared disk", g.Machine).
					remedy("have %s on a disk of this host alone; where that disk is a copy of another host's, rm -r %s",
						h.Layout.State(), h.Layout.GenerationDir(g.ID)))
			continue
		}
		if !g.Alive && !g.Supervised {
			list = append(list, warning("generation "+g.ID, "container %s has ended, and its relay's files are still here",
				cut(g.Container.ID)).touching(lanesOf(g)))
		}
	}
	if err != nil {
		return list // the owner of a socket is unknown
	}
	for _, dir := range []string{h.Layout.Sockets(), h.Layout.Peers()} {
		entries, err := os.ReadDir(dir)
		if absent(err) {
			continue
		}
		if err != nil {
			list = append(list, unknown(dir, "%s", denied(err)))
			continue
		}
		for _, e := range entries {
			id := strings.TrimSuffix(e.Name(), ".sock")
			// The hook creates the directory of a generation first.
			if _, err := os.Lstat(h.Layout.GenerationDir(id)); absent(err) && !known[id] {
				list = append(list, warning(dir+"/"+e.Name(), "no generation has this socket"))
			}
		}
	}
	return orFine(list, "nothing is left of containers that have ended")
}

func checkStaging(_ context.Context, h *Host) []Finding {
	p, err := h.readPlan()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if len(p.Staging) == 0 {
		return notApplicable("lanes stage on no GPU")
	}
	if none := noNVML(h); none != nil {
		return none
	}
	taken, err := h.Staged(h.Layout)
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	var list []Finding
	for _, s := range p.Staging {
		gpu, err := p.GPU(s.GPU)
		if err != nil {
			gpu = topo.GPU{BusID: s.GPU}
		}
		lanes := h.lanesWith(func(l planner.Lane) bool { return slices.Contains(l.Servers, s.GPU) })
		health, why := h.healthOf(s.GPU)
		if health == nil || health.Memory == 0 {
			if health != nil {
				why = or(strings.Join(health.Failures, "; "), "NVML tells nothing of its memory")
			}
			list = append(list, unknown(gpuName(gpu), "%s", why).remedy("see the check driver").touching(lanes))
			continue
		}
		limit, by := health.Memory/4, "a quarter of its memory"
		if s.Limit != nil {
			limit, by = *s.Limit, "staging.limit"
		}
		need := min(limit, s.All)
		rest := need - min(need, taken[s.GPU])
		switch {
		case s.All > limit:
			list = append(list,
				warning(gpuName(gpu), "one container for each of its %d lanes takes %s, and all relays may have %s (%s)",
					s.Lanes, humanize.IBytes(s.All), humanize.IBytes(limit), by).remedy(
					"raise staging.limit, or lower relay.slots or relay.slot_size, in "+
						"%s", h.Layout.ConfigFile()).touching(lanes))
		case health.MemoryFree < rest:
			list = append(list,
				warning(gpuName(gpu), "relays have %s of the %s that its lanes take, and %s of its memory are free",
					humanize.IBytes(taken[s.GPU]), humanize.IBytes(need), humanize.IBytes(health.MemoryFree)).touching(lanes))
		}
	}
	return orFine(list, "each GPU has room for what its lanes stage there")
}
