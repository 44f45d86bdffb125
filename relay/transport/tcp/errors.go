package tcp

import (
	"errors"
	"fmt"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// PeerError is the cause of the [wire.Error] with which a Peer ends.
type PeerError struct {
	Peer  string // Config.Name
	Event string // verb phrase, such as "closed its connection"; empty if the cause is a message of the other relay
	Route string // Config.Route of the connection
	Cause error  // nil if Event states the cause
}

// Error formats e as "the relay at PEER EVENT (ROUTE): CAUSE", without the parts that e lacks.
func (e *PeerError) Error() string {
	text := "the relay at " + e.Peer
	if e.Event != "" {
		text += " " + e.Event
	}
	if e.Route != "" {
		text += " (" + e.Route + ")"
	}
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text
}

// ErrorObject returns the other relay, as the object of an error of package wire.
func (e *PeerError) ErrorObject() string { return e.Peer }

// Unwrap returns the cause.
func (e *PeerError) Unwrap() error { return e.Cause }

// Causes of the end of a Peer with a live relay that does not make progress.
var (
	errSaidNothing    = errors.New("no data received")
	errTookNothing    = errors.New("no data accepted")
	errNoProgress     = errors.New("no progress of a write")
	errUnacknowledged = errors.New("no write acknowledged")
	errNotLeft        = errors.New("a closed connection stays open")
	errUnread         = errors.New("messages stay unread")
)

// Causes of refused calls and frames.
var (
	errWithinWrite = errors.New("within a write")
	errGranted     = errors.New("was removed with a grant")
)

// deadFor returns the end of a Peer after a limit of time.
func (p *Peer) deadFor(route string, cause error, limit time.Duration) error {
	return wire.Errorf(wire.StatusPeerRelayDied, "%w", &PeerError{Peer: p.config.Name, Event: "is dead", Route: route,
		Cause: fmt.Errorf("%w for %v", cause, limit)})
}
