package supervisor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/relay/launch"
)

// maxOpen limits a relay's descriptors: a client and a connection take some.
const maxOpen = 65536

// confinement returns the sandbox of the relay of a generation. A relay on the network has TCP to
// the ports of relays; other relays have no TCP.
func confinement(g *generation.Generation, network *launch.Network) sandbox.Spec {
	s := sandbox.Standard()
	if network != nil {
		s.TCP = network.Ports
	}
	s.UID, s.Open, s.Tasks = g.Sandbox.UID, maxOpen, uint64(g.Sandbox.Limits.Tasks)
	if s.UID != 0 {
		s.Groups = []int{g.Sandbox.Group}
	}
	// For connections to the listeners in these directories.
	s.Read = append(s.Read, g.Config.Peers, g.Config.NICs)
	g.Sandbox.AddFiles(&s, g.Relay.Environment)
	// CUDA's IPC creates abstract Unix sockets (cuda-uvmfd-…), which only processes of the same
	// network namespace reach.
	s.HostNetwork = network != nil || g.Config.CUDAIPC
	for _, lane := range g.Config.Lanes {
		nics := slices.Clone(lane.NICs)
		for _, spare := range lane.Spares {
			nics = append(nics, spare.NICs...)
		}
		for _, nic := range nics {
			nodes := VerbsNodes(nic)
			s.Devices = append(s.Devices, nodes...)
			// In another namespace the kernel resolves no address of a RoCE port.
			s.HostNetwork = s.HostNetwork || nodes != nil
		}
	}
	slices.Sort(s.Devices)
	s.Devices = slices.Compact(s.Devices)
	return s
}

// Uverbs has the character devices of RDMA; tests have another.
var Uverbs = "/sys/class/infiniband_verbs"

// VerbsNodes returns the device nodes of an RDMA device, with or without a PCI function (rxe,
// siw): the nodes whose uverbsN/ibdev has the name. An emulated device has no nodes.
func VerbsNodes(nic string) (nodes []string) {
	entries, err := os.ReadDir(Uverbs)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		// abi_version is in the same directory.
		if is, err := os.ReadFile(filepath.Join(Uverbs, e.Name(), "ibdev")); err == nil && strings.TrimSpace(string(is)) == nic {
			nodes = append(nodes, filepath.Join("/dev/infiniband", e.Name()))
		}
	}
	if nodes != nil {
		nodes = append(nodes, "/dev/infiniband/rdma_cm")
	}
	return nodes
}
