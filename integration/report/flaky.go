package main

import (
	"fmt"
	"os"
	"strings"
)

// readFlaky reads the tests that have been flaky, with their causes: one line a test, its
// name as in the matrix and then the cause. '#' begins a comment. Without a path there are
// none.
func readFlaky(path string) (map[string]string, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the flaky tests: %w", err)
	}
	causes := map[string]string{}
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		name, cause, _ := strings.Cut(line, " ")
		cause = strings.TrimSpace(cause)
		if !strings.Contains(name, ".Test") || cause == "" {
			return nil, fmt.Errorf("reading the flaky tests: %s:%d: want FOLDER.TEST CAUSE, not %q", path, number, line)
		}
		causes[name] = cause
	}
	return causes, nil
}
