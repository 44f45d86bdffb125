package planner

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/ncclxml"
)

// roughly compares rounded figures.
var roughly = cmpopts.EquateApprox(1e-3, 0)

func TestShareIsMaxMinFair(t *testing.T) {
	for _, tt := range []struct {
		name     string
		flows    []load
		capacity []float64
		rates    []float64
		full     []int
	}{
		{"two on one link", []load{{{0, 1}}, {{0, 1}}}, []float64{10}, []float64{5, 5}, []int{0, 0}},
		{"one is stopped early, the other takes the rest", []load{{{0, 1}, {1, 1}}, {{1, 1}}}, []float64{2, 10},
			[]float64{2, 8}, []int{0, 1}},
		{"one that crosses a link twice is no slower than the other", []load{{{0, 2}}, {{0, 1}}}, []float64{9},
			[]float64{3, 3}, []int{0, 0}},
		{"a chain", []load{{{0, 1}, {1, 1}, {2, 1}}, {{0, 1}}, {{1, 1}}, {{2, 1}}}, []float64{4, 6, 20},
			[]float64{2, 2, 4, 18}, []int{0, 0, 1, 2}},
		{"no way", []load{{}, {{0, 1}}}, []float64{3}, []float64{0, 3}, []int{-1, 0}},
		{"nobody", nil, []float64{3}, []float64{}, []int{}},
	} {
		rates, full := share(tt.flows, tt.capacity)
		if diff := cmp.Diff(tt.rates, rates, roughly); diff != "" {
			t.Errorf("%s: rates %s", tt.name, diff)
		}
		if diff := cmp.Diff(tt.full, full); diff != "" {
			t.Errorf("%s: full %s", tt.name, diff)
		}
	}
}

func estimate(t *testing.T, h *topo.Host, c Config) (*Plan, *Estimate) {
	t.Helper()
	plan, err := Make(h, c)
	if err != nil {
		t.Fatal(err)
	}
	e, err := plan.Estimate(h)
	if err != nil {
		t.Fatal(err)
	}
	return plan, e
}

// The expected figures are calculated by hand.
func TestEstimateMatchesHandCalculation(t *testing.T) {
	type want struct {
		gpu                                int
		nccl, off, relay                   float64
		ncclAlone, offAlone, relayAlone    float64
		limit                              string
		uniformNCCL, uniformAlone, planned float64
	}
	// NVLink with at most the rate of the NIC. The link of the only server carries the server's
	// traffic and the relayed traffic of the second GPU, once per GPU.
	nvlink := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").
		GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "").
		NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(400)).Nvswitches().Host()
	for _, tt := range []struct {
		name string
		host *topo.Host
		want want
	}{
		// NUMA node 0: two direct GPUs and two far GPUs on a NIC of 48 GB/s. GPUDirect RDMA
		// off: four GPUs bounce through a CPU that forwards 32 GB/s. One busy GPU: 48 GB/s
		// directly, 32 GB/s through the CPU; through the relay the copies' 48 × 19.87/24 GB/s.
		{"two sockets", topotest.TwoSockets().Host(), want{2, 12, 8, 12, 32, 32, 39.74, "the PCIe link of mlx5_0 (downwards)",
			1, 32.0 / 48, 39.74 / 48}},
		{"NVLink", nvlink, want{1, 24, 16, 24, 32, 32, 48, "the PCIe link of GPU 0 (upwards)", 1, 32.0 / 48, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, e := estimate(t, tt.host, Config{})
			g := e.GPUs[tt.want.gpu]
			got := want{tt.want.gpu, g.NCCL, g.HostMemory, g.Relay, g.Alone.NCCL, g.Alone.HostMemory, g.Alone.Relay, g.Limit,
				e.Uniformity.NCCL, e.Uniformity.Alone.NCCL, e.Uniformity.Alone.Relay}
			if diff := cmp.Diff(tt.want, got, roughly, cmp.AllowUnexported(want{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A relayed byte crosses the link of the server twice, in both directions at once: the figure
// of 12 GB/s for a Gen4 GPU in the design. A single server is therefore slower than the CPU.
func TestSingleServerGPUOverPCIeLeavesLaneOnHostMemory(t *testing.T) {
	h := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").
		GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "").
		NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).Gen(24).Host()
	plan, e := estimate(t, h, Config{})
	l := plan.Lanes[1]
	if l.Kind != KindBounce || l.Relay || len(l.Servers) != 0 || l.Compared == nil {
		t.Fatalf("lane %+v", l)
	}
	// The link of the server carries inwards the server's traffic, the copy and the NIC's
	// reads: 24/3 GB/s. The bounce gets half of the NIC's 24 GB/s.
	want := Comparison{Relay: 8, Without: 12, RelayAlone: 12, WithoutAlone: 16}
	if diff := cmp.Diff(want, *l.Compared, roughly); diff != "" {
		t.Error(diff)
	}
	if e.GPUs[1].Relay != l.Bandwidth || math.Abs(l.Bandwidth-12) > 1e-9 {
		t.Errorf("the lane carries %g, the estimate says %g", l.Bandwidth, e.GPUs[1].Relay)
	}

	pinned, e := estimate(t, h, Config{Lanes: []Assignment{{GPU: "1", Servers: []string{"0"}, NICs: []string{"mlx5_0"}}}})
	if l := pinned.Lanes[1]; !l.Relay || !l.Pinned || math.Abs(l.Bandwidth-8) > 1e-9 || e.GPUs[1].Limit == "" {
		t.Errorf("a pinned lane: %+v", l)
	}
}

func TestEstimateWithoutBandwidthsIsRefused(t *testing.T) {
	unknown := topotest.TwoSockets().Host()
	unknown.GPUs[3].Link = 0
	matrix := &topo.Host{Matrix: map[[2]string]topo.PathType{}, GPUs: []topo.GPU{{BusID: "GPU0"}}}
	for _, h := range []*topo.Host{unknown, matrix} {
		plan, err := Make(h, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := plan.Estimate(h); !errors.Is(err, ErrNoBandwidths) {
			t.Errorf("%v", err)
		}
		for _, l := range plan.Lanes {
			if l.Bandwidth != 0 || l.Compared != nil {
				t.Errorf("%+v", l)
			}
		}
	}
	// The relay stays: no estimate says that the relay is slower.
	plan, err := Make(unknown, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if !plan.Lanes[2].Relay {
		t.Errorf("%+v", plan.Lanes[2])
	}
}

// published has published measurements. docs/estimate.md lists the measurements, with the
// meaning and the error of the estimate.
var published = []struct {
	name     string
	host     func() *topo.Host
	route    func(*Estimate) float64
	measured float64
	// low and high limit the ratio of the estimate to the measurement.
	low, high float64
}{
	{
		// "If the NIC is attached to the CPU getting 16 GB/s is normal": 8 A800
		// with NVLink, one 200G NIC.
		"nccl#412, NIC at the CPU", func() *topo.Host {
			return topotest.EightA100().NIC("mlx5_0", 0, "pci0000:f0", "", topotest.Up(200)).Gen(24).Host()
		}, total, 16, 0.99, 1.01,
	},
	{
		// As before, with the NIC at a GPU's switch: "24 GB/s inter-node".
		"nccl#412, NIC at a switch", func() *topo.Host {
			return topotest.EightA100().NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).Gen(24).Host()
		}, firstAlone, 24, 0.95, 1.05,
	},
	{
		// A DGX A100, eight NICs of 200G: 192 GB/s.
		"nccl#1576", func() *topo.Host {
			b := topotest.EightA100()
			for i := range 8 {
				b.NIC(fmt.Sprintf("mlx5_%d", i), i/4, fmt.Sprintf("pci0000:%d0", 1+i/2), fmt.Sprintf("00aa:%02x:00.0", i/2),
					topotest.Up(200))
			}
			return b.Gen(24).Host()
		}, total, 192, 0.95, 1.05,
	},
	{
		// 8 H100, four NICs of 400G, ring: 190 GB/s.
		"nccl#1368", func() *topo.Host {
			b := topotest.EightA100()
			for i := range 4 {
				b.NIC(fmt.Sprintf("mlx5_%d", i), i/2, fmt.Sprintf("pci0000:%d0", 1+i), fmt.Sprintf("00aa:%02x:00.0", i),
					topotest.Up(400))
			}
			return b.Gen(48).Host()
		}, total, 190, 0.95, 1.05,
	},
	{
		// Four A100 with four NICs of 200G: 78 GB/s.
		"nccl-tests#277", func() *topo.Host {
			b := topotest.Build(2)
			for i := range 4 {
				sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
				b.Sw(sw, i/2, bridge, "").GPU(i/2, bridge, sw).NIC(fmt.Sprintf("mlx5_%d", i), i/2, bridge, sw, topotest.Up(200))
			}
			return b.Nvswitches().Gen(24).Host()
		}, total, 78, 1, 1.25,
	},
	{
		// An L40S with two NICs of 100G at the GPU's switch: 21.4 GB/s.
		"nccl#1202", func() *topo.Host {
			return topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").
				NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(100)).NIC("mlx5_1", 0, "pci0000:10", "00aa:00:00.0",
				topotest.Up(100)).Gen(24).Host()
		}, func(e *Estimate) float64 { return e.GPUs[0].Alone.Relay }, 21.4, 1, 1.2,
	},
	{
		// ib_write_bw between GPU memories, path SYS.
		"perftest#241, GPUDirect through the CPU", func() *topo.Host {
			return topotest.Build(2).GPU(0, "pci0000:10", "").NIC("mlx5_0", 1, "pci0000:20", "", topotest.Up(200)).Gen(24).Host()
		}, func(e *Estimate) float64 { return e.GPUs[0].Relay }, 11, 0.99, 1.01,
	},
}

func total(e *Estimate) float64 {
	sum := 0.0
	for _, g := range e.GPUs {
		sum += g.NCCL
	}
	return sum
}

func firstAlone(e *Estimate) float64 { return e.GPUs[0].Alone.NCCL }

func TestEstimateAgreesWithPublishedMachines(t *testing.T) {
	document, err := os.ReadFile("../../docs/estimate.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range published {
		t.Run(m.name, func(t *testing.T) {
			config := Config{}
			if strings.HasPrefix(m.name, "perftest") {
				config.GDR.MaxPath, config.Near = topo.SYS, nearDirect
			}
			_, e := estimate(t, m.host(), config)
			got := m.route(e)
			line := fmt.Sprintf("| %s | %.1f | %.1f | %.2f |", m.name, m.measured, got, got/m.measured)
			if !strings.Contains(string(document), line) {
				t.Errorf("docs/estimate.md lacks the line %s", line)
			}
			if share := got / m.measured; share < m.low || share > m.high {
				t.Errorf("outside of %g to %g", m.low, m.high)
			}
		})
	}
}

// GPUDirect RDMA over C2C is at least as fast as the route through the CPU's memory.
func TestEstimateOverC2CIsAtLeastHostMemory(t *testing.T) {
	const grace = `<cpu numaid="0" arch="arm64" vendor="ARM">
		<pci busid="0000:01:00.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90" rank="0" gdr="1"><c2c bw="450000" count="1"/></gpu></pci>
		<pci busid="0000:02:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">` + "%s" + `</pci></cpu>`
	h, err := ncclxml.Read(strings.NewReader(topotest.System(fmt.Sprintf(grace,
		topotest.NetXML("0000:03:00.0", "mlx5_0")))), "")
	if err != nil {
		t.Fatal(err)
	}
	_, e := estimate(t, h, Config{})
	if alone := e.GPUs[0].Alone; alone.NCCL < alone.HostMemory || alone.NCCL < 40 {
		t.Errorf("alone: %+v", alone)
	}
}

// NCCL takes the NICs with the highest bandwidth, of these NICs the nearest, and distributes
// the NICs over the GPUs (ncclTopoGetLocalNet).
func TestEstimateTakesNICsOfNCCL(t *testing.T) {
	off := false
	for _, tt := range []struct {
		name string
		host func() *topo.Host
		want []string // kind and NICs, per GPU
	}{
		{
			"a faster NIC farther away", func() *topo.Host {
				return topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").
					NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(100)).NIC("mlx5_1", 0, "pci0000:20", "",
					topotest.Up(200)).Gen(24).Host()
			}, []string{"bounce mlx5_1"},
		},
		{
			"four NICs for two GPUs of a switch, by bits mirrored", func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
					"pci0000:10", "00aa:00:00.0")
				for i := range 4 {
					b.NIC(fmt.Sprintf("mlx5_%d", i), 0, "pci0000:10", "00aa:00:00.0", topotest.Up(100))
				}
				return b.Gen(24).Host()
			}, []string{"direct mlx5_0,mlx5_1", "direct mlx5_2,mlx5_3"},
		},
		{
			"a GPU that the driver gives no GPUDirect", func() *topo.Host {
				h := topotest.TwoSockets().Host()
				h.GPUs[1].GDR = &off
				return h
			}, []string{
				"direct mlx5_0", "bounce mlx5_0", "bounce mlx5_0", "bounce mlx5_0",
				"direct mlx5_1", "direct mlx5_1", "bounce mlx5_1", "bounce mlx5_1",
			},
		},
		{
			"a NIC that is down, and Ethernet", func() *topo.Host {
				h := topotest.Build(1).GPU(0, "", "").NIC("eth0", 0, "", "", topotest.Up(400)).NIC("mlx5_0", 0, "", "",
					topotest.Down(400)).NIC("mlx5_1", 0, "", "", topotest.Up(100)).Host()
				h.NICs[0].Ethernet = true
				return h
			}, []string{"bounce mlx5_1"},
		},
		{"no NIC", func() *topo.Host { return topotest.Build(1).GPU(0, "", "").Host() }, []string{" "}},
	} {
		n := newNetwork(sortedHost(tt.host()))
		var got []string
		var gpus []int
		for g := range n.h.GPUs {
			gpus = append(gpus, g)
		}
		for _, c := range n.ncclDefaults(gpus, false) {
			var names []string
			kind := ""
			for _, p := range c.parts {
				names = append(names, n.h.NICs[p.nic].Name)
				kind = p.kind(c.gpu)
			}
			got = append(got, kind+" "+strings.Join(names, ","))
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
}
