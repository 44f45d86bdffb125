package cgroup

import (
	"testing"
)

func TestMountFindsCgroup2(t *testing.T) {
	for _, test := range []struct {
		mountinfo, root string
	}{
		{"25 19 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup"},
		{"19 1 0:18 / /sys rw - sysfs sysfs rw\n34 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n",
			"/sys/fs/cgroup/unified"},
		{"34 25 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", ""},
		{"", ""},
	} {
		if root, _, ok := Mount(test.mountinfo, "cgroup2", ""); root != test.root || ok != (test.root != "") {
			t.Errorf("%q, %t for %q", root, ok, test.mountinfo)
		}
	}
}
