package handover

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// StartTimeout is how long a supervisor may take until it has executed the
// relay: milliseconds, on a host that is not starved. One that is starved shall
// start its containers late, and not never.
const StartTimeout = 30 * time.Second

// Descriptors of a supervisor at its start. Standard error is the
// generation's log.
const (
	FDClients = 3 // listening socket of the clients
	FDPeers   = 4 // listening socket of the peer relays
	FDInit    = 5 // pidfd of the container's init
	FDStarted = 6 // pipe on which Launch waits for startedAnswer, or an error
	FDAdmin   = 7 // listening socket of the administration
	FDAlive   = 8 // locked file; the lock ends with the supervisor
)

const Started = "started"

// Descriptors are what a supervisor works on, wherever it has them from.
type Descriptors struct{ Clients, Peers, Init, Started, Admin, Alive *os.File }

// With systemd a hook does not fork its supervisor, which would be a child of
// the container runtime's and live under its limits. It connects to
// peerlane-relay.socket, for which systemd starts a peerlane-relay@.service, and
// the two say, a datagram of JSON each:
//
//	service → hook  answer, with a pidfd of the service
//	hook → service  handover, with the descriptors fdClients to fdAlive
//	service → hook  answer with an error, if it does not take the generation
//
// Nothing of the generation leaves the hook before a service is there to take
// it. A hook that has waited long enough hangs up, and a service that comes late
// finds that: it has no descriptor to work with, so that a generation never has
// two supervisors. With the handover the decision has been made; from then on it
// is as with a supervisor that was forked, down to the pipe of startedAnswer.
type (
	Answer struct {
		Version int    `json:"version"`
		Error   string `json:"error,omitempty"`
	}
	Message struct {
		Version    int    `json:"version"`
		Root       string `json:"root"` // of the layout
		Generation string `json:"generation"`
	}
)

// Version changes with the meaning of the messages and the order of
// the descriptors. Units and hook are of one package, and differ in the moment
// of an upgrade only.
const Version = 1

// maxHandover bounds each of the messages, bytes. A root is a path (4,096 bytes
// at most), which JSON can make six times as long.
const maxHandover = 32 << 10

// Count is how many descriptors a handover has.
const Count = FDAlive - FDClients + 1

// Send sends one message with descriptors, which stay the caller's.
func Send(conn *net.UnixConn, message any, files ...*os.File) error {
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	var fds []int
	for _, f := range files {
		// Fd makes them blocking, as the other side, which has the same open file,
		// expects.
		fds = append(fds, int(f.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = conn.WriteMsgUnix(text, rights, nil)
	return err
}

// maxDescriptors is more than any message has, so that what is too many can be
// counted, and closed. The kernel passes 253 (SCM_MAX_FD).
const maxDescriptors = 253

// Receive receives one message and its descriptors, which are the caller's. Of
// a message that is refused none stays open. The end of the conversation is
// io.EOF.
func Receive(conn *net.UnixConn, message any) (files []*os.File, err error) {
	text, rights := make([]byte, maxHandover+1), make([]byte, unix.CmsgSpace(4*maxDescriptors))
	n, oobn, flags, _, err := conn.ReadMsgUnix(text, rights)
	if err != nil {
		return nil, err
	}
	files, err = descriptorsOf(rights[:oobn])
	switch {
	case err != nil:
	case n == 0 && len(files) == 0:
		err = io.EOF
	case n > maxHandover || flags&unix.MSG_TRUNC != 0:
		err = fmt.Errorf("the message has more than %d bytes", maxHandover)
	case flags&unix.MSG_CTRUNC != 0:
		err = errors.New("the message's descriptors do not fit here: too many files are open")
	default:
		err = ParseMessage(text[:n], message)
	}
	if err != nil {
		CloseAll(files)
		return nil, err
	}
	return files, nil
}

// descriptorsOf takes the descriptors out of a message's control data. They are
// close-on-exec already, by package net.
func descriptorsOf(control []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("the message's control data: %w", err)
	}
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue // credentials, if somebody wants to send them
		}
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			CloseAll(files)
			return nil, fmt.Errorf("the message's descriptors: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "handed over"))
		}
	}
	return files, nil
}

func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// ParseMessage reads exactly one JSON value with no key that is not known.
func ParseMessage(text []byte, message any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	err := dec.Decode(message)
	if err == nil {
		if _, more := dec.Token(); more != io.EOF {
			err = errors.New("there is more after it")
		}
	}
	if err != nil {
		return fmt.Errorf("the message makes no sense: %w", err)
	}
	return nil
}

// Named gives the descriptors of a handover their names.
func Named(files []*os.File) Descriptors {
	at := func(fd int) *os.File { return files[fd-FDClients] }
	return Descriptors{Clients: at(FDClients), Peers: at(FDPeers), Init: at(FDInit), Started: at(FDStarted), Admin: at(FDAdmin), Alive: at(FDAlive)}
}
