package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"strconv"
)

const gerundsFile = "integration/wording/gerunds.txt"

const gerundsHeader = `# Texts of errors that begin with a gerund, by folder: "read %s: %w" is the form, not "reading %s: %w".
# The values may only fall: go run ./integration/wording -update
`

var (
	gerund = regexp.MustCompile(`^[a-z]+ing[ :]`)
	// notGerund matches first words that end like a gerund and name no operation.
	notGerund = regexp.MustCompile(`^(missing|nothing|remaining|pending|staging|string|ring)[ :]`)
)

// countGerunds returns the number of errors in a source whose text, the first argument of fmt.Errorf or
// errors.New, begins with a gerund.
func countGerunds(name string, source []byte) (count int, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
	if err != nil {
		return 0, err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && isErrorConstructor(call.Fun) && len(call.Args) > 0 {
			if text := firstLiteral(call.Args[0]); gerund.MatchString(text) && !notGerund.MatchString(text) {
				count++
			}
		}
		return true
	})
	return count, nil
}

// isErrorConstructor reports whether an expression is fmt.Errorf or errors.New.
func isErrorConstructor(e ast.Expr) bool {
	f, ok := e.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	x, ok := f.X.(*ast.Ident)
	return ok && (x.Name == "fmt" && f.Sel.Name == "Errorf" || x.Name == "errors" && f.Sel.Name == "New")
}

// firstLiteral returns the string literal with which an expression begins, empty for other expressions.
func firstLiteral(e ast.Expr) string {
	for {
		sum, ok := e.(*ast.BinaryExpr)
		if !ok {
			break
		}
		e = sum.X
	}
	literal, ok := e.(*ast.BasicLit)
	if !ok {
		return ""
	}
	text, err := strconv.Unquote(literal.Value)
	if err != nil {
		return "" // a number
	}
	return text
}

// checkGerunds compares the counts below root with the limits of gerundsFile, which update lowers first.
func checkGerunds(root string, update bool) error {
	found := map[string]int{}
	err := eachFile(root, skipped, func(at string, source []byte) error {
		count, err := countGerunds(at, source)
		if count > 0 {
			found[textsKey(path.Dir(at))] += count
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("count gerunds in errors below %s: %w", root, err)
	}
	l := countList{gerundsFile, gerundsHeader, func(folder string, count, limit int) error {
		return fmt.Errorf("%s: %d texts of errors begin with a gerund, limit %d; begin with the verb: \"read %%s: %%w\"",
			folder, count, limit)
	}, false}
	return l.check(root, found, update)
}
