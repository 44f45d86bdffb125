package picture

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
	"github.com/peerlane/peerlane/topo/recorded"
)

// builder makes synthetic hosts.
type builder struct{ h topo.Host }

func build(numas int) *builder {
	b := &builder{topo.Host{Source: topo.Source{Kind: topo.SourceNCCLXML, File: "made-up.xml"}}}
	for n := range numas {
		b.h.CPUs = append(b.h.CPUs, topo.CPU{NUMA: n, CPUs: fmt.Sprintf("%d-%d", 32*n, 32*n+31), Arch: "x86_64",
			Vendor: "GenuineIntel", Family: 6, Model: 143, Socket: 22})
	}
	return b
}

func gen(generation int) topo.Place {
	return map[int]topo.Place{
		3: {Link: 12, LinkSpeed: "8.0 GT/s PCIe", LinkWidth: 16},
		4: {Link: 24, LinkSpeed: "16.0 GT/s PCIe", LinkWidth: 16},
		5: {Link: 48, LinkSpeed: "32.0 GT/s PCIe", LinkWidth: 16},
	}[generation]
}

func under(sw string, p topo.Place) topo.Place {
	p.Switch = sw
	return p
}

func (b *builder) sw(busID, above string, numa int, p topo.Place) *builder {
	b.h.Switches = append(b.h.Switches, topo.Switch{BusID: busID, NUMA: numa, Place: under(above, p)})
	return b
}

func (b *builder) gpu(name, sw string, numa int, p topo.Place) *builder {
	i := len(b.h.GPUs)
	b.h.GPUs = append(b.h.GPUs, topo.GPU{Index: i, UUID: fmt.Sprintf("GPU-%08x-0000-0000-0000-000000000000", i),
		Name:  name,
		BusID: fmt.Sprintf("0000:%02x:00.0", 0x10+i), Minor: i, NUMA: numa, Place: under(sw, p)})
	return b
}

func (b *builder) nic(sw string, numa int, gbps float64, p topo.Place) *builder {
	i := len(b.h.NICs)
	b.h.NICs = append(b.h.NICs, topo.NIC{Name: fmt.Sprintf("mlx5_%d", i), BusID: fmt.Sprintf("0000:%02x:00.0", 0x90+i),
		NUMA: numa, Protocol: "InfiniBand",
		Place: under(sw, p), Ports: []topo.Port{{Number: 1, State: "ACTIVE", LinkLayer: "InfiniBand", RateGbps: gbps}}})
	return b
}

func (b *builder) nvswitches(links int, each float64) *builder {
	for i := range b.h.GPUs {
		b.h.GPUs[i].NVLinks = []topo.NVLink{{Count: links, Bandwidth: each * float64(links)}}
	}
	return b
}

// large returns a host of switches with gpus GPUs each. In every group of every switches, the first
// switch has a NIC.
func large(numas, switches, gpus, every int) *topo.Host {
	b := build(numas)
	for s := range switches {
		id, numa := fmt.Sprintf("00aa:%02x:00.0", s), s*numas/switches
		b.sw(id, "", numa, gen(5))
		for range gpus {
			b.gpu("NVIDIA H200", id, numa, gen(5))
		}
		if s%every == 0 {
			b.nic(id, numa, 400, gen(5))
		}
	}
	return &b.h
}

// machine is a host to draw.
type machine struct {
	name    string
	host    *topo.Host
	config  planner.Config
	picture *Picture
	svg     string
	page    string
}

const hostile = `<script>alert("x")</script>&amp;'"]]> ` + "\u202eevil\u0007"

// machines plans the machines once: planning large machines is slow.
func machines(t *testing.T) []machine {
	t.Helper()
	once.Do(func() {
		for _, m := range hosts(t) {
			m.picture = m.draw(t)
			m.svg = string(m.picture.SVG())
			page, err := m.picture.HTML()
			if err != nil {
				t.Fatalf("%s: %v", m.name, err)
			}
			m.page = string(page)
			made = append(made, m)
		}
	})
	if made == nil {
		t.Fatal("another test could not make the machines")
	}
	return made
}

var (
	once sync.Once
	made []machine
)

func hosts(t *testing.T) []machine {
	t.Helper()
	sysfs, proc, err := recorded.Unpack(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	live, err := reader.Sysfs(topo.Options{Sysfs: sysfs, Proc: proc})
	if err != nil {
		t.Fatal(err)
	}
	live.Source.Sysfs = "/sys"

	a800 := build(2)
	for s := range 4 {
		id := fmt.Sprintf("00aa:%02x:00.0", s)
		a800.sw(id, "", s/2, gen(4)).gpu("NVIDIA A800-SXM4-80GB", id, s/2, gen(4)).gpu("NVIDIA A800-SXM4-80GB", id, s/2,
			gen(4))
	}
	a800.nic("00aa:00:00.0", 0, 200, gen(4)).nic("00aa:01:00.0", 0, 200, gen(4)).nvswitches(8, 20)

	flat := build(2).gpu("NVIDIA A30", "", 0, gen(4)).gpu("NVIDIA A30", "", 0, gen(4)).gpu("NVIDIA A30", "", 1, gen(4)).
		nic("", 0, 100, gen(4)).nic("", 1, 100, gen(3))

	odd := build(3)
	odd.h.CPUs[1].Socket = 10
	odd.h.CPUs[2] = topo.CPU{NUMA: 2}
	odd.sw("00aa:00:00.0", "", 0, gen(5)).sw("00aa:01:00.0", "00aa:00:00.0", 0, gen(5)).sw("00aa:02:00.0", "00aa:01:00.0",
		0, topo.Place{Link: 12}).
		gpu(hostile, "00aa:02:00.0", 0, gen(5)).gpu("NVIDIA H100 NVL, a name that is longer than any card of a picture",
		"00aa:01:00.0", 0, topo.Place{Link: 48, LinkNow: 6, LinkSpeed: "32.0 GT/s PCIe", LinkWidth: 16}).
		gpu("", "", 1, gen(3)).gpu("NVIDIA H100", "00aa:00:00.0", 0, gen(5)).gpu("NVIDIA H100", "gone", -1,
		topo.Place{Link: 12}).
		nic("00aa:00:00.0", 0, 400, gen(5)).nic("", 1, 25, gen(3)).nic("", -1, 0, topo.Place{Link: 5000})
	odd.h.GPUs[3].Reason = "MIG is on: instances of a GPU cannot map another GPU's memory"
	odd.h.NICs[1].Name, odd.h.NICs[1].Ports[0].State = hostile, "DOWN"
	odd.h.NICs[2].Ports, odd.h.NICs[2].BusID = nil, ""
	odd.sw("00aa:0f:00.0", "", 1, gen(5)) // an empty switch
	odd.h.Notes = []string{hostile, strings.Repeat("a long note that has to be wrapped ", 12)}

	matrix, err := reader.Input("matrix.txt", []byte("\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\n"+
		"GPU0\t X \tPIX\tSYS\tPIX\tSYS\nGPU1\tPIX\t X \tSYS\tPIX\tSYS\nGPU2\tSYS\tSYS\t X \tSYS\tNODE\n"+
		"NIC0\tPIX\tPIX\tSYS\t X \tSYS\nNIC1\tSYS\tSYS\tNODE\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"))
	if err != nil {
		t.Fatal(err)
	}

	all := []machine{
		{name: "eight GPUs and two NICs", host: live},
		{name: "two GPUs", host: large(1, 1, 2, 1)},
		{name: "four GPUs", host: large(2, 2, 2, 2)},
		{name: "eight GPUs with NVSwitches", host: &a800.h},
		{name: "sixteen GPUs", host: large(2, 8, 2, 4)},
		{name: "sixteen GPUs and sixteen NICs", host: large(4, 16, 1, 1)},
		{name: "no switches", host: &flat.h},
		{name: "an odd tree", host: &odd.h, config: planner.Config{Lanes: []planner.Assignment{{GPU: "2",
			Servers: []string{"1"}, NICs: []string{"emulated0"}}}}},
		{name: "a matrix", host: matrix},
		{name: "ninety-six GPUs", host: large(8, 24, 4, 3)},
	}
	files, err := filepath.Glob("../graph/testdata/nccl/*.xml")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files of NCCL: %v", len(files), err)
	}
	for _, path := range append(files, "../reader/testdata/recorded-hwloc.xml") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		h, err := reader.Input(path, text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, machine{name: filepath.Base(path), host: h})
	}
	for i := range all {
		all[i].config.GDR.MaxPath = topo.PXB
	}
	return all
}

// draw lays out a machine; a machine of a single host has lanes.
func (m machine) draw(t *testing.T) *Picture {
	t.Helper()
	p, err := planner.Make(m.host, m.config)
	if several := new(planner.SeveralHostsError); errors.As(err, &several) {
		return New(m.host, nil, nil)
	}
	if err != nil {
		t.Fatalf("%s: %v", m.name, err)
	}
	e, err := p.Estimate(m.host)
	if err != nil && !errors.Is(err, planner.ErrNoBandwidths) {
		t.Fatalf("%s: %v", m.name, err)
	}
	return New(m.host, p, e)
}
