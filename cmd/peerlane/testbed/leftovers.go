package testbed

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Snapshot is the set of objects that Peerlane or an OCI runtime has created on a host, as
// sentences. A test compares two snapshots.
type Snapshot map[string]bool

// Look takes a snapshot of this host, without the objects of other hosts on the same machine.
func (h *Host) Look() (Snapshot, error) {
	s := Snapshot{}
	for _, f := range []func(Snapshot) error{h.processes, h.mounts, h.sockets, h.files, h.cgroups} {
		if err := f(s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// processes adds the processes of Peerlane's programs on this host, of the runtime and of containers.
func (h *Host) processes(s Snapshot) error {
	self := fmt.Sprint(os.Getpid())
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == self || strings.Trim(e.Name(), "0123456789") != "" {
			continue
		}
		// A process that has ended since the listing is no leftover.
		p, err := readProcess(e.Name())
		if err != nil || len(p.arguments) == 0 {
			continue
		}
		groups, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
		if strings.HasPrefix(p.program, h.Binaries+"/") && !h.ofAnotherHost(p) || p.names(h.Root) ||
			strings.Contains(string(groups), h.containers()) {
			s[fmt.Sprintf("process %s: %s", p.pid, strings.Join(p.arguments, " "))] = true
		}
	}
	return nil
}

// process is a process as /proc shows it.
type process struct {
	pid, parent, program string
	arguments            []string
}

func readProcess(pid string) (process, error) {
	dir := filepath.Join("/proc", pid)
	command, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return process{}, err
	}
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return process{}, err
	}
	p := process{pid: pid}
	p.program, _ = os.Readlink(filepath.Join(dir, "exe"))
	if len(command) > 0 {
		p.arguments = strings.Split(strings.TrimRight(string(command), "\x00"), "\x00")
	}
	// "PID (NAME) STATE PARENT": the name can have spaces and brackets.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return process{}, fmt.Errorf("no parent in %s/stat: %.100q", dir, stat)
	}
	p.parent = fields[1]
	return p, nil
}

// names reports whether an argument contains a path.
func (p process) names(path string) bool {
	return slices.ContainsFunc(p.arguments, func(a string) bool { return strings.Contains(a, path) })
}

// ofAnotherHost reports whether a process of Peerlane's programs works for another Host, of this
// process or of another demo: the process or one of its ancestors names the other's directory, or
// is the other demo.
func (h *Host) ofAnotherHost(p process) bool {
	self := fmt.Sprint(os.Getpid())
	for p.pid != self && !p.names(h.Root) {
		if strings.HasPrefix(p.program, h.Binaries+"/") {
			for i := 1; i < len(p.arguments); i++ {
				if flag := p.arguments[i-1]; (flag == "--root" || flag == "--socket") && filepath.IsAbs(p.arguments[i]) {
					return true
				}
			}
			if len(p.arguments) > 1 && (p.arguments[1] == "demo" || p.arguments[1] == "bench") {
				return true
			}
		}
		parent, err := readProcess(p.parent)
		if err != nil {
			return false
		}
		p = parent
	}
	return false
}

func (h *Host) mounts(s Snapshot) error {
	return lines("/proc/self/mountinfo", func(line string) {
		if strings.Contains(line, h.Root) {
			s["mount "+line] = true
		}
	})
}

// sockets adds the sockets that are bound by their own path. The sockets of generations are bound
// by a shorter path, and appear among the files.
func (h *Host) sockets(s Snapshot) error {
	return lines("/proc/net/unix", func(line string) {
		if f := strings.Fields(line); len(f) == 8 && strings.HasPrefix(f[7], h.Root) {
			s["socket "+f[7]] = true
		}
	})
}

func lines(path string, each func(string)) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		each(strings.TrimSpace(line))
	}
	return nil
}

// files adds the files of Peerlane's trees and of the runtime's tree.
func (h *Host) files(s Snapshot) error {
	tests := strings.TrimSuffix(h.Layout.SelfTestFile(), ".json") // prefix of the results and their lock
	for _, dir := range []string{h.Layout.State(), h.Layout.Run(), h.RuntimeState()} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil
			}
			if err != nil {
				return err
			}
			if strings.HasPrefix(path, h.Layout.GoodConfig()) || strings.TrimSuffix(path, filepath.Ext(path)) == tests {
				return nil // the next container uses the file
			}
			s["file "+path] = true
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// cgroups adds the cgroups of containers and relays.
func (h *Host) cgroups(s Snapshot) error {
	return filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		switch {
		case os.IsNotExist(err):
			return nil // the cgroup was removed, or the host has no cgroups
		case err != nil:
			return err
		case d.IsDir() && (strings.Contains(path, h.Layout.Cgroup()) || strings.Contains(path, h.containers())):
			s["cgroup "+path] = true
		}
		return nil
	})
}

// Left returns the objects that an earlier snapshot lacks. It waits for at most patience until
// there are none, because a supervisor ends later than its container.
func (h *Host) Left(before Snapshot, patience time.Duration) ([]string, error) {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		after, err := h.Look()
		if err != nil {
			return nil, err
		}
		more := []string{}
		for thing := range after {
			if !before[thing] {
				more = append(more, thing)
			}
		}
		if len(more) == 0 || time.Now().After(end) {
			slices.Sort(more)
			return more, nil
		}
	}
}
