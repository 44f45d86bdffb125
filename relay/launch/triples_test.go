package launch

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

var aTriple = Triple{
	TripleName: TripleName{PairName{GPU{BusID: "0000:17:00.0"}, GPU{BusID: "0000:65:00.0", Index: 1}}, "mlx5_0"},
	Verdict:    VerdictGood, Memory: MemoryDMABuf, Flushed: true, Rounds: 2048, Bytes: 1 << 24, At: 1,
}

func TestTripleCheckRefusesImpossibleResults(t *testing.T) {
	for name, change := range map[string]func(*Triple){
		"":                                func(*Triple) {},
		"no NIC":                          func(r *Triple) { r.NIC = "" },
		"a NIC with a slash":              func(r *Triple) { r.NIC = "../mlx5_0" },
		"a NIC with a long name":          func(r *Triple) { r.NIC = strings.Repeat("x", 65) },
		"slow":                            func(r *Triple) { r.Verdict, r.Reason = VerdictSlow, "slow" },
		"wrong without a reason":          func(r *Triple) { r.Verdict = VerdictWrong },
		"good with a reason":              func(r *Triple) { r.Reason = "why" },
		"a reason with a line's end":      func(r *Triple) { r.Verdict, r.Reason = VerdictWrong, "a\nb" },
		"memory of an unknown kind":       func(r *Triple) { r.Memory = "tape" },
		"fewer than no rounds":            func(r *Triple) { r.Rounds = -1 },
		"a GPU that is no PCI address":    func(r *Triple) { r.Server.BusID = "x" },
		"a setting of control characters": func(r *Triple) { r.Setting = "\x1b[2J" },
	} {
		r := aTriple
		change(&r)
		if err := r.Check(); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestReadRDMATakesAskedTriplesAlone(t *testing.T) {
	job := RDMAJob{Triples: []TripleName{aTriple.TripleName}, NICs: []RDMANIC{{Name: "mlx5_0"}}}
	other := aTriple
	other.NIC = "mlx5_1"
	for _, c := range []struct {
		line RDMAResult
		good bool
	}{
		{RDMAResult{NIC: "mlx5_0", Triple: &aTriple}, true},
		{RDMAResult{NIC: "mlx5_1", Triple: &other}, false},
		{RDMAResult{NIC: "mlx5_1", Triple: &aTriple}, false},
		{RDMAResult{NIC: "mlx5_0", Triple: &aTriple, Memory: MemoryHost, Tried: "read"}, false},
	} {
		text, err := json.Marshal(c.line)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		if err := ReadRDMA(strings.NewReader(string(text)), job, func(RDMAResult) { n++ }); (err == nil) != c.good ||
			(n == 1) != c.good {
			t.Errorf("%s: %v, %d results", text, err, n)
		}
	}
}

func TestRecordKeepsTriples(t *testing.T) {
	r := PairRecord{Version: PairVersion, Boot: "b", Pairs: []Pair{}, Triples: []Triple{aTriple}}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadPairRecord(text)
	if err != nil || len(got.Triples) != 1 || got.Triples[0] != aTriple {
		t.Errorf("%+v, %v", got, err)
	}
	r.Triples = append(r.Triples, aTriple)
	if text, err = json.Marshal(r); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPairRecord(text); err == nil {
		t.Error("a triple that is there twice is read")
	}
}

func TestStagingTriplesFollowLanes(t *testing.T) {
	gpu := func(i int) GPU { return GPU{BusID: fmt.Sprintf("0000:%02x:00.0", i), Index: i} }
	lanes := []Lane{
		{
			GPU:     gpu(1),
			Relay:   true,
			Servers: []GPU{gpu(2)},
			NICs:    []string{"a"},
			Spares:  []Spare{{GPU: gpu(3), NICs: []string{"d"}}},
		},
		{GPU: gpu(2), Direct: true, NICs: []string{"b"}},
		{GPU: gpu(4), NICs: []string{"c"}}, // neither stages nor is near
		{GPU: gpu(5), Relay: true, Direct: true, Servers: []GPU{gpu(2)}, NICs: []string{"e"}},
	}
	var got []string
	for _, n := range StagingTriples(lanes) {
		got = append(got, fmt.Sprint(n.GPU.Index, n.Server.Index, n.NIC))
	}
	// Planned ones, other lanes' NICs, spares with the lane's NICs, and the other lanes'. No lane
	// has d: the relay does not open it.
	want := "1 2a 2 2b 5 2e 5 5e 1 2b 1 2c 1 2e 2 2a 2 2c 2 2e 5 2a 5 5a 5 2b 5 5b 5 2c 5 5c 1 3a 1 3b 1 3c 1 3e"
	if got := strings.Join(got, " "); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
