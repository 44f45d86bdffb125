package topo

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// at builds hosts for the tests: devices by NUMA node, host bridge and switch.
func at(numa int, hostBridge, sw string) (int, Place) {
	return numa, Place{HostBridge: hostBridge, Switch: sw, Link: 48}
}

type builder struct{ h Host }

func build(nodes int) *builder {
	b := &builder{Host{Source: Source{Kind: SourceSysfs, Sysfs: "/sys"}}}
	for n := range nodes {
		b.h.CPUs = append(b.h.CPUs, CPU{NUMA: n, Socket: 22})
	}
	return b
}

func (b *builder) sw(busID string, numa int, hostBridge, above string) *builder {
	n, p := at(numa, hostBridge, above)
	b.h.Switches = append(b.h.Switches, Switch{BusID: busID, NUMA: n, Place: p})
	return b
}

// gpu adds the next GPU; its address begins with its index.
func (b *builder) gpu(numa int, hostBridge, sw string) *builder {
	i := len(b.h.GPUs)
	n, p := at(numa, hostBridge, sw)
	b.h.GPUs = append(b.h.GPUs, GPU{
		Index: i, BusID: bus(i), Minor: i, NUMA: n, Place: p,
		UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i),
	})
	return b
}

func (b *builder) nic(name string, numa int, hostBridge, sw string, ports ...Port) *builder {
	n, p := at(numa, hostBridge, sw)
	b.h.NICs = append(b.h.NICs, NIC{Name: name, BusID: fmt.Sprintf("00ff:%02x:00.0", len(b.h.NICs)), NUMA: n, Place: p, Ports: ports})
	return b
}

// nvswitches joins all GPUs.
func (b *builder) nvswitches() *builder {
	for i := range b.h.GPUs {
		b.h.GPUs[i].NVLinks = []NVLink{{Count: 18, Bandwidth: 370.8}}
	}
	return b
}

func (b *builder) host() *Host { return &b.h }

func bus(gpu int) string { return fmt.Sprintf("0000:%02x:00.0", gpu+1) }

func up(rate float64) Port   { return Port{Number: 1, State: "ACTIVE", RateGbps: rate} }
func down(rate float64) Port { return Port{Number: 1, State: "DOWN", RateGbps: rate} }

// short writes a lane in one line: role, kind, servers by index, NICs, path.
func short(p *Plan) []string {
	var lines []string
	for _, l := range p.Lanes {
		var servers []string
		for _, s := range l.Servers {
			g, err := p.GPU(s)
			if err != nil {
				panic(err)
			}
			servers = append(servers, fmt.Sprint(g.Index))
		}
		s := l.Role
		switch l.Kind {
		case KindStaged:
			s += " by " + strings.Join(servers, ",")
		case KindBounce:
			s += " bouncing"
		}
		lines = append(lines, fmt.Sprintf("%s to %s, rail %d, %v", s, strings.Join(l.NICs, ","), l.Rail, l.Path))
	}
	return lines
}

// twoSockets has a NIC with two GPUs beside it and two GPUs elsewhere on each
// of two sockets.
func twoSockets() *builder {
	return build(2).
		sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 1, "pci0000:80", "").
		gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:10", "00aa:00:00.0").
		gpu(0, "pci0000:20", "").gpu(0, "pci0000:20", "").
		gpu(1, "pci0000:80", "00aa:01:00.0").gpu(1, "pci0000:80", "00aa:01:00.0").
		gpu(1, "pci0000:90", "").gpu(1, "pci0000:90", "").
		nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(400)).
		nic("mlx5_1", 1, "pci0000:80", "00aa:01:00.0", up(400))
}

func TestPlan(t *testing.T) {
	for _, tt := range []struct {
		name   string
		host   *Host
		config PlanConfig
		want   []string
	}{
		{
			name: "far GPUs are relayed over all GPUs near the nearest NIC",
			host: twoSockets().host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 0,1 to mlx5_0, rail 0, NODE", "far by 0,1 to mlx5_0, rail 0, NODE",
				"near to mlx5_1, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 4,5 to mlx5_1, rail 1, NODE", "far by 4,5 to mlx5_1, rail 1, NODE",
			},
		},
		{
			name: "NVLink does not draw a GPU away from the NIC of its socket",
			host: twoSockets().nvswitches().host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 1 to mlx5_0, rail 0, NODE",
				"near to mlx5_1, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 4 to mlx5_1, rail 1, NODE", "far by 5 to mlx5_1, rail 1, NODE",
			},
		},
		{
			name: "far GPUs between two equally near NICs are spread",
			host: build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 0, "pci0000:20", "").
				gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "00aa:01:00.0").
				gpu(0, "pci0000:30", "").gpu(0, "pci0000:30", "").gpu(0, "pci0000:30", "").gpu(0, "pci0000:30", "").
				nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0").nic("mlx5_1", 0, "pci0000:20", "00aa:01:00.0").host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX",
				"far bouncing to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 1 to mlx5_1, rail 1, NODE", "far bouncing to mlx5_1, rail 1, NODE",
			},
		},
		{
			name: "with NVLink an overloaded NIC gives lanes to the other socket",
			host: build(2).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 1, "pci0000:80", "").
				gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "").gpu(0, "pci0000:20", "").
				gpu(0, "pci0000:20", "").gpu(0, "pci0000:20", "").gpu(1, "pci0000:80", "00aa:01:00.0").
				nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0").nic("mlx5_1", 1, "pci0000:80", "00aa:01:00.0").nvswitches().host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 5 to mlx5_1, rail 1, SYS", "far by 5 to mlx5_1, rail 1, SYS",
				"near to mlx5_1, rail 1, PIX",
			},
		},
		{
			name: "without NVLink, too: a busy NIC is worse than a long way",
			host: build(2).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 1, "pci0000:80", "").
				gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "").gpu(0, "pci0000:20", "").
				gpu(0, "pci0000:20", "").gpu(1, "pci0000:80", "00aa:01:00.0").
				nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0").nic("mlx5_1", 1, "pci0000:80", "00aa:01:00.0").host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "far bouncing to mlx5_0, rail 0, NODE",
				"far bouncing to mlx5_0,mlx5_1, rail 0, NODE", "far bouncing to mlx5_1, rail 1, SYS",
				"near to mlx5_1, rail 1, PIX",
			},
		},
		{
			name: "a faster NIC takes more lanes",
			host: build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").sw("00aa:01:00.0", 0, "pci0000:20", "").
				gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:20", "00aa:01:00.0").
				gpu(0, "pci0000:30", "").gpu(0, "pci0000:30", "").gpu(0, "pci0000:30", "").gpu(0, "pci0000:30", "").
				nic("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", up(400)).nic("mlx5_1", 0, "pci0000:20", "00aa:01:00.0", up(100)).nvswitches().host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0,mlx5_1, rail 0, NODE",
			},
		},
		{
			name: "two NICs under one switch share its GPUs",
			host: build(1).sw("00aa:00:00.0", 0, "", "").
				gpu(0, "", "00aa:00:00.0").gpu(0, "", "00aa:00:00.0").
				nic("mlx5_0", 0, "", "00aa:00:00.0").nic("mlx5_1", 0, "", "00aa:00:00.0").host(),
			want: []string{"near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX"},
		},
		{
			name: "a GPU with a choice of near NICs leaves the only one of another to it",
			host: build(1).sw("00aa:00:00.0", 0, "", "").sw("00aa:01:00.0", 0, "", "00aa:00:00.0").sw("00aa:02:00.0", 0, "", "00aa:00:00.0").
				gpu(0, "", "00aa:00:00.0").gpu(0, "", "00aa:01:00.0").
				nic("mlx5_0", 0, "", "00aa:01:00.0").nic("mlx5_1", 0, "", "00aa:02:00.0").host(),
			want: []string{"near to mlx5_1, rail 1, PXB", "near to mlx5_0, rail 0, PIX"},
		},
		{
			name: "a NIC with its port down is not used, and keeps its rail",
			host: build(1).sw("00aa:00:00.0", 0, "", "").
				gpu(0, "", "00aa:00:00.0").gpu(0, "", "").
				nic("mlx5_0", 0, "", "00aa:00:00.0", down(400)).nic("mlx5_1", 0, "", "00aa:00:00.0", up(400)).nvswitches().host(),
			want: []string{"near to mlx5_1, rail 1, PIX", "far by 0 to mlx5_1, rail 1, PHB"},
		},
		{
			name: "PXB is near by default",
			host: build(1).sw("00aa:00:00.0", 0, "", "").sw("00aa:01:00.0", 0, "", "00aa:00:00.0").
				gpu(0, "", "00aa:01:00.0").nic("mlx5_0", 0, "", "00aa:00:00.0").host(),
			want: []string{"near to mlx5_0, rail 0, PXB"},
		},
		{
			name: "and far where the administrator says PIX",
			host: build(1).sw("00aa:00:00.0", 0, "", "").sw("00aa:01:00.0", 0, "", "00aa:00:00.0").
				gpu(0, "", "00aa:01:00.0").nic("mlx5_0", 0, "", "00aa:00:00.0").host(),
			config: PlanConfig{GDR: GDRPolicy{MaxPath: PIX}},
			want:   []string{"far bouncing to mlx5_0, rail 0, PXB"},
		},
		{
			name: "where no GPU is near a NIC, each keeps its own way",
			host: build(2).gpu(0, "pci0000:00", "").gpu(1, "pci0000:80", "").
				nic("mlx5_0", 0, "pci0000:00", "").nic("mlx5_1", 1, "pci0000:90", "").host(),
			want: []string{"far bouncing to mlx5_0, rail 0, PHB", "far bouncing to mlx5_1, rail 1, NODE"},
		},
		{
			name: "without a NIC there is no way",
			host: build(1).gpu(0, "", "").gpu(0, "", "").host(),
			want: []string{"far to , rail -1, DIS", "far to , rail -1, DIS"},
		},
		{
			name: "a GPU in MIG mode is refused, and serves nobody",
			host: func() *Host {
				h := twoSockets().host()
				h.GPUs[1].MIG, h.GPUs[4].MIG, h.GPUs[5].MIG = true, true, true
				return h
			}(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "refused to , rail -1, DIS",
				"far bouncing to mlx5_0, rail 0, NODE", "far bouncing to mlx5_0, rail 0, NODE",
				"refused to , rail -1, DIS", "refused to , rail -1, DIS",
				"far bouncing to mlx5_1, rail 1, NODE", "far bouncing to mlx5_1, rail 1, NODE",
			},
		},
		{
			name: "configuration assigns servers and an emulated NIC",
			host: build(1).gpu(0, "", "").gpu(0, "", "").host(),
			config: PlanConfig{Lanes: []Assignment{
				{GPU: "0", Servers: []string{"1"}, NICs: []string{"emulated0"}},
				{GPU: "GPU-00000000-0000-0000-0000-000000000001", Servers: []string{"0000:01:00.0"}, NICs: []string{"emulated1"}},
			}},
			want: []string{"far by 1 to emulated0, rail 0, DIS", "far by 0 to emulated1, rail 1, DIS"},
		},
		{
			name: "an assignment overrides the topology for its GPU, and its lane counts as load",
			host: twoSockets().nvswitches().host(),
			config: PlanConfig{Lanes: []Assignment{
				{GPU: "2", Servers: []string{"5"}},
				{GPU: "0", NICs: []string{"mlx5_1"}},
				{GPU: "1", Servers: []string{"4"}, NICs: []string{"mlx5_0", "emulated0"}},
			}},
			want: []string{
				"near bouncing to mlx5_1, rail 1, SYS", "near by 4 to mlx5_0,emulated0, rail 0, PIX",
				"far by 5 to mlx5_1, rail 1, SYS", "far by 1 to mlx5_0, rail 0, NODE",
				"near by 1 to mlx5_1,mlx5_0, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 0 to mlx5_0, rail 0, SYS", "far by 0 to mlx5_0, rail 0, SYS",
			},
		},
		{name: "a host without GPUs has no lane", host: build(1).nic("mlx5_0", 0, "", "").host()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, err := MakePlan(tt.host, tt.config)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, short(plan)); diff != "" {
				t.Error(diff)
			}
			for _, l := range plan.Lanes {
				if len(l.Reason) < 20 {
					t.Errorf("%s: the reason is %q", l.GPU, l.Reason)
				}
			}
			if err := plan.check(); err != nil {
				t.Error(err)
			}
			again, err := MakePlan(tt.host, tt.config)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(plan, again); diff != "" {
				t.Errorf("the same host has two plans: %s", diff)
			}
		})
	}
}

func TestReasons(t *testing.T) {
	off := false
	switches := func(gpus, nics int) *builder {
		b := build(1).sw("00aa:00:00.0", 0, "pci0000:10", "").gpu(0, "pci0000:10", "00aa:00:00.0").gpu(0, "pci0000:10", "00aa:00:00.0")
		for i := range nics {
			b.nic(fmt.Sprintf("mlx5_%d", i), 0, "pci0000:10", "00aa:00:00.0", up(100))
		}
		for range gpus {
			b.gpu(0, "pci0000:20", "")
		}
		return b.nvswitches()
	}
	striped := switches(1, 4).host() // the first two have one each
	striped.GPUs[0].MIG, striped.GPUs[1].NoP2P = true, true
	lone := switches(0, 3).host()
	lone.GPUs[0].MIG = true
	withoutGDR := switches(1, 1).host()
	withoutGDR.NICs[0].Ports = []Port{up(400)}
	withoutGDR.NICs[0].GDR, withoutGDR.GPUs[1].GDR = &off, &off
	mig := twoSockets().host()
	mig.GPUs[0].MIG = true
	ethernet := build(1).gpu(0, "", "").nic("eth0", 0, "", "").nic("mlx5_0", 0, "", "", down(100)).host()
	ethernet.NICs[0].Ethernet = true
	for _, tt := range []struct {
		host *Host
		gpu  string
		want string
	}{
		{twoSockets().host(), "0", "mlx5_0 reads and writes its memory directly (PIX, 48 GB/s), so no relay is needed"},
		{twoSockets().host(), "2", "mlx5_0, the nearest NIC, is far (NODE, 48 GB/s), so its traffic is staged on GPUs 0 and 1, near that NIC (copies: NODE, 48 GB/s); while all lanes are busy 12 GB/s with the relay and 12 GB/s through host memory; alone 39.74 GB/s with the relay, 32 GB/s through host memory"},
		{twoSockets().nvswitches().host(), "7", "mlx5_1, the nearest NIC, is far (NODE, 48 GB/s), so its traffic is staged on GPU 5, near that NIC (copies: NVL, 370.8 GB/s); while all lanes are busy 12 GB/s with the relay and 12 GB/s through host memory; alone 48 GB/s with the relay, 32 GB/s through host memory"},
		{striped, "2", "mlx5_1, mlx5_2 and mlx5_3, some of the nearest NICs, are far (NODE, 12.5 GB/s), so its traffic bounces through host memory: no GPU that it could be staged on is near enough to those NICs (PXB)"},
		{lone, "1", "mlx5_0, mlx5_1 and mlx5_2 read and write its memory directly (PIX, 12.5 GB/s), so no relay is needed"},
		{withoutGDR, "0", "mlx5_0 reads and writes its memory directly (PIX, 48 GB/s), so no relay is needed; it needs GPUDirect RDMA, which by the file was off for mlx5_0"},
		{withoutGDR, "1", "mlx5_0 reads and writes its memory directly (PIX, 48 GB/s), so no relay is needed; it needs GPUDirect RDMA, which by the file was off for mlx5_0 and GPU 1"},
		{withoutGDR, "2", "mlx5_0, the nearest NIC, is far (NODE, 48 GB/s), so its traffic is staged on GPU 0, near that NIC (copies: NVL, 370.8 GB/s); while all lanes are busy 16 GB/s with the relay and 16 GB/s through host memory; alone 48 GB/s with the relay, 32 GB/s through host memory; it needs GPUDirect RDMA, which by the file was off for mlx5_0"},
		{mig, "0", "MIG is on: instances of a GPU cannot map another GPU's memory; switch it off (nvidia-smi -mig 0) or use another GPU"},
		{build(1).gpu(0, "", "").host(), "0", "this host has no RDMA NIC; so the lane reaches the containers of this host alone, by one copy, unless [[plan.lane]] in config.toml assigns servers and NICs"},
		{ethernet, "0", "this host has no RDMA NIC to use (eth0: it has no RDMA; mlx5_0: it has no active port); so the lane reaches the containers of this host alone, by one copy, unless [[plan.lane]] in config.toml assigns servers and NICs"},
		{build(1).gpu(0, "", "").nic("mlx5_0", 0, "", "").host(), "0", "mlx5_0, the nearest NIC, is far (PHB, 48 GB/s), so its traffic bounces through host memory: no GPU that it could be staged on is near enough to that NIC (PXB)"},
	} {
		plan, err := MakePlan(tt.host, PlanConfig{})
		if err != nil {
			t.Fatal(err)
		}
		lane, err := plan.Lane(tt.gpu)
		if err != nil {
			t.Fatal(err)
		}
		if lane.Reason != tt.want {
			t.Errorf("got  %s\nwant %s", lane.Reason, tt.want)
		}
	}
}

func TestWrongConfigurationIsRefusedWithAReason(t *testing.T) {
	mig := twoSockets().host()
	mig.GPUs[1].MIG = true
	none := build(1).gpu(0, "", "").gpu(0, "", "").host()
	lanes := func(a ...Assignment) PlanConfig { return PlanConfig{Lanes: a} }
	for _, tt := range []struct {
		name   string
		host   *Host
		config PlanConfig
		want   string
	}{
		{"a limit that is no path to a NIC", none, PlanConfig{GDR: GDRPolicy{MaxPath: NVL}}, "gdr.max_path: NVL"},
		{"an unknown GPU", none, lanes(Assignment{GPU: "9", Servers: []string{"0"}}), `plan.lane for GPU "9": no GPU "9"`},
		{"an unknown server", none, lanes(Assignment{GPU: "0", Servers: []string{"9"}}), `servers: no GPU "9"`},
		{"a GPU that serves itself", none, lanes(Assignment{GPU: "0", Servers: []string{"0000:01:00.0"}}), "cannot serve itself"},
		{"a server named twice", twoSockets().host(), lanes(Assignment{GPU: "2", Servers: []string{"0", "0000:01:00.0"}}), "GPU 0 is named twice"},
		{"a GPU assigned twice", none, lanes(
			Assignment{GPU: "0", Servers: []string{"1"}, NICs: []string{"a"}},
			Assignment{GPU: "0000:01:00.0", NICs: []string{"a"}}), "already"},
		{"an empty assignment", none, lanes(Assignment{GPU: "0"}), "neither servers nor nics"},
		{"no NIC to be found", none, lanes(Assignment{GPU: "0", Servers: []string{"1"}}), `nics = ["emulated0"]`},
		{"a NIC named twice", none, lanes(Assignment{GPU: "0", NICs: []string{"a", "a"}}), `"a"`},
		{"a NIC without a name", none, lanes(Assignment{GPU: "0", NICs: []string{""}}), `""`},
		{"a GPU in MIG mode", mig, lanes(Assignment{GPU: "1", NICs: []string{"mlx5_0"}}), "MIG is on"},
		{"a server in MIG mode", mig, lanes(Assignment{GPU: "2", Servers: []string{"1"}}), "servers: MIG is on"},
	} {
		if _, err := MakePlan(tt.host, tt.config); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v; want one with %q", tt.name, err, tt.want)
		}
	}
}

func TestPlanNotesWhatIsLeftOut(t *testing.T) {
	h := build(1).nic("mlx5_0", 0, "", "", down(100)).host()
	h.Notes = []string{"a note of the reader"}
	plan, err := MakePlan(h, PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"a note of the reader",
		"this host has no GPU, so the plan has no lane",
		"NIC mlx5_0 has no active port (port 1 DOWN) and serves no lane that the topology decides",
	}
	if diff := cmp.Diff(want, plan.Notes); diff != "" {
		t.Error(diff)
	}
}

// A NIC is idle where a GPU could have used it.
func TestNoNICIsCalledIdleWhereEveryGPUIsRefused(t *testing.T) {
	h := twoSockets().host()
	for i := range h.GPUs {
		h.GPUs[i].MIG = true
	}
	plan := planOf(t, 0, h, PlanConfig{})
	want := []string{"every GPU of this host is refused, so the plan has no lane that leads anywhere"}
	if diff := cmp.Diff(want, plan.Notes); diff != "" {
		t.Error(diff)
	}
}

// What a file says of GPUDirect RDMA changes no role, and only one column of the
// estimate; the plan says so.
func TestAFileWithoutGPUDirectIsPlannedByItsPaths(t *testing.T) {
	off := false
	on, without := twoSockets().host(), twoSockets().host()
	for i := range without.NICs {
		without.NICs[i].GDR = &off
	}
	before, e := estimate(t, on, PlanConfig{})
	after, eWithout := estimate(t, without, PlanConfig{})
	if diff := cmp.Diff(short(before), short(after)); diff != "" {
		t.Error(diff)
	}
	if notes := strings.Join(after.Notes, "\n"); !strings.Contains(notes, "by the file, GPUDirect RDMA was off") || strings.Contains(strings.Join(before.Notes, "\n"), "by the file") {
		t.Errorf("notes %q", after.Notes)
	}
	for i, g := range eWithout.GPUs {
		if g.NCCL != g.HostMemory || g.HostMemory != e.GPUs[i].HostMemory || g.Relay != e.GPUs[i].Relay {
			t.Errorf("%+v; with GPUDirect %+v", g, e.GPUs[i])
		}
	}
}
