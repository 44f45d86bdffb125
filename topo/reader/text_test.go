package reader

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// A file from another user must not send control characters to a terminal.
func TestInputControlCharacterFails(t *testing.T) {
	hwloc, err := os.ReadFile(recordedHwloc)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, text, want string }{
		{"the name of a NIC", topotest.System(topotest.CPUXML(0, topotest.NetXML("0000:02:00.0", "mlx5&#x9b;2J"))),
			"NICs[0].Name"},
		{"a second line", topotest.System(topotest.CPUXML(0, topotest.NetXML("0000:02:00.0", "mlx5&#xa;Note: all is well"))),
			"NICs[0].Name"},
		{"a maker of processors", strings.Replace(topotest.System(topotest.CPUXML(0,
			topotest.NetXML("0000:02:00.0", "mlx5_0"))), "GenuineIntel", "Genuine&#x7f;Intel", 1), "CPUs[0].Vendor"},
		{"none", topotest.System(topotest.CPUXML(0, topotest.NetXML("0000:02:00.0", "网卡 0"))), ""},
		{"a name of hwloc", strings.ReplaceAll(string(hwloc), "mlx5_0", "mlx5_&#x9;0"), "NICs[1].Name"},
	} {
		_, err := Input("file", []byte(tt.text))
		e, _ := errors.AsType[*topo.TextError](err)
		if tt.want == "" && err != nil || tt.want != "" && (e == nil || e.Field != tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
		// The check is on the text itself, because a terminal shows the text.
		if err != nil && strings.ContainsAny(err.Error(), "\x1b\n\x7f\u009b") {
			t.Errorf("%s: %q", tt.name, err)
		}
	}
	o := topotest.Tree(t, map[string]string{"sys/class/infiniband/mlx5_0/node_guid": "\x1b[2J"})
	_, err = Sysfs(o)
	if e, ok := errors.AsType[*topo.TextError](err); !ok || e.Field != "NICs[0].GUID" {
		t.Errorf("sysfs: %v", err)
	}
}
