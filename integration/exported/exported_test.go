package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRunListsIdentifiersWithoutUser(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module " + module + "\n\ngo 1.24\n",
		"a/a.go": `package a

import "fmt"

type Colour int

const (
	Red Colour = iota
	Green
)

const (
	One = 1 + iota
	Two
)

type Pair struct{ Left, Right Part }

type Part struct{ Name string }

type Tagged struct {
	Key string "json:\"key\""
}

type Failure struct{ Cause string }

func (*Failure) Error() string { return "" }

func (Part) String() string { return "" }

func (Part) Unused() {}

func Unused() {}

var _ fmt.Stringer = Part{}

type Shape interface{ Area() int }

func Used() Pair { return Pair{} }
`,
		"a/a_test.go": "package a\n\nfunc useInTest() { Unused(); _ = One }\n",
		"b/b.go": `package b

import "` + module + `/a"

func use() { _, _, _, _ = a.Red, a.Used().Left, a.Tagged{}, a.Failure{} }
`,
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	excepted := exceptions
	exceptions = map[string]string{"a.Two": "a reason", "a.Used": "a stale exception"}
	t.Cleanup(func() { exceptions = excepted })
	got, err := run(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"a/a.go:13: constant a.One",
		"a/a.go:17: field a.Pair.Right",
		"a/a.go:19: field a.Part.Name",
		"a/a.go:31: method a.Part.Unused",
		"a/a.go:33: function a.Unused",
		"a/a.go:37: type a.Shape",
		"integration/exported/exceptions.go: a.Used is in use or does not exist",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("identifiers (-want +got):\n%s", diff)
	}
}
