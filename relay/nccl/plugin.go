// Package nccl builds the plugin by which NCCL reaches a container's relay: a library with tables
// of functions on libpeerlane, whose source is compiled into the plugin, so that the plugin is a
// single file. docs/nccl.md describes the plugin.
package nccl

import (
	"embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/relay/libpeerlane"
)

// Name is the plugin's file: the file that NCCL loads for NCCL_NET_PLUGIN=peerlane.
const Name = "libnccl-net-peerlane.so"

//go:embed source
var source embed.FS

// Unpack writes the source and libpeerlane's into dir, and returns the names of the C
// files.
func Unpack(dir string) ([]string, error) {
	names, err := libpeerlane.Unpack(dir)
	if err != nil {
		return nil, err
	}
	own, err := libpeerlane.Copy(dir, source, "source", ".c")
	return append(names, own...), err
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
	own := []string{"-Wl,-soname," + Name, "-ffile-prefix-map=" + work + "=nccl", "-o", Name}
	if err := libpeerlane.Compile(work, Name, compiler, libpeerlane.Flags, libpeerlane.Shared("plugin.map"), own, more,
		files, libpeerlane.Libraries); err != nil {
		return err
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
