package generation

import (
	"slices"
	"testing"

	"github.com/peerlane/peerlane/hook/sandbox"
)

func TestSandboxFilesComeFromConfigurationAndLibraries(t *testing.T) {
	c := Sandbox{Read: []string{"/read"}, Write: []string{"/write"}}
	var s sandbox.Spec
	c.AddFiles(&s, []string{
		LibraryVariable + "=/a", VerbsVariable + "=/b", "LD_LIBRARY_PATH=/c:relative:/d:", "PATH=/e",
	})
	want := []string{"/read", "/a", "/b", "/c", "/d"}
	if !slices.Equal(s.Read, want) || !slices.Equal(s.Write, c.Write) {
		t.Errorf("read %v, want %v; write %v", s.Read, want, s.Write)
	}
}
