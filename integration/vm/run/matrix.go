package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// matrix is the file in the repository that assigns tests to places. The report of the run checks
// that the tests ran.
const matrix = "integration/matrix.txt"

// ofMatrix returns the whole packages of a place, and tests of further packages with a cell for the
// place: guests are slow, so that guests skip tests whose result does not depend on the guest.
func (p place) ofMatrix(path string) ([]target, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var targets []target
	for _, pkg := range p.whole {
		targets = append(targets, target{pkg: pkg})
	}
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) < 4 || words[0] != p.name || words[2] == "absent" || words[2] == "count" {
			continue
		}
		pkg, test, found := strings.Cut(words[3], ".")
		if !found {
			return nil, fmt.Errorf("%s: %q: the form of a test is FOLDER.TEST", path, words[3])
		}
		if slices.Contains(p.whole, pkg) {
			continue
		}
		i := slices.IndexFunc(targets, func(t target) bool { return t.pkg == pkg })
		if i < 0 {
			i = len(targets)
			targets = append(targets, target{pkg: pkg})
		}
		targets[i].tests = append(targets[i].tests, test)
	}
	return targets, nil
}

// patternOf returns the pattern that matches exactly the tests and the subtests of the tests.
func patternOf(tests []string) string {
	var patterns []string
	for _, test := range tests {
		parts := strings.Split(test, "/")
		for i, part := range parts {
			parts[i] = "^" + regexp.QuoteMeta(part) + "$"
		}
		patterns = append(patterns, strings.Join(parts, "/"))
	}
	return strings.Join(patterns, "|")
}

// topLevel returns the top-level test of a subtest, or the test itself.
func topLevel(test string) string {
	top, _, _ := strings.Cut(test, "/")
	return top
}
