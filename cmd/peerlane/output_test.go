package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/graph"
	"github.com/peerlane/peerlane/topo/reader"
)

// onTerminal runs a command line with a terminal of this width as standard output, and returns the
// output.
func onTerminal(t *testing.T, columns uint16, args ...string) string {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine gives no pseudo-terminal: %v", err)
	}
	defer master.Close()
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine gives no pseudo-terminal: %v", err)
	}
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 50, Col: columns}); err != nil {
		t.Fatal(err)
	}
	seen := make(chan string)
	go func() {
		var all bytes.Buffer
		_, _ = all.ReadFrom(master) // EIO after the last byte, because the slave is closed
		seen <- all.String()
	}()
	var errOut bytes.Buffer
	code := run(args, slave, &errOut)
	if err := slave.Close(); err != nil {
		t.Fatal(err)
	}
	out := <-seen
	if code != 0 {
		t.Fatalf("exit status %d: %s", code, errOut.String())
	}
	return strings.ReplaceAll(out, "\r\n", "\n")
}

var escape = regexp.MustCompile("\x1b\\[[0-9;]*m")

func TestTerminalGetsColoursAndWidth(t *testing.T) {
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	_, host := recordedHost(t)
	args := append([]string{"plan", "--root", t.TempDir()}, host...)
	for _, columns := range []uint16{90, 120, 250} {
		out := onTerminal(t, columns, args...)
		if !escape.MatchString(out) {
			t.Errorf("%d columns: no colours", columns)
		}
		body := out[strings.Index(out, "Lanes"):] // the heading contains a path of any length
		for line := range strings.Lines(body) {
			line = strings.TrimRight(escape.ReplaceAllString(line, ""), " \n")
			if len(line) > int(columns) && !strings.HasPrefix(line, "Note:") { // the terminal wraps sentences
				t.Errorf("a line of %d on %d columns: %s", len(line), columns, line)
			}
		}
	}
	t.Setenv("NO_COLOR", "1")
	if out := onTerminal(t, 120, args...); escape.MatchString(out) {
		t.Error("colours in spite of NO_COLOR")
	}
}

// largeXML writes a topology file with the given number of GPUs on two sockets, a switch per GPU,
// and half as many NICs.
func largeXML(t *testing.T, gpus int) string {
	t.Helper()
	var b strings.Builder
	b.WriteString(`<system version="1">`)
	for numa := range 2 {
		fmt.Fprintf(&b, `<cpu numaid="%d" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">`, numa)
		for i := numa; i < gpus; i += 2 {
			fmt.Fprintf(&b, `<pci busid="%04x:01:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">`, i)
			fmt.Fprintf(&b, `<pci busid="%04x:02:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="%d"><gpu dev="%d" sm="90" rank="%d" gdr="1"/></pci>`, i, 4<<(i%3), i, i)
			if i%2 == 0 {
				fmt.Fprintf(&b, `<pci busid="%04x:03:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_%d" dev="%d" speed="%d" port="1" guid="0x%x" gdr="1"/></nic></pci>`, i, i/2, i/2, 100000+i, i+1)
			}
			b.WriteString(`</pci>`)
		}
		b.WriteString(`</cpu>`)
	}
	b.WriteString(`</system>`)
	file := filepath.Join(t.TempDir(), "topo.xml")
	if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func largeHost(t *testing.T, gpus int) *topo.Host {
	t.Helper()
	h, err := reader.Read(largeXML(t, gpus), topo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(h.GPUs) != gpus || len(h.NICs) != gpus/2 {
		t.Fatalf("%d GPUs and %d NICs are read", len(h.GPUs), len(h.NICs))
	}
	return h
}

// printMatrix prints the same text as go-pretty's table of the same cells, with and without
// colours.
func TestMatrixEqualsPrettyTable(t *testing.T) {
	checkMatrix(t, largeHost(t, 12), 18)
	// Each of two switches has six GPUs of three widths, and three NICs of one rate.
	h := largeHost(t, 12)
	for i := range h.GPUs {
		h.GPUs[i].Switch, h.GPUs[i].NUMA = h.GPUs[i%2].Switch, i%2
	}
	for i := range h.NICs {
		h.NICs[i].Switch, h.NICs[i].NUMA, h.NICs[i].Ports = h.GPUs[i%2].Switch, i%2, h.NICs[0].Ports
	}
	checkMatrix(t, h, 8)
}

// checkMatrix checks the matrices of a host with this number of distinct rows.
func checkMatrix(t *testing.T, h *topo.Host, rows int) {
	t.Helper()
	paths := graph.NewTable(h, topo.RulesNCCL)
	labels, _ := matrixLabels(h)
	for i := range labels {
		if paths.First(i) != i {
			rows++
		}
	}
	if rows != len(labels) {
		t.Fatalf("%d rows too many are distinct", len(labels)-rows)
	}
	odd := slices.Clone(labels)
	odd[2], odd[5], odd[13], odd[17] = "host/GPU1234567890", "", "网卡网卡网卡网卡网卡0", "ib 0 "
	var types, coloured cells
	for _, p := range paths.Paths {
		types.texts = append(types.texts, terminal.Paint(p.Type.String()))
		coloured.texts = append(coloured.texts, terminal.Paint(p.Type.String(), typeColours(p.Type)...))
	}
	// odder has a text that depends on the pair and not on the path.
	odder := cells{append(slices.Clone(types.texts), terminal.Paint("NV18")), func(from, to int, path int32) int32 {
		if (from+to)%5 == 0 {
			return int32(len(types.texts))
		}
		return path
	}}
	after := []column{{"CPU AFFINITY", slices.Repeat([]string{"0-47", "48-95,144-191", ""}, len(labels)/3)},
		{"NUMA", slices.Repeat([]string{"0"}, len(labels))}}
	for _, tt := range []struct {
		name   string
		labels []string
		cells  cells
		after  []column
		bold   bool
	}{
		{"types", labels, types, nil, false},
		{"bandwidths", labels, bandwidthCells(paths), nil, false},
		{"types in colours", labels, coloured, nil, true},
		{"odd labels", odd, types, nil, false},
		{"odd labels in colours", odd, coloured, nil, true},
		{"cells of pairs, and columns after them", odd, odder, after, true},
	} {
		heading := []any{""}
		for _, l := range tt.labels {
			heading = append(heading, l)
		}
		for _, c := range tt.after {
			heading = append(heading, c.heading)
		}
		want := table.New(tt.bold, heading...)
		for i, label := range tt.labels {
			row := table.Row{label}
			for j, at := range paths.Row(i) {
				switch {
				case i == j:
					row = append(row, "X")
				case tt.cells.at != nil:
					row = append(row, tt.cells.texts[tt.cells.at(i, j, at)])
				default:
					row = append(row, tt.cells.texts[at])
				}
			}
			for _, c := range tt.after {
				row = append(row, c.cells[i])
			}
			want.AppendRow(row)
		}
		var got bytes.Buffer
		w := bufio.NewWriter(&got)
		writeMatrix(w, tt.labels, paths, tt.cells, func(s string) terminal.Styled {
			if tt.bold {
				return terminal.Paint(s, bold)
			}
			return terminal.Paint(s)
		}, tt.after...)
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want.Render().String()+"\n", got.String()); diff != "" {
			t.Errorf("%s (-table +matrix):\n%s", tt.name, diff)
		}
	}
}

func TestNamesOfAFileStayOnTheirLine(t *testing.T) {
	h := &topo.Host{NICs: []topo.NIC{{Name: "a\nb"}, {Name: "\x1b[2Jc\t"}}}
	labels, _ := matrixLabels(h)
	if diff := cmp.Diff([]string{"a\ufffdb", "\ufffd[2Jc\ufffd"}, labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	h.NICs[0].Name = "a longer\nname"
	if _, legend := matrixLabels(h); !slices.Equal(legend,
		[]string{"NIC0  a longer\ufffdname", "NIC1  \ufffd[2Jc\ufffd"}) {
		t.Errorf("legend %q", legend)
	}
}

// encoding/json accepts the pairs, which printTopology writes one at a time.
func TestTopologyJSONIsValidForAnyNumberOfDevices(t *testing.T) {
	for _, gpus := range []int{0, 1, 6} {
		h := largeHost(t, 6)
		h.GPUs, h.NICs = h.GPUs[:gpus], h.NICs[:min(gpus, len(h.NICs))]
		devices := len(h.GPUs) + len(h.NICs)
		paths := graph.NewPathTable(h, topo.RulesNCCL)
		var b bytes.Buffer
		a := &app{out: terminal.New(&b)}
		if err := a.printTopology(topology{Version: topologyVersion, Rules: topo.RulesNCCL, Host: withLists(h)},
			paths); err != nil {
			t.Fatal(err)
		}
		var got topology
		if err := json.Unmarshal(b.Bytes(), &got); err != nil {
			t.Fatalf("%d GPUs: %v in\n%s", gpus, err, b.String())
		}
		if len(got.Pairs) != devices*max(0, devices-1)/2 || got.Pairs == nil || got.Paths == nil {
			t.Errorf("%d GPUs: %d pairs of %d devices", gpus, len(got.Pairs), devices)
		}
		for _, p := range got.Pairs {
			if p[2] != int(paths.At(p[0], p[1])) || p[3] != int(paths.At(p[1], p[0])) {
				t.Errorf("%d GPUs: pair %v", gpus, p)
			}
		}
	}
	infinite := largeHost(t, 6)
	infinite.GPUs[0].Link = math.Inf(1)
	if err := (&app{out: terminal.New(io.Discard)}).printTopology(topology{Host: infinite},
		&graph.PathTable{}); err == nil {
		t.Error("a number that JSON does not have was printed")
	}
}

// shut is a pipe whose reader closes it after a number of bytes.
type shut struct{ left int }

func (s *shut) Write(p []byte) (int, error) {
	if s.left -= len(p); s.left < 0 {
		return 0, errors.New("closed by the reader")
	}
	return len(p), nil
}

func TestOutputClosedByReaderIsError(t *testing.T) {
	file := largeXML(t, 64)
	for _, args := range [][]string{{"topo", "--input", file}, {"topo", "--input", file, "-o", "json"}} {
		for _, left := range []int{0, 1000, 100_000} {
			var errOut bytes.Buffer
			if code := run(args, &shut{left}, &errOut); code != exitFailure ||
				!strings.Contains(errOut.String(), "closed by the reader") {
				t.Errorf("%v with %d bytes read: exit status %d, %s", args, left, code, errOut.String())
			}
		}
	}
}

// printTopology must not hold the whole document in memory.
func TestLargeHostIsPrintedInLittleMemory(t *testing.T) {
	file := largeXML(t, 256)
	for _, tt := range []struct {
		form            string
		prints, mayTake int // bytes
	}{
		{formTable, 1e6, 20e6},
		{formJSON, 1e6, 30e6}, // including garbage
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var out counter
		if code := run([]string{"topo", "--input", file, "-o", tt.form}, &out, io.Discard); code != 0 {
			t.Fatalf("exit status %d", code)
		}
		runtime.ReadMemStats(&after)
		if took := int(after.TotalAlloc - before.TotalAlloc); int(out) < tt.prints || took > tt.mayTake {
			t.Errorf("a %s of %d bytes took %d bytes of memory, and may take %d", tt.form, out, took, tt.mayTake)
		}
	}
}

type counter int

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// Two NICs with the same paths share a row of the table. Its cell for the first NIC is the path
// between the two NICs.
func TestTopoOfTwoEqualNICsPrintsTheirPath(t *testing.T) {
	file := filepath.Join(t.TempDir(), "two.xml")
	text := `<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:02:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>
      <net name="a" dev="0" speed="100000" port="1" guid="0x1" maxconn="1" gdr="1"/></nic></pci>
    <pci busid="0000:03:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>
      <net name="b" dev="1" speed="100000" port="1" guid="0x2" maxconn="1" gdr="1"/></nic></pci>
  </cpu>
</system>
`
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"topo", "--input", file}, &out, &errOut); code != 0 {
		t.Fatalf("exit status %d: %s", code, errOut.String())
	}
	for _, row := range []string{"a  X     PHB", "b  PHB   X", "a  X     12.5", "b  12.5  X"} {
		words := strings.Fields(row)
		found := slices.ContainsFunc(strings.Split(out.String(), "\n"), func(line string) bool {
			return slices.Equal(strings.Fields(line), words)
		})
		if !found {
			t.Errorf("no row %q in:\n%s", row, out.String())
		}
	}
}
