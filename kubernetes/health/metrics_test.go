package health

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/topo/planner"
)

func TestMetricsHaveTheConditionsOfLanes(t *testing.T) {
	m := &Metrics{last: &Observation{
		Plan: &planner.Plan{Lanes: []planner.Lane{{GPU: "0000:3b:00.0"}, {GPU: "0000:5d:00.0"},
			{GPU: "0000:9e:00.0", Role: planner.RoleRefused}}},
		Lanes: map[string]Conditions{"0000:3b:00.0": {NoNetwork: "no active port", Drain: ""}},
	}}
	const want = `# HELP peerlane_lane_condition 1 if the lane of a GPU has the condition: no-network, degraded or drain.
# TYPE peerlane_lane_condition gauge
peerlane_lane_condition{condition="degraded",gpu="0000:3b:00.0"} 0
peerlane_lane_condition{condition="degraded",gpu="0000:5d:00.0"} 0
peerlane_lane_condition{condition="drain",gpu="0000:3b:00.0"} 1
peerlane_lane_condition{condition="drain",gpu="0000:5d:00.0"} 0
peerlane_lane_condition{condition="no-network",gpu="0000:3b:00.0"} 1
peerlane_lane_condition{condition="no-network",gpu="0000:5d:00.0"} 0
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestMetricsOfAnUnreadableHostAreAbsent(t *testing.T) {
	n := newNode(t)
	log := logrus.New()
	log.Out = io.Discard
	failures := &Failures{Log: log}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	m := &Metrics{}
	m.Run(ended, n.Monitor, time.Hour, failures)
	if count := testutil.CollectAndCount(m); count == 0 {
		t.Error("a readable host has no metric")
	}
	if err := os.WriteFile(n.layout.PlanFile(), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	m.Run(ended, n.Monitor, time.Hour, failures)
	if count := testutil.CollectAndCount(m); count != 0 {
		t.Errorf("an unreadable host has %d metrics", count)
	}
}
