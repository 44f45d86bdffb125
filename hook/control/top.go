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
	ID        string `json:"id"` // of the generation
	Container string `json:"container"`
	// NoReport says why there is nothing else.
	NoReport string `json:"noReport,omitempty"`
	// Seconds is the interval; 0 for a relay that is new since then: the rest is of its whole
	// life.
	Seconds     float64 `json:"seconds"`
	Lanes       []Rate  `json:"lanes"`
	Connections []Rate  `json:"connections"`
	// MoreConnections moved less, and are not shown.
	MoreConnections int `json:"moreConnections,omitempty"`
}

// Rate is the work of a lane or a connection in one direction.
type Rate struct {
	GPU   string `json:"gpu"` // PCI address
	Sends bool   `json:"sends"`
	// Of a connection.
	PID     int    `json:"pid,omitempty"`
	Program string `json:"program,omitempty"` // one of launch.Program*
	Number  uint32 `json:"number,omitempty"`
	Peer    string `json:"peer,omitempty"`
	Route   string `json:"route,omitempty"`

	Bytes      uint64         `json:"bytes"`
	Operations uint64         `json:"operations"` // that ended
	Failed     uint64         `json:"failed"`
	InPlace    uint64         `json:"inPlace"` // of Bytes; see launch.Figures
	InFlight   int            `json:"inFlight"`
	Slots      int            `json:"slots,omitempty"` // of the lane, that a connection holds now
	Stalls     []launch.Stall `json:"stalls"`
	// Percentiles of how long operations took, microseconds.
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// Watch asks relays twice, an interval apart, and returns the work in between. With an earlier
// answer Watch asks once: before is the previous result now.
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

// Reports are reports of relays, by generation.
type Reports map[string]Answer

// Answer is a relay's report.
type Answer struct {
	*launch.Report // nil where NoReport says why
	NoReport       string
	relay          int // process
}

// askedAtOnce is the number of relays that are asked at a time; a relay that hangs takes the
// whole time limit.
const askedAtOnce = 64

// Ask asks relays for their work since the start, within the limit. NoReport names a relay that
// has not answered.
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
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, unix.EAGAIN) { // connect's
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

// between computes the work since the earlier report of the same process.
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
		known := before.MoreConnections == 0 // a connection outside the earlier report is new
		for _, b := range before.Connections {
			// Numbers are a session's own.
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
