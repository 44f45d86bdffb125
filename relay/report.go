package relay

import (
	"slices"
	"strings"

	"github.com/peerlane/peerlane/relay/launch"
)

// Report is what the administrator is told of this relay; nil where it is
// ending.
func (r *Relay) Report() *launch.Report {
	report := &launch.Report{Clients: []launch.Client{}, Contexts: []string{}, Staging: []launch.Staging{}}
	done := r.loop.Call(func() {
		for _, s := range r.sessions {
			c := launch.Client{PID: s.pid, Memories: len(s.memories), Connections: len(s.connections)}
			for _, m := range s.memories {
				c.Bytes += m.length
			}
			report.Clients = append(report.Clients, c)
		}
		staged := map[string]uint64{}
		for _, l := range r.lanes {
			if l.device != nil {
				report.Contexts = append(report.Contexts, l.spec.GPU.BusID)
			}
			for _, s := range []*staging{l.out, l.in} {
				if s == nil {
					continue
				}
				for i, g := range s.regions { // one a server, in their order
					staged[l.spec.Servers[i].BusID] += g.memory.Bytes
				}
			}
		}
		for gpu, bytes := range staged {
			report.Staging = append(report.Staging, launch.Staging{GPU: gpu, Bytes: bytes})
		}
		c := r.counters
		report.Sent, report.Received, report.Staged, report.Direct = c.sent, c.received, c.staged, c.direct
	})
	if !done {
		return nil
	}
	slices.SortFunc(report.Clients, func(a, b launch.Client) int { return a.PID - b.PID })
	slices.SortFunc(report.Staging, func(a, b launch.Staging) int { return strings.Compare(a.GPU, b.GPU) })
	return report
}
