package topo

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pairOf is the pair of two devices, by name.
func pairOf(t *testing.T, pairs []Pair, from, to string) Pair {
	t.Helper()
	for _, p := range pairs {
		if p.From == from && p.To == to {
			return p
		}
	}
	t.Fatalf("no pair from %s to %s", from, to)
	return Pair{}
}

// bridge is a <pci> that others are below; identity is vendor, device,
// subsystem_vendor and subsystem_device.
func bridge(busID, identity, inner string) string {
	f := strings.Fields(identity)
	return fmt.Sprintf(`<pci busid="%s" class="0x060400" vendor="%s" device="%s" subsystem_vendor="%s" subsystem_device="%s" link_speed="16.0 GT/s PCIe" link_width="16">%s</pci>`,
		busID, f[0], f[1], f[2], f[3], inner)
}

func gpuXML(busID string, dev int, inner string) string {
	return fmt.Sprintf(`<pci busid="%s" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="%d" sm="90" rank="%d" gdr="1">%s</gpu></pci>`, busID, dev, dev, inner)
}

func netXML(busID, name string) string {
	return fmt.Sprintf(`<pci busid="%s" class="0x020700" vendor="0x15b3" link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="%s" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic></pci>`, busID, name)
}

func system(cpus ...string) string {
	return `<system version="1">` + strings.Join(cpus, "\n") + `</system>`
}

func cpuXML(numa int, inner ...string) string {
	return fmt.Sprintf(`<cpu numaid="%d" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">%s</cpu>`, numa, strings.Join(inner, "\n"))
}

func TestSwitchPairsOfBroadcomCountAsOne(t *testing.T) {
	const gen4, gen5upper, gen5lower = "0x1000 0xc010 0x1000 0xa096", "0x1000 0xc030 0x1000 0x0042", "0x1000 0xc030 0x1000 0x1042"
	for _, tt := range []struct {
		upper, lower string
		nccl         PathType
		why          string
	}{
		{gen4, gen4, PIX, "two halves of one of the fourth generation"},
		{gen5upper, gen5lower, PIX, "two halves of one of the fifth"},
		{gen5upper, gen5upper, PXB, "two of the fifth, one below the other"},
		{gen5lower, gen5upper, PXB, "the wrong way round"},
		{gen4, gen5lower, PXB, "of two generations"},
		{gen4, "0x11f8 0x4052 0x1000 0xa096", PXB, "of two makers"},
	} {
		h := readXML(t, system(cpuXML(0, bridge("0000:01:00.0", tt.upper,
			bridge("0000:02:00.0", tt.lower, gpuXML("0000:03:00.0", 0, ""))+
				bridge("0000:04:00.0", tt.lower, netXML("0000:05:00.0", "mlx5_0"))))))
		got := pairOf(t, h.Paths(RulesNCCL), "0000:03:00.0", "mlx5_0")
		if got.Type != tt.nccl {
			t.Errorf("%s: %v, want %v (%s)", tt.why, got.Type, tt.nccl, got.Reason)
		}
		// A merged half has no link of its own, so that it narrows nothing.
		if want := map[PathType]float64{PIX: 48, PXB: 24}[tt.nccl]; got.Bandwidth != want {
			t.Errorf("%s: %g GB/s, want %g", tt.why, got.Bandwidth, want)
		}
		if smi := pairOf(t, h.Paths(RulesSMI), "0000:03:00.0", "mlx5_0"); smi.Type != PXB {
			t.Errorf("%s: nvidia-smi has PXB, and got is %v", tt.why, smi.Type)
		}
	}
}

func TestLevelsBelowAMergedPairStaySwitches(t *testing.T) {
	const gen4 = "0x1000 0xc010 0x1000 0xa096"
	h := readXML(t, system(cpuXML(0, bridge("0000:01:00.0", gen4,
		bridge("0000:02:00.0", gen4, bridge("0000:03:00.0", gen4, gpuXML("0000:04:00.0", 0, ""))+netXML("0000:06:00.0", "mlx5_0"))+
			netXML("0000:05:00.0", "mlx5_1")))))
	pairs := h.Paths(RulesNCCL)
	if got := pairOf(t, pairs, "mlx5_0", "mlx5_1"); got.Type != PIX {
		t.Errorf("below the merged pair: %v", got)
	}
	if got := pairOf(t, pairs, "0000:04:00.0", "mlx5_0"); got.Type != PXB {
		t.Errorf("a third level: %v", got)
	}
}

func TestSwitchesThatAreLinkedPassTheCPUBy(t *testing.T) {
	other := "0x1000 0xc010 0x1000 0x1111"
	link := func(target string) string { return `<pcilink target="` + target + `"/>` }
	h := readXML(t, system(cpuXML(0,
		bridge("0000:01:00.0", other, link("0000:11:00.0")+gpuXML("0000:02:00.0", 0, "")),
		bridge("0000:11:00.0", other, link("0000:01:00.0")+link("0000:99:00.0")+netXML("0000:12:00.0", "mlx5_0")))))
	if got := pairOf(t, h.Paths(RulesNCCL), "0000:02:00.0", "mlx5_0"); got.Type != PXB || got.Bandwidth != 48 {
		t.Errorf("%+v; want PXB at 48 GB/s", got)
	}
	if got := pairOf(t, h.Paths(RulesSMI), "0000:02:00.0", "mlx5_0"); got.Type != PHB {
		t.Errorf("nvidia-smi: %+v; want PHB", got)
	}
}

func TestChipToChipLinkThenPCIeIsAPolicy(t *testing.T) {
	c2c := `<c2c bw="44000" count="10"/>`
	h := readXML(t, `<system version="1"><cpu numaid="0" arch="arm64">`+gpuXML("0000:01:00.0", 0, c2c)+gpuXML("0000:02:00.0", 1, c2c)+netXML("0000:03:00.0", "mlx5_0")+`</cpu></system>`)
	pairs := h.Paths(RulesNCCL)
	if got := pairOf(t, pairs, "0000:01:00.0", "0000:02:00.0"); got.Path != (Path{C2C, 440}) {
		t.Errorf("GPU to GPU: %+v; want C2C at 440 GB/s", got)
	}
	got := pairOf(t, pairs, "0000:01:00.0", "mlx5_0")
	if got.Path != (Path{PHB, 48}) || got.Policy == nil || got.Policy.Path != (Path{P2C, 48}) || !got.Policy.Direct {
		t.Errorf("GPU to NIC: %+v, policy %+v; want PHB, and P2C as the policy", got.Path, got.Policy)
	}
}

func TestNVLinksToTheCPU(t *testing.T) {
	npu := `<nvlink target="0004:00:00.0" count="3" tclass="0x068001"/>`
	h := readXML(t, `<system version="1"><cpu numaid="0" arch="ppc64">`+strings.ReplaceAll(gpuXML("0000:01:00.0", 0, npu)+gpuXML("0000:02:00.0", 1, npu), `sm="90"`, `sm="70"`)+netXML("0000:03:00.0", "mlx5_0")+`</cpu></system>`)
	pairs := h.Paths(RulesNCCL)
	if got := pairOf(t, pairs, "0000:01:00.0", "0000:02:00.0"); got.Path != (Path{NVL, 60}) {
		t.Errorf("%+v; want NVL at three links of 20 GB/s", got)
	}
	if got := pairOf(t, pairs, "0000:01:00.0", "mlx5_0"); got.Path != (Path{PHB, 48}) {
		t.Errorf("%+v; want PHB at the 48 GB/s of the NIC", got)
	}
}

func TestPXNGoesThroughTheGPUThatIsNearTheNIC(t *testing.T) {
	nvlink := `<nvlink target="0000:c1:00.0" count="18" tclass="0x068000"/>`
	other := "0x15b3 0x1979 0x0000 0x0000"
	h := readXML(t, system(cpuXML(0,
		bridge("0000:01:00.0", other, gpuXML("0000:02:00.0", 0, nvlink)+netXML("0000:03:00.0", "mlx5_0")),
		bridge("0000:11:00.0", other, gpuXML("0000:12:00.0", 1, nvlink)))))
	pairs := h.Paths(RulesNCCL)
	got := pairOf(t, pairs, "0000:12:00.0", "mlx5_0")
	if got.Type != PHB || got.PXN == nil || *got.PXN != (PXNPath{"0000:02:00.0", 48}) || got.Policy.Type != PXN || !got.Policy.Direct {
		t.Errorf("%+v, PXN %+v, policy %+v", got.Path, got.PXN, got.Policy)
	}
	if back := pairOf(t, pairs, "mlx5_0", "0000:12:00.0"); back.PXN != nil || back.Policy.Type != PHB || back.Policy.Direct {
		t.Errorf("receiving takes no PXN: %+v, policy %+v", back.PXN, back.Policy)
	}
	if near := pairOf(t, pairs, "0000:02:00.0", "mlx5_0"); near.PXN != nil || near.Policy.Path != near.Path {
		t.Errorf("a near GPU needs no PXN: %+v", near)
	}
}

func TestWithoutGPUDirectTheWayIsThroughTheCPU(t *testing.T) {
	h := readXML(t, strings.ReplaceAll(system(cpuXML(0, bridge("0000:01:00.0", "0x15b3 0x1979 0x0000 0x0000",
		gpuXML("0000:02:00.0", 0, "")+netXML("0000:03:00.0", "mlx5_0")))), `gdr="1"/></nic>`, `gdr="0"/></nic>`))
	got := pairOf(t, h.Paths(RulesNCCL), "0000:02:00.0", "mlx5_0")
	if got.Path != (Path{PIX, 48}) || got.Policy.Path != (Path{PHB, 24}) || got.Policy.Direct {
		t.Errorf("%+v, policy %+v; want PIX, and PHB at the switch's own link as the policy", got.Path, got.Policy)
	}
}

func TestANetWithoutSpeedHasTenGigabits(t *testing.T) {
	for _, speed := range []string{`speed="-1"`, `speed="0"`, ``} {
		h := readXML(t, strings.Replace(system(cpuXML(0, gpuXML("0000:02:00.0", 0, ""), netXML("0000:03:00.0", "mlx5_0"))), `speed="400000"`, speed, 1))
		if got := pairOf(t, h.Paths(RulesNCCL), "0000:02:00.0", "mlx5_0"); got.Bandwidth != 1.25 {
			t.Errorf("%s: %g GB/s, and NCCL has 1.25", speed, got.Bandwidth)
		}
		if h.NICs[0].RateGbps() != 0 {
			t.Errorf("%s: the NIC states %g Gbit/s", speed, h.NICs[0].RateGbps())
		}
	}
}

func TestSeveralHostsOfAFile(t *testing.T) {
	nvlink := `<nvlink target="0000:c1:00.0" count="18" tclass="0x068000"/>`
	host := func(hash string) string {
		inner := gpuXML("0000:02:00.0", 0, nvlink) + netXML("0000:03:00.0", "mlx5_0")
		return strings.Replace(cpuXML(0, inner), "<cpu", `<cpu host_hash="`+hash+`"`, 1)
	}
	h := readXML(t, system(host("0xa5f31daa95182da8"), host("0x2")))
	if len(h.GPUs) != 2 || h.GPUs[0].Host != "0xa5f31daa95182da8" || h.GPUs[1].Host != "0x2" || h.GPUs[1].Index != 0 || h.NICs[1].Host != "0x2" || h.CPUs[1].Host != "0x2" {
		t.Fatalf("%+v", h)
	}
	for _, p := range h.Paths(RulesNCCL) {
		switch {
		case p.FromHost == "" || p.ToHost == "":
			t.Errorf("a pair without its hosts: %+v", p)
		case p.FromHost == p.ToHost && p.Type != PHB:
			t.Errorf("on one host: %+v", p)
		case p.FromHost != p.ToHost && p.From == p.To && p.From == "0000:02:00.0" && p.Type != NVL:
			t.Errorf("NVSwitches join hosts: %+v", p)
		case p.FromHost != p.ToHost && p.To == "mlx5_0" && p.Type != DIS:
			t.Errorf("nothing else does: %+v", p)
		}
	}
	if _, err := h.Path("0000:02:00.0", "0x2/mlx5_0"); err == nil || !strings.Contains(err.Error(), "0x2") {
		t.Errorf("a name that two hosts have: %v", err)
	}
	if got, err := h.Path("0x2/0000:02:00.0", "0x2/mlx5_0"); err != nil || got.Type != PHB {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := MakePlan(h, PlanConfig{}); err == nil || !strings.Contains(err.Error(), "2 hosts") {
		t.Errorf("a plan of two hosts: %v", err)
	}
	// One hash is one host, and needs no name.
	if one := readXML(t, system(host("0x2"))); one.GPUs[0].Host != "" {
		t.Errorf("one host: %+v", one.GPUs)
	}
}

func TestNVLinkThroughAGPUIsNoWayForSMI(t *testing.T) {
	nvlink := func(to ...string) (s string) {
		for _, target := range to {
			s += `<nvlink target="` + target + `" count="2" tclass="0x030200"/>`
		}
		return s
	}
	h := readXML(t, system(cpuXML(0, gpuXML("0000:01:00.0", 0, nvlink("0000:02:00.0")),
		gpuXML("0000:02:00.0", 1, nvlink("0000:01:00.0", "0000:03:00.0")), gpuXML("0000:03:00.0", 2, nvlink("0000:02:00.0")))))
	got := pairOf(t, h.Paths(RulesNCCL), "0000:01:00.0", "0000:03:00.0")
	if got.Path != (Path{NVB, 41.2}) || got.Hops != 2 || !strings.Contains(got.Reason, "0000:02:00.0") {
		t.Errorf("%+v", got)
	}
	if got := pairOf(t, h.Paths(RulesSMI), "0000:01:00.0", "0000:03:00.0"); got.Path != (Path{PHB, 48}) {
		t.Errorf("nvidia-smi: %+v", got)
	}
}

func TestDevicesThatNoLaneUsesAreShownWithTheReason(t *testing.T) {
	other := func(busID, class, vendor, device string) string {
		return fmt.Sprintf(`<pci busid="%s" class="%s" vendor="%s" device="%s" link_speed="16 GT/s" link_width="16"/>`, busID, class, vendor, device)
	}
	h := readXML(t, system(cpuXML(0, bridge("0000:01:00.0", "0x15b3 0x1979 0x0000 0x0000",
		other("0000:02:00.0", "0x030200", "0x10de", "0x2330")+
			other("0000:03:00.0", "0x120000", "0x1002", "0x74a1")+
			other("0000:04:00.0", "0x0b4000", "0x1d94", "0x55b7")+
			other("0000:05:00.0", "0x020000", "0x1d0f", "0xefa1")+
			other("0000:06:00.0", "0x020000", "0x1d0f", "0xec20")+
			other("0000:07:00.0", "0x020000", "0x1ded", "0x107f")))))
	var got []string
	for _, g := range h.GPUs {
		got = append(got, fmt.Sprintf("GPU %s %q %t", g.BusID, g.Vendor, g.Reason == ""))
	}
	for _, n := range h.NICs {
		got = append(got, fmt.Sprintf("NIC %s %q %t %t", n.BusID, n.Protocol, n.Ethernet, n.Reason == ""))
	}
	want := []string{
		`GPU 0000:02:00.0 "" true`, `GPU 0000:03:00.0 "AMD" false`, `GPU 0000:04:00.0 "Hygon" false`,
		`NIC 0000:05:00.0 "EFA" false false`, `NIC 0000:06:00.0 "" true false`, `NIC 0000:07:00.0 "eRDMA" false true`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	plan, err := MakePlan(h, PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for i, role := range []string{RoleNear, RoleRefused, RoleRefused} {
		if l := plan.Lanes[i]; l.Role != role || role == RoleRefused && !strings.Contains(l.Reason, "GPU of") {
			t.Errorf("lane %d: %+v; want %s", i, l, role)
		}
	}
	if nics := plan.Lanes[0].NICs; len(nics) != 1 || nics[0] != "nic@0000:07:00.0" {
		t.Errorf("GPU 0 uses %v; only eRDMA can serve it", nics)
	}
}

func TestSoftwareRDMAIsPlannedOnlyWhereThatIsAskedFor(t *testing.T) {
	h := &Host{
		CPUs: []CPU{{NUMA: 0}},
		GPUs: []GPU{{BusID: "0000:01:00.0", Place: Place{Link: 12}}},
		NICs: []NIC{{Name: "rxe0", Software: true, Place: Place{Link: localBandwidth}}},
	}
	for _, software := range []bool{false, true} {
		plan, err := MakePlan(h, PlanConfig{Software: software})
		if err != nil {
			t.Fatal(err)
		}
		l := plan.Lanes[0]
		if used := len(l.NICs) == 1; used != software || !software && !strings.Contains(l.Reason, "--software") {
			t.Errorf("software %t: %+v", software, l)
		}
	}
}

func TestGPUsThatCannotBeRelayedSayWhy(t *testing.T) {
	for word, g := range map[string]GPU{
		"MIG": {MIG: true}, "vGPU": {VGPU: true}, "exclusive": {ComputeMode: "exclusive-process"},
		"prohibited": {ComputeMode: "prohibited"}, "peer-to-peer": {NoP2P: true}, "AMD": {Vendor: "AMD"}, "because": {Reason: "because"},
	} {
		if why := g.refusal(); !strings.Contains(why, word) {
			t.Errorf("%+v: %q", g, why)
		}
	}
	if why := (GPU{}).refusal(); why != "" {
		t.Errorf("an ordinary GPU: %q", why)
	}
}

func TestXGMIBandwidthFollowsTheArchitecture(t *testing.T) {
	for gcn, want := range map[string]float64{"906": 24, "908": 24, "gfx90a": 36, "910": 36, "gfx942": 48, "942": 48, "950": 48, "": 24} {
		if got := xgmiBandwidth(gcn); got != want {
			t.Errorf("%q: %g GB/s, want %g", gcn, got, want)
		}
	}
}

func TestCRLFAndBreadthAreBoundedAndPlaced(t *testing.T) {
	crlf := strings.ReplaceAll(smallHost, "\n", "\r\n")
	if diff := cmp.Diff(readXML(t, smallHost), readXML(t, crlf)); diff != "" {
		t.Errorf("CRLF changes the host:\n%s", diff)
	}
	for name, tt := range map[string]struct{ text, want string }{
		"deep":    {strings.Repeat("<pci>", 100), "deep"},
		"wide":    {"<system>" + strings.Repeat("<pci/>", maxXMLElements+1), "elements"},
		"torn":    {"<system version=\"1\">\n<cpu numaid=\"0\"\n<", "line 3"},
		"a place": {"<system version=\"1\">\n<cpu numaid=\"0\">\n<pci busid=\"x\"/>\n</cpu></system>", "line 3, column"},
	} {
		_, err := ReadNCCLXML(strings.NewReader(tt.text), "some.xml")
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "line") {
			t.Errorf("%s: %v; want one with a line and %q", name, err, tt.want)
		}
	}
}

func TestEveryNCCLFileLoads(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(topologies, "*.xml"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Skipf("no files in %s", topologies)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "<system") {
			continue
		}
		if _, err := ReadNCCLXML(strings.NewReader(string(text)), file); err != nil {
			t.Error(err)
		}
	}
}

// A file's names can have any character.
func TestNamesThatLookLikeSomethingElse(t *testing.T) {
	for _, name := range []string{" GT/_0", "host/mlx5_0", "/", "a/b/c"} {
		h, err := ReadNCCLXML(strings.NewReader(system(cpuXML(0, gpuXML("0000:01:00.0", 0, ""), netXML("0000:02:00.0", name)))), "")
		if err != nil {
			t.Fatal(err)
		}
		if p, err := h.Path("0000:01:00.0", name); err != nil || p.Type != PHB {
			t.Errorf("the path to %q is %v, %v", name, p, err)
		}
	}
}

func TestOnlyHostOfAFileCanBePlanned(t *testing.T) {
	host := func(hash string, gpus int) (s string) {
		var inner string
		for i := range gpus {
			inner += gpuXML(fmt.Sprintf("0000:%02x:00.0", 2+i), i, "")
		}
		return strings.Replace(cpuXML(0, bridge("0000:01:00.0", "0x10b5 0x9765 0x10b5 0x9765", inner+netXML("0000:0f:00.0", "mlx5_0"))), "<cpu", `<cpu host_hash="`+hash+`"`, 1)
	}
	h := readXML(t, system(host("0xA5", 1), host("0x2", 2)))
	for name, gpus := range map[string]int{"0": 1, "1": 2, "0xa5": 1, "0xA5": 1, "0x2": 2} {
		one, err := h.Only(name)
		if err != nil {
			t.Error(err)
			continue
		}
		plan, err := MakePlan(one, PlanConfig{})
		if err != nil || len(plan.Lanes) != gpus || len(one.NICs) != 1 || len(one.Switches) != 1 || len(one.CPUs) != 1 {
			t.Errorf("host %s: %+v, %v", name, one, err)
			continue
		}
		for _, l := range plan.Lanes {
			if l.Kind != "direct" {
				t.Errorf("host %s: %+v", name, l)
			}
		}
	}
	for _, name := range []string{"2", "-1", "0x3", "", "x"} {
		if one, err := h.Only(name); err == nil || one != nil || !strings.Contains(err.Error(), "numbers 0 to 1: 0xa5, 0x2") {
			t.Errorf("host %q: %v", name, err)
		}
	}
	if h.GPUs[0].Host != "0xa5" {
		t.Errorf("Only changed the file's hosts: %+v", h.GPUs)
	}
	alone := readXML(t, system(host("0x2", 1)))
	if one, err := alone.Only("0"); err != nil || one != alone {
		t.Error(err)
	}
	if _, err := alone.Only("1"); err == nil || !strings.Contains(err.Error(), "one host, number 0") {
		t.Error(err)
	}
}
