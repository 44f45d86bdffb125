// Nightly runs the cases that are too long for CI and records the results.
//
//	nightly [-run PATTERN] [-table DOCUMENT] FILE     run the cases, and write their results to FILE
//	nightly -check FILE                               fail if a case of FILE is missing, failed or old
//
// FILE is JSON; docs/nightly.json has the last results. A run of some cases keeps the
// results of the others. In DOCUMENT nightly replaces the table between two comments.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// maxAge is the age from which a result does not count for a release.
const maxAge = 7 * 24 * time.Hour

// testCase is a command of the nightly list.
type testCase struct{ Name, Command string }

// cases are in the order of the run: short cases first.
var cases = []testCase{
	{"race", "make test-race"},
	{"cluster", "make test-cluster"},
	{"guest", "make test-vm PLACE=vm-nightly"},
	{"network", "make soak-network"},
	{"nccl", "make soak-nccl"},
	{"nixl", "make soak-nixl"},
	{"model", "make soak-model PROGRAMS=10000"},
	{"doctor", "make soak-doctor ROUNDS=2000"},
	{"plan", "make soak-plan HOSTS=10000"},
	{"reuse", "make soak-reuse OPERATIONS=1000000"},
	{"faults", "make soak-faults"},
	{"sanitize", "make sanitize"},
	{"fuzz", "make fuzz FUZZTIME=60s"},
	{"containers", "make soak-containers N=1000"},
	{"relay", "make soak-relay TIME=1h"},
	{"guests", "make vm-long"},
}

// result is the last result of a case.
type result struct {
	testCase
	Date    time.Time // start of the run
	Commit  string    // with "-dirty" if files differed
	Seconds float64
	Passed  bool
}

func main() {
	check := flag.Bool("check", false, "check the results in FILE and run nothing")
	pattern := flag.String("run", "", "run the cases whose name matches this pattern")
	table := flag.String("table", "", "write the table of results into this `document`")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: nightly [-run PATTERN] [-table DOCUMENT] FILE, or nightly -check FILE")
		os.Exit(2)
	}
	if err := nightly(flag.Arg(0), *pattern, *table, *check, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "nightly:", err)
		os.Exit(1)
	}
}

func nightly(file, pattern, document string, check bool, out io.Writer) error {
	results, err := read(file)
	if err != nil {
		return err
	}
	if check {
		return verify(results, time.Now())
	}
	chosen, err := regexp.Compile(pattern)
	if err != nil {
		return fmt.Errorf("-run %q: %w", pattern, err)
	}
	commit, err := exec.Command("git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty").Output()
	if err != nil {
		return fmt.Errorf("read the commit: git describe: %w", err)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	var failed []string
	for _, c := range cases {
		if !chosen.MatchString(c.Name) {
			continue
		}
		fmt.Fprintf(out, "\n== %s: %s\n", c.Name, c.Command)
		r := result{testCase: c, Date: time.Now().UTC().Truncate(time.Second), Commit: strings.TrimSpace(string(commit))}
		command := exec.Command("bash", "-c", c.Command)
		command.Stdout, command.Stderr, command.Env = out, os.Stderr, environment()
		r.Passed = command.Run() == nil
		r.Seconds = time.Since(r.Date).Round(time.Second).Seconds()
		select {
		case <-stop: // the case got the signal, too, and has no result
			return errors.New("interrupted")
		default:
		}
		if !r.Passed {
			failed = append(failed, c.Name)
		}
		fmt.Fprintf(out, "== %s: %s after %v\n", c.Name, map[bool]string{true: "passed", false: "FAILED"}[r.Passed],
			time.Duration(r.Seconds)*time.Second)
		results = set(results, r)
		if err := write(file, results); err != nil {
			return err
		}
		if document != "" {
			if err := writeTable(document, results); err != nil {
				return err
			}
		}
	}
	if len(failed) > 0 {
		return &failedError{failed}
	}
	return nil
}

// environment returns the environment of this process without the variables of make: RUN of `make
// nightly` selects cases, and would select tests in the make of a case.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return slices.Contains([]string{"RUN", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL"}, name)
	})
}

// set replaces the result of a case.
func set(results []result, r result) []result {
	results = slices.DeleteFunc(results, func(old result) bool { return old.Name == r.Name })
	return append(results, r)
}

// failedError is the error of a run with failed cases.
type failedError struct{ cases []string } // names

func (e *failedError) Error() string { return "failed: " + strings.Join(e.cases, ", ") }

// missingError is the error of results that do not permit a release.
type missingError struct{ results []string } // "NAME never ran" and similar

func (e *missingError) Error() string {
	return fmt.Sprintf("a release needs passed results of the last seven days: %s; run make nightly",
		strings.Join(e.results, ", "))
}

// verify returns an error with every case that has not passed in the last seven days.
func verify(results []result, now time.Time) error {
	var wrong []string
	for _, c := range cases {
		i := slices.IndexFunc(results, func(r result) bool { return r.Name == c.Name })
		switch {
		case i < 0:
			wrong = append(wrong, c.Name+" never ran")
		case strings.HasSuffix(results[i].Commit, "-dirty"):
			wrong = append(wrong, c.Name+" ran on a changed tree on "+results[i].Date.Format(time.DateOnly))
		case !results[i].Passed:
			wrong = append(wrong, c.Name+" failed on "+results[i].Date.Format(time.DateOnly))
		case now.Sub(results[i].Date) > maxAge:
			wrong = append(wrong, c.Name+" last ran on "+results[i].Date.Format(time.DateOnly))
		}
	}
	if len(wrong) > 0 {
		return &missingError{wrong}
	}
	return nil
}

// read returns the results of a file, empty if the file does not exist.
func read(file string) (results []result, err error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &results)
	}
	if err != nil {
		return nil, fmt.Errorf("read the results %s: %w", file, err)
	}
	return results, nil
}

// The table lies between these comments.
const (
	tableBegin = "<!-- nightly: begin -->\n"
	tableEnd   = "<!-- nightly: end -->\n"
)

// writeTable replaces the table of a document.
func writeTable(document string, results []result) error {
	text, err := os.ReadFile(document)
	if err != nil {
		return fmt.Errorf("write the table of results: %w", err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegin)
	_, after, ends := strings.Cut(rest, tableEnd)
	if !begins || !ends {
		return fmt.Errorf("write the table of results: %s has no lines %q and %q", document, strings.TrimSpace(tableBegin),
			strings.TrimSpace(tableEnd))
	}
	return os.WriteFile(document, []byte(before+tableBegin+table(results)+tableEnd+after), 0o644)
}

// table has a row per case, in the order of the list.
func table(results []result) string {
	var b strings.Builder
	b.WriteString("| case | command | last run | commit | duration | result |\n|---|---|---|---|---|---|\n")
	for _, c := range cases {
		row := "never | | | no result"
		if i := slices.IndexFunc(results, func(r result) bool { return r.Name == c.Name }); i >= 0 {
			r := results[i]
			commit, dirty := strings.CutSuffix(r.Commit, "-dirty")
			commit = commit[:min(12, len(commit))]
			if dirty {
				commit += "-dirty"
			}
			row = fmt.Sprintf("%s | %s | %v | %s", r.Date.Format(time.DateOnly), commit, time.Duration(r.Seconds)*time.Second,
				map[bool]string{true: "passed", false: "failed"}[r.Passed])
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s |\n", c.Name, c.Command, row)
	}
	return b.String()
}

func write(file string, results []result) error {
	text, err := json.MarshalIndent(results, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}
