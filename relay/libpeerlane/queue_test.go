package libpeerlane_test

import (
	"errors"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/packet/packettest"
	"github.com/peerlane/peerlane/relay/wire"
)

func TestDialQueueFullWaitsAndReturnsBusy(t *testing.T) {
	path, l := packettest.FullQueue(t)
	if c, err := packet.Dial(path); !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("%v, %v: the queue has room", c, err)
	}

	p := start(t, program(t, "tests", "calls", plain), path, devices[0].UUID, "full")
	p.calls(call{"dial", wire.StatusBusy, "accepts no connection: its queue was full for 300 ms"})
	p.demand("waits")
	served := make(chan struct{})
	go func() {
		defer close(served)
		for { // earlier connections have closed
			c, err := l.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			f := &fake{T: t, Conn: packet.Conn{UnixConn: c.(*net.UnixConn)}}
			if err := f.SetDeadline(testutil.Deadline()); err != nil {
				t.Error(err)
			}
			if m, _, _, err := f.Receive(); err != nil {
				t.Logf("%v, %v", m, err)
				f.Close()
				continue
			}
			f.greet(nil)
			f.hear()
			f.free()
			f.Close()
			return
		}
	}()
	p.calls(call{"dial", wire.StatusOK, ""})
	p.demand("closed")
	p.end()
	<-served
}
