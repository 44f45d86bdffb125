package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"strings"
	"unicode"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/peerlane/peerlane/topo"
)

// Forms of output.
const (
	formTable = "table"
	formJSON  = "json"
	formXML   = "xml" // of peerlane topo alone
)

// form is the value of -o, one of known.
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

// addForm gives a command the flag -o, with the table, JSON, and more forms.
func addForm(cmd *cobra.Command, more ...string) *form {
	f := &form{formTable, append([]string{formTable, formJSON}, more...)}
	cmd.Flags().VarP(f, "output", "o", "print in `FORM`: "+strings.Join(f.known, ", "))
	complete(cmd, "output", f.known...)
	return f
}

// printJSON prints one indented document.
func (a *app) printJSON(v any) error {
	text, err := indented(v)
	if err != nil {
		return err
	}
	_, _ = a.out.Write(text) // a.out remembers its errors
	return nil
}

func indented(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("printing JSON: %w", err)
	}
	return b.Bytes(), nil
}

// printTopology prints t as printJSON would with these paths, but one at a time:
// those of hundreds of devices are tens of megabytes of text.
func (a *app) printTopology(t topology, paths iter.Seq[topo.Pair]) error {
	t.Paths = []topo.Pair{}
	text, err := indented(t)
	if err != nil {
		return err
	}
	const none = "[]\n}\n" // the end: paths are the last field
	w := bufio.NewWriterSize(a.out, 64<<10)
	_, _ = w.Write(bytes.TrimSuffix(text, []byte(none)))
	before, after := "[\n    ", none
	var one bytes.Buffer
	e := json.NewEncoder(&one)
	e.SetIndent("    ", "  ")
	e.SetEscapeHTML(false)
	for p := range paths {
		one.Reset()
		if err := e.Encode(p); err != nil {
			return fmt.Errorf("printing JSON: %w", err)
		}
		_, _ = w.WriteString(before)
		if _, err := w.Write(bytes.TrimSuffix(one.Bytes(), []byte("\n"))); err != nil {
			return nil // a.out remembers it
		}
		before, after = ",\n    ", "\n  ]\n}\n"
	}
	_, _ = w.WriteString(after)
	_ = w.Flush()
	return nil
}

// sink is standard output. It keeps the first error, so that printing need not
// look after it line by line: run does, at the end.
type sink struct {
	io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.Writer.Write(p)
	if err != nil && s.err == nil {
		s.err = err
	}
	return n, err
}

// terminal is the terminal that w is, nil where it is none.
func terminal(w io.Writer) *os.File {
	if s, ok := w.(*sink); ok {
		w = s.Writer
	}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return f
	}
	return nil
}

// colourful says whether a reader of w sees colours: a terminal does, unless
// NO_COLOR (https://no-color.org) or a dumb terminal speaks against it.
func colourful(w io.Writer) bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && terminal(w) != nil
}

// columns is the width of the terminal that w is, 0 where it is none: what is
// piped is cut by whoever reads it.
func columns(w io.Writer) int {
	f := terminal(w)
	if f == nil {
		return 0
	}
	wide, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0 // a terminal that cannot tell is treated like a pipe
	}
	return wide
}

// newTable is the look of all tables: columns two blanks apart, no lines, bold
// headings where there are colours.
func (a *app) newTable(heading ...any) table.Writer {
	t := table.NewWriter()
	style := table.StyleDefault
	style.Name = "peerlane"
	style.Box.PaddingLeft, style.Box.PaddingRight = "", "  "
	style.Format = table.FormatOptions{Header: text.FormatDefault, Row: text.FormatDefault}
	style.Options = table.Options{}
	if colourful(a.out) {
		style.Color.Header = text.Colors{text.Bold}
	}
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	t.AppendHeader(table.Row(heading))
	return t
}

// paint colours s where there are colours.
func (a *app) paint(s string, colours ...text.Color) string {
	if !colourful(a.out) {
		return s
	}
	return text.Colors(colours).Sprint(s)
}

// wrapLast lets the last column of a table take what a terminal's width leaves
// it, at least 24, and wraps it there.
func (a *app) wrapLast(t table.Writer, heading string) {
	wide := columns(a.out)
	if wide == 0 {
		return
	}
	longest := 0
	for line := range strings.Lines(t.Render()) {
		if at := strings.Index(line, heading); at >= 0 {
			longest = text.StringWidthWithoutEscSequences(line[:at])
			break
		}
	}
	t.SetColumnConfigs([]table.ColumnConfig{{
		Name: heading, WidthMax: max(24, wide-longest-1), WidthMaxEnforcer: text.WrapSoft,
	}})
}

// section prints a heading and a table below it.
func (a *app) section(title string, t table.Writer) {
	fmt.Fprintf(a.out, "%s\n%s\n\n", a.paint(title, text.Bold, text.FgCyan), t.Render())
}

// cells are what a matrix of paths shows: texts, of which there are far fewer
// than cells.
type cells struct {
	texts []string
	// at says which text shows the path from one device to another, given its
	// place among the table's paths; nil where it is the same place.
	at func(from, to int, path int32) int32
}

// column is one that follows those of the devices.
type column struct {
	heading string
	cells   []string // for each device
}

// printMatrix prints a heading, and below it a row and a column for each device
// in the manner of `nvidia-smi topo -m`. It looks as a section with a newTable
// does, which keeps every cell several times: of hundreds of devices there are
// as many as the square of that, and few differ.
func (a *app) printMatrix(title string, devices []string, paths *topo.PathTable, show cells, after ...column) {
	w := bufio.NewWriterSize(a.out, 64<<10)
	fmt.Fprintln(w, a.paint(title, text.Bold, text.FgCyan))
	writeMatrix(w, devices, paths, show, func(s string) string { return a.paint(s, text.Bold) }, after...)
	fmt.Fprintln(w)
	_ = w.Flush() // a.out remembers its errors
}

// writeMatrix writes one line after the other; heading is for each word of the
// first.
func writeMatrix(w *bufio.Writer, devices []string, paths *topo.PathTable, show cells, heading func(string) string, after ...column) {
	at := show.at
	if at == nil {
		at = func(_, _ int, path int32) int32 { return path }
	}
	const self = "X"
	width := text.StringWidthWithoutEscSequences
	wide := make([]int, len(show.texts))
	for i, cell := range show.texts {
		wide[i] = width(cell)
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
		}
	}
	for i := range devices {
		for j, path := range paths.Row(i) {
			if path < 0 {
				columns[j] = max(columns[j], len(self))
			} else {
				columns[j] = max(columns[j], wide[at(i, j, path)])
			}
		}
		for j, c := range after {
			columns[len(devices)+j] = max(columns[len(devices)+j], width(c.cells[i]))
		}
	}
	blanks := strings.Repeat(" ", max(first, slices.Max(columns))+2)
	line := []byte(heading(blanks[:first+2]))
	for i, h := range headings {
		line = append(line, heading(h+blanks[:columns[i]-width(h)+2])...)
	}
	write := func() {
		_, _ = w.Write(bytes.TrimRightFunc(line, unicode.IsSpace))
		_ = w.WriteByte('\n')
		line = line[:0]
	}
	write()
	for i, device := range devices {
		line = append(append(line, device...), blanks[:first-width(device)+2]...)
		for j, path := range paths.Row(i) {
			cell, used := self, len(self)
			if path >= 0 {
				text := at(i, j, path)
				cell, used = show.texts[text], wide[text]
			}
			line = append(append(line, cell...), blanks[:columns[j]-used+2]...)
		}
		for j, c := range after {
			line = append(append(line, c.cells[i]...), blanks[:columns[len(devices)+j]-width(c.cells[i])+2]...)
		}
		write()
	}
}

// printable keeps a stranger's text, a name of a file, say, on its line and its hands
// off the terminal.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return unicode.ReplacementChar
		}
		return r
	}, name)
}

// dash stands for what is not known or does not exist, so that every cell of a
// table is a word.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
