package generation

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWriteFileReplacesAndLeavesNoOther(t *testing.T) {
	dir := t.TempDir()
	for _, text := range []string{"first", "second"} {
		if err := WriteFile(dir, "name", []byte(text)); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, "name"))
		if err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, "name")); err != nil {
		t.Error(err)
	} else if info.Mode() != 0o644 {
		t.Errorf("mode %v", info.Mode())
	}
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(dir, "folder", nil); err == nil {
		t.Error("a folder was replaced")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
}
