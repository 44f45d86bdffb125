// Package control runs processes in a guest. The agent in the guest is the server, on a
// virtio-serial port for the host and on TCP for the other guest; both sides send JSON values, one
// per frame.
package control

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Port is the agent's TCP port for the other guest.
const Port = 7777

// Command is a process to run in the guest.
type Command struct {
	Argv []string `json:"argv"`
	// Env is added to the agent's environment: "NAME=value".
	Env []string `json:"env,omitempty"`
	Dir string   `json:"dir,omitempty"`
	// Terminal gives the process a pseudo-terminal with this number of rows and columns; output
	// then arrives on Stdout only.
	Terminal *Size `json:"terminal,omitempty"`
}

// Size is the size of a terminal.
type Size struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Ready is the agent's first message.
type Ready struct {
	// Uptime is the uptime of the guest's kernel at the start of the agent's service.
	Uptime time.Duration `json:"uptime"`
	Kernel string        `json:"kernel"`
}

// ExitError reports a process whose exit status is not 0.
type ExitError struct {
	Argv   []string
	Status int // 128 + the signal's number for a process that a signal ended
}

func (e *ExitError) Error() string { return fmt.Sprintf("%q ended with status %d", e.Argv, e.Status) }

// startError reports a process that did not start.
type startError struct {
	argv  []string
	cause string
	errno syscall.Errno // 0 for a cause without a number
}

func (e *startError) Error() string {
	return fmt.Sprintf("start %q in the guest: %s", e.argv, e.cause)
}

// Unwrap returns the number, if any.
func (e *startError) Unwrap() error {
	if e.errno == 0 {
		return nil
	}
	return e.errno
}

// inputCredit is the limit of input in flight, in bytes: the sender keeps unread input, so that no
// frame waits behind the input.
const inputCredit = 1 << 20

// frame is a message in either direction. ID identifies the process.
type frame struct {
	ID int64 `json:"id,omitempty"`

	// To the guest.
	Start *Command `json:"start,omitempty"`
	Input []byte   `json:"input,omitempty"`
	EOF   bool     `json:"eof,omitempty"` // no more input
	Kill  bool     `json:"kill,omitempty"`
	Ping  bool     `json:"ping,omitempty"`

	// From the guest.
	Ready  *Ready `json:"ready,omitempty"`
	Output []byte `json:"output,omitempty"`
	Error  []byte `json:"error,omitempty"` // standard error
	Taken  int    `json:"taken,omitempty"` // bytes of input that the process has taken
	Exit   *exit  `json:"exit,omitempty"`
	Pong   bool   `json:"pong,omitempty"`
}

type exit struct {
	Status int           `json:"status"`
	Failed string        `json:"failed,omitempty"` // error of the start
	Errno  syscall.Errno `json:"errno,omitempty"`  // number of Failed, if any
}

// failedStart returns the report of a process that did not start.
func failedStart(err error) *exit {
	errno, _ := errors.AsType[syscall.Errno](err)
	return &exit{Failed: err.Error(), Errno: errno}
}
