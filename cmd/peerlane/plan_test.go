package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/peerlane/peerlane/topo/planner"
)

func TestEstimateAndExplanationOfRecordedHostEqualGolden(t *testing.T) {
	dir, host := recordedHost(t)
	for name, flags := range map[string][]string{"estimate.txt": {"--estimate"}, "explain.txt": {"--explain", "gpu3"}} {
		out := peerlane(t, append(append([]string{"plan", "--root", t.TempDir()}, flags...), host...)...)
		golden(t, name, strings.ReplaceAll(out, dir, "RECORDED"))
	}
}

func TestEstimateInJSONHasRatesOfEachGPU(t *testing.T) {
	_, host := recordedHost(t)
	type routeRates struct{ NCCL, HostMemory, Relay float64 }
	type rates struct {
		GPU                     string
		Index                   int
		NCCL, HostMemory, Relay float64
		Alone                   routeRates
	}
	got := decode[struct {
		GPUs       []rates
		Uniformity rates
	}](t, append([]string{"plan", "--estimate", "--root", t.TempDir(), "-o", "json"}, host...)...)
	if len(got.GPUs) != 8 {
		t.Fatalf("%d GPUs", len(got.GPUs))
	}
	want := rates{"0000:3b:00.0", 3, 12, 8, 12, routeRates{32, 32, 39.74}}
	if diff := cmp.Diff(want, got.GPUs[3], cmpopts.EquateApprox(1e-3, 0)); diff != "" {
		t.Error(diff)
	}
	if u := got.Uniformity; u.Relay != 1 || u.Alone.NCCL >= u.Alone.Relay {
		t.Errorf("uniformity %+v", u)
	}
	sentences := decode[struct{ Sentences []string }](t, append(
		[]string{"plan", "--explain", "3", "--root", t.TempDir(), "-o", "json"}, host...)...)
	if len(sentences.Sentences) < 5 || !strings.HasPrefix(sentences.Sentences[0], "GPU 3 ") {
		t.Errorf("%q", sentences)
	}
}

func TestGPUsOfAnyVendorArePlannedWhereThatIsAskedFor(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.xml")
	text := strings.NewReplacer(`<gpu dev="0"`, `<gpu gcn="gfx942" dev="0"`, `<gpu dev="1"`, `<gpu gcn="gfx942" dev="1"`,
		`version="1"`, `version="2"`).Replace(ncclXML)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, any := range []bool{false, true} {
		args := []string{"plan", "--root", t.TempDir(), "-o", "json", "--input", file}
		if any {
			args = append(args, "--any-vendor")
		}
		plan := decode[planner.Plan](t, args...)
		if len(plan.Lanes) != 2 || (plan.Lanes[0].Role == planner.RoleNear) != any ||
			(plan.Lanes[0].Role == planner.RoleRefused) == any {
			t.Errorf("any vendor %t: %+v", any, plan.Lanes)
		}
	}
}

func TestPlanOfInvalidRequestFails(t *testing.T) {
	_, host := recordedHost(t)
	matrix := filepath.Join(t.TempDir(), "topo.txt")
	if err := os.WriteFile(matrix, []byte(smiText), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{append([]string{"--explain", "gpu9"}, host...), 1, `no GPU "gpu9": use an index`},
		{append([]string{"--explain", "0", "--estimate"}, host...), 2, "give one or the other"},
		{[]string{"--estimate", "--input", matrix}, 1, "does not state the bandwidth of every link"},
	} {
		var out, errOut bytes.Buffer
		code := run(append([]string{"plan", "--root", t.TempDir()}, test.args...), &out, &errOut)
		if code != test.code || !strings.Contains(errOut.String(), test.want) || out.Len() > 0 {
			t.Errorf("%q: exit status %d, %q; want %q", test.args, code, errOut.String(), test.want)
		}
	}
	if out := peerlane(t, "plan", "--root", t.TempDir(), "--explain", "1", "--input", matrix); !strings.Contains(out,
		"No estimate") {
		t.Errorf("%s", out)
	}
}

func TestEstimateWithoutGPUsIsSentence(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.xml")
	if err := os.WriteFile(file, []byte(`<system version="1"><cpu numaid="0"/></system>`), 0o644); err != nil {
		t.Fatal(err)
	}
	out := peerlane(t, "plan", "--estimate", "--root", t.TempDir(), "--input", file)
	if !strings.HasPrefix(out, "Nothing to estimate for the host read from "+file) ||
		strings.Contains(out, "GPU  ADDRESS") || strings.Contains(out, "uniformity") {
		t.Errorf("%s", out)
	}
}
