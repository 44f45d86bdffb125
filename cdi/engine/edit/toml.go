package edit

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/BurntSushi/toml"
)

// TOML is the format of the configuration of containerd, Podman and CRI-O.
var TOML Language = tomlLanguage{}

type tomlLanguage struct{}

func (tomlLanguage) Read(text []byte) (map[string]any, error) {
	tree := map[string]any{}
	if !utf8.Valid(text) {
		return nil, &Error{0, "it is not UTF-8"}
	}
	if _, err := toml.Decode(string(text), &tree); err != nil {
		var parse toml.ParseError
		if errors.As(err, &parse) {
			return nil, &Error{lineOf(text, parse.Position.Start), parse.Message}
		}
		return nil, &Error{0, err.Error()}
	}
	return tree, nil
}

// statement is the header of a table, or a key with its value.
type statement struct {
	header, array bool     // [table], [[table]]
	table         []string // the table of the statement
	key           []string // of a key, below the table
	inArray       bool     // the key is of an element of a list of tables
	start, end    int      // position of the lines, with the final line end
	value         [2]int   // begin and end of a key's value
}

// path is the path of a table or key, from the outermost table on.
func (s statement) path() []string { return slices.Concat(s.table, s.key) }

func (tomlLanguage) set(text []byte, k Key) ([]byte, error) {
	all, err := statements(text)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(
		all,
		func(s statement) bool { return !s.header && !s.inArray && slices.Equal(s.path(), k.Path) },
	)
	if k.Value == nil {
		if at < 0 {
			return text, refuseInline(text, all, k)
		}
		return withoutKey(text, all, at, k), nil
	}
	value := tomlValue(k.Value)
	if at >= 0 {
		return splice(text, all[at].value[0], all[at].value[1], value), nil
	}
	if err := refuseInline(text, all, k); err != nil {
		return nil, err
	}
	table, name := k.Path[:len(k.Path)-1], k.Path[len(k.Path)-1:]
	end := newline(text)
	// Insert after the last statement of the table, with its indentation.
	after := lastOf(all, table)
	if after == nil {
		if after = lastDotted(all, table); after != nil {
			name = k.Path[len(after.table):]
		}
	}
	line := tomlKey(name) + " = " + value + end
	switch {
	case after != nil:
		lead := indentation(text[after.start:])
		if after.end > 0 && text[after.end-1] != '\n' {
			lead = end + lead
		}
		return splice(text, after.end, after.end, lead+line), nil
	case len(table) == 0:
		first := len(text)
		if len(all) > 0 {
			first = all[0].start
		}
		if rest := strings.TrimPrefix(string(text[:first]), byteOrderMark); rest != "" && !strings.HasSuffix(rest, "\n") {
			line = end + line
		}
		return splice(text, first, first, line), nil
	}
	head := ""
	if len(text) > 0 {
		head = end
		if text[len(text)-1] != '\n' {
			head += end
		}
	}
	return splice(text, len(text), len(text), head+"["+tomlKey(table)+"]"+end+line), nil
}

// lastOf returns the last statement of a table, or nil.
func lastOf(all []statement, table []string) (last *statement) {
	for i, s := range all {
		if slices.Equal(s.table, table) && !s.array && !s.inArray {
			last = &all[i]
		}
	}
	return last
}

// lastDotted returns the last statement of a table that exists by dotted keys of an outer table,
// without a header, or nil.
func lastDotted(all []statement, table []string) (last *statement) {
	for i, s := range all {
		if !s.header && !s.inArray && len(s.path()) > len(table) && slices.Equal(s.path()[:len(table)], table) &&
			len(s.table) < len(table) {
			last = &all[i]
		}
	}
	return last
}

// refuseInline refuses a key whose table is an inline value or an element of a list.
func refuseInline(text []byte, all []statement, k Key) error {
	for _, s := range all {
		path := s.path()
		if len(path) == 0 || len(path) >= len(k.Path) || !slices.Equal(path, k.Path[:len(path)]) {
			continue
		}
		switch {
		case !s.header:
			return &Error{
				lineOf(text, s.start),
				fmt.Sprintf("%s is an inline table; change it to a table [%s] by hand", strings.Join(path, "."), tomlKey(path)),
			}
		case s.array:
			return &Error{lineOf(text, s.start), fmt.Sprintf("%s is a list of tables", strings.Join(path, "."))}
		}
	}
	return nil
}

// withoutKey removes a key, and the headers of tables, from the innermost outwards, that are then
// empty.
func withoutKey(text []byte, all []statement, at int, k Key) []byte {
	gone := []int{at}
	for depth := len(k.Path) - 1; depth > k.Keep; depth-- {
		table := k.Path[:depth]
		left, header := false, -1
		for i, s := range all {
			path := s.path()
			switch {
			case slices.Contains(gone, i) || len(path) < depth || !slices.Equal(path[:depth], table):
			case len(path) == depth && s.header && !s.array:
				header = i
			default:
				left = true
			}
		}
		if left {
			break
		}
		if header >= 0 {
			gone = append(gone, header)
		}
	}
	// Between the statements are only comments of users, which stay.
	slices.Sort(gone)
	for _, i := range slices.Backward(gone) {
		from := all[i].start
		if all[i].header {
			// The header was inserted with the blank line before it.
			if before := strings.TrimSuffix(string(text[:from]), newline(text)); len(before) < from &&
				(before == "" || strings.HasSuffix(before, "\n")) {
				from = len(before)
			}
		}
		text = splice(text, from, all[i].end, "")
	}
	return text
}

// statements returns the statements of a valid TOML text.
func statements(text []byte) (all []statement, err error) {
	s := scanner{text: text}
	var table []string
	inArray := map[string]bool{}
	for {
		s.blanks(true)
		if s.at >= len(text) {
			return all, nil
		}
		one := statement{start: s.lineStart(), table: table}
		if s.text[s.at] == '[' {
			one.header = true
			s.at++
			if one.array = s.next("["); one.array {
				s.at++
			}
			if table, err = s.keys(); err != nil {
				return nil, err
			}
			one.table = table
			if one.array {
				inArray[strings.Join(table, "\x00")] = true
			}
			s.at++ // one bracket; skipping the line skips a second bracket
		} else {
			if one.key, err = s.keys(); err != nil {
				return nil, err
			}
			s.at++ // =
			s.blanks(false)
			one.value[0] = s.at
			s.skipValue()
			one.value[1] = s.at
			for one.value[1] > one.value[0] && strings.ContainsRune(" \t\r", rune(text[one.value[1]-1])) {
				one.value[1]--
			}
			for i := range table {
				one.inArray = one.inArray || inArray[strings.Join(table[:i+1], "\x00")]
			}
		}
		s.line()
		one.end = s.at
		all = append(all, one)
	}
}

const byteOrderMark = "\ufeff"

// scanner scans valid TOML: it detects no errors.
type scanner struct {
	text []byte
	at   int
}

func (s *scanner) next(prefix string) bool {
	return strings.HasPrefix(string(s.text[s.at:min(len(s.text), s.at+len(prefix))]), prefix)
}

// blanks skips blanks and, with lines, also line ends, comments and a byte order mark.
func (s *scanner) blanks(lines bool) {
	for s.at < len(s.text) {
		switch c := s.text[s.at]; {
		case c == ' ' || c == '\t':
			s.at++
		case lines && (c == '\n' || c == '\r'):
			s.at++
		case lines && c == '#':
			s.line()
		case lines && s.at == 0 && s.next(byteOrderMark):
			s.at += len(byteOrderMark)
		default:
			return
		}
	}
}

func (s *scanner) lineStart() int {
	at := strings.LastIndexByte(string(s.text[:s.at]), '\n') + 1
	if at == 0 && strings.HasPrefix(string(s.text), byteOrderMark) {
		return len(byteOrderMark)
	}
	return at
}

// line skips to the end of the line.
func (s *scanner) line() {
	for s.at < len(s.text) {
		s.at++
		if s.text[s.at-1] == '\n' {
			return
		}
	}
}

// keys reads a dotted key, up to the next token.
func (s *scanner) keys() (path []string, err error) {
	for {
		s.blanks(false)
		from := s.at
		if s.at < len(s.text) && (s.text[s.at] == '"' || s.text[s.at] == '\'') {
			s.skipText()
			var one struct{ K string }
			if _, err := toml.Decode("k="+string(s.text[from:s.at]), &one); err != nil {
				return nil, &Error{lineOf(s.text, from), err.Error()}
			}
			path = append(path, one.K)
		} else {
			for s.at < len(s.text) && !strings.ContainsRune(" \t.=]\n", rune(s.text[s.at])) {
				s.at++
			}
			path = append(path, string(s.text[from:s.at]))
		}
		s.blanks(false)
		if !s.next(".") {
			return path, nil
		}
		s.at++
	}
}

// skipText skips a quoted text, of one line or several lines.
func (s *scanner) skipText() {
	quote := s.text[s.at]
	mark := strings.Repeat(string(quote), 3)
	if !s.next(mark) {
		mark = mark[:1]
	}
	for s.at += len(mark); s.at < len(s.text); s.at++ {
		if quote == '"' && s.text[s.at] == '\\' {
			s.at++
			continue
		}
		if s.next(mark) {
			s.at += len(mark)
			// A text of several lines may end with one or two quotes of its own.
			for n := 0; n < 2 && len(mark) == 3 && s.next(string(quote)); n++ {
				s.at++
			}
			return
		}
	}
}

func (s *scanner) skipValue() {
	for depth := 0; s.at < len(s.text); {
		switch c := s.text[s.at]; c {
		case '"', '\'':
			s.skipText()
			continue
		case '[', '{':
			depth++
		case ']', '}':
			depth--
		case '\n':
			if depth == 0 {
				return
			}
		case '#':
			if depth == 0 {
				return
			}
			s.line()
			continue
		}
		s.at++
	}
}

func indentation(line []byte) string {
	return string(line[:len(line)-len(strings.TrimLeft(string(line), " \t"))])
}

var bare = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

func tomlKey(path []string) string {
	words := make([]string, len(path))
	for i, word := range path {
		if words[i] = word; !bare.MatchString(word) {
			words[i] = tomlText(word)
		}
	}
	return strings.Join(words, ".")
}

func tomlValue(value any) string {
	switch v := value.(type) {
	case bool:
		return strconv.FormatBool(v)
	case int64:
		return strconv.FormatInt(v, 10)
	case string:
		return tomlText(v)
	}
	var words []string
	for _, text := range Texts(value) {
		words = append(words, tomlText(text))
	}
	return "[" + strings.Join(words, ", ") + "]"
}

func tomlText(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < 0x20 || r == 0x7f:
			fmt.Fprintf(&b, `\u%04X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}
