// Package nixl builds the plugin by which NIXL moves memory between containers: a backend of NIXL's
// on libpeerlane, whose source is compiled into the plugin, so that the plugin needs only the C and
// C++ libraries. docs/nixl.md describes the plugin.
package nixl

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

// Name is the plugin's file: NIXL loads it as backend PEERLANE.
const Name = "libplugin_PEERLANE.so"

// forwarded are backends of NIXL with a forwarder: NIXL_PLUGIN_DIR names one directory, so that
// NIXL would not find NIXL's plugins beside this plugin.
var forwarded = []string{"UCX", "LIBFABRIC", "POSIX", "GDS", "GDS_MT", "OBJ"}

// ForwarderName is the file of a backend's forwarder.
func ForwarderName(backend string) string { return "libplugin_" + backend + ".so" }

// Files are the names of the files that Build makes.
func Files() []string {
	files := []string{Name}
	for _, backend := range forwarded {
		files = append(files, ForwarderName(backend))
	}
	return files
}

//go:embed source forward
var source embed.FS

// cxxFlags compile the plugin's own source. The ABI of std::string is the one that NIXL's builds
// have, regardless of the compiler's default.
var cxxFlags = []string{
	"-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-fPIC", "-fvisibility=hidden",
	"-fvisibility-inlines-hidden",
	"-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-D_GLIBCXX_USE_CXX11_ABI=1", "-pthread",
	"-DPEERLANE_BUILD",
}

// libraries are those of libpeerlane, and others if needed.
var libraries = append(slices.Clone(libpeerlane.Libraries), "-Wl,--as-needed")

// Unpack writes the source and libpeerlane's into dir, and returns the names of the C and of the
// C++ files.
func Unpack(dir string) (c, cxx []string, err error) {
	if c, err = libpeerlane.Unpack(dir); err != nil {
		return nil, nil, err
	}
	for _, from := range []string{"source", "forward"} {
		own, err := libpeerlane.Copy(dir, source, from, ".cpp")
		if err != nil {
			return nil, nil, err
		}
		cxx = append(cxx, own...)
	}
	return c, cxx, nil
}

// Compiler is the C++ compiler beside libpeerlane's C compiler: CXX with arguments, else the name
// of the C compiler with g++ in place of gcc, c++ in place of cc.
func Compiler() ([]string, error) {
	if cxx := strings.Fields(os.Getenv("CXX")); len(cxx) > 0 {
		return cxx, nil
	}
	c, err := libpeerlane.Compiler()
	if err != nil {
		return nil, err
	}
	dir, base := filepath.Split(c[0])
	switch {
	case strings.Contains(base, "gcc"):
		base = strings.Replace(base, "gcc", "g++", 1)
	case strings.Contains(base, "clang"):
		base = strings.Replace(base, "clang", "clang++", 1)
	default:
		base = strings.Replace(base, "cc", "c++", 1)
	}
	path, err := exec.LookPath(dir + base)
	if err != nil {
		return nil, fmt.Errorf("no C++ compiler %s beside %s; install g++", dir+base, c[0])
	}
	return append([]string{path}, c[1:]...), nil
}

// Build compiles the plugin and the forwarders into dir, with more flags for both compilers, which
// tests have. Build replaces existing files atomically.
func Build(dir string, more ...string) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	c, err := libpeerlane.Compiler()
	if err != nil {
		return fmt.Errorf("%s cannot be built: %w", Name, err)
	}
	cxx, err := Compiler()
	if err != nil {
		return fmt.Errorf("%s cannot be built: %w", Name, err)
	}
	work, err := os.MkdirTemp(dir, ".nixl-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	cFiles, cxxFiles, err := Unpack(work)
	if err != nil {
		return err
	}
	prefix := "-ffile-prefix-map=" + work + "=nixl"
	run := func(compiler []string, lists ...[]string) error {
		return libpeerlane.Compile(work, Name, compiler, lists...)
	}
	shared := libpeerlane.Shared("plugin.map")
	if err := run(c, libpeerlane.Flags, libpeerlane.Hardening, []string{prefix, "-c"}, more, cFiles); err != nil {
		return err
	}
	if err := run(cxx, cxxFlags, []string{prefix, "-c"}, more, cxxFiles); err != nil {
		return err
	}
	var objects []string
	for _, name := range append(cFiles, cxxFiles...) {
		objects = append(objects, strings.TrimSuffix(strings.TrimSuffix(name, ".cpp"), ".c")+".o")
	}
	if err := run(cxx, shared, more, []string{"-Wl,-soname," + Name, "-o", Name}, objects, libraries); err != nil {
		return err
	}
	// A single binary under several names: a forwarder reads the name of its file.
	if err := run(c, libpeerlane.Flags, shared, more, []string{prefix, "-o", "forward.so", "forward.c"},
		libraries); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(work, "forward.so"))
	if err != nil {
		return err
	}
	for _, backend := range forwarded {
		if err := os.WriteFile(filepath.Join(work, ForwarderName(backend)), text, 0o755); err != nil {
			return err
		}
	}
	for _, name := range Files() {
		if err := os.Rename(filepath.Join(work, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}
