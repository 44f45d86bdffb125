package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"slices"
	"strconv"
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
)

// form is the value of -o.
type form string

func (f *form) String() string { return string(*f) }
func (f *form) Type() string   { return "form" }
func (f *form) Set(s string) error {
	if s != formTable && s != formJSON {
		return fmt.Errorf("the form of output is %s or %s", formTable, formJSON)
	}
	*f = form(s)
	return nil
}

// addForm gives a command the flag -o.
func addForm(cmd *cobra.Command) *form {
	f := form(formTable)
	cmd.Flags().VarP(&f, "output", "o", "print in `FORM`: table, json")
	complete(cmd, "output", formTable, formJSON)
	return &f
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
// those of hundreds of devices are tens of megabytes of text, for which
// encoding/json takes five times the memory and most of the command's time.
func (a *app) printTopology(t topology, paths iter.Seq[topo.Pair]) error {
	t.Paths = []topo.Pair{}
	text, err := indented(t)
	if err != nil {
		return err
	}
	const none = "[]\n}\n" // the end: paths are the last field
	w := bufio.NewWriterSize(a.out, 64<<10)
	_, _ = w.Write(bytes.TrimSuffix(text, []byte(none)))
	before, after := "[\n", none
	var pair pairText
	for p := range paths {
		pair.text = pair.text[:0]
		pair.append(&p)
		if pair.err != nil {
			return fmt.Errorf("printing JSON: %w", pair.err)
		}
		_, _ = w.WriteString(before)
		if _, err := w.Write(pair.text); err != nil {
			return nil // a.out remembers it
		}
		before, after = ",\n", "\n  ]\n}\n"
	}
	_, _ = w.WriteString(after)
	_ = w.Flush()
	return nil
}

// pairText is what encoding/json makes of a topo.Pair in a list of "paths".
type pairText struct {
	text []byte
	err  error
}

func (t *pairText) append(p *topo.Pair) {
	t.raw("    {\n      \"from\": ").string(p.From)
	t.raw(",\n      \"to\": ").string(p.To)
	if p.FromHost != "" {
		t.raw(",\n      \"fromHost\": ").string(p.FromHost)
	}
	if p.ToHost != "" {
		t.raw(",\n      \"toHost\": ").string(p.ToHost)
	}
	t.raw(",\n      \"type\": ").string(p.Type.String())
	t.raw(",\n      \"bandwidth\": ").number(p.Bandwidth)
	t.raw(",\n      \"hops\": ").number(float64(p.Hops))
	t.raw(",\n      \"reason\": ").string(p.Reason)
	if p.PXN != nil {
		t.raw(",\n      \"pxn\": {\n        \"via\": ").string(p.PXN.Via)
		t.raw(",\n        \"bandwidth\": ").number(p.PXN.Bandwidth)
		t.raw("\n      }")
	}
	if p.Policy != nil {
		t.raw(",\n      \"policy\": {\n        \"type\": ").string(p.Policy.Type.String())
		t.raw(",\n        \"bandwidth\": ").number(p.Policy.Bandwidth)
		t.raw(",\n        \"direct\": ").raw(strconv.FormatBool(p.Policy.Direct))
		t.raw("\n      }")
	}
	t.raw("\n    }")
}

func (t *pairText) raw(s string) *pairText {
	t.text = append(t.text, s...)
	return t
}

func (t *pairText) string(s string) {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			t.other(s)
			return
		}
	}
	t.raw(`"`).raw(s).raw(`"`)
}

func (t *pairText) number(f float64) {
	switch size := math.Abs(f); {
	case f == math.Trunc(f) && size >= 1 && size < 1e15: // most are whole
		t.text = strconv.AppendInt(t.text, int64(f), 10)
	case f == 0 || size >= 1e-6 && size < 1e21:
		t.text = strconv.AppendFloat(t.text, f, 'f', -1, 64)
	default:
		t.other(f)
	}
}

// other leaves what is out of the ordinary to encoding/json.
func (t *pairText) other(v any) {
	text, err := indented(v)
	if err != nil {
		t.err = err
	}
	t.text = append(t.text, bytes.TrimSuffix(text, []byte("\n"))...)
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

// printMatrix prints a heading, and below it a row and a column for each device
// in the manner of `nvidia-smi topo -m`. It looks as a section with a newTable
// does, which keeps every cell several times: of hundreds of devices there are
// as many as the square of that, and few differ.
func (a *app) printMatrix(title string, devices []string, paths *topo.PathTable, cell func(topo.Path) string) {
	w := bufio.NewWriterSize(a.out, 64<<10)
	fmt.Fprintln(w, a.paint(title, text.Bold, text.FgCyan))
	writeMatrix(w, devices, paths, cell, func(s string) string { return a.paint(s, text.Bold) })
	fmt.Fprintln(w)
	_ = w.Flush() // a.out remembers its errors
}

// writeMatrix writes one line after the other; heading is for each word of the
// first.
func writeMatrix(w *bufio.Writer, devices []string, paths *topo.PathTable, cell func(topo.Path) string, heading func(string) string) {
	cells := make([]string, len(paths.Paths))
	wide := make([]int, len(cells))
	for i, p := range paths.Paths {
		cells[i] = cell(p)
		wide[i] = text.StringWidthWithoutEscSequences(cells[i])
	}
	const self = "X"
	first := 0
	columns := make([]int, len(devices))
	for i, device := range devices {
		columns[i] = text.StringWidthWithoutEscSequences(device)
		first = max(first, columns[i])
	}
	names := slices.Clone(columns)
	for i := range devices {
		for j, at := range paths.Row(i) {
			if at < 0 {
				columns[j] = max(columns[j], len(self))
			} else {
				columns[j] = max(columns[j], wide[at])
			}
		}
	}
	blanks := strings.Repeat(" ", max(first, slices.Max(columns))+2)
	line := []byte(heading(blanks[:first+2]))
	for i, device := range devices {
		line = append(line, heading(device+blanks[:columns[i]-names[i]+2])...)
	}
	write := func() {
		_, _ = w.Write(bytes.TrimRightFunc(line, unicode.IsSpace))
		_ = w.WriteByte('\n')
		line = line[:0]
	}
	write()
	for i, device := range devices {
		line = append(append(line, device...), blanks[:first-names[i]+2]...)
		for j, at := range paths.Row(i) {
			text, used := self, len(self)
			if at >= 0 {
				text, used = cells[at], wide[at]
			}
			line = append(append(line, text...), blanks[:columns[j]-used+2]...)
		}
		write()
	}
}

// matrixLabels names the devices of a matrix, GPUs and then NICs. A name of a
// file stays on its line, whatever is in it.
func matrixLabels(h *topo.Host) []string {
	labels := make([]string, 0, len(h.GPUs)+len(h.NICs))
	for _, g := range h.GPUs {
		labels = append(labels, onHost(g.Host, fmt.Sprintf("GPU%d", g.Index)))
	}
	for _, n := range h.NICs {
		labels = append(labels, onHost(n.Host, n.Name))
	}
	for i, l := range labels {
		labels[i] = strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return unicode.ReplacementChar
			}
			return r
		}, l)
	}
	return labels
}

// dash stands for what is not known or does not exist, so that every cell of a
// table is a word.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
