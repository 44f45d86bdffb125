package textfile

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// MaxInput limits a topology file, bytes. Topology files of real machines have tens of
// thousands of bytes, captures hundreds of thousands.
const MaxInput = 16 << 20

var ErrTooLarge = fmt.Errorf("it is larger than %d MiB, the maximum for a topology", MaxInput>>20)

// WithoutDashes replaces "-" within comments by "." in a copy of the text; without such
// comments WithoutDashes returns the text. Some topology files have comments such as <!------
// text ------>, which the standard and the decoder refuse. Lines and columns stay.
func WithoutDashes(text []byte) []byte {
	out := text
	for at := 0; ; {
		rest := text[at:]
		i := bytes.IndexByte(rest, '<')
		if i < 0 {
			return out
		}
		begins, ends := "", ""
		for _, form := range [][2]string{{"<!--", "-->"}, {"<![CDATA[", "]]>"}, {"<?", "?>"}, {"<", ""}} {
			if bytes.HasPrefix(rest[i:], []byte(form[0])) {
				begins, ends = form[0], form[1]
				break
			}
		}
		at += i + len(begins)
		length := bytes.Index(text[at:], []byte(ends))
		if length < 0 {
			return out // the decoder names the place
		}
		if begins == "<!--" && bytes.IndexByte(text[at:at+length], '-') >= 0 {
			if &out[0] == &text[0] {
				out = bytes.Clone(text)
			}
			for j := at; j < at+length; j++ {
				if out[j] == '-' {
					out[j] = '.'
				}
			}
		}
		at += length + len(ends)
	}
}

// QuoteStart quotes the beginning of a text, short enough for a message.
func QuoteStart(text []byte) string {
	line, _, _ := bytes.Cut(text, []byte("\n"))
	const maxBytes = 40
	if len(line) > maxBytes {
		return strconv.QuoteToASCII(strings.ToValidUTF8(string(line[:maxBytes]), "?")) + " .."
	}
	return strconv.QuoteToASCII(strings.TrimSpace(string(line)))
}

// PlaceError is an error at a position in a file.
type PlaceError struct {
	Line, Column int // both from 1; Column counts characters
	Err          error
}

func (e *PlaceError) Error() string {
	return fmt.Sprintf("line %d, column %d: %v", e.Line, e.Column, e.Err)
}

func (e *PlaceError) Unwrap() error { return e.Err }

// Is reports whether target is a PlaceError of the same place without a cause.
func (e *PlaceError) Is(target error) bool {
	place, ok := target.(*PlaceError)
	return ok && place.Err == nil && place.Line == e.Line && place.Column == e.Column
}

// FileError is a topology file that cannot be read.
type FileError struct {
	Form string // such as "hwloc topology"
	Name string
	Err  error
}

func (e *FileError) Error() string {
	return fmt.Sprintf("read the %s %s: %v", e.Form, e.Name, e.Err)
}

func (e *FileError) Unwrap() error { return e.Err }
