package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
)

func TestMountFindsCgroup2(t *testing.T) {
	for _, test := range []struct {
		mountinfo, root string
	}{
		{"25 19 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup"},
		{"19 1 0:18 / /sys rw - sysfs sysfs rw\n34 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n",
			"/sys/fs/cgroup/unified"},
		{"34 25 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", ""},
		{"25 19 0:22 / /five - cgroup2 none rw\n", "/five"},
		{"25 19 0:22 / - cgroup2 cgroup2 rw\n", ""},
		{"25 19 0:22 / /a rw - cgroup2 cgroup2\n", ""},
		{"25 19 0:22 / /a rw - \n", ""},
		{"25 19 0:22 / /a rw\n", ""},
		{"", ""},
	} {
		if root, _, ok := Mount(test.mountinfo, "cgroup2", ""); root != test.root || ok != (test.root != "") {
			t.Errorf("%q, %t for %q", root, ok, test.mountinfo)
		}
	}
}

func TestFindFollowsMountsOfProcess(t *testing.T) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	root, _, want := Mount(string(text), "cgroup2", "")
	l := paths.New("/r")
	g, ok, err := Find(l, "id")
	if err != nil || ok != want || g.Path() != filepath.Join(root, l.Cgroup(), "id") {
		t.Errorf("%+v, %t, %v", g, ok, err)
	}
}

// fakeGroup returns a group on a file system without control groups.
func fakeGroup(t *testing.T) Group { return Group{t.TempDir(), "family", "id"} }

func TestCreateOpensGroup(t *testing.T) {
	g := fakeGroup(t)
	dir, err := g.create()
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	opened, err := dir.Stat()
	made, errMade := os.Stat(g.Path())
	if err != nil || errMade != nil || !os.SameFile(opened, made) || !made.IsDir() {
		t.Errorf("%v, %v", err, errMade)
	}
	other := fakeGroup(t)
	writeFile(t, other.Parent())
	if _, err := other.create(); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("with a file in place of the parent: %v", err)
	}
}

func writeFile(t *testing.T, path string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
}

// Limit enables a controller that the group lacks, and sets the other limits if that fails.
func TestLimitWritesEachController(t *testing.T) {
	want := map[string]string{"memory.max": "1024", "pids.max": "3", "cpu.max": "200000 100000"}
	limits := generation.Limits{Memory: 1024, CPUs: 2, Tasks: 3}
	for _, c := range []struct {
		name     string
		present  []string // files of controllers
		refusing string   // a group that enables no controller
		written  []string
		enabled  string // the last controller that Limit enabled
		err      error
	}{
		{"all controllers", []string{"memory.max", "pids.max", "cpu.max"}, "", []string{"memory.max", "pids.max", "cpu.max"},
			"", nil},
		{"no controller", nil, "", []string{"memory.max", "pids.max", "cpu.max"}, "+cpu", nil},
		{"the root refuses", []string{"cpu.max"}, ".", []string{"cpu.max"}, "", unix.EISDIR},
		{"the parent refuses", []string{"memory.max"}, "family", []string{"memory.max"}, "", unix.EISDIR},
	} {
		g := fakeGroup(t)
		for _, name := range c.present {
			writeFile(t, filepath.Join(g.Path(), name))
		}
		if err := os.MkdirAll(g.Path(), 0o755); err != nil {
			t.Fatal(err)
		}
		if c.refusing != "" {
			if err := os.Mkdir(filepath.Join(g.root, c.refusing, "cgroup.subtree_control"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.Limit(limits); !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
			t.Errorf("%s: %v", c.name, err)
		}
		for name, text := range want {
			got, err := os.ReadFile(filepath.Join(g.Path(), name))
			if written := slices.Contains(c.written, name); written != (string(got) == text) || written != (err == nil) {
				t.Errorf("%s: %s is %q, %v", c.name, name, got, err)
			}
		}
		for _, group := range []string{g.root, g.Parent()} {
			got, err := os.ReadFile(filepath.Join(group, "cgroup.subtree_control"))
			if c.err == nil && string(got) != c.enabled || c.enabled != "" && err != nil {
				t.Errorf("%s: %s enables %q, %v", c.name, group, got, err)
			}
		}
	}
	g := fakeGroup(t)
	for _, name := range []string{"memory.max", "pids.max", "cpu.max"} {
		if err := os.MkdirAll(filepath.Join(g.Path(), name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Limit(limits); !errors.Is(err, unix.EISDIR) {
		t.Errorf("files that take no limit: %v", err)
	}
}

func TestRemoveLeavesGroupsOfOtherGenerations(t *testing.T) {
	for _, c := range []struct {
		name  string
		make  func(t *testing.T, g Group)
		left  bool // the parent
		fails func(g Group) error
	}{
		{"nothing", func(*testing.T, Group) {}, false, nil},
		{"an empty parent", func(t *testing.T, g Group) { makeDir(t, g.Parent()) }, false, nil},
		{"another generation", func(t *testing.T, g Group) { makeDir(t, filepath.Join(g.Parent(), "other")) }, true, nil},
		{"the group for ending supervisors", func(t *testing.T, g Group) { makeDir(t, g.leaving()) }, false, nil},
		{"ending supervisors", func(t *testing.T, g Group) { makeDir(t, filepath.Join(g.leaving(), "x")) }, true, nil},
		{"a file in place of that group", func(t *testing.T, g Group) { writeFile(t, g.leaving()) }, true,
			func(g Group) error { return &os.PathError{Op: "rmdir", Path: g.leaving(), Err: unix.ENOTDIR} }},
		{"an empty group", func(t *testing.T, g Group) { makeDir(t, g.Path()) }, false, nil},
		{"a group with a group below", func(t *testing.T, g Group) { makeDir(t, filepath.Join(g.Path(), "x")) }, true,
			func(g Group) error { return &os.PathError{Op: "rmdir", Path: g.Path(), Err: unix.ENOTEMPTY} }},
		{"a group that cannot be killed", func(t *testing.T, g Group) { makeDir(t, filepath.Join(g.Path(), "cgroup.kill")) },
			true, func(Group) error { return unix.EISDIR }},
	} {
		g := fakeGroup(t)
		c.make(t, g)
		var want error
		if c.fails != nil {
			want = c.fails(g)
		}
		if err := g.remove(); !testutil.HasError(err, want) {
			t.Errorf("%s: %v, want %v", c.name, err, want)
		}
		if _, err := os.Stat(g.Parent()); errors.Is(err, fs.ErrNotExist) == c.left {
			t.Errorf("%s: the parent: %v", c.name, err)
		}
	}
}

func makeDir(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestRemoveKillsProcessesOfGroup(t *testing.T) {
	g := fakeGroup(t)
	kill := filepath.Join(g.Path(), "cgroup.kill")
	writeFile(t, kill)
	if err := g.remove(); !errors.Is(err, unix.ENOTEMPTY) { // as the directory has the file
		t.Error(err)
	}
	if text, err := os.ReadFile(kill); err != nil || string(text) != "1" {
		t.Errorf("%q, %v", text, err)
	}
}

func TestRemoveInNamespaceWithoutMountUsesDetachedMount(t *testing.T) {
	g := fakeGroup(t)
	for _, c := range []struct {
		name              string
		mounted, reported bool
		mount             error // of cgroup2
		left              bool  // the group
		want              error
	}{
		{"a mount", true, true, unix.EIO, false, nil},
		{"a detached mount", false, false, nil, false, nil},
		{"a kernel without cgroup2", false, true, unix.ENODEV, true, nil},
		{"no permission, and no group", false, false, unix.EPERM, true, nil},
		{"no permission, and a group", false, true, unix.EPERM, true, unix.EPERM},
		{"another failure", false, false, unix.ENOMEM, true, unix.ENOMEM},
	} {
		makeDir(t, g.Path())
		seen := g
		if !c.mounted {
			seen.root = ""
		}
		err := seen.removeIn(c.mounted, c.reported, func() (*os.File, error) {
			if c.mount != nil {
				return nil, c.mount
			}
			return os.Open(g.root)
		})
		if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s: %v", c.name, err)
		}
		if _, err := os.Stat(g.Path()); errors.Is(err, fs.ErrNotExist) == c.left {
			t.Errorf("%s: the group: %v", c.name, err)
		}
	}
}

func TestUntilFoundRepeatsWhileNotFound(t *testing.T) {
	for _, c := range []struct {
		name         string
		missing      int // calls that find nothing
		then         error
		calls        int
		wantNotFound bool
	}{
		{"found at once", 0, nil, 1, false},
		{"found later", 3, nil, 4, false},
		{"another error", 1, unix.EIO, 2, false},
		{"never found", 1 << 30, nil, maxTries, true},
	} {
		calls := 0
		err := untilFound(func() error {
			calls++
			if calls <= c.missing {
				return fs.ErrNotExist
			}
			return c.then
		})
		if calls != c.calls || errors.Is(err, fs.ErrNotExist) != c.wantNotFound || !c.wantNotFound && err != c.then {
			t.Errorf("%s: %d calls, %v", c.name, calls, err)
		}
	}
}

func TestLeaveWithoutGroupOrRootOfHierarchy(t *testing.T) {
	g := fakeGroup(t)
	if err := g.Leave(); err != nil {
		t.Errorf("without a group: %v", err)
	}
	if _, err := os.Stat(filepath.Join(g.root, "cgroup.procs")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process without a group moved: %v", err)
	}
	makeDir(t, g.Path())
	if err := g.Leave(); err != nil {
		t.Error(err)
	}
	if text, err := os.ReadFile(filepath.Join(g.root, "cgroup.procs")); err != nil || string(text) != "0" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := os.Stat(g.leaving()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a group beside: %v", err)
	}
}
