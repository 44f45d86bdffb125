package reader

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
	"github.com/peerlane/peerlane/topo/internal/textfile"
)

// sourceSMI is the Source.Kind of a host that was read from the text of
// nvidia-smi topo -m.
const sourceSMI = "nvidia-smi"

// maxSMIDevices bounds the columns of a matrix; matrices of real machines have a few dozen
// columns.
const maxSMIDevices = 256

// smiNote is the note of every host that SMI reads.
const smiNote = "a matrix of nvidia-smi has only path types: no PCIe tree, no bandwidths, no PCI " +
	"addresses and no port states; GPUs have the names of the matrix, and every NIC counts as active"

// SMI reads the output of `nvidia-smi topo -m`: a row and a column for every GPU and NIC, and in a
// cell the type of the path between two devices. SMI ignores colours, CRLF and prose around the
// matrix, and accepts columns separated by tabs or blanks. Errors contain name.
//
// The returned host has [topo.Host.Matrix] in place of a tree. GPUs have no PCI address: BusID is the
// name in the matrix, "GPU0". A NIC has the name in the legend ("NIC0: mlx5_0"), or the name in
// the matrix if the legend is missing.
//
// SMI refuses an incomplete matrix with a [textfile.PlaceError], because half of a topology leads to wrong
// plans. A matrix is incomplete if a row, a column or a cell is missing, or the two halves differ.
func SMI(text []byte, name string) (*topo.Host, error) {
	h, err := readSMI(text)
	if err == nil {
		err = h.CheckText()
	}
	if err != nil {
		return nil, &textfile.FileError{Form: "matrix of nvidia-smi topo -m", Name: name, Err: err}
	}
	h.Source = topo.Source{Kind: sourceSMI, File: name}
	return h, nil
}

// word is a piece of a line without blanks.
type word struct {
	text   string
	column int
	tab    int // number of tabs before the word
}

// smiLine is a line in words.
type smiLine struct {
	number int
	words  []word
	end    int // column after the last character
}

func (l smiLine) fail(column int, format string, args ...any) error {
	return &textfile.PlaceError{Line: l.number, Column: column, Err: fmt.Errorf(format, args...)}
}

// escape is a control sequence of a terminal: a colour, an underline.
var escape = lazyregexp.New(`^\x1b\[[0-?]*[ -/]*[@-~]`)

// splitLine cuts a line into words. Control sequences count as characters and
// belong to no word.
func splitLine(number int, text string) smiLine {
	l := smiLine{number: number, end: 1}
	var w strings.Builder
	start, tabs := 0, 0
	flush := func() {
		if w.Len() > 0 {
			l.words = append(l.words, word{w.String(), start, tabs})
			w.Reset()
		}
	}
	for i, column := 0, 1; i < len(text); {
		_, size := utf8.DecodeRuneInString(text[i:])
		switch c := text[i]; {
		case c == 0x1b && escape.MatchString(text[i:]):
			size = len(escape.FindString(text[i:]))
			column += size - 1
		case c == ' ' || c == '\t' || c == '\r':
			flush()
			if c == '\t' {
				tabs++
			}
		default:
			if w.Len() == 0 {
				start = column
			}
			w.WriteString(text[i : i+size])
			l.end = column + 1
		}
		i += size
		column++
	}
	flush()
	return l
}

var (
	smiGPU  = lazyregexp.New(`^GPU([0-9]{1,6})$`)
	smiNIC  = lazyregexp.New(`^NIC[0-9]{1,6}$`)
	smiNV   = lazyregexp.New(`^NV[1-9][0-9]{0,3}$`)
	smiName = lazyregexp.New(`^[A-Za-z][A-Za-z0-9_.@:-]*$`)
)

// smiCell returns the path type of a cell. Drivers before 375 write SOC for SYS, and PSB for the
// switch on a board with two GPUs.
func smiCell(text string) (topo.PathType, bool) {
	switch text {
	case "X":
		return topo.LOC, true
	case "PIX", "PSB":
		return topo.PIX, true
	case "PXB":
		return topo.PXB, true
	case "PHB":
		return topo.PHB, true
	case "NODE":
		return topo.NODE, true
	case "SYS", "SOC":
		return topo.SYS, true
	}
	return topo.NVL, smiNV.MatchString(text)
}

// smiHeader reports whether a line is the header of a matrix: a header begins, indented or not,
// with a GPU, and a row would continue with a path type.
func smiHeader(l smiLine) bool {
	if len(l.words) == 0 || !smiGPU.MatchString(l.words[0].text) {
		return false
	}
	if len(l.words) == 1 {
		return true
	}
	if _, row := smiCell(l.words[1].text); row {
		return false
	}
	// On a host with a single GPU, a header has no second GPU.
	return smiGPU.MatchString(l.words[1].text) ||
		slices.ContainsFunc(l.words, func(w word) bool { return w.text == "Affinity" })
}

// smiRow reports whether a line is a row: a device, and then a cell.
func smiRow(l smiLine) bool {
	if len(l.words) < 2 {
		return false
	}
	_, cell := smiCell(l.words[1].text)
	return cell && (smiGPU.MatchString(l.words[0].text) || smiNIC.MatchString(l.words[0].text))
}

// smiIndex is the number in the name of a GPU.
func smiIndex(label string) int {
	index, _ := strconv.Atoi(smiGPU.FindStringSubmatch(label)[1]) // six digits are a number
	return index
}

type smiReader struct {
	labels   []string
	affinity bool // columns follow the matrix
	numa     int  // index of the NUMA affinity, -1 if missing
	rows     []smiLine
	types    [][]topo.PathType
	renamed  map[string]string // "NIC0" to "mlx5_0"
}

func readSMI(text []byte) (*topo.Host, error) {
	if len(text) > textfile.MaxInput {
		return nil, textfile.ErrTooLarge
	}
	r := smiReader{numa: -1, renamed: map[string]string{}}
	number, last := 0, smiLine{number: 1, end: 1}
	legend := 0 // the line of the NIC legend's heading
	for line := range strings.Lines(string(text)) {
		number++
		l := splitLine(number, strings.TrimRight(line, "\r\n"))
		if len(l.words) == 0 {
			continue
		}
		var err error
		switch {
		case r.labels == nil && smiHeader(l):
			err = r.header(l)
		case r.labels == nil && smiRow(l):
			err = l.fail(l.words[0].column, "this is a row of a matrix, but the line with the names of the columns is "+
				"missing above it")
		case r.labels == nil: // prose
		case len(r.rows) < len(r.labels):
			err = r.row(l)
		case smiHeader(l):
			err = l.fail(l.words[0].column, "a second matrix begins here, but a file describes one host")
		case smiRow(l) || slices.Contains(r.labels, l.words[0].text):
			err = l.fail(l.words[0].column, "the matrix has more rows than columns (%d)", len(r.labels))
		case l.words[0].text == "NIC" && len(l.words) > 1 && strings.HasPrefix(l.words[1].text, "Legend"):
			legend = number
		default:
			err = r.legend(l)
		}
		if err != nil {
			return nil, err
		}
		last = l
	}
	switch {
	case r.labels == nil:
		return nil, errNoHeader
	case len(r.rows) < len(r.labels):
		return nil, last.fail(last.end, "the matrix ends here, but the row of %s is missing", r.labels[len(r.rows)])
	}
	if err := r.symmetric(); err != nil {
		return nil, err
	}
	if legend > 0 || len(r.renamed) > 0 {
		for _, label := range r.labels {
			if smiNIC.MatchString(label) && r.renamed[label] == "" {
				return nil, last.fail(last.end, "the legend of NICs ends here, but %s is missing", label)
			}
		}
	}
	return r.host()
}

// header reads the names of the columns: the devices, then "CPU Affinity", "NUMA Affinity" and
// "GPU NUMA ID", as far as the driver's version has the columns.
func (r *smiReader) header(l smiLine) error {
	seen := map[string]bool{}
	for i, w := range l.words {
		next := ""
		if i+1 < len(l.words) {
			next = l.words[i+1].text
		}
		if w.text == "CPU" && next == "Affinity" || w.text == "NUMA" && next == "Affinity" || w.text == "GPU" &&
			next == "NUMA" {
			return r.affinities(l.words[i:], l)
		}
		switch {
		case !smiName.MatchString(w.text):
			return l.fail(w.column, "%q is not the name of a GPU or NIC", w.text)
		case smiGPU.MatchString(w.text) && smiIndex(w.text) > topo.MaxIndex:
			return l.fail(w.column, "%s: %w", w.text, topo.CheckIndex(smiIndex(w.text)))
		case seen[w.text]:
			return l.fail(w.column, "a second column %s", w.text)
		case len(r.labels) == maxSMIDevices:
			return l.fail(w.column, "%w", &countError{items: "columns", max: maxSMIDevices, countless: true})
		}
		seen[w.text] = true
		r.labels = append(r.labels, w.text)
	}
	return nil
}

func (r *smiReader) affinities(words []word, l smiLine) error {
	r.affinity = true
	known := []string{"CPU Affinity", "NUMA Affinity", "GPU NUMA ID"}
	for column := 0; len(words) > 0; column++ {
		i := slices.IndexFunc(known, func(name string) bool {
			parts := strings.Fields(name)
			return len(words) >= len(parts) && slices.EqualFunc(words[:len(parts)], parts,
				func(w word, part string) bool { return w.text == part })
		})
		if i < 0 {
			return l.fail(words[0].column, "unknown column %q of nvidia-smi topo -m; known are %s", words[0].text,
				strings.Join(known, ", "))
		}
		if known[i] == "NUMA Affinity" {
			r.numa = column
		}
		words = words[len(strings.Fields(known[i])):]
	}
	return nil
}

func (r *smiReader) row(l smiLine) error {
	i := len(r.rows)
	if first := l.words[0]; first.text != r.labels[i] {
		return l.fail(first.column, "expected the row of %s instead of %q", r.labels[i], first.text)
	}
	cells := l.words[1:]
	types := make([]topo.PathType, 0, len(r.labels))
	for j, to := range r.labels {
		if j >= len(cells) {
			return l.fail(l.end, "the row of %s ends here, but its cell for %s is missing", r.labels[i], to)
		}
		t, ok := smiCell(cells[j].text)
		switch {
		case !ok:
			return l.fail(cells[j].column, "%q is not a path type (X PIX PXB PHB NODE SYS NV1 ..): the cell from %s to %s "+
				"belongs here", cells[j].text, r.labels[i], to)
		case (t == topo.LOC) != (i == j):
			return l.fail(cells[j].column, "%q from %s to %s: X is only valid on the diagonal, so a cell is "+
				"missing or too many", cells[j].text, r.labels[i], to)
		}
		types = append(types, t)
	}
	for _, w := range cells[len(r.labels):] {
		if _, cell := smiCell(w.text); cell || !r.affinity {
			return l.fail(w.column, "%q: the row of %s has more cells than the matrix has columns (%d)", w.text, r.labels[i],
				len(r.labels))
		}
	}
	r.rows = append(r.rows, l)
	r.types = append(r.types, types)
	return nil
}

// symmetric compares the two halves. The driver prints both halves from a single table, so
// different halves are damaged text. symmetric compares the text of cells, because the count in
// NV4 is equal in both directions.
func (r *smiReader) symmetric() error {
	for i, l := range r.rows {
		for j := range i {
			here, mirror := l.words[1+j], r.rows[j].words[1+i]
			if here.text != mirror.text {
				return l.fail(here.column, "%s from %s to %s, but %s in the other direction (line %d, column %d)",
					here.text, r.labels[i], r.labels[j], mirror.text, r.rows[j].number, mirror.column)
			}
		}
	}
	return nil
}

// legend reads "NIC0: mlx5_0" below the matrix, and skips prose.
func (r *smiReader) legend(l smiLine) error {
	label, isLabel := strings.CutSuffix(l.words[0].text, ":")
	if !isLabel || !smiNIC.MatchString(label) {
		return nil
	}
	if len(l.words) != 2 || !smiName.MatchString(l.words[1].text) {
		return l.fail(l.words[0].column, "the legend of %s is not a device name", label)
	}
	name := l.words[1]
	switch {
	case !slices.Contains(r.labels, label):
		return l.fail(l.words[0].column, "the legend names %s, but the matrix has no such column", label)
	case r.renamed[label] != "":
		return l.fail(l.words[0].column, "the legend names %s twice", label)
	}
	for other, taken := range r.renamed {
		if taken == name.text {
			return l.fail(name.column, "the legend gives %s the name %s, and also %s", label, taken, other)
		}
	}
	if slices.Contains(r.labels, name.text) {
		return l.fail(name.column, "the legend gives %s the name %s, which is another column", label, name.text)
	}
	r.renamed[label] = name.text
	return nil
}

// host creates the devices, in the order of Host, and the matrix.
func (r *smiReader) host() (*topo.Host, error) {
	h := &topo.Host{CPUs: []topo.CPU{}, Switches: []topo.Switch{}, GPUs: []topo.GPU{}, NICs: []topo.NIC{},
		Matrix: map[[2]string]topo.PathType{}}
	names := slices.Clone(r.labels)
	indices := map[int]string{}
	for i, label := range r.labels {
		if !smiGPU.MatchString(label) {
			names[i] = cmp.Or(r.renamed[label], label)
			h.NICs = append(h.NICs, topo.NIC{Name: names[i], NUMA: -1})
			continue
		}
		index := smiIndex(label)
		if other, taken := indices[index]; taken {
			return nil, fmt.Errorf("%s and %s %w", other, label, errSameGPU)
		}
		indices[index] = label
		h.GPUs = append(h.GPUs, topo.GPU{Index: index, BusID: label, Minor: -1, NUMA: r.numaOf(r.rows[i])})
	}
	for i, from := range names {
		for j, to := range names {
			h.Matrix[[2]string{from, to}] = r.types[i][j]
		}
	}
	for i := range h.GPUs {
		h.GPUs[i].NVLinks = r.nvlinks(h.GPUs[i].BusID)
	}
	slices.SortFunc(h.GPUs, func(a, b topo.GPU) int { return cmp.Compare(a.Index, b.Index) })
	slices.SortFunc(h.NICs, func(a, b topo.NIC) int { return topo.CompareNatural(a.Name, b.Name) })
	h.Judge()
	h.Note("%s", smiNote)
	return h, nil
}

// maxNVLinks is the maximum number of NVLinks of a GPU: 18 from Hopper on.
const maxNVLinks = 18

// nvlinks returns the NVLinks of a GPU, from the count in NV4. If the sum over peers exceeds the
// links of a GPU, the links lead to NVSwitches, and every peer shares the links.
func (r *smiReader) nvlinks(gpu string) (links []topo.NVLink) {
	i, total, equal := slices.Index(r.labels, gpu), 0, true
	for j, to := range r.labels {
		text, counts := strings.CutPrefix(r.rows[i].words[1+j].text, "NV")
		if !counts || !smiGPU.MatchString(to) {
			continue
		}
		n, _ := strconv.Atoi(text) // up to four digits, as smiCell has seen
		equal = equal && (len(links) == 0 || links[0].Count == n)
		links = append(links, topo.NVLink{Peer: to, Count: n})
		total += n
	}
	if total > maxNVLinks && equal && len(links) > 1 {
		return []topo.NVLink{{Count: links[0].Count}}
	}
	return links
}

// numaOf reads the NUMA affinity of a row; -1 for an empty cell or several nodes. A cell can be
// empty only between tabs.
func (r *smiReader) numaOf(l smiLine) int {
	tail := l.words[1+len(r.labels):]
	if r.numa < 0 || len(tail) == 0 {
		return -1
	}
	column := r.numa
	if last := l.words[len(r.labels)]; tail[0].tab > last.tab {
		column = slices.IndexFunc(tail, func(w word) bool { return w.tab == last.tab+1+r.numa })
	}
	if column < 0 || column >= len(tail) {
		return -1
	}
	numa, err := strconv.Atoi(tail[column].text)
	if err != nil || topo.CheckNUMA(numa) != nil {
		return -1
	}
	return numa
}
