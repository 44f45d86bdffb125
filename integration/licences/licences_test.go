package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
)

// The beginnings of licences, and the words that make a text another licence.
const (
	mit = `The MIT License (MIT)
Copyright (c) 2013 Somebody
Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights`
	bsd2 = `Redistribution and use in source and binary forms, with or without modification …
   * Redistributions in binary form must reproduce the above
     copyright notice, this list of conditions`
	bsd3 = bsd2 + `
   * Neither the name of Somebody nor the names of its contributors
// may be used to endorse or promote products derived from
// this software without specific prior written permission.`
	apache = `                                 Apache License
                           Version 2.0, January 2004
                        http://www.apache.org/licenses/`
	mpl = `Mozilla Public License, version 2.0
1.12. "Secondary License"
      means either the GNU General Public License, Version 2.0, the GNU Lesser
      General Public License, Version 2.1, the GNU Affero General Public
      License, Version 3.0, or any later versions of those licenses.
`
)

func TestLicencesOfModuleAreRecognised(t *testing.T) {
	const installed = "linked into an installed program"
	for name, test := range map[string]struct {
		files map[string]string
		want  []string
		err   error // nil if allowed in an installed binary
	}{
		"MIT":                    {map[string]string{"LICENSE": mit}, []string{"MIT"}, nil},
		"BSD with three clauses": {map[string]string{"LICENCE.txt": bsd3}, []string{"BSD-3-Clause"}, nil},
		"BSD with two clauses":   {map[string]string{"License.md": bsd2}, []string{"BSD-2-Clause"}, nil},
		"one file with two":      {map[string]string{"LICENSE": mit + "\n\n" + apache}, []string{"Apache-2.0", "MIT"}, nil},
		"two files": {map[string]string{"LICENSE-MIT": mit, "LICENSE-BSD": bsd3, "README": mpl},
			[]string{"BSD-3-Clause", "MIT"}, nil},
		"COPYING": {map[string]string{"COPYING": mit}, []string{"MIT"}, nil},
		"not allowed": {map[string]string{"LICENSE": mpl}, []string{"MPL-2.0"},
			&notAllowedError{"MPL-2.0", allowed, installed}},
		"one of two not allowed": {map[string]string{"LICENSE": mit, "LICENSE-THIRD-PARTY": mpl},
			[]string{"MIT", "MPL-2.0"}, &notAllowedError{"MPL-2.0", allowed, installed}},
		"BSD with the old clause": {map[string]string{"LICENSE": bsd3 +
			" All advertising materials mentioning features or use of this software must display the following"}, []string{
			"BSD-4-Clause"}, &notAllowedError{"BSD-4-Clause", allowed, installed}},
		"unknown": {map[string]string{"LICENSE": "Ask Somebody."}, nil, &unknownTextError{"LICENSE"}},
		"one of two unknown": {map[string]string{"LICENSE": mit, "LICENSE-2": "Ask Somebody."}, nil,
			&unknownTextError{"LICENSE-2"}},
		"none": {map[string]string{"README": mit}, nil, errNoLicence},
	} {
		dir := t.TempDir()
		for name, text := range test.files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := ofModule(dir, true)
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if !testutil.HasError(err, test.err) {
			t.Errorf("%s: %v; want %v", name, err, test.err)
		}
	}
}

// Modules for builds and tests may have further licences, but not every licence.
func TestLicencesOfTestModuleMayBeFurther(t *testing.T) {
	for text, want := range map[string]struct{ shipped, beside bool }{
		mit: {true, true}, mpl: {false, true}, mit + mpl: {false, true},
		"GNU Affero General Public License": {false, false}, mpl + "Business Source License": {false,
			false}, mpl + "GNU General Public License": {false, false}, "Ask Somebody.": {false, false},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "LICENSE"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		_, shipped := ofModule(dir, true)
		_, beside := ofModule(dir, false)
		if (shipped == nil) != want.shipped || (beside == nil) != want.beside {
			t.Errorf("%.30q: installed %v, beside %v", text, shipped, beside)
		}
	}
}

func TestLicencesOfThisRepositoryAreAllowed(t *testing.T) {
	_, err := exec.LookPath("go")
	programs.MustHave(t, err)
	t.Chdir("../..")
	modules, err := check()
	if err != nil {
		t.Error(err)
	}
	shipped := map[string]bool{}
	for _, m := range modules {
		shipped[m.path] = m.shipped
	}
	for path, want := range map[string]bool{"github.com/spf13/cobra": true, "github.com/google/go-cmp": false,
		"honnef.co/go/tools": false, "k8s.io/client-go": true} {
		if got, ok := shipped[path]; !ok || got != want {
			t.Errorf("%s: found %t, installed %t; want %t", path, ok, got, want)
		}
	}
	own, err := os.ReadFile("LICENSE")
	if err != nil || !cmp.Equal(recognise(own), []string{"Apache-2.0"}) {
		t.Errorf("Peerlane's own licence is %q: %v", recognise(own), err)
	}
}
