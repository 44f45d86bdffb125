package admin

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/unixsocket"
	"github.com/peerlane/peerlane/internal/testutil"
)

const id = "0123456789abcdef0123456789abcdef"

// supervised returns a layout with a generation, and its listening administration socket.
func supervised(t *testing.T) (paths.Layout, *os.File) {
	t.Helper()
	l := paths.New(testutil.ShortDir(t))
	if err := os.MkdirAll(filepath.Dir(Socket(l, id)), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := unixsocket.Listen(Socket(l, id), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return l, f
}

func TestAskReturnsAnswerOfSupervisor(t *testing.T) {
	l, f := supervised(t)
	fd := f.Fd()
	requests, err := Listen(f)
	if err != nil {
		t.Fatal(err)
	}
	if f.Fd() == fd {
		t.Error("Listen leaves its file open")
	}
	go func() {
		for r := range requests {
			switch r.Command {
			case Inspect:
				r.Answer <- Answer{Version: Version, Supervisor: 7, NoReport: "none"}
			case Stop:
				r.Reply(errors.New("refused"))
			default:
				r.Reply(nil)
			}
		}
	}()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector closes files too
	sockets := openSockets(t)
	if a, err := Ask(l, id, Inspect); err != nil || a != (Answer{Version: Version, Supervisor: 7, NoReport: "none"}) {
		t.Errorf("%+v, %v", a, err)
	}
	if _, err := Ask(l, id, Stop); !testutil.HasError(err, &RefusedError{Request: Stop, Reason: "refused"}) {
		t.Errorf("%v", err)
	}
	if err := NotifyLanesChanged(l, id); err != nil {
		t.Error(err)
	}
	testutil.Until(t, "both sides close their sockets", func() bool { return openSockets(t) == sockets })
}

// openSockets returns the number of this process's sockets.
func openSockets(t *testing.T) (n int) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, "socket:") { // otherwise closed meanwhile
			n++
		}
	}
	return n
}

func TestAskWithoutSupervisorFails(t *testing.T) {
	l, f := supervised(t)
	if _, err := AskUntil(l, id, Inspect, time.Now().Add(-time.Second)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the time limit: %v", err)
	}
	if _, err := AskUntil(l, id, Inspect, time.Now().Add(20*time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a supervisor that does not answer: %v", err)
	}
	f.Close()
	if _, err := Ask(l, id, Inspect); !errors.Is(err, ErrSupervisorKilled) {
		t.Errorf("a killed supervisor: %v", err)
	}
	if err := NotifyLanesChanged(l, id); !errors.Is(err, ErrSupervisorKilled) {
		t.Errorf("a killed supervisor: %v", err)
	}
	if err := os.Remove(Socket(l, id)); err != nil {
		t.Fatal(err)
	}
	if _, err := Ask(l, id, Inspect); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a removed generation: %v", err)
	}
}

// answerOnce accepts a connection of the listening socket, reads the request and answers with a text.
func answerOnce(t *testing.T, listener int, text string) {
	fd, _, err := unix.Accept(listener)
	if err != nil {
		t.Error(err)
		return
	}
	defer unix.Close(fd)
	var request [4 << 10]byte
	n, err := unix.Read(fd, request[:])
	if err == nil && text != "" {
		_, err = unix.Write(fd, []byte(text))
	}
	var m message
	if err != nil || json.Unmarshal(request[:n], &m) != nil || m != (message{Version, Inspect}) {
		t.Errorf("the request is %q, %v", request[:n], err)
	}
}

func TestAskInvalidAnswerFails(t *testing.T) {
	for _, c := range []struct {
		name, answer string
		matches      func(error) bool
	}{
		{"an end", "", func(err error) bool { return err != nil }},
		{"no JSON", "{", isSyntax},
		{"another version", `{"version": 2}`, func(err error) bool {
			return testutil.HasError(err, &versionError{supervisor: 2, request: Inspect})
		}},
		{"no version", `{}`, func(err error) bool {
			return testutil.HasError(err, &versionError{request: Inspect})
		}},
	} {
		l, f := supervised(t)
		go answerOnce(t, int(f.Fd()), c.answer)
		if _, err := Ask(l, id, Inspect); !c.matches(err) {
			t.Errorf("%s: %v", c.name, err)
		}
		f.Close()
	}
}

func isSyntax(err error) bool {
	_, ok := errors.AsType[*json.SyntaxError](err)
	return ok
}

// failingListener fails, and then accepts one connection.
type failingListener struct {
	net.Listener
	calls int
	conn  net.Conn
}

func (l *failingListener) Accept() (net.Conn, error) {
	l.calls++
	switch l.calls {
	case 1:
		return nil, unix.EMFILE
	case 2:
		return l.conn, nil
	}
	select {}
}

func TestServeContinuesAfterFailedAccept(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	requests := make(chan Request)
	go serve(&failingListener{conn: theirs}, requests)
	go func() { (<-requests).Reply(nil) }()
	if a := request(t, ours); a != (Answer{Version: Version}) {
		t.Errorf("%+v", a)
	}
}

// request sends a request and returns the answer.
func request(t *testing.T, conn net.Conn) (a Answer) {
	t.Helper()
	if err := errors.Join(conn.SetDeadline(testutil.Deadline()), json.NewEncoder(conn).Encode(message{Version, Drain}),
		json.NewDecoder(conn).Decode(&a)); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestLateSupervisorIsAnsweredFor(t *testing.T) {
	for name, takes := range map[string]bool{"not taken": false, "taken": true} {
		ours, theirs := net.Pipe()
		requests := make(chan Request, 1)
		if !takes {
			requests <- Request{}
		}
		go serveAdmin(theirs, requests, time.Millisecond)
		if a := request(t, ours); a.Version != Version || a.Error == "" {
			t.Errorf("%s: %+v", name, a)
		}
		ours.Close()
	}
}

func TestListenOnFileFails(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(f); !errors.Is(err, unix.ENOTSOCK) {
		t.Errorf("%v", err)
	}
}

// A client that connects and sends nothing, or ends, keeps no supervisor from its work.
func TestListenAfterSilentClientServesNext(t *testing.T) {
	l, f := supervised(t)
	requests, err := Listen(f)
	if err != nil {
		t.Fatal(err)
	}
	silent, err := unixsocket.Connect(Socket(l, id))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	gone, err := unixsocket.Connect(Socket(l, id))
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	go func() { (<-requests).Reply(nil) }()
	if a, err := Ask(l, id, Drain); err != nil || a != (Answer{Version: Version}) {
		t.Errorf("%+v, %v", a, err)
	}
}
