package planner

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// virtualized is a host with two GPUs below the switch of a NIC of 400 Gb/s, and with virtual
// functions of the NIC as further NICs.
func virtualized(functions int) *topotest.Builder {
	b := topotest.Build(1)
	b.Sw("00aa:00:00.0", 0, "pci0000:00", "")
	b.GPU(0, "pci0000:00", "00aa:00:00.0").GPU(0, "pci0000:00", "00aa:00:00.0")
	b.NIC("mlx5_0", 0, "pci0000:00", "00aa:00:00.0", topotest.Up(400))
	for i := range functions {
		b.NIC(fmt.Sprintf("mlx5_%d", 1+i), 0, "pci0000:00", "00aa:00:00.0", topotest.Up(400))
		v := &b.H.NICs[len(b.H.NICs)-1]
		v.VirtualFunctionOf, v.Card = b.H.NICs[0].BusID, b.H.NICs[0].BusID
	}
	return b
}

func nicsOf(t *testing.T, h *topo.Host, c Config) (names []string, p *Plan) {
	t.Helper()
	p, err := Make(h, c)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range p.Lanes {
		for _, n := range l.NICs {
			if !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
	}
	slices.Sort(names)
	return names, p
}

func TestVirtualFunctionsCarryNoLanesByDefault(t *testing.T) {
	h := virtualized(3).Host()
	names, p := nicsOf(t, h, Config{})
	if !slices.Equal(names, []string{"mlx5_0"}) {
		t.Errorf("lanes use %v", names)
	}
	if notes := strings.Join(p.Notes, "\n"); !strings.Contains(notes, "mlx5_0 has 3 virtual functions or subfunctions") ||
		strings.Contains(notes, "mlx5_1 is idle") {
		t.Errorf("the notes are %q", p.Notes)
	}
	all, _ := nicsOf(t, h, Config{VirtualFunctions: true})
	if len(all) < 2 {
		t.Errorf("with plan.virtual_functions lanes use %v", all)
	}
	pinned, _ := nicsOf(t, h, Config{Lanes: []Assignment{{GPU: "0", NICs: []string{"mlx5_2"}}}})
	if !slices.Equal(pinned, []string{"mlx5_0", "mlx5_2"}) {
		t.Errorf("with a lane by configuration lanes use %v", pinned)
	}
	for name, change := range map[string]func(h *topo.Host, c *Config){
		"down":     func(h *topo.Host, _ *Config) { h.NICs[0].Ports[0].State = "DOWN" },
		"excluded": func(_ *topo.Host, c *Config) { c.Exclude.NICs = []string{"mlx5_0"} },
		"no RDMA":  func(h *topo.Host, _ *Config) { h.NICs[0].Reason = "it does not support RDMA" },
	} {
		h, c := virtualized(3).Host(), Config{}
		change(h, &c)
		if names, _ := nicsOf(t, h, c); len(names) == 0 || slices.Contains(names, "mlx5_0") {
			t.Errorf("with a physical function that is %s lanes use %v", name, names)
		}
	}
}

func TestFunctionsOfOnePortShareItsRate(t *testing.T) {
	b := virtualized(2)
	b.H.NICs[2].VirtualFunctionOf, b.H.NICs[2].Card = "", ""
	b.H.NICs[2].BusID, b.H.NICs[2].Subfunction = b.H.NICs[0].BusID, "mlx5_core.sf.4"
	for i := range b.H.NICs {
		b.H.NICs[i].Ports[0].RateGbps = 200
	}
	n := newNetwork(sortedHost(b.Gen(48).Host()))
	// 200 Gb/s are 25 GB/s: two GPUs on two functions get half of the rate.
	for _, nics := range [][2]int{{0, 1}, {0, 2}, {1, 2}} {
		got := n.rates([]carried{{gpu: 0, parts: []part{{0, nics[0], 1}}}, {gpu: 1, parts: []part{{1, nics[1], 1}}}}).busy
		if got[0] != 12.5 || got[1] != 12.5 {
			t.Errorf("over NICs %v the GPUs get %v GB/s, want 12.5", nics, got)
		}
	}
}

func TestFunctionsWithoutTheirPhysicalFunctionShareThePort(t *testing.T) {
	b := virtualized(2)
	b.H.NICs = b.H.NICs[1:]
	of := topo.Owners(b.H.NICs)
	if !slices.Equal(of, []int{0, 0}) {
		t.Errorf("the owners of the ports are %v", of)
	}
	if names, _ := nicsOf(t, b.Host(), Config{}); len(names) == 0 {
		t.Error("no lane uses a function")
	}
}

func TestFoldedHostListsEachPortOnce(t *testing.T) {
	h := virtualized(126).Host()
	folded, functions := h.FoldFunctions(map[string]bool{"mlx5_7": true})
	var names []string
	for _, n := range folded.NICs {
		names = append(names, n.Name)
	}
	if !slices.Equal(names, []string{"mlx5_0", "mlx5_7"}) {
		t.Errorf("NICs are %v", names)
	}
	if left := functions.Of(folded.NICs[0]); len(left) != 125 || len(h.NICs) != 127 {
		t.Errorf("%d functions are left out of %d NICs", len(left), len(h.NICs))
	}
	if same, none := virtualized(0).Host().FoldFunctions(nil); none != nil || len(same.NICs) != 1 {
		t.Errorf("a host without functions: %v", none)
	}
	// Two hosts of a file can have equal addresses.
	two := virtualized(1).Host()
	for _, n := range slices.Clone(two.NICs) {
		n.Host = "b"
		two.NICs = append(two.NICs, n)
	}
	if got, left := two.FoldFunctions(nil); len(got.NICs) != 2 || len(left.Of(got.NICs[1])) != 1 {
		t.Errorf("of two hosts %d NICs stay, and %v are left out", len(got.NICs), left)
	}
}

func TestXMLOfAHostWithManyFunctionsIsWritten(t *testing.T) {
	h, _ := virtualized(600).Host().FoldFunctions(nil)
	text, err := ncclxml.Write(h)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := ncclxml.Read(strings.NewReader(string(text)), "again.xml"); err != nil || len(again.NICs) != 1 {
		t.Errorf("%v, %v", again, err)
	}
}

func TestExplanationNamesNoFoldedFunctions(t *testing.T) {
	h := virtualized(126).Host()
	p, err := Make(h, Config{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := p.Explain(h, "0")
	if err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(got, "\n"); strings.Contains(text, "mlx5_100") || !strings.Contains(text, "mlx5_0") {
		t.Errorf("%s", text)
	}
}
