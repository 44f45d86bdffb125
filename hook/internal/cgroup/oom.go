package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// MemoryKills returns the number of out-of-memory kills in this process's control group, which the
// relay and the supervisor share: from memory.events of cgroup2, or from memory.oom_control of
// version 1 (cgroup-v2.rst, cgroup-v1/memory.rst).
func MemoryKills() (uint64, error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return 0, err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return 0, err
	}
	var errs error
	for _, file := range memoryFiles(string(groups), string(mounts)) {
		text, err := os.ReadFile(file)
		if err == nil {
			return oomKills(string(text))
		}
		errs = err
	}
	return 0, errs
}

// memoryFiles returns the candidate files with that number, from the texts of a /proc/PID/cgroup
// and of a mountinfo.
func memoryFiles(groups, mountinfo string) (files []string) {
	for line := range strings.Lines(groups) {
		part := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3)
		if len(part) != 3 {
			continue
		}
		if part[0] == "0" && part[1] == "" {
			if root, _, ok := Mount(mountinfo, "cgroup2", ""); ok {
				files = append(files, filepath.Join(root, part[2], "memory.events"))
			}
			continue
		}
		for _, controller := range strings.Split(part[1], ",") {
			if root, _, ok := Mount(mountinfo, "cgroup", "memory"); ok && controller == "memory" {
				files = append(files, filepath.Join(root, part[2], "memory.oom_control"))
			}
		}
	}
	return files
}

// oomKills parses the number in a memory.events or a memory.oom_control.
func oomKills(text string) (uint64, error) {
	for line := range strings.Lines(text) {
		if count, is := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); is {
			return strconv.ParseUint(count, 10, 64)
		}
	}
	return 0, fmt.Errorf("no oom_kill in %.100q", text)
}
