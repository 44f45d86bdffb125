package planner

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
)

// short returns a line per lane: role, kind, servers by index, NICs, rail, path.
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

func TestMakeOnSmallHostsAssignsExpectedLanes(t *testing.T) {
	for _, tt := range []struct {
		name   string
		host   *topo.Host
		config Config
		want   []string
	}{
		{
			name: "far GPUs are relayed over all GPUs near the nearest NIC",
			host: topotest.TwoSockets().Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 0,1 to mlx5_0, rail 0, NODE", "far by 0,1 to mlx5_0, rail 0, NODE",
				"near to mlx5_1, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 4,5 to mlx5_1, rail 1, NODE", "far by 4,5 to mlx5_1, rail 1, NODE",
			},
		},
		{
			name: "NVLink does not draw a GPU away from the NIC of its socket",
			host: topotest.TwoSockets().Nvswitches().Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 1 to mlx5_0, rail 0, NODE",
				"near to mlx5_1, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 4 to mlx5_1, rail 1, NODE", "far by 5 to mlx5_1, rail 1, NODE",
			},
		},
		{
			name: "far GPUs between two equally near NICs are spread",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:20", "").
				GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "00aa:01:00.0").
				GPU(0, "pci0000:30", "").GPU(0, "pci0000:30", "").GPU(0, "pci0000:30", "").GPU(0, "pci0000:30", "").
				NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0").NIC("mlx5_1", 0, "pci0000:20", "00aa:01:00.0").Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX",
				"far bouncing to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 1 to mlx5_1, rail 1, NODE", "far bouncing to mlx5_1, rail 1, NODE",
			},
		},
		{
			name: "with NVLink an overloaded NIC gives lanes to the other socket",
			host: topotest.Build(2).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 1, "pci0000:80", "").
				GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "").GPU(0, "pci0000:20", "").
				GPU(0, "pci0000:20", "").GPU(0, "pci0000:20", "").GPU(1, "pci0000:80", "00aa:01:00.0").
				NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0").NIC("mlx5_1", 1, "pci0000:80", "00aa:01:00.0").Nvswitches().Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 5 to mlx5_1, rail 1, SYS", "far by 5 to mlx5_1, rail 1, SYS",
				"near to mlx5_1, rail 1, PIX",
			},
		},
		{
			name: "without NVLink, too: a busy NIC is worse than a long way",
			host: topotest.Build(2).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 1, "pci0000:80", "").
				GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "").GPU(0, "pci0000:20", "").
				GPU(0, "pci0000:20", "").GPU(1, "pci0000:80", "00aa:01:00.0").
				NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0").NIC("mlx5_1", 1, "pci0000:80", "00aa:01:00.0").Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "far bouncing to mlx5_0, rail 0, NODE",
				"far bouncing to mlx5_0,mlx5_1, rail 0, NODE", "far bouncing to mlx5_1, rail 1, SYS",
				"near to mlx5_1, rail 1, PIX",
			},
		},
		{
			name: "a faster NIC takes more lanes",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").Sw("00aa:01:00.0", 0, "pci0000:20", "").
				GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "00aa:01:00.0").
				GPU(0, "pci0000:30", "").GPU(0, "pci0000:30", "").GPU(0, "pci0000:30", "").GPU(0, "pci0000:30", "").
				NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(400)).NIC("mlx5_1", 0, "pci0000:20", "00aa:01:00.0",
				topotest.Up(100)).Nvswitches().Host(),
			want: []string{
				"near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0, rail 0, NODE",
				"far by 0 to mlx5_0, rail 0, NODE", "far by 0 to mlx5_0,mlx5_1, rail 0, NODE",
			},
		},
		{
			name: "two NICs under one switch share its GPUs",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "", "").
				GPU(0, "", "00aa:00:00.0").GPU(0, "", "00aa:00:00.0").
				NIC("mlx5_0", 0, "", "00aa:00:00.0").NIC("mlx5_1", 0, "", "00aa:00:00.0").Host(),
			want: []string{"near to mlx5_0, rail 0, PIX", "near to mlx5_1, rail 1, PIX"},
		},
		{
			name: "a GPU with a choice of near NICs leaves the only one of another to it",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "", "").Sw("00aa:01:00.0", 0, "", "00aa:00:00.0").Sw("00aa:02:00.0", 0,
				"", "00aa:00:00.0").
				GPU(0, "", "00aa:00:00.0").GPU(0, "", "00aa:01:00.0").
				NIC("mlx5_0", 0, "", "00aa:01:00.0").NIC("mlx5_1", 0, "", "00aa:02:00.0").Host(),
			want: []string{"near to mlx5_1, rail 1, PXB", "near to mlx5_0, rail 0, PIX"},
		},
		{
			name: "a NIC with its port down is not used, and keeps its rail",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "", "").
				GPU(0, "", "00aa:00:00.0").GPU(0, "", "").
				NIC("mlx5_0", 0, "", "00aa:00:00.0", topotest.Down(400)).NIC("mlx5_1", 0, "", "00aa:00:00.0",
				topotest.Up(400)).Nvswitches().Host(),
			want: []string{"near to mlx5_1, rail 1, PIX", "far by 0 to mlx5_1, rail 1, PHB"},
		},
		{
			name: "PXB is near by default",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "", "").Sw("00aa:01:00.0", 0, "", "00aa:00:00.0").
				GPU(0, "", "00aa:01:00.0").NIC("mlx5_0", 0, "", "00aa:00:00.0").Host(),
			want: []string{"near to mlx5_0, rail 0, PXB"},
		},
		{
			name: "and far where the administrator says PIX",
			host: topotest.Build(1).Sw("00aa:00:00.0", 0, "", "").Sw("00aa:01:00.0", 0, "", "00aa:00:00.0").
				GPU(0, "", "00aa:01:00.0").NIC("mlx5_0", 0, "", "00aa:00:00.0").Host(),
			config: Config{GDR: GDRPolicy{MaxPath: topo.PIX}},
			want:   []string{"far bouncing to mlx5_0, rail 0, PXB"},
		},
		{
			name: "where no GPU is near a NIC, each keeps its own way",
			host: topotest.Build(2).GPU(0, "pci0000:00", "").GPU(1, "pci0000:80", "").
				NIC("mlx5_0", 0, "pci0000:00", "").NIC("mlx5_1", 1, "pci0000:90", "").Host(),
			want: []string{"far bouncing to mlx5_0, rail 0, PHB", "far bouncing to mlx5_1, rail 1, NODE"},
		},
		{
			name: "without a NIC there is no way",
			host: topotest.Build(1).GPU(0, "", "").GPU(0, "", "").Host(),
			want: []string{"far to , rail -1, DIS", "far to , rail -1, DIS"},
		},
		{
			name: "a GPU in MIG mode is refused, and serves nobody",
			host: func() *topo.Host {
				h := topotest.TwoSockets().Host()
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
			name: "configuration assigns servers and a software device",
			host: topotest.Build(1).GPU(0, "", "").GPU(0, "", "").Host(),
			config: Config{Lanes: []Assignment{
				{GPU: "0", Servers: []string{"1"}, NICs: []string{"emulated0"}},
				{GPU: "GPU-00000000-0000-0000-0000-000000000001", Servers: []string{"0000:01:00.0"}, NICs: []string{"emulated1"}},
			}},
			want: []string{"far by 1 to emulated0, rail 0, DIS", "far by 0 to emulated1, rail 1, DIS"},
		},
		{
			name: "an assignment overrides the topology for its GPU, and its lane counts as load",
			host: topotest.TwoSockets().Nvswitches().Host(),
			config: Config{Lanes: []Assignment{
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
		{name: "a host without GPUs has no lane", host: topotest.Build(1).NIC("mlx5_0", 0, "", "").Host()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, err := Make(tt.host, tt.config)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, short(plan)); diff != "" {
				t.Error(diff)
			}
			for _, l := range plan.Lanes {
				if len(l.Reason) < 20 {
					t.Errorf("GPU %s: reason %q, want a sentence", l.GPU, l.Reason)
				}
			}
			if err := plan.Check(); err != nil {
				t.Error(err)
			}
			again, err := Make(tt.host, tt.config)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(plan, again); diff != "" {
				t.Errorf("second plan of the host differs: %s", diff)
			}
		})
	}
}

func TestReasonOnSmallHostsNamesNICsAndRates(t *testing.T) {
	off := false
	switches := func(gpus, nics int) *topotest.Builder {
		b := topotest.Build(1).Sw("00aa:00:00.0", 0, "pci0000:10", "").GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0,
			"pci0000:10", "00aa:00:00.0")
		for i := range nics {
			b.NIC(fmt.Sprintf("mlx5_%d", i), 0, "pci0000:10", "00aa:00:00.0", topotest.Up(100))
		}
		for range gpus {
			b.GPU(0, "pci0000:20", "")
		}
		return b.Nvswitches()
	}
	striped := switches(1, 4).Host() // MIG and NoP2P refuse GPUs 0 and 1
	striped.GPUs[0].MIG, striped.GPUs[1].NoP2P = true, true
	lone := switches(0, 3).Host()
	lone.GPUs[0].MIG = true
	withoutGDR := switches(1, 1).Host()
	withoutGDR.NICs[0].Ports = []topo.Port{topotest.Up(400)}
	withoutGDR.NICs[0].GDR, withoutGDR.GPUs[1].GDR = &off, &off
	mig := topotest.TwoSockets().Host()
	mig.GPUs[0].MIG = true
	ethernet := topotest.Build(1).GPU(0, "", "").NIC("eth0", 0, "", "").NIC("mlx5_0", 0, "", "", topotest.Down(100)).Host()
	ethernet.NICs[0].Ethernet = true
	for _, tt := range []struct {
		host *topo.Host
		gpu  string
		want string
	}{
		{topotest.TwoSockets().Host(), "0", "mlx5_0 reads and writes its memory directly (PIX, 48 GB/s), so no relay is " +
			"needed"},
		{topotest.TwoSockets().Host(), "2", "mlx5_0, the nearest NIC, is far (NODE, 48 GB/s), so its traffic is staged on " +
			"GPUs 0 and 1, near that NIC (copies: NODE, 48 GB/s); while all lanes are busy 12 GB/s with the relay and 12 " +
			"GB/s through host memory; alone 39.74 GB/s with the relay, 32 GB/s through host memory"},
		{topotest.TwoSockets().Nvswitches().Host(), "7",
			"mlx5_1, the nearest NIC, is far (NODE, 48 GB/s), so its traffic is staged on GPU 5, near that NIC (copies: NVL, " +
				"370.8 GB/s); while all lanes are busy 12 GB/s with the relay and 12 GB/s through host memory; alone 48 GB/s " +
				"with the relay, 32 GB/s through host memory"},
		{striped, "2", "mlx5_1, mlx5_2 and mlx5_3, some of the nearest NICs, are far (NODE, 12.5 GB/s), so its traffic " +
			"bounces through host memory: no GPU that could stage it is near enough to those NICs (PXB)"},
		{lone, "1", "mlx5_0, mlx5_1 and mlx5_2 read and write its memory directly (PIX, 12.5 GB/s), so no relay is needed"},
		{withoutGDR, "0", "mlx5_0 reads and writes its memory directly (PIX, 48 GB/s), so no relay is needed; it needs " +
			"GPUDirect RDMA, which the file reports as off for mlx5_0"},
		{withoutGDR, "1", "mlx5_0 reads and writes its memory directly (PIX, 48 GB/s), so no relay is needed; it needs " +
			"GPUDirect RDMA, which the file reports as off for mlx5_0 and GPU 1"},
		{withoutGDR, "2", "mlx5_0, the nearest NIC, is far (NODE, 48 GB/s), so its traffic is staged on GPU 0, near that " +
			"NIC (copies: NVL, 370.8 GB/s); while all lanes are busy 16 GB/s with the relay and 16 GB/s through host memory; " +
			"alone 48 GB/s with the relay, 32 GB/s through host memory; it needs GPUDirect RDMA, which the file reports as " +
			"off for mlx5_0"},
		{mig, "0", "MIG is on: instances of a GPU cannot map another GPU's memory; disable MIG (nvidia-smi -mig 0) or " +
			"use another GPU"},
		{topotest.Build(1).GPU(0, "", "").Host(), "0", "this host has no RDMA NIC; so the lane reaches only containers " +
			"of this host, by one copy, unless [[plan.lane]] in config.toml assigns servers and NICs"},
		{ethernet, "0", "this host has no usable RDMA NIC (eth0: it does not support RDMA; mlx5_0: it has no active " +
			"port); so the lane reaches only containers of this host, by one copy, unless [[plan.lane]] in config.toml " +
			"assigns servers and NICs"},
		{topotest.Build(1).GPU(0, "", "").NIC("mlx5_0", 0, "", "").Host(), "0",
			"mlx5_0, the nearest NIC, is far (PHB, 48 GB/s), so its traffic bounces through host memory: no GPU that could " +
				"stage it is near enough to that NIC (PXB)"},
	} {
		plan, err := Make(tt.host, Config{})
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
	mig := topotest.TwoSockets().Host()
	mig.GPUs[1].MIG = true
	none := topotest.Build(1).GPU(0, "", "").GPU(0, "", "").Host()
	lanes := func(a ...Assignment) Config { return Config{Lanes: a} }
	zero := func(keys ...string) []string { return append([]string{`plan.lane for GPU "0"`}, keys...) }
	for _, tt := range []struct {
		name   string
		host   *topo.Host
		config Config
		keys   []string // of nested KeyErrors
		cause  error    // nil for an unknown GPU
		gpu    string   // the unknown GPU
	}{
		{"a limit that is no path to a NIC", none, Config{GDR: GDRPolicy{MaxPath: topo.NVL}}, []string{"gdr.max_path"},
			&valueError{topo.NVL, "must be a path from a GPU to a NIC: PIX PXB P2C PHB NODE SYS"}, ""},
		{"an unknown GPU", none, lanes(Assignment{GPU: "9", Servers: []string{"0"}}), []string{`plan.lane for GPU "9"`},
			nil, "9"},
		{"an unknown server", none, lanes(Assignment{GPU: "0", Servers: []string{"9"}}), zero("servers"), nil, "9"},
		{"a GPU that serves itself", none, lanes(Assignment{GPU: "0", Servers: []string{"0000:01:00.0"}}), zero("servers"),
			errServesSelf, ""},
		{"a server named twice", topotest.TwoSockets().Host(),
			lanes(Assignment{GPU: "2", Servers: []string{"0", "0000:01:00.0"}}),
			[]string{`plan.lane for GPU "2"`, "servers"}, &twiceError{gpu: 0}, ""},
		{"a GPU assigned twice", none, lanes(
			Assignment{GPU: "0", Servers: []string{"1"}, NICs: []string{"a"}},
			Assignment{GPU: "0000:01:00.0", NICs: []string{"a"}}), []string{`plan.lane for GPU "0000:01:00.0"`},
			&twiceError{0, true}, ""},
		{"an empty assignment", none, lanes(Assignment{GPU: "0"}), zero(), errNoMember, ""},
		{"no NIC to be found", none, lanes(Assignment{GPU: "0", Servers: []string{"1"}}), zero(), errNoActiveNIC, ""},
		{"a NIC named twice", none, lanes(Assignment{GPU: "0", NICs: []string{"a", "a"}}), zero(`nics: "a"`), errNICName,
			""},
		{"a NIC without a name", none, lanes(Assignment{GPU: "0", NICs: []string{""}}), zero(`nics: ""`), errNICName, ""},
		{"a GPU in MIG mode", mig, lanes(Assignment{GPU: "1", NICs: []string{"mlx5_0"}}),
			[]string{`plan.lane for GPU "1"`}, &RefusedError{"GPU 1", mig.GPUs[1].Refusal()}, ""},
		{"a server in MIG mode", mig, lanes(Assignment{GPU: "2", Servers: []string{"1"}}),
			[]string{`plan.lane for GPU "2"`, "servers"}, &RefusedError{"GPU 1", mig.GPUs[1].Refusal()}, ""},
	} {
		_, err := Make(tt.host, tt.config)
		if diff := cmp.Diff(tt.keys, keysOf(err)); diff != "" {
			t.Errorf("%s: error %v, keys (-want +got):\n%s", tt.name, err, diff)
		}
		unknown, _ := errors.AsType[*topo.UnknownGPUError](err)
		if tt.cause != nil && !testutil.HasError(err, tt.cause) ||
			tt.cause == nil && (unknown == nil || unknown.Name != tt.gpu) {
			t.Errorf("%s: error %v; want the cause %v, or the unknown GPU %q", tt.name, err, tt.cause, tt.gpu)
		}
	}
}

func TestPlanOfHostWithoutGPUNotesInactiveNIC(t *testing.T) {
	h := topotest.Build(1).NIC("mlx5_0", 0, "", "", topotest.Down(100)).Host()
	h.Notes = []string{"a note of the reader"}
	plan, err := Make(h, Config{})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"a note of the reader",
		"this host has no GPU, so the plan has no lane",
		"NIC mlx5_0 has no active port (port 1 DOWN) and carries only lanes of the configuration",
	}
	if diff := cmp.Diff(want, plan.Notes); diff != "" {
		t.Error(diff)
	}
}

// An idle NIC is a NIC that a usable GPU could use.
func TestIdleNICWithEveryGPURefusedGetsNoNote(t *testing.T) {
	h := topotest.TwoSockets().Host()
	for i := range h.GPUs {
		h.GPUs[i].MIG = true
	}
	plan := planOf(t, 0, h, Config{})
	want := []string{"no GPU of this host can have a lane"}
	if diff := cmp.Diff(want, plan.Notes); diff != "" {
		t.Error(diff)
	}
}

// The GPUDirect RDMA fields of a file change no role. The fields change only the NCCL column of the
// estimate, and a note of the plan reports the fields.
func TestPlanOfFileWithoutGPUDirectKeepsRoles(t *testing.T) {
	off := false
	on, without := topotest.TwoSockets().Host(), topotest.TwoSockets().Host()
	for i := range without.NICs {
		without.NICs[i].GDR = &off
	}
	before, e := estimate(t, on, Config{})
	after, eWithout := estimate(t, without, Config{})
	if diff := cmp.Diff(short(before), short(after)); diff != "" {
		t.Error(diff)
	}
	if notes := strings.Join(after.Notes, "\n"); !strings.Contains(notes, "the file reports GPUDirect RDMA as off") ||
		strings.Contains(strings.Join(before.Notes, "\n"), "by the file") {
		t.Errorf("notes %q", after.Notes)
	}
	for i, g := range eWithout.GPUs {
		if g.NCCL != g.HostMemory || g.HostMemory != e.GPUs[i].HostMemory || g.Relay != e.GPUs[i].Relay {
			t.Errorf("%+v; with GPUDirect %+v", g, e.GPUs[i])
		}
	}
}

func TestFileOfTwoHostsNeedsHostNames(t *testing.T) {
	nvlink := `<nvlink target="0000:c1:00.0" count="18" tclass="0x068000"/>`
	host := func(hash string) string {
		inner := topotest.GPUXML("0000:02:00.0", 0, nvlink) + topotest.NetXML("0000:03:00.0", "mlx5_0")
		return strings.Replace(topotest.CPUXML(0, inner), "<cpu", `<cpu host_hash="`+hash+`"`, 1)
	}
	h := ncclfile.ReadXML(t, topotest.System(host("0xa5f31daa95182da8"), host("0x2")))
	if len(h.GPUs) != 2 || h.GPUs[0].Host != "0xa5f31daa95182da8" || h.GPUs[1].Host != "0x2" || h.GPUs[1].Index != 0 ||
		h.NICs[1].Host != "0x2" || h.CPUs[1].Host != "0x2" {
		t.Fatalf("%+v", h)
	}
	for _, p := range graph.All(h, topo.RulesNCCL) {
		switch {
		case p.FromHost == "" || p.ToHost == "":
			t.Errorf("pair without hosts: %+v", p)
		case p.FromHost == p.ToHost && p.Type != topo.PHB:
			t.Errorf("pair on a host: %+v; want PHB", p)
		case p.FromHost != p.ToHost && p.From == p.To && p.From == "0000:02:00.0" && p.Type != topo.NVL:
			t.Errorf("pair of GPUs on two hosts: %+v; want NVL through NVSwitches", p)
		case p.FromHost != p.ToHost && p.To == "mlx5_0" && p.Type != topo.DIS:
			t.Errorf("GPU and NIC on two hosts: %+v; want DIS", p)
		}
	}
	_, err := graph.Between(h, "0000:02:00.0", "0x2/mlx5_0")
	if !testutil.HasError(err, &graph.DeviceError{Name: "0000:02:00.0", Hosts: []string{"0xa5f31daa95182da8", "0x2"}}) {
		t.Errorf("ambiguous name: error %v, want the host names", err)
	}
	if got, err := graph.Between(h, "0x2/0000:02:00.0", "0x2/mlx5_0"); err != nil || got.Type != topo.PHB {
		t.Errorf("%v, %v", got, err)
	}
	var several *SeveralHostsError
	if _, err := Make(h, Config{}); !errors.As(err, &several) || !slices.Equal(several.Hosts, h.Hosts()) {
		t.Errorf("plan of two hosts: error %v, want the hosts", err)
	}
	// A file with a single hash has a single host, without a name.
	if one := ncclfile.ReadXML(t, topotest.System(host("0x2"))); one.GPUs[0].Host != "" {
		t.Errorf("GPU of a single host: %+v; want no host name", one.GPUs)
	}
}

func TestUnusableDevicesOfFileKeepReason(t *testing.T) {
	other := func(busID, class, vendor, device string) string {
		return fmt.Sprintf(`<pci busid="%s" class="%s" vendor="%s" device="%s" link_speed="16 GT/s" link_width="16"/>`, busID,
			class, vendor, device)
	}
	h := ncclfile.ReadXML(t, topotest.System(topotest.CPUXML(0,
		topotest.Bridge("0000:01:00.0", "0x15b3 0x1979 0x0000 0x0000",
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
	plan, err := Make(h, Config{})
	if err != nil {
		t.Fatal(err)
	}
	for i, role := range []string{RoleNear, RoleRefused, RoleRefused} {
		if l := plan.Lanes[i]; l.Role != role || role == RoleRefused && !strings.Contains(l.Reason, "GPU of") {
			t.Errorf("lane %d: %+v; want %s", i, l, role)
		}
	}
	if nics := plan.Lanes[0].NICs; len(nics) != 1 || nics[0] != "nic@0000:07:00.0" {
		t.Errorf("GPU 0 uses %v, want the eRDMA NIC", nics)
	}
}

func TestSoftwareRDMAWithoutOptionStaysUnused(t *testing.T) {
	h := &topo.Host{
		CPUs: []topo.CPU{{NUMA: 0}},
		GPUs: []topo.GPU{{BusID: "0000:01:00.0", Place: topo.Place{Link: 12}}},
		NICs: []topo.NIC{{Name: "rxe0", Software: true, Place: topo.Place{Link: bandwidths.Local}}},
	}
	for _, software := range []bool{false, true} {
		plan, err := Make(h, Config{Software: software})
		if err != nil {
			t.Fatal(err)
		}
		l := plan.Lanes[0]
		if used := len(l.NICs) == 1; used != software || !software && !strings.Contains(l.Reason, "--software") {
			t.Errorf("software %t: %+v", software, l)
		}
	}
}

func TestOnlyOfFileWithTwoHostsReturnsNamedHost(t *testing.T) {
	host := func(hash string, gpus int) (s string) {
		var inner string
		for i := range gpus {
			inner += topotest.GPUXML(fmt.Sprintf("0000:%02x:00.0", 2+i), i, "")
		}
		return strings.Replace(topotest.CPUXML(0, topotest.Bridge("0000:01:00.0", "0x10b5 0x9765 0x10b5 0x9765",
			inner+topotest.NetXML("0000:0f:00.0", "mlx5_0"))), "<cpu", `<cpu host_hash="`+hash+`"`, 1)
	}
	h := ncclfile.ReadXML(t, topotest.System(host("0xA5", 1), host("0x2", 2)))
	for name, gpus := range map[string]int{"0": 1, "1": 2, "0xa5": 1, "0xA5": 1, "0x2": 2} {
		one, err := h.Only(name)
		if err != nil {
			t.Error(err)
			continue
		}
		plan, err := Make(one, Config{})
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
		one, err := h.Only(name)
		if one != nil || !testutil.HasError(err, &topo.UnknownHostError{Name: name, Hosts: []string{"0xa5", "0x2"}}) {
			t.Errorf("host %q: %v", name, err)
		}
	}
	if h.GPUs[0].Host != "0xa5" {
		t.Errorf("Only changed the hosts of the file: %+v", h.GPUs)
	}
	alone := ncclfile.ReadXML(t, topotest.System(host("0x2", 1)))
	if one, err := alone.Only("0"); err != nil || one != alone {
		t.Error(err)
	}
	if _, err := alone.Only("1"); !testutil.HasError(err, &topo.UnknownHostError{Name: "1"}) {
		t.Error(err)
	}
}
