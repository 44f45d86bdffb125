package topo

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The tree has a switch with two ports below a root port; devices are at the addresses 01 and 02.
func TestACSRedirectsBetweenDevicesOfSwitch(t *testing.T) {
	gpu := func(at string) GPU { return GPU{BusID: at} }
	nic := func(at string) NIC { return NIC{BusID: at} }
	for _, c := range []struct {
		name     string
		gpus     []GPU
		nics     []NIC
		acs      []string // of both ports of the switch
		redirect int
		unknown  int
	}{
		{"two GPUs", []GPU{gpu("01"), gpu("02")}, nil, []string{ACSRequestRedirect}, 2, 0},
		{"completions", []GPU{gpu("01"), gpu("02")}, nil, []string{"SrcValid", ACSCompletionRedirect}, 2, 0},
		{"other controls", []GPU{gpu("01"), gpu("02")}, nil, []string{"SrcValid"}, 0, 0},
		{"no control", []GPU{gpu("01"), gpu("02")}, nil, []string{}, 0, 0},
		{"unknown controls", []GPU{gpu("01"), gpu("02")}, nil, nil, 0, 2},
		{"a GPU and a NIC", []GPU{gpu("01")}, []NIC{nic("02")}, []string{ACSRequestRedirect}, 2, 0},
		{"two NICs", nil, []NIC{nic("01"), nic("02")}, []string{ACSRequestRedirect}, 0, 0},
		{"one GPU", []GPU{gpu("01")}, nil, []string{ACSRequestRedirect}, 0, 0},
		{"one NIC", nil, []NIC{nic("01")}, nil, 0, 0},
		{"a GPU and a NIC below one port", []GPU{gpu("01")}, []NIC{nic("01")}, nil, 0, 0},
		{"a GPU beside a GPU and a NIC", []GPU{gpu("01"), gpu("02")}, []NIC{nic("01")}, nil, 0, 2},
		{"a GPU behind a bridge", []GPU{gpu("01"), gpu("04")}, nil, []string{}, 0, 0},
		{"a GPU outside the tree", []GPU{gpu("01"), gpu("03")}, nil, nil, 0, 0},
	} {
		h := &Host{GPUs: c.gpus, NICs: c.nics, PCIePorts: []PCIePort{
			{BusID: "root", Type: PortRoot, ACS: []string{ACSRequestRedirect}},
			{BusID: "up", Above: "root", Type: PortUpstream, ACS: []string{ACSRequestRedirect}},
			{BusID: "down1", Above: "up", Type: PortDownstream, ACS: c.acs},
			{BusID: "down2", Above: "up", Type: PortDownstream, ACS: c.acs},
			{BusID: "01", Above: "down1", Type: PortEndpoint, ACS: []string{ACSRequestRedirect}},
			{BusID: "02", Above: "down2", Type: PortEndpoint},
			{BusID: "lost", Above: "none", Type: PortDownstream},
			{BusID: "bridge", Above: "up", Type: PortToPCI},
			{BusID: "04", Above: "bridge", Type: PortEndpoint},
		}}
		redirect, unknown := h.ACSRedirects()
		if len(redirect) != c.redirect || len(unknown) != c.unknown {
			t.Errorf("%s: redirect %v, unknown %v; want %d and %d", c.name, redirect, unknown, c.redirect, c.unknown)
		}
		for i, p := range append(redirect, unknown...) {
			if want := []string{"down1", "down2"}[i]; !cmp.Equal(p.BusID, want) {
				t.Errorf("%s: port %s, want %s", c.name, p.BusID, want)
			}
		}
	}
}
