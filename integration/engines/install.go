package engines

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/peerlane/peerlane/integration/programs"
)

// Installed is where the engines lie that are no packages of this Debian.
type Installed struct {
	// Runc, Containerd and Docker are directories of programs that were built.
	Runc, Containerd, Docker string
	// Next is the root file system of the newer Debian, and Old that of a separate Debian of this
	// release.
	Next, Old string
}

// modules has the Go modules; both the installer and the tests run in the folder
// of this package.
const modules = "modules"

// keepFor is the retention of unused folders.
const keepFor = 14 * 24 * time.Hour

// find returns the result of Install for the current recipe.
func find() (*Installed, error) {
	dir, err := cacheDir()
	if err != nil {
		return nil, err
	}
	found := &Installed{}
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

func (i *Installed) folders() map[string]*string {
	return map[string]*string{"runc": &i.Runc, "containerd": &i.Containerd, "docker": &i.Docker, nextSuite: &i.Next,
		oldSuite: &i.Old}
}

func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	return filepath.Join(cache, "peerlane", "engines"), err
}

// key names a folder of the cache by its inputs: another recipe, module or compiler gives another
// folder.
func key(name string) (string, error) {
	h := sha256.New()
	if _, built := builds[name]; !built {
		fmt.Fprintln(h, name, suites[name])
	} else {
		fmt.Fprintln(h, runtime.Version(), builds[name])
		root := filepath.Join(modules, name)
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			fmt.Fprintf(h, "%s %d\n%s", path, len(text), text)
			return err
		})
		if err != nil {
			return "", fmt.Errorf(
				"the modules of the container engines: %w; the folder of package engines has to be the working directory", err)
		}
	}
	return fmt.Sprintf("%s-%x", name, h.Sum(nil)[:8]), nil
}

// Install builds and installs missing engines, one process at a time; it reports steps to progress.
func Install(ctx context.Context, progress func(format string, arguments ...any)) error {
	if os.Geteuid() != 0 {
		return errors.New("installing container engines needs root: a root file system has files of many users")
	}
	dir, err := cacheDir()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	path := filepath.Join(dir, "lock")
	unlock, err := programs.Lock(ctx, path, func() {
		progress(
			"waiting for another process that installs container engines (%s)", path)
	})
	if err != nil {
		return err
	}
	defer unlock()
	if err := forget(dir); err != nil {
		return err
	}
	// Downloading the packages takes as long as linking: both at once.
	next := make(chan error, 1)
	go func() {
		var err error
		for _, suite := range slices.Sorted(maps.Keys(suites)) {
			err = errors.Join(err, once(ctx, dir, suite, progress, makeSuite))
		}
		next <- err
	}()
	for _, name := range slices.Backward(slices.Sorted(maps.Keys(builds))) {
		err = errors.Join(err, once(ctx, dir, name, progress, makeBuild))
	}
	return errors.Join(err, <-next)
}

// forget removes folders that were unused for keepFor.
func forget(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		if e.IsDir() && time.Since(info.ModTime()) > keepFor {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// once creates a folder under a temporary name, so that an existing folder is complete.
func once(ctx context.Context, dir, name string, progress func(string, ...any),
	do func(ctx context.Context, name, dir string) error) error {
	k, err := key(name)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, k)
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
	progress("%s: making %s", name, path)
	begun := time.Now()
	if err := do(ctx, name, temporary); err != nil {
		return fmt.Errorf("%s: %w", name, errors.Join(err, os.RemoveAll(temporary)))
	}
	progress("%s: done after %v", name, time.Since(begun).Round(time.Second))
	// The folder may have the old date of its source.
	now := time.Now()
	return errors.Join(os.Chtimes(temporary, now, now), os.Rename(temporary, path))
}

// makeSuite makes a Debian's root file system.
func makeSuite(ctx context.Context, suite, dir string) error {
	return step(ctx, nil, "mmdebstrap", "--quiet", "--variant=apt", "--mode=root", "--format=directory",
		"--include="+strings.Join(suites[suite], ","), suite, dir)
}

// makeBuild builds the programs of a module.
func makeBuild(ctx context.Context, name, dir string) error {
	b := builds[name]
	environment := []string{"CGO_ENABLED=0", "GOFLAGS=-buildvcs=false -mod=readonly"}
	if b.cgo {
		environment[0] = "CGO_ENABLED=1"
	}
	if b.needs != "" {
		if err := step(ctx, nil, "pkg-config", "--exists", "--print-errors", b.needs); err != nil {
			return err
		}
	}
	arguments := []string{"-n", "10", "go", "build", "-C", filepath.Join(modules, name), "-trimpath", "-tags", b.tags,
		"-ldflags", b.ldflags, "-o", dir + "/"}
	return step(ctx, environment, "nice", append(arguments, b.packages...)...)
}

// step runs a command; the error contains the output.
func step(ctx context.Context, environment []string, name string, arguments ...string) error {
	c := exec.CommandContext(ctx, name, arguments...)
	c.Env = append(os.Environ(), environment...)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
