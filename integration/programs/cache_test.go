package programs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestCachedBuildsOncePerKey(t *testing.T) {
	cache, builds := t.TempDir(), 0
	build := func(dir string) error {
		builds++
		return os.WriteFile(filepath.Join(dir, "result"), nil, 0o600)
	}
	for range 2 {
		dir, err := cacheIn(cache, "one", "library", build)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(dir, "result")); err != nil {
			t.Error(err)
		}
	}
	if _, err := cacheIn(cache, "two", "library", build); err != nil || builds != 2 {
		t.Errorf("%d builds of two keys: %v", builds, err)
	}
}

func TestCachedFailedBuildLeavesNothing(t *testing.T) {
	cache, cause := t.TempDir(), errors.New("broken")
	if _, err := cacheIn(cache, "one", "library", func(string) error { return cause }); !errors.Is(err, cause) {
		t.Errorf("the error is %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(cache, "one")); err != nil || len(left) > 0 {
		t.Errorf("%v are left, %v", left, err)
	}
}

func buildNothing(string) error { return nil }

// cacheOfLongAgo returns a cache with the library of a key "old", which is older than maxAge.
func cacheOfLongAgo(t *testing.T) string {
	t.Helper()
	cache := t.TempDir()
	if _, err := cacheIn(cache, "old", "library", buildNothing); err != nil {
		t.Fatal(err)
	}
	before := time.Now().Add(-maxAge - time.Hour)
	if err := os.Chtimes(filepath.Join(cache, "old"), before, before); err != nil {
		t.Fatal(err)
	}
	return cache
}

func TestCachedRemovesKeysOfLongAgo(t *testing.T) {
	cache := cacheOfLongAgo(t)
	if _, err := cacheIn(cache, "new", "library", buildNothing); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(cache, "old")); !os.IsNotExist(err) {
		t.Errorf("a key of long ago is left: %v", err)
	}
}

func TestCachedAddsToKeyOfLongAgo(t *testing.T) {
	cache := cacheOfLongAgo(t)
	dir, err := cacheIn(cache, "old", "program", buildNothing)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
}

func TestKeyFollowsTheContentOfFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.c")
	key := func(text string) string {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		k, err := Key(path)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	one, two := key("1"), key("2")
	if one == two || one != key("1") {
		t.Errorf("keys of different files are %s and %s", one, two)
	}
	if _, err := Key(path + ".none"); err == nil {
		t.Error("a pattern without a file has a key")
	}
}
