package recorded

import (
	"path"

	"github.com/peerlane/peerlane/topo/reader"
)

// Capture reads a host's sysfs and procfs, usually /sys and /proc, and returns
// the archive of what they tell of GPUs, RDMA devices and what joins them: the
// text that host.txt is. The same host gives the same text.
//
// It takes what topo.Record does to the extent of topo.DevicesOnly, and of each
// configuration space all: so it wants to be root, and a host that has one of
// these devices.
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
