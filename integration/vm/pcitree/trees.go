package pcitree

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed trees/*.txt
var trees embed.FS

// Names lists the tables that the package has, in order.
func Names() []string {
	entries, err := trees.ReadDir("trees")
	if err != nil {
		panic(err) // the folder is in the program
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".txt"))
	}
	return names
}

// unknownTableError is the error of a name without a table.
type unknownTableError struct {
	name  string
	known []string
}

func (e *unknownTableError) Error() string {
	return fmt.Sprintf("unknown PCIe table %q; use one of %s", e.name, strings.Join(e.known, ", "))
}

// ReadTable returns the text of a table of the package.
func ReadTable(name string) (string, error) {
	text, err := trees.ReadFile("trees/" + name + ".txt")
	if err != nil {
		return "", &unknownTableError{name, Names()}
	}
	return string(text), nil
}
