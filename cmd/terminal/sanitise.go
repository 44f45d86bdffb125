// Package terminal writes text to terminals. Names of devices and containers, logs of relays and
// messages of tenants are untrusted: a terminal executes control characters in the text. Every
// argument of a Writer and every cell of package table is sanitised, except Styled text, which
// this program made.
package terminal

import (
	"bytes"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Sanitise replaces each character of s that controls a terminal or changes the order of the text
// around it by U+FFFD: control characters (C0, DEL, C1), invisible format characters such as
// bidirectional overrides, line and paragraph separators, and invalid UTF-8. The result is one
// line with the number of characters of s.
func Sanitise(s string) string {
	return strings.Map(func(r rune) rune {
		if hostile(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// Lines sanitises every line of s, and keeps line feeds and tabs.
func Lines(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && hostile(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

func hostile(r rune) bool {
	return unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp)
}

// JSON replaces the characters in a JSON document that encoding/json writes unchanged and
// terminals execute, DEL and C1 for example, by their \u escapes. The value of the document stays
// the same.
func JSON(document []byte) []byte {
	if !bytes.ContainsFunc(document, escapes) {
		return document
	}
	var b bytes.Buffer
	for len(document) > 0 {
		r, size := utf8.DecodeRune(document)
		switch {
		case !escapes(r):
			b.Write(document[:size])
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
		document = document[size:]
	}
	return b.Bytes()
}

// escapes reports whether JSON escapes r. Characters below DEL belong to the layout of the
// document, and encoding/json escapes them in strings.
func escapes(r rune) bool { return r >= 0x7f && hostile(r) }
