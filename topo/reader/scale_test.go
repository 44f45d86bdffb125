package reader

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// grow creates a host with the given number of PCI functions. gpus functions are GPUs, and half as
// many are RDMA NICs. A switch has a GPU, or a GPU and a NIC. The rest are functions without
// effect on the topology. Sockets share the switches. If functions is too small for a switch per
// GPU, eight GPUs share a switch. The host also has the files that hwloc reads, for comparison.
func grow(t testing.TB, to Recorder, functions, gpus int) {
	t.Helper()
	write := func(at, text string) {
		if err := to.File(at, []byte(text+"\n")); err != nil {
			t.Fatal(err)
		}
	}
	link := func(at, target string) {
		if err := to.Link(at, target); err != nil {
			t.Fatal(err)
		}
	}
	left, total := functions, 0
	function := func(above string, domain, bus, dev, fn, numa int, class, vendor string) string {
		name := fmt.Sprintf("%04x:%02x:%02x.%x", domain, bus, dev, fn)
		at := filepath.Join(above, name)
		dir := "sys/devices/" + at
		for attribute, text := range map[string]string{
			"class": class, "vendor": vendor, "device": "0x1021", "subsystem_vendor": vendor, "subsystem_device": "0x0041",
			"revision":  "0x00",
			"numa_node": fmt.Sprint(numa), "local_cpulist": fmt.Sprint(numa), "local_cpus": fmt.Sprintf("%08x", 1<<numa),
			"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe", "current_link_width": "16",
			"max_link_width": "16",
			"resource":       "0x0000000000000000 0x0000000000000000 0x0000000000000000",
		} {
			write(dir+"/"+attribute, text)
		}
		config := make([]byte, 256)
		if strings.HasPrefix(class, "0x0604") {
			config[0x0e] = 1 // a bridge, which hwloc wants to know the buses of
			config[0x18], config[0x19], config[0x1a] = byte(bus), byte(bus+1), 0xff
		}
		write(dir+"/config", string(config))
		link("sys/bus/pci/devices/"+name, "../../../devices/"+at)
		left--
		total++
		return at
	}
	const sockets = 2
	for n := range sockets {
		write(fmt.Sprintf("sys/devices/system/node/node%d/cpulist", n), fmt.Sprint(n))
		write(fmt.Sprintf("sys/devices/system/node/node%d/cpumap", n), fmt.Sprintf("%08x", 1<<n))
		write(fmt.Sprintf("sys/devices/system/node/node%d/meminfo", n), fmt.Sprintf("Node %d MemTotal: 1048576 kB", n))
		write(fmt.Sprintf("sys/devices/system/node/node%d/distance", n), []string{"10 21", "21 10"}[n])
		for name, text := range map[string]string{
			"physical_package_id": fmt.Sprint(n), "core_id": "0", "core_siblings": fmt.Sprintf("%08x", 1<<n),
			"package_cpus":    fmt.Sprintf("%08x", 1<<n),
			"thread_siblings": fmt.Sprintf("%08x", 1<<n), "core_cpus": fmt.Sprintf("%08x", 1<<n),
		} {
			write(fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/%s", n, name), text)
		}
	}
	for _, name := range []string{"online", "possible", "present"} {
		write("sys/devices/system/cpu/"+name, "0-1")
		write("sys/devices/system/node/"+name, "0-1")
	}
	write("proc/cpuinfo", "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nphysical id\t: "+
		"0\n\nprocessor\t: 1\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nphysical id\t: 1\n")
	write("proc/mounts", "")

	each := 1 // GPUs of a switch
	if functions < 7*gpus {
		each = 8
	}
	others := max(0, (functions-7*gpus)/gpus+1) // functions without effect, per switch
	nics := 0
	var bridge, up string
	for i := range gpus {
		// Every switch has a PCI domain: a domain has few buses.
		domain, slot := i/each, i%each
		numa := domain % sockets
		if slot == 0 {
			bridge = fmt.Sprintf("pci%04x:10", domain)
			port := function(bridge, domain, 0x10, 0, 0, numa, "0x060400", "0x8086")
			up = function(port, domain, 0x11, 0, 0, numa, "0x060400", "0x1000")
		}
		down := function(up, domain, 0x12, 2*slot, 0, numa, "0x060400", "0x1000")
		gpu := filepath.Base(function(down, domain, 0x20+2*slot, 0, 0, numa, "0x030200", "0x10de"))
		write("proc/driver/nvidia/gpus/"+gpu+"/information",
			fmt.Sprintf("Model: \t NVIDIA H200\nGPU UUID: \t GPU-00000000-0000-0000-0000-%012x\nDevice Minor: \t %d", i, i))
		if i%2 == 0 {
			down = function(up, domain, 0x12, 2*slot+1, 0, numa, "0x060400", "0x1000")
			at := function(down, domain, 0x21+2*slot, 0, 0, numa, "0x020700", "0x15b3")
			name := fmt.Sprintf("mlx5_%d", nics)
			nics++
			dir := "sys/devices/" + at + "/infiniband/" + name
			write(dir+"/node_guid", fmt.Sprintf("a088:c203:00a1:%04x", i))
			for attribute, text := range map[string]string{"state": "4: ACTIVE", "phys_state": "5: LinkUp",
				"rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"} {
				write(dir+"/ports/1/"+attribute, text)
			}
			link(dir+"/device", "../../../"+filepath.Base(at))
			link("sys/class/infiniband/"+name, "../../devices/"+at+"/infiniband/"+name)
			verbs := fmt.Sprintf("uverbs%d", nics)
			write("sys/devices/"+at+"/infiniband_verbs/"+verbs+"/ibdev", name)
			link("sys/class/infiniband_verbs/"+verbs, "../../devices/"+at+"/infiniband_verbs/"+verbs)
		}
		for n := 0; n < others && (left > 7*(gpus-1-i) || i == gpus-1) && left > 0; n++ {
			function(bridge, domain, 0x40+n/256, n/8%32, n%8, numa, "0x088000", "0x8086")
		}
	}
	for n := 0; left > 0; n++ {
		function("pciffff:00", 0xffff, n/256, n/8%32, n%8, 0, "0x088000", "0x8086")
	}
	if total != functions {
		t.Fatalf("%d functions were made, not %d", total, functions)
	}
}

// disk is a Recorder that writes files.
type disk struct {
	root string
	made map[string]bool
}

func (d disk) Directory(p string) error {
	if d.made[p] {
		return nil
	}
	d.made[p] = true
	return os.MkdirAll(filepath.Join(d.root, p), 0o755)
}

func (d disk) File(p string, data []byte) error {
	if err := d.Directory(filepath.Dir(p)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(d.root, p), data, 0o644)
}

func (d disk) Link(p, target string) error {
	if err := d.Directory(filepath.Dir(p)); err != nil {
		return err
	}
	return os.Symlink(target, filepath.Join(d.root, p))
}

// grown returns a grown host on disk: in a directory of the test, or below PEERLANE_TEST_GROWN to
// time commands.
func grown(t testing.TB, functions, gpus int) topo.Options {
	t.Helper()
	root := t.TempDir()
	if keep := os.Getenv("PEERLANE_TEST_GROWN"); keep != "" {
		root = filepath.Join(keep, fmt.Sprintf("%d-%d", functions, gpus))
	}
	if _, err := os.Stat(filepath.Join(root, "sys")); err != nil {
		grow(t, disk{root, map[string]bool{}}, functions, gpus)
	}
	return topo.Options{Sysfs: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc")}
}

// grownCapture is a capture of a grown host.
func grownCapture(t testing.TB, functions, gpus int) []byte {
	t.Helper()
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	c := &capturing{tar: tar.NewWriter(z), written: map[string]bool{}}
	if err := c.header(nil); err != nil {
		t.Fatal(err)
	}
	grow(t, c, functions, gpus)
	if err := errors.Join(c.tar.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// sizes are the sizes in docs/benchmarks.md: a machine that grows by functions other than GPUs,
// and a machine that grows by GPUs and other functions.
var sizes = []struct{ functions, gpus int }{{60, 8}, {256, 8}, {4096, 8}, {256, 16}, {4096, 256}, {4096, 1024}}

func BenchmarkReadSysfs(b *testing.B) {
	for _, s := range sizes {
		b.Run(fmt.Sprintf("functions=%d/gpus=%d", s.functions, s.gpus), func(b *testing.B) {
			o := grown(b, s.functions, s.gpus)
			b.ReportAllocs()
			for b.Loop() {
				h, err := Sysfs(o)
				if err != nil || len(h.GPUs) != s.gpus || len(h.NICs) != (s.gpus+1)/2 {
					b.Fatalf("%v, %v", h, err)
				}
			}
		})
	}
}

// benchmarkHosts calls compute in a loop for a host of each size.
func benchmarkHosts(b *testing.B, compute func(*topo.Host)) {
	for _, s := range sizes {
		b.Run(fmt.Sprintf("functions=%d/gpus=%d", s.functions, s.gpus), func(b *testing.B) {
			h, err := hostOfCapture(bytes.NewReader(grownCapture(b, s.functions, s.gpus)))
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				compute(h)
			}
		})
	}
}

// BenchmarkPaths computes the paths of every pair. The number of pairs is the square of the number
// of devices.
func BenchmarkPaths(b *testing.B) {
	benchmarkHosts(b, func(h *topo.Host) { graph.All(h, topo.RulesNCCL) })
}

func BenchmarkReadCapture(b *testing.B) {
	for _, s := range sizes {
		b.Run(fmt.Sprintf("functions=%d/gpus=%d", s.functions, s.gpus), func(b *testing.B) {
			captured := grownCapture(b, s.functions, s.gpus)
			b.ReportMetric(float64(len(captured)), "bytes")
			b.ReportAllocs()
			for b.Loop() {
				if _, err := hostOfCapture(bytes.NewReader(captured)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// The capture of a host with 4,096 functions is readable below the limits, in bounded memory.
func TestReadCaptureLargestHostStaysBelowLimits(t *testing.T) {
	captured := grownCapture(t, 4096, 64)
	var h *topo.Host
	used := topotest.AllocatedBytes(func() {
		var err error
		if h, err = hostOfCapture(bytes.NewReader(captured)); err != nil {
			t.Fatal(err)
		}
	})
	if len(h.GPUs) != 64 || len(h.NICs) != 32 {
		t.Errorf("%d GPUs and %d NICs are read, of 64 and 32", len(h.GPUs), len(h.NICs))
	}
	if len(captured) > maxCapture/4 {
		t.Errorf("the capture has %d bytes", len(captured))
	}
	if used > 400<<20 {
		t.Errorf("hostOfCapture allocates %d MiB", used>>20)
	}
}

// BenchmarkPathTable computes only the types and bandwidths, for tables.
func BenchmarkPathTable(b *testing.B) {
	benchmarkHosts(b, func(h *topo.Host) { graph.NewTable(h, topo.RulesNCCL) })
}

// Memory for the paths between hundreds of devices is bounded: a table needs the memory of the
// cells, and a walk over the pairs allocates garbage in proportion to the text.
func TestPathsOfLargeHostTakeLittleMemory(t *testing.T) {
	h, err := hostOfCapture(bytes.NewReader(grownCapture(t, 1792, 256)))
	if err != nil {
		t.Fatal(err)
	}
	var table *graph.Table
	if used := topotest.AllocatedBytes(func() { table = graph.NewTable(h, topo.RulesNCCL) }); used > 2<<20 {
		t.Errorf("a table allocates %d KiB", used>>10)
	}
	pairs := 0
	used := topotest.AllocatedBytes(func() {
		for range graph.Each(h, topo.RulesNCCL) {
			pairs++
		}
	})
	if used > 40<<20 {
		t.Errorf("a walk over the pairs allocates %d KiB", used>>10)
	}
	if pairs != 384*383 || len(table.Row(383)) != 384 {
		t.Errorf("there are %d pairs, and %d in a row", pairs, len(table.Row(383)))
	}
}

func TestPathTableOfLargeHostIsSmall(t *testing.T) {
	h, err := hostOfCapture(bytes.NewReader(grownCapture(t, 1792, 256)))
	if err != nil {
		t.Fatal(err)
	}
	var table *graph.PathTable
	if used := topotest.AllocatedBytes(func() { table = graph.NewPathTable(h, topo.RulesNCCL) }); used > 16<<20 {
		t.Errorf("the table allocates %d KiB", used>>10)
	}
	if len(table.Paths) > 1500 || table.Devices() != 384 {
		t.Errorf("%d ways between %d devices", len(table.Paths), table.Devices())
	}
}
