package client

import (
	"errors"
	"fmt"
)

// versionError is the cause of a session, or of a request, without a common version of the protocol.
type versionError struct {
	socket         string // empty for a request
	relay          uint32 // version of the relay
	oldest, newest uint32 // of this client; for a request the first version with the request
}

func (e *versionError) Error() string {
	const remedy = "install the same release of Peerlane in the image and on the host"
	if e.socket == "" {
		return fmt.Sprintf(
			"the relay does not tell of the NIC of a lane: it speaks version %d of Peerlane's protocol, and that "+
				"came with version %d; %s",
			e.relay,
			e.oldest,
			remedy,
		)
	}
	return fmt.Sprintf(
		"the relay at %s speaks version %d of Peerlane's protocol, this client %d to %d; %s",
		e.socket,
		e.relay,
		e.oldest,
		e.newest,
		remedy,
	)
}

// Causes of refused calls.
var (
	errClosedSilently = errors.New("closed the connection without a word; it may have died: connect to it again, its " +
		"successor is there within seconds")
	errCaptured = errors.New("cannot be captured: every replay of the graph would have the same value, and none but the " +
		"first would wait; capture the two-phase form, a hand-over (Session.HandOver, StreamTimelines.Take and Give), " +
		"which waits for its turn and sets it back in the graph")
	errTurnsOpen = errors.New("operations in turn have not ended; cancel them or wait before the hand-over begins anew")
)
