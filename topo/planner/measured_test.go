package planner

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// rootPorts is a host with a near GPU below the switch of the NIC, and a far GPU at another
// root port. Copies between the two GPUs pass the CPU.
func rootPorts() *topo.Host {
	b := topotest.Build(1)
	b.Sw("00aa:00:00.0", 0, "pci0000:10", "")
	b.GPU(0, "pci0000:10", "00aa:00:00.0").GPU(0, "pci0000:20", "")
	b.NIC("mlx5_0", 0, "pci0000:10", "00aa:00:00.0", topotest.Up(400))
	return b.Gen(24).Host()
}

func measuredOf(h *topo.Host, copies, memory float64) *topo.Measured {
	return &topo.Measured{
		Fingerprint: h.Fingerprint(), At: 1,
		Copies: []topo.MeasuredCopy{{GPU: h.GPUs[1].BusID, Peer: h.GPUs[0].BusID, Out: copies, In: copies}},
		Memory: []topo.MeasuredHost{{GPU: h.GPUs[1].BusID, Out: memory, In: memory + 1}},
	}
}

func TestMeasuredFiguresReplaceConstants(t *testing.T) {
	h := rootPorts()
	far := func(server int) carried { return carried{gpu: 1, parts: []part{{server, 0, 1}}} }
	rate := func(h *topo.Host, c carried) float64 { return newNetwork(sortedHost(h)).rates([]carried{c}).alone[0] }
	if got := rate(h, far(throughMemory)); got != 16 {
		t.Fatalf("through host memory the constant gives %g GB/s, want 16", got)
	}
	if got := rate(h, far(0)); got >= 12.1 {
		t.Fatalf("a staged lane gets %g GB/s", got)
	}
	if !h.Measure(measuredOf(h, 5, 9)) {
		t.Fatal("what was measured on the host is not taken")
	}
	if got := rate(h, far(throughMemory)); got != 9 {
		t.Errorf("through host memory measured at 9 GB/s: %g", got)
	}
	if got := rate(h, far(0)); got != 5 {
		t.Errorf("staged over copies measured at 5 GB/s: %g", got)
	}
	p, err := Make(h, Config{Lanes: []Assignment{{GPU: "1", Servers: []string{"0"}, NICs: []string{"mlx5_0"}}}})
	if err != nil {
		t.Fatal(err)
	}
	links := p.ModelLinks(h)
	want := []ModelLink{{"host memory of NUMA node 0", 9, SourceMeasured},
		{"copies between GPU 1 and GPU 0", 5, SourceMeasured}}
	if !slices.Equal(links, want) {
		t.Errorf("the links are %+v, want %+v", links, want)
	}
	e, err := p.Estimate(h)
	if err != nil {
		t.Fatal(err)
	}
	if limit := e.GPUs[1].Limit; !strings.Contains(limit, "(measured)") {
		t.Errorf("GPU 1 is limited by %q", limit)
	}
	h.Measured = nil
	if links := p.ModelLinks(h); len(links) != 2 || links[0].Source != SourceConstant ||
		links[1].Source != SourceConstant {
		t.Errorf("without a measurement the links are %+v", links)
	}
}

func TestMeasuredDirectionsHaveSeparateLimits(t *testing.T) {
	h := rootPorts()
	m := measuredOf(h, 5, 9)
	m.Copies[0].In = 7
	h.Measure(m)
	n := newNetwork(sortedHost(h))
	for name, tt := range map[string]struct {
		server        int
		send, receive float64
	}{"staged": {0, 5, 7}, "through host memory": {throughMemory, 9, 10}} {
		c := []carried{{gpu: 1, parts: []part{{tt.server, 0, 1}}}}
		if sent, received := n.apart(c, nil); sent[0] != tt.send || len(received) != 0 {
			t.Errorf("%s: %v GB/s are sent, want %g", name, sent, tt.send)
		}
		if _, received := n.apart(nil, c); received[0] != tt.receive {
			t.Errorf("%s: %v GB/s are received, want %g", name, received, tt.receive)
		}
		if both := n.rates(c).alone[0]; both != min(tt.send, tt.receive) {
			t.Errorf("%s: %g GB/s go both ways", name, both)
		}
	}
}

func TestMeasurementCanChangeKindOfLane(t *testing.T) {
	kind := func(m *topo.Measured, h *topo.Host) string {
		t.Helper()
		h.Measure(m)
		p, err := Make(h, Config{})
		if err != nil {
			t.Fatal(err)
		}
		return p.Lanes[1].Kind
	}
	h := rootPorts()
	if got := kind(measuredOf(h, 22, 2), h); got != KindStaged {
		t.Errorf("with fast copies and slow memory the lane is %s", got)
	}
	h = rootPorts()
	if got := kind(measuredOf(h, 1, 22), h); got != KindBounce {
		t.Errorf("with slow copies and fast memory the lane is %s", got)
	}
}

func TestMeasurementOfOtherHostIsIgnored(t *testing.T) {
	h := rootPorts()
	m := measuredOf(h, 5, 9)
	changes := map[string]func(h *topo.Host){
		"a GPU elsewhere": func(h *topo.Host) { h.GPUs[1].Switch = h.GPUs[0].Switch },
		"another GPU":     func(h *topo.Host) { h.GPUs[1].UUID = "GPU-x" },
		"a slower link":   func(h *topo.Host) { h.GPUs[1].Link /= 2 },
		"no NIC":          func(h *topo.Host) { h.NICs = nil },
		"another CPU":     func(h *topo.Host) { h.CPUs[0].Model++ },
	}
	for name, change := range changes {
		other := rootPorts()
		change(other)
		if other.Measure(m) || other.Measured != nil {
			t.Errorf("%s: the measurement is taken", name)
		}
	}
	same := rootPorts()
	same.NICs[0].Ports[0].State = "DOWN"
	same.Notes = append(same.Notes, "a note")
	if !same.Measure(m) {
		t.Error("a port that is down makes another host")
	}
	if same.Measure(nil) {
		t.Error("no measurement is taken")
	}
}

func TestParseMeasuredRefusesInvalidFigures(t *testing.T) {
	text, err := json.Marshal(measuredOf(rootPorts(), 5, 9))
	if err != nil {
		t.Fatal(err)
	}
	if m, err := topo.ParseMeasured(text); err != nil || len(m.Copies) != 1 || len(m.Memory) != 1 {
		t.Errorf("%+v, %v", m, err)
	}
	for _, text := range []string{"", "[]", `{"copies":[{"gpu":"a","peer":"b","out":-1,"in":1}]}`,
		`{"copies":[{"gpu":"a","out":1}]}`, `{"memory":[{"gpu":"a","out":1e300,"in":1}]}`} {
		if m, err := topo.ParseMeasured([]byte(text)); err == nil {
			t.Errorf("%s is read as %+v", text, m)
		}
	}
}

func TestPlanNotesThatConstantsDecideACloseCall(t *testing.T) {
	noted := func(h *topo.Host) bool {
		p, err := Make(h, Config{})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(strings.Join(p.Notes, "\n"), "peerlane plan --measure")
	}
	h := rootPorts() // 11 to 12 GB/s staged, 16 through host memory
	p := &planner{host: h}
	lanes := []Lane{{}, {Compared: &Comparison{Relay: 10, Without: 12}}, {Compared: &Comparison{Relay: 10, Without: 20}},
		{Compared: &Comparison{Relay: 5, Without: 5, RelayAlone: 10, WithoutAlone: 11}}}
	if got := p.closeCalls(lanes); !slices.Equal(got, []int{1, 3}) {
		t.Errorf("close are %v", got)
	}
	h.Measure(measuredOf(h, 5, 9))
	if got := p.closeCalls(lanes); got != nil || noted(h) {
		t.Errorf("of a host that was measured, constants decide %v", got)
	}
}
