package terminal_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/terminal"
)

// hostile is ESC, OSC with BEL, CSI as C1, DEL, CR, a bidirectional override and an
// isolate, a line separator, an invisible tag, and a byte that is no UTF-8.
const hostile = "a\x1b[2J\x1b]0;t\x07\u009b2J\x7f\r\u202eb\u2066\u2028\U000e0041\xff"

func clean(t *testing.T, text string) {
	t.Helper()
	if !utf8.ValidString(text) {
		t.Errorf("%q is no UTF-8", text)
	}
	for _, r := range text {
		if unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp) {
			t.Errorf("%q has %U", text, r)
		}
	}
}

func TestSanitiseHostileTextKeepsPrintableCharacters(t *testing.T) {
	const want = "a\ufffd[2J\ufffd]0;t\ufffd\ufffd2J\ufffd\ufffd\ufffdb\ufffd\ufffd\ufffd\ufffd"
	if got := terminal.Sanitise(hostile); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	const plain = "容器 mlx5_0 – é \u00a0 🙂"
	if got := terminal.Sanitise(plain); got != plain {
		t.Errorf("plain text became %q", got)
	}
	if got := terminal.Lines("a\n\tb\rc\x1b\n"); got != "a\n\tb\ufffdc\ufffd\n" {
		t.Errorf("lines %q", got)
	}
}

func FuzzSanitise(f *testing.F) {
	for _, seed := range []string{"", "mlx5_0", hostile, "\xc2", "\xe2\x80", "\ufffd"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		once := terminal.Sanitise(text)
		clean(t, once)
		if utf8.RuneCountInString(once) != utf8.RuneCountInString(text) {
			t.Errorf("%q has another number of characters than %q", once, text)
		}
		if again := terminal.Sanitise(once); again != once {
			t.Errorf("%q became %q", once, again)
		}
		for line := range strings.SplitSeq(terminal.Lines(text), "\n") {
			clean(t, strings.ReplaceAll(line, "\t", ""))
		}
		document, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		escaped := terminal.JSON(document)
		clean(t, string(escaped))
		var before, after string
		if err := json.Unmarshal(document, &before); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(escaped, &after); err != nil || after != before {
			t.Errorf("%s is %q, %s is %q: %v", document, before, escaped, after, err)
		}
	})
}

type word string

func (w word) String() string { return string(w) }

func TestWriterSanitisesArguments(t *testing.T) {
	var b bytes.Buffer
	w := terminal.New(&b)
	w.Printf("%s %q %v %v %-12s| %v %d %*d\n", hostile, hostile, []string{hostile}, word(hostile), word("\x1b"),
		struct{ A string }{hostile}, 7, 4, 2)
	w.Printf("%v\n", fmt.Errorf("open %s: %w", "\x1b[2J", errors.Join(errors.New("one\x07"), errors.New("two"))))
	w.Println(hostile, 3, word(hostile))
	w.PrintLines(hostile + "\n")
	terminal.PrintError(&b, "peerlane", errors.New(hostile))
	for line := range strings.Lines(b.String()) {
		clean(t, strings.TrimSuffix(line, "\n"))
	}
	for _, want := range []string{"\ufffd           |", " 7    2\n", "\ntwo\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in %q", want, b.String())
		}
	}
	b.Reset()
	w.Printf("%s\n", terminal.Paint(hostile, 1, 31))
	text, painted := strings.CutPrefix(b.String(), "\x1b[1;31m")
	text, ended := strings.CutSuffix(text, "\x1b[0m\n")
	if !painted || !ended {
		t.Errorf("painted text is %q", b.String())
	}
	clean(t, text)
	clean(t, terminal.Concat(hostile, 3, terminal.Paint("b")).String())
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, unix.ENOSPC }

func TestWriterKeepsFirstError(t *testing.T) {
	w := terminal.New(full{})
	w.Println("a")
	if err := w.Err(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("error %v", err)
	}
}

// documents are the functions of commands that write unsanitised bytes: JSON, XML, pictures and
// metrics for programs, the protocols of test clients, and text that is already sanitised.
var documents = []string{
	"cmd/peerlane/bench.go:newBenchClientCommand", "cmd/peerlane/bench.go:printBench",
	"cmd/peerlane/capture.go:newCaptureCommand",
	"cmd/peerlane/cdi.go:printSpecs", "cmd/peerlane/demo.go:newDemoClientCommand",
	"cmd/peerlane/demo.go:newMeasureCommand",
	"cmd/peerlane/demo.go:progress", "cmd/peerlane/exporter.go:export", "cmd/peerlane/exporter.go:newCollectCommand",
	"cmd/peerlane/exporter.go:printMetrics",
	"cmd/peerlane/main.go:newRootCommand", "cmd/peerlane/main.go:start", "cmd/peerlane/output.go:printJSON",
	"cmd/peerlane/output.go:printMatrix", "cmd/peerlane/output.go:printTopology", "cmd/peerlane/picture.go:printPicture",
	"cmd/peerlane/relay_top.go:newTopCommand", "cmd/peerlane/topo.go:printXML",
}

// Commands print only through a Writer, and tables only through package table.
func TestCommandsPrintThroughOneWriter(t *testing.T) {
	var found []string
	files := token.NewFileSet()
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		parsed, err := parser.ParseFile(files, path, nil, 0)
		if err != nil {
			return err
		}
		name := filepath.ToSlash(filepath.Join("cmd", strings.TrimPrefix(path, "..")))
		for _, i := range parsed.Imports {
			if strings.Contains(i.Path.Value, "go-pretty/v6/table") && name != "cmd/terminal/table/table.go" {
				t.Errorf("%s makes tables without cmd/terminal/table", name)
			}
		}
		for _, d := range parsed.Decls {
			function, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			where := name + ":" + function.Name.Name
			ast.Inspect(function, func(n ast.Node) bool {
				selector, ok := n.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				on, _ := selector.X.(*ast.Ident)
				switch called := selector.Sel.Name; {
				case called == "Document":
					if !slices.Contains(found, where) {
						found = append(found, where)
					}
				case called == "NewStyled" && on != nil && on.Name == "terminal" && name != "cmd/terminal/table/table.go":
					t.Errorf("%s makes Styled text itself", where)
				case on != nil && on.Name == "fmt" && strings.HasPrefix(called, "Print") &&
					strings.HasPrefix(name, "cmd/peerlane/"):
					t.Errorf("%s prints to standard output with fmt.%s", where, called)
				case on != nil && on.Name == "os" && (called == "Stdout" || called == "Stderr") &&
					strings.HasPrefix(name, "cmd/peerlane/") && where != "cmd/peerlane/main.go:main":
					t.Errorf("%s uses os.%s", where, called)
				}
				return true
			})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(found)
	for _, f := range found {
		if !slices.Contains(documents, f) {
			t.Errorf("%s writes unsanitised bytes", f)
		}
	}
	for _, f := range documents {
		if !slices.Contains(found, f) {
			t.Errorf("%s is listed and writes no document", f)
		}
	}
}
