// Command fuzz runs the fuzz targets of Go packages for a time, as many targets in parallel as
// there are processors, with one worker per target. It prints a line for each target, and the whole
// output of a failed target.
//
//	go run ./integration/fuzz -time 10s ./...
//
// The exit status is 1 when a target failed, and 2 for a wrong command line or a failed search for
// targets.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"
)

func main() {
	length := flag.Duration("time", time.Minute, "duration of fuzzing each target")
	match := flag.String("run", "", "only targets whose PACKAGE.NAME matches this `pattern`")
	goCommand := flag.String("go", "go", "the go `command`")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: fuzz [flags] PACKAGE...")
		flag.PrintDefaults()
	}
	flag.Parse()
	wanted, err := regexp.Compile(*match)
	if err == nil && flag.NArg() == 0 {
		err = fmt.Errorf("no package was given")
	}
	var all []target
	if err == nil {
		all, err = find(*goCommand, flag.Args())
	}
	var chosen []target
	for _, t := range all {
		if wanted != nil && wanted.MatchString(t.pkg+"."+t.name) {
			chosen = append(chosen, t)
		}
	}
	if err == nil && len(chosen) == 0 {
		err = fmt.Errorf("no target of %d matches %q", len(all), *match)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(2)
	}
	if failed := each(chosen, runtime.NumCPU(), os.Stdout, func(t target) (string, bool) {
		return t.fuzz(*goCommand, *length)
	}); failed > 0 {
		fmt.Fprintf(os.Stderr, "fuzz: %d of %d targets failed\n", failed, len(chosen))
		os.Exit(1)
	}
}

// target is a fuzz function.
type target struct {
	pkg  string // import path
	name string
}

// find returns the fuzz targets of packages, by the names for `go list`.
func find(goCommand string, packages []string) ([]target, error) {
	list := exec.Command(goCommand, append([]string{"list", "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles"},
		packages...)...)
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var targets []target
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath, Dir           string
			TestGoFiles, XTestGoFiles []string
		}
		if err := decoder.Decode(&p); err == io.EOF {
			return targets, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		for _, name := range append(p.TestGoFiles, p.XTestGoFiles...) {
			names, err := targetsOf(filepath.Join(p.Dir, name))
			if err != nil {
				return nil, err
			}
			for _, name := range names {
				targets = append(targets, target{pkg: p.ImportPath, name: name})
			}
		}
	}
}

// targetsOf returns the fuzz targets of a file.
func targetsOf(path string) ([]string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Fuzz") {
			names = append(names, f.Name.Name)
		}
	}
	return names, nil
}

// each fuzzes targets, some in parallel, prints the result of every target and returns the number
// of failures.
func each(targets []target, atOnce int, out io.Writer, fuzz func(target) (report string, good bool)) (failed int) {
	next := make(chan target)
	var mu sync.Mutex
	var workers sync.WaitGroup
	for range min(atOnce, len(targets)) {
		workers.Go(func() {
			for t := range next {
				report, good := fuzz(t)
				mu.Lock()
				if !good {
					failed++
				}
				fmt.Fprint(out, report)
				mu.Unlock()
			}
		})
	}
	for _, t := range targets {
		next <- t
	}
	close(next)
	workers.Wait()
	return failed
}

// tries is the maximum number of runs of a target if runs end by the defect of Go that
// endedByItsDeadline detects.
const tries = 3

// fuzz runs a target, and returns a sentence with the result.
func (t target) fuzz(goCommand string, length time.Duration) (report string, good bool) {
	return t.fuzzBy(func() (string, error) {
		c := exec.Command(goCommand, "test", "-run", "^$", "-fuzz", "^"+t.name+"$", "-fuzztime", length.String(),
			"-fuzzminimizetime", "10x", "-parallel", "1", t.pkg)
		out, err := c.CombinedOutput()
		return string(out), err
	})
}

func (t target) fuzzBy(run func() (string, error)) (report string, good bool) {
	for try := 1; ; try++ {
		out, err := run()
		switch {
		case err == nil:
			return fmt.Sprintf("%sok    %s %s: %s\n", report, t.pkg, t.name, figures(out)), true
		case try < tries && t.endedByItsDeadline(out):
			report += fmt.Sprintf(
				"again %s %s: Go's fuzzer reported the end of its own time as a failure (golang/go#75804); no input "+
					"failed\n", t.pkg, t.name)
		default:
			return fmt.Sprintf("%sFAIL  %s %s: %v\n%s", report, t.pkg, t.name, err, out), false
		}
	}
}

// endedByItsDeadline reports whether a run failed only by a defect of Go before 1.27: the end of
// -fuzztime can count as a failure of the target (golang/go#75804). For a failing input the fuzzer
// always writes a file, and the output names the file with the message of the target; the same
// holds for a panic.
func (t target) endedByItsDeadline(out string) bool {
	failures, expected := 0, false
	lines := bufio.NewScanner(strings.NewReader(out))
	for after := false; lines.Scan(); {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, "fuzz: "), strings.HasPrefix(line,
			"warning: "), line == "FAIL", line == "exit status 1", strings.HasPrefix(line, "FAIL\t"), line == "":
		case strings.HasPrefix(line, "--- FAIL: "+t.name+" ("):
			failures++
			after = true
			continue
		case after && line == "    context deadline exceeded":
			expected = true
		default:
			return false
		}
		after = false
	}
	return failures == 1 && expected
}

var lastLine = regexp.MustCompile(`(?m)^fuzz: elapsed: (\S+), (execs: \d+).*?(new interesting: \d+)`)

// figures returns the last figures of the fuzzer.
func figures(out string) string {
	found := lastLine.FindAllStringSubmatch(out, -1)
	if len(found) == 0 {
		return "no figures"
	}
	last := found[len(found)-1]
	return fmt.Sprintf("%s, %s, %s", last[1], last[2], last[3])
}
