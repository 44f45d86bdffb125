// Wording checks the texts of this project: comments and errors of packages, names of tests,
// subjects of commits, comparisons of error texts in tests, first words of errors, and the groups of
// imports.
// docs/contributing.md has the rules. limits.txt lists the packages above the limits, with the
// largest values that pass; texts.txt has the limits of comparisons, lines.txt the limits of long lines,
// gerunds.txt those of errors that begin with a gerund.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

func main() {
	history := flag.Bool("history", false, "fail without a repository, in place of a notice: for CI")
	update := flag.Bool("update", false, "lower the values of the lists to the measured values")
	root := flag.String("root", ".", "the root of the repository")
	flag.Parse()
	if err := run(os.Stdout, *root, *history, *update); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run makes the checks, and returns the violations in one error.
func run(out io.Writer, root string, history, update bool) error {
	list, err := readLimits(root)
	if err != nil {
		return err
	}
	found, err := measureAll(root)
	if err != nil {
		return err
	}
	if update {
		list.values = lowered(list.values, found)
		if err := list.write(root); err != nil {
			return err
		}
	}
	errs := check(list.values, found)
	for _, check := range []func() error{
		func() error { return checkTexts(root, update) },
		func() error { return checkGerunds(root, update) },
		func() error { return checkLines(root, found, update) },
		func() error { return checkAllImports(root) },
	} {
		if err := check(); err != nil {
			errs = append(errs, err)
		}
	}
	count, err := checkCommits(root, list)
	switch {
	case errors.Is(err, errNoHistory) && !history:
		fmt.Fprintf(out, "wording: subjects of commits are not checked: %v\n", err)
	case err != nil:
		errs = append(errs, err)
	default:
		fmt.Fprintf(out, "wording: %d packages, %d commits\n", len(found), count)
	}
	return errors.Join(errs...)
}
