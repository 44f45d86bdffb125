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

// event is one line of `go test -json`; see `go doc test2json` and, for the
// two about builds, `go help buildjson`. Place is ours.
type event struct {
	Action     string
	Place      string
	Package    string
	ImportPath string // instead of Package, in build-output and build-fail
	Test       string
	Elapsed    float64 // seconds
	Output     string
}

// test is one test in one place. Its name is the package's folder, a full stop,
// and what the go command calls it.
type test struct{ place, name string }

// What became of a test, in the words of the report.
const (
	began   = "began and did not end"
	passed  = "passed"
	failed  = "failed"
	skipped = "was skipped"
)

// result is what became of a test, and why it was skipped.
type result struct{ state, reason string }

// summary is what one run of `go test` came to.
type summary struct {
	places  []string
	results map[test]result // subtests included
	broken  []string
	failing []failing
	flaky   []test            // failed, and passed when they were tried again
	causes  map[string]string // of flaky tests, by name
	// Of the matrix:
	uncovered  []string // cells, each with what became of its test
	needRoot   []string // cells, and tests without one, that root alone would have run
	unexpected []string // tests that were skipped though no cell lets them
	unlisted   []string // tests of whole containers or machines that passed and are in no cell
	compared   bool     // with the matrix
}

// all are the tests of which one thing became.
func (s *summary) all(state string) []test {
	var list []test
	for t, r := range s.results {
		if r.state == state {
			list = append(list, t)
		}
	}
	slices.SortFunc(list, func(a, b test) int {
		return cmp.Or(cmp.Compare(slices.Index(s.places, a.place), slices.Index(s.places, b.place)), cmp.Compare(a.name, b.name))
	})
	return list
}

func (s *summary) good() bool {
	return len(s.all(failed)) == 0 && len(s.broken) == 0 && len(s.uncovered) == 0 && len(s.needRoot) == 0 && len(s.unexpected) == 0 &&
		len(s.unlisted) == 0 && len(s.idle()) == 0
}

// idle are the places where no test ended and one should have: any of them with
// a matrix, and without one, which is a run of some tests, only if none did.
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

// title is what the report calls a package, a test or a case of one place: where
// there are several, it has to say which.
func (s *summary) title(place, name string) string {
	if len(s.places) == 1 {
		return name
	}
	return place + " " + name
}

// testPackage is a package whose events have not ended.
type testPackage struct{ place, path string }

// outputs is what the tests of a package, and under the empty name itself,
// have printed so far. A test that failed, or that was cut off by the end of its
// package, is shown.
type outputs map[string]*strings.Builder

// reader follows the events of the packages that run.
type reader struct {
	*summary
	out     io.Writer
	words   bool // what tests say that pass is printed, too
	running map[testPackage]outputs
}

// read prints each package of the stream as it ends, and sums up; with words also what
// each test has said that passes.
func read(places []string, in io.Reader, out io.Writer, words bool) (*summary, error) {
	r := &reader{&summary{places: places, results: map[test]result{}}, out, words, map[testPackage]outputs{}}
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				// The go command's own complaints are no JSON.
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
			return nil, fmt.Errorf("reading the events of go test: %w", err)
		}
	}
}

func (r *reader) take(e event) error {
	if e.Place == "" {
		e.Place = r.places[0]
	}
	if !slices.Contains(r.places, e.Place) {
		return fmt.Errorf("an event of the place %q, and -places names only %s: %+v", e.Place, strings.Join(r.places, ", "), e)
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
		said := r.running[p]
		if said[e.Test] == nil {
			said[e.Test] = &strings.Builder{}
		}
		said[e.Test].WriteString(e.Output)
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
		if said := r.running[p][e.Test]; r.words && said != nil {
			fmt.Fprint(r.out, said)
		}
	case "fail":
		r.results[t] = result{state: failed}
		return // its output stays for the end of the package
	case "skip":
		said := ""
		if b := r.running[p][e.Test]; b != nil {
			said = b.String()
		}
		r.results[t] = result{skipped, reason(said)}
	}
	delete(r.running[p], e.Test)
}

// end prints the line of a package, and all that is left of its output when it
// did not pass.
func (r *reader) end(p testPackage, action string, took time.Duration) {
	left := r.running[p]
	delete(r.running, p)
	name, column := short(p.path), ""
	if len(r.places) > 1 {
		column = fmt.Sprintf("%-8s ", p.place)
	}
	took = took.Round(100 * time.Millisecond)
	switch action {
	case "skip": // no test files
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

// cutOff ends the packages that the stream has no end of: the go command or a
// virtual machine went away in the middle of them.
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
		fmt.Fprintf(out, "flaky       %s: it failed, as above, and passed when it was tried again%s\n", s.title(t.place, t.name), cause)
	}
	skips := s.all(skipped)
	for _, t := range skips {
		fmt.Fprintf(out, "skipped     %s: %s\n", s.title(t.place, t.name), s.results[t].reason)
	}
	for _, t := range s.unexpected {
		fmt.Fprintf(out, "unexpected  %s: skipped, and the matrix does not say so\n", t)
	}
	for _, c := range s.uncovered {
		fmt.Fprintf(out, "not covered %s\n", c)
	}
	for _, t := range s.unlisted {
		fmt.Fprintf(out, "unlisted    %s: passed, and the matrix does not have it\n", t)
	}
	if len(s.needRoot) > 0 {
		fmt.Fprintf(out, "not covered, because root alone can run it: %s\n", strings.Join(s.needRoot, ", "))
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

// frame is what the testing package prints around a test's own words.
var frame = regexp.MustCompile(`^(=== \w+\s|\s*--- SKIP: )`)

// position is the file and line that testing puts before a message.
var position = regexp.MustCompile(`^\s*[\w.-]+\.go:\d+: `)

// reason is what a skipped test said last, which is what it gave to Skip.
func reason(output string) string {
	var said []string
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, "\n")
		switch {
		case frame.MatchString(line) || strings.TrimSpace(line) == "":
		case position.MatchString(line):
			said = []string{position.ReplaceAllString(line, "")}
		default: // a further line of the message before
			said = append(said, strings.TrimSpace(line))
		}
	}
	if len(said) == 0 {
		return "no reason given"
	}
	return strings.Join(said, " ")
}

// short leaves out the module's path.
func short(pkg string) string {
	return strings.TrimPrefix(strings.TrimPrefix(pkg, "github.com/peerlane/peerlane"), "/")
}
