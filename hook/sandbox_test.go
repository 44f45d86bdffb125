package hook_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
)

// targets are the objects that a compromised relay tries to reach.
type targets struct {
	PID       int     // of another relay
	Address   uintptr // of memory that the relay with PID can read
	State     string  // the tree
	Secret    string  // generation.json of the generation of PID
	Admin     string  // administration socket of the generation
	Sockets   string  // folder of the client socket of the generation
	Socket    string  // name of the client socket in Sockets
	Device    string  // of the host, and in no relay
	Node      string  // a device node in a directory that the attacker may write
	Passwords string  // of the host; empty if the host has no such file
	Directory []string
	Network   string // the host's network namespace
}

const targetsVariable = "TEST_TARGETS"

// attack tries the attacks, and returns the errors by name; "" is a success. A successful attack
// is harmless.
func attack() map[string]string {
	var at targets
	if err := json.Unmarshal([]byte(os.Getenv(targetsVariable)), &at); err != nil {
		fatal(err)
	}
	went := map[string]string{}
	try := func(what string, f func() error) {
		went[what] = ""
		if err := f(); err != nil {
			went[what] = err.Error()
		}
	}
	open := func(path string, how int) func() error {
		return func() error {
			f, err := os.OpenFile(path, how, 0)
			if err == nil {
				f.Close()
			}
			return err
		}
	}
	// Some hosts deny the call to any process, with another error.
	offered := func(err error) error {
		if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSPC) {
			return nil
		}
		return err
	}
	call := func(number uintptr, arguments ...uintptr) func() error {
		return func() error {
			a := append(arguments, 0, 0, 0, 0, 0, 0)
			_, _, errno := unix.Syscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
			if errno != 0 {
				return errno
			}
			return nil
		}
	}
	connect := func(dir, name string) func() error {
		return func() error {
			d, err := os.Open(dir) // for a short name
			if err != nil {
				return err
			}
			defer d.Close()
			c, err := net.Dial("unixpacket", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name))
			if err == nil {
				c.Close()
			}
			return err
		}
	}
	process := fmt.Sprintf("/proc/%d/", at.PID)

	try("say what is known of pairs of GPUs", func() error {
		return os.WriteFile(filepath.Join(at.State, "self-test.json"), []byte("{}"), 0o600)
	})
	try("read the state tree", func() error { _, err := os.ReadDir(at.State); return err })
	try("read another's state", open(at.Secret, os.O_RDONLY))
	try("connect to another's clients' socket", connect(at.Sockets, at.Socket))
	try("connect to another's administration", connect(filepath.Dir(at.Admin), filepath.Base(at.Admin)))
	if at.Passwords != "" {
		try("read the host's passwords", open(at.Passwords, os.O_RDONLY))
	}
	for _, dir := range at.Directory {
		try("write in "+dir, func() error {
			f, err := os.CreateTemp(dir, "peerlane-test-")
			if err == nil {
				f.Close()
				err = os.Remove(f.Name())
			}
			return err
		})
	}
	try("another's memory", open(process+"mem", os.O_RDONLY))
	try("another's environment", open(process+"environ", os.O_RDONLY))
	try("another's descriptors", func() error { _, err := os.ReadDir(process + "fd"); return err })
	try("another's root", func() error { _, err := os.ReadDir(process + "root/"); return err })
	try("process_vm_readv", func() error {
		var word [8]byte
		local := []unix.Iovec{{Base: &word[0], Len: 8}}
		_, err := unix.ProcessVMReadv(at.PID, local, []unix.RemoteIovec{{Base: at.Address, Len: 8}}, 0)
		return err
	})
	try("ptrace", func() error {
		result := make(chan error)
		go func() {
			runtime.LockOSThread() // the thread ends with the goroutine, and detaches
			const seize = 0x4206   // PTRACE_SEIZE does not stop the process
			result <- call(unix.SYS_PTRACE, seize, uintptr(at.PID))()
		}()
		return <-result
	})
	try("kill", func() error { return unix.Kill(at.PID, 0) })
	pidfd, err := unix.PidfdOpen(at.PID, 0)
	if err != nil {
		fatal(err) // a relay opens pidfds of clients
	}
	try("kill by a pidfd", func() error { return unix.PidfdSendSignal(pidfd, 0, nil, 0) })
	try("take another's descriptor", func() error {
		fd, err := unix.PidfdGetfd(pidfd, 0, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
	try("mount", func() error {
		if err := unix.Mount("none", "/", "peerlane-none", 0, ""); err != unix.ENODEV { // there is no such file system
			return err
		}
		return nil
	})
	try("open_tree", func() error {
		fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
	try("chroot", func() error { return unix.Chroot("/") })
	try("setns", func() error {
		fd, err := unix.Open("/proc/self/ns/uts", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Setns(fd, unix.CLONE_NEWUTS)
	})
	try("a user namespace", func() error {
		c := exec.Command("/bin/true")
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
		return offered(c.Run())
	})
	try("an unshared user namespace", func() error {
		c := exec.Command("/bin/true")
		c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWUSER}
		return offered(c.Run())
	})
	try("a process", func() error { return exec.Command("/bin/true").Run() })
	try("a packet socket", func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
	for _, s := range []struct {
		what           string
		kind, protocol int
	}{{"TCP", unix.SOCK_STREAM, 0}, {"TCP by its number", unix.SOCK_STREAM | unix.SOCK_NONBLOCK, unix.IPPROTO_TCP},
		{"MPTCP", unix.SOCK_STREAM, unix.IPPROTO_MPTCP}} {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			try(fmt.Sprintf("%s, family %d", s.what, family), func() error {
				fd, err := unix.Socket(family, s.kind|unix.SOCK_CLOEXEC, s.protocol)
				if err == nil {
					unix.Close(fd)
				}
				if !errors.Is(err, unix.EPERM) {
					return nil // the host lacks the protocol
				}
				return err
			})
		}
	}
	try("the host's network namespace", func() error {
		if own, err := os.Readlink("/proc/self/ns/net"); err != nil || own != at.Network {
			return fmt.Errorf("the namespace is %s, %w", own, err)
		}
		return nil
	})
	try("names of control groups", func() error { _, err := os.ReadDir("/sys/fs/cgroup"); return err })
	try("names of network interfaces", func() error { _, err := os.ReadDir("/sys/class/net"); return err })
	for name, s := range map[string][3]int{
		"a netlink socket":  {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE},
		"a datagram socket": {unix.AF_INET, unix.SOCK_DGRAM, 0},
		"UDP-Lite":          {unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE},
		"L2TP":              {unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_L2TP},
	} {
		try(name, func() error {
			fd, err := unix.Socket(s[0], s[1]|unix.SOCK_CLOEXEC, s[2])
			if err == nil {
				unix.Close(fd)
			}
			if !errors.Is(err, unix.EPERM) {
				return nil // the host lacks the protocol
			}
			return err
		})
	}
	try("a pair of TIPC sockets", func() error {
		pair, err := unix.Socketpair(unix.AF_TIPC, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = errors.Join(unix.Close(pair[0]), unix.Close(pair[1]))
		}
		if !errors.Is(err, unix.EPERM) {
			return nil
		}
		return err
	})
	try("a device of the host", open(at.Device, os.O_RDONLY))
	if at.Node != "" {
		try("a device node of somebody's", open(at.Node, os.O_RDONLY))
	}
	try("a setting of the kernel", open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
	try("core dumps", func() error {
		return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	})
	try("to be looked into", func() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) })
	try("to be root", func() error { return unix.Setresuid(0, 0, 0) })
	// The arguments are invalid: a process that may call gets EINVAL or EFAULT, not EPERM.
	for name, f := range map[string]func() error{
		"bpf": call(unix.SYS_BPF, ^uintptr(0)), "perf_event_open": call(unix.SYS_PERF_EVENT_OPEN, 0),
		"io_uring_setup": call(unix.SYS_IO_URING_SETUP, 0),
		"userfaultfd":    call(unix.SYS_USERFAULTFD, ^uintptr(0)), "keyctl": call(unix.SYS_KEYCTL, ^uintptr(0)),
		"open_by_handle_at": call(unix.SYS_OPEN_BY_HANDLE_AT, ^uintptr(0)),
		"init_module":       call(unix.SYS_FINIT_MODULE, ^uintptr(0)),
		"kexec_load":        call(unix.SYS_KEXEC_LOAD, 0, ^uintptr(0)), "reboot": call(unix.SYS_REBOOT, 0),
		"fsopen": call(unix.SYS_FSOPEN, 0),
		"shmget": call(unix.SYS_SHMGET, 0), "shmat": call(unix.SYS_SHMAT, ^uintptr(0)),
		"shmctl": call(unix.SYS_SHMCTL, ^uintptr(0)),
		"semget": call(unix.SYS_SEMGET, 1), "semop": call(unix.SYS_SEMOP, ^uintptr(0)),
		"semctl": call(unix.SYS_SEMCTL, ^uintptr(0)),
		"msgget": call(unix.SYS_MSGGET, 1), "msgsnd": call(unix.SYS_MSGSND, ^uintptr(0)),
		"msgrcv":  call(unix.SYS_MSGRCV, ^uintptr(0)),
		"mq_open": call(unix.SYS_MQ_OPEN, 0), "mq_unlink": call(unix.SYS_MQ_UNLINK, 0),
	} {
		try(name, func() error {
			if err := f(); errors.Is(err, unix.EPERM) {
				return err
			}
			return nil
		})
	}
	return went
}

// victim starts a relay, and returns the targets for an attacker.
func (h host) victim(t *testing.T) targets {
	t.Helper()
	g := h.launch(t, "victim", startProcess(t).Process.Pid, "")
	pid := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	address, _, _ := strings.Cut(string(maps), "-")
	from, err := strconv.ParseUint(address, 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	at := targets{
		PID: pid, Address: uintptr(from), State: h.layout.State(), Secret: h.layout.GenerationDir(g.ID) + "/generation.json",
		Admin: h.layout.GenerationDir(g.ID) + "/admin.sock", Sockets: h.layout.SocketDir(g.ID), Socket: "relay.sock",
		Device: "/dev/ptmx", Node: filepath.Join(h.dir, "node"),
	}
	if at.Network, err = os.Readlink("/proc/self/ns/net"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/etc/shadow"); err == nil {
		at.Passwords = "/etc/shadow"
	}
	for _, dir := range []string{"/", "/tmp", "/usr", "/dev", "/dev/shm", "/run", "/var/tmp", h.layout.Peers(),
		h.layout.SocketDir(g.ID), h.layout.State()} {
		if unix.Access(dir, unix.W_OK) == nil { // skip read-only folders
			at.Directory = append(at.Directory, dir)
		}
	}
	if err := unix.Mknod(at.Node, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(at.Node, 0o666); err != nil {
		t.Fatal(err)
	}
	return at
}

// A compromised relay reaches neither another relay nor the host. Without the sandbox the attacks
// succeed, which proves that the attacks work.
func TestCompromisedRelayReachesNothing(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root for the sandbox's own uid and root directory")
	}
	for _, mode := range []string{config.SandboxAuto, config.SandboxOff} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			at := h.victim(t)
			var under unix.Statfs_t
			if err := unix.Statfs(at.Node, &under); err != nil {
				t.Fatal(err)
			}
			if mode == config.SandboxOff && under.Flags&unix.ST_NODEV != 0 {
				at.Node = "" // the mount option nodev disables device nodes
			}
			text, err := json.Marshal(at)
			if err != nil {
				t.Fatal(err)
			}
			r := h.request("attacker", startProcess(t).Process.Pid, "attacks", lane(4))
			r.Config.Relay.Environment = append(r.Config.Relay.Environment, targetsVariable+"="+string(text))
			r.Config.Relay.Sandbox = mode
			g, err := hook.Launch(h.layout, r)
			if err != nil {
				t.Fatal(err)
			}
			info := h.state(t, g.ID, generation.StateReady)
			went := h.attacks(t)
			judge(t, went, mode == config.SandboxAuto)

			i, err := control.Inspect(h.layout, g.ID)
			if err != nil || i.Sandbox.Relay == nil || i.Sandbox.Mode != mode {
				t.Fatalf("inspected: %+v, %v", i.Sandbox, err)
			}
			got := i.Sandbox.Relay
			if mode == config.SandboxOff {
				if got.UID != 0 || got.Capabilities == 0 || got.Seccomp || got.OwnRoot || got.OwnNetwork ||
					i.Sandbox.Landlock != 0 {
					t.Errorf("without a sandbox: %+v", i.Sandbox)
				}
				return
			}
			if got.UID == 0 || got.UID != got.GID || got.UID != info.Sandbox.UID || got.Capabilities != 0 || !got.NoNewPrivs ||
				!got.Seccomp ||
				!got.OwnRoot || !got.OwnNetwork ||
				!slices.Equal(got.Groups, []int{info.Sandbox.Group}) {
				t.Errorf("the sandbox: %+v, missing %q", got, i.Sandbox.Missing)
			}
			if (i.Sandbox.Landlock > 0) != landlocks() {
				t.Errorf("Landlock of version %d, missing %q", i.Sandbox.Landlock, i.Sandbox.Missing)
			}
		})
	}
}

// attacks waits for the report of the attacker, and returns the report.
func (h host) attacks(t *testing.T) map[string]string {
	t.Helper()
	var went []map[string]string
	testutil.Succeeds(t, "the attacks", func() error {
		if went = reports[map[string]string](t, h.dir, "attacks"); len(went) != 1 {
			return fmt.Errorf("%d reports", len(went))
		}
		return nil
	})
	return went[0]
}

// judge demands that the attacks failed, or that the attacks succeeded.
func judge(t *testing.T, went map[string]string, denied bool) {
	t.Helper()
	if len(went) < 61 {
		t.Errorf("%d attacks", len(went))
	}
	for what, err := range went {
		if denied != (err != "") {
			t.Errorf("%s: %q, want denied: %v", what, err, denied)
		}
	}
}

// landlocks reports whether this kernel has Landlock.
func landlocks() bool {
	_, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	return errno == 0
}

// Where the host lacks a part of the sandbox, the remaining parts hold, and the report names the
// missing part.
func TestIncompleteSandboxKeepsTheRest(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it gives away what root has")
	}
	for _, c := range []struct {
		name    string
		without func() error // of the calling thread
		missing []string
		allowed []string // attacks that succeed without the missing part
	}{
		{"without CAP_SYS_ADMIN", withoutMounts, []string{"its own root", "its own network namespace"},
			[]string{"a device node of somebody's", "the host's network namespace"}},
		{"without Landlock", withoutLandlock, []string{"Landlock", "its own root"},
			[]string{"a device node of somebody's", "a device of the host", "write in /tmp", "write in /var/tmp",
				"write in /dev/shm",
				"names of control groups", "names of network interfaces"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if strings.Contains(c.name, "Landlock") && !landlocks() {
				t.Skip("this kernel has none to be used up; all of this package runs without")
			}
			h := newHost(t)
			at := h.victim(t)
			// without a private root the attacker reaches TEST_DIR through these folders
			for _, dir := range []string{filepath.Dir(h.dir), filepath.Dir(h.layout.Root)} {
				if err := os.Chmod(dir, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			text, err := json.Marshal(at)
			if err != nil {
				t.Fatal(err)
			}
			s := sandbox.Standard()
			s.UID, s.Open = 2147352570, 4096
			s.Write = []string{h.dir}
			read, write, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer read.Close()
			attacker := exec.Command(
				filepath.Join(bin, "peerlane-hook"),
				append([]string{"confine"}, s.Arguments(3, filepath.Join(bin, "peerlane-relay"), "serve")...)...)
			attacker.Env = []string{"TEST_DIR=" + h.dir, "TEST_FAULT=attacks only", targetsVariable + "=" + string(text)}
			attacker.ExtraFiles = []*os.File{write}
			attacker.Stderr = &bytes.Buffer{}
			started := make(chan error)
			go func() {
				runtime.LockOSThread() // the thread ends with the goroutine
				err := c.without()
				if err == nil {
					err = attacker.Start()
				}
				started <- err
			}()
			if err := <-started; err != nil {
				t.Fatal(err)
			}
			write.Close()
			if err := attacker.Wait(); err != nil {
				t.Fatalf("%v: %s", err, attacker.Stderr)
			}
			var report sandbox.Report
			if err := json.NewDecoder(read).Decode(&report); err != nil {
				t.Fatal(err)
			}
			if report.UID != s.UID || !report.Seccomp || report.Root ||
				(report.Landlock > 0) != (!slices.Contains(c.missing, "Landlock") && landlocks()) {
				t.Errorf("the report is %+v", report)
			}
			for _, missing := range c.missing {
				if !slices.ContainsFunc(report.Missing, func(m string) bool { return strings.HasPrefix(m, missing+": ") }) {
					t.Errorf("the report does not say that %s is missing: %q", missing, report.Missing)
				}
			}
			went := h.attacks(t)
			for _, allowed := range c.allowed {
				delete(went, allowed)
			}
			judge(t, went, true)
		})
	}
}

func withoutMounts() error { return unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_ADMIN, 0, 0, 0) }

// withoutLandlock uses up the kernel limit of 16 nested Landlock rulesets. A thread under a
// ruleset cannot mount.
func withoutLandlock() error {
	attributes := unix.LandlockRulesetAttr{Handled_access_fs: unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK}
	fd, _, errno := unix.RawSyscall(
		unix.SYS_LANDLOCK_CREATE_RULESET,
		uintptr(unsafe.Pointer(&attributes)),
		unsafe.Sizeof(attributes.Handled_access_fs),
		0,
	)
	if errno != 0 {
		return errno
	}
	defer unix.Close(int(fd))
	for {
		_, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0)
		if errno == unix.E2BIG {
			return nil
		}
		if errno != 0 {
			return errno
		}
	}
}

// Relays of containers that start at the same time have different uids. A uid is free after the
// end of the container.
func TestRelaysShareNoUID(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: only that can take another uid")
	}
	h := newHost(t)
	const count = 10
	request := func(id string, pid int) hook.Request {
		r := h.request(id, pid, "", lane(3))
		r.Config.Relay.UIDs = fmt.Sprintf("2147350000-%d", 2147350000+count) // the first is the group
		return r
	}
	inits := make([]*exec.Cmd, count)
	var wait sync.WaitGroup
	for i := range inits {
		inits[i] = startProcess(t)
		wait.Go(func() {
			if _, err := hook.Launch(h.layout, request(fmt.Sprint("c", i), inits[i].Process.Pid)); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	all, err := generation.List(h.layout)
	if err != nil || len(all) != count {
		t.Fatalf("%d generations, %v", len(all), err)
	}
	users := map[uint32]int{}
	for _, g := range all {
		pid := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
		var stat unix.Stat_t
		if err := unix.Stat(fmt.Sprintf("/proc/%d", pid), &stat); err != nil {
			t.Fatal(err)
		}
		if other, taken := users[stat.Uid]; taken || stat.Uid == 0 || int(stat.Uid) != g.Sandbox.UID {
			t.Errorf(
				"relay %d has uid %d, which %d is recorded for, and relay %d may have",
				pid,
				stat.Uid,
				g.Sandbox.UID,
				other,
			)
		}
		users[stat.Uid] = pid
	}
	_, err = hook.Launch(h.layout, request("one more", startProcess(t).Process.Pid))
	if !errors.Is(err, fault.NoRelayUID) {
		t.Errorf("a relay too many: %v", err)
	}
	end(inits[0])
	testutil.Succeeds(t, "the uid of the ended", func() error {
		left, err := os.ReadDir(h.layout.UIDs())
		if err == nil && len(left) != count-1 {
			err = fmt.Errorf("%d uids are taken", len(left))
		}
		return err
	})
	if _, err := hook.Launch(h.layout, request("one more", startProcess(t).Process.Pid)); err != nil {
		t.Errorf("after the end of a container: %v", err)
	}
}

// Hundreds of hooks claim a uid at the same time, beside marks of killed hooks.
func TestUIDsAreClaimedOnce(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: only that can take another uid")
	}
	h := newHost(t)
	if err := h.layout.Create(); err != nil {
		t.Fatal(err)
	}
	const count = 400
	c := config.Default().Relay
	c.UIDs = fmt.Sprintf("2147330000-%d", 2147330000+count)
	// The uids are marked, but the generations are gone.
	for uid := 2147330007; uid < 2147330007+count/2; uid++ {
		if err := os.WriteFile(filepath.Join(h.layout.UIDs(), fmt.Sprint(uid)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	claimed := make([]int, count)
	var wait sync.WaitGroup
	for range 20 {
		wait.Go(func() {
			if err := generation.SweepUIDs(h.layout); err != nil {
				t.Error(err)
			}
		})
	}
	for i := range claimed {
		wait.Go(func() {
			var err error
			if claimed[i], err = claimUID(h.layout, c); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	slices.Sort(claimed)
	for i, uid := range claimed {
		if uid != 2147330001+i {
			t.Fatalf("uid %d is at place %d", uid, i)
		}
	}
	if err := generation.SweepUIDs(h.layout); err != nil {
		t.Error(err)
	}
	if marks := h.marks(t); len(marks) != count {
		t.Errorf("%d uids are marked, and %d claimed", len(marks), count)
	}
	for _, dir := range []string{h.layout.Generations(), h.layout.UIDs()} {
		if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
}

// A program that cannot be executed is an error of the hook, as without the sandbox.
func TestSandboxWithoutProgramReturnsError(t *testing.T) {
	t.Parallel()
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ program, want string }{
		{"/nowhere/relay", "/nowhere/relay"}, {text, "permission denied"},
	} {
		out, err := exec.Command(filepath.Join(bin, "peerlane-hook"), "confine", "--", c.program).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%s: %v, %s", c.program, err, out)
		}
	}
}

// A relay killed in the sandbox before the execve is not a failed start: the supervisor starts
// the next relay.
func TestRelayKilledInSandboxIsRestarted(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "killed in its sandbox")
	testutil.Succeeds(t, "the next relay", func() error {
		if s := h.info(t, g.ID).Status; s.State != generation.StateReady || s.Starts != 2 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if _, err := os.Stat(filepath.Join(h.dir, "killed")); err != nil {
		t.Error(err)
	}
	end(init)
	h.gone(t)
}

// With --processes, a program in the sandbox can use the given paths and start child processes.
func TestSandboxedProgramUsesGivenPaths(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it is about its own uid")
	}
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o777), os.WriteFile(filepath.Join(dir, "in"), []byte("text\n"),
		0o644)); err != nil {
		t.Fatal(err)
	}
	script := `set -e
cat "$0/in" >"$0/out"
echo more >>"$0/out"
echo name >/proc/self/task/$$/comm
head -c 1 /dev/zero /dev/urandom >/dev/null
test "$(id -u)" = 2147352571
ls /sys/bus/pci/devices >/dev/null
test -e "/sys/bus/pci/devices/$(ls /sys/bus/pci/devices | head -n 1)/vendor"
test ! -e /sys/fs
ulimit -c | grep -qx 0
test "$GOMAXPROCS" -ge 1
(true & wait)
`
	cmd := exec.Command(
		filepath.Join(bin, "peerlane-hook"),
		"confine",
		"--processes",
		"--show",
		"--uid",
		"2147352571",
		"--open",
		"512",
		"--tasks",
		"64",
		"--write",
		dir,
		"--",
		"/bin/sh",
		"-c",
		script,
		dir,
	)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "out")); err != nil || string(text) != "text\nmore\n" {
		t.Errorf("the program wrote %q, %v", text, err)
	}
}

// The devices of a relay are fixed at the start. An added lane with further devices makes the
// supervisor restart the relay before the container runs, which is not a failure.
func TestAddedLaneWithOtherDevicesRestartsRelay(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	init := startProcess(t)
	g := h.launch(t, "c", init.Process.Pid, "")
	first := h.state(t, g.ID, generation.StateReady).Status.Relay.PID
	added := lane(4)
	added.NICs = []string{"verbs0"}
	h.launch(t, "c", init.Process.Pid, "", added)
	waitDead(t, first)
	testutil.Succeeds(t, "the next relay", func() error {
		if s := h.info(t, g.ID).Status; s.State != generation.StateReady || s.Starts != 2 || s.Error != "" {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if answered, err := h.ask(g.ID); err != nil || answered == first {
		t.Errorf("relay %d answers: %v", answered, err)
	}
	configs := reports[launch.Config](t, h.dir, "config")
	if last := configs[len(configs)-1]; len(configs) < 2 ||
		!slices.ContainsFunc(configs, func(c launch.Config) bool { return len(c.Lanes) == 2 }) {
		t.Errorf("%d configurations, the last %+v", len(configs), last)
	}
	end(init)
	h.gone(t)
}

// attackMain is a compromised relay. After the report it works as a relay.
func attackMain(only bool) {
	report("attacks", attack())
	if only {
		syscall.Exit(0)
	}
}

// The sandbox lets a relay read the libraries that the environment names.
func TestSandboxAllowsLibrariesOfEnvironment(t *testing.T) {
	got := readable(
		"PEERLANE_CUDA_LIBRARY=/opt/a.so",
		"PEERLANE_VERBS_LIBRARY=/opt/b.so",
		"LD_LIBRARY_PATH=/opt/c:d:/opt/e",
		"PEERLANE_OTHER=/opt/f",
	)
	if want := []string{"/opt/a.so", "/opt/b.so", "/opt/c", "/opt/e"}; !slices.Equal(got, want) {
		t.Errorf("readable are %v, not %v", got, want)
	}
}

// A relay may open only the device nodes of the NICs of the container, for NICs with a PCI
// function (two of three in the test) and for software RDMA devices.
func TestSandboxAllowsOwnRDMANodesOnly(t *testing.T) {
	original := sandbox.Uverbs
	t.Cleanup(func() { sandbox.Uverbs = original })
	sandbox.Uverbs = t.TempDir()
	for file, text := range map[string]string{
		"abi_version": "6\n", "uverbs0/ibdev": "mlx5_0\n", "uverbs0/device/vendor": "0x15b3\n", "uverbs1/ibdev": "mlx5_1\n",
		"uverbs10/ibdev": "rxe0\n",
	} {
		file = filepath.Join(sandbox.Uverbs, file)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for nic, want := range map[string][]string{
		"mlx5_0": {"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"},
		"rxe0":   {"/dev/infiniband/uverbs10", "/dev/infiniband/rdma_cm"},
		"mlx5":   nil, "emulated0": nil, "": nil,
	} {
		if got := sandbox.VerbsNodes(nic); !slices.Equal(got, want) {
			t.Errorf("%q has %q, not %q", nic, got, want)
		}
	}
	sandbox.Uverbs = filepath.Join(sandbox.Uverbs, "none")
	if got := sandbox.VerbsNodes("mlx5_0"); got != nil {
		t.Errorf("without RDMA a NIC has %q", got)
	}
}
