package testbed

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/reader"
	"github.com/peerlane/peerlane/topo/recorded"
)

// halfPopulated is docs/hgx-4-nics.xml, the host of the README's picture.
//
//go:embed half.xml
var halfPopulated []byte

// half makes h the half-populated host of the README's picture, on the CUDA simulator. The XML has
// neither UUIDs nor device nodes, so half invents them. sysfs has only the files that the hook
// reads.
func (h *Host) half() error {
	_, proc, err := recorded.Unpack(filepath.Join(h.Root, "host"))
	if err != nil {
		return err
	}
	sysfs := filepath.Join(h.Root, "sysfs")
	topology, err := reader.Input("docs/hgx-4-nics.xml", halfPopulated)
	if err != nil {
		return err
	}
	// The hook refuses the plan of a file, so declare the topology read from sysfs.
	topology.Source = topo.Source{Kind: topo.SourceSysfs, Sysfs: sysfs}
	for i := range topology.GPUs {
		g := &topology.GPUs[i]
		g.Minor, g.Name = g.Index, "simulated GPU"
		g.UUID = fmt.Sprintf("GPU-%08x-0000-4000-8000-000000000000", g.Index+1)
		if err := attribute(filepath.Join(sysfs, "bus/pci/devices", g.BusID, "vendor"), "0x10de"); err != nil {
			return err
		}
	}
	for i := range topology.NICs {
		n := &topology.NICs[i]
		n.Uverbs = fmt.Sprintf("uverbs%d", i)
		if err := attribute(filepath.Join(sysfs, "class/infiniband_verbs", n.Uverbs, "ibdev"), n.Name); err != nil {
			return err
		}
	}
	h.proc, h.devRoot = proc, filepath.Join(h.Root, "nodes")
	h.Words = fmt.Sprintf("the half-populated board of the README's picture, with %s and %s, on the CUDA simulator",
		counted(len(topology.GPUs), "GPU"), counted(len(topology.NICs), "NIC"))
	if err := h.simulate(topology); err != nil {
		return err
	}
	return h.makeNodes(h.devRoot)
}

// attribute writes a file of a fake sysfs.
func attribute(path, text string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(text+"\n"), 0o644)
}
