package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/integration/vm"
	"github.com/peerlane/peerlane/integration/vm/control"
)

const module = "github.com/peerlane/peerlane/"

// place is a place of cases, named as in matrix.txt.
type place struct {
	name, image string
	guests      int
	// nightly excludes a place from runs that do not name it.
	nightly bool
	// whole lists packages whose tests all run in the place. Of further packages only the tests
	// with a cell run.
	whole   []string
	targets []target
}

// target is a package with the names of some tests in the matrix, or with a pattern, or with every
// test if both are empty.
type target struct {
	pkg   string
	tests []string
	run   string
}

// pattern returns the -test.run pattern; empty for every test.
func (t target) pattern() string {
	if t.tests == nil {
		return t.run
	}
	return patternOf(t.tests)
}

// places has the slowest places first. Tests on the host create separate machines, and break the
// machines.
var places = []place{
	{name: "vm-full", image: vm.Full, guests: 1, whole: []string{"integration/vm/cases/full",
		"integration/vm/cases/units", "integration/vm/cases/packages"}},
	{name: "vm-small", image: vm.Small, guests: 1, whole: []string{"integration/vm/cases/small"}},
	{name: "vm-pair", image: vm.Small, guests: 2, whole: []string{"integration/vm/cases/pair"}},
	{name: "vm-host", whole: []string{"integration/vm"}},
	{name: "vm-nightly", image: vm.Small, guests: 1, nightly: true},
}

// atOnce is the number of concurrent places. A guest uses one processor of the host, regardless of
// the number of its processors.
const atOnce = 2

// margin is the time for a test binary to end and print the reason after its time-out.
const margin = 90 * time.Second

func testCommand() *cobra.Command {
	var o testOptions
	cmd := &cobra.Command{
		Use:   "test [package...]",
		Short: "Run tests in machines, and print their events as `go test -json` does",
		Long: `Run tests in machines, and print the events as go test -json does, with the place
of each event. Without packages every case with a place in a machine runs; with
packages the tests of the packages run, in the machines of --place.

Afterwards bin/vm/PLACE has the artifact directories of the tests and the console of
each machine.`,
		RunE: func(cmd *cobra.Command, packages []string) error {
			o.packages = packages
			return o.run(cmd.Context())
		},
	}
	cmd.Flags().StringSliceVar(&o.places, "place", nil,
		"`PLACES` to run in: vm-small, vm-full, vm-pair, vm-host, vm-nightly")
	cmd.Flags().StringVar(&o.pattern, "run", "", "run only the tests that match `PATTERN`")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 25*time.Minute, "time-out of each test binary")
	cmd.Flags().StringSliceVar(&o.environment, "env", nil, "`NAME=VALUE` for the tests")
	return cmd
}

type testOptions struct {
	places, packages, environment []string
	pattern                       string
	timeout                       time.Duration

	testsFailed atomic.Bool
}

// errTests reports failed tests without another error.
var errTests = errors.New("tests failed")

func (o *testOptions) run(ctx context.Context) error {
	chosen, err := o.choose(ctx)
	if err != nil {
		return err
	}
	// Before the places run: places share images.
	for _, p := range chosen {
		if p.image == "" {
			continue
		}
		if _, err := images(ctx, p.image); err != nil {
			return err
		}
	}
	next := make(chan int, len(chosen))
	for i := range chosen {
		next <- i
	}
	close(next)
	failed := make([]error, len(chosen))
	var group sync.WaitGroup
	for range min(atOnce, len(chosen)) {
		group.Go(func() {
			for i := range next {
				if ctx.Err() != nil {
					return
				}
				if err := o.runPlace(ctx, chosen[i]); err != nil {
					failed[i] = fmt.Errorf("%s: %w", chosen[i].name, err)
				}
			}
		})
	}
	group.Wait()
	if err := errors.Join(append(failed, ctx.Err())...); err != nil {
		return err
	}
	if o.testsFailed.Load() {
		return errTests
	}
	return nil
}

// choose returns the tests of every place.
func (o *testOptions) choose(ctx context.Context) ([]place, error) {
	names := o.places
	if len(names) == 0 && len(o.packages) > 0 {
		names = []string{"vm-small"}
	}
	source, err := repository()
	if err != nil {
		return nil, err
	}
	var targets []target
	if len(o.packages) > 0 {
		c := exec.CommandContext(ctx, "go", append([]string{"list", "-tags", "vm", "-f",
			"{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"}, o.packages...)...)
		c.Dir, c.Stderr = source, os.Stderr
		out, err := c.Output()
		if err != nil {
			return nil, fmt.Errorf("go list %s: %w", strings.Join(o.packages, " "), err)
		}
		for _, pkg := range strings.Fields(string(out)) {
			targets = append(targets, target{pkg: strings.TrimPrefix(pkg, module)})
		}
		if len(targets) == 0 {
			return nil, fmt.Errorf("no package of %s has tests", strings.Join(o.packages, " "))
		}
	}
	var chosen []place
	for _, p := range places {
		if len(names) > 0 && !slices.Contains(names, p.name) || len(names) == 0 && p.nightly {
			continue
		}
		if p.targets = targets; targets == nil {
			if p.targets, err = p.ofMatrix(filepath.Join(source, matrix)); err != nil {
				return nil, err
			}
		}
		chosen = append(chosen, p)
	}
	if len(chosen) < len(names) {
		return nil, fmt.Errorf("unknown place among %s", strings.Join(names, ", "))
	}
	if o.pattern != "" {
		return o.narrow(ctx, chosen)
	}
	return chosen, nil
}

// narrow keeps only places with a test that matches the pattern, so that no machine boots in vain.
func (o *testOptions) narrow(ctx context.Context, chosen []place) ([]place, error) {
	top, _, _ := strings.Cut(o.pattern, "/")
	wanted, err := regexp.Compile(top)
	if err != nil {
		return nil, fmt.Errorf("--run %s: %w", o.pattern, err)
	}
	var narrowed []place
	for _, p := range chosen {
		var left []target
		for _, t := range p.targets {
			names := t.tests
			if names == nil {
				if names, err = testsOf(ctx, t.pkg); err != nil {
					return nil, err
				}
			}
			names = slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !wanted.MatchString(topLevel(n)) })
			switch {
			case len(names) == 0:
				continue
			case t.tests == nil || top != o.pattern: // the pattern selects the parts
				for i, n := range names {
					names[i] = topLevel(n)
				}
				t.tests, t.run = nil, "^("+strings.Join(names, "|")+")$"+strings.TrimPrefix(o.pattern, top)
			default:
				t.tests = names
			}
			left = append(left, t)
		}
		if p.targets = left; len(left) > 0 {
			narrowed = append(narrowed, p)
		}
	}
	if len(narrowed) == 0 {
		return nil, fmt.Errorf("--run %s: no place has such a test", o.pattern)
	}
	return narrowed, nil
}

var testFunction = regexp.MustCompile(`(?m)^func (Test\w*)\(\w* \*testing\.T\)`)

// testsOf lists the tests in the source of a package.
func testsOf(ctx context.Context, pkg string) ([]string, error) {
	const format = "{{$dir := .Dir}}{{range .TestGoFiles}}{{$dir}}/{{.}}\n{{end}}{{range " +
		".XTestGoFiles}}{{$dir}}/{{.}}\n{{end}}"
	out, err := exec.CommandContext(ctx, "go", "list", "-tags", "vm", "-f", format, module+pkg).Output()
	if err != nil {
		return nil, fmt.Errorf("go list %s: %w", pkg, err)
	}
	var names []string
	for _, file := range strings.Fields(string(out)) {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, m := range testFunction.FindAllSubmatch(text, -1) {
			if name := string(m[1]); name != "TestMain" {
				names = append(names, name)
			}
		}
	}
	return names, nil
}

func (o *testOptions) runPlace(ctx context.Context, p place) (err error) {
	if p.guests == 0 {
		return o.runHere(ctx, p)
	}
	s, err := newSession(ctx, p.image)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	defer func() { err = errors.Join(err, s.keep(filepath.Join(s.source, "bin", "vm", p.name))) }()
	// The machine boots while its tests are compiled.
	compiled := make(chan error, 1)
	go func() { compiled <- o.compile(ctx, s, p) }()
	started := s.start(ctx, p.guests)
	if err := errors.Join(<-compiled, started); err != nil {
		return err
	}
	logf("%s: up after %.1f s, of which the guest took %.1f s", p.name, s.machines[0].Booted.Seconds(),
		s.machines[0].Ready.Uptime.Seconds())
	var failed []error
	for _, t := range p.targets {
		if err := o.runTarget(ctx, s, p, t); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", t.pkg, err))
		}
	}
	return errors.Join(failed...)
}

// runHere runs tests on the host.
func (o *testOptions) runHere(ctx context.Context, p place) error {
	logf("%s: on this host", p.name)
	arguments := []string{"test", "-json", "-count=1", "-tags", "vm", "-vet=off", "-timeout", o.timeout.String(), "-run",
		o.pattern}
	for _, t := range p.targets {
		arguments = append(arguments, module+t.pkg)
	}
	c := vm.Program(ctx, "go", arguments...)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	err = addPlace(out, p.name)
	ended := c.Wait()
	var status *exec.ExitError
	if errors.As(ended, &status) && ctx.Err() == nil {
		o.testsFailed.Store(true) // or their build failed; the events report this too
		ended = nil
	}
	return errors.Join(err, ended)
}

// binary returns the name of a package's test binary.
func binary(pkg string) string {
	return strings.ReplaceAll(pkg, "/", "-") + ".test"
}

func (o *testOptions) compile(ctx context.Context, s *session, p place) error {
	for _, t := range p.targets {
		if err := goTool(ctx, s.source, nil, "test", "-c", "-tags", "vm", "-vet=off", "-o",
			filepath.Join(s.share, "test", binary(t.pkg)), module+t.pkg); err != nil {
			return err
		}
	}
	return nil
}

func (o *testOptions) runTarget(ctx context.Context, s *session, p place, t target) error {
	out := path.Join("/share/out", t.pkg)
	if err := os.MkdirAll(filepath.Join(s.share, "out", t.pkg), 0o755); err != nil {
		return err
	}
	command := control.Command{
		Argv: []string{
			"/share/test/" + binary(t.pkg), "-test.v=test2json", "-test.paniconexit0",
			"-test.timeout=" + o.timeout.String(), "-test.outputdir=" + out, "-test.artifacts",
		},
		Env: append([]string{"PEERLANE_TEST_BINARIES=/share/bin", "HOME=/root"}, o.environment...),
		Dir: path.Join("/source", t.pkg),
	}
	if pattern := t.pattern(); pattern != "" {
		command.Argv = append(command.Argv, "-test.run="+pattern)
	}
	events, err := newEvents(ctx, p.name, module+t.pkg)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeoutCause(ctx, o.timeout+margin,
		fmt.Errorf("tests still running %v after their time-out of %v", margin, o.timeout))
	defer cancel()
	err = s.machines[0].Run(limited, command, nil, events, events)
	var status *control.ExitError
	switch {
	case errors.As(err, &status):
		o.testsFailed.Store(true)
		err = nil
	case err != nil:
		// Attach the error to the running test in the report.
		fmt.Fprintf(events, "\n%v\n", err)
	}
	return errors.Join(err, events.Close())
}

// events converts the output of a test binary to events, and adds the place.
type events struct {
	io.WriteCloser
	convert *exec.Cmd
	done    chan error
}

func newEvents(ctx context.Context, place, pkg string) (*events, error) {
	e := &events{convert: exec.CommandContext(ctx, "go", "tool", "test2json", "-t", "-p", pkg), done: make(chan error, 1)}
	var err error
	if e.WriteCloser, err = e.convert.StdinPipe(); err != nil {
		return nil, err
	}
	from, err := e.convert.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := e.convert.Start(); err != nil {
		return nil, fmt.Errorf("go tool test2json: %w", err)
	}
	go func() { e.done <- addPlace(from, place) }()
	return e, nil
}

// stdout serialises events.
var stdout sync.Mutex

func addPlace(from io.Reader, place string) error {
	dec := json.NewDecoder(from)
	for {
		var event map[string]any
		err := dec.Decode(&event)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the events of test2json: %w", err)
		}
		event["Place"] = place
		var line bytes.Buffer
		if err := json.NewEncoder(&line).Encode(event); err != nil {
			return err
		}
		stdout.Lock()
		_, err = os.Stdout.Write(line.Bytes())
		stdout.Unlock()
		if err != nil {
			return err
		}
	}
}

func (e *events) Close() error {
	err := e.WriteCloser.Close()
	return errors.Join(err, <-e.done, e.convert.Wait())
}
