package engines

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/integration/pinned"
)

// installation has the directories of the engines that are not packages of this Debian.
type installation struct {
	// Runc, Containerd and Docker are directories of built programs.
	Runc, Containerd, Docker string
	// Next is the root file system of the newer Debian, and Old the root file system of a separate
	// Debian of this release.
	Next, Old string
}

// modules has the Go modules; both the installer and the tests run in the directory of this
// package.
const modules = "modules"

// find returns the result of Install for the current recipe.
func find() (*installation, error) {
	dir, err := Cache()
	if err != nil {
		return nil, err
	}
	found := &installation{}
	for name, path := range found.folders() {
		k, err := key(name)
		if err != nil {
			return nil, err
		}
		*path = filepath.Join(dir, k)
		if _, err := os.Stat(*path); err != nil {
			return nil, fmt.Errorf("the container engines are not installed: %w; install them with `make test-engines`", err)
		}
	}
	return found, nil
}

func (i *installation) folders() map[string]*string {
	return map[string]*string{"runc": &i.Runc, "containerd": &i.Containerd, "docker": &i.Docker, nextSuite: &i.Next,
		oldSuite: &i.Old}
}

// Cache returns the directory of the installed engines.
func Cache() (string, error) { return pinned.Dir("engines") }

// key names a folder of the cache by its inputs.
func key(name string) (string, error) {
	if m, built := Modules(modules)[name]; built {
		return m.Key()
	}
	h := sha256.New()
	fmt.Fprintln(h, name, suites[name])
	return fmt.Sprintf("%s-%x", name, h.Sum(nil)[:8]), nil
}

// Install builds and installs missing engines, in one process at a time, and reports steps to
// progress.
func Install(ctx context.Context, progress pinned.Progress) error {
	if os.Geteuid() != 0 {
		return errors.New("the container engines need root to install: a root file system has files of many users")
	}
	dir, err := Cache()
	if err != nil {
		return err
	}
	cache := pinned.Cache{Dir: dir, Progress: progress}
	unlock, err := cache.Open(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	once := func(name string, do func(dir string) error) error {
		k, err := key(name)
		if err != nil {
			return err
		}
		return cache.Once(k, do)
	}
	// Download the packages and link concurrently: both take equally long.
	next := make(chan error, 1)
	go func() {
		var err error
		for _, suite := range slices.Sorted(maps.Keys(suites)) {
			err = errors.Join(err, once(suite, func(dir string) error { return makeSuite(ctx, suite, dir) }))
		}
		next <- err
	}()
	builds := Modules(modules)
	for _, name := range slices.Backward(slices.Sorted(maps.Keys(builds))) {
		err = errors.Join(err, once(name, func(dir string) error { return builds[name].Build(ctx, dir) }))
	}
	return errors.Join(err, <-next)
}

// makeSuite creates the root file system of a Debian.
func makeSuite(ctx context.Context, suite, dir string) error {
	return pinned.Step(ctx, nil, "mmdebstrap", "--quiet", "--variant=apt", "--mode=root", "--format=directory",
		"--include="+strings.Join(suites[suite], ","), suite, dir)
}
