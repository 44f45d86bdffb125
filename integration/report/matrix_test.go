package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
)

// judged is a run of some events, compared with a matrix.
func judged(t *testing.T, places []string, matrix string, stream ...string) *summary {
	t.Helper()
	cells, err := parseMatrix(strings.NewReader(matrix))
	if err != nil {
		t.Fatal(err)
	}
	s, err := read(places, events(t, stream...), io.Discard, false)
	if err != nil {
		t.Fatal(err)
	}
	s.compare(cells)
	return s
}

func TestMatrixDemandsCells(t *testing.T) {
	passes := []string{"run - a TestGood", "pass - a TestGood"}
	skips := []string{"run - a TestA", "output - a TestA     a_test.go:1: no rain", "skip - a TestA"}
	rootless := []string{"run - a TestA", "output - a TestA     a_test.go:1: needs root: it mounts", "skip - a TestA"}
	fails := []string{"run - a TestA", "fail - a TestA"}
	for _, test := range []struct {
		name                            string
		matrix                          string
		stream                          []string
		uncovered, needRoot, unexpected []string
	}{
		{
			name:   "tested and passed",
			matrix: "host good tested a.TestGood  # covered",
		},
		{
			name:      "tested and nowhere",
			matrix:    "host none tested a.TestNone",
			uncovered: []string{"host none: a.TestNone did not run"},
		},
		{
			name:      "tested and failed",
			matrix:    "host a tested a.TestA",
			stream:    fails,
			uncovered: []string{"host a: a.TestA failed"},
		},
		{
			name:      "tested and dead in the middle",
			matrix:    "host a tested a.TestA",
			stream:    []string{"run - a TestA"},
			uncovered: []string{"host a: a.TestA began and did not end"},
		},
		{
			name:      "tested and skipped",
			matrix:    "host a tested a.TestA",
			stream:    skips,
			uncovered: []string{"host a: a.TestA was skipped: no rain"},
		},
		{
			name:   "tested and skipped with the whole of it",
			matrix: "host one tested a.TestA/one\nhost deep tested a.TestA/two/deep",
			stream: skips,
			uncovered: []string{
				"host one: a.TestA was skipped: no rain",
				"host deep: a.TestA was skipped: no rain",
			},
		},
		{
			name:      "a test's name that begins alike is another",
			matrix:    "host ab tested a.TestAB\nhost a may-skip a.TestA rain is rare",
			stream:    skips,
			uncovered: []string{"host ab: a.TestAB did not run"},
		},
		{
			name:       "skipped, and no cell says so",
			matrix:     "host good tested a.TestGood",
			stream:     skips,
			unexpected: []string{"a.TestA"},
		},
		{
			name:   "may skip and skipped",
			matrix: "host a may-skip a.TestA rain is rare",
			stream: skips,
		},
		{
			name:   "may skip and passed",
			matrix: "host a may-skip a.TestGood rain is rare",
		},
		{
			name:   "may skip and failed, which the report says anyway",
			matrix: "host a may-skip a.TestA rain is rare",
			stream: fails,
		},
		{
			name:      "may skip and is nowhere",
			matrix:    "host a may-skip a.TestNone rain is rare",
			uncovered: []string{"host a: a.TestNone did not run"},
		},
		{
			name:       "what may skip does not stretch to what it is a part of",
			matrix:     "host a may-skip a.TestA rain is rare",
			stream:     []string{"run - a TestA/deep", "skip - a TestA/deep", "run - a TestA", "pass - a TestA"},
			unexpected: []string{"a.TestA/deep"},
		},
		{
			name:      "nor to its parts",
			matrix:    "host deep may-skip a.TestA/deep rain is rare",
			stream:    skips,
			uncovered: []string{"host deep: a.TestA was skipped: no rain"},
		},
		{
			name:   "without root",
			matrix: "host one tested a.TestA/one\nhost two tested a.TestA/two",
			stream: append([]string{"run - a TestB", "output - a TestB     a_test.go:1: needs root", "skip - a TestB"},
				rootless...),
			needRoot: []string{"one", "two", "a.TestB"},
		},
		{
			name:       "a cell of another place does not excuse",
			matrix:     "vm-full a may-skip a.TestA rain is rare",
			stream:     skips,
			unexpected: []string{"a.TestA"},
		},
		{
			name:   "nor is one demanded",
			matrix: "vm-full a tested a.TestNone\ngpus b absent by hand",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			stream := append(append([]string{}, passes...), test.stream...)
			s := judged(t, []string{placeHost}, test.matrix, append(stream, "pass - a")...)
			if diff := cmp.Diff(test.uncovered, s.uncovered); diff != "" {
				t.Errorf("not covered: %s", diff)
			}
			if diff := cmp.Diff(test.needRoot, s.needRoot); diff != "" {
				t.Errorf("needs root: %s", diff)
			}
			if diff := cmp.Diff(test.unexpected, s.unexpected); diff != "" {
				t.Errorf("unexpected: %s", diff)
			}
			good := len(test.uncovered)+len(test.needRoot)+len(test.unexpected)+len(s.all(failed)) == 0
			if s.good() != good {
				t.Errorf("good = %v, want %v", s.good(), good)
			}
		})
	}
}

func TestMatrixTestInTwoPlacesIsTwoCells(t *testing.T) {
	s := judged(t, []string{placeVMSmall, placeVMFull}, `
vm-small  demo  tested    a.TestDemo
vm-full   demo  tested    a.TestDemo
vm-small  rain  may-skip  a.TestRain  it is dry there
vm-full   rain  tested    a.TestRain
`,
		"run - a TestDemo", "pass - a TestDemo", "run - a TestRain", "skip - a TestRain", "pass - a",
		"run vm-full a TestRain", "skip vm-full a TestRain", "pass vm-full a",
	)
	want := []string{
		"vm-full demo: a.TestDemo did not run",
		"vm-full rain: a.TestRain was skipped: no reason given",
	}
	if diff := cmp.Diff(want, s.uncovered); diff != "" {
		t.Error(diff)
	}
	if s.unexpected != nil {
		t.Errorf("unexpected %q", s.unexpected)
	}
}

func TestMatrixReportsCaseWithoutCell(t *testing.T) {
	s := judged(t, []string{placeVMSmall, placeVMFull}, `
vm-small  one  tested  integration/vm/cases/a.TestOne/part
vm-full   two  absent  elsewhere
`,
		"run - integration/vm/cases/a TestOne", "run - integration/vm/cases/a "+
			"TestOne/part", "pass - integration/vm/cases/a TestOne/part",
		"pass - integration/vm/cases/a TestOne", "pass - integration/vm/cases/a",
		"run vm-full integration/vm/cases/a TestOne", "pass vm-full integration/vm/cases/a TestOne", "pass vm-full "+
			"integration/vm/cases/a",
		"run vm-full a TestUnit", "pass vm-full a TestUnit", "pass vm-full a",
	)
	if diff := cmp.Diff([]string{"vm-full integration/vm/cases/a.TestOne"}, s.unlisted); diff != "" || s.good() {
		t.Errorf("good = %v, unlisted: %s", s.good(), diff)
	}
}

func TestReportOfRootTestsIsOneSentence(t *testing.T) {
	s := judged(t, []string{placeHost}, "host one tested a.TestA/one\nhost two tested a.TestA/two",
		"run - a TestGood", "pass - a TestGood",
		"run - a TestA", "output - a TestA     a_test.go:1: needs root: it mounts", "skip - a TestA", "pass - a")
	var out strings.Builder
	s.print(&out)
	want := `
skipped     a.TestA: needs root: it mounts
not covered, because only root can run it: one, two
1 passed, 0 failed, 1 skipped
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestMatrixTornLineIsRefused(t *testing.T) {
	for text, words := range map[string]string{
		"host a tested":                                        "a test or a reason",
		"runc a tested a.TestA":                                `unknown place "runc"`,
		"host a maybe a.TestA":                                 `unknown state "maybe"`,
		"host a tested a.TestA y":                              "exactly one test",
		"host a may-skip a.TestA":                              "reason",
		"host a tested TestA":                                  "folder",
		"vm-small a count":                                     "a test or a reason",
		"vm-small a count few":                                 "a number of cells",
		"vm-small a count 0":                                   "a number of cells",
		"host a absent x\n# between\nhost a absent y":          "duplicate of the cell host a at line 1",
		"host a tested a.TestA\nhost b may-skip a.TestA rains": "a.TestA is in the cell of line 1 already",
	} {
		_, err := parseMatrix(strings.NewReader(text))
		e, ok := errors.AsType[*lineError](err)
		if last := 1 + strings.Count(text, "\n"); !ok || e.line != last || !strings.Contains(e.reason, words) {
			t.Errorf("%q gives %v, not an error of line %d with %q", text, err, last, words)
		}
	}
}

// A lost cell of a guest is an error: no other place would run its test.
func TestCellsOfGuestsAreCounted(t *testing.T) {
	of := func(place, folder string, cells, count int) error {
		return &countError{test{place, folder}, cells, count}
	}
	for text, want := range map[string][]error{
		"host a tested a.TestA": nil,
		// every test runs in the guest
		"vm-small a tested integration/vm/cases/small.TestA":                          nil,
		"vm-small a tested a.TestA":                                                   {of("vm-small", "a", 1, 0)},
		"vm-small a count 1\nvm-small x tested a.TestA":                               nil,
		"vm-small a count 2\nvm-small x tested a.TestA\nvm-small y absent it is gone": {of("vm-small", "a", 1, 2)},
		"vm-small a count 1\nvm-small x tested a.TestA\nvm-small y may-skip a.TestB now and then": {
			of("vm-small", "a", 2, 1)},
		"vm-full a count 1\nvm-small x tested a.TestA": {of("vm-full", "a", 0, 1), of("vm-small", "a", 1, 0)},
		"vm-small a count 1\nvm-small x tested a/b.TestA": {
			of("vm-small", "a", 0, 1), of("vm-small", "a/b", 1, 0)},
	} {
		cells, err := parseMatrix(strings.NewReader(text))
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		err = checkCounts(cells)
		if (err == nil) != (want == nil) {
			t.Errorf("%q gives %v", text, err)
		}
		for _, w := range want {
			if !testutil.HasError(err, w) {
				t.Errorf("%q gives %v, not the error %v", text, err, w)
			}
		}
	}
	// The cells of the repository.
	cells, err := readMatrix("../matrix.txt")
	if err != nil {
		t.Fatal(err)
	}
	gone := 0
	for i, c := range cells {
		if !strings.HasPrefix(c.place, "vm-") || c.test == "" || strings.HasPrefix(c.test, "integration/vm") {
			continue
		}
		gone++
		if checkCounts(slices.Delete(slices.Clone(cells), i, i+1)) == nil {
			t.Errorf("removal of the cell of %s goes unnoticed", c)
		}
	}
	if gone == 0 {
		t.Error("the matrix has no cells of guests")
	}
	path := filepath.Join(t.TempDir(), "matrix.txt")
	if err := os.WriteFile(path, []byte("vm-small x tested a.TestA"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readMatrix(path); !testutil.HasError(err, of("vm-small", "a", 1, 0)) {
		t.Errorf("a matrix without its count is accepted: %v", err)
	}
}

func TestMatrixOfRepositoryIsValid(t *testing.T) {
	cells, err := readMatrix("../matrix.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cells {
		if c.place == placeGPUs && c.state != cellAbsent {
			t.Errorf("%s: no run of ours has NVIDIA's GPUs", c)
		}
	}
}

func TestParsePlacesReadsList(t *testing.T) {
	got, err := parsePlaces("vm-small,vm-pair")
	if diff := cmp.Diff([]string{placeVMSmall, placeVMPair}, got); diff != "" || err != nil {
		t.Error(diff, err)
	}
	for _, list := range []string{"", "host,", "moon", "host,host", "host, vm-full"} {
		if got, err := parsePlaces(list); err == nil {
			t.Errorf("-places %q gives %q", list, got)
		}
	}
}
