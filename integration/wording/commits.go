package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxSubject is the limit in columns: a subject fits beside a hash in 80 columns.
const maxSubject = 72

var (
	// errNoHistory reports a tree without the history of this project: an archive of the source,
	// or an import of the source into another repository.
	errNoHistory = errors.New("no history")

	subjectForm = regexp.MustCompile(`^\.?[a-zA-Z0-9][\w./+-]*(, \.?[a-zA-Z0-9][\w./+-]*)*: ([a-z]+)\b`)
	notAVerb    = regexp.MustCompile(
		`^(a|an|the|no|not|what|who|how|when|where|this|that|it|its|all|each|more|new|some|\w+ing|\w+ed)$`)
	isAVerb = regexp.MustCompile(`^(embed|need|feed|seed|shed|speed|exceed|proceed|succeed|bring|ping|string|swing)$`)
)

// checkSubject returns an error for the subject of a commit without the form
// "package: verb …".
func checkSubject(subject string) error {
	reason := subjectReason(subject)
	if reason == "" {
		return nil
	}
	return &subjectError{subject, reason}
}

// subjectError is the error of a subject of a commit.
type subjectError struct{ subject, reason string }

func (e *subjectError) Error() string { return fmt.Sprintf("%q %s", e.subject, e.reason) }

// subjectReason returns the reason to refuse a subject, empty for a correct subject.
func subjectReason(subject string) string {
	if n := utf8.RuneCountInString(subject); n > maxSubject {
		return fmt.Sprintf("has %d columns, limit %d", n, maxSubject)
	}
	m := subjectForm.FindStringSubmatch(subject)
	if m == nil {
		return "is not \"package: verb …\""
	}
	if verb := m[2]; notAVerb.MatchString(verb) && !isAVerb.MatchString(verb) {
		return fmt.Sprintf("has the unknown verb %q in the imperative", verb)
	}
	return ""
}

// git returns the output of a git command in root. safe.directory makes git accept a checkout
// that another user owns.
func git(root string, args ...string) (string, error) {
	c := exec.Command("git", append([]string{"-c", "safe.directory=*", "-C", root}, args...)...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// checkRepository returns errNoHistory if root is not the top of a repository. A repository of a
// folder above root does not count. Other failures of git are errors too, without errNoHistory.
func checkRepository(root string) error {
	if _, err := os.Stat(filepath.Join(root, ".git")); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s has no .git; run it in a clone of the repository", errNoHistory, root)
	} else if err != nil {
		return fmt.Errorf("find the repository: %w", err)
	}
	top, err := git(root, "rev-parse", "--show-toplevel")
	if err != nil {
		return err
	}
	for _, folder := range []*string{&root, &top} {
		if *folder, err = filepath.Abs(*folder); err != nil {
			return fmt.Errorf("find the repository: %w", err)
		}
		if *folder, err = filepath.EvalSymlinks(*folder); err != nil {
			return fmt.Errorf("find the repository: %w", err)
		}
	}
	if top != root {
		return fmt.Errorf("%w: the repository of %s is %s; run it in a clone of the repository", errNoHistory, root, top)
	}
	return nil
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

// checkCommits checks the subjects of the commits after l.base, and that the present tree raises no value
// and adds no package to limits.txt and texts.txt, compared with the base and each commit after it. In a shallow
// clone without the base, checkCommits checks the commits of
// the clone that are newer than the base. It returns the number of commits that are not merges,
// and errNoHistory if root is not a repository or a complete clone lacks the base.
func checkCommits(root string, l limits) (int, error) {
	if err := checkRepository(root); err != nil {
		return 0, fmt.Errorf("check the subjects of commits: %w", err)
	}
	shallow, err := git(root, "rev-parse", "--is-shallow-repository")
	if err != nil {
		return 0, fmt.Errorf("check the subjects of commits: %w", err)
	}
	commits := []string{l.base + "..HEAD"}
	baseMissing := false
	if _, err := git(root, "cat-file", "-e", l.base); err != nil {
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			return 0, fmt.Errorf("check the subjects of commits: find the base of %s: %w", limitsFile, err)
		}
		// Exit status 1 means that the object is missing; other failures have 128.
		if shallow != "true" {
			return 0, fmt.Errorf(
				"check the subjects of commits: %w: the base %s of %s is not in the repository; fetch it, or run it in a clone "+
					"of the repository", errNoHistory, l.base, limitsFile)
		}
		baseMissing = true
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
		errs = append(errs,
			errors.New("check the subjects of commits: the shallow clone has no commit after the base; run git fetch "+
				"--unshallow"))
	}
	base := l.base
	if baseMissing {
		base = ""
	}
	texts, err := readTexts(root)
	if err != nil {
		return 0, err
	}
	for file, now := range map[string]map[string]allowed{limitsFile: l.values, textsFile: texts} {
		fall, err := checkFall(root, file, base, commits, now)
		if err != nil {
			return 0, fmt.Errorf("check that limits fall: %w", err)
		}
		errs = append(errs, fall...)
	}
	return count, errors.Join(errs...)
}

// checkFall returns an error for each value of a list that is above the value of an earlier commit.
// commits are the arguments of git log that select the commits after the base; base is empty if the
// repository lacks the base.
func checkFall(root, name, base string, commits []string, now map[string]allowed) (errs []error, err error) {
	// git log without --full-history leaves out the versions of the branches whose file a merge
	// replaced.
	versions, err := git(root, append(append([]string{"log", "--full-history", "--format=%h"}, commits...), "--", name)...)
	if err != nil {
		return nil, err
	}
	for _, commit := range strings.Fields(versions + " " + base) {
		file, err := git(root, "ls-tree", "--name-only", commit, "--", name)
		if err != nil {
			return nil, err
		}
		if file == "" {
			continue // no limits yet, or the commit removed the file
		}
		text, err := git(root, "cat-file", "blob", commit+":"+name)
		if err != nil {
			return nil, err
		}
		before, err := valuesOf(name, text)
		if err != nil {
			errs = append(errs, fmt.Errorf("commit %s: %w", commit, err))
			continue
		}
		errs = append(errs, risen(name, commit, before, now)...)
	}
	return errs, nil
}

// valuesOf parses a version of limits.txt or texts.txt.
func valuesOf(name, text string) (map[string]allowed, error) {
	if name == limitsFile {
		l, err := parseLimits(text)
		return l.values, err
	}
	return parseTexts(text)
}

// risen returns an error for each package of which a value is above that of an earlier commit,
// and for each package that the earlier commit does not list, unless the package is a renamed
// one.
func risen(file, commit string, before, now map[string]allowed) (errs []error) {
	renamed := renames(before, now)
	for _, name := range slices.Sorted(maps.Keys(now)) {
		b, known := before[name]
		if known && !now[name].within(b) {
			errs = append(errs, fmt.Errorf("%s raises the limits of %s above those of commit %s; rewrite the texts instead",
				file, name, commit))
		}
		if !known && renamed[name] == "" {
			errs = append(errs,
				fmt.Errorf("%s adds %s, which commit %s does not list, and no package with values as large has left the list "+
					"for it; rewrite the texts instead", file, name, commit))
		}
	}
	return errs
}

// renames returns the former names of new packages. A package that is in now and not in before
// is new. Its former name is in before and not in now, has values at least as large, and serves
// one new package. As many new packages as possible have a former name.
func renames(before, now map[string]allowed) map[string]string {
	former, renamed := map[string]string{}, map[string]string{} // by new name, by former name
	// assign finds a former name for a new package, and moves other new packages to other former
	// names if necessary.
	var assign func(name string, tried map[string]bool) bool
	assign = func(name string, tried map[string]bool) bool {
		for old, b := range before {
			if _, stays := now[old]; stays || tried[old] || !now[name].within(b) {
				continue
			}
			tried[old] = true
			if renamed[old] == "" || assign(renamed[old], tried) {
				former[name], renamed[old] = old, name
				return true
			}
		}
		return false
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if _, known := before[name]; !known {
			assign(name, map[string]bool{})
		}
	}
	return former
}
