package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/internal/fault"
)

// searchPath lists the directories of runtimes. PATH comes from the engine and is not trusted.
var searchPath = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// findRuntime returns the configured runtime, or else the first of runc and crun in these
// directories.
func findRuntime(configured string, dirs []string) (string, error) {
	if configured != "" {
		if err := check(configured); err != nil {
			return "", fmt.Errorf("runtime.path: %w", err)
		}
		return configured, nil
	}
	for _, name := range []string{"runc", "crun"} {
		for _, dir := range dirs {
			path := filepath.Join(dir, name)
			err := check(path)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return path, err
		}
	}
	return "", &fault.Error{Operation: "find runc or crun in", Object: strings.Join(dirs, ", "), Cause: exec.ErrNotFound,
		Remedy: "install one of them, or set runtime.path in config.toml"}
}

// Errors of a file that this program does not execute.
var (
	errNoProgram = errors.New("not a program")
	errSelf      = errors.New("this is peerlane-runtime itself; set runtime.path in config.toml to the runtime to execute")
)

// check refuses a file that is not a program, a file that other users could have written, and this
// program itself, which would execute itself endlessly.
func check(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	stat := info.Sys().(*syscall.Stat_t) // as package os documents for Linux
	switch mode := info.Mode(); {
	case !mode.IsRegular() || mode&0o111 == 0:
		return fmt.Errorf("%s: %w (%v)", path, errNoProgram, mode)
	case stat.Uid != 0 && int(stat.Uid) != os.Geteuid() && !unmapped(stat.Uid):
		return &fault.Error{Code: fault.UntrustedFile, Operation: "trust the runtime", Object: path,
			Cause: fmt.Errorf("it belongs to uid %d, but root runs it", stat.Uid), Remedy: "chown root " + path}
	case mode.Perm()&0o022 != 0:
		return &fault.Error{Code: fault.UntrustedFile, Operation: "trust the runtime", Object: path,
			Cause: fmt.Errorf("users other than its owner can write it (mode %04o), but root runs it",
				mode.Perm()), Remedy: "chmod go-w " + path}
	}
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return err
	}
	if os.SameFile(self, info) {
		return fmt.Errorf("%s: %w", path, errSelf)
	}
	return nil
}

// unmapped reports whether a file's owner has no uid in this user namespace. The owner may be the
// host's root: the runtime of a rootless engine.
func unmapped(uid uint32) bool {
	overflow, err := os.ReadFile("/proc/sys/kernel/overflowuid")
	if err != nil || strings.TrimSpace(string(overflow)) != strconv.Itoa(int(uid)) {
		return false
	}
	return hook.Rootless()
}
