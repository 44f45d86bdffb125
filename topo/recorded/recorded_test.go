package recorded

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

func unpackHost(t *testing.T) *topo.Host {
	t.Helper()
	sysfs, proc, err := Unpack(filepath.Join(t.TempDir(), "not", "there", "yet"))
	if err != nil {
		t.Fatal(err)
	}
	h, err := reader.Sysfs(topo.Options{Sysfs: sysfs, Proc: proc})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestRecordedHostHasEightGPUsAndTwoNICs(t *testing.T) {
	h := unpackHost(t)
	if len(h.GPUs) != 8 || len(h.NICs) != 2 || len(h.Notes) > 0 {
		t.Fatalf("%d GPUs, %d NICs, notes %q; want 8, 2, none", len(h.GPUs), len(h.NICs), h.Notes)
	}
	uuids := map[string]bool{}
	for i, g := range h.GPUs {
		uuids[g.UUID] = true
		if g.Index != i || g.Minor != i || len(g.UUID) != len("GPU-00000000-0000-0000-0000-000000000000") ||
			g.Name != "NVIDIA H100 80GB HBM3" {
			t.Errorf("GPU %d reads %+v", i, g)
		}
	}
	if len(uuids) != 8 {
		t.Errorf("%d different UUIDs", len(uuids))
	}
	want := topo.NIC{
		Name: "mlx5_1", BusID: "0000:9c:00.0", Driver: "mlx5_core", Uverbs: "uverbs1", GUID: "5054:00ff:fe70:0101",
		SystemGUID: "5054:00ff:fe70:0101", NUMA: 1,
		Place: topo.Place{HostBridge: "pci0000:97", Switch: "0000:98:00.0", Link: 48, LinkSpeed: "32.0 GT/s PCIe",
			LinkWidth: 16, LinkNow: 48},
		Ports:    []topo.Port{{Number: 1, State: "ACTIVE", PhysicalState: "LinkUp", LinkLayer: "Ethernet", RateGbps: 400}},
		Protocol: "RoCE",
		Device: topo.PCIIdentity{Class: "0x020000", Vendor: "0x15b3", Device: "0x1021", SubsystemVendor: "0x15b3",
			SubsystemDevice: "0x0041"},
	}
	if diff := cmp.Diff(want, h.NICs[1]); diff != "" {
		t.Error(diff)
	}
}

func TestRecordedHostHasFarGPUs(t *testing.T) {
	plan, err := planner.Make(unpackHost(t), planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	type lane struct {
		Role    string
		Servers []string
		NIC     string
		Rail    int
		Path    topo.PathType
	}
	socket0, socket1 := []string{"0000:18:00.0", "0000:19:00.0"}, []string{"0000:9a:00.0", "0000:9b:00.0"}
	near := func(nic string, rail int) lane { return lane{planner.RoleNear, []string{}, nic, rail, topo.PIX} }
	far := func(servers []string, nic string, rail int) lane {
		return lane{planner.RoleFar, servers, nic, rail, topo.NODE}
	}
	want := []lane{
		near("mlx5_0", 0), near("mlx5_0", 0), far(socket0, "mlx5_0", 0), far(socket0, "mlx5_0", 0),
		near("mlx5_1", 1), near("mlx5_1", 1), far(socket1, "mlx5_1", 1), far(socket1, "mlx5_1", 1),
	}
	var got []lane
	for _, l := range plan.Lanes {
		got = append(got, lane{l.Role, l.Servers, strings.Join(l.NICs, " "), l.Rail, l.Path})
		if l.Relay != (l.Role == planner.RoleFar) {
			t.Errorf("%s: relay is %t", l.GPU, l.Relay)
		}
		if l.Reason == "" {
			t.Errorf("%s: no reason", l.GPU)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestEveryLinkOfTheRecordedHostLeadsSomewhere(t *testing.T) {
	dir := t.TempDir()
	if _, _, err := Unpack(dir); err != nil {
		t.Fatal(err)
	}
	links := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type() != fs.ModeSymlink {
			return err
		}
		links++
		target, err := filepath.EvalSymlinks(path)
		if err != nil {
			t.Errorf("%s: %v", path, err)
		} else if !strings.HasPrefix(target, dir) {
			t.Errorf("%s leads out of the host, to %s", path, target)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if links == 0 {
		t.Error("the recorded host has no symbolic link, and a real sysfs is full of them")
	}
}

func TestUnpackErrorNamesPath(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var failed *fs.PathError
	if _, _, err := Unpack(file); !errors.As(err, &failed) || failed.Path != file {
		t.Errorf("unpacking over a file: %v", err)
	}
}
