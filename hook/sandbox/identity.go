package sandbox

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Use raw calls: the functions of packages syscall and unix change every thread of the process.

func rawExecveat(dir int, path *byte, argv, envv []*byte, how int) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_EXECVEAT, uintptr(dir), uintptr(unsafe.Pointer(path)),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&envv[0])), uintptr(how), 0)
	return errno
}

// become switches the thread to a uid, and to the gid with the same number.
func become(id uint32, groups []int) error {
	list := make([]uint32, len(groups)+1) // one more element, so that the slice is not empty
	for i, g := range groups {
		list[i] = uint32(g)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&list[0])),
		0); errno != 0 {
		return os.NewSyscallError("setgroups", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(id), uintptr(id), uintptr(id)); errno != 0 {
		return os.NewSyscallError("setresgid", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(id), uintptr(id), uintptr(id)); errno != 0 {
		return os.NewSyscallError("setresuid", errno)
	}
	return nil
}

// lastCapability is above the capabilities of any kernel: the bounding set has 64 bits.
const lastCapability = 63

// dropBounding removes every capability from the bounding set of executed programs.
func dropBounding() error {
	for c := uintptr(0); c <= lastCapability; c++ {
		inSet, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if err != nil {
			return nil // EINVAL: the kernel has no further capability
		}
		if inSet == 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return os.NewSyscallError("PR_CAPBSET_DROP", err)
		}
	}
	return nil
}

// dropCapabilities drops every capability. With no_new_privs, exec does not restore capabilities,
// even for uid 0.
func dropCapabilities() error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return os.NewSyscallError("PR_CAP_AMBIENT", err)
	}
	// Without these bits, uid 0 would get the bounding set at exec.
	const noRoot, noRootLocked = 1 << 0, 1 << 1 // SECBIT_NOROOT, linux/securebits.h
	_ = unix.Prctl(
		unix.PR_SET_SECUREBITS,
		noRoot|noRootLocked,
		0,
		0,
		0,
	) // needs CAP_SETPCAP
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	return os.NewSyscallError("capset", unix.Capset(&header, &none[0]))
}
