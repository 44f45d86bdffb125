package generation

import (
	"path/filepath"

	"github.com/peerlane/peerlane/config/paths"
)

// ContainerNCCLConf is the file that NCCL reads last, after the environment, NCCL_CONF_FILE and
// ~/.nccl.conf. NCCL does not replace a variable that is already set.
const ContainerNCCLConf = "/etc/nccl.conf"

// NCCLConfRecord is the record that the hook writes for package control.
type NCCLConfRecord struct {
	// Absent is the reason why the hook made no link, although the container has no such file.
	Absent string `json:"absent,omitempty"`
}

// NCCLConfFile returns the path of a generation's NCCLConfRecord.
func NCCLConfFile(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "nccl-conf.json")
}
