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

// loaderDirs are where the loader of every glibc image looks at last, with and
// without a cache (ld.so.cache) and whatever LD_LIBRARY_PATH says: Debian's and
// Arch's in /usr/lib, Fedora's and SUSE's in /usr/lib64. A file that lies in both
// is the same file.
var loaderDirs = []string{"/usr/lib", "/usr/lib64"}

// NCCLTopology is the file in the directory of libraries that becomes ncclTopology in
// containers.
const NCCLTopology = "nccl-topology.xml"

// ncclTopology is the host with the virtual switch that its lanes make
// (`peerlane topo -o xml --virtual`), for NCCL_TOPO_FILE. It is the same in
// all containers: NCCL leaves out GPUs that a rank has not, and NICs that the plugin
// does not name. It tells nothing that /sys does not.
const ncclTopology = "/etc/nccl-topology.xml"

// libraries are what containers with a lane get to load.
type libraries struct {
	mounts []*specs.Mount
	// refused says of each file that is not mounted why.
	refused []string
}

// findLibraries looks for shared libraries in a directory of the host, by the
// names that programs load them by, and for NCCL's topology. What an
// administrator did not put there is no library, and a link none either: a
// specification names what it mounts for as long as a container lives.
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
			found.mounts = append(found.mounts, &specs.Mount{HostPath: host, ContainerPath: place, Options: []string{"bind", "ro", "nosuid", "nodev", "rprivate"}})
		}
	}
	return found, nil
}
