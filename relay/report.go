package relay

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// programNames are the names of the plugins of wire.Hello in reports.
var programNames = map[uint64]string{
	wire.ProgramNCCL: launch.ProgramNCCL, wire.ProgramNIXL: launch.ProgramNIXL,
}

// Report returns the relay's report; nil where it is ending.
func (r *Relay) Report() *launch.Report {
	report := &launch.Report{Clients: []launch.Client{}, Contexts: []string{}, Staging: []launch.Staging{}}
	done := r.loop.Call(func() {
		for _, s := range r.sessions {
			c := launch.Client{PID: s.pid, Program: programNames[s.program], Memories: len(s.memories),
				Connections: len(s.connections), HostMemory: s.host, Staging: s.staging}
			for _, m := range s.memories {
				c.Bytes += m.length
				if m.kind == wire.MemoryIPC {
					c.IPCMemories++
				}
			}
			report.Clients = append(report.Clients, c)
		}
		staged := map[string]*launch.Staging{}
		at := func(key string, one launch.Staging) *launch.Staging {
			if staged[key] == nil {
				staged[key] = &one
			}
			return staged[key]
		}
		for _, l := range r.lanes {
			if l.device != nil {
				report.Contexts = append(report.Contexts, l.spec.GPU.BusID)
				report.Writes = append(report.Writes, writesOf(l))
			}
			all := slices.Concat(l.placed, l.registered.placed)
			own := len(all)
			for _, p := range l.registered.placed { // cuMemAlloc needs one there
				if p.bytes > 0 {
					report.Contexts = append(report.Contexts, p.gpu.BusID)
				}
			}
			if l.remote.out != nil {
				all = append(all, l.remote.placed)
			}
			for i, p := range all {
				key, one := p.gpu.BusID, launch.Staging{GPU: p.gpu.BusID}
				if p.host { // which lanes do not share
					key, one = "host "+l.spec.GPU.BusID, launch.Staging{Host: true, Lane: l.spec.GPU.BusID}
				}
				if i == own {
					key, one.Transport = key+" "+launch.TransportTCP, launch.TransportTCP
				}
				s := at(key, one)
				s.Bytes += p.bytes
				s.Wanted += p.wanted
				if s.Slots == 0 && p.bytes > 0 {
					s.Slots, s.SlotBytes, s.Streams = p.slots.slots, p.slots.slotBytes, len(l.push.queues)
				}
				if p.pages != "" {
					s.Pages = p.pages
				}
				if p.note != "" {
					s.Note = strings.TrimPrefix(s.Note+"; "+p.note, "; ")
				}
			}
		}
		for _, l := range r.lanes {
			for _, on := range l.serverUsage {
				if on.bytes > 0 {
					at(on.gpu.BusID, launch.Staging{GPU: on.gpu.BusID}).Clients += on.bytes
				}
			}
		}
		for _, s := range staged {
			report.Staging = append(report.Staging, *s)
		}
		c := r.counters
		report.Sent, report.Received, report.Staged, report.Direct = c.sent, c.received, c.staged, c.direct
		report.BadHandles, report.Limits = c.badHandles, r.limits
		report.Network = r.networkReport()
		r.live(report)
		report.Used = launch.Limits{
			Clients: len(r.sessions), Memories: r.used.memories, Connections: r.used.connections,
			Descriptors: r.used.descriptors,
			HostMemory:  r.used.host, Staging: r.used.staging,
		}
	})
	if !done {
		return nil
	}
	slices.SortFunc(report.Clients, func(a, b launch.Client) int { return a.PID - b.PID })
	if more := len(report.Clients) - toldClients; more > 0 {
		report.Clients, report.MoreClients = report.Clients[:toldClients], more
	}
	slices.SortFunc(report.Staging, func(a, b launch.Staging) int {
		return strings.Compare(a.GPU+a.Lane+a.Transport, b.GPU+b.Lane+b.Transport)
	})
	fit(report)
	return report
}

func writesOf(l *lane) launch.Writes {
	w := l.device.Writes()
	told := launch.Writes{GPU: l.spec.GPU.BusID, Words: w.MaxWords, Stores: w.MaxStores, NoStores: w.NoStores}
	for _, m := range w.Measured {
		told.Measured = append(told.Measured, launch.WriteTime{Bytes: m.Bytes, Words: microseconds(m.Words),
			Rows: microseconds(m.Rows), Stores: microseconds(m.Stores)})
	}
	return told
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// toldClients is how many clients a report shows at most: more have no room in any.
const toldClients = 1024

// fit drops figures without room in the datagram, for containers with very many GPUs or clients:
// connections first, then how long operations took, then clients.
func fit(report *launch.Report) {
	const room = launch.MaxDatagram * 3 / 4
	for {
		text, err := json.Marshal(report)
		if err != nil || len(text) <= room {
			return // the sender of the report gets the same error
		}
		switch shown := len(report.Connections); {
		case shown > 0:
			report.Connections = report.Connections[:shown/2]
			report.MoreConnections += shown - shown/2
		case len(report.Lanes) > 0 && len(report.Lanes[0].Sent.Latency)+len(report.Lanes[0].Received.Latency) > 0:
			for i := range report.Lanes {
				report.Lanes[i].Sent.Latency, report.Lanes[i].Received.Latency = nil, nil
			}
		case len(report.Clients) > 0:
			shown := len(report.Clients)
			report.Clients = report.Clients[:shown/2]
			report.MoreClients += shown - shown/2
		default:
			return
		}
	}
}
