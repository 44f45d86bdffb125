package main

import (
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
)

func main() {
	modules, err := check()
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, m := range modules {
		use := "to build and test"
		if m.shipped {
			use = "installed"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", m.path, m.version, use, strings.Join(m.licences, ", "))
	}
	if flushed := t.Flush(); err == nil {
		err = flushed
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "licences: %s\n", strings.ReplaceAll(err.Error(), "\n", "\nlicences: "))
		os.Exit(1)
	}
}
