// Command complexity prints, per package, the function of highest cyclomatic complexity, the longest
// parameter list, the largest struct and the struct with the largest number of booleans:
//
//	complexity [-limits FILE [-update]] DIRECTORY
//
// A package's test files have a separate row. Generated files do not count. With -limits the program
// fails if a function's complexity is above 25 and above the value in FILE, or below the value in
// FILE. With -update the program lowers values of FILE to measured values and removes functions at or
// below 25. The program never raises a value and never adds a function.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// maximum is the highest cyclomatic complexity of a function without a limit.
const maximum = 25

func main() {
	limits := flag.String("limits", "", "`FILE` of functions above the maximum, with their values")
	update := flag.Bool("update", false, "lower the values of the limits to the measured ones")
	flag.Parse()
	if err := run(flag.Arg(0), *limits, *update); err != nil {
		fmt.Fprintf(os.Stderr, "complexity: %s\n", strings.ReplaceAll(err.Error(), "\n", "\ncomplexity: "))
		os.Exit(1)
	}
}

func run(directory, limits string, update bool) error {
	if directory == "" {
		directory = "."
	}
	packages, err := measure(directory)
	if err != nil {
		return err
	}
	if limits == "" {
		return printTable(packages)
	}
	text, err := os.ReadFile(limits)
	if err != nil {
		return err
	}
	listed, err := parseLimits(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", limits, err)
	}
	measured := functionsAbove(packages)
	if update {
		return os.WriteFile(limits, []byte(lower(string(text), measured)), 0o644)
	}
	return compare(measured, listed)
}

func printTable(packages []*metrics) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PACKAGE\tCOMPLEXITY\t\tPARAMETERS\t\tFIELDS\t\tBOOLEANS\t")
	for _, p := range packages {
		fmt.Fprint(w, p.name)
		for _, h := range []highest{p.complexity, p.parameters, p.fields, p.booleans} {
			fmt.Fprintf(w, "\t%d\t%s", h.value, h.name)
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// functionsAbove returns the complexities of functions above the maximum.
func functionsAbove(packages []*metrics) map[string]int {
	above := map[string]int{}
	for _, p := range packages {
		for name, value := range p.functions {
			if value > maximum {
				above[p.directory+" "+name] = value
			}
		}
	}
	return above
}

// parseLimits reads lines of directory, function and value. A # begins a comment.
func parseLimits(text string) (map[string]int, error) {
	limits := map[string]int{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 3 {
			return nil, &lineError{n, fmt.Errorf("%w, not %d", errWords, len(fields))}
		}
		value, err := strconv.Atoi(fields[2])
		if err != nil {
			return nil, &lineError{n, err}
		}
		name := fields[0] + " " + fields[1]
		if _, ok := limits[name]; ok {
			return nil, &lineError{n, fmt.Errorf("%s %w", name, errTwice)}
		}
		limits[name] = value
	}
	return limits, lines.Err()
}

// compare reports functions with a measured value that differs from the limit.
func compare(measured, limits map[string]int) error {
	var problems []error
	for name, value := range measured {
		if limit := max(limits[name], maximum); value > limit {
			problems = append(problems, &limitError{name, value, limit})
		}
	}
	for name, limit := range limits {
		if value := measured[name]; value < limit {
			problems = append(problems, &limitError{name, value, limit})
		}
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(problems...)
}

// lower returns the text of the limits with lower values and without functions below the maximum.
func lower(text string, measured map[string]int) string {
	var kept strings.Builder
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 3 || strings.HasPrefix(fields[0], "#") {
			kept.WriteString(line)
			continue
		}
		value, above := measured[fields[0]+" "+fields[1]]
		limit, err := strconv.Atoi(fields[2])
		switch {
		case !above:
			continue
		case err == nil && value < limit:
			line = strings.Replace(line, " "+fields[2], " "+strconv.Itoa(value), 1)
		}
		kept.WriteString(line)
	}
	return kept.String()
}
