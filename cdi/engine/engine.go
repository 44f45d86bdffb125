// Package engine finds the container engines of a host and their configuration, makes the
// smallest change that enables CDI devices, and reverts the change.
//
// Newer versions of engines enable CDI by default, and need no change. Engines without CDI get
// peerlane-runtime as a runtime.
package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/cdi/engine/edit"
	"github.com/peerlane/peerlane/internal/fault"
)

// Names of the engines.
const (
	docker     = "docker"
	Containerd = "containerd"
	Podman     = "podman"
	CRIO       = "crio"
)

// Names lists the engines.
var Names = []string{docker, Containerd, Podman, CRIO}

// DefaultSpecDirs are the directories in which every engine looks for CDI specifications.
var DefaultSpecDirs = []string{"/etc/cdi", "/var/run/cdi"}

// RuntimeName is the name of peerlane-runtime in the configuration of engines.
const RuntimeName = "peerlane"

// Host describes the host with the engines.
type Host struct {
	// Root is the directory of etc and usr; "/" on a host.
	Root string
	// ConfigFile is the path of an engine's configuration, if it is not the default path.
	ConfigFile string
	// Version is the version of the engine; empty means to ask the engine.
	Version string
	// ask returns the version of an engine from the socket of the daemon; nil means askEngine.
	ask func(ctx context.Context, engine, socket string) (reply, error)
}

// reply is the version that an engine reports.
type reply struct {
	// Version has the engine's form, "28.2.2".
	Version string
	// Daemon reports that the running daemon answered; otherwise the program did.
	Daemon bool
}

// Wanted is the configuration that an engine needs.
type Wanted struct {
	// SpecDirs are the directories of CDI specifications, in addition to the default directories.
	SpecDirs []string
	// HooksDirs are directories of OCI hooks, for Podman and CRI-O.
	HooksDirs []string
	// Runtime requests peerlane-runtime as a runtime even for an engine with CDI.
	Runtime bool
	// RuntimePath is the path of peerlane-runtime, and RuntimeArgs are its arguments, for Docker.
	RuntimePath string
	RuntimeArgs []string
}

// CDI is the support of an engine for CDI devices.
type CDI string

// Values of CDI.
const (
	CDIOn      CDI = "on"
	CDIOff     CDI = "off"  // the version supports CDI, and the configuration disables CDI
	CDIUnknown CDI = "none" // the version does not support CDI
)

// State is an engine of a host, with the change that it needs.
type State struct {
	Engine string `json:"engine"`
	// Version is empty for an engine that is not installed.
	Version string `json:"version"`
	// Daemon reports that the running daemon reported Version.
	Daemon bool `json:"daemon"`
	CDI    CDI  `json:"cdi,omitempty"`
	// File is the configuration file to change. Exists reports whether the file exists.
	File   string `json:"file"`
	Exists bool   `json:"exists"`
	// Configured reports whether Peerlane has changed the configuration.
	Configured bool `json:"configured"`
	// Change lists the keys to set, such as "features.cdi = true".
	Change []string `json:"change"`
	// Restart is the command that makes the engine read a change, with the reason; empty if no
	// restart is necessary.
	Restart string   `json:"restart,omitempty"`
	Notes   []string `json:"notes"`
	// Error is the reason why Look failed; empty for an engine that is not installed.
	Error string `json:"error,omitempty"`

	keys []edit.Key
	// text is the content of File; nil if the file is missing.
	text []byte
}

// ErrNotInstalled reports that an engine is not installed.
var ErrNotInstalled = errors.New("is not installed")

// engine holds the functions for one engine.
type engine struct {
	language edit.Language
	// find reads the configuration.
	find func(h Host) (documents, error)
	// plan returns the keys to set.
	plan func(v version, d documents, w Wanted) (decision, error)
	// socket returns the address of the daemon; nil without a daemon.
	socket func(d documents) string
}

var engines = map[string]engine{
	docker:     {edit.JSON, findDocker, planDocker, dockerSocket},
	Containerd: {edit.TOML, findContainerd, planContainerd, containerdSocket},
	Podman:     {edit.TOML, findPodman, planPodman, nil},
	CRIO:       {edit.TOML, findCRIO, planCRIO, nil},
}

// decision is the change that an engine needs.
type decision struct {
	cdi CDI
	// file is the file to change.
	file    string
	keys    []edit.Key
	restart string
	notes   []string
}

// Look finds an engine and plans the change for w. The error is ErrNotInstalled for a missing
// engine, and names file, line and reason for an unreadable configuration.
func (h Host) Look(ctx context.Context, name string, w Wanted) (State, error) {
	s := State{Engine: name, Change: []string{}, Notes: []string{}}
	e, known := engines[name]
	if !known {
		return s, &nameError{name}
	}
	d, err := e.find(h)
	if err != nil {
		return s, err
	}
	d.root, s.File = h.Root, d.main
	answer := reply{Version: h.Version}
	if h.Version == "" {
		ask := h.ask
		if ask == nil {
			ask = askEngine
		}
		socket := ""
		if e.socket != nil {
			socket = e.socket(d)
		}
		if answer, err = ask(ctx, name, socket); errors.Is(err, ErrNotInstalled) {
			return s, &fault.Error{
				Code:      fault.NoEngine,
				Operation: "ask for the version of",
				Object:    name,
				Cause:     err,
				Remedy:    "install it, or name another engine with --runtime",
			}
		} else if err != nil {
			return s, &fault.Error{Code: fault.NoEngine, Operation: "ask for the version of", Object: name, Cause: err,
				Remedy: "start its service"}
		}
	}
	s.Version, s.Daemon = answer.Version, answer.Daemon
	v, err := parseVersion(answer.Version)
	if err != nil {
		return s, fmt.Errorf("%s: %w", name, err)
	}
	plan, err := e.plan(v, d, w)
	if err != nil {
		return s, err
	}
	s.CDI, s.keys, s.Restart, s.Notes = plan.cdi, plan.keys, plan.restart, append(s.Notes, plan.notes...)
	if plan.file != "" {
		s.File = plan.file
	}
	if document := d.of(s.File); document != nil {
		s.Exists, s.text = true, document.text
	}
	for _, k := range s.keys {
		s.Change = append(s.Change, fmt.Sprintf("%s = %s", k, valueText(k.Value)))
	}
	if len(s.keys) == 0 {
		s.Restart = ""
	}
	return s, nil
}

func valueText(value any) string {
	if list, ok := value.([]string); ok {
		return fmt.Sprintf("%q", list)
	}
	if text, ok := value.(string); ok {
		return fmt.Sprintf("%q", text)
	}
	return fmt.Sprint(value)
}

// document is the content of a configuration file.
type document struct {
	path string
	text []byte
	tree map[string]any
}

// documents are the configuration files of an engine, in the order of reading. A later file
// overrides an earlier file.
type documents struct {
	// root is the directory of etc and usr on the host.
	root string
	// main is the file that Peerlane changes by default; it may be missing.
	main string
	all  []document
}

func (d documents) of(path string) *document {
	for i := range d.all {
		if d.all[i].path == path {
			return &d.all[i]
		}
	}
	return nil
}

// get returns the effective value of a key, and the file that sets it.
func (d documents) get(path ...string) (value any, file string) {
	for _, one := range d.all {
		if v := edit.Get(one.tree, path...); v != nil {
			value, file = v, one.path
		}
	}
	return value, file
}

// read adds a file, if the file exists.
func (d *documents) read(l edit.Language, path string) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	tree, err := l.Read(text)
	if err != nil {
		return inFile(path, err)
	}
	d.all = append(d.all, document{path, text, tree})
	return nil
}

// inFile returns the error of a file's text as a fileError, "FILE:LINE: reason".
func inFile(path string, err error) error {
	var at *edit.Error
	if errors.As(err, &at) && at.Line > 0 {
		return &fileError{path, at}
	}
	return fmt.Errorf("%s: %w", path, err)
}

// fileError is an error at a line of a file.
type fileError struct {
	file string
	at   *edit.Error
}

func (e *fileError) Error() string { return fmt.Sprintf("%s:%d: %s", e.file, e.at.Line, e.at.Reason) }

func (e *fileError) Unwrap() error { return e.at }

// typeError is the error of a key with a value of another type.
type typeError struct{ file, key, want string }

func (e *typeError) Error() string { return fmt.Sprintf("%s: %s is not a %s", e.file, e.key, e.want) }

// nameError is the error of an unknown engine.
type nameError struct{ name string }

func (e *nameError) Error() string {
	return fmt.Sprintf("unknown engine %q; use one of %s", e.name, strings.Join(Names, ", "))
}

// dropIns returns the files that match the pattern, in order.
func dropIns(pattern string) []string {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return nil // malformed, so the engine finds no file either
	}
	slices.Sort(files)
	return slices.DeleteFunc(files, func(path string) bool {
		info, err := os.Stat(path)
		return err != nil || info.IsDir()
	})
}

// readWithDropIns reads TOML files, and then the files in the directory dir that match pattern. If h
// names a file, readWithDropIns reads only that file.
func readWithDropIns(h Host, files []string, dir, pattern string) (d documents, err error) {
	if h.ConfigFile != "" {
		d.main = h.ConfigFile
		return d, d.read(edit.TOML, d.main)
	}
	below := filepath.Join(h.Root, dir)
	d.main = filepath.Join(below, dropIn)
	var all []string
	for _, file := range files {
		all = append(all, filepath.Join(h.Root, file))
	}
	for _, path := range append(all, dropIns(filepath.Join(below, pattern))...) {
		if err := d.read(edit.TOML, path); err != nil {
			return d, err
		}
	}
	return d, nil
}

// withDirs appends the elements of dirs that list lacks; changed reports an addition. /run/cdi and
// /var/run/cdi may be one directory.
func (d documents) withDirs(list, dirs []string) (all []string, changed bool) {
	all = slices.Clone(list)
	for _, dir := range dirs {
		if !slices.ContainsFunc(all, func(existing string) bool { return d.directory(existing) == d.directory(dir) }) {
			all, changed = append(all, dir), true
		}
	}
	return all, changed
}

// directory resolves the links of a directory's path on the host.
func (d documents) directory(path string) string {
	real, err := resolve(filepath.Join(d.root, path))
	if err != nil {
		return filepath.Clean(path)
	}
	// With a root other than /, a link to an absolute path leads out of the root.
	below, err := filepath.Rel(d.root, real)
	if err != nil || !filepath.IsLocal(below) {
		return real
	}
	return filepath.Join("/", below)
}

// directoriesKey returns the key for a list of directories, or nil if the list is complete. standing is
// the engine's default list.
func directoriesKey(d documents, path, standing, wanted []string) (*edit.Key, error) {
	value, file := d.get(path...)
	list := standing
	if value != nil {
		if list = edit.Texts(value); list == nil {
			return nil, &typeError{file, strings.Join(path, "."), "list of strings"}
		}
	}
	all, changed := d.withDirs(list, wanted)
	if !changed {
		return nil, nil
	}
	return &edit.Key{Path: path, Value: all}, nil
}

// addListed adds the key of listed to a decision, if the list lacks a wanted directory.
func (p *decision) addListed(d documents, path, standing, wanted []string) error {
	key, err := directoriesKey(d, path, standing, wanted)
	if err == nil && key != nil {
		p.keys = append(p.keys, *key)
	}
	return err
}
