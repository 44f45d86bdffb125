package main

import "testing"

func TestImportGroupsOutOfOrderAreRefused(t *testing.T) {
	const std, other, own = `"fmt"`, `"golang.org/x/sys/unix"`, `"github.com/peerlane/peerlane/topo"`
	file := func(lines string) []byte { return []byte("package a\n\nimport (\n" + lines + "\n)\n") }
	for name, c := range map[string]struct {
		source []byte
		ok     bool
	}{
		"three groups":              {file(std + "\n" + `"io"` + "\n\n" + other + "\n\n" + own), true},
		"a comment above an import": {file(std + "\n\n// for its driver\n_ " + other + "\n\n" + own), true},
		"one import":                {[]byte("package a\n\nimport " + own + "\n"), true},
		"cgo":                       {[]byte("package a\n\nimport \"C\"\nimport (\n" + std + "\n\n" + own + "\n)\n"), true},
		"own before other":          {file(std + "\n\n" + own + "\n\n" + other), false},
		"one group of two kinds":    {file(std + "\n" + own), false},
		"two groups of one kind":    {file(std + "\n\n" + `"io"`), false},
		"own group twice":           {file(std + "\n\n" + own + "\n\n" + `"github.com/peerlane/peerlane/cuda"`), false},
	} {
		if err := checkImports("a.go", c.source); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
