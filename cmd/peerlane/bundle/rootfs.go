package bundle

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// File is a program or library of the host to copy into a container.
type File struct {
	// Host is the path on the host, and Container the path in the container; empty for the same
	// path.
	Host      string
	Container string
}

// libraryDirs are the directories that the dynamic linkers of Debian and Fedora search.
var libraryDirs = []string{
	"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
	"/lib64", "/usr/lib64", "/lib", "/usr/lib",
}

// RootFS makes a root file system with these files, the libraries that they are linked with, and
// the directories for a container's mounts. also lists libraries to mount into the container
// later; RootFS copies the libraries that they are linked with.
func RootFS(dir string, files []File, also ...string) error {
	for _, d := range []string{"proc", "dev", "run", "tmp", "etc", "usr/bin", "usr/lib"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	needs := map[string]bool{}
	for _, f := range files {
		inside := f.Container
		if inside == "" {
			inside = f.Host
		}
		if err := CopyFile(f.Host, filepath.Join(dir, inside)); err != nil {
			return err
		}
		if err := closure(f.Host, needs); err != nil {
			return err
		}
	}
	for _, library := range also {
		if err := closure(library, needs); err != nil {
			return err
		}
	}
	for path := range needs {
		if err := CopyFile(path, filepath.Join(dir, path)); err != nil {
			return err
		}
	}
	return nil
}

// closure adds to needs the paths of the libraries and the dynamic linker of an ELF file.
func closure(path string, needs map[string]bool) error {
	f, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer f.Close()
	libraries, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		linker := make([]byte, p.Filesz)
		if _, err := io.ReadFull(p.Open(), linker); err != nil {
			return fmt.Errorf("%s: its dynamic linker: %w", path, err)
		}
		needs[string(linker[:len(linker)-1])] = true // without the trailing NUL
	}
	for _, name := range libraries {
		found, err := findLibrary(name)
		if err != nil {
			return fmt.Errorf("%s needs %w", path, err)
		}
		if needs[found] {
			continue
		}
		needs[found] = true
		if err := closure(found, needs); err != nil {
			return err
		}
	}
	return nil
}

func findLibrary(name string) (string, error) {
	for _, dir := range libraryDirs {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s, which was not found in %v", name, libraryDirs)
}

// CopyFile copies a program and creates the parent directories of the copy.
func CopyFile(from, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
