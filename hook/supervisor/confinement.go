package supervisor

import (
	"slices"

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
			nodes := sandbox.VerbsNodes(nic)
			s.Devices = append(s.Devices, nodes...)
			// In another namespace the kernel resolves no address of a RoCE port.
			s.HostNetwork = s.HostNetwork || nodes != nil
		}
	}
	slices.Sort(s.Devices)
	s.Devices = slices.Compact(s.Devices)
	return s
}
