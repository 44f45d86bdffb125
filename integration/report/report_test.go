package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/integration/programs"
)

// madeModule writes a module, and returns the events of its tests.
func madeModule(t *testing.T, dir string, files map[string]string) string {
	t.Helper()
	goCommand, err := exec.LookPath("go")
	programs.MustHave(t, err)
	t.Setenv("GOFLAGS", "")
	t.Setenv("GOWORK", "off")
	files["go.mod"] = "module probe\n\ngo 1.24\n"
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	run := exec.Command(goCommand, "test", "-json", "-vet=off", "-count=1", "./...")
	run.Dir = dir
	events, err := run.Output()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	return string(events)
}

// The go command makes the events: the tests of the fixture module really run.
func TestReportOfRealRunListsResults(t *testing.T) {
	for _, test := range []struct {
		name  string
		files map[string]string
		good  bool
		want  []string
	}{
		{
			name: "one passes and one is skipped with its reason",
			files: map[string]string{"a/a_test.go": `package a
import "testing"
func TestPasses(t *testing.T) {}
func TestSkipped(t *testing.T) { t.Log("looked for two GPUs"); t.Skip("needs two GPUs,\nfound one") }
func TestSub(t *testing.T) { t.Run("deep", func(t *testing.T) { t.SkipNow() }) }
`},
			good: true,
			want: []string{
				"ok    probe/a",
				"2 passed, 0 failed, 2 skipped",
				"skipped     probe/a.TestSkipped: needs two GPUs, found one",
				"skipped     probe/a.TestSub/deep: no reason given",
			},
		},
		{
			name: "a failure shows what the test said",
			files: map[string]string{"a/a_test.go": `package a
import "testing"
func TestFails(t *testing.T) { t.Run("deep", func(t *testing.T) { t.Error("seven is not eight") }) }
func TestPasses(t *testing.T) { t.Log("of no interest") }
`},
			want: []string{"FAIL  probe/a", "seven is not eight", "1 passed, 2 failed, 0 skipped", "failed      probe/a"},
		},
		{
			name: "a process that dies takes its test with it",
			files: map[string]string{"a/a_test.go": `package a
import ("os"; "testing")
func TestDies(t *testing.T) { os.Stderr.WriteString("last words\n"); os.Exit(3) }
`},
			want: []string{"FAIL  probe/a", "last words", "failed      probe/a"},
		},
		{
			name: "what does not compile",
			files: map[string]string{
				"a/a_test.go": "package a\nfunc f() { nothing() }\n",
				"b/b_test.go": "package b\nimport \"testing\"\nfunc TestPasses(t *testing.T) {}\n",
			},
			want: []string{"undefined: nothing", "failed      probe/a", "1 passed, 0 failed"},
		},
		{
			name:  "no test at all",
			files: map[string]string{"a/a.go": "package a\n"},
			want:  []string{"no test ran"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			events := madeModule(t, t.TempDir(), test.files)
			var out strings.Builder
			s, err := read([]string{placeHost}, strings.NewReader(events), &out, false)
			if err != nil {
				t.Fatal(err)
			}
			s.print(&out)
			if s.good() != test.good {
				t.Errorf("good = %v, want %v", s.good(), test.good)
			}
			for _, want := range test.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("the report lacks %q:\n%s", want, out.String())
				}
			}
			if strings.Contains(out.String(), "of no interest") {
				t.Errorf("the report shows the output of a test that passed:\n%s", out.String())
			}
		})
	}
}

func TestReasonIsTheLastMessage(t *testing.T) {
	for output, want := range map[string]string{
		"=== RUN   TestX\n    x_test.go:7: looked\n    x_test.go:9: needs root\n--- SKIP: TestX (0.00s)\n": "needs root",
		"=== RUN   TestX\n--- SKIP: TestX (0.00s)\n":                                                       "no reason given",
		"": "no reason given",
	} {
		if diff := cmp.Diff(want, reason(output)); diff != "" {
			t.Errorf("reason(%q) (-want +got):\n%s", output, diff)
		}
	}
}

// brokenPipe returns one line and then an error.
type brokenPipe struct{ given bool }

func (f *brokenPipe) Read(p []byte) (int, error) {
	if f.given {
		return 0, syscall.EPIPE
	}
	f.given = true
	return copy(p, "go: some complaint\n"), nil
}

func TestReadPassesOtherLinesAndReportsBrokenPipe(t *testing.T) {
	var out strings.Builder
	_, err := read([]string{placeHost}, io.Reader(&brokenPipe{}), &out, false)
	if !errors.Is(err, syscall.EPIPE) {
		t.Errorf("err = %v", err)
	}
	if out.String() != "go: some complaint\n" {
		t.Errorf("out = %q", out.String())
	}
}

// events writes a stream of `go test -json` from a short form: action, place or "-", package, and
// test with its output.
func events(t *testing.T, lines ...string) io.Reader {
	t.Helper()
	var all strings.Builder
	encode := json.NewEncoder(&all)
	for _, line := range lines {
		words := strings.SplitN(line, " ", 5)
		e := event{Action: words[0], Place: strings.Trim(words[1], "-"), Package: "github.com/peerlane/peerlane/" + words[2]}
		if len(words) > 3 {
			e.Test = words[3]
		}
		if len(words) > 4 {
			e.Output = words[4] + "\n"
		}
		if err := encode.Encode(e); err != nil {
			t.Fatal(err)
		}
	}
	return strings.NewReader(all.String())
}

func TestPackagesOfSeveralPlacesAreSeparate(t *testing.T) {
	for _, words := range []bool{false, true} {
		testTwoPlaces(t, words)
	}
}

func testTwoPlaces(t *testing.T, words bool) {
	t.Helper()
	var out strings.Builder
	s, err := read([]string{placeVMSmall, placeVMFull}, events(t,
		"start vm-full a", "start - a", // both run at once
		"run - a TestX", "run vm-full a TestX",
		"output vm-full a TestX full is full",
		"output - a TestX small is small",
		"fail vm-full a TestX", "pass - a TestX",
		"run - a TestY", "output - a TestY     y_test.go:7: no rain", "skip - a TestY",
		"pass - a", "fail vm-full a",
	), &out, words)
	if err != nil {
		t.Fatal(err)
	}
	s.print(&out)
	want := map[bool]string{true: "small is small\n"}[words] + `ok    vm-small a                                    0s
FAIL  vm-full  a                                    0s
full is full

failed      vm-full a
skipped     vm-small a.TestY: no rain
1 passed, 1 failed, 1 skipped
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

// The go command ends each package; a virtual machine may die before the end.
func TestStreamWithoutEndIsFailure(t *testing.T) {
	var out strings.Builder
	s, err := read([]string{placeVMFull}, events(t,
		"start - a", "run - a TestX", "pass - a TestX", "pass - a",
		"start - b", "run - b TestX", "pass - b TestX", "run - b TestY", "output - b TestY last words",
	), &out, false)
	if err != nil {
		t.Fatal(err)
	}
	if s.good() {
		t.Error("the run counts as good")
	}
	s.print(&out)
	for _, want := range []string{"last words", "failed      b (its events stop before its end)"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, out.String())
		}
	}
}

func TestPlaceWithoutTestsIsFailure(t *testing.T) {
	var out strings.Builder
	s, err := read([]string{placeVMSmall, placeVMPair}, events(t, "run - a TestX", "pass - a TestX", "pass - a"), &out,
		false)
	if err != nil {
		t.Fatal(err)
	}
	if !s.good() {
		t.Error("some tests, and not the matrix's, need not run in every place")
	}
	s.compare(nil)
	s.print(&out)
	if s.good() || !strings.Contains(out.String(), "no test ran in vm-pair\n") {
		t.Errorf("good = %v:\n%s", s.good(), out.String())
	}
}

func TestEventOfAnotherPlaceIsRefused(t *testing.T) {
	_, err := read([]string{placeHost}, events(t, "run vm-full a TestX"), io.Discard, false)
	var wrong *placeError
	if !errors.As(err, &wrong) || wrong.event.Place != "vm-full" {
		t.Errorf("err = %v", err)
	}
}
