package cgroup

import (
	"slices"
	"strings"
	"testing"
)

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
		{"none", "0::/x\n", "", nil},
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
