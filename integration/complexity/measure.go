package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fzipp/gocyclo"
)

// highest is the highest value of a metric in a package, with the name of the function or type.
type highest struct {
	value int
	name  string
}

func (h *highest) note(value int, name string) {
	if value > h.value {
		*h = highest{value, name}
	}
}

// metrics has the metrics of a package's files, or of a package's test files.
type metrics struct {
	// name is the directory, with a suffix for tests.
	name, directory                          string
	complexity, parameters, fields, booleans highest
	functions                                map[string]int
}

// measure returns the metrics of packages below a directory.
func measure(directory string) ([]*metrics, error) {
	packages := map[string]*metrics{}
	err := filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
		name := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != directory &&
			(name == "testdata" || name == "bin" || name == "dist" || strings.HasPrefix(name, ".")):
			return filepath.SkipDir
		case entry.IsDir() || !strings.HasSuffix(name, ".go"):
			return nil
		}
		folder, err := filepath.Rel(directory, filepath.Dir(path))
		if err != nil {
			return err
		}
		row := folder
		if strings.HasSuffix(name, "_test.go") {
			row += " (tests)"
		}
		m := packages[row]
		if m == nil {
			m = &metrics{name: row, directory: folder, functions: map[string]int{}}
			packages[row] = m
		}
		return m.addFile(path)
	})
	return slices.SortedFunc(maps.Values(packages), func(a, b *metrics) int { return cmp.Compare(a.name, b.name) }), err
}

func (m *metrics) addFile(path string) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.ParseComments)
	if err != nil {
		return fmt.Errorf("parse a Go file: %w", err)
	}
	if ast.IsGenerated(file) {
		return nil
	}
	for _, s := range gocyclo.AnalyzeASTFile(file, files, nil) {
		m.complexity.note(s.Complexity, s.FuncName)
		m.functions[s.FuncName] = max(m.functions[s.FuncName], s.Complexity)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			m.parameters.note(n.Type.Params.NumFields(), n.Name.Name)
		case *ast.TypeSpec:
			if s, ok := n.Type.(*ast.StructType); ok {
				fields, booleans := count(s)
				m.fields.note(fields, n.Name.Name)
				m.booleans.note(booleans, n.Name.Name)
			}
		}
		return true
	})
	return nil
}

// count returns the number of a struct's fields and booleans. Fields of anonymous structs count.
func count(s *ast.StructType) (fields, booleans int) {
	for _, f := range s.Fields.List {
		n := max(1, len(f.Names))
		switch t := f.Type.(type) {
		case *ast.StructType:
			inner, flags := count(t)
			fields, booleans = fields+inner*n, booleans+flags*n
			continue
		case *ast.Ident:
			if t.Name == "bool" {
				booleans += n
			}
		case *ast.SelectorExpr:
			if pkg, ok := t.X.(*ast.Ident); ok && pkg.Name == "atomic" && t.Sel.Name == "Bool" {
				booleans += n
			}
		}
		fields += n
	}
	return fields, booleans
}
