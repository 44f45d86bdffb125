package client

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// answering is a socket that answers the first message of each client.
func answering(t *testing.T, answer func(packet.Conn, wire.Message)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			conn := packet.Conn{UnixConn: c}
			m, _, fds, err := conn.Receive()
			packet.CloseAll(fds)
			if err == nil {
				answer(conn, m)
			}
			conn.Close()
		}
	}()
	return path
}

func dialed(t *testing.T, socket string, oldest, newest uint32) error {
	t.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), 20*time.Second)
	defer cancel()
	s, err := dial(ctx, socket, oldest, newest)
	if err == nil {
		s.Close()
	}
	return err
}

func TestDialOtherVersionNamesBothVersions(t *testing.T) {
	refusing := answering(t, func(c packet.Conn, m wire.Message) {
		hello := m.(*wire.Hello)
		_, err := wire.Negotiate("client", hello.Oldest, hello.Newest)
		if err == nil {
			err = wire.Errorf(wire.StatusInternal, "the test's client is not too old")
		}
		if err := c.Send(wire.NewFailure(err), 1); err != nil {
			t.Error(err)
		}
	})
	err := dialed(t, refusing, wire.NewestVersion+1, wire.NewestVersion+2)
	if wire.StatusOf(err) != wire.StatusVersion {
		t.Errorf("a client that is too new: %v", err)
	}
	// A relay that picks a version the client does not speak.
	wrong := answering(t, func(c packet.Conn, _ wire.Message) {
		r, err := ring.NewRelay()
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		submit, complete := r.FDs()
		if err := c.Send(&wire.Welcome{Version: 99}, 1, submit, complete, submit, complete); err != nil {
			t.Error(err)
		}
	})
	err = dialed(t, wrong, wire.OldestVersion, wire.NewestVersion)
	relays := &versionError{wrong, 99, wire.OldestVersion, wire.NewestVersion}
	if wire.StatusOf(err) != wire.StatusVersion ||
		!testutil.HasError(err, relays) {
		t.Errorf("a relay that picks a version of its own: %v", err)
	}
}

// The client sends no unknown request to a relay of an older release, and returns the reason; the
// session goes on.
func TestOlderRelayUnknownRequestsFailLocally(t *testing.T) {
	older := &Session{version: wire.LaneNICVersion - 1} // sends find no reader
	want := &versionError{relay: wire.LaneNICVersion - 1, oldest: wire.LaneNICVersion}
	if _, err := older.LaneNIC(t.Context(), wire.UUID{}); wire.StatusOf(err) != wire.StatusVersion ||
		!testutil.HasError(err, want) {
		t.Errorf("%v", err)
	}
	if older.broken != nil {
		t.Errorf("its session has ended: %v", older.broken)
	}
}

func TestDialWithoutRelayNamesTheCause(t *testing.T) {
	err := dialed(t, filepath.Join(t.TempDir(), "nowhere", "none"), 1, 1)
	if f, ok := errors.AsType[*fault.Error](err); !ok || f.Code != fault.NoRelay ||
		!strings.Contains(f.Remedy, "--device peerlane.dev/lane=") {
		t.Errorf("no socket: %v", err)
	}
	other := answering(t, func(c packet.Conn, _ wire.Message) {
		if err := c.Send(&wire.Done{}, 1); err != nil {
			t.Error(err)
		}
	})
	if err := dialed(t, other, 1, 1); wire.StatusOf(err) != wire.StatusMalformed {
		t.Errorf("somebody else's answer: %v", err)
	}
	silent := answering(t, func(packet.Conn, wire.Message) {})
	// As of a relay that dies just then.
	if err := dialed(t, silent, 1, 1); wire.StatusOf(err) != wire.StatusRelayDied || !errors.Is(err, errClosedSilently) {
		t.Errorf("a socket that closes: %v", err)
	}
}

// A slow unmap of staging memory in the driver blocks no further call of the session.
func TestUnmapDuringUnexportBlocksNoOtherCall(t *testing.T) {
	over := wire.Errorf(wire.StatusClosed, "over")
	s := &Session{broken: over, ended: make(chan struct{}), mapped: map[*Memory]bool{}}
	begun, end := make(chan struct{}), make(chan struct{})
	m := &Memory{session: s, Ptr: 1, unmap: func() error { close(begun); <-end; return nil }}
	s.mapped[m] = true
	returned := make(chan error)
	go func() { returned <- m.Unexport(context.Background()) }()
	<-begun
	asked := make(chan error, 1)
	go func() { asked <- s.Err() }()
	select {
	case err := <-asked:
		if err != over {
			t.Error(err)
		}
	case <-testutil.After(time.Minute):
		t.Error("the session waits for the driver")
	}
	if m.Ptr != 0 || len(s.mapped) != 0 {
		t.Errorf("at %#x, and the session would unmap %d memories", m.Ptr, len(s.mapped))
	}
	close(end)
	if err := <-returned; wire.StatusOf(err) != wire.StatusClosed {
		t.Error(err)
	}
}
