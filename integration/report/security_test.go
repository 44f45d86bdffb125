package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = "../.."

// testNames returns the names of every test of the project.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	exist := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(text, -1) {
			exist[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return exist
}

// docs/security.md names tests as proof of its rules: each test exists.
func TestSecurityNamesTestsThatExist(t *testing.T) {
	exist := testNames(t)
	text, err := os.ReadFile(filepath.Join(root, "docs/security.md"))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]\w*`).FindAllString(string(text), -1)
	if len(named) < 30 {
		t.Errorf("the page names %d tests", len(named))
	}
	for _, name := range named {
		if !exist[name] {
			t.Errorf("the page names %s, and no package has that", name)
		}
	}
}
