package ncclxml_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/bandwidths"
	"github.com/peerlane/peerlane/topo/internal/cpuset"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/internal/topotest/kernelhost"
	"github.com/peerlane/peerlane/topo/internal/topotest/ncclfile"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

// write returns h as a file of NCCL, without the bound on elements.
func write(t *testing.T, h *topo.Host) string {
	t.Helper()
	text, err := ncclxml.WriteUnbounded(h)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// builtTrees hold cases that the files of real machines may lack.
var builtTrees = map[string]string{
	"a small host": topotest.SmallHost,
	"a skeleton":   skeleton,
	"links of a width that there is not": `<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49">
		<pci busid="0000:01:00.0" class="0x030200" vendor="0x10de" link_speed="16 GT/s" link_width="96"/>
		<pci busid="0000:02:00.0" class="0x020700" vendor="0x15b3" link_speed="" link_width="255"/>
	</cpu></system>`,
	"AMD's GPUs, one of a vendor that there is not": `<system version="2"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
		<pci busid="0000:01:00.0" class="0x038000" vendor="qx1002"><gpu dev="1" gcn="942" rank="1" gdr="1"><xgmi target="0000:02:00.0" count="1" tclass="0x038000"/></gpu></pci>
		<pci busid="0000:02:00.0" class="0x120000" vendor="0x1002"><gpu dev="0" gcn="942" rank="0" gdr="1"><xgmi target="0000:01:00.0" count="1" tclass="0x038000"/></gpu></pci>
	</cpu></system>`,
	"merged switches, and ones that are joined": `<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="17">
		<pci busid="0000:01:00.0" class="0x060400" vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="0x0001" link_speed="32.0 GT/s PCIe" link_width="16">
			<pci busid="0000:03:00.0" class="0x060400" vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="0x1001" link_speed="32.0 GT/s PCIe" link_width="16">
				<pcilink target="0000:11:00.0"/>
				<pci busid="0000:04:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90" rank="0" gdr="1"/></pci>
			</pci>
			<pci busid="0000:05:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="1" sm="90" rank="1" gdr="1"/></pci>
		</pci>
		<pci busid="0000:11:00.0" class="0x060400" vendor="0x1000" device="0xc030" link_speed="32.0 GT/s PCIe" link_width="16">
			<pci busid="0000:12:00.0" class="0x020000" link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1"/></nic></pci>
		</pci></cpu></system>`,
	"NVLinks between some GPUs, and PXN": `<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
		<pci busid="0000:01:00.0" class="0x060400" link_speed="8.0 GT/s PCIe" link_width="16">
			<pci busid="0000:02:00.0" class="0x030200" link_speed="8.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="70" rank="0" gdr="1"><nvlink target="0000:81:00.0" count="2" tclass="0x030200"/><nvlink target="0000:82:00.0" count="1" tclass="0x030200"/></gpu></pci>
			<pci busid="0000:03:00.0" class="0x020700" link_speed="8.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_0" speed="100000" port="1" guid="0x1" gdr="1"/></nic></pci>
		</pci></cpu><cpu numaid="1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
		<pci busid="0000:81:00.0" class="0x030200" link_speed="8.0 GT/s PCIe" link_width="16"><gpu dev="1" sm="70" rank="1" gdr="1"><nvlink target="0000:02:00.0" count="2" tclass="0x030200"/></gpu></pci>
		<pci busid="0000:82:00.0" class="0x030200" link_speed="8.0 GT/s PCIe" link_width="8"><gpu dev="2" sm="70" rank="2" gdr="0"><nvlink target="0000:02:00.0" count="1" tclass="0x030200"/><nvlink target="0000:82:00.0" count="1" tclass="0x030200"/></gpu></pci>
		</cpu></system>`,
	"C2C, and NVLinks to the CPU and to switches": `<system version="1"><cpu numaid="0" arch="arm64">
		<pci busid="0009:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="90" rank="0" gdr="1"><c2c bw="44712" count="10"/><nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu></pci>
		<pci busid="0019:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="1" sm="70" rank="1" gdr="1"><nvlink target="0004:04:00.0" count="3" tclass="0x068001"/></gpu></pci>
		<pci busid="0002:01:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1"/></nic></pci>
		</cpu></system>`,
	"a NIC of two ports, one without a place, one without a name": `<system version="1">
		<cpu numaid="3" affinity="f,00000000" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"><pci busid="0000:02:00.0" class="0x030200"/></cpu>
		<cpu numaid="4" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"/>
		<cpu numaid="1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207">
		<pci busid="0000:03:00.0" class="0x020000" link_speed="" link_width="0"><nic>
			<net name="mlx5_10" speed="-1" port="2" guid="0x7893510003a1420c"/><net name="mlx5_2" speed="2500" port="1" guid="0x7893510003a1420c" gdr="0"/><net port="3"/></nic></pci>
		<nic><net name="eth0" dev="2" speed="100000" port="0" guid="0x0"/><net name="eth1" guid="0x0"/></nic></cpu></system>`,
	"EFA, eRDMA and Ethernet by their vendors": `<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200"><gpu dev="5"/></pci>
		<pci busid="0000:02:00.0" class="0x020000" vendor="0x1d0f" device="0xefa1"/><pci busid="0000:03:00.0" class="0x020000" vendor="0x1ded" device="0x107f"><nic><net name="erdma_0"/></nic></pci>
		<pci busid="0000:04:00.0" class="0x020000" vendor="0x1af4" device="0x1041"/></cpu></system>`,
	"AMD's and Hygon's": `<system version="2"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
		<pci busid="0000:01:00.0" class="0x038000" vendor="0x1002"><gpu dev="1" sm="94" gcn="942" rank="1" gdr="1"><xgmi target="0000:02:00.0" count="1" tclass="0x038000"/></gpu></pci>
		<pci busid="0000:02:00.0" class="0x120000" vendor="0x1002"><gpu dev="0" sm="94" gcn="942" rank="0" gdr="1"><xgmi target="0000:01:00.0" count="1" tclass="0x038000"/></gpu></pci>
		<pci busid="0000:03:00.0" class="0x0b4000" vendor="0x1d94"><gpu dev="2" rank="0"/></pci></cpu></system>`,
	"several hosts": `<system version="1">
		<cpu host_hash="0xa5f31daa95182da8" numaid="0" arch="arm64"><pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="100" rank="0" gdr="1"><nvlink target="x" count="18" tclass="0x068000"/></gpu></pci>
			<pci busid="0000:02:00.0" class="0x020700"><nic><net name="mlx5_0" speed="400000" port="1"/></nic></pci></cpu>
		<cpu host_hash="0x2" numaid="0" arch="arm64"><pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="100" rank="1" gdr="1"><nvlink target="x" count="18" tclass="0x068000"/></gpu></pci></cpu>
		<cpu host_hash="0x2" numaid="1" arch="arm64"><pci busid="0000:02:00.0" class="0x020700"/></cpu>
		<cpu numaid="0" arch="arm64"/></system>`,
	"a GPU that its number puts first": `<system version="1"><cpu numaid="-1" arch="x86_64"><pci busid="0000:01:00.0" class="0x030200"><gpu dev="1"/></pci><pci busid="0000:02:00.0" class="0x030200"><gpu dev="0"/></pci></cpu></system>`,
}

const skeleton = `<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49">
	<pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
		<pci busid="0002:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
		<pci busid="0001:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="8"/>
		<pci busid="0101:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
	</pci></cpu></system>`

// asRead compares a host that was read from NCCL's XML with the host that Read returns after
// Write. The options ignore differences without effect.
var asRead = cmp.Options{
	cmpopts.IgnoreFields(topo.Host{}, "Notes", "Source", "CPUs"),
	cmpopts.IgnoreFields(topo.Place{}, "LinkSpeed", "LinkWidth"), // words of links that NCCL does not know
	cmpopts.IgnoreFields(topo.PCIIdentity{}, "Class"),            // Write fills in a missing class
	cmpopts.SortSlices(func(a, b topo.Switch) bool { return a.Host+a.BusID < b.Host+b.BusID }),
	cmpopts.EquateApprox(1e-12, 0),
}

func TestWriteFileOfNCCLRoundTrips(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(topotest.Topologies, "*.xml"))
	if err != nil {
		t.Fatal(err)
	}
	hosts := map[string]*topo.Host{}
	for name, text := range builtTrees {
		hosts[name] = ncclfile.ReadXML(t, text)
	}
	for _, file := range files {
		if h, err := reader.Read(file, topo.Options{}); err != nil {
			t.Error(err)
		} else if h.Source.Kind == topo.SourceNCCLXML {
			hosts[filepath.Base(file)] = h
		}
	}
	for name, h := range hosts {
		t.Run(name, func(t *testing.T) {
			text := write(t, h)
			again := ncclfile.ReadXML(t, text)
			if diff := cmp.Diff(h, again, asRead); diff != "" {
				t.Errorf("read (-), and written and read again (+):\n%s\n%s", diff, text)
			}
			for _, c := range again.CPUs { // Write omits CPUs without a device
				if !slices.Contains(h.CPUs, c) {
					t.Errorf("NUMA node %+v is missing in %+v", c, h.CPUs)
				}
			}
			for _, rules := range []topo.Rules{topo.RulesNCCL, topo.RulesSMI} {
				if diff := cmp.Diff(graph.All(h, rules), graph.All(again, rules), cmpopts.EquateApprox(1e-12, 0)); diff != "" {
					t.Errorf("paths by %s:\n%s", rules, diff)
				}
			}
			ncclfile.ReadAsNCCLDoes(t, text)
			if len(h.Hosts()) > 1 {
				return
			}
			plans := make([]*planner.Plan, 2)
			for i, h := range []*topo.Host{h, again} {
				if plans[i], err = planner.Make(h, planner.Config{}); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(plans[0].Lanes, plans[1].Lanes, cmpopts.EquateApprox(1e-12, 0)); diff != "" {
				t.Errorf("lanes:\n%s", diff)
			}
		})
	}
}

func TestWriteKernelHostMatchesNCCLForm(t *testing.T) {
	text, err := ncclxml.Write(kernelhost.KernelsHost(t))
	if err != nil {
		t.Fatal(err)
	}
	const want = `<!-- a note - - with dashes - - - -->
<!-- rxe0 is omitted: it is software RDMA, which has no place in the tree -->
<!-- mlx5_2 is omitted: none of its ports is active -->
<system version="1">
  <cpu numaid="0" affinity="0000ffff,0000ffff" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="17">
    <pci busid="0000:11:00.0" class="0x060400" vendor="0x104c" device="0x8232" subsystem_vendor="0x0000" subsystem_device="0x0000" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:13:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0">
          <nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:14:00.0" class="0x020000" vendor="0x15b3" device="0x101d" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" speed="100000" port="1" guid="0xe040a10003c288a0"/>
          <net name="mlx5_1" speed="100000" port="2" guid="0xe040a10003c288a0"/>
        </nic>
      </pci>
    </pci>
  </cpu>
</system>
`
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	ncclfile.ReadAsNCCLDoes(t, string(text))
}

func TestWriteKernelHostKeepsPaths(t *testing.T) {
	h := kernelhost.KernelsHost(t)
	again := ncclfile.ReadXML(t, write(t, h))
	got := map[[2]string]graph.Pair{}
	for _, p := range graph.All(again, topo.RulesNCCL) {
		got[[2]string{p.From, p.To}] = p
	}
	left := map[string]bool{"rxe0": true, "mlx5_2": true}
	compared := 0
	for _, want := range graph.All(h, topo.RulesNCCL) {
		if left[want.From] || left[want.To] {
			continue
		}
		compared++
		if want.Type == topo.LOC {
			want.Reason = "they are one PCI function" // in the XML, the two functions of the card are a single function
		}
		if diff := cmp.Diff(want, got[[2]string{want.From, want.To}]); diff != "" {
			t.Errorf("host (-), XML (+):\n%s", diff)
		}
	}
	if compared != 6 || len(got) != 6 {
		t.Errorf("%d pairs compared, and the XML has %d", compared, len(got))
	}
}

// hwloc lists interfaces without RDMA. NCCL's files mark such interfaces with GUID 0.
func TestWriteEthernetNICStaysEthernet(t *testing.T) {
	h := ncclfile.ReadXML(t, topotest.SmallHost)
	h.Source.Kind = reader.SourceHwlocXML
	place := topo.Place{Link: 12}
	h.NICs = []topo.NIC{
		{Name: "eth0", BusID: "0000:0a:00.0", Ethernet: true, Place: place},
		{Name: "nic@0000:0b:00.0", BusID: "0000:0b:00.0", Ethernet: true, Place: place},
		{Name: "nic@0000:0c:00.0", BusID: "0000:0c:00.0", Place: place},
	}
	got := map[string]bool{}
	for _, n := range ncclfile.ReadXML(t, write(t, h)).NICs {
		got[n.Name] = n.Ethernet
	}
	if diff := cmp.Diff(map[string]bool{"eth0": true, "nic@0000:0b:00.0": true, "nic@0000:0c:00.0": false},
		got); diff != "" {
		t.Errorf("Ethernet (-want +got):\n%s", diff)
	}
}

func TestAffinityListBecomesKernelMask(t *testing.T) {
	all := strings.TrimSuffix(strings.Repeat("ffffffff,", 28), ",")
	for list, want := range map[string]string{
		"0":              "00000001",
		"0-11,24-35":     "0000000f,ff000fff",
		"63":             "80000000,00000000",
		"0-895":          all,
		"992-1023":       "ffffffff" + strings.Repeat(",0", 31),
		"0-3,2000":       "0000000f",
		"":               "",
		"x":              "",
		"5-2":            "",
		"0-4294967296":   "", // 32 words are too long for NCCL
		"0-900,960-1023": "",
	} {
		got := ncclxml.Affinity(list)
		if got != want {
			t.Errorf("%q is %q, want %q", list, got, want)
		}
		if set, err := cpuset.Parse(got); err != nil || got != "" && !strings.HasPrefix(list, "0-3") && set.String() != list {
			t.Errorf("%q is read as %q, %v", list, set.String(), err)
		}
	}
}

func TestWriteUnreadableValueFails(t *testing.T) {
	one := func(change func(h *topo.Host)) *topo.Host {
		h := ncclfile.ReadXML(t, topotest.SmallHost)
		change(h)
		return h
	}
	errorIs := func(want error) func(error) bool { return func(err error) bool { return testutil.HasError(err, want) } }
	text := func(text string) func(error) bool {
		return func(err error) bool {
			e, ok := errors.AsType[*ncclxml.UnwritableError](err)
			return ok && e.Text == text
		}
	}
	for name, tt := range map[string]struct {
		host    *topo.Host
		errorIs func(error) bool
	}{
		"without a tree": {&topo.Host{Matrix: map[[2]string]topo.PathType{}}, errorIs(ncclxml.ErrNoTree)},
		"a quote":        {one(func(h *topo.Host) { h.NICs[0].Name = `a"b` }), text(`a"b`)},
		"an entity":      {one(func(h *topo.Host) { h.NICs[0].Name = "a&b" }), text("a&b")},
		"a control": {one(func(h *topo.Host) { h.CPUs[0].Vendor = "a\nb" }),
			errorIs(&ncclxml.UnwritableError{What: "attribute vendor of a <cpu>", Text: "a\nb"})},
		"no UTF-8": {one(func(h *topo.Host) { h.NICs[0].GUID = "\xff" }),
			errorIs(&ncclxml.UnwritableError{What: "attribute guid of a <net>", Text: "\xff"})},
		"a long name": {one(func(h *topo.Host) { h.NICs[0].Name = strings.Repeat("n", 254) }),
			text(strings.Repeat("n", 254))},
		"a node not there": {one(func(h *topo.Host) { h.CPUs = h.CPUs[:1] }), func(err error) bool {
			e, ok := errors.AsType[*ncclxml.PlaceError](err)
			return ok && e.NUMA == 1 && e.Switch == ""
		}},
		"a switch nowhere": {one(func(h *topo.Host) { h.GPUs[0].Switch = "0000:99:00.0" }), func(err error) bool {
			e, ok := errors.AsType[*ncclxml.PlaceError](err)
			return ok && e.Switch == "0000:99:00.0"
		}},
		"a circle": {one(func(h *topo.Host) { h.Switches[0].Switch = h.Switches[1].BusID }),
			errorIs(&ncclxml.SwitchError{BusID: "0000:01:00.0"})},
		"a switch twice": {one(func(h *topo.Host) { h.Switches = append(h.Switches, h.Switches[1]) }),
			errorIs(&ncclxml.SwitchError{BusID: "0000:05:00.0", Twice: true})},
		"many elements": {one(func(h *topo.Host) {
			for i := range 240 {
				h.GPUs = append(h.GPUs, topo.GPU{BusID: fmt.Sprintf("0001:%02x:00.0", i), Index: 9 + i})
			}
		}), func(err error) bool {
			e, ok := errors.AsType[*ncclxml.SizeError](err)
			return ok && e.Elements > 255
		}},
	} {
		text, err := ncclxml.Write(tt.host)
		if !tt.errorIs(err) || text != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestLinkWordsBandwidthOnlyRoundTrips(t *testing.T) {
	for _, speed := range bandwidths.PCIeSpeeds {
		for _, lanes := range []int{1, 2, 4, 8, 16} {
			link := bandwidths.PCIe(speed.Begins, lanes)
			gotSpeed, gotLanes := ncclxml.LinkWords(topo.Place{Link: link})
			n, err := strconv.Atoi("0" + gotLanes)
			if err != nil {
				t.Fatal(err)
			}
			if got := bandwidths.PCIe(gotSpeed, n); math.Abs(got-link) > 1e-9 {
				t.Errorf("%g GB/s is written as %q, %q, which is %g", link, gotSpeed, gotLanes, got)
			}
		}
	}
}

func FuzzWriteNCCLXML(f *testing.F) {
	topotest.AddSeeds(f, "*.xml", slices.Collect(maps.Values(builtTrees))...)
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := reader.Input("fuzz", text)
		if err != nil || h.Matrix != nil {
			return
		}
		root, err := ncclxml.WriteUnbounded(h)
		var unwritable *ncclxml.UnwritableError
		if errors.As(err, &unwritable) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		written := string(root)
		if h.Source.Kind != topo.SourceNCCLXML {
			ncclfile.ReadAsNCCLDoes(t, written)
			return // another source knows of NICs that NCCL would not list
		}
		again, err := ncclxml.Read(strings.NewReader(written), "written.xml")
		if err != nil {
			t.Fatalf("%v in\n%s", err, written)
		}
		if diff := cmp.Diff(graph.All(h, topo.RulesNCCL), graph.All(again, topo.RulesNCCL),
			cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("paths of the input (-), and of the output (+):\n%s\n%s", diff, written)
		}
		ncclfile.ReadAsNCCLDoes(t, written)
		if !slices.Equal(h.Hosts(), again.Hosts()) {
			t.Errorf("hosts %q and %q", h.Hosts(), again.Hosts())
		}
	})
}
