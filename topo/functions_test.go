package topo

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParentIsPhysicalFunction(t *testing.T) {
	for _, c := range []struct {
		name string
		nic  NIC
		want string
	}{
		{"physical function", NIC{BusID: "0000:01:00.0"}, ""},
		{"virtual function", NIC{BusID: "0000:01:00.2", VirtualFunctionOf: "0000:01:00.0"}, "0000:01:00.0"},
		{"subfunction", NIC{BusID: "0000:01:00.0", Subfunction: "mlx5_core.sf.4"}, "0000:01:00.0"},
		{"subfunction of a virtual function",
			NIC{BusID: "0000:01:00.2", Subfunction: "mlx5_core.sf.4", VirtualFunctionOf: "0000:01:00.0"}, "0000:01:00.0"},
	} {
		if got := c.nic.Parent(); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// ports has two physical NICs on host a, functions of the first, a function whose physical function is
// missing with a second one of the same port, a NIC without an address, and the address on host b.
func ports() []NIC {
	return []NIC{
		{Host: "a", Name: "pf", BusID: "0000:01:00.0"},
		{Host: "a", Name: "other", BusID: "0000:02:00.0"},
		{Host: "a", Name: "vf", BusID: "0000:01:00.2", VirtualFunctionOf: "0000:01:00.0"},
		{Host: "a", Name: "sf", BusID: "0000:01:00.0", Subfunction: "mlx5_core.sf.4"},
		{Host: "a", Name: "alone", BusID: "0000:03:00.2", VirtualFunctionOf: "0000:03:00.0"},
		{Host: "a", Name: "beside", BusID: "0000:03:00.3", VirtualFunctionOf: "0000:03:00.0"},
		{Host: "b", Name: "vf", BusID: "0000:01:00.2", VirtualFunctionOf: "0000:01:00.0"},
		{Host: "a", Name: "nowhere"},
		{Host: "a", Name: "second", BusID: "0000:01:00.0"},
	}
}

func TestOwnersOfFunctionsAreNICsOfPort(t *testing.T) {
	if diff := cmp.Diff([]int{0, 1, 0, 0, 4, 4, 6, 7, 8}, Owners(ports())); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestFoldedKeepsNICsAndNamedFunctions(t *testing.T) {
	h := &Host{NICs: ports()}
	folded, functions := h.FoldFunctions(map[string]bool{"sf": true})
	var names []string
	for _, n := range folded.NICs {
		names = append(names, n.Host+"/"+n.Name)
	}
	want := []string{"a/pf", "a/other", "a/sf", "a/alone", "b/vf", "a/nowhere", "a/second"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(Functions{"a/pf": {"vf"}, "a/alone": {"beside"}}, functions); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if got := functions.Of(h.NICs[0]); !cmp.Equal(got, []string{"vf"}) {
		t.Errorf("functions of the first NIC: %q", got)
	}
	one := &Host{NICs: []NIC{{Name: "pf", BusID: "0000:01:00.0"}, {Name: "vf", VirtualFunctionOf: "0000:01:00.0"}}}
	if _, functions := one.FoldFunctions(nil); !cmp.Equal(functions, Functions{"pf": {"vf"}}) {
		t.Errorf("of a single host: %v", functions)
	}
	if same, functions := one.FoldFunctions(map[string]bool{"vf": true}); same != one || functions != nil {
		t.Errorf("without a function to remove: %v, %v", same, functions)
	}
}
