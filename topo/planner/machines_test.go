package planner

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// Well-known machines, with the lanes that an expert expects.
func TestPlansOfKnownMachinesHaveExpectedLanes(t *testing.T) {
	each := func(first int, format string, count int) (lines []string) {
		for i := range count {
			lines = append(lines, fmt.Sprintf(format, first+i, first+i))
		}
		return lines
	}
	flat := func(numas int, gpus int) *topotest.Builder {
		b := topotest.Build(numas)
		for i := range gpus {
			b.GPU(i*numas/gpus, fmt.Sprintf("pci0000:%02x", 0x10+i), "")
		}
		return b
	}
	nothing := "the relay has no benefit on this host"
	whileBusy := "with all lanes busy the relay has no benefit on this host"
	for _, m := range []struct {
		name   string
		host   *topo.Host
		config Config
		want   []string
		note   string // part of the notes; "": no note reports that the relay has no benefit
	}{
		{
			name: "HGX H100, four switches, eight NICs",
			host: topotest.Hgx(48, 400, 0, 0, 1, 1, 2, 2, 3, 3).Host(),
			want: each(0, "near to mlx5_%d, rail %d, PIX", 8), note: nothing,
		},
		{
			name: "HGX A100 with a NIC at every second switch",
			host: topotest.Hgx(24, 200, 0, 2).Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 1 to mlx5_0, rail 0, NODE",
				"near to mlx5_1, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 4 to mlx5_1, rail 1, NODE", "far by 5 to mlx5_1, rail 1, NODE",
			},
			note: whileBusy,
		},
		{
			name: "HGX A800 with one NIC (nccl#412)",
			host: topotest.Hgx(24, 200, 0).Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 1 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 1 to mlx5_0, rail 0, SYS", "far by 0 to mlx5_0, rail 0, SYS",
				"far by 0 to mlx5_0, rail 0, SYS", "far by 1 to mlx5_0, rail 0, SYS",
			},
		},
		{
			name: "eight PCIe GPUs and two NICs on two switches",
			host: func() *topo.Host {
				b := topotest.Build(2)
				for i := range 2 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.Sw(sw, i, bridge, "").GPU(i, bridge, sw).GPU(i, bridge, sw).GPU(i, bridge, sw).GPU(i, bridge, sw).
						NIC(fmt.Sprintf("mlx5_%d", i), i, bridge, sw, topotest.Up(200))
				}
				return b.Gen(24).Host()
			}(),
			want: slices.Concat(topotest.Repeat(4, "near to mlx5_0, rail 0, PIX"),
				topotest.Repeat(4, "near to mlx5_1, rail 1, PIX")), note: nothing,
		},
		{
			name: "DGX-1, four NICs",
			host: func() *topo.Host {
				b := topotest.Build(2)
				for i := range 4 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.Sw(sw, i/2, bridge, "").GPU(i/2, bridge, sw).GPU(i/2, bridge, sw).NIC(fmt.Sprintf("mlx5_%d", i), i/2, bridge, sw,
						topotest.Up(100))
				}
				return b.CubeMesh().Gen(12).Host()
			}(),
			want: slices.Concat(topotest.Repeat(2, "near to mlx5_0, rail 0, PIX"),
				topotest.Repeat(2, "near to mlx5_1, rail 1, PIX"),
				topotest.Repeat(2, "near to mlx5_2, rail 2, PIX"), topotest.Repeat(2, "near to mlx5_3, rail 3, PIX")),
			note: nothing,
		},
		{
			// GPUs 2 and 3 have NVLink to both servers, GPUs 4 and 5 to a single server; the
			// copies of GPUs 6 and 7 cross the sockets.
			name: "DGX-1 with one NIC (OneFlow's)",
			host: func() *topo.Host {
				b := topotest.Build(2)
				for i := range 4 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.Sw(sw, i/2, bridge, "").GPU(i/2, bridge, sw).GPU(i/2, bridge, sw)
				}
				return b.NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(100)).CubeMesh().Gen(12).Host()
			}(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 1 to mlx5_0, rail 0, NODE",
				"far by 0 to mlx5_0, rail 0, SYS", "far by 1 to mlx5_0, rail 0, SYS",
				"far by 0,1 to mlx5_0, rail 0, SYS", "far by 0,1 to mlx5_0, rail 0, SYS",
			},
		},
		{
			name: "eRDMA instance, NICs at the sockets",
			host: func() *topo.Host {
				b := topotest.Hgx(48, 0)
				for i := range 2 {
					b.NIC(fmt.Sprintf("erdma_%d", i), i, fmt.Sprintf("pci0000:%d0", 8+i), "", topotest.Up(200))
					b.H.NICs[i].Protocol = "eRDMA"
				}
				return b.Gen(48).Host()
			}(),
			want: slices.Concat(topotest.Repeat(4, "far bouncing to erdma_0, rail 0, NODE"),
				topotest.Repeat(4, "far bouncing to erdma_1, rail 1, NODE")),
			note: "gdr.max_path in config.toml sets the distance",
		},
		{
			name: "the same, with GPUDirect RDMA through the CPU allowed",
			host: func() *topo.Host {
				b := topotest.Hgx(48, 0)
				for i := range 2 {
					b.NIC(fmt.Sprintf("erdma_%d", i), i, fmt.Sprintf("pci0000:%d0", 8+i), "", topotest.Up(200))
					b.H.NICs[i].Protocol = "eRDMA"
				}
				return b.Gen(48).Host()
			}(),
			config: Config{GDR: GDRPolicy{MaxPath: topo.NODE}},
			want: []string{
				"near bouncing to erdma_0, rail 0, NODE", "near to erdma_0, rail 0, NODE",
				"near to erdma_0, rail 0, NODE", "near to erdma_0, rail 0, NODE",
				"near to erdma_1, rail 1, NODE", "near to erdma_1, rail 1, NODE",
				"near bouncing to erdma_1, rail 1, NODE", "near to erdma_1, rail 1, NODE",
			}, note: "NIC erdma_0 (eRDMA) cannot flush its writes into GPU memory",
		},
		{
			name: "and for one of the NICs alone",
			host: flat(2, 4).NIC("erdma_0", 0, "pci0000:80", "", topotest.Up(200)).NIC("erdma_1", 1, "pci0000:90", "",
				topotest.Up(200)).Host(),
			config: Config{GDR: GDRPolicy{NICs: map[string]topo.PathType{"erdma_1": topo.NODE}}},
			want: []string{
				"far bouncing to erdma_0, rail 0, NODE", "far bouncing to erdma_0, rail 0, NODE",
				"near bouncing to erdma_1, rail 1, NODE", "near to erdma_1, rail 1, NODE",
			}, note: nothing,
		},
		{
			name: "a NIC at a root port, GPUs at others",
			host: flat(1, 4).NIC("mlx5_0", 0, "pci0000:80", "", topotest.Up(100)).Host(),
			want: topotest.Repeat(4, "far bouncing to mlx5_0, rail 0, NODE"), note: nothing,
		},
		{
			name: "eight A30 without a switch, two NICs (nccl#1084)",
			host: flat(2, 8).NIC("mlx5_0", 0, "pci0000:11", "", topotest.Up(100)).NIC("mlx5_1", 1, "pci0000:16", "",
				topotest.Up(100)).Gen(24).Host(),
			want: slices.Concat(
				[]string{"far bouncing to mlx5_0, rail 0, NODE", "far bouncing to mlx5_0, rail 0, PHB"},
				topotest.Repeat(2, "far bouncing to mlx5_0, rail 0, NODE"),
				topotest.Repeat(2, "far bouncing to mlx5_1, rail 1, NODE"),
				[]string{"far bouncing to mlx5_1, rail 1, PHB", "far bouncing to mlx5_1, rail 1, NODE"}),
			note: nothing,
		},
		{
			name: "Grace Hopper",
			host: func() *topo.Host {
				h := flat(1, 1).NIC("mlx5_0", 0, "pci0000:80", "", topotest.Up(400)).Host()
				h.GPUs[0].C2C = 360
				return h
			}(),
			want: []string{"far bouncing to mlx5_0, rail 0, P2C"}, note: nothing,
		},
		{
			name: "Grace Hopper, with GPUDirect RDMA as NCCL has it",
			host: func() *topo.Host {
				h := flat(4, 4).Host()
				b := &topotest.Builder{H: *h}
				for i := range 4 {
					b.H.GPUs[i].C2C = 360
					b.NIC(fmt.Sprintf("mlx5_%d", i), i, fmt.Sprintf("pci0000:%d0", 6+i), "", topotest.Up(400))
				}
				return b.Host()
			}(),
			config: Config{GDR: GDRPolicy{MaxPath: topo.P2C}},
			want:   each(0, "near to mlx5_%d, rail %d, P2C", 4), note: nothing,
		},
		{
			name: "EPYC with four NUMA nodes and NVLink (nccl#595)",
			host: func() *topo.Host {
				b := topotest.Build(4)
				for i, numa := range []int{1, 0, 3, 2} {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.Sw(sw, numa, bridge, "").GPU(numa, bridge, sw)
				}
				return b.NIC("mlx5_0", 0, "pci0000:20", "00aa:01:00.0", topotest.Up(200)).NIC("mlx5_1", 3, "pci0000:30",
					"00aa:02:00.0", topotest.Up(200)).
					Nvswitches().Gen(24).Host()
			}(),
			want: []string{
				"far by 1 to mlx5_0, rail 0, SYS", "near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 2 to mlx5_1, rail 1, SYS",
			},
			note: whileBusy,
		},
		{
			name: "Broadcom's switches of two levels, which count as one",
			host: func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").
					Sw("00aa:01:00.0", 0, "pci0000:10", "00aa:00:00.0").Sw("00aa:02:00.0", 0, "pci0000:10", "00aa:00:00.0").
					GPU(0, "pci0000:10", "00aa:01:00.0").GPU(0, "pci0000:10", "00aa:02:00.0").
					NIC("mlx5_0", 0, "pci0000:10", "00aa:01:00.0", topotest.Up(400))
				for i := range b.H.Switches {
					b.H.Switches[i].Device = topo.PCIIdentity{Class: "0x060400", Vendor: "0x1000", Device: "0xc010",
						SubsystemVendor: "0x1000", SubsystemDevice: "0xa096"}
				}
				return b.Host()
			}(),
			config: Config{GDR: GDRPolicy{MaxPath: topo.PIX}},
			want:   topotest.Repeat(2, "near to mlx5_0, rail 0, PIX"), note: nothing,
		},
		{
			name: "HGX H100, eight NICs and two for storage at the sockets",
			host: topotest.Hgx(48, 400, 0, 0, 1, 1, 2, 2, 3, 3).
				NIC("mlx5_8", 0, "pci0000:80", "", topotest.Up(200)).NIC("mlx5_9", 1, "pci0000:90", "", topotest.Up(200)).Host(),
			want: each(0, "near to mlx5_%d, rail %d, PIX", 8), note: "NIC mlx5_9 is idle",
		},
		{
			name: "HGX A100, eight NICs at the four switches and two for storage at switches, too",
			host: topotest.Hgx(24, 200, 0, 0, 1, 1, 2, 2, 3, 3, 0, 2).Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX",
				"near to mlx5_2, rail 2, PIX", "near to mlx5_3, rail 3, PIX",
				"near to mlx5_4, rail 4, PIX", "near to mlx5_5, rail 5, PIX",
				"near to mlx5_6, rail 6, PIX", "near to mlx5_7, rail 7, PIX",
			},
			note: nothing,
		},
		{
			name: "four GPUs on one switch, the NIC at a root port",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
				"pci0000:10", "00aa:00:00.0").
				GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:10", "00aa:00:00.0").NIC("mlx5_0", 0, "pci0000:20", "",
				topotest.Up(200)).Gen(24).Host(),
			want: topotest.Repeat(4, "far bouncing to mlx5_0, rail 0, NODE"),
			note: "gdr.max_path in config.toml sets the distance",
		},
		{
			name: "ten GPUs below two cascaded switches, the NIC at the lower",
			host: func() *topo.Host {
				b := topotest.Build(2).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:10", "00aa:00:00.0")
				for i := range 10 {
					b.GPU(0, "pci0000:10", fmt.Sprintf("00aa:%02x:00.0", i/5))
				}
				return b.NIC("mlx5_0", 0, "pci0000:10", "00aa:01:00.0", topotest.Up(200)).Gen(24).Host()
			}(),
			want: slices.Concat(topotest.Repeat(5, "near to mlx5_0, rail 0, PXB"),
				topotest.Repeat(5, "near to mlx5_0, rail 0, PIX")), note: nothing,
		},
		{
			name: "ten GPUs of two sockets, a switch each, the NIC at the first",
			host: func() *topo.Host {
				b := topotest.Build(2).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 1, "pci0000:80", "")
				for i := range 10 {
					b.GPU(i/5, fmt.Sprintf("pci0000:%d0", 1+i/5*7), fmt.Sprintf("00aa:%02x:00.0", i/5))
				}
				return b.NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).Gen(24).Host()
			}(),
			want: slices.Concat(topotest.Repeat(5, "near to mlx5_0, rail 0, PIX"),
				topotest.Repeat(5, "far by 0,1,2,3,4 to mlx5_0, rail 0, SYS")),
			note: whileBusy,
		},
		{
			// SYS does not distinguish the nodes of the two sockets, so the plan only
			// distributes far GPUs evenly.
			name: "EPYC with NPS4: eight NUMA nodes, each a GPU, and NICs at two of the GPUs' switches",
			host: func() *topo.Host {
				b := topotest.Build(8)
				for i := range 8 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.Sw(sw, i, bridge, "").GPU(i, bridge, sw)
				}
				return b.NIC("mlx5_0", 1, "pci0000:20", "00aa:01:00.0", topotest.Up(200)).NIC("mlx5_1", 5, "pci0000:60",
					"00aa:05:00.0", topotest.Up(200)).
					Nvswitches().Gen(24).Host()
			}(),
			want: []string{
				"far by 1 to mlx5_0, rail 0, SYS", "near to mlx5_0, rail 0, PIX",
				"far by 1 to mlx5_0, rail 0, SYS", "far by 1 to mlx5_0, rail 0, SYS",
				"far by 5 to mlx5_1, rail 1, SYS", "near to mlx5_1, rail 1, PIX",
				"far by 5 to mlx5_1, rail 1, SYS", "far by 5 to mlx5_1, rail 1, SYS",
			},
		},
		{
			// The port is full with the relay and without the relay.
			name: "a NIC of two ports, each an RDMA device, at the switch of one of two GPUs",
			host: func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
					"pci0000:20", "").
					NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(100)).NIC("mlx5_1", 0, "pci0000:10", "00aa:00:00.0",
					topotest.Up(100)).Nvswitches().Gen(24)
				b.H.NICs[0].BusID, b.H.NICs[1].BusID, b.H.NICs[1].Card = "0000:f0:00.0", "0000:f0:00.1", "0000:f0:00.0"
				return b.Host()
			}(),
			want: []string{"near to mlx5_0, rail 0, PIX", "far bouncing to mlx5_1, rail 1, NODE"}, note: nothing,
		},
		{
			name: "the same as one bond",
			host: func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
					"pci0000:20", "").
					NIC("mlx5_bond_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).Nvswitches().Gen(24)
				b.H.NICs[0].Bond = true
				return b.Host()
			}(),
			want: []string{"near to mlx5_bond_0, rail 0, PIX", "far by 0 to mlx5_bond_0, rail 0, NODE"}, note: whileBusy,
		},
		{
			name: "a multi-host NIC: one card, a function at a switch of each socket",
			host: func() *topo.Host {
				b := topotest.Build(2)
				for i := range 2 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+7*i)
					b.Sw(sw, i, bridge, "").GPU(i, bridge, sw).GPU(i, bridge, sw).NIC(fmt.Sprintf("mlx5_%d", i), i, bridge, sw,
						topotest.Up(200))
					b.H.NICs[i].SystemGUID = "a088:c203:00a1:0001"
				}
				return b.Gen(24).Host()
			}(),
			want: slices.Concat(topotest.Repeat(2, "near to mlx5_0, rail 0, PIX"),
				topotest.Repeat(2, "near to mlx5_1, rail 1, PIX")), note: nothing,
		},
		{
			name: "a virtual machine with everything on its first bus",
			host: topotest.Build(1).GPU(0, "pci0000:00", "").GPU(0, "pci0000:00", "").NIC("mlx5_0", 0, "pci0000:00", "",
				topotest.Up(200)).Nvswitches().Gen(24).Host(),
			want: topotest.Repeat(2, "far bouncing to mlx5_0, rail 0, PHB"), note: nothing,
		},
		{
			name: "a GPU in MIG mode beside the NIC, and one that is not",
			host: func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
					"pci0000:20", "").
					NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).Nvswitches().Gen(24)
				b.H.GPUs[0].MIG = true
				return b.Host()
			}(),
			want: []string{"refused to , rail -1, DIS", "far bouncing to mlx5_0, rail 0, NODE"}, note: nothing,
		},
		{
			name: "one GPU and one NIC at a switch",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "", "").GPU(0, "", "00aa:00:00.0").NIC("mlx5_0", 0, "", "00aa:00:00.0",
				topotest.Up(400)).Host(),
			want: []string{"near to mlx5_0, rail 0, PIX"}, note: nothing,
		},
		{
			name: "virtual functions of one NIC beside a GPU, and a far one",
			host: func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
					"pci0000:20", "").
					NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Down(200)).NIC("mlx5_1", 0, "pci0000:10", "00aa:00:00.0",
					topotest.Up(200)).Nvswitches().Gen(24)
				b.H.NICs[0].BusID, b.H.NICs[1].BusID, b.H.NICs[1].Card, b.H.NICs[1].VirtualFunctionOf = "0000:f0:00.0",
					"0000:f0:00.2", "0000:f0:00.0", "0000:f0:00.0"
				return b.Host()
			}(),
			want: []string{"near to mlx5_1, rail 1, PIX", "far by 0 to mlx5_1, rail 1, NODE"}, note: whileBusy,
		},
		{
			name: "BlueField, a NIC behind a switch of its own, below the GPU's switch and at a root port",
			host: topotest.Build(2).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:10",
				"00aa:00:00.0").Sw("00aa:02:00.0", 1, "pci0000:80", "").
				GPU(0, "pci0000:10", "00aa:00:00.0").GPU(1, "pci0000:90", "").
				NIC("mlx5_0", 0, "pci0000:10", "00aa:01:00.0", topotest.Up(200)).NIC("mlx5_1", 1, "pci0000:80", "00aa:02:00.0",
				topotest.Up(200)).Gen(24).Host(),
			want: []string{
				"near to mlx5_0, rail 0, PXB", "far bouncing to mlx5_1,mlx5_0, rail 1, NODE",
			}, note: nothing,
		},
		{
			name: "a switch cut into two partitions, each with an upstream port, the NIC in one",
			host: func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:20", "")
				for i := range 4 {
					b.GPU(0, fmt.Sprintf("pci0000:%d0", 1+i/2), fmt.Sprintf("00aa:%02x:00.0", i/2))
				}
				return b.NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).Gen(24).Host()
			}(),
			want: slices.Concat(topotest.Repeat(2, "near to mlx5_0, rail 0, PIX"),
				topotest.Repeat(2, "far by 0,1 to mlx5_0, rail 0, NODE")), note: whileBusy,
		},
		{
			name: "the same, where the switch passes traffic between its partitions",
			host: func() *topo.Host {
				b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:20", "")
				b.H.Switches[0].Peers = []string{"00aa:01:00.0"}
				for i := range 4 {
					b.GPU(0, fmt.Sprintf("pci0000:%d0", 1+i/2), fmt.Sprintf("00aa:%02x:00.0", i/2))
				}
				return b.NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(200)).Gen(24).Host()
			}(),
			want: slices.Concat(topotest.Repeat(2, "near to mlx5_0, rail 0, PIX"),
				topotest.Repeat(2, "near to mlx5_0, rail 0, PXB")), note: nothing,
		},
		{
			name: "one GPU, four NICs at its switch: striped",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "", "").GPU(0, "", "00aa:00:00.0").
				NIC("mlx5_0", 0, "", "00aa:00:00.0", topotest.Up(100)).NIC("mlx5_1", 0, "", "00aa:00:00.0", topotest.Up(100)).
				NIC("mlx5_2", 0, "", "00aa:00:00.0", topotest.Up(100)).NIC("mlx5_10", 0, "", "00aa:00:00.0",
				topotest.Up(100)).Host(),
			want: []string{"near to mlx5_0,mlx5_1,mlx5_2,mlx5_10, rail 0, PIX"}, note: nothing,
		},
	} {
		t.Run(m.name, func(t *testing.T) {
			plan, err := Make(m.host, m.config)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m.want, short(plan)); diff != "" {
				t.Error(diff)
			}
			notes := strings.Join(plan.Notes, "\n")
			if m.note == "" && strings.Contains(notes, "has no benefit") || !strings.Contains(notes, m.note) {
				t.Errorf("notes %q; want %q", notes, m.note)
			}
			if t.Failed() {
				for _, l := range plan.Lanes {
					t.Logf("%s: %s", l.GPU, l.Reason)
				}
			}
		})
	}
}
