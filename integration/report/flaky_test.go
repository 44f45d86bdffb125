package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
)

func TestReadFlakyNamesALineWithoutACause(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flaky.txt")
	for text, want := range map[string]error{"hook.TestA\n": &flakyLineError{path, 1, "hook.TestA"},
		"# a comment\n\nhook cause\n": &flakyLineError{path, 3, "hook cause"}} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readFlaky(path); !testutil.HasError(err, want) {
			t.Errorf("%q: error %v, want %v", text, err, want)
		}
	}
}

func TestPrintGivesTheCauseOfAFlakyTest(t *testing.T) {
	s := &summary{places: []string{placeHost}, flaky: []test{{placeHost, "hook.TestA"}, {placeHost, "hook.TestB"}},
		causes: map[string]string{"hook.TestA": "a race"}}
	var out strings.Builder
	s.print(&out)
	for _, want := range []string{"hook.TestA: it failed, as above, and passed when it was tried again; known cause: a " +
		"race\n", "hook.TestB: it failed, as above, and passed when it was tried again; find its cause"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
}

// Each test of the list exists.
func TestFlakyTestsExist(t *testing.T) {
	causes, err := readFlaky("../flaky.txt")
	if err != nil {
		t.Fatal(err)
	}
	for name := range causes {
		folder, function, _ := strings.Cut(name, ".Test")
		function, _, _ = strings.Cut(function, "/")
		paths, err := filepath.Glob(filepath.Join("../..", folder, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			found = found || regexp.MustCompile(`(?m)^func Test`+function+`\(`).Match(text)
		}
		if !found {
			t.Errorf("%s: there is no such test in %s", name, folder)
		}
	}
}
