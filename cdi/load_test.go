package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// specification returns the text of a valid specification with a device of a kind, and with a hook.
func specification(kind, hook string) string {
	edits := `{"env": ["A=1"]}`
	if hook != "" {
		edits = fmt.Sprintf(`{"hooks": [{"hookName": "createRuntime", "path": %q}]}`, hook)
	}
	return fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": %q, "devices": [{"name": "0", "containerEdits": {"env": ["B=1"]}}],
		"containerEdits": %s}`, kind, edits)
}

func TestLoadReadsFilesOfPeerlaneOnly(t *testing.T) {
	ours := JSON.FileName(Kinds[0])
	yaml := YAML.FileName(Kinds[0])
	valid := specification(Kinds[0], "")
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o640) }
	}
	for _, c := range []struct {
		name, file string
		make       func(path string) error
		loaded     bool // Load returns the file
		valid      bool
	}{
		{"our file", ours, write(valid), true, true},
		{"our file in YAML", yaml, write(valid), true, true},
		{"a file with our device", "other.json", write(valid), true, true},
		{"our device in YAML", "other.yaml", write(valid), true, true},
		{"another vendor", "other.json", write(specification("vendor.com/gpu", "")), false, false},
		{"another vendor that names us", "other.json", write(specification("vendor.com/gpu", "/"+Vendor+"/hook")), false,
			false},
		{"another extension", ours + ".bak", write(valid), false, false},
		{"no extension", "json", write(valid), false, false},
		{"a directory", ours, func(path string) error { return os.Mkdir(path, 0o755) }, false, false},
		{"our damaged file", ours, write("{"), true, false},
		{"our empty file", ours, write(""), true, false},
		{"a damaged file with our name in it", "other.json", write(`{"kind": "` + Vendor + `/lane"`), false, false},
		{"our dangling link", ours, func(path string) error { return os.Symlink("none", path) }, true, false},
		{"a dangling link", "other.json", func(path string) error { return os.Symlink("none", path) }, false, false},
		{"our link in a loop", ours, func(path string) error { return os.Symlink(filepath.Base(path), path) }, true, false},
	} {
		first, second := t.TempDir(), t.TempDir()
		path := filepath.Join(second, c.file)
		if err := c.make(path); err != nil {
			t.Fatal(err)
		}
		files, err := Load([]string{filepath.Join(first, "none"), first, second})
		if err != nil || (len(files) == 1) != c.loaded || len(files) > 1 {
			t.Errorf("%s: %d files, %v", c.name, len(files), err)
			continue
		}
		if !c.loaded {
			continue
		}
		f := files[0]
		if f.Path != path || f.priority != 2 || (f.spec != nil) != c.valid || (f.Err == nil) != c.valid {
			t.Errorf("%s: %+v", c.name, f)
		}
		if info, err := os.Lstat(path); err != nil || f.mode != info.Mode() || f.uid != os.Geteuid() {
			t.Errorf("%s: mode %v of uid %d, %v", c.name, f.mode, f.uid, err)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if files, err := Load([]string{file}); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file in place of the directory: %d files, %v", len(files), err)
	}
	if f, err := load(filepath.Join(file+".none", ours), 0); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a removed file: %+v, %v", f, err)
	}
}

func TestInstalledHookIsFirstExecutable(t *testing.T) {
	dir := t.TempDir()
	program := func(name string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	first, second, plain := program("first", 0o755), program("second", 0o100), program("plain", 0o644)
	for _, c := range []struct {
		name  string
		files []map[string]string // of each directory, by name
		want  string
	}{
		{"no directories", nil, ""},
		{"a hook", []map[string]string{{JSON.FileName(Kinds[0]): specification(Kinds[0], first)}}, first},
		{"a hook in YAML", []map[string]string{{YAML.FileName(Kinds[1]): specification(Kinds[1], second)}}, second},
		{"two directories", []map[string]string{{JSON.FileName(Kinds[1]): specification(Kinds[1], second)},
			{JSON.FileName(Kinds[0]): specification(Kinds[0], first)}}, second},
		{"a directory without a hook", []map[string]string{{JSON.FileName(Kinds[0]): specification(Kinds[0], "")},
			{JSON.FileName(Kinds[0]): specification(Kinds[0], first)}}, first},
		{"a missing program", []map[string]string{{JSON.FileName(Kinds[0]): specification(Kinds[0], filepath.Join(dir,
			"none"))},
			{JSON.FileName(Kinds[0]): specification(Kinds[0], first)}}, first},
		{"a program without a mode", []map[string]string{{JSON.FileName(Kinds[0]): specification(Kinds[0], plain)}}, ""},
		{"a directory as the program", []map[string]string{{JSON.FileName(Kinds[0]): specification(Kinds[0], dir)}}, ""},
		{"another file", []map[string]string{{"other.json": specification(Kinds[0], first)}}, ""},
		{"another kind", []map[string]string{{JSON.FileName(Kinds[0]): specification(Kinds[1], first)}}, ""},
		{"a damaged file", []map[string]string{{JSON.FileName(Kinds[0]): "{"},
			{JSON.FileName(Kinds[0]): specification(Kinds[0], first)}}, first},
	} {
		var dirs []string
		for _, files := range c.files {
			dirs = append(dirs, t.TempDir())
			for name, text := range files {
				if err := os.WriteFile(filepath.Join(dirs[len(dirs)-1], name), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got := InstalledHook(slices.Concat([]string{filepath.Join(dir, "none")}, dirs)); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
