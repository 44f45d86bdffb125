package libpeerlane_test

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
)

func TestListsInC(t *testing.T) {
	for _, k := range []kind{plain, address} { // it has one thread
		if why := lacks(t, k); why != "" {
			t.Logf("without -fsanitize=%s: %s", k, why)
			continue
		}
		for _, route := range []string{launch.RouteDirect, launch.RouteStaged} {
			a, b := newHost(t).pair(route, 0, 1)
			start(t, program(t, "tests", "lists", k), a, b, devices[0].UUID, devices[1].UUID).end()
		}
	}
}
