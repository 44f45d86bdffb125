package topo

import (
	"strings"
	"testing"
)

func TestJudgeSetsReasonOfRefusedDevices(t *testing.T) {
	for _, c := range []struct {
		name, want string // want is a part of the reason; empty for a usable device
		gpu        GPU
	}{
		{"usable", "", GPU{}},
		{"a reason of the source", "broken", GPU{Reason: "broken", Vendor: "AMD"}},
		{"another maker", "a GPU of AMD", GPU{Vendor: "AMD", MIG: true}},
		{"MIG", "MIG is on", GPU{MIG: true, VGPU: true}},
		{"vGPU", "it is a vGPU", GPU{VGPU: true, ComputeMode: "prohibited"}},
		{"prohibited", "compute mode is prohibited", GPU{ComputeMode: "prohibited", NoP2P: true}},
		{"exclusive", "compute mode is exclusive", GPU{ComputeMode: "exclusive-process", NoP2P: true}},
		{"without peers", "peer-to-peer", GPU{NoP2P: true}},
	} {
		h := &Host{GPUs: []GPU{c.gpu}}
		h.Judge()
		if got := h.GPUs[0].Reason; !strings.Contains(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("GPU, %s: %q, want %q", c.name, got, c.want)
		}
	}
	for _, c := range []struct {
		name, want string
		nic        NIC
	}{
		{"usable", "", NIC{Protocol: "RoCE"}},
		{"a reason of the source", "broken", NIC{Reason: "broken", Management: true}},
		{"management", "management bridge", NIC{Management: true, Ethernet: true}},
		{"Ethernet", "does not support RDMA", NIC{Ethernet: true, Protocol: "EFA"}},
		{"EFA", "EFA", NIC{Protocol: "EFA"}},
	} {
		h := &Host{NICs: []NIC{c.nic}}
		h.Judge()
		if got := h.NICs[0].Reason; !strings.Contains(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("NIC, %s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestNoteAppendsSentence(t *testing.T) {
	h := &Host{Notes: []string{"first"}}
	h.Note("GPU %d", 3)
	if len(h.Notes) != 2 || h.Notes[1] != "GPU 3" {
		t.Errorf("%q", h.Notes)
	}
}

func TestStringOfUnknownPathTypeIsNumber(t *testing.T) {
	for path, want := range map[PathType]string{-1: "PathType(-1)", LOC: "LOC", DIS: "DIS", DIS + 1: "PathType(12)"} {
		if got := path.String(); got != want {
			t.Errorf("%d: %q, want %q", int(path), got, want)
		}
	}
	if text, err := PathType(-1).MarshalText(); err == nil {
		t.Errorf("-1 is written %q", text)
	}
}
