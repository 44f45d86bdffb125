package documents

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// indexLine is a line of docs/README.md: a link to a document, and a description.
var indexLine = regexp.MustCompile(`(?m)^- \[([^\]]+)\]\(([^)]+)\): \S.*\.$`)

// indexFaults compares the text of docs/README.md with the names of the documents in docs.
func indexFaults(index string, documents []string) (faults []string) {
	listed := map[string]int{}
	for _, m := range indexLine.FindAllStringSubmatch(index, -1) {
		listed[m[2]]++
		if filepath.Base(m[2]) != m[1] {
			faults = append(faults, "the link "+m[2]+" has the text "+m[1])
		}
	}
	for _, name := range documents {
		switch {
		case name == "README.md":
		case listed[name] == 0:
			faults = append(faults, "no line of the form \"- [FILE](FILE): description.\" lists "+name)
		case listed[name] > 1:
			faults = append(faults, "more than one line lists "+name)
		}
	}
	for target := range listed {
		if !strings.Contains(target, "/") && !slices.Contains(documents, target) {
			faults = append(faults, "a line lists "+target+", which does not exist")
		}
	}
	return faults
}

func TestDocumentIndexListsEachDocument(t *testing.T) {
	index, err := os.ReadFile(filepath.Join(root, "docs/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(root, "docs/*.md"))
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < 20 {
		t.Fatalf("%d documents in docs", len(found))
	}
	for i := range found {
		found[i] = filepath.Base(found[i])
	}
	for _, fault := range indexFaults(string(index), found) {
		t.Errorf("docs/README.md: %s", fault)
	}
}

func TestDocumentIndexFaultsAreFound(t *testing.T) {
	for name, tt := range map[string]struct{ index, fault string }{
		"a missing document": {"- [a.md](a.md): A.\n", "lists b.md"},
		"a document twice": {"- [a.md](a.md): A.\n- [b.md](b.md): B.\n- [b.md](b.md): B.\n",
			"more than one line lists b.md"},
		"no such document": {"- [a.md](a.md): A.\n- [b.md](b.md): B.\n- [c.md](c.md): C.\n",
			"c.md, which does not exist"},
		"no description":        {"- [a.md](a.md): A.\n- [b.md](b.md)\n", "lists b.md"},
		"the text of another":   {"- [a.md](a.md): A.\n- [a.md](b.md): B.\n", "has the text a.md"},
		"a complete index":      {"- [a.md](a.md): A.\n- [b.md](b.md): B.\n", ""},
		"a document of another": {"- [a.md](a.md): A.\n- [b.md](b.md): B.\n- [X.md](../X.md): X.\n", ""},
	} {
		faults := strings.Join(indexFaults(tt.index, []string{"README.md", "a.md", "b.md"}), "; ")
		if !strings.Contains(faults, tt.fault) || tt.fault == "" && faults != "" {
			t.Errorf("%s: %q, want %q", name, faults, tt.fault)
		}
	}
}
