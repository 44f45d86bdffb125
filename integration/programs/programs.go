// Package programs gives tests the programs of this repository: built with the
// go command or, on a machine without one, out of a directory that was filled on
// another. It imports nothing of Peerlane, so the tests of each package can use it.
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

// Variable names the directory of the programs that are built already. A machine
// where it is set builds nothing.
const Variable = "PEERLANE_TEST_BINARIES"

const module = "github.com/peerlane/peerlane/"

// Programs by the names that Build gives them.
const (
	Peerlane     = "peerlane"
	Hook         = "peerlane-hook"
	Relay        = "peerlane-relay"
	Runtime      = "peerlane-runtime"
	WireGenerate = "wire-generate"
)

// program is where a program's source is, and whether it is linked with C.
type program struct {
	folder string
	cgo    bool
}

var all = map[string]program{
	Peerlane:     {"cmd/peerlane", true},
	Hook:         {"cmd/peerlane-hook", false}, // static, as it is shipped
	Relay:        {"cmd/peerlane-relay", true},
	Runtime:      {"cmd/peerlane-runtime", false}, // static, as it is shipped
	WireGenerate: {"relay/wire/generate", false},
}

// Build builds programs into dir, which must be there; without names, every one
// that a test wants, so that dir can be what Variable names elsewhere. The library
// of the CUDA simulator is none of them: cuda/sim builds it, and looks for it
// beside each program that runs.
func Build(dir string, names ...string) error {
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(all))
	}
	for _, name := range names {
		p, known := all[name]
		if !known {
			return fmt.Errorf("building %s: no test has a program of this name", name)
		}
		cgo := "0"
		if p.cgo {
			cgo = "1"
		}
		c := exec.Command("go", "build", "-o", filepath.Join(dir, name), module+p.folder)
		c.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		out, err := c.CombinedOutput()
		switch {
		case c.ProcessState == nil:
			return fmt.Errorf("building %s: %w; where there is no go command, %s names a directory that has it built", name, err, Variable)
		case err != nil:
			return fmt.Errorf("building %s: %w: %s", name, err, out)
		}
		if name == Relay { // relays cannot trace a program that they cannot read; see docs/security.md
			if err := os.Chmod(filepath.Join(dir, name), 0o711); err != nil {
				return err
			}
		}
	}
	return nil
}

// Directory returns a directory that has the programs of these names, and what to
// call when they are not needed any more.
func Directory(names ...string) (dir string, remove func() error, err error) {
	if dir := os.Getenv(Variable); dir != "" {
		if !filepath.IsAbs(dir) {
			return "", nil, fmt.Errorf("%s=%s must be absolute: each test runs in the folder of its package", Variable, dir)
		}
		for _, name := range names {
			if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
				return "", nil, fmt.Errorf("%s=%s must have %s: %w", Variable, dir, strings.Join(names, ", "), err)
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

// Path returns where a test finds one program.
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

// MustHave is for a test of how Peerlane is built, with the error of looking for a
// compiler or the like: a machine that builds Peerlane has it, and one that is
// given its programs may lack it.
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
