package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const textsFile = "integration/wording/texts.txt"

const textsHeader = `# Checks of the text of an error in tests, by folder: comparisons with err.Error(). A test asserts
# the type of an error and the fields; a text only for the reason behind the number. The values may
# only fall, also compared with earlier commits: go run ./integration/wording -update
`

// matchers are functions that compare texts.
var matchers = []string{"Contains", "HasPrefix", "HasSuffix", "EqualFold", "MatchString", "Cut", "Diff"}

// countTexts returns the number of comparisons with the text of an error in the source of a test.
func countTexts(name string, source []byte) (count int, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
	if err != nil {
		return 0, err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); ok && slices.Contains(matchers, f.Sel.Name) &&
				slices.ContainsFunc(n.Args, isErrorText) {
				count++
			}
		case *ast.BinaryExpr:
			if (n.Op == token.EQL || n.Op == token.NEQ) && (isErrorText(n.X) || isErrorText(n.Y)) {
				count++
			}
		}
		return true
	})
	return count, nil
}

// isErrorText reports whether an expression is a call of Error without arguments.
func isErrorText(e ast.Expr) bool {
	call, ok := e.(*ast.CallExpr)
	if !ok || len(call.Args) > 0 {
		return false
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	return ok && f.Sel.Name == "Error"
}

// countAllTexts returns the counts of the folders below root, without folders that have none.
func countAllTexts(root string) (map[string]int, error) {
	found := map[string]int{}
	err := eachFile(root, skipped, func(at string, source []byte) error {
		if !strings.HasSuffix(at, "_test.go") {
			return nil
		}
		count, err := countTexts(at, source)
		if count > 0 {
			found[textsKey(path.Dir(at))] += count
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("count checks of error texts below %s: %w", root, err)
	}
	return found, nil
}

// textsKey returns the key of a folder: relay/ has a single count, because packages move there.
func textsKey(folder string) string {
	if strings.HasPrefix(folder, "relay/") {
		return "relay"
	}
	return folder
}

// checkTexts compares the counts with the limits of textsFile. With update, checkTexts first lowers
// the limits to the counts.
func checkTexts(root string, update bool) error {
	found, err := countAllTexts(root)
	if err != nil {
		return err
	}
	l := countList{textsFile, textsHeader, func(folder string, count, limit int) error {
		return fmt.Errorf(
			"%s: tests compare the text of an error in %d places, limit %d; use errors.Is, or errors.As and fields",
			folder, count, limit)
	}, true}
	return l.check(root, found, update)
}

// readTexts returns the counts of textsFile, none if the tree has no such file.
func readTexts(root string) (map[string]allowed, error) {
	text, err := os.ReadFile(filepath.Join(root, textsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parseTexts(string(text))
}

// parseTexts reads the content of textsFile. Versions before the reasons are valid, too.
func parseTexts(text string) (map[string]allowed, error) {
	list, _, err := countList{file: textsFile, reasons: true}.parse(text)
	if err != nil {
		list, _, err = countList{file: textsFile}.parse(text)
	}
	counts := map[string]allowed{}
	for folder, count := range list {
		counts[folder] = allowed{tests: count}
	}
	return counts, err
}

// countList is a file with limits of counts by folder; a folder that the file does not name has limit 0.
type countList struct {
	file, header string
	above        func(folder string, count, limit int) error // the error of a count above the limit
	reasons      bool                                        // the file has a reason for each folder
}

// check compares the counts with the limits of the file. With update, check first lowers the limits to
// the counts. A tree without the file has no limits.
func (l countList) check(root string, found map[string]int, update bool) error {
	file := filepath.Join(root, l.file)
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) && !update {
		return nil // the tree of a test
	}
	if err != nil {
		return err
	}
	limits, reasons, err := l.parse(string(text))
	if err != nil {
		return err
	}
	if update {
		for folder, limit := range limits {
			if limits[folder] = min(limit, found[folder]); found[folder] == 0 {
				delete(limits, folder)
			}
		}
		var b strings.Builder
		b.WriteString(l.header)
		for _, folder := range slices.Sorted(maps.Keys(limits)) {
			line := fmt.Sprintf("%-36s %3d %s", folder, limits[folder], reasons[folder])
			b.WriteString(strings.TrimSpace(line) + "\n")
		}
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			return err
		}
	}
	var errs []error
	for _, folder := range slices.Sorted(maps.Keys(found)) {
		if found[folder] > limits[folder] {
			errs = append(errs, l.above(folder, found[folder], limits[folder]))
		}
	}
	return errors.Join(errs...)
}

// parse reads the content of the file.
func (l countList) parse(text string) (limits map[string]int, reasons map[string]string, err error) {
	limits, reasons = map[string]int{}, map[string]string{}
	for n, line := range strings.Split(text, "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		bad := fmt.Errorf("parse %s, line %d: %q is not a folder and a number", l.file, n+1, line)
		if l.reasons {
			bad = fmt.Errorf("parse %s, line %d: %q is not a folder, a number and a reason", l.file, n+1, line)
		}
		if len(fields) < 2 || len(fields) > 2 != l.reasons {
			return nil, nil, bad
		}
		count, err := strconv.Atoi(fields[1])
		if err != nil || count < 1 {
			return nil, nil, bad
		}
		limits[fields[0]], reasons[fields[0]] = count, strings.Join(fields[2:], " ")
	}
	return limits, reasons, nil
}
