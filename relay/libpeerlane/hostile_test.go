package libpeerlane_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// fake is a listener in place of a relay, for a single client.
type fake struct {
	*testing.T
	packet.Conn
	ring *ring.Relay
	bell int // that the client would ring
	pipe int // that wakes the client
}

// pretend serves a client by the function, and returns the socket.
func pretend(t *testing.T, serve func(f *fake)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer c.Close()
		if err := c.SetDeadline(testutil.Deadline()); err != nil {
			t.Error(err)
		}
		serve(&fake{T: t, Conn: packet.Conn{UnixConn: c}})
	}()
	t.Cleanup(func() {
		l.Close()
		<-served
	})
	return path
}

// hear reads the next message, unless the session ends. A closing client waits until the relay
// hangs up.
func (f *fake) hear() (wire.Message, uint32) {
	m, sequence, fds, err := f.Receive()
	packet.CloseAll(fds)
	if _, over := m.(*wire.Goodbye); err != nil || over {
		return nil, 0
	}
	return m, sequence
}

// raw sends bytes.
func (f *fake) raw(b []byte) {
	if _, err := f.Write(b); err != nil {
		f.Logf("the client has left: %v", err)
	}
}

// welcome reads a hello and answers as a relay does, with changes.
func (f *fake) welcome(change func(w *wire.Welcome, fds *[]int)) {
	f.hear()
	f.greet(change)
}

// greet is welcome after the hello.
func (f *fake) greet(change func(w *wire.Welcome, fds *[]int)) {
	var err error
	if f.ring, err = ring.NewRelay(); err != nil {
		f.Error(err)
		return
	}
	if f.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		f.Error(err)
		return
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		f.Error(err)
		return
	}
	f.pipe = pipe[1]
	submit, complete := f.ring.FDs()
	w, fds := &wire.Welcome{Version: wire.NewestVersion, Session: 1}, []int{submit, complete, f.bell, pipe[0]}
	if change != nil {
		change(w, &fds)
	}
	if err := f.Send(w, 1, fds...); err != nil {
		f.Error(err)
	}
	unix.Close(pipe[0])
}

// free closes the objects of welcome.
func (f *fake) free() {
	unix.Close(f.bell)
	unix.Close(f.pipe)
	if err := f.ring.Close(); err != nil {
		f.Error(err)
	}
}

// call is a line of tests/calls.c.
type call struct {
	name   string
	status wire.Status
	words  string
}

// timedOut is PEERLANE_STATUS_TIMED_OUT, a status of the library's own.
const timedOut = 1001

func (p *process) calls(want ...call) {
	p.Helper()
	for _, c := range want {
		line := p.line()
		name, rest, _ := strings.Cut(line, " ")
		number, sentence, _ := strings.Cut(rest, " ")
		if status, _ := strconv.Atoi(number); name != c.name || wire.Status(status) != c.status ||
			!strings.Contains(sentence, c.words) {
			p.Errorf("the program says %q, not %s %d %q", line, c.name, c.status, c.words)
		}
	}
}

// kindsForHostility: the address sanitizer detects a relay's damage to memory best.
var kindsForHostility = []kind{plain, address}

func hostile(t *testing.T, mode string, serve func(f *fake), then func(p *process)) {
	t.Helper()
	for _, k := range kindsForHostility {
		if why := lacks(t, k); why != "" {
			t.Logf("without -fsanitize=%s: %s", k, why)
			continue
		}
		socket := pretend(t, serve)
		p := start(t, program(t, "tests", "calls", k), socket, devices[0].UUID, mode)
		then(p)
		p.end()
	}
}

func TestDialWithoutRelayNamesTheCause(t *testing.T) {
	sealed := func(name string, size int64, seals int) int {
		fd, err := unix.MemfdCreate(name, unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, size)
		}
		if err == nil && seals != 0 {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	small := sealed("small", wire.SubmitBytes-4096, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	unsealed := sealed("unsealed", wire.SubmitBytes, 0)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	answer := func(b []byte) func(*fake) {
		return func(f *fake) {
			f.hear()
			f.raw(b)
			f.hear()
		}
	}
	welcome := func(change func(w *wire.Welcome, fds *[]int)) func(*fake) {
		return func(f *fake) {
			f.welcome(change)
			f.hear()
			f.free()
		}
	}
	for name, c := range map[string]struct {
		serve func(*fake)
		want  call
	}{
		"a refusal": {answer(wire.Encode(wire.NewFailure(wire.Errorf(wire.StatusLimit, "no room \x1b[31m here")), 1)),
			call{"dial", wire.StatusLimit, ": no room ?[31m here"}},
		"a version that it does not speak": {func(f *fake) {
			_, err := wire.Negotiate("client", wire.NewestVersion+1, wire.NewestVersion+2)
			f.hear()
			f.raw(wire.Encode(wire.NewFailure(err), 1))
			f.hear()
		}, call{"dial", wire.StatusVersion, "install the same release of Peerlane in the image and on the host"}},
		"a version of its own": {welcome(func(w *wire.Welcome, _ *[]int) { w.Version = 99 }),
			call{"dial", wire.StatusVersion,
				fmt.Sprintf("speaks version 99 of Peerlane's protocol, this client %d to %d; install the same release",
					wire.OldestVersion, wire.NewestVersion)}},
		"version 0": {welcome(func(w *wire.Welcome, _ *[]int) { w.Version = 0 }),
			call{"dial", wire.StatusVersion, "version 0"}},
		"another message": {answer(wire.Encode(&wire.Done{}, 1)), call{"dial", wire.StatusMalformed, "no welcome"}},
		"a byte":          {answer([]byte{1}), call{"dial", wire.StatusMalformed, "no welcome"}},
		"a short welcome": {answer(wire.Encode(&wire.Welcome{Version: 1}, 1)[:16]),
			call{"dial", wire.StatusMalformed, "no welcome"}},
		"far too much": {answer(bytes.Repeat([]byte{2}, 5000)), call{"dial", wire.StatusMalformed,
			"more than 1024 bytes"}},
		"no descriptors": {answer(wire.Encode(&wire.Welcome{Version: 1}, 1)), call{"dial", wire.StatusMalformed,
			"0 descriptors"}},
		"three descriptors": {welcome(func(_ *wire.Welcome, fds *[]int) { *fds = (*fds)[:3] }),
			call{"dial", wire.StatusMalformed, "3 descriptors"}},
		"nine descriptors": {welcome(func(_ *wire.Welcome, fds *[]int) {
			*fds = append(*fds, *fds...)
			*fds = append(*fds, (*fds)[0])
		}), call{"dial", wire.StatusMalformed, "descriptors"}},
		"memory that is small": {welcome(func(_ *wire.Welcome, fds *[]int) { (*fds)[0] = small }),
			call{"dial", wire.StatusMalformed, "shared memory has"}},
		"memory that can shrink": {welcome(func(_ *wire.Welcome, fds *[]int) { (*fds)[0] = unsealed }),
			call{"dial", wire.StatusMalformed, "not sealed"}},
		"no memory": {welcome(func(_ *wire.Welcome, fds *[]int) { (*fds)[1] = int(null.Fd()) }),
			call{"dial", wire.StatusMalformed, "shared memory has 0 bytes"}},
		"a pipe for the eventfd": {welcome(func(_ *wire.Welcome, fds *[]int) { (*fds)[2] = (*fds)[3] }),
			call{"dial", wire.StatusMalformed, "not an eventfd and a pipe"}},
		"an eventfd for the pipe": {welcome(func(_ *wire.Welcome, fds *[]int) { (*fds)[3] = (*fds)[2] }),
			call{"dial", wire.StatusMalformed, "not an eventfd and a pipe"}},
		"an end":             {func(f *fake) {}, call{"dial", wire.StatusRelayDied, ""}},
		"an end after hello": {func(f *fake) { f.hear() }, call{"dial", wire.StatusRelayDied, "without a word"}},
	} {
		t.Run(name, func(t *testing.T) {
			hostile(t, "requests", c.serve, func(p *process) { p.calls(c.want) })
		})
	}
}

// After any invalid answer the session continues, or has ended with a message.
func TestInvalidAnswersEndSession(t *testing.T) {
	names := []string{"statistics", "lanes", "nic", "export", "host", "listen", "connect", "connect"}
	all := func(status wire.Status, words string) (list []call) {
		for _, n := range names {
			list = append(list, call{n, status, words})
		}
		return list
	}
	each := func(answer func(m wire.Message, sequence uint32) []byte) func(*fake) {
		return func(f *fake) {
			f.welcome(nil)
			defer f.free()
			for {
				m, sequence := f.hear()
				if _, bye := m.(*wire.Goodbye); m == nil || bye {
					return
				}
				f.raw(answer(m, sequence))
			}
		}
	}
	for name, c := range map[string]struct {
		serve func(*fake)
		want  []call
	}{
		"of another type": {each(func(_ wire.Message, n uint32) []byte {
			return wire.Encode(&wire.Done{}, n)
		}), all(wire.StatusMalformed, "a message of type 7")},
		"a failure without status": {each(func(_ wire.Message, n uint32) []byte { return wire.Encode(&wire.Failure{}, n) }),
			all(wire.StatusInternal, "error of its own")},
		"a failure with a status of ours": {each(func(_ wire.Message, n uint32) []byte {
			return wire.Encode(&wire.Failure{Status: timedOut, Reason: [488]byte{'x'}}, n)
		}), all(wire.StatusInternal, "x")},
		"numbers that are none": {each(func(m wire.Message, n uint32) []byte {
			switch m.(type) {
			case *wire.Statistics:
				return wire.Encode(&wire.StatisticsReply{Servers: 1 << 30}, n)
			case *wire.Lanes:
				return wire.Encode(&wire.LanesReply{Lanes: 33}, n)
			case *wire.Export:
				return wire.Encode(&wire.Exported{}, n)
			case *wire.HostMemory:
				return wire.Encode(&wire.HostMemoryMade{Bytes: 4096}, n)
			case *wire.Listen:
				return wire.Encode(&wire.Listening{}, n)
			}
			return wire.Encode(&wire.Connected{}, n)
		}), all(wire.StatusMalformed, "")},
		"one number twice": {each(func(m wire.Message, n uint32) []byte {
			switch m.(type) {
			case *wire.Statistics:
				return wire.Encode(&wire.StatisticsReply{}, n)
			case *wire.Lanes:
				return wire.Encode(&wire.LanesReply{}, n)
			case *wire.LaneNIC:
				return wire.Encode(&wire.LaneNICReply{Guid: 1, Name: [64]byte(bytes.Repeat([]byte{0xff}, 64))}, n)
			case *wire.Export:
				return wire.Encode(&wire.Exported{Memory: 1}, n)
			case *wire.HostMemory:
				return wire.Encode(&wire.HostMemoryMade{Bytes: 4096, Memory: 2}, n)
			case *wire.Listen:
				return wire.Encode(&wire.Listening{Listener: 1}, n)
			}
			c := &wire.Connected{Connection: 5, Route: 77}
			copy(c.Peer[:], bytes.Repeat([]byte{0xff}, len(c.Peer))) // without a zero byte at the end, as the NIC's name
			return wire.Encode(c, n)
		}), append(append(append(allOf(names[:4]), call{"host", wire.StatusMalformed, "4096 bytes and no descriptor"}),
			allOf(names[5:7])...), call{"connect", wire.StatusMalformed, "to a second connection"})},
		"those of an older relay": {func(f *fake) {
			f.welcome(func(w *wire.Welcome, _ *[]int) { w.Version = wire.LaneNICVersion - 1 })
			defer f.free()
			for {
				m, n := f.hear()
				if m == nil {
					return
				}
				if _, is := m.(*wire.LaneNIC); is {
					f.Error("it is asked for what it does not know")
				}
				f.raw(wire.Encode(wire.NewFailure(wire.Errorf(wire.StatusLimit, "enough")), n))
			}
		}, append([]call{{"statistics", wire.StatusLimit, "enough"}, {"lanes", wire.StatusLimit, "enough"},
			{"nic", wire.StatusVersion, "install the same release"}}, all(wire.StatusLimit, "enough")[3:]...)},
		"garbage": {each(func(wire.Message, uint32) []byte {
			return bytes.Repeat([]byte{0xa5}, 333)
		}), all(wire.StatusMalformed, "cannot be understood")},
		"a byte": {each(func(wire.Message, uint32) []byte { return []byte{1} }),
			all(wire.StatusMalformed, "a message of 1 bytes")},
		"far too much": {each(func(wire.Message, uint32) []byte { return make([]byte, 3000) }),
			all(wire.StatusMalformed, "more than 1024 bytes")},
		"a relay's own end": {each(func(wire.Message, uint32) []byte {
			return wire.Encode(wire.NewFailure(wire.Errorf(wire.StatusCUDA, "the GPU fell off")), 0)
		}), all(wire.StatusCUDA, "the GPU fell off")},
		"the end of a relay": {func(f *fake) {
			f.welcome(nil)
			f.free()
		}, all(wire.StatusRelayDied, "its successor is there within seconds")},
		"events first": {each(func(m wire.Message, n uint32) []byte {
			return wire.Encode(wire.NewFailure(wire.Errorf(wire.StatusLimit, "enough")), n)
		}), all(wire.StatusLimit, "enough")},
	} {
		t.Run(name, func(t *testing.T) {
			serve := c.serve
			if name == "events first" {
				serve = func(f *fake) {
					f.welcome(nil)
					defer f.free()
					for {
						m, sequence := f.hear()
						if _, bye := m.(*wire.Goodbye); m == nil || bye {
							return
						}
						for i := range uint32(100) { // of unknown connections
							f.raw(wire.Encode(&wire.ConnectionDown{Connection: i}, 0))
						}
						f.raw(wire.Encode(&wire.Exported{Memory: 9}, sequence+1000)) // and answers to nothing
						f.raw(wire.Encode(wire.NewFailure(wire.Errorf(wire.StatusLimit, "enough")), sequence))
					}
				}
			}
			hostile(t, "requests", serve, func(p *process) {
				p.calls(append([]call{{"dial", wire.StatusOK, ""}}, c.want...)...)
				p.demand("closed")
			})
		})
	}
}

// Invalid host memory, and the library's answer. An answer to a question that will come, and the
// relay's end: the object of the answer belongs to the session, although the request fails.
func TestAnswerBeforeRequestIsHandled(t *testing.T) {
	listened, gone := make(chan bool), make(chan bool)
	hostile(t, "early", func(f *fake) {
		defer close(gone)
		f.welcome(nil)
		defer f.free()
		_, n := f.hear()
		f.raw(wire.Encode(&wire.Listening{Listener: 1}, n))
		<-listened
		f.raw(wire.Encode(&wire.Connected{Connection: 5, Route: wire.RouteDirect}, n+1))
		f.Close()
	}, func(p *process) {
		p.calls(call{"dial", wire.StatusOK, ""}, call{"listen", wire.StatusOK, ""})
		close(listened)
		<-gone
		listened, gone = make(chan bool), make(chan bool)
		p.say("go on")
		p.calls(call{"connect", wire.StatusRelayDied, ""}, call{"connect", wire.StatusRelayDied, ""})
		p.demand("closed")
	})
}

func TestInvalidHostMemoryAnswersAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		bytes uint64 // of the answer
		size  int64  // of the memory
		seals int
		want  call
		older bool // the relay speaks the version before wire.PopulateVersion
		full  bool // the relay refuses the memory once the client has allocated the pages
	}{
		"good": {bytes: 8192, size: 8192, seals: unix.F_SEAL_SHRINK | unix.F_SEAL_GROW,
			want: call{"host", wire.StatusOK, ""}},
		"of an older relay": {bytes: 8192, size: 8192, seals: unix.F_SEAL_SHRINK | unix.F_SEAL_GROW,
			want: call{"host", wire.StatusOK, ""}, older: true},
		"that cannot be pinned": {bytes: 8192, size: 8192, seals: unix.F_SEAL_SHRINK | unix.F_SEAL_GROW,
			want: call{"host", wire.StatusCUDA, "no pin"}, full: true},
		"less than was asked for": {bytes: 4095, size: 4095, seals: unix.F_SEAL_SHRINK,
			want: call{"host", wire.StatusMalformed, "4095 bytes"}},
		"less than it says": {bytes: 8192, size: 4096, seals: unix.F_SEAL_SHRINK,
			want: call{"host", wire.StatusMalformed, "has 4096 bytes, not 8192"}},
		"more than an address": {bytes: 1 << 63, size: 4096, seals: unix.F_SEAL_SHRINK,
			want: call{"host", wire.StatusMalformed, "has 4096 bytes"}},
		"that can shrink": {bytes: 8192, size: 8192, seals: 0, want: call{"host", wire.StatusMalformed, "not sealed"}},
	} {
		t.Run(name, func(t *testing.T) {
			hostile(t, "requests", func(f *fake) {
				f.welcome(func(w *wire.Welcome, _ *[]int) {
					if c.older {
						w.Version = wire.PopulateVersion - 1
					}
				})
				defer f.free()
				returned, populated, kept := false, false, -1
				for {
					m, sequence := f.hear()
					if _, bye := m.(*wire.Goodbye); m == nil || bye {
						break
					}
					if u, ok := m.(*wire.Unexport); ok && u.Memory == 5 {
						returned = true
						continue
					}
					if p, ok := m.(*wire.HostMemoryPopulated); ok && p.Memory == 5 {
						populated = true
						var is unix.Stat_t
						if err := unix.Fstat(kept, &is); err != nil || is.Blocks*512 != c.size {
							f.Errorf("the client says that it has allocated %d bytes, and has %d, %v", c.size, is.Blocks*512, err)
						}
						var answer wire.Message = &wire.Done{}
						if c.full {
							answer = wire.NewFailure(wire.Errorf(wire.StatusCUDA, "no pin"))
						}
						f.raw(wire.Encode(answer, sequence))
						continue
					}
					if h, ok := m.(*wire.HostMemory); ok && (h.Populates == 1) == c.older {
						f.Errorf("populates is %d", h.Populates)
					} else if !ok {
						f.raw(wire.Encode(wire.NewFailure(wire.Errorf(wire.StatusLimit, "enough")), sequence))
						continue
					}
					fd, err := unix.MemfdCreate("host", unix.MFD_ALLOW_SEALING)
					if err == nil {
						err = unix.Ftruncate(fd, c.size)
					}
					if err == nil {
						_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, c.seals)
					}
					if err == nil {
						err = f.Send(&wire.HostMemoryMade{Bytes: c.bytes, Memory: 5}, sequence, fd)
					}
					if err != nil {
						f.Error(err)
					}
					kept = fd
				}
				unix.Close(kept)
				if pinned := c.full || c.want.status == wire.StatusOK && !c.older; populated != pinned {
					f.Errorf("the relay hears that the client has allocated the pages: %v", populated)
				}
				if mapped := c.want.status == wire.StatusOK; returned == mapped {
					f.Errorf("the relay hears that the memory is not wanted: %v", returned)
				}
			}, func(p *process) {
				refused := func(name string) call { return call{name, wire.StatusLimit, "enough"} }
				p.calls(call{"dial", wire.StatusOK, ""}, refused("statistics"), refused("lanes"), refused("nic"), refused("export"),
					c.want, refused("listen"), refused("connect"), refused("connect"))
				p.demand("closed")
			})
		})
	}
}

func allOf(names []string) (list []call) {
	for _, n := range names {
		list = append(list, call{n, wire.StatusOK, ""})
	}
	return list
}

// The pages that a relay writes can say anything.
func TestBrokenCompletionRingEndsSession(t *testing.T) {
	for name, c := range map[string]struct {
		mode  string
		spoil func(f *fake, d []wire.Descriptor)
		want  []call
	}{
		"good": {"good", func(f *fake, d []wire.Descriptor) {
			f.ring.Complete(wire.Completion{Cookie: d[0].Cookie, Length: 100})
		}, []call{{"wait", wire.StatusOK, ""}, {"poll", wire.StatusOK, ""}, {"send", wire.StatusOK, ""}}},
		"a cookie that is none": broken(wire.Completion{Cookie: 1 << 60}),
		"cookie 0":              broken(wire.Completion{}),
		"a cookie of later":     broken(wire.Completion{Cookie: 3 + 1<<12}),
		"more bytes than asked": {"bad", func(f *fake, d []wire.Descriptor) {
			f.ring.Complete(wire.Completion{Cookie: d[0].Cookie, Length: 101})
		}, allBroken},
		"one operation twice": {"bad", func(f *fake, d []wire.Descriptor) {
			f.ring.Complete(wire.Completion{Cookie: d[1].Cookie, Length: 1})
			f.ring.Complete(wire.Completion{Cookie: d[1].Cookie, Length: 1})
		}, allBroken},
		"more completions than entries": {"bad", func(f *fake, d []wire.Descriptor) {
			for range wire.RingEntries + 1 {
				f.ring.Complete(wire.Completion{Cookie: d[0].Cookie})
			}
		}, allBroken},
	} {
		t.Run(name, func(t *testing.T) {
			spoiled := make(chan struct{}, 1) // a value per build of the program
			hostile(t, c.mode, func(f *fake) {
				f.welcome(nil)
				defer f.free()
				var posted []wire.Descriptor
				for end := testutil.Begin(); len(posted) < 3 && !end.Over(); {
					d, ok, err := f.ring.Take()
					if err != nil {
						f.Error(err)
						return
					}
					if ok {
						posted = append(posted, d)
					} else {
						time.Sleep(time.Millisecond)
					}
				}
				c.spoil(f, posted)
				spoiled <- struct{}{}
				_, _ = unix.Write(f.pipe, []byte{1})
				for m, _ := f.hear(); m != nil; m, _ = f.hear() {
				}
			}, func(p *process) {
				p.calls(call{"dial", wire.StatusOK, ""})
				p.demand("posted")
				<-spoiled // the whole ring: the program would accept a completion of a half
				p.say("go on")
				p.calls(c.want...)
				p.demand("closed")
			})
		})
	}
}

var allBroken = []call{
	{"wait", wire.StatusBadRing, "the relay's ring is broken"},
	{"poll", wire.StatusBadRing, "broken"},
	{"send", wire.StatusBadRing, "broken"},
}

func broken(c wire.Completion) struct {
	mode  string
	spoil func(f *fake, d []wire.Descriptor)
	want  []call
} {
	return struct {
		mode  string
		spoil func(f *fake, d []wire.Descriptor)
		want  []call
	}{"bad", func(f *fake, _ []wire.Descriptor) { f.ring.Complete(c) }, allBroken}
}
