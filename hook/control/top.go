package control

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/admin"
	"github.com/peerlane/peerlane/relay/launch"
)

// Rates is the work of a relay in an interval.
type Rates struct {
	// ID is the generation.
	ID        string `json:"id"`
	Container string `json:"container"`
	// NoReport is the reason if the other fields are empty.
	NoReport string `json:"noReport,omitempty"`
	// Seconds is the length of the interval. It is 0 for a relay that started in the interval,
	// whose figures cover its whole life.
	Seconds     float64 `json:"seconds"`
	Lanes       []Rate  `json:"lanes"`
	Connections []Rate  `json:"connections"`
	// MoreConnections is the number of omitted connections, which moved less.
	MoreConnections int `json:"moreConnections,omitempty"`
}

// Rate is the work of a lane or a connection in one direction.
type Rate struct {
	// GPU is a PCI address.
	GPU   string `json:"gpu"`
	Sends bool   `json:"sends"`
	// Fields of a connection; empty for a lane. Program is one of launch.Program*.
	PID     int    `json:"pid,omitempty"`
	Program string `json:"program,omitempty"`
	Number  uint32 `json:"number,omitempty"`
	Peer    string `json:"peer,omitempty"`
	Route   string `json:"route,omitempty"`

	Bytes uint64 `json:"bytes"`
	// Operations is the number of ended operations.
	Operations uint64 `json:"operations"`
	Failed     uint64 `json:"failed"`
	// InPlace is a part of Bytes; see launch.Figures.
	InPlace  uint64 `json:"inPlace"`
	InFlight int    `json:"inFlight"`
	// Slots is the number of the lane's slots that a connection holds now.
	Slots  int            `json:"slots,omitempty"`
	Stalls []launch.Stall `json:"stalls"`
	// P50 and P99 are percentiles of the duration of operations in microseconds.
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// Watch asks relays twice, an interval apart, and returns the work in the interval. With an
// earlier answer, Watch asks once: before is the result now of the previous call.
func Watch(
	l paths.Layout,
	infos []generation.Info,
	before Reports,
	interval time.Duration,
) (list []Rates, now Reports) {
	if before == nil {
		before = Ask(l, infos, admin.Timeout)
		time.Sleep(interval)
	}
	now = Ask(l, infos, admin.Timeout)
	list = []Rates{}
	for _, info := range infos {
		r := Rates{ID: info.ID, Container: info.Container.ID, Lanes: []Rate{}, Connections: []Rate{}}
		report, old := now[info.ID], before[info.ID]
		if report.NoReport != "" {
			r.NoReport = report.NoReport
			list = append(list, r)
			continue
		}
		r.between(report, old)
		list = append(list, r)
	}
	return list, now
}

// Reports maps generations to the reports of their relays.
type Reports map[string]Answer

// Answer is a relay's report.
type Answer struct {
	*launch.Report // nil if NoReport has the reason
	NoReport       string
	// relay is the process id.
	relay int
}

// askedAtOnce is the number of relays to ask at a time. A relay that hangs uses up the time limit.
const askedAtOnce = 64

// Ask asks relays for their work since their start, within the time limit. For a relay that does
// not answer in time, NoReport says so.
func Ask(l paths.Layout, infos []generation.Info, limit time.Duration) Reports {
	until := time.Now().Add(limit)
	all := Reports{}
	var mutex sync.Mutex
	var group sync.WaitGroup
	room := make(chan struct{}, askedAtOnce)
	for _, info := range infos {
		room <- struct{}{}
		group.Go(func() {
			answer := askRelay(l, info.ID, until)
			mutex.Lock()
			all[info.ID] = answer
			mutex.Unlock()
			<-room
		})
	}
	group.Wait()
	return all
}

func askRelay(l paths.Layout, id string, until time.Time) Answer {
	answer, err := admin.AskUntil(l, id, admin.Inspect, until)
	r := Answer{answer.Report, answer.NoReport, 0}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, unix.EAGAIN) { // EAGAIN is from connect
		err = errors.New("no answer in time")
	}
	if err != nil {
		r.NoReport = err.Error()
	}
	if r.Report == nil && r.NoReport == "" {
		r.NoReport = "the relay did not answer"
	}
	if info, err := generation.Look(l, id); err == nil && info.Status.Relay != nil {
		r.relay = info.Status.Relay.PID
	}
	return r
}

// between computes the work since an earlier report of the same process.
func (r *Rates) between(now, before Answer) {
	if before.Report == nil || before.relay != now.relay || before.At >= now.At {
		before = Answer{Report: &launch.Report{At: now.At}}
	}
	r.Seconds = (now.At - before.At).Seconds()
	for _, lane := range now.Lanes {
		var old launch.LaneFigures
		for _, b := range before.Lanes {
			if b.GPU == lane.GPU {
				old = b
			}
		}
		r.Lanes = append(r.Lanes,
			rate(Rate{GPU: lane.GPU, Sends: true}, lane.Sent.Since(old.Sent)),
			rate(Rate{GPU: lane.GPU}, lane.Received.Since(old.Received)))
	}
	r.MoreConnections = now.MoreConnections
	for _, c := range now.Connections {
		var old launch.ConnectionFigures
		known := before.MoreConnections == 0 // a connection outside a complete earlier report is new
		for _, b := range before.Connections {
			// Numbers of connections are unique in a session only.
			if b.PID == c.PID && b.Number == c.Number && b.GPU == c.GPU && b.Operations <= c.Operations {
				old, known = b, true
			}
		}
		if !known {
			r.MoreConnections++
			continue
		}
		r.Connections = append(
			r.Connections,
			rate(
				Rate{GPU: c.GPU, Sends: c.Sends, PID: c.PID, Program: c.Program, Number: c.Number, Peer: c.Peer,
					Route: c.Route, Slots: c.Slots},
				c.Since(old.Figures),
			),
		)
	}
}

func rate(r Rate, f launch.Figures) Rate {
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	r.Bytes, r.Operations, r.Failed, r.InPlace, r.InFlight, r.Stalls = f.Bytes, f.Operations, f.Failed, f.InPlace,
		f.InFlight, f.Stalls
	r.P50, r.P99 = us(f.Percentile(500)), us(f.Percentile(990))
	if r.Stalls == nil {
		r.Stalls = []launch.Stall{}
	}
	return r
}
