package reader

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/peerlane/peerlane/topo"
)

// twoGPUs is a host with GPUs at 1:0.0 and 2:0.0.
func twoGPUs() *topo.Host {
	return &topo.Host{Source: topo.Source{Sysfs: "/sys"}, GPUs: []topo.GPU{
		{Index: 0, BusID: "0000:01:00.0", UUID: "own", Name: "own", Minor: 7, Capability: 70,
			NVLinks: []topo.NVLink{{Count: 1}}},
		{Index: 1, BusID: "0000:02:00.0", Minor: -1}}}
}

func TestCompleteTakesFieldsOfAnswer(t *testing.T) {
	classes := map[string]string{"0000:02:00.0": "0x030200", "0000:c1:00.0": "0x068000", "0000:04:00.0": "0x068001"}
	for name, tt := range map[string]struct {
		answer topo.NVMLGPU
		want   topo.GPU
	}{
		"nothing": {topo.NVMLGPU{Minor: -1}, topo.GPU{UUID: "own", Name: "own", Minor: 7}},
		"names":   {topo.NVMLGPU{UUID: "u", Name: "n", Minor: 0}, topo.GPU{UUID: "u", Name: "n", Minor: 0}},
		"modes": {topo.NVMLGPU{Minor: -1, MIG: true, VGPU: true, ComputeMode: "prohibited", NoP2P: true, Capability: 90},
			topo.GPU{UUID: "own", Name: "own", Minor: 7, MIG: true, VGPU: true, ComputeMode: "prohibited", NoP2P: true,
				Capability: 90}},
		"links": {topo.NVMLGPU{Minor: -1, Capability: 90,
			NVLinks: map[string]int{"": 1, "00000000:02:00.0": 2, "00000000:C1:00.0": 3, "x": 4,
				"00000000:05:00.0": 5, "00000000:04:00.0": 6}, NVLinksCPU: 1},
			topo.GPU{UUID: "own", Name: "own", Minor: 7, Capability: 90, NVLinkCPU: 7 * 20.6, NVLinks: []topo.NVLink{
				{Count: 13, Bandwidth: 13 * 20.6}, {Peer: "0000:02:00.0", Count: 2, Bandwidth: 2 * 20.6}}}},
		"C2C": {topo.NVMLGPU{Minor: -1, C2C: 10, C2CBandwidth: 44712},
			topo.GPU{UUID: "own", Name: "own", Minor: 7, C2C: 447.12}},
	} {
		h := twoGPUs()
		tt.answer.BusID, tt.answer.Index = "00000000:01:00.0", 3
		tt.want.BusID, tt.want.Index = "0000:01:00.0", 3
		other := topo.NVMLGPU{BusID: "00000000:02:00.0", Index: 0, Minor: -1}
		complete(h, answer{gpus: []topo.NVMLGPU{tt.answer, other}}, func(busID string) string { return classes[busID] })
		if diff := cmp.Diff([]topo.GPU{{BusID: "0000:02:00.0", Minor: -1}, tt.want}, h.GPUs,
			cmpopts.EquateApprox(1e-12, 0)); diff != "" || h.Notes != nil {
			t.Errorf("%s: notes %q (-want +got):\n%s", name, h.Notes, diff)
		}
	}
	h := twoGPUs()
	complete(h, answer{gpus: []topo.NVMLGPU{{BusID: "00000000:01:00.0", Lost: true}}}, func(string) string { return "" })
	if h.GPUs[0].Reason == "" {
		t.Error("a lost GPU has no reason")
	}
}

func TestCompleteNumbersGPUsOutsideAnswer(t *testing.T) {
	for name, tt := range map[string]struct {
		gpus   []topo.NVMLGPU
		amd    bool
		want   map[string]int
		notes  int
		reason bool // of 2:0.0
	}{
		"both": {[]topo.NVMLGPU{{BusID: "0:2:0.0", Index: 0}, {BusID: "0:1:0.0", Index: 1}}, false,
			map[string]int{"0000:02:00.0": 0, "0000:01:00.0": 1}, 0, false},
		"one": {[]topo.NVMLGPU{{BusID: "0:1:0.0", Index: 4}}, false,
			map[string]int{"0000:01:00.0": 4, "0000:02:00.0": 5}, 1, true},
		"another maker": {[]topo.NVMLGPU{{BusID: "0:1:0.0", Index: 4}}, true,
			map[string]int{"0000:01:00.0": 4, "0000:02:00.0": 5}, 0, false},
		"an unknown GPU": {[]topo.NVMLGPU{{BusID: "0:9:0.0", Index: 8}, {BusID: "0:1:0.0", Index: 0}}, true,
			map[string]int{"0000:01:00.0": 0, "0000:02:00.0": 9}, 1, false},
		"no address": {[]topo.NVMLGPU{{BusID: "x", Index: 8}, {BusID: "0:1:0.0", Index: 0}}, true,
			map[string]int{"0000:01:00.0": 0, "0000:02:00.0": 9}, 1, false},
		"no data": {[]topo.NVMLGPU{{Index: 1, Failures: []string{"f"}}, {BusID: "0:1:0.0", Index: 0}}, true,
			map[string]int{"0000:01:00.0": 0, "0000:02:00.0": 2}, 1, false},
		"part of data": {[]topo.NVMLGPU{{BusID: "0:2:0.0", Index: 1, Failures: []string{"f"}},
			{BusID: "0:1:0.0", Index: 0}}, true, map[string]int{"0000:01:00.0": 0, "0000:02:00.0": 1}, 1, false},
	} {
		h := twoGPUs()
		if tt.amd {
			h.GPUs[1].Vendor = "AMD"
		}
		complete(h, answer{gpus: tt.gpus}, func(string) string { return "" })
		got := map[string]int{}
		for i, g := range h.GPUs {
			got[g.BusID] = g.Index
			if g.BusID == "0000:02:00.0" && (g.Reason != "") != tt.reason {
				t.Errorf("%s: reason %q", name, g.Reason)
			}
			if i > 0 && h.GPUs[i-1].Index > g.Index {
				t.Errorf("%s: GPU %d follows GPU %d", name, g.Index, h.GPUs[i-1].Index)
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" || len(h.Notes) != tt.notes {
			t.Errorf("%s: notes %q, want %d (-want +got):\n%s", name, h.Notes, tt.notes, diff)
		}
	}
	// An error beside GPUs adds a note; an error alone changes no GPU.
	for _, a := range []answer{{err: topo.ErrNoNVML}, {err: errors.New("e")},
		{err: errors.New("e"), gpus: []topo.NVMLGPU{{BusID: "0:1:0.0", Index: 5}}}} {
		h := twoGPUs()
		complete(h, a, func(string) string { return "" })
		if changed := h.GPUs[0].Index != 0; len(h.Notes) == 0 || changed != (a.gpus != nil) {
			t.Errorf("%v, %d GPUs: notes %q, %+v", a.err, len(a.gpus), h.Notes, h.GPUs)
		}
	}
}

// A capture can hold any answer; a value outside NVML's range fails.
func TestCapturedAnswerOutsideRangeFails(t *testing.T) {
	many := func(n int) []topo.NVMLGPU { return make([]topo.NVMLGPU, n) }
	one := func(g topo.NVMLGPU) []topo.NVMLGPU { return []topo.NVMLGPU{{}, g} }
	links := func(counts ...int) map[string]int {
		m := map[string]int{}
		for i, n := range counts {
			m[strings.Repeat("x", i)] = n
		}
		return m
	}
	for name, tt := range map[string]struct{ most, more []topo.NVMLGPU }{
		"GPUs": {many(4096), many(4097)},
		"failures": {one(topo.NVMLGPU{Failures: make([]string, 4096)}),
			one(topo.NVMLGPU{Failures: make([]string, 4097)})},
		"links to the CPU":       {one(topo.NVMLGPU{NVLinksCPU: 0}), one(topo.NVMLGPU{NVLinksCPU: -1})},
		"C2C links":              {one(topo.NVMLGPU{C2C: 4096}), one(topo.NVMLGPU{C2C: 4097})},
		"negative C2C":           {one(topo.NVMLGPU{C2C: 0}), one(topo.NVMLGPU{C2C: -1})},
		"C2C bandwidth":          {one(topo.NVMLGPU{C2CBandwidth: 1 << 30}), one(topo.NVMLGPU{C2CBandwidth: 1<<30 + 1})},
		"negative C2C bandwidth": {one(topo.NVMLGPU{C2CBandwidth: 0}), one(topo.NVMLGPU{C2CBandwidth: -1})},
		"NVLinks":                {one(topo.NVMLGPU{NVLinks: links(4000, 96)}), one(topo.NVMLGPU{NVLinks: links(4000, 97)})},
		"all NVLinks": {one(topo.NVMLGPU{NVLinks: links(96), NVLinksCPU: 4000}),
			one(topo.NVMLGPU{NVLinks: links(97), NVLinksCPU: 4000})},
		"negative NVLinks":    {one(topo.NVMLGPU{NVLinks: links(0)}), one(topo.NVMLGPU{NVLinks: links(-1)})},
		"index":               {one(topo.NVMLGPU{Index: 4095}), one(topo.NVMLGPU{Index: 4096})},
		"negative index":      {one(topo.NVMLGPU{Index: 0}), one(topo.NVMLGPU{Index: -1})},
		"minor":               {one(topo.NVMLGPU{Minor: 1<<20 - 1}), one(topo.NVMLGPU{Minor: 1 << 20})},
		"negative minor":      {one(topo.NVMLGPU{Minor: -1}), one(topo.NVMLGPU{Minor: -2})},
		"capability":          {one(topo.NVMLGPU{Capability: 10000}), one(topo.NVMLGPU{Capability: 10001})},
		"negative capability": {one(topo.NVMLGPU{Capability: 0}), one(topo.NVMLGPU{Capability: -1})},
	} {
		if err := (&capturedNVML{Answer: tt.most}).check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := (&capturedNVML{Answer: tt.more}).check(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for absent, want := range map[bool]bool{true: true, false: false} {
		_, err := (&capturedNVML{Error: "e", Absent: absent}).GPUs()
		if errors.Is(err, topo.ErrNoNVML) != want || errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("absent %t: %v", absent, err)
		}
	}
}

func TestEscapesCountsDirectories(t *testing.T) {
	for _, tt := range []struct {
		dir, target string
		want        bool
	}{{"/sys", "..", false}, {"/sys", "../..", true}, {"/sys/a", "../..", false}, {"/sys/a", "../../..", true},
		{"/", "..", true},
		{"/sys", "../a", false}, {"/sys", "../../a", true}, {"/sys", "a/b", false}, {"/sys/a/", "../../x", false}} {
		if got := escapes(tt.dir, tt.target); got != tt.want {
			t.Errorf("%s from %s: %t, want %t", tt.target, tt.dir, got, tt.want)
		}
	}
}

func TestCompleteNumbersSeveralGPUsOutsideAnswer(t *testing.T) {
	h := twoGPUs()
	h.GPUs = append(h.GPUs, topo.GPU{Index: 2, BusID: "0000:03:00.0"})
	complete(h, answer{gpus: []topo.NVMLGPU{{BusID: "0:2:0.0", Index: 5}}}, func(string) string { return "" })
	got := map[string]int{}
	for _, g := range h.GPUs {
		got[g.BusID] = g.Index
	}
	if diff := cmp.Diff(map[string]int{"0000:02:00.0": 5, "0000:01:00.0": 6, "0000:03:00.0": 7}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A limit of n bytes accepts n bytes of a stream, and fails for the next byte.
func TestLimitedReaderCountsBytes(t *testing.T) {
	for n, fails := range map[int64]bool{9: true, 10: true, 11: false} {
		r := &limited{r: iotest.OneByteReader(strings.NewReader("0123456789")), left: n, what: "x"}
		got, err := io.ReadAll(r)
		var limit *streamError
		if errors.As(err, &limit) != fails || len(got) != int(min(n, 10)) {
			t.Errorf("limit %d: %q, %v", n, got, err)
		}
	}
}

// Modes of the members: files, directories and links have those of sysfs.
func TestCaptureMembersHaveModes(t *testing.T) {
	var b bytes.Buffer
	c := &capturing{tar: tar.NewWriter(&b), written: map[string]bool{}}
	if err := errors.Join(c.Directory("sys/d"), c.File("sys/d/f", []byte("x")), c.Link("sys/l", "d"),
		c.tar.Close()); err != nil {
		t.Fatal(err)
	}
	want := map[string]int64{"sys/d/": 0o755, "sys/d/f": 0o644, "sys/l": 0o777}
	got := map[string]int64{}
	for r := tar.NewReader(&b); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		got[h.Name] = h.Mode
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
