package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The help of a command or a program becomes a page, and pages of an earlier build disappear.
func TestWriteMakesPagePerCommand(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	put("bin/peerlane", "#!/bin/sh\n[ $1 = version ] && echo 'peerlane v1.2.3 (commit x)' || echo "+
		"'{\"path\":\"peerlane\",\"usage\":\"peerlane\",\"short\":\"s\",\"long\":\"l\",\"commands\":[{\"path\":\"peerlane "+
		"plan\",\"usage\":\"peerlane plan\",\"short\":\"p\",\"long\":\"l\"}]}'\n")
	put("bin/peerlane-relay",
		"#!/bin/sh\necho '{\"path\":\"peerlane-relay\",\"usage\":\"peerlane-relay\",\"short\":\"s\",\"long\":\"l\"}'\n")
	put("bin/peerlane-hook", "#!/bin/sh\necho \"$1 of the hook\"\n")
	put("bin/peerlane-runtime", "#!/bin/sh\necho \"$1 of the runtime\"\n")
	put("configuration.md", "# Configuration\n\n`relay.slots`, number: how many.\n")
	put("man/man1/gone.1", "")
	if err := write(filepath.Join(dir, "bin"), filepath.Join(dir, "configuration.md"),
		filepath.Join(dir, "man")); err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(dir, "man/*/*"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"man1/peerlane.1": "", "man1/peerlane-plan.1": "peerlane\\-plan \\- " +
			"p\n", "man8/peerlane-relay.8": "", "man8/peerlane-hook.8": "help of the hook",
		"man8/peerlane-runtime.8": "\\-\\-peerlane\\-help of the " +
			"runtime", "man5/peerlane-config.toml.5": "\\fBrelay.slots\\fR\nnumber: how many.",
	}
	for _, path := range pages {
		name := strings.TrimPrefix(path, filepath.Join(dir, "man")+"/")
		words, known := want[name]
		text, err := os.ReadFile(path)
		if err != nil || !known || !strings.Contains(string(text), words) ||
			!strings.Contains(string(text), "Peerlane v1.2.3") {
			t.Errorf("%s, %v:\n%s", name, err, text)
		}
	}
	if len(pages) != len(want) {
		t.Errorf("the pages are %v", slices.Sorted(slices.Values(pages)))
	}
	put("bin/peerlane-hook", "#!/bin/sh\necho why >&2; exit 3\n")
	if err := write(filepath.Join(dir, "bin"), filepath.Join(dir, "configuration.md"),
		filepath.Join(dir, "man")); err == nil || !strings.Contains(err.Error(), "exit status 3: why") {
		t.Errorf("output %v", err)
	}
}
