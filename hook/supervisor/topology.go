package supervisor

import (
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/topo/virtualswitch"
)

// writeTopology puts the container's virtual switch beside the socket, for NCCL's plugin, before
// the relay gets the lanes, so that every client that knows the lanes finds the file. Without the
// file NCCL uses the topology of the host.
func (s *supervisor) writeTopology() {
	if err := writeTopology(s.layout, s.generation, s.relayConfig().Local()); err != nil {
		s.log.WithError(err).Warn("NCCL gets no topology file for this container")
	}
}

// writeTopology writes the container's topology file. local reports that the lanes reach only this
// host.
func writeTopology(l paths.Layout, g *generation.Generation, local bool) error {
	plan, err := lanes.ReadPlan(l)
	if err != nil {
		return err
	}
	var gpus []string
	for _, lane := range g.Config.Lanes {
		gpus = append(gpus, lane.GPU.BusID)
	}
	text, err := virtualswitch.ContainerXML(plan, gpus, local)
	if err != nil {
		return err
	}
	return generation.WriteFile(l.SocketDir(g.ID), paths.TopologyName, text)
}
