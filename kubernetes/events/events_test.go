package events

import (
	"fmt"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/health"
	"github.com/peerlane/peerlane/topo/planner"
)

// recorder records events as text.
type recorder []string

func (r *recorder) Event(object runtime.Object, kind, reason, message string) {
	o := object.(*corev1.ObjectReference)
	*r = append(*r, fmt.Sprintf("%s/%s %s %s %s: %s", o.Namespace, o.Name, o.UID, kind, reason, message))
}

func TestReporterReportsChangesToThePodsOfALane(t *testing.T) {
	const gpu, other = "0000:3b:00.0", "0000:5d:00.0"
	pod := generation.Pod{Namespace: "research", Name: "job-0", Container: "main", UID: "0a1b"}
	observed := func(conditions health.Conditions, relays ...string) *health.Observation {
		o := &health.Observation{
			Plan:  &planner.Plan{Lanes: []planner.Lane{{GPU: gpu}, {GPU: other}}},
			Lanes: map[string]health.Conditions{}, Relays: map[string][]string{},
			Pods: map[string][]generation.Pod{gpu: {pod}},
		}
		if conditions != nil {
			o.Lanes[gpu] = conditions
		}
		if relays != nil {
			o.Relays[gpu] = relays
		}
		o.Lanes[other] = health.Conditions{health.NoNetwork: "a lane without a pod"}
		return o
	}
	const begin = "research/job-0 0a1b "
	down := health.Conditions{health.NoNetwork: "no active port on mlx5_0"}
	gone := observed(down)
	gone.Pods = nil
	var events recorder
	r := New(&events)
	for _, c := range []struct {
		name string
		o    *health.Observation
		want []string
	}{
		{"healthy", observed(nil), nil},
		{"a lane that bounces", observed(health.Conditions{health.Degraded: "the lane goes through host memory"}), nil},
		{"no network", observed(down), []string{begin + "Warning LaneUnhealthy: The lane of GPU " + gpu +
			" of container main: no active port on mlx5_0"}},
		{"the same", observed(down), nil},
		{"another cause", observed(down, "the relay is down"), []string{begin + "Warning LaneUnhealthy: The lane of GPU " +
			gpu + " of container main: no active port on mlx5_0; the relay is down"}},
		{"healthy again", observed(nil), []string{begin + "Normal LaneHealthy: The lane of GPU " + gpu +
			" of container main is healthy again"}},
		{"no network again", observed(down), []string{begin + "Warning LaneUnhealthy: The lane of GPU " + gpu +
			" of container main: no active port on mlx5_0"}},
		{"the pod ends", gone, nil},
	} {
		events = nil
		r.Note(c.o)
		if !reflect.DeepEqual([]string(events), c.want) {
			t.Errorf("%s: %q, expected %q", c.name, events, c.want)
		}
	}
	if len(r.unhealthy) != 0 {
		t.Errorf("an ended pod is kept: %v", r.unhealthy)
	}
}
