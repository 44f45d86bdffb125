package cgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// pids.max limits a relay's tasks in the generation's own group, or the unit's. The limit of a
// group with other processes does not count.
func TestLimitsTasksOwnControlGroupOnly(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef"
	v1 := "31 25 0:28 / %s/v1 rw,nosuid - cgroup cgroup rw,pids\n"
	v2 := "32 25 0:29 / %s/v2 rw,nosuid - cgroup2 cgroup2 rw\n"
	for _, c := range []struct {
		name, groups, mounts string
		files                map[string]string
		unit, want           bool
	}{
		{"own group", "0::/peerlane/" + id + "\n", v2, map[string]string{"v2/peerlane/" + id + "/pids.max": "4096\n"}, false, true},
		{"own group without a limit", "0::/peerlane/" + id + "\n", v2, map[string]string{"v2/peerlane/" + id + "/pids.max": "max\n"}, false, false},
		{"own group without the controller", "0::/peerlane/" + id + "\n", v2, nil, false, false},
		{"the runtime's group", "0::/docker\n", v2, map[string]string{"v2/docker/pids.max": "100\n"}, false, false},
		{"unit", "0::/system.slice/peerlane-relay@1.service\n", v2, map[string]string{"v2/system.slice/peerlane-relay@1.service/pids.max": "4096\n"}, true, true},
		{"unit of v1", "8:pids:/system.slice/peerlane-relay@1.service\n0::/x\n", v1 + v2, map[string]string{"v1/system.slice/peerlane-relay@1.service/pids.max": "4096\n"}, true, true},
		{"root group", "0::/\n", v2, map[string]string{"v2/pids.max": "4096\n"}, true, false},
		{"outside of the namespace", "0::/../" + id + "\n", v2, nil, false, false},
		{"nothing mounted", "0::/peerlane/" + id + "\n", "", nil, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			files := map[string]string{
				"proc/self/cgroup":    c.groups,
				"proc/self/mountinfo": strings.ReplaceAll(c.mounts, "%s", dir),
			}
			for name, text := range c.files {
				files[name] = text
			}
			for name, text := range files {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := LimitsTasks(filepath.Join(dir, "proc"), id, c.unit); got != c.want {
				t.Errorf("%t, want %t", got, c.want)
			}
		})
	}
	if LimitsTasks(t.TempDir(), id, true) {
		t.Error("a host without /proc has a limit")
	}
}
