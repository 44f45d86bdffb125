package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/internal/unixsocket"
	"github.com/peerlane/peerlane/relay/launch"
)

// The administration socket takes one request per connection and sends one answer. Request and
// answer are a JSON document in one packet. The socket is in the state tree, which only root can
// enter. A container keeps the first supervisor, so client and supervisor can be of different
// releases: Version identifies the protocol.
const (
	Version = 1
	Timeout = 30 * time.Second // longer than the start of a supervisor on a starved host
	// replyTimeout limits the answer of a supervisor including its relay, below the client's
	// Timeout.
	replyTimeout = Timeout - 5*time.Second

	Lanes   = "lanes"   // read the generation again for added lanes
	Inspect = "inspect" // answer with the relay's report
	Stop    = "stop"    // end the relay, and start no other
	Drain   = "drain"   // Stop after the relay's copies
	Resume  = "resume"  // start a relay again
)

// acceptPause is the time between two calls of accept after a failure.
const acceptPause = 100 * time.Millisecond

type message struct {
	Version int    `json:"version"`
	Command string `json:"command"`
}

// versionError is the error of a request to a supervisor of another release.
type versionError struct {
	// supervisor is the supervisor's version; this program has Version.
	supervisor int
	request    string
}

func (e *versionError) Error() string {
	return fmt.Sprintf(
		"the supervisor speaks version %d of requests, this program version %d for %q; restart the container",
		e.supervisor, Version, e.request)
}

// RefusedError is the error of a request that the supervisor refused.
type RefusedError struct {
	// Request is the command, and Reason the supervisor's text.
	Request string
	Reason  string
}

func (e *RefusedError) Error() string { return e.Reason }

// Answer is the answer of a supervisor. Error is empty after success.
type Answer struct {
	Version int    `json:"version"`
	Error   string `json:"error,omitempty"`
	// Supervisor is the process id of the supervisor, in the answer to Inspect.
	Supervisor int            `json:"supervisor,omitempty"`
	Report     *launch.Report `json:"report,omitempty"`
	// NoReport is the reason for a missing report.
	NoReport string `json:"noReport,omitempty"`
}

// Socket returns the path of a generation's administration socket.
func Socket(l paths.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "admin.sock")
}

// Ask sends a command to the supervisor of a generation and waits for the answer.
func Ask(l paths.Layout, id, command string) (Answer, error) {
	return AskUntil(l, id, command, time.Now().Add(Timeout))
}

// ErrSupervisorKilled is the error of a generation whose supervisor has ended before the relay.
var ErrSupervisorKilled = errors.New("the supervisor has been killed; restart the container")

// AskUntil is Ask with a time limit. The supervisor executes the request even after that time.
func AskUntil(l paths.Layout, id, command string, until time.Time) (Answer, error) {
	fail := func(err error) (Answer, error) {
		return Answer{}, fmt.Errorf("query the supervisor: %w", err)
	}
	if !time.Now().Before(until) {
		return fail(os.ErrDeadlineExceeded)
	}
	socket, err := unixsocket.ConnectWithin(Socket(l, id), min(time.Until(until), unixsocket.ConnectTimeout))
	if errors.Is(err, unix.ECONNREFUSED) {
		return Answer{}, ErrSupervisorKilled
	}
	if err != nil {
		return fail(err)
	}
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return fail(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(until); err != nil {
		return fail(err)
	}
	text, err := json.Marshal(message{Version, command})
	if err != nil {
		return fail(err)
	}
	if _, err := conn.Write(text); err != nil {
		return fail(err)
	}
	buffer := make([]byte, launch.MaxDatagram)
	n, err := conn.Read(buffer)
	if err != nil {
		return fail(err)
	}
	var answer Answer
	if err := json.Unmarshal(buffer[:n], &answer); err != nil {
		return fail(fmt.Errorf("%q is no answer: %w; restart the container", buffer[:n], err))
	}
	if answer.Version != Version {
		return Answer{}, &versionError{supervisor: answer.Version, request: command}
	}
	if answer.Error != "" {
		return answer, &RefusedError{Request: command, Reason: answer.Error}
	}
	return answer, nil
}

// NotifyLanesChanged makes a supervisor read the generation again. The supervisor answers after the
// message to the relay, without the relay's answer.
func NotifyLanesChanged(l paths.Layout, id string) error {
	_, err := Ask(l, id, Lanes)
	return err
}

// Request is a request to a supervisor. The channel Answer has room for a value.
type Request struct {
	Command string
	Answer  chan Answer
	// Late is the time at which the client stops waiting.
	Late time.Time
}

// Reply answers a request.
func (r Request) Reply(err error) {
	a := Answer{Version: Version}
	if err != nil {
		a.Error = err.Error()
	}
	r.Answer <- a
}

// Listen serves the supervisor's side of the socket.
func Listen(f *os.File) (<-chan Request, error) {
	defer f.Close() // package net uses a copy
	listener, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	requests := make(chan Request)
	go serve(listener, requests)
	return requests, nil
}

// serve accepts connections, without an end.
func serve(listener net.Listener, requests chan<- Request) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			time.Sleep(acceptPause) // temporarily out of descriptors or memory
			continue
		}
		go serveAdmin(conn, requests, replyTimeout)
	}
}

// serveAdmin answers a request within a limit.
func serveAdmin(conn net.Conn, requests chan<- Request, limit time.Duration) {
	defer conn.Close()
	if conn.SetDeadline(time.Now().Add(Timeout)) != nil {
		return // the client has disconnected
	}
	buffer := make([]byte, 4<<10)
	n, err := conn.Read(buffer)
	if err != nil {
		return
	}
	answer := Answer{Version: Version}
	var asked message
	switch err := json.Unmarshal(buffer[:n], &asked); {
	case err != nil:
		answer.Error = fmt.Sprintf("invalid request %q: %v", buffer[:n], err)
	case asked.Version != Version:
		answer.Error = fmt.Sprintf(
			"the supervisor speaks version %d, and was asked in version %d; restart the container",
			Version,
			asked.Version,
		)
	default:
		r := Request{asked.Command, make(chan Answer, 1), time.Now().Add(limit)}
		late := time.After(limit)
		select {
		case requests <- r:
			select {
			case answer = <-r.Answer:
			case <-late:
				answer.Error = fmt.Sprintf("there is no answer to %q within %v", asked.Command, limit)
			}
		case <-late:
			answer.Error = fmt.Sprintf("the supervisor has not reached %q within %v", asked.Command, limit)
		}
	}
	if text, err := json.Marshal(answer); err == nil {
		_, _ = conn.Write(text) // the client may have disconnected
	}
}
