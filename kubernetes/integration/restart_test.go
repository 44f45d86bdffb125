//go:build cluster

package integration

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/lanes"
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
			c.Errorf("generation %s is of container %s, alive %v; the containers are %v", g.ID, g.Container.ID,
				g.Alive, ids)
		}
		ids = append(ids, g.ID)
	}
	return ids
}

// prepare makes the plugin prepare every claim, as the kubelet does, and returns the answers.
func (c *cluster) prepare() (string, error) {
	c.Helper()
	claims, err := c.client.ResourceV1().ResourceClaims("default").List(c.Context(), metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	request := &dra.NodePrepareResourcesRequest{}
	for _, claim := range claims.Items {
		request.Claims = append(request.Claims, &dra.Claim{Namespace: claim.Namespace, Name: claim.Name,
			Uid: string(claim.UID)})
	}
	socket := filepath.Join(kubeletDir, "plugins", lanes.DriverName, "dra.sock")
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	answer, err := dra.NewDRAPluginClient(conn).NodePrepareResources(c.Context(), request)
	if err != nil {
		return "", err
	}
	text, err := json.Marshal(answer.Claims) // with the keys in order
	return string(text), err
}

func TestClusterRestartsKeepPods(t *testing.T) {
	c := startCluster(t, options{})
	c.startNVIDIA()
	c.startPlugin()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")
	c.create(claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"), "gpu-with-staged-lane"))
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")
	before := c.containers("a", "b")
	prepared, err := c.prepare()
	if err != nil || !strings.Contains(prepared, "peerlane.dev/lane=") {
		t.Fatalf("Prepare answers %s, %v", prepared, err)
	}

	// Relays are no children of the plugin.
	plugin := c.daemons["peerlane-kubelet"]
	plugin.kill(t)
	c.exchanged(2, "a", "b")

	c.daemons["kubelet"].kill(t)
	c.daemons["kubelet"].start(t)
	plugin.start(t)
	var again string
	c.until(patience, "the plugin answers again", func() string {
		var err error
		if again, err = c.prepare(); err != nil {
			return err.Error()
		}
		return ""
	})
	if again != prepared {
		t.Errorf("Prepare answers %s, and answered %s", again, prepared)
	}
	c.exchanged(3, "a", "b")
	if after := c.containers("a", "b"); !slices.Equal(before, after) {
		t.Errorf("containers and generations are %v, and were %v", after, before)
	}

	// A pod that is deleted while the plugin is stopped waits for the plugin.
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
	if phase, state := c.state("b"); phase == absent {
		t.Errorf("the pod is gone before its claims are unprepared: %s", state)
	}
	plugin.start(t)
	c.untilGone("b")

	// New pods use the released devices.
	c.clearRounds()
	c.remove("a")
	c.create(claiming(c.pod("c", "d"), "gpu-with-staged-lane"), claiming(c.pod("d", "c"), "gpu-with-staged-lane"))
	c.untilRunning("c", "d")
	c.exchanged(1, "c", "d")
	c.remove("c", "d")
}
