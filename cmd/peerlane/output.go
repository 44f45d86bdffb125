package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"golang.org/x/term"
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
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("printing JSON: %w", err)
	}
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

// dash stands for what is not known or does not exist, so that every cell of a
// table is a word.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
