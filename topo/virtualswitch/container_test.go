package virtualswitch

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/planner"
)

// A container's virtual switch has the container's GPUs, the NICs of the GPUs' lanes, and the
// switches above, without values that NVML or the plugin supply. The plan passes through JSON,
// as in the hook.
func TestContainerXMLHasOwnGPUsLanesAndSwitches(t *testing.T) {
	made, err := planner.Make(fourGPUs(t), planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	written, err := json.Marshal(made)
	if err != nil {
		t.Fatal(err)
	}
	p, err := planner.Parse(written)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ gpus, nics, switches []string }{
		{[]string{"0000:82:00.0"}, []string{"peerlane_2"}, []string{"0000:81:00.0", "ffff:ff:04.0"}},
		{[]string{"0000:02:00.0", "0000:04:00.0"}, []string{"peerlane_0", "peerlane_1"},
			[]string{"ffff:ff:01.0", "ffff:ff:02.0", "ffff:ff:03.0"}},
		{[]string{"0000:05:00.0"}, nil, []string{"ffff:ff:01.0"}}, // which has no lane
	} {
		text, err := ContainerXML(p, c.gpus, false)
		if err != nil {
			t.Fatal(err)
		}
		ncclfile.ReadAsNCCLDoes(t, string(text))
		if !strings.Contains(string(text), "for one container") {
			t.Errorf("%v: no note says that the file is for one container:\n%s", c.gpus, text)
		}
		for _, no := range []string{"<gpu", "dev=", "guid", " speed=", "port=", "nvlink", "mlx5", "sm="} {
			if strings.Contains(string(text), no) {
				t.Errorf("%v: the file contains %q:\n%s", c.gpus, no, text)
			}
		}
		h := ncclfile.ReadXML(t, string(text))
		var gpus, nics, switches []string
		for _, g := range h.GPUs {
			gpus = append(gpus, g.BusID)
		}
		for _, n := range h.NICs {
			nics = append(nics, n.Name)
		}
		for _, s := range h.Switches {
			switches = append(switches, s.BusID)
		}
		slices.Sort(switches)
		if !slices.Equal(gpus, c.gpus) || !slices.Equal(nics, c.nics) || !slices.Equal(switches, c.switches) {
			t.Errorf("%v: GPUs %v, NICs %v, switches %v; want %+v\n%s", c.gpus, gpus, nics, switches, c, text)
		}
		// The NIC of a lane is below the bridge of the lane's GPU.
		for i := range h.NICs {
			if h.NICs[i].Switch != h.GPUs[i].Switch {
				t.Errorf("%s is at %s, its GPU at %s", h.NICs[i].Name, h.NICs[i].Switch, h.GPUs[i].Switch)
			}
		}
	}
	if text, err := ContainerXML(p, []string{"0000:99:00.0"}, false); err == nil {
		t.Errorf("of a GPU that is not there: %s", text)
	}
	p.CPUs = nil
	if text, err := ContainerXML(p, []string{"0000:82:00.0"}, false); !errors.Is(err, errNoTree) {
		t.Errorf("of a plan of an earlier release: %v: %s", err, text)
	}
}
