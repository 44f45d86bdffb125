// Package programs gives tests the programs of this repository: built with the go command or, on a
// machine without Go, from a directory that was filled on another machine. Package programs imports
// no package of Peerlane, so that the tests of every package can import it.
package programs

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Variable names the directory of built programs. With the variable, a machine builds no program.
const Variable = "PEERLANE_TEST_BINARIES"

// RunVariable names the directory of the programs that `make test` has built for the packages of
// the run, on a machine that can build.
const RunVariable = "PEERLANE_TEST_PROGRAMS"

const module = "github.com/peerlane/peerlane/"

// Names of programs in Build.
const (
	Peerlane     = "peerlane"
	Hook         = "peerlane-hook"
	Relay        = "peerlane-relay"
	Runtime      = "peerlane-runtime"
	WireGenerate = "wire-generate"
	Traffic      = "traffic-client"
)

// program is the source folder of a program, and whether it links C.
type program struct {
	folder string
	cgo    bool
}

var all = map[string]program{
	Peerlane:     {"cmd/peerlane", true},
	Hook:         {"cmd/peerlane-hook", false}, // static and without symbols, as in packages
	Relay:        {"cmd/peerlane-relay", true},
	Runtime:      {"cmd/peerlane-runtime", false}, // static and without symbols, as in packages
	WireGenerate: {"relay/wire/generate", false},
	Traffic:      {"integration/traffic/client", true},
}

// Build builds programs into dir, an existing directory; without names, every program that a test
// needs, so that dir can be the directory of Variable on another machine. The library of the CUDA
// simulator is not included: cuda/sim builds the library, and looks for it in the directory of the
// running program.
func Build(dir string, names ...string) error {
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(all))
	}
	for _, name := range names {
		if _, known := all[name]; !known {
			return fmt.Errorf("build %s: unknown program", name)
		}
	}
	// One go command builds the programs with equal linking that keep the name of their folder.
	type command struct{ environment, flags, out string }
	together := map[command][]string{}
	for _, name := range names {
		p := all[name]
		key := command{"CGO_ENABLED=0", "-ldflags=-s -w", dir + string(filepath.Separator)}
		if p.cgo {
			key.environment, key.flags = "CGO_ENABLED=1", "-ldflags="
		}
		if filepath.Base(p.folder) != name {
			key.out = filepath.Join(dir, name)
		}
		together[key] = append(together[key], name)
	}
	for key, names := range together {
		c := exec.Command("go", "build", key.flags, "-o", key.out)
		for _, name := range names {
			c.Args = append(c.Args, module+all[name].folder)
		}
		c.Env = append(os.Environ(), key.environment)
		output, err := c.CombinedOutput()
		what := strings.Join(names, ", ")
		switch {
		case c.ProcessState == nil:
			return fmt.Errorf("build %s: %w; without a go command, set %s to a directory of built programs", what, err,
				Variable)
		case err != nil:
			return fmt.Errorf("build %s: %w: %s", what, err, output)
		}
		if slices.Contains(names, Relay) { // relays cannot trace an unreadable program; see docs/security.md
			if err := os.Chmod(filepath.Join(dir, Relay), 0o711); err != nil {
				return err
			}
		}
	}
	return nil
}

// ErrNotAbsolute is the cause of a relative directory.
var ErrNotAbsolute = errors.New("must be absolute: each test runs in the folder of its package")

// DirectoryError is a directory of an environment variable that Directory refuses.
type DirectoryError struct {
	Variable, Directory string
	Err                 error
}

func (e *DirectoryError) Error() string {
	return fmt.Sprintf("%s=%s %v", e.Variable, e.Directory, e.Err)
}

// Unwrap returns the cause.
func (e *DirectoryError) Unwrap() error { return e.Err }

// Directory returns a directory with the named programs, and a function that removes the directory.
func Directory(names ...string) (dir string, remove func() error, err error) {
	for _, variable := range []string{Variable, RunVariable} {
		dir := os.Getenv(variable)
		if dir == "" {
			continue
		}
		if !filepath.IsAbs(dir) {
			return "", nil, &DirectoryError{variable, dir, ErrNotAbsolute}
		}
		for _, name := range names {
			if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
				return "", nil, &DirectoryError{variable, dir, fmt.Errorf("must have %s: %w", strings.Join(names, ", "), err)}
			}
		}
		return dir, func() error { return nil }, nil
	}
	if dir, err = os.MkdirTemp("", "peerlane-programs-"); err != nil {
		return "", nil, err
	}
	remove = func() error { return os.RemoveAll(dir) }
	if err := Build(dir, names...); err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}

// Path returns the path of a program for a test.
func Path(t testing.TB, name string) string {
	t.Helper()
	dir, remove, err := Directory(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, name)
}

// MustHave reports the error of a search for a build tool, such as a compiler: a machine that
// builds Peerlane must have the tool; a machine that receives the programs may lack the tool.
func MustHave(t testing.TB, err error) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv(Variable) != "":
		t.Skipf("needs a machine that builds Peerlane: %v", err)
	default:
		t.Fatal(err)
	}
}
