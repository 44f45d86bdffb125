package packet

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/wire"
)

// file is a file with the number of this process's descriptors of it.
type file struct {
	t *testing.T
	*os.File
}

func newFile(t *testing.T) file {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return file{t, f}
}

// descriptors returns the number of this process's descriptors of the file.
func (f file) descriptors() (n int) {
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		f.t.Error(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == f.Name() { // otherwise perhaps closed meanwhile
			n++
		}
	}
	return n
}

// wait waits until no descriptor but f is open.
func (f file) wait(name string) {
	f.t.Helper()
	testutil.Until(f.t, name+": the descriptors are closed", func() bool { return f.descriptors() == 1 })
}

// sendEmpty sends a message without bytes, with the descriptor. Functions of packages net and unix add
// a byte.
func (f file) sendEmpty(c Conn) {
	f.t.Helper()
	control := unix.UnixRights(int(f.Fd()))
	message := unix.Msghdr{Control: &control[0]}
	message.SetControllen(len(control))
	raw, err := c.SyscallConn()
	if err != nil {
		f.t.Fatal(err)
	}
	var failed unix.Errno
	err = raw.Control(func(fd uintptr) {
		_, _, failed = unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&message)), 0)
	})
	if err != nil || failed != 0 {
		f.t.Fatal(err, failed)
	}
}

func malformed(err error) bool { return errors.Is(err, &wire.Error{Status: wire.StatusMalformed}) }

func isEOF(err error) bool { return errors.Is(err, io.EOF) }

// Both ways of receiving end alike for everything that a remote side can do.
func TestReceiveReportsEndOfRemoteSide(t *testing.T) {
	for _, c := range []struct {
		name    string
		remote  func(t *testing.T, near, remote Conn)
		message bool // a message precedes the end
		is      func(error) bool
	}{
		{"it closes", func(_ *testing.T, _, remote Conn) { remote.Close() }, false, isEOF},
		{"it sends and closes", func(t *testing.T, _, remote Conn) {
			send(t, remote)
			remote.Close()
		}, true, isEOF},
		{"it leaves a message unread", func(t *testing.T, near, remote Conn) {
			send(t, near)
			remote.Close()
		}, false, isEOF},
		{"it leaves a message unread and sends", func(t *testing.T, near, remote Conn) {
			send(t, near)
			send(t, remote)
			remote.Close()
		}, true, isEOF},
		{"it sends a byte", func(t *testing.T, _, remote Conn) { sendBytes(t, remote, 1) }, false, malformed},
		{"it sends too many bytes", func(t *testing.T, _, remote Conn) { sendBytes(t, remote, wire.MaxMessage+1) }, false,
			malformed},
		{"it sends twice as many bytes", func(t *testing.T, _, remote Conn) { sendBytes(t, remote, 2*wire.MaxMessage) },
			false,
			malformed},
		{"this side closes", func(_ *testing.T, near, _ Conn) { near.Close() }, false,
			func(err error) bool { return errors.Is(err, net.ErrClosed) }},
		{"it is silent", func(t *testing.T, near, _ Conn) {
			if err := near.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
				t.Fatal(err)
			}
		}, false, func(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }},
	} {
		for name, receive := range map[string]func(Conn) (wire.Message, uint32, error){
			"Receive": func(c Conn) (wire.Message, uint32, error) {
				m, sequence, fds, err := c.Receive()
				if len(fds) > 0 {
					t.Errorf("%s: %d descriptors", c.LocalAddr(), len(fds))
				}
				return m, sequence, err
			},
			"ReceiveBare": Conn.ReceiveBare,
		} {
			near, remote := conns(t)
			c.remote(t, near, remote)
			if c.message {
				m, sequence, err := receive(near)
				if grant, ok := m.(*wire.PeerWritten); err != nil || !ok || grant.Grant != 7 || sequence != 8 {
					t.Errorf("%s, %s: %T %d, %v", name, c.name, m, sequence, err)
				}
			}
			if m, _, err := receive(near); m != nil || !c.is(err) {
				t.Errorf("%s, %s: %T, %v", name, c.name, m, err)
			}
		}
	}
}

func send(t *testing.T, c Conn, fds ...int) {
	t.Helper()
	if err := c.Send(&wire.PeerWritten{Grant: 7}, 8, fds...); err != nil {
		t.Fatal(err)
	}
}

func sendBytes(t *testing.T, c Conn, n int) {
	t.Helper()
	if _, err := c.Write(make([]byte, n)); err != nil {
		t.Fatal(err)
	}
}

func TestReceiveBareRefusesDescriptors(t *testing.T) {
	f := newFile(t)
	near, remote := conns(t)
	send(t, remote, int(f.Fd()))
	for range 2 { // the message stays in the socket
		if m, _, err := near.ReceiveBare(); m != nil || !malformed(err) {
			t.Errorf("%T, %v", m, err)
		}
		if n := f.descriptors(); n != 1 {
			t.Errorf("%d descriptors are open", n)
		}
	}
	m, _, fds, err := near.Receive()
	if m == nil || len(fds) != 1 || err != nil {
		t.Errorf("%T with %d descriptors, %v", m, len(fds), err)
	}
	CloseAll(fds)
	f.wait("ReceiveBare")
	near, remote = conns(t)
	f.sendEmpty(remote)
	if m, _, err := near.ReceiveBare(); m != nil || !malformed(err) {
		t.Errorf("an empty message: %T, %v", m, err)
	}
}

// The caller gets the descriptors of a message that is refused.
func TestReceiveRefusedMessageReturnsDescriptors(t *testing.T) {
	f := newFile(t)
	for _, c := range []struct {
		name string
		send func(remote Conn)
		fds  int
		is   func(error) bool
	}{
		{"an empty message", f.sendEmpty, 1, isEOF},
		{"a byte", func(remote Conn) {
			if _, _, err := remote.WriteMsgUnix(make([]byte, 1), unix.UnixRights(int(f.Fd())), nil); err != nil {
				t.Fatal(err)
			}
		}, 1, malformed},
		{"too many descriptors", func(remote Conn) {
			send(t, remote, slices.Repeat([]int{int(f.Fd())}, wire.MaxDescriptors+1)...)
		}, wire.MaxDescriptors + 1, malformed},
		{"the kernel's limit of descriptors", func(remote Conn) {
			send(t, remote, slices.Repeat([]int{int(f.Fd())}, 253)...)
		}, 253, malformed},
		{"the limit of descriptors", func(remote Conn) {
			send(t, remote, slices.Repeat([]int{int(f.Fd())}, wire.MaxDescriptors)...)
		}, wire.MaxDescriptors, func(err error) bool { return err == nil }},
	} {
		near, remote := conns(t)
		c.send(remote)
		_, _, fds, err := near.Receive()
		if len(fds) != c.fds || !c.is(err) {
			t.Errorf("%s: %d descriptors, %v", c.name, len(fds), err)
		}
		if n := f.descriptors(); n != 1+c.fds {
			t.Errorf("%s: %d descriptors are open, want %d", c.name, n, 1+c.fds)
		}
		CloseAll(fds)
		f.wait(c.name)
	}
}

func TestExchangeReturnsAnswerOrReason(t *testing.T) {
	f := newFile(t)
	busy := func(err error) bool { return errors.Is(err, &wire.Error{Status: wire.StatusBusy}) }
	refusal := wire.NewFailure(wire.Errorf(wire.StatusBusy, "busy"))
	for _, c := range []struct {
		name   string
		remote func(near, remote Conn)
		fds    int
		is     func(error) bool
	}{
		{"an answer", func(_, remote Conn) { send(t, remote, int(f.Fd())) }, 1, nil},
		{"a refusal", func(_, remote Conn) {
			if err := remote.Send(refusal, 1, int(f.Fd())); err != nil {
				t.Fatal(err)
			}
		}, 0, busy},
		{"an answer that is refused", func(_, remote Conn) {
			send(t, remote, slices.Repeat([]int{int(f.Fd())}, wire.MaxDescriptors+1)...)
		}, 0, malformed},
		{"an earlier refusal of a remote side that closed", func(_, remote Conn) {
			if err := remote.Send(refusal, 1); err != nil {
				t.Fatal(err)
			}
			remote.Close()
		}, 0, busy},
		{"a remote side that closed", func(_, remote Conn) { remote.Close() }, 0,
			func(err error) bool { return errors.Is(err, unix.EPIPE) }},
		{"a remote side that reads and closes", func(_, remote Conn) {
			go func() {
				_, _, _, _ = remote.Receive() // the answer is the end
				remote.Close()
			}()
		}, 0, isEOF},
		{"this side is closed", func(near, _ Conn) { near.Close() }, 0,
			func(err error) bool { return errors.Is(err, net.ErrClosed) }},
	} {
		near, remote := conns(t)
		c.remote(near, remote)
		m, fds, err := near.Exchange(&wire.PeerWritten{}, time.Minute)
		if c.is == nil && (m == nil || err != nil) || c.is != nil && (m != nil || !c.is(err)) || len(fds) != c.fds {
			t.Errorf("%s: %T with %d descriptors, %v", c.name, m, len(fds), err)
		}
		CloseAll(fds)
		f.wait(c.name)
	}
	near, remote := conns(t)
	if _, _, err := near.Exchange(&wire.PeerWritten{}, time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a silent remote side: %v", err)
	}
	send(t, near) // the limit was for the exchange alone
	for range 2 {
		if m, _, _, err := remote.Receive(); m == nil || err != nil {
			t.Errorf("%T, %v", m, err)
		}
	}
	if err := near.SetWriteDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
}

func TestDetachLeavesSocketOpen(t *testing.T) {
	near, remote := conns(t)
	fd, err := near.Detach()
	if err != nil {
		t.Fatal(err)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 || fd < 3 {
		t.Errorf("descriptor %d has flags %#x, %v", fd, flags, err)
	}
	if _, err := near.Detach(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a second Detach: %v", err)
	}
	Refuse(fd, wire.Errorf(wire.StatusBusy, "busy"), 9)
	m, sequence, _, err := remote.Receive()
	if failure, ok := m.(*wire.Failure); err != nil || !ok || failure.Status != uint32(wire.StatusBusy) || sequence != 9 {
		t.Errorf("%T %d, %v", m, sequence, err)
	}
	unix.Close(fd)
	if _, _, _, err := remote.Receive(); !isEOF(err) {
		t.Errorf("%v", err)
	}
}

func TestFromFDTakesUnixSocketsOnly(t *testing.T) {
	f := newFile(t)
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := FromFD(fd, "file"); !errors.Is(err, unix.ENOTSOCK) {
		t.Errorf("a file: %v", err)
	}
	f.wait("FromFD")
	before := sockets(t)
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if c, err := FromFD(fd, "TCP"); err == nil || c.UnixConn != nil {
		t.Errorf("a TCP socket: %v", err)
	}
	if after := sockets(t); after != before {
		t.Errorf("%d sockets are open, want %d", after, before)
	}
}

func sockets(t *testing.T) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && len(to) > 6 && to[:7] == "socket:" {
			n++
		}
	}
	return n
}

func TestRightsOfOtherControlDataIsNone(t *testing.T) {
	credentials := unix.UnixCredentials(&unix.Ucred{Pid: 1})
	otherLevel := unix.UnixRights(7)
	otherLevel[8] = unix.SOL_SOCKET + 1 // cmsg_level
	for _, c := range []struct {
		name    string
		control []byte
		want    []int
		fails   bool
	}{
		{"nothing", nil, nil, false},
		{"credentials", credentials, nil, false},
		{"another level", otherLevel, nil, false},
		{"credentials and descriptors", slices.Concat(credentials, unix.UnixRights(7, 8)), []int{7, 8}, false},
		{"a size above the data", slices.Repeat([]byte{0xff}, unix.CmsgLen(0)), nil, true},
	} {
		if got, err := rights(c.control); !slices.Equal(got, c.want) || (err != nil) != c.fails {
			t.Errorf("%s: %v, %v", c.name, got, err)
		}
	}
	message := wire.Encode(&wire.PeerWritten{}, 1)
	for _, flags := range []int{unix.MSG_TRUNC, unix.MSG_CTRUNC} {
		if m, _, fds, err := decode(message, unix.UnixRights(7), flags); m != nil || !slices.Equal(fds, []int{7}) ||
			!malformed(err) {
			t.Errorf("flags %#x: %T, %v, %v", flags, m, fds, err)
		}
	}
	if m, _, _, err := decode(message, slices.Repeat([]byte{0xff}, unix.CmsgLen(0)), 0); m != nil || err == nil {
		t.Errorf("invalid control data: %T, %v", m, err)
	}
}

func TestClosingIsFullAtItsMaximumAndHangsLater(t *testing.T) {
	c := closing{most: 3}
	check := func(name string, wantFull, wantHanging bool) {
		t.Helper()
		if full, hanging := c.state(); full != wantFull || hanging != wantHanging {
			t.Errorf("%s: full %t, hanging %t", name, full, hanging)
		}
	}
	check("none", false, false)
	c.add(2)
	check("below the maximum", false, false)
	c.since = time.Now().Add(-time.Hour)
	c.add(1)
	check("the maximum", true, false)
	c.since = time.Now().Add(-time.Hour)
	check("the maximum for an hour", true, true)
	c.add(1)
	check("more", true, true)
	c.add(-2)
	check("below the maximum again", false, false)
	c.add(5)
	check("above the maximum", true, false)
}

// While too many closes hang, messages of relays are received without descriptors.
func TestReceiveWhileClosesHangTakesNoDescriptors(t *testing.T) {
	near, remote := conns(t)
	f := newFile(t)
	most := Relays.most
	Relays.add(most)
	defer func() { Relays.add(-most) }()
	Relays.mu.Lock()
	Relays.since = time.Now().Add(-time.Hour)
	Relays.mu.Unlock()
	send(t, remote)
	if m, _, fds, err := near.Receive(); m == nil || fds != nil || err != nil {
		t.Errorf("%T with %d descriptors, %v", m, len(fds), err)
	}
	send(t, remote, int(f.Fd()))
	if m, _, fds, err := near.Receive(); m != nil || fds != nil || !malformed(err) {
		t.Errorf("%T with %d descriptors, %v", m, len(fds), err)
	}
	if n := f.descriptors(); n != 1 {
		t.Errorf("%d descriptors are open", n)
	}
}

func TestReceiveWaitsForCloses(t *testing.T) {
	near, remote := conns(t)
	f := newFile(t)
	most := Relays.most
	Relays.add(most)
	send(t, remote, int(f.Fd()))
	time.AfterFunc(10*time.Millisecond, func() { Relays.add(-most) })
	m, _, fds, err := near.Receive()
	if m == nil || len(fds) != 1 || err != nil {
		t.Errorf("%T with %d descriptors, %v", m, len(fds), err)
	}
	CloseAll(fds)
	f.wait("Receive")
}

func TestHangUpClosesSocketAndUnreadDescriptors(t *testing.T) {
	f := newFile(t)
	for _, c := range []struct {
		name   string
		remote func(remote Conn)
	}{
		{"no message", func(Conn) {}},
		{"a message", func(remote Conn) { send(t, remote) }},
		{"a descriptor", func(remote Conn) { send(t, remote, int(f.Fd())) }},
	} {
		s := newSource()
		near, remote := conns(t)
		before := sockets(t)
		c.remote(remote)
		s.HangUp(near)
		s.HangUp(near) // detached: nothing
		if _, _, _, err := remote.Receive(); !isEOF(err) {
			t.Errorf("%s: %v", c.name, err)
		}
		f.wait(c.name)
		testutil.Until(t, "the source is idle", func() bool { return s.behind.Load() == 0 })
		if n := sockets(t); n != before-1 {
			t.Errorf("%s: %d sockets are open, want %d", c.name, n, before-1)
		}
	}
}

func TestClosesOfManyDescriptorsWeighMore(t *testing.T) {
	for n, want := range map[int]int{1: 1, 63: 1, 64: 2, 127: 2, 128: 3, 253: 4} {
		if got := weightOf(n); got != want {
			t.Errorf("%d descriptors weigh %d, want %d", n, got, want)
		}
	}
}

func TestCloseAllCountsUntilClosed(t *testing.T) {
	s, port, f := newSource(), &closing{most: 1}, newFile(t)
	s.closeAll(nil, port)
	if s.count != 0 || port.count != 0 {
		t.Errorf("no descriptors: %d, %d", s.count, port.count)
	}
	var fds []int
	for range 3 {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	s.closeAll(fds, port)
	f.wait("closeAll")
	testutil.Until(t, "nothing is counted", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		port.mu.Lock()
		defer port.mu.Unlock()
		return s.count == 0 && port.count == 0
	})
}
