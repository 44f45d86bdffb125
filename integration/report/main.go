// Command report reads the events of `go test -json` on standard input and prints one line per
// package, the whole output of failures, and at the end every skipped test with its reason.
//
//	go test -json ./... | go run ./integration/report -matrix integration/matrix.txt -places host
//
// The events may come from several places, such as the virtual machines of integration/vm: the
// field Place of an event, which the go command does not write, names the place. An event without
// Place belongs to the first of -places.
//
// With -again, the given command repeats failures that may be chance. A test that then passes is
// reported as flaky, with the cause in the file of -flaky.
//
// The exit status is 1 when a test or a build failed, when the events stop before their package
// ends, when no test ran, and, with a matrix, when a cell of one of the places is not covered, or
// when a test was skipped without permission of the matrix. It is 2 for a wrong command line.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	matrix := flag.String("matrix", "", "the `file` that assigns cases to places; without it cells are not checked")
	list := flag.String("places", placeHost, "the places that the events come from, of "+strings.Join(everyPlace,
		",")+"; the matrix's cells of each must be covered")
	again := flag.String("again", "",
		"a `command` of the shell that writes the events of $TESTS of $PACKAGE in $PLACE: it runs once more what failed")
	flaky := flag.String("flaky", "", "the `file` of the tests that have been flaky, each with its cause")
	words := flag.Bool("v", false, "also print the output of tests that pass: figures")
	flag.Parse()
	places, err := parsePlaces(*list)
	if err == nil && flag.NArg() > 0 {
		err = fmt.Errorf("%q: unexpected arguments; the events are read from standard input", flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	good, err := report(os.Stdin, places, *matrix, *flaky, *again, *words)
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
	}
	if !good {
		os.Exit(1)
	}
}

func report(events io.Reader, places []string, matrix, flaky, again string, words bool) (good bool, err error) {
	var cells []cell
	causes, err := readFlaky(flaky)
	if err != nil {
		return false, err
	}
	if matrix != "" {
		// Read the matrix first, so that an error in the file does not cost a whole run.
		if cells, err = readMatrix(matrix); err != nil {
			return false, err
		}
	}
	s, err := read(places, events, os.Stdout, words)
	if err != nil {
		return false, err
	}
	s.causes = causes
	if again != "" {
		if err := s.tryAgain(again, os.Stdout); err != nil {
			return false, err
		}
	}
	if matrix != "" {
		s.compare(cells)
	}
	s.print(os.Stdout)
	return s.good(), nil
}
