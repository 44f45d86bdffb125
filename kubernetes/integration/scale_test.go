//go:build cluster

package integration

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/peerlane/peerlane/kubernetes/lanes"
)

const (
	bareNodes   = 1000
	podsOfShape = 50
	// taintedEach: of this many nodes one has a lane with a taint.
	taintedEach = 10
)

// each calls f for 0 to n-1, with 16 calls at a time.
func (c *cluster) each(n int, f func(ctx context.Context, i int) error) {
	c.Helper()
	var wait sync.WaitGroup
	next, failed := make(chan int), make(chan error, 16)
	for range 16 {
		wait.Go(func() {
			for i := range next {
				if err := f(c.Context(), i); err != nil && !apierrors.IsAlreadyExists(err) {
					failed <- err
					break
				}
			}
			for range next { // the sender does not block
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wait.Wait()
	select {
	case err := <-failed:
		c.Fatal(err)
	default:
	}
}

// bareNode returns a node without a kubelet, and its slices.
func (c *cluster) bareNode(i int) (*corev1.Node, []*resourceapi.ResourceSlice) {
	name := fmt.Sprintf("bare-%04d", i)
	room := corev1.ResourceList{"cpu": resource.MustParse("200"), "memory": resource.MustParse("2Ti"),
		"pods": resource.MustParse("110")}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Allocatable: room, Capacity: room,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
	}}
	var gpus []resourceapi.Device
	for _, g := range c.Plan.GPUs {
		gpus = append(gpus, nvidia{}.device(g))
	}
	n := lanes.Node{Plan: c.Plan, Registration: "dmabuf", Version: "1.0.0"}
	if i%taintedEach == 0 {
		n.Taints = map[string][]resourceapi.DeviceTaint{c.Plan.Lanes[0].GPU: {{Key: "peerlane.dev/no-network",
			Effect: resourceapi.DeviceTaintEffectNoSchedule}}}
	}
	slice := func(driver string, devices []resourceapi.Device) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name + "-" + driver},
			Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &name, Devices: devices,
				Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1}}}
	}
	return node, []*resourceapi.ResourceSlice{slice(nvidiaDriver, gpus), slice(lanes.DriverName, lanes.Devices(n))}
}

// shape is a form of claim.
type shape struct {
	name string
	// devices is the number of devices that a claim gets.
	devices int
	claim   resourceapi.DeviceClaim
}

func request(name, class string, count int64) resourceapi.DeviceRequest {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: class,
		AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	if count == 0 {
		exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: exactly}
}

// shapes are the claims of the examples, with one GPU and with the GPUs of a node. The first has GPUs alone.
func shapes(gpus int64) []shape {
	const gpu, lane, all = "gpu.nvidia.com", "lane.peerlane.dev", "lanes.peerlane.dev"
	pair := resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{request("gpu", gpu, 1), request("lane", lane, 1)},
		Constraints: []resourceapi.DeviceConstraint{{Requests: []string{"gpu", "lane"},
			MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("resource.kubernetes.io/pciBusID"))}}}
	return []shape{
		{"a GPU", 1, resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request("gpu", gpu, 1)}}},
		{"a GPU with its lane (lane-claim.yaml)", 2, pair},
		{"a GPU and lanes (lanes-claim.yaml)", 2, resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{request("gpu", gpu, 1), request("lanes", all, 1)}}},
		{"every GPU", int(gpus), resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request("gpu", gpu, gpus)}}},
		{"every GPU and lanes", int(gpus) + 1, resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{request("gpu", gpu, gpus), request("lanes", all, 1)}}},
		{"all GPUs and all lanes (all-claim.yaml)", 2 * int(gpus), resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{request("gpus", gpu, 0), request("lanes", lane, 0)}}},
	}
}

// schedule creates pods with a claim each, and returns the number of pods that the scheduler binds in a
// second. prefix makes the names unique.
func (c *cluster) schedule(prefix string, s shape) float64 {
	c.Helper()
	c.each(podsOfShape, func(ctx context.Context, i int) error {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", prefix, i)},
			Spec: resourceapi.ResourceClaimSpec{Devices: s.claim}}
		_, err := c.client.ResourceV1().ResourceClaims("default").Create(ctx, claim, metav1.CreateOptions{})
		return err
	})
	begun := time.Now()
	c.each(podsOfShape, func(ctx context.Context, i int) error {
		p := c.pod(fmt.Sprintf("%s-%d", prefix, i), "")
		p.Labels = map[string]string{"shape": prefix}
		p.Spec.Volumes, p.Spec.Containers[0].VolumeMounts = nil, nil
		p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}} // bare nodes are not ready
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "devices", ResourceClaimName: &p.Name}}
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "devices"}}
		_, err := c.client.CoreV1().Pods("default").Create(ctx, p, metav1.CreateOptions{})
		return err
	})
	c.until(10*time.Minute, fmt.Sprintf("%d pods with %s are bound", podsOfShape, s.name), func() string {
		list, err := c.client.CoreV1().Pods("default").List(c.Context(),
			metav1.ListOptions{LabelSelector: "shape=" + prefix})
		if err != nil {
			return err.Error()
		}
		bound := 0
		for _, p := range list.Items {
			if p.Spec.NodeName != "" {
				bound++
			}
		}
		if bound < podsOfShape {
			return fmt.Sprintf("%d pods", bound)
		}
		return ""
	})
	took := time.Since(begun)
	c.mustHaveDevices(prefix, s)
	return podsOfShape / took.Seconds()
}

// mustHaveDevices requires that each claim has devices of one node, and no lane with a taint.
func (c *cluster) mustHaveDevices(prefix string, s shape) {
	c.Helper()
	bytes := 0
	for i := range podsOfShape {
		claim, err := c.client.ResourceV1().ResourceClaims("default").Get(c.Context(), fmt.Sprintf("%s-%d", prefix, i),
			metav1.GetOptions{})
		if err != nil {
			c.Fatal(err)
		}
		results := claim.Status.Allocation.Devices.Results
		if len(results) != s.devices {
			c.Fatalf("a claim of %s has %d devices: %v", s.name, len(results), results)
		}
		for _, r := range results {
			number, err := strconv.Atoi(strings.TrimPrefix(r.Pool, "bare-"))
			if err != nil || r.Pool != results[0].Pool {
				c.Errorf("the devices of a claim of %s are %v, %v", s.name, results, err)
			}
			if number%taintedEach == 0 && r.Device == lanes.Name(c.Plan.Lanes[0].GPU) {
				c.Errorf("a claim of %s has the lane %s of %s, which has a taint", s.name, r.Device, r.Pool)
			}
		}
		bytes += claim.Size()
	}
	c.Logf("a claim of %s has %d bytes", s.name, bytes/podsOfShape)
}

// resident returns the memory of a daemon in MiB.
func (c *cluster) resident(name string) int {
	c.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.daemons[name].process.Pid))
	if err != nil {
		c.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		c.Fatal(err)
	}
	return kib >> 10
}

// TestClusterSchedulesPodsOnAThousandNodes measures the real scheduler on nodes without kubelets, as
// ratios to pods with GPUs alone. docs/benchmarks/scale.md has the figures.
func TestClusterSchedulesPodsOnAThousandNodes(t *testing.T) {
	c := startCluster(t, options{bare: true})
	c.apply(nvidiaClass)
	c.mustDo("kubectl", "apply", "-f", classes)
	programs := []string{"etcd", "kube-apiserver", "kube-scheduler"}
	before := map[string]int{}
	for _, name := range programs {
		before[name] = c.resident(name)
	}
	begun := time.Now()
	c.each(bareNodes, func(ctx context.Context, i int) error {
		node, slices := c.bareNode(i)
		if _, err := c.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return err
		}
		for _, s := range slices {
			created, err := c.client.ResourceV1().ResourceSlices().Create(ctx, s, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			if i == 1 {
				t.Logf("a slice of %s has %d devices and %d bytes", s.Spec.Driver, len(s.Spec.Devices), created.Size())
			}
		}
		return nil
	})
	t.Logf("%d nodes and their slices exist after %v", bareNodes, time.Since(begun).Round(time.Second))
	all := shapes(int64(len(c.Plan.GPUs)))
	c.schedule("warm", all[0]) // the scheduler's caches fill, and its selectors are compiled
	var rates []float64
	for i, s := range all {
		rates = append(rates, c.schedule(fmt.Sprintf("s%d", i), s))
	}
	again := c.schedule("again", all[0])
	alone := []float64{(rates[0] + again) / 2, rates[3]}
	for i, s := range all {
		t.Logf("%s: %.1f pods/s, %.2f of GPUs alone", s.name, rates[i], rates[i]/alone[i/3])
	}
	t.Logf("a GPU at the end: %.1f pods/s", again)
	for _, name := range slices.Sorted(slices.Values(programs)) {
		t.Logf("%s: %d MiB, and %d without nodes", name, c.resident(name), before[name])
	}
}
