package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// MemoryKills returns the number of out-of-memory kills in this process's control group, which the
// relay and the supervisor share: from memory.events of cgroup2, or from memory.oom_control of
// version 1 (cgroup-v2.rst, cgroup-v1/memory.rst).
func MemoryKills() (uint64, error) { return memoryKills("/proc") }

func memoryKills(proc string) (uint64, error) {
	groups, err := os.ReadFile(filepath.Join(proc, "self/cgroup"))
	if err != nil {
		return 0, err
	}
	mounts, err := os.ReadFile(filepath.Join(proc, "self/mountinfo"))
	if err != nil {
		return 0, err
	}
	var errs error
	for _, file := range memoryFiles(string(groups), string(mounts)) {
		text, err := os.ReadFile(file)
		if err == nil {
			return oomKills(string(text))
		}
		errs = errors.Join(errs, err)
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
			if dir, ok := directory(mountinfo, "cgroup2", "", part[2]); ok {
				files = append(files, filepath.Join(dir, "memory.events"))
			}
		} else if slices.Contains(strings.Split(part[1], ","), "memory") {
			if dir, ok := directory(mountinfo, "cgroup", "memory", part[2]); ok {
				files = append(files, filepath.Join(dir, "memory.oom_control"))
			}
		}
	}
	return files
}

// directory returns the directory of a group; ok is false if no mount contains the group.
func directory(mountinfo, filesystem, controller, group string) (dir string, ok bool) {
	mount, root, ok := Mount(mountinfo, filesystem, controller)
	below, err := filepath.Rel(root, group)
	if !ok || err != nil || below == ".." || strings.HasPrefix(below, "../") {
		return "", false
	}
	return filepath.Join(mount, below), true
}

// oomKills parses the number in a memory.events or a memory.oom_control.
func oomKills(text string) (uint64, error) {
	for line := range strings.Lines(text) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			return strconv.ParseUint(count, 10, 64)
		}
	}
	return 0, fmt.Errorf("no oom_kill in %.100q", text)
}
