package launch

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
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
	return Pair{
		PairName: n,
		Verdict:  VerdictGood,
		Bytes:    25 << 20,
		Push:     PairRate{395, 390, 55},
		Pull:     PairRate{396, 389, 54},
		Chunk:    8 << 20,
		Depth:    4,
		Streams:  2,
		At:       1,
	}
}

// The reader refuses invalid output of a compromised tester, or of a different release.
func TestInvalidSelfTestReportsAreRefused(t *testing.T) {
	head := line(PairHost{Driver: 13000})
	change := func(f func(*Pair)) string {
		p := good(testPairs[0])
		f(&p)
		return head + line(p)
	}
	value := func(field string, v any) error { return &ValueError{field, v, ""} }
	chunk := func(v uint64) error { return &ValueError{"chunk", v, "a multiple of 64 KiB up to 1 GiB"} }
	for _, c := range []struct {
		name, text string
		line       int // 0: of the reader
		want       error
	}{
		{"nothing that makes sense", "hello\n", 1, &json.SyntaxError{Offset: 1}},
		{"unknown keys", head + `{"verdict":"good","root":"please"}` + "\n", 2, &UnknownFieldError{"root"}},
		{"two documents in a line", head + strings.TrimSuffix(line(good(testPairs[0])), "\n") + "{}\n", 2, errMore},
		{"a line without end", head + strings.Repeat(" ", 1<<20), 0, bufio.ErrTooLong},
		{"a pair twice", head + line(good(testPairs[0])) + line(good(testPairs[0])), 3, errNotAsked},
		{"another pair", change(func(p *Pair) { p.Server.BusID = "0000:ff:00.0" }), 2, errNotAsked},
		{"another GPU in its place", change(func(p *Pair) {
			p.GPU.UUID = "GPU-11111111-0000-0000-0000-000000000000"
		}), 2, errNotAsked},
		{"no PCI address", change(func(p *Pair) { p.GPU.BusID = "../../x" }), 2, value("PCI address", "../../x")},
		{"another verdict", change(func(p *Pair) { p.Verdict = "perfect" }), 2, value("verdict", "perfect")},
		{"bad without a reason", change(func(p *Pair) { p.Verdict = VerdictSlow }), 2, value("reason of verdict slow", "")},
		{"a long reason", change(func(p *Pair) { p.Verdict, p.Reason = VerdictSlow, strings.Repeat("x", 600) }), 2,
			&ValueError{"reason or reader", strings.Repeat("x", 600), textForm}},
		{"a reason that moves the cursor", change(func(p *Pair) { p.Verdict, p.Reason = VerdictSlow, "\x1b[2J" }), 2,
			&ValueError{"reason or reader", "\x1b[2J", textForm}},
		{"a negative rate", change(func(p *Pair) { p.Push.Client = -1 }), 2, value("rate in GB/s", -1.0)},
		{"a rate of nobody's", change(func(p *Pair) { p.Pull.Bounce = 1e300 }), 2, value("rate in GB/s", 1e300)},
		{"a chunk of a terabyte", change(func(p *Pair) { p.Chunk = 1 << 40 }), 2, chunk(1 << 40)},
		{"an odd chunk", change(func(p *Pair) { p.Chunk = 100_000 }), 2, chunk(100_000)},
		{"streams", change(func(p *Pair) { p.Streams = 1000 }), 2,
			&ValueError{"streams", 1000, fmt.Sprintf("0 to %d", MaxStreams)}},
		{"a depth", change(func(p *Pair) { p.Depth = -1 }), 2, &ValueError{"depth", -1, fmt.Sprintf("0 to %d", MaxDepth)}},
		{"a driver", `{"driver":-5,"simulated":false}` + "\n", 1, value("driver", -5)},
	} {
		t.Run(c.name, func(t *testing.T) {
			told := 0
			err := ReadPairs(strings.NewReader(c.text), testPairs, func(PairHost, Pair) { told++ })
			at, _ := errors.AsType[*lineError](err)
			if !testutil.HasError(err, c.want) || (at == nil) != (c.line == 0) || at != nil && at.line != c.line {
				t.Errorf("error %v, want %v in line %d", err, c.want, c.line)
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
	if p := FindPair(got, PairName{testPairs[0].GPU,
		GPU{BusID: "0000:18:00.0", UUID: "GPU-33333333-0000-0000-0000-000000000000"}}); p != nil {
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
	for _, c := range []struct {
		text string
		want error
	}{
		{whole[:len(whole)/2], io.ErrUnexpectedEOF},
		{"", io.EOF},
		{strings.Repeat(" ", MaxPairRecord+1),
			&ValueError{"bytes of the record", MaxPairRecord + 1, fmt.Sprintf("up to %d", MaxPairRecord)}},
		{line(twice), errTwice},
		{line(newer), &ValueError{"version", 2, "1"}},
		{strings.Replace(whole, `"boot"`, `"boat"`, 1), &UnknownFieldError{"boat"}},
		{strings.Replace(whole, `"good"`, `"great"`, 1), &ValueError{"verdict", "great", ""}},
		{strings.Replace(whole, `"boot":"b"`, `"boot":7`, 1), &json.UnmarshalTypeError{Value: "number"}},
		{whole + whole, errMore},
	} {
		if _, err := ReadPairRecord([]byte(c.text)); !testutil.HasError(err, c.want) {
			t.Errorf("error %v, want %v", err, c.want)
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
