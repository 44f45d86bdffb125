package cgroup

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// withProc writes proc/self/cgroup, proc/self/mountinfo and files below a new directory, by whose path
// %s of mounts is replaced, and returns the path of proc.
func withProc(t *testing.T, groups, mounts string, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	all := map[string]string{"proc/self/cgroup": groups, "proc/self/mountinfo": strings.ReplaceAll(mounts, "%s", dir)}
	maps.Copy(all, files)
	for name, text := range all {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "proc")
}

func TestMemoryKillsReadsFirstReadableCounter(t *testing.T) {
	const mounts = "31 1 0:29 / %s/v1 rw - cgroup cgroup rw,memory\n22 1 0:20 / %s/v2 rw - cgroup2 cgroup2 rw\n"
	const groups = "3:memory:/z\n0::/x\n"
	for _, c := range []struct {
		name  string
		files map[string]string
		want  uint64
		err   error
	}{
		{"1", map[string]string{"v1/z/memory.oom_control": "oom_kill 3\n"}, 3, nil},
		{"2", map[string]string{"v2/x/memory.events": "oom_kill 4\n"}, 4, nil},
		{"both", map[string]string{"v1/z/memory.oom_control": "oom_kill 3\n", "v2/x/memory.events": "oom_kill 4\n"}, 3, nil},
		{"none", nil, 0, fs.ErrNotExist},
		{"no number", map[string]string{"v1/z/memory.oom_control": "oom_kill a\n"}, 0, strconv.ErrSyntax},
	} {
		n, err := memoryKills(withProc(t, groups, mounts, c.files))
		if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || err == nil && n != c.want {
			t.Errorf("%s: %d, %v", c.name, n, err)
		}
	}
	if n, err := memoryKills(withProc(t, "", mounts, nil)); n != 0 || err != nil {
		t.Errorf("without groups: %d, %v", n, err)
	}
	dir := t.TempDir()
	if n, err := memoryKills(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without /proc: %d, %v", n, err)
	}
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "self"), 0o755),
		os.WriteFile(filepath.Join(dir, "self/cgroup"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if n, err := memoryKills(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without mounts: %d, %v", n, err)
	}
}

func TestMemoryFilesFindCountersOfKills(t *testing.T) {
	const v2 = "22 1 0:20 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
	const v1 = "30 1 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n31 1 0:29 / /sys/fs/cgroup/memory rw - " +
		"cgroup cgroup rw,memory\n"
	for _, c := range []struct {
		name, groups, mounts string
		want                 []string
	}{
		{"2", "0::/peerlane/x\n", v2, []string{"/sys/fs/cgroup/peerlane/x/memory.events"}},
		{"1", "4:cpu:/y\n3:memory:/z\n", v1, []string{"/sys/fs/cgroup/memory/z/memory.oom_control"}},
		{"both", "3:cpu,memory:/z\n0::/x\n", v1 + strings.ReplaceAll(v2, "/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
			[]string{"/sys/fs/cgroup/memory/z/memory.oom_control", "/sys/fs/cgroup/unified/x/memory.events"}},
		{"2, a part of the hierarchy", "0::/docker/c/peerlane/x\n", strings.Replace(v2, " / ", " /docker/c ", 1),
			[]string{"/sys/fs/cgroup/peerlane/x/memory.events"}},
		{"1, the group itself", "3:memory:/docker/c\n", strings.ReplaceAll(v1, " / ", " /docker/c "),
			[]string{"/sys/fs/cgroup/memory/memory.oom_control"}},
		{"2, outside of the mount", "0::/x\n", strings.Replace(v2, " / ", " /docker/c ", 1), nil},
		{"2, the parent of the mounted group", "0::/docker\n", strings.Replace(v2, " / ", " /docker/c ", 1), nil},
		{"2, a colon in the path", "0::/a:b\n", v2, []string{"/sys/fs/cgroup/a:b/memory.events"}},
		{"2, a relative path", "0::x\n", v2, nil},
		{"2, another number", "5::/x\n", v2, nil},
		{"2, a controller", "0:memory:/x\n", v2, nil},
		{"1 is not mounted", "3:memory:/z\n", v2, nil},
		{"none", "0::/x\n", "", nil},
		{"none, a relative path", "0::x\n", "", nil},
		{"nonsense", "x\n::\n0:\n", v2, nil},
	} {
		if got := memoryFiles(c.groups, c.mounts); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	for text, want := range map[string]uint64{"low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n": 1,
		"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n": 3} {
		if n, err := oomKills(text); err != nil || n != want {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
	if n, err := oomKills("oom_kill_disable 0\n"); err == nil {
		t.Errorf("a kernel that does not count has %d", n)
	}
}
