package topo_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

func TestGPUsAreFoundByIndexUUIDAndAddress(t *testing.T) {
	h := topotest.TwoSockets().Host()
	for _, name := range []string{"3", "GPU-00000000-0000-0000-0000-000000000003",
		"gpu-00000000-0000-0000-0000-000000000003", "0000:04:00.0", "04:00.0", "00000000:04:00.0"} {
		if g, err := h.FindGPU(name); err != nil || g.Index != 3 {
			t.Errorf("%s: GPU %d, %v", name, g.Index, err)
		}
	}
	h.GPUs[0].UUID = ""
	for _, name := range []string{"", "8", "-1", "GPU-", "0000:44:00.0"} {
		_, err := h.FindGPU(name)
		var unknown *topo.UnknownGPUError
		if !errors.As(err, &unknown) || unknown.Name != name ||
			!strings.Contains(err.Error(), "7 = 0000:08:00.0 = GPU-00000000") {
			t.Errorf("%q: %v; want an error that lists the GPUs", name, err)
		}
	}
	if _, err := (&topo.Host{}).FindGPU("0"); err == nil || !strings.Contains(err.Error(), "no GPU") {
		t.Error(err)
	}
}
