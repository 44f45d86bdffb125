package integration_test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// attributes returns the attributes of a process that a relay resets, from the kernel's view.
func attributes(t *testing.T, pid int) map[string]string {
	t.Helper()
	process := fmt.Sprintf("/proc/%d/", pid)
	all := map[string]string{"oom_score_adj": strings.TrimSpace(read(t, process+"oom_score_adj"))}
	for line := range strings.Lines(read(t, process+"limits")) {
		for _, name := range []string{"Max file size", "Max address space", "Max data size", "Max cpu time",
			"Max resident set", "Max nice priority", "Max realtime priority"} {
			if rest, ok := strings.CutPrefix(line, name); ok {
				all[name] = strings.Join(strings.Fields(rest)[:2], " ")
			}
		}
	}
	for line := range strings.Lines(read(t, process+"status")) {
		if rest, ok := strings.CutPrefix(line, "Cpus_allowed_list:"); ok {
			all["processors"] = strings.TrimSpace(rest)
		}
	}
	stat := read(t, process+"stat")
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	all["nice"], all["policy"] = fields[19-3], fields[41-3]
	const process1 = 1 // IOPRIO_WHO_PROCESS
	class, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, process1, uintptr(pid), 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	all["I/O class"] = fmt.Sprint(class >> 13)
	return all
}

// A runtime with limits and a low priority passes both to the hook. Relay and supervisor
// reset both, and clients can attach.
func TestRelayAttributesOfTheRuntimeAreReset(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			for _, program := range []string{"prlimit", "choom", "taskset", "ionice", "nice"} {
				if _, err := exec.LookPath(program); err != nil {
					t.Fatal(err) // all Debian systems have these packages: util-linux, coreutils
				}
			}
			hard := "" // the soft and the hard limit
			if !mayRaiseLimits(t) {
				hard = ":" // only the soft limit: no process could raise the hard limit again
			}
			b.runtime.Before = []string{
				"prlimit", "--fsize=1048576" + hard, "--as=17179869184" + hard, "--data=17179869184" + hard, "--cpu=1000" + hard,
				"--rss=1073741824" + hard, "--",
				"choom", "-n", "700", "--", "ionice", "-c", "3", "taskset", "-c", "0", "nice", "-n", "7", b.runtime.Path(),
			}
			c := b.start(b.lanes[0], "hold")
			c.next("hello")
			i := b.inspection(c)
			want := attributes(t, 1)
			for _, name := range []string{"Max file size", "Max address space", "Max data size", "Max cpu time",
				"Max resident set"} {
				want[name] = "unlimited unlimited"
			}
			for name, value := range map[string]string{"oom_score_adj": "0", "nice": "0", "policy": "0", "I/O class": "0",
				"Max nice priority": "0 0", "Max realtime priority": "0 0"} {
				want[name] = value
			}
			for who, pid := range map[string]int{"relay": i.Status.Relay.PID, "supervisor": supervisor(t, i.Status.Relay.PID)} {
				got := attributes(t, pid)
				for name, value := range want {
					if got[name] != value {
						t.Errorf("the %s has %s %q, want %q", who, name, got[name], value)
					}
				}
			}
			// Control: without these attributes the test checks nothing.
			if taken := attributes(t, c.init()); taken["nice"] == "0" || taken["processors"] != "0" {
				t.Errorf("the container has %v", taken)
			}
		})
	}
}
