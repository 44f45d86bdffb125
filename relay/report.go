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
		staged := map[string]*launch.Staging{}
		for _, l := range r.lanes {
			if l.device != nil {
				report.Contexts = append(report.Contexts, l.spec.GPU.BusID)
			}
			for _, p := range l.placed {
				s := staged[p.gpu.BusID]
				if s == nil {
					s = &launch.Staging{GPU: p.gpu.BusID}
					staged[s.GPU] = s
				}
				s.Bytes += p.bytes
				s.Wanted += p.wanted
				if p.note != "" {
					s.Note = strings.TrimPrefix(s.Note+"; "+p.note, "; ")
				}
			}
		}
		for _, s := range staged {
			report.Staging = append(report.Staging, *s)
		}
		c := r.counters
		report.Sent, report.Received, report.Staged, report.Direct = c.sent, c.received, c.staged, c.direct
		report.BadHandles, report.Limits = c.badHandles, r.limits
		report.Used = launch.Limits{
			Clients: len(r.sessions), Memories: r.used.memories, Connections: r.used.connections, Descriptors: r.used.descriptors,
		}
	})
	if !done {
		return nil
	}
	slices.SortFunc(report.Clients, func(a, b launch.Client) int { return a.PID - b.PID })
	slices.SortFunc(report.Staging, func(a, b launch.Staging) int { return strings.Compare(a.GPU, b.GPU) })
	return report
}
