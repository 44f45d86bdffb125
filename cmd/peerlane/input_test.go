package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

const smiText = `	GPU0	GPU1	NIC0	CPU Affinity	NUMA Affinity
GPU0	 X 	NV12	PIX	0-31	0
GPU1	NV12	 X 	SYS	32-63	1
NIC0	PIX	SYS	 X

NIC Legend:

  NIC0: mlx5_3
`

func TestMatrixOfNvidiaSMIHasTypesOnly(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.txt")
	if err := os.WriteFile(file, []byte(smiText), 0o644); err != nil {
		t.Fatal(err)
	}
	out := peerlane(t, "topo", "--input", file)
	for _, want := range []string{"(nvidia-smi)", "mlx5_3", "Path types", "no bandwidths"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in\n%s", want, out)
		}
	}
	if strings.Contains(out, "Bandwidths") {
		t.Errorf("table of bandwidths without a stated bandwidth:\n%s", out)
	}
	got := decode[struct {
		printedTopology
		Notes []string
	}](t, "topo", "-o", "json", "--input", file)
	if len(got.Pairs) != 3 || len(got.Notes) == 0 || got.GPUs[1].BusID != "GPU1" {
		t.Fatalf("%+v", got)
	}
	for _, p := range got.pairs() {
		if p.Bandwidth != 0 || p.From == "GPU1" && p.To == "mlx5_3" && p.Type != topo.SYS {
			t.Errorf("%+v", p)
		}
	}
	plan := decode[planner.Plan](t, "plan", "--root", t.TempDir(), "-o", "json", "--input", file)
	lane, err := plan.Lane("GPU1")
	if err != nil || lane.Role != planner.RoleFar || !lane.Relay || len(lane.Servers) != 1 || lane.Servers[0] != "GPU0" {
		t.Errorf("lane %+v, %v", lane, err)
	}
}

func TestTopologyTornFileIsRefusedWithPlace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.txt")
	if err := os.WriteFile(file, []byte(strings.Replace(smiText, "\tSYS\t X", "\t X", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"topo", "--input", file}, &out, &errOut); code != 1 || out.Len() > 0 {
		t.Errorf("exit status %d, output %q", code, out.String())
	}
	for _, want := range []string{file, "line 4, column 11"} {
		if !strings.Contains(errOut.String(), want) {
			t.Errorf("standard error %q lacks %q", errOut.String(), want)
		}
	}
}

// The error blames the file that cannot be planned, not the configuration.
func TestPlanOfSeveralHostsIsRefused(t *testing.T) {
	one := `<cpu host_hash="0x%d" numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"><pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="90"/></pci></cpu>`
	file := filepath.Join(t.TempDir(), "two.xml")
	if err := os.WriteFile(file, []byte(`<system version="1">`+fmt.Sprintf(one+one, 1, 2)+`</system>`),
		0o644); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	code := run([]string{"plan", "--root", t.TempDir(), "--input", file}, &out, &errOut)
	if stderr := errOut.String(); code != 1 || !strings.Contains(stderr, file) || !strings.Contains(stderr, "2 hosts") ||
		strings.Contains(stderr, "config.toml") {
		t.Errorf("exit status %d: %s", code, stderr)
	}
	if !strings.Contains(errOut.String(), "--host N, from 0 to 1") {
		t.Errorf("no remedy: %s", errOut.String())
	}
	if names := peerlane(t, "__complete", "plan", "--input", file, "--host", ""); !strings.Contains(names,
		"0\t0x1\n1\t0x2\n") {
		t.Errorf("--host completes %q", names)
	}
	for _, n := range []string{"0", "1", "0x2"} {
		plan := decode[planner.Plan](t, "plan", "--root", t.TempDir(), "--input", file, "--host", n, "-o", "json")
		if len(plan.Lanes) != 1 || plan.GPUs[0].Host != "" {
			t.Errorf("host %s: %+v", n, plan)
		}
	}
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--input", file, "--host", "2"}, 1, "numbers 0 to 1: 0x1, 0x2"},
		{[]string{"--input", file, "--host", ""}, 1, "numbers 0 to 1: 0x1, 0x2"},
		{[]string{"--host", "0"}, 2, "--input"},
	} {
		out.Reset()
		errOut.Reset()
		if code := run(append([]string{"plan", "--root", t.TempDir()}, tt.args...), &out, &errOut); code != tt.code ||
			!strings.Contains(errOut.String(), tt.want) || out.Len() > 0 {
			t.Errorf("%v: exit status %d, %s", tt.args, code, errOut.String())
		}
	}
}
