package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// root is the repository.
const root = "../.."

// statusesOfTests returns the statuses that each test of the repository names, itself or in called
// functions of its test package.
func statusesOfTests(t *testing.T) map[string]map[string]bool {
	t.Helper()
	packages := map[string]map[string][]*ast.FuncDecl{} // by folder and name
	err := filepath.WalkDir(filepath.Join(root, "relay"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir := filepath.Dir(path)
		if packages[dir] == nil {
			packages[dir] = map[string][]*ast.FuncDecl{}
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				packages[dir][f.Name.Name] = append(packages[dir][f.Name.Name], f)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	statuses := map[string]map[string]bool{}
	for _, functions := range packages {
		for name := range functions {
			if strings.HasPrefix(name, "Test") {
				if statuses[name] == nil { // two packages can have a test with this name
					statuses[name] = map[string]bool{}
				}
				collect(functions, name, map[string]bool{}, statuses[name])
			}
		}
	}
	return statuses
}

// collect adds the statuses that a function names, and those of its callees.
func collect(functions map[string][]*ast.FuncDecl, name string, seen, statuses map[string]bool) {
	if seen[name] {
		return
	}
	seen[name] = true
	for _, f := range functions[name] {
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Ident:
				if status, ok := strings.CutPrefix(n.Name, "Status"); ok {
					statuses[status] = true
				}
			case *ast.CallExpr:
				switch called := n.Fun.(type) {
				case *ast.Ident:
					collect(functions, called.Name, seen, statuses)
				case *ast.SelectorExpr:
					collect(functions, called.Sel.Name, seen, statuses)
				}
			}
			return true
		})
	}
}

// docs/errors.md has a row for each status of the protocol, with its number and a test that
// requires the status.
func TestErrorsNameAllStatuses(t *testing.T) {
	demanded := statusesOfTests(t)
	read := func(path string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	type row struct{ number, test string }
	rows := map[string]row{}
	for _, m := range regexp.MustCompile(`(?m)^\| (\w+) \| (\d+) \|.*\| (\w+) \|$`).FindAllStringSubmatch(
		read("docs/errors.md"), -1) {
		rows[m[1]] = row{m[2], m[3]}
	}
	statuses := regexp.MustCompile(`(?m)^status (\w+) +(\d+)`).FindAllStringSubmatch(read("relay/wire/protocol.def"), -1)
	if len(statuses) < 20 {
		t.Fatalf("the protocol has %d statuses", len(statuses))
	}
	for _, m := range statuses {
		r := rows[m[1]]
		if r.number != m[2] || !demanded[r.test][m[1]] {
			t.Errorf("status %s, %s: the page has number %q and test %q; the test must name the status; it names %v", m[1],
				m[2], r.number, r.test, demanded[r.test])
		}
		delete(rows, m[1])
	}
	for name := range rows {
		t.Errorf("the page has status %s, and the protocol does not", name)
	}
}
