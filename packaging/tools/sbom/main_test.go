package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// module is a module of this test program.
const module = "github.com/CycloneDX/cyclonedx-go"

// copied copies this test program to a path.
func copied(t *testing.T, path string) string {
	t.Helper()
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(own)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = os.WriteFile(path, text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// write writes a file, and returns its path and SHA-256.
func write(t *testing.T, path, text string) (file, sum string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256([]byte(text))
	return path, hex.EncodeToString(digest[:])
}

// byRef returns the components of a document by reference.
func byRef(t *testing.T, bom *cdx.BOM) map[string]cdx.Component {
	t.Helper()
	list := map[string]cdx.Component{}
	for _, c := range *bom.Components {
		if _, twice := list[c.BOMRef]; twice {
			t.Errorf("%s is in the document twice", c.BOMRef)
		}
		list[c.BOMRef] = c
	}
	return list
}

func TestDescribeProgramsListsFilesModulesAndEdges(t *testing.T) {
	dir := t.TempDir()
	programs := []string{copied(t, filepath.Join(dir, "peerlane")), copied(t, filepath.Join(dir, "front", "peerlane"))}
	library, librarySum := write(t, filepath.Join(dir, "libpeerlane.so.0"), "library")
	raw := bytes.Repeat([]byte{0xab}, sha256.Size)
	sums := filepath.Join(dir, "go.sum")
	info, _ := debug.ReadBuildInfo()
	i := slices.IndexFunc(info.Deps, func(m *debug.Module) bool { return m.Path == module })
	if i < 0 {
		t.Fatalf("the test has no module %s", module)
	}
	version := info.Deps[i].Version
	write(t, sums, fmt.Sprintf("%s %s h1:%s\n%s %s/go.mod h1:invalid\n\n", module, version,
		base64.StdEncoding.EncodeToString(raw), module, version))
	at := time.Unix(1763800000, 0)
	bom, err := describe("1.2.3", at, sums, append(programs, library))
	if err != nil {
		t.Fatal(err)
	}
	if root := bom.Metadata.Component; root.Version != "1.2.3" || bom.Metadata.Timestamp != at.UTC().Format(time.RFC3339) {
		t.Errorf("version %s, time %s", root.Version, bom.Metadata.Timestamp)
	}
	list := byRef(t, bom)
	std := "pkg:golang/std@" + strings.TrimPrefix(runtime.Version(), "go")
	dependency := "pkg:golang/" + module + "@" + version
	for _, ref := range []string{"file:peerlane", "file:front/peerlane", "file:libpeerlane.so.0", std, dependency} {
		if _, found := list[ref]; !found {
			t.Errorf("the document has no %s: %q", ref, slices.Sorted(maps.Keys(list)))
		}
	}
	if hashes := list["file:libpeerlane.so.0"].Hashes; hashes == nil || (*hashes)[0].Value != librarySum {
		t.Errorf("the hash of the library is %v", hashes)
	}
	if hashes := list[dependency].Hashes; hashes == nil || (*hashes)[0].Value != hex.EncodeToString(raw) {
		t.Errorf("the hash of %s is %v", dependency, hashes)
	}
	if list[std].Hashes != nil {
		t.Errorf("the standard library has the hash %v", list[std].Hashes)
	}
	edges := map[string][]string{}
	for _, d := range *bom.Dependencies {
		edges[d.Ref] = *d.Dependencies
	}
	if !slices.Equal(edges["peerlane"], []string{"file:peerlane", "file:front/peerlane", "file:libpeerlane.so.0"}) ||
		len(edges["file:libpeerlane.so.0"]) != 0 || !slices.Contains(edges["file:peerlane"], std) ||
		!slices.Contains(edges["file:front/peerlane"], dependency) || !slices.IsSorted(edges["file:peerlane"]) {
		t.Errorf("the edges are %v", edges)
	}
}

func TestDescribeSameProgramsGivesSameText(t *testing.T) {
	dir := t.TempDir()
	program := copied(t, filepath.Join(dir, "peerlane"))
	sums, _ := write(t, filepath.Join(dir, "go.sum"), "")
	var texts [2]bytes.Buffer
	for i := range texts {
		bom, err := describe("1", time.Unix(0, 0), sums, []string{program})
		if err == nil {
			err = cdx.NewBOMEncoder(&texts[i], cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if texts[0].Len() == 0 || texts[0].String() != texts[1].String() {
		t.Error("the documents differ")
	}
}

func TestDescribeUnreadableInputFails(t *testing.T) {
	dir := t.TempDir()
	good, _ := write(t, filepath.Join(dir, "go.sum"), "")
	text, _ := write(t, filepath.Join(dir, "script"), "#!/bin/sh\n")
	program := copied(t, filepath.Join(dir, "peerlane"))
	absent := filepath.Join(dir, "absent")
	for name, c := range map[string]struct{ sums, program string }{
		"no go.sum":         {absent, program},
		"no program":        {good, absent},
		"no Go program":     {good, text},
		"a folder":          {good, dir},
		"no library at all": {good, absent + ".so"},
	} {
		if bom, err := describe("1", time.Unix(0, 0), c.sums, []string{c.program}); err == nil || bom != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := describe("1", time.Unix(0, 0), absent, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without go.sum: %v", err)
	}
}

func TestReadSumsOfMalformedLinesSkipsOrFails(t *testing.T) {
	hash := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, sha256.Size))
	for _, c := range []struct {
		name, text string
		want       int
		fails      bool
	}{
		{"empty", "", 0, false},
		{"a module and its go.mod", "a v1 h1:" + hash + "\na v1/go.mod h1:" + hash + "\n", 1, false},
		{"two fields", "a v1\n", 0, false},
		{"four fields", "a v1 h1:" + hash + " x\n", 0, false},
		{"no base64", "a v1 h1:%%%\n", 0, true},
		{"a line above the limit", "a v1 h1:" + strings.Repeat("A", 1<<17) + "\n", 0, true},
	} {
		path, _ := write(t, filepath.Join(t.TempDir(), "go.sum"), c.text)
		sums, err := readSums(path)
		if (err != nil) != c.fails || !c.fails && len(sums) != c.want {
			t.Errorf("%s: %v, %v", c.name, sums, err)
		}
	}
}
