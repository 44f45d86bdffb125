package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A package has the hook elsewhere than the command.
func TestHookPathOfPackageIsFound(t *testing.T) {
	dir := t.TempDir()
	beside, packaged := filepath.Join(dir, "bin", "peerlane-hook"), filepath.Join(dir, "libexec", "peerlane-hook")
	check := func(want string, says ...string) {
		t.Helper()
		got, err := firstHook(beside, packaged)
		if got != want || (err == nil) != (len(says) == 0) {
			t.Errorf("the hook is %s (%v), want %s", got, err, want)
		}
		for _, words := range says {
			if err != nil && !strings.Contains(err.Error(), words) {
				t.Errorf("%v; want %q", err, words)
			}
		}
	}
	put := func(path string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	check(packaged, "no hook found", beside, packaged, "--hook")
	put(packaged, 0o755)
	check(packaged)
	put(beside, 0o644)
	check(beside, "not an executable file", "--hook")
	if err := os.Chmod(beside, 0o755); err != nil {
		t.Fatal(err)
	}
	check(beside)
}
