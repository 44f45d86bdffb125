package main

import (
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const limitsFile = "integration/wording/limits.txt"

const limitsHeader = `# Limits of integration/wording. base is the commit after which wording checks the subjects
# of commits, and the date of that commit. Each other line is a package above the limits, with
# free relatives per 1,000 words (limit 2), pronouns and quantifiers per 1,000 words (limit
# 30), and names of tests without the form (limit 0). The values may only fall:
# go run ./integration/wording -update
`

// allowed holds the largest values that pass for a package.
type allowed struct {
	relatives, pronouns float64
	tests               int
}

// within reports whether no value of a is above that of b.
func (a allowed) within(b allowed) bool {
	return a.relatives <= b.relatives && a.pronouns <= b.pronouns && a.tests <= b.tests
}

// limits holds the content of limits.txt.
type limits struct {
	base, date string
	values     map[string]allowed
}

// parseLimits reads the content of limits.txt.
func parseLimits(text string) (limits, error) {
	l := limits{values: map[string]allowed{}}
	for n, line := range strings.Split(text, "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		if len(fields) == 3 && fields[0] == "base" {
			l.base, l.date = fields[1], fields[2]
			continue
		}
		bad := fmt.Errorf("parse %s, line %d: %q is not a package and three numbers", limitsFile, n+1, line)
		if len(fields) != 4 {
			return l, bad
		}
		var a allowed
		var errs [3]error
		a.relatives, errs[0] = strconv.ParseFloat(fields[1], 64)
		a.pronouns, errs[1] = strconv.ParseFloat(fields[2], 64)
		a.tests, errs[2] = strconv.Atoi(fields[3])
		if errs != [3]error{} {
			return l, bad
		}
		l.values[fields[0]] = a
	}
	if l.base == "" {
		return l, fmt.Errorf("parse %s: no line with base, its commit and its date", limitsFile)
	}
	return l, nil
}

func readLimits(root string) (limits, error) {
	text, err := os.ReadFile(filepath.Join(root, limitsFile))
	if err != nil {
		return limits{}, err
	}
	return parseLimits(string(text))
}

func (l limits) write(root string) error {
	var b strings.Builder
	b.WriteString(limitsHeader)
	fmt.Fprintf(&b, "base %s %s\n", l.base, l.date)
	for _, name := range slices.Sorted(maps.Keys(l.values)) {
		a := l.values[name]
		fmt.Fprintf(&b, "%-36s %4.1f %4.0f %4d\n", name, a.relatives, a.pronouns, a.tests)
	}
	return os.WriteFile(filepath.Join(root, limitsFile), []byte(b.String()), 0o644)
}

// limit returns the largest values that pass for a package: the general limits where
// limits.txt does not name the package.
func limit(list map[string]allowed, name string) allowed {
	a := list[name]
	return allowed{max(a.relatives, maxRelatives), max(a.pronouns, maxPronouns), a.tests}
}

// check returns an error for every value above the limit of the package, and for every package
// of list that does not exist.
func check(list map[string]allowed, found map[string]score) (errs []error) {
	for _, name := range slices.Sorted(maps.Keys(found)) {
		s, bound := found[name], limit(list, name)
		if value := s.per(s.relatives); value > bound.relatives {
			errs = append(errs, fmt.Errorf("%s: %.1f free relatives per 1,000 words, limit %.1f; name the actor and the object",
				name, value, bound.relatives))
		}
		if value := s.per(s.pronouns); value > bound.pronouns {
			errs = append(errs, fmt.Errorf("%s: %.1f pronouns and quantifiers per 1,000 words, limit %.0f; repeat the noun",
				name, value, bound.pronouns))
		}
		if s.tests > bound.tests {
			errs = append(errs,
				fmt.Errorf("%s: %d names of tests without the form Test<Subject><Condition><Result>, limit %d; do not begin "+
					"with an article or a question word, and name the result", name, s.tests, bound.tests))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(list)) {
		if _, exists := found[name]; !exists {
			errs = append(errs, fmt.Errorf("%s names %s, which is not a package; run go run ./integration/wording -update",
				limitsFile, name))
		}
	}
	return errs
}

// lowered returns list with the measured values where the measured values are lower. A package
// that meets the general limits leaves the list.
func lowered(list map[string]allowed, found map[string]score) map[string]allowed {
	lower := map[string]allowed{}
	for name, a := range list {
		s, exists := found[name]
		if !exists {
			continue
		}
		// Round up, so that one new comment does not fail the check.
		a.relatives = min(a.relatives, math.Ceil(s.per(s.relatives)*2)/2)
		a.pronouns = min(a.pronouns, math.Ceil(s.per(s.pronouns)))
		a.tests = min(a.tests, s.tests)
		if a.relatives > maxRelatives || a.pronouns > maxPronouns || a.tests > 0 {
			lower[name] = a
		}
	}
	return lower
}
