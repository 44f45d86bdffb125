package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// memoryLimit returns the smallest limit of the control group of a container and the groups
// above, in both versions of control groups, and an error where the group is not found.
func TestMemoryLimitIsSmallestOfAllGroups(t *testing.T) {
	const pid, mib = 4711, 1 << 20
	v1 := "31 25 0:28 / %s/v1 rw,nosuid - cgroup cgroup rw,memory\n"
	v2 := "32 25 0:29 / %s/v2 rw,nosuid - cgroup2 cgroup2 rw\n"
	for _, c := range []struct {
		name, groups, mounts string
		files                map[string]string
		want                 uint64
		fails                error
	}{
		{"v2", "0::/pod/c\n", v2, map[string]string{"v2/pod/c/memory.max": "50331648\n", "v2/pod/c/cgroup.procs": "1\n4711\n",
			"v2/pod/memory.max": "max\n"}, 48 * mib, nil},
		{"v2 group above", "0::/pod/c\n", v2, map[string]string{"v2/pod/c/memory.max": "max\n",
			"v2/pod/c/cgroup.procs": "4711\n", "v2/pod/memory.max": "16777216\n"}, 16 * mib, nil},
		{"v2 no limit", "0::/pod/c\n", v2, map[string]string{"v2/pod/c/memory.max": "max\n",
			"v2/pod/c/cgroup.procs": "4711\n"}, math.MaxUint64, nil},
		{"v2 no controller", "0::/c\n", v2, map[string]string{"v2/c/cgroup.procs": "4711\n"}, math.MaxUint64, nil},
		{"v1", "9:name=systemd:/x\n4:cpu,memory:/docker/c\n0::/\n", v1 + v2, map[string]string{
			"v1/docker/c/memory.limit_in_bytes": "50331648\n", "v1/docker/c/cgroup.procs": "4711\n",
			"v1/docker/memory.limit_in_bytes": "9223372036854771712\n",
			"v2/cgroup.procs":                 "4711\n"}, 48 * mib, nil},
		{"v1 no limit", "4:memory:/c\n", v1, map[string]string{"v1/c/memory.limit_in_bytes": "9223372036854771712\n",
			"v1/c/cgroup.procs": "4711\n"}, math.MaxUint64, nil},
		{"a mounted group", "0::/docker/a/c\n", strings.Replace(v2, " / ", " /docker/a ", 1),
			map[string]string{"v2/c/memory.max": "8388608\n", "v2/c/cgroup.procs": "4711\n"}, 8 * mib, nil},
		{"another group's place", "0::/c\n", v2, map[string]string{"v2/c/memory.max": "max\n", "v2/c/cgroup.procs": "1\n"}, 0,
			errNotMember},
		{"outside of the namespace", "0::/../c\n", v2, nil, 0, errOutside},
		{"no such group", "0::/c\n", v2, nil, 0, fs.ErrNotExist},
		{"nonsense", "0::/c\n", v2, map[string]string{"v2/c/memory.max": "much\n", "v2/c/cgroup.procs": "4711\n"}, 0,
			strconv.ErrSyntax},
		{"nothing is mounted", "4:memory:/c\n0::/\n", "", nil, 0, errNoHierarchy},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			files := map[string]string{
				fmt.Sprintf("proc/%d/cgroup", pid): c.groups, "proc/self/mountinfo": strings.ReplaceAll(c.mounts, "%s", dir),
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
			got, err := memoryLimit(filepath.Join(dir, "proc"), pid)
			if c.fails != nil {
				if !errors.Is(err, c.fails) {
					t.Errorf("%d, %v; want %v", got, err, c.fails)
				}
			} else if err != nil || got != c.want {
				t.Errorf("%d, %v; want %d", got, err, c.want)
			}
		})
	}
	// A process with an unreadable limit gets a small limit, not an unlimited one.
	if got := ownHostMemory(1 << 30); got != unknownOwnHostMemory {
		t.Errorf("a process that is not there has %d", got)
	}
}
