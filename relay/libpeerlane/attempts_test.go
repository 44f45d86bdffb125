package libpeerlane_test

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
)

func TestConnectingWithoutWaiting(t *testing.T) {
	eachKind(t, "attempts", func(t *testing.T, path string) {
		a, b := newHost(t).pair(launch.RouteDirect, 0, 1)
		start(t, path, a, b, devices[0].UUID, devices[1].UUID).end()
	})
}
