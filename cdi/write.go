package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/aymanbagabas/go-udiff"
	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/topo/planner"
)

// Format is the format of a CDI file. Engines read both formats.
type Format string

// Formats of CDI files.
const (
	JSON Format = "json"
	YAML Format = "yaml"
)

// Formats lists the names of the formats.
var Formats = []string{string(JSON), string(YAML)}

// FileName returns the name of a kind's file in a directory of specifications,
// "peerlane.dev-lane.json" for KindLane.
func (f Format) FileName(kind string) string {
	return cdi.GenerateSpecName(parser.ParseQualifier(kind)) + "." + string(f)
}

// other returns the other format.
func (f Format) other() Format {
	if f == JSON {
		return YAML
	}
	return JSON
}

// Encode writes the specifications as consecutive documents.
func (f Format) Encode(w io.Writer, list ...*specs.Spec) error {
	for _, spec := range list {
		var err error
		if f == YAML {
			e := yaml.NewEncoder(w)
			e.SetIndent(2)
			if _, err = io.WriteString(w, "---\n"); err == nil {
				err = errors.Join(e.Encode(spec), e.Close())
			}
		} else {
			e := json.NewEncoder(w)
			e.SetIndent("", "  ")
			e.SetEscapeHTML(false)
			err = e.Encode(spec)
		}
		if err != nil {
			return fmt.Errorf("write the CDI specification of %s: %w", spec.Kind, err)
		}
	}
	return nil
}

// FileName is the name of a kind's file in JSON.
func FileName(kind string) string { return JSON.FileName(kind) }

// encode writes the specifications as consecutive JSON documents.
func encode(w io.Writer, list ...*specs.Spec) error { return JSON.Encode(w, list...) }

// Write installs specifications as JSON in a directory that engines read, without a plan; see
// Installation.
func Write(dir string, list []*specs.Spec) error {
	changes, err := directoryChanges(dir, JSON, list)
	if err != nil {
		return err
	}
	return apply(changes)
}

// Installation describes the plan and CDI specifications to install on a host.
//
// Apply replaces a file in one step, so that an engine reads the old or the new file, with mode
// 0644, so that rootless engines can read the file. Apply does not touch a current file. It
// removes a file of Peerlane for a kind without a specification, because the file would offer
// devices that the host has lost, and a file of the same kind in the other format, because
// engines ignore a device that two files define.
type Installation struct {
	Layout paths.Layout
	// Dirs are the directories of specifications. Apply creates missing directories.
	Dirs []string
	// Format is the format of the files. Empty keeps the format of a directory; the default is
	// JSON.
	Format Format
	// plan and specs are the content to install. A nil plan removes the plan; empty specs remove
	// the files of Peerlane.
	plan  *planner.Plan
	specs []*specs.Spec
}

// Change is one file that Apply writes or removes.
type Change struct {
	// Path is the path of the file. Kind is its kind of device; empty for the plan.
	Path string `json:"path"`
	Kind string `json:"kind,omitempty"`
	// Removed reports that Apply removes the file; otherwise Apply writes the file.
	Removed bool `json:"removed,omitempty"`
	// Devices is the number of device names in the new file.
	Devices int `json:"devices,omitempty"`

	old, text []byte
	// replaces is the file of the other format that this file replaces; empty for none.
	replaces string
	format   Format
	plan     *planner.Plan
}

// Diff returns the change as a unified diff; empty if only mode or owner change.
func (c Change) Diff() string {
	from, to := c.Path, c.Path
	switch {
	case c.Removed:
		to = os.DevNull
	case c.replaces != "":
		from = c.replaces
	case c.old == nil:
		from = os.DevNull
	}
	return udiff.Unified(from, to, string(c.old), string(c.text))
}

// changes returns the file changes that Apply would make, in order. It does not modify the host.
func (i Installation) changes() ([]Change, error) {
	var plan, all []Change
	change, err := i.planChange()
	if err != nil {
		return nil, err
	}
	if change != nil {
		plan = []Change{*change}
	}
	for _, dir := range i.Dirs {
		format := i.Format
		if format == "" {
			format = formatOf(dir)
		}
		changes, err := directoryChanges(dir, format, i.specs)
		if err != nil {
			return nil, err
		}
		all = append(all, changes...)
	}
	// Write the plan before the specifications that lead a hook to the plan, and remove the plan
	// after the specifications.
	if i.plan == nil {
		return append(all, plan...), nil
	}
	return append(plan, all...), nil
}

// apply writes and removes files until the host matches i, and returns the changes. The caller
// holds the layout's lock (Hold): otherwise a command that read the host earlier could replace
// the files of a later command.
func (i Installation) apply() ([]Change, error) {
	if i.plan != nil {
		if err := i.Layout.Create(); err != nil {
			return nil, fmt.Errorf("create Peerlane's directories: %w", err)
		}
	}
	for _, dir := range i.Dirs {
		if err := removeLeftovers(dir); err != nil {
			return nil, err
		}
	}
	changes, err := i.changes()
	if err != nil {
		return nil, err
	}
	return changes, apply(changes)
}

// planChange returns the change to the plan file, or nil if the file is current.
func (i Installation) planChange() (*Change, error) {
	path := i.Layout.PlanFile()
	old, ours, err := readOurs(path)
	if err != nil {
		return nil, fmt.Errorf("read the plan: %w", err)
	}
	if i.plan == nil {
		if old == nil {
			return nil, nil
		}
		return &Change{Path: path, Removed: true, old: old}, nil
	}
	plan := settled(i.plan)
	text, err := json.MarshalIndent(plan, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write the plan: %w", err)
	}
	text = append(text, '\n') // like Plan.Write
	if ours && bytes.Equal(old, text) {
		return nil, nil
	}
	return &Change{Path: path, old: old, text: text, plan: plan}, nil
}

// settled returns a copy of the plan without volatile values, such as the link speed of a GPU,
// which drops when the GPU is idle.
func settled(p *planner.Plan) *planner.Plan {
	s := *p
	s.GPUs, s.NICs = slices.Clone(p.GPUs), slices.Clone(p.NICs)
	for i := range s.GPUs {
		s.GPUs[i].LinkNow = 0
	}
	for i := range s.NICs {
		s.NICs[i].LinkNow = 0
	}
	return &s
}

// directoryChanges returns the changes to the specifications of a directory.
func directoryChanges(dir string, format Format, list []*specs.Spec) ([]Change, error) {
	var changes []Change
	var stale []string
	stale = append(stale, Kinds...)
	for _, spec := range list {
		stale = slices.DeleteFunc(stale, func(kind string) bool { return kind == spec.Kind })
		change, err := specChange(dir, format, spec)
		if err != nil {
			return nil, fmt.Errorf("install the CDI specification of %s in %s: %w", spec.Kind, dir, err)
		}
		if change != nil {
			changes = append(changes, *change)
			if change.replaces != "" {
				continue
			}
		}
		if changes, err = addRemoval(changes, dir, format.other(), spec.Kind); err != nil {
			return nil, err
		}
	}
	for _, kind := range stale {
		for _, f := range []Format{JSON, YAML} {
			var err error
			if changes, err = addRemoval(changes, dir, f, kind); err != nil {
				return nil, err
			}
		}
	}
	return changes, nil
}

// addRemoval adds the removal of a kind's file, if the file exists and Peerlane may replace it.
func addRemoval(changes []Change, dir string, format Format, kind string) ([]Change, error) {
	path := filepath.Join(dir, format.FileName(kind))
	old, _, err := readOurs(path)
	if err != nil {
		return nil, fmt.Errorf("find a CDI specification of %s: %w", kind, err)
	}
	if old == nil || !isOfKind(old, kind) {
		return changes, nil
	}
	return append(changes, Change{Path: path, Kind: kind, Removed: true, old: old}), nil
}

func specChange(dir string, format Format, spec *specs.Spec) (*Change, error) {
	var text bytes.Buffer
	if err := format.Encode(&text, spec); err != nil {
		return nil, err
	}
	c := &Change{
		Path: filepath.Join(dir, format.FileName(spec.Kind)), Kind: spec.Kind, Devices: len(spec.Devices),
		text: text.Bytes(), format: format,
	}
	var ours bool
	var err error
	if c.old, ours, err = readOurs(c.Path); err != nil {
		return nil, err
	}
	if c.old == nil {
		replaced := filepath.Join(dir, format.other().FileName(spec.Kind))
		old, _, err := readOurs(replaced)
		if err != nil {
			return nil, err
		}
		if old != nil && isOfKind(old, spec.Kind) {
			c.old, c.replaces = old, replaced
		}
	}
	if ours && bytes.Equal(c.old, c.text) {
		return nil, nil
	}
	return c, nil
}

// readOurs returns the content of path: nil if path does not exist, empty if path is not a
// regular file. ours reports a regular file with mode 0644 that the effective user owns.
func readOurs(path string) (text []byte, ours bool, err error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	if !info.Mode().IsRegular() { // apply replaces or removes the link, and does not follow the link
		return []byte{}, false, nil
	}
	if text, err = os.ReadFile(path); err != nil {
		return nil, false, err
	}
	stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
	ours = info.Mode() == 0o644 && int(stat.Uid) == os.Geteuid()
	return append([]byte{}, text...), ours, nil
}

// isOfKind reports whether Peerlane may replace a file at the path of a kind: a file that is not
// the specification of another program.
func isOfKind(text []byte, kind string) bool {
	spec, err := cdi.ParseSpec(text)
	return err != nil || spec == nil || spec.Kind == kind
}

// formatOf returns the format of Peerlane's files in a directory.
func formatOf(dir string) Format {
	for _, kind := range Kinds {
		if _, err := os.Lstat(filepath.Join(dir, YAML.FileName(kind))); err == nil {
			return YAML
		}
	}
	return JSON
}

// apply makes the changes in order and then syncs every directory, so that a power failure leaves
// the old or the new file.
func apply(changes []Change) error {
	var touched []string
	for _, c := range changes {
		if err := c.apply(); err != nil {
			return err
		}
		if dir := filepath.Dir(c.Path); !slices.Contains(touched, dir) {
			touched = append(touched, dir)
		}
	}
	for _, dir := range touched {
		if err := syncDir(dir); err != nil {
			return err
		}
	}
	return nil
}

func (c Change) apply() error {
	switch {
	case c.Removed:
		if err := os.Remove(c.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			if c.Kind == "" {
				return fmt.Errorf("remove the plan: %w", err)
			}
			return fmt.Errorf("remove the CDI specification of %s: %w", c.Kind, err)
		}
		return nil
	case c.plan != nil:
		return c.plan.Write(c.Path)
	}
	if err := c.write(); err != nil {
		return fmt.Errorf("install the CDI specification of %s in %s: %w", c.Kind, filepath.Dir(c.Path), err)
	}
	return nil
}

// write installs the specification of a change.
func (c Change) write() error {
	if err := os.MkdirAll(filepath.Dir(c.Path), 0o755); err != nil {
		return err
	}
	if c.replaces == "" {
		return replace(c.Path, c.text)
	}
	// Replace a file of the other format in steps that leave one file at any moment: without a
	// file the device is missing, and with two files engines ignore the device. JSON is YAML, so
	// the YAML name may hold JSON for a moment, but the JSON name may not hold YAML.
	if c.format == YAML {
		if err := os.Rename(c.replaces, c.Path); err != nil {
			return err
		}
		return replace(c.Path, c.text)
	}
	if err := replace(c.replaces, c.text); err != nil {
		return err
	}
	return os.Rename(c.replaces, c.Path)
}

// temporary is the pattern of incomplete files. The names end in neither .json nor .yaml, so no
// engine reads such a file.
const temporary = "." + Vendor + "-*.tmp"

// replace writes a specification in one step. The writer of the CDI library is not used: its
// files have mode 0600, and a power failure can leave a file empty.
func replace(path string, text []byte) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), temporary)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	_, err = tmp.Write(text)
	if err == nil {
		err = tmp.Chmod(0o644) // with any umask
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	// Engines read the file with this library: a specification that the library refuses must not
	// replace a working specification.
	if _, err = cdi.ReadSpec(tmp.Name(), 0); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// removeLeftovers removes the temporary files of killed writers. A writer of another layout, which
// the lock does not cover, may write to the same directory at this time.
func removeLeftovers(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the directory of CDI specifications: %w", err)
	}
	for _, e := range entries {
		if left, err := filepath.Match(temporary, e.Name()); err != nil || !left {
			continue // the pattern is valid
		}
		if info, err := e.Info(); err != nil || time.Since(info.ModTime()) < holdTimeout {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the temporary file of an interrupted write: %w", err)
		}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // removed since Glob
	}
	if err != nil {
		return fmt.Errorf("install CDI specifications: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("install CDI specifications in %s: %w", dir, err)
	}
	return nil
}
