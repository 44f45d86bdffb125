package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
)

// maxSpec bounds a config.json, bytes. Engines write some ten thousand; but its
// environment is the image's, and its mounts are whoever's who asked for them.
const maxSpec = 16 << 20

// spec is what matters here of a container's config.json.
type spec struct {
	Root struct {
		Path string
	}
	Process struct {
		Env     []string
		Rlimits []specLimit
	}
	Mounts  []specMount
	Devices []specDevice // of linux
	// unread says that config.json was not found.
	unread bool
	Hooks  struct {
		Prestart      []specHook
		CreateRuntime []specHook
	}
}

type specLimit struct {
	Type string `json:"type"`
}

type specMount struct {
	Destination string `json:"destination"`
	Source      string `json:"source"`
}

type specDevice struct {
	Type  string `json:"type"`
	Major int64  `json:"major"`
	Minor int64  `json:"minor"`
}

type specHook struct {
	Args []string `json:"args"`
	Path string   `json:"path"`
}

// readSpec reads the config.json of a bundle.
func readSpec(bundle string) (*spec, error) {
	path := filepath.Join(bundle, "config.json")
	text, err := readBounded(path, maxSpec)
	if err != nil {
		return nil, fmt.Errorf("reading the container's configuration: %w", err)
	}
	s, err := parseSpec(text)
	if err != nil {
		return nil, fmt.Errorf("reading the container's configuration %s: %w", path, err)
	}
	return s, nil
}

// specDocument is a spec as it is written.
type specDocument struct {
	Root    noDuplicateKeys[specRoot]    `json:"root"`
	Process noDuplicateKeys[specProcess] `json:"process"`
	Mounts  noDuplicateKeys[[]specMount] `json:"mounts"`
	Hooks   noDuplicateKeys[specHooks]   `json:"hooks"`
	Linux   noDuplicateKeys[specLinux]   `json:"linux"`
}

type specLinux struct {
	Devices noDuplicateKeys[[]specDevice] `json:"devices"`
}

type specRoot struct {
	Path noDuplicateKeys[string] `json:"path"`
}

type specProcess struct {
	Env     noDuplicateKeys[[]string]    `json:"env"`
	Rlimits noDuplicateKeys[[]specLimit] `json:"rlimits"`
}

type specHooks struct {
	Prestart      noDuplicateKeys[[]specHook] `json:"prestart"`
	CreateRuntime noDuplicateKeys[[]specHook] `json:"createRuntime"`
}

func parseSpec(text []byte) (*spec, error) {
	var d specDocument
	if err := json.Unmarshal(text, &d); err != nil {
		return nil, err
	}
	s := &spec{Mounts: d.Mounts.value, Devices: d.Linux.value.Devices.value}
	s.Process.Env, s.Process.Rlimits = d.Process.value.Env.value, d.Process.value.Rlimits.value
	s.Root.Path = d.Root.value.Path.value
	s.Hooks.Prestart, s.Hooks.CreateRuntime = d.Hooks.value.Prestart.value, d.Hooks.value.CreateRuntime.value
	if s.Root.Path == "" {
		return nil, errors.New("it names no root file system")
	}
	return s, nil
}

// rootOnly is a specification of which nothing but the root file system is known.
func rootOnly(path string) *spec {
	s := &spec{unread: true}
	s.Root.Path = path
	return s
}

// readBounded reads a regular file of no more than limit bytes. Nothing else can
// make it wait.
func readBounded(path string, limit int64) (text []byte, err error) {
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
		return nil, fmt.Errorf("%s is no regular file", path)
	}
	if info.Size() > limit {
		return nil, fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	text, err = io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit { // it has grown
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	return text, err
}

// nothingBelow refuses a mount below the place of the relay's socket: a volume
// that an image asks for, say. Some runtimes make its mount point before they make
// the anchor read-only, and so on the host.
func (s *spec) nothingBelow() error {
	for _, m := range s.Mounts {
		if at := filepath.Join("/", m.Destination); strings.HasPrefix(at, paths.ContainerDir+"/") {
			return fmt.Errorf("a mount at %s is asked for, and %s is the relay's own; leave out that volume (-v, --mount, or VOLUME in the image)", at, paths.ContainerDir)
		}
	}
	return nil
}

// rootfs is the root file system of the bundle that the specification is of.
func (s *spec) rootfs(bundle string) string {
	if filepath.IsAbs(s.Root.Path) {
		return s.Root.Path
	}
	return filepath.Join(bundle, s.Root.Path)
}
