package relay_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/packet/packettest"
	"github.com/peerlane/peerlane/relay/wire"
)

// Environment of a flooder.
const (
	floodSocket = "PEERLANE_TEST_SOCKET"
	floodUID    = "PEERLANE_TEST_UID"
)

// playFlooder floods a socket as a different user, until standard input ends. The process writes to
// descriptor 3 when the first connection is open.
func playFlooder() error {
	socket := os.Getenv(floodSocket)
	// The path is short, and needs no rights on the directories above.
	if err := os.Chdir(filepath.Dir(socket)); err != nil {
		return err
	}
	uid, err := strconv.Atoi(os.Getenv(floodUID))
	if err != nil {
		return err
	}
	if err := syscall.Setresuid(uid, uid, uid); err != nil {
		return err
	}
	packettest.Flood(filepath.Base(socket), func() { _, _ = unix.Write(3, []byte{1}) })
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// flood starts flooders of other users.
func (v *victim) flood(socket string, uids ...int) {
	v.t.Helper()
	log, err := os.Create(filepath.Join(v.t.TempDir(), "flooders"))
	if err != nil {
		v.t.Fatal(err)
	}
	v.t.Cleanup(func() { log.Close() })
	for _, uid := range uids {
		output, input, err := os.Pipe()
		if err != nil {
			v.t.Fatal(err)
		}
		defer output.Close()
		cmd, stdin, err := startRole("flooder", []*os.File{input}, log, floodSocket+"="+socket,
			floodUID+"="+strconv.Itoa(uid))
		input.Close()
		if err != nil {
			v.t.Fatal(err)
		}
		v.t.Cleanup(func() {
			stdin.Close()
			if err := cmd.Wait(); err != nil {
				text, _ := os.ReadFile(log.Name())
				v.t.Errorf("a flooder ended with %v: %.2000s", err, text)
			}
		})
		if _, err := output.Read(make([]byte, 1)); err != nil {
			v.t.Fatalf("a flooder opens no connection: %v", err)
		}
	}
}

// PEERLANE_FLOOD_CONNECTS says how many connects are tried: flooders use every processor meanwhile.
func TestPeerSocketFloodHonestConnectsSucceed(t *testing.T) {
	n := 2
	if wanted := os.Getenv("PEERLANE_FLOOD_CONNECTS"); wanted != "" {
		var err error
		if n, err = strconv.Atoi(wanted); err != nil {
			t.Fatal(err)
		}
	}
	v := newVictim(t, nil)
	honest := attach(t, v.host.relay("honest", launch.RouteDirect, far(1, 2, "nic1")))
	listener, err := v.good.Listen(within(t), uuid(t, 0))
	if err != nil {
		t.Fatal(err)
	}
	opaque := listener.Handle()
	socket := filepath.Join(v.host.dir, opaque.Layout().Generation.String()+".sock")
	uids := []int{os.Geteuid(), os.Geteuid(), os.Geteuid()}
	if os.Geteuid() == 0 { // as relays, which have uids of their own
		uids = []int{64001, 64002, 64003}
		if err := errors.Join(os.Chmod(v.host.dir, 0o711), os.Chmod(socket, 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	v.flood(socket, uids...)
	failed, longest := 0, time.Duration(0)
	for range n {
		begin := time.Now()
		c, err := honest.Connect(within(t), uuid(t, 1), listener.Handle())
		longest = max(longest, time.Since(begin))
		if err != nil {
			failed++
			t.Log(err)
			continue
		}
		receiving, err := listener.Accept(within(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []*client.Connection{c, receiving} {
			if err := c.Close(within(t)); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("the longest connect took %v", longest)
	if failed > 0 {
		t.Errorf("%d of %d connects failed", failed, n)
	}
	v.goesOn()
}

// A dial waits while the queue is full, and returns that reason at the limit.
func TestPeerQueueFullConnectWaits(t *testing.T) {
	t.Parallel() // it waits more than it works
	v := newVictim(t, nil)
	honest := attach(t, v.host.relay("honest", launch.RouteDirect, far(1, 2, "nic1")))
	listener, err := v.good.Listen(within(t), uuid(t, 0))
	if err != nil {
		t.Fatal(err)
	}
	opaque := listener.Handle()
	socket := filepath.Join(v.host.dir, opaque.Layout().Generation.String()+".sock")
	result := make(chan error, 1)
	v.stopped(func() {
		for {
			c, err := packet.Dial(socket)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}
		_, err := honest.Connect(within(t), uuid(t, 1), listener.Handle())
		demand(t, err, wire.StatusBusy)
		go func() {
			_, err := honest.Connect(within(t), uuid(t, 1), listener.Handle())
			result <- err
		}()
	})
	if err := <-result; err != nil {
		t.Error(err)
	}
}
