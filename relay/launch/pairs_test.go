package launch

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

var testPairs = []PairName{
	{GPU{BusID: "0000:17:00.0", UUID: "GPU-00000000-0000-0000-0000-000000000000"}, GPU{BusID: "0000:18:00.0", Index: 1}},
	{GPU{BusID: "0000:17:00.0"}, GPU{BusID: "0000:19:00.0", Index: 2}},
}

func line(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // of values of this test
	}
	return string(text) + "\n"
}

func good(n PairName) Pair {
	return Pair{PairName: n, Verdict: VerdictGood, Bytes: 25 << 20, Push: PairRate{395, 390, 55}, Pull: PairRate{396, 389, 54}, Chunk: 8 << 20, Depth: 4, Streams: 2, At: 1}
}

// What a tester that was taken over, or is of another release, says is not believed.
func TestInvalidSelfTestReportsAreRefused(t *testing.T) {
	head := line(PairHost{Driver: 13000})
	change := func(f func(*Pair)) string {
		p := good(testPairs[0])
		f(&p)
		return head + line(p)
	}
	for _, c := range []struct{ name, text, why string }{
		{"nothing that makes sense", "hello\n", "first line"},
		{"unknown keys", head + `{"verdict":"good","root":"please"}` + "\n", "unknown field"},
		{"two documents in a line", head + strings.TrimSuffix(line(good(testPairs[0])), "\n") + "{}\n", "more behind it"},
		{"a line without end", head + strings.Repeat(" ", 1<<20), "token too long"},
		{"a pair twice", head + line(good(testPairs[0])) + line(good(testPairs[0])), "nobody asked for, or twice"},
		{"another pair", change(func(p *Pair) { p.Server.BusID = "0000:ff:00.0" }), "nobody asked for"},
		{"another GPU in its place", change(func(p *Pair) { p.GPU.UUID = "GPU-11111111-0000-0000-0000-000000000000" }), "nobody asked for"},
		{"no PCI address", change(func(p *Pair) { p.GPU.BusID = "../../x" }), "at \"../../x\""},
		{"another verdict", change(func(p *Pair) { p.Verdict = "perfect" }), "verdict"},
		{"bad without a reason", change(func(p *Pair) { p.Verdict = VerdictSlow }), "verdict slow"},
		{"a long reason", change(func(p *Pair) { p.Verdict, p.Reason = VerdictSlow, strings.Repeat("x", 600) }), "a reason of 600 bytes"},
		{"a reason that moves the cursor", change(func(p *Pair) { p.Verdict, p.Reason = VerdictSlow, "\x1b[2J" }), "control characters"},
		{"a negative rate", change(func(p *Pair) { p.Push.Client = -1 }), "a rate of"},
		{"a rate of nobody's", change(func(p *Pair) { p.Pull.Bounce = 1e300 }), "a rate of"},
		{"a chunk of a terabyte", change(func(p *Pair) { p.Chunk = 1 << 40 }), "a chunk of"},
		{"an odd chunk", change(func(p *Pair) { p.Chunk = 100_000 }), "a chunk of"},
		{"streams", change(func(p *Pair) { p.Streams = 1000 }), "1000 streams"},
		{"a depth", change(func(p *Pair) { p.Depth = -1 }), "depth of -1"},
		{"a driver", `{"driver":-5,"simulated":false}` + "\n", "driver -5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			told := 0
			err := ReadPairs(strings.NewReader(c.text), testPairs, func(PairHost, Pair) { told++ })
			if err == nil || !strings.Contains(err.Error(), c.why) {
				t.Errorf("the error does not say %q: %v", c.why, err)
			}
			if most := strings.Count(c.name, "twice"); told > most {
				t.Errorf("%d pairs are believed", told)
			}
		})
	}
}

func TestReadPairsReturnsReport(t *testing.T) {
	first, second := good(testPairs[0]), Pair{PairName: testPairs[1], Verdict: VerdictUntested, Reason: "out of memory"}
	first.Server.UUID = "GPU-22222222-0000-0000-0000-000000000000" // which the plan has not
	first.Server.Index = 77                                        // the plan's counts
	var got []Pair
	text := line(PairHost{Driver: 13000}) + line(second) + line(first)
	if err := ReadPairs(strings.NewReader(text), testPairs, func(h PairHost, p Pair) {
		if h.Driver != 13000 {
			t.Errorf("host %+v", h)
		}
		got = append(got, p)
	}); err != nil {
		t.Fatal(err)
	}
	first.Server.Index = 1
	if !reflect.DeepEqual(got, []Pair{second, first}) {
		t.Errorf("%+v", got)
	}
	if p := FindPair(got, testPairs[0]); p == nil || p.Chunk != 8<<20 {
		t.Errorf("found %+v", p)
	}
	if p := FindPair(got, PairName{testPairs[0].GPU, GPU{BusID: "0000:18:00.0", UUID: "GPU-33333333-0000-0000-0000-000000000000"}}); p != nil {
		t.Errorf("another GPU at the same place is %+v", p)
	}
}

func TestInvalidPairRecordsAreRefused(t *testing.T) {
	record := PairRecord{Version: PairVersion, Boot: "b", Pairs: []Pair{good(testPairs[0])}}
	whole := line(record)
	if r, err := ReadPairRecord([]byte(whole)); err != nil || !reflect.DeepEqual(r, record) {
		t.Fatalf("%+v, %v", r, err)
	}
	twice, newer := record, record
	twice.Pairs = append(twice.Pairs, good(testPairs[0]))
	newer.Version++
	for why, text := range map[string]string{
		"unexpected EOF":       whole[:len(whole)/2],
		"EOF":                  "",
		"more than":            strings.Repeat(" ", MaxPairRecord+1),
		"there twice":          line(twice),
		"is of version 2":      line(newer),
		"unknown field":        strings.Replace(whole, `"boot"`, `"boat"`, 1),
		"verdict":              strings.Replace(whole, `"good"`, `"great"`, 1),
		"cannot unmarshal":     strings.Replace(whole, `"boot":"b"`, `"boot":7`, 1),
		"there is more behind": whole + whole,
	} {
		if _, err := ReadPairRecord([]byte(text)); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("the error does not say %q: %v", why, err)
		}
	}
}

func TestPairVerdictsDecideUse(t *testing.T) {
	for _, c := range []struct {
		pair           *Pair
		once, required bool
	}{
		{nil, true, false},
		{&Pair{Verdict: VerdictUntested}, true, false},
		{&Pair{Verdict: VerdictGood}, true, true},
		{&Pair{Verdict: VerdictWrong}, false, false},
		{&Pair{Verdict: VerdictSlow}, false, false},
	} {
		if c.pair.Usable(false) != c.once || c.pair.Usable(true) != c.required {
			t.Errorf("%+v", c.pair)
		}
	}
}

func TestStagingPairsFollowLanes(t *testing.T) {
	g := func(i int) GPU { return GPU{BusID: fmt.Sprintf("0000:%02x:00.0", i), Index: i} }
	lanes := []Lane{
		{GPU: g(0), Relay: true, Servers: []GPU{g(1), g(0)}, Spares: []Spare{{GPU: g(3)}, {GPU: g(1)}}},
		{GPU: g(2), Servers: []GPU{g(2)}},
		{GPU: g(4), Relay: true, Servers: []GPU{g(3)}},
	}
	var got []string
	for _, p := range StagingPairs(lanes) {
		got = append(got, fmt.Sprintf("%d-%d", p.GPU.Index, p.Server.Index))
	}
	if strings.Join(got, " ") != "0-1 4-3 0-3" {
		t.Errorf("the pairs are %v", got)
	}
}
