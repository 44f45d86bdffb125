package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"
)

// FileName is the name of a kind's file in a directory of specifications,
// "peerlane.dev-lane.json" for KindLane.
func FileName(kind string) string {
	return cdi.GenerateSpecName(parser.ParseQualifier(kind)) + ".json"
}

// Encode writes specifications as JSON documents, one after another.
func Encode(w io.Writer, list ...*specs.Spec) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	for _, spec := range list {
		if err := e.Encode(spec); err != nil {
			return fmt.Errorf("writing the CDI specification of %s: %w", spec.Kind, err)
		}
	}
	return nil
}

// Write installs specifications in a directory that engines read, which it
// makes where it is missing. Each file is replaced in one step, so that an
// engine reads the old or the new one, and has mode 0644, so that rootless
// engines read it too. A file of ours for a kind that is not among the
// specifications is removed: it would offer what the host no longer does.
func Write(dir string, list []*specs.Spec) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("making the directory for CDI specifications: %w", err)
	}
	stale := map[string]bool{}
	for _, kind := range Kinds {
		stale[kind] = true
	}
	for _, spec := range list {
		if err := write(dir, spec); err != nil {
			return fmt.Errorf("installing the CDI specification of %s in %s: %w", spec.Kind, dir, err)
		}
		delete(stale, spec.Kind)
	}
	for kind := range stale {
		if err := os.Remove(filepath.Join(dir, FileName(kind))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing the CDI specification of %s, which this host no longer offers: %w", kind, err)
		}
	}
	return syncDir(dir)
}

// The CDI library's own writer is not used: it leaves mode 0600, and a file
// that a power failure can empty.
func write(dir string, spec *specs.Spec) (err error) {
	// The name ends in neither .json nor .yaml, so no engine reads it early.
	tmp, err := os.CreateTemp(dir, "."+FileName(spec.Kind)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	err = Encode(tmp, spec)
	if err == nil {
		err = tmp.Chmod(0o644) // whatever the umask is
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	// What engines do with it: a specification that the library refuses must
	// not replace one that works.
	if _, err = cdi.ReadSpec(tmp.Name(), 0); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), filepath.Join(dir, FileName(spec.Kind)))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("installing CDI specifications: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("installing CDI specifications in %s: %w", dir, err)
	}
	return nil
}
