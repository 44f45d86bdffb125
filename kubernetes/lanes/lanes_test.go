package lanes

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// board returns the plan of a board with gpus GPUs, and a NIC for every second GPU.
func board(gpus int) *planner.Plan {
	p := &planner.Plan{}
	for i := range gpus {
		bus := fmt.Sprintf("0000:%02x:00.0", 0x10+i)
		nic := fmt.Sprintf("mlx5_%d", i/2)
		p.GPUs = append(p.GPUs, topo.GPU{Index: i, BusID: bus, UUID: fmt.Sprintf("GPU-%d", i), NUMA: i/4 - 1,
			Place: topo.Place{HostBridge: "pci0000:10"}})
		lane := planner.Lane{GPU: bus, Role: planner.RoleNear, Kind: planner.KindDirect, NICs: []string{nic}, Rail: i / 2,
			Path: topo.PIX, Bandwidth: 24.5}
		if i%2 == 1 {
			lane.Role, lane.Kind, lane.Path = planner.RoleFar, planner.KindStaged, topo.SYS
		} else {
			p.NICs = append(p.NICs, topo.NIC{Name: nic, Protocol: "RoCE"})
		}
		p.Lanes = append(p.Lanes, lane)
	}
	return p
}

func TestDevicesOfAClassHaveTheSameAttributes(t *testing.T) {
	p := board(8)
	p.Lanes[3].NICs, p.Lanes[3].Rail, p.Lanes[3].Kind = nil, -1, planner.KindBounce
	p.GPUs[5].UUID, p.GPUs[6].HostBridge = "", ""
	devices := Devices(Node{Plan: p, Registration: "dmabuf", Version: "1.2.3"})
	if len(devices) != 9 || devices[0].Name != Shared || !*devices[0].AllowMultipleAllocations {
		t.Fatalf("%d devices, the first is %s", len(devices), devices[0].Name)
	}
	want := slices.Sorted(maps.Keys(devices[1].Attributes))
	if len(want) != 12 {
		t.Errorf("a lane has the attributes %v", want)
	}
	for _, d := range devices[1:] {
		if got := slices.Sorted(maps.Keys(d.Attributes)); !slices.Equal(got, want) {
			t.Errorf("%s has the attributes %v, and %s has %v", d.Name, got, devices[1].Name, want)
		}
		for name, a := range d.Attributes {
			if a.StringValue != nil && (*a.StringValue == "" || len(*a.StringValue) > maxAttribute) {
				t.Errorf("%s: attribute %s is %q", d.Name, name, *a.StringValue)
			}
		}
		if d.AllowMultipleAllocations != nil {
			t.Errorf("%s has allowMultipleAllocations, which API servers before 1.36 drop", d.Name)
		}
		if errs := validation.IsDNS1123Label(d.Name); errs != nil {
			t.Errorf("%s: %v", d.Name, errs)
		}
	}
	if got := *devices[1].Attributes["resource.kubernetes.io/numaNode"].IntValue; got != 0 {
		t.Errorf("a GPU without a NUMA node has numaNode %d", got)
	}
	if got := *devices[4].Attributes[AttributeFabric].StringValue; got != "tcp" {
		t.Errorf("a lane without a NIC has the fabric %s", got)
	}
	if got := devices[1].Capacity[CapacityBandwidth].Value; got.Value() != 24_500_000_000 {
		t.Errorf("bandwidth is %s", got.String())
	}
}

func TestDeviceNamesLeadBackToTheirGPUs(t *testing.T) {
	p := board(4)
	p.Lanes[2].Role = planner.RoleRefused
	for i, lane := range p.Lanes {
		busID, known := BusID(p, Name(lane.GPU))
		if known != (i != 2) || known && busID != lane.GPU {
			t.Errorf("%s leads to %q, %v", Name(lane.GPU), busID, known)
		}
	}
	if Name("0000:3A:00.0") != "lane-0000-3a-00-0" {
		t.Error(Name("0000:3A:00.0"))
	}
}

func TestNamesOfManyNICsFitAnAttribute(t *testing.T) {
	var names []string
	for i := range 32 {
		names = append(names, fmt.Sprintf("rocep%ds0f0", i))
	}
	got := joined(names)
	shown := strings.Count(got, "rocep")
	if len(got) > maxAttribute || !strings.HasSuffix(got, fmt.Sprintf(",+%d", 32-shown)) {
		t.Errorf("%d bytes: %s", len(got), got)
	}
	if joined(names[:2]) != "rocep0s0f0,rocep1s0f0" {
		t.Error(joined(names[:2]))
	}
}

func TestReleaseIsASemanticVersion(t *testing.T) {
	for in, want := range map[string]string{"1.2.3": "1.2.3", "1.2.3-4-gabcdef": "1.2.3-4-gabcdef", "unknown": "0.0.0",
		"": "0.0.0"} {
		if got := *release(in).VersionValue; got != want {
			t.Errorf("%q is %s, and %s was expected", in, got, want)
		}
	}
}

func TestDevicesOfNodeWithoutLanesAreNone(t *testing.T) {
	p := board(2)
	for i := range p.Lanes {
		p.Lanes[i].Role = planner.RoleRefused
	}
	if got := Devices(Node{Plan: p}); got != nil {
		t.Errorf("%d devices", len(got))
	}
}
