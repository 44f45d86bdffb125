// Mutation changes the code of packages in small steps and reports the changes that tests do not notice:
//
//	mutation [-sample N] [-seed SEED] [-files PATTERN] [-run PATTERN] [-slow TIME] PACKAGE[=TESTER,...]...
//
// Tests of PACKAGE and of the packages TESTER, directories of the module, run.
//
// A mutant negates a condition, moves a boundary, ignores an operand of && or ||, exchanges + and -, adds
// one to a constant, or removes a statement. A test binary has the mutants of a package, and an environment
// variable switches a mutant on: one build serves a package. A first run of a test records the mutants that
// the test reaches. A mutant runs the tests that reach the mutant, fast tests first. A mutant is killed if a
// test fails, crashes or exceeds the time limit. A mutant that no test reaches survives. Generated files,
// logging, panics, durations, constants of other packages, values beside an error, numbers in messages of
// errors and methods Error have no mutants: tests do not compare texts of errors. A capacity of make has no
// mutant: it changes no result.
//
// [gremlins] builds a test binary per mutant, does not sample, and does not remove statements.
//
// [gremlins]: https://github.com/go-gremlins/gremlins
package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"text/tabwriter"
	"time"
)

func main() {
	s := settings{}
	flag.IntVar(&s.sample, "sample", 100, "run at most `N` mutants of each package")
	flag.Uint64Var(&s.seed, "seed", 1, "choose the mutants by this number")
	files := flag.String("files", "", "mutate files whose names match this `PATTERN`")
	flag.StringVar(&s.run, "run", "", "run tests whose names match this `PATTERN`")
	flag.DurationVar(&s.slow, "slow", 5*time.Second, "do not use tests that take more processor `TIME` than this")
	flag.BoolVar(&s.verbose, "v", false, "print every mutant with its result")
	flag.Parse()
	var err error
	if s.files, err = regexp.Compile(*files); err == nil {
		err = run(s, os.Stdout, flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutation:", err)
		os.Exit(1)
	}
}

type settings struct {
	sample  int
	seed    uint64
	files   *regexp.Regexp
	run     string
	slow    time.Duration
	verbose bool
}

// result is the outcome of the mutants of a package.
type result struct {
	path                             string
	mutants, killed, expired, missed int
	survivors                        []mutant
}

func (r result) sampled() int { return r.killed + r.expired + len(r.survivors) }

// run tests the mutants of packages and writes the report.
func run(s settings, out io.Writer, arguments []string) error {
	subjects, err := load(arguments)
	if err != nil {
		return err
	}
	var results []result
	for _, p := range subjects {
		r, err := examine(s, out, p)
		if err != nil {
			return fmt.Errorf("%s: %w", p.path, err)
		}
		results = append(results, r)
		if err := printSurvivors(out, r); err != nil {
			return err
		}
	}
	return printTable(out, results)
}

// choose returns the identifiers of at most n of count mutants, in ascending order, without those of skip.
func choose(count int, skip map[int]bool, n int, seed uint64) []int {
	list := rand.New(rand.NewPCG(seed, 0)).Perm(count)
	list = slices.DeleteFunc(list, func(id int) bool { return skip[id] })
	list = list[:min(n, len(list))]
	slices.Sort(list)
	return list
}

func printSurvivors(out io.Writer, r result) error {
	slices.SortStableFunc(r.survivors, func(a, b mutant) int {
		return cmp.Or(cmp.Compare(a.file, b.file), a.line-b.line)
	})
	for _, m := range r.survivors {
		if _, err := fmt.Fprintf(out, "survived: %s\n", m); err != nil {
			return err
		}
	}
	return nil
}

// printTable prints the counts of each package and of all packages.
func printTable(out io.Writer, results []result) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "package\tmutants\trun\tkilled\tby time limit\tsurvived\tnot reached\tsurvivors")
	var all result
	row := func(r result) {
		share := 100 * float64(len(r.survivors)) / float64(max(1, r.sampled()))
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%.1f %%\n",
			r.path, r.mutants, r.sampled(), r.killed+r.expired, r.expired, len(r.survivors), r.missed, share)
	}
	for _, r := range results {
		row(r)
		all.mutants += r.mutants
		all.killed += r.killed
		all.expired += r.expired
		all.missed += r.missed
		all.survivors = append(all.survivors, r.survivors...)
	}
	if len(results) > 1 {
		all.path = "all"
		row(all)
	}
	return w.Flush()
}
