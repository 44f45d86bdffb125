package recorded

import (
	"path"

	"github.com/peerlane/peerlane/topo/reader"
)

// Capture reads a host's sysfs and procfs, usually /sys and /proc, and returns an archive of
// the files about GPUs, RDMA devices and the devices between. host.txt is such an archive.
// Equal hosts give equal texts.
//
// Capture reads the files of reader.Record with reader.DevicesOnly, and complete configuration
// spaces. Capture therefore needs root, and a host with a GPU or an RDMA device.
func Capture(sysfs, proc string) (string, error) {
	a := archive{}
	if err := reader.Record(sysfs, proc, reader.DevicesOnly, a); err != nil {
		return "", err
	}
	return a.String(), nil
}

var _ reader.Recorder = archive{}

func (a archive) Directory(p string) error { return a.addDirectory(p) }

func (a archive) File(p string, data []byte) error {
	return a.addFile(path.Dir(p), path.Base(p), data)
}

func (a archive) Link(p, target string) error {
	return a.addLink(path.Dir(p), path.Base(p), target)
}
