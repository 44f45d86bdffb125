package topo

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOnlyChoosesHostByNumberOrHash(t *testing.T) {
	h := &Host{
		CPUs:     []CPU{{Host: "0xa"}, {Host: "0xa", NUMA: 1}},
		Switches: []Switch{{Host: "0xb", BusID: "1"}, {Host: "0xa", BusID: "2"}},
		GPUs:     []GPU{{Host: "0xb", Index: 1}, {Host: "0xa", Index: 2}},
		NICs:     []NIC{{Host: "1", Name: "n"}, {Host: "0xb", Name: "o"}},
		Notes:    []string{"note"},
	}
	if diff := cmp.Diff([]string{"0xa", "0xb", "1"}, h.Hosts()); diff != "" {
		t.Fatalf("hosts (-want +got)\n%s", diff)
	}
	second := &Host{Switches: []Switch{{BusID: "1"}}, GPUs: []GPU{{Index: 1}}, NICs: []NIC{{Name: "o"}},
		Notes: []string{"note", "this is host 1 of the file, 0xb"}}
	for name, want := range map[string]*Host{
		"0xb": second, "0XB": second,
		"0": {CPUs: []CPU{{}, {NUMA: 1}}, Switches: []Switch{{BusID: "2"}}, GPUs: []GPU{{Index: 2}},
			Notes: []string{"note", "this is host 0 of the file, 0xa"}},
		"1": {NICs: []NIC{{Name: "n"}}, Notes: []string{"note", "this is host 2 of the file, 1"}}, // the hash first
		"2": {NICs: []NIC{{Name: "n"}}, Notes: []string{"note", "this is host 2 of the file, 1"}},
	} {
		got, err := h.Only(name)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got)\n%s", name, err, diff)
		}
	}
	for _, name := range []string{"3", "-1", "0xc", ""} {
		_, err := h.Only(name)
		var unknown *UnknownHostError
		if !errors.As(err, &unknown) || unknown.Name != name || !cmp.Equal(unknown.Hosts, []string{"0xa", "0xb", "1"}) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestOnlyOfSingleHostIsThatHost(t *testing.T) {
	h := &Host{CPUs: []CPU{{}}}
	if got, err := h.Only("0"); got != h || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	_, err := h.Only("1")
	var unknown *UnknownHostError
	if !errors.As(err, &unknown) || unknown.Hosts != nil {
		t.Errorf("%v", err)
	}
}

func TestFindGPUMatchesWholeNames(t *testing.T) {
	gpus := []GPU{{Index: 1}, {Index: 2, BusID: "GPU2"}, {Index: 3, BusID: "0000:03:00.0"}}
	for name, want := range map[string]int{"2": 2, "GPU2": 2, "03:00.0": 3, "": 1} {
		if g, err := FindGPU(gpus, name); err != nil || g.Index != want {
			t.Errorf("%q: GPU %d, %v; want %d", name, g.Index, err, want)
		}
	}
	for _, name := range []string{"gpu2", "x", "00:00.0"} {
		if g, err := FindGPU(gpus[1:], name); err == nil {
			t.Errorf("%q: GPU %d", name, g.Index)
		}
	}
}

func TestUnknownNameErrorListsNames(t *testing.T) {
	err := &UnknownGPUError{Name: "x", Known: []GPU{{Index: 0, BusID: "a", UUID: "u"}, {Index: 1, BusID: "b"}}}
	if got := err.Error(); !strings.HasSuffix(got, "known are 0 = a = u, 1 = b") {
		t.Errorf("%s", got)
	}
	none := &UnknownGPUError{Name: "x"}
	if got := none.Error(); !strings.HasSuffix(got, "this host has no GPU") {
		t.Errorf("%s", got)
	}
	hosts := &UnknownHostError{"x", []string{"0xa", "0xb"}}
	if got := hosts.Error(); !strings.HasSuffix(got, "2 hosts, numbers 0 to 1: 0xa, 0xb") {
		t.Errorf("%s", got)
	}
}
