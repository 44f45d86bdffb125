package explain

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const busID = "resource.kubernetes.io/pciBusID"

func text(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }

func selecting(expression string) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
}

// slice returns the slice of a driver with one device per PCI address.
func slice(driver, node string, generation int64, addresses ...string) resourceapi.ResourceSlice {
	s := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &node,
		Pool: resourceapi.ResourcePool{Name: node, Generation: generation}}}
	for _, a := range addresses {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: driver[:3] + "-" + a,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{busID: text(a), "kind": text("staged")}})
	}
	return s
}

// allocated returns a claim that has a device.
func allocated(name, driver, device string) resourceapi.ResourceClaim {
	return resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
				{Driver: driver, Pool: "n1", Device: device}}}}}}
}

// cluster returns a node with the GPUs and lanes a and b, and the template pair.
func cluster() Cluster {
	lanes := slice("peerlane.dev", "n1", 2, "a", "b")
	return Cluster{
		Classes: []resourceapi.DeviceClass{
			{ObjectMeta: metav1.ObjectMeta{Name: "gpus"}, Spec: resourceapi.DeviceClassSpec{
				Selectors: selecting("device.driver == 'gpu.nvidia.com'"), ExtendedResourceName: ptr.To("nvidia.com/gpu")}},
			{ObjectMeta: metav1.ObjectMeta{Name: "lanes"}, Spec: resourceapi.DeviceClassSpec{
				Selectors: selecting("device.driver == 'peerlane.dev'")}},
		},
		Slices: []resourceapi.ResourceSlice{slice("gpu.nvidia.com", "n1", 1, "a", "b"), lanes,
			slice("peerlane.dev", "n1", 1, "old")},
		Templates: []resourceapi.ResourceClaimTemplate{{ObjectMeta: metav1.ObjectMeta{Name: "pair"},
			Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{
					{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpus", Count: 1}},
					{Name: "lane", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "lanes", Count: 1}}},
				Constraints: []resourceapi.DeviceConstraint{{Requests: []string{"gpu", "lane"},
					MatchAttribute: ptr.To(resourceapi.FullyQualifiedName(busID))}},
			}}}}},
	}
}

// number gives the devices of a slice an attribute that is a number, and constrains the template by it.
func number(c *Cluster, slice int, value int64) {
	const name = "resource.kubernetes.io/numaNode"
	for _, d := range c.Slices[slice].Spec.Devices {
		d.Attributes[name] = resourceapi.DeviceAttribute{IntValue: &value}
	}
	c.Templates[0].Spec.Spec.Devices.Constraints[0].MatchAttribute = ptr.To(resourceapi.FullyQualifiedName(name))
}

func TestPodNamesTheCause(t *testing.T) {
	pod := func() *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Spec: corev1.PodSpec{
			ResourceClaims: []corev1.PodResourceClaim{{Name: "devices", ResourceClaimTemplateName: ptr.To("pair")}}}}
	}
	const (
		gpu  = "claim devices, request gpu (1 of class gpus), node n1: "
		lane = "claim devices, request lane (1 of class lanes), node n1: "
	)
	for _, c := range []struct {
		name   string
		change func(p *corev1.Pod, c *Cluster)
		want   []string
	}{
		{"nothing is taken", func(*corev1.Pod, *Cluster) {}, []string{gpu + "2 free", lane + "2 free",
			"Node n1 has devices for each request: look at the pod's events for another cause, such as processors or " +
				"taints of the node."}},
		{"lanes are taken", func(_ *corev1.Pod, c *Cluster) {
			c.Claims = append(c.Claims, allocated("x", "peerlane.dev", "pee-a"), allocated("y", "peerlane.dev", "pee-b"))
		}, []string{gpu + "2 free", lane + "0 free, 2 allocated (pee-a by default/x, pee-b by default/y)"}},
		{"free GPU and free lane differ", func(_ *corev1.Pod, c *Cluster) {
			c.Claims = append(c.Claims, allocated("x", "peerlane.dev", "pee-a"), allocated("y", "gpu.nvidia.com", "gpu-b"))
		}, []string{gpu + "1 free, 1 allocated (gpu-b by default/y)", lane + "1 free, 1 allocated (pee-a by default/x)",
			"claim devices, node n1: no free devices of the requests gpu, lane have the same " + busID}},
		{"free GPU and free lane have the same number", func(_ *corev1.Pod, c *Cluster) {
			number(c, 0, 1)
			number(c, 1, 1)
		}, []string{gpu + "2 free", lane + "2 free", "Node n1 has devices"}},
		{"numbers of free GPU and free lane differ", func(_ *corev1.Pod, c *Cluster) {
			number(c, 0, 0)
			number(c, 1, 1)
		}, []string{gpu + "2 free", lane + "2 free",
			"claim devices, node n1: no free devices of the requests gpu, lane have the same resource.kubernetes.io/numaNode"}},
		{"a constraint of all requests", func(_ *corev1.Pod, c *Cluster) {
			c.Templates[0].Spec.Spec.Devices.Constraints[0].Requests = nil
			c.Claims = append(c.Claims, allocated("x", "peerlane.dev", "pee-a"), allocated("y", "gpu.nvidia.com", "gpu-b"))
		}, []string{gpu + "1 free, 1 allocated (gpu-b by default/y)", lane + "1 free, 1 allocated (pee-a by default/x)",
			"claim devices, node n1: no free devices of the requests gpu, lane have the same " + busID}},
		{"a taint", func(_ *corev1.Pod, c *Cluster) {
			c.Slices[1].Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "peerlane.dev/degraded",
				Effect: resourceapi.DeviceTaintEffectNone}}
			c.Slices[1].Spec.Devices[1].Taints = []resourceapi.DeviceTaint{{Key: "peerlane.dev/no-network",
				Effect: resourceapi.DeviceTaintEffectNoSchedule}}
			c.Claims = append(c.Claims, allocated("x", "peerlane.dev", "pee-a"))
		}, []string{gpu + "2 free",
			lane + "0 free, 1 allocated (pee-a by default/x), 1 tainted (pee-b with peerlane.dev/no-network)"}},
		{"a tolerated taint", func(_ *corev1.Pod, c *Cluster) {
			for i := range c.Slices[1].Spec.Devices {
				c.Slices[1].Spec.Devices[i].Taints = []resourceapi.DeviceTaint{{Key: "peerlane.dev/no-network",
					Effect: resourceapi.DeviceTaintEffectNoSchedule}}
			}
			c.Templates[0].Spec.Spec.Devices.Requests[1].Exactly.Tolerations = []resourceapi.DeviceToleration{
				{Key: "peerlane.dev/no-network", Operator: resourceapi.DeviceTolerationOpExists}}
		}, []string{gpu + "2 free", lane + "2 free", "Node n1 has devices"}},
		{"a shared device", func(_ *corev1.Pod, c *Cluster) {
			c.Slices[1].Spec.Devices[0].AllowMultipleAllocations = ptr.To(true)
			c.Claims = append(c.Claims, allocated("x", "peerlane.dev", "pee-a"))
		}, []string{gpu + "2 free", lane + "2 free", "Node n1 has devices"}},
		{"an attribute that a device lacks", func(_ *corev1.Pod, c *Cluster) {
			delete(c.Slices[1].Spec.Devices[1].Attributes, "kind")
			c.Templates[0].Spec.Spec.Devices.Requests[1].Exactly.Selectors =
				selecting("device.attributes['peerlane.dev'].kind == 'staged'")
		}, []string{gpu + "2 free",
			lane + "a selector fails for device pee-b, so that the node gets no pod with this request: "}},
		{"no device matches", func(_ *corev1.Pod, c *Cluster) {
			c.Templates[0].Spec.Spec.Devices.Requests[1].Exactly.Selectors =
				selecting("device.attributes['peerlane.dev'].kind == 'direct'")
		}, []string{gpu + "2 free", lane + "0 free: no device matches"}},
		{"all, and one is taken", func(_ *corev1.Pod, c *Cluster) {
			c.Templates[0].Spec.Spec.Devices.Requests[1].Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
			c.Claims = append(c.Claims, allocated("x", "peerlane.dev", "pee-a"))
		}, []string{gpu + "2 free", "claim devices, request lane (all of class lanes), node n1: 1 free, 1 allocated"}},
		{"no class", func(_ *corev1.Pod, c *Cluster) { c.Classes = c.Classes[:1] },
			[]string{gpu + "2 free", lane + "the cluster has no DeviceClass lanes"}},
		{"no template", func(_ *corev1.Pod, c *Cluster) { c.Templates = nil }, []string{
			"claim devices: namespace default has no ResourceClaimTemplate pair", "No request of the pod waits for devices."}},
		{"no slices", func(_ *corev1.Pod, c *Cluster) { c.Slices = nil }, []string{
			"No node has published a ResourceSlice: is the DaemonSet of each driver running?"}},
		{"limits", func(p *corev1.Pod, _ *Cluster) {
			p.Spec.ResourceClaims = nil
			p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{
				Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("3")}}}}
		}, []string{"claim of limits, request nvidia.com/gpu (3 of class gpus), node n1: 2 free"}},
		{"scheduled", func(p *corev1.Pod, _ *Cluster) { p.Spec.NodeName = "n1" },
			[]string{"The scheduler has chosen node n1: the pod has the devices."}},
	} {
		p, state := pod(), cluster()
		c.change(p, &state)
		got := Pod(t.Context(), p, state)
		if !slices.EqualFunc(got, c.want, strings.HasPrefix) {
			t.Errorf("%s:\n%s\nexpected the beginnings\n%s", c.name, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
}
