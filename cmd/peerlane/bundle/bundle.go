// Package bundle makes OCI bundles from files of the host, injects CDI devices with the CDI
// library, and runs the bundles with a real low-level runtime. `peerlane demo` and the
// integration tests use the package.
package bundle

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
	cdilibrary "tags.cncf.io/container-device-interface/pkg/cdi"
)

// Bundle is an OCI bundle in memory.
type Bundle struct {
	// Dir is the bundle's directory; the root file system is in Dir/rootfs.
	Dir  string
	Spec *specs.Spec
}

// New returns a bundle whose process runs with these arguments, in new namespaces, without
// capabilities, with a private /dev/shm and no network.
func New(dir string, arguments ...string) *Bundle {
	return &Bundle{Dir: dir, Spec: &specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: "rootfs", Readonly: true},
		Process: &specs.Process{
			Args:            arguments,
			Cwd:             "/",
			Env:             []string{"PATH=/usr/bin:/bin"},
			NoNewPrivileges: true,
			Capabilities:    &specs.LinuxCapabilities{},
		},
		Hostname: "container",
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs",
				Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm",
				Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
			{Destination: "/run", Type: "tmpfs", Source: "tmpfs",
				Options: []string{"nosuid", "nodev", "mode=755", "size=1024k"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs",
				Options: []string{"nosuid", "nodev", "mode=1777", "size=1024k"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
			},
			Resources: &specs.LinuxResources{
				Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
			},
		},
	}}
}

// Inject applies CDI devices of the specifications in a directory, as engines do.
func (b *Bundle) Inject(specDir string, devices ...string) error {
	cache, err := cdilibrary.NewCache(cdilibrary.WithSpecDirs(specDir), cdilibrary.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("CDI specifications in %s: %w", specDir, err)
	}
	for path, problems := range cache.GetErrors() {
		return fmt.Errorf("CDI specification %s: %w", path, problems[0])
	}
	if missing, err := cache.InjectDevices(b.Spec, devices...); err != nil {
		return fmt.Errorf("inject %v (not known: %v): %w", devices, missing, err)
	}
	return nil
}

// Write writes config.json.
func (b *Bundle) Write() error {
	text, err := json.MarshalIndent(b.Spec, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.Dir, "config.json"), text, 0o644)
}
