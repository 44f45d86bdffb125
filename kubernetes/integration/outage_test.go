//go:build cluster

package integration

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/peerlane/peerlane/kubernetes/lanes"
	"github.com/peerlane/peerlane/topo/planner"
)

// crowd is the number of pods that start at once.
const crowd = 50

func TestClusterOutagesKeepPods(t *testing.T) {
	c := startCluster(t, options{})
	c.startNVIDIA()
	c.startPlugin()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples/lane-claim.yaml")
	pair := []*corev1.Pod{claiming(c.pod("a", "b"), "gpu-with-staged-lane"),
		claiming(c.pod("b", "a"), "gpu-with-staged-lane")}
	c.create(pair...)
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")
	before := c.containers("a", "b")

	// The API server stops for a minute.
	api, plugin := c.daemons["kube-apiserver"], c.daemons["peerlane-kubelet"]
	api.kill(t)
	time.Sleep(time.Minute)
	select {
	case err := <-plugin.ended:
		t.Fatalf("the plugin ended without the API server: %v", err)
	default:
	}
	api.start(t)
	c.exchanged(2, "a", "b")
	if after := c.containers("a", "b"); !slices.Equal(before, after) {
		t.Errorf("containers and generations are %v, and were %v", after, before)
	}

	// The plugin dies during a call of Prepare.
	if err := plugin.process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c.create(claiming(c.pod("c", "d"), "gpu-with-staged-lane"))
	c.until(patience, "the scheduler gives pod c a lane", func() string {
		p, err := c.client.CoreV1().Pods("default").Get(c.Context(), "c", metav1.GetOptions{})
		if err == nil && p.Spec.NodeName != "" {
			return ""
		}
		_, state := c.state("c")
		return state
	})
	time.Sleep(5 * time.Second) // the call waits
	if phase, state := c.state("c"); phase != corev1.PodPending {
		t.Errorf("without an answer to Prepare: %s", state)
	}
	plugin.kill(t)
	plugin.start(t)
	c.untilRunning("c")
	c.remove("c")

	// The plan changes: the lane of pod a is refused, and the pods go on.
	lost := c.allocation("a")[lanes.DriverName][0]
	plan, err := planner.Read(c.Layout.PlanFile())
	if err != nil {
		t.Fatal(err)
	}
	for i := range plan.Lanes {
		if lanes.Name(plan.Lanes[i].GPU) == lost {
			plan.Lanes[i].Role = planner.RoleRefused
		}
	}
	if err := plan.Write(c.Layout.PlanFile()); err != nil {
		t.Fatal(err)
	}
	if devices := c.untilPublished(len(c.Plan.Lanes)); devices[lost].Name != "" {
		t.Errorf("the slice has %s, which the plan refuses", lost)
	}
	c.exchanged(3, "a", "b")
	if after := c.containers("a", "b"); !slices.Equal(before, after) {
		t.Errorf("containers and generations are %v, and were %v", after, before)
	}
	if answer, err := c.prepare(); err != nil || !strings.Contains(answer, "the plan of this node has no such lane") {
		t.Errorf("Prepare of a lane that the plan refuses answers %s, %v", answer, err)
	}
	if err := c.Plan.Write(c.Layout.PlanFile()); err != nil {
		t.Fatal(err)
	}
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.remove("a", "b")

	// More pods start than the node has lanes: each pod gets a lane in turn.
	var pods []string
	for i := range crowd {
		p := claiming(c.pod(fmt.Sprintf("crowd-%d", i), ""), "gpu-with-staged-lane")
		p.Spec.Containers[0].Command = []string{"/usr/bin/test", "-S", "/run/peerlane/relay.sock"}
		pods = append(pods, p.Name)
		c.create(p)
	}
	took := c.until(crowd*10*time.Second, "all pods end", func() string {
		for _, name := range pods {
			if phase, state := c.state(name); phase != corev1.PodSucceeded {
				return state
			}
		}
		return ""
	})
	t.Logf("%d pods end after %v", crowd, took.Round(time.Second))
	c.remove(pods...)
}
