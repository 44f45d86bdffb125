package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// File is a CDI file of Peerlane, or a file that defines devices of Peerlane's kinds.
type File struct {
	Path string
	// priority is the position of the directory in the list. A device in a later directory hides
	// the same device in an earlier directory.
	priority int
	// mode and uid are the attributes of the file itself, not of the target of a link.
	mode fs.FileMode
	uid  int
	// spec is nil if engines do not load the file; Err is the reason.
	spec *specs.Spec
	Err  error
}

// Load reads the directories of specifications as engines do. A missing directory is empty; an
// unreadable directory or file is an error.
func Load(dirs []string) ([]File, error) {
	var files []File
	for priority, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read CDI specifications: %w", err)
		}
		for _, e := range entries {
			if ext := filepath.Ext(e.Name()); e.IsDir() || ext != "."+string(JSON) && ext != "."+string(YAML) {
				continue
			}
			f, err := load(filepath.Join(dir, e.Name()), priority)
			if errors.Is(err, fs.ErrNotExist) {
				continue // removed since ReadDir
			}
			if err != nil {
				return nil, fmt.Errorf("read CDI specifications: %w", err)
			}
			if f != nil {
				files = append(files, *f)
			}
		}
	}
	return files, nil
}

// load reads a file. It returns nil for a file without devices of Peerlane.
func load(path string, priority int) (*File, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	named := isOurName(filepath.Base(path))
	f := &File{
		Path:     path,
		priority: priority,
		mode:     info.Mode(),
		uid:      int(info.Sys().(*syscall.Stat_t).Uid), // as package os documents for Linux
	}
	text, err := os.ReadFile(path)
	switch {
	case err != nil && named:
		if errors.Is(err, fs.ErrPermission) {
			return nil, err // root can read the file, so the file has no defect
		}
		f.Err = err
		return f, nil
	case err != nil: // a foreign file that this user may not read, or a dangling link
		return nil, nil
	case !named && !bytes.Contains(text, []byte(Vendor+"/")):
		return nil, nil
	}
	spec, err := cdi.ReadSpec(path, priority)
	switch {
	case err != nil && named:
		f.Err = err
	case err != nil || !strings.HasPrefix(spec.Kind, Vendor+"/"):
		return nil, nil
	default:
		f.spec = spec.Spec
	}
	return f, nil
}

// isOurName reports whether Peerlane writes files with this name.
func isOurName(name string) bool {
	for _, kind := range Kinds {
		for _, f := range []Format{JSON, YAML} {
			if name == f.FileName(kind) {
				return true
			}
		}
	}
	return false
}

// InstalledHook returns the hook that the specifications of these directories call, if the file
// exists, and else "". An unreadable directory has no hook.
func InstalledHook(dirs []string) string {
	for _, dir := range dirs {
		for _, kind := range Kinds {
			for _, format := range []Format{JSON, YAML} {
				spec, err := cdi.ReadSpec(filepath.Join(dir, format.FileName(kind)), 0)
				if err != nil || spec.Kind != kind {
					continue
				}
				for _, hook := range spec.ContainerEdits.Hooks {
					if info, err := os.Stat(hook.Path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
						return hook.Path
					}
				}
			}
		}
	}
	return ""
}
