package sandbox

import (
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// The filter allows the sockets of a relay's network access, and denies every other combination of
// family, type and protocol.
func TestFilterSocketAllowsListedKindsOnly(t *testing.T) {
	unixOnly := map[[3]int]bool{}
	for _, protocol := range socketProtocols {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET} {
			unixOnly[[3]int{unix.AF_UNIX, kind, protocol}] = true
		}
	}
	rdma := maps.Clone(unixOnly)
	for _, kind := range []int{unix.SOCK_RAW, unix.SOCK_DGRAM} {
		rdma[[3]int{unix.AF_NETLINK, kind, unix.NETLINK_ROUTE}] = true
		rdma[[3]int{unix.AF_NETLINK, kind, unix.NETLINK_RDMA}] = true
	}
	tcp := map[[3]int]bool{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		for _, protocol := range []int{0, unix.IPPROTO_UDP} {
			rdma[[3]int{family, unix.SOCK_DGRAM, protocol}] = true
		}
		for _, protocol := range []int{0, unix.IPPROTO_TCP} {
			tcp[[3]int{family, unix.SOCK_STREAM, protocol}] = true
		}
	}
	maps.Copy(tcp, rdma)
	for _, c := range []struct {
		name    string
		access  networkAccess
		call    uint32
		allowed map[[3]int]bool
	}{
		{"socket without network", noNetwork, unix.SYS_SOCKET, unixOnly},
		{"socket with RDMA", rdmaNetwork, unix.SYS_SOCKET, rdma},
		{"socket with TCP", tcpNetwork, unix.SYS_SOCKET, tcp},
		{"socketpair without network", noNetwork, unix.SYS_SOCKETPAIR, unixOnly},
		{"socketpair with TCP", tcpNetwork, unix.SYS_SOCKETPAIR, unixOnly},
	} {
		t.Run(c.name, func(t *testing.T) {
			vm, err := bpf.NewVM(filter(c.access, false))
			if err != nil {
				t.Fatal(err)
			}
			for family := range unix.AF_MAX {
				for kind := range socketType + 1 {
					for _, protocol := range socketProtocols {
						answer, err := ask(
							vm,
							c.call,
							uint32(family),
							uint32(kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK),
							uint32(protocol),
						)
						if allowed := uint32(answer) == answerAllow; err != nil ||
							allowed != c.allowed[[3]int{family, kind, protocol}] {
							t.Errorf("family %d, type %d, protocol %d: %#x, %v", family, kind, protocol, answer, err)
						}
					}
				}
			}
		})
	}
}

// socketProtocols are the protocols of the tests. UDP-Lite (136), L2TP (115), SCTP (132), MPTCP
// (262) and ICMP (1) share types with UDP and TCP.
var socketProtocols = []int{0, 1, 2, 3, 4, 6, 9, 15, 16, 17, 20, 21, 33, 58, 115, 132, 136, 255, 262, 0xffff}

// In a process with the filter, a socketpair of AF_TIPC and a UDP-Lite socket are denied, and
// pairs of Unix sockets are allowed.
func TestSocketsOutsideTheListAreDenied(t *testing.T) {
	if os.Getenv("PEERLANE_TEST_SOCKETS") != "" {
		trySockets()
	}
	c := exec.Command("/proc/self/exe", "-test.run", "^TestSocketsOutsideTheListAreDenied$")
	c.Env = append(os.Environ(), "PEERLANE_TEST_SOCKETS=1")
	out, err := c.CombinedOutput()
	want := "TIPC pair: operation not permitted\nUDP-Lite: operation not permitted\nL2TP: operation not " +
		"permitted\nuevents: operation not permitted\nUnix pair: <nil>\nUDP: <nil>\n"
	if err != nil || string(out) != want {
		t.Errorf("%v: %s; want %s", err, out, want)
	}
}

// trySockets ends this process.
func trySockets() {
	runtime.LockOSThread()
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if err == nil {
		err = filterCalls(tcpNetwork, false)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_, err = unix.Socketpair(unix.AF_TIPC, unix.SOCK_SEQPACKET, 0)
	fmt.Println("TIPC pair:", err)
	_, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE)
	fmt.Println("UDP-Lite:", err)
	_, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_L2TP)
	fmt.Println("L2TP:", err)
	_, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT)
	fmt.Println("uevents:", err)
	_, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	fmt.Println("Unix pair:", err)
	_, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	fmt.Println("UDP:", err)
	os.Exit(0)
}

// ask runs the filter for a call with the given lower halves of arguments.
func ask(vm *bpf.VM, call uint32, arguments ...uint32) (int, error) {
	data := make([]byte, 64) // struct seccomp_data, in the word order of this VM
	binary.BigEndian.PutUint32(data[dataCall:], call)
	binary.BigEndian.PutUint32(data[dataArch:], auditArch)
	for n, a := range arguments {
		binary.BigEndian.PutUint32(data[argument(n):], a)
	}
	return vm.Run(data)
}

// A program without processes can create threads.
func TestFilterWithoutProcessesDeniesFork(t *testing.T) {
	const thread = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND |
		unix.CLONE_THREAD | unix.CLONE_SYSVSEM
	calls := map[string][]uint32{
		"fork by clone":           {unix.SYS_CLONE, uint32(unix.SIGCHLD)},
		"vfork by clone":          {unix.SYS_CLONE, unix.CLONE_VM | unix.CLONE_VFORK | uint32(unix.SIGCHLD)},
		"a process like a thread": {unix.SYS_CLONE, thread &^ unix.CLONE_THREAD},
	}
	for i, call := range forks {
		calls[fmt.Sprint("fork call ", i)] = []uint32{uint32(call), 0}
	}
	for _, processes := range []bool{false, true} {
		vm, err := bpf.NewVM(filter(noNetwork, processes))
		if err != nil {
			t.Fatal(err)
		}
		expect := func(name string, call []uint32, allowed bool) {
			t.Helper()
			if answer, err := ask(vm, call[0], call[1]); err != nil || (uint32(answer) == answerAllow) != allowed {
				t.Errorf("processes %v: %s: %#x, %v", processes, name, answer, err)
			}
		}
		for name, call := range calls {
			expect(name, call, processes)
		}
		expect(
			"a thread",
			[]uint32{unix.SYS_CLONE, thread | unix.CLONE_SETTLS | unix.CLONE_PARENT_SETTID | unix.CLONE_CHILD_CLEARTID},
			true,
		)
		expect("a thread in a namespace", []uint32{unix.SYS_CLONE, thread | unix.CLONE_NEWNS}, false)
		expect("clone3", []uint32{unix.SYS_CLONE3, thread}, false)
	}
}

// The filter denies a send that connects, which would bypass Landlock's ports, and allows other
// sends.
func TestFilterDeniesFastOpen(t *testing.T) {
	vm, err := bpf.NewVM(filter(tcpNetwork, false))
	if err != nil {
		t.Fatal(err)
	}
	const other = unix.MSG_NOSIGNAL | unix.MSG_DONTWAIT | unix.MSG_ZEROCOPY | unix.MSG_MORE
	for _, c := range []struct {
		name      string
		call      uint32
		arguments []uint32
		allowed   bool
	}{
		{"sendto", unix.SYS_SENDTO, []uint32{3, 0, 1, unix.MSG_FASTOPEN}, false},
		{"sendto and more", unix.SYS_SENDTO, []uint32{3, 0, 1, unix.MSG_FASTOPEN | other}, false},
		{"sendto without", unix.SYS_SENDTO, []uint32{3, unix.MSG_FASTOPEN, unix.MSG_FASTOPEN, other, unix.MSG_FASTOPEN},
			true},
		{"sendmsg", unix.SYS_SENDMSG, []uint32{3, 0, unix.MSG_FASTOPEN | other}, false},
		{"sendmsg without", unix.SYS_SENDMSG, []uint32{3, unix.MSG_FASTOPEN, other, unix.MSG_FASTOPEN}, true},
		{"sendmmsg", unix.SYS_SENDMMSG, []uint32{3, 0, 1, unix.MSG_FASTOPEN}, false},
		{"sendmmsg without", unix.SYS_SENDMMSG, []uint32{3, unix.MSG_FASTOPEN, unix.MSG_FASTOPEN, other}, true},
		{"write", unix.SYS_WRITE, []uint32{3, 0, unix.MSG_FASTOPEN, unix.MSG_FASTOPEN}, true},
	} {
		answer, err := ask(vm, c.call, c.arguments...)
		if err != nil || (uint32(answer) == answerAllow) != c.allowed {
			t.Errorf("%s: %#x, %v", c.name, answer, err)
		}
	}
}

// In a process with the filter, a TCP socket can send, but a send cannot connect.
func TestFastOpenIsDenied(t *testing.T) {
	if os.Getenv("PEERLANE_TEST_FAST_OPEN") != "" {
		tryFastOpen()
	}
	c := exec.Command("/proc/self/exe", "-test.run", "^TestFastOpenIsDenied$")
	c.Env = append(os.Environ(), "PEERLANE_TEST_FAST_OPEN=1")
	out, err := c.CombinedOutput()
	if want := "sendto denied: true\nsendmsg denied: true\n" +
		"sendmmsg denied: true\nsendmsg on a Unix socket: <nil>\n"; err != nil ||
		string(out) != want {
		t.Errorf("%v: %s; want %s", err, out, want)
	}
}

// tryFastOpen ends this process.
func tryFastOpen() {
	runtime.LockOSThread()
	check := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	check(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	check(filterCalls(tcpNetwork, false))
	to := &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}
	for _, attempt := range []struct {
		what string
		how  func(fd int) error
	}{
		{"sendto", func(fd int) error { return unix.Sendto(fd, []byte{1}, unix.MSG_FASTOPEN, to) }},
		{"sendmsg", func(fd int) error { return unix.Sendmsg(fd, []byte{1}, nil, to, unix.MSG_FASTOPEN) }},
		{"sendmmsg", func(fd int) error {
			_, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), 0, 0, unix.MSG_FASTOPEN, 0, 0)
			return errno // an empty list of messages succeeds
		}},
	} {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		check(err)
		fmt.Printf("%s denied: %t\n", attempt.what, attempt.how(fd) == unix.EPERM)
		unix.Close(fd)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(err)
	fmt.Println("sendmsg on a Unix socket:", unix.Sendmsg(pair[0], []byte{1}, nil, nil, unix.MSG_NOSIGNAL))
	os.Exit(0)
}
