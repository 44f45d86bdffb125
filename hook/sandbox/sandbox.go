// Package sandbox drops the rights that a relay does not use, and executes a program with the
// rest: its own uid, no capabilities, a root with only the listed programs, libraries and devices,
// Landlock, a seccomp filter, and limits.
//
// One thread drops the rights and executes the program, which ends the other threads.
//
// A host may lack parts: a rootless engine has one uid, and some kernels have no Landlock. The
// Report names the missing parts; the remaining parts are in effect.
package sandbox

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/network/address"
)

// Spec configures the sandbox of a program.
type Spec struct {
	// UID is the uid and the gid; 0 keeps the caller's.
	UID int
	// Groups are supplementary groups, in addition to the groups of device nodes.
	Groups []int
	// Read are the files and directories that the program may read and execute, and Write the paths
	// that it may also change. Missing paths are omitted. Paths are the same in the program's
	// root.
	Read, Write []string
	// Devices are device nodes, or directories of device nodes.
	Devices []string
	// Open limits descriptors; 0 keeps the limit. With a UID, Tasks limits threads and processes
	// (RLIMIT_NPROC); 0 removes that limit, because a control group limits tasks, or because no
	// limit is needed.
	Open, Tasks uint64
	// processes permits new processes; a relay creates only threads.
	processes bool
	// TCP is the range of ports for listeners and connections; the zero value forbids TCP.
	TCP address.Ports
	// HostNetwork keeps the caller's network namespace, and allows the sockets of RDMA. TCP
	// implies HostNetwork. A program with neither has an empty network namespace.
	HostNetwork bool
}

// network returns the program's access to the network.
func (s Spec) network() networkAccess {
	switch {
	case s.TCP != address.Ports{}:
		return tcpNetwork
	case s.HostNetwork:
		return rdmaNetwork
	}
	return noNetwork
}

// Report describes the sandbox of a program.
type Report struct {
	UID    int   `json:"uid"`
	Groups []int `json:"groups"`
	// Root reports a separate root and mount namespace.
	Root bool `json:"root"`
	// Network reports a separate, empty network namespace.
	Network bool `json:"network"`
	// Landlock is the version of Landlock's interface; 0 without Landlock.
	Landlock int  `json:"landlock"`
	Seccomp  bool `json:"seccomp"`
	// Missing lists the parts that the host did not offer, with reasons.
	Missing []string `json:"missing"`
}

func (r *Report) lacks(what string, err error) {
	r.Missing = append(r.Missing, fmt.Sprintf("%s: %v", what, err))
}

// Standard returns the paths that every relay with a GPU driver or RDMA uses.
func Standard() Spec {
	s := Spec{
		Read: []string{
			"/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin",
			"/etc/ld.so.cache", "/etc/libibverbs.d",
			// Links in /usr can lead through this directory, for example /usr/local/cuda.
			"/etc/alternatives",
			// Directories of the driver's libraries on NixOS.
			"/run/opengl-driver", "/nix/store",
		},
		Devices: []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"},
	}
	s.Read = append(s.Read, sysPaths("/sys")...)
	nodes, _ := filepath.Glob("/dev/nvidia*") // the pattern is valid
	s.Devices = append(s.Devices, nodes...)
	return s
}

// sysPatterns are the parts of sysfs that CUDA, rdma-core, the C library and the Go runtime read:
// PCI and InfiniBand devices, the topology of CPUs and memory, the NVIDIA modules, and the sizes
// of huge pages. The patterns exclude control groups, which name the containers of the host.
var sysPatterns = []string{
	"bus/pci", "devices/system/cpu", "devices/system/memory", "devices/system/node", "kernel/mm/transparent_hugepage",
	"module/nvidia*", "module/nv_peer_mem",
	"class/infiniband*", "class/misc/rdma_cm",
}

// sysLinks are links to the directories of devices.
var sysLinks = []string{"bus/pci/devices/*", "class/infiniband*/*"}

// pciRoot matches the name of the directory of a PCI host bridge.
var pciRoot = regexp.MustCompile(`^pci[0-9a-f]{4,}:[0-9a-f]{2}$`)

// sysPaths returns the directories of a sysfs that a relay reads. sysPaths lists a device by the PCI
// host bridge above it, because libraries walk up from a device to its root port.
func sysPaths(root string) []string {
	var paths []string
	add := func(path string) {
		if !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	for _, pattern := range sysPatterns {
		found, _ := filepath.Glob(filepath.Join(root, pattern)) // the patterns are valid
		for _, path := range found {
			if info, err := os.Stat(path); err == nil && info.IsDir() {
				add(path)
			}
		}
	}
	for _, pattern := range sysLinks {
		links, _ := filepath.Glob(filepath.Join(root, pattern))
		for _, link := range links {
			if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
				continue
			}
			path, err := filepath.EvalSymlinks(link)
			if err != nil {
				continue // the device has been removed
			}
			add(deviceRoot(path))
		}
	}
	return paths
}

// deviceRoot returns the directory of the PCI host bridge above a device, or the device's own
// directory.
func deviceRoot(path string) string {
	for above := path; above != "/"; above = filepath.Dir(above) {
		if pciRoot.MatchString(filepath.Base(above)) {
			return above
		}
	}
	return path
}

// list is the value of an option that can be repeated.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// Arguments returns the command line of Main for a program. Main writes a report, or an error,
// to the descriptor report, and closes the descriptor at the execution of the program.
func (s Spec) Arguments(report int, program string, arguments ...string) []string {
	a := []string{
		fmt.Sprintf("--report=%d", report),
		"--standard=false",
		fmt.Sprintf("--uid=%d", s.UID),
		fmt.Sprintf("--open=%d", s.Open),
		fmt.Sprintf("--tasks=%d", s.Tasks),
	}
	for _, g := range s.Groups {
		a = append(a, fmt.Sprintf("--group=%d", g))
	}
	for _, path := range s.Read {
		a = append(a, "--read="+path)
	}
	for _, path := range s.Write {
		a = append(a, "--write="+path)
	}
	for _, path := range s.Devices {
		a = append(a, "--device="+path)
	}
	if s.processes {
		a = append(a, "--processes")
	}
	if s.TCP != (address.Ports{}) {
		a = append(a, "--tcp="+s.TCP.String())
	}
	if s.HostNetwork {
		a = append(a, "--host-network")
	}
	return append(append(a, "--", program), arguments...)
}

var errArguments = errors.New("wrong command line")

// IsUsage reports whether an error of Main is an error of the command line.
func IsUsage(err error) bool { return errors.Is(err, errArguments) }

// Main confines the calling process and executes the program in arguments. It returns only an
// error.
func Main(arguments []string) error {
	flags := flag.NewFlagSet("confine", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // err contains the message
	var s Spec
	var read, write, devices list
	flags.IntVar(&s.UID, "uid", 0, "")
	flags.Var(&read, "read", "")
	flags.Var(&write, "write", "")
	flags.Var(&devices, "device", "")
	flags.Uint64Var(&s.Open, "open", 0, "")
	flags.Uint64Var(&s.Tasks, "tasks", 0, "")
	flags.Func("group", "", func(text string) error {
		gid, err := strconv.Atoi(text)
		s.Groups = append(s.Groups, gid)
		return err
	})
	flags.Func("tcp", "", func(text string) (err error) {
		s.TCP, err = address.ParsePorts(text)
		return err
	})
	flags.BoolVar(&s.HostNetwork, "host-network", false, "")
	flags.BoolVar(&s.processes, "processes", false, "")
	standard := flags.Bool("standard", true, "")
	show := flags.Bool("show", false, "")
	reportTo := flags.Int("report", -1, "")
	if err := flags.Parse(arguments); err != nil {
		return fmt.Errorf("confine: %w: %w", errArguments, err)
	}
	if flags.NArg() == 0 {
		return fmt.Errorf("confine: %w: missing program", errArguments)
	}
	s.Read, s.Write, s.Devices = read, write, devices
	if *standard {
		all := Standard()
		s.Read, s.Devices = append(s.Read, all.Read...), append(s.Devices, all.Devices...)
	}

	to := os.Stderr
	if *reportTo >= 0 {
		to = os.NewFile(uintptr(*reportTo), "report")
		unix.CloseOnExec(*reportTo)
	}
	// Never unlock: the thread becomes the program, or the process ends.
	runtime.LockOSThread()
	program, err := filepath.Abs(flags.Arg(0))
	if err == nil {
		var r Report
		file, opened := unix.Open(program, unix.O_PATH|unix.O_CLOEXEC, 0)
		if r, err = s.apply(program); err == nil {
			if *show || *reportTo >= 0 {
				err = json.NewEncoder(to).Encode(r)
			}
			if err == nil {
				if err = keepProcessors(); err == nil {
					err = execute(program, flags.Args())
				}
				// Without its own root, the program may lack access to the directory.
				if err == unix.EACCES && !r.Root && opened == nil {
					err = executeFile(file, flags.Args())
				}
				err = &os.PathError{Op: "exec", Path: program, Err: err}
			}
		}
	}
	if *reportTo >= 0 {
		// An error follows the report, or replaces it.
		_, writeErr := fmt.Fprint(to, err)
		return errors.Join(err, writeErr)
	}
	return err
}

// keepProcessors passes the number of usable processors to a Go program, which cannot read the
// limit of its control group in the new root.
func keepProcessors() error {
	const name = "GOMAXPROCS"
	if os.Getenv(name) != "" {
		return nil
	}
	return os.Setenv(name, strconv.Itoa(runtime.GOMAXPROCS(0)))
}

// execute is execve(2) on this thread. syscall.Exec would restore the limit of open files.
func execute(program string, arguments []string) error {
	return executeAt(unix.AT_FDCWD, program, arguments, 0)
}

// executeFile executes an open file, independently of paths.
func executeFile(file int, arguments []string) error {
	return executeAt(file, "", arguments, unix.AT_EMPTY_PATH)
}

func executeAt(dir int, program string, arguments []string, how int) error {
	path, err := unix.BytePtrFromString(program)
	if err != nil {
		return err
	}
	argv, err := syscall.SlicePtrFromStrings(arguments)
	if err != nil {
		return err
	}
	envv, err := syscall.SlicePtrFromStrings(os.Environ())
	if err != nil {
		return err
	}
	return rawExecveat(dir, path, argv, envv, how)
}

// view returns the files that the thread can still reach.
func (s Spec) view(nodes []string) view {
	v := view{read: roots(present(s.Read)), devices: nodes}
	for _, path := range present(s.Write) {
		if within(path, v.read) {
			path = real(path) // see roots
		}
		v.write = append(v.write, path)
	}
	return v
}

// apply confines this thread.
func (s Spec) apply(program string) (Report, error) {
	r := Report{Missing: []string{}, Groups: []int{}}
	var own uint32 = math.MaxUint32
	if s.UID != 0 {
		if err := CheckMapped(s.UID); err != nil {
			r.lacks("its own uid", err)
		} else {
			own = uint32(s.UID)
		}
	}
	s.Read = append(s.Read, program)
	nodes, groups := s.nodes()
	if own != math.MaxUint32 {
		for _, g := range append(slices.Clone(s.Groups), groups...) {
			if !slices.Contains(r.Groups, g) {
				r.Groups = append(r.Groups, g)
			}
		}
	}
	view := s.view(nodes)
	lacking := map[string]bool{} // report a path once
	lacks := func(path string, err error) {
		if !lacking[path] {
			r.lacks(path, err)
		}
		lacking[path] = true
	}

	if err := s.limit(own != math.MaxUint32, &r); err != nil {
		return r, err
	}
	if s.network() == noNetwork {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			r.lacks("its own network namespace", os.NewSyscallError("unshare", err))
		} else {
			r.Network = true
		}
	}
	if err := ownRoot(view, lacks); err != nil {
		r.lacks("its own root", err)
	} else {
		r.Root = true
	}
	// Open the files while the thread still can. The rules take effect below.
	rules, err := landlockRules(view, own != math.MaxUint32, s.TCP, lacks)
	if err != nil {
		r.lacks("Landlock", err)
	} else {
		defer unix.Close(rules.fd)
	}

	if err := dropBounding(); err != nil {
		r.lacks("an empty bounding set", err)
	}
	if own != math.MaxUint32 {
		if err := become(own, r.Groups); err != nil {
			if !errors.Is(err, unix.EPERM) {
				return r, err
			}
			r.lacks("its own uid", err)
			r.Groups = []int{}
		}
	}
	r.UID = unix.Getuid()
	// Without root, a relay has the uid of its containers. A process of a container could
	// trace the relay once the relay has dropped its capabilities, so make the relay undumpable, as
	// a change of uid does.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return r, os.NewSyscallError("PR_SET_DUMPABLE", err)
	}
	if err := dropCapabilities(); err != nil {
		return r, err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return r, os.NewSyscallError("PR_SET_NO_NEW_PRIVS", err)
	}
	if rules != nil {
		if _, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(rules.fd), 0, 0); errno != 0 {
			r.lacks("Landlock", os.NewSyscallError("landlock_restrict_self", errno))
		} else {
			r.Landlock = rules.abi
			olderLacks(r.Landlock, s.TCP, r.lacks)
		}
	}
	// Until the program makes itself undumpable, the kernel prevents tracing only if the user may
	// not read the program.
	if own != math.MaxUint32 && unix.Access(program, unix.R_OK) == nil {
		r.lacks(
			"protection from tracing at its start",
			fmt.Errorf(
				"every user can read %[1]s, so a process of the relay's uid can trace the relay until the relay disables "+
					"tracing; chmod 711 %[1]s",
				program,
			),
		)
	}
	if err := filterCalls(s.network(), s.processes); err != nil {
		r.lacks("a filter of system calls", err)
	} else {
		r.Seccomp = true
	}
	return r, nil
}

// CheckMapped returns an error if id is not both a uid and a gid of this user namespace.
func CheckMapped(id int) error {
	for _, file := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		found := false
		for line := range strings.Lines(string(text)) {
			var inside, outside, count int
			if _, err := fmt.Sscan(line, &inside, &outside, &count); err == nil && id >= inside && id-inside < count {
				found = true
			}
		}
		if !found {
			return fmt.Errorf("%d is not in %s, so this user namespace does not map it", id, file)
		}
	}
	return nil
}

// limit sets the limits. Registered memory counts as locked memory.
func (s Spec) limit(own bool, r *Report) error {
	infinite := uint64(unix.RLIM_INFINITY)
	tasks := infinite
	if s.Tasks > 0 && own {
		tasks = s.Tasks
		// The kernel counts the tasks of all processes of the uid, so a container could exhaust
		// the limit.
		r.lacks(
			"its own limit of tasks",
			errors.New("its control group has no pids.max; RLIMIT_NPROC counts all processes of its uid"),
		)
	}
	for _, l := range []struct {
		name     string
		resource int
		value    uint64
		set      bool
	}{
		{"no core dumps", unix.RLIMIT_CORE, 0, true},
		{"unlimited locked memory", unix.RLIMIT_MEMLOCK, infinite, true},
		{"a limit of open files", unix.RLIMIT_NOFILE, s.Open, s.Open > 0},
		{"a limit of tasks", unix.RLIMIT_NPROC, tasks, own},
	} {
		if !l.set {
			continue
		}
		var limit unix.Rlimit
		if err := unix.Prlimit(0, l.resource, nil, &limit); err != nil {
			return os.NewSyscallError("prlimit", err)
		}
		want := unix.Rlimit{Cur: l.value, Max: l.value}
		err := unix.Prlimit(0, l.resource, &want, nil)
		if err != nil && limit.Max < l.value { // not above the hard limit
			want = unix.Rlimit{Cur: limit.Max, Max: limit.Max}
			if l.resource == unix.RLIMIT_MEMLOCK {
				r.lacks(l.name, fmt.Errorf("%w; it has %d KiB", err, limit.Max>>10))
			}
			err = unix.Prlimit(0, l.resource, &want, nil)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", l.name, os.NewSyscallError("prlimit", err))
		}
	}
	return nil
}

// nodes returns the device nodes, and the groups that may open the nodes.
func (s Spec) nodes() (nodes []string, groups []int) {
	add := func(path string) {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) != nil || stat.Mode&unix.S_IFMT != unix.S_IFCHR {
			return
		}
		nodes = append(nodes, path)
		if stat.Mode&0o006 != 0o006 && stat.Mode&0o060 == 0o060 && stat.Gid != 0 {
			groups = append(groups, int(stat.Gid))
		}
	}
	for _, path := range s.Devices {
		if entries, err := os.ReadDir(path); err == nil {
			for _, e := range entries {
				add(filepath.Join(path, e.Name()))
			}
			continue
		}
		add(path)
	}
	return nodes, groups
}

// present returns the paths that exist.
func present(paths []string) []string {
	var list []string
	for _, path := range paths {
		path = filepath.Clean(path)
		if _, err := os.Stat(path); err == nil && filepath.IsAbs(path) && path != "/" && !slices.Contains(list, path) {
			list = append(list, path)
		}
	}
	sortByDepth(list)
	return list
}
