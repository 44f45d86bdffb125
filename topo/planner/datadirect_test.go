package planner

import (
	"bytes"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/reader"
)

func TestDataDirectFunctionDecidesNearness(t *testing.T) {
	o := topotest.Tree(t, topotest.GB300("mlx5_ib"))
	h, err := reader.Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	if len(h.NICs) != 2 || len(h.GPUs) != 2 {
		t.Fatalf("%+v", h)
	}
	for i, n := range h.NICs {
		want := []string{"0008:03:00.0", "0018:03:00.0"}[i]
		if n.DataDirect != want || n.Own == nil || n.Own.Link != 48 || n.Link != 96 ||
			n.BusID != []string{"0000:03:00.0", "0010:03:00.0"}[i] {
			t.Errorf("%s: Data Direct function %q, own %+v, link %g; want %s", n.Name, n.DataDirect, n.Own, n.Link, want)
		}
	}
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0008:06:00.0", "mlx5_0"); got.Type != topo.PXB {
		t.Errorf("the path from the GPU to the near NIC is %v", got.Type)
	}
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0008:06:00.0", "mlx5_1"); got.Type != topo.SYS {
		t.Errorf("the path from the GPU to the far NIC is %v", got.Type)
	}
	p, err := Make(h, Config{})
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range p.Lanes {
		if l.Role != RoleNear || l.Kind != KindDirect || len(l.NICs) != 1 || l.NICs[0] != h.NICs[i].Name {
			t.Errorf("lane %d is %+v", i, l)
		}
	}
	// The NIC reaches host memory by the NIC's PCI function, with half the lanes of the Data
	// Direct function.
	net := newNetwork(sortedHost(h))
	bounced := net.rates([]carried{{gpu: 0, parts: []part{{throughMemory, 0, 1}}}})
	if bounced.busy[0] > 48 {
		t.Errorf("%g GB/s pass through host memory and a link of 48", bounced.busy[0])
	}
	direct := net.rates([]carried{{gpu: 0, parts: []part{{0, 0, 1}}}})
	if direct.busy[0] != 96 {
		t.Errorf("%g GB/s pass directly, want 96", direct.busy[0])
	}

	text, err := ncclxml.Write(h)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{`"mlx5_0"`, `"mlx5_0_dma"`} {
		if !strings.Contains(string(text), name) {
			t.Errorf("the file for NCCL has no <net> %s", name)
		}
	}
	again, err := ncclxml.Read(bytes.NewReader(text), "test.xml")
	if err != nil {
		t.Fatal(err)
	}
	if len(again.NICs) != 2 || again.NICs[0].DataDirect != "0008:03:00.0" || again.NICs[0].BusID != "0000:03:00.0" {
		t.Errorf("read again the NICs are %+v", again.NICs)
	}
	if got := ncclfile.PairOf(t, graph.All(again, topo.RulesNCCL), "0008:06:00.0", "mlx5_0"); got.Type != topo.PXB {
		t.Errorf("read again, the path from the GPU to the near NIC is %v", got.Type)
	}
}
