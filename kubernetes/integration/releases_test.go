//go:build cluster

package integration

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/peerlane/peerlane/kubernetes/lanes"
	"github.com/peerlane/peerlane/topo"
)

// nvidiaPlugin is a fake of NVIDIA's device plugin in CDI mode.
type nvidiaPlugin struct {
	api.UnimplementedDevicePluginServer
	gpus []topo.GPU
}

func (p *nvidiaPlugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *nvidiaPlugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	var all api.ListAndWatchResponse
	for _, g := range p.gpus {
		all.Devices = append(all.Devices, &api.Device{ID: fmt.Sprint(g.Index), Health: api.Healthy})
	}
	if err := stream.Send(&all); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *nvidiaPlugin) Allocate(_ context.Context, r *api.AllocateRequest) (*api.AllocateResponse, error) {
	out := &api.AllocateResponse{}
	for _, c := range r.ContainerRequests {
		answer := &api.ContainerAllocateResponse{}
		for _, id := range c.DevicesIds {
			answer.CdiDevices = append(answer.CdiDevices, &api.CDIDevice{Name: "nvidia.com/gpu=" + id})
		}
		out.ContainerResponses = append(out.ContainerResponses, answer)
	}
	return out, nil
}

// startNVIDIAPlugin runs the fake of NVIDIA's device plugin until the end of the test.
func (c *cluster) startNVIDIAPlugin() {
	c.Helper()
	const name = "nvidia-gpu.sock"
	dir := filepath.Join(kubeletDir, "device-plugins")
	listener, err := net.Listen("unix", filepath.Join(dir, name))
	if err != nil {
		c.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &nvidiaPlugin{gpus: c.Plan.GPUs})
	go server.Serve(listener) // ends with Stop
	c.Cleanup(server.Stop)
	conn, err := grpc.NewClient("unix:"+filepath.Join(dir, "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		c.Fatal(err)
	}
	defer conn.Close()
	if _, err := api.NewRegistrationClient(conn).Register(c.Context(),
		&api.RegisterRequest{Version: api.Version, Endpoint: name,
			ResourceName: "nvidia.com/gpu"}); err != nil {
		c.Fatal(err)
	}
}

// untilAllocatable waits until the node has a number of units of an extended resource.
func (c *cluster) untilAllocatable(name corev1.ResourceName, n int64) time.Duration {
	c.Helper()
	return c.until(maxDelay, fmt.Sprintf("the node has %d of %s", n, name), func() string {
		node, err := c.client.CoreV1().Nodes().Get(c.Context(), nodeName, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if q := node.Status.Allocatable[name]; q.Value() != n {
			return q.String()
		}
		return ""
	})
}

// units is the default of --units.
const units = 64

// mustLog requires words in the log of peerlane-kubelet.
func (c *cluster) mustLog(words string) {
	c.Helper()
	text, err := os.ReadFile(c.daemons["peerlane-kubelet"].log)
	if err != nil || !strings.Contains(string(text), words) {
		c.Errorf("peerlane-kubelet does not say %q: %v: %s", words, err, text)
	}
}

func TestClusterWithoutDRAHasADevicePlugin(t *testing.T) {
	// The control plane is that of Kubernetes 1.34, the last release that can run without DRA. The
	// kubelet's feature gate cannot be closed, and has no effect without the API.
	c := startCluster(t, options{
		controlPlane: []string{"--emulated-version=1.34", "--feature-gates=DynamicResourceAllocation=false," +
			"DRAAdminAccess=false,DRAPrioritizedList=false,DRASchedulerFilterTimeout=false"},
		apiServer: []string{"--runtime-config=resource.k8s.io/v1=false"},
	})
	if _, err := c.client.Discovery().ServerResourcesForGroupVersion("resource.k8s.io/v1"); err == nil {
		t.Error("the API server has resource.k8s.io/v1")
	}
	c.startNVIDIAPlugin()
	c.startPlugin()
	c.untilAllocatable("nvidia.com/gpu", int64(len(c.Plan.GPUs)))
	c.untilAllocatable("peerlane.dev/lanes", units)
	c.mustLog("mode=device-plugin")
	limits := map[corev1.ResourceName]string{"nvidia.com/gpu": "2", "peerlane.dev/lanes": "1"}
	c.create(limited(c.pod("a", "b"), limits), limited(c.pod("b", "a"), limits))
	c.untilRunning("a", "b")
	for _, r := range c.exchanged(1, "a", "b") {
		if len(r.GPUs) != 2 || !r.Socket {
			t.Errorf("a pod with the limits %v sees the GPUs %v and the socket %v", limits, r.GPUs, r.Socket)
		}
		c.mustBeUnprivileged(r)
	}
	c.remove("a", "b")
	for _, l := range c.Plan.Lanes {
		for _, nic := range l.NICs {
			c.setPort(nic, portDown)
		}
	}
	t.Logf("the lanes are gone after %v", c.untilAllocatable("peerlane.dev/lanes", 0).Round(100*time.Millisecond))
}

func TestClusterWithoutTaintsWithdrawsUnhealthyLanes(t *testing.T) {
	c := startCluster(t, options{controlPlane: []string{"--emulated-version=1.35"}})
	c.startNVIDIA()
	c.startPlugin()
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")
	devices := c.untilPublished(len(c.Plan.Lanes))
	c.mustLog("mode=mixed")
	if _, ok := devices[lanes.Shared]; ok {
		t.Errorf("the device %s would serve one claim", lanes.Shared)
	}
	c.untilAllocatable("peerlane.dev/lanes", units)
	c.create(claiming(c.pod("a", "b"), "gpu-with-staged-lane"), claiming(c.pod("b", "a"), "gpu-with-staged-lane"))
	c.untilRunning("a", "b")
	c.exchanged(1, "a", "b")

	nic := c.Plan.Lanes[0].NICs[0]
	down := c.lanesOf(nic)
	c.setPort(nic, portDown)
	left := len(c.Plan.Lanes) - len(down)
	took := c.until(maxDelay, "the lanes of "+nic+" leave the slice", func() string {
		devices := c.slice(lanes.DriverName)
		for _, name := range down {
			if _, ok := devices[name]; ok {
				return name + " is in the slice"
			}
		}
		if len(devices) != left {
			return fmt.Sprintf("%d devices instead of %d", len(devices), left)
		}
		return ""
	})
	t.Logf("the lanes of %s leave the slice after %v", nic, took.Round(100*time.Millisecond))
	c.exchanged(2, "a", "b") // running pods keep their lanes
	c.setPort(nic, portActive)
	c.untilPublished(len(c.Plan.Lanes))
	c.remove("a", "b")

	// GPUs of a claim, and the lanes of these GPUs by the device plugin.
	c.clearRounds()
	c.apply(gpuClaim)
	limits := map[corev1.ResourceName]string{"peerlane.dev/lanes": "1"}
	c.create(limited(claiming(c.pod("c", "d"), "two-gpus"), limits), limited(claiming(c.pod("d", "c"),
		"two-gpus"), limits))
	c.untilRunning("c", "d")
	for _, r := range c.exchanged(1, "c", "d") {
		if len(r.GPUs) != 2 || !r.Socket {
			t.Errorf("a pod sees the GPUs %v and the socket %v", r.GPUs, r.Socket)
		}
	}
	c.remove("c", "d")
}

const gpuClaim = `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two-gpus}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 2}}]}}}
`
