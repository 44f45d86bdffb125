package relay_test

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// An ending relay does not grant a client's request, and the client gets the reason.
func TestRequestToEndingRelayFailsWithReason(t *testing.T) {
	h := newHost(t)
	ending := wire.Errorf(wire.StatusCUDA, "an illegal memory access").On("the GPU")
	h.ends = ending
	socket, r := h.start("a", launch.RouteAuto, -1, far(0, 1, "nic0"))
	s := attach(t, socket)
	r.EndWhileAsked(launch.EndCUDA, ending)
	_, err := s.Listen(within(t), uuid(t, 0))
	demandOf(t, err, wire.StatusCUDA, "the GPU")
}
