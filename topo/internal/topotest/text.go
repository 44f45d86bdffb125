package topotest

import (
	_ "embed" // SMIMatrix
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/peerlane/peerlane/topo"
)

// Plain excludes names of devices and processors and texts of link speeds from a comparison.
var Plain = cmp.Options{
	cmpopts.IgnoreFields(topo.CPU{}, "Arch", "Vendor", "Family", "Model"),
	cmpopts.IgnoreFields(topo.Place{}, "LinkSpeed", "LinkWidth"),
	cmpopts.IgnoreFields(topo.PCIIdentity{}, "Class"),
	cmpopts.IgnoreFields(topo.GPU{}, "Device"),
	cmpopts.IgnoreFields(topo.NIC{}, "Device", "SystemGUID"),
}

// Topologies is the folder of topology files of real machines, with NCCL's results for each
// file. A checkout may lack the folder.
const Topologies = "../../../shared/topologies"

// SmallHost has two GPUs and a NIC below a switch, a GPU below a second-level switch, a GPU at the
// same CPU, and a GPU at the other CPU.
const SmallHost = `<?xml version="1.0"?>
<!-- a comment -->
<system version="1">
  <cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:02:00.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90"/></pci>
      <pci busid="0000:03:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="8"><gpu dev="1" sm="90"><nvlink target="0000:07:00.0" count="2" tclass="0x030200"/></gpu></pci>
      <pci busid="0000:04:00.0" class="0x020700" vendor="0x15b3" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1" guid="0x1234"/></nic>
      </pci>
      <pci busid="0000:05:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
        <pci busid="0000:06:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="2" sm="90"/></pci>
      </pci>
    </pci>
    <pci busid="0000:07:00.0" class="0x030200" link_speed="" link_width="0"><gpu dev="3" sm="90"><nvlink target="0000:03:00.0" count="2" tclass="0x030200"/></gpu></pci>
    <nic><net name="eth0" dev="1" speed="100000" port="0" guid="0x0"/></nic>
  </cpu>
  <cpu numaid="1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:81:00.0" class="0x030200" link_speed="32 GT/s" link_width="16"><gpu dev="4" sm="90"/></pci>
  </cpu>
</system>`

// Bridge returns a <pci> element with children; identity is vendor, device,
// subsystem_vendor and subsystem_device.
func Bridge(busID, identity, inner string) string {
	f := strings.Fields(identity)
	return fmt.Sprintf(`<pci busid="%s" class="0x060400" vendor="%s" device="%s" subsystem_vendor="%s" subsystem_device="%s" link_speed="16.0 GT/s PCIe" link_width="16">%s</pci>`,
		busID, f[0], f[1], f[2], f[3], inner)
}

func GPUXML(busID string, dev int, inner string) string {
	return fmt.Sprintf(`<pci busid="%s" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="%d" sm="90" rank="%d" gdr="1">%s</gpu></pci>`, busID, dev, dev, inner)
}

func NetXML(busID, name string) string {
	return fmt.Sprintf(`<pci busid="%s" class="0x020700" vendor="0x15b3" link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="%s" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic></pci>`, busID, name)
}

func System(cpus ...string) string {
	return `<system version="1">` + strings.Join(cpus, "\n") + `</system>`
}

func CPUXML(numa int, inner ...string) string {
	return fmt.Sprintf(`<cpu numaid="%d" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">%s</cpu>`, numa,
		strings.Join(inner, "\n"))
}

// AllocatedBytes returns the bytes that a function allocates, freed bytes included.
func AllocatedBytes(what func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	what()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// SMIMatrix is the matrix of a current driver, without colours.
//
//go:embed testdata/smi-three-gpus.txt
var SMIMatrix string

const SMILegend = `
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_10
  NIC1: mlx5_2
`

// Files returns the files of the tree that match the pattern own, relative to the package of the
// test, and the files in Topologies that match the pattern collected, if the folder exists. The test
// fails without a file of the tree.
func Files(t *testing.T, own, collected string) []string {
	t.Helper()
	files, err := filepath.Glob(own)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatalf("no file matches %s", own)
	}
	more, err := filepath.Glob(filepath.Join(Topologies, collected))
	if err != nil {
		t.Fatal(err)
	}
	return append(files, more...)
}

// AddSeeds adds texts to the seeds of a fuzz test, and the files in
// Topologies with matching names, if the folder exists.
func AddSeeds(f *testing.F, pattern string, texts ...string) {
	f.Helper()
	for _, text := range texts {
		f.Add([]byte(text))
	}
	files, err := filepath.Glob(filepath.Join(Topologies, pattern))
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
}

// CheckNumbers fails the test if a GPU or NUMA node has a number outside the bounds.
func CheckNumbers(t *testing.T, h *topo.Host) {
	for _, c := range h.CPUs {
		if err := topo.CheckNUMA(c.NUMA); err != nil {
			t.Error(err)
		}
	}
	for _, g := range h.GPUs {
		if err := errors.Join(topo.CheckIndex(g.Index), topo.CheckNUMA(g.NUMA)); err != nil {
			t.Error(err)
		}
	}
}
