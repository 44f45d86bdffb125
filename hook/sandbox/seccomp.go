package sandbox

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// denied lists system calls that GPU drivers, RDMA and the runtimes of Go and C do not make. The
// calls fail with EPERM. A list of allowed calls would break with the next driver.
var denied = append([]uintptr{
	// mounts and roots
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE,
	unix.SYS_OPEN_TREE_ATTR, unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
	// other namespaces
	unix.SYS_UNSHARE, unix.SYS_SETNS,
	// processes
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE,
	unix.SYS_PROCESS_MRELEASE,
	unix.SYS_PIDFD_GETFD, unix.SYS_KCMP,
	// System V IPC and POSIX queues: the relay is in the host's IPC namespace
	unix.SYS_SHMGET, unix.SYS_SHMAT, unix.SYS_SHMCTL, unix.SYS_SHMDT, unix.SYS_SEMGET, unix.SYS_SEMOP, unix.SYS_SEMTIMEDOP,
	unix.SYS_SEMCTL,
	unix.SYS_MSGGET, unix.SYS_MSGSND, unix.SYS_MSGRCV, unix.SYS_MSGCTL,
	unix.SYS_MQ_OPEN, unix.SYS_MQ_UNLINK, unix.SYS_MQ_TIMEDSEND, unix.SYS_MQ_TIMEDRECEIVE, unix.SYS_MQ_NOTIFY,
	unix.SYS_MQ_GETSETATTR,
	// the kernel itself
	unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER,
	unix.SYS_IO_URING_REGISTER, unix.SYS_REBOOT, unix.SYS_SYSLOG, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	unix.SYS_FANOTIFY_INIT, unix.SYS_ACCT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD,
	unix.SYS_NFSSERVCTL, unix.SYS_LOOKUP_DCOOKIE, unix.SYS_VHANGUP,
	// files without names
	unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_NAME_TO_HANDLE_AT,
	// the host's clock and name
	unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_CLOCK_ADJTIME, unix.SYS_ADJTIMEX, unix.SYS_SETHOSTNAME,
	unix.SYS_SETDOMAINNAME,
}, deniedHere...)

// Offsets in struct seccomp_data (linux/seccomp.h).
const (
	dataCall = 0
	dataArch = 4
	dataArgs = 16
)

// Results of a filter (linux/seccomp.h).
const (
	answerKill  = 0x80000000
	answerErrno = 0x00050000
	answerAllow = 0x7fff0000
)

// argument returns the offset of the lower half of an argument. Both architectures are
// little-endian, and the kernel uses only the lower half of these arguments.
func argument(n int) uint32 { return uint32(dataArgs + 8*n) }

// load returns the instruction that loads a word of struct seccomp_data.
func load(offset uint32) bpf.Instruction { return bpf.LoadAbsolute{Off: offset, Size: 4} }

// socketType is SOCK_TYPE_MASK of linux/net.h; the other bits are flags.
const socketType = 0xf

// networkAccess selects the sockets that a program may create.
type networkAccess int

const (
	noNetwork   networkAccess = iota // AF_UNIX only
	rdmaNetwork                      // also the families of librdmacm and libibverbs
	tcpNetwork                       // also TCP
)

// socketKind is a family, type and protocol of sockets. Protocol -1 means any protocol of the
// family and type.
type socketKind struct{ family, kind, protocol int }

// Unix sockets have no protocol. The relay and CUDA use no datagram sockets.
var unixSockets = []socketKind{{unix.AF_UNIX, unix.SOCK_STREAM, -1}, {unix.AF_UNIX, unix.SOCK_SEQPACKET, -1}}

// sockets returns the kinds that socket(2) may create. sockets omits protocols that share a type
// with TCP or UDP (MPTCP, SCTP, UDP-Lite, L2TP, ping), for which Landlock has no rules.
func sockets(access networkAccess) []socketKind {
	kinds := slices.Clone(unixSockets)
	if access == noNetwork {
		return kinds
	}
	for _, kind := range []int{unix.SOCK_RAW, unix.SOCK_DGRAM} { // netlink(7) does not distinguish the types
		kinds = append(
			kinds,
			socketKind{unix.AF_NETLINK, kind, unix.NETLINK_ROUTE},
			socketKind{unix.AF_NETLINK, kind, unix.NETLINK_RDMA},
		)
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		// libibverbs and glibc look up routes and link-layer addresses with a datagram socket.
		kinds = append(
			kinds,
			socketKind{family, unix.SOCK_DGRAM, 0},
			socketKind{family, unix.SOCK_DGRAM, unix.IPPROTO_UDP},
		)
		if access == tcpNetwork {
			kinds = append(
				kinds,
				socketKind{family, unix.SOCK_STREAM, 0},
				socketKind{family, unix.SOCK_STREAM, unix.IPPROTO_TCP},
			)
		}
	}
	return kinds
}

// allowSockets allows a call whose first three arguments are a kind in the list, and denies other
// calls.
func allowSockets(kinds []socketKind, deny, allow bpf.Instruction) []bpf.Instruction {
	var body []bpf.Instruction
	for _, k := range kinds {
		one := []bpf.Instruction{allow}
		if k.protocol >= 0 {
			one = append(
				[]bpf.Instruction{
					load(argument(2)),
					bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(k.protocol), SkipTrue: uint8(len(one))},
				},
				one...)
		}
		one = append([]bpf.Instruction{
			load(argument(1)), bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: socketType},
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(k.kind), SkipTrue: uint8(len(one))},
		}, one...)
		one = append(
			[]bpf.Instruction{
				load(argument(0)),
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(k.family), SkipTrue: uint8(len(one))},
			},
			one...)
		body = append(body, one...)
	}
	return append(body, deny)
}

const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// filter returns the program that the kernel runs for every system call. The kernel caches an
// answer that depends only on the call.
//
// Without processes, the program has only threads, so nothing survives its end.
func filter(access networkAccess, processes bool) []bpf.Instruction {
	deny := bpf.RetConstant{Val: answerErrno | uint32(unix.EPERM)}
	unknown := bpf.RetConstant{Val: answerErrno | uint32(unix.ENOSYS)}
	allow := bpf.RetConstant{Val: answerAllow}
	unless := func(value uint32, skip uint8) bpf.Instruction {
		return bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipFalse: skip}
	}
	f := []bpf.Instruction{
		load(dataArch),
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: auditArch, SkipTrue: 1},
		bpf.RetConstant{Val: answerKill},
		load(dataCall),
	}
	if runtime.GOARCH == "amd64" { // x32 has other numbers for the same calls
		f = append(f, bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: 0x40000000, SkipFalse: 1}, unknown)
	}
	for _, call := range denied {
		f = append(f, unless(uint32(call), 1), deny)
	}
	// The flags of clone3 are in memory, which a filter cannot read. After ENOSYS the C library
	// uses clone.
	f = append(f, unless(unix.SYS_CLONE3, 1), unknown)
	needed := uint32(unix.CLONE_THREAD)
	if processes {
		needed = 0
	} else {
		for _, call := range forks {
			f = append(f, unless(uint32(call), 1), deny)
		}
	}
	block := func(call uint32, body ...bpf.Instruction) {
		f = append(f, unless(call, uint8(len(body))))
		f = append(f, body...)
	}
	block(unix.SYS_CLONE,
		load(argument(0)),
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: newNamespaces, SkipTrue: 2},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: needed},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: needed, SkipTrue: 1},
		deny, allow)
	block(unix.SYS_SOCKET, allowSockets(sockets(access), deny, allow)...)
	block(unix.SYS_SOCKETPAIR, allowSockets(unixSockets, deny, allow)...)
	// A send with TCP Fast Open connects, and Landlock does not check the port.
	for _, send := range []struct{ call, flags int }{{unix.SYS_SENDTO, 3}, {unix.SYS_SENDMSG, 2}, {unix.SYS_SENDMMSG, 3}} {
		block(uint32(send.call),
			load(argument(send.flags)),
			bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: unix.MSG_FASTOPEN, SkipFalse: 1},
			deny, allow)
	}
	block(unix.SYS_PRCTL, // only 0 is allowed, so that a relay stays untraceable
		load(argument(0)),
		unless(unix.PR_SET_DUMPABLE, 3),
		load(argument(1)),
		unless(0, 2),
		allow, allow, deny)
	block(unix.SYS_IOCTL, // input into the terminal of another process
		load(argument(1)),
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.TIOCSTI, SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0x541c, SkipTrue: 1}, // TIOCLINUX
		allow, deny)
	block(unix.SYS_PERSONALITY,
		load(argument(0)),
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0xffffffff, SkipFalse: 1}, // a query
		allow, deny)
	return append(f, allow)
}

// filterCalls installs the filter for this thread.
func filterCalls(access networkAccess, processes bool) error {
	raw, err := bpf.Assemble(filter(access, processes))
	if err != nil {
		return fmt.Errorf("the filter: %w", err)
	}
	program := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	return nil
}
