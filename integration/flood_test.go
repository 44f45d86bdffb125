package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/packet/packettest"
	"github.com/peerlane/peerlane/relay/wire"
)

// firstLane returns the GPU of this container's first lane, and a session with the relay.
func firstLane(ctx context.Context) (*client.Session, wire.UUID, error) {
	s, err := client.Dial(ctx, client.DefaultSocket)
	if err != nil {
		return nil, wire.UUID{}, err
	}
	lanes, err := s.Lanes(ctx)
	if err != nil {
		return nil, wire.UUID{}, err
	}
	return s, lanes[0].GPU, nil
}

// acceptAll accepts every connection, prints the listener's handle, and runs until killed.
func acceptAll() error {
	ctx := context.Background()
	s, gpu, err := firstLane(ctx)
	if err != nil {
		return err
	}
	listener, err := s.Listen(ctx, gpu)
	if err != nil {
		return err
	}
	emit(event{Kind: "listening", Handle: listener.Handle()})
	go func() {
		for {
			c, err := listener.Accept(ctx)
			if err != nil {
				return
			}
			_ = c.Close(ctx) // the peer may have closed the connection
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// connectOften connects to the handle from standard input n times, and prints the number of
// failures.
func connectOften(arguments []string) error {
	n, err := strconv.Atoi(arguments[0])
	if err != nil {
		return err
	}
	ctx := context.Background()
	s, gpu, err := firstLane(ctx)
	if err != nil {
		return err
	}
	emit(event{Kind: "hello"})
	var order event
	if err := json.NewDecoder(os.Stdin).Decode(&order); err != nil {
		return err
	}
	failed, first := 0, error(nil)
	for range n {
		limited, cancel := testutil.WithLimit(ctx, time.Minute)
		c, err := s.Connect(limited, gpu, order.Handle)
		cancel()
		if err != nil {
			failed, first = failed+1, errors.Join(first, err)
			continue
		}
		_ = c.Close(ctx) // the peer may have closed the connection
	}
	connected := event{Kind: "connected", Peer: strconv.Itoa(n - failed)}
	if first != nil {
		connected.Error = fmt.Sprintf("%.2000s", first)
	}
	emit(connected)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// flood opens connections to a relay's peer socket as another relay's user, as fast as possible,
// and keeps a hundred silent connections, until the end of input.
func flood(arguments []string) error {
	socket := arguments[0]
	uid, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	// A relative path is short, and needs no permission on the directories above.
	if err := os.Chdir(filepath.Dir(socket)); err != nil {
		return err
	}
	var stat unix.Stat_t // the group of relays may connect
	if err := unix.Stat(filepath.Base(socket), &stat); err != nil {
		return err
	}
	if err := errors.Join(unix.Setresgid(int(stat.Gid), int(stat.Gid), int(stat.Gid)),
		unix.Setresuid(uid, uid, uid)); err != nil {
		return err
	}
	packettest.Flood(filepath.Base(socket), func() { emit(event{Kind: "flooding"}) })
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// Three processes with uids of relays, as a compromised relay has, flood the peer socket of a
// container's relay. Every connect of another container succeeds.
func TestFloodedRelayOfAContainerAcceptsConnects(t *testing.T) {
	const connects = 2
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			accepting := b.start(b.lanes[0], "accept")
			handle := accepting.next("listening").Handle
			connecting := b.start(b.lanes[1], "connects", strconv.Itoa(connects))
			connecting.next("hello")
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			socket := b.Layout.PeerSocket(accepting.generation().ID)
			for _, uid := range []string{"64001", "64002", "64003"} {
				b.follow("flood-"+uid, exec.Command(self, "role", "flood", socket, uid),
					func(context.Context) error { return nil }).next("flooding")
			}
			connecting.send(event{Handle: handle})
			if s := connecting.next("connected"); s.Peer != strconv.Itoa(connects) {
				t.Errorf("%s of %d connects beside a flood succeed: %s", s.Peer, connects, s.Error)
			}
		})
	}
}
