package health

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/peerlane/peerlane/kubernetes/lanes"
	"github.com/peerlane/peerlane/topo/planner"
)

// condition is the metric of the conditions of lanes.
var condition = prometheus.NewDesc("peerlane_lane_condition",
	"1 if the lane of a GPU has the condition: no-network, degraded or drain.", []string{"gpu", "condition"}, nil)

// Metrics exports the conditions of a node's lanes. Metrics is safe for concurrent use.
type Metrics struct {
	mu   sync.Mutex
	last *Observation
}

// Run observes the host until the context ends.
func (m *Metrics) Run(ctx context.Context, monitor *Monitor, poll time.Duration, failures *Failures) {
	for ticker := time.NewTicker(poll); ; {
		o, err := monitor.Observe()
		failures.Note(err)
		m.mu.Lock()
		m.last = o // nil where the host is unreadable: a metric of an old observation would hide that
		m.mu.Unlock()
		select {
		case <-ctx.Done():
			ticker.Stop()
			return
		case <-ticker.C:
		}
	}
}

// Describe names the metric.
func (m *Metrics) Describe(to chan<- *prometheus.Desc) { to <- condition }

// Collect sends the conditions of the last observation, 0 for the absent.
func (m *Metrics) Collect(to chan<- prometheus.Metric) {
	m.mu.Lock()
	o := m.last
	m.mu.Unlock()
	if o == nil {
		return
	}
	for _, lane := range o.Plan.Lanes {
		if lane.Role == planner.RoleRefused {
			continue
		}
		for _, c := range []Condition{NoNetwork, Degraded, Drain} {
			value := 0.0
			if _, ok := o.Lanes[lane.GPU][c]; ok {
				value = 1
			}
			to <- prometheus.MustNewConstMetric(condition, prometheus.GaugeValue, value, lane.GPU,
				strings.TrimPrefix(string(c), lanes.DriverName+"/"))
		}
	}
}
