package edit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// JSON is the format of Docker's configuration.
var JSON Language = jsonLanguage{}

type jsonLanguage struct{}

func (jsonLanguage) Read(text []byte) (map[string]any, error) {
	tree := map[string]any{}
	if len(trimmed(text)) == 0 {
		return tree, nil
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&tree); err != nil {
		var syntax *json.SyntaxError
		var kind *json.UnmarshalTypeError
		switch {
		case errors.As(err, &syntax):
			return nil, &Error{lineOf(text, int(syntax.Offset)-1), strings.TrimPrefix(err.Error(), "json: ")}
		case errors.As(err, &kind):
			return nil, &Error{lineOf(text, int(kind.Offset)-1), "expected an object instead of " + kind.Value}
		case errors.Is(err, io.ErrUnexpectedEOF):
			return nil, &Error{lineOf(text, len(text)), "the file ends in the middle of an object"}
		}
		return nil, &Error{0, err.Error()}
	}
	if tree == nil {
		return nil, &Error{lineOf(text, 0), "expected an object instead of null"}
	}
	if at := int(d.InputOffset()); len(trimmed(text[at:])) > 0 {
		return nil, &Error{lineOf(text, at), "unexpected data after the object"}
	}
	return tree, nil
}

// object is a JSON object of a text: its position and its members.
type object struct {
	// start and end are the offsets of the braces.
	start, end int
	members    []member
}

// member is a name and its value. before is the offset behind the preceding brace or comma.
type member struct {
	name       string
	before     int
	start      int // of the name
	value, end int
	object     *object // the value, if it is an object
}

func (jsonLanguage) set(text []byte, k Key) ([]byte, error) {
	if len(trimmed(text)) == 0 {
		if k.Value == nil {
			return text, nil
		}
		text = []byte("{}\n")
	}
	s := jsonScanner{text: text}
	o := s.object()
	trail := []*object{o}
	for i, name := range k.Path {
		m := o.find(name)
		last := i == len(k.Path)-1
		switch {
		case m == nil && k.Value == nil:
			return text, nil
		case m == nil:
			return insert(text, trail, name, nested(k.Path[i+1:], k.Value))
		case last && k.Value == nil:
			// Remove the outermost object that would become empty.
			for i > k.Keep && len(trail[i].members) == 1 {
				i--
			}
			return trail[i].without(text, trail[i].find(k.Path[i])), nil
		case last:
			value, err := json.Marshal(k.Value)
			return splice(text, m.value, m.end, string(value)), err
		case m.object == nil:
			return nil, &Error{lineOf(text, m.value), fmt.Sprintf("%s is not an object", strings.Join(k.Path[:i+1], "."))}
		}
		o = m.object
		trail = append(trail, o)
	}
	return text, nil
}

// find returns the last member with a name, which is the effective member.
func (o *object) find(name string) *member {
	for i := len(o.members) - 1; i >= 0; i-- {
		if o.members[i].name == name {
			return &o.members[i]
		}
	}
	return nil
}

func nested(path []string, value any) any {
	for i := len(path) - 1; i >= 0; i-- {
		value = map[string]any{path[i]: value}
	}
	return value
}

// insert adds a member to the innermost object, formatted like the present members.
func insert(text []byte, trail []*object, name string, value any) ([]byte, error) {
	const unit = "  "
	o := trail[len(trail)-1]
	end := newline(text)
	depth := len(trail)
	lead := ""
	switch {
	case len(o.members) > 0:
		m := o.members[len(o.members)-1]
		lead = string(text[m.before:m.start])
	case depth > 1 || bytes.Contains(trimmed(text), []byte("\n")) || len(trimmed(text)) == 2:
		lead = end + strings.Repeat(unit, depth)
	}
	key, err := json.Marshal(name)
	if err != nil {
		return nil, err
	}
	var content []byte
	if at := strings.LastIndexByte(lead, '\n'); at >= 0 {
		indent := lead[at+1:]
		step := unit
		if len(indent)%depth == 0 && len(indent) > 0 {
			step = indent[:len(indent)/depth]
		}
		if content, err = json.MarshalIndent(value, indent, step); err == nil {
			content = bytes.ReplaceAll(content, []byte("\n"), []byte(end))
		}
	} else {
		content, err = json.Marshal(value)
	}
	if err != nil {
		return nil, err
	}
	if len(o.members) == 0 {
		tail := ""
		if at := strings.LastIndexByte(lead, '\n'); at >= 0 {
			tail = end + strings.Repeat(unit, depth-1)
		}
		return splice(text, o.start+1, o.end-1, lead+string(key)+": "+string(content)+tail), nil
	}
	at := o.members[len(o.members)-1].end
	return splice(text, at, at, ","+lead+string(key)+": "+string(content)), nil
}

// without removes a member.
func (o *object) without(text []byte, m *member) []byte {
	switch {
	case len(o.members) == 1:
		return splice(text, o.start+1, o.end-1, "")
	case m.name == o.members[0].name && m.start == o.members[0].start:
		return splice(text, m.start, o.members[1].start, "")
	}
	return splice(text, m.before-1, m.end, "") // with the comma before the member
}

// jsonScanner scans text that is valid JSON.
type jsonScanner struct {
	text []byte
	at   int
}

func (s *jsonScanner) blanks() {
	for s.at < len(s.text) && strings.ContainsRune(" \t\r\n", rune(s.text[s.at])) {
		s.at++
	}
}

func (s *jsonScanner) object() *object {
	s.blanks()
	o := &object{start: s.at}
	s.at++
	for {
		before := s.at
		s.blanks()
		switch s.text[s.at] {
		case '}':
			s.at++
			o.end = s.at
			return o
		case ',':
			s.at++
			continue
		}
		m := member{before: before, start: s.at}
		s.skipText()
		// The text is valid JSON, so the name is a string.
		_ = json.Unmarshal(s.text[m.start:s.at], &m.name)
		s.blanks()
		s.at++ // :
		s.blanks()
		m.value = s.at
		if s.text[s.at] == '{' {
			m.object = s.object()
		} else {
			s.skipValue()
		}
		m.end = s.at
		o.members = append(o.members, m)
		s.blanks()
	}
}

func (s *jsonScanner) skipText() {
	for s.at++; s.text[s.at] != '"'; s.at++ {
		if s.text[s.at] == '\\' {
			s.at++
		}
	}
	s.at++
}

func (s *jsonScanner) skipValue() {
	for depth := 0; ; {
		switch c := s.text[s.at]; {
		case c == '"':
			s.skipText()
			if depth == 0 {
				return
			}
			continue
		case c == '[' || c == '{':
			depth++
		case depth > 0 && (c == ']' || c == '}'):
			depth--
			if depth == 0 {
				s.at++
				return
			}
		case depth == 0 && strings.ContainsRune(",}] \t\r\n", rune(c)):
			return
		}
		s.at++
	}
}

// trimmed returns a text without leading and trailing JSON blanks.
func trimmed(text []byte) []byte { return bytes.Trim(text, " \t\r\n") }
