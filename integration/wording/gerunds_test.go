package main

import (
	"testing"
)

func TestCountGerundsFindsFirstWordOfErrors(t *testing.T) {
	count, err := countGerunds("x.go", []byte(`package x

func f() {
	_ = fmt.Errorf("reading %s: %w", name, err)
	_ = errors.New("waiting: " + cause)
	_ = fmt.Errorf("read %s: %w", name, err)
	_ = errors.New("missing name")
	_ = errors.New(reason)
	t.Errorf("reading: %v", err)
}
`))
	if err != nil || count != 2 {
		t.Errorf("countGerunds returns %d, %v, not 2", count, err)
	}
}

func TestGerundsAboveLimitAreReported(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) { writeFile(t, root, name, text) }
	write("a/a.go", "package a\n\nvar _ = errors.New(\"reading it\")\n")
	write(gerundsFile, "a 1\n")
	if err := checkGerunds(root, false); err != nil {
		t.Errorf("a folder at the limit: %v", err)
	}
	write(gerundsFile, "b 1\n")
	if err := checkGerunds(root, false); err == nil {
		t.Error("a folder without a limit passes")
	}
}
