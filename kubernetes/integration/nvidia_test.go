//go:build cluster

package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/peerlane/peerlane/topo"
)

// nvidia is a fake of NVIDIA's DRA driver. The names, attributes and capacity of the devices are those of
// cmd/gpu-kubelet-plugin/deviceinfo.go (GpuInfo.GetDevice) of kubernetes-sigs/dra-driver-nvidia-gpu at
// 95932046683719c43b6a0dd9613c2e5aad5d6703, and the class is that of its chart. The CDI devices are
// those of the simulated host's specification.
type nvidia struct{ gpus []topo.GPU }

const nvidiaDriver = "gpu.nvidia.com"

// nvidiaClass is templates/deviceclass-gpu.yaml of the driver's chart.
const nvidiaClass = `apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: gpu.nvidia.com
spec:
  selectors:
  - cel:
      expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"
  extendedResourceName: nvidia.com/gpu
`

func (n nvidia) name(g topo.GPU) string { return fmt.Sprintf("gpu-%d", g.Minor) }

func (n nvidia) device(g topo.GPU) resourceapi.Device {
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	version := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{VersionValue: &s} }
	d := resourceapi.Device{
		Name: n.name(g),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"type": text("gpu"), "uuid": text(g.UUID), "productName": text("NVIDIA H100 80GB HBM3"),
			"brand":        text("Nvidia"),
			"architecture": text("Hopper"), "cudaComputeCapability": version("9.0.0"), "driverVersion": version("580.95.5"),
			"cudaDriverVersion": version("13.0.0"), "addressingMode": text("HMM"),
			deviceattribute.StandardDeviceAttributePCIBusID: text(g.BusID),
			deviceattribute.StandardDeviceAttributePCIeRoot: text(g.HostBridge),
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"memory": {Value: resource.MustParse("81559Mi")},
		},
	}
	if g.NUMA >= 0 {
		numa := resourceapi.DeviceAttribute{IntValue: ptr.To(int64(g.NUMA))}
		d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = numa
	}
	return d
}

func (n nvidia) PrepareResourceClaims(_ context.Context,
	claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		var r kubeletplugin.PrepareResult
		for _, a := range claim.Status.Allocation.Devices.Results {
			for _, g := range n.gpus {
				if a.Driver == nvidiaDriver && a.Device == n.name(g) {
					r.Devices = append(r.Devices, kubeletplugin.Device{Requests: []string{a.Request}, PoolName: a.Pool,
						DeviceName:   a.Device,
						CDIDeviceIDs: []string{fmt.Sprintf("nvidia.com/gpu=%d", g.Index)}})
				}
			}
		}
		results[claim.UID] = r
	}
	return results, nil
}

func (n nvidia) UnprepareResourceClaims(_ context.Context,
	claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = nil
	}
	return results, nil
}

func (n nvidia) HandleError(context.Context, error, string) {} // the helper retries

func (n nvidia) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// startNVIDIA runs the fake of NVIDIA's driver until stop or the end of the test, and creates the driver's
// class.
func (c *cluster) startNVIDIA() (stop func()) {
	c.Helper()
	n := nvidia{c.Plan.GPUs}
	data := filepath.Join(kubeletDir, "plugins", nvidiaDriver)
	if err := os.MkdirAll(data, 0o750); err != nil {
		c.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	helper, err := kubeletplugin.Start(ctx, n, kubeletplugin.DriverName(nvidiaDriver),
		kubeletplugin.KubeClient(c.client),
		kubeletplugin.NodeName(c.node), kubeletplugin.RegistrarDirectoryPath(filepath.Join(kubeletDir,
			"plugins_registry")),
		kubeletplugin.PluginDataDirectoryPath(data))
	if err != nil {
		cancel()
		c.Fatal(err)
	}
	stop = sync.OnceFunc(func() { cancel(); helper.Stop() })
	c.Cleanup(stop)
	var slice resourceslice.Slice
	for _, g := range n.gpus {
		slice.Devices = append(slice.Devices, n.device(g))
	}
	if err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		c.node: {Slices: []resourceslice.Slice{slice}}}}); err != nil {
		c.Fatal(err)
	}
	c.apply(nvidiaClass)
	return stop
}

// apply applies a manifest.
func (c *cluster) apply(manifest string) {
	c.Helper()
	path := filepath.Join(c.TempDir(), "manifest.yaml")
	if err := os.WriteFile(path, []byte(manifest), 0o644); err != nil {
		c.Fatal(err)
	}
	c.mustDo("kubectl", "apply", "-f", path)
}
