package planner

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// crowded are hosts with many GPUs and equally many NICs of different rates: no shortcut of the
// planner applies.
var crowded = []struct {
	name string
	make func(gpus int) *topo.Host
}{
	{"all at root ports", func(gpus int) *topo.Host {
		return crowd(gpus, func(b *topotest.Builder, i int) (gpu, nic string) { return "", "" })
	}},
	{"four GPUs and NICs at a switch", func(gpus int) *topo.Host {
		return crowd(gpus, func(b *topotest.Builder, i int) (gpu, nic string) {
			sw := fmt.Sprintf("00aa:%02x:00.0", i/4)
			if i%4 == 0 {
				b.Sw(sw, i%8/4, fmt.Sprintf("pci%04x:00", i/4), "")
			}
			return sw, sw
		})
	}},
	{"NICs at every fourth switch", func(gpus int) *topo.Host {
		return crowd(gpus, func(b *topotest.Builder, i int) (gpu, nic string) {
			sw := fmt.Sprintf("00aa:%02x:00.0", i/4)
			if i%4 == 0 {
				b.Sw(sw, i%8/4, fmt.Sprintf("pci%04x:00", i/4), "")
			}
			return sw, fmt.Sprintf("00aa:%02x:00.0", i/16*4)
		})
	}},
	{"one near GPU in sixteen, NVSwitches", func(gpus int) *topo.Host {
		h := crowd(gpus, func(b *topotest.Builder, i int) (gpu, nic string) {
			sw := fmt.Sprintf("00aa:%02x:00.0", i/16)
			if i%16 == 0 {
				b.Sw(sw, i%32/16, fmt.Sprintf("pci%04x:00", i/16), "")
				return sw, sw
			}
			return "", sw
		})
		return (&topotest.Builder{H: *h}).Nvswitches().Host()
	}},
}

// crowd makes a host with GPUs and equally many NICs on two NUMA nodes. place returns the
// switches of the GPU and the NIC of an index.
func crowd(gpus int, place func(b *topotest.Builder, i int) (gpu, nic string)) *topo.Host {
	r := rand.New(rand.NewPCG(1, uint64(gpus)))
	b := topotest.Build(2)
	for i := range gpus {
		gpu, nic := place(b, i)
		numa := i % 2
		b.GPU(numa, fmt.Sprintf("pci%04x:00", i), gpu)
		g := &b.H.GPUs[i]
		g.BusID = fmt.Sprintf("%04x:01:00.0", 1+i)
		b.NIC(fmt.Sprintf("mlx5_%d", i), numa, fmt.Sprintf("pci%04x:00", i), nic, topotest.Up(25+float64(r.IntN(3750))/10))
		b.H.NICs[i].BusID = fmt.Sprintf("%04x:02:00.0", 1+i)
	}
	return b.Host()
}

// hostOfNodes is a host with the given number of NUMA nodes, eight GPUs and four NICs.
func hostOfNodes(nodes int) *topo.Host {
	b := topotest.Build(nodes)
	for i := range 8 {
		b.GPU(i*nodes/8, fmt.Sprintf("pci%04x:00", i), "")
		if i%2 == 0 {
			b.NIC(fmt.Sprintf("mlx5_%d", i/2), i*nodes/8, fmt.Sprintf("pci%04x:80", i), "", topotest.Up(400))
		}
	}
	return b.Host()
}

func BenchmarkPlan(b *testing.B) {
	for _, gpus := range []int{8, 64, 256} {
		for _, c := range crowded {
			b.Run(fmt.Sprintf("%s/gpus=%d", c.name, gpus), func(b *testing.B) {
				h := c.make(gpus)
				b.ReportAllocs()
				for b.Loop() {
					p, err := Make(h, Config{})
					if err != nil {
						b.Fatal(err)
					}
					if _, err := p.Estimate(h); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkNodes measures hosts with many NUMA nodes.
func BenchmarkNodes(b *testing.B) {
	for _, nodes := range []int{2, 64, 256, 1024} {
		h := hostOfNodes(nodes)
		for _, what := range []struct {
			name string
			do   func() error
		}{
			{"table", func() error { graph.NewTable(h, topo.RulesNCCL); return nil }},
			{"paths", func() error { graph.All(h, topo.RulesNCCL); return nil }},
			{"plan", func() error { _, err := Make(h, Config{}); return err }},
		} {
			b.Run(fmt.Sprintf("%s/nodes=%d", what.name, nodes), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if err := what.do(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// Every pair of NUMA nodes has a link. The table of a host of a thousand nodes does not store a
// million links.
func TestLinksOfAThousandNUMANodesTakeLittleMemory(t *testing.T) {
	h := hostOfNodes(1024)
	if used := topotest.AllocatedBytes(func() { graph.NewTable(h, topo.RulesNCCL) }); used > 2<<20 {
		t.Errorf("a table of paths allocates %d KiB", used>>10)
	}
}
