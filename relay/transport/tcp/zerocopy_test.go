package tcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/wire"
)

// BenchmarkZerocopy measures the processor time for each byte that a process sends over a veth pair
// between two network namespaces, with and without MSG_ZEROCOPY, and the part of the sends that the
// kernel copied (SO_EE_CODE_ZEROCOPY_COPIED). A piece is reused when the kernel has reported the
// end of its send.
func BenchmarkZerocopy(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root: it makes network namespaces")
	}
	must := func(words ...string) {
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			b.Fatalf("%v: %v: %s", words, err, out)
		}
	}
	names := [2]string{fmt.Sprintf("peerlane-%d-a", os.Getpid()), fmt.Sprintf("peerlane-%d-b", os.Getpid())}
	for _, name := range names {
		must("ip", "netns", "add", name)
		b.Cleanup(func() { must("ip", "netns", "del", name) })
	}
	must("ip", "link", "add", "plzero0", "netns", names[0], "type", "veth", "peer", "name", "plzero1", "netns", names[1])
	for i, name := range names {
		must("ip", "-n", name, "address", "add", fmt.Sprintf("10.212.0.%d/24", i+1), "dev", fmt.Sprintf("plzero%d", i))
		must("ip", "-n", name, "link", "set", fmt.Sprintf("plzero%d", i), "up")
	}
	// Plain sockets, and the transport with writes of a number of KiB.
	for _, how := range []string{
		"socket/copy", "socket/zerocopy", "transport/copy/512", "transport/zerocopy/512", "transport/copy/64",
		"transport/zerocopy/64",
		"transport/copy/128", "transport/zerocopy/128",
	} {
		b.Run(how, func(b *testing.B) {
			var total zerocopyResult
			for b.Loop() {
				sink := zerocopyProcess(names[1], "sink/"+how)
				out, err := sink.StdoutPipe()
				if err != nil {
					b.Fatal(err)
				}
				if err := sink.Start(); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
					b.Fatal(err)
				}
				text, err := zerocopyProcess(names[0], how).Output()
				if err := errors.Join(err, sink.Wait()); err != nil {
					b.Fatal(err)
				}
				var r zerocopyResult
				if err := json.Unmarshal(text, &r); err != nil {
					b.Fatal(err)
				}
				total.Bytes, total.Nanoseconds = total.Bytes+r.Bytes, total.Nanoseconds+r.Nanoseconds
				total.Sends, total.Copied = total.Sends+r.Sends, total.Copied+r.Copied
			}
			b.ReportMetric(float64(total.Nanoseconds)*1024/float64(total.Bytes), "processor-ns/KiB")
			if total.Sends > 0 && strings.Contains(how, "zerocopy") {
				b.ReportMetric(float64(total.Copied)/float64(total.Sends), "copied")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

const zerocopyVariable = "PEERLANE_TEST_ZEROCOPY"

// zerocopyResult is the result of a sending process.
type zerocopyResult struct{ Bytes, Nanoseconds, Sends, Copied int64 }

func zerocopyProcess(network, how string) *exec.Cmd {
	c := exec.Command("ip", "netns", "exec", network, os.Args[0])
	c.Env = append(os.Environ(), zerocopyVariable+"="+how)
	c.Stderr = os.Stderr
	return c
}

func TestMain(m *testing.M) {
	var err error
	words := strings.Split(os.Getenv(zerocopyVariable), "/")
	switch {
	case words[0] == "":
		os.Exit(m.Run())
	case words[0] == "sink" && words[1] == "transport":
		err = zerocopyTransportSink(words[3])
	case words[0] == "sink":
		err = zerocopySink()
	case words[0] == "killed":
		err = zerocopyKilled(words[1])
	case words[0] == "transport":
		err = zerocopyTransport(words[1] == "zerocopy", words[2])
	default:
		err = zerocopySend(words[1] == "zerocopy")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const zerocopyAddress = "10.212.0.2:7000"

func zerocopySink() error {
	l, err := net.Listen("tcp", zerocopyAddress)
	if err != nil {
		return err
	}
	fmt.Print("x")
	c, err := l.Accept()
	if err != nil {
		return err
	}
	// Each word is its number, modulo the number of a piece's words.
	b := make([]byte, zerocopyPiece)
	for seen := uint64(0); ; seen++ {
		if _, err := io.ReadFull(c, b); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		for _, at := range []int{0, zerocopyPiece/2 - 8, zerocopyPiece - 8} {
			if got := *(*uint64)(unsafe.Pointer(&b[at])); got != seen {
				return fmt.Errorf("piece %d has the number %d at byte %d", seen, got, at)
			}
		}
	}
}

const (
	zerocopyPiece  = 256 << 10
	zerocopyPieces = 16 // in use at once
	zerocopyTotal  = 1 << 30
)

func zerocopySend(zerocopy bool) error {
	c, err := net.Dial("tcp", zerocopyAddress)
	if err != nil {
		return err
	}
	f, err := c.(*net.TCPConn).File() // blocks; the poller of Go does not know the file
	if err != nil {
		return err
	}
	c.Close()
	fd, flags := int(f.Fd()), unix.MSG_NOSIGNAL
	if zerocopy {
		flags |= unix.MSG_ZEROCOPY
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1); err != nil {
			return err
		}
	}
	memory, err := unix.Mmap(-1, 0, zerocopyPieces*zerocopyPiece, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANONYMOUS|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	_ = unix.Madvise(memory, unix.MADV_HUGEPAGE)
	clear(memory)
	var r zerocopyResult
	begun := processorTime()
	var ends [zerocopyPieces]int64 // sends until the end of the piece
	var known int64                // sends that have ended
	for piece := int64(0); piece*zerocopyPiece < zerocopyTotal; piece++ {
		b := memory[piece%zerocopyPieces*zerocopyPiece:][:zerocopyPiece]
		for zerocopy && known < ends[piece%zerocopyPieces] {
			n, copied, err := zerocopyEnds(fd)
			if err != nil {
				return err
			}
			known, r.Copied = known+n, r.Copied+copied
		}
		for _, at := range []int{0, zerocopyPiece/2 - 8, zerocopyPiece - 8} {
			*(*uint64)(unsafe.Pointer(&b[at])) = uint64(piece)
		}
		for len(b) > 0 {
			n, err := unix.SendmsgN(fd, b, nil, nil, flags)
			if err == unix.ENOBUFS {
				e, copied, err := zerocopyEnds(fd)
				if err != nil {
					return err
				}
				known, r.Copied = known+e, r.Copied+copied
				continue
			}
			if err != nil {
				return err
			}
			r.Sends++
			b = b[n:]
		}
		ends[piece%zerocopyPieces] = r.Sends
	}
	for zerocopy && known < r.Sends {
		n, copied, err := zerocopyEnds(fd)
		if err != nil {
			return err
		}
		known, r.Copied = known+n, r.Copied+copied
	}
	r.Bytes, r.Nanoseconds = zerocopyTotal, int64(processorTime()-begun)
	text, err := json.Marshal(r)
	fmt.Println(string(text))
	return errors.Join(err, f.Close())
}

// zerocopyEnds waits for notifications, and returns the number of ended sends, and of ended sends
// that the kernel copied.
func zerocopyEnds(fd int) (ended, copied int64, err error) {
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, 10_000); err != nil && err != unix.EINTR {
		return 0, 0, err
	}
	oob := make([]byte, 128)
	for {
		_, n, _, _, err := unix.Recvmsg(fd, nil, oob, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err == unix.EAGAIN {
			return ended, copied, nil
		}
		if err != nil {
			return ended, copied, err
		}
		messages, err := unix.ParseSocketControlMessage(oob[:n])
		if err != nil {
			return ended, copied, err
		}
		for _, m := range messages {
			e := (*unix.SockExtendedErr)(unsafe.Pointer(&m.Data[0]))
			if e.Origin != unix.SO_EE_ORIGIN_ZEROCOPY {
				return ended, copied, errors.New("a message of the error queue is no notification")
			}
			sends := int64(e.Data-e.Info) + 1
			ended += sends
			if e.Code == unix.SO_EE_CODE_ZEROCOPY_COPIED {
				copied += sends
			}
		}
	}
}

// zerocopyPeer runs a Peer of a process, and calls begin on its loop.
func zerocopyPeer(s *Streams, config Config, begin func(*poll.Loop, *Peer)) error {
	loop, err := poll.New()
	if err != nil {
		return err
	}
	down := make(chan error, 1)
	config.Name, config.Down = "other process", func(err error) { down <- err; loop.Stop() }
	loop.Do(func() { begin(loop, New(loop, s, config)) })
	loop.Run()
	return <-down
}

// zerocopySlot parses the size of a write, and returns the number of writes of zerocopyTotal.
func zerocopySlot(kib string) (bytes, writes int, err error) {
	n, err := strconv.Atoi(kib)
	if err != nil {
		return 0, 0, err
	}
	return n << 10, zerocopyTotal / (n << 10), nil
}

// zerocopyTransportSink grants and receives the writes, and ends at the end of the peer.
func zerocopyTransportSink(kib string) error {
	slot, writes, err := zerocopySlot(kib)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", zerocopyAddress)
	if err != nil {
		return err
	}
	fmt.Print("x")
	gathering := &Gathering{Time: waitTime}
	var s *Streams
	for s == nil {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		if s, err = gathering.Add(c, "sender"); err != nil {
			return err
		}
	}
	memory := make([]byte, zerocopyPieces*slot)
	err = zerocopyPeer(s, Config{Accept: func(c *Channel, _ wire.Message, _ uint32) {
		in := c.Receive(func(uint64, uint64) {}, func() {})
		in.add(1, memory)
		for n := range writes {
			if err := in.Grant(uint64(n+1), 1, uint64(n%zerocopyPieces*slot), uint64(slot)); err != nil {
				c.Peer().End(err)
			}
		}
		c.Handle(func(wire.Message, uint32, []int) {}, func(error) {})
		c.Send(&wire.Done{}, 0)
	}}, func(*poll.Loop, *Peer) {})
	if wire.StatusOf(err) == wire.StatusPeerRelayDied {
		return nil // the sender's Close
	}
	return err
}

// zerocopyTransport sends zerocopyTotal bytes out of slots in huge pages.
func zerocopyTransport(zerocopy bool, kib string) error {
	slot, writes, err := zerocopySlot(kib)
	if err != nil {
		return err
	}
	memory, err := device.CreateHuge("zerocopy", uint64(zerocopyPieces*slot))
	if err != nil {
		return err
	}
	config := Config{zerocopy: zerocopyNever}
	if zerocopy {
		config.zerocopy = zerocopyAlways
	}
	s, err := Dial(context.Background(), time.Now().Add(waitTime), func(context.Context) (net.Conn, error) {
		return net.Dial("tcp", zerocopyAddress)
	}, 4, 0)
	if err != nil {
		return err
	}
	var r zerocopyResult
	var begun time.Duration
	failed := zerocopyPeer(s, config, func(_ *poll.Loop, p *Peer) {
		var c *Channel
		posted, ended := 0, 0
		var post func(at int)
		post = func(at int) {
			if posted++; posted > writes {
				return
			}
			c.Link().Write(transport.Target{Region: 1, Offset: uint64((posted - 1) % zerocopyPieces * slot)},
				transport.Source{Place: memory.At(uint64(at * slot))}, uint64(slot), uint64(posted), func(err error) {
					if err != nil {
						return // the Peer's end reports
					}
					if ended++; ended < writes {
						post(at)
						return
					}
					f := p.Figures().Zerocopy
					r = zerocopyResult{Bytes: int64(writes * slot), Nanoseconds: int64(processorTime() - begun),
						Sends: int64(f.sends), Copied: int64(f.copied)}
					p.Close()
				})
		}
		var err error
		if c, err = p.Open(&wire.Done{}, 0, func(wire.Message, uint32, []int) {
			begun = processorTime()
			for at := range zerocopyPieces {
				post(at)
			}
		}, func(error) {}); err != nil {
			p.End(err)
		}
	})
	if r.Bytes == 0 {
		return failed
	}
	text, err := json.Marshal(r)
	fmt.Println(string(text))
	return errors.Join(err, memory.Close())
}

func processorTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
