package topo

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAddKeepsRatesThatAreThere(t *testing.T) {
	m := &Measured{
		Copies: []MeasuredCopy{{GPU: "1", Peer: "2", Out: 1, In: 1}},
		Memory: []MeasuredHost{{GPU: "1", Out: 1, In: 1}},
		Loops:  []MeasuredLoop{{NIC: "n", GPU: "1", Out: 1, In: 1}},
	}
	m.Add(&Measured{
		Copies: []MeasuredCopy{{GPU: "1", Peer: "2", Out: 9, In: 9}, {GPU: "1", Peer: "3", Out: 2, In: 2},
			{GPU: "2", Peer: "2"}},
		Memory: []MeasuredHost{{GPU: "1", Out: 9, In: 9}, {GPU: "2", Out: 2, In: 2}},
		Loops: []MeasuredLoop{{NIC: "n", GPU: "1", Out: 9, In: 9}, {NIC: "n", Out: 2, In: 2},
			{NIC: "o", GPU: "1", Out: 3, In: 3}},
	})
	want := &Measured{
		Copies: []MeasuredCopy{{GPU: "1", Peer: "2", Out: 1, In: 1}, {GPU: "1", Peer: "3", Out: 2, In: 2},
			{GPU: "2", Peer: "2"}},
		Memory: []MeasuredHost{{GPU: "1", Out: 1, In: 1}, {GPU: "2", Out: 2, In: 2}},
		Loops: []MeasuredLoop{{NIC: "n", GPU: "1", Out: 1, In: 1}, {NIC: "n", Out: 2, In: 2},
			{NIC: "o", GPU: "1", Out: 3, In: 3}},
	}
	if diff := cmp.Diff(want, m); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestParseMeasuredInvalidRateFails(t *testing.T) {
	for _, list := range []string{"copies", "memory", "loops"} {
		for rate, permitted := range map[string]bool{"0.1": true, "100000": true, "100001": false, "0": false, "-1": false} {
			for _, rates := range []string{`"out": 5, "in": ` + rate, `"out": ` + rate + `, "in": 5`} {
				text := fmt.Sprintf(`{"fingerprint": "f", %q: [{"gpu": "1", "nic": "n", "peer": "2", %s}]}`, list, rates)
				m, err := ParseMeasured([]byte(text))
				if (err == nil) != permitted || permitted && len(m.Copies)+len(m.Memory)+len(m.Loops) != 1 {
					t.Errorf("%s: %+v, %v", text, m, err)
				}
			}
		}
	}
	if m, err := ParseMeasured([]byte("{")); err == nil {
		t.Errorf("%+v", m)
	}
}

func TestFingerprintChangesWithEachDevice(t *testing.T) {
	made := func() *Host {
		return &Host{CPUs: []CPU{{}}, Switches: []Switch{{}}, GPUs: []GPU{{}}, NICs: []NIC{{}}}
	}
	seen := map[string]string{made().Fingerprint(): "no change"}
	for name, change := range map[string]func(*Host){
		"CPU":                func(h *Host) { h.CPUs[0].Model = 1 },
		"switch":             func(h *Host) { h.Switches[0].BusID = "1" },
		"place of a switch":  func(h *Host) { h.Switches[0].Link = 1 },
		"GPU":                func(h *Host) { h.GPUs[0].UUID = "1" },
		"switch above a GPU": func(h *Host) { h.GPUs[0].Switch = "1" },
		"NVLinks":            func(h *Host) { h.GPUs[0].NVLinks = []NVLink{{}} },
		"NIC":                func(h *Host) { h.NICs[0].Name = "1" },
		"bridge of a NIC":    func(h *Host) { h.NICs[0].HostBridge = "1" },
	} {
		h := made()
		change(h)
		f := h.Fingerprint()
		if other, ok := seen[f]; ok {
			t.Errorf("%s: the fingerprint is that of %s", name, other)
		}
		seen[f] = name
	}
	h := made()
	h.NICs[0].Ports = []Port{{Number: 1}}
	if seen[h.Fingerprint()] != "no change" {
		t.Error("the state of a port changes the fingerprint")
	}
}

func TestMeasureOtherHostIsRefused(t *testing.T) {
	h := &Host{GPUs: []GPU{{BusID: "1"}}}
	other := &Measured{Fingerprint: (&Host{}).Fingerprint()}
	if h.Measure(nil) || h.Measure(other) || h.Measured != nil {
		t.Errorf("%+v is stored", h.Measured)
	}
	if own := (&Measured{Fingerprint: h.Fingerprint()}); !h.Measure(own) || h.Measured != own {
		t.Errorf("%+v is stored, want the rates of the host", h.Measured)
	}
}

func TestRateIsTheLowerOfBoth(t *testing.T) {
	for _, l := range []MeasuredLoop{{Out: 1, In: 2}, {Out: 2, In: 1}} {
		if got := l.Rate(); got != 1 {
			t.Errorf("%+v: %g", l, got)
		}
	}
}
