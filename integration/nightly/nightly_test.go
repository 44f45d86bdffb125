package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

func TestVerifyNamesMissingFailedAndOldResults(t *testing.T) {
	now := time.Date(2026, 11, 23, 0, 0, 0, 0, time.UTC)
	var results []result
	for _, c := range cases {
		results = append(results, result{testCase: c, Date: now.Add(-maxAge), Passed: true})
	}
	if err := verify(results, now); err != nil {
		t.Errorf("results of seven days ago: %v", err)
	}
	results[0].Passed = false
	results[1].Date = now.Add(-maxAge - time.Hour)
	results[2].Commit = "12eb4a3e-dirty"
	err := verify(results[:len(results)-1], now)
	want := &missingError{[]string{cases[0].Name + " failed on 2026-11-16", cases[1].Name + " last ran on 2026-11-15",
		cases[2].Name + " ran on a changed tree on 2026-11-16",
		cases[len(cases)-1].Name + " never ran"}}
	if !testutil.HasError(err, want) {
		t.Errorf("the error is %v, want %v", err, want)
	}
}

func TestCasesAreTargetsOfTheMakefile(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		fields := strings.Fields(c.Command)
		if fields[0] != "make" || !regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(fields[1])+`:`).Match(makefile) {
			t.Errorf("%s: %q is no target of the Makefile", c.Name, c.Command)
		}
	}
}

// `make nightly RUN=fuzz` chooses a case, and no tests within the case.
func TestCasesDoNotGetVariablesOfMake(t *testing.T) {
	old := cases
	defer func() { cases = old }()
	t.Setenv("RUN", "fuzz")
	t.Setenv("MAKEFLAGS", " -- RUN=fuzz")
	cases = []testCase{{"own", `test -z "$RUN$MAKEFLAGS" && test -n "$PATH"`}}
	if err := nightly(filepath.Join(t.TempDir(), "results.json"), "", "", false, io.Discard); err != nil {
		t.Error(err)
	}
}

// A run writes a result per chosen case, keeps the results of other cases, and fails if a case
// fails.
func TestRunRecordsResults(t *testing.T) {
	old := cases
	defer func() { cases = old }()
	cases = []testCase{{"good", "true"}, {"bad", "false"}, {"other", "true"}}
	file := filepath.Join(t.TempDir(), "results.json")
	if err := write(file, []result{{testCase: cases[2], Passed: true, Commit: "before"}}); err != nil {
		t.Fatal(err)
	}
	document := filepath.Join(t.TempDir(), "document.md")
	if err := os.WriteFile(document, []byte("before\n"+tableBegin+"old\n"+tableEnd+"after\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := nightly(file, "^(good|bad)$", document, false, &out); !testutil.HasError(err,
		&failedError{[]string{"bad"}}) {
		t.Errorf("the error is %v", err)
	}
	results, err := read(file)
	if err != nil || len(results) != 3 {
		t.Fatalf("%v, %v", results, err)
	}
	for _, r := range results {
		if r.Passed != (r.Name != "bad") || (r.Commit == "before") != (r.Name == "other") {
			t.Errorf("the result %+v", r)
		}
	}
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"before\n" + tableBegin + "| case |", "| good | `true` | ", " | passed |\n",
		"| bad | `false` | ", " | failed |\n", tableEnd + "after\n"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%q is not in the document:\n%s", want, text)
		}
	}
	if strings.Contains(string(text), "old") {
		t.Errorf("the old table is left:\n%s", text)
	}
	if err := nightly(file, "(", "", false, &out); err == nil {
		t.Error("a pattern that is none was accepted")
	}
}

func TestTableOfTheBenchmarksShowsTheLastResults(t *testing.T) {
	results, err := read("../../docs/nightly.json")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../docs/benchmarks.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := tableBegin + table(results) + tableEnd; !strings.Contains(string(text), want) {
		t.Errorf("docs/benchmarks.md does not have\n%s", want)
	}
}
