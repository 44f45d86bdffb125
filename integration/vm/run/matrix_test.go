package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPlaceRunsTestsOfMatrix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "matrix.txt")
	text := `# a comment
vm-small  integration  count  2
vm-small  tree         tested    integration/vm/cases/small.TestTree
vm-small  runc/death   tested    integration.TestDeath/runc/1_%_of_it
host      runc/death   tested    integration.TestDeath/runc/1_%_of_it
vm-small  files        may-skip  relay.TestFiles some kernels have none # a comment
vm-small  crun/death   tested    integration.TestDeath/crun
vm-small  crun/life    absent    integration.TestLife is somewhere else
`
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	small := place{name: "vm-small", whole: []string{"integration/vm/cases/small"}}
	targets, err := small.ofMatrix(path)
	if err != nil {
		t.Fatal(err)
	}
	var got [][2]string
	for _, of := range targets {
		got = append(got, [2]string{of.pkg, of.pattern()})
	}
	if diff := cmp.Diff([][2]string{
		{"integration/vm/cases/small", ""},
		{"integration", "^TestDeath$/^runc$/^1_%_of_it$|^TestDeath$/^crun$"},
		{"relay", "^TestFiles$"},
	}, got); diff != "" {
		t.Error(diff)
	}
}

// A machine runs every test that the matrix assigns to a place of machines.
func TestEachPlaceOfAMachineIsRun(t *testing.T) {
	text, err := os.ReadFile("../../matrix.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, " ")
		if strings.HasPrefix(name, "vm-") && !slices.ContainsFunc(places, func(p place) bool { return p.name == name }) {
			t.Errorf("nothing runs in the place %s: %s", name, line)
		}
	}
	for _, p := range places {
		targets, err := p.ofMatrix("../../matrix.txt")
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range targets {
			tests, err := testsOf(t.Context(), of.pkg)
			if err != nil {
				t.Fatal(err)
			}
			for _, test := range of.tests {
				if !slices.Contains(tests, topLevel(test)) {
					t.Errorf("%s %s has no test %s", p.name, of.pkg, test)
				}
			}
		}
	}
}

func TestPatternNarrowsTestsOfPlace(t *testing.T) {
	for _, c := range []struct {
		pattern string
		want    []target
	}{
		{"^TestDeath", []target{{pkg: "integration", tests: []string{"TestDeath/runc/staged"}}}},
		{"TestDeath/crun", []target{{pkg: "integration", run: "^(TestDeath)$/crun"}}},
	} {
		o := testOptions{pattern: c.pattern}
		left, err := o.narrow(t.Context(), []place{{name: "vm-small", targets: []target{
			{pkg: "integration", tests: []string{"TestDeath/runc/staged", "TestLife"}},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, left[0].targets, cmp.AllowUnexported(target{})); diff != "" {
			t.Errorf("--run %s: %s", c.pattern, diff)
		}
	}
}
