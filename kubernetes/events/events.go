// Package events reports the health of lanes as events on the pods that have the lanes.
package events

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/health"
)

// Reasons of events.
const (
	Unhealthy = "LaneUnhealthy"
	Healthy   = "LaneHealthy"
)

// Recorder is the part of record.EventRecorder that a Reporter needs. Event does not wait for the API
// server.
type Recorder interface {
	Event(object runtime.Object, kind, reason, message string)
}

// lane is a lane of a container.
type lane struct {
	pod generation.Pod
	gpu string
}

// Reporter reports changes between two observations. Reporter is not safe for concurrent use.
type Reporter struct {
	recorder Recorder
	// unhealthy has the reported cause of each lane that is unhealthy.
	unhealthy map[lane]string
}

// New returns a reporter.
func New(r Recorder) *Reporter { return &Reporter{recorder: r, unhealthy: map[lane]string{}} }

// Note reports the lanes whose health or cause differs from the observation before.
func (r *Reporter) Note(o *health.Observation) {
	now := map[lane]string{}
	for gpu, pods := range o.Pods {
		for _, pod := range pods {
			l := lane{pod, gpu}
			before, was := r.unhealthy[l]
			if o.Healthy(gpu) {
				if was {
					r.recorder.Event(reference(pod), corev1.EventTypeNormal, Healthy,
						fmt.Sprintf("The lane of GPU %s of container %s is healthy again", gpu, pod.Container))
				}
				continue
			}
			cause := o.Message(gpu)
			if now[l] = cause; before != cause {
				r.recorder.Event(reference(pod), corev1.EventTypeWarning, Unhealthy,
					fmt.Sprintf("The lane of GPU %s of container %s: %s", gpu, pod.Container, cause))
			}
		}
	}
	r.unhealthy = now
}

func reference(p generation.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name,
		UID: types.UID(p.UID)}
}
