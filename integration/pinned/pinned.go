// Package pinned builds programs of Go modules at pinned versions, and keeps them in the user's cache
// directory. Tests of container engines and of Kubernetes use the programs, and images of virtual
// machines are in a Cache.
package pinned

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/peerlane/peerlane/integration/programs"
)

// keepFor is the retention of unused folders.
const keepFor = 14 * 24 * time.Hour

// Progress reports a step.
type Progress func(format string, arguments ...any)

// Cache is a directory with a folder for each recipe.
type Cache struct {
	Dir      string
	Progress Progress
}

// Dir returns the cache's directory for a purpose.
func Dir(purpose string) (string, error) {
	cache, err := os.UserCacheDir()
	return filepath.Join(cache, "peerlane", purpose), err
}

// Open creates the cache, waits until no other process changes it, and removes folders that were
// unused for keepFor.
func (c Cache) Open(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return nil, err
	}
	path := filepath.Join(c.Dir, "lock")
	unlock, err = programs.Lock(ctx, path, func() { c.Progress("waiting for another process that holds %s", path) })
	if err != nil {
		return nil, err
	}
	if err := c.forget(); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// forget removes folders that were unused for keepFor.
func (c Cache) forget() error {
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		if e.IsDir() && time.Since(info.ModTime()) > keepFor {
			if err := os.RemoveAll(filepath.Join(c.Dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// Once creates the folder key of the cache under a temporary name, so that an existing folder is
// complete. do fills the folder.
func (c Cache) Once(key string, do func(dir string) error) error {
	path := filepath.Join(c.Dir, key)
	if _, err := os.Stat(path); err == nil {
		now := time.Now()
		return os.Chtimes(path, now, now)
	}
	temporary := path + ".new"
	if err := os.RemoveAll(temporary); err != nil {
		return err
	}
	if err := os.MkdirAll(temporary, 0o755); err != nil {
		return err
	}
	c.Progress("making %s", path)
	begun := time.Now()
	if err := do(temporary); err != nil {
		return fmt.Errorf("create %s: %w", path, errors.Join(err, os.RemoveAll(temporary)))
	}
	c.Progress("made %s in %v", path, time.Since(begun).Round(time.Second))
	// The folder may have the old date of its source.
	now := time.Now()
	return errors.Join(os.Chtimes(temporary, now, now), os.Rename(temporary, path))
}

// Module is a Go module that pins programs, and the recipe of their build.
type Module struct {
	// Folder has the module's go.mod.
	Folder string
	// Packages are the programs; packages of the module itself begin with "./".
	Packages []string
	Tags     string
	Ldflags  string
	CGO      bool
	// Needs is a C library, by pkg-config name.
	Needs string
}

// Key returns the name of the module's folder in a cache: another recipe, module or compiler gives
// another key.
func (m Module) Key() (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), m.Packages, m.Tags, m.Ldflags, m.CGO, m.Needs)
	err := fs.WalkDir(os.DirFS(m.Folder), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f, err := os.Open(filepath.Join(m.Folder, path))
		if err != nil {
			return err
		}
		defer f.Close()
		fmt.Fprintln(h, path)
		_, err = io.Copy(h, f)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("module of pinned programs: %w; run in the folder of the package", err)
	}
	return fmt.Sprintf("%s-%x", filepath.Base(m.Folder), h.Sum(nil)[:8]), nil
}

// Build builds the programs of the module into dir.
func (m Module) Build(ctx context.Context, dir string) error {
	environment := []string{"CGO_ENABLED=0", "GOFLAGS=-buildvcs=false -mod=readonly"}
	if m.CGO {
		environment[0] = "CGO_ENABLED=1"
	}
	if m.Needs != "" {
		if err := Step(ctx, nil, "pkg-config", "--exists", "--print-errors", m.Needs); err != nil {
			return err
		}
	}
	arguments := []string{"-n", "10", "go", "build", "-C", m.Folder, "-trimpath", "-tags", m.Tags, "-ldflags",
		m.Ldflags, "-o", dir + "/"}
	return Step(ctx, environment, "nice", append(arguments, m.Packages...)...)
}

// Step runs a command; the error contains the output.
func Step(ctx context.Context, environment []string, name string, arguments ...string) error {
	c := exec.CommandContext(ctx, name, arguments...)
	c.Env = append(os.Environ(), environment...)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
