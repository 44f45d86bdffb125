package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/peerlane/peerlane/config/paths"
)

// loaderDirs are the last directories that the loader of a glibc image searches, with and without
// a cache (ld.so.cache) and with any LD_LIBRARY_PATH: /usr/lib on Debian and Arch, /usr/lib64 on
// Fedora and SUSE. Containers have every library in both directories.
var loaderDirs = []string{"/usr/lib", "/usr/lib64"}

// NCCLTopology is the name, in the directory of libraries, of the file that containers have as
// ncclTopology.
const NCCLTopology = "nccl-topology.xml"

// nixlDir is the directory of NIXL's plugins, in the directory of libraries and, below
// /usr/lib/peerlane, in containers: the value of NIXL_PLUGIN_DIR.
const nixlDir = "nixl"

// ncclTopology is the topology of the host with the virtual switch of the lanes (`peerlane topo
// -o xml --virtual`), for NCCL_TOPO_FILE. Every container gets the same file: NCCL ignores GPUs
// that a rank does not have, and NICs that the plugin does not name. The file has no information
// beyond /sys.
const ncclTopology = "/etc/nccl-topology.xml"

// libraries are the files that containers with a lane load.
type libraries struct {
	mounts []*specs.Mount
	// refused has the reason for every file that is not mounted.
	refused []string
}

// findLibraries searches a directory of the host for shared libraries, by the names that programs
// load, for NIXL's plugins, and for NCCL's topology. It skips links and files that a user other
// than the administrator could have written, because a container has a file mounted for its whole
// life.
func findLibraries(dir string) (libraries, error) {
	var found libraries
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return found, nil
	}
	if err != nil {
		return found, fmt.Errorf("find the libraries that containers get: %w", err)
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == NCCLTopology:
			found.add(filepath.Join(dir, name), ncclTopology)
		case isLibrary(name):
			var places []string
			for _, place := range loaderDirs {
				places = append(places, path.Join(place, name))
			}
			found.add(filepath.Join(dir, name), places...)
		}
	}
	plugins, err := os.ReadDir(filepath.Join(dir, nixlDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return found, fmt.Errorf("find the plugins of NIXL that containers get: %w", err)
	}
	for _, e := range plugins {
		if isLibrary(e.Name()) {
			found.add(filepath.Join(dir, nixlDir, e.Name()), path.Join("/usr/lib/peerlane", nixlDir, e.Name()))
		}
	}
	return found, nil
}

// isLibrary reports whether a file has the name of a shared library.
func isLibrary(name string) bool {
	return strings.HasPrefix(name, "lib") && slices.Contains(strings.Split(name, "."), "so")
}

// add mounts a trusted file of the host at paths in containers; refused gets the reason for any
// other file.
func (l *libraries) add(host string, places ...string) {
	if err := paths.CheckTrusted(host); err != nil {
		l.refused = append(l.refused, fmt.Sprintf("containers do not get %s: %v", host, err))
		return
	}
	for _, place := range places {
		l.mounts = append(
			l.mounts,
			&specs.Mount{
				HostPath:      host,
				ContainerPath: place,
				Options:       []string{"bind", "ro", "nosuid", "nodev", "rprivate"},
			},
		)
	}
}
