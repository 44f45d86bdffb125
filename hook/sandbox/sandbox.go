// Package sandbox takes from a process what a relay does not need, and executes
// a program with the rest: a uid of its own, no capabilities, a root of its own
// that has the programs, libraries and devices that are named and nothing else,
// Landlock, a seccomp filter, limits.
//
// All of it is done to one thread, which then executes the program: what the
// thread has is what the program has, and what the others of this process have
// goes with them.
//
// Not every host offers all of it: a rootless engine has one uid, some kernels
// have no Landlock. What could not be had is in the Report, and the rest holds.
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

// Spec is what a program is left with.
type Spec struct {
	// UID is its user, and its only group but for Groups; 0 leaves it the caller's.
	UID int
	// Groups are supplementary. Those that a device's node asks for are added.
	Groups []int
	// Read are files and directories that it may read, and execute what is in
	// them; Write those that it may change. What is not there is left out, and
	// each is at the same place in the program's root.
	Read, Write []string
	// Devices are nodes, or directories of nodes.
	Devices []string
	// Open limits descriptors; 0 leaves that limit as it is. Tasks limits, for a UID of its
	// own, threads and processes by RLIMIT_NPROC; 0 removes that limit, where a control
	// group has one or none is needed.
	Open, Tasks uint64
	// Processes lets it make processes; a relay has threads alone.
	Processes bool
	// TCP are the ports that it may listen on, and connect to; zeros are no TCP at all.
	TCP address.Ports
	// HostNetwork keeps the caller's network namespace and allows the sockets that RDMA
	// needs. TCP implies it. A program with neither gets an empty network namespace.
	HostNetwork bool
}

// network is the access to the network that the program keeps.
func (s Spec) network() networkAccess {
	switch {
	case s.TCP != address.Ports{}:
		return tcpNetwork
	case s.HostNetwork:
		return rdmaNetwork
	}
	return noNetwork
}

// Report is what was done.
type Report struct {
	UID    int   `json:"uid"`
	Groups []int `json:"groups"`
	// Root says that it has a root, and a mount namespace, of its own.
	Root bool `json:"root"`
	// Network says that it has an empty network namespace of its own.
	Network bool `json:"network"`
	// Landlock is the version of Landlock's interface; 0 where there is none.
	Landlock int  `json:"landlock"`
	Seccomp  bool `json:"seccomp"`
	// Missing says what the host did not offer, and why.
	Missing []string `json:"missing"`
}

func (r *Report) lacks(what string, err error) {
	r.Missing = append(r.Missing, fmt.Sprintf("%s: %v", what, err))
}

// Standard is what every relay needs that uses a GPU's driver or RDMA.
func Standard() Spec {
	s := Spec{
		Read: []string{
			"/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin",
			"/etc/ld.so.cache", "/etc/libibverbs.d",
			// Where links of /usr lead through: /usr/local/cuda, say.
			"/etc/alternatives",
			// Where the driver's libraries are on systems that keep their own in
			// neither: NixOS.
			"/run/opengl-driver", "/nix/store",
		},
		Devices: []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"},
	}
	s.Read = append(s.Read, sysPaths("/sys")...)
	nodes, _ := filepath.Glob("/dev/nvidia*") // the pattern is a good one
	s.Devices = append(s.Devices, nodes...)
	return s
}

// sysPatterns are the parts of sysfs that CUDA, rdma-core, the C library and the Go
// runtime read: PCI and InfiniBand devices, the topology of CPUs and memory, the
// NVIDIA modules, the size of huge pages. They exclude control groups, which name
// all containers of the host.
var sysPatterns = []string{
	"bus/pci", "devices/system/cpu", "devices/system/memory", "devices/system/node", "kernel/mm/transparent_hugepage",
	"module/nvidia*", "module/nv_peer_mem",
	"class/infiniband*", "class/misc/rdma_cm",
}

// sysLinks have the links to the directories of devices.
var sysLinks = []string{"bus/pci/devices/*", "class/infiniband*/*"}

// pciRoot is the name of the directory of a PCI host bridge.
var pciRoot = regexp.MustCompile(`^pci[0-9a-f]{4,}:[0-9a-f]{2}$`)

// sysPaths lists the directories of a sysfs that a relay reads. A device behind a PCI
// host bridge is listed by the bridge: libraries walk up from a device to its root port.
func sysPaths(root string) []string {
	var paths []string
	add := func(path string) {
		if !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	for _, pattern := range sysPatterns {
		found, _ := filepath.Glob(filepath.Join(root, pattern)) // the patterns are good ones
		for _, path := range found {
			if is, err := os.Stat(path); err == nil && is.IsDir() {
				add(path)
			}
		}
	}
	for _, pattern := range sysLinks {
		links, _ := filepath.Glob(filepath.Join(root, pattern))
		for _, link := range links {
			if is, err := os.Lstat(link); err != nil || is.Mode()&os.ModeSymlink == 0 {
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

// deviceRoot is the directory of the PCI host bridge above a device, or of the device
// itself where there is none.
func deviceRoot(path string) string {
	for above := path; above != "/"; above = filepath.Dir(above) {
		if pciRoot.MatchString(filepath.Base(above)) {
			return above
		}
	}
	return path
}

// list is the value of an option that may be repeated.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// Arguments is the command line of Main for a program. The report, or an error,
// goes to a descriptor, which is closed when the program is executed.
func (s Spec) Arguments(report int, program string, arguments ...string) []string {
	a := []string{fmt.Sprintf("--report=%d", report), "--standard=false", fmt.Sprintf("--uid=%d", s.UID), fmt.Sprintf("--open=%d", s.Open), fmt.Sprintf("--tasks=%d", s.Tasks)}
	for _, g := range s.Groups {
		a = append(a, fmt.Sprintf("--group=%d", g))
	}
	for option, paths := range map[string][]string{"--read=": s.Read, "--write=": s.Write, "--device=": s.Devices} {
		for _, path := range paths {
			a = append(a, option+path)
		}
	}
	if s.Processes {
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

// Usage is the command line of Main.
const Usage = `  peerlane-hook confine [--uid N] [--group N ...] [--read PATH ...]
                        [--write PATH ...] [--device PATH ...] [--open N]
                        [--tasks N] [--tcp FIRST-LAST] [--host-network]
                        [--processes] [--show] -- PROGRAM ARGUMENTS
      execute a program as relays are: with what is named, a GPU's driver, and
      nothing else of the host. --processes lets it make processes, which relays
      cannot. --show prints what that comes to
`

var errArguments = errors.New("wrong command line")

// IsUsage reports whether an error of Main is one of its command line.
func IsUsage(err error) bool { return errors.Is(err, errArguments) }

// Main confines the calling process and executes a program, as its arguments
// say. It returns with an error only.
func Main(arguments []string) error {
	flags := flag.NewFlagSet("confine", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // the error says it
	var s Spec
	var read, write, devices list
	flags.IntVar(&s.UID, "uid", 0, "")
	flags.Var(&read, "read", "")
	flags.Var(&write, "write", "")
	flags.Var(&devices, "device", "")
	flags.Uint64Var(&s.Open, "open", 0, "")
	flags.Uint64Var(&s.Tasks, "tasks", 0, "")
	flags.Func("group", "", func(text string) error {
		var gid int
		_, err := fmt.Sscan(text, &gid)
		s.Groups = append(s.Groups, gid)
		return err
	})
	flags.Func("tcp", "", func(text string) (err error) {
		s.TCP, err = address.ParsePorts(text)
		return err
	})
	flags.BoolVar(&s.HostNetwork, "host-network", false, "")
	flags.BoolVar(&s.Processes, "processes", false, "")
	standard := flags.Bool("standard", true, "")
	show := flags.Bool("show", false, "")
	reportTo := flags.Int("report", -1, "")
	if err := flags.Parse(arguments); err != nil {
		return fmt.Errorf("confine: %w: %w", errArguments, err)
	}
	if flags.NArg() == 0 {
		return fmt.Errorf("confine: %w: no program is given", errArguments)
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
	// For good: the thread becomes the program, or the process ends.
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
				// Without a root of its own it may not be allowed to go there.
				if err == unix.EACCES && !r.Root && opened == nil {
					err = executeFile(file, flags.Args())
				}
				err = &os.PathError{Op: "exec", Path: program, Err: err}
			}
		}
	}
	if *reportTo >= 0 {
		// What follows the report, or is there instead of one.
		_, tell := fmt.Fprint(to, err)
		return errors.Join(err, tell)
	}
	return err
}

// keepProcessors has a Go program use as many processors as this one does: the limit of
// its control group, which it cannot read in its root.
func keepProcessors() error {
	const name = "GOMAXPROCS"
	if os.Getenv(name) != "" {
		return nil
	}
	return os.Setenv(name, strconv.Itoa(runtime.GOMAXPROCS(0)))
}

// execute is execve(2) from this thread. That of package syscall would set the
// limit of open files back.
func execute(program string, arguments []string) error {
	return executeAt(unix.AT_FDCWD, program, arguments, 0)
}

// executeFile executes an open file, wherever it is.
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

// apply does it all to this thread.
func (s Spec) apply(program string) (Report, error) {
	r := Report{Missing: []string{}, Groups: []int{}}
	var own uint32 = math.MaxUint32
	if s.UID != 0 {
		if err := Mapped(s.UID); err != nil {
			r.lacks("a uid of its own", err)
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
	view := view{read: roots(present(s.Read)), devices: nodes}
	for _, path := range present(s.Write) {
		if within(path, view.read) {
			path = real(path) // see roots
		}
		view.write = append(view.write, path)
	}
	lacking := map[string]bool{} // once, whatever cannot be done with it
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
			r.lacks("a network namespace of its own", os.NewSyscallError("unshare", err))
		} else {
			r.Network = true
		}
	}
	if err := ownRoot(view, lacks); err != nil {
		r.lacks("a root of its own", err)
	} else {
		r.Root = true
	}
	// Its files are opened while the thread can; it takes effect below.
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
			r.lacks("a uid of its own", err)
			r.Groups = []int{}
		}
	}
	r.UID = unix.Getuid()
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
	// Until it has disabled tracing itself, the kernel does so for a program that it may not read.
	if own != math.MaxUint32 && unix.Access(program, unix.R_OK) == nil {
		r.lacks("protection from tracing at its start", fmt.Errorf("each user can read %[1]s, so each process of its uid can trace it until it has disabled that; chmod 711 %[1]s", program))
	}
	if err := filterCalls(s.network(), s.Processes); err != nil {
		r.lacks("a filter of system calls", err)
	} else {
		r.Seccomp = true
	}
	return r, nil
}

// Mapped looks whether a uid and a gid can be had here: in a user namespace there
// are few.
func Mapped(id int) error {
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
			return fmt.Errorf("%d is not in %s, so this user namespace has it not", id, file)
		}
	}
	return nil
}

// limit sets the limits. Registered memory counts as locked.
func (s Spec) limit(own bool, r *Report) error {
	infinite := uint64(unix.RLIM_INFINITY)
	tasks := infinite
	if s.Tasks > 0 && own {
		tasks = s.Tasks
		// The kernel counts the tasks of all processes of the uid, and a container can take any.
		r.lacks("a limit of tasks of its own", errors.New("its control group has no pids.max; RLIMIT_NPROC counts each process of its uid"))
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
		var is unix.Rlimit
		if err := unix.Prlimit(0, l.resource, nil, &is); err != nil {
			return os.NewSyscallError("prlimit", err)
		}
		want := unix.Rlimit{Cur: l.value, Max: l.value}
		err := unix.Prlimit(0, l.resource, &want, nil)
		if err != nil && is.Max < l.value { // more than may be had here: what may
			want = unix.Rlimit{Cur: is.Max, Max: is.Max}
			if l.resource == unix.RLIMIT_MEMLOCK {
				r.lacks(l.name, fmt.Errorf("%w; it has %d KiB", err, is.Max>>10))
			}
			err = unix.Prlimit(0, l.resource, &want, nil)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", l.name, os.NewSyscallError("prlimit", err))
		}
	}
	return nil
}

// nodes are the device nodes, and the groups without which they cannot be opened.
func (s Spec) nodes() (nodes []string, groups []int) {
	add := func(path string) {
		var is unix.Stat_t
		if unix.Stat(path, &is) != nil || is.Mode&unix.S_IFMT != unix.S_IFCHR {
			return
		}
		nodes = append(nodes, path)
		if is.Mode&0o006 != 0o006 && is.Mode&0o060 == 0o060 && is.Gid != 0 {
			groups = append(groups, int(is.Gid))
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

// present are the paths that are there.
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
