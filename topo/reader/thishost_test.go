package reader

import (
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

func TestThisHostCanBeRead(t *testing.T) {
	h, err := Read("", topo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if h.Source != (topo.Source{Kind: topo.SourceSysfs, Sysfs: "/sys"}) || len(h.CPUs) == 0 {
		t.Errorf("%+v", h)
	}
	if _, err := planner.Make(h, planner.Config{}); err != nil {
		t.Error(err)
	}
}
