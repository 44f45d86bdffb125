package handover

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
)

// pair returns both ends of a SOCK_SEQPACKET connection.
func pair(t *testing.T) (near, far *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends []*net.UnixConn
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		end := c.(*net.UnixConn)
		if err := end.SetDeadline(testutil.Deadline()); err != nil {
			t.Fatal(err)
		}
		ends = append(ends, end)
	}
	return ends[0], ends[1]
}

// opened returns n descriptors of a new file.
func opened(t *testing.T, n int) (path string, files []*os.File) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "file")
	for range n {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		files = append(files, f)
	}
	return path, files
}

func TestReceiveReturnsMessageWithDescriptors(t *testing.T) {
	for _, n := range []int{0, 1, Count} {
		near, far := pair(t)
		_, files := opened(t, n)
		want := Message{Version: 1, Root: "/r", Generation: "g"}
		if err := Send(near, want, files...); err != nil {
			t.Fatal(err)
		}
		var got Message
		received, err := Receive(far, &got)
		if err != nil || got != want || len(received) != n {
			t.Fatalf("%+v with %d descriptors, %v", got, len(received), err)
		}
		for i, f := range received {
			own, err := f.Stat()
			sent, errSent := files[i].Stat()
			if err != nil || errSent != nil || !os.SameFile(own, sent) || f.Fd() == files[i].Fd() {
				t.Errorf("descriptor %d is of another file: %v, %v", i, err, errSent)
			}
		}
		CloseAll(received)
	}
}

// A hostile or foreign sender gets an error, and the receiver keeps none of its descriptors.
func TestReceiveInvalidMessageClosesDescriptors(t *testing.T) {
	const valid = `{"version": 1}`
	long := func(n int) string { return valid + strings.Repeat(" ", n-len(valid)) }
	for _, c := range []struct {
		name, text string
		files      int
		valid      bool
	}{
		{"a message", valid, 2, true},
		{"a message of the limit", long(maxHandover), 2, true},
		{"a message above the limit", long(maxHandover + 1), 2, false},
		{"a message of twice the limit", long(2 * maxHandover), 2, false},
		{"no JSON", "{", 2, false},
		{"white space", " \n", 2, false},
		{"another type", "[]", 2, false},
		{"an unknown key", `{"version": 1, "more": 2}`, 2, false},
		{"two messages", valid + valid, 2, false},
		{"text after the message", valid + "}", 2, false},
		{"the kernel's limit of descriptors", valid, maxDescriptors, true},
	} {
		near, far := pair(t)
		path, files := opened(t, 1)
		fds := slices.Repeat([]int{int(files[0].Fd())}, c.files)
		if _, _, err := near.WriteMsgUnix([]byte(c.text), unix.UnixRights(fds...), nil); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		var m Message
		received, err := Receive(far, &m)
		want := 0
		if c.valid {
			want = c.files
		}
		if (err == nil) != c.valid || len(received) != want || errors.Is(err, io.EOF) {
			t.Errorf("%s: %d descriptors, %v", c.name, len(received), err)
		}
		if n := testutil.Descriptors(t, path); n != 1+want {
			t.Errorf("%s: %d descriptors are open, want %d", c.name, n, 1+want)
		}
		CloseAll(received)
		if n := testutil.Descriptors(t, path); n != 1 {
			t.Errorf("%s: %d descriptors are open after CloseAll", c.name, n)
		}
	}
}

func TestReceiveWithoutFreeDescriptorsFails(t *testing.T) {
	near, far := pair(t)
	path, files := opened(t, 1)
	fds := slices.Repeat([]int{int(files[0].Fd())}, Count)
	if _, _, err := near.WriteMsgUnix([]byte(`{"version": 1}`), unix.UnixRights(fds...), nil); err != nil {
		t.Fatal(err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	free, err := unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(free)
	few := limit
	few.Cur = uint64(free) + 2
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	received, err := Receive(far, &Message{})
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err == nil || received != nil {
		t.Errorf("%d descriptors of %d, %v", len(received), Count, err)
	}
	if n := testutil.Descriptors(t, path); n != 1 {
		t.Errorf("%d descriptors are open", n)
	}
}

func TestReceiveAfterDisconnectIsEOF(t *testing.T) {
	near, far := pair(t)
	if err := near.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Receive(far, &Message{}); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	far.Close()
	if _, err := Receive(far, &Message{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("of a closed connection: %v", err)
	}
}

func TestReceiveEmptyMessageClosesDescriptors(t *testing.T) {
	near, far := pair(t)
	path, files := opened(t, 1)
	control := unix.UnixRights(int(files[0].Fd()))
	// Functions of packages net and unix add a byte.
	message := unix.Msghdr{Control: &control[0]}
	message.SetControllen(len(control))
	raw, err := near.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed unix.Errno
	err = raw.Control(func(fd uintptr) {
		_, _, failed = unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&message)), 0)
	})
	if err != nil || failed != 0 {
		t.Fatal(err, failed)
	}
	if received, err := Receive(far, &Message{}); !errors.Is(err, io.EOF) || received != nil {
		t.Errorf("%d descriptors, %v", len(received), err)
	}
	if n := testutil.Descriptors(t, path); n != 1 {
		t.Errorf("%d descriptors are open", n)
	}
}

func TestDescriptorsOfOtherControlDataIsNone(t *testing.T) {
	credentials := unix.UnixCredentials(&unix.Ucred{Pid: 1})
	path, files := opened(t, 1)
	fd, err := unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	otherLevel := unix.UnixRights(fd)
	otherLevel[8] = unix.SOL_SOCKET + 1 // cmsg_level
	for _, c := range []struct {
		name    string
		control []byte
		want    int
		fails   bool
	}{
		{"nothing", nil, 0, false},
		{"credentials", credentials, 0, false},
		{"another level", otherLevel, 0, false},
		{"credentials and a descriptor", slices.Concat(credentials, unix.UnixRights(fd)), 1, false},
		{"an incomplete header", bytes.Repeat([]byte{1}, unix.CmsgLen(0)-1), 0, false},
		{"a size above the data", bytes.Repeat([]byte{0xff}, unix.CmsgLen(0)), 0, true},
	} {
		got, err := descriptorsOf(c.control)
		if (err != nil) != c.fails || len(got) != c.want {
			t.Errorf("%s: %d descriptors, %v", c.name, len(got), err)
		}
		CloseAll(got)
	}
	if n := testutil.Descriptors(t, path); n != 1 {
		t.Errorf("%d descriptors are open", n)
	}
}

func TestNamedFollowsNumbersOfDescriptors(t *testing.T) {
	_, files := opened(t, Count)
	want := Descriptors{files[0], files[1], files[2], files[3], files[4], files[5]}
	if got := NewDescriptors(files); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
