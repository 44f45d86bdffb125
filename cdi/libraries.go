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
// Fedora and SUSE. A file in both directories is the same file.
var loaderDirs = []string{"/usr/lib", "/usr/lib64"}

// NCCLTopology is the file in the directory of libraries that becomes ncclTopology in
// containers.
const NCCLTopology = "nccl-topology.xml"

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
// load, and for NCCL's topology. It skips links and files that a user other than the administrator
// could have written: containers have the file mounted for their whole life.
func findLibraries(dir string) (libraries, error) {
	var found libraries
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return found, nil
	}
	if err != nil {
		return found, fmt.Errorf("looking for the libraries that containers get: %w", err)
	}
	for _, e := range entries {
		var places []string
		switch name := e.Name(); {
		case name == NCCLTopology:
			places = []string{ncclTopology}
		case strings.HasPrefix(name, "lib") && slices.Contains(strings.Split(name, "."), "so"):
			for _, place := range loaderDirs {
				places = append(places, path.Join(place, name))
			}
		default:
			continue
		}
		host := filepath.Join(dir, e.Name())
		if err := paths.Trusted(host); err != nil {
			found.refused = append(found.refused, fmt.Sprintf("containers do not get %s: %v", host, err))
			continue
		}
		for _, place := range places {
			found.mounts = append(
				found.mounts,
				&specs.Mount{
					HostPath:      host,
					ContainerPath: place,
					Options:       []string{"bind", "ro", "nosuid", "nodev", "rprivate"},
				},
			)
		}
	}
	return found, nil
}
