package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/internal/fault"
)

// Packages install the hook and the command in different directories.
func TestHookPathOfPackageIsFound(t *testing.T) {
	dir := t.TempDir()
	beside, packaged := filepath.Join(dir, "bin", "peerlane-hook"), filepath.Join(dir, "libexec", "peerlane-hook")
	check := func(want, object string, cause error) {
		t.Helper()
		got, err := firstHook(beside, packaged)
		if got != want || (err == nil) != (cause == nil) {
			t.Errorf("the hook is %s (%v), want %s", got, err, want)
		}
		if f, ok := errors.AsType[*fault.Error](err); cause != nil && (!ok || f.Object != object || f.Cause != cause ||
			f.Remedy != "name the hook with --hook") {
			t.Errorf("%v; want %v of %s", err, cause, object)
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
	check(packaged, beside+" or "+packaged, errNoHook)
	put(packaged, 0o755)
	check(packaged, "", nil)
	put(beside, 0o644)
	check(beside, beside, errHookMode)
	if err := os.Chmod(beside, 0o755); err != nil {
		t.Fatal(err)
	}
	check(beside, "", nil)
}
