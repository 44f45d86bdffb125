package tcp

import (
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// stopped is a connection whose process is stopped when it is to read: longer than the
// deadline, while something comes.
type stopped struct {
	net.Conn
	came  chan struct{} // something has
	until atomic.Bool   // it was stopped once
}

func (c *stopped) Read(b []byte) (int, error) {
	<-c.came
	if !c.until.Swap(true) {
		return 0, os.ErrDeadlineExceeded
	}
	return c.Conn.Read(b)
}

// Who was stopped itself does not take the other side for dead that has spoken meanwhile.
func TestAPauseIsNotSilence(t *testing.T) {
	t.Parallel()
	conn := &stopped{came: make(chan struct{})}
	e, r := against(t, 0, Config{Heartbeat: 20 * time.Millisecond, Dead: time.Hour}, func(c net.Conn) net.Conn {
		conn.Conn = c
		return conn
	})
	r.listens()
	go close(conn.came) // which the write waits for: it is of a pipe
	if err := r.say(0, frameBeat); err != nil {
		t.Fatalf("what came during the pause was not read: %v; the peer's end: %v", err, e.died())
	}
	if err := r.say(7, frameLeave); err != nil { // of no channel
		t.Fatal(err)
	}
	if err := e.died(); wire.StatusOf(err) != wire.StatusMalformed {
		t.Errorf("what came after the pause was not read: %v", err)
	}
}
