package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// virtualHost returns flags that read a sysfs with a GPU and a NIC with this number of virtual
// functions.
func virtualHost(t *testing.T, functions int) []string {
	t.Helper()
	root := t.TempDir()
	write := func(at, text string) {
		at = filepath.Join(root, "sys", at)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := func(at, target string) {
		at = filepath.Join(root, "sys", at)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, at); err != nil {
			t.Fatal(err)
		}
	}
	function := func(at, class, vendor string) {
		write("devices/"+at+"/class", class)
		write("devices/"+at+"/vendor", vendor)
		link("bus/pci/devices/"+filepath.Base(at), "../../../devices/"+at)
	}
	if err := os.Mkdir(filepath.Join(root, "proc"), 0o755); err != nil {
		t.Fatal(err)
	}
	function("pci0000:00/0000:00:01.0", "0x030200", "0x10de")
	for i := range 1 + functions {
		at := fmt.Sprintf("pci0000:00/0000:03:%02x.%d", i/8, i%8)
		name := fmt.Sprintf("mlx5_%d", i)
		function(at, "0x020700", "0x15b3")
		if i > 0 {
			link("devices/"+at+"/physfn", "../0000:03:00.0")
		}
		dir := at + "/infiniband/" + name
		write("devices/"+dir+"/node_type", "1: CA")
		write("devices/"+dir+"/ports/1/state", "4: ACTIVE")
		write("devices/"+dir+"/ports/1/rate", "400 Gb/sec (4X NDR)")
		link("devices/"+dir+"/device", "../../../"+filepath.Base(at))
		link("class/infiniband/"+name, "../../devices/"+dir)
	}
	return []string{"--sysfs", filepath.Join(root, "sys"), "--proc", filepath.Join(root, "proc"), "--root", t.TempDir()}
}

func TestTablesAndPicturesFoldVirtualFunctions(t *testing.T) {
	host := virtualHost(t, 126)
	command := func(args ...string) string { return peerlane(t, append(args, host...)...) }
	const sentence = "mlx5_0 has 126 virtual functions or subfunctions, mlx5_1 to mlx5_126"
	out := command("topo")
	if len(out) > 4000 || strings.Contains(out, "mlx5_77") || !strings.Contains(out, sentence) {
		t.Errorf("the tables have %d bytes:\n%s", len(out), out)
	}
	if all := command("topo", "--functions"); !strings.Contains(all, "mlx5_77") || strings.Contains(all, sentence) {
		t.Error("--functions does not show functions")
	}
	if out := command("topo", "--nics"); strings.Contains(out, "mlx5_77") {
		t.Errorf("%s", out)
	}
	if out := command("topo", "-o", "json"); !strings.Contains(out, "mlx5_77") {
		t.Error("JSON has not all functions")
	}
	for _, args := range [][]string{{"topo", "-o", "xml"}, {"topo", "-o", "svg"}, {"topo", "-o", "html"},
		{"plan", "-o", "svg"}, {"plan"}, {"plan", "--explain", "0"}, {"plan", "--estimate"}} {
		if out := command(args...); strings.Contains(out, "mlx5_77") || len(out) > 100_000 {
			t.Errorf("peerlane %s names a virtual function, in %d bytes", strings.Join(args, " "), len(out))
		}
	}
	if out := command("topo", "-o", "xml", "--virtual"); len(out) == 0 {
		t.Error("the virtual switch is empty")
	}
}

func TestTopoShowsDataDirectFunctionsAsAColumn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topo.xml")
	text := strings.Replace(ncclXML, `<pci busid="0000:2a:00.0"`,
		`<pci busid="0000:33:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_9" dev="1" speed="400000" port="1" guid="0x9" gdr="1"/></nic></pci>
	<pci busid="0000:44:00.0" class="0x020700" link_speed="64.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_9_dma" dev="2" speed="400000" port="1" guid="0x9" gdr="1"/></nic></pci>
    <pci busid="0000:2a:00.0"`, 1)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	out := peerlane(t, "topo", "--input", file)
	var row []string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "mlx5_9 ") {
			row = strings.Fields(line)
			break
		}
	}
	if !strings.Contains(out, "DATA DIRECT") || len(row) < 3 || row[1] != "0000:33:00.0" || row[2] != "0000:44:00.0" ||
		strings.Contains(out, "mlx5_9_dma") {
		t.Errorf("%s", out)
	}
	if err := os.WriteFile(file, []byte(ncclXML), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := peerlane(t, "topo", "--input", file); strings.Contains(out, "DATA DIRECT") {
		t.Errorf("column of functions on a host without functions:\n%s", out)
	}
}
