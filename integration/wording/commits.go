package main

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"unicode/utf8"
)

// maxSubject is in columns, so that a subject fits beside a hash in 80 columns.
const maxSubject = 72

var (
	// errNoHistory reports a tree without a repository: an archive of the source.
	errNoHistory = errors.New("no history")

	subjectForm = regexp.MustCompile(`^\.?[a-zA-Z0-9][\w./+-]*(, \.?[a-zA-Z0-9][\w./+-]*)*: ([a-z]+)\b`)
	notAVerb    = regexp.MustCompile(`^(a|an|the|no|not|what|who|how|when|where|this|that|it|its|all|each|more|new|some|\w+ing|\w+ed)$`)
	isAVerb     = regexp.MustCompile(`^(embed|need|feed|seed|shed|speed|exceed|proceed|succeed|bring|ping|string|swing)$`)
)

// checkSubject returns an error for the subject of a commit without the form
// "package: verb …".
func checkSubject(subject string) error {
	if n := utf8.RuneCountInString(subject); n > maxSubject {
		return fmt.Errorf("%q has %d columns, limit %d", subject, n, maxSubject)
	}
	m := subjectForm.FindStringSubmatch(subject)
	if m == nil {
		return fmt.Errorf("%q is not \"package: verb …\"", subject)
	}
	if verb := m[2]; notAVerb.MatchString(verb) && !isAVerb.MatchString(verb) {
		return fmt.Errorf("%q: %q is no verb in the imperative", subject, verb)
	}
	return nil
}

// git returns the output of a git command in root.
func git(root string, args ...string) (string, error) {
	c := exec.Command("git", append([]string{"-C", root}, args...)...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// isMerge reports whether a commit is a merge. parents holds the parents that git log prints:
// git log prints none for the oldest commits of a shallow clone, and isMerge reads the parents
// of these commits from the object.
func isMerge(root, commit string, parents []string) (bool, error) {
	if len(parents) > 0 {
		return len(parents) > 1, nil
	}
	object, err := git(root, "cat-file", "-p", commit)
	if err != nil {
		return false, err
	}
	header, _, _ := strings.Cut(object, "\n\n")
	return strings.Count(header, "\nparent ") > 1, nil
}

// checkCommits checks the subjects of the commits after l.base, and that no commit raised a
// value of limits.txt. In a shallow clone without the base, checkCommits checks the commits of
// the clone that are newer than the base. It returns the number of commits that are not merges,
// and errNoHistory if git or the repository is missing.
func checkCommits(root string, l limits) (int, error) {
	shallow, err := git(root, "rev-parse", "--is-shallow-repository")
	if err != nil {
		return 0, fmt.Errorf("check the subjects of commits: %w: %w; run it in a clone of the repository", errNoHistory, err)
	}
	commits := []string{l.base + "..HEAD"}
	if _, err := git(root, "cat-file", "-e", l.base+"^{commit}"); err != nil {
		if shallow != "true" {
			return 0, fmt.Errorf("check the subjects of commits: the base of %s is not in the repository: %w", limitsFile, err)
		}
		commits = []string{"--since=" + l.date, "HEAD"}
	}
	log, err := git(root, append([]string{"log", "--format=%h%x09%P%x09%s"}, commits...)...)
	if err != nil {
		return 0, fmt.Errorf("check the subjects of commits: %w", err)
	}
	var errs []error
	count := 0
	for line := range strings.Lines(log) {
		hash, rest, _ := strings.Cut(strings.TrimRight(line, "\n"), "\t")
		parents, subject, _ := strings.Cut(rest, "\t")
		merge, err := isMerge(root, hash, strings.Fields(parents))
		if err != nil {
			return 0, fmt.Errorf("check the subjects of commits: %w", err)
		}
		if merge {
			continue
		}
		count++
		if err := checkSubject(subject); err != nil {
			errs = append(errs, fmt.Errorf("commit %s: %w", hash, err))
		}
	}
	if log == "" && shallow == "true" {
		errs = append(errs, errors.New("check the subjects of commits: the shallow clone has no commit after the base; run git fetch --unshallow"))
	}
	versions, err := git(root, append(append([]string{"log", "--format=%h"}, commits...), "--", limitsFile)...)
	if err != nil {
		return 0, fmt.Errorf("check that limits fall: %w", err)
	}
	for _, commit := range strings.Fields(versions) {
		text, err := git(root, "show", commit+":"+limitsFile)
		if err != nil {
			continue // the commit removed the file
		}
		before, err := parseLimits(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("commit %s: %w", commit, err))
			continue
		}
		errs = append(errs, risen(commit, before.values, l.values)...)
	}
	return count, errors.Join(errs...)
}

// risen returns an error for each package of which a value is above that of an earlier
// commit.
func risen(commit string, before, now map[string]allowed) (errs []error) {
	for name, a := range now {
		b, known := before[name]
		if known && (a.relatives > b.relatives || a.pronouns > b.pronouns || a.tests > b.tests) {
			errs = append(errs, fmt.Errorf("%s raises the limits of %s above those of commit %s; rewrite the texts instead", limitsFile, name, commit))
		}
	}
	return errs
}
