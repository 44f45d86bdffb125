package cgroup

import (
	"errors"
	"os"
	"path/filepath"
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
		{"the largest limit", "0::" + unit + "\n", v2, map[string]string{"v2" + unit + "/pids.max": "4611686018427387903\n"},
			true, tasks},
		{"above the largest limit", "0::" + unit + "\n", v2,
			map[string]string{"v2" + unit + "/pids.max": "4611686018427387904\n"}, true, Limited{}},
		{"a colon in the path", "0::/a:b\n", v2, map[string]string{"v2/a:b/pids.max": "4096\n"}, true, tasks},
		{"lines without three fields", "x\n0:\n0::" + unit + "\n", v2,
			map[string]string{"v2" + unit + "/pids.max": "4096\n"}, true, tasks},
		{"another controller of v1", "8:cpu:" + unit + "\n", v1 + v2,
			map[string]string{"v2" + unit + "/pids.max": "4096\n", "v1" + unit + "/pids.max": "4096\n"}, true, Limited{}},
		{"another hierarchy without controllers", "5::" + unit + "\n", v2,
			map[string]string{"v2" + unit + "/pids.max": "4096\n"}, true, Limited{}},
		{"controllers of the second version", "0:pids:" + unit + "\n", v2,
			map[string]string{"v2" + unit + "/pids.max": "4096\n"}, true, Limited{}},
		{"root group", "0::/\n", v2, map[string]string{"v2/pids.max": "4096\n"}, true, Limited{}},
		{"outside of the namespace", "0::/../" + id + "\n", v2, nil, false, Limited{}},
		{"nothing mounted", "0::/peerlane/" + id + "\n", "", nil, false, Limited{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			proc := withProc(t, c.groups, c.mounts, c.files)
			if got := ReadLimited(proc, id, c.unit); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
	dir := t.TempDir()
	if got := ReadLimited(dir, id, true); got != (Limited{}) {
		t.Errorf("a host without /proc has %+v", got)
	}
	groups := filepath.Join(dir, "self/cgroup")
	if err := errors.Join(os.Mkdir(filepath.Dir(groups), 0o755), os.WriteFile(groups, []byte("0::/\n"),
		0o644)); err != nil {
		t.Fatal(err)
	}
	if got := ReadLimited(dir, id, true); got != (Limited{}) {
		t.Errorf("a host without mounts has %+v", got)
	}
}
