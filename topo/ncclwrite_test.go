package topo

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// write is NCCLXML without the bound on elements, which not all of the files
// below keep to.
func write(t *testing.T, h *Host) string {
	t.Helper()
	root, err := h.ncclTree()
	if err != nil {
		t.Fatal(err)
	}
	return string(root.text())
}

// builtTrees have one thing each that the files of real machines perhaps lack.
var builtTrees = map[string]string{
	"a small host": smallHost,
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

// asRead compares a host that was read from NCCL's XML with what was read of it
// when it was written again: but for words of no consequence they are the same.
var asRead = cmp.Options{
	cmpopts.IgnoreFields(Host{}, "Notes", "Source", "CPUs"),
	cmpopts.IgnoreFields(Place{}, "LinkSpeed", "LinkWidth"), // of those that NCCL does not know
	cmpopts.IgnoreFields(PCIIdentity{}, "Class"),            // a missing one is written
	cmpopts.SortSlices(func(a, b Switch) bool { return a.Host+a.BusID < b.Host+b.BusID }),
	cmpopts.EquateApprox(1e-12, 0),
}

func TestWhatNCCLWroteIsWrittenAgain(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(topologies, "*.xml"))
	if err != nil {
		t.Fatal(err)
	}
	hosts := map[string]*Host{}
	for name, text := range builtTrees {
		hosts[name] = readXML(t, text)
	}
	for _, file := range files {
		if h, err := Read(file, Options{}); err != nil {
			t.Error(err)
		} else if h.Source.Kind == SourceNCCLXML {
			hosts[filepath.Base(file)] = h
		}
	}
	for name, h := range hosts {
		t.Run(name, func(t *testing.T) {
			text := write(t, h)
			again := readXML(t, text)
			if diff := cmp.Diff(h, again, asRead); diff != "" {
				t.Errorf("read (-), and written and read again (+):\n%s\n%s", diff, text)
			}
			for _, c := range again.CPUs { // those that nothing hangs on are not written
				if !slices.Contains(h.CPUs, c) {
					t.Errorf("NUMA node %+v is none of %+v", c, h.CPUs)
				}
			}
			for _, rules := range []Rules{RulesNCCL, RulesSMI} {
				if diff := cmp.Diff(h.Paths(rules), again.Paths(rules), cmpopts.EquateApprox(1e-12, 0)); diff != "" {
					t.Errorf("paths by %s:\n%s", rules, diff)
				}
			}
			readAsNCCLDoes(t, text)
			if len(h.Hosts()) > 1 {
				return
			}
			plans := make([]*Plan, 2)
			for i, h := range []*Host{h, again} {
				if plans[i], err = MakePlan(h, PlanConfig{}); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(plans[0].Lanes, plans[1].Lanes, cmpopts.EquateApprox(1e-12, 0)); diff != "" {
				t.Errorf("lanes:\n%s", diff)
			}
		})
	}
}

// readAsNCCLDoes parses as NCCL 2.30's src/graph/xml.cc does, byte by byte, and
// compares with what a parser of XML sees.
func readAsNCCLDoes(t *testing.T, text string) {
	t.Helper()
	r := bytes.NewReader([]byte(text))
	next := func() byte {
		c, err := r.ReadByte()
		if err != nil {
			t.Fatalf("NCCL would meet an unexpected end in\n%s", text)
		}
		return c
	}
	// token is xmlGetToken with xmlGetValue.
	token := func() (name, value string, last byte) {
		for {
			c := next()
			if c == '=' {
				if c := next(); c != '"' {
					t.Fatalf("NCCL wants a double quote after %s=", name)
				}
				for {
					if c := next(); c == '"' {
						return name, value, next()
					} else if value += string([]byte{c}); len(value) > maxNCCLValue {
						t.Fatalf("NCCL has no room for %s", value)
					}
				}
			}
			if strings.IndexByte(" >/\n\r", c) >= 0 {
				return name, "", c
			}
			name += string([]byte{c})
		}
	}
	var got []string
	for {
		c, err := r.ReadByte()
		for err == nil && (c == ' ' || c == '\n' || c == '\r') {
			c, err = r.ReadByte()
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if c != '<' {
			t.Fatalf("NCCL expects <, and there is %q", c)
		}
		name, _, last := token()
		if strings.HasPrefix(name, "!--") {
			for seen := name[3:] + string([]byte{last}); !strings.HasSuffix(seen, "-->"); {
				seen += string([]byte{next()})
			}
			continue
		}
		if name == "" && last == '/' {
			name, _, last = token()
			got = append(got, "/"+name)
		} else {
			line := name
			for n := 0; last == ' '; n++ {
				var key, value string
				if n == 16 {
					t.Fatalf("NCCL has no room for more attributes in <%s>", line)
				}
				key, value, last = token()
				line += " " + key + "=" + value
			}
			got = append(got, line)
			if last == '/' {
				_, _, last = token()
				got = append(got, "/"+name)
			}
		}
		if last != '>' {
			t.Fatalf("NCCL expects > after %s, and there is %q", name, last)
		}
	}
	var want []string
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		switch e := token.(type) {
		case xml.StartElement:
			line := e.Name.Local
			for _, a := range e.Attr {
				line += " " + a.Name.Local + "=" + a.Value
			}
			want = append(want, line)
		case xml.EndElement:
			want = append(want, "/"+e.Name.Local)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what is written (-) and what NCCL reads (+):\n%s", diff)
	}
}

// A host as the kernel shows it: a dual-port card of two functions and one of
// another maker, software RDMA, a NIC without a link, a processor with an
// extended family, a node of memory alone.
func kernelsHost(t *testing.T) *Host {
	t.Helper()
	files := map[string]string{
		"sys/devices/system/node/node0/cpulist": "0-15,32-47",
		"sys/devices/system/node/node1/cpulist": "16-31",
		"sys/devices/system/node/node2/cpulist": "",
		"proc/cpuinfo":                          "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n",
	}
	const port, upper = "pci0000:10/0000:10:01.0", "pci0000:10/0000:10:01.0/0000:11:00.0"
	gen5 := []string{"max_link_speed=32.0 GT/s PCIe", "max_link_width=16", "numa_node=0"}
	for _, path := range []string{port, upper, upper + "/0000:12:00.0", upper + "/0000:12:01.0"} {
		device(files, path, append(gen5, "class=0x060400", "vendor=0x104c", "device=0x8232", "subsystem_vendor=0x0000", "subsystem_device=0x0000")...)
	}
	device(files, upper+"/0000:12:00.0/0000:13:00.0", append(gen5, gpuClass, gpuVendor, "device=0x2330")...)
	nics := map[string]string{
		"mlx5_0": upper + "/0000:12:01.0/0000:14:00.0",
		"mlx5_1": upper + "/0000:12:01.0/0000:14:00.1",
		"mlx5_2": "pci0000:80/0000:80:01.0",
	}
	states := map[string]string{"mlx5_0": "4: ACTIVE", "mlx5_1": "4: ACTIVE", "mlx5_2": "1: DOWN", "rxe0": "4: ACTIVE"}
	for name, path := range nics {
		device(files, path, append(gen5, "class=0x020000", "vendor=0x15b3", "device=0x101d")...)
		files["sys/class/infiniband/"+name] = "-> ../../devices/" + path + "/infiniband/" + name
		files["sys/devices/"+path+"/infiniband/"+name+"/device"] = "-> ../../../" + filepath.Base(path)
	}
	nics["rxe0"] = "virtual"
	files["sys/class/infiniband/rxe0"] = "-> ../../devices/virtual/infiniband/rxe0"
	for name, path := range nics {
		at := "sys/devices/" + path + "/infiniband/" + name
		files[at+"/node_guid"] = "a088:c203:00a1:40e" + name[len(name)-1:]
		files[at+"/sys_image_guid"] = "a088:c203:00a1:40e0"
		files[at+"/ports/1/state"] = states[name]
		files[at+"/ports/1/rate"] = "100 Gb/sec (4X EDR)"
	}
	o := tree(t, files)
	o.NVML = answer{gpus: []NVMLGPU{{BusID: "0000:13:00.0", Minor: 0, Capability: 90, NVLinks: map[string]int{"": 18}}}}
	h, err := ReadSysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	h.Notes = []string{"a note -- with dashes ---"}
	return h
}

func TestTheKernelsHostInNCCLsWords(t *testing.T) {
	text, err := kernelsHost(t).NCCLXML()
	if err != nil {
		t.Fatal(err)
	}
	const want = `<!-- a note - - with dashes - - - -->
<!-- rxe0 is left out: it is software RDMA, which has no place in the tree -->
<!-- mlx5_2 is left out: none of its ports is active -->
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
	readAsNCCLDoes(t, string(text))
}

func TestPathsOfTheKernelsHostSurvive(t *testing.T) {
	h := kernelsHost(t)
	again := readXML(t, write(t, h))
	got := map[[2]string]Pair{}
	for _, p := range again.Paths(RulesNCCL) {
		got[[2]string{p.From, p.To}] = p
	}
	left := map[string]bool{"rxe0": true, "mlx5_2": true}
	compared := 0
	for _, want := range h.Paths(RulesNCCL) {
		if left[want.From] || left[want.To] {
			continue
		}
		compared++
		if want.Type == LOC {
			want.Reason = "they are one PCI function" // which the XML has made of the card
		}
		if diff := cmp.Diff(want, got[[2]string{want.From, want.To}]); diff != "" {
			t.Errorf("host (-), XML (+):\n%s", diff)
		}
	}
	if compared != 6 || len(got) != 6 {
		t.Errorf("%d pairs compared, and the XML has %d", compared, len(got))
	}
}

func TestHwlocBecomesNCCLXML(t *testing.T) {
	h := readHwlocFile(t, recordedHwloc)
	again := readXML(t, write(t, h))
	want, got := h.Paths(RulesNCCL), again.Paths(RulesNCCL)
	if len(want) != 90 || len(got) != len(want) {
		t.Fatalf("%d and %d paths", len(want), len(got))
	}
	for i := range want {
		// hwloc does not tell a port's rate, and NCCL takes 10 Gbit/s then.
		if want[i].Type != got[i].Type || want[i].Hops != got[i].Hops || got[i].Bandwidth != want[i].Bandwidth && got[i].Bandwidth != 1.25 {
			t.Errorf("hwloc %+v, XML %+v", want[i], got[i])
		}
	}
}

// hwloc lists interfaces without RDMA; what tells them in NCCL's files is a guid
// of 0.
func TestEthernetStaysEthernet(t *testing.T) {
	h := readXML(t, smallHost)
	h.Source.Kind = SourceHwlocXML
	place := Place{Link: 12}
	h.NICs = []NIC{
		{Name: "eth0", BusID: "0000:0a:00.0", Ethernet: true, Place: place},
		{Name: "nic@0000:0b:00.0", BusID: "0000:0b:00.0", Ethernet: true, Place: place},
		{Name: "nic@0000:0c:00.0", BusID: "0000:0c:00.0", Place: place},
	}
	got := map[string]bool{}
	for _, n := range readXML(t, write(t, h)).NICs {
		got[n.Name] = n.Ethernet
	}
	if diff := cmp.Diff(map[string]bool{"eth0": true, "nic@0000:0b:00.0": true, "nic@0000:0c:00.0": false}, got); diff != "" {
		t.Errorf("Ethernet (-want +got):\n%s", diff)
	}
}

func TestAffinityIsAMaskOfTheKernel(t *testing.T) {
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
		"0-4294967296":   "", // all 32 words are more than NCCL has room for
		"0-900,960-1023": "",
	} {
		got := affinity(list)
		if got != want {
			t.Errorf("%q is %q, want %q", list, got, want)
		}
		if set, err := parseHwlocSet(got); err != nil || got != "" && !strings.HasPrefix(list, "0-3") && set.String() != list {
			t.Errorf("%q is read as %q, %v", list, set.String(), err)
		}
	}
}

func TestWhatNCCLCannotReadIsRefused(t *testing.T) {
	one := func(change func(h *Host)) *Host {
		h := readXML(t, smallHost)
		change(h)
		return h
	}
	for name, tt := range map[string]struct {
		host *Host
		want string
	}{
		"no tree":          {&Host{Matrix: map[[2]string]PathType{}}, "no tree"},
		"a quote":          {one(func(h *Host) { h.NICs[0].Name = `a"b` }), `"a\"b"`},
		"an entity":        {one(func(h *Host) { h.NICs[0].Name = "a&b" }), "entities"},
		"a control":        {one(func(h *Host) { h.CPUs[0].Vendor = "a\nb" }), "vendor of a <cpu>"},
		"no UTF-8":         {one(func(h *Host) { h.NICs[0].GUID = "\xff" }), "guid of a <net>"},
		"a long name":      {one(func(h *Host) { h.NICs[0].Name = strings.Repeat("n", 254) }), "253 bytes"},
		"a node not there": {one(func(h *Host) { h.CPUs = h.CPUs[:1] }), "NUMA node 1"},
		"a switch nowhere": {one(func(h *Host) { h.GPUs[0].Switch = "0000:99:00.0" }), "0000:99:00.0"},
		"a circle":         {one(func(h *Host) { h.Switches[0].Switch = h.Switches[1].BusID }), "no way leads from switch 0000:01:00.0"},
		"a switch twice":   {one(func(h *Host) { h.Switches = append(h.Switches, h.Switches[1]) }), "two switches have the address 0000:05:00.0"},
		"many elements": {one(func(h *Host) {
			for i := range 240 {
				h.GPUs = append(h.GPUs, GPU{BusID: fmt.Sprintf("0001:%02x:00.0", i), Index: 9 + i})
			}
		}), "no more than 255"},
	} {
		text, err := tt.host.NCCLXML()
		if err == nil || !strings.Contains(err.Error(), tt.want) || text != nil {
			t.Errorf("%s: %v; want one with %q", name, err, tt.want)
		}
	}
}

func TestALinkThatOnlyItsBandwidthTells(t *testing.T) {
	for _, speed := range pcieSpeeds {
		for _, lanes := range []int{1, 2, 4, 8, 16} {
			link := pcieBandwidth(speed.begins, lanes)
			gotSpeed, gotLanes := linkWords(Place{Link: link})
			n, err := strconv.Atoi("0" + gotLanes)
			if err != nil {
				t.Fatal(err)
			}
			if got := pcieBandwidth(gotSpeed, n); math.Abs(got-link) > 1e-9 {
				t.Errorf("%g GB/s is written as %q, %q, which is %g", link, gotSpeed, gotLanes, got)
			}
		}
	}
}

func FuzzWriteNCCLXML(f *testing.F) {
	addSeeds(f, "*.xml", slices.Collect(maps.Values(builtTrees))...)
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := ReadInput("fuzz", text)
		if err != nil || h.Matrix != nil {
			return
		}
		root, err := h.ncclTree()
		var unwritable *UnwritableError
		if errors.As(err, &unwritable) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		written := string(root.text())
		if h.Source.Kind != SourceNCCLXML {
			readAsNCCLDoes(t, written)
			return // another source knows of NICs that NCCL would not list
		}
		again, err := ReadNCCLXML(strings.NewReader(written), "written.xml")
		if err != nil {
			t.Fatalf("%v in\n%s", err, written)
		}
		if diff := cmp.Diff(h.Paths(RulesNCCL), again.Paths(RulesNCCL), cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Errorf("paths of what was read (-), and of what was written (+):\n%s\n%s", diff, written)
		}
		readAsNCCLDoes(t, written)
		if !slices.Equal(h.Hosts(), again.Hosts()) {
			t.Errorf("hosts %q and %q", h.Hosts(), again.Hosts())
		}
	})
}
