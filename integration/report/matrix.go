package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Where tests run.
const (
	placeHost     = "host"       // `make test`, on the machine that builds Peerlane
	placeEngines  = "engines"    // `make test-engines`, in container engines on that machine
	placeCluster  = "cluster"    // `make test-cluster`, in clusters of one node on that machine
	placePackages = "packages"   // `make test-packages`, on that machine
	placeVMSmall  = "vm-small"   // the virtual machine with its own init
	placeVMFull   = "vm-full"    // the virtual machine with systemd
	placeVMPair   = "vm-pair"    // two virtual machines, joined by a network
	placeVMHost   = "vm-host"    // the host of virtual machines with faults
	placeNightly  = "vm-nightly" // the vm-small of `make nightly`
	placeGPUs     = "gpus"       // a machine with NVIDIA's driver, by hand
)

var everyPlace = []string{placeHost, placeEngines, placeCluster, placePackages, placeVMSmall, placeVMFull,
	placeVMPair, placeVMHost,
	placeNightly, placeGPUs}

// parsePlaces reads a comma-separated list of places.
func parsePlaces(list string) ([]string, error) {
	var places []string
	for _, p := range strings.Split(list, ",") {
		if !slices.Contains(everyPlace, p) {
			return nil, fmt.Errorf("-places %s: unknown place %q; use one of %s", list, p,
				strings.Join(everyPlace, ", "))
		}
		if slices.Contains(places, p) {
			return nil, fmt.Errorf("-places %s: duplicate %s", list, p)
		}
		places = append(places, p)
	}
	return places, nil
}

// States of a cell of the matrix.
const (
	cellTested  = "tested"   // followed by the test that covers the cell
	cellMaySkip = "may-skip" // followed by the test, and the reason for the permission to skip
	cellAbsent  = "absent"   // followed by the reason
	cellCount   = "count"    // of the folder in place of the case: the number of tests with a cell
)

// cell is a case in a place.
type cell struct {
	place, name, state string
	test               string // the package's folder, a full stop, the test; "" when absent
	count              int    // of cells whose tests are in the folder of the name; 0 but for a count
}

func (c cell) String() string { return c.place + " " + c.name }

func readMatrix(path string) ([]cell, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cells, err := parseMatrix(f)
	if err == nil {
		err = checkCounts(cells)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return cells, nil
}

// countError is the error of a folder whose cells differ from the count in number.
type countError struct {
	at           test // place and folder
	cells, count int
}

func (e *countError) Error() string {
	return fmt.Sprintf("%s has %d cells of %s, and the count is %d: update the count", e.at.place, e.cells,
		e.at.name, e.count)
}

// checkCounts compares the number of cells of each package in a guest with the count in the matrix.
// A guest runs only tests with a cell, so a lost cell would go unnoticed.
func checkCounts(cells []cell) error {
	found, counted := map[test]int{}, map[test]int{} // by place and folder
	for _, c := range cells {
		folder, _, _ := strings.Cut(c.test, ".")
		switch {
		case c.state == cellCount:
			counted[test{c.place, c.name}] = c.count
		case c.test != "" && strings.HasPrefix(c.place, "vm-") && !strings.HasPrefix(folder, "integration/vm"):
			found[test{c.place, folder}]++
		}
	}
	var wrong []error
	for at := range found {
		if _, ok := counted[at]; !ok {
			counted[at] = 0
		}
	}
	for at, n := range counted {
		if found[at] != n {
			wrong = append(wrong, &countError{at, found[at], n})
		}
	}
	slices.SortFunc(wrong, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(wrong...)
}

// parseMatrix reads one cell per line; integration/matrix.txt describes the form.
func parseMatrix(in io.Reader) ([]cell, error) {
	var cells []cell
	cellAt := map[string]int{} // the line of a cell
	testAt := map[test]int{}   // the line of the cell that a test covers
	lines := bufio.NewScanner(in)
	for number := 1; lines.Scan(); number++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if len(words) < 4 {
			return nil, refuse(number, "%q: a cell needs a place, a case, a state, and a test or a reason", line)
		}
		c := cell{place: words[0], name: words[1], state: words[2]}
		if !slices.Contains(everyPlace, c.place) {
			return nil, refuse(number, "unknown place %q; use one of %s", c.place,
				strings.Join(everyPlace, ", "))
		}
		if at := cellAt[c.String()]; at != 0 {
			return nil, refuse(number, "duplicate of the cell %s at line %d", c, at)
		}
		cellAt[c.String()] = number
		switch c.state {
		case cellAbsent:
			cells = append(cells, c)
			continue
		case cellCount:
			n, err := strconv.Atoi(words[3])
			if err != nil || n < 1 || len(words) != 4 {
				return nil, refuse(number, "%q: a count is a number of cells, 1 or more", line)
			}
			c.count = n
			cells = append(cells, c)
			continue
		case cellTested:
			if len(words) != 4 {
				return nil, refuse(number, "%q: a cell has exactly one test", line)
			}
		case cellMaySkip:
			if len(words) < 5 {
				return nil, refuse(number, "%q: a test that may skip needs a reason", line)
			}
		default:
			return nil, refuse(number, "unknown state %q; use %s, %s, %s or %s", c.state, cellTested,
				cellMaySkip,
				cellAbsent, cellCount)
		}
		c.test = words[3]
		if _, name, _ := strings.Cut(c.test, "."); name == "" {
			return nil, refuse(number, "%q: name a test by the folder of its package, a full stop, and its name", c.test)
		}
		t := test{c.place, c.test}
		if at := testAt[t]; at != 0 {
			return nil, refuse(number, "%s is in the cell of line %d already; a test covers one cell per place", c.test, at)
		}
		testAt[t] = number
		cells = append(cells, c)
	}
	return cells, lines.Err()
}

// lineError is the error of a line of the matrix.
type lineError struct {
	line   int
	reason string
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d: %s", e.line, e.reason) }

func refuse(line int, format string, arguments ...any) error {
	return &lineError{line, fmt.Sprintf(format, arguments...)}
}

// compare finds the cells of the run's places whose test did not run, failed or was skipped, and
// the skipped tests without a permitting cell. compare reports a lack of root only once.
func (s *summary) compare(cells []cell) {
	s.compared = true
	s.findUnlisted(cells)
	reported := map[test]bool{} // skipped tests that are reported already
	for _, c := range cells {
		if c.test == "" || !slices.Contains(s.places, c.place) {
			continue
		}
		t := test{c.place, c.test}
		r, ran := s.results[t]
		if r.state == passed {
			continue
		}
		if c.state == cellMaySkip && ran {
			// The report already has the failure.
			reported[t] = true
			continue
		}
		if by, ok := s.skippedBy(t); ok {
			reported[by] = true
			if reason := s.results[by].reason; needsRoot(reason) {
				s.needRoot = append(s.needRoot, s.title(c.place, c.name))
			} else {
				s.uncovered = append(s.uncovered, fmt.Sprintf("%s: %s was skipped: %s", c, by.name, reason))
			}
			continue
		}
		became := "did not run"
		if ran {
			became = r.state
		}
		s.uncovered = append(s.uncovered, fmt.Sprintf("%s: %s %s", c, c.test, became))
	}
	for _, t := range s.all(skipped) {
		switch {
		case reported[t]:
		case needsRoot(s.results[t].reason):
			s.needRoot = append(s.needRoot, s.title(t.place, t.name))
		default:
			s.unexpected = append(s.unexpected, s.title(t.place, t.name))
		}
		reported[t] = true
	}
}

// findUnlisted finds integration cases that passed and have no cell: the matrix lists every case,
// so that a lost case is noticed.
func (s *summary) findUnlisted(cells []cell) {
	listed := map[test]bool{}
	for _, c := range cells {
		folder, name, _ := strings.Cut(c.test, ".")
		top, _, _ := strings.Cut(name, "/")
		listed[test{c.place, folder + "." + top}] = true
	}
	for t, r := range s.results {
		folder, name, _ := strings.Cut(t.name, ".")
		if r.state == passed && !strings.Contains(name, "/") && isCase(folder) && !listed[t] {
			s.unlisted = append(s.unlisted, s.title(t.place, t.name))
		}
	}
	slices.Sort(s.unlisted)
}

// isCase reports whether a folder's tests are integration cases, which need a cell.
func isCase(folder string) bool {
	return folder == "integration" || folder == "integration/engines" || folder == "kubernetes/integration" ||
		folder == "integration/vm" ||
		strings.HasPrefix(folder, "integration/vm/cases/")
}

// skippedBy returns the test whose skip kept t from running: t or a parent of t.
func (s *summary) skippedBy(t test) (by test, ok bool) {
	for {
		if s.results[t].state == skipped {
			return t, true
		}
		folder, name, _ := strings.Cut(t.name, ".")
		end := strings.LastIndexByte(name, '/')
		if end < 0 {
			return test{}, false
		}
		t.name = folder + "." + name[:end]
	}
}

// needsRoot reports whether a test was skipped for lack of root: its reason begins with these
// words.
func needsRoot(reason string) bool { return strings.HasPrefix(reason, "needs root") }
