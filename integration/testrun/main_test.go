package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/integration/programs"
)

// Two packages of one name, a failing and a passing package, give the events of the go command.
func TestRunGivesTheEventsOfEachPackage(t *testing.T) {
	_, err := exec.LookPath("go")
	programs.MustHave(t, err)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":         "module probe\n\ngo 1.26\n",
		"a/x/x_test.go":  "package x\nimport \"testing\"\nfunc TestGood(t *testing.T) {}\n",
		"b/x/x_test.go":  "package x\nimport \"testing\"\nfunc TestBad(t *testing.T) { t.Error(\"wrong\") }\n",
		"none/none.go":   "package none\n",
		"a/x/testdata/a": "",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	plain := []string{"./..."}
	var out bytes.Buffer
	o := options{dir: "bin", atOnce: 2, out: &out}
	if err := run(runAll, o, plain, plain); err == nil || errors.Is(err, errFailed) {
		t.Errorf("without binaries: %v", err)
	}
	out.Reset()
	if err := run(buildAll, o, plain, plain); err != nil {
		t.Fatal(err)
	}
	if err := run(runAll, o, plain, plain); !errors.Is(err, errFailed) {
		t.Errorf("the error is %v, and a test fails", err)
	}
	ends := map[string]string{}
	for line := range bytes.Lines(out.Bytes()) {
		var e struct{ Action, Package, Test string }
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if e.Action == "pass" || e.Action == "fail" {
			ends[e.Package+" "+e.Test] = e.Action
		}
	}
	for name, want := range map[string]string{"probe/a/x TestGood": "pass", "probe/a/x ": "pass",
		"probe/b/x TestBad": "fail", "probe/b/x ": "fail"} {
		if ends[name] != want {
			t.Errorf("%q ended with %q, want %q", name, ends[name], want)
		}
	}
}

// Three tests in two processes give one start and one end: a failure, because TestBad fails.
func TestRunOfAPackageInPartsGivesOneEnd(t *testing.T) {
	_, err := exec.LookPath("go")
	programs.MustHave(t, err)
	t.Chdir(t.TempDir())
	const text = `package x
import ("os"; "testing")
func TestFirst(t *testing.T) {}
func TestBad(t *testing.T) { t.Error("wrong") }
func TestLast(t *testing.T) { if err := os.WriteFile("last", nil, 0o600); err != nil { t.Error(err) } }
`
	for name, text := range map[string]string{"go.mod": "module probe\n\ngo 1.26\n", "x_test.go": text} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	o := options{dir: "bin", atOnce: 2, out: &out, parts: map[string]int{".": 2}}
	if err := run(buildAll, o, []string{"."}, []string{"."}); err != nil {
		t.Fatal(err)
	}
	if err := run(runAll, o, []string{"."}, []string{"."}); !errors.Is(err, errFailed) {
		t.Errorf("the error is %v, and a test fails", err)
	}
	seen := map[string]int{}
	for line := range bytes.Lines(out.Bytes()) {
		var e struct{ Action, Test string }
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if e.Action != "output" {
			seen[e.Action+" "+e.Test]++
		}
	}
	want := map[string]int{"start ": 1, "run TestFirst": 1, "pass TestFirst": 1, "run TestBad": 1, "fail TestBad": 1,
		"run TestLast": 1, "pass TestLast": 1, "fail ": 1}
	if !maps.Equal(seen, want) {
		t.Errorf("the events are %v, want %v", seen, want)
	}
	if _, err := os.Stat("last"); err != nil {
		t.Error(err)
	}
}

// A test that computes for 0.3 s is charged more than an idle test, also if a child computes.
func TestCostChargesEachTestItsProcessorTime(t *testing.T) {
	_, err := exec.LookPath("go")
	programs.MustHave(t, err)
	t.Chdir(t.TempDir())
	const text = `package x
import ("os/exec"; "testing")
func TestIdle(t *testing.T) {}
func TestBusy(t *testing.T) {
	if err := exec.Command("sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done").Run(); err != nil { t.Error(err) }
}
func TestBad(t *testing.T) { t.Error("wrong") }
`
	for name, text := range map[string]string{"go.mod": "module probe\n\ngo 1.26\n", "x_test.go": text} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	o := options{dir: "bin", out: &out}
	if err := run(buildAll, o, []string{"."}, []string{"."}); err != nil {
		t.Fatal(err)
	}
	if err := run(costAll, o, []string{"."}, []string{"."}); err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(out.String())
	if len(fields) != 8 || fields[0] != "probe" || fields[2] != "TestBusy" ||
		!strings.Contains(out.String(), "TestBad (failed)") {
		t.Errorf("the table is\n%s", &out)
	}
}

func TestRunOfABrokenPackageNamesIt(t *testing.T) {
	_, err := exec.LookPath("go")
	programs.MustHave(t, err)
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{"go.mod": "module probe\n\ngo 1.26\n",
		"x_test.go": "package x\nfunc TestBad(\n"} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err = run(buildAll, options{dir: "bin"}, []string{"."}, []string{"."})
	var failed *buildError
	if !errors.As(err, &failed) || !strings.Contains(failed.output, "x_test.go:2") {
		t.Errorf("the error is %v", err)
	}
}
