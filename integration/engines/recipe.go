package engines

import (
	"path/filepath"

	"github.com/peerlane/peerlane/integration/pinned"
)

// Required versions of installed packages: a prefix of each.
const (
	runc11              = "1.1.5"
	runc15              = "1.5.2"
	crun18              = "1.8.1"
	crun121             = "1.21"
	podman43            = "4.3.1"
	podman54            = "5.4.2"
	containerd17Version = "1.7.24"
	containerd2Version  = "2.4.2"
	docker20Version     = "20.10.24"
	docker26            = "26.1"
	containerd16        = "1.6.20"
	docker29Version     = "v2.0.0-beta.24"
)

// nextSuite is the Debian of the newer packages. oldSuite is this Debian, in a separate root file
// system where the quickstart installs and removes packages.
const (
	nextSuite = "trixie"
	oldSuite  = "bookworm"
)

// suites are the packages of each suite. apt verifies their signatures.
var suites = map[string][]string{
	nextSuite: {"podman", "crun", "runc", "containerd", "docker.io", "docker-cli", "conmon", "netavark", "catatonit",
		"mount"},
	oldSuite: {"podman", "crun", "runc", "containerd", "docker.io", "conmon", "netavark", "catatonit", "mount"},
}

// Modules returns the engines built from modules, by name. modules is the folder with the module of
// each engine.
func Modules(modules string) map[string]pinned.Module {
	folder := func(name string) string { return filepath.Join(modules, name) }
	return map[string]pinned.Module{
		"runc": {
			Folder:   folder("runc"),
			Packages: []string{"github.com/opencontainers/runc"},
			Tags:     "seccomp", Ldflags: "-s -w -X main.version=" + runc15, CGO: true, Needs: "libseccomp",
		},
		"containerd": {
			Folder: folder("containerd"),
			Packages: []string{
				"github.com/containerd/containerd/v2/cmd/containerd", "github.com/containerd/containerd/v2/cmd/ctr",
				"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", "./containerd-client", "./cri-client",
			},
			Tags:    "no_btrfs no_zfs no_devmapper",
			Ldflags: "-s -w",
		},
		"docker": {
			Folder:   folder("docker"),
			Packages: []string{"github.com/moby/moby/v2/cmd/dockerd", "github.com/moby/moby/v2/cmd/docker-proxy"},
			Ldflags:  "-s -w -X github.com/moby/moby/v2/dockerversion.Version=" + docker29Version,
		},
	}
}
