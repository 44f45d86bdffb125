package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo/planner"
)

// The README's configuration must work unchanged.
func TestConfigurationOfReadmeIsValid(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(readme), "```toml\n")
	text, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		t.Fatal("the README shows no configuration")
	}
	root := t.TempDir()
	path := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Plan.Lanes) != 1 {
		t.Fatalf("the README's configuration assigns %d lanes, want 1", len(c.Plan.Lanes))
	}
	// All other keys show their defaults, and the lane fits the recorded host.
	c.Plan.Lanes = nil
	if want := config.Default(); c.Relay.Slots != want.Relay.Slots || c.Relay.SlotSize != want.Relay.SlotSize ||
		c.Relay.Route != want.Relay.Route || c.Relay.Transport != want.Relay.Transport ||
		c.GDR.MaxPath != want.GDR.MaxPath || c.CDI != want.CDI {
		t.Errorf("the README shows %+v as the default, which is %+v", c, want)
	}
	_, host := recordedHost(t)
	peerlane(t, append([]string{"plan", "--root", root}, host...)...)
}

// readmeServer matches a row of the README's table of servers: the link to a topology, and three
// cells that the estimate fills.
var readmeServer = regexp.MustCompile(`(?m)^(\| [^|]*\]\((docs/[^)]+\.xml)\)[^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|`)

func TestREADMEServersHaveTheEstimatesOfPlan(t *testing.T) {
	const file = "../../README.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if lines := bytes.Count(text, []byte("\n")); lines >= 200 {
		t.Errorf("the README has %d lines; the limit is 199", lines)
	}
	var linked []string
	want := readmeServer.ReplaceAllStringFunc(string(text), func(row string) string {
		m := readmeServer.FindStringSubmatch(row)
		linked = append(linked, m[2])
		info, err := os.Lstat(filepath.Join("../..", m[2]))
		if err != nil {
			t.Error(err)
			return row
		}
		if !info.Mode().IsRegular() {
			t.Errorf("%s is not a regular file", m[2])
		}
		return m[1] + "| " + strings.Join(readmeEstimate(t, m[2]), " | ") + " |"
	})
	if len(linked) < 8 {
		t.Errorf("the README has estimates of %d servers", len(linked))
	}
	files, err := filepath.Glob("../../docs/hosts/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if name := "docs/hosts/" + filepath.Base(f); !slices.Contains(linked, name) {
			t.Errorf("no row of the README's table links to %s", name)
		}
	}
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("the README's table of servers (-by the plan +in the README; accept with go test -update):\n%s", diff)
	}
}

// readmeEstimate returns the cells of a server: the slowest and the fastest GPU while every GPU is
// busy, and the slowest far GPU alone.
func readmeEstimate(t *testing.T, file string) []string {
	t.Helper()
	input := []string{"--root", t.TempDir(), "--input", "../../" + file, "-o", "json"}
	plan := decode[planner.Plan](t, append([]string{"plan"}, input...)...)
	e := decode[planner.Estimate](t, append([]string{"plan", "--estimate"}, input...)...)
	far := map[string]bool{}
	for _, l := range plan.Lanes {
		far[l.GPU] = l.Role == planner.RoleFar && len(l.NICs) > 0
	}
	type rates struct{ today, lane []float64 }
	var all, alone rates
	for _, g := range e.GPUs {
		all.today, all.lane = append(all.today, g.NCCL), append(all.lane, g.Relay)
		if far[g.GPU] {
			alone.today, alone.lane = append(alone.today, g.Alone.NCCL), append(alone.lane, g.Alone.Relay)
		}
	}
	cell := func(r rates, of func([]float64) float64) string {
		switch {
		case len(r.today) == 0 || of(r.today) == 0 && of(r.lane) == 0:
			return "–"
		case of(r.lane) == 0:
			return gigabytes(of(r.today)) + " → no lane"
		}
		return gigabytes(of(r.today)) + " → " + gigabytes(of(r.lane))
	}
	return []string{cell(all, slices.Min), cell(all, slices.Max), cell(alone, slices.Min)}
}
