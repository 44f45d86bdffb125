package documents

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/fault"
)

var update = flag.Bool("update", false, "write the list of internal messages, docs/troubleshooting.md and the diagrams")

// internalList lists the messages without a code, by package. The author of a new message gives the
// message a code of package fault, or runs this test with -update.
const internalList = "testdata/internal-messages.txt"

func TestEachMessageHasACodeOrIsInternal(t *testing.T) {
	all, err := Messages(root)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	b.WriteString("# Messages without a code. `go test ./integration/documents -update` writes this list.\n")
	at, coded := "", 0
	coveredText := map[string]bool{}
	for _, m := range all {
		if m.code != "" {
			coded++
			coveredText[m.at+"\x00"+m.Text] = true
		}
	}
	for _, m := range all {
		if coveredText[m.at+"\x00"+m.Text] {
			continue
		}
		if m.at != at {
			at = m.at
			fmt.Fprintf(&b, "\n%s\n", at)
		}
		fmt.Fprintf(&b, "\t%s\n", m.Text)
	}
	if coded < 60 || len(all) < 1500 {
		t.Errorf("only %d of %d messages have a code", coded, len(all))
	}
	current(t, internalList, b.Bytes())
	t.Logf("%d messages, %d with a code", len(all), coded)
}

// current compares a generated file with its expected text, and writes the file with -update.
func current(t *testing.T, path string, want []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(string(got), "\n")); diff != "" {
		t.Errorf("%s is stale; run go test ./integration/documents -update (-want +got):\n%s", path, diff)
	}
}

// troubleshooting returns docs/troubleshooting.md: the introduction in testdata, and an entry for
// each code.
func troubleshooting(t *testing.T, all []Message) []byte {
	t.Helper()
	introduction, err := os.ReadFile("testdata/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	names := constantNames(t)
	b := bytes.NewBuffer(introduction)
	for _, e := range fault.Entries() {
		fmt.Fprintf(b, "\n## %s: %s\n\n%s\n\n", e.Code, e.Title, e.Cause)
		for _, remedy := range e.Remedies {
			fmt.Fprintf(b, "- %s\n", remedy)
		}
		if e.See != "" {
			fmt.Fprintf(b, "\nSee [%s](%s).\n", e.See, e.See)
		}
		if !slices.ContainsFunc(all, func(m Message) bool { return m.code != "" && names[m.code] == e.Code }) {
			t.Errorf("no program prints %s", e.Code)
		}
	}
	return b.Bytes()
}

// constantNames maps constant names, and codes, to codes.
func constantNames(t *testing.T) map[string]fault.Code {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), root+"/internal/fault/entries.go", nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]fault.Code{}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == 1 {
			if text, ok := literal(v.Values[0], nil); ok {
				names[v.Names[0].Name], names[text] = fault.Code(text), fault.Code(text)
			}
		}
		return true
	})
	return names
}

func TestTroubleshootingHasEachCode(t *testing.T) {
	all, err := Messages(root)
	if err != nil {
		t.Fatal(err)
	}
	names := constantNames(t)
	for _, m := range all {
		if m.code != "" && names[m.code] == "" {
			t.Errorf("%s: %q has the unknown code %s", m.at, m.Text, m.code)
		}
	}
	current(t, root+"/docs/troubleshooting.md", troubleshooting(t, all))
}

// The extractor finds every form of a message.
func TestMessagesOfEachFormAreExtracted(t *testing.T) {
	source := "package p\nconst tail = \"; do %s\"\nfunc f() {\n" +
		"fmt.Errorf(\"reading %q: %w\", x, err)\nerrors.New(\"one\" + tail)\nwire.Errorf(status, \"a %d%% of %.60q...\", " +
		"1, x)\n" +
		"malformed(1, \"its own %d\", 2)\nr.kill(fmt.Sprintf(\"dead after %v\", " +
		"t))\nlog.WithError(err).Warn(\"careful\")\nlogrus.Errorf(\"%v: %v\", a, " +
		"b)\nlog.Info(\"nothing\")\nt.Error(err)\nreturn &fault.Error{Code: fault.NoLane, Operation: \"find\", Object: " +
		"x, Cause: errors.New(\"why\"), Remedy: \"do \" + y}\n}\nfunc g() error { return lost(\"at %s\", z) }\n" +
		"func malformed(a int, format string, args ...any) error { return nil }\nfunc lost(at string, args ...any) error " +
		"{ return &fault.Error{Code: fault.NoPort, Operation: \"lose\", Object: at} }\nfunc (e E) Error() string { " +
		"return fmt.Sprintf(\"E of %d\", e) }\nfunc (f F) Error() string { return \"F of \" + f.a }\n" +
		"var internal = &fault.Error{Operation: \"take\", Cause: err}\n"
	f, err := parser.ParseFile(token.NewFileSet(), "p.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range messagesOf([]*ast.File{f}, "p") {
		got = append(got, strings.TrimSuffix(m.code+" "+m.Text, " "))
	}
	want := []string{" reading …: …", " one; do …", " a …% of …...", " its own …", " dead after …", " careful",
		"NoLane find …: …; do …", "NoLane why", "NoPort at …", "NoPort lose …", " E of …", " F of …", " take: …"}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := withoutComments(`a("x // y", '"') /* "z" */; // "w"`); got != `a("x // y", 0)  ;  ` {
		t.Errorf("%q", got)
	}
}
