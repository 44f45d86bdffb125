package topo

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRateOfNICIsThatOfFastestActivePort(t *testing.T) {
	down := Port{Number: 1, RateGbps: 400, State: "DOWN"}
	for _, c := range []struct {
		name   string
		ports  []Port
		active bool
		rate   float64
	}{
		{"no ports", nil, true, 0},
		{"two active ports", []Port{{RateGbps: 100}, {RateGbps: 200}, {RateGbps: 50}}, true, 200},
		{"a port that is down", []Port{down}, false, 0},
		{"a port that is down and an active port", []Port{down, {RateGbps: 100, State: "ACTIVE"}}, true, 100},
	} {
		n := NIC{Ports: c.ports}
		if n.Active() != c.active || n.RateGbps() != c.rate {
			t.Errorf("%s: active %t at %g Gb/s, want %t at %g", c.name, n.Active(), n.RateGbps(), c.active, c.rate)
		}
	}
}

func TestCannotFlushFollowsProtocol(t *testing.T) {
	for protocol, want := range map[string]bool{"iWARP": true, "eRDMA": true, "RoCE": false, "": false} {
		if got := (NIC{Protocol: protocol}).CannotFlush(); got != want {
			t.Errorf("%q: %t", protocol, got)
		}
	}
}

func TestOwnFunctionReplacesDataDirect(t *testing.T) {
	n := NIC{BusID: "1", DataDirect: "2", NUMA: 1, Place: Place{Switch: "3"},
		Own: &Function{NUMA: 2, Place: Place{Switch: "4"}}}
	want := NIC{BusID: "1", NUMA: 2, Place: Place{Switch: "4"}}
	if diff := cmp.Diff(want, n.OwnFunction()); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if got := want.OwnFunction(); !cmp.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	for _, c := range []struct {
		nic  NIC
		want string
	}{{NIC{BusID: "1", Card: "2", DataDirect: "3"}, "3"}, {NIC{BusID: "1", Card: "2"}, "2"}, {NIC{BusID: "1"}, "1"}} {
		if got := c.nic.CardFunction(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.nic, got, c.want)
		}
	}
}
