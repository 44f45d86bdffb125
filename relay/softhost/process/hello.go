package process

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// Hello returns the first message of the client that client starts with the path of a socket, and
// kills the client.
func Hello(t testing.TB, client func(socket string) *exec.Cmd) *wire.Hello {
	t.Helper()
	socket := filepath.Join(Dir(t), "relay.sock")
	l, err := listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	c := client(socket)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = c.Process.Kill() // the process may have ended
		_ = c.Wait()
	}()
	accepted, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	conn := packet.Conn{UnixConn: accepted}
	defer conn.Close()
	if err := conn.SetDeadline(testutil.Deadline()); err != nil {
		t.Fatal(err)
	}
	m, _, fds, err := conn.Receive()
	packet.CloseAll(fds)
	hello, is := m.(*wire.Hello)
	if err != nil || !is {
		t.Fatalf("the first message is a %T, want a hello (%v)", m, err)
	}
	return hello
}
