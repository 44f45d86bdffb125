package cgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Only limits of the generation's own group, or of the unit, count, not those of a group with
// other processes.
func TestReadLimitedReadsOwnControlGroupOnly(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef"
	v1 := "31 25 0:28 / %s/v1 rw,nosuid - cgroup cgroup rw,pids\n33 25 0:30 / %s/v1m rw,nosuid - cgroup cgroup rw,memory\n"
	v2 := "32 25 0:29 / %s/v2 rw,nosuid - cgroup2 cgroup2 rw\n"
	const unit = "/system.slice/peerlane-relay@1.service"
	tasks, memory := Limited{Tasks: true}, Limited{Memory: true}
	for _, c := range []struct {
		name, groups, mounts string
		files                map[string]string
		unit                 bool
		want                 Limited
	}{
		{"own group", "0::/peerlane/" + id + "\n", v2, map[string]string{"v2/peerlane/" + id + "/pids.max": "4096\n"}, false,
			tasks},
		{"own group without a limit", "0::/peerlane/" + id + "\n", v2,
			map[string]string{"v2/peerlane/" + id + "/pids.max": "max\n"}, false, Limited{}},
		{"own group without the controller", "0::/peerlane/" + id + "\n", v2, nil, false, Limited{}},
		{"the runtime's group", "0::/docker\n", v2, map[string]string{"v2/docker/pids.max": "100\n"}, false, Limited{}},
		{"unit", "0::" + unit + "\n", v2, map[string]string{"v2" + unit + "/pids.max": "4096\n"}, true, tasks},
		{"unit of v1", "8:pids:" + unit + "\n0::/x\n", v1 + v2, map[string]string{"v1" + unit + "/pids.max": "4096\n"}, true,
			tasks},
		{"memory of own group", "0::/peerlane/" + id + "\n", v2,
			map[string]string{"v2/peerlane/" + id + "/memory.max": "68719476736\n", "v2/peerlane/" + id + "/pids.max": "max\n"},
			false, memory},
		{"memory of own group without a limit", "0::/peerlane/" + id + "\n", v2,
			map[string]string{"v2/peerlane/" + id + "/memory.max": "max\n", "v2/peerlane/" + id + "/pids.max": "4096\n"}, false,
			tasks},
		{"memory of the runtime's group", "0::/docker\n", v2, map[string]string{"v2/docker/memory.max": "100\n"}, false,
			Limited{}},
		{"memory of unit", "0::" + unit + "\n", v2, map[string]string{"v2" + unit + "/memory.max": "68719476736\n"}, true,
			memory},
		{"memory of unit without a limit", "0::" + unit + "\n", v2, map[string]string{"v2" + unit + "/memory.max": "max\n"},
			true, Limited{}},
		{"memory of unit of v1", "8:pids:/x\n9:memory:" + unit + "\n", v1,
			map[string]string{"v1m" + unit + "/memory.limit_in_bytes": "68719476736\n"}, true, memory},
		{"memory of unit of v1 without a limit", "9:memory:" + unit + "\n", v1,
			map[string]string{"v1m" + unit + "/memory.limit_in_bytes": "9223372036854771712\n"}, true, Limited{}},
		{"root group", "0::/\n", v2, map[string]string{"v2/pids.max": "4096\n"}, true, Limited{}},
		{"outside of the namespace", "0::/../" + id + "\n", v2, nil, false, Limited{}},
		{"nothing mounted", "0::/peerlane/" + id + "\n", "", nil, false, Limited{}},
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
			if got := ReadLimited(filepath.Join(dir, "proc"), id, c.unit); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
	if got := ReadLimited(t.TempDir(), id, true); got != (Limited{}) {
		t.Errorf("a host without /proc has %+v", got)
	}
}
