package programs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// maxAge is the retention of a directory that no test has used.
const maxAge = 14 * 24 * time.Hour

// Key returns a name for the content of files, by patterns, and the C compiler. Tests that compile
// these files with this compiler get the same result.
func Key(patterns ...string) (string, error) {
	h := sha256.New()
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	version, _ := exec.Command("sh", "-c", compiler+" --version").Output() // without a compiler the build fails
	fmt.Fprintf(h, "%q %q\n", compiler, version)
	for _, pattern := range patterns {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		if len(paths) == 0 {
			return "", fmt.Errorf("no file matches %s", pattern)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(h, "%s %d\n%s", path, len(text), text)
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:16]), nil
}

// Cache returns a directory that build has filled, in this run or in an earlier run with the same
// key. The directory is in the user's cache; callers must not change it.
func Cache(key, name string, build func(dir string) error) (dir string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return cacheIn(filepath.Join(cache, "peerlane", "tests"), key, name, build)
}

func cacheIn(cache, key, name string, build func(dir string) error) (dir string, err error) {
	dir = filepath.Join(cache, key, name)
	now := time.Now()
	if _, err := os.Stat(dir); err == nil {
		return dir, os.Chtimes(filepath.Dir(dir), now, now)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	if err := os.Chtimes(filepath.Dir(dir), now, now); err != nil { // removeOld keeps the key
		return "", err
	}
	if err := removeOld(cache, now); err != nil {
		return "", err
	}
	temporary, err := os.MkdirTemp(filepath.Dir(dir), ".build-*")
	if err != nil {
		return "", err
	}
	if err = os.Chmod(temporary, 0o755); err == nil {
		err = build(temporary)
	}
	if err == nil {
		err = os.Rename(temporary, dir)
		if errors.Is(err, fs.ErrExist) { // another process created it first
			return dir, os.RemoveAll(temporary)
		}
	}
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(temporary))
	}
	return dir, nil
}

// removeOld removes the keys that no test has used for a while.
func removeOld(cache string, now time.Time) error {
	keys, err := os.ReadDir(cache)
	if err != nil {
		return err
	}
	for _, k := range keys {
		info, err := k.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if now.Sub(info.ModTime()) > maxAge {
			if err := os.RemoveAll(filepath.Join(cache, k.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

var built struct {
	sync.Mutex
	once map[string]func() (string, error) // by key and name
}

// Built is Cached for tests: it builds once in a process, for all tests of the process.
func Built(t testing.TB, key, name string, build func(dir string) error) (dir string) {
	t.Helper()
	built.Lock()
	if built.once == nil {
		built.once = map[string]func() (string, error){}
	}
	of := key + "/" + name
	once, ok := built.once[of]
	if !ok {
		once = sync.OnceValues(func() (string, error) { return Cache(key, name, build) })
		built.once[of] = once
	}
	built.Unlock()
	dir, err := once()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
