package topo

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// smiMatrix is what a driver of today prints, but for its colours.
const smiMatrix = "\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n" +
	"GPU0\t X \tNV12\tSYS\tPIX\tSYS\t0-31,64-95\t0\t\tN/A\n" +
	"GPU1\tNV12\t X \tSYS\tNODE\tSYS\t0-31,64-95\t0\t\tN/A\n" +
	"GPU2\tSYS\tSYS\t X \tSYS\tPXB\t32-63\t1\t\tN/A\n" +
	"NIC0\tPIX\tNODE\tSYS\t X \tSYS\t\t\t\t\n" +
	"NIC1\tSYS\tSYS\tPXB\tSYS\t X \t\t\t\t\n"

const smiLegend = `
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_10
  NIC1: mlx5_2
`

func readSMIText(t *testing.T, text string) *Host {
	t.Helper()
	h, err := ReadSMI([]byte(text), "matrix.txt")
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return h
}

func TestMatrixOfNvidiaSMIIsAHost(t *testing.T) {
	h := readSMIText(t, smiMatrix+smiLegend)
	want := &Host{
		Source: Source{Kind: SourceSMI, File: "matrix.txt"},
		CPUs:   []CPU{}, Switches: []Switch{},
		GPUs: []GPU{
			{Index: 0, BusID: "GPU0", Minor: -1, NUMA: 0, NVLinks: []NVLink{{Peer: "GPU1", Count: 12}}},
			{Index: 1, BusID: "GPU1", Minor: -1, NUMA: 0, NVLinks: []NVLink{{Peer: "GPU0", Count: 12}}},
			{Index: 2, BusID: "GPU2", Minor: -1, NUMA: 1},
		},
		NICs:   []NIC{{Name: "mlx5_2", NUMA: -1}, {Name: "mlx5_10", NUMA: -1}},
		Notes:  []string{smiNote},
		Matrix: h.Matrix,
	}
	if diff := cmp.Diff(want, h, cmp.AllowUnexported(NIC{})); diff != "" {
		t.Errorf("host (-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		from, to string
		want     PathType
	}{
		{"GPU0", "GPU1", NVL}, {"GPU0", "GPU2", SYS}, {"GPU0", "mlx5_10", PIX}, {"GPU1", "mlx5_10", NODE},
		{"GPU2", "mlx5_2", PXB}, {"mlx5_2", "mlx5_10", SYS}, {"GPU2", "GPU2", LOC},
	} {
		for _, ends := range [][2]string{{tt.from, tt.to}, {tt.to, tt.from}} {
			got, err := h.Path(ends[0], ends[1])
			if err != nil || got != (Path{Type: tt.want}) {
				t.Errorf("%s to %s: %v, %v; want %v without a bandwidth", ends[0], ends[1], got, err, tt.want)
			}
		}
	}
}

func TestMatrixCountsNVLinks(t *testing.T) {
	row := func(label string, cells ...string) string { return label + "\t" + strings.Join(cells, "\t") + "\n" }
	for _, tt := range []struct {
		name, text string
		want       []NVLink // of GPU0
	}{
		{"a mesh", row("", "GPU0", "GPU1", "GPU2", "mlx5_0") + row("GPU0", "X", "NV2", "NV1", "PIX") + row("GPU1", "NV2", "X", "SYS", "SYS") +
			row("GPU2", "NV1", "SYS", "X", "SYS") + row("mlx5_0", "PIX", "SYS", "SYS", "X"), []NVLink{{Peer: "GPU1", Count: 2}, {Peer: "GPU2", Count: 1}}},
		{"switches: no GPU has 36 links", row("", "GPU0", "GPU1", "GPU2") + row("GPU0", "X", "NV18", "NV18") + row("GPU1", "NV18", "X", "NV18") +
			row("GPU2", "NV18", "NV18", "X"), []NVLink{{Count: 18}}},
		{"none", row("", "GPU0", "GPU1") + row("GPU0", "X", "SYS") + row("GPU1", "SYS", "X"), nil},
	} {
		if diff := cmp.Diff(tt.want, readSMIText(t, tt.text).GPUs[0].NVLinks); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
}

func TestMatrixIsPlannedByItsTypes(t *testing.T) {
	plan, err := MakePlan(readSMIText(t, smiMatrix+smiLegend), PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []Lane{
		{GPU: "GPU0", Role: RoleNear, NICs: []string{"mlx5_10"}},
		{GPU: "GPU1", Role: RoleFar, NICs: []string{"mlx5_10"}, Relay: true, Servers: []string{"GPU0"}},
		{GPU: "GPU2", Role: RoleNear, NICs: []string{"mlx5_2"}},
	} {
		got := plan.Lanes[i]
		if got.GPU != want.GPU || got.Role != want.Role || got.Relay != want.Relay || !slices.Equal(got.NICs, want.NICs) || !slices.Equal(got.Servers, want.Servers) {
			t.Errorf("lane %d: %+v, want %+v", i, got, want)
		}
		if strings.Contains(got.Reason, "0 GB/s") {
			t.Errorf("lane %d tells a bandwidth that nobody stated: %s", i, got.Reason)
		}
	}
	if _, err := plan.Lane("GPU1"); err != nil {
		t.Errorf("a lane by the name that the matrix has: %v", err)
	}
}

func TestShapesOfTheMatrix(t *testing.T) {
	plain := readSMIText(t, smiMatrix)
	blanks := strings.NewReplacer("\t X \t", "   X   ", "\t", "    ").Replace
	for name, text := range map[string]string{
		"CRLF":               strings.ReplaceAll(smiMatrix, "\n", "\r\n"),
		"no last line break": strings.TrimRight(smiMatrix, "\t\n"),
		"unindented header":  strings.TrimPrefix(smiMatrix, "\t"),
		"blanks":             blanks(smiMatrix),
		"blank lines":        strings.ReplaceAll(smiMatrix, "\n", "\n\n"),
		"colours":            strings.NewReplacer("\tGPU0\t", "\t\x1b[4mGPU0\t", "GPU NUMA ID", "GPU NUMA ID\x1b[0m", "PIX", "\x1b[1;32mPIX\x1b[m").Replace(smiMatrix),
		"a prompt above":     "$ nvidia-smi topo -m\nSat Nov 21 2026, GPU0 is fine\n" + smiMatrix + "$ \n",
		"a note below":       smiMatrix + "\nthe machine has eight GPUs\n",
	} {
		got := readSMIText(t, text)
		if diff := cmp.Diff(plain, got, cmp.AllowUnexported(NIC{})); diff != "" {
			t.Errorf("%s (-plain +%s):\n%s", name, name, diff)
		}
	}
	if h := readSMIText(t, "\tGPU0\tCPU Affinity\nGPU0\t X \t0-3\n"); len(h.GPUs) != 1 || len(h.NICs) != 0 || h.GPUs[0].NUMA != -1 {
		t.Errorf("one GPU: %+v", h)
	}
	if h := readSMIText(t, "\tGPU0\nGPU0\t X\n"); len(h.GPUs) != 1 {
		t.Errorf("one GPU without affinities: %+v", h)
	}
	old := readSMIText(t, "    GPU0 GPU1 mlx5_0\nGPU0 X PSB SOC\nGPU1 PSB X SOC\nmlx5_0 SOC SOC X\n")
	if a, b := old.Matrix[[2]string{"GPU0", "GPU1"}], old.Matrix[[2]string{"GPU0", "mlx5_0"}]; a != PIX || b != SYS {
		t.Errorf("PSB and SOC of old drivers are read as %v and %v", a, b)
	}
	// A GPU that another program numbers from 4, and a NUMA affinity of two nodes.
	late := readSMIText(t, "\tGPU5\tGPU4\tCPU Affinity\tNUMA Affinity\nGPU5\tX\tPHB\t0-3\t0-1\nGPU4\tPHB\tX\t\t1\n")
	if late.GPUs[0].Index != 4 || late.GPUs[0].NUMA != 1 || late.GPUs[1].NUMA != -1 {
		t.Errorf("GPUs %+v", late.GPUs)
	}
}

func TestTornMatrixIsRefusedWithItsPlace(t *testing.T) {
	replace := func(old, replacement string) string {
		if strings.Count(smiMatrix, old) == 0 {
			t.Fatalf("the matrix has no %q", old)
		}
		return strings.Replace(smiMatrix, old, replacement, 1)
	}
	for name, tt := range map[string]struct {
		text         string
		line, column int
		want         string
	}{
		"no header":           {smiMatrix[strings.Index(smiMatrix, "\nGPU0")+1:], 1, 1, "names of the columns"},
		"a row is missing":    {replace("GPU1\tNV12\t X \tSYS\tNODE\tSYS\t0-31,64-95\t0\t\tN/A\n", ""), 3, 1, "row of GPU1"},
		"the last row":        {smiMatrix[:strings.Index(smiMatrix, "NIC1\tSYS")], 5, 26, "row of NIC1 is missing"},
		"a row ends early":    {"\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\n", 3, 9, "cell for GPU1 is missing"},
		"a cell is missing":   {replace("GPU1\tNV12\t X ", "GPU1\t X "), 3, 7, "diagonal"},
		"a cell too many":     {replace("NIC0\tPIX\tNODE\tSYS\t X \tSYS", "NIC0\tPIX\tNODE\tSYS\t X \tSYS\tSYS"), 5, 27, "more cells"},
		"a column is missing": {replace("\tNIC1\tCPU", "\tCPU"), 2, 23, "more cells"},
		"a cell of nonsense":  {replace("\tPXB\t32", "\tPX\t32"), 4, 22, `"PX" is no path type`},
		"the halves differ":   {replace("GPU2\tSYS", "GPU2\tPHB"), 4, 6, "line 2, column 15"},
		"links differ":        {replace("GPU1\tNV12", "GPU1\tNV1"), 3, 6, "NV12 the other way"},
		"X beside the diagonal": {replace("GPU0\t X \tNV12", "GPU0\t X \tX"), 2, 10,
			"diagonal"},
		"a column twice":       {replace("\tGPU1\tGPU2", "\tGPU1\tGPU1"), 1, 12, "second column GPU1"},
		"a GPU's number":       {"\tGPU0\tGPU4096\n", 1, 7, "4096 is no number of a GPU; they are numbered from 0 to 4095"},
		"an unknown column":    {replace("GPU NUMA ID", "GPU NUMA ID\tMoon"), 1, 66, `"Moon"`},
		"a row too many":       {smiMatrix + "GPU3\tSYS\tSYS\tSYS\tSYS\tSYS\n", 7, 1, "a row more"},
		"a second matrix":      {smiMatrix + smiMatrix, 7, 2, "second matrix"},
		"a legend's stranger":  {smiMatrix + "NIC0: mlx5_0\nNIC1: mlx5_1\nNIC2: mlx5_2\n", 9, 1, "no such column"},
		"a legend that ends":   {smiMatrix + "\nNIC Legend:\n\n  NIC0: mlx5_0\n", 10, 15, "NIC1 is missing"},
		"a legend's name":      {smiMatrix + "NIC0: mlx5_0\nNIC1: mlx5_0\n", 8, 7, "and so is NIC0"},
		"a legend twice":       {smiMatrix + "NIC0: a\nNIC0: b\n", 8, 1, "twice"},
		"a legend of nothing":  {smiMatrix + "NIC0:\n", 7, 1, "not the name of one device"},
		"a legend of a column": {smiMatrix + "NIC0: NIC1\nNIC1: x\n", 7, 7, "a column of its own"},
	} {
		_, err := ReadSMI([]byte(tt.text), "torn.txt")
		var place *PlaceError
		if !errors.As(err, &place) {
			t.Errorf("%s: %v; want an error with a place", name, err)
			continue
		}
		if place.Line != tt.line || place.Column != tt.column || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "torn.txt") {
			t.Errorf("%s: %v; want line %d, column %d, and %q", name, err, tt.line, tt.column, tt.want)
		}
	}
}

func TestNoPieceOfAMatrixIsReadAsAnother(t *testing.T) {
	end := strings.LastIndex(smiMatrix, "X")
	for cut := range end {
		if _, err := ReadSMI([]byte(smiMatrix[:cut]), "x"); err == nil {
			t.Errorf("read, though cut after %q", smiMatrix[:cut])
		}
	}
	lines := strings.SplitAfter(strings.TrimSuffix(smiMatrix, "\n"), "\n")
	for i, line := range lines {
		rest := slices.Concat(lines[:i], lines[i+1:])
		if _, err := ReadSMI([]byte(strings.Join(rest, "")), "x"); err == nil {
			t.Errorf("read without line %d", i+1)
		}
		words := strings.Fields(line)
		for j := range min(len(words), 6) {
			if i == 0 && j >= 5 {
				break // the names of the affinities are none of the matrix's business
			}
			changed := slices.Clone(lines)
			changed[i] = strings.Join(slices.Delete(slices.Clone(words), j, j+1), "\t") + "\n"
			if _, err := ReadSMI([]byte(strings.Join(changed, "")), "x"); err == nil {
				t.Errorf("read without word %d of line %d:\n%s", j+1, i+1, strings.Join(changed, ""))
			}
		}
	}
}

func TestMatrixHasLimits(t *testing.T) {
	var header strings.Builder
	for i := range maxSMIDevices + 1 {
		fmt.Fprintf(&header, "\tGPU%d", i)
	}
	if _, err := ReadSMI([]byte(header.String()), "x"); err == nil || !strings.Contains(err.Error(), "no more are read") {
		t.Errorf("%d columns: %v", maxSMIDevices+1, err)
	}
	if _, err := ReadSMI(make([]byte, maxInput+1), "x"); err == nil || !strings.Contains(err.Error(), "16 MiB") {
		t.Errorf("a huge file: %v", err)
	}
	if _, err := ReadSMI([]byte("no matrix"), "x"); err == nil || !strings.Contains(err.Error(), "names of the GPUs") {
		t.Errorf("no matrix: %v", err)
	}
	if _, err := ReadSMI([]byte("\tGPU1\tGPU01\nGPU1\tX\tSYS\nGPU01\tSYS\tX\n"), "x"); err == nil || !strings.Contains(err.Error(), "one number") {
		t.Errorf("a number twice: %v", err)
	}
}

// TestMatricesOfRealMachines reads each matrix of the collection once more, the
// simplest way there is, and compares.
func TestMatricesOfRealMachines(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(topologies, "smi-*.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Skipf("no matrices in %s", topologies)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		h, err := ReadInput(file, text)
		if err != nil {
			t.Error(err)
			continue
		}
		lines := strings.Split(string(text), "\n")
		header, _, _ := strings.Cut(lines[0], "CPU Affinity")
		columns := strings.Fields(header)
		if len(h.GPUs)+len(h.NICs) != len(columns) || h.Source.Kind != SourceSMI {
			t.Errorf("%s: %d GPUs, %d NICs of %s; want %d columns", file, len(h.GPUs), len(h.NICs), h.Source.Kind, len(columns))
		}
		for i, from := range columns {
			cells := strings.Fields(lines[1+i])[1:]
			for j, to := range columns {
				want := cells[j]
				switch {
				case want == "X":
					want = "LOC"
				case strings.HasPrefix(want, "NV"):
					want = "NVL"
				}
				if got, err := h.Path(from, to); err != nil || got.Type.String() != want {
					t.Errorf("%s, %s to %s: %v, %v; want %s", filepath.Base(file), from, to, got.Type, err, want)
				}
			}
		}
	}
}

func FuzzReadSMI(f *testing.F) {
	addSeeds(f, "smi-*.txt", smiMatrix+smiLegend, strings.ReplaceAll(smiMatrix, "\n", "\r\n"),
		" \x1b[4mGPU0 mlx5_0\x1b[0m CPU Affinity\nGPU0 X PIX 0-1\nmlx5_0 PIX X",
		"\tGPU4095\tGPU4096\tNUMA Affinity\nGPU4095\t X \tSYS\t65536\nGPU4096\tSYS\t X \t1\n")
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := ReadSMI(text, "fuzz.txt")
		if err != nil {
			if h != nil {
				t.Error("both a host and an error")
			}
			return
		}
		checkRead(t, h)
		if n := len(h.GPUs) + len(h.NICs); len(h.Matrix) != n*n {
			t.Errorf("%d devices, %d cells", n, len(h.Matrix))
		}
	})
}

// addSeeds adds texts to the seeds of a fuzz test, and the files of the collection
// whose names match, where the collection is there.
func addSeeds(f *testing.F, pattern string, texts ...string) {
	f.Helper()
	for _, text := range texts {
		f.Add([]byte(text))
	}
	files, err := filepath.Glob(filepath.Join(topologies, pattern))
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

// checkRead: whatever was read can be planned and looked at, and a path is the
// same in both directions.
func checkRead(t *testing.T, h *Host) {
	plan, err := MakePlan(h, PlanConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := plan.check(); err != nil {
		t.Error(err)
	}
	if len(plan.Lanes) != len(h.GPUs) {
		t.Errorf("%d GPUs, %d lanes", len(h.GPUs), len(plan.Lanes))
	}
	checkNumbers(t, h)
	for _, g := range h.GPUs[:min(len(h.GPUs), 16)] {
		for _, n := range h.NICs[:min(len(h.NICs), 16)] {
			there, err := h.Path(g.BusID, n.Name)
			if err != nil {
				t.Fatal(err)
			}
			back, err := h.Path(n.Name, g.BusID)
			if err != nil {
				t.Fatal(err)
			}
			if there != back || there.Bandwidth < 0 {
				t.Errorf("%s to %s: %v, and back %v", g.BusID, n.Name, there, back)
			}
		}
	}
}

// checkNumbers: no GPU and no NUMA node has a number that none can have.
func checkNumbers(t *testing.T, h *Host) {
	for _, c := range h.CPUs {
		if err := checkNUMA(c.NUMA); err != nil {
			t.Error(err)
		}
	}
	for _, g := range h.GPUs {
		if err := errors.Join(checkIndex(g.Index), checkNUMA(g.NUMA)); err != nil {
			t.Error(err)
		}
	}
}
