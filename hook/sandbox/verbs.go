package sandbox

import (
	"os"
	"path/filepath"
	"strings"
)

// Uverbs is the directory of the RDMA character devices in sysfs; tests replace the directory.
var Uverbs = "/sys/class/infiniband_verbs"

// VerbsNodes returns the device nodes of an RDMA device, with or without a PCI function (rxe,
// siw): the nodes with its name in uverbsN/ibdev. An emulated device has no nodes.
func VerbsNodes(nic string) (nodes []string) {
	entries, err := os.ReadDir(Uverbs)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		// The directory also contains the file abi_version.
		if ibdev, err := os.ReadFile(filepath.Join(Uverbs, e.Name(), "ibdev")); err == nil &&
			strings.TrimSpace(string(ibdev)) == nic {
			nodes = append(nodes, filepath.Join("/dev/infiniband", e.Name()))
		}
	}
	if nodes != nil {
		nodes = append(nodes, "/dev/infiniband/rdma_cm")
	}
	return nodes
}
