package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/testplan"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// The file for NCCL's plugin, beside the socket, lists the GPUs of the container, including later
// ones, and no others.
func TestWriteTopologyListsGPUsOfContainer(t *testing.T) {
	dir := t.TempDir()
	l := paths.New(dir)
	plan := testplan.New("/sys")
	plan.CPUs = []topo.CPU{{NUMA: 0, CPUs: "0-7", Arch: "x86_64"}}
	g := &generation.Generation{ID: strings.Repeat("0a", 16)}
	if err := errors.Join(l.Create(), os.MkdirAll(l.SocketDir(g.ID), 0o755)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(l.SocketDir(g.ID), paths.TopologyName)
	g.Config.Lanes = []launch.Lane{{GPU: launch.GPU{BusID: "0000:2a:00.0"}}}
	if err := writeTopology(l, g, false); !errors.Is(err, fault.UnreadablePlan) {
		t.Errorf("without a plan: %v", err)
	}
	if err := plan.Write(l.PlanFile()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"peerlane_1", "peerlane_1 peerlane_0"} {
		if err := writeTopology(l, g, false); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"peerlane_0", "peerlane_1"} {
			if ok := strings.Contains(string(text), `name="`+name+`"`); ok != strings.Contains(want, name) {
				t.Errorf("topology of a container with %s: %s", want, text)
			}
		}
		if info, err := os.Stat(file); err != nil {
			t.Error(err)
		} else if info.Mode() != 0o644 {
			t.Errorf("mode %v: every user of the container reads the file", info.Mode())
		}
		g.Config.Lanes = append(g.Config.Lanes, launch.Lane{GPU: launch.GPU{BusID: "0000:17:00.0"}})
	}
	// Lanes that reach only this host require no NIC.
	for i := range plan.Lanes {
		plan.Lanes[i].NICs = nil
	}
	if err := plan.Write(l.PlanFile()); err != nil {
		t.Fatal(err)
	}
	for _, local := range []bool{false, true} {
		if err := writeTopology(l, g, local); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if ok := strings.Contains(string(text), `name="peerlane_1"`); err != nil || ok != local {
			t.Errorf("local %v: %v: %s", local, err, text)
		}
	}
	if left, err := os.ReadDir(filepath.Dir(file)); err != nil || len(left) != 1 {
		t.Errorf("beside it are %v, %v", left, err)
	}
}
