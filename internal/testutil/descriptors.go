package testutil

import (
	"os"
	"path/filepath"
	"testing"
)

// Descriptors returns the number of this process's open descriptors of a file.
func Descriptors(t testing.TB, path string) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == path { // otherwise perhaps closed meanwhile
			n++
		}
	}
	return n
}
