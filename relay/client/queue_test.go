package client

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/packet/packettest"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestDialQueueFullWaitsAndReturnsBusy(t *testing.T) {
	path, l := packettest.FullQueue(t)

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	s, err := Dial(ctx, path, wire.UUID{1})
	if s != nil || !errors.Is(err, &wire.Error{Status: wire.StatusBusy, Object: path}) || errors.Is(err, fault.NoRelay) {
		t.Errorf("%v, %v", s, err)
	}

	// The dial waits in the queue, and then gets the relay's answer.
	done := make(chan error, 1)
	go func() {
		ctx, cancel := testutil.WithLimit(t.Context(), time.Minute)
		defer cancel()
		_, err := Dial(ctx, path)
		done <- err
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		conn := packet.Conn{UnixConn: c.(*net.UnixConn)}
		if _, _, _, err := conn.Receive(); err != nil { // the first
			conn.Close()
			continue
		}
		if err := conn.Send(wire.NewFailure(wire.Errorf(wire.StatusLimit, "heard").On("a test")), 1); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, &wire.Error{Status: wire.StatusLimit, Object: "a test"}) {
			t.Errorf("%v", err)
		}
		conn.Close()
		return
	}
}
