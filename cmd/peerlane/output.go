package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/topo/graph"
)

// Output formats.
const (
	formTable = "table"
	formJSON  = "json"
	formXML   = "xml" // peerlane topo only
	formWide  = "wide"
)

// Output formats that are pictures.
const (
	formSVG  = "svg"
	formHTML = "html"
)

// picture reports whether the format is SVG or HTML.
func (f *form) picture() bool { return f.value == formSVG || f.value == formHTML }

// form is the value of the flag -o, one of known.
type form struct {
	value string
	known []string
}

func (f *form) String() string { return f.value }
func (f *form) Type() string   { return "form" }
func (f *form) Set(s string) error {
	if !slices.Contains(f.known, s) {
		last := len(f.known) - 1
		return fmt.Errorf("the form of output is %s or %s", strings.Join(f.known[:last], ", "), f.known[last])
	}
	f.value = s
	return nil
}

// addForm adds the flag -o to a command, with the formats table, JSON and more.
func addForm(cmd *cobra.Command, more ...string) *form {
	f := &form{formTable, append([]string{formTable, formJSON}, more...)}
	cmd.Flags().VarP(f, "output", "o", "print in `FORM`: "+strings.Join(f.known, ", "))
	complete(cmd, "output", f.known...)
	return f
}

// printJSON prints v as an indented document.
func (a *app) printJSON(v any) error {
	text, err := marshalIndented(v)
	if err != nil {
		return err
	}
	_, _ = a.out.Document().Write(text) // a.out keeps a write error
	return nil
}

func marshalIndented(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("print JSON: %w", err)
	}
	return terminal.JSON(b.Bytes()), nil
}

// printTopology prints t and, as the last field, each pair of devices once: two indices into GPUs
// followed by NICs, and the indices in t.Paths of the two directions. It does not build the
// document in memory, because large hosts have millions of pairs.
func (a *app) printTopology(t topology, paths *graph.PathTable) error {
	t.Paths, t.Pairs = append([]graph.DistinctPath{}, paths.Paths...), [][4]int{}
	text, err := marshalIndented(t)
	if err != nil {
		return err
	}
	const none = "[]\n}\n" // the last field, pairs, is empty
	w := bufio.NewWriterSize(a.out.Document(), 64<<10)
	_, _ = w.Write(bytes.TrimSuffix(text, []byte(none)))
	before, after := "[\n    [", none
	var line []byte
	for i := range paths.Devices() {
		for j := i + 1; j < paths.Devices(); j++ {
			line = append(line[:0], before...)
			for n, number := range [...]int{i, j, int(paths.At(i, j)), int(paths.At(j, i))} {
				if n > 0 {
					line = append(line, ',')
				}
				line = strconv.AppendInt(line, int64(number), 10)
			}
			if _, err := w.Write(append(line, ']')); err != nil {
				return nil // a.out keeps a write error
			}
			before, after = ",\n    [", "\n  ]\n}\n"
		}
	}
	_, _ = w.WriteString(after)
	_ = w.Flush()
	return nil
}

// SGR attributes.
const (
	bold        = 1
	red         = 31
	green       = 32
	yellow      = 33
	cyan        = 36
	brightGreen = 92
)

// newTable returns a table, with bold headings if the output has colours.
func (a *app) newTable(heading ...any) *table.Writer {
	return table.New(a.colours(), heading...)
}

// colours reports whether standard output has colours.
func (a *app) colours() bool { return a.out != nil && a.out.Colours() }

// paint sanitises s and, if the output has colours, adds the attributes.
func (a *app) paint(s string, attributes ...int) terminal.Styled {
	if !a.colours() {
		attributes = nil
	}
	return terminal.Paint(s, attributes...)
}

// wrapLast wraps the last column of a table at the width of the terminal.
func (a *app) wrapLast(t *table.Writer, heading string) {
	if width := a.out.Columns(); width > 0 {
		t.Wrap(heading, width)
	}
}

// columns is the width of a table that also has a wide form, if the output is not a terminal.
const columns = 100

// fit wraps the last column of a table at the width of the terminal, or at columns if standard
// output is not a terminal. It does not wrap the wide form.
func (a *app) fit(t *table.Writer, heading, form string) {
	if form == formWide {
		return
	}
	width := a.out.Columns()
	if width <= 0 {
		width = columns
	}
	t.Wrap(heading, width)
}

// section prints a heading and a table.
func (a *app) section(title string, t *table.Writer) {
	a.out.Printf("%s\n%s\n\n", a.paint(title, bold, cyan), t.Render())
}

// cells is the content of a matrix of paths: the distinct texts, and an index for every cell.
type cells struct {
	texts []terminal.Styled
	// at returns the index in texts for two devices, from the index of their path in the table.
	// Without at, the two indices are equal.
	at func(from, to int, path int32) int32
}

// column is an extra column to the right of the devices.
type column struct {
	heading string
	// cells has one cell per device.
	cells []string
}

// printMatrix prints a heading and a matrix with a row and a column for each device, in the layout
// of `nvidia-smi topo -m`. It does not use newTable, which copies every cell several times: the
// number of cells is the square of hundreds of devices, with few distinct texts.
func (a *app) printMatrix(title string, devices []string, paths *graph.Table, show cells, after ...column) {
	w := bufio.NewWriterSize(a.out.Document(), 64<<10)
	fmt.Fprintln(w, a.paint(title, bold, cyan))
	writeMatrix(w, devices, paths, show, func(s string) terminal.Styled { return a.paint(s, bold) }, after...)
	fmt.Fprintln(w)
	_ = w.Flush() // a.out keeps a write error
}

// writeMatrix writes the matrix line by line; heading styles each word of the first line. It
// sanitises device names and the extra columns.
func writeMatrix(w *bufio.Writer, devices []string, paths *graph.Table, show cells,
	heading func(string) terminal.Styled, after ...column) {
	at := func(i, j int, path int32) int32 {
		if show.at == nil {
			return path
		}
		return show.at(i, j, path)
	}
	devices = sanitised(devices)
	after = slices.Clone(after)
	for i := range after {
		after[i].cells = sanitised(after[i].cells)
	}
	const self = "X"
	width := text.StringWidthWithoutEscSequences
	wide := make([]int, len(show.texts))
	for i, cell := range show.texts {
		wide[i] = width(cell.String())
	}
	headings := slices.Clone(devices)
	for _, c := range after {
		headings = append(headings, c.heading)
	}
	first := 0
	columns := make([]int, len(headings))
	for i, h := range headings {
		columns[i] = width(h)
		if i < len(devices) {
			first = max(first, columns[i])
			columns[i] = max(columns[i], len(self))
		}
	}
	// likeBefore reports whether the row has the cells of an earlier row, except for the devices
	// themselves.
	likeBefore := func(i int) bool { return show.at == nil && paths.First(i) != i }
	for i := range devices {
		if !likeBefore(i) {
			for j, path := range paths.Row(i) {
				// Without show.at, the rows of other devices with the same paths also have the
				// cell of the device itself.
				if path >= 0 && (i != j || show.at == nil) {
					columns[j] = max(columns[j], wide[at(i, j, path)])
				}
			}
		}
		for j, c := range after {
			columns[len(devices)+j] = max(columns[len(devices)+j], width(c.cells[i]))
		}
	}
	blanks := strings.Repeat(" ", max(first, slices.Max(columns))+2)
	var cellOf [][]string // by width of the column and index of the text
	kinds, kindOf := make([]int, len(devices)), map[int]int{}
	for j := range devices {
		kind, known := kindOf[columns[j]]
		if !known {
			kind = len(cellOf)
			kindOf[columns[j]], cellOf = kind, append(cellOf, make([]string, len(show.texts)))
		}
		kinds[j] = kind
	}
	line := []byte(heading(blanks[:first+2]).String())
	for i, h := range headings {
		line = append(line, heading(h+blanks[:columns[i]-width(h)+2]).String()...)
	}
	write := func() {
		_, _ = w.Write(bytes.TrimRightFunc(line, unicode.IsSpace))
		_ = w.WriteByte('\n')
		line = line[:0]
	}
	write()
	// row holds the cells of a row, and starts their places. The cell of the device itself is that of
	// another device of the same row, or empty.
	var row []byte
	starts, rowOf := make([]int, len(devices)+1), -1
	for i, device := range devices {
		if !likeBefore(i) || rowOf != paths.First(i) {
			row, rowOf = row[:0], paths.First(i)
			for j, path := range paths.Row(i) {
				starts[j] = len(row)
				if path < 0 || i == j && show.at != nil {
					continue
				}
				// Large hosts have millions of cells, and few that differ.
				text := at(i, j, path)
				padded := &cellOf[kinds[j]][text]
				if *padded == "" {
					*padded = show.texts[text].String() + blanks[:columns[j]-wide[text]+2]
				}
				row = append(row, *padded...)
			}
			starts[len(devices)] = len(row)
		}
		line = append(append(line, device...), blanks[:first-width(device)+2]...)
		line = append(append(line, row[:starts[i]]...), self...)
		line = append(append(line, blanks[:columns[i]-len(self)+2]...), row[starts[i+1]:]...)
		for j, c := range after {
			line = append(append(line, c.cells[i]...), blanks[:columns[len(devices)+j]-width(c.cells[i])+2]...)
		}
		write()
	}
}

func sanitised(texts []string) []string {
	list := make([]string, len(texts))
	for i, s := range texts {
		list[i] = terminal.Sanitise(s)
	}
	return list
}

// formatter sanitises log messages: with colours, a logrus.TextFormatter does not quote the
// message, only the fields.
type formatter struct{ logrus.Formatter }

func (f formatter) Format(e *logrus.Entry) ([]byte, error) {
	clean := *e
	clean.Message = terminal.Lines(e.Message)
	text, err := f.Formatter.Format(&clean)
	if _, ok := f.Formatter.(*logrus.JSONFormatter); ok {
		text = terminal.JSON(text)
	}
	return text, err
}

// dash returns "-" for an empty text, so that every cell of a table is one word.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
