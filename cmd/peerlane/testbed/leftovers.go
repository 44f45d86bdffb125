package testbed

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Snapshot is what a host has of things that Peerlane or an OCI runtime makes:
// a set of sentences, so that two can be compared.
type Snapshot map[string]bool

// Look takes a snapshot of what belongs to this host: others may work beside
// it.
func (h *Host) Look() (Snapshot, error) {
	s := Snapshot{}
	for _, f := range []func(Snapshot) error{h.processes, h.mounts, h.sockets, h.files, h.cgroups} {
		if err := f(s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// processes are those of Peerlane's programs, of the runtime's, and in the
// containers.
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
		dir := filepath.Join("/proc", e.Name())
		// A process that ends while we look is none that is left.
		command, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || len(command) == 0 {
			continue
		}
		program, _ := os.Readlink(filepath.Join(dir, "exe"))
		groups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		if strings.HasPrefix(program, h.Binaries+"/") || strings.Contains(string(command), h.Root) || strings.Contains(string(groups), h.containers()) {
			s[fmt.Sprintf("process %s: %s", e.Name(), strings.TrimSpace(strings.ReplaceAll(string(command), "\x00", " ")))] = true
		}
	}
	return nil
}

func (h *Host) mounts(s Snapshot) error {
	return lines("/proc/self/mountinfo", func(line string) {
		if strings.Contains(line, h.Root) {
			s["mount "+line] = true
		}
	})
}

// sockets are those with a path of their own; those of generations are bound by
// a shorter one, and show among the files.
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

// files are those of Peerlane's trees and of the runtime's.
func (h *Host) files(s Snapshot) error {
	for _, dir := range []string{h.Layout.State(), h.Layout.Run(), h.RuntimeState()} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil
			}
			if err != nil {
				return err
			}
			if strings.HasPrefix(path, h.Layout.GoodConfig()) {
				return nil // it stays for the next container
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

// cgroups are the containers' and the relays'.
func (h *Host) cgroups(s Snapshot) error {
	return filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		switch {
		case os.IsNotExist(err):
			return nil // a cgroup that went while we looked, or no cgroups at all
		case err != nil:
			return err
		case d.IsDir() && (strings.Contains(path, h.Layout.Cgroup()) || strings.Contains(path, h.containers())):
			s["cgroup "+path] = true
		}
		return nil
	})
}

// Left compares with an earlier snapshot until they are alike or the time is
// over: a supervisor needs a moment after its container. It lists what is more.
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
