package planner

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/reader"
)

func bytesOf(n uint64) *uint64 { return &n }

func TestConfigurationShapesThePlan(t *testing.T) {
	slots := StagingConfig{Slots: 8, SlotBytes: 32 << 20}
	limited := func(limit *uint64, gpus map[string]uint64) StagingConfig {
		c := slots
		c.Limit, c.GPUs = limit, gpus
		return c
	}
	usual := []string{
		"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
		"far by 0 to mlx5_0, rail 0, NODE", "far by 1 to mlx5_0, rail 0, NODE",
		"near to mlx5_1, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
		"far by 4 to mlx5_1, rail 1, NODE", "far by 5 to mlx5_1, rail 1, NODE",
	}
	// but returns the usual plan, with other lanes at the given indices.
	but := func(lanes map[int]string) []string {
		want := append([]string{}, usual...)
		for g, lane := range lanes {
			want[g] = lane
		}
		return want
	}
	for _, tt := range []struct {
		name   string
		config Config
		want   []string
	}{
		{"none", Config{}, usual},
		{"an excluded GPU gets no lane and serves nobody",
			Config{Exclude: Exclude{GPUs: []string{"GPU-00000000-0000-0000-0000-000000000000"}}},
			but(map[int]string{0: "refused to , rail -1, DIS", 2: "far by 1 to mlx5_0, rail 0, NODE",
				6: "far by 4,1 to mlx5_1,mlx5_0, rail 1, NODE", 7: "far by 4 to mlx5_1, rail 1, NODE"})},
		{"an excluded NIC carries nothing", Config{Exclude: Exclude{NICs: []string{"mlx5_1"}}},
			but(map[int]string{2: "far by 1 to mlx5_0, rail 0, NODE", 3: "far by 0 to mlx5_0, rail 0, NODE",
				4: "far by 1 to mlx5_0, rail 0, SYS", 5: "far by 0 to mlx5_0, rail 0, SYS", 6: "far by 1 to mlx5_0, rail 0, SYS",
				7: "far by 0 to mlx5_0, rail 0, SYS"})},
		{"a GPU is kept from a NIC", Config{Exclude: Exclude{Pairs: [][]string{{"2", "mlx5_0"}}}},
			but(map[int]string{2: "far by 4 to mlx5_1, rail 1, SYS", 6: "far by 0 to mlx5_0, rail 0, SYS"})},
		// A lane staged only on GPU 0 would make the link of GPU 0 the busiest.
		{"GPUs are kept from serving each other", Config{Exclude: Exclude{Pairs: [][]string{{"1", "2"}}}},
			but(map[int]string{})},
		{"whichever is named first", Config{Exclude: Exclude{Pairs: [][]string{{"2", "1"}, {"6", "mlx5_0"}}}},
			but(map[int]string{})},
		{"rails", Config{Rails: map[string]int{"mlx5_0": 5, "mlx5_1": 2}}, func() []string {
			want := []string{}
			for _, lane := range usual {
				want = append(want, strings.NewReplacer("rail 0", "rail 5", "rail 1", "rail 2").Replace(lane))
			}
			return want
		}()},
		{"a limit without room for a lane's slots", Config{Staging: limited(nil, map[string]uint64{"0": 255 << 20})},
			but(map[int]string{2: "far by 1 to mlx5_0, rail 0, NODE", 7: "far by 4 to mlx5_1, rail 1, NODE"})},
		{"a limit that has it", Config{Staging: limited(bytesOf(256<<20), nil)},
			but(map[int]string{2: "far by 0,1 to mlx5_0, rail 0, NODE", 3: "far by 0,1 to mlx5_0, rail 0, NODE",
				6: "far by 4,5 to mlx5_1, rail 1, NODE", 7: "far by 4,5 to mlx5_1, rail 1, NODE"})},
		{"a limit of one GPU, which leaves the other more than its own",
			Config{Staging: limited(bytesOf(256<<20), map[string]uint64{"5": 0, "4": 512 << 20})},
			but(map[int]string{2: "far by 0,1 to mlx5_0, rail 0, NODE", 3: "far by 0,1 to mlx5_0, rail 0, NODE",
				7: "far by 4 to mlx5_1, rail 1, NODE"})},
		{"a limit for all of nothing", Config{Staging: limited(bytesOf(0), nil)},
			but(map[int]string{
				2: "far bouncing to mlx5_0, rail 0, NODE", 3: "far bouncing to mlx5_0, rail 0, NODE",
				6: "far bouncing to mlx5_1, rail 1, NODE", 7: "far bouncing to mlx5_1, rail 1, NODE"})},
		{"a pin to bounce, and one that is staged by whoever is near", Config{Lanes: []Assignment{
			{GPU: "0", Kind: KindBounce, NICs: []string{"mlx5_0"}}, {GPU: "2", Kind: KindStaged, NICs: []string{"mlx5_1"}}}},
			but(map[int]string{0: "near bouncing to mlx5_0, rail 0, PIX", 2: "far by 4,5 to mlx5_1, rail 1, SYS",
				3: "far by 0 to mlx5_0, rail 0, NODE", 6: "far by 1 to mlx5_0, rail 0, SYS",
				7: "far by 4 to mlx5_1, rail 1, NODE"})},
		{"PHB alone, for one NIC", Config{GDR: GDRPolicy{NICs: map[string]topo.PathType{"mlx5_1": topo.NODE}}},
			but(map[int]string{6: "near by 4 to mlx5_1, rail 1, NODE", 7: "near to mlx5_1, rail 1, NODE"})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, err := Make(topotest.TwoSockets().Nvswitches().Host(), tt.config)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, short(plan)); diff != "" {
				t.Error(diff)
			}
			if t.Failed() {
				for _, l := range plan.Lanes {
					t.Log(l.GPU, l.Reason)
				}
			}
		})
	}
}

func TestConfigurationOfMissingDevicesIsRefused(t *testing.T) {
	for _, tt := range []struct {
		config Config
		keys   []string // of nested KeyErrors
		cause  error    // nil for an unknown GPU
		gpu    string   // the unknown GPU
	}{
		{Config{GDR: GDRPolicy{NICs: map[string]topo.PathType{"mlx5_7": topo.PHB}}}, []string{"gdr.nics.mlx5_7"},
			&unknownNICError{name: "mlx5_7", known: "mlx5_0, mlx5_1"}, ""},
		{Config{GDR: GDRPolicy{NICs: map[string]topo.PathType{"mlx5_0": topo.PXN}}},
			[]string{"gdr.nics.mlx5_0", "a limit"},
			&valueError{topo.PXN, "must be a path from a GPU to a NIC: PIX PXB P2C PHB NODE SYS"}, ""},
		{Config{Exclude: Exclude{GPUs: []string{"8"}}}, []string{"plan.exclude.gpus"}, nil, "8"},
		{Config{Exclude: Exclude{NICs: []string{"eth0"}}}, []string{"plan.exclude.nics"},
			&unknownNICError{name: "eth0", known: "mlx5_0, mlx5_1"}, ""},
		{Config{Exclude: Exclude{Pairs: [][]string{{"0"}}}}, []string{`plan.exclude.pairs: ["0"]`}, errPairForm, ""},
		{Config{Exclude: Exclude{Pairs: [][]string{{"0", "eth0"}}}}, []string{`plan.exclude.pairs: ["0" "eth0"]`},
			&unknownNICError{"eth0", "mlx5_0, mlx5_1",
				&topo.UnknownGPUError{Name: "eth0", Known: topotest.TwoSockets().Host().GPUs}}, ""},
		{Config{Exclude: Exclude{Pairs: [][]string{{"0", "0000:01:00.0"}}}},
			[]string{`plan.exclude.pairs: ["0" "0000:01:00.0"]`}, errSameGPU, ""},
		{Config{Exclude: Exclude{Pairs: [][]string{{"mlx5_0", "0"}}}}, []string{`plan.exclude.pairs: ["mlx5_0" "0"]`}, nil,
			"mlx5_0"},
		{Config{Rails: map[string]int{"mlx5_0": -1}}, []string{"plan.rails.mlx5_0"},
			&valueError{-1, "must be 0 to 1023"}, ""},
		{Config{Staging: StagingConfig{GPUs: map[string]uint64{"9": 1}}}, []string{"staging.gpus"}, nil, "9"},
		{Config{Staging: StagingConfig{GPUs: map[string]uint64{"0": 1, "0000:01:00.0": 2}}}, []string{"staging.gpus"},
			&twiceError{gpu: 0}, ""},
		{Config{Groups: map[string][]string{"half": {"0", "9"}}}, []string{"groups.half"}, nil, "9"},
		{Config{Groups: map[string][]string{"half": {"0", "0"}}}, []string{"groups.half"}, &twiceError{gpu: 0}, ""},
		{Config{Groups: map[string][]string{"half": nil}}, []string{"groups.half"}, errEmptyGroup, ""},
		{Config{Exclude: Exclude{GPUs: []string{"1"}}, Groups: map[string][]string{"half": {"0", "1"}}},
			[]string{"groups.half"}, &RefusedError{"GPU 1", "configuration excludes it (plan.exclude.gpus)"}, ""},
		{Config{Lanes: []Assignment{{GPU: "0", Kind: "relay", NICs: []string{"a"}}}},
			[]string{`plan.lane for GPU "0"`, "kind"}, &valueError{"relay", "must be direct, staged or bounce"}, ""},
		{Config{Lanes: []Assignment{{GPU: "0", Kind: KindDirect, Servers: []string{"1"}}}},
			[]string{`plan.lane for GPU "0"`, "kind"}, &valueError{"direct", "does not allow servers"}, ""},
		{Config{Lanes: []Assignment{{GPU: "0", Kind: KindStaged, NICs: []string{"emulated0"}}}},
			[]string{`plan.lane for GPU "0"`}, &noServerError{"emulated0"}, ""},
	} {
		_, err := Make(topotest.TwoSockets().Host(), tt.config)
		if diff := cmp.Diff(tt.keys, keysOf(err)); diff != "" {
			t.Errorf("%v: keys (-want +got):\n%s", err, diff)
		}
		unknown, _ := errors.AsType[*topo.UnknownGPUError](err)
		if tt.cause != nil && !testutil.HasError(err, tt.cause) ||
			tt.cause == nil && (unknown == nil || unknown.Name != tt.gpu) {
			t.Errorf("%v; want the cause %v, or the unknown GPU %q", err, tt.cause, tt.gpu)
		}
	}
}

// keysOf returns the keys of nested KeyErrors, the outermost first.
func keysOf(err error) (keys []string) {
	for {
		e, ok := errors.AsType[*keyError](err)
		if !ok {
			return keys
		}
		keys, err = append(keys, e.Key), e.Err
	}
}

func TestGroupsAndStagingAreInThePlan(t *testing.T) {
	plan, err := Make(topotest.TwoSockets().Host(), Config{
		Groups:  map[string][]string{"b": {"7", "0000:05:00.0"}, "a": {"1", "0"}},
		Staging: StagingConfig{Slots: 3, SlotBytes: 1 << 20, Limit: bytesOf(1 << 30), GPUs: map[string]uint64{"5": 8 << 20}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Group{{"a", []string{topotest.Bus(0), topotest.Bus(1)}},
		{"b", []string{topotest.Bus(4), topotest.Bus(7)}}}, plan.Groups); diff != "" {
		t.Error(diff)
	}
	// Three slots on two servers need two slots per server, in both directions.
	var want []Staging
	for _, g := range []int{0, 1, 4, 5} {
		s := Staging{GPU: topotest.Bus(g), PerContainer: 4 << 20, Lanes: 2, All: 8 << 20, Limit: bytesOf(1 << 30)}
		if g == 5 {
			s.Limit = bytesOf(8 << 20)
		}
		want = append(want, s)
	}
	if diff := cmp.Diff(want, plan.Staging); diff != "" {
		t.Error(diff)
	}
}

func TestGPUsOfOtherVendorsArePlannedOnlyWithAnyVendor(t *testing.T) {
	h := topotest.TwoSockets().Host()
	for i := range h.GPUs {
		h.GPUs[i].Vendor = "AMD"
	}
	h.GPUs[7].NoP2P = true
	h.Judge()
	plan, err := Make(h, Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range plan.Lanes {
		if l.Role != RoleRefused || !strings.Contains(l.Reason, "AMD") {
			t.Errorf("%+v", l)
		}
	}
	if plan, err = Make(h, Config{AnyVendor: true}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"near to mlx5_0, rail 0, PIX", "near to mlx5_0, rail 0, PIX",
		"far by 0,1 to mlx5_0, rail 0, NODE", "far bouncing to mlx5_0,mlx5_1, rail 0, NODE",
		"near to mlx5_1, rail 1, PIX", "near to mlx5_1, rail 1, PIX",
		"far by 4,5 to mlx5_1, rail 1, NODE", "refused to , rail -1, DIS",
	}
	if diff := cmp.Diff(want, short(plan)); diff != "" {
		t.Error(diff)
	}
	if _, err := plan.Estimate(h); err != nil {
		t.Error(err)
	}
}

func TestExplanationNamesPathsOfPlan(t *testing.T) {
	h := topotest.Build(1).GPU(0, "pci0000:00", "").NIC("near", 0, "pci0000:40", "", topotest.Up(100)).Gen(24).Host()
	plan, err := Make(h, Config{GDR: GDRPolicy{MaxPath: topo.PHB}})
	if err != nil {
		t.Fatal(err)
	}
	sentences, err := plan.Explain(h, "0")
	if err != nil {
		t.Fatal(err)
	}
	// PHB would be near enough; gdr.max_path compares NODE.
	if all := strings.Join(sentences, "\n"); !strings.Contains(all, "(NODE, ") || strings.Contains(all, "(PHB, ") {
		t.Errorf("the lane's path is %v; Explain:\n%s", plan.Lanes[0].Path, all)
	}
}

func TestExplainReturnsReasonsOfLane(t *testing.T) {
	h := topotest.TwoSockets().NIC("mlx5_8", 0, "pci0000:10", "00aa:00:00.0", topotest.Down(400)).NIC("eth0", 0, "", "",
		topotest.Up(400)).NIC("mlx5_9", 7, "", "", topotest.Up(400)).Host()
	h.NICs[3].Ethernet = true
	h.GPUs[4].MIG = true
	plan, err := Make(h, Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		want []string
	}{
		{"gpu2", []string{
			"GPU 2 (0000:03:00.0) is far",
			"Without a relay it reaches mlx5_0 by the host bridges pci0000:20 and pci0000:10 of NUMA node 0 (NODE, 48 GB/s) " +
				"and mlx5_1 by the link ",
			"No path leads to mlx5_9.",
			"No lane can use eth0 (it does not support RDMA) and mlx5_8 (no port is active: port 1 DOWN).",
			"staged on GPUs 0 and 1, near that NIC",
			"The relay copies between it and GPUs 0 and 1 (NODE, 48 GB/s), and mlx5_0 reads and writes there (PIX, 48 GB/s)",
			"While all GPUs are busy it carries 13.71 GB/s in each direction, because the PCIe link of mlx5_0 (downwards) is " +
				"full; ",
			"Alone it carries 39.74 GB/s; with NCCL's defaults 32 GB/s",
			"It shares mlx5_0 with GPUs 0, 1 and 3.",
		}},
		{"0", []string{"GPU 0 (0000:01:00.0) is near: a NIC may read and write its memory directly.", "It serves GPU 2."}},
		{"GPU4", []string{"GPU 4 (0000:05:00.0) is refused, so it has no lane and serves no lane: MIG is on"}},
		{"0000:04:00.0", []string{"GPU 3 ", "1 of 2 parts through host memory over mlx5_0 (NODE, 48 GB/s)"}},
	} {
		sentences, err := plan.Explain(h, tt.name)
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Join(sentences, "\n")
		for _, want := range tt.want {
			if !strings.Contains(text, want) {
				t.Errorf("%s: %q is missing in\n%s", tt.name, want, text)
			}
		}
	}
	for _, name := range []string{"gpu9", "9", "gpu", "gpux", "", "gpu0000:01:00.0"} {
		if sentences, err := plan.Explain(h, name); err == nil {
			t.Errorf("%q: %q", name, sentences)
		}
	}
}

// Explanation and lane name the path over C2C.
func TestExplanationOverC2CNamesPathOfLane(t *testing.T) {
	h := topotest.Build(1).GPU(0, "pci0000:10", "").NIC("mlx5_0", 0, "pci0000:20", "", topotest.Up(400)).Host()
	h.GPUs[0].C2C = 360
	plan := planOf(t, 0, h, Config{})
	sentences, err := plan.Explain(h, "0")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(sentences, "\n")
	if plan.Lanes[0].Path != topo.P2C || strings.Count(text, "(P2C, ") < 2 || strings.Contains(text, "NODE") {
		t.Errorf("the lane's path is %v, and\n%s", plan.Lanes[0].Path, text)
	}
}

// A matrix has types of paths, and no links.
func TestExplanationOfMatrixNamesTypes(t *testing.T) {
	h, err := reader.SMI([]byte(topotest.SMIMatrix+topotest.SMILegend), "some.txt")
	if err != nil {
		t.Fatal(err)
	}
	sentences, err := planOf(t, 0, h, Config{}).Explain(h, "0")
	if err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(sentences, "\n"); strings.Contains(text, "according to the matrix") ||
		!strings.Contains(text, "it reaches mlx5_2 (SYS) and mlx5_10 (PIX).") {
		t.Error(text)
	}
}
