// Exported lists exported identifiers that no other package uses; external tests count as another
// package. `make lint` fails on a package-level identifier or a method of an exported type without
// such a user. Exported permits
//
//   - a method that an interface needs, such as Error or MarshalText
//   - a type in the signature of an identifier in use
//   - a constant, if another constant of the type or of the block is in use
//   - identifiers of public folders, which other modules import, and the keys of exceptions
//
// Exported checks fields of exported structs, too, except structs with a tag, errors, and structs of
// generated files: encoders, callers and messages of a fixed layout need every field.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/tools/go/packages"
)

// module is the import path of this project.
const module = "github.com/peerlane/peerlane"

// tags are the build tags of tests.
const tags = "vm,engines,packages,cluster"

func main() {
	root := flag.String("root", ".", "the root of the repository")
	flag.Parse()
	found, err := run(*root, filepath.Join(*root, "kubernetes"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, f := range found {
		fmt.Fprintf(os.Stderr, "%s: exported, but no other package uses it: unexport it\n", f)
	}
	if len(found) > 0 {
		fmt.Fprintf(os.Stderr, "exported: %d identifiers\n", len(found))
		os.Exit(1)
	}
}

// run returns the identifiers of the module in root, sorted. The modules in the directories others use identifiers too.
func run(root string, others ...string) ([]string, error) {
	s := newSurvey()
	for _, dir := range append([]string{root}, others...) {
		list, err := packages.Load(&packages.Config{
			Mode: packages.NeedName | packages.NeedFiles | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo |
				packages.NeedImports | packages.NeedModule,
			Dir: dir, Tests: true, BuildFlags: []string{"-tags", tags},
		}, "./...")
		if err != nil {
			return nil, err
		}
		for _, p := range list {
			if len(p.Errors) > 0 {
				return nil, fmt.Errorf("load %s: %w", p.ID, p.Errors[0])
			}
			s.look(p, dir == root && !strings.HasSuffix(p.PkgPath, ".test"))
		}
	}
	return s.unused(), nil
}
