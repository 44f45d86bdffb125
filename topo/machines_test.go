package topo

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// hgx is a server of eight GPUs with NVSwitches, two GPUs to a switch and two
// switches to a socket, with NICs at the given switches.
func hgx(link, rate float64, switches ...int) *builder {
	b := eightA100()
	for i, sw := range switches {
		b.nic(fmt.Sprintf("mlx5_%d", i), sw/2, fmt.Sprintf("pci0000:%d0", 1+sw), fmt.Sprintf("00aa:%02x:00.0", sw), up(rate))
	}
	return b.gen(link)
}

// cubeMesh joins eight GPUs as a DGX-1 does: two quads, and each GPU with its
// like in the other.
func (b *builder) cubeMesh() *builder {
	for i := range 8 {
		for j := range 8 {
			if i != j && (i/4 == j/4 || i%4 == j%4) {
				b.h.GPUs[i].NVLinks = append(b.h.GPUs[i].NVLinks, NVLink{Peer: b.h.GPUs[j].BusID, Count: 1, Bandwidth: 20})
			}
		}
	}
	return b
}

func repeat(n int, lines ...string) []string { return slices.Repeat(lines, n) }

// Machines that one meets, and what anyone who knows them would say.
func TestPlansOfWellKnownMachines(t *testing.T) {
	each := func(first int, format string, count int) (lines []string) {
		for i := range count {
			lines = append(lines, fmt.Sprintf(format, first+i, first+i))
		}
		return lines
	}
	flat := func(numas int, gpus int) *builder {
		b := build(numas)
		for i := range gpus {
			b.gpu(i*numas/gpus, fmt.Sprintf("pci0000:%02x", 0x10+i), "")
		}
		return b
	}
	nothing := "the relay brings nothing on this host"
	whileBusy := "with all lanes busy the relay brings nothing here"
	for _, m := range []struct {
		name   string
		host   *Host
		config PlanConfig
		want   []string
		note   string // in the notes; "" for none that says that the relay brings nothing
	}{
		{
			name: "HGX H100, four switches, eight NICs",
			host: hgx(48, 400, 0, 0, 1, 1, 2, 2, 3, 3).host(),
			want: each(0, "near to mlx5_%d, rail %d, PIX", 8), note: nothing,
		},
		{
			name: "HGX A100 with a NIC at every second switch",
			host: hgx(24, 200, 0, 2).host(),
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
			host: hgx(24, 200, 0).host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 1 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 1 to mlx5_0, rail 0, SYS", "far by 0 to mlx5_0, rail 0, SYS",
				"far by 0 to mlx5_0, rail 0, SYS", "far by 1 to mlx5_0, rail 0, SYS",
			},
		},
		{
			name: "eight PCIe GPUs and two NICs on two switches",
			host: func() *Host {
				b := build(2)
				for i := range 2 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.sw(sw, i, bridge, "").gpu(i, bridge, sw).gpu(i, bridge, sw).gpu(i, bridge, sw).gpu(i, bridge, sw).
						nic(fmt.Sprintf("mlx5_%d", i), i, bridge, sw, up(200))
				}
				return b.gen(24).host()
			}(),
			want: slices.Concat(repeat(4, "near to mlx5_0, rail 0, PIX"), repeat(4, "near to mlx5_1, rail 1, PIX")), note: nothing,
		},
		{
			name: "DGX-1, four NICs",
			host: func() *Host {
				b := build(2)
				for i := range 4 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.sw(sw, i/2, bridge, "").gpu(i/2, bridge, sw).gpu(i/2, bridge, sw).nic(fmt.Sprintf("mlx5_%d", i), i/2, bridge, sw, up(100))
				}
				return b.cubeMesh().gen(12).host()
			}(),
			want: slices.Concat(repeat(2, "near to mlx5_0, rail 0, PIX"), repeat(2, "near to mlx5_1, rail 1, PIX"),
				repeat(2, "near to mlx5_2, rail 2, PIX"), repeat(2, "near to mlx5_3, rail 3, PIX")), note: nothing,
		},
		{
			// GPUs 2 and 3 have NVLink to both servers, 4 and 5 to one of them; from 6
			// and 7 the copies cross the sockets.
			name: "DGX-1 with one NIC (OneFlow's)",
			host: func() *Host {
				b := build(2)
				for i := range 4 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.sw(sw, i/2, bridge, "").gpu(i/2, bridge, sw).gpu(i/2, bridge, sw)
				}
				return b.nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(100)).cubeMesh().gen(12).host()
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
			host: func() *Host {
				b := hgx(48, 0)
				for i := range 2 {
					b.nic(fmt.Sprintf("erdma_%d", i), i, fmt.Sprintf("pci0000:%d0", 8+i), "", up(200))
					b.h.NICs[i].Protocol = "eRDMA"
				}
				return b.gen(48).host()
			}(),
			want: slices.Concat(repeat(4, "far bouncing to erdma_0, rail 0, NODE"), repeat(4, "far bouncing to erdma_1, rail 1, NODE")),
			note: "gdr.max_path in config.toml says what is near",
		},
		{
			name: "the same, with GPUDirect RDMA through the CPU allowed",
			host: func() *Host {
				b := hgx(48, 0)
				for i := range 2 {
					b.nic(fmt.Sprintf("erdma_%d", i), i, fmt.Sprintf("pci0000:%d0", 8+i), "", up(200))
					b.h.NICs[i].Protocol = "eRDMA"
				}
				return b.gen(48).host()
			}(),
			config: PlanConfig{GDR: GDRPolicy{MaxPath: NODE}},
			want: []string{
				"near bouncing to erdma_0, rail 0, NODE", "near to erdma_0, rail 0, NODE",
				"near to erdma_0, rail 0, NODE", "near to erdma_0, rail 0, NODE",
				"near to erdma_1, rail 1, NODE", "near to erdma_1, rail 1, NODE",
				"near bouncing to erdma_1, rail 1, NODE", "near to erdma_1, rail 1, NODE",
			}, note: "NIC erdma_0 (eRDMA) cannot flush its writes into GPU memory",
		},
		{
			name:   "and for one of the NICs alone",
			host:   flat(2, 4).nic("erdma_0", 0, "pci0000:80", "", up(200)).nic("erdma_1", 1, "pci0000:90", "", up(200)).host(),
			config: PlanConfig{GDR: GDRPolicy{NICs: map[string]PathType{"erdma_1": NODE}}},
			want: []string{
				"far bouncing to erdma_0, rail 0, NODE", "far bouncing to erdma_0, rail 0, NODE",
				"near bouncing to erdma_1, rail 1, NODE", "near to erdma_1, rail 1, NODE",
			}, note: nothing,
		},
		{
			name: "a NIC at a root port, GPUs at others",
			host: flat(1, 4).nic("mlx5_0", 0, "pci0000:80", "", up(100)).host(),
			want: repeat(4, "far bouncing to mlx5_0, rail 0, NODE"), note: nothing,
		},
		{
			name: "eight A30 without a switch, two NICs (nccl#1084)",
			host: flat(2, 8).nic("mlx5_0", 0, "pci0000:11", "", up(100)).nic("mlx5_1", 1, "pci0000:16", "", up(100)).gen(24).host(),
			want: slices.Concat(
				[]string{"far bouncing to mlx5_0, rail 0, NODE", "far bouncing to mlx5_0, rail 0, PHB"}, repeat(2, "far bouncing to mlx5_0, rail 0, NODE"),
				repeat(2, "far bouncing to mlx5_1, rail 1, NODE"), []string{"far bouncing to mlx5_1, rail 1, PHB", "far bouncing to mlx5_1, rail 1, NODE"}),
			note: nothing,
		},
		{
			name: "Grace Hopper",
			host: func() *Host {
				h := flat(1, 1).nic("mlx5_0", 0, "pci0000:80", "", up(400)).host()
				h.GPUs[0].C2C = 360
				return h
			}(),
			want: []string{"far bouncing to mlx5_0, rail 0, P2C"}, note: nothing,
		},
		{
			name: "Grace Hopper, with GPUDirect RDMA as NCCL has it",
			host: func() *Host {
				h := flat(4, 4).host()
				b := &builder{*h}
				for i := range 4 {
					b.h.GPUs[i].C2C = 360
					b.nic(fmt.Sprintf("mlx5_%d", i), i, fmt.Sprintf("pci0000:%d0", 6+i), "", up(400))
				}
				return b.host()
			}(),
			config: PlanConfig{GDR: GDRPolicy{MaxPath: P2C}},
			want:   each(0, "near to mlx5_%d, rail %d, P2C", 4), note: nothing,
		},
		{
			name: "EPYC with four NUMA nodes and NVLink (nccl#595)",
			host: func() *Host {
				b := build(4)
				for i, numa := range []int{1, 0, 3, 2} {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.sw(sw, numa, bridge, "").gpu(numa, bridge, sw)
				}
				return b.nic("mlx5_0", 0, "pci0000:20", "00aa:01:00.0", up(200)).nic("mlx5_1", 3, "pci0000:30", "00aa:02:00.0", up(200)).
					nvswitches().gen(24).host()
			}(),
			want: []string{
				"far by 1 to mlx5_0, rail 0, SYS", "near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX", "far by 2 to mlx5_1, rail 1, SYS",
			},
			note: whileBusy,
		},
		{
			name: "Broadcom's switches of two levels, which count as one",
			host: func() *Host {
				b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").
					sw("00aa:01:00.0", 0, "pci0000:10", "00aa:00:00.0").sw("00aa:02:00.0", 0, "pci0000:10", "00aa:00:00.0").
					gpu(0, "pci0000:10", "00aa:01:00.0").gpu(0, "pci0000:10", "00aa:02:00.0").
					nic("mlx5_0", 0, "pci0000:10", "00aa:01:00.0", up(400))
				for i := range b.h.Switches {
					b.h.Switches[i].Device = PCIIdentity{"0x060400", "0x1000", "0xc010", "0x1000", "0xa096"}
				}
				return b.host()
			}(),
			config: PlanConfig{GDR: GDRPolicy{MaxPath: PIX}},
			want:   repeat(2, "near to mlx5_0, rail 0, PIX"), note: nothing,
		},
		{
			name: "HGX H100, eight NICs and two for storage at the sockets",
			host: hgx(48, 400, 0, 0, 1, 1, 2, 2, 3, 3).
				nic("mlx5_8", 0, "pci0000:80", "", up(200)).nic("mlx5_9", 1, "pci0000:90", "", up(200)).host(),
			want: each(0, "near to mlx5_%d, rail %d, PIX", 8), note: "NIC mlx5_9 is idle",
		},
		{
			name: "HGX A100, eight NICs at the four switches and two for storage at switches, too",
			host: hgx(24, 200, 0, 0, 1, 1, 2, 2, 3, 3, 0, 2).host(),
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
			host: build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:10", "00aa:00:00.0").
				gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:10", "00aa:00:00.0").nic("mlx5_0", 0, "pci0000:20", "", up(200)).gen(24).host(),
			want: repeat(4, "far bouncing to mlx5_0, rail 0, NODE"), note: "gdr.max_path in config.toml says what is near",
		},
		{
			name: "ten GPUs below two cascaded switches, the NIC at the lower",
			host: func() *Host {
				b := build(2).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 0, "pci0000:10", "00aa:00:00.0")
				for i := range 10 {
					b.gpu(0, "pci0000:10", fmt.Sprintf("00aa:%02x:00.0", i/5))
				}
				return b.nic("mlx5_0", 0, "pci0000:10", "00aa:01:00.0", up(200)).gen(24).host()
			}(),
			want: slices.Concat(repeat(5, "near to mlx5_0, rail 0, PXB"), repeat(5, "near to mlx5_0, rail 0, PIX")), note: nothing,
		},
		{
			name: "ten GPUs of two sockets, a switch each, the NIC at the first",
			host: func() *Host {
				b := build(2).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 1, "pci0000:80", "")
				for i := range 10 {
					b.gpu(i/5, fmt.Sprintf("pci0000:%d0", 1+i/5*7), fmt.Sprintf("00aa:%02x:00.0", i/5))
				}
				return b.nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(200)).gen(24).host()
			}(),
			want: slices.Concat(repeat(5, "near to mlx5_0, rail 0, PIX"), repeat(5, "far by 0,1,2,3,4 to mlx5_0, rail 0, SYS")),
			note: whileBusy,
		},
		{
			// SYS does not tell the nodes of one socket from those of the other, so far
			// GPUs are dealt out evenly, and no more.
			name: "EPYC with NPS4: eight NUMA nodes, each a GPU, and NICs at two of the GPUs' switches",
			host: func() *Host {
				b := build(8)
				for i := range 8 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+i)
					b.sw(sw, i, bridge, "").gpu(i, bridge, sw)
				}
				return b.nic("mlx5_0", 1, "pci0000:20", "00aa:01:00.0", up(200)).nic("mlx5_1", 5, "pci0000:60", "00aa:05:00.0", up(200)).
					nvswitches().gen(24).host()
			}(),
			want: []string{
				"far by 1 to mlx5_0, rail 0, SYS", "near to mlx5_0, rail 0, PIX",
				"far by 1 to mlx5_0, rail 0, SYS", "far by 1 to mlx5_0, rail 0, SYS",
				"far by 5 to mlx5_1, rail 1, SYS", "near to mlx5_1, rail 1, PIX",
				"far by 5 to mlx5_1, rail 1, SYS", "far by 5 to mlx5_1, rail 1, SYS",
			},
		},
		{
			// The port is what is full, with the relay and without.
			name: "a NIC of two ports, each an RDMA device, at the switch of one of two GPUs",
			host: func() *Host {
				b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "").
					nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(100)).nic("mlx5_1", 0, "pci0000:10", "00aa:00:00.0", up(100)).nvswitches().gen(24)
				b.h.NICs[0].BusID, b.h.NICs[1].BusID, b.h.NICs[1].Card = "0000:f0:00.0", "0000:f0:00.1", "0000:f0:00.0"
				return b.host()
			}(),
			want: []string{"near to mlx5_0, rail 0, PIX", "far bouncing to mlx5_1, rail 1, NODE"}, note: nothing,
		},
		{
			name: "the same as one bond",
			host: func() *Host {
				b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "").
					nic("mlx5_bond_0", 0, "pci0000:10", "00aa:00:00.0", up(200)).nvswitches().gen(24)
				b.h.NICs[0].Bond = true
				return b.host()
			}(),
			want: []string{"near to mlx5_bond_0, rail 0, PIX", "far by 0 to mlx5_bond_0, rail 0, NODE"}, note: whileBusy,
		},
		{
			name: "a multi-host NIC: one card, a function at a switch of each socket",
			host: func() *Host {
				b := build(2)
				for i := range 2 {
					sw, bridge := fmt.Sprintf("00aa:%02x:00.0", i), fmt.Sprintf("pci0000:%d0", 1+7*i)
					b.sw(sw, i, bridge, "").gpu(i, bridge, sw).gpu(i, bridge, sw).nic(fmt.Sprintf("mlx5_%d", i), i, bridge, sw, up(200))
					b.h.NICs[i].SystemGUID = "a088:c203:00a1:0001"
				}
				return b.gen(24).host()
			}(),
			want: slices.Concat(repeat(2, "near to mlx5_0, rail 0, PIX"), repeat(2, "near to mlx5_1, rail 1, PIX")), note: nothing,
		},
		{
			name: "a virtual machine with everything on its first bus",
			host: build(1).gpu(0, "pci0000:00", "").gpu(0, "pci0000:00", "").nic("mlx5_0", 0, "pci0000:00", "", up(200)).nvswitches().gen(24).host(),
			want: repeat(2, "far bouncing to mlx5_0, rail 0, PHB"), note: nothing,
		},
		{
			name: "a GPU in MIG mode beside the NIC, and one that is not",
			host: func() *Host {
				b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "").
					nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(200)).nvswitches().gen(24)
				b.h.GPUs[0].MIG = true
				return b.host()
			}(),
			want: []string{"refused to , rail -1, DIS", "far bouncing to mlx5_0, rail 0, NODE"}, note: nothing,
		},
		{
			name: "one GPU and one NIC at a switch",
			host: build(1).sw("00aa:00:00.0", 0, "", "").gpu(0, "", "00aa:00:00.0").nic("mlx5_0", 0, "", "00aa:00:00.0", up(400)).host(),
			want: []string{"near to mlx5_0, rail 0, PIX"}, note: nothing,
		},
		{
			name: "virtual functions of one NIC beside a GPU, and a far one",
			host: func() *Host {
				b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "").
					nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", down(200)).nic("mlx5_1", 0, "pci0000:10", "00aa:00:00.0", up(200)).nvswitches().gen(24)
				b.h.NICs[0].BusID, b.h.NICs[1].BusID, b.h.NICs[1].Card, b.h.NICs[1].VirtualFunctionOf = "0000:f0:00.0", "0000:f0:00.2", "0000:f0:00.0", "0000:f0:00.0"
				return b.host()
			}(),
			want: []string{"near to mlx5_1, rail 1, PIX", "far by 0 to mlx5_1, rail 1, NODE"}, note: whileBusy,
		},
		{
			name: "BlueField, a NIC behind a switch of its own, below the GPU's switch and at a root port",
			host: build(2).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 0, "pci0000:10", "00aa:00:00.0").sw("00aa:02:00.0", 1, "pci0000:80", "").
				gpu(0, "pci0000:10", "00aa:00:00.0").gpu(1, "pci0000:90", "").
				nic("mlx5_0", 0, "pci0000:10", "00aa:01:00.0", up(200)).nic("mlx5_1", 1, "pci0000:80", "00aa:02:00.0", up(200)).gen(24).host(),
			want: []string{
				"near to mlx5_0, rail 0, PXB", "far bouncing to mlx5_1,mlx5_0, rail 1, NODE",
			}, note: nothing,
		},
		{
			name: "a switch cut into two partitions, each with an upstream port, the NIC in one",
			host: func() *Host {
				b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 0, "pci0000:20", "")
				for i := range 4 {
					b.gpu(0, fmt.Sprintf("pci0000:%d0", 1+i/2), fmt.Sprintf("00aa:%02x:00.0", i/2))
				}
				return b.nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(200)).gen(24).host()
			}(),
			want: slices.Concat(repeat(2, "near to mlx5_0, rail 0, PIX"), repeat(2, "far by 0,1 to mlx5_0, rail 0, NODE")), note: whileBusy,
		},
		{
			name: "the same, where the switch passes traffic between its partitions",
			host: func() *Host {
				b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 0, "pci0000:20", "")
				b.h.Switches[0].Peers = []string{"00aa:01:00.0"}
				for i := range 4 {
					b.gpu(0, fmt.Sprintf("pci0000:%d0", 1+i/2), fmt.Sprintf("00aa:%02x:00.0", i/2))
				}
				return b.nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(200)).gen(24).host()
			}(),
			want: slices.Concat(repeat(2, "near to mlx5_0, rail 0, PIX"), repeat(2, "near to mlx5_0, rail 0, PXB")), note: nothing,
		},
		{
			name: "one GPU, four NICs at its switch: striped",
			host: build(1).sw("00aa:00:00.0", 0, "", "").gpu(0, "", "00aa:00:00.0").
				nic("mlx5_0", 0, "", "00aa:00:00.0", up(100)).nic("mlx5_1", 0, "", "00aa:00:00.0", up(100)).
				nic("mlx5_2", 0, "", "00aa:00:00.0", up(100)).nic("mlx5_10", 0, "", "00aa:00:00.0", up(100)).host(),
			want: []string{"near to mlx5_0,mlx5_1,mlx5_2,mlx5_10, rail 0, PIX"}, note: nothing,
		},
	} {
		t.Run(m.name, func(t *testing.T) {
			plan, err := MakePlan(m.host, m.config)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m.want, short(plan)); diff != "" {
				t.Error(diff)
			}
			notes := strings.Join(plan.Notes, "\n")
			if m.note == "" && strings.Contains(notes, "brings nothing") || !strings.Contains(notes, m.note) {
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
