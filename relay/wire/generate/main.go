// Command generate makes the Go and the C form of relay/wire/protocol.def.
//
//	go run ./relay/wire/generate DIR
//
// DIR is the folder of protocol.def; protocol.go, peerlane_wire.h and
// peerlane_values.h are written beside it.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

type field struct {
	kind, name   string // kind: u32, u64, uuid, handle, text, array
	element      string // array: the struct's name
	count        int    // text: bytes; array: elements
	offset, size int
}

type layout struct {
	name    string
	message int // 0 for a struct
	comment []string
	fields  []field
	size    int
}

type constant struct {
	name, value string
	comment     []string
	public      bool // in peerlane_values.h
}

type status struct {
	name, text string
	value      int
}

type protocol struct {
	constants []constant
	statuses  []status
	layouts   []*layout
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate DIR")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "protocol.def"))
	if err != nil {
		return err
	}
	p, err := parse(text)
	if err != nil {
		return err
	}
	source, err := p.goSource()
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "protocol.go"), source, 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "peerlane_values.h"), p.cValues(), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "peerlane_wire.h"), p.cHeader(), 0o644)
}

func parse(text []byte) (*protocol, error) {
	p := &protocol{}
	var current *layout
	var comment []string
	lines := bufio.NewScanner(bytes.NewReader(text))
	for number := 1; lines.Scan(); number++ {
		line := strings.TrimRight(lines.Text(), " ")
		words := strings.Fields(line)
		public := len(words) > 1 && words[0] == "public" && words[1] == "constant"
		if public {
			words = words[1:]
		}
		fail := func(why string) error {
			return fmt.Errorf("protocol.def:%d: %s: %q", number, why, line)
		}
		switch {
		case len(words) == 0:
			comment = nil
		case strings.HasPrefix(words[0], "#"):
			comment = append(comment, strings.TrimSpace(strings.TrimPrefix(line, "#")))
		case words[0] == "constant" && len(words) == 3:
			p.constants = append(p.constants, constant{words[1], words[2], comment, public})
			comment = nil
		case words[0] == "status" && len(words) > 3:
			value, err := strconv.Atoi(words[2])
			if err != nil {
				return nil, fail("no number")
			}
			_, quoted, _ := strings.Cut(line, `"`)
			p.statuses = append(p.statuses, status{words[1], strings.TrimSuffix(quoted, `"`), value})
		case words[0] == "message" && len(words) == 3:
			value, err := strconv.Atoi(words[2])
			if err != nil || value == 0 {
				return nil, fail("no number")
			}
			current = &layout{name: words[1], message: value, comment: comment}
			current.fields = []field{{kind: "u32", name: "type"}, {kind: "u32", name: "sequence"}}
			p.layouts = append(p.layouts, current)
			comment = nil
		case words[0] == "struct" && len(words) == 2:
			current = &layout{name: words[1], comment: comment}
			p.layouts = append(p.layouts, current)
			comment = nil
		case strings.HasPrefix(line, "\t") && current != nil:
			f, err := parseField(words)
			if err != nil {
				return nil, fail(err.Error())
			}
			current.fields = append(current.fields, f)
		default:
			return nil, fail("not understood")
		}
	}
	return p, p.place()
}

func parseField(words []string) (field, error) {
	f := field{kind: words[0], name: words[len(words)-1], count: 1}
	switch {
	case len(words) == 2 && (f.kind == "u32" || f.kind == "u64" || f.kind == "uuid" || f.kind == "handle"):
	case len(words) == 3 && f.kind == "text", len(words) == 4 && f.kind == "array":
		n, err := strconv.Atoi(words[1])
		if err != nil {
			return field{}, errors.New("no number")
		}
		f.count = n
		if f.kind == "array" {
			f.element = words[2]
		}
	default:
		return field{}, errors.New("not a field")
	}
	return f, nil
}

// place computes offsets and refuses hidden padding, so that both languages
// agree by construction. Structs used in arrays may follow their users.
func (p *protocol) place() error {
	sizes := map[string]int{}
	for round := 0; round < 2; round++ {
		for _, l := range p.layouts {
			offset := 0
			for i := range l.fields {
				f := &l.fields[i]
				align := 8
				switch f.kind {
				case "u32":
					f.size, align = 4, 4
				case "u64":
					f.size = 8
				case "uuid":
					f.size = 16
				case "handle":
					f.size = 128
				case "text":
					f.size = f.count
				case "array":
					f.size = f.count * sizes[f.element]
					if round == 1 && f.size == 0 {
						return fmt.Errorf("%s.%s: no struct %s", l.name, f.name, f.element)
					}
				}
				if offset%align != 0 || f.size%align != 0 {
					return fmt.Errorf("%s.%s is not aligned: offset %d, size %d", l.name, f.name, offset, f.size)
				}
				f.offset = offset
				offset += f.size
			}
			if offset%8 != 0 {
				return fmt.Errorf("%s: its size %d is no multiple of 8", l.name, offset)
			}
			l.size = offset
			sizes[l.name] = offset
		}
	}
	return nil
}

const origin = "Code generated from protocol.def by relay/wire/generate. DO NOT EDIT."

func (p *protocol) goSource() ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "// %s\n\npackage wire\n\nimport \"unsafe\"\n\n", origin)
	b.WriteString("// Constants of the protocol.\nconst (\n")
	for _, c := range p.constants {
		for _, line := range c.comment {
			fmt.Fprintf(&b, "// %s\n", line)
		}
		fmt.Fprintf(&b, "%s = %s\n", c.name, c.value)
	}
	b.WriteString(")\n\n// Outcomes of requests and operations.\nconst (\n")
	for _, s := range p.statuses {
		fmt.Fprintf(&b, "%s Status = %d // %s\n", statusName(s.name), s.value, s.text)
	}
	b.WriteString(")\n\nvar statusText = map[Status]string{\n")
	for _, s := range p.statuses {
		fmt.Fprintf(&b, "%s: %q,\n", statusName(s.name), s.text)
	}
	b.WriteString("}\n\n// Message types.\nconst (\n")
	for _, l := range p.layouts {
		if l.message != 0 {
			fmt.Fprintf(&b, "type%s uint32 = %d\n", l.name, l.message)
		}
	}
	b.WriteString(")\n\n")
	for _, l := range p.layouts {
		fmt.Fprintf(&b, "// %s is %d bytes.\n", l.name, l.size)
		for _, line := range l.comment {
			fmt.Fprintf(&b, "// %s\n", line)
		}
		fmt.Fprintf(&b, "type %s struct {\n", l.name)
		fields := l.fields
		if l.message != 0 {
			b.WriteString("Header\n")
			fields = fields[2:]
		}
		for _, f := range fields {
			fmt.Fprintf(&b, "%s %s\n", camel(f.name), f.goType())
		}
		b.WriteString("}\n\n")
		fmt.Fprintf(
			&b,
			"func (m *%s) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(m)), unsafe.Sizeof(*m)) }\n\n",
			l.name,
		)
		if l.message != 0 {
			fmt.Fprintf(&b, "func (m *%s) messageType() uint32 { return type%s }\n\n", l.name, l.name)
		}
	}
	b.WriteString("func newMessage(messageType uint32) Message {\nswitch messageType {\n")
	for _, l := range p.layouts {
		if l.message != 0 {
			fmt.Fprintf(&b, "case type%s: return &%s{}\n", l.name, l.name)
		}
	}
	b.WriteString("}\nreturn nil\n}\n\n// Layouts lists every field's place, for comparison with the C form.\n")
	b.WriteString("var layouts = []struct{ name string; size uintptr; offsets []uintptr }{\n")
	for _, l := range p.layouts {
		fmt.Fprintf(&b, "{%q, unsafe.Sizeof(%s{}), []uintptr{", l.name, l.name)
		for _, f := range l.fields {
			name := camel(f.name)
			if l.message != 0 && (f.name == "type" || f.name == "sequence") {
				name = "Header." + name
			}
			fmt.Fprintf(&b, "unsafe.Offsetof(%s{}.%s),", l.name, name)
		}
		b.WriteString("}},\n")
	}
	b.WriteString("}\n")
	return format.Source(b.Bytes())
}

func (f field) goType() string {
	switch f.kind {
	case "u32":
		return "uint32"
	case "u64":
		return "uint64"
	case "uuid":
		return "UUID"
	case "handle":
		return "Handle"
	case "text":
		return fmt.Sprintf("[%d]byte", f.count)
	}
	return fmt.Sprintf("[%d]%s", f.count, f.element)
}

// cConstants writes the public or the private constants.
func (p *protocol) cConstants(b *bytes.Buffer, public bool) {
	for _, c := range p.constants {
		if c.public != public {
			continue
		}
		for _, line := range c.comment {
			fmt.Fprintf(b, "/* %s */\n", line)
		}
		suffix := ""
		if strings.HasPrefix(c.value, "0x") && len(c.value) > 10 {
			suffix = "ull"
		}
		fmt.Fprintf(b, "#define PEERLANE_%s (%s%s)\n", shout(c.name), c.value, suffix)
	}
}

// cValues writes the public part of the protocol. The header includes no file.
func (p *protocol) cValues() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "/* %s */\n#ifndef PEERLANE_VALUES_H\n#define PEERLANE_VALUES_H\n\n", origin)
	p.cConstants(&b, true)
	b.WriteString("\n/* Outcomes of requests and operations. */\nenum peerlane_status {\n")
	for _, s := range p.statuses {
		fmt.Fprintf(&b, "\tPEERLANE_STATUS_%s = %d, /* %s */\n", shout(s.name), s.value, s.text)
	}
	b.WriteString("};\n\n#endif\n")
	return b.Bytes()
}

func (p *protocol) cHeader() []byte {
	var b bytes.Buffer
	fmt.Fprintf(
		&b,
		"/* %s */\n#ifndef PEERLANE_WIRE_H\n#define PEERLANE_WIRE_H\n\n#include <stddef.h>\n"+
			"#include <stdint.h>\n\n#include \"peerlane_values.h\"\n\n",
		origin,
	)
	p.cConstants(&b, false)
	b.WriteString("\n/* X(number, text) for each status. */\n#define PEERLANE_STATUSES(X)")
	for _, s := range p.statuses {
		fmt.Fprintf(&b, " \\\n\tX(%d, %q)", s.value, s.text)
	}
	b.WriteString("\n\nenum peerlane_message {\n")
	for _, l := range p.layouts {
		if l.message != 0 {
			fmt.Fprintf(&b, "\tPEERLANE_MESSAGE_%s = %d,\n", shout(l.name), l.message)
		}
	}
	b.WriteString("};\n\n")
	// Structs first: messages hold them.
	for _, structs := range []bool{true, false} {
		for _, l := range p.layouts {
			if (l.message == 0) != structs {
				continue
			}
			for _, line := range l.comment {
				fmt.Fprintf(&b, "/* %s */\n", line)
			}
			name := "peerlane_" + snake(l.name)
			fmt.Fprintf(&b, "struct %s {\n", name)
			for _, f := range l.fields {
				switch f.kind {
				case "u32":
					fmt.Fprintf(&b, "\tuint32_t %s;\n", f.name)
				case "u64":
					fmt.Fprintf(&b, "\tuint64_t %s;\n", f.name)
				case "array":
					fmt.Fprintf(&b, "\tstruct peerlane_%s %s[%d];\n", snake(f.element), f.name, f.count)
				case "text":
					fmt.Fprintf(&b, "\tchar %s[%d];\n", f.name, f.size)
				default:
					fmt.Fprintf(&b, "\tuint8_t %s[%d];\n", f.name, f.size)
				}
			}
			fmt.Fprintf(&b, "};\n_Static_assert(sizeof(struct %s) == %d, \"%s\");\n", name, l.size, name)
			for _, f := range l.fields {
				fmt.Fprintf(&b, "_Static_assert(offsetof(struct %s, %s) == %d, \"%s.%s\");\n", name, f.name, f.offset, name, f.name)
			}
			b.WriteString("\n")
		}
	}
	b.WriteString("#endif\n")
	return b.Bytes()
}

func camel(s string) string {
	var b strings.Builder
	for _, part := range strings.Split(s, "_") {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	name := b.String()
	if name == "Gpu" {
		return "GPU"
	}
	return name
}

// snake turns NICRegion into nic_region.
func snake(s string) string {
	var b strings.Builder
	for i, r := range s {
		upper := r >= 'A' && r <= 'Z'
		previousLower := i > 0 && s[i-1] >= 'a' && s[i-1] <= 'z'
		nextLower := i+1 < len(s) && s[i+1] >= 'a' && s[i+1] <= 'z'
		if upper && i > 0 && (previousLower || nextLower) {
			b.WriteByte('_')
		}
		b.WriteString(strings.ToLower(string(r)))
	}
	return b.String()
}

func shout(s string) string { return strings.ToUpper(snake(s)) }

// statusName keeps the statuses apart from messages of the same name.
func statusName(s string) string { return "Status" + s }
