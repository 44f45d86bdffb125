package ocispec

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
)

// MaxBytes is the maximum size of a config.json in bytes. Engines write some ten thousand, but the
// image controls the environment, and the user of the container controls the mounts.
const MaxBytes = 16 << 20

// Spec is the part of a container's config.json that the hook reads.
type Spec struct {
	Root struct {
		Path string
	}
	Process struct {
		Env     []string
		Rlimits []Limit
	}
	Mounts []Mount
	// Devices are linux.devices.
	Devices []Device
	// Unread reports that config.json was not found.
	Unread bool
	Hooks  struct {
		Prestart      []Hook
		CreateRuntime []Hook
	}
}

// Limit is the resource of an element of process.rlimits.
type Limit struct {
	Type string `json:"type"`
}

// Mount is an element of mounts.
type Mount struct {
	Destination string `json:"destination"`
	Source      string `json:"source"`
}

// Device is an element of linux.devices.
type Device struct {
	Type  string `json:"type"`
	Major int64  `json:"major"`
	Minor int64  `json:"minor"`
}

// Hook is an element of a list of hooks.
type Hook struct {
	Args []string `json:"args"`
	Path string   `json:"path"`
}

// Read reads the config.json of a bundle.
func Read(bundle string) (*Spec, error) {
	path := filepath.Join(bundle, "config.json")
	text, err := ReadBounded(path, MaxBytes)
	if err != nil {
		return nil, notRead(path, err)
	}
	s, err := Parse(text)
	if err != nil {
		return nil, notRead(path, err)
	}
	return s, nil
}

// specDocument is the JSON form of a Spec.
type specDocument struct {
	Root    NoDuplicateKeys[specRoot]    `json:"root"`
	Process NoDuplicateKeys[specProcess] `json:"process"`
	Mounts  NoDuplicateKeys[[]Mount]     `json:"mounts"`
	Hooks   NoDuplicateKeys[specHooks]   `json:"hooks"`
	Linux   NoDuplicateKeys[specLinux]   `json:"linux"`
}

type specLinux struct {
	Devices NoDuplicateKeys[[]Device] `json:"devices"`
}

type specRoot struct {
	Path NoDuplicateKeys[string] `json:"path"`
}

type specProcess struct {
	Env     NoDuplicateKeys[[]string] `json:"env"`
	Rlimits NoDuplicateKeys[[]Limit]  `json:"rlimits"`
}

type specHooks struct {
	Prestart      NoDuplicateKeys[[]Hook] `json:"prestart"`
	CreateRuntime NoDuplicateKeys[[]Hook] `json:"createRuntime"`
}

// Parse parses the text of a config.json. A missing root.path or a duplicate key is an error.
func Parse(text []byte) (*Spec, error) {
	var d specDocument
	if err := json.Unmarshal(text, &d); err != nil {
		return nil, err
	}
	s := &Spec{Mounts: d.Mounts.Value, Devices: d.Linux.Value.Devices.Value}
	s.Process.Env, s.Process.Rlimits = d.Process.Value.Env.Value, d.Process.Value.Rlimits.Value
	s.Root.Path = d.Root.Value.Path.Value
	s.Hooks.Prestart, s.Hooks.CreateRuntime = d.Hooks.Value.Prestart.Value, d.Hooks.Value.CreateRuntime.Value
	if s.Root.Path == "" {
		return nil, errNoRoot
	}
	return s, nil
}

// RootOnly returns a Spec of which only the root file system is known.
func RootOnly(path string) *Spec {
	s := &Spec{Unread: true}
	s.Root.Path = path
	return s
}

// ReadBounded reads a regular file of at most limit bytes. It refuses other files, which could
// block.
func ReadBounded(path string, limit int64) (text []byte, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, paths.ErrNotRegular
	}
	if info.Size() > limit {
		return nil, &paths.SizeError{Path: path, Bytes: info.Size(), Limit: limit}
	}
	text, err = io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit { // the file has grown since Stat
		err = &paths.SizeError{Path: path, Bytes: int64(len(text)), Limit: limit}
	}
	return text, err
}

var errNoRoot = errors.New("it names no root file system")

func notRead(path string, cause error) error {
	return &fault.Error{Operation: "read the container's configuration", Object: path, Cause: cause}
}

// NothingBelow refuses a mount below the relay's socket directory, for example a volume of an
// image. Some runtimes make the mount point before the anchor is read-only, and so on the host.
func (s *Spec) NothingBelow() error {
	for _, m := range s.Mounts {
		if at := filepath.Join("/", m.Destination); strings.HasPrefix(at, paths.ContainerDir+"/") {
			return &fault.Error{
				Code:      fault.MountBelowSocket,
				Operation: "check the mount at",
				Object:    at,
				Cause:     errors.New(paths.ContainerDir + " is the relay's own"),
				Remedy:    "leave out that volume (-v, --mount, or VOLUME in the image)",
			}
		}
	}
	return nil
}

// Rootfs returns the path of the root file system of a bundle with this specification.
func (s *Spec) Rootfs(bundle string) string {
	if filepath.IsAbs(s.Root.Path) {
		return s.Root.Path
	}
	return filepath.Join(bundle, s.Root.Path)
}
