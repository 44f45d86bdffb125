package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/aymanbagabas/go-udiff"

	"github.com/peerlane/peerlane/cdi/engine/edit"
)

// Change is the change of an engine's configuration file.
type Change struct {
	Engine string
	// Path is the file to write; the target, if the configuration is a link.
	Path string
	// old and New are the contents; nil for a missing file.
	old, New []byte
	// Restart is the command that makes the engine read the change; empty if the engine reads the
	// change by itself.
	Restart string
	// Notes are sentences for the administrator.
	Notes []string
	// record is the record to keep after the change; nil for none.
	record *record
	// store is the directory of the record.
	store string
}

// None reports whether the change changes nothing.
func (c Change) None() bool { return bytes.Equal(c.old, c.New) && (c.old == nil) == (c.New == nil) }

// Diff returns the change as a unified diff.
func (c Change) Diff() string {
	from, to := c.Path, c.Path
	if c.old == nil {
		from = os.DevNull
	}
	if c.New == nil {
		to = os.DevNull
	}
	return udiff.Unified(from, to, string(c.old), string(c.New))
}

// Backup returns the path of the original file; empty if there was no file.
func (c Change) Backup() string {
	if c.record == nil || !c.record.Existed {
		return ""
	}
	return filepath.Join(c.store, backupName)
}

// record describes an engine's configuration that Peerlane has changed. The directory of the
// record also has the original file.
type record struct {
	Path    string `json:"path"`
	Existed bool   `json:"existed"`
	// Result is the SHA-256 of the file that Peerlane wrote; empty if another program changed the
	// file between two changes of Peerlane, so that Remove must not restore the original.
	Result string `json:"result,omitempty"`
	// Keys are the keys that Peerlane set.
	Keys []edit.Key `json:"keys"`
	// Restart is the command that makes the engine read the keys.
	Restart string `json:"restart,omitempty"`

	original []byte
}

const (
	recordName = "record.json"
	backupName = "original"
)

// storeOf returns the directory of an engine's record, below dir.
func storeOf(dir, engine string) string { return filepath.Join(dir, engine) }

// readRecord returns nil if the engine has no record.
func readRecord(store string) (*record, error) {
	text, err := os.ReadFile(filepath.Join(store, recordName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	r := &record{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(store, recordName), err)
	}
	if r.Existed {
		if r.original, err = os.ReadFile(filepath.Join(store, backupName)); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *record) write(store string) error {
	if err := os.MkdirAll(store, 0o700); err != nil {
		return err
	}
	if r.Existed {
		if err := replace(filepath.Join(store, backupName), r.original, 0o600, false); err != nil {
			return err
		}
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(replace(filepath.Join(store, recordName), append(text, '\n'), 0o600, false), flush(store))
}

func hash(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// resolve follows symbolic links. The target of the last link may be missing.
func resolve(path string) (string, error) {
	for range 40 {
		to, err := os.Readlink(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EINVAL): // missing, or no link
			dir, err := filepath.EvalSymlinks(filepath.Dir(path))
			if errors.Is(err, fs.ErrNotExist) {
				dir, err = resolve(filepath.Dir(path))
			}
			return filepath.Join(dir, filepath.Base(path)), err
		case err != nil:
			return "", err
		case !filepath.IsAbs(to):
			to = filepath.Join(filepath.Dir(path), to)
		}
		path = to
	}
	return "", fmt.Errorf("%s: too many links", path)
}

// Configure returns the change to an engine's configuration that w requires. dir is the directory
// of Peerlane's records. Configure writes nothing.
func (h Host) Configure(ctx context.Context, dir, name string, w Wanted) (Change, State, error) {
	s, err := h.Look(ctx, name, w)
	if err != nil {
		return Change{}, s, err
	}
	c := Change{Engine: name, store: storeOf(dir, name), old: s.text, New: s.text, Notes: s.Notes}
	if c.Path, err = resolve(s.File); err != nil {
		return c, s, err
	}
	if c.record, err = readRecord(c.store); err != nil {
		return c, s, err
	}
	s.Configured = c.record != nil
	if len(s.keys) == 0 {
		return c, s, nil
	}
	l := engines[name].language
	if c.New, err = edit.Set(l, s.text, s.keys...); err != nil {
		return c, s, inFile(c.Path, err)
	}
	if err := h.reaches(name, s, c.New, w); err != nil {
		return c, s, err
	}
	switch r := c.record; {
	case r == nil:
		c.record = &record{Path: c.Path, Existed: s.text != nil, original: s.text, Result: hash(c.New)}
	case r.Path != c.Path:
		return c, s, fmt.Errorf(
			"%s was changed earlier, and now %s would be changed; run `peerlane runtime remove --runtime %s` first",
			r.Path,
			c.Path,
			name,
		)
	case r.Result != hash(s.text):
		c.record = &record{Path: r.Path, Existed: r.Existed, original: r.original, Keys: r.Keys, Restart: r.Restart}
	default:
		c.record = &record{
			Path:     r.Path,
			Existed:  r.Existed,
			original: r.original,
			Keys:     r.Keys,
			Restart:  r.Restart,
			Result:   hash(c.New),
		}
	}
	c.record.add(s.keys)
	if c.Restart = s.Restart; len(c.Restart) > len(c.record.Restart) { // a reload disturbs less than a restart
		c.record.Restart = c.Restart
	}
	return c, s, nil
}

// add adds keys that the record lacks.
func (r *record) add(keys []edit.Key) {
	for _, k := range keys {
		kept := r.Keys[:0:0]
		for _, old := range r.Keys {
			if old.String() != k.String() {
				kept = append(kept, old)
			}
		}
		r.Keys = append(kept, k)
	}
}

// reaches checks that a change takes effect: a file that the engine reads later may override a
// key.
func (h Host) reaches(name string, s State, text []byte, w Wanted) error {
	e := engines[name]
	d, err := e.find(h)
	if err != nil {
		return err
	}
	d.root = h.Root
	tree, err := e.language.Read(text)
	if err != nil {
		return inFile(s.File, err)
	}
	changed := document{s.File, text, tree}
	if one := d.of(s.File); one != nil {
		*one = changed
	} else {
		// Insert a missing file at the position of its name: the main file first, and the file of
		// Peerlane after the files with smaller names.
		d.all = insertByName(d.all, changed, s.File == d.main && filepath.Base(s.File) != dropIn)
	}
	v, err := parseVersion(s.Version)
	if err != nil {
		return err
	}
	again, err := e.plan(v, d, w)
	if err != nil {
		return err
	}
	if len(again.keys) > 0 {
		_, file := d.get(again.keys[0].Path...)
		return &overriddenError{again.keys[0].String(), file, name, s.File}
	}
	return nil
}

func insertByName(all []document, one document, first bool) []document {
	at := 0
	if !first {
		for i, other := range all {
			if filepath.Dir(other.path) != filepath.Dir(one.path) || filepath.Base(other.path) < filepath.Base(one.path) {
				at = i + 1
			}
		}
	}
	return append(all[:at:at], append([]document{one}, all[at:]...)...)
}

// Remove returns the change that restores an engine's configuration: exactly the original, if no
// other program has changed the file since; otherwise the keys of Peerlane get their former values.
// Without a record there is no change.
func Remove(dir, name string) (c Change, err error) {
	c = Change{Engine: name, store: storeOf(dir, name)}
	r, err := readRecord(c.store)
	if err != nil || r == nil {
		return c, err
	}
	c.Path, c.Restart = r.Path, r.Restart
	// The path was resolved when it was recorded.
	now, err := resolve(r.Path)
	if err != nil {
		return c, err
	}
	if now != r.Path {
		return c, fmt.Errorf(
			"%s %w: it leads to %s; change that file by hand, and remove %s",
			r.Path,
			errOtherFile,
			now,
			c.store,
		)
	}
	c.old, err = os.ReadFile(r.Path)
	if errors.Is(err, fs.ErrNotExist) {
		c.Notes = append(c.Notes, fmt.Sprintf("%s no longer exists", r.Path))
		return c, nil
	}
	if err != nil {
		return c, err
	}
	if c.New = r.original; hash(c.old) == r.Result {
		return c, nil
	}
	l := engines[name].language
	current, err := l.Read(c.old)
	if err != nil {
		return c, inFile(r.Path, err)
	}
	before, err := l.Read(r.original)
	if err != nil {
		return c, inFile(filepath.Join(c.store, backupName), err)
	}
	var keys []edit.Key
	for _, k := range r.Keys {
		if isForm(k) {
			continue // entries of other programs may need that version
		}
		if !sameAfterRecord(edit.Get(current, k.Path...), k.Value) {
			c.Notes = append(c.Notes, fmt.Sprintf("another program or user has changed %s, so the key stays", k))
			continue
		}
		keys = append(
			keys,
			edit.Key{Path: k.Path, Value: restorable(edit.Get(before, k.Path...)), Keep: edit.Depth(before, k.Path)},
		)
	}
	if c.New, err = edit.Set(l, c.old, keys...); err != nil {
		return c, inFile(r.Path, err)
	}
	left, err := l.Read(c.New)
	if err != nil || r.Existed {
		return c, err
	}
	i := slices.IndexFunc(r.Keys, isForm)
	form := i >= 0 && sameAfterRecord(left["version"], r.Keys[i].Value)
	// A list of numbers contains # only in comments, in all of these languages.
	if alone := len(left) == 0 || form && len(left) == 1; alone && !bytes.ContainsRune(c.New, '#') {
		c.New = nil
	} else if form {
		c.Notes = append(c.Notes, fmt.Sprintf("version = %v stays: another program or user has added keys to the "+
			"file", left["version"]))
	}
	return c, nil
}

// isForm reports whether a key is the format version of containerd's configuration.
func isForm(k edit.Key) bool { return len(k.Path) == 1 && k.Path[0] == "version" }

// sameAfterRecord compares a value of a file with a recorded value. JSON has changed the types of
// recorded numbers.
func sameAfterRecord(current, recorded any) bool {
	if number, ok := recorded.(float64); ok {
		return fmt.Sprint(current) == fmt.Sprint(int64(number))
	}
	return edit.Same(current, recorded)
}

// restorable returns a recorded value in a form that edit sets.
func restorable(value any) any {
	if list := edit.Texts(value); list != nil {
		return list
	}
	return value
}

// Apply writes the file and the record. If the file has changed since Configure read it, Apply
// returns an error and writes nothing.
func (c Change) Apply() error {
	if c.Path == "" {
		return nil
	}
	if c.record != nil && c.New != nil && !c.None() {
		// Write the record first, so that Remove can undo a partial change.
		if err := c.record.write(c.store); err != nil {
			return fmt.Errorf("save the original %s: %w", c.Path, err)
		}
	}
	if !c.None() {
		if err := c.write(); err != nil {
			return err
		}
	}
	if c.record == nil {
		return forget(c.store)
	}
	return nil
}

// overriddenError is the error of a key that the engine reads again from a later file.
type overriddenError struct{ key, by, engine, file string }

func (e *overriddenError) Error() string {
	return fmt.Sprintf("%s is overridden by %s, which %s reads after %s; change it there", e.key, e.by, e.engine, e.file)
}

// errOtherFile reports that a recorded path now leads to another file.
var errOtherFile = errors.New("is not the file that Peerlane changed")

// errConcurrent reports that another program has changed a file since Peerlane read it.
var errConcurrent = errors.New("was changed by another program at the same time; nothing is changed")

func (c Change) write() error {
	now, err := os.ReadFile(c.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if !bytes.Equal(now, c.old) {
		return fmt.Errorf("%s %w; try again", c.Path, errConcurrent)
	}
	if c.New == nil {
		return os.Remove(c.Path)
	}
	if err := os.MkdirAll(filepath.Dir(c.Path), 0o755); err != nil {
		return err
	}
	return errors.Join(replace(c.Path, c.New, 0o644, true), flush(filepath.Dir(c.Path)))
}

// forget removes the record of an engine.
func forget(store string) error {
	for _, name := range []string{recordName, backupName} {
		if err := os.Remove(filepath.Join(store, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, dir := range []string{store, filepath.Dir(store)} {
		err := os.Remove(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTEMPTY) {
			return err
		}
	}
	return nil
}

// flush syncs a directory, so that its changes survive a power failure.
func flush(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Configured reports whether Peerlane has changed an engine's configuration.
func Configured(dir, name string) (bool, error) {
	r, err := readRecord(storeOf(dir, name))
	return r != nil, err
}
