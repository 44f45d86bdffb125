package recorded

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/reader"
)

// Ports and links inferred from the tree must equal the ports and links from configuration
// space.
func TestPortsOfTheRecordedHostAreInferredAsTheyAre(t *testing.T) {
	sysfs, proc, err := Unpack(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	read := func() *topo.Host {
		h, err := reader.Sysfs(topo.Options{Sysfs: sysfs, Proc: proc})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	change := func(pattern string, change func(file string) error) {
		files, err := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*", pattern))
		if err != nil || len(files) != 28 && len(files) != 2*28 {
			t.Fatalf("%d files %s, %v", len(files), pattern, err)
		}
		for _, f := range files {
			if err := change(f); err != nil {
				t.Fatal(err)
			}
		}
	}
	whole := read()
	types := map[string]int{}
	for _, p := range whole.PCIePorts {
		types[p.Type]++
		if p.Inferred || p.ACS == nil {
			t.Errorf("%+v is incomplete", p)
		}
	}
	if diff := cmp.Diff(map[string]int{topo.PortRoot: 4, topo.PortUpstream: 4, topo.PortDownstream: 10,
		topo.PortEndpoint: 10}, types); diff != "" {
		t.Errorf("types (-want +got):\n%s", diff)
	}

	change("max_link_*", os.Remove)
	without := read()
	for i := range whole.GPUs {
		if whole.GPUs[i].Link != without.GPUs[i].Link {
			t.Errorf("the attributes say %g GB/s, and the configuration space %g", whole.GPUs[i].Link, without.GPUs[i].Link)
		}
	}

	change("config", func(file string) error { return os.Truncate(file, 64) })
	for i, p := range read().PCIePorts {
		want := whole.PCIePorts[i]
		want.Inferred, want.ACS, want.Slot = true, nil, 0
		if diff := cmp.Diff(want, p); diff != "" {
			t.Errorf("read (-) and inferred (+):\n%s", diff)
		}
	}
}
