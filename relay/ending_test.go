package relay_test

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// An ending relay does not grant a client's request, and the client gets the reason.
func TestRequestToEndingRelayFailsWithReason(t *testing.T) {
	h := newHost(t)
	h.ends = "an illegal memory access"
	socket, r := h.start("a", launch.RouteAuto, -1, far(0, 1, "nic0"))
	s := attach(t, socket)
	r.EndWhileAsked(launch.EndCUDA, wire.Errorf(wire.StatusCUDA, "%s", h.ends))
	_, err := s.Listen(within(t), uuid(t, 0))
	demand(t, err, wire.StatusCUDA, h.ends)
}
