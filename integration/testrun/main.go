// Testrun runs the tests of packages like `go test -json`, and keeps the binaries.
//
//	testrun -build [-plain PACKAGES] DIR PACKAGE...
//	        build the binaries that are not up to date in DIR
//	testrun [-plain PACKAGES] [-parts PACKAGE=N ...] [-p N] DIR PACKAGE...
//	        run the tests, and print the events
//	testrun -cost [-plain PACKAGES] DIR PACKAGE...
//	        run every test alone, and print the processor time of each test
//
// A run writes the processor time of packages into DIR/usage.txt, the largest first.
//
// `go test -count=1` links the binary of every package in every run, which is a sixth of the
// processor time of `make test`; the binaries in DIR are linked when their code changes. Packages
// run in the order of the arguments, N in parallel. The tests of a package of -parts run in N
// processes, because tests wait longer than tests compute. The race detector is off in the packages
// of -plain, a list with spaces.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

func main() {
	build := flag.Bool("build", false, "build the binaries and run nothing")
	cost := flag.Bool("cost", false, "run each test alone, and print the processor seconds of each")
	plain := flag.String("plain", "", "the `packages` whose tests run without the race detector")
	parts := flag.String("parts", "", "the packages whose tests run in several processes: `PACKAGE=N ...`")
	atOnce := flag.Int("p", 4, "number of packages to run concurrently")
	flag.Parse()
	if flag.NArg() < 2 || *atOnce < 1 {
		fmt.Fprintln(os.Stderr, "usage: testrun [-build | -cost] [-plain PACKAGES] [-parts PACKAGE=N] [-p N] DIR PACKAGE...")
		os.Exit(2)
	}
	what := runAll
	switch {
	case *build:
		what = buildAll
	case *cost:
		what = costAll
	}
	divided, err := parseParts(*parts)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(2)
	}
	err = run(what, options{parts: divided, dir: flag.Arg(0), atOnce: *atOnce, out: os.Stdout}, strings.Fields(*plain),
		flag.Args()[1:])
	if errors.Is(err, errFailed) {
		os.Exit(1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

// options are the options of a run of packages.
type options struct {
	dir    string // of the binaries
	atOnce int    // number of packages to run concurrently
	out    io.Writer
	parts  map[string]int // of packages that run in several processes, by pattern
}

// parseParts reads PACKAGE=N, separated by spaces.
func parseParts(text string) (map[string]int, error) {
	parts := map[string]int{}
	for _, word := range strings.Fields(text) {
		name, number, _ := strings.Cut(word, "=")
		n, err := strconv.Atoi(number)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("-parts %s: give PACKAGE=N with a number of at least 1", word)
		}
		parts[name] = n
	}
	return parts, nil
}

func run(what func([]testPackage, options) error, o options, plain, patterns []string) error {
	packages, err := list(patterns)
	if err != nil {
		return err
	}
	without := map[string]bool{}
	if len(plain) > 0 {
		list, err := list(plain)
		if err != nil {
			return err
		}
		for _, p := range list {
			without[p.path] = true
		}
	}
	for i := range packages {
		packages[i].race = !without[packages[i].path]
	}
	for pattern, n := range o.parts {
		list, err := list([]string{pattern})
		if err != nil {
			return err
		}
		for _, divided := range list {
			if i := slices.IndexFunc(packages, func(p testPackage) bool { return p.path == divided.path }); i >= 0 {
				packages[i].parts = n
			}
		}
	}
	if o.dir, err = filepath.Abs(o.dir); err != nil {
		return err
	}
	place(packages, o.dir)
	return what(packages, o)
}

// testPackage is a package that has tests.
type testPackage struct {
	path, dir string
	race      bool
	binary    string
	parts     int    // number of processes; 0 is 1
	pattern   string // of a part's tests; empty without parts
}

// list returns the packages with tests, in the order of the patterns.
func list(patterns []string) (packages []testPackage, err error) {
	const form = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}\t{{.Dir}}{{end}}"
	c := exec.Command("go", append([]string{"list", "-f", form}, patterns...)...)
	c.Stderr = os.Stderr
	text, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("list the packages: go list: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if name, dir, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
			packages = append(packages, testPackage{path: name, dir: dir})
		}
	}
	return packages, nil
}

// place sets the paths of binaries. The go command names a binary by the last element of the
// package's path, so packages of the same name lie in separate directories.
func place(packages []testPackage, dir string) {
	for i := range packages {
		p := &packages[i]
		mode := "plain"
		if p.race {
			mode = "race"
		}
		parent := strings.ReplaceAll(path.Dir(p.path), "/", "_")
		p.binary = filepath.Join(dir, mode, parent, path.Base(p.path)+".test")
	}
}

// buildAll builds the outdated binaries. One go command builds the binaries of a directory.
func buildAll(packages []testPackage, _ options) error {
	type target struct {
		dir  string
		race bool
	}
	together := map[target][]string{}
	var targets []target
	for _, p := range packages {
		t := target{filepath.Dir(p.binary), p.race}
		if together[t] == nil {
			targets = append(targets, t)
		}
		together[t] = append(together[t], p.path)
	}
	var builds errgroup.Group
	builds.SetLimit(2) // a build uses every processor
	for _, t := range targets {
		builds.Go(func() error {
			if err := os.MkdirAll(t.dir, 0o755); err != nil {
				return err
			}
			// DWARF would take a third of the linking.
			c := exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-w", "-o", t.dir+string(filepath.Separator))
			if t.race {
				c.Args = append(c.Args, "-race")
			}
			c.Args = append(c.Args, together[t]...)
			if output, err := c.CombinedOutput(); err != nil {
				return &buildError{together[t], string(output), err}
			}
			return nil
		})
	}
	return builds.Wait()
}

// buildError is the error of tests that the go command does not build.
type buildError struct {
	packages []string
	output   string // of the go command
	err      error
}

func (e *buildError) Error() string {
	return fmt.Sprintf("build the tests of %s: %v\n%s", strings.Join(e.packages, " "), e.err, e.output)
}

// Unwrap returns the cause.
func (e *buildError) Unwrap() error { return e.err }

// errFailed reports failed tests; the events name the tests.
var errFailed = errors.New("tests failed")

// runAll runs the binaries, some in parallel, and writes events as whole lines.
func runAll(packages []testPackage, o options) error {
	text, err := exec.Command("go", "tool", "-n", "test2json").Output()
	if err != nil {
		return fmt.Errorf("find test2json: %w", err)
	}
	converter := strings.TrimSpace(string(text))
	var processes []testPackage
	for _, p := range packages {
		list, err := p.divide()
		if err != nil {
			return err
		}
		processes = append(processes, list...)
	}
	m := &merger{out: o.out, left: map[string]int{}, ends: map[string]packageEvent{}}
	for _, p := range processes {
		m.left[p.path]++
	}
	var runs errgroup.Group
	runs.SetLimit(o.atOnce)
	var mu sync.Mutex
	failed := false
	used := map[string]time.Duration{}
	for _, p := range processes {
		runs.Go(func() error {
			seconds, err := p.run(converter, m.write)
			mu.Lock()
			defer mu.Unlock()
			used[p.path] += seconds
			if errors.Is(err, errFailed) {
				failed = true
				return nil
			}
			return err
		})
	}
	if err := runs.Wait(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.dir, "usage.txt"), []byte(usage(used)), 0o644); err != nil {
		return err
	}
	if failed {
		return errFailed
	}
	return nil
}

// divide returns the processes of a package.
func (p testPackage) divide() ([]testPackage, error) {
	if p.parts <= 1 {
		return []testPackage{p}, nil
	}
	text, err := p.command(p.binary, "-test.list", "^(Test|Fuzz|Example)").Output()
	if err != nil {
		return nil, fmt.Errorf("list the tests of %s: %w; run testrun -build first", p.path, err)
	}
	names := make([][]string, p.parts)
	for i, name := range strings.Fields(string(text)) {
		names[i%p.parts] = append(names[i%p.parts], name)
	}
	var list []testPackage
	for _, n := range names {
		if len(n) > 0 {
			part := p
			part.pattern = "^(" + strings.Join(n, "|") + ")$"
			list = append(list, part)
		}
	}
	return list, nil
}

// packageEvent is an event of a package in the form of test2json.
type packageEvent struct {
	Time    time.Time
	Action  string
	Package string
	Test    string  `json:",omitempty"`
	Elapsed float64 `json:",omitempty"`
}

// merger writes events as whole lines. For a package in parts merger writes one start, and one end
// after the last process: "fail" after a failed process, with the longest time.
type merger struct {
	mu    sync.Mutex
	out   io.Writer
	left  map[string]int          // running and waiting processes, by package
	ends  map[string]packageEvent // the end so far
	begun []string                // packages
}

func (m *merger) write(line []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var e packageEvent
	if err := json.Unmarshal(line, &e); err == nil && e.Test == "" {
		switch e.Action {
		case "start":
			if slices.Contains(m.begun, e.Package) {
				return nil
			}
			m.begun = append(m.begun, e.Package)
		case "pass", "fail", "skip":
			m.left[e.Package]--
			if end, others := m.ends[e.Package]; others {
				e.Elapsed = max(e.Elapsed, end.Elapsed)
				if end.Action == "fail" || e.Action == "skip" {
					e.Action = end.Action
				}
			}
			m.ends[e.Package] = e
			if m.left[e.Package] > 0 {
				return nil
			}
			text, err := json.Marshal(e)
			if err != nil {
				return err
			}
			line = append(text, '\n')
		}
	}
	_, err := m.out.Write(line)
	return err
}

// usage is a table of processor seconds, the largest first.
func usage(used map[string]time.Duration) string {
	names := slices.SortedFunc(maps.Keys(used), func(a, b string) int {
		return cmp.Or(cmp.Compare(used[b], used[a]), strings.Compare(a, b))
	})
	var text strings.Builder
	for _, name := range names {
		fmt.Fprintf(&text, "%8.1f  %s\n", used[name].Seconds(), name)
	}
	return text.String()
}

// command runs the binary of a package in the package's directory.
func (p testPackage) command(name string, arguments ...string) *exec.Cmd {
	c := exec.Command(name, arguments...)
	c.Dir = p.dir
	c.Env = append(os.Environ(), "PWD="+p.dir)
	c.Stderr = os.Stderr
	return c
}

// processorTime is the user and system time of an ended process, and of the descendants for which
// an ancestor has waited.
func processorTime(s *os.ProcessState) time.Duration { return s.UserTime() + s.SystemTime() }

// costAll runs every test of the packages alone and prints a table per package.
func costAll(packages []testPackage, o options) error {
	for _, p := range packages {
		list, err := p.command(p.binary, "-test.list", "^Test").Output()
		if err != nil {
			return fmt.Errorf("list the tests of %s: %w; run testrun -build first", p.path, err)
		}
		used := map[string]time.Duration{}
		for _, name := range strings.Fields(string(list)) {
			c := p.command(p.binary, "-test.run", "^"+name+"$", "-test.paniconexit0", "-test.timeout=0")
			c.Stderr = nil // the logs of relays
			err := c.Run()
			if ended := (*exec.ExitError)(nil); errors.As(err, &ended) {
				name += " (failed)"
			} else if err != nil {
				return fmt.Errorf("run %s of %s: %w", name, p.path, err)
			}
			used[name] = processorTime(c.ProcessState)
		}
		if _, err := fmt.Fprintf(o.out, "%s\n%s", p.path, usage(used)); err != nil {
			return err
		}
	}
	return nil
}

// run runs the tests of a package as the go command does, and returns the processor time.
func (p testPackage) run(converter string, write func(line []byte) error) (time.Duration, error) {
	if _, err := os.Stat(p.binary); err != nil {
		return 0, fmt.Errorf("run the tests of %s: %w; run testrun -build first", p.path, err)
	}
	c := p.command(converter, "-t", "-p", p.path, p.binary, "-test.v=test2json", "-test.paniconexit0", "-test.timeout=0",
		"-test.parallel=4")
	if p.pattern != "" {
		c.Args = append(c.Args, "-test.run="+p.pattern)
	}
	events, err := c.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := c.Start(); err != nil {
		return 0, fmt.Errorf("run the tests of %s: %w", p.path, err)
	}
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			if !bytes.HasSuffix(line, []byte("\n")) {
				line = append(line, '\n')
			}
			if err := write(line); err != nil {
				return 0, errors.Join(err, c.Process.Kill(), c.Wait())
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return 0, errors.Join(err, c.Wait())
		}
	}
	var ended *exec.ExitError
	if err := c.Wait(); errors.As(err, &ended) {
		return processorTime(c.ProcessState), errFailed
	} else if err != nil {
		return 0, err
	}
	return processorTime(c.ProcessState), nil
}
