package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

func TestTablesOfRecordedHostEqualGolden(t *testing.T) {
	dir, host := recordedHost(t)
	for _, command := range []string{"topo", "plan", "topo --nics"} {
		out := peerlane(t, slices.Concat(strings.Fields(command), []string{"--root", t.TempDir()}, host)...)
		golden(t, strings.ReplaceAll(command, " --", "-")+".txt", strings.ReplaceAll(out, dir, "RECORDED"))
		if strings.Contains(out, "\x1b") {
			t.Errorf("peerlane %s writes colours to a file", command)
		}
	}
}

// printedTopology is the JSON document of `peerlane topo -o json`, with the pairs expanded.
type printedTopology struct {
	Version int
	Rules   string
	GPUs    []struct{ BusID, UUID string }
	NICs    []struct{ Name string }
	Paths   []graph.DistinctPath
	Pairs   [][4]int
}

func (p *printedTopology) pairs() (pairs []graph.Pair) {
	var names []string
	for _, g := range p.GPUs {
		names = append(names, g.BusID)
	}
	for _, n := range p.NICs {
		names = append(names, n.Name)
	}
	for _, of := range p.Pairs {
		for _, direction := range [][3]int{{of[0], of[1], of[2]}, {of[1], of[0], of[3]}} {
			w := p.Paths[direction[2]]
			pairs = append(pairs, graph.Pair{From: names[direction[0]], To: names[direction[1]], Path: w.Path, Hops: w.Hops,
				Reason: w.Reason, PXN: w.PXN, Policy: w.Policy})
		}
	}
	return pairs
}

func TestTopoJSONHasEveryPair(t *testing.T) {
	_, host := recordedHost(t)
	got := decode[printedTopology](t, append([]string{"topo", "-o", "json"}, host...)...)
	if len(got.GPUs) != 8 || len(got.NICs) != 2 || len(got.Pairs) != 10*9/2 {
		t.Fatalf("%d GPUs, %d NICs, %d paths", len(got.GPUs), len(got.NICs), len(got.Pairs))
	}
	h, err := reader.Sysfs(topo.Options{Sysfs: host[1], Proc: host[3]})
	if err != nil {
		t.Fatal(err)
	}
	want := map[[2]string]graph.Pair{}
	for _, p := range graph.All(h, topo.RulesNCCL) {
		want[[2]string{p.From, p.To}] = p
	}
	pairs := got.pairs()
	for _, p := range pairs {
		if diff := cmp.Diff(want[[2]string{p.From, p.To}], p); diff != "" {
			t.Errorf("%s to %s (-found +printed):\n%s", p.From, p.To, diff)
		}
	}
	if len(pairs) != len(want) {
		t.Errorf("%d pairs are printed of %d", len(pairs), len(want))
	}
}

func TestRulesSelectPathTypes(t *testing.T) {
	_, host := recordedHost(t)
	for rules, want := range map[string]string{"": "PHB", "nccl": "PHB", "smi": "NODE"} {
		args := append([]string{"topo", "-o", "json"}, host...)
		if rules != "" {
			args = append(args, "--rules", rules)
		}
		got := decode[printedTopology](t, args...)
		if got.Version != topologyVersion || got.Rules != map[bool]string{true: "smi", false: "nccl"}[rules == "smi"] {
			t.Errorf("version %d, rules %q", got.Version, got.Rules)
		}
		for _, p := range got.pairs() {
			if p.From == "0000:3a:00.0" && p.To == "mlx5_0" && (p.Type.String() != want || p.Hops == 0 || p.Reason == "" ||
				p.Policy == nil) {
				t.Errorf("by the rules %q: %+v, want %s", rules, p, want)
			}
		}
	}
}

func TestPlanJSONIsThePlan(t *testing.T) {
	_, flags := recordedHost(t)
	got := decode[planner.Plan](t, append([]string{"plan", "--root", t.TempDir(), "-o", "json"}, flags...)...)
	host, err := reader.Sysfs(topo.Options{Sysfs: flags[1], Proc: flags[3]})
	if err != nil {
		t.Fatal(err)
	}
	want, err := planner.Make(host, config.Default().PlannerConfig())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*want, got); diff != "" {
		t.Errorf("plan (-made +printed):\n%s", diff)
	}
}

func TestXMLOfRecordedHostEqualsGolden(t *testing.T) {
	_, host := recordedHost(t)
	for name, more := range map[string][]string{"topo.xml": nil, "virtual.xml": {"--virtual"}} {
		args := append([]string{"topo", "-o", "xml", "--root", t.TempDir()}, more...)
		golden(t, name, peerlane(t, append(args, host...)...))
	}
}

// onFile runs a command line on a topology file.
func onFile(t *testing.T, text string, args ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "topo.xml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return peerlane(t, append(args, "--input", file)...)
}

// The matrix contains what nvidia-smi prints: the number of NVLinks, a legend for replaced NIC
// names, and the local processors and NUMA node of each GPU.
func TestMatrixHasColumnsOfNvidiaSMI(t *testing.T) {
	out := onFile(t, `<system version="1"><cpu numaid="1" affinity="0000000f,000000f0" arch="x86_64" vendor="AuthenticAMD">
		<pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="80"><nvlink target="0000:02:00.0" count="4" tclass="0x030200"/></gpu></pci>
		<pci busid="0000:02:00.0" class="0x030200"><gpu dev="1" sm="80"><nvlink target="0000:01:00.0" count="4" tclass="0x030200"/></gpu></pci>
		<pci busid="0000:03:00.0" class="0x030200"><gpu dev="2" sm="80"><nvlink target="x" count="12" tclass="0x068000"/></gpu></pci>
		<pci busid="0000:04:00.0" class="0x030200"><gpu dev="3" sm="80"><nvlink target="x" count="8" tclass="0x068000"/></gpu></pci>
		<pci busid="0000:05:00.0" class="0x020700"/></cpu></system>`, "topo")
	_, out, _ = strings.Cut(out, "Path types\n")
	const want = `      GPU0  GPU1  GPU2  GPU3  NIC0  CPU AFFINITY  NUMA AFFINITY
GPU0  X     NV4   PHB   PHB   PHB   4-7,32-35     1
GPU1  NV4   X     PHB   PHB   PHB   4-7,32-35     1
GPU2  PHB   PHB   X     NV8   PHB   4-7,32-35     1
GPU3  PHB   PHB   NV8   X     PHB   4-7,32-35     1
NIC0  PHB   PHB   PHB   PHB   X

Bandwidths, GB/s in one direction
      GPU0  GPU1  GPU2  GPU3  NIC0
GPU0  X     80    12    12    12
GPU1  80    X     12    12    12
GPU2  12    12    X     160   12
GPU3  12    12    160   X     12
NIC0  12    12    12    12    X

NV#   so many NVLinks
PHB   a PCIe host bridge (the CPU)
NIC0  nic@0000:05:00.0
`
	if diff := cmp.Diff(want, out); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMatrixOfSeveralHostsNamesThemBelow(t *testing.T) {
	const gpu = `<pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="100"><nvlink target="x" count="18" tclass="0x068000"/></gpu></pci>`
	out := onFile(t, `<system version="1"><cpu host_hash="0xa5f31daa95182da8" numaid="-1" arch="arm64">`+gpu+`</cpu>
		<cpu host_hash="0xb5f31daa95182da8" numaid="-1" arch="arm64">`+gpu+`</cpu></system>`, "topo")
	for _, want := range []string{
		"         H0/GPU0  H1/GPU0\nH0/GPU0  X        NV18\nH1/GPU0  NV18     X\n\n",
		"\nH0    0xa5f31daa95182da8\nH1    0xb5f31daa95182da8\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in\n%s", want, out)
		}
	}
}

func TestTopoColoursTerminalsAlone(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	_, host := recordedHost(t)
	args := append([]string{"topo"}, host...)
	plain := peerlane(t, args...)
	coloured := onTerminal(t, 200, args...)
	if !strings.Contains(coloured, "\x1b[32mPIX\x1b[0m") || !strings.Contains(coloured, "\x1b[31mSYS\x1b[0m") {
		t.Error("near and far are of one colour")
	}
	trailing := regexp.MustCompile(" +\n") // a bold heading includes its padding
	if diff := cmp.Diff(plain, trailing.ReplaceAllString(escape.ReplaceAllString(coloured, ""), "\n")); diff != "" {
		t.Errorf("colours move something (-plain +terminal):\n%s", diff)
	}
	t.Setenv("NO_COLOR", "1")
	if out := onTerminal(t, 200, args...); out != plain {
		t.Error("colours in spite of NO_COLOR")
	}
}

// The XML of a host has the same paths as the host.
func TestXMLStandsInForTheHost(t *testing.T) {
	_, host := recordedHost(t)
	file := filepath.Join(t.TempDir(), "topo.xml")
	if err := os.WriteFile(file, []byte(peerlane(t, append([]string{"topo", "-o", "xml"}, host...)...)),
		0o644); err != nil {
		t.Fatal(err)
	}
	first := decode[printedTopology](t, append([]string{"topo", "-o", "json"}, host...)...)
	again := decode[printedTopology](t, "topo", "-o", "json", "--input", file)
	want, got := first.pairs(), again.pairs()
	if diff := cmp.Diff(want, got); diff != "" || len(got) != 90 {
		t.Errorf("%d paths (-host +XML):\n%s", len(got), diff)
	}
}

func TestVirtualSwitchFollowsTheConfiguration(t *testing.T) {
	_, host := recordedHost(t)
	root := t.TempDir()
	config := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("[[plan.lane]]\ngpu = \"3\"\nservers = [\"2\"]\nnics = [\"emulated0\"]\n"),
		0o644); err != nil {
		t.Fatal(err)
	}
	out := peerlane(t, append([]string{"topo", "-o", "xml", "--virtual", "--root", root}, host...)...)
	if !strings.Contains(out, `<net name="peerlane_3"/>`) || !strings.Contains(out, "emulated0 is not in the topology") {
		t.Errorf("GPU 3 is assigned to a NIC that is not there:\n%s", out)
	}
}

const ncclXML = `<system version="1">
  <cpu numaid="0" affinity="0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:16:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:17:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:2a:00.0" count="4" tclass="0x030200"/></gpu></pci>
      <pci busid="0000:18:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_7" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic></pci>
    </pci>
    <pci busid="0000:2a:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="1" sm="90" rank="1" gdr="1"><nvlink target="0000:17:00.0" count="4" tclass="0x030200"/></gpu></pci>
  </cpu>
</system>
`

func TestTopologyFileReplacesHost(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.xml")
	if err := os.WriteFile(file, []byte(ncclXML), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := peerlane(t, "topo", "--input", file); !strings.Contains(out, "mlx5_7") || !strings.Contains(out, file) {
		t.Errorf("peerlane topo printed\n%s", out)
	}
	plan := decode[planner.Plan](t, "plan", "--root", t.TempDir(), "--input", file, "-o", "json")
	far, err := plan.Lane("1")
	if err != nil {
		t.Fatal(err)
	}
	if far.Role != planner.RoleFar || !far.Relay || len(far.Servers) != 1 || far.Servers[0] != "0000:17:00.0" {
		t.Errorf("the lane of GPU 1 is %+v", far)
	}
}

func TestConfigurationAssignsALane(t *testing.T) {
	_, host := recordedHost(t)
	root := t.TempDir()
	config := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	text := "[[plan.lane]]\ngpu = \"3\"\nservers = [\"2\"]\nnics = [\"emulated0\"]\n"
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	plan := decode[planner.Plan](t, append([]string{"plan", "--root", root, "-o", "json"}, host...)...)
	lane, err := plan.Lane("3")
	if err != nil {
		t.Fatal(err)
	}
	server, err := plan.GPU("2")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{server.BusID}, lane.Servers); diff != "" {
		t.Errorf("servers (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"emulated0"}, lane.NICs); diff != "" {
		t.Errorf("NICs (-want +got):\n%s", diff)
	}
}

func TestGigabytesRoundToThreeDigits(t *testing.T) {
	for b, want := range map[float64]string{0: "0", 0.001: "0.001", 0.45: "0.5", 12.34: "12.3", 48: "48", 99.94: "99.9",
		99.96: "100", 396.5: "396"} {
		if got := gigabytes(b); got != want {
			t.Errorf("gigabytes(%v) = %s, want %s", b, got, want)
		}
	}
}
