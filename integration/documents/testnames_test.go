package documents

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	declaration = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	testName    = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
)

// declaredTests returns the names of the functions of all tests, fuzz targets and benchmarks.
func declaredTests(t *testing.T) map[string]bool {
	t.Helper()
	declared := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range declaration.FindAllSubmatch(text, -1) {
			declared[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(declared) < 1000 {
		t.Fatalf("%d tests were found", len(declared))
	}
	return declared
}

// unknownTests returns the names of tests in a text that no package declares, and the count of all
// names. In a command with -run a name can be the beginning of names.
func unknownTests(text string, declared map[string]bool) (unknown []string, count int) {
	for line := range strings.Lines(text) {
		for _, name := range testName.FindAllString(line, -1) {
			count++
			known := declared[name]
			if !known && strings.Contains(line, "-run") {
				for other := range declared {
					known = known || strings.HasPrefix(other, name)
				}
			}
			if !known {
				unknown = append(unknown, name)
			}
		}
	}
	return unknown, count
}

// Pages of history keep former names of tests.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	declared := declaredTests(t)
	texts := pages(t)
	for _, pattern := range []string{"Makefile", ".ci/*", "docs/nightly.json", "integration/*.txt", "integration/*/*.txt",
		"packaging/*.md", "kubernetes/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, found...)
	}
	total := 0
	for _, path := range texts {
		switch filepath.Base(path) {
		case "HISTORY.md", "CHANGELOG.md":
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		unknown, count := unknownTests(string(text), declared)
		total += count
		name, _ := filepath.Rel(root, path) // relative to root, as in pages
		for _, test := range unknown {
			t.Errorf("%s names %s, which no package declares", name, test)
		}
		if name == filepath.Join("docs", "security.md") && count < 30 {
			t.Errorf("%s names %d tests", name, count)
		}
	}
	t.Logf("%d names", total)
}

func TestUnknownTestsAreFound(t *testing.T) {
	declared := map[string]bool{"TestOneThing": true, "FuzzOne": true}
	text := "`TestOneThing`, `TestOther`/x, FuzzOne\n" +
		"go test -run TestOne ./x\ngo test -run '^TestTwo'\nTestOne without a command\n"
	unknown, count := unknownTests(text, declared)
	if got, want := strings.Join(unknown, " "), "TestOther TestTwo TestOne"; got != want || count != 6 {
		t.Errorf("unknown %q of %d, want %q of 6", got, count, want)
	}
}
