// Package libpeerlane builds the C library by which programs in containers connect to relays, the C
// counterpart of package client. The folder source has the source, and the header with the
// documentation.
package libpeerlane

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/relay/wire"
)

// Names of files: the library's file name for programs, and the link for linkers.
const (
	Name = "libpeerlane.so.0"
	Link = "libpeerlane.so"
)

//go:embed source
var source embed.FS

// Flags are the flags of every source file, for any C compiler with GCC's command line.
var Flags = []string{
	"-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-Wmissing-prototypes",
	"-fPIC", "-fvisibility=hidden", "-pthread", "-DPEERLANE_BUILD",
}

// Shared returns the flags of a shared library with the list of symbols in the file versions. The
// library is never unloaded: fork() calls its handlers, and a thread may run its code. libpthread and
// libdl are named because libc before glibc 2.34 does not contain them.
func Shared(versions string) []string {
	return append(slices.Clone(Hardening), "-shared",
		"-Wl,-z,defs,-z,relro,-z,now,-z,noexecstack,-z,nodelete", "-Wl,--version-script="+versions)
}

// Hardening are the compiler's flags of shipped binaries.
var Hardening = []string{"-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"}

// Libraries are the linker's arguments of a shared library.
var Libraries = []string{"-Wl,--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2"}

// Unpack writes the source and the headers into dir, and returns the names of the
// C files.
func Unpack(dir string) ([]string, error) {
	names, err := Copy(dir, source, "source", ".c")
	if err != nil {
		return nil, err
	}
	_, err = Copy(dir, wire.Headers, ".", ".h")
	return names, err
}

// Copy writes the files of the directory from into dir, and returns the names that end in suffix.
// A file that dir has already is an error.
func Copy(dir string, files fs.FS, from, suffix string) ([]string, error) {
	entries, err := fs.ReadDir(files, from)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		text, err := fs.ReadFile(files, path.Join(from, e.Name()))
		if err != nil {
			return nil, err
		}
		f, err := os.OpenFile(filepath.Join(dir, e.Name()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err != nil {
			return nil, err
		}
		_, err = f.Write(text)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
		if strings.HasSuffix(e.Name(), suffix) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Compile runs a compiler in dir. name is the product, for the error.
func Compile(dir, name string, compiler []string, lists ...[]string) error {
	args := append(slices.Clone(compiler[1:]), slices.Concat(lists...)...)
	c := exec.Command(compiler[0], args...)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("compiling %s with %s: %w\n%s", name, compiler[0], err, out)
	}
	return nil
}

// Compiler is the C compiler: CC with arguments, else cc, else gcc.
func Compiler() ([]string, error) {
	if cc := strings.Fields(os.Getenv("CC")); len(cc) > 0 {
		return cc, nil
	}
	for _, name := range []string{"cc", "gcc"} {
		if path, err := exec.LookPath(name); err == nil {
			return []string{path}, nil
		}
	}
	return nil, errors.New("no C compiler (cc, gcc) in PATH; install gcc")
}

// Build compiles the library into dir, with the link. It replaces an existing file atomically, so
// that concurrent processes are safe.
func Build(dir string) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	compiler, err := Compiler()
	if err != nil {
		return fmt.Errorf("%s cannot be built: %w", Name, err)
	}
	work, err := os.MkdirTemp(dir, ".libpeerlane-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	files, err := Unpack(work)
	if err != nil {
		return err
	}
	// No name of a temporary directory in it: the same source gives the same library.
	own := []string{"-Wl,-soname," + Name, "-ffile-prefix-map=" + work + "=libpeerlane", "-o", Name}
	if err := Compile(work, Name, compiler, Flags, Shared("peerlane.map"), own, files, Libraries); err != nil {
		return err
	}
	if err := os.Symlink(Name, filepath.Join(work, Link)); err != nil {
		return err
	}
	for _, name := range []string{Name, Link} {
		if err := os.Rename(filepath.Join(work, name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// Places are the directories of an installation.
type Places struct {
	Library   string // directories
	Include   string
	PkgConfig string
	Version   string // of the release
	DestDir   string // in front of each, for packages
}

// Installed are the usual places. The library is in the directory of `peerlane cdi generate`
// (config/paths); programs name it -lpeerlane by pkg-config.
func Installed() Places {
	return Places{Library: "/usr/lib/peerlane", Include: "/usr/include", PkgConfig: "/usr/share/pkgconfig", Version: "0"}
}

// Install builds and installs the library, the headers and the pkg-config file. There is no link
// libpeerlane.so beside it: only libraries that containers load by name belong there.
func Install(p Places) (err error) {
	work, err := os.MkdirTemp("", "libpeerlane-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if err := Build(work); err != nil {
		return err
	}
	library, err := os.ReadFile(filepath.Join(work, Name))
	if err != nil {
		return err
	}
	write := func(dir, name string, content []byte, mode os.FileMode) error {
		dir = filepath.Join(p.DestDir, dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, name), content, mode)
	}
	header, err := source.ReadFile("source/peerlane.h")
	if err != nil {
		return err
	}
	values, err := wire.Headers.ReadFile("peerlane_values.h")
	if err != nil {
		return err
	}
	return errors.Join(
		write(p.Library, Name, library, 0o755),
		write(p.Include, "peerlane.h", header, 0o644),
		write(p.Include, "peerlane_values.h", values, 0o644),
		write(p.PkgConfig, "peerlane.pc", []byte(p.pkgConfig()), 0o644))
}

func (p Places) pkgConfig() string {
	return fmt.Sprintf(`libdir=%s
includedir=%s

Name: peerlane
Description: GPU memory between containers, through their relays
Version: %s
Cflags: -I${includedir}
Libs: -L${libdir} -l:%s
`, p.Library, p.Include, p.Version, Name)
}
