package reader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/internal/textfile"
	"github.com/peerlane/peerlane/topo/internal/topotest"
	"github.com/peerlane/peerlane/topo/planner"
)

func readSMIText(t *testing.T, text string) *topo.Host {
	t.Helper()
	h, err := SMI([]byte(text), "matrix.txt")
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return h
}

func TestSMIMatrixReadsAsHost(t *testing.T) {
	h := readSMIText(t, topotest.SMIMatrix+topotest.SMILegend)
	want := &topo.Host{
		Source: topo.Source{Kind: sourceSMI, File: "matrix.txt"},
		CPUs:   []topo.CPU{}, Switches: []topo.Switch{},
		GPUs: []topo.GPU{
			{Index: 0, BusID: "GPU0", Minor: -1, NUMA: 0, NVLinks: []topo.NVLink{{Peer: "GPU1", Count: 12}}},
			{Index: 1, BusID: "GPU1", Minor: -1, NUMA: 0, NVLinks: []topo.NVLink{{Peer: "GPU0", Count: 12}}},
			{Index: 2, BusID: "GPU2", Minor: -1, NUMA: 1},
		},
		NICs:   []topo.NIC{{Name: "mlx5_2", NUMA: -1}, {Name: "mlx5_10", NUMA: -1}},
		Notes:  []string{smiNote},
		Matrix: h.Matrix,
	}
	if diff := cmp.Diff(want, h, cmp.AllowUnexported(topo.NIC{})); diff != "" {
		t.Errorf("host (-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		from, to string
		want     topo.PathType
	}{
		{"GPU0", "GPU1", topo.NVL}, {"GPU0", "GPU2", topo.SYS}, {"GPU0", "mlx5_10", topo.PIX}, {"GPU1", "mlx5_10", topo.NODE},
		{"GPU2", "mlx5_2", topo.PXB}, {"mlx5_2", "mlx5_10", topo.SYS}, {"GPU2", "GPU2", topo.LOC},
	} {
		for _, ends := range [][2]string{{tt.from, tt.to}, {tt.to, tt.from}} {
			got, err := graph.Between(h, ends[0], ends[1])
			if err != nil || got != (topo.Path{Type: tt.want}) {
				t.Errorf("%s to %s: %v, %v; want %v without a bandwidth", ends[0], ends[1], got, err, tt.want)
			}
		}
	}
}

func TestSMIMatrixCountsNVLinks(t *testing.T) {
	row := func(label string, cells ...string) string { return label + "\t" + strings.Join(cells, "\t") + "\n" }
	for _, tt := range []struct {
		name, text string
		want       []topo.NVLink // of GPU0
	}{
		{"a mesh", row("", "GPU0", "GPU1", "GPU2", "mlx5_0") + row("GPU0", "X", "NV2", "NV1", "PIX") +
			row("GPU1", "NV2", "X", "SYS", "SYS") +
			row("GPU2", "NV1", "SYS", "X", "SYS") + row("mlx5_0", "PIX", "SYS", "SYS", "X"),
			[]topo.NVLink{{Peer: "GPU1", Count: 2}, {Peer: "GPU2", Count: 1}}},
		{"switches: no GPU has 36 links", row("", "GPU0", "GPU1", "GPU2") + row("GPU0", "X", "NV18", "NV18") +
			row("GPU1", "NV18", "X", "NV18") +
			row("GPU2", "NV18", "NV18", "X"), []topo.NVLink{{Count: 18}}},
		{"none", row("", "GPU0", "GPU1") + row("GPU0", "X", "SYS") + row("GPU1", "SYS", "X"), nil},
	} {
		if diff := cmp.Diff(tt.want, readSMIText(t, tt.text).GPUs[0].NVLinks); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
}

func TestSMIMatrixPlanFollowsPathTypes(t *testing.T) {
	plan, err := planner.Make(readSMIText(t, topotest.SMIMatrix+topotest.SMILegend), planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []planner.Lane{
		{GPU: "GPU0", Role: planner.RoleNear, NICs: []string{"mlx5_10"}},
		{GPU: "GPU1", Role: planner.RoleFar, NICs: []string{"mlx5_10"}, Relay: true, Servers: []string{"GPU0"}},
		{GPU: "GPU2", Role: planner.RoleNear, NICs: []string{"mlx5_2"}},
	} {
		got := plan.Lanes[i]
		if got.GPU != want.GPU || got.Role != want.Role || got.Relay != want.Relay || !slices.Equal(got.NICs, want.NICs) ||
			!slices.Equal(got.Servers, want.Servers) {
			t.Errorf("lane %d: %+v, want %+v", i, got, want)
		}
		if strings.Contains(got.Reason, "0 GB/s") {
			t.Errorf("lane %d has a bandwidth that the matrix does not have: %s", i, got.Reason)
		}
	}
	if _, err := plan.Lane("GPU1"); err != nil {
		t.Errorf("a lane by the name that the matrix has: %v", err)
	}
}

func TestSMIMatrixVariantsReadAsEqualHosts(t *testing.T) {
	plain := readSMIText(t, topotest.SMIMatrix)
	blanks := strings.NewReplacer("\t X \t", "   X   ", "\t", "    ").Replace
	for name, text := range map[string]string{
		"CRLF":               strings.ReplaceAll(topotest.SMIMatrix, "\n", "\r\n"),
		"no last line break": strings.TrimRight(topotest.SMIMatrix, "\t\n"),
		"unindented header":  strings.TrimPrefix(topotest.SMIMatrix, "\t"),
		"blanks":             blanks(topotest.SMIMatrix),
		"blank lines":        strings.ReplaceAll(topotest.SMIMatrix, "\n", "\n\n"),
		"colours": strings.NewReplacer("\tGPU0\t", "\t\x1b[4mGPU0\t", "GPU NUMA ID", "GPU NUMA ID\x1b[0m", "PIX",
			"\x1b[1;32mPIX\x1b[m").Replace(topotest.SMIMatrix),
		"a prompt above": "$ nvidia-smi topo -m\nSat Nov 21 2026, GPU0 is fine\n" + topotest.SMIMatrix + "$ \n",
		"a note below":   topotest.SMIMatrix + "\nthe machine has eight GPUs\n",
	} {
		got := readSMIText(t, text)
		if diff := cmp.Diff(plain, got, cmp.AllowUnexported(topo.NIC{})); diff != "" {
			t.Errorf("%s (-plain +%s):\n%s", name, name, diff)
		}
	}
	if h := readSMIText(t, "\tGPU0\tCPU Affinity\nGPU0\t X \t0-3\n"); len(h.GPUs) != 1 || len(h.NICs) != 0 ||
		h.GPUs[0].NUMA != -1 {
		t.Errorf("single GPU: %+v", h)
	}
	if h := readSMIText(t, "\tGPU0\nGPU0\t X\n"); len(h.GPUs) != 1 {
		t.Errorf("single GPU without affinities: %+v", h)
	}
	old := readSMIText(t, "    GPU0 GPU1 mlx5_0\nGPU0 X PSB SOC\nGPU1 PSB X SOC\nmlx5_0 SOC SOC X\n")
	if a, b := old.Matrix[[2]string{"GPU0", "GPU1"}], old.Matrix[[2]string{"GPU0", "mlx5_0"}]; a != topo.PIX ||
		b != topo.SYS {
		t.Errorf("PSB and SOC of old drivers are read as %v and %v", a, b)
	}
	// A GPU that another program numbers from 4, and a NUMA affinity of two nodes.
	late := readSMIText(t, "\tGPU5\tGPU4\tCPU Affinity\tNUMA Affinity\nGPU5\tX\tPHB\t0-3\t0-1\nGPU4\tPHB\tX\t\t1\n")
	if late.GPUs[0].Index != 4 || late.GPUs[0].NUMA != 1 || late.GPUs[1].NUMA != -1 {
		t.Errorf("GPUs %+v", late.GPUs)
	}
}

func TestSMITornMatrixErrorNamesPlace(t *testing.T) {
	replace := func(old, replacement string) string {
		if strings.Count(topotest.SMIMatrix, old) == 0 {
			t.Fatalf("the matrix has no %q", old)
		}
		return strings.Replace(topotest.SMIMatrix, old, replacement, 1)
	}
	for name, tt := range map[string]struct {
		text         string
		line, column int
	}{
		"no header":             {topotest.SMIMatrix[strings.Index(topotest.SMIMatrix, "\nGPU0")+1:], 1, 1},
		"a row is missing":      {replace("GPU1\tNV12\t X \tSYS\tNODE\tSYS\t0-31,64-95\t0\t\tN/A\n", ""), 3, 1},
		"the last row":          {topotest.SMIMatrix[:strings.Index(topotest.SMIMatrix, "NIC1\tSYS")], 5, 26},
		"a row ends early":      {"\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\n", 3, 9},
		"a cell is missing":     {replace("GPU1\tNV12\t X ", "GPU1\t X "), 3, 7},
		"a cell too many":       {replace("NIC0\tPIX\tNODE\tSYS\t X \tSYS", "NIC0\tPIX\tNODE\tSYS\t X \tSYS\tSYS"), 5, 27},
		"a column is missing":   {replace("\tNIC1\tCPU", "\tCPU"), 2, 23},
		"a cell of nonsense":    {replace("\tPXB\t32", "\tPX\t32"), 4, 22},
		"the halves differ":     {replace("GPU2\tSYS", "GPU2\tPHB"), 4, 6},
		"links differ":          {replace("GPU1\tNV12", "GPU1\tNV1"), 3, 6},
		"X beside the diagonal": {replace("GPU0\t X \tNV12", "GPU0\t X \tX"), 2, 10},
		"a column twice":        {replace("\tGPU1\tGPU2", "\tGPU1\tGPU1"), 1, 12},
		"a GPU's number":        {"\tGPU0\tGPU4096\n", 1, 7},
		"an unknown column":     {replace("GPU NUMA ID", "GPU NUMA ID\tMoon"), 1, 66},
		"a row too many":        {topotest.SMIMatrix + "GPU3\tSYS\tSYS\tSYS\tSYS\tSYS\n", 7, 1},
		"a second matrix":       {topotest.SMIMatrix + topotest.SMIMatrix, 7, 2},
		"a legend's stranger":   {topotest.SMIMatrix + "NIC0: mlx5_0\nNIC1: mlx5_1\nNIC2: mlx5_2\n", 9, 1},
		"a legend that ends":    {topotest.SMIMatrix + "\nNIC Legend:\n\n  NIC0: mlx5_0\n", 10, 15},
		"a legend's name":       {topotest.SMIMatrix + "NIC0: mlx5_0\nNIC1: mlx5_0\n", 8, 7},
		"a legend twice":        {topotest.SMIMatrix + "NIC0: a\nNIC0: b\n", 8, 1},
		"a legend of nothing":   {topotest.SMIMatrix + "NIC0:\n", 7, 1},
		"a legend of a column":  {topotest.SMIMatrix + "NIC0: NIC1\nNIC1: x\n", 7, 7},
	} {
		_, err := SMI([]byte(tt.text), "torn.txt")
		var place *textfile.PlaceError
		if !errors.As(err, &place) {
			t.Errorf("%s: %v; want an error with a place", name, err)
			continue
		}
		if place.Line != tt.line || place.Column != tt.column || !ofFile(err, "torn.txt") {
			t.Errorf("%s: %v; want line %d, column %d", name, err, tt.line, tt.column)
		}
	}
}

func TestSMIPartOfMatrixFails(t *testing.T) {
	end := strings.LastIndex(topotest.SMIMatrix, "X")
	for cut := range end {
		if _, err := SMI([]byte(topotest.SMIMatrix[:cut]), "x"); err == nil {
			t.Errorf("read, though cut after %q", topotest.SMIMatrix[:cut])
		}
	}
	lines := strings.SplitAfter(strings.TrimSuffix(topotest.SMIMatrix, "\n"), "\n")
	for i, line := range lines {
		rest := slices.Concat(lines[:i], lines[i+1:])
		if _, err := SMI([]byte(strings.Join(rest, "")), "x"); err == nil {
			t.Errorf("read without line %d", i+1)
		}
		words := strings.Fields(line)
		for j := range min(len(words), 6) {
			if i == 0 && j >= 5 {
				break // the text ignores names of affinity columns
			}
			changed := slices.Clone(lines)
			changed[i] = strings.Join(slices.Delete(slices.Clone(words), j, j+1), "\t") + "\n"
			if _, err := SMI([]byte(strings.Join(changed, "")), "x"); err == nil {
				t.Errorf("read without word %d of line %d:\n%s", j+1, i+1, strings.Join(changed, ""))
			}
		}
	}
}

func TestSMIMatrixAboveLimitFails(t *testing.T) {
	var header strings.Builder
	for i := range maxSMIDevices + 1 {
		fmt.Fprintf(&header, "\tGPU%d", i)
	}
	_, err := SMI([]byte(header.String()), "x")
	if !testutil.HasError(err, &countError{items: "columns", max: maxSMIDevices, countless: true}) {
		t.Errorf("%d columns: %v", maxSMIDevices+1, err)
	}
	if _, err := SMI(make([]byte, textfile.MaxInput+1), "x"); !errors.Is(err, textfile.ErrTooLarge) {
		t.Errorf("a huge file: %v", err)
	}
	if _, err := SMI([]byte("no matrix"), "x"); !errors.Is(err, errNoHeader) {
		t.Errorf("no matrix: %v", err)
	}
	if _, err := SMI([]byte("\tGPU1\tGPU01\nGPU1\tX\tSYS\nGPU01\tSYS\tX\n"), "x"); !errors.Is(err, errSameGPU) {
		t.Errorf("a number twice: %v", err)
	}
}

// TestMatricesOfRealMachinesMatchSimpleParser compares SMI with a simple parser on the matrix of the tree and on the
// matrices of the collection.
func TestMatricesOfRealMachinesMatchSimpleParser(t *testing.T) {
	for _, file := range topotest.Files(t, "../internal/topotest/testdata/smi-*.txt", "smi-*.txt") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		h, err := Input(file, text)
		if err != nil {
			t.Error(err)
			continue
		}
		lines := strings.Split(string(text), "\n")
		header, _, _ := strings.Cut(lines[0], "CPU Affinity")
		columns := strings.Fields(header)
		if len(h.GPUs)+len(h.NICs) != len(columns) || h.Source.Kind != sourceSMI {
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
				if got, err := graph.Between(h, from, to); err != nil || got.Type.String() != want {
					t.Errorf("%s, %s to %s: %v, %v; want %s", filepath.Base(file), from, to, got.Type, err, want)
				}
			}
		}
	}
}

func FuzzReadSMI(f *testing.F) {
	topotest.AddSeeds(f, "smi-*.txt", topotest.SMIMatrix+topotest.SMILegend,
		strings.ReplaceAll(topotest.SMIMatrix, "\n", "\r\n"),
		" \x1b[4mGPU0 mlx5_0\x1b[0m CPU Affinity\nGPU0 X PIX 0-1\nmlx5_0 PIX X",
		"\tGPU4095\tGPU4096\tNUMA Affinity\nGPU4095\t X \tSYS\t65536\nGPU4096\tSYS\t X \t1\n")
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := SMI(text, "fuzz.txt")
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

// checkRead checks that a host can be planned and formatted, and that a path is equal in both
// directions.
func checkRead(t *testing.T, h *topo.Host) {
	plan, err := planner.Make(h, planner.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := plan.Check(); err != nil {
		t.Error(err)
	}
	if len(plan.Lanes) != len(h.GPUs) {
		t.Errorf("%d GPUs, %d lanes", len(h.GPUs), len(plan.Lanes))
	}
	topotest.CheckNumbers(t, h)
	for _, g := range h.GPUs[:min(len(h.GPUs), 16)] {
		for _, n := range h.NICs[:min(len(h.NICs), 16)] {
			path, err := graph.Between(h, g.BusID, n.Name)
			if err != nil {
				t.Fatal(err)
			}
			back, err := graph.Between(h, n.Name, g.BusID)
			if err != nil {
				t.Fatal(err)
			}
			if path != back || path.Bandwidth < 0 {
				t.Errorf("%s to %s: %v, and back %v", g.BusID, n.Name, path, back)
			}
		}
	}
}
