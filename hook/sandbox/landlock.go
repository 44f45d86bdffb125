package sandbox

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/network/address"
)

// Access rights of Landlock (linux/landlock.h).
const (
	mayRead  = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	mayWrite = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR |
		unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK |
		unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER
	mayUse = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	// cuInit of CUDA names threads through /proc/self/task/N/comm, and fails without this right.
	mayName = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR |
		unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE

	// mayFile is the subset of rights for a file other than a directory.
	mayFile = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// handled returns the access rights of a version of the interface. Landlock denies every right,
// including TCP, unless a rule allows the right. Without a network, the filter denies TCP on every
// kernel, like the protocols that Landlock does not know.
func handled(abi int) (files, network, scopes uint64) {
	files = unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1 // version 1: every right up to this bit
	if abi >= 2 {
		files |= unix.LANDLOCK_ACCESS_FS_REFER
	}
	if abi >= 3 {
		files |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi >= withTCP {
		network = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 5 {
		files |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if abi >= withScopes {
		scopes = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	return files, network, scopes
}

// withScopes is the version of the interface with scopes (Linux 6.12). Earlier versions do not
// protect abstract Unix sockets of the host.
const withScopes = 6

// withTCP is the version of the interface with rules for TCP ports (Linux 6.7). On earlier kernels
// a program with TCP can use any port.
const withTCP = 4

// olderLacks reports the rights that a version of the interface lacks and that no other mechanism
// denies: the filter allows any port to a program with TCP.
func olderLacks(abi int, tcp address.Ports, lacks func(what string, err error)) {
	for _, one := range []struct {
		what   string
		takes  int
		needed bool
	}{
		{fmt.Sprintf("TCP on ports %s alone", tcp), withTCP, tcp != address.Ports{}},
		{"no abstract Unix sockets of others", withScopes, true},
	} {
		if one.needed && abi < one.takes {
			lacks(
				one.what,
				fmt.Errorf("this kernel has version %d of Landlock's interface; version %d is needed", abi, one.takes),
			)
		}
	}
}

// landlock is a set of rules before enforcement.
type landlock struct{ fd, abi int }

// landlockRules opens the paths of the rules in the root that the program will have. landlockRules
// reports a path that cannot be opened as missing.
func landlockRules(v view, ownUID bool, tcp address.Ports, lacks func(path string, err error)) (*landlock, error) {
	version, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return nil, fmt.Errorf("this kernel lacks Landlock, or it is disabled: %w", errno)
	}
	l := &landlock{abi: int(version)}
	files, network, scopes := handled(l.abi)
	attributes := unix.LandlockRulesetAttr{Handled_access_fs: files, Handled_access_net: network, Scoped: scopes}
	// An older kernel accepts 0 in unknown fields.
	fd, _, errno := unix.RawSyscall(
		unix.SYS_LANDLOCK_CREATE_RULESET,
		uintptr(unsafe.Pointer(&attributes)),
		unsafe.Sizeof(attributes),
		0,
	)
	if errno != 0 {
		return nil, os.NewSyscallError("landlock_create_ruleset", errno)
	}
	l.fd = int(fd)
	// /proc has no file of another user that a separate uid could write.
	proc, task := uint64(mayName), uint64(mayName)
	if !ownUID {
		proc = mayRead
	}
	type part struct {
		paths  []string
		rights uint64
	}
	for _, p := range []part{
		{v.read, mayRead}, {v.write, mayWrite}, {v.devices, mayUse}, {[]string{"/proc"}, proc},
		{[]string{"/proc/self/task"}, task},
	} {
		for _, path := range p.paths {
			if err := l.allow(path, p.rights&files); err != nil {
				lacks(path, err)
			}
		}
	}
	if err := l.allowTCP(tcp, network); err != nil {
		return nil, errors.Join(err, unix.Close(l.fd))
	}
	return l, nil
}

// Package unix lacks these definitions of linux/landlock.h: struct landlock_net_port_attr and
// LANDLOCK_RULE_NET_PORT.
type netPort struct{ access, port uint64 }

const ruleNetPort = 2

// allowTCP allows listening on the ports and connections to the ports: relays of every host use
// the same range. A kernel without TCP rules in Landlock allows every port.
func (l *landlock) allowTCP(ports address.Ports, rights uint64) error {
	if ports == (address.Ports{}) || rights == 0 {
		return nil
	}
	for port := int(ports.First); port <= int(ports.Last); port++ {
		rule := netPort{rights, uint64(port)}
		if _, _, errno := unix.RawSyscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(l.fd), ruleNetPort,
			uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
			return fmt.Errorf("landlock_add_rule for port %d: %w", port, errno)
		}
	}
	return nil
}

func (l *landlock) allow(path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= mayFile
	}
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	if _, _, errno := unix.RawSyscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(l.fd), unix.LANDLOCK_RULE_PATH_BENEATH,
		uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("landlock_add_rule %s: %w", path, errno)
	}
	return nil
}
