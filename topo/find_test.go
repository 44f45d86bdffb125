package topo_test

import (
	"errors"
	"reflect"
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
		if !errors.As(err, &unknown) || unknown.Name != name || !reflect.DeepEqual(unknown.Known, h.GPUs) {
			t.Errorf("%q: %v; want an error that lists the GPUs", name, err)
		}
	}
	var unknown *topo.UnknownGPUError
	if _, err := (&topo.Host{}).FindGPU("0"); !errors.As(err, &unknown) || unknown.Name != "0" || unknown.Known != nil {
		t.Error(err)
	}
}
