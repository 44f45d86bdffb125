package planner

import (
	"encoding/json"
	"math"
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

func TestMeasuredLoopbackReplacesConstants(t *testing.T) {
	h := rootPorts()
	rate := func(gpu, server int) float64 {
		return newNetwork(sortedHost(h)).rates([]carried{{gpu: gpu, parts: []part{{server, 0, 1}}}}).alone[0]
	}
	if got := rate(1, 1); math.Abs(got-11) > 1e-9 {
		t.Fatalf("GPUDirect RDMA through the CPU has the constant %g GB/s, want 11", got)
	}
	m := &topo.Measured{Fingerprint: h.Fingerprint(), Loops: []topo.MeasuredLoop{
		{NIC: "mlx5_0", Out: 13, In: 14}, {NIC: "mlx5_0", GPU: h.GPUs[1].BusID, Out: 9, In: 8},
		// below one switch: no constant to replace
		{NIC: "mlx5_0", GPU: h.GPUs[0].BusID, Out: 3, In: 3},
		{NIC: "mlx5_7", Out: 1, In: 1}, {NIC: "mlx5_0", GPU: "0000:ff:00.0", Out: 1, In: 1}, // not of this host
	}}
	if !h.Measure(m) {
		t.Fatal("a measurement of this host is refused")
	}
	for _, c := range []struct {
		name        string
		gpu, server int
		want        float64
	}{
		{"GPUDirect RDMA through the CPU", 1, 1, 8}, {"through host memory", 1, throughMemory, 13},
		{"below the switch", 0, 0, 24},
	} {
		if got := rate(c.gpu, c.server); got != c.want {
			t.Errorf("%s: %g GB/s, want %g", c.name, got, c.want)
		}
	}
	p, err := Make(h, Config{})
	if err != nil {
		t.Fatal(err)
	}
	var loops []ModelLink
	for _, l := range p.ModelLinks(h) {
		if strings.HasPrefix(l.Name, "mlx5_0 and") || strings.HasPrefix(l.Name, "host memory") {
			loops = append(loops, l)
		}
	}
	want := []ModelLink{{"host memory of NUMA node 0", 13, SourceMeasured}, {"mlx5_0 and host memory", 13, SourceMeasured},
		{"mlx5_0 and memory of GPU 1", 8, SourceMeasured}}
	if !slices.Equal(loops, want) {
		t.Errorf("the links are %+v, want %+v", loops, want)
	}
	// Of two GPUs with different rates, the NIC carries no more than the best in all.
	m.Loops = append(m.Loops, topo.MeasuredLoop{NIC: "mlx5_0", GPU: h.GPUs[0].BusID, Out: 1, In: 1})
	n := newNetwork(sortedHost(h))
	both := n.rates([]carried{{gpu: 1, parts: []part{{1, 0, 1}}}, {gpu: 1, parts: []part{{1, 0, 1}}}})
	if both.busy[0] != 4 || !strings.Contains(both.limit[0], "mlx5_0 and memory of GPUs through the CPU (") {
		t.Errorf("two flows: %v by %q, want 4 GB/s each", both.busy, both.limit[0])
	}
}

func TestMeasuredAddKeepsEarlierRates(t *testing.T) {
	m := &topo.Measured{Copies: []topo.MeasuredCopy{{GPU: "a", Peer: "b", Out: 1, In: 1}},
		Memory: []topo.MeasuredHost{{GPU: "a", Out: 1, In: 1}},
		Loops:  []topo.MeasuredLoop{{NIC: "x", Out: 1, In: 1}}}
	m.Add(&topo.Measured{
		Copies: []topo.MeasuredCopy{{GPU: "a", Peer: "b", Out: 2, In: 2}, {GPU: "b", Peer: "a", Out: 3, In: 3}},
		Memory: []topo.MeasuredHost{{GPU: "a", Out: 2, In: 2}, {GPU: "b", Out: 3, In: 3}},
		Loops:  []topo.MeasuredLoop{{NIC: "x", Out: 2, In: 2}, {NIC: "x", GPU: "a", Out: 3, In: 3}},
	})
	if len(m.Copies) != 2 || m.Copies[0].Out != 1 || m.Copies[1].Out != 3 || len(m.Memory) != 2 || m.Memory[0].Out != 1 ||
		len(m.Loops) != 2 || m.Loops[0].Out != 1 || m.Loops[1].GPU != "a" {
		t.Errorf("together they are %+v", m)
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
		if sent, received := n.separateRates(c, nil); sent[0] != tt.send || len(received) != 0 {
			t.Errorf("%s: %v GB/s are sent, want %g", name, sent, tt.send)
		}
		if _, received := n.separateRates(nil, c); received[0] != tt.receive {
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
		`{"copies":[{"gpu":"a","out":1}]}`, `{"memory":[{"gpu":"a","out":1e300,"in":1}]}`,
		`{"loops":[{"nic":"a","out":1}]}`} {
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
