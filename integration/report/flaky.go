package main

import (
	"fmt"
	"os"
	"strings"
)

// flakyLineError is the error of a line that lacks a test or a cause.
type flakyLineError struct {
	path string
	line int // from 1
	text string
}

func (e *flakyLineError) Error() string {
	return fmt.Sprintf("read the flaky tests: %s:%d: want FOLDER.TEST CAUSE, not %q", e.path, e.line, e.text)
}

// readFlaky reads the list of flaky tests with causes: a line for each test, with its name in the
// matrix and then the cause. '#' begins a comment. An empty path gives an empty list.
func readFlaky(path string) (map[string]string, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the flaky tests: %w", err)
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
			return nil, &flakyLineError{path, number, line}
		}
		causes[name] = cause
	}
	return causes, nil
}
