package generation

import (
	"path/filepath"

	"github.com/peerlane/peerlane/config/paths"
)

// ContainerNCCLConf is the file that NCCL reads last, after the environment,
// NCCL_CONF_FILE and ~/.nccl.conf. NCCL replaces no variable that is set.
const ContainerNCCLConf = "/etc/nccl.conf"

// NCCLConfRecord is the hook's record for package control.
type NCCLConfRecord struct {
	// Absent says why the hook made no link, although the container has no file.
	Absent string `json:"absent,omitempty"`
}

func NCCLConfFile(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "nccl-conf.json")
}
