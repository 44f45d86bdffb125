package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is one line of `go test -json`; see `go doc test2json` and, for build events, `go help
// buildjson`. Place is an extension.
type event struct {
	Action     string
	Place      string
	Package    string
	ImportPath string // instead of Package, in build-output and build-fail
	Test       string
	Elapsed    float64 // seconds
	Output     string
}

// test is a test in a place. The name is the package's folder, a full stop, and the go command's
// name.
type test struct{ place, name string }

// States of a test in the words of the report.
const (
	began   = "began and did not end"
	passed  = "passed"
	failed  = "failed"
	skipped = "was skipped"
)

// result is the state of a test, and the reason of a skip.
type result struct{ state, reason string }

// summary is the result of a run of `go test`.
type summary struct {
	places  []string
	results map[test]result // subtests included
	broken  []string
	failing []failing
	flaky   []test            // failed, then passed in the second run
	causes  map[string]string // of flaky tests, by name
	// Results of the comparison with the matrix.
	uncovered  []string // cells with the state of their test
	needRoot   []string // cells, and tests without a cell, that need root
	unexpected []string // skipped tests without a permitting cell
	unlisted   []string // tests of whole containers or machines that passed and are in no cell
	compared   bool     // with the matrix
}

// all returns the tests in a state.
func (s *summary) all(state string) []test {
	var list []test
	for t, r := range s.results {
		if r.state == state {
			list = append(list, t)
		}
	}
	slices.SortFunc(list, func(a, b test) int {
		return cmp.Or(cmp.Compare(slices.Index(s.places, a.place), slices.Index(s.places, b.place)),
			cmp.Compare(a.name, b.name))
	})
	return list
}

func (s *summary) good() bool {
	return len(s.all(failed)) == 0 && len(s.broken) == 0 && len(s.uncovered) == 0 && len(s.needRoot) == 0 &&
		len(s.unexpected) == 0 &&
		len(s.unlisted) == 0 && len(s.idle()) == 0
}

// idle returns the places without a finished test: with a matrix any place, otherwise every place,
// if no test at all finished.
func (s *summary) idle() []string {
	var list []string
	for _, place := range s.places {
		ended := false
		for t, r := range s.results {
			ended = ended || t.place == place && (r.state == passed || r.state == failed)
		}
		if !ended {
			list = append(list, place)
		}
	}
	if !s.compared && len(list) < len(s.places) {
		return nil
	}
	return list
}

// title returns the name of a package, a test or a case for the report, with the place if there are
// several.
func (s *summary) title(place, name string) string {
	if len(s.places) == 1 {
		return name
	}
	return place + " " + name
}

// testPackage is a package whose events have not ended.
type testPackage struct{ place, path string }

// outputs is the output so far of a package's tests, and under the empty name of the package. It is
// printed for a test that failed or did not end.
type outputs map[string]*strings.Builder

// reader follows the events of the packages that run.
type reader struct {
	*summary
	out     io.Writer
	words   bool // print the output of passing tests too
	running map[testPackage]outputs
}

// read prints each package of the stream when it ends, and returns the summary; with words it also
// prints the output of passing tests.
func read(places []string, in io.Reader, out io.Writer, words bool) (*summary, error) {
	r := &reader{&summary{places: places, results: map[test]result{}}, out, words, map[testPackage]outputs{}}
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				// Messages of the go command itself are not JSON.
				fmt.Fprint(out, line)
			} else if err := r.take(e); err != nil {
				return nil, err
			}
		}
		if err == io.EOF {
			r.cutOff()
			return r.summary, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the events of go test: %w", err)
		}
	}
}

// placeError is the error of an event of a place that -places does not list.
type placeError struct {
	event  event
	listed []string
}

func (e *placeError) Error() string {
	return fmt.Sprintf("an event of the place %q, but -places lists only %s: %+v", e.event.Place,
		strings.Join(e.listed, ", "), e.event)
}

func (r *reader) take(e event) error {
	if e.Place == "" {
		e.Place = r.places[0]
	}
	if !slices.Contains(r.places, e.Place) {
		return &placeError{e, r.places}
	}
	switch e.Action {
	case "build-output":
		fmt.Fprint(r.out, e.Output)
		return nil
	case "build-fail":
		r.broken = append(r.broken, e.ImportPath+" (build)")
		return nil
	}
	if e.Package == "" {
		return nil
	}
	p := testPackage{e.Place, e.Package}
	if r.running[p] == nil {
		r.running[p] = outputs{}
	}
	switch e.Action {
	case "output":
		output := r.running[p]
		if output[e.Test] == nil {
			output[e.Test] = &strings.Builder{}
		}
		output[e.Test].WriteString(e.Output)
	case "run":
		r.results[test{e.Place, short(e.Package) + "." + e.Test}] = result{state: began}
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.end(p, e.Action, time.Duration(e.Elapsed*float64(time.Second)))
			return nil
		}
		r.endTest(p, e)
	}
	return nil
}

func (r *reader) endTest(p testPackage, e event) {
	t := test{e.Place, short(e.Package) + "." + e.Test}
	switch e.Action {
	case "pass":
		r.results[t] = result{state: passed}
		if output := r.running[p][e.Test]; r.words && output != nil {
			fmt.Fprint(r.out, output)
		}
	case "fail":
		r.results[t] = result{state: failed}
		return // keep the output for the end of the package
	case "skip":
		output := ""
		if b := r.running[p][e.Test]; b != nil {
			output = b.String()
		}
		r.results[t] = result{skipped, reason(output)}
	}
	delete(r.running[p], e.Test)
}

// end prints the line of a package, and the remaining output of a package that did not pass.
func (r *reader) end(p testPackage, action string, took time.Duration) {
	left := r.running[p]
	delete(r.running, p)
	name, column := short(p.path), ""
	if len(r.places) > 1 {
		column = fmt.Sprintf("%-8s ", p.place)
	}
	took = took.Round(100 * time.Millisecond)
	switch action {
	case "skip": // the package has no test files
		return
	case "pass":
		fmt.Fprintf(r.out, "ok    %s%-30s %8s\n", column, name, took)
		return
	}
	r.broken = append(r.broken, r.title(p.place, name))
	fmt.Fprintf(r.out, "FAIL  %s%-30s %8s\n", column, name, took)
	chance := true
	for _, name := range slices.Sorted(maps.Keys(left)) {
		text := left[name].String()
		fmt.Fprint(r.out, text)
		chance = chance && !neverChance.MatchString(text)
	}
	r.failing = append(r.failing, failing{p, r.failedIn(p), chance})
}

// cutOff ends the packages without an end in the stream: the go command or a virtual machine died.
func (r *reader) cutOff() {
	for _, p := range slices.SortedFunc(maps.Keys(r.running), func(a, b testPackage) int {
		return cmp.Or(cmp.Compare(a.place, b.place), cmp.Compare(a.path, b.path))
	}) {
		r.end(p, "fail", 0)
		r.broken[len(r.broken)-1] += " (its events stop before its end)"
		r.failing[len(r.failing)-1].chance = false
	}
}

func (s *summary) print(out io.Writer) {
	fmt.Fprintln(out)
	for _, b := range s.broken {
		fmt.Fprintf(out, "failed      %s\n", b)
	}
	for _, t := range s.flaky {
		cause := "; find its cause, and name test and cause in integration/flaky.txt"
		if known := s.causes[t.name]; known != "" {
			cause = "; known cause: " + known
		}
		fmt.Fprintf(out, "flaky       %s: it failed, as above, and passed when it was tried again%s\n",
			s.title(t.place, t.name), cause)
	}
	skips := s.all(skipped)
	for _, t := range skips {
		fmt.Fprintf(out, "skipped     %s: %s\n", s.title(t.place, t.name), s.results[t].reason)
	}
	for _, t := range s.unexpected {
		fmt.Fprintf(out, "unexpected  %s: skipped, but the matrix does not permit that\n", t)
	}
	for _, c := range s.uncovered {
		fmt.Fprintf(out, "not covered %s\n", c)
	}
	for _, t := range s.unlisted {
		fmt.Fprintf(out, "unlisted    %s: passed, but the matrix lacks it\n", t)
	}
	if len(s.needRoot) > 0 {
		fmt.Fprintf(out, "not covered, because only root can run it: %s\n", strings.Join(s.needRoot, ", "))
	}
	for _, place := range s.idle() {
		if len(s.places) == 1 {
			fmt.Fprintln(out, "no test ran")
		} else {
			fmt.Fprintf(out, "no test ran in %s\n", place)
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", len(s.all(passed)), len(s.all(failed)), len(skips))
}

// frame matches the lines that the testing package adds to a test's output.
var frame = regexp.MustCompile(`^(=== \w+\s|\s*--- SKIP: )`)

// position is the file and line that testing puts before a message.
var position = regexp.MustCompile(`^\s*[\w.-]+\.go:\d+: `)

// reason returns the last output of a skipped test: the argument of Skip.
func reason(output string) string {
	var lines []string
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, "\n")
		switch {
		case frame.MatchString(line) || strings.TrimSpace(line) == "":
		case position.MatchString(line):
			lines = []string{position.ReplaceAllString(line, "")}
		default: // a further line of the message before
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	if len(lines) == 0 {
		return "no reason given"
	}
	return strings.Join(lines, " ")
}

// short removes the module's path.
func short(pkg string) string {
	return strings.TrimPrefix(strings.TrimPrefix(pkg, "github.com/peerlane/peerlane"), "/")
}
