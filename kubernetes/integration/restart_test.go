//go:build cluster

package integration

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/peerlane/peerlane/hook/generation"
)

// containers returns the ids of the pods' containers and of the containers that have relays.
func (c *cluster) containers(pods ...string) (ids []string) {
	c.Helper()
	for _, name := range pods {
		p, err := c.client.CoreV1().Pods("default").Get(c.Context(), name, metav1.GetOptions{})
		if err != nil {
			c.Fatal(err)
		}
		for _, s := range p.Status.ContainerStatuses {
			ids = append(ids, strings.TrimPrefix(s.ContainerID, "containerd://"))
		}
	}
	list, err := generation.List(c.Layout)
	if err != nil {
		c.Fatal(err)
	}
	for _, g := range list {
		if !slices.Contains(ids, g.Container.ID) || !g.Alive {
			c.Errorf("generation %s is of container %s, alive %v; the containers are %v", g.ID, g.Container.ID, g.Alive, ids)
		}
		ids = append(ids, g.ID)
	}
	return ids
}

// draState is the kubelet's record of prepared claims.
const draState = kubeletDir + "/dra_manager_state"

func TestClusterRestartsKeepPods(t *testing.T) {
	c := startCluster(t, options{})
	c.startNVIDIA()
	c.startPlugin()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.mustDo("kubectl", "apply", "-f", "../manifests", "-f", "../examples")
	c.create(claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"), "gpu-with-staged-lane"))
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")
	before := c.containers("a", "b")

	// Relays are no children of the plugin.
	plugin := c.daemons["peerlane-kubelet"]
	plugin.kill(t)
	c.exchanged(2, "a", "b")

	// A kubelet without a record of claims prepares the claims of running pods again.
	c.daemons["kubelet"].kill(t)
	if err := os.Remove(draState); err != nil {
		t.Fatal(err)
	}
	c.daemons["kubelet"].start(t)
	plugin.start(t)
	claims, err := c.client.ResourceV1().ResourceClaims("default").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(claims.Items) != 2 {
		t.Fatalf("%d claims, %v", len(claims.Items), err)
	}
	c.until(patience, "the claims are prepared again", func() string {
		text, err := os.ReadFile(draState)
		if err != nil {
			return err.Error()
		}
		for _, claim := range claims.Items {
			if !strings.Contains(string(text), string(claim.UID)) {
				return string(text)
			}
		}
		return ""
	})
	c.exchanged(3, "a", "b")
	if after := c.containers("a", "b"); !slices.Equal(before, after) {
		t.Errorf("containers and generations are %v, and were %v", after, before)
	}

	// A pod that is deleted without the plugin waits for the plugin.
	plugin.kill(t)
	if err := c.client.CoreV1().Pods("default").Delete(t.Context(), "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.until(patience, "the relay of pod b ends", func() string {
		list, err := generation.List(c.Layout)
		if err != nil || len(list) != 1 {
			return fmt.Sprintf("%d generations, %v", len(list), err)
		}
		return ""
	})
	if phase, state := c.state("b"); phase == "" {
		t.Errorf("the pod is gone before its claims are unprepared: %s", state)
	}
	plugin.start(t)
	c.untilGone("b")

	// New pods, on the devices that are free again.
	c.clearRounds()
	c.remove("a")
	c.create(claiming(c.pod("c", "d"), "gpu-with-staged-lane"), claiming(c.pod("d", "c"), "gpu-with-staged-lane"))
	c.untilRunning("c", "d")
	c.exchanged(1, "c", "d")
	c.remove("c", "d")
}
