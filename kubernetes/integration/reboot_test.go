//go:build cluster

package integration

import (
	"errors"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/lanes"
)

// reboot ends the programs and containers of the node, and removes the files of a boot and the state
// directory of Peerlane. The start of the host mounts the anchor and writes plan and specifications. The
// boot id stays: one kernel runs the node and the test.
func (c *cluster) reboot() {
	c.Helper()
	for _, name := range []string{"kubelet", "peerlane-kubelet"} {
		c.daemons[name].kill(c.T)
	}
	c.endContainers()
	c.daemons["containerd"].kill(c.T)
	c.endShims()
	c.unmount()
	c.until(patience, "relays end", func() string {
		list, err := generation.List(c.Layout)
		if err != nil {
			return err.Error()
		}
		for _, g := range list {
			if g.Status.Relay != nil && syscall.Kill(g.Status.Relay.PID, 0) == nil {
				return "relay of generation " + g.ID
			}
		}
		return ""
	})
	if _, err := c.Layout.UnmountAnchor(); err != nil {
		c.Fatal(err)
	}
	for _, dir := range []string{c.in("containerd"), "/run/containerd", c.Layout.State(), c.Layout.Run()} {
		if err := os.RemoveAll(dir); err != nil {
			c.Fatal(err)
		}
	}
	c.clearRounds()
	var err error
	if paths.MountsAnchor() {
		err = c.Layout.MountAnchor()
	}
	if err = errors.Join(err, c.Configure(c.configureRelays)); err != nil {
		c.Fatal(err)
	}
	for _, name := range []string{"containerd", "peerlane-kubelet", "kubelet"} {
		c.daemons[name].start(c.T)
	}
}

func TestClusterRebootedNodeGivesPodsTheirLanesAgain(t *testing.T) {
	c := startCluster(t, options{})
	c.startNVIDIA()
	c.startPlugin()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")
	pods := []*corev1.Pod{claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"),
		"gpu-with-staged-lane")}
	for _, p := range pods {
		p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	}
	c.create(pods...)
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")
	before := c.containers("a", "b")
	lanesBefore := [][]string{c.allocation("a")[lanes.DriverName], c.allocation("b")[lanes.DriverName]}

	c.reboot()
	took := c.until(2*patience, "the kubelet starts the pods again", func() string {
		list, err := generation.List(c.Layout)
		if err != nil || len(list) != 2 {
			_, state := c.state("a")
			return state
		}
		return ""
	})
	t.Logf("the pods have relays %v after the reboot", took.Round(100*time.Millisecond))
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")
	for _, id := range c.containers("a", "b") {
		if slices.Contains(before, id) {
			t.Errorf("container or generation %s is that of before the reboot", id)
		}
	}
	for i, name := range []string{"a", "b"} {
		if got := c.allocation(name)[lanes.DriverName]; !slices.Equal(got, lanesBefore[i]) {
			t.Errorf("pod %s has the lanes %v, and had %v", name, got, lanesBefore[i])
		}
	}
	c.remove("a", "b")
}
