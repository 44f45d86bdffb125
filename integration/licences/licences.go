// Command licences lists the licences of the Go modules with which Peerlane is built, checked and
// tested, and fails for a licence that is not allowed. Run the command in the root of the
// repository.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// allowed are the licences compatible with Apache-2.0, Peerlane's own, in a binary and in its
// source, by SPDX identifier.
var allowed = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"}

// allowedBeside are further licences for modules without code in an installed binary: the
// conditions of these licences apply only to the distribution of a binary.
var allowedBeside = []string{"MPL-2.0"}

// texts recognise licences by words that every copy of a licence has, and words that only other
// licences have. The list includes licences that are not allowed, so that no licence of a file
// stays unknown.
var texts = []struct {
	id              string
	contains, lacks string
}{
	{"Apache-2.0", "apache license version 2 0 january 2004", ""},
	{"Apache-2.0", "licensed under the apache license version 2 0", ""},
	{"MIT", "permission is hereby granted free of charge to any person obtaining a copy of this software and " +
		"associated documentation files the software to deal in the software without restriction", ""},
	{"ISC", "permission to use copy modify and or distribute this software for any purpose with or without fee is " +
		"hereby granted", ""},
	{"ISC", "permission to use copy modify and distribute this software for any purpose with or without fee is hereby " +
		"granted", ""},
	{"BSD-4-Clause", "all advertising materials mentioning features or use of this software must display", ""},
	{"BSD-3-Clause",
		"may be used to endorse or promote products derived from this software without specific prior written " +
			"permission", "all advertising materials"},
	{"BSD-2-Clause", "redistributions in binary form must reproduce the above copyright notice",
		"may be used to endorse or promote"},
	{"MPL-2.0", "mozilla public license version 2 0", ""},
	{"EPL-2.0", "eclipse public license v 2 0", ""},
	{"CDDL-1.0", "common development and distribution license", ""},
	{"AGPL", "gnu affero general public license", ""},
	{"LGPL", "gnu lesser general public license", ""},
	{"GPL", "gnu general public license", ""},
	{"BUSL-1.1", "business source license", ""},
	{"SSPL-1.0", "server side public license", ""},
	{"Commons Clause", "commons clause", ""},
	{"CC", "creative commons", ""},
	{"Unlicense", "this is free and unencumbered software released into the public domain", ""},
}

var noWord = regexp.MustCompile(`[^a-z0-9]+`)

// secondary is the passage in which the Mozilla Public License names other licences, which do not
// apply.
const secondary = "secondary license means either the gnu general public license version 2 0 the gnu lesser general " +
	"public license version 2 1 the gnu affero general public license version 3 0 or any later versions of those licenses"

// recognise returns the licences that a text states.
func recognise(text []byte) (ids []string) {
	words := noWord.ReplaceAllString(string(bytes.ToLower(text)), " ")
	words = strings.ReplaceAll(words, secondary, "")
	for _, l := range texts {
		if strings.Contains(words, l.contains) && (l.lacks == "" || !strings.Contains(words, l.lacks)) &&
			!slices.Contains(ids, l.id) {
			ids = append(ids, l.id)
		}
	}
	return ids
}

// module is a module that a package of this repository, a test, or a tool of go.mod imports.
type module struct {
	path, version string
	// shipped reports that an installed binary links the module.
	shipped  bool
	licences []string
}

// file matches the names of licence files.
var file = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)`)

// errNoLicence reports a module without a licence file.
var errNoLicence = errors.New("no licence found; use another module")

// unknownTextError reports a licence file whose licence is unknown.
type unknownTextError struct{ file string }

func (e *unknownTextError) Error() string {
	return fmt.Sprintf("unknown licence text in %s; read the file, and add the licence to texts in integration/licences",
		e.file)
}

// notAllowedError reports a licence that does not permit the use of a module.
type notAllowedError struct {
	id      string
	allowed []string
	use     string
}

func (e *notAllowedError) Error() string {
	return fmt.Sprintf("%s is not among %s, which may be %s; use another module", e.id, strings.Join(e.allowed, ", "),
		e.use)
}

// ofModule reads the licences of a module in the directory dir, and reports whether the licences
// permit the use of the module: linked into an installed binary, or for build and test.
func ofModule(dir string, shipped bool) (ids []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	found := false
	for _, e := range entries {
		if e.IsDir() || !file.MatchString(e.Name()) {
			continue
		}
		found = true
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		recognised := recognise(text)
		if len(recognised) == 0 {
			return nil, &unknownTextError{e.Name()}
		}
		ids = append(ids, recognised...)
	}
	if !found {
		return nil, errNoLicence
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	permitted, use := allowed, "linked into an installed program"
	if !shipped {
		permitted, use = append(slices.Clone(allowed), allowedBeside...), "to build and test"
	}
	for _, id := range ids {
		if !slices.Contains(permitted, id) {
			return ids, &notAllowedError{id, permitted, use}
		}
	}
	return ids, nil
}

// repository is the path of the module in the root of the repository.
const repository = "github.com/peerlane/peerlane"

// uses lists the packages of the repository's modules: folder of the module, arguments of go list, and
// whether the packages are linked into an installed binary.
var uses = []struct {
	folder    string
	arguments []string
	shipped   bool
}{
	{".", []string{"./cmd/..."}, true},
	{".", []string{"-test", "-tags", "vm,engines", "./..."}, false},
	{".", []string{"tool"}, false},
	{"kubernetes", []string{"./cmd/..."}, true},
	{"kubernetes", []string{"-test", "-tags", "cluster", "./..."}, false},
}

// check reads the licences of the modules that the repository in the working directory uses, from the
// go command's cache. The error lists every module that must not be used.
func check() ([]module, error) {
	all, shipped := map[string]string{}, map[string]bool{}
	for _, u := range uses {
		used, err := dependencies(u.folder, u.arguments...)
		if err != nil {
			return nil, err
		}
		for name, dir := range used {
			all[name], shipped[name] = dir, shipped[name] || u.shipped
		}
	}
	var modules []module
	var errs []error
	for name, dir := range all {
		m := module{shipped: shipped[name]}
		m.path, m.version, _ = strings.Cut(name, "@")
		var err error
		if m.licences, err = ofModule(dir, m.shipped); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
		modules = append(modules, m)
	}
	slices.SortFunc(modules, func(a, b module) int { return strings.Compare(a.path, b.path) })
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return modules, errors.Join(errs...)
}

// dependencies returns the modules outside the repository that packages of a module are built from: the
// modules' folders by name and version.
func dependencies(folder string, arguments ...string) (map[string]string, error) {
	const form = "{{with .Module}}{{if not .Main}}{{.Path}}@{{.Version}}\t{{.Dir}}{{end}}{{end}}"
	c := exec.Command("go", append([]string{"list", "-C", folder, "-deps", "-f", form}, arguments...)...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	dirs := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if name, dir, found := strings.Cut(strings.TrimSpace(line), "\t"); found && !strings.HasPrefix(name, repository+"@") {
			dirs[name] = dir
		}
	}
	return dirs, nil
}
