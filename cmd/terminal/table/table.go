// Package table formats tables of untrusted cells for package terminal. Two blanks separate the
// columns; there are no rules.
package table

import (
	"fmt"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/peerlane/peerlane/cmd/terminal"
)

// Row holds the cells of a row: numbers, terminal.Styled, Lines, or another value, which the
// table sanitises.
type Row []any

// Lines is a cell of several lines. The table sanitises every line.
type Lines []string

// Writer is a table.
type Writer struct{ table table.Writer }

// New returns an empty table. bold prints the heading in bold, for terminals with colours.
func New(bold bool, heading ...any) *Writer {
	t := table.NewWriter()
	style := table.StyleDefault
	style.Name = "peerlane"
	style.Box.PaddingLeft, style.Box.PaddingRight = "", "  "
	style.Format = table.FormatOptions{Header: text.FormatDefault, Row: text.FormatDefault}
	style.Options = table.Options{}
	if bold {
		style.Color.Header = text.Colors{text.Bold}
	}
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	if len(heading) > 0 {
		t.AppendHeader(sanitised(heading))
	}
	return &Writer{t}
}

// AppendRow adds a row.
func (w *Writer) AppendRow(row Row) { w.table.AppendRow(sanitised(row)) }

// Length returns the number of rows.
func (w *Writer) Length() int { return w.table.Length() }

// Render formats the table, without a line feed at the end.
func (w *Writer) Render() terminal.Styled { return terminal.NewStyled(w.table.Render()) }

// Wrap limits the last column, which has this heading, to the rest of width, at least 24
// characters, and wraps its text.
func (w *Writer) Wrap(heading string, width int) {
	before := 0
	for line := range strings.Lines(w.table.Render()) {
		if at := strings.Index(line, heading); at >= 0 {
			before = text.StringWidthWithoutEscSequences(line[:at])
			break
		}
	}
	w.table.SetColumnConfigs([]table.ColumnConfig{{
		Name: heading, WidthMax: max(24, width-before-1), WidthMaxEnforcer: text.WrapSoft,
	}})
}

func sanitised(cells []any) table.Row {
	row := make(table.Row, len(cells))
	for i, cell := range cells {
		switch c := cell.(type) {
		case bool, int, int32, int64, uint, uint8, uint16, uint32, uint64, float32, float64:
			row[i] = c // go-pretty aligns numbers at the right
		case terminal.Styled:
			row[i] = c.String()
		case Lines:
			lines := make([]string, len(c))
			for j, line := range c {
				lines[j] = terminal.Sanitise(line)
			}
			row[i] = strings.Join(lines, "\n")
		default:
			row[i] = terminal.Sanitise(fmt.Sprint(c))
		}
	}
	return row
}
