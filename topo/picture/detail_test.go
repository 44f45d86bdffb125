package picture

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

func TestNodeDetailListsKnownValues(t *testing.T) {
	for name, tt := range map[string]struct {
		node *node
		role string
		want string
	}{
		"NUMA node": {&node{kind: kindRoot, name: "NUMA node 1", host: "h", cpu: topo.CPU{CPUs: "0-7", Arch: "x86_64",
			Vendor: "GenuineIntel", Family: 6, Model: 143}}, "",
			"NUMA node 1\nHost: h\nProcessors: 0-7\nArchitecture: x86_64\nMaker: GenuineIntel\nFamily and model: 6, 143"},
		"unknown NUMA node": {&node{kind: kindRoot, name: "NUMA node unknown"}, "", "NUMA node unknown"},
		"switch": {&node{kind: kindSwitch, name: "PCIe switch",
			sw: topo.Switch{BusID: "0000:10:00.0", Peers: []string{"a", "b"},
				Device: topo.PCIIdentity{Vendor: "0x1000", Device: "0xc030"}}}, "",
			"PCIe switch 0000:10:00.0\nPasses traffic beside the CPU to: a, b\nDevice: 0x1000 0xc030"},
		"GPU": {&node{kind: kindGPU, name: "GPU 2", gpu: topo.GPU{Name: "NVIDIA H200", BusID: "0000:01:00.0", UUID: "GPU-1",
			NVLinks: []topo.NVLink{{Count: 18, Bandwidth: 370.8}, {Peer: "0000:02:00.0", Count: 1, Bandwidth: 20}}, C2C: 250,
			Reason: "MIG is on"}}, "far",
			"GPU 2 NVIDIA H200\nAddress: 0000:01:00.0\nUUID: GPU-1\nRole: far\nNVLinks to NVSwitches: 18, 371 GB/s\n" +
				"NVLinks to 0000:02:00.0: 1, 20 GB/s\nC2C to the CPU: 250 GB/s\nIt cannot be relayed: MIG is on"},
		"GPU of AMD": {&node{kind: kindGPU, name: "GPU 0", gpu: topo.GPU{Vendor: "AMD", BusID: "0000:01:00.0",
			NVLinks: []topo.NVLink{{Peer: "0000:02:00.0", Count: 1, Bandwidth: 48}}, NVLinkCPU: 75}}, "",
			"GPU 0 AMD\nAddress: 0000:01:00.0\nxGMI links to 0000:02:00.0: 1, 48 GB/s\nNVLink to the CPU: 75 GB/s"},
		"NIC": {&node{kind: kindNIC, name: "mlx5_0", nic: topo.NIC{BusID: "0000:03:00.0", DataDirect: "0000:04:00.0",
			Driver: "mlx5_core", Protocol: "RoCE", GUID: "1:2",
			Ports: []topo.Port{{Number: 1, State: "ACTIVE", LinkLayer: "Ethernet",
				RateGbps: 400}, {Number: 2, State: "DOWN"}, {Number: 3}}, Reason: "it does not support RDMA"}}, "",
			"mlx5_0\nAddress: 0000:03:00.0\nData Direct function: 0000:04:00.0\nDriver: mlx5_core\nProtocol: RoCE\nGUID: 1:2\n" +
				"Port 1: ACTIVE Ethernet 400 Gb/s\nPort 2: DOWN\nIt serves no lane: it does not support RDMA"},
		"memory": {&node{kind: kindMemory}, "",
			"Lanes that bounce go through this memory: from the GPU to it, and from it to the NIC"},
	} {
		if diff := cmp.Diff(tt.want, tt.node.detail(tt.role)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestLinkDetailStatesBandwidth(t *testing.T) {
	const assumed = "The source describes the link only in part; the bandwidth is NCCL's assumption"
	for name, tt := range map[string]struct {
		node *node
		kind string
		want string
	}{
		"known": {&node{kind: kindGPU, name: "GPU 1", address: "0000:01:00.0", place: gen(5)}, topo.SourceSysfs,
			"Link of GPU 1 0000:01:00.0 upwards\nPCIe 5.0 x16, 48 GB/s in each direction\nSpeed: 32.0 GT/s PCIe"},
		"no speed": {&node{kind: kindSwitch, name: "PCIe switch", address: "a",
			place: topo.Place{Link: 12, LinkWidth: 16}}, topo.SourceSysfs,
			"Link of PCIe switch a upwards\nPCIe x16, 12 GB/s assumed in each direction\n" + assumed},
		"hwloc": {&node{kind: kindGPU, name: "GPU 1", address: "a", place: topo.Place{Link: 15.75}},
			reader.SourceHwlocXML, "Link of GPU 1 a upwards\nPCIe, 15.8 GB/s in each direction"},
		"unknown": {&node{kind: kindGPU, name: "GPU 1", address: "a"}, topo.SourceSysfs,
			"Link of GPU 1 a upwards\nThe source does not state its bandwidth"},
		"NIC at no place": {&node{kind: kindNIC, name: " eth0 "}, topo.SourceSysfs,
			"Link of  eth0  upwards\nThe source does not state its bandwidth"},
		"NIC at a place": {&node{kind: kindNIC, name: "mlx5_0", address: "a", place: gen(3)}, topo.SourceSysfs,
			"Link of mlx5_0 a upwards\nPCIe 3.0 x16, 12 GB/s in each direction\nSpeed: 8.0 GT/s PCIe"},
		"C2C": {&node{kind: kindGPU, name: "GPU 1", address: "a", gpu: topo.GPU{C2C: 250}}, topo.SourceSysfs,
			"Link of GPU 1 a upwards\nThe source does not state its bandwidth\nC2C to the CPU: 250 GB/s"},
		"NVLink to a CPU": {&node{kind: kindGPU, name: "GPU 1", address: "a", gpu: topo.GPU{NVLinkCPU: 75}},
			topo.SourceSysfs, "Link of GPU 1 a upwards\nThe source does not state its bandwidth\nNVLink to the CPU: 75 GB/s"},
		"slower at present": {&node{kind: kindGPU, name: "GPU 1", address: "a",
			place: topo.Place{Link: 12, LinkSpeed: "8 GT/s", LinkWidth: 16, LinkNow: 11.9}}, topo.SourceSysfs,
			"Link of GPU 1 a upwards\nPCIe 3.0 x16, 12 GB/s (now 11.9) in each direction\nSpeed: 8 GT/s"},
		"full at present": {&node{kind: kindGPU, name: "GPU 1", address: "a",
			place: topo.Place{Link: 12, LinkSpeed: "8 GT/s", LinkWidth: 1, LinkNow: 12}}, topo.SourceSysfs,
			"Link of GPU 1 a upwards\nPCIe 3.0 x1, 12 GB/s in each direction\nSpeed: 8 GT/s"},
	} {
		if diff := cmp.Diff(tt.want, tt.node.linkDetail(topo.Source{Kind: tt.kind})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// lanePicture is a picture of three GPUs and two NICs of a switch with the given lanes.
func lanePicture(e *planner.Estimate, lanes ...planner.Lane) *Picture {
	b := build(1).sw("00aa:00:00.0", "", 0, gen(5))
	for range 3 {
		b.gpu("NVIDIA H200", "00aa:00:00.0", 0, gen(5))
	}
	b.nic("00aa:00:00.0", 0, 400, gen(5)).nic("00aa:00:00.0", 0, 400, gen(5))
	for i := range lanes {
		lanes[i].GPU = b.h.GPUs[i].BusID
		if lanes[i].Kind == "" && lanes[i].Role == "" {
			lanes[i].Role = planner.RoleFar
		}
	}
	return New(&b.h, &planner.Plan{GPUs: b.h.GPUs, NICs: b.h.NICs, Lanes: lanes}, e)
}

const (
	gpu0, gpu1, gpu2 = "0000:10:00.0", "0000:11:00.0", "0000:12:00.0"
)

func TestLaneDetailDescribesRoute(t *testing.T) {
	both := []string{"mlx5_0", "mlx5_1"}
	for name, tt := range map[string]struct {
		lane planner.Lane
		want string
	}{
		"direct": {planner.Lane{Kind: planner.KindDirect, NICs: both, Reason: "r"},
			"GPU 0: direct to mlx5_0 and mlx5_1\nReason: r"},
		"staged": {planner.Lane{Kind: planner.KindStaged, Servers: []string{gpu1, gpu2, "gone"}, NICs: both[:1]},
			"GPU 0: staged on GPU 1 and GPU 2, to mlx5_0\nReason: "},
		"bounce": {planner.Lane{Kind: planner.KindBounce, NICs: both[:1]},
			"GPU 0: bounces through host memory, to mlx5_0\nReason: "},
		"none": {planner.Lane{Role: planner.RoleRefused}, "GPU 0: no lane (refused)\nReason: "},
		"pinned": {planner.Lane{Kind: planner.KindDirect, NICs: both[:1], Pinned: true},
			"GPU 0: direct to mlx5_0\nConfiguration assigns it\nReason: "},
		"equal": {planner.Lane{Kind: planner.KindDirect, NICs: both,
			Members: []planner.Member{{Server: gpu0, NIC: "mlx5_0", Weight: 2}, {Server: gpu0, NIC: "mlx5_1", Weight: 2}}},
			"GPU 0: direct to mlx5_0 and mlx5_1\nReason: "},
		"unequal": {planner.Lane{Kind: planner.KindDirect, NICs: both,
			Members: []planner.Member{{Server: gpu0, NIC: "mlx5_0", Weight: 2}, {Server: gpu0, NIC: "mlx5_1", Weight: 1}}},
			"GPU 0: 67 % direct to mlx5_0; 33 % direct to mlx5_1\nReason: "},
		"a mixture": {planner.Lane{Kind: planner.KindStaged, NICs: both, Servers: []string{gpu1},
			Members: []planner.Member{{Server: gpu0, NIC: "mlx5_0", Weight: 1}, {Server: gpu1, NIC: "mlx5_1", Weight: 1},
				{NIC: "mlx5_1", Weight: 1}, {Server: "gone", NIC: "mlx5_1", Weight: 1}}},
			"GPU 0: 25 % direct to mlx5_0; 25 % staged on GPU 1, to mlx5_1; 25 % through host memory to mlx5_1; 25 % " +
				"mlx5_1\nReason: "},
	} {
		if diff := cmp.Diff(tt.want, lanePicture(nil, tt.lane).lanes[0].detail); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	e := &planner.Estimate{GPUs: []planner.GPUEstimate{{GPU: gpu0, Limit: "the port of mlx5_0", Rates: planner.Rates{
		RouteRates: planner.RouteRates{Relay: 50, NCCL: 25, HostMemory: 12.5},
		Alone:      planner.RouteRates{Relay: 48, NCCL: 24, HostMemory: 11.5}}}}}
	const rates = "GPU 0: direct to mlx5_0\nAll GPUs busy: 50 GB/s (NCCL today 25, GPUDirect off 12.5)\n" +
		"Alone: 48 GB/s (NCCL today 24, GPUDirect off 11.5)\n"
	lane := planner.Lane{Kind: planner.KindDirect, NICs: both[:1], Reason: "r"}
	if diff := cmp.Diff(rates+"Full: the port of mlx5_0\nReason: r", lanePicture(e, lane).lanes[0].detail); diff != "" {
		t.Errorf("estimate (-want +got):\n%s", diff)
	}
	e.GPUs[0].Limit = ""
	if diff := cmp.Diff(rates+"Reason: r", lanePicture(e, lane).lanes[0].detail); diff != "" {
		t.Errorf("estimate without a full link (-want +got):\n%s", diff)
	}
}

func TestNICStateNamesFabricAndRate(t *testing.T) {
	port := func(state, layer string, rate float64) []topo.Port {
		return []topo.Port{{Number: 1, State: state, LinkLayer: layer, RateGbps: rate}}
	}
	for name, tt := range map[string]struct {
		nic          topo.NIC
		fabric, rate string
	}{
		"protocol":        {topo.NIC{Protocol: "RoCE", Ports: port("ACTIVE", "Ethernet", 400)}, "RoCE", "400 Gb/s"},
		"link layer":      {topo.NIC{Ports: port("ACTIVE", "InfiniBand", 25)}, "InfiniBand", "25 Gb/s"},
		"unknown":         {topo.NIC{}, "", ""},
		"Ethernet":        {topo.NIC{Protocol: "x", Ethernet: true}, "no RDMA", ""},
		"software":        {topo.NIC{Protocol: "x", Software: true}, "software", ""},
		"down":            {topo.NIC{Protocol: "RoCE", Ports: port("DOWN", "", 100)}, "RoCE", "no active port"},
		"not in the file": {topo.NIC{Protocol: "RoCE", Reason: notThere}, "not in the topology", ""},
		"another reason":  {topo.NIC{Protocol: "RoCE", Reason: "x"}, "RoCE", ""},
	} {
		n := node{kind: kindNIC, nic: tt.nic}
		if fabric, rate := n.state(); fabric != tt.fabric || rate != tt.rate {
			t.Errorf("%s: %q, %q; want %q, %q", name, fabric, rate, tt.fabric, tt.rate)
		}
	}
}

func TestNodeWordsSummariseValues(t *testing.T) {
	gpu := func(vendor string, links ...topo.NVLink) *node {
		return &node{gpu: topo.GPU{Vendor: vendor, NVLinks: links}}
	}
	for want, n := range map[string]*node{
		"":                       gpu(""),
		"1 NVLink":               gpu("", topo.NVLink{Count: 1}),
		"3 NVLinks, 60 GB/s":     gpu("", topo.NVLink{Count: 1, Bandwidth: 20}, topo.NVLink{Count: 2, Bandwidth: 40}),
		"2 xGMI links, 0.5 GB/s": gpu("AMD", topo.NVLink{Count: 2, Bandwidth: 0.5}),
	} {
		if got := n.nvlinks(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for want, n := range map[string]*node{
		"":                      {},
		"Intel x86_64":          {cpu: topo.CPU{Vendor: "GenuineIntel", Arch: "x86_64"}},
		"AMD":                   {cpu: topo.CPU{Vendor: "AuthenticAMD"}},
		"Shanghai":              {cpu: topo.CPU{Vendor: "  Shanghai  "}},
		"host 0x1 Intel x86_64": {host: "0x1", cpu: topo.CPU{Vendor: "GenuineIntel", Arch: "x86_64"}},
		"host 0x2":              {host: "0x2"},
		"Ampere\ufffd arm64":    {cpu: topo.CPU{Vendor: "Ampere\a", Arch: "arm64"}},
	} {
		if got := n.processor(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := (&node{cpu: topo.CPU{CPUs: "0-7"}}).processors(); got != "processors 0-7" {
		t.Errorf("processors: %q", got)
	}
	if got := (&node{}).processors(); got != "" {
		t.Errorf("no processors: %q", got)
	}
	if got := (&node{sw: topo.Switch{Peers: []string{"a", "b"}}}).passes(); got != "to a, b" {
		t.Errorf("peers: %q", got)
	}
	if got := (&node{}).passes(); got != "" {
		t.Errorf("no peers: %q", got)
	}
}

func TestTitleDescribesHostAndPlan(t *testing.T) {
	lane := func(kind string) planner.Lane {
		return planner.Lane{Kind: kind, NICs: []string{"mlx5_0"}, Servers: []string{gpu1}}
	}
	e := func(rates ...float64) *planner.Estimate {
		e := &planner.Estimate{}
		for i, r := range rates {
			g := planner.GPUEstimate{GPU: []string{gpu0, gpu1}[i]}
			g.Relay, g.NCCL = r, r/2
			e.GPUs = append(e.GPUs, g)
		}
		e.Uniformity.Relay, e.Uniformity.NCCL = 0.5, 0.25
		return e
	}
	const devices = "3 GPUs and 2 NICs"
	for name, tt := range map[string]struct {
		picture         *Picture
		title, subtitle string
	}{
		"no lane": {lanePicture(nil, planner.Lane{}, planner.Lane{}), "Lanes to the network of made-up.xml", devices +
			" · 2 GPUs without a lane"},
		"one lane": {lanePicture(nil, lane(planner.KindDirect)), "Lanes to the network of made-up.xml", devices +
			" · 1 direct lane"},
		"three kinds": {lanePicture(nil, lane(planner.KindStaged), lane(planner.KindDirect), lane(planner.KindBounce)),
			"Lanes to the network of made-up.xml", devices + " · 1 direct lane, 1 staged lane and 1 bounce lane"},
		"refused": {lanePicture(nil, lane(planner.KindDirect), planner.Lane{Role: planner.RoleRefused}),
			"Lanes to the network of made-up.xml", devices + " · 1 direct lane and 1 GPU refused"},
		"estimate": {lanePicture(e(50, 25), lane(planner.KindDirect), lane(planner.KindDirect)),
			"Lanes to the network of made-up.xml",
			devices + " · 2 direct lanes · the slowest GPU gets 25 GB/s, 50 % of the fastest (NCCL today: 12.5 GB/s, 25 %)"},
		"empty estimate": {lanePicture(e(), lane(planner.KindDirect)), "Lanes to the network of made-up.xml", devices +
			" · 1 direct lane"},
	} {
		if tt.picture.title != tt.title || tt.picture.subtitle != tt.subtitle {
			t.Errorf("%s: %q, %q; want %q, %q", name, tt.picture.title, tt.picture.subtitle, tt.title, tt.subtitle)
		}
	}
	for want, source := range map[string]topo.Source{
		"Topology of a.xml": {Kind: topo.SourceNCCLXML, File: "/tmp/dir/a.xml"},
		"Topology":          {Kind: topo.SourceSysfs, Sysfs: "/sys"},
		"Topology of /x":    {Kind: topo.SourceSysfs, Sysfs: "/x"},
	} {
		b := build(1).gpu("", "", 0, gen(5))
		b.h.Source = source
		if p := New(&b.h, nil, nil); p.title != want || p.subtitle != "1 GPU and 0 NICs" {
			t.Errorf("%q, %q; want %q", p.title, p.subtitle, want)
		}
	}
	matrix := topo.Host{GPUs: []topo.GPU{{BusID: "GPU0"}}, Matrix: map[[2]string]topo.PathType{}}
	if p := New(&matrix, nil, nil); p.subtitle != "1 GPU and 0 NICs · the source tells path types and no tree" {
		t.Errorf("matrix: %q", p.subtitle)
	}
}

func TestNotesAreLimited(t *testing.T) {
	for n, want := range map[int][]string{
		0: nil,
		5: {"Note: a", "Note: b", "Note: c", "Note: d", "Note: e"},
		6: {"Note: a", "Note: b", "Note: c", "Note: d", "and 2 more notes"},
		7: {"Note: a", "Note: b", "Note: c", "Note: d", "and 3 more notes"},
	} {
		b := build(1).gpu("", "", 0, gen(5))
		b.h.Notes = []string{"a", "b", "c", "d", "e", "f", "g"}[:n]
		for i, p := range []*Picture{New(&b.h, nil, nil),
			New(&topo.Host{GPUs: b.h.GPUs}, &planner.Plan{Notes: b.h.Notes}, nil)} {
			var got []string
			for k, line := range p.notes {
				got = append(got, line.words)
				if line.x != 28 || k > 0 && line.y-p.notes[k-1].y != 16 {
					t.Errorf("note %d is at %g, %g", k, line.x, line.y)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%d notes, picture %d (-want +got):\n%s", n, i, diff)
			}
			if len(got) > 0 && p.height != p.notes[len(got)-1].y+28 {
				t.Errorf("the height is %g, and the last note is at %g", p.height, p.notes[len(got)-1].y)
			}
		}
	}
	b := build(1).gpu("", "", 0, gen(5)).sw("00aa:00:00.0", "", 0, gen(5)).sw("00aa:01:00.0", "00aa:00:00.0", 0, gen(5))
	if p := New(&b.h, nil, nil); len(p.notes) != 1 ||
		p.notes[0].words != "Note: 2 PCIe switches without a GPU or NIC left out" {
		t.Errorf("empty switches: %+v", p.notes)
	}
}
