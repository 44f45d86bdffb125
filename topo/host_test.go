package topo

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/fault"
)

func TestPathTypesAreOrderedAndNamed(t *testing.T) {
	for a := LOC; a <= DIS; a++ {
		text, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		var back PathType
		if err := json.Unmarshal(text, &back); err != nil || back != a {
			t.Errorf("%v is written %s and read %v, %v", a, text, back, err)
		}
	}
	if got, err := ParsePathType("pxb"); err != nil || got != PXB {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := ParsePathType("NEAR"); err == nil || !strings.Contains(err.Error(), "PIX PXB") {
		t.Errorf("%v; want an error that lists the names", err)
	}
	if _, err := json.Marshal(DIS + 1); err == nil {
		t.Error("a path type without a name is written")
	}
	if !slices.IsSorted([]PathType{NVL, PIX, PXB, PHB, NODE, SYS, DIS}) {
		t.Error("a nearer path type is not smaller")
	}
}

func TestBandwidthOfPCIeLinks(t *testing.T) {
	for _, tt := range []struct {
		speed string
		width int
		want  float64 // GB/s, NCCL's
	}{
		{"2.5 GT/s PCIe", 1, 0.1875}, {"5.0 GT/s PCIe", 4, 1.5}, {"5 GT/s", 16, 6}, {"8.0 GT/s PCIe", 16, 12},
		{"16 GT/s", 8, 12}, {"32.0 GT/s PCIe", 16, 48}, {"64.0 GT/s PCIe", 16, 96},
		{"16.0 GT/s", 16, 12}, {"", 0, 12}, {"Unknown", 255, 191.25}, {"NaN GT/s", -1, 12}, {"-8 GT/s", 8, 6}, {"1e9 GT/s", 16, 12},
	} {
		if got := pcieBandwidth(tt.speed, tt.width); got != tt.want {
			t.Errorf("%q, %d lanes: %g GB/s, want %g", tt.speed, tt.width, got, tt.want)
		}
	}
}

func TestBandwidthBetweenSockets(t *testing.T) {
	for _, tt := range []struct {
		arch, vendor  string
		family, model int
		want          float64 // GB/s, NCCL's
	}{
		{"x86_64", "GenuineIntel", 6, 0x4f, 6}, {"x86_64", "GenuineIntel", 6, 85, 10}, {"x86_64", "GenuineIntel", 6, 143, 22},
		{"x86_64", "GenuineIntel", 6, 207, 40}, {"x86_64", "AuthenticAMD", 25, 1, 16}, {"ppc64", "", 0, 0, 32},
		{"arm64", "", 0, 0, 6}, {"", "", 0, 0, localBandwidth}, {"x86_64", "HygonGenuine", 24, 0, localBandwidth},
		{"x86_64", "CentaurHauls", 7, 0x5b, 9}, {"x86_64", "  Shanghai  ", 7, 0x3b, 6},
	} {
		if got := socketBandwidth(tt.arch, tt.vendor, tt.family, tt.model); got != tt.want {
			t.Errorf("%+v: %g GB/s", tt, got)
		}
	}
}

func TestParseBusID(t *testing.T) {
	for text, want := range map[string]string{
		"0000:17:00.0": "0000:17:00.0", "17:00.0": "0000:17:00.0", "00000000:AB:1C.7": "0000:ab:1c.7",
		"10000:e1:00.0": "10000:e1:00.0", "1:0.0": "0000:01:00.0", "0001:00:00.0": "0001:00:00.0",
		"": "", "0": "", "0000:17:00": "", "0000:17:00.8": "", "0000:17:00.0/..": "", "GPU-1": "", "123456789:00:00.0": "",
	} {
		got, err := ParseBusID(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

func TestNamesAreOrderedByTheirNumbers(t *testing.T) {
	names := []string{"mlx5_10", "mlx5_2", "erdma_0", "mlx5_bond_0", "eth", "mlx5_02", "99999999999999999999", "mlx5_1"}
	slices.SortFunc(names, compareNatural)
	want := []string{"99999999999999999999", "erdma_0", "eth", "mlx5_1", "mlx5_02", "mlx5_2", "mlx5_10", "mlx5_bond_0"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}

func TestGPUsAreFoundByIndexUUIDAndAddress(t *testing.T) {
	h := twoSockets().host()
	for _, name := range []string{"3", "GPU-00000000-0000-0000-0000-000000000003", "gpu-00000000-0000-0000-0000-000000000003", "0000:04:00.0", "04:00.0", "00000000:04:00.0"} {
		if g, err := h.FindGPU(name); err != nil || g.Index != 3 {
			t.Errorf("%s: GPU %d, %v", name, g.Index, err)
		}
	}
	h.GPUs[0].UUID = ""
	for _, name := range []string{"", "8", "-1", "GPU-", "0000:44:00.0"} {
		_, err := h.FindGPU(name)
		var unknown *UnknownGPUError
		if !errors.As(err, &unknown) || unknown.Name != name || !strings.Contains(err.Error(), "7 = 0000:08:00.0 = GPU-00000000") {
			t.Errorf("%q: %v; want an error that lists the GPUs", name, err)
		}
	}
	if _, err := (&Host{}).FindGPU("0"); err == nil || !strings.Contains(err.Error(), "no GPU") {
		t.Error(err)
	}
}

func TestPlanSurvivesItsFile(t *testing.T) {
	plan, err := MakePlan(twoSockets().nvswitches().host(), PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "plan.json")
	for range 2 { // the second time over the first
		if err := plan.Write(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(plan, got); diff != "" {
		t.Error(diff)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("%v, %v; want mode 0644", info.Mode(), err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("beside the plan something is left: %v, %v", entries, err)
	}
	for _, name := range []string{"7", "GPU-00000000-0000-0000-0000-000000000007", "0000:08:00.0"} {
		if l, err := got.Lane(name); err != nil || l.GPU != "0000:08:00.0" {
			t.Errorf("lane %s: %v, %v", name, l, err)
		}
	}
	if _, err := got.Lane("8"); err == nil {
		t.Error("there is a lane of a GPU that there is not")
	}
}

func TestPlanThatCannotBeWrittenLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "plan.json")
	if err := os.MkdirAll(filepath.Join(path, "in the way"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := (&Plan{}).Write(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("writing over a directory: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("something is left: %v, %v", entries, err)
	}
}

func TestBadPlanFileIsRefusedWithAReason(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plan.json")
	if _, err := ReadPlan(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for text, want := range map[string]string{
		``:               "unexpected end",
		`{"version":99}`: "version 99",
		`{"version":1,"lanes":"of another form"}`:                                                             "it is of version 1, and this program reads 2 and 3",
		`{"version":2,"gpus":[{"busid":"0000:01:00.0"}],"lanes":[{"gpu":"0000:01:00.0","kind":"staged"}]}`:    "kind is staged",
		`{"version":2,"lanes":[{"gpu":"0000:01:00.0"}]}`:                                                      "0000:01:00.0",
		`{"version":2,"gpus":[{"busid":"0000:01:00.0"}],"lanes":[{"gpu":"0000:01:00.0","relay":true}]}`:       "contradictory",
		`{"version":2,"gpus":[{"busid":"0000:01:00.0"}],"lanes":[{"gpu":"0000:01:00.0","servers":["x"]}]}`:    "GPU x",
		`{"version":2,"gpus":[{"busid":"0000:01:00.0"}],"lanes":[{"gpu":"0000:01:00.0","path":"SOMEWHERE"}]}`: "SOMEWHERE",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var f *fault.Error
		if _, err := ReadPlan(path); !errors.As(err, &f) || f.Code != fault.UnreadablePlan || f.Object != path || !strings.Contains(f.Cause.Error(), want) {
			t.Errorf("%s: %v; want %s of the file with the cause %q", text, err, fault.UnreadablePlan, want)
		}
	}
}
