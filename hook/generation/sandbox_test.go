package generation

import (
	"os"
	"reflect"
	"slices"
	"testing"

	"github.com/peerlane/peerlane/config"
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

func TestNewSandboxCopiesConfiguration(t *testing.T) {
	c := config.Relay{Sandbox: config.SandboxAuto, SandboxRead: []string{"/r"}, SandboxWrite: []string{"/w"},
		Memory: 1 << 30, CPUs: 2, Tasks: 3, UIDs: "2000000000-2000000009"}
	got, err := NewSandbox(c)
	if err != nil {
		t.Fatal(err)
	}
	group := got.Group
	got.Group = 0
	want := Sandbox{Mode: config.SandboxAuto, Read: c.SandboxRead, Write: c.SandboxWrite, Limits: Limits{1 << 30, 2, 3}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	wantGroup := 0
	if os.Geteuid() == 0 && sandbox.CheckMapped(2000000000) == nil {
		wantGroup = 2000000000
	}
	if group != wantGroup {
		t.Errorf("group %d, want %d", group, wantGroup)
	}
	c.UIDs = "none"
	if got, err := NewSandbox(c); err == nil {
		t.Errorf("%+v of a wrong range", got)
	}
}
