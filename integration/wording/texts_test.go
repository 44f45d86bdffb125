package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCountTextsFindsComparisonsOfErrorTexts(t *testing.T) {
	count, err := countTexts("x_test.go", []byte(`package x

func f() {
	_ = strings.Contains(err.Error(), "a") || !strings.HasPrefix(w.err.Error(), "b")
	_ = err.Error() != want || c.Error == "no call" || pattern.MatchString(err.Error())
	_ = errors.Is(err, fs.ErrNotExist) || strings.Contains(out, "a")
	t.Error(err.Error())
}
`))
	if err != nil || count != 4 {
		t.Errorf("countTexts returns %d, %v, not 4", count, err)
	}
}

func TestErrorTextsAboveLimitAreReported(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) { writeFile(t, root, name, text) }
	const source = "package a\n\nvar _ = err.Error() == \"a\"\n"
	write("a/a_test.go", source)
	write("b/b_test.go", source)
	write("b/b.go", source)
	write("relay/r_test.go", source)
	write(textsFile, "a 2 of a\nb 1 of b\nc 3 of c\n")
	if err := checkTexts(root, false); err == nil {
		t.Error("a folder without a limit passes")
	}
	if err := os.Remove(filepath.Join(root, "relay/r_test.go")); err != nil {
		t.Fatal(err)
	}
	if err := checkTexts(root, true); err != nil {
		t.Errorf("folders within the limits: %v", err)
	}
	text, err := os.ReadFile(filepath.Join(root, textsFile))
	if err != nil {
		t.Fatal(err)
	}
	limits, reasons, err := countList{reasons: true}.parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]int{"a": 1, "b": 1}, limits); diff != "" {
		t.Errorf("limits after the update (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"a": "of a", "b": "of b"}, reasons); diff != "" {
		t.Errorf("reasons after the update (-want +got):\n%s", diff)
	}
	if _, _, err := (countList{reasons: true}).parse("a 2"); err == nil {
		t.Error("a folder without a reason passes")
	}
}
