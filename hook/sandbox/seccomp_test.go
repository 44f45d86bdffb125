package sandbox

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// What the filter answers about sockets, of a relay that is on no network and of one that
// is.
func TestSocketsOfTheFilter(t *testing.T) {
	for _, tcp := range []bool{false, true} {
		t.Run(fmt.Sprint("tcp ", tcp), func(t *testing.T) { testSockets(t, tcp) })
	}
}

func testSockets(t *testing.T, tcp bool) {
	vm, err := bpf.NewVM(filter(tcp))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		family, kind, protocol int
		allowed                bool
	}{
		{unix.AF_UNIX, unix.SOCK_SEQPACKET | unix.SOCK_CLOEXEC, 0, true},
		{unix.AF_UNIX, unix.SOCK_STREAM, 0, true},
		{unix.AF_INET, unix.SOCK_DGRAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK, 0, true},
		{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDP, true},
		{unix.AF_INET, unix.SOCK_STREAM | unix.SOCK_CLOEXEC, 0, tcp},
		{unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_TCP, tcp},
		{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP, false},
		{unix.AF_INET, unix.SOCK_SEQPACKET, unix.IPPROTO_SCTP, false},
		{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP, false},
		{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE, true},
		{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_RDMA, true},
		{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT, false},
		{unix.AF_PACKET, unix.SOCK_RAW, 0, false},
		{unix.AF_VSOCK, unix.SOCK_STREAM, 0, false},
	} {
		answer, err := ask(vm, unix.SYS_SOCKET, uint32(c.family), uint32(c.kind), uint32(c.protocol))
		if err != nil || (uint32(answer) == answerAllow) != c.allowed {
			t.Errorf("socket(%d, %#x, %d): %#x, %v", c.family, c.kind, c.protocol, answer, err)
		}
	}
}

// ask runs the filter for a call with these lower halves of arguments.
func ask(vm *bpf.VM, call uint32, arguments ...uint32) (int, error) {
	data := make([]byte, 64) // struct seccomp_data, with words as this VM reads them
	binary.BigEndian.PutUint32(data[dataCall:], call)
	binary.BigEndian.PutUint32(data[dataArch:], auditArch)
	for n, a := range arguments {
		binary.BigEndian.PutUint32(data[argument(n):], a)
	}
	return vm.Run(data)
}

// Nothing is sent that connects by itself, past Landlock's ports, and all else is.
func TestFastOpenOfTheFilter(t *testing.T) {
	vm, err := bpf.NewVM(filter(true))
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
		{"sendto without", unix.SYS_SENDTO, []uint32{3, unix.MSG_FASTOPEN, unix.MSG_FASTOPEN, other, unix.MSG_FASTOPEN}, true},
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

// The same of the kernel: a socket that has TCP sends, but connects to nobody by it.
func TestFastOpenIsDenied(t *testing.T) {
	if os.Getenv("PEERLANE_TEST_FAST_OPEN") != "" {
		tryFastOpen()
	}
	c := exec.Command("/proc/self/exe", "-test.run", "^TestFastOpenIsDenied$")
	c.Env = append(os.Environ(), "PEERLANE_TEST_FAST_OPEN=1")
	out, err := c.CombinedOutput()
	if want := "sendto denied: true\nsendmsg denied: true\nsendmmsg denied: true\nsendmsg on a Unix socket: <nil>\n"; err != nil || string(out) != want {
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
	check(filterCalls(true))
	to := &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}
	for _, does := range []struct {
		what string
		how  func(fd int) error
	}{
		{"sendto", func(fd int) error { return unix.Sendto(fd, []byte{1}, unix.MSG_FASTOPEN, to) }},
		{"sendmsg", func(fd int) error { return unix.Sendmsg(fd, []byte{1}, nil, to, unix.MSG_FASTOPEN) }},
		{"sendmmsg", func(fd int) error {
			_, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), 0, 0, unix.MSG_FASTOPEN, 0, 0)
			return errno // of no messages it is a success
		}},
	} {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		check(err)
		fmt.Printf("%s denied: %t\n", does.what, does.how(fd) == unix.EPERM)
		unix.Close(fd)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(err)
	fmt.Println("sendmsg on a Unix socket:", unix.Sendmsg(pair[0], []byte{1}, nil, nil, unix.MSG_NOSIGNAL))
	os.Exit(0)
}
