package reader

import (
	"encoding/json"
	"syscall"
	"testing"

	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/planner"
)

// The device controls the attributes of a port, so the text can be malformed.
func TestPortAttributeMalformedIsEmpty(t *testing.T) {
	for text, want := range map[string]string{
		"fe80:0000:0000:0000:a088:c203:00a1:40e2":   "a088:c203:00a1:40e2",
		"0000:0000:0000:0000:0000:ffff:c000:0201":   "0000:ffff:c000:0201",
		"0000:0000:0000:0000:0000:0000:0000:0000":   "",
		"fe80::a088:c203:a1:40e2":                   "",
		"":                                          "",
		"fe80:0000:0000:0000:a088:c203:00a1:40e2:0": "",
	} {
		if got := portGUID(text); got != want {
			t.Errorf("GUID of %q: %q, want %q", text, got, want)
		}
	}
	for text, want := range map[string]int{"0x1f": 31, "0xffff": 65535, "0x10000": 0, "-1": 0, "": 0, "none": 0} {
		if got := portLID(text); got != want {
			t.Errorf("LID of %q: %d, want %d", text, got, want)
		}
	}
	for text, want := range map[string]string{"5: LinkUp": "LinkUp", "LinkUp": "LinkUp", "": ""} {
		if got := portState(text); got != want {
			t.Errorf("state of %q: %q, want %q", text, got, want)
		}
	}
}

// oneNIC is a tree with a NIC that has a single port.
func oneNIC() map[string]string {
	const at = "sys/devices/pci0000:00/0000:00:04.0/infiniband/mlx5_0/"
	files := map[string]string{
		"sys/class/infiniband/mlx5_0": "-> ../../devices/pci0000:00/0000:00:04.0/infiniband/mlx5_0",
		at + "device":                 "-> ../../../0000:00:04.0",
		at + "ports/1/state":          "4: ACTIVE",
		at + "ports/1/gids/0":         "fe80:0000:0000:0000:a088:c203:00a1:40e2",
	}
	topotest.Device(files, "pci0000:00/0000:00:04.0", "class=0x020700", "vendor=0x15b3")
	return files
}

// A GID of another network namespace exists and cannot be read. The device is not faulty, so the
// host has no note.
func TestGIDOfOtherNamespaceAddsNoNote(t *testing.T) {
	files := oneNIC()
	o := topotest.Tree(t, files)
	for errno, want := range map[error]string{nil: "a088:c203:00a1:40e2", syscall.EINVAL: ""} {
		from := failingAt("gids/0", errno)
		if errno == nil {
			from = failingAt("nothing", syscall.EINVAL)
		}
		h, err := readHost(o, from)
		if err != nil || len(h.NICs) != 1 {
			t.Fatalf("%v: %+v, %v", errno, h, err)
		}
		if p := h.NICs[0].Ports[0]; p.GUID != want || len(h.Notes) > 0 {
			t.Errorf("%v: port %+v, notes %q", errno, p, h.Notes)
		}
	}
}

// The values of ibstat change without a change of lanes, and plans are compared as text.
func TestPlanWithOtherFirmwareIsEqual(t *testing.T) {
	h := readTree(t, oneNIC())
	if len(h.NICs) == 0 || len(h.NICs[0].Ports) == 0 {
		t.Fatal("the host has no NIC with a port")
	}
	text := func() string {
		p, err := planner.Make(h, planner.Config{})
		if err != nil {
			t.Fatal(err)
		}
		out, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	before := text()
	n := &h.NICs[0]
	n.Firmware = "28.43.1014"
	n.Ports[0].PhysicalState, n.Ports[0].GUID, n.Ports[0].LID, n.Ports[0].SMLID = "LinkUp", "a088:c203:00a1:40e2", 7, 1
	if after := text(); after != before {
		t.Errorf("the plan was\n%s\nand is\n%s", before, after)
	}
	if n.Firmware == "" || n.Ports[0].LID == 0 {
		t.Error("the plan takes the host's facts away")
	}
}
