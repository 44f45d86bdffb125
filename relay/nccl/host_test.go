package nccl_test

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/softhost/process"
)

func TestMain(m *testing.M) { process.Main(m) }

// host is a directory for the sockets of relay processes and NICs.
type host struct {
	*testing.T
	dir, route string
	// ipc: the relays take memory of cudaMalloc.
	ipc   bool
	scope string
	// both: relays have the lanes of GPUs 0 and 1.
	both   bool
	shared bool // the containers share GPU 0
}

func newHost(t *testing.T, route string) *host {
	t.Helper()
	return &host{T: t, dir: process.Dir(t), route: route}
}

// lane is a relay with the lane of a GPU.
type lane struct {
	*process.Relay
	socket, uuid string
}

// lane starts the relay of container i.
func (h *host) lane(i int) *lane {
	h.Helper()
	lanes, uuid := []launch.Lane{process.Lane(i)}, process.Devices[i].UUID
	if h.shared {
		uuid = process.Devices[0].UUID
		lanes[0].GPU = launch.GPU{UUID: uuid, BusID: process.Devices[0].BusID, Index: i}
	}
	if h.both {
		lanes = append(lanes, process.Lane(1-i))
	}
	r := process.Start(h.T, launch.Config{
		Container: string(rune('a' + i)), Route: h.route, Peers: h.dir, CUDAIPC: h.ipc, Scope: h.scope, Lanes: lanes,
	})
	return &lane{r, r.Socket, uuid}
}
