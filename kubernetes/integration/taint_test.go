//go:build cluster

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/peerlane/peerlane/kubernetes/lanes"
)

// maxDelay is the time within which a failed port becomes a taint.
const maxDelay = 40 * time.Second

// setPort writes the state of a NIC's port.
func (c *cluster) setPort(nic, state string) {
	c.Helper()
	path := filepath.Join(c.Plan.Source.Sysfs, "class/infiniband", nic, "ports/1/state")
	if err := os.WriteFile(path, []byte(state+"\n"), 0o644); err != nil {
		c.Fatal(err)
	}
}

// Values of a port's state in sysfs.
const (
	portActive = "4: ACTIVE"
	portDown   = "1: DOWN"
)

// lanesOf returns the device names of the lanes that use only the NIC nic.
func (c *cluster) lanesOf(nic string) (names []string) {
	for _, l := range c.Plan.Lanes {
		if slices.Equal(l.NICs, []string{nic}) {
			names = append(names, lanes.Name(l.GPU))
		}
	}
	return names
}

func TestClusterPortDownTaintsItsLanes(t *testing.T) {
	c := startCluster(t, options{})
	c.startNVIDIA()
	c.startPlugin()
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")
	c.untilPublished(len(c.Plan.Lanes) + 1)
	nic := c.Plan.Lanes[0].NICs[0]
	down := c.lanesOf(nic)
	if len(down) == 0 || len(down) == len(c.Plan.Lanes) {
		t.Fatalf("%d of %d lanes have the NIC %s", len(down), len(c.Plan.Lanes), nic)
	}
	// tainted compares the taints of all lanes.
	tainted := func(want bool) func() string {
		return func() string {
			for name, d := range c.slice(lanes.DriverName) {
				hasTaint := false
				for _, taint := range d.Taints {
					hasTaint = hasTaint || taint.Key == "peerlane.dev/no-network" && taint.Effect == "NoSchedule"
				}
				if hasTaint != (want && slices.Contains(down, name)) {
					return name + " has not the expected taints"
				}
			}
			return ""
		}
	}
	if state := tainted(false)(); state != "" {
		t.Fatal(state)
	}
	c.setPort(nic, portDown)
	t.Logf("the taint appears after %v", c.until(maxDelay, "the lanes of "+nic+" have the taint",
		tainted(true)).Round(100*time.Millisecond))
	c.create(claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"), "gpu-with-staged-lane"))
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")
	for _, pod := range []string{"a", "b"} {
		if got := c.allocation(pod)[lanes.DriverName]; len(got) != 1 || slices.Contains(down, got[0]) {
			t.Errorf("pod %s has the lanes %v; those of %s are tainted", pod, got, nic)
		}
	}
	// No healthy lane remains.
	c.create(claiming(c.pod("c", "d"), "gpu-with-staged-lane"))
	c.untilPending("c", "cannot allocate all claims")
	if out := c.mustDo(kubelet, "explain", "c"); !strings.Contains(out, " with peerlane.dev/no-network") ||
		!strings.Contains(out, " by default/a-devices-") {
		t.Errorf("explain says %s", out)
	}
	c.setPort(nic, portActive)
	t.Logf("the taint is gone after %v", c.until(maxDelay, "no lane has the taint",
		tainted(false)).Round(100*time.Millisecond))
	c.untilRunning("c")

	// The ports of pod a's lane fail: a taint, an event of the pod and a metric report the failure.
	c.daemon("exporter", nil, kubelet, "exporter", "--root", c.Layout.Root, "--listen", "127.0.0.1:9836")
	lost := c.allocation("a")[lanes.DriverName][0]
	gpu, known := lanes.BusID(c.Plan, lost)
	if !known {
		t.Fatalf("the plan has no lane %s", lost)
	}
	for _, l := range c.Plan.Lanes {
		if l.GPU == gpu {
			for _, nic := range l.NICs {
				c.setPort(nic, portDown)
			}
		}
	}
	series := fmt.Sprintf(`peerlane_lane_condition{condition="no-network",gpu=%q} 1`, gpu)
	t.Logf("taint, event and metric appear after %v", c.until(maxDelay, "the failure is shown", func() string {
		if taints := c.slice(lanes.DriverName)[lost].Taints; !slices.ContainsFunc(taints,
			func(t resourceapi.DeviceTaint) bool { return t.Key == "peerlane.dev/no-network" }) {
			return fmt.Sprintf("%s has the taints %v", lost, taints)
		}
		if _, state := c.state("a"); !strings.Contains(state,
			"The lane of GPU "+gpu+" of container main: no active port") {
			return state
		}
		if text := c.metrics(); !strings.Contains(text, series) {
			return text
		}
		return ""
	}).Round(100*time.Millisecond))
	c.remove("a", "b", "c")
}
