package hook

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/layout"
)

// The administration socket knows one request and two answers, a packet each.
// It lies in the state tree, where only root comes.
const (
	requestLanesChanged = "lanes changed"
	answerDone          = "done"
	answerRefused       = "refused: " // and the reason
	adminTimeout        = 10 * time.Second
)

func adminSocket(l layout.Layout, id string) string {
	return filepath.Join(l.GenerationDir(id), "admin.sock")
}

// tellLanesChanged has a supervisor read its generation again. It returns when
// the relay has been told, not when it has answered.
func tellLanesChanged(l layout.Layout, id string) error {
	socket, err := connect(adminSocket(l, id))
	if errors.Is(err, unix.ECONNREFUSED) {
		return errors.New("its supervisor has been killed; restart the container")
	}
	if err != nil {
		return fmt.Errorf("asking its supervisor: %w", err)
	}
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	answer := make([]byte, 64<<10)
	n := 0
	err = conn.SetDeadline(time.Now().Add(adminTimeout))
	if err == nil {
		if _, err = conn.Write([]byte(requestLanesChanged)); err == nil {
			n, err = conn.Read(answer)
		}
	}
	if err != nil {
		return fmt.Errorf("asking its supervisor: %w", err)
	}
	if reason, refused := strings.CutPrefix(string(answer[:n]), answerRefused); refused {
		return errors.New(reason)
	}
	if string(answer[:n]) != answerDone {
		return fmt.Errorf("its supervisor answers %q", answer[:n])
	}
	return nil
}

// request is one request to a supervisor; answer has room for its answer.
type request struct{ answer chan error }

// listenAdmin is the supervisor's side.
func listenAdmin(f *os.File) (<-chan request, error) {
	defer f.Close() // net works on a copy
	listener, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	requests := make(chan request)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				time.Sleep(firstPause) // out of descriptors or memory: it passes
				continue
			}
			// One at a time is enough: who asks holds the generation's lock.
			serveAdmin(conn, requests)
		}
	}()
	return requests, nil
}

func serveAdmin(conn net.Conn, requests chan<- request) {
	defer conn.Close()
	if conn.SetDeadline(time.Now().Add(adminTimeout)) != nil {
		return // the other side has gone, and with it who would hear an error
	}
	buffer := make([]byte, 256)
	n, err := conn.Read(buffer)
	if err != nil {
		return
	}
	answer := answerDone
	if text := string(buffer[:n]); text != requestLanesChanged {
		answer = answerRefused + fmt.Sprintf("unknown request %q", text)
	} else {
		r := request{make(chan error, 1)}
		requests <- r
		if err := <-r.answer; err != nil {
			answer = answerRefused + err.Error()
		}
	}
	conn.Write([]byte(answer)) // as above
}
