package documents

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/relay/wire"
)

// message is what a program can print: a format of an error, or of a line of a log from
// warning up.
type message struct {
	text string // as operators see it: "…" stands for what differs
	at   string // the package, relative to root
}

// products are the folders of what is installed. What tests, demonstrates and measures is
// not explained to operators.
var products = []string{"cdi", "cmd", "config", "cuda", "hook", "relay", "topo"}

var notProducts = regexp.MustCompile(`^(cuda/(sim|conformance|kernels)|cmd/peerlane/(bench|bundle|demo|measure|testbed|traffic)|topo/recorded|relay/wire/generate|relay/(libpeerlane|nccl)/build|relay/verbs/(standin|conformance)|cmd/manual)(/|$)|/testdata(/|$)`)

// verb is one of package fmt's.
var verb = regexp.MustCompile(`%[-+# 0]*(\*|\d+)?(\.(\*|\d+)?)?(\[\d+\])?[a-zA-Z]`)

// shown is a format as it is printed.
func shown(format string) string {
	text := verb.ReplaceAllString(strings.ReplaceAll(format, "%%", "\x00"), "…")
	text = strings.ReplaceAll(text, "\x00", "%")
	text = strings.Join(strings.Fields(text), " ")
	for strings.Contains(text, "……") {
		text = strings.ReplaceAll(text, "……", "…")
	}
	return text
}

// formatOf is which argument of a call is the text of a message; -1 for none.
func formatOf(call *ast.CallExpr) int {
	name := ""
	of := ""
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		name = f.Sel.Name
		if x, ok := f.X.(*ast.Ident); ok {
			of = x.Name
		}
	case *ast.Ident:
		name = f.Name
	}
	switch {
	case of == "fmt" && name == "Errorf", of == "errors" && name == "New":
		return 0
	case of == "wire" && name == "Errorf", of == "" && name == "Errorf":
		if len(call.Args) > 1 { // with a status in front
			return 1
		}
	case name == "Warn" || name == "Warnf" || name == "Warning" || name == "Error" || name == "Errorf" || name == "Fatal" || name == "Fatalf":
		return 0
	}
	return -1
}

// literal is the text of an expression of constants, with "…" for what is none.
func literal(e ast.Expr, constants map[string]string) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, err == nil && e.Kind == token.STRING
	case *ast.Ident:
		text, ok := constants[e.Name]
		return text, ok
	case *ast.BinaryExpr:
		a, okA := literal(e.X, constants)
		b, okB := literal(e.Y, constants)
		if !okA {
			a = "%v"
		}
		if !okB {
			b = "%v"
		}
		return a + b, okA || okB
	}
	return "", false
}

// messages are all, in order.
func messages(t *testing.T) (all []message) {
	t.Helper()
	for _, top := range products {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return err
			}
			at, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			if notProducts.MatchString(at) {
				return filepath.SkipDir
			}
			names, err := filepath.Glob(filepath.Join(path, "*.go"))
			if err != nil {
				return err
			}
			var files []*ast.File
			for _, name := range names {
				if strings.HasSuffix(name, "_test.go") {
					continue
				}
				f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
				if err != nil {
					return err
				}
				files = append(files, f)
			}
			all = append(all, messagesOf(files, at)...)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.SortFunc(all, func(a, b message) int { return strings.Compare(a.text+"\x00"+a.at, b.text+"\x00"+b.at) })
	return slices.Compact(all)
}

// messagesOf are those of a package, by its files.
func messagesOf(files []*ast.File, at string) (list []message) {
	constants := map[string]string{}
	for _, f := range files {
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec) // of a const declaration
				for i, name := range v.Names {
					if i < len(v.Values) {
						if text, ok := literal(v.Values[i], constants); ok {
							constants[name.Name] = text
						}
					}
				}
			}
		}
	}
	own := formats(files, at)
	add := func(e ast.Expr) {
		if text, ok := literal(e, constants); ok {
			if text := shown(text); strings.Trim(text, "…:;,. ()") != "" {
				list = append(list, message{text, at})
			}
		}
	}
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			if d, ok := n.(*ast.FuncDecl); ok && d.Name.Name == "Error" && d.Recv != nil && d.Body != nil {
				texts(d.Body, add) // a type of errors
			}
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if i := formatOf(call); i >= 0 && i < len(call.Args) {
				add(call.Args[i])
			} else if i, is := own[called(call)]; is && i < len(call.Args) {
				add(call.Args[i])
			} else if sinks[called(call)] {
				for _, a := range call.Args {
					add(a)
					texts(a, add)
				}
			}
			return true
		})
	}
	return list
}

// called is the name of what is called.
func called(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		return f.Sel.Name
	case *ast.Ident:
		return f.Name
	}
	return ""
}

// sinks take a sentence that somebody hears: why a relay was killed, or clients are refused.
var sinks = map[string]bool{"failed": true, "kill": true, "complain": true, "refuse": true, "tell": true}

// texts adds all that fmt.Sprintf makes within a part of a program.
func texts(part ast.Node, add func(ast.Expr)) {
	ast.Inspect(part, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && called(call) == "Sprintf" && len(call.Args) > 0 {
			add(call.Args[0])
		}
		return true
	})
}

// formats are a package's own functions that make an error or a warning of a format, and
// which argument that is: those with a parameter of that name, and anything after it.
// What makes findings of peerlane doctor is none: docs/doctor.md has them.
func formats(files []*ast.File, at string) map[string]int {
	own := map[string]int{}
	for _, f := range files {
		for _, d := range f.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || at == "cmd/peerlane/doctor" {
				continue
			}
			i := 0
			for n, field := range f.Type.Params.List {
				last := n == len(f.Type.Params.List)-2
				if _, variadic := f.Type.Params.List[len(f.Type.Params.List)-1].Type.(*ast.Ellipsis); last && variadic && len(field.Names) > 0 && field.Names[len(field.Names)-1].Name == "format" {
					own[f.Name.Name] = i + len(field.Names) - 1
				}
				i += len(field.Names)
			}
		}
	}
	return own
}

// comment is one of C's.
var comment = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)

// strung are C's strings, of which those that stand one after the other are one.
var strung = regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"(?:\s*(?:PRI[a-z0-9]+\s*)?"(?:[^"\\\n]|\\.)*")*`)

var text = regexp.MustCompile(`"((?:[^"\\\n]|\\.)*)"`)

// cVerb is one of printf's.
var cVerb = regexp.MustCompile(`%[-+# 0]*(\*|\d+)?(\.(\*|\d+)?)?(hh|h|ll|l|z|j|t)?[a-zA-Z]`)

// cMessages are those of the libraries that other programs load: all texts of several
// words, for C tells nothing more of what they are.
func cMessages(t *testing.T) (list []message) {
	t.Helper()
	for _, at := range []string{"relay/libpeerlane/source", "relay/nccl/source"} {
		files, err := filepath.Glob(filepath.Join(root, at, "*.c"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", at, len(files), err)
		}
		for _, file := range files {
			source, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, together := range strung.FindAllString(withoutComments(string(source)), -1) {
				said := ""
				for _, m := range text.FindAllStringSubmatch(together, -1) {
					said += m[1]
				}
				said = shown(cVerb.ReplaceAllString(strings.ReplaceAll(strings.ReplaceAll(said, `\"`, `"`), `\n`, " "), "%v"))
				if strings.Count(said, " ") >= 2 && strings.Trim(said, "…:;,. ()") != "" {
					list = append(list, message{said, at})
				}
			}
		}
	}
	return list
}

// withoutComments leaves strings as they are, also those that look like comments.
func withoutComments(source string) string {
	either := regexp.MustCompile(`(?s)"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|` + comment.String())
	return either.ReplaceAllStringFunc(source, func(s string) string {
		if strings.HasPrefix(s, "/") {
			return " "
		}
		if strings.HasPrefix(s, "'") {
			return "0"
		}
		return s
	})
}

// statuses are what operations end with, as libraries name them.
func statuses() (list []message) {
	for s := wire.StatusInternal; !strings.Contains(s.String(), "not know"); s++ {
		list = append(list, message{s.String(), "relay/wire, a status"})
	}
	return list
}

// sectionOf is the section of a message, and the rule that says so; "" for none.
func sectionOf(m message) (string, int) {
	for i, r := range sections {
		if r.at.MatchString(m.at) && r.text.MatchString(m.text) {
			return r.section, i
		}
	}
	return "", -1
}

const index = root + "/docs/messages.md"

// Each message that a program can print is in the index, and leads from there to a
// section that is there. One that has been added or changed has to be seen: who writes it
// runs this with -update, and reads whether the section answers it.
func TestEveryMessageIsExplained(t *testing.T) {
	page, err := os.ReadFile(root + "/docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	there := anchors(string(page))
	used := map[int]bool{}
	var b strings.Builder
	b.WriteString("<!-- Written by `go test ./integration/documents -update` from the sources. -->\n\n# Messages\n\n" +
		"What Peerlane's programs and libraries can say of an error, or log as a warning, sorted by its text.\n" +
		"\"…\" stands for what differs: a name, a number, or the message of what went wrong below. Those that begin with it are\n" +
		"at the end. Each leads to its section of [troubleshooting.md](troubleshooting.md), and a status to [errors.md](errors.md).\n\n" +
		"| message | of | section |\n|---|---|---|\n")
	all := append(messages(t), cMessages(t)...)
	links := map[message]string{}
	for _, m := range all {
		section, rule := sectionOf(m)
		links[m] = fmt.Sprintf("[%s](troubleshooting.md#%s)", section, slug(section))
		if section == "" {
			t.Errorf("%s can print %q, and no rule of rules_test.go has a section for it", m.at, m.text)
			continue
		}
		if used[rule] = true; !there[slug(section)] {
			t.Errorf("docs/troubleshooting.md has no section %q", section)
		}
	}
	for i, r := range sections {
		if !used[i] {
			t.Errorf("the rule %s, %v, %v has no message", r.section, r.at, r.text)
		}
	}
	all = append(all, statuses()...)
	slices.SortFunc(all, func(a, b message) int {
		return strings.Compare(strings.ToLower(a.text)+"\x00"+a.at, strings.ToLower(b.text)+"\x00"+b.at)
	})
	for _, m := range slices.Compact(all) {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", cell(m.text), m.at, cmp.Or(links[m], "[errors](errors.md)"))
	}
	if *update {
		if err := os.WriteFile(index, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(index)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(strings.Split(b.String(), "\n"), strings.Split(string(got), "\n")); diff != "" {
		t.Errorf("%s (-want +got; go test ./integration/documents -update writes it):\n%s", index, diff)
	}
	t.Logf("%d messages", len(all))
}

var update = flag.Bool("update", false, "write docs/messages.md")

// cell is a text that is a text in a table, too.
func cell(s string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "*", `\*`, "_", `\_`, "`", "\\`", "[", `\[`).Replace(s)
}

// A section says more than its heading: each has causes with what to do.
func TestEverySectionHasRemedies(t *testing.T) {
	page, err := os.ReadFile(root + "/docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(page), "\n## ")[1:]
	if len(parts) < 15 {
		t.Fatalf("%d sections", len(parts))
	}
	known := map[string]bool{}
	for _, s := range sections {
		known[s.section] = true
	}
	for _, part := range parts {
		title, text, _ := strings.Cut(part, "\n")
		if !known[title] {
			t.Errorf("no message leads to the section %q", title)
		}
		rows := 0
		for line := range strings.Lines(text) {
			cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
			if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| it says") {
				continue
			}
			if rows++; len(cells) != 3 || strings.TrimSpace(cells[1]) == "" || strings.TrimSpace(cells[2]) == "" {
				t.Errorf("%s: %s lacks a cause or what to do", title, strings.TrimSpace(line))
			}
		}
		if rows < 3 {
			t.Errorf("the section %q has %d rows", title, rows)
		}
	}
}

// What the walk does not see it cannot find without a section.
func TestWhatAMessageIs(t *testing.T) {
	source := "package p\nconst tail = \"; do %s\"\nfunc f() {\n" +
		"fmt.Errorf(\"reading %q: %w\", x, err)\nerrors.New(\"one\" + tail)\nwire.Errorf(status, \"a %d%% of %.60q...\", 1, x)\n" +
		"malformed(1, \"its own %d\", 2)\nr.kill(fmt.Sprintf(\"dead after %v\", t))\nlog.WithError(err).Warn(\"careful\")\nlogrus.Errorf(\"%v: %v\", a, b)\nlog.Info(\"nothing\")\nt.Error(err)\n}\n" +
		"func malformed(a int, format string, args ...any) error { return nil }\nfunc (e E) Error() string { return fmt.Sprintf(\"E of %d\", e) }\n"
	f, err := parser.ParseFile(token.NewFileSet(), "p.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range messagesOf([]*ast.File{f}, "p") {
		got = append(got, m.text)
	}
	want := []string{"reading …: …", "one; do …", "a …% of …...", "its own …", "dead after …", "careful", "E of …"}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := withoutComments(`a("x // y", '"') /* "z" */; // "w"`); got != `a("x // y", 0)  ;  ` {
		t.Errorf("%q", got)
	}
}
