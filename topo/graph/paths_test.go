package graph_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

func TestSwitchPairsOfBroadcomCountAsOne(t *testing.T) {
	const gen4, gen5upper, gen5lower = "0x1000 0xc010 0x1000 0xa096", "0x1000 0xc030 0x1000 0x0042",
		"0x1000 0xc030 0x1000 0x1042"
	for _, tt := range []struct {
		upper, lower string
		nccl         topo.PathType
		why          string
	}{
		{gen4, gen4, topo.PIX, "two halves of one of the fourth generation"},
		{gen5upper, gen5lower, topo.PIX, "two halves of one of the fifth"},
		{gen5upper, gen5upper, topo.PXB, "two of the fifth, one below the other"},
		{gen5lower, gen5upper, topo.PXB, "the wrong way round"},
		{gen4, gen5lower, topo.PXB, "of two generations"},
		{gen4, "0x11f8 0x4052 0x1000 0xa096", topo.PXB, "of two makers"},
	} {
		h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0, topotest.Bridge("0000:01:00.0", tt.upper,
			topotest.Bridge("0000:02:00.0", tt.lower, topotest.GPUXML("0000:03:00.0", 0, ""))+
				topotest.Bridge("0000:04:00.0", tt.lower, topotest.NetXML("0000:05:00.0", "mlx5_0"))))))
		got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:03:00.0", "mlx5_0")
		if got.Type != tt.nccl {
			t.Errorf("%s: %v, want %v (%s)", tt.why, got.Type, tt.nccl, got.Reason)
		}
		// A merged half has no upstream link, and therefore limits no bandwidth.
		if want := map[topo.PathType]float64{topo.PIX: 48, topo.PXB: 24}[tt.nccl]; got.Bandwidth != want {
			t.Errorf("%s: %g GB/s, want %g", tt.why, got.Bandwidth, want)
		}
		if smi := ncclfile.PairOf(t, graph.All(h, topo.RulesSMI), "0000:03:00.0", "mlx5_0"); smi.Type != topo.PXB {
			t.Errorf("%s: nvidia-smi has PXB, and got is %v", tt.why, smi.Type)
		}
	}
}

func TestLevelsBelowAMergedPairStaySwitches(t *testing.T) {
	const gen4 = "0x1000 0xc010 0x1000 0xa096"
	h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0, topotest.Bridge("0000:01:00.0", gen4,
		topotest.Bridge("0000:02:00.0", gen4, topotest.Bridge("0000:03:00.0", gen4, topotest.GPUXML("0000:04:00.0", 0, ""))+
			topotest.NetXML("0000:06:00.0", "mlx5_0"))+
			topotest.NetXML("0000:05:00.0", "mlx5_1")))))
	pairs := graph.All(h, topo.RulesNCCL)
	if got := ncclfile.PairOf(t, pairs, "mlx5_0", "mlx5_1"); got.Type != topo.PIX {
		t.Errorf("below the merged pair: %v", got)
	}
	if got := ncclfile.PairOf(t, pairs, "0000:04:00.0", "mlx5_0"); got.Type != topo.PXB {
		t.Errorf("a third level: %v", got)
	}
}

func TestSwitchesThatAreLinkedPassTheCPUBy(t *testing.T) {
	other := "0x1000 0xc010 0x1000 0x1111"
	link := func(target string) string { return `<pcilink target="` + target + `"/>` }
	h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0,
		topotest.Bridge("0000:01:00.0", other, link("0000:11:00.0")+topotest.GPUXML("0000:02:00.0", 0, "")),
		topotest.Bridge("0000:11:00.0", other, link("0000:01:00.0")+link("0000:99:00.0")+
			topotest.NetXML("0000:12:00.0", "mlx5_0")))))
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:02:00.0", "mlx5_0"); got.Type != topo.PXB ||
		got.Bandwidth != 48 {
		t.Errorf("%+v; want PXB at 48 GB/s", got)
	}
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesSMI), "0000:02:00.0", "mlx5_0"); got.Type != topo.PHB {
		t.Errorf("nvidia-smi: %+v; want PHB", got)
	}
}

func TestChipToChipLinkThenPCIeIsAPolicy(t *testing.T) {
	c2c := `<c2c bw="44000" count="10"/>`
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0" arch="arm64">`+topotest.GPUXML("0000:01:00.0", 0, c2c)+
		topotest.GPUXML("0000:02:00.0", 1, c2c)+topotest.NetXML("0000:03:00.0", "mlx5_0")+`</cpu></system>`)
	pairs := graph.All(h, topo.RulesNCCL)
	if got := ncclfile.PairOf(t, pairs, "0000:01:00.0",
		"0000:02:00.0"); got.Path != (topo.Path{Type: topo.C2C, Bandwidth: 440}) {
		t.Errorf("GPU to GPU: %+v; want C2C at 440 GB/s", got)
	}
	got := ncclfile.PairOf(t, pairs, "0000:01:00.0", "mlx5_0")
	if got.Path != (topo.Path{Type: topo.PHB, Bandwidth: 48}) || got.Policy == nil ||
		got.Policy.Path != (topo.Path{Type: topo.P2C, Bandwidth: 48}) || !got.Policy.Direct {
		t.Errorf("GPU to NIC: %+v, policy %+v; want PHB, and P2C as the policy", got.Path, got.Policy)
	}
}

func TestNVLinksToCPUMakeNVLPaths(t *testing.T) {
	npu := `<nvlink target="0004:00:00.0" count="3" tclass="0x068001"/>`
	h := ncclfile.ReadXML(t, `<system version="1"><cpu numaid="0" arch="ppc64">`+
		strings.ReplaceAll(topotest.GPUXML("0000:01:00.0", 0, npu)+topotest.GPUXML("0000:02:00.0", 1, npu), `sm="90"`,
			`sm="70"`)+topotest.NetXML("0000:03:00.0", "mlx5_0")+`</cpu></system>`)
	pairs := graph.All(h, topo.RulesNCCL)
	if got := ncclfile.PairOf(t, pairs, "0000:01:00.0",
		"0000:02:00.0"); got.Path != (topo.Path{Type: topo.NVL, Bandwidth: 60}) {
		t.Errorf("%+v; want NVL at three links of 20 GB/s", got)
	}
	if got := ncclfile.PairOf(t, pairs, "0000:01:00.0", "mlx5_0"); got.Path != (topo.Path{Type: topo.PHB, Bandwidth: 48}) {
		t.Errorf("%+v; want PHB at the 48 GB/s of the NIC", got)
	}
}

func TestPXNGoesThroughTheGPUThatIsNearTheNIC(t *testing.T) {
	nvlink := `<nvlink target="0000:c1:00.0" count="18" tclass="0x068000"/>`
	other := "0x15b3 0x1979 0x0000 0x0000"
	h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0,
		topotest.Bridge("0000:01:00.0", other, topotest.GPUXML("0000:02:00.0", 0, nvlink)+
			topotest.NetXML("0000:03:00.0", "mlx5_0")),
		topotest.Bridge("0000:11:00.0", other, topotest.GPUXML("0000:12:00.0", 1, nvlink)))))
	pairs := graph.All(h, topo.RulesNCCL)
	got := ncclfile.PairOf(t, pairs, "0000:12:00.0", "mlx5_0")
	if got.Type != topo.PHB || got.PXN == nil || *got.PXN != (topo.PXNPath{Via: "0000:02:00.0", Bandwidth: 48}) ||
		got.Policy.Type != topo.PXN || !got.Policy.Direct {
		t.Errorf("%+v, PXN %+v, policy %+v", got.Path, got.PXN, got.Policy)
	}
	if back := ncclfile.PairOf(t, pairs, "mlx5_0", "0000:12:00.0"); back.PXN != nil || back.Policy.Type != topo.PHB ||
		back.Policy.Direct {
		t.Errorf("receiving takes no PXN: %+v, policy %+v", back.PXN, back.Policy)
	}
	if near := ncclfile.PairOf(t, pairs, "0000:02:00.0", "mlx5_0"); near.PXN != nil || near.Policy.Path != near.Path {
		t.Errorf("a near GPU needs no PXN: %+v", near)
	}
}

func TestPathWithoutGPUDirectCrossesCPU(t *testing.T) {
	h := ncclfile.ReadXML(t, strings.ReplaceAll(topotest.System(topotest.CPUXML(0,
		topotest.Bridge("0000:01:00.0", "0x15b3 0x1979 0x0000 0x0000",
			topotest.GPUXML("0000:02:00.0", 0, "")+topotest.NetXML("0000:03:00.0", "mlx5_0")))), `gdr="1"/></nic>`,
		`gdr="0"/></nic>`))
	got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:02:00.0", "mlx5_0")
	if got.Path != (topo.Path{Type: topo.PIX, Bandwidth: 48}) ||
		got.Policy.Path != (topo.Path{Type: topo.PHB, Bandwidth: 24}) || got.Policy.Direct {
		t.Errorf("%+v, policy %+v; want PIX, and PHB at the switch's own link as the policy", got.Path, got.Policy)
	}
}

func TestNetWithoutSpeedHasTenGigabits(t *testing.T) {
	for _, speed := range []string{`speed="-1"`, `speed="0"`, ``} {
		h := ncclfile.ReadXML(t, strings.Replace(topotest.System(topotest.CPUXML(0, topotest.GPUXML("0000:02:00.0", 0, ""),
			topotest.NetXML("0000:03:00.0", "mlx5_0"))), `speed="400000"`, speed, 1))
		if got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:02:00.0", "mlx5_0"); got.Bandwidth != 1.25 {
			t.Errorf("%s: %g GB/s, and NCCL has 1.25", speed, got.Bandwidth)
		}
		if h.NICs[0].RateGbps() != 0 {
			t.Errorf("%s: the NIC states %g Gbit/s", speed, h.NICs[0].RateGbps())
		}
	}
}

func TestSMIPathsCrossNoGPU(t *testing.T) {
	nvlink := func(to ...string) (s string) {
		for _, target := range to {
			s += `<nvlink target="` + target + `" count="2" tclass="0x030200"/>`
		}
		return s
	}
	h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0, topotest.GPUXML("0000:01:00.0", 0, nvlink("0000:02:00.0")),
		topotest.GPUXML("0000:02:00.0", 1, nvlink("0000:01:00.0", "0000:03:00.0")),
		topotest.GPUXML("0000:03:00.0", 2, nvlink("0000:02:00.0")))))
	got := ncclfile.PairOf(t, graph.All(h, topo.RulesNCCL), "0000:01:00.0", "0000:03:00.0")
	if got.Path != (topo.Path{Type: topo.NVB, Bandwidth: 41.2}) || got.Hops != 2 ||
		!strings.Contains(got.Reason, "0000:02:00.0") {
		t.Errorf("%+v", got)
	}
	if got := ncclfile.PairOf(t, graph.All(h, topo.RulesSMI), "0000:01:00.0",
		"0000:03:00.0"); got.Path != (topo.Path{Type: topo.PHB, Bandwidth: 48}) {
		t.Errorf("nvidia-smi: %+v", got)
	}
}

func TestRefusedGPUHasReason(t *testing.T) {
	for word, g := range map[string]topo.GPU{
		"MIG": {MIG: true}, "vGPU": {VGPU: true}, "exclusive": {ComputeMode: "exclusive-process"},
		"prohibited": {ComputeMode: "prohibited"}, "peer-to-peer": {NoP2P: true}, "AMD": {Vendor: "AMD"},
		"because": {Reason: "because"},
	} {
		if why := g.Refusal(); !strings.Contains(why, word) {
			t.Errorf("%+v: %q", g, why)
		}
	}
	if why := (topo.GPU{}).Refusal(); why != "" {
		t.Errorf("an ordinary GPU: %q", why)
	}
}

// A file's names can have any character.
func TestNamesOfUnusualFormAreFound(t *testing.T) {
	for _, name := range []string{" GT/_0", "host/mlx5_0", "/", "a/b/c"} {
		h, err := ncclxml.Read(strings.NewReader(topotest.System(topotest.CPUXML(0, topotest.GPUXML("0000:01:00.0", 0, ""),
			topotest.NetXML("0000:02:00.0", name)))), "")
		if err != nil {
			t.Fatal(err)
		}
		if p, err := graph.Between(h, "0000:01:00.0", name); err != nil || p.Type != topo.PHB {
			t.Errorf("the path to %q is %v, %v", name, p, err)
		}
	}
}

// A PathFinder for a single pair, Table and All agree on the path.
func TestPathAloneEqualsPathInTableAndPairs(t *testing.T) {
	pairsSeen, sharedRows := 0, 0
	for seed := range uint64(300) {
		h := topotest.MachineOf(rand.New(rand.NewPCG(seed, 2)))
		if seed%3 == 1 {
			addTwins(h)
		}
		if seed%10 == 0 {
			h.Matrix = map[[2]string]topo.PathType{}
			for i, a := range graph.Devices(h) {
				for j, b := range graph.Devices(h) {
					h.Matrix[[2]string{a.Name, b.Name}] = topo.PathType(1 + (i+j)%int(topo.DIS))
				}
			}
		}
		ends := graph.Devices(h)
		for _, rules := range []topo.Rules{topo.RulesNCCL, topo.RulesSMI, topo.RulesPlan} {
			table, pairs := graph.NewTable(h, rules), graph.All(h, rules)
			pairsSeen += len(pairs)
			next := 0
			for i, a := range ends {
				row := table.Row(i)
				if table.First(i) != i {
					sharedRows++
				}
				for j, b := range ends {
					if i == j {
						continue
					}
					pair := pairs[next]
					next++
					if pair.From != a.Name || pair.To != b.Name || table.Paths[row[j]] != pair.Path {
						t.Fatalf("seed %d, rules %s, from %s to %s: %+v in the table, %+v as a pair", seed, rules, a.Name, b.Name,
							table.Paths[row[j]], pair)
					}
					if rules != topo.RulesNCCL || h.Matrix != nil {
						continue
					}
					alone := graph.NewPathFinder(h, rules).To(b)(a).Path
					if alone != pair.Path {
						t.Fatalf("seed %d, from %s to %s: %+v alone, %+v among all", seed, a.Name, b.Name, alone, pair.Path)
					}
				}
			}
			for i, p := range table.Paths {
				if slices.Contains(table.Paths[:i], p) {
					t.Errorf("seed %d: the table has %+v twice", seed, p)
				}
			}
		}
	}
	if pairsSeen < 5000 || sharedRows < 200 {
		t.Errorf("only %d pairs were compared, and %d devices share a row", pairsSeen, sharedRows)
	}
}

// addTwins adds two devices beside each device, with the same parent: GPUs without NVLinks, and
// NICs.
func addTwins(h *topo.Host) {
	gpus, nics := h.GPUs, h.NICs
	for n := range 2 {
		for i, g := range gpus {
			g.BusID, g.NVLinks = fmt.Sprintf("f%d%02x:00:00.0", n, i), nil
			h.GPUs = append(h.GPUs, g)
		}
		for i, nic := range nics {
			nic.Name, nic.BusID = fmt.Sprintf("%s_%d", nic.Name, n), fmt.Sprintf("e%d%02x:00:00.0", n, i)
			h.NICs = append(h.NICs, nic)
		}
	}
}

// A consumer can stop after any pair.
func TestEachPathCanBeLeft(t *testing.T) {
	h := topotest.MachineOf(rand.New(rand.NewPCG(3, 2)))
	all := graph.All(h, topo.RulesNCCL)
	if len(all) < 4 {
		t.Fatalf("%d pairs are too few", len(all))
	}
	var first []graph.Pair
	for p := range graph.Each(h, topo.RulesNCCL) {
		if first = append(first, p); len(first) == 3 {
			break
		}
	}
	if diff := cmp.Diff(all[:3], first); diff != "" {
		t.Errorf("the first three (-all +left):\n%s", diff)
	}
}
