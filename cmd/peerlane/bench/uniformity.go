package bench

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// PerNIC is the default number of GPUs that share a NIC in table uniformity.
const PerNIC = 4

// sharing describes GPUs that share NICs. Half of a NIC's GPUs are near.
type sharing struct {
	nics int
	// near are the streams of near GPUs, and lanes the lanes of far GPUs. A far GPU sends to the
	// next far GPU of the NIC.
	near  []nearStream
	lanes []planner.Assignment
	// far are the far GPUs by NIC.
	far  [][]string
	gpus int
}

type nearStream struct{ from, to, nic string }

// mixed assigns near and far GPUs to NICs, at most perNIC to a NIC.
func mixed(gpus []topo.GPU, perNIC int) sharing {
	s := sharing{}
	for len(gpus) >= 2 {
		n := min(len(gpus), perNIC) &^ 1
		if s.nics > 0 && n < perNIC {
			break // a NIC with fewer GPUs would give each GPU a larger share
		}
		nic := fmt.Sprintf("software%d", s.nics)
		var near, far []string
		for i, g := range gpus[:n] {
			if i < n/2 {
				near = append(near, g.BusID)
			} else {
				far = append(far, g.BusID)
			}
		}
		for i, g := range near {
			s.lanes = append(s.lanes, planner.Assignment{GPU: far[i], Servers: []string{g}, NICs: []string{nic}})
			to := near[(i+1)%len(near)]
			if n == 2 {
				to = far[0]
				// The stream of the far GPU ends on this GPU.
				s.lanes = append(s.lanes, planner.Assignment{GPU: g, Servers: []string{far[0]}, NICs: []string{nic}})
				far = append(far, g)
			}
			s.near = append(s.near, nearStream{g, to, nic})
		}
		s.far = append(s.far, far)
		s.nics++
		s.gpus += n
		gpus = gpus[n:]
	}
	return s
}

// staging returns the same GPUs as far GPUs only: each GPU stages on the next GPU.
func (s sharing) staging() sharing {
	all := sharing{nics: s.nics, gpus: s.gpus}
	for i, far := range s.far {
		nic := fmt.Sprintf("software%d", i)
		var near []string
		for _, n := range s.near {
			if n.nic == nic {
				near = append(near, n.from)
			}
		}
		gpus := slices.Concat(near, far)[:s.gpus/s.nics]
		for k, g := range gpus {
			all.lanes = append(all.lanes, planner.Assignment{GPU: g, Servers: []string{gpus[(k+1)%len(gpus)]},
				NICs: []string{nic}})
		}
		all.far = append(all.far, gpus)
	}
	return all
}

func (r *run) uniformity() error {
	pace := r.Pace
	if len(pace) == 0 {
		pace = []float64{25, 50}
		if r.host.Simulated {
			pace = []float64{0.5}
		}
	}
	gpus := r.host.Topology.GPUs
	if r.host.Simulated {
		gpus = gpus[:min(len(gpus), PerNIC)] // GPUs share the bandwidth of host memory
	}
	size := uint64(16 << 20)
	if r.host.Simulated {
		size = 1 << 20
	}
	half := mixed(gpus, cmp.Or(r.GPUsPerNIC, PerNIC))
	for _, rate := range pace {
		paced := fmt.Sprintf("the NICs' rate, as it is set: %d of %g GB/s", half.nics, rate)
		r.report.Baselines = append(r.report.Baselines, Baseline{Name: paced, Value: rate * float64(half.nics), Unit: GBs})
		for _, how := range []struct {
			state string
			sharing
			off bool
		}{
			{"near direct, far staged", half, false},
			{"relay off: near direct, far bounce", half, true},
			{"all far and staged", half.staging(), false},
		} {
			if r.Quick && len(how.near) == 0 {
				continue
			}
			r.progress("%d streams through %d NICs of %g GB/s, %s", how.gpus, how.nics, rate, how.state)
			near, far, err := r.streams(how.sharing, rate, size, how.off)
			if err != nil {
				return err
			}
			rates := slices.Sorted(slices.Values(slices.Concat(near, far)))
			row := Row{
				Table: "uniformity", State: fmt.Sprintf("%s, %g GB/s", how.state, rate), Route: staged,
				Transport: transportOf(staged), Size: size, Depth: 16, Unit: index,
				Note: fmt.Sprintf("%d GPUs to a NIC; GB/s of near ones%s; of far ones%s", how.gpus/how.nics, listed(near),
					listed(far)),
			}
			var asked *Bound // for Peerlane's route only
			if !how.off {
				asked = atLeast(0.95)
			}
			row.What, row.Value, row.Asked = "slowest over fastest", rates[0]/rates[len(rates)-1], asked
			r.row(row)
			row.What, row.Value, row.Unit, row.Baseline = "all streams", total(rates), GBs, paced
			r.row(row)
			row.What, row.Value, row.Unit, row.Baseline, row.Asked = "Jain's index", jain(rates), index, "", nil
			r.row(row)
		}
	}
	return nil
}

func listed(rates []float64) string {
	text := ""
	for _, f := range rates {
		text += fmt.Sprintf(" %.3g", f)
	}
	if text == "" {
		return " none"
	}
	return text
}

// streams runs one stream from every GPU concurrently, for ten times the duration of a measurement,
// and returns the rates. With off, no server GPU has room, so far GPUs reach the same NICs through
// host memory, as without relays.
func (r *run) streams(how sharing, pace float64, size uint64, off bool) (near, far []float64, err error) {
	s, err := r.stageWith(staged, how.lanes, pace, func(c *config.Config) {
		if off {
			none := config.Size(0)
			c.Staging.Limit = &none
		}
	})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	var direct []*testbed.Measuring
	defer func() {
		for _, m := range direct {
			err = errors.Join(err, m.Close())
		}
	}()
	job := measure.Job{Size: size, Depth: 16, Duration: 10 * r.Duration}
	for _, n := range how.near {
		m, err := r.host.StartMeasuring(r.ctx)
		if err != nil {
			return nil, nil, err
		}
		direct = append(direct, m)
		prepare := job
		prepare.Kind, prepare.From, prepare.To, prepare.NIC = measure.PrepareNIC, n.from, n.to, n.nic
		if _, err := m.Do(prepare); err != nil {
			return nil, nil, err
		}
	}
	orders := map[*worker]order{}
	for _, ring := range how.far {
		if err := r.ring(s, ring, job, len(how.near) > 0 && how.gpus/how.nics == 2, orders); err != nil {
			return nil, nil, err
		}
	}
	for w := range orders {
		if err := r.bounces(w, off); err != nil {
			return nil, nil, err
		}
	}
	type answer struct {
		measure.Result
		err error
	}
	answers := make(chan answer, len(direct))
	for _, m := range direct {
		go func() {
			run := job
			run.Kind = measure.NIC
			found, err := m.Do(run)
			answers <- answer{found, err}
		}()
	}
	replies, err := together(orders)
	for w, reply := range replies {
		if orders[w].Do != doReceive {
			far = append(far, reply.GBs)
		}
	}
	for range direct {
		a := <-answers
		near, err = append(near, a.GBs), errors.Join(err, a.err)
	}
	return near, far, err
}

// bounces checks that a client's relay stages in the required place: in host memory, or on a
// server GPU.
func (r *run) bounces(w *worker, inHost bool) error {
	report, err := r.reportOf(w)
	if err != nil {
		return err
	}
	for _, c := range report.Connections {
		if c.Transport != launch.TransportVerbs || c.GDR == inHost {
			return fmt.Errorf("the relay of client %s stages in the wrong place: transport %s, %s", w.name, c.Transport,
				c.Registration)
		}
	}
	return nil
}

// ring attaches a client to the lane of every GPU and connects every client with the next. With
// oneWay the first of two clients sends and the second receives.
func (r *run) ring(s *stage, gpus []string, job measure.Job, oneDirection bool, orders map[*worker]order) error {
	var clients []*worker
	for _, busID := range gpus {
		lane, err := r.host.Plan.Lane(busID)
		if err != nil {
			return err
		}
		w, err := s.startAttached(lane, nil, job.Size)
		if err != nil {
			return err
		}
		clients = append(clients, w)
	}
	for i, w := range clients {
		o := order{Do: doBoth, Size: job.Size, Depth: job.Depth, Duration: job.Duration, Tag: 1}
		if oneDirection {
			o.Do = []string{doSend, doReceive}[i]
		}
		orders[w] = o
		if o.Do == doReceive {
			continue
		}
		if err := s.connect(w, clients[(i+1)%len(clients)]); err != nil {
			return err
		}
	}
	return nil
}
