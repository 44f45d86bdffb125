package control

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/openat2"
)

// Limits of NCCLSettings: a container can have any number of processes and variables.
const (
	maxNCCLProcesses = 4096
	maxNCCLSettings  = 64      // different sets of variables
	maxNCCLVariables = 512     // of a process
	maxNCCLValue     = 4 << 10 // bytes of a name and its value
	maxNCCLText      = 1 << 20 // bytes of an environment or of a file
)

// NCCLSetting is the set of NCCL's variables in processes of a container.
type NCCLSetting struct {
	// PIDs are the processes with these variables, in the caller's PID namespace.
	PIDs []int
	// Variables has the variables whose names begin with NCCL_, of the environment and of NCCL's
	// files. The environment comes first, then the file of NCCL_CONF_FILE or ~/.nccl.conf, then
	// /etc/nccl.conf (NCCL 2.30, src/misc/param.cc).
	Variables map[string]string
}

// NCCLSettings reads the variables of NCCL in the processes of a running container. proc is the
// directory of procfs. The processes are those in the control group of the container's init. A
// process that has changed its environment itself shows the environment of its start. NCCLSettings
// returns at most maxNCCLSettings sets.
func NCCLSettings(proc string, info generation.Info) ([]NCCLSetting, error) {
	pids, err := processesBeside(proc, info.Init.PID)
	if err != nil {
		return nil, err
	}
	var settings []NCCLSetting
	for _, pid := range pids {
		variables, err := ncclVariables(filepath.Join(proc, strconv.Itoa(pid)))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // the process has ended
		}
		if err != nil {
			return nil, err
		}
		same := func(s NCCLSetting) bool { return maps.Equal(s.Variables, variables) }
		if i := slices.IndexFunc(settings, same); i >= 0 {
			settings[i].PIDs = append(settings[i].PIDs, pid)
		} else if len(settings) < maxNCCLSettings {
			settings = append(settings, NCCLSetting{PIDs: []int{pid}, Variables: variables})
		}
	}
	return settings, nil
}

// processesBeside returns the processes in the control group of a process, in ascending order.
func processesBeside(proc string, pid int) (pids []int, err error) {
	group, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		other, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		of, err := os.ReadFile(filepath.Join(proc, e.Name(), "cgroup"))
		if err == nil && string(of) == string(group) { // after an error the process has ended
			pids = append(pids, other)
		}
	}
	slices.Sort(pids)
	return pids[:min(len(pids), maxNCCLProcesses)], nil
}

// ncclVariables returns the variables of NCCL in a process. dir is the directory of the process in
// procfs.
func ncclVariables(dir string) (map[string]string, error) {
	f, err := os.Open(filepath.Join(dir, "environ"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxNCCLText))
	if err != nil {
		return nil, err
	}
	variables, home := map[string]string{}, ""
	for e := range strings.SplitSeq(string(text), "\x00") {
		name, value, _ := strings.Cut(e, "=")
		if name == "HOME" {
			home = value
		}
		addNCCLVariable(variables, name, value)
	}
	user := variables["NCCL_CONF_FILE"]
	if user == "" && home != "" {
		user = filepath.Join(home, ".nccl.conf")
	}
	for _, path := range []string{user, generation.ContainerNCCLConf} {
		if path == "" {
			continue
		}
		text, err := readBelow(filepath.Join(dir, "root"), path)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(text) {
			name, value, _ := strings.Cut(strings.TrimRight(line, "\r\n"), "=")
			addNCCLVariable(variables, name, value)
		}
	}
	return variables, nil
}

// addNCCLVariable adds a variable of NCCL that is not set yet. The copy releases the text.
func addNCCLVariable(variables map[string]string, name, value string) {
	if !strings.HasPrefix(name, "NCCL_") || len(name)+len(value) > maxNCCLValue || len(variables) >= maxNCCLVariables {
		return
	}
	if _, set := variables[name]; !set {
		variables[strings.Clone(name)] = strings.Clone(value)
	}
}

// readBelow returns the text of a regular file below a root directory; empty without the file.
func readBelow(root, path string) (string, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("open the container's root directory: %w", &os.PathError{Op: "open", Path: root, Err: err})
	}
	defer unix.Close(dir)
	// The container can make device nodes that only the host may open, and opening such a device can have
	// an effect. O_PATH opens no device.
	fd, err := openat2.InRoot(dir, path, unix.O_PATH, 0)
	if err != nil {
		return "", nil // NCCL ignores a file that it cannot open
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return "", &os.PathError{Op: "stat", Path: path, Err: err}
	}
	// Files of procfs and tracefs have size 0, and a read of /proc/kmsg removes messages of the kernel.
	if stat.Mode&unix.S_IFMT != unix.S_IFREG || stat.Size == 0 {
		return "", nil
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxNCCLText))
	return string(text), err
}
