package cdi

import (
	"fmt"
	"slices"

	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo"
)

// rdmaCM is the node of the kernel's connection manager. The node exists while the module
// rdma_ucm is loaded. Containers never get the nodes umad and issm: a process with umad or issm
// can send management packets and make a port a subnet manager.
const rdmaCM = "infiniband/rdma_cm"

// offeredNICs returns the NICs that become devices of KindNIC, and a sentence for every other NIC
// with RDMA.
func (g *generator) offeredNICs() (nics []topo.NIC, missing []string) {
	if g.tenancy == config.TenancyMulti {
		return nil, nil
	}
	for _, nic := range g.plan.NICs {
		if nic.Ethernet {
			continue
		}
		if nic.Management {
			missing = append(missing, fmt.Sprintf("%s=%s is not offered: %s", KindNIC, nic.Name, nic.Reason))
			continue
		}
		if nic.Uverbs == "" {
			missing = append(
				missing,
				fmt.Sprintf(
					"%s=%s is not offered: the kernel has no device node for it; load the module ib_uverbs",
					KindNIC,
					nic.Name,
				),
			)
			continue
		}
		// The kernel accepts names of NICs that CDI refuses.
		if err := parser.ValidateDeviceName(nic.Name); err != nil || nic.Name == all {
			missing = append(
				missing,
				fmt.Sprintf(
					"%s=%s is not offered: its name is not valid for a CDI device; rename the NIC (rdma dev set)",
					KindNIC,
					nic.Name,
				),
			)
			continue
		}
		nics = append(nics, nic)
	}
	return nics, missing
}

// nicSpec returns the specification of these NICs: by name, by PCI address if only one NIC has
// the address, and as "all".
func (g *generator) nicSpec(nics []topo.NIC) *specs.Spec {
	spec := &specs.Spec{Kind: KindNIC, ContainerEdits: specs.ContainerEdits{
		Env:         []string{g.registration()},
		DeviceNodes: g.nodeIfPresent(rdmaCM),
	}}
	for _, nic := range nics {
		names := []string{nic.Name}
		sharing := slices.IndexFunc(
			nics,
			func(other topo.NIC) bool { return other.BusID == nic.BusID && other.Name != nic.Name },
		)
		if nic.BusID != "" && sharing < 0 {
			names = append(names, nic.BusID)
		}
		edits := g.nicEdits(nic)
		for _, name := range names {
			spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: edits})
		}
	}
	spec.Devices = append(spec.Devices, specs.Device{Name: all, ContainerEdits: g.nicEdits(nics...)})
	return spec
}

// nicEdits returns the edits of the device of these NICs. The hook checks that the NICs have not
// changed, and lifts the limit of locked memory.
func (g *generator) nicEdits(nics ...topo.NIC) specs.ContainerEdits {
	var edits specs.ContainerEdits
	var args []string
	for _, nic := range nics {
		edits.DeviceNodes = append(edits.DeviceNodes, g.node("infiniband/"+nic.Uverbs))
		args = append(args, "--nic", nic.Name)
	}
	edits.Hooks = []*specs.Hook{g.hook("createRuntime", "create", args...)}
	return edits
}
