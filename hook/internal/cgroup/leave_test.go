package cgroup

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// In the cgroup namespace of a container, neither the root of the hierarchy nor the parent of the
// groups accepts processes while controllers are enabled below them.
func TestLeaveInCgroupNamespaceUsesGroupBeside(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	family := filepath.Join(root, "family")
	refusing := func(group string) { // makes cgroup.procs unwritable
		if err := os.MkdirAll(filepath.Join(group, "cgroup.procs"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	refusing(root)
	refusing(family)
	if err := os.Mkdir(filepath.Join(family, "id"), 0o755); err != nil {
		t.Fatal(err)
	}
	group := Group{root, "family", "id"}
	if err := group.Leave(); err != nil {
		t.Fatal(err)
	}
	procs := filepath.Join(family, "ending/cgroup.procs")
	if err := errors.Join(os.Chmod(procs, 0o600), os.Remove(procs)); err != nil { // as at the end of the process
		t.Errorf("the process is elsewhere: %v", err)
	}
	if err := errors.Join(os.Remove(filepath.Join(family, "cgroup.procs")), group.remove()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(family); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the last generation leaves %s: %v", family, err)
	}
}
