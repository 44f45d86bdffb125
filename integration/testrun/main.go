// Testrun runs the tests of packages like `go test -json`, and keeps their binaries.
//
//	testrun -build [-plain PACKAGES] DIR PACKAGE...     build what is not up to date in DIR
//	testrun [-plain PACKAGES] [-p N] DIR PACKAGE...     run it, and print the events
//
// `go test -count=1` links the binary of each package in each run, which is a sixth of the
// processor time of `make test`; the binaries in DIR are linked when their code changes.
// Packages run in the order of the arguments, N at once. The race detector is on, but in
// the packages of -plain, which are separated by spaces.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

func main() {
	build := flag.Bool("build", false, "build the binaries and run nothing")
	plain := flag.String("plain", "", "the `packages` whose tests run without the race detector")
	atOnce := flag.Int("p", 4, "how many packages run at once")
	flag.Parse()
	if flag.NArg() < 2 || *atOnce < 1 {
		fmt.Fprintln(os.Stderr, "usage: testrun [-build] [-plain PACKAGES] [-p N] DIR PACKAGE...")
		os.Exit(2)
	}
	err := run(*build, strings.Fields(*plain), *atOnce, flag.Arg(0), flag.Args()[1:], os.Stdout)
	if errors.Is(err, errFailed) {
		os.Exit(1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

func run(build bool, plain []string, atOnce int, dir string, patterns []string, out io.Writer) error {
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
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	place(packages, dir)
	if build {
		return buildAll(packages)
	}
	return runAll(packages, atOnce, out)
}

// testPackage is a package that has tests.
type testPackage struct {
	path, dir string
	race      bool
	binary    string
}

// list returns the packages that have tests, in the order of the patterns.
func list(patterns []string) (packages []testPackage, err error) {
	const form = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}\t{{.Dir}}{{end}}"
	c := exec.Command("go", append([]string{"list", "-f", form}, patterns...)...)
	c.Stderr = os.Stderr
	text, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("listing the packages: go list: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if name, dir, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
			packages = append(packages, testPackage{path: name, dir: dir})
		}
	}
	return packages, nil
}

// place says where each binary lies. The go command names a binary by the last element of
// the package's path, so packages of the same name lie in directories of their own.
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

// buildAll builds the binaries that are not up to date. One go command builds all of a
// directory.
func buildAll(packages []testPackage) error {
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
	builds.SetLimit(2) // each uses all processors
	for _, t := range targets {
		builds.Go(func() error {
			if err := os.MkdirAll(t.dir, 0o755); err != nil {
				return err
			}
			// Nobody debugs them: without DWARF a third of the linking is saved.
			c := exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-w", "-o", t.dir+string(filepath.Separator))
			if t.race {
				c.Args = append(c.Args, "-race")
			}
			c.Args = append(c.Args, together[t]...)
			if said, err := c.CombinedOutput(); err != nil {
				return fmt.Errorf("building the tests of %s: %w\n%s", strings.Join(together[t], " "), err, said)
			}
			return nil
		})
	}
	return builds.Wait()
}

// errFailed says that tests failed, which the events tell.
var errFailed = errors.New("tests failed")

// runAll runs the binaries, some at once, and writes their events, each line whole.
func runAll(packages []testPackage, atOnce int, out io.Writer) error {
	text, err := exec.Command("go", "tool", "-n", "test2json").Output()
	if err != nil {
		return fmt.Errorf("looking for test2json: %w", err)
	}
	converter := strings.TrimSpace(string(text))
	var mu sync.Mutex
	write := func(line []byte) error {
		mu.Lock()
		defer mu.Unlock()
		_, err := out.Write(line)
		return err
	}
	var runs errgroup.Group
	runs.SetLimit(atOnce)
	failed := false
	for _, p := range packages {
		runs.Go(func() error {
			err := p.run(converter, write)
			if errors.Is(err, errFailed) {
				mu.Lock()
				defer mu.Unlock()
				failed = true
				return nil
			}
			return err
		})
	}
	if err := runs.Wait(); err != nil {
		return err
	}
	if failed {
		return errFailed
	}
	return nil
}

// run runs the tests of a package, as the go command does.
func (p testPackage) run(converter string, write func(line []byte) error) error {
	if _, err := os.Stat(p.binary); err != nil {
		return fmt.Errorf("running the tests of %s: %w; run testrun -build first", p.path, err)
	}
	c := exec.Command(converter, "-t", "-p", p.path, p.binary, "-test.v=test2json", "-test.paniconexit0", "-test.timeout=0", "-test.parallel=4")
	c.Dir = p.dir
	c.Env = append(os.Environ(), "PWD="+p.dir)
	c.Stderr = os.Stderr
	events, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return fmt.Errorf("running the tests of %s: %w", p.path, err)
	}
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			if !bytes.HasSuffix(line, []byte("\n")) {
				line = append(line, '\n')
			}
			if err := write(line); err != nil {
				return errors.Join(err, c.Process.Kill(), c.Wait())
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return errors.Join(err, c.Wait())
		}
	}
	var ended *exec.ExitError
	if err := c.Wait(); errors.As(err, &ended) {
		return errFailed
	} else if err != nil {
		return err
	}
	return nil
}
