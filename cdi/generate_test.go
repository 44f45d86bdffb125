package cdi

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// testPlan has a near GPU, a far GPU that the near GPU serves, and a refused GPU.
func testPlan() *planner.Plan {
	return &planner.Plan{
		Version: planner.Version,
		GPUs: []topo.GPU{
			{Index: 0, UUID: "GPU-00000000-0000-0000-0000-000000000000", BusID: "0000:17:00.0", Minor: 0},
			{Index: 1, UUID: "GPU-11111111-1111-1111-1111-111111111111", BusID: "0000:2a:00.0", Minor: 5},
			{Index: 2, UUID: "GPU-22222222-2222-2222-2222-222222222222", BusID: "0000:3b:00.0", Minor: 2, MIG: true},
		},
		NICs: []topo.NIC{{Name: "mlx5_0", BusID: "0000:18:00.0", Uverbs: "uverbs3"}},
		Lanes: []planner.Lane{
			{GPU: "0000:17:00.0", Role: planner.RoleNear, NICs: []string{"mlx5_0"}},
			{
				GPU:     "0000:2a:00.0",
				Role:    planner.RoleFar,
				Relay:   true,
				Servers: []string{"0000:17:00.0"},
				NICs:    []string{"mlx5_0"},
			},
			{GPU: "0000:3b:00.0", Role: planner.RoleRefused, Reason: "MIG is on"},
		},
	}
}

// testOptions refer to a test root whose /dev has the named nodes. The nodes are FIFOs: any user
// may make a FIFO, and CDI accepts FIFOs.
func testOptions(t *testing.T, nodes ...string) Options {
	t.Helper()
	root := t.TempDir()
	for _, node := range nodes {
		makeFIFO(t, filepath.Join(root, "dev", node))
	}
	return Options{
		Layout: paths.New("/"), HookPath: "/usr/libexec/peerlane/peerlane-hook", DevRoot: root,
		Proc: procfs(t, "6.12.0-amd64\n", openModule), LibraryDir: filepath.Join(root, "libraries"),
	}
}

var allNodes = []string{
	"nvidiactl",
	"nvidia-uvm",
	"nvidia-uvm-tools",
	"nvidia0",
	"nvidia5",
	"infiniband/uverbs3",
	"infiniband/rdma_cm",
}

// The files of testdata are the files in /etc/cdi of a host with testPlan.
func TestSpecificationsOfPlanEqualGolden(t *testing.T) {
	o := testOptions(t, allNodes...)
	list, err := Generate(testPlan(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != 3 {
		t.Fatalf("%d specifications, want those of lane, gpu and nic", len(list))
	}
	for _, spec := range list {
		want, err := os.ReadFile(filepath.Join("testdata", FileName(spec.Kind)))
		if err != nil {
			t.Fatal(err)
		}
		var got bytes.Buffer
		if err := encode(&got, spec); err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(got.String(), o.DevRoot, "ROOT")
		if diff := cmp.Diff(string(want), text); diff != "" {
			t.Errorf("%s (-testdata +generated):\n%s", FileName(spec.Kind), diff)
		}
	}
}

// Podman 4.3 reads CDI 0.5.0 at most, and reports a newer file only as "unresolvable".
func TestSpecificationsNeedCDI050(t *testing.T) {
	for _, devRoot := range []string{"", "/"} {
		o := testOptions(t)
		o.DevRoot = devRoot
		list, err := Generate(testPlan(), o)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range list {
			if spec.Version != "0.5.0" {
				t.Errorf("%s is of version %s", spec.Kind, spec.Version)
			}
			if err := specs.ValidateVersion(spec); err != nil {
				t.Errorf("%s: %v", spec.Kind, err)
			}
		}
	}
}

func TestNodesOfTheHostItselfNeedNoHostPath(t *testing.T) {
	o := testOptions(t)
	o.DevRoot = "/"
	list, err := Generate(testPlan(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range list {
		for _, d := range spec.Devices {
			for _, n := range d.ContainerEdits.DeviceNodes {
				if n.HostPath != "" {
					t.Errorf("%s=%s: %s has host path %s", spec.Kind, d.Name, n.Path, n.HostPath)
				}
			}
		}
	}
}

// An engine starts no container with a device whose node the host lacks.
func TestNodesThatAHostMayLackAreLeftOut(t *testing.T) {
	list, err := Generate(
		testPlan(),
		testOptions(t, "nvidiactl", "nvidia-uvm", "nvidia0", "nvidia5", "infiniband/uverbs3"),
	)
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := encode(&text, list...); err != nil {
		t.Fatal(err)
	}
	for _, absent := range []string{"nvidia-uvm-tools", "rdma_cm"} {
		if strings.Contains(text.String(), absent) {
			t.Errorf("%s is named, and the host has none", absent)
		}
	}
}

func TestHookArgumentsNameOtherRoot(t *testing.T) {
	o := testOptions(t)
	o.Layout = paths.New("/tmp/demo")
	list, err := Generate(testPlan(), o)
	if err != nil {
		t.Fatal(err)
	}
	lane := list[0]
	want := []string{
		"peerlane-hook",
		"create",
		"--root",
		"/tmp/demo",
		"--lane",
		"GPU-00000000-0000-0000-0000-000000000000@0000:17:00.0",
	}
	if diff := cmp.Diff(want, lane.Devices[0].ContainerEdits.Hooks[0].Args); diff != "" {
		t.Errorf("create (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"peerlane-hook", "remove", "--root", "/tmp/demo"},
		lane.ContainerEdits.Hooks[0].Args); diff != "" {
		t.Errorf("remove (-want +got):\n%s", diff)
	}
	if got := lane.ContainerEdits.Mounts[0].HostPath; got != "/tmp/demo/var/lib/peerlane/anchor" {
		t.Errorf("the anchor is %s", got)
	}
}

func TestGenerateTenancyLimitsDevices(t *testing.T) {
	for _, test := range []struct {
		name string
		edit func(*planner.Plan, *Options)
		// want maps kinds to device names, without all.
		want map[string][]string
		// notes are substrings.
		notes []string
	}{
		{
			name: "one tenant",
			edit: func(*planner.Plan, *Options) {},
			want: map[string][]string{
				KindLane: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
				KindGPU: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
				KindNIC: {"mlx5_0", "0000:18:00.0"},
			},
			notes: []string{`tenancy = "multi" in /etc/peerlane/config.toml`, "peerlane.dev/lane=2 is not offered: MIG is on",
				"peerlane.dev/gpu=2 is not offered: MIG is on"},
		},
		{
			name: "several tenants get no device nodes",
			edit: func(_ *planner.Plan, o *Options) { o.Tenancy = config.TenancyMulti },
			want: map[string][]string{
				KindLane: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
			},
			notes: []string{"peerlane.dev/lane=2 is not offered: MIG is on"},
		},
		{
			name: "a server GPU whose node is unknown takes its clients' gpu= with it",
			edit: func(p *planner.Plan, _ *Options) { p.GPUs[0].Minor = -1 },
			want: map[string][]string{
				KindLane: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
				KindNIC: {"mlx5_0", "0000:18:00.0"},
			},
			notes: []string{"lane=2", "gpu=0 is not offered: the device node of GPU 0000:17:00.0",
				"gpu=1 is not offered: the device node of GPU 0000:17:00.0", "gpu=2"},
		},
		{
			name: "without a driver there is no UUID to name a GPU by",
			edit: func(p *planner.Plan, _ *Options) { p.GPUs[1].UUID = "" },
			want: map[string][]string{
				KindLane: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1", "0000:2a:00.0"},
				KindGPU:  {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0"},
				KindNIC:  {"mlx5_0", "0000:18:00.0"},
			},
			notes: []string{"server GPUs", "lane=2", "gpu=1 is not offered: the UUID of GPU 0000:2a:00.0 is unknown", "gpu=2"},
		},
		{
			name: "a NIC of one PCI address with another, without a node, without RDMA, with an odd name",
			edit: func(p *planner.Plan, _ *Options) {
				p.NICs = append(p.NICs, topo.NIC{Name: "mlx5_1", BusID: p.NICs[0].BusID, Uverbs: "uverbs4"},
					topo.NIC{Name: "mlx5_2"},
					topo.NIC{Name: "eth0", Ethernet: true}, topo.NIC{Name: "all", Uverbs: "uverbs5"},
					topo.NIC{Name: "a b", Uverbs: "uverbs6"},
					topo.NIC{Name: "mlx5_3", Uverbs: "uverbs7", Management: true, Reason: "it is a management bridge of NVSwitches"})
			},
			want: map[string][]string{
				KindLane: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
				KindGPU: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
				KindNIC: {"mlx5_0", "mlx5_1"},
			},
			notes: []string{"server GPUs", "lane=2", "gpu=2", "nic=mlx5_2 is not offered: the kernel has no device node for it",
				"nic=all is not offered", "nic=a b is not offered", "nic=mlx5_3 is not offered: it is a management bridge"},
		},
		{
			name: "GPU memory that no NIC reaches",
			edit: func(_ *planner.Plan, o *Options) { o.Proc = procfs(t, "", "") },
			want: map[string][]string{
				KindLane: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
				KindGPU: {"0", "GPU-00000000-0000-0000-0000-000000000000", "0000:17:00.0", "1",
					"GPU-11111111-1111-1111-1111-111111111111", "0000:2a:00.0"},
				KindNIC: {"mlx5_0", "0000:18:00.0"},
			},
			notes: []string{"server GPUs", "PEERLANE_REGISTRATION=bounce: no NIC can reach GPU memory on this host", "lane=2",
				"gpu=2"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			plan, o := testPlan(), testOptions(t)
			test.edit(plan, &o)
			list, err := Generate(plan, o)
			if err != nil {
				t.Fatal(err)
			}
			got := map[string][]string{}
			for _, spec := range list {
				last := len(spec.Devices) - 1
				if spec.Kind == KindLane { // with any tenancy and any number of lanes
					if edits := spec.Devices[last].ContainerEdits; spec.Devices[last].Name != auto || len(edits.Hooks) != 1 ||
						!slices.Contains(edits.Hooks[0].Args, "--auto") ||
						slices.Contains(edits.Hooks[0].Args, "--lane") {
						t.Errorf("the device after all lanes is %+v", spec.Devices[last])
					}
					last--
				}
				if spec.Devices[last].Name != all {
					t.Errorf("the last device of %s is %s", spec.Kind, spec.Devices[last].Name)
				}
				for _, d := range spec.Devices[:last] {
					got[spec.Kind] = append(got[spec.Kind], d.Name)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			notes, err := Notes(plan, o)
			if err != nil {
				t.Fatal(err)
			}
			if len(notes) != len(test.notes) {
				t.Fatalf("%d notes, want %d: %q", len(notes), len(test.notes), notes)
			}
			for i, want := range test.notes {
				if !strings.Contains(notes[i], want) {
					t.Errorf("note %q lacks %q", notes[i], want)
				}
			}
		})
	}
}

func TestGenerateUnusablePlanFails(t *testing.T) {
	for _, test := range []struct {
		name    string
		edit    func(*planner.Plan, *Options)
		errorIs func(error) bool
	}{
		{"no GPU", func(p *planner.Plan, _ *Options) { *p = planner.Plan{} },
			func(err error) bool { return errors.Is(err, errNoGPU) }},
		{"every GPU refused", func(p *planner.Plan, _ *Options) { p.Lanes = p.Lanes[2:] }, func(err error) bool {
			e, ok := errors.AsType[*noLaneError](err)
			return ok && len(e.missing) == 1 && strings.HasPrefix(e.missing[0], "peerlane.dev/lane=2 is not offered: MIG is on")
		}},
		{"a hook that is looked up", func(_ *planner.Plan, o *Options) { o.HookPath = "peerlane-hook" },
			func(err error) bool {
				e, ok := errors.AsType[*optionError](err)
				return ok && e.option == "hook path" && e.value == "peerlane-hook"
			}},
		{"an unknown tenancy", func(_ *planner.Plan, o *Options) { o.Tenancy = "double" }, func(err error) bool {
			e, ok := errors.AsType[*optionError](err)
			return ok && e.option == "tenancy" && e.value == "double"
		}},
		{"a server that is not listed", func(p *planner.Plan, _ *Options) { p.GPUs = p.GPUs[1:] }, func(err error) bool {
			e, ok := errors.AsType[*unlistedGPUError](err)
			return ok && e.gpu == "0000:17:00.0"
		}},
		{"one UUID twice", func(p *planner.Plan, _ *Options) { p.GPUs[1].UUID = p.GPUs[0].UUID }, func(err error) bool {
			e, ok := errors.AsType[*deviceNameError](err)
			return ok && e.name == testPlan().GPUs[0].UUID && e.err == nil
		}},
		{"a name that CDI does not allow", func(p *planner.Plan, _ *Options) { p.GPUs[1].UUID = "GPU=1" },
			func(err error) bool {
				e, ok := errors.AsType[*deviceNameError](err)
				return ok && e.name == "GPU=1" && e.err != nil
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			plan, o := testPlan(), testOptions(t)
			test.edit(plan, &o)
			list, err := Generate(plan, o)
			if !test.errorIs(err) || list != nil {
				t.Errorf("Generate = %d specifications and error %v", len(list), err)
			}
		})
	}
}

func TestGroupsAreDevices(t *testing.T) {
	plan := testPlan()
	plan.Groups = []planner.Group{
		{Name: "half0", GPUs: []string{"0000:17:00.0", "0000:2a:00.0"}},
		{Name: "rest", GPUs: []string{"0000:3b:00.0"}},
	}
	o := testOptions(t, allNodes...)
	list, err := Generate(plan, o)
	if err != nil {
		t.Fatal(err)
	}
	for _, spec := range list[:2] { // groups consist of GPUs
		found := map[string]specs.Device{}
		for _, d := range spec.Devices {
			found[d.Name] = d
		}
		// The group contains every offered lane.
		if diff := cmp.Diff(found[all].ContainerEdits, found["half0"].ContainerEdits); diff != "" ||
			len(found["half0"].ContainerEdits.Hooks) == 0 {
			t.Errorf("%s=half0 (-all +half0): %s", spec.Kind, diff)
		}
		if _, ok := found["rest"]; ok {
			t.Errorf("%s=rest is offered, and its GPU is refused", spec.Kind)
		}
	}
	notes, err := Notes(plan, o)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(strings.Join(notes, "\n"), KindLane+"=rest is not offered") {
		t.Errorf("notes %q", notes)
	}
	plan.Groups = []planner.Group{{Name: "1", GPUs: []string{"0000:17:00.0"}}}
	_, err = Generate(plan, o)
	if e, ok := errors.AsType[*deviceNameError](err); !ok || e.name != "1" || e.err != nil {
		t.Errorf("a group that is named as a GPU: %v", err)
	}
}
