package nixl_test

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/softhost/process"
)

func TestMain(m *testing.M) { process.Main(m) }

// host is a directory for the sockets of relay processes.
type host struct {
	*testing.T
	dir, route string
	limits     launch.Limits // of the relays that start from now on
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
	r := process.Start(h.T, launch.Config{
		Container: string(rune('a' + i)), Route: h.route, Peers: h.dir, Limits: h.limits,
		Lanes: []launch.Lane{process.Lane(i)},
	})
	return &lane{r, r.Socket, process.Devices[i].UUID}
}
