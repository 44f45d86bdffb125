package planner

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/peerlane/peerlane/internal/fault"
)

// Version is the version of the plan file that Write writes. Parse also reads the previous
// version, without members of lanes: after an upgrade, a host can have a file of the previous
// version.
const (
	Version           = 3
	oldestPlanVersion = 2
)

// Read reads a plan that Write wrote. Read does not check whether the file is trustworthy.
func Read(path string) (*Plan, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the plan: %w", err)
	}
	p, err := Parse(text)
	if err != nil {
		return nil, &fault.Error{Code: fault.UnreadablePlan, Operation: "read the plan", Object: path, Cause: err,
			Remedy: "run peerlane cdi refresh"}
	}
	return p, nil
}

// Parse decodes a plan. On an error of the first decoding, Parse checks the version: a plan of
// another version can have another form. The hook parses a plan before every container start,
// so Parse decodes a readable plan only once.
func Parse(text []byte) (*Plan, error) {
	var p Plan
	err := json.Unmarshal(text, &p)
	readable := func(version int) bool { return version >= oldestPlanVersion && version <= Version }
	if err != nil || !readable(p.Version) {
		var header struct {
			Version int `json:"version"`
		}
		if err := json.Unmarshal(text, &header); err != nil {
			return nil, err
		}
		if !readable(header.Version) {
			return nil, &versionError{header.Version}
		}
		return nil, err
	}
	for i := range p.Lanes {
		if l := &p.Lanes[i]; len(l.Members) == 0 {
			l.Members = l.Even()
		}
	}
	return &p, p.Check()
}

// Check checks the properties that readers of a plan rely on.
func (p *Plan) Check() error {
	known := map[string]bool{}
	for _, g := range p.GPUs {
		known[g.BusID] = true
	}
	for _, l := range p.Lanes {
		for _, busID := range append([]string{l.GPU}, l.Servers...) {
			if !known[busID] {
				return &unlistedError{l.GPU, busID}
			}
		}
		if l.Relay != (len(l.Servers) > 0) {
			return &contradictionError{lane: l.GPU, relay: l.Relay, servers: len(l.Servers)}
		}
		if l.Kind != "" && l.Relay != (l.Kind == KindStaged) {
			return &contradictionError{l.GPU, l.Relay, len(l.Servers), l.Kind}
		}
		if err := l.checkMembers(); err != nil {
			return fmt.Errorf("the lane of %s: %w", l.GPU, err)
		}
	}
	return nil
}

// Write writes the plan as JSON, with mode 0644. Readers see the old file or the new file,
// never a partial file.
func (p *Plan) Write(path string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the plan %s: %w", path, err)
		}
	}()
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(append(text, '\n'))
	err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
