package bundle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// removeGroups removes a cgroup after the end of its last process, not before.
func TestRemoveGroupsWaitsForLastProcess(t *testing.T) {
	parents, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs") // per hierarchy, version 1 or hybrid
	if err != nil {
		t.Fatal(err)
	}
	id := fmt.Sprintf("peerlane-testbundle-%d", os.Getpid())
	var groups []string
	for _, p := range parents {
		group := filepath.Join(filepath.Dir(p), id)
		if err := os.Mkdir(group, 0o755); err != nil {
			t.Logf("not made: %v", err)
			continue
		}
		t.Cleanup(func() { _ = os.Remove(group) }) // if the test fails
		groups = append(groups, group)
	}
	if len(groups) == 0 {
		t.Skip("needs to make cgroups below one of /sys/fs/cgroup: root, and a writable hierarchy")
	}
	last := exec.Command("cat")
	in, err := last.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := last.Start(); err != nil {
		t.Fatal(err)
	}
	// A cpuset group without processors accepts no process: a group in one other hierarchy is
	// enough.
	taken := ""
	for _, group := range groups {
		if os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(fmt.Sprint(last.Process.Pid)), 0) == nil {
			taken = group
		}
	}
	if taken == "" {
		t.Error("no group takes a process")
	}
	short, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := removeGroups(short, id); err == nil {
		t.Error("a group with a process was removed")
	}
	in.Close()
	if err := removeGroups(context.Background(), id); err != nil {
		t.Error(err)
	}
	for _, group := range groups {
		if _, err := os.Stat(group); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", group, err)
		}
	}
	if err := last.Wait(); err != nil {
		t.Error(err)
	}
}
