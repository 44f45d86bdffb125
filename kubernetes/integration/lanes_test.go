//go:build cluster

package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/kubernetes/lanes"
)

// patience is the limit of a step that takes a second on an idle machine.
const patience = 30 * time.Second

// slice returns the devices that a driver has published, by name.
func (c *cluster) slice(driver string) map[string]resourceapi.Device {
	c.Helper()
	list, err := c.client.ResourceV1().ResourceSlices().List(c.Context(), metav1.ListOptions{})
	if err != nil {
		c.Fatal(err)
	}
	devices := map[string]resourceapi.Device{}
	for _, s := range list.Items {
		if s.Spec.Driver == driver {
			for _, d := range s.Spec.Devices {
				devices[d.Name] = d
			}
		}
	}
	return devices
}

// untilPublished waits until peerlane-kubelet has published a number of devices.
func (c *cluster) untilPublished(n int) map[string]resourceapi.Device {
	c.Helper()
	var devices map[string]resourceapi.Device
	c.until(maxDelay, fmt.Sprintf("%d devices are published", n), func() string {
		if devices = c.slice(lanes.DriverName); len(devices) == n {
			return ""
		}
		return fmt.Sprintf("%d devices", len(devices))
	})
	return devices
}

// pod returns a pod without privileges that exchanges messages with another pod.
func (c *cluster) pod(name, other string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: ptr.To(int64(1)),
			SecurityContext: &corev1.PodSecurityContext{
				RunAsUser: ptr.To(int64(1000)), RunAsGroup: ptr.To(int64(1000)), RunAsNonRoot: ptr.To(true),
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Volumes: []corev1.Volume{{Name: "reports", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: c.reports}}}},
			Containers: []corev1.Container{{
				Name: "main", Image: imageName, ImagePullPolicy: corev1.PullNever,
				Command:      []string{"/usr/bin/test-peerlane", "exchange", name, other},
				VolumeMounts: []corev1.VolumeMount{{Name: "reports", MountPath: reportsDir}},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: ptr.To(false),
					Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
}

// claiming gives a pod a claim of a template.
func claiming(p *corev1.Pod, template string) *corev1.Pod {
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "devices", ResourceClaimTemplateName: &template}}
	p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "devices"}}
	return p
}

// limited gives a pod extended resources.
func limited(p *corev1.Pod, limits map[corev1.ResourceName]string) *corev1.Pod {
	list := corev1.ResourceList{}
	for name, n := range limits {
		list[name] = resource.MustParse(n)
	}
	p.Spec.Containers[0].Resources.Limits = list
	return p
}

func (c *cluster) create(pods ...*corev1.Pod) {
	c.Helper()
	for _, p := range pods {
		if _, err := c.client.CoreV1().Pods(p.Namespace).Create(c.Context(), p, metav1.CreateOptions{}); err != nil &&
			!apierrors.IsAlreadyExists(err) { // a repeated request created the pod
			c.Fatal(err)
		}
	}
}

// absent is the phase of a pod that does not exist.
const absent corev1.PodPhase = "absent"

// state returns the phase of a pod, and describes the pod for a failure.
func (c *cluster) state(name string) (corev1.PodPhase, string) {
	c.Helper()
	p, err := c.client.CoreV1().Pods("default").Get(c.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return absent, err.Error()
	}
	if err != nil {
		return "", err.Error()
	}
	events, err := c.client.CoreV1().Events("default").List(c.Context(),
		metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
	if err != nil {
		return "", err.Error()
	}
	text := fmt.Sprintf("pod %s is %s: %v", name, p.Status.Phase, p.Status.ContainerStatuses)
	for _, e := range events.Items {
		text += "; " + e.Message
	}
	return p.Status.Phase, text
}

// untilRunning waits until pods run.
func (c *cluster) untilRunning(names ...string) {
	c.Helper()
	for _, name := range names {
		took := c.until(patience, "pod "+name+" runs", func() string {
			phase, state := c.state(name)
			if phase == corev1.PodRunning {
				return ""
			}
			return state
		})
		c.Logf("pod %s runs after %v", name, took.Round(10*time.Millisecond))
	}
}

// untilPending waits until the scheduler has refused a pod with a message that contains words.
func (c *cluster) untilPending(name, words string) {
	c.Helper()
	c.until(patience, "pod "+name+" is refused", func() string {
		phase, state := c.state(name)
		if phase == corev1.PodPending && strings.Contains(state, words) {
			return ""
		}
		return state
	})
}

// remove deletes pods and waits until the pods and their claims do not exist.
func (c *cluster) remove(names ...string) {
	c.Helper()
	for _, name := range names {
		if err := c.client.CoreV1().Pods("default").Delete(c.Context(), name, metav1.DeleteOptions{}); err != nil &&
			!apierrors.IsNotFound(err) {
			c.Fatal(err)
		}
	}
	for _, name := range names {
		c.untilGone(name)
	}
	c.until(patience, "relays end", func() string {
		list, err := generation.List(c.Layout)
		if err != nil || len(list) > 0 && c.pods() == 0 {
			return fmt.Sprintf("%v, %d generations", err, len(list))
		}
		return ""
	})
}

func (c *cluster) pods() int {
	c.Helper()
	list, err := c.client.CoreV1().Pods("default").List(c.Context(), metav1.ListOptions{})
	if err != nil {
		c.Fatal(err)
	}
	return len(list.Items)
}

func (c *cluster) untilGone(name string) {
	c.Helper()
	c.until(patience, "pod "+name+" is gone", func() string {
		if phase, state := c.state(name); phase != absent {
			return state
		}
		return ""
	})
}

// exchanged runs a round in the pods, and returns the reports.
func (c *cluster) exchanged(round int, names ...string) []report {
	c.Helper()
	if err := os.WriteFile(filepath.Join(c.reports, roundFile(round)), nil, 0o644); err != nil {
		c.Fatal(err)
	}
	var reports []report
	for _, name := range names {
		var r report
		c.until(patience, fmt.Sprintf("pod %s ends round %d", name, round), func() string {
			text, err := os.ReadFile(filepath.Join(c.reports, reportFile(name, round)))
			if err != nil {
				_, state := c.state(name)
				return err.Error() + ": " + state
			}
			if err := json.Unmarshal(text, &r); err != nil {
				c.Fatal(err)
			}
			return ""
		})
		if r.Error != "" || r.Exchange.BytesReceived < bytesPerDirection || len(r.Exchange.Failures) > 0 {
			c.Errorf("pod %s, round %d: error %q, exchange %+v", name, round, r.Error, r.Exchange)
		}
		reports = append(reports, r)
	}
	return reports
}

// clearRounds removes the files of earlier rounds.
func (c *cluster) clearRounds() {
	c.Helper()
	files, err := filepath.Glob(filepath.Join(c.reports, "*"))
	if err != nil {
		c.Fatal(err)
	}
	for _, path := range files {
		if err := os.Remove(path); err != nil {
			c.Fatal(err)
		}
	}
}

// mustBeUnprivileged requires that a pod's process has no privilege and a separate network.
func (c *cluster) mustBeUnprivileged(r report) {
	c.Helper()
	host, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		c.Fatal(err)
	}
	for _, line := range []string{"CapEff:\t0000000000000000\n", "CapBnd:\t0000000000000000\n", "Seccomp:\t2\n",
		"NoNewPrivs:\t1\n"} {
		if !strings.Contains(r.Status, line) {
			c.Errorf("/proc/self/status has no %q: %s", line, r.Status)
		}
	}
	if r.UID != 1000 || r.Network == host || r.Network == "" {
		c.Errorf("uid %d, network namespace %s; that of the host is %s", r.UID, r.Network, host)
	}
}

// allocation returns the devices of the only claim of a pod, by driver.
func (c *cluster) allocation(pod string) map[string][]string {
	c.Helper()
	list, err := c.client.ResourceV1().ResourceClaims("default").List(c.Context(), metav1.ListOptions{})
	if err != nil {
		c.Fatal(err)
	}
	devices := map[string][]string{}
	for _, claim := range list.Items {
		if !slices.ContainsFunc(claim.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Name == pod }) {
			continue
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			devices[r.Driver] = append(devices[r.Driver], r.Device)
		}
	}
	return devices
}

func TestClusterPodsWithLanesExchange(t *testing.T) {
	c := startCluster(t, options{})
	c.startNVIDIA()
	c.startPlugin()
	devices := c.untilPublished(len(c.Plan.Lanes) + 1)
	if d := devices[lanes.Shared]; d.AllowMultipleAllocations == nil || !*d.AllowMultipleAllocations {
		t.Errorf("the device %s is exclusive: %+v", lanes.Shared, d)
	}
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")

	c.create(claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"), "gpu-with-staged-lane"))
	c.untilRunning("a", "b")
	for i, r := range c.exchanged(1, "a", "b") {
		pod := []string{"a", "b"}[i]
		got := c.allocation(pod)
		if len(got[nvidiaDriver]) != 1 || len(got[lanes.DriverName]) != 1 {
			t.Fatalf("pod %s has the devices %v", pod, got)
		}
		g, err := c.Plan.GPU(strings.TrimPrefix(got[nvidiaDriver][0], "gpu-"))
		if err != nil {
			t.Fatal(err)
		}
		if lane := lanes.Name(g.BusID); got[lanes.DriverName][0] != lane {
			t.Errorf("pod %s has %v; the lane of the GPU is %s", pod, got, lane)
		}
		if want := fmt.Sprintf("/dev/nvidia%d", g.Minor); !slices.Equal(r.GPUs, []string{want}) || !r.Socket {
			t.Errorf("pod %s sees the GPUs %v and the socket %v; %s is expected", pod, r.GPUs, r.Socket, want)
		}
		c.mustBeUnprivileged(r)
	}
	c.remove("a", "b")

	// Extended resources need no claim: the hook gives the lanes of the GPUs.
	c.clearRounds()
	limits := map[corev1.ResourceName]string{"nvidia.com/gpu": "2", "peerlane.dev/lanes": "1"}
	c.create(limited(c.pod("c", "d"), limits), limited(c.pod("d", "c"), limits))
	c.untilRunning("c", "d")
	for _, r := range c.exchanged(1, "c", "d") {
		if len(r.GPUs) != 2 || !r.Socket {
			t.Errorf("a pod with the limits %v sees the GPUs %v and the socket %v", limits, r.GPUs, r.Socket)
		}
	}
	c.remove("c", "d")
}
