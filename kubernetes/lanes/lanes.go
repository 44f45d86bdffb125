package lanes

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// DriverName is the name of the DRA driver, and the domain of its attributes.
const DriverName = cdi.Vendor

// Shared is the name of the device for the lanes of all GPUs of a container. A node has one such
// device, for any number of claims.
const Shared = "lanes"

// Names of Peerlane's own attributes. Every device of a class carries every attribute of the class:
// a CEL selector that reads an attribute which one device lacks makes a pod unschedulable on every
// node.
const (
	AttributeShared       = "shared"       // bool: true for the device Shared, false for a lane
	AttributeVersion      = "version"      // version: the release of Peerlane
	AttributeGPUUUID      = "gpuUUID"      // string
	AttributeKind         = "kind"         // string: direct, staged or bounce
	AttributePath         = "path"         // string: the PCIe path from the GPU to the NIC
	AttributeNICs         = "nics"         // string: names, separated by commas
	AttributeRail         = "rail"         // int: -1 without a NIC
	AttributeFabric       = "fabric"       // string: infiniband, roce, iwarp, erdma, efa, tcp
	AttributeRegistration = "registration" // string: dmabuf, peermem or bounce
	CapacityBandwidth     = "bandwidth"    // bytes/s in each direction, an estimate
)

// maxAttribute is the limit of the API on the length of a string attribute, bytes
// (k8s.io/api/resource/v1.DeviceAttributeMaxValueLength).
const maxAttribute = resourceapi.DeviceAttributeMaxValueLength

// none is the value of a string attribute without a value.
const none = "none"

// Node is the state of a node; Devices derives the node's devices from it.
type Node struct {
	Plan *planner.Plan
	// Registration is the value of the attribute registration, the same for all lanes.
	Registration string
	// Version is the release of Peerlane.
	Version string
	// Taints are the taints of each lane, by the PCI address of the lane's GPU.
	Taints map[string][]resourceapi.DeviceTaint
	// SharedTaints are the taints of the device Shared.
	SharedTaints []resourceapi.DeviceTaint
	// Exclusive omits the device Shared, for releases that allocate each device once.
	Exclusive bool
	// Withdrawn lists the lanes to omit, by the PCI address of the lane's GPU.
	Withdrawn map[string]bool
}

// Name returns the name of the device of a GPU's lane: lane-0000-3a-00-0 for 0000:3a:00.0. Indices
// of GPUs change between boots; PCI addresses identify the slot.
func Name(busID string) string {
	return "lane-" + strings.NewReplacer(":", "-", ".", "-").Replace(strings.ToLower(busID))
}

// BusID returns the PCI address of the GPU whose lane has this device name. The second result is
// false if the plan has no such lane.
func BusID(plan *planner.Plan, name string) (string, bool) {
	i := slices.IndexFunc(plan.Lanes, func(l planner.Lane) bool { return offered(l) && Name(l.GPU) == name })
	if i < 0 {
		return "", false
	}
	return plan.Lanes[i].GPU, true
}

// offered reports whether a lane becomes a device. A GPU in MIG mode has no lane: its slices carry
// the PCI address of the whole GPU. The plan refuses such a GPU.
func offered(l planner.Lane) bool { return l.Role != planner.RoleRefused }

// Devices returns the devices of a node: Shared first, then one device per lane in the order of the
// plan. The result is empty if the node has no lane, or Node withdraws every lane.
func Devices(n Node) []resourceapi.Device {
	var devices []resourceapi.Device
	for _, lane := range n.Plan.Lanes {
		if !offered(lane) || n.Withdrawn[lane.GPU] {
			continue
		}
		devices = append(devices, n.device(lane))
	}
	if devices == nil || n.Exclusive {
		return devices
	}
	return append([]resourceapi.Device{n.shared()}, devices...)
}

func (n Node) shared() resourceapi.Device {
	many := true
	return resourceapi.Device{
		Name:                     Shared,
		AllowMultipleAllocations: &many,
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			AttributeShared:       boolean(true),
			AttributeVersion:      release(n.Version),
			AttributeRegistration: text(n.Registration),
		},
		Taints: n.SharedTaints,
	}
}

func (n Node) device(lane planner.Lane) resourceapi.Device {
	gpu := n.gpu(lane.GPU)
	return resourceapi.Device{
		Name: Name(lane.GPU),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			deviceattribute.StandardDeviceAttributePCIBusID: text(lane.GPU),
			deviceattribute.StandardDeviceAttributePCIeRoot: text(gpu.HostBridge),
			// A kernel that knows one NUMA node states none (-1), which the attribute does not allow.
			deviceattribute.StandardDeviceAttributeNUMANode: integer(max(0, gpu.NUMA)),
			AttributeShared:       boolean(false),
			AttributeVersion:      release(n.Version),
			AttributeGPUUUID:      text(gpu.UUID),
			AttributeKind:         text(lane.Kind),
			AttributePath:         text(lane.Path.String()),
			AttributeNICs:         text(joined(lane.NICs)),
			AttributeRail:         integer(lane.Rail),
			AttributeFabric:       text(n.fabric(lane)),
			AttributeRegistration: text(n.Registration),
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			CapacityBandwidth: {Value: *resource.NewQuantity(int64(lane.Bandwidth*1e9), resource.DecimalSI)},
		},
		Taints: n.Taints[lane.GPU],
	}
}

func (n Node) gpu(busID string) topo.GPU {
	if i := slices.IndexFunc(n.Plan.GPUs, func(g topo.GPU) bool { return g.BusID == busID }); i >= 0 {
		return n.Plan.GPUs[i]
	}
	return topo.GPU{NUMA: -1}
}

// fabric returns the protocol of the lane's first NIC. A lane without a NIC has the transport tcp.
func (n Node) fabric(lane planner.Lane) string {
	for _, nic := range n.Plan.NICs {
		if len(lane.NICs) > 0 && nic.Name == lane.NICs[0] {
			return strings.ToLower(nic.Protocol)
		}
	}
	if len(lane.NICs) > 0 {
		return none
	}
	return "tcp"
}

// joined returns names separated by commas. If the names do not all fit into an attribute, joined
// returns the first names and the number of further names.
func joined(names []string) string {
	all := strings.Join(names, ",")
	for n := len(names) - 1; len(all) > maxAttribute && n > 0; n-- {
		all = fmt.Sprintf("%s,+%d", strings.Join(names[:n], ","), len(names)-n)
	}
	return all
}

func text(s string) resourceapi.DeviceAttribute {
	if s == "" {
		s = none
	}
	if len(s) > maxAttribute {
		s = s[:maxAttribute]
	}
	return resourceapi.DeviceAttribute{StringValue: &s}
}

func integer(i int) resourceapi.DeviceAttribute {
	v := int64(i)
	return resourceapi.DeviceAttribute{IntValue: &v}
}

func boolean(b bool) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{BoolValue: &b} }

// release returns a release as a semantic version, which the API requires: 0.0.0 for a build without
// a release.
func release(s string) resourceapi.DeviceAttribute {
	v, err := utilversion.ParseSemantic(s)
	if err != nil {
		v = utilversion.MustParseSemantic("0.0.0")
	}
	out := v.String()
	return resourceapi.DeviceAttribute{VersionValue: &out}
}
