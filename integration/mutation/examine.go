package main

import (
	"context"
	_ "embed" // switch.txt
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/tools/go/packages"
)

//go:embed switch.txt
var helper string

// slack is the time limit of tests with a mutant, beyond ten times the duration without a mutant.
const slack = 10 * time.Second

// subject is a package whose code is changed.
type subject struct {
	*packages.Package
	path, dir, root string // path is relative to root, the directory of the module
	work            string // a directory for files of the run
	mutants         []mutant
	skip            map[int]bool // mutants that do not compile
	testers         []tester
	confine         string
}

// tester is a package with tests: the subject, or an importer of the subject.
type tester struct{ dir, binary string }

// load returns packages without cgo. An argument is PATTERN or PATTERN=TESTER,....
func load(arguments []string) ([]*subject, error) {
	var subjects []*subject
	for _, a := range arguments {
		pattern, testers, _ := strings.Cut(a, "=")
		found, err := loadPattern(pattern)
		if err != nil {
			return nil, err
		}
		for _, p := range found {
			dirs := []string{p.dir}
			for t := range strings.SplitSeq(testers, ",") {
				if t != "" {
					dirs = append(dirs, filepath.Join(p.root, t))
				}
			}
			for _, dir := range dirs {
				p.testers = append(p.testers, tester{dir: dir})
			}
		}
		subjects = append(subjects, found...)
	}
	return subjects, nil
}

func loadPattern(pattern string) ([]*subject, error) {
	list, err := packages.Load(&packages.Config{
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedCompiledGoFiles | packages.NeedSyntax |
			packages.NeedTypes | packages.NeedTypesInfo | packages.NeedImports | packages.NeedModule,
	}, pattern)
	if err != nil {
		return nil, err
	}
	var subjects []*subject
	for _, p := range list {
		if len(p.Errors) > 0 {
			return nil, fmt.Errorf("load %s: %w", p.ID, p.Errors[0])
		}
		if len(p.GoFiles) == 0 || p.Module == nil {
			continue
		}
		if !slices.Equal(p.GoFiles, p.CompiledGoFiles) {
			return nil, fmt.Errorf("%s uses cgo", p.PkgPath)
		}
		s := &subject{Package: p, dir: filepath.Dir(p.GoFiles[0]), root: p.Module.Dir}
		if s.path, err = filepath.Rel(s.root, s.dir); err != nil {
			return nil, err
		}
		subjects = append(subjects, s)
	}
	if len(subjects) == 0 {
		return nil, fmt.Errorf("no package matches %q", pattern)
	}
	return subjects, nil
}

// examine builds a package with mutants and runs the chosen mutants.
func examine(s settings, out io.Writer, p *subject) (r result, err error) {
	r.path = p.path
	if p.work, err = os.MkdirTemp("", "peerlane-mutation-"); err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.work)) }()
	if err := p.build(s); err != nil {
		return r, err
	}
	r.mutants = len(p.mutants) - len(p.skip)
	tests, err := p.traces(s, out)
	if err != nil {
		return r, err
	}
	for _, id := range choose(len(p.mutants), p.skip, s.sample, s.seed) {
		verdict, err := p.try(id, tests)
		if err != nil {
			return r, err
		}
		switch verdict {
		case killed:
			r.killed++
		case expired:
			r.expired++
		case missed:
			r.missed++
			m := p.mutants[id]
			m.action += " (no test reaches it)"
			r.survivors = append(r.survivors, m)
		case survived:
			r.survivors = append(r.survivors, p.mutants[id])
		}
		if s.verbose {
			fmt.Fprintf(out, "%s: %s\n", verdict, p.mutants[id])
		}
	}
	return r, nil
}

// compileError is a line of the compiler's output.
var compileError = regexp.MustCompile(`(?m)^(\S+\.go):(\d+):\d+: `)

// build compiles the test binary. It removes mutants on lines that do not compile.
func (p *subject) build(s settings) error {
	p.confine = filepath.Join(p.work, "confine")
	own := exec.Command("go", "build", "-o", p.confine, "github.com/peerlane/peerlane/integration/confine")
	own.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := own.CombinedOutput(); err != nil {
		return fmt.Errorf("build confine: %w\n%s", err, text)
	}
	p.skip = map[int]bool{}
	for range 8 {
		overlay, err := p.instrument(s.files)
		if err != nil {
			return err
		}
		text, err := p.compile(overlay)
		if err == nil {
			return nil
		}
		before := len(p.skip)
		for _, e := range compileError.FindAllStringSubmatch(string(text), -1) {
			for id, m := range p.mutants {
				if filepath.Base(e[1]) == filepath.Base(m.file) && e[2] == strconv.Itoa(m.line) {
					p.skip[id] = true
				}
			}
		}
		if len(p.skip) == before {
			return fmt.Errorf("build with mutants: %w\n%s", err, text)
		}
	}
	return errors.New("build with mutants: too many mutants do not compile")
}

// compile compiles the test binaries of the testers that have tests.
func (p *subject) compile(overlay string) (text []byte, err error) {
	var built []tester
	for n, t := range p.testers {
		t.binary = filepath.Join(p.work, fmt.Sprintf("tests%d", n))
		c := exec.Command("go", "test", "-c", "-vet=off", "-gcflags=-e", "-overlay", overlay, "-o", t.binary, ".")
		c.Dir = t.dir
		if text, err = c.CombinedOutput(); err != nil {
			return text, err
		}
		if _, err := os.Stat(t.binary); err == nil {
			built = append(built, t)
		}
	}
	p.testers = built
	return nil, nil
}

// instrument writes the files with mutants and returns the file for -overlay.
func (p *subject) instrument(files *regexp.Regexp) (string, error) {
	m := mutator{info: p.TypesInfo, pkg: p.Types, fset: p.Fset, skip: p.skip}
	replace := map[string]string{}
	write := func(path string, text []byte) error {
		to := filepath.Join(p.work, filepath.Base(path))
		replace[path] = to
		return os.WriteFile(to, text, 0o600)
	}
	for n, f := range p.Syntax {
		path := p.CompiledGoFiles[n]
		if ast.IsGenerated(f) || !files.MatchString(filepath.Base(path)) {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		name, err := filepath.Rel(p.root, path)
		if err != nil {
			return "", err
		}
		if err := write(path, m.file(name, text, f)); err != nil {
			return "", err
		}
	}
	if p.mutants = m.mutants; len(p.mutants) == 0 {
		return "", errors.New("no mutants")
	}
	switches := strings.NewReplacer("PACKAGE", p.Name, "COUNT", strconv.Itoa(len(p.mutants))).Replace(helper)
	if err := write(filepath.Join(p.dir, "zz_mutation_switch.go"), []byte(switches)); err != nil {
		return "", err
	}
	overlay := filepath.Join(p.work, "overlay.json")
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	return overlay, os.WriteFile(overlay, text, 0o600)
}

// trace is a test with the reached mutants.
type trace struct {
	tester
	name    string
	took    time.Duration
	reached []byte
}

// traces runs tests one by one without a mutant. Failing and slow tests are reported and not used.
func (p *subject) traces(s settings, out io.Writer) ([]trace, error) {
	chosen, err := regexp.Compile(s.run)
	if err != nil {
		return nil, err
	}
	var tests []trace
	for _, by := range p.testers {
		list := exec.Command(by.binary, "-test.list", "^(Test|Fuzz|Example)")
		list.Dir = by.dir
		names, err := list.Output()
		if err != nil {
			return nil, fmt.Errorf("list the tests of %s: %w", by.dir, err)
		}
		for _, name := range strings.Fields(string(names)) {
			if !chosen.MatchString(name) {
				continue
			}
			t, why, err := p.trace(by, name, s.slow)
			if err != nil {
				return nil, err
			}
			if why != "" {
				fmt.Fprintf(out, "not used: %s of %s %s\n", name, filepath.Base(by.dir), why)
				continue
			}
			tests = append(tests, t)
		}
	}
	slices.SortStableFunc(tests, func(a, b trace) int { return int(a.took - b.took) })
	return tests, nil
}

// trace runs a test without a mutant. why is the reason not to use the test.
func (p *subject) trace(by tester, name string, slow time.Duration) (t trace, why string, err error) {
	file := filepath.Join(p.work, "reached")
	if err := os.WriteFile(file, make([]byte, len(p.mutants)), 0o600); err != nil {
		return trace{}, "", err
	}
	begin := time.Now()
	// On a busy machine a fast test can take long.
	o, err := p.runTests(by, []string{name}, 10*slow, "PEERLANE_MUTANTS_REACHED="+file)
	switch {
	case err != nil:
		return trace{}, "", err
	case o.late || o.processor > slow:
		return trace{}, fmt.Sprintf("takes more than %v of processor time", slow), nil
	case !o.passed:
		return trace{}, "fails without a mutant", nil
	}
	t = trace{tester: by, name: name, took: time.Since(begin)}
	t.reached, err = os.ReadFile(file)
	return t, "", err
}

// outcome is the result of a run of tests.
type outcome struct {
	passed, late bool
	processor    time.Duration // of the tests and of the processes that they waited for
}

// runTests runs tests in new namespaces, in the directory of the package, within a limit.
func (p *subject) runTests(by tester, names []string, limit time.Duration, variables ...string) (outcome, error) {
	temporary, err := os.MkdirTemp(p.work, "t")
	if err != nil {
		return outcome{}, err
	}
	defer os.RemoveAll(temporary) // after a failure examine removes it with p.work
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c := exec.CommandContext(ctx, p.confine, by.binary, "-test.failfast", "-test.timeout=0",
		"-test.run=^("+strings.Join(names, "|")+")$")
	c.Dir, c.Env = by.dir, append(append(os.Environ(), "TMPDIR="+temporary), variables...)
	c.WaitDelay = slack
	err = c.Run()
	var failed *exec.ExitError
	if err != nil && ctx.Err() == nil && !errors.As(err, &failed) {
		return outcome{}, err
	}
	o := outcome{passed: err == nil, late: ctx.Err() != nil}
	if s := c.ProcessState; s != nil {
		o.processor = s.UserTime() + s.SystemTime()
	}
	return o, nil
}

// verdict is the outcome of a mutant.
type verdict string

const (
	killed   verdict = "killed"
	expired  verdict = "killed by the time limit"
	survived verdict = "survived"
	missed   verdict = "not reached"
)

// try runs the tests that reach a mutant, the fast half first.
func (p *subject) try(id int, tests []trace) (verdict, error) {
	reaching := slices.DeleteFunc(slices.Clone(tests), func(t trace) bool { return t.reached[id] == 0 })
	if len(reaching) == 0 {
		return missed, nil
	}
	half := (len(reaching) + 1) / 2
	for _, part := range [][]trace{reaching[:half], reaching[half:]} {
		for _, by := range p.testers {
			var names []string
			limit := slack
			for _, t := range part {
				if t.tester == by {
					names = append(names, t.name)
					limit += 10 * t.took
				}
			}
			if len(names) == 0 {
				continue
			}
			o, err := p.runTests(by, names, limit, "PEERLANE_MUTANT="+strconv.Itoa(id))
			switch {
			case err != nil:
				return "", err
			case o.late:
				return expired, nil
			case !o.passed:
				return killed, nil
			}
		}
	}
	return survived, nil
}
