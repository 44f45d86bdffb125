package manual

import (
	"regexp"
	"strings"
)

// FromMarkdown returns the man page of a document. It supports headings, paragraphs, `code` and
// links of Markdown. A paragraph that begins with code becomes an entry with that name.
func FromMarkdown(p Page, text string) string {
	var b strings.Builder
	p.head(&b)
	section(&b, "DESCRIPTION")
	first := true
	for paragraph := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		paragraph = strings.ReplaceAll(strings.TrimSpace(paragraph), "\n", " ")
		heading := strings.TrimLeft(paragraph, "#")
		switch depth := len(paragraph) - len(heading); {
		case depth == 1: // the title, which the head of the page has
		case depth > 1:
			b.WriteString(".SS " + inline(strings.TrimSpace(heading)) + "\n")
		case strings.HasPrefix(paragraph, "`"):
			name, rest, _ := strings.Cut(paragraph[1:], "`")
			b.WriteString(".TP\n" + inline("`"+name+"`") + "\n" + inline(strings.TrimLeft(rest, ", ")) + "\n")
		default:
			if !first {
				b.WriteString(".PP\n")
			}
			b.WriteString(inline(paragraph) + "\n")
		}
		first = first && strings.HasPrefix(paragraph, "# ")
	}
	p.foot(&b)
	return b.String()
}

var link = regexp.MustCompile(`\[([^\]]+)\]\([^)]*\)`)

// inline prints code in bold, and a link as the text.
func inline(s string) string {
	parts := strings.Split(link.ReplaceAllString(s, "$1"), "`")
	for i := range parts {
		parts[i] = escape(parts[i])
		if i%2 == 1 {
			parts[i] = `\fB` + parts[i] + `\fR`
		}
	}
	s = strings.Join(parts, "")
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, `\(aq`) {
		return `\&` + s
	}
	return s
}
