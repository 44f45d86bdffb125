package manual

import (
	"fmt"
	"strings"
)

// Page holds the head and the foot of a man page.
type Page struct {
	Name    string // "peerlane-cdi-generate"
	Section int
	// Version is the version of Peerlane, and Brief a one-line description.
	Version string
	Brief   string
	SeeAlso []string
}

// roff returns a command's man page, in the macros of man(7).
func (c Command) roff(p Page) string {
	var b strings.Builder
	p.head(&b)
	section(&b, "SYNOPSIS")
	name, rest, _ := strings.Cut(c.Usage, " [")
	if rest != "" {
		rest = " [" + rest
	}
	fmt.Fprintf(&b, "\\fB%s\\fR%s\n", escape(name), escape(rest))
	section(&b, "DESCRIPTION")
	prose(&b, c.Long)
	if len(c.Commands) > 0 {
		section(&b, "COMMANDS")
		for _, below := range c.Commands {
			fmt.Fprintf(&b, ".TP\n\\fB%s\\fR\n%s\n", escape(below.Path),
				line(fmt.Sprintf("%s; see %s(%d)", below.Short, below.pageName(), p.Section)))
		}
	}
	options(&b, "OPTIONS", c.Flags)
	options(&b, "GLOBAL OPTIONS", c.Global)
	if c.Exit != "" {
		section(&b, "EXIT STATUS")
		verbatim(&b, unindent(c.Exit))
	}
	if c.Example != "" {
		section(&b, "EXAMPLES")
		verbatim(&b, unindent(c.Example))
	}
	p.foot(&b)
	return b.String()
}

// pageName returns the name of a command's page: "peerlane-cdi-generate".
func (c Command) pageName() string { return strings.ReplaceAll(c.Path, " ", "-") }

// Pages returns the man pages of a command and its subcommands, by file name.
func (c Command) Pages(section int, version string) map[string]string {
	pages := map[string]string{}
	for _, one := range c.all() {
		p := Page{Name: one.pageName(), Section: section, Version: version, Brief: one.Short}
		if above := strings.LastIndex(one.Path, " "); above > 0 {
			p.SeeAlso = append(p.SeeAlso, fmt.Sprintf("%s(%d)", strings.ReplaceAll(one.Path[:above], " ", "-"), section))
		}
		for _, below := range one.Commands {
			p.SeeAlso = append(p.SeeAlso, fmt.Sprintf("%s(%d)", below.pageName(), section))
		}
		pages[fmt.Sprintf("%s.%d", p.Name, section)] = one.roff(p)
	}
	return pages
}

// Prose returns the man page of a text, such as the help of a program.
func Prose(p Page, text string) string {
	var b strings.Builder
	p.head(&b)
	section(&b, "DESCRIPTION")
	prose(&b, text)
	p.foot(&b)
	return b.String()
}

func (p Page) head(b *strings.Builder) {
	// No date: builds of one commit are identical.
	fmt.Fprintf(b, ".TH \"%s\" \"%d\" \"\" \"Peerlane %s\" \"Peerlane\"\n", escape(strings.ToUpper(p.Name)), p.Section,
		escape(p.Version))
	section(b, "NAME")
	fmt.Fprintf(b, "%s \\- %s\n", escape(p.Name), escape(p.Brief))
}

func (p Page) foot(b *strings.Builder) {
	if len(p.SeeAlso) == 0 {
		return
	}
	section(b, "SEE ALSO")
	for i, page := range p.SeeAlso {
		name, number, _ := strings.Cut(page, "(")
		end := ","
		if i == len(p.SeeAlso)-1 {
			end = ""
		}
		fmt.Fprintf(b, ".BR %s (%s%s\n", escape(name), number, end)
	}
}

func section(b *strings.Builder, name string) { fmt.Fprintf(b, ".SH %s\n", name) }

func options(b *strings.Builder, heading string, flags []Flag) {
	if len(flags) == 0 {
		return
	}
	section(b, heading)
	for _, f := range flags {
		b.WriteString(".TP\n")
		if f.Shorthand != "" {
			fmt.Fprintf(b, "\\fB\\-%s\\fR, ", f.Shorthand)
		}
		fmt.Fprintf(b, "\\fB\\-\\-%s\\fR", escape(f.Name))
		if f.Value != "" {
			fmt.Fprintf(b, " \\fI%s\\fR", escape(f.Value))
		}
		fmt.Fprintf(b, "\n%s\n", line(f.sentence()))
	}
}

// sentence returns the description of a flag, with the default unless the description states the
// default.
func (f Flag) sentence() string {
	if f.Default == "" || strings.Contains(f.Usage, "(default") {
		return f.Usage
	}
	return fmt.Sprintf("%s (default %s)", f.Usage, f.Default)
}

// prose writes paragraphs, and indented lines as preformatted text.
func prose(b *strings.Builder, text string) {
	for i, block := range blocks(text) {
		if block.verbatim {
			verbatim(b, block.text)
			continue
		}
		if i > 0 {
			b.WriteString(".PP\n")
		}
		for l := range strings.Lines(block.text) {
			b.WriteString(line(strings.TrimRight(l, "\n")) + "\n")
		}
	}
}

// block is a paragraph or preformatted lines.
type block struct {
	text     string
	verbatim bool
}

func blocks(text string) (list []block) {
	var current block
	end := func() {
		if text := strings.Trim(current.text, "\n"); text != "" {
			if current.verbatim {
				text = unindent(text)
			}
			list = append(list, block{text, current.verbatim})
		}
		current = block{}
	}
	for l := range strings.Lines(strings.Trim(text, "\n")) {
		indented := strings.HasPrefix(l, "  ") || strings.HasPrefix(l, "\t")
		blank := strings.TrimSpace(l) == ""
		if !blank && indented != current.verbatim || blank && !current.verbatim {
			end()
		}
		if !blank {
			current.verbatim = indented
		}
		current.text += l
	}
	end()
	return list
}

func verbatim(b *strings.Builder, text string) {
	if written := b.String(); !strings.HasPrefix(written[strings.LastIndexByte(written[:len(written)-1], '\n')+1:],
		".SH ") {
		b.WriteString(".PP\n")
	}
	b.WriteString(".RS 4\n.nf\n")
	for l := range strings.Lines(strings.Trim(text, "\n")) {
		b.WriteString(line(strings.TrimRight(l, "\n")) + "\n")
	}
	b.WriteString(".fi\n.RE\n")
}

// unindent removes two leading blanks from every line.
func unindent(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimPrefix(lines[i], "  ")
	}
	return strings.Join(lines, "\n")
}

// line escapes a line that roff would read as a request.
func line(s string) string {
	if s = escape(s); strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		return `\&` + s
	}
	return s
}

// escaper keeps hyphens as characters that users can copy into a shell.
var escaper = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", "\\`", "^", `\(ha`, "~", `\(ti`, `"`, `\(dq`)

func escape(s string) string { return escaper.Replace(s) }
