package sandbox

import (
	"encoding/binary"
	"fmt"
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
		data := make([]byte, 64) // struct seccomp_data, with words as this VM reads them
		for at, value := range map[uint32]uint32{
			dataCall: unix.SYS_SOCKET, dataArch: auditArch,
			argument(0): uint32(c.family), argument(1): uint32(c.kind), argument(2): uint32(c.protocol),
		} {
			binary.BigEndian.PutUint32(data[at:], value)
		}
		answer, err := vm.Run(data)
		if err != nil || (uint32(answer) == answerAllow) != c.allowed {
			t.Errorf("socket(%d, %#x, %d): %#x, %v", c.family, c.kind, c.protocol, answer, err)
		}
	}
}
