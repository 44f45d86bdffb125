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

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/lanes"
)

// usersOfTheDriver returns the processes that have the CUDA driver's library mapped, other than this one.
// A module of the kernel with a user cannot be unloaded.
func (c *cluster) usersOfTheDriver() (list []string) {
	c.Helper()
	maps, err := filepath.Glob("/proc/[0-9]*/maps")
	if err != nil {
		c.Fatal(err)
	}
	for _, path := range maps {
		text, err := os.ReadFile(path)
		mapped := func(library string) bool { return strings.Contains(string(text), library) }
		if err != nil || !slices.ContainsFunc(c.Libraries, mapped) {
			continue // an ended process, or another process
		}
		command, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		if pid := filepath.Base(filepath.Dir(path)); err == nil && pid != fmt.Sprint(os.Getpid()) {
			list = append(list, pid+" "+strings.ReplaceAll(string(command), "\x00", " "))
		}
	}
	return list
}

// holders returns the pods with an allocated claim of NVIDIA's driver, like GetGPUResourceClaimHolders of
// k8s-driver-manager.
func (c *cluster) holders() (pods []string) {
	c.Helper()
	list, err := c.client.CoreV1().Pods("default").List(c.Context(), metav1.ListOptions{
		FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		c.Fatal(err)
	}
	for _, p := range list.Items {
		if len(c.allocation(p.Name)[nvidiaDriver]) > 0 && p.Status.Phase != corev1.PodSucceeded &&
			p.Status.Phase != corev1.PodFailed {
			pods = append(pods, p.Name)
		}
	}
	return pods
}

// TestClusterDriverUpgradeEvictsPodsAndGivesLanesAgain does the steps of k8s-driver-manager in their order
// (uninstallDriver in cmd/driver-manager/main.go of NVIDIA/k8s-driver-manager at
// bd62ca7d4a25376a7edd67e2f247e124cd77cd9c): cordon, evict the pods with GPUs by kubectl's package drain,
// check that no pod holds a claim, stop NVIDIA's kubelet plugin, unload the modules, uncordon.
// peerlane-kubelet and the control plane know nothing of the upgrade.
func TestClusterDriverUpgradeEvictsPodsAndGivesLanesAgain(t *testing.T) {
	c := startCluster(t, options{})
	stop := c.startNVIDIA()
	c.startPlugin()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")
	limits := map[corev1.ResourceName]string{"nvidia.com/gpu": "1", "peerlane.dev/lanes": "1"}
	pods := func() []*corev1.Pod {
		return []*corev1.Pod{claiming(c.pod("a", "b"), "gpu-with-staged-lane"),
			claiming(c.pod("b", "a"), "gpu-with-staged-lane"), limited(c.pod("c", ""), limits)}
	}
	c.create(pods()...)
	c.untilRunning("a", "b", "c")
	c.exchanged(1, "a", "b")
	if users := c.usersOfTheDriver(); len(users) < 3 {
		t.Fatalf("with three pods the users of the driver are %q", users)
	}

	c.mustDo("kubectl", "cordon", nodeName)
	begun := time.Now()
	c.mustDo("kubectl", "drain", nodeName, "--ignore-daemonsets", "--force", "--timeout=2m")
	t.Logf("the pods are gone after %v", time.Since(begun).Round(100*time.Millisecond))
	if left := c.holders(); len(left) > 0 {
		t.Errorf("the pods %v hold claims", left)
	}
	stop()
	c.until(patience, "nothing uses the driver", func() string {
		if list, err := generation.List(c.Layout); err != nil || len(list) > 0 {
			return fmt.Sprintf("%d generations, %v", len(list), err)
		}
		return strings.Join(c.usersOfTheDriver(), ", ")
	})
	select {
	case err := <-c.daemons["peerlane-kubelet"].ended:
		t.Fatalf("peerlane-kubelet ended: %v", err)
	default:
	}

	// The new driver: NVIDIA's plugin starts, and `peerlane cdi refresh` reads the host again.
	if err := c.Configure(c.configureRelays); err != nil {
		t.Fatal(err)
	}
	c.startNVIDIA()
	c.mustDo("kubectl", "uncordon", nodeName)
	c.clearRounds()
	c.create(pods()...)
	c.untilRunning("a", "b", "c")
	c.exchanged(1, "a", "b")
	if got := c.allocation("c")[lanes.DriverName]; !slices.Equal(got, []string{lanes.Shared}) {
		t.Errorf("pod c has the devices %v", got)
	}
	c.remove("a", "b", "c")
}
