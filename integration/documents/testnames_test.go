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
	// A pattern between quotes; $$ is $ in a Makefile.
	runPattern = regexp.MustCompile(`-run[= ]'([^']*Test[^']*)'`)
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
// names. In a command with -run a name can be the beginning of names, and a pattern must match a test.
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
		for _, m := range runPattern.FindAllStringSubmatch(line, -1) {
			pattern, err := regexp.Compile(strings.ReplaceAll(m[1], "$$", "$"))
			if err != nil || !matchesAny(pattern, declared) {
				unknown = append(unknown, m[1])
			}
		}
	}
	return unknown, count
}

func matchesAny(pattern *regexp.Regexp, declared map[string]bool) bool {
	for name := range declared {
		if pattern.MatchString(name) {
			return true
		}
	}
	return false
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
		"go test -run TestOne ./x\ngo test -run '^TestOne(Big)?Thing$$'\n--run '^TestOne(Big)?ThingThing$$'\n" +
		"go test -run TestTwo\nTestOne without a command\n"
	unknown, count := unknownTests(text, declared)
	const want = "TestOther ^TestOne(Big)?ThingThing$$ TestTwo TestOne"
	if got := strings.Join(unknown, " "); got != want || count != 8 {
		t.Errorf("unknown %q of %d, want %q of 8", got, count, want)
	}
}
