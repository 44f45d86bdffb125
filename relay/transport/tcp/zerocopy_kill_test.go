package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
)

// zerocopyKilled sends to an address by MSG_ZEROCOPY until the socket accepts no more bytes,
// reports this on its standard output, and waits for the end of its standard input.
func zerocopyKilled(address string) error {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	z, err := newZerocopyConn(c, zerocopyAlways, func([]*write) {})
	if err != nil {
		return err
	}
	memory, err := unix.Mmap(-1, 0, 64<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANONYMOUS|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	for at := 0; at < len(memory); at += unix.Getpagesize() {
		memory[at] = 1
	}
	if err := z.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err = z.send(&outgoingPiece{write: &write{}, data: memory})
	if z.open.Load() == 0 {
		return err
	}
	if _, err := os.Stdout.WriteString("x"); err != nil {
		return err
	}
	_, err = os.Stdin.Read(make([]byte, 1)) // until the end of the test, if it does not kill this process
	return err
}

// TestKernelResetsZerocopyStreamOfAKilledProcess demands that the kernel sends no more pages of a
// killed relay: clients have mapped the pages, too, and can write there.
func TestKernelResetsZerocopyStreamOfAKilledProcess(t *testing.T) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	sender := exec.Command(os.Args[0])
	sender.Env = append(os.Environ(), zerocopyVariable+"=killed/"+l.Addr().String())
	sender.Stderr = os.Stderr
	out, err := sender.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sender.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := sender.Start(); err != nil {
		t.Fatal(err)
	}
	defer sender.Process.Kill()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatalf("the sender did not fill the socket: %v", err)
	}
	if err := sender.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = sender.Wait()
	n, err := io.Copy(io.Discard, c)
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the stream ended after %d bytes with %v, want a reset", n, err)
	}
}
