package lanes

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/peerlane/peerlane/topo/planner"
)

// maxAllocation is the time within which Kubernetes' allocator answers each documented claim.
const maxAllocation = 50 * time.Millisecond

// classes are the device classes of the manifests and NVIDIA's class.
type classes map[string]*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	var all []*resourceapi.DeviceClass
	for _, class := range c {
		all = append(all, class)
	}
	return all, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class := c[name]; class != nil {
		return class, nil
	}
	return nil, fmt.Errorf("device class %s does not exist", name)
}

// documents decodes each YAML document of a file into a new T.
func documents[T any](t *testing.T, path string) []*T {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all []*T
	for _, part := range bytes.Split(text, []byte("\n---\n")) {
		one := new(T)
		if err := yaml.UnmarshalStrict(part, one); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all = append(all, one)
	}
	return all
}

func manifestClasses(t *testing.T) classes {
	all := classes{"gpu.nvidia.com": {ObjectMeta: metav1.ObjectMeta{Name: "gpu.nvidia.com"},
		Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'",
			}}},
		}}}
	for _, class := range documents[resourceapi.DeviceClass](t, "../manifests/deviceclasses.yaml") {
		all[class.Name] = class
	}
	return all
}

// taintedLane is the GPU whose lane has a taint, healthy for none.
const (
	taintedLane = 0
	healthy     = -1
)

// nodeSlices returns the slices of a node with 8 GPUs: NVIDIA's GPUs with the attributes that NVIDIA's
// driver publishes, and the lanes. The lane of the GPU tainted has a taint.
func nodeSlices(tainted int) []*resourceapi.ResourceSlice {
	p := board(8)
	node := "n1"
	slice := func(driver string, devices []resourceapi.Device) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: driver}, Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &node, Devices: devices,
			Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
		}}
	}
	var nvidia []resourceapi.Device
	for i, gpu := range p.GPUs {
		nvidia = append(nvidia, resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type": text("gpu"), "uuid": text(gpu.UUID),
				deviceattribute.StandardDeviceAttributePCIBusID: text(gpu.BusID),
				deviceattribute.StandardDeviceAttributePCIeRoot: text(gpu.HostBridge),
			},
		})
	}
	n := Node{Plan: p, Version: "1.0.0", Taints: map[string][]resourceapi.DeviceTaint{}}
	if tainted != healthy {
		n.Taints[p.Lanes[tainted].GPU] = []resourceapi.DeviceTaint{{Key: "peerlane.dev/no-network",
			Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	return []*resourceapi.ResourceSlice{slice("gpu.nvidia.com", nvidia), slice(DriverName, Devices(n))}
}

// allocate runs the allocator of Kubernetes' scheduler for one claim on a node of nodeSlices, of which earlier
// claims have the devices used. It returns the shortest of five times.
func allocate(t *testing.T, claim *resourceapi.ResourceClaim, tainted int,
	used ...resourceapi.DeviceRequestAllocationResult) ([]resourceapi.DeviceRequestAllocationResult, time.Duration) {
	t.Helper()
	features := structured.Features{ConsumableCapacity: true, DeviceTaints: true, PrioritizedList: true,
		PartitionableDevices: true}
	state := structured.AllocatedState{AggregatedCapacity: structured.NewConsumedCapacityCollection(),
		AllocatedDevices: sets.New[structured.DeviceID]()}
	for _, d := range used {
		state.AllocatedDevices.Insert(structured.MakeDeviceID(d.Driver, d.Pool, d.Device))
	}
	a, err := structured.NewAllocator(t.Context(), features, state, manifestClasses(t), nodeSlices(tainted),
		cel.NewCache(100, cel.Features{EnableConsumableCapacity: true}))
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	// The first call compiles the selectors, which the scheduler caches.
	if _, err := a.Allocate(t.Context(), node, []*resourceapi.ResourceClaim{claim}); err != nil {
		t.Fatal(err)
	}
	least := time.Hour
	var results []resourceapi.DeviceRequestAllocationResult
	for range 5 {
		begin := time.Now()
		got, err := a.Allocate(t.Context(), node, []*resourceapi.ResourceClaim{claim})
		if err != nil {
			t.Fatal(err)
		}
		least = min(least, time.Since(begin))
		if results = nil; got != nil {
			results = got[0].Devices.Results
		}
	}
	return results, least
}

// claimOf returns the claim of a template with the defaults that the API server fills in
// (pkg/apis/resource/v1/defaults.go of Kubernetes).
func claimOf(template *resourceapi.ResourceClaimTemplate) *resourceapi.ResourceClaim {
	for i := range template.Spec.Spec.Devices.Requests {
		r := template.Spec.Spec.Devices.Requests[i].Exactly
		if r.AllocationMode == "" {
			r.AllocationMode = resourceapi.DeviceAllocationModeExactCount
		}
		if r.AllocationMode == resourceapi.DeviceAllocationModeExactCount && r.Count == 0 {
			r.Count = 1
		}
	}
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: template.Name, UID: types.UID(template.Name)},
		Spec: template.Spec.Spec}
}

// example returns the claim of a file of the examples.
func example(t *testing.T, file string) *resourceapi.ResourceClaim {
	t.Helper()
	templates := documents[resourceapi.ResourceClaimTemplate](t, filepath.Join("../examples", file))
	if len(templates) != 1 {
		t.Fatalf("%s has %d documents", file, len(templates))
	}
	return claimOf(templates[0])
}

// allocatedInTime calls allocate, and limits the time.
func allocatedInTime(t *testing.T, claim *resourceapi.ResourceClaim, tainted int,
	used ...resourceapi.DeviceRequestAllocationResult) []resourceapi.DeviceRequestAllocationResult {
	t.Helper()
	got, took := allocate(t, claim, tainted, used...)
	t.Logf("%d devices in %s", len(got), took)
	if took > maxAllocation {
		t.Errorf("the allocator needs %s; at most %s are expected", took, maxAllocation)
	}
	return got
}

// documented are the files of the examples with claims, each with a test for every number of GPUs and
// with a taint on each lane in turn.
var documented = map[string]func(t *testing.T, tainted int){
	// Claims of pods until each lane of the claim's kind is allocated.
	"lane-claim.yaml": func(t *testing.T, tainted int) {
		claim, kind := example(t, "lane-claim.yaml"), board(8).Lanes
		free := 0
		for i, l := range kind {
			if l.Kind == planner.KindStaged && i != tainted {
				free++
			}
		}
		var used []resourceapi.DeviceRequestAllocationResult
		for k := 1; k <= free; k++ {
			got := allocatedInTime(t, claim, tainted, used...)
			if len(got) != 2 {
				t.Fatalf("claim %d gets %v; %d lanes are free", k, got, free-k+1)
			}
			used = append(used, got...)
		}
		if got := allocatedInTime(t, claim, tainted, used...); len(got) > 0 {
			t.Errorf("without a free lane the claim gets %v", got)
		}
	},
	"lanes-claim.yaml": func(t *testing.T, tainted int) {
		claim := example(t, "lanes-claim.yaml")
		for k := 1; k <= 8; k++ {
			claim.Spec.Devices.Requests[0].Exactly.Count = int64(k)
			if got := allocatedInTime(t, claim, tainted); len(got) != k+1 || got[k].Device != Shared {
				t.Errorf("the allocation of %d GPUs is %v", k, got)
			}
		}
	},
	// A lane with a taint makes the claim impossible.
	"all-claim.yaml": func(t *testing.T, tainted int) {
		want := 0
		if tainted == healthy {
			want = 16
		}
		if got := allocatedInTime(t, example(t, "all-claim.yaml"), tainted); len(got) != want {
			t.Errorf("the allocation is %v", got)
		}
	},
}

func TestDocumentedClaimsAreAllocatedInTime(t *testing.T) {
	for _, file := range slices.Sorted(maps.Keys(documented)) {
		for tainted := healthy; tainted < 8; tainted++ {
			t.Run(fmt.Sprintf("%s/tainted=%d", file, tainted), func(t *testing.T) { documented[file](t, tainted) })
		}
	}
}

func TestEveryClaimOfTheDocumentsHasATest(t *testing.T) {
	for _, pattern := range []string{"../examples/*.yaml", "../examples/*/*.yaml", "../../docs/*.md", "../../docs/*/*.md",
		"../../README.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %v", pattern, files, err)
		}
		for _, path := range files {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, kind := range []string{"kind: ResourceClaim\n", "kind: ResourceClaimTemplate\n"} {
				if bytes.Contains(text, []byte(kind)) && documented[filepath.Base(path)] == nil {
					t.Errorf("%s has a claim without a test", path)
				}
			}
		}
	}
}

func TestPairedLaneBelongsToTheGPU(t *testing.T) {
	got, _ := allocate(t, claimOf(documents[resourceapi.ResourceClaimTemplate](t, "../examples/lane-claim.yaml")[0]),
		taintedLane)
	p := board(8)
	if len(got) != 2 {
		t.Fatalf("the allocation is %v", got)
	}
	var gpu int
	if _, err := fmt.Sscanf(got[0].Device, "gpu-%d", &gpu); err != nil {
		t.Fatal(err)
	}
	if got[1].Device != Name(p.GPUs[gpu].BusID) || gpu%2 != 1 {
		t.Errorf("GPU %d has the lane %s", gpu, got[1].Device)
	}
}
