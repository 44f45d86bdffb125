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

// StartTimeout limits the time until a supervisor has executed the relay. It usually takes
// milliseconds, but an overloaded host should start containers late rather than never.
const StartTimeout = 30 * time.Second

// Descriptors of a supervisor at its start. Standard error is the generation's log.
const (
	FDClients = 3 // listening socket of the clients
	FDPeers   = 4 // listening socket of the peer relays
	FDInit    = 5 // pidfd of the container's init
	FDStarted = 6 // pipe on which Launch waits for Started, or an error
	FDAdmin   = 7 // listening socket of the administration
	FDAlive   = 8 // locked file; the lock ends with the supervisor
)

// Started is the text that a supervisor writes to FDStarted when it has executed the relay.
const Started = "started"

// Descriptors are the files of a supervisor, which it has inherited or received.
type Descriptors struct{ Clients, Peers, Init, Started, Admin, Alive *os.File }

// A forked supervisor would be a child of the container runtime, with the runtime's limits, so
// with systemd the hook does not fork. The hook connects to peerlane-relay.socket, systemd starts
// a peerlane-relay@.service, and hook and service exchange datagrams of JSON:
//
//	service → hook  Answer, with a pidfd of the service
//	hook → service  Message, with the descriptors FDClients to FDAlive
//	service → hook  Answer with an error, if the service refuses the generation
//
// The hook keeps the generation until the service has answered. After its time limit the hook
// disconnects, and a late service gets no descriptors, so that a generation never has two
// supervisors. After the Message, everything is as with a forked supervisor, including the pipe
// Started.
type (
	Answer struct {
		Version int    `json:"version"`
		Error   string `json:"error,omitempty"`
	}
	Message struct {
		Version int `json:"version"`
		// Root is the root of the layout.
		Root       string `json:"root"`
		Generation string `json:"generation"`
	}
)

// Version changes if the meaning of the messages or the order of the descriptors changes. Units
// and hook are in one package, and differ only during an upgrade.
const Version = 1

// maxHandover is the maximum size of a message in bytes. A root is a path of at most 4,096 bytes,
// which JSON can encode in six times as many.
const maxHandover = 32 << 10

// Count is the number of descriptors in a handover.
const Count = FDAlive - FDClients + 1

// Send sends one message with descriptors. The caller still owns the descriptors.
func Send(conn *net.UnixConn, message any, files ...*os.File) error {
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	var fds []int
	for _, f := range files {
		// Fd makes the descriptor blocking, which the receiver of the same open file expects.
		fds = append(fds, int(f.Fd()))
	}
	_, _, err = conn.WriteMsgUnix(text, unix.UnixRights(fds...), nil)
	return err
}

// maxDescriptors is more than any message has, so that Receive can count and close excess
// descriptors. The kernel passes at most 253 (SCM_MAX_FD).
const maxDescriptors = 253

// Receive receives one message with its descriptors, which the caller then owns. It closes the
// descriptors of an invalid message. The error wraps io.EOF after the peer has disconnected.
func Receive(conn *net.UnixConn, message any) (files []*os.File, err error) {
	text, rights := make([]byte, maxHandover+1), make([]byte, unix.CmsgSpace(4*maxDescriptors))
	n, oobn, flags, _, err := conn.ReadMsgUnix(text, rights)
	// An empty message looks like an end, io.EOF, and can carry descriptors.
	files, invalid := descriptorsOf(rights[:oobn])
	switch {
	case err != nil:
	case invalid != nil:
		err = invalid
	case n > maxHandover:
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

// descriptorsOf returns the descriptors in a message's control data. Package net has made them
// close-on-exec.
func descriptorsOf(control []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("the message's control data: %w", err)
	}
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m) // none in other control data, such as credentials of the sender
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "handed over"))
		}
	}
	return files, nil
}

// CloseAll closes the files.
func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// ParseMessage parses exactly one JSON value without unknown keys.
func ParseMessage(text []byte, message any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	err := dec.Decode(message)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF // io.EOF is the end of the connection
	}
	if err == nil {
		if _, more := dec.Token(); more != io.EOF {
			err = errors.New("data after the message")
		}
	}
	if err != nil {
		return fmt.Errorf("invalid message: %w", err)
	}
	return nil
}

// NewDescriptors returns the descriptors of a handover by their purpose.
func NewDescriptors(files []*os.File) Descriptors {
	at := func(fd int) *os.File { return files[fd-FDClients] }
	return Descriptors{
		Clients: at(FDClients),
		Peers:   at(FDPeers),
		Init:    at(FDInit),
		Started: at(FDStarted),
		Admin:   at(FDAdmin),
		Alive:   at(FDAlive),
	}
}
