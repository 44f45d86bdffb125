package main

import (
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"strconv"
	"strings"
)

// ownModules is the prefix of the paths of this project's packages.
const ownModules = "github.com/peerlane/"

// checkAllImports checks the imports of the files below root, without generated files.
func checkAllImports(root string) error {
	var errs []error
	err := eachFile(root, skipped, func(at string, source []byte) error {
		if !generated.Match(source) {
			errs = append(errs, checkImports(at, source))
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// checkImports returns an error for a file whose imports are not in three groups: the standard library,
// other modules, and this project, each in one block of lines (goimports -local github.com/peerlane).
func checkImports(name string, source []byte) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		return err
	}
	last, end := -1, 0 // the group and the line of the previous import
	for _, spec := range file.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return err
		}
		if path == "C" {
			continue
		}
		group, begin := importGroup(path), files.Position(spec.Pos()).Line
		if spec.Doc != nil {
			begin = files.Position(spec.Doc.Pos()).Line
		}
		if group < last || last >= 0 && (group == last) != (begin == end+1) {
			return fmt.Errorf("%s:%d: import %s is not in its group: standard library, other modules, %s…, with an empty "+
				"line between groups", name, begin, path, ownModules)
		}
		last, end = group, files.Position(spec.End()).Line
	}
	return nil
}

// importGroup returns the number of the group of a path.
func importGroup(path string) int {
	first, _, _ := strings.Cut(path, "/")
	switch {
	case strings.HasPrefix(path, ownModules):
		return 2
	case strings.Contains(first, "."):
		return 1
	}
	return 0
}
