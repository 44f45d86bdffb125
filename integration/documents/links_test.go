package documents

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// root is the root of the repository.
const root = "../.."

// pages returns the pages for readers, relative to root.
func pages(t *testing.T) (list []string) {
	t.Helper()
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, found...)
	}
	if len(list) < 20 {
		t.Fatalf("%d pages were found", len(list))
	}
	return list
}

var (
	fence   = regexp.MustCompile("^ {0,3}(```+|~~~+)")
	code    = regexp.MustCompile("(?s)``.+?``|`[^`]+`")
	inline  = regexp.MustCompile(`(?s)\]\(\s*<?([^)\s>]*)>?(?:\s+"[^"]*")?\s*\)`)
	linkDef = regexp.MustCompile(`(?m)^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$`)
	heading = regexp.MustCompile(`^ {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*$`)
	anchor  = regexp.MustCompile(`<a\s+(?:id|name)="([^"]+)"`)
	link    = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
)

// prose returns a page without code blocks, which contain neither links nor headings.
func prose(text string) string {
	var b strings.Builder
	end := ""
	for line := range strings.Lines(text) {
		m := fence.FindStringSubmatch(line)
		switch {
		case end == "" && m != nil:
			end = m[1]
		case end != "" && m != nil && strings.HasPrefix(m[1], end) && strings.TrimSpace(line) == m[1]:
			end = ""
			line = "\n"
		}
		if end != "" {
			line = "\n"
		}
		b.WriteString(line)
	}
	return b.String()
}

// links returns the targets of a page's links, in order.
func links(text string) (targets []string) {
	text = code.ReplaceAllString(prose(text), "")
	for _, form := range []*regexp.Regexp{inline, linkDef} {
		for _, m := range form.FindAllStringSubmatch(text, -1) {
			targets = append(targets, m[1])
		}
	}
	return targets
}

// anchors returns the fragments of a page's headings as GitHub derives them: lower case, without
// punctuation, "-" for a space, and a number after a duplicate.
func anchors(text string) map[string]bool {
	all := map[string]bool{}
	text = prose(text)
	for line := range strings.Lines(text) {
		m := heading.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			continue
		}
		slug := slug(m[1])
		name := slug
		for n := 1; all[name]; n++ {
			name = fmt.Sprintf("%s-%d", slug, n)
		}
		all[name] = true
	}
	for _, m := range anchor.FindAllStringSubmatch(text, -1) {
		all[m[1]] = true
	}
	return all
}

// anchorsOf caches the anchors of pages: many links lead to a page.
func anchorsOf(page string) (map[string]bool, error) {
	if known := read[page]; known != nil {
		return known, nil
	}
	text, err := os.ReadFile(page)
	if err == nil {
		read[page] = anchors(string(text))
	}
	return read[page], err
}

// read caches the anchors of pages by path; tests run in sequence.
var read = map[string]map[string]bool{}

func slug(title string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r):
			return unicode.ToLower(r)
		}
		return -1
	}, link.ReplaceAllString(title, "$1"))
}

// wrongLink returns the defect of a link, or "". wrongLink uses no network: it checks only the form
// of a remote address.
func wrongLink(page, target string) string {
	u, err := url.Parse(target)
	switch {
	case err != nil:
		return err.Error()
	case u.Scheme != "" || u.Host != "":
		if (u.Scheme != "https" && u.Scheme != "http") || !strings.Contains(u.Host, ".") {
			return "it is no address of the web"
		}
		return ""
	case target == "":
		return "it is empty"
	case filepath.IsAbs(u.Path):
		return "it is absolute, and leads to another place in each view of the repository"
	}
	to := page
	if u.Path != "" {
		to = filepath.Join(filepath.Dir(page), u.Path)
	}
	if below, err := filepath.Rel(root, to); err != nil || strings.HasPrefix(below, "..") {
		return "it leads out of the repository"
	}
	info, err := os.Stat(to)
	if err != nil {
		return "there is no such file"
	}
	if u.Fragment == "" {
		return ""
	}
	if info.IsDir() || filepath.Ext(to) != ".md" {
		return "only pages have headings"
	}
	known, err := anchorsOf(to)
	if err != nil {
		return err.Error()
	}
	if !known[u.Fragment] {
		return "the page has no such heading"
	}
	return ""
}

func TestEveryLinkLeadsSomewhere(t *testing.T) {
	count := 0
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		name, _ := filepath.Rel(root, page) // relative to root, as in pages
		for _, target := range links(string(text)) {
			count++
			if wrong := wrongLink(page, target); wrong != "" {
				t.Errorf("%s links to %q: %s", name, target, wrong)
			}
		}
	}
	if count < 100 {
		t.Errorf("%d links were found", count)
	}
	t.Logf("%d links", count)
}

// Links of every form are found.
func TestLinksOfEachFormAreFound(t *testing.T) {
	page := "# A `b` c\n\n[one](x.md) `[two](y.md)` [three\nfour](z.md#d \"title\")\n\n```\n# no " +
		"heading\n[five](v.md)\n```\n\n![six](w.svg)\n\n[r]: u.md\n\n## A b, c!\n## A b, c!\n"
	if got, want := strings.Join(links(page), " "), "x.md z.md#d w.svg u.md"; got != want {
		t.Errorf("links %q, want %q", got, want)
	}
	at := anchors(page)
	for _, want := range []string{"a-b-c", "a-b-c-1", "a-b-c-2"} {
		if !at[want] {
			t.Errorf("no heading %q among %v", want, at)
		}
	}
	if len(at) != 3 {
		t.Errorf("headings %v", at)
	}
	readme := filepath.Join(root, "README.md")
	for target, right := range map[string]bool{
		"docs/network.md": true, "docs": true, "docs/errors.md#error-codes-of-the-moon": false, "docs/nothing.md": false,
		"/docs/network.md": false,
		"../outside.md":    false, "#nothing": false, "#install": true, "https://example.com/x": true,
		"https://nowhere": false,
		"":                false, "docs/picture.svg#a": false,
	} {
		if wrong := wrongLink(readme, target); (wrong == "") != right {
			t.Errorf("%q: %q", target, wrong)
		}
	}
}
