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
	"github.com/peerlane/peerlane/topo"
)

// Format is the form of a file of specifications. Engines read both.
type Format string

// The formats.
const (
	JSON Format = "json"
	YAML Format = "yaml"
)

// Formats are the names of all.
var Formats = []string{string(JSON), string(YAML)}

// FileName is the name of a kind's file in a directory of specifications,
// "peerlane.dev-lane.json" for KindLane.
func (f Format) FileName(kind string) string {
	return cdi.GenerateSpecName(parser.ParseQualifier(kind)) + "." + string(f)
}

// other is the format that f is not.
func (f Format) other() Format {
	if f == JSON {
		return YAML
	}
	return JSON
}

// Encode writes specifications as documents, one after another.
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
			return fmt.Errorf("writing the CDI specification of %s: %w", spec.Kind, err)
		}
	}
	return nil
}

// FileName is the name of a kind's file in JSON.
func FileName(kind string) string { return JSON.FileName(kind) }

// encode writes specifications as JSON documents, one after another.
func encode(w io.Writer, list ...*specs.Spec) error { return JSON.Encode(w, list...) }

// Write installs specifications as JSON in a directory that engines read, and
// nothing else; see Installation.
func Write(dir string, list []*specs.Spec) error {
	changes, err := directoryChanges(dir, JSON, list)
	if err != nil {
		return err
	}
	return apply(changes)
}

// Installation is what a host is to have of Peerlane for its engines: a plan,
// and specifications in one or more directories.
//
// Each file is replaced in one step, so that an engine reads the old or the new
// one, and has mode 0644, so that rootless engines read it too. A file that is
// as it should be is not touched. A file of ours for a kind that is not among
// the specifications is removed: it would offer what the host no longer does;
// so is one of the same kind in the other format, because engines ignore a
// device that two files define.
type Installation struct {
	Layout paths.Layout
	// Dirs are the directories of specifications, made where they are missing.
	Dirs []string
	// Format is that of the files; empty keeps what a directory has, and is JSON
	// where it has none.
	Format Format
	// Plan and Specs are what is to be there. Without a plan there shall be none,
	// and without specifications no file of ours.
	Plan  *topo.Plan
	Specs []*specs.Spec
}

// Change is one file that is not as it should be.
type Change struct {
	// Path is the file, and Kind its kind of device; empty for the plan.
	Path string `json:"path"`
	Kind string `json:"kind,omitempty"`
	// Removed says that the file goes; otherwise it is written.
	Removed bool `json:"removed,omitempty"`
	// Devices is the number of names that the file will have.
	Devices int `json:"devices,omitempty"`

	old, text []byte
	// replaces is the file of the other format that this one takes the place of;
	// empty for none.
	replaces string
	format   Format
	plan     *topo.Plan
}

// Diff is the change as a unified diff; empty where only mode or owner change.
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

// Changes are what Apply would do now, in its order. It writes nothing.
func (i Installation) Changes() ([]Change, error) {
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
		changes, err := directoryChanges(dir, format, i.Specs)
		if err != nil {
			return nil, err
		}
		all = append(all, changes...)
	}
	// The plan is there before the specifications that lead a hook to it, and
	// goes after them.
	if i.Plan == nil {
		return append(all, plan...), nil
	}
	return append(plan, all...), nil
}

// Apply makes the host have it, and returns what had to change. Callers hold
// the layout (Hold): otherwise what one has read of the host can be replaced by
// what another read earlier.
func (i Installation) Apply() ([]Change, error) {
	if i.Plan != nil {
		if err := i.Layout.Create(); err != nil {
			return nil, fmt.Errorf("making Peerlane's directories: %w", err)
		}
	}
	for _, dir := range i.Dirs {
		if err := removeLeftovers(dir); err != nil {
			return nil, err
		}
	}
	changes, err := i.Changes()
	if err != nil {
		return nil, err
	}
	return changes, apply(changes)
}

// planChange is what has to be done about the plan; nil for nothing.
func (i Installation) planChange() (*Change, error) {
	path := i.Layout.PlanFile()
	old, ours, err := readOurs(path)
	if err != nil {
		return nil, fmt.Errorf("reading the plan: %w", err)
	}
	if i.Plan == nil {
		if old == nil {
			return nil, nil
		}
		return &Change{Path: path, Removed: true, old: old}, nil
	}
	plan := settled(i.Plan)
	text, err := json.MarshalIndent(plan, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("writing the plan: %w", err)
	}
	text = append(text, '\n') // as Plan.Write has it
	if ours && bytes.Equal(old, text) {
		return nil, nil
	}
	return &Change{Path: path, old: old, text: text, plan: plan}, nil
}

// settled is a plan without what changes from one moment to the next: an idle
// GPU lowers the speed of its link.
func settled(p *topo.Plan) *topo.Plan {
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

// directoryChanges is what has to be done about the specifications of a
// directory.
func directoryChanges(dir string, format Format, list []*specs.Spec) ([]Change, error) {
	var changes []Change
	var stale []string
	stale = append(stale, Kinds...)
	for _, spec := range list {
		stale = slices.DeleteFunc(stale, func(kind string) bool { return kind == spec.Kind })
		change, err := specChange(dir, format, spec)
		if err != nil {
			return nil, fmt.Errorf("installing the CDI specification of %s in %s: %w", spec.Kind, dir, err)
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

// addRemoval adds the removal of a kind's file, if it is there and ours.
func addRemoval(changes []Change, dir string, format Format, kind string) ([]Change, error) {
	path := filepath.Join(dir, format.FileName(kind))
	old, _, err := readOurs(path)
	if err != nil {
		return nil, fmt.Errorf("looking for a CDI specification of %s: %w", kind, err)
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

// readOurs reads a file, nil where there is none, and says whether it is as we
// write it: a regular file of whoever runs this, mode 0644.
func readOurs(path string) (text []byte, ours bool, err error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	if !info.Mode().IsRegular() { // replaced or removed, not followed
		return []byte{}, false, nil
	}
	if text, err = os.ReadFile(path); err != nil {
		return nil, false, err
	}
	stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
	ours = info.Mode() == 0o644 && int(stat.Uid) == os.Geteuid()
	return append([]byte{}, text...), ours, nil
}

// isOfKind says whether a file at a kind's name is to be taken for ours: all
// that is not somebody else's specification.
func isOfKind(text []byte, kind string) bool {
	spec, err := cdi.ParseSpec(text)
	return err != nil || spec == nil || spec.Kind == kind
}

// formatOf is the format of the files of ours that a directory has.
func formatOf(dir string) Format {
	for _, kind := range Kinds {
		if _, err := os.Lstat(filepath.Join(dir, YAML.FileName(kind))); err == nil {
			return YAML
		}
	}
	return JSON
}

// apply does it. Directories are flushed, so that a power failure leaves the
// old or the new.
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
				return fmt.Errorf("removing the plan: %w", err)
			}
			return fmt.Errorf("removing the CDI specification of %s: %w", c.Kind, err)
		}
		return nil
	case c.plan != nil:
		return c.plan.Write(c.Path)
	}
	if err := c.write(); err != nil {
		return fmt.Errorf("installing the CDI specification of %s in %s: %w", c.Kind, filepath.Dir(c.Path), err)
	}
	return nil
}

// write installs a specification.
func (c Change) write() error {
	if err := os.MkdirAll(filepath.Dir(c.Path), 0o755); err != nil {
		return err
	}
	if c.replaces == "" {
		return replace(c.Path, c.text)
	}
	// A file of the other format goes in steps that leave one file at any moment:
	// none would be a device that is not there, two one that engines ignore.
	// JSON is YAML, too, so it may have that name for a moment, and not the other
	// way round.
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

// temporary is a pattern for files that are not yet whole. Their names end in
// neither .json nor .yaml, so no engine reads them.
const temporary = "." + Vendor + "-*.tmp"

// replace writes a specification in one step. The CDI library's own writer is
// not used: it leaves mode 0600, and a file that a power failure can empty.
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
	return os.Rename(tmp.Name(), path)
}

// removeLeftovers removes what a writer left that was killed. One of another
// layout, whom nothing keeps waiting, may be at work in the same directory.
func removeLeftovers(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reading the directory of CDI specifications: %w", err)
	}
	for _, e := range entries {
		if left, err := filepath.Match(temporary, e.Name()); err != nil || !left {
			continue // the pattern is right
		}
		if info, err := e.Info(); err != nil || time.Since(info.ModTime()) < holdTimeout {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing what was left of a write that did not end: %w", err)
		}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a removed file's
	}
	if err != nil {
		return fmt.Errorf("installing CDI specifications: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("installing CDI specifications in %s: %w", dir, err)
	}
	return nil
}
