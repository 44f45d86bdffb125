package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const source = `package p

const most = 8

type state int

func f(n int, s state, done bool) (out int) {
	if n > most && !done {
		out = n + 1
	}
	for out < 3 {
		out++
	}
	if s == 2 || done {
		panic("done")
	}
	return out
}
`

// outlines imports packages that have only the function that each text declares.
type outlines struct{}

func (outlines) Import(path string) (*types.Package, error) {
	text := map[string]string{
		"errors": "package errors; func New(string) error",
		"fmt":    "package fmt; func Errorf(string, ...any) error",
	}[path]
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, path, text, 0)
	if err != nil {
		return nil, err
	}
	return (&types.Config{IgnoreFuncBodies: true}).Check(path, fset, []*ast.File{f}, nil)
}

// mutate returns the text of source with mutants, and the mutants.
func mutate(t *testing.T, text string, skip map[int]bool) (string, []mutant) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, "p.go", text, 0)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{},
		Defs: map[*ast.Ident]types.Object{}}
	pkg, err := (&types.Config{Importer: outlines{}}).Check("p", fset, []*ast.File{f}, info)
	if err != nil {
		t.Fatal(err)
	}
	m := mutator{info: info, pkg: pkg, fset: fset, skip: skip}
	return string(m.file("p.go", []byte(text), f)), m.mutants
}

func TestMutatorEachActionHasMutants(t *testing.T) {
	_, mutants := mutate(t, source, nil)
	var got []string
	for _, m := range mutants {
		got = append(got, m.String())
	}
	slices.Sort(got)
	want := []string{
		"p.go:8: add one to a constant: most", "p.go:8: ignore an operand of &&: !done",
		"p.go:8: ignore an operand of &&: n > most", "p.go:8: move a boundary: n > most",
		"p.go:8: negate: n > most && !done",
		"p.go:9: add one to a constant: 1", "p.go:9: remove: out = n + 1", "p.go:9: subtract: n + 1",
		"p.go:11: add one to a constant: 3", "p.go:11: move a boundary: out < 3", "p.go:11: negate: out < 3",
		"p.go:12: remove: out++",
		"p.go:14: add one to a constant: 2", "p.go:14: ignore an operand of ||: done",
		"p.go:14: ignore an operand of ||: s == 2", "p.go:14: negate: s == 2 || done",
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestMutatorValueBesideErrorHasNoMutant(t *testing.T) {
	text := "package p\n\nimport (\n\t\"errors\"\n\t\"fmt\"\n)\n\nvar _, _ = fmt.Errorf, errors.New\n\n" +
		"var failed = errors.New(\"\")\n\ntype e struct{ error }\n\nfunc Errorf(status int, format string, a ...any) *e\n\n" +
		"func f(err, other error, n *int) (int, error) {\n"
	for _, c := range []struct{ name, body, want string }{
		{"an error of a condition", "if err != nil {\nreturn 1, err\n}", ""},
		{"an error of a case", "switch {\ncase err != nil:\nreturn 1, err\n}", ""},
		{"an error of one of several cases", "switch {\ncase err != nil, n != nil:\nreturn 1, err\n}", "1"},
		{"an error of the package", "if n != nil {\nreturn 1, failed\n}", ""},
		{"an error around an error of a condition", "if err != nil {\nreturn 1, e{err}\n}", ""},
		{"an error of another condition", "if n != nil {\nreturn 1, err\n}", "1"},
		{"another error", "if err != nil {\nreturn 1, other\n}", "1"},
		{"a condition without an error", "if err == nil {\nreturn 1, err\n}", "1"},
		{"a made error", `return 1, errors.New("")`, ""},
		{"a number in a message", `return 1, fmt.Errorf("%d", 2)`, ""},
		{"a number beside a message", `return 1, Errorf(2, "%d", 3)`, "2"},
		{"an error's fields", "return 1, &e{}", ""},
		{"no error", "return 1, nil", "1"},
		{"an error that may be nil", "return 1, err", "1"},
	} {
		_, mutants := mutate(t, text+c.body+"\nreturn *n, nil\n}\n", nil)
		var got []string
		for _, m := range mutants {
			if m.action == "add one to a constant" {
				got = append(got, m.code)
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

func TestMutatorTextOfErrorHasNoMutant(t *testing.T) {
	for text, want := range map[string]int{
		"type e int\n\nfunc (x e) Error() string {\n\tif x == 1 {\n\t\treturn \"\"\n\t}\n\treturn \"x\"\n}\n": 0,
		"type e int\n\nfunc (x e) Error(y int) bool { return y == 1 }\n":                                      2,
		"func Error(x int) bool { return x == 1 }\n":                                                          2,
	} {
		if _, mutants := mutate(t, "package p\n\n"+text, nil); len(mutants) != want {
			t.Errorf("%s has %d mutants: %v", text, len(mutants), mutants)
		}
	}
}

func TestMutatorCapacityOfMakeHasNoMutant(t *testing.T) {
	for code, want := range map[string]string{
		"return make([]int, n-1, n+1)": "1 n-1", "return make([]int, n-1)": "1 n-1",
	} {
		_, mutants := mutate(t, "package p\n\nfunc f(n int) []int { "+code+" }\n", nil)
		var got []string
		for _, m := range mutants {
			got = append(got, m.code)
		}
		slices.Sort(got)
		if strings.Join(got, " ") != want {
			t.Errorf("%s: mutants of %q, want %q", code, got, want)
		}
	}
}

func TestMutatorSkippedMutantLeavesText(t *testing.T) {
	_, mutants := mutate(t, source, nil)
	skip := map[int]bool{}
	for id := range mutants {
		skip[id] = true
	}
	if got, _ := mutate(t, source, skip); got != source {
		t.Errorf("the text has changed:\n%s", got)
	}
}

func TestMutatorNestedMutantsKeepOrder(t *testing.T) {
	text := "package p\n\nfunc f(a, b int) bool {\n\treturn a < b+1 && b > 0\n}\n"
	want := "package p\n\nfunc f(a, b int) bool {\n\treturn " +
		"(mutationOn(0) || (mutationLess(2, a ,mutationAdd(3, b,mutationConstant[int](4, 1))))) && " +
		"(mutationOn(1) || (mutationGreater(5, b ,mutationConstant[int](6, 0))))\n}\n"
	got, _ := mutate(t, text, nil)
	plain := func(s string) string { return strings.ReplaceAll(s, " ", "") }
	if plain(got) != plain(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestChooseSeedRepeatsChoice(t *testing.T) {
	first, second := choose(100, map[int]bool{3: true}, 10, 7), choose(100, map[int]bool{3: true}, 10, 7)
	if !slices.Equal(first, second) || len(first) != 10 || !slices.IsSorted(first) {
		t.Errorf("%v and %v", first, second)
	}
	if all := choose(5, map[int]bool{3: true}, 10, 7); !slices.Equal(all, []int{0, 1, 2, 4}) {
		t.Errorf("%v", all)
	}
}

func TestRunReportsSurvivors(t *testing.T) {
	var out bytes.Buffer
	s := settings{sample: 100, seed: 1, files: regexp.MustCompile(""), slow: time.Minute}
	if err := run(s, &out, []string{"./testdata/sum"}); err != nil {
		t.Fatal(err)
	}
	const dir = "integration/mutation/testdata/sum"
	want := "survived: " + dir + "/sum.go:10: move a boundary: sum > limit\n" +
		"survived: " + dir + "/sum.go:17: negate (no test reaches it): len(list) == 0\n" +
		"survived: " + dir + "/sum.go:17: add one to a constant (no test reaches it): 0\n"
	row := regexp.MustCompile(dir + ` +7 +7 +4 +0 +3 +2 +42.9 %`)
	if got := out.String(); !strings.HasPrefix(got, want) || !row.MatchString(got) {
		t.Errorf("got\n%s\nwant\n%s and a row of 7 mutants", got, want)
	}
}
