package bench

import (
	"fmt"

	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/relay/launch"
)

// softwareConnection describes the RDMA connection of a client's relay. softwareConnection fails if the data
// does not use queue pairs and GPU memory.
func (r *run) softwareConnection(w *worker) (string, error) {
	c, err := r.sending(w)
	if err != nil {
		return "", err
	}
	if c.Transport != launch.TransportVerbs || !c.GDR {
		return "", fmt.Errorf("the connection goes by transport %s, %s", c.Transport, c.Registration)
	}
	info, err := control.Inspect(r.host.Layout, w.generation.ID)
	if err != nil {
		return "", err
	}
	if info.Report == nil || info.Report.Network == nil || len(info.Report.Network.Peers) == 0 {
		return "", fmt.Errorf("the relay reports no RDMA connection: %s", info.NoReport)
	}
	return info.Report.Network.Peers[0].Way, nil
}
