// Package nccl builds the plugin by which NCCL reaches a container's relay: a library with tables
// of functions on libpeerlane, whose source is compiled into the plugin, so that the plugin is a
// single file. docs/nccl.md describes the plugin.
package nccl

import (
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/relay/libpeerlane"
)

// Name is the plugin's file: the file that NCCL loads for NCCL_NET_PLUGIN=peerlane.
const Name = "libnccl-net-peerlane.so"

//go:embed source
var source embed.FS

// shared are the flags of a shared library, as for libpeerlane. The plugin is never unloaded:
// fork() calls its handlers.
var shared = []string{
	"-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2",
	"-shared", "-Wl,-soname," + Name, "-Wl,-z,defs,-z,relro,-z,now,-z,noexecstack,-z,nodelete",
	"-Wl,--version-script=plugin.map",
}

// Before glibc 2.34 libpthread and libdl are not in libc.
var libraries = []string{"-Wl,--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2"}

// Unpack writes the source and libpeerlane's into dir, and returns the names of the C
// files.
func Unpack(dir string) ([]string, error) {
	names, err := libpeerlane.Unpack(dir)
	if err != nil {
		return nil, err
	}
	entries, err := source.ReadDir("source")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		text, err := source.ReadFile("source/" + e.Name())
		if err != nil {
			return nil, err
		}
		if slices.Contains(names, e.Name()) {
			return nil, fmt.Errorf("%s is a source of the plugin's and of libpeerlane's", e.Name())
		}
		if err := os.WriteFile(filepath.Join(dir, e.Name()), text, 0o644); err != nil {
			return nil, err
		}
		if strings.HasSuffix(e.Name(), ".c") {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Versions are the versions of NCCL's interface with a table in the plugin.
var Versions = []int{8, 9, 10, 11, 12}

// NameOf is the file of a plugin with the table of a single version.
func NameOf(version int) string {
	return strings.TrimSuffix(Name, ".so") + fmt.Sprintf("-v%d.so", version)
}

// Build compiles the plugin into dir, with more flags and sources for the compiler, which tests
// have. It replaces an existing file atomically.
func Build(dir string, more ...string) error { return build(dir, Name, 0, more) }

// BuildVersion compiles a plugin that exports the table of a single version (NameOf), for tests of
// that version with an NCCL that would use a newer one.
func BuildVersion(dir string, version int) error { return build(dir, NameOf(version), version, nil) }

// build exports every table if version is 0.
func build(dir, name string, version int, more []string) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	compiler, err := libpeerlane.Compiler()
	if err != nil {
		return fmt.Errorf("%s cannot be built: %w", Name, err)
	}
	work, err := os.MkdirTemp(dir, ".nccl-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	files, err := Unpack(work)
	if err != nil {
		return err
	}
	if version > 0 {
		if err := showOnly(filepath.Join(work, "plugin.map"), version); err != nil {
			return err
		}
	}
	args := append(append([]string{}, compiler[1:]...), libpeerlane.Flags...)
	args = append(append(args, shared...), "-ffile-prefix-map="+work+"=nccl", "-o", Name)
	args = append(append(append(args, more...), files...), libraries...)
	c := exec.Command(compiler[0], args...)
	c.Dir = work
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("compiling %s with %s: %w\n%s", Name, compiler[0], err, out)
	}
	return os.Rename(filepath.Join(work, Name), filepath.Join(dir, name))
}

// ErrNoTable is the cause of a build for a version of NCCL's interface that the plugin does not have.
var ErrNoTable = errors.New("the plugin has no table of that version")

// showOnly keeps a single table in the list of exported symbols.
func showOnly(file string, version int) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	table := func(version int) string { return fmt.Sprintf("\tncclNetPlugin_v%d;\n", version) }
	if !strings.Contains(string(text), table(version)) {
		return fmt.Errorf("%w: version %d", ErrNoTable, version)
	}
	for _, v := range Versions {
		if v != version {
			text = []byte(strings.Replace(string(text), table(v), "", 1))
		}
	}
	return os.WriteFile(file, text, 0o644)
}
