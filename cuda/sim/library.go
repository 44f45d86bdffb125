package sim

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/peerlane/peerlane/cuda"
)

// LibraryName is the file name of the simulator's library.
const LibraryName = "libpeerlane-cuda-sim.so"

//go:embed libcuda/*.c libcuda/*.h
var source embed.FS

// flags are the compiler flags of the library, for GCC or a compatible compiler. The library needs
// only glibc.
var flags = []string{
	"-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow",
	"-fPIC", "-fvisibility=hidden", "-pthread", "-shared", "-Wl,-z,defs",
	// As in packages.
	"-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wl,-z,relro,-z,now,-z,noexecstack",
}

// fingerprint identifies source and flags, so that a library of other source is rejected.
var fingerprint = sync.OnceValue(func() string {
	h := sha256.New()
	fmt.Fprintln(h, flags)
	entries, _ := source.ReadDir("libcuda") // of an embedded file system: cannot fail
	for _, e := range entries {
		text, _ := source.ReadFile("libcuda/" + e.Name())
		fmt.Fprintf(h, "%s %d\n%s", e.Name(), len(text), text)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:16])
})

// Library returns the path of the simulator's library for the source in this program. It tries the
// directory of the executable, the directory of packages, and bin/ of the repository around the
// working directory; else it compiles the library once into the user's cache directory.
func Library() (string, error) {
	var tried []string
	if exe, err := os.Executable(); err == nil {
		dir := filepath.Dir(exe)
		tried = append(tried, filepath.Join(dir, LibraryName), filepath.Join(dir, "../libexec/peerlane", LibraryName))
	}
	if root, ok := repository(); ok {
		tried = append(tried, filepath.Join(root, "bin", LibraryName))
	}
	cache, err := os.UserCacheDir()
	if err == nil {
		cache = filepath.Join(cache, "peerlane", "cuda-sim-"+fingerprint(), LibraryName)
		tried = append(tried, cache)
	}
	for _, path := range tried {
		if current(path) {
			return path, nil
		}
	}
	places := strings.Join(tried, ", ")
	if err != nil {
		return "", fmt.Errorf(
			"CUDA simulator: no library of this version at %s, and no cache directory for a compiled library: %w", places, err)
	}
	if err := Build(cache); err != nil {
		return "", fmt.Errorf("CUDA simulator: no library of this version at %s: %w", places, err)
	}
	return cache, nil
}

// Use creates a simulated host in dir, and sets the environment of this process and later children
// to it.
func Use(dir string, devices []Device) error {
	if err := Write(dir, devices); err != nil {
		return err
	}
	environment, err := Environment(dir)
	if err != nil {
		return err
	}
	for _, e := range environment {
		name, value, _ := strings.Cut(e, "=")
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}

// Environment returns the environment variables for the simulated host in dir.
func Environment(dir string) ([]string, error) {
	library, err := Library()
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	return []string{cuda.LibraryVariable + "=" + library, "PEERLANE_SIM=" + dir}, nil
}

// Build compiles the library to path with the C compiler: CC, else cc, else gcc. The replacement is
// atomic, so several processes may build at a time. more has further arguments of the compiler.
func Build(path string, more ...string) (err error) {
	compiler, err := compiler()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".cuda-sim-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.CopyFS(dir, source); err != nil {
		return err
	}
	files, err := fs.Glob(source, "libcuda/*.c")
	if err != nil {
		return err
	}
	args := append(append([]string{}, flags...), more...)
	// Keep the temporary directory out of the debug information, so that builds are reproducible.
	args = append(args, "-ffile-prefix-map="+dir+"=cuda-sim", `-DPEERLANE_SIM_SOURCE="`+fingerprint()+`"`, "-o",
		LibraryName)
	cmd := exec.Command(compiler, append(args, files...)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile the CUDA simulator with %s: %w\n%s", compiler, err, out)
	}
	return os.Rename(filepath.Join(dir, LibraryName), path)
}

func compiler() (string, error) {
	names := []string{"cc", "gcc"}
	if cc := os.Getenv("CC"); cc != "" {
		names = []string{cc}
	}
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf(
		"the CUDA simulator cannot be compiled: no C compiler (%s) in PATH; install gcc, or put %s beside the "+
			"program", strings.Join(names, ", "), LibraryName)
}

// current reports whether the library at path was built from this source, by its mark
// (peerlaneSimVersion).
func current(path string) bool {
	content, err := os.ReadFile(path)
	return err == nil && bytes.Contains(content, []byte("peerlane-sim-source:"+fingerprint()))
}

// repository returns the root of the repository that contains the working directory.
func repository() (string, bool) {
	dir, err := os.Getwd()
	for err == nil {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil {
			return dir, bytes.HasPrefix(mod, []byte("module github.com/peerlane/peerlane\n"))
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			break
		}
		dir = parent
	}
	return "", false
}
