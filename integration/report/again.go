package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
)

// failing is a package that failed in a place.
type failing struct {
	testPackage
	tests  []string // failed top-level tests of the package
	chance bool     // the failure may be random
}

// neverChance matches the output of failures that are never retried: a race exists also in runs
// that do not detect it, and a panic or a time-out keeps further tests from running.
var neverChance = regexp.MustCompile(`(?m)^(panic: |fatal error: |WARNING: DATA RACE)`)

// atMost is the maximum number of failed tests to retry.
const atMost = 4

func (s *summary) failedIn(p testPackage) []string {
	var names []string
	for _, t := range s.all(failed) {
		name, ok := strings.CutPrefix(t.name, short(p.path)+".")
		if ok && t.place == p.place && !strings.Contains(name, "/") {
			names = append(names, name)
		}
	}
	return names
}

// tryAgain repeats failed tests, by a shell command with PLACE, PACKAGE and TESTS, a
// pattern, in the environment. A test that passes then counts as flaky instead of failed,
// because shared machines lose seconds. After many failures tryAgain retries nothing.
func (s *summary) tryAgain(line string, out io.Writer) error {
	count := 0
	for _, f := range s.failing {
		if count += len(f.tests); !f.chance || len(f.tests) == 0 || count > atMost {
			return nil
		}
	}
	for _, f := range s.failing {
		if err := s.tryPackage(f, line, out); err != nil {
			return err
		}
	}
	return nil
}

func (s *summary) tryPackage(f failing, line string, out io.Writer) error {
	fmt.Fprintf(out, "again %s: %s\n", s.title(f.place, short(f.path)), strings.Join(f.tests, ", "))
	c := exec.Command("bash", "-c", line)
	c.Env = append(os.Environ(), "PLACE="+f.place, "PACKAGE="+f.path, "TESTS=^("+strings.Join(f.tests, "|")+")$")
	c.Stderr = os.Stderr
	events, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return fmt.Errorf("retry: %w", err)
	}
	second, err := read([]string{f.place}, events, out, false)
	if err != nil {
		return err
	}
	if err := c.Wait(); err != nil || !second.good() {
		return nil // failed twice
	}
	of := func(t test) bool { // of reports whether t is a retried test, or a part of one
		if t.place != f.place {
			return false
		}
		for _, name := range f.tests {
			whole := short(f.path) + "." + name
			if t.name == whole || strings.HasPrefix(t.name, whole+"/") {
				return true
			}
		}
		return false
	}
	for _, name := range f.tests {
		if second.results[test{f.place, short(f.path) + "." + name}].state != passed {
			return nil
		}
	}
	for t := range s.results {
		if of(t) {
			delete(s.results, t)
		}
	}
	for t, r := range second.results {
		s.results[t] = r
	}
	for _, name := range f.tests {
		s.flaky = append(s.flaky, test{f.place, short(f.path) + "." + name})
	}
	for i, b := range s.broken {
		if b == s.title(f.place, short(f.path)) {
			s.broken = append(s.broken[:i], s.broken[i+1:]...)
			break
		}
	}
	return nil
}
