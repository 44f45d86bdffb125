package terminal

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/term"
)

// Styled is text that this program made, with escape sequences for colours. A Writer prints the
// text unchanged.
type Styled struct{ text string }

func (s Styled) String() string { return s.text }

// NewStyled returns a Styled of sanitised text with escape sequences of this program. Only packages
// below cmd/terminal call NewStyled.
func NewStyled(text string) Styled { return Styled{text} }

// Concat joins strings, which it sanitises, and Styled values.
func Concat(parts ...any) Styled {
	var b strings.Builder
	for _, part := range parts {
		if s, ok := part.(Styled); ok {
			b.WriteString(s.text)
		} else {
			b.WriteString(Sanitise(fmt.Sprint(part)))
		}
	}
	return Styled{b.String()}
}

// Paint sanitises s and adds SGR attributes (ECMA-48, 8.3.117): 1 is bold, 31 red.
func Paint(s string, attributes ...int) Styled {
	if len(attributes) == 0 {
		return Styled{Sanitise(s)}
	}
	codes := make([]string, len(attributes))
	for i, a := range attributes {
		codes[i] = strconv.Itoa(a)
	}
	return Styled{"\x1b[" + strings.Join(codes, ";") + "m" + Sanitise(s) + "\x1b[0m"}
}

// Writer is the standard output or standard error of a command. It keeps the first error of a
// write, which Err returns.
type Writer struct {
	w   io.Writer
	err error
}

// New returns a Writer that writes to w.
func New(w io.Writer) *Writer { return &Writer{w: w} }

// Err returns the first error of a write.
func (w *Writer) Err() error { return w.err }

// Printf formats and prints the sanitised arguments.
func (w *Writer) Printf(format string, arguments ...any) {
	fmt.Fprintf(document{w}, format, sanitised(arguments)...)
}

// Println prints the sanitised arguments as a line.
func (w *Writer) Println(arguments ...any) { fmt.Fprintln(document{w}, sanitised(arguments)...) }

// PrintLines prints text of several lines, a diff for example. The output ends with a line feed
// if text does.
func (w *Writer) PrintLines(text string) { _, _ = io.WriteString(document{w}, Lines(text)) }

// Document returns a writer for documents that programs read, such as JSON or XML, and for text
// without untrusted parts. The writer does not change the bytes.
func (w *Writer) Document() io.Writer { return document{w} }

// document is a separate type so that fmt.Fprintf to a Writer, without sanitising, does not
// compile.
type document struct{ w *Writer }

func (d document) Write(p []byte) (int, error) {
	n, err := d.w.w.Write(p)
	if err != nil && d.w.err == nil {
		d.w.err = err
	}
	return n, err
}

// sanitised wraps arguments so that fmt sanitises their text. Numbers stay numbers, because fmt
// reads widths and precisions from them.
func sanitised(arguments []any) []any {
	list := make([]any, len(arguments))
	for i, a := range arguments {
		switch a.(type) {
		case Styled, bool, int, int32, int64, uint, uint8, uint16, uint32, uint64, float32, float64:
			list[i] = a
		default:
			list[i] = argument{a}
		}
	}
	return list
}

type argument struct{ value any }

func (a argument) Format(f fmt.State, verb rune) {
	text := fmt.Sprintf(fmt.FormatString(f, verb), a.value)
	if err, ok := a.value.(error); ok && err != nil {
		_, _ = io.WriteString(f, Lines(text)) // keep the lines of joined errors
		return
	}
	_, _ = io.WriteString(f, Sanitise(text))
}

// File returns the terminal that w writes to, or nil if w is not a terminal.
func (w *Writer) File() *os.File {
	if f, ok := w.w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return f
	}
	return nil
}

// Colours reports whether output may be coloured: on a terminal, unless NO_COLOR
// (https://no-color.org) is set or TERM is dumb.
func (w *Writer) Colours() bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && w.File() != nil
}

// Columns returns the width of the terminal, 0 if unknown.
func (w *Writer) Columns() int {
	f := w.File()
	if f == nil {
		return 0
	}
	wide, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0
	}
	return wide
}

// PrintError prints "program: error", one line for each line of the error.
func PrintError(w io.Writer, program string, err error) {
	_, _ = fmt.Fprintf(w, "%s: %s\n", program, Lines(err.Error()))
}
