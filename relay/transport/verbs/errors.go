package verbs

import (
	"errors"
	"fmt"
	"time"

	"github.com/peerlane/peerlane/relay/network/address"
)

// Causes of errors.
var (
	errNotOutstanding = errors.New("no write with the ticket is outstanding")
	errTicketTwice    = errors.New("two writes on one queue pair")
	errTwoGrants      = errors.New("the ticket belongs to two grants")
	errNoTicket       = errors.New("a queue pair received a message without a ticket")
	errWrongSecret    = errors.New("the answer lacks the secret of the requesting relay")
	errInactive       = errors.New("the NIC is not active")
)

// ticketError is an invalid ticket in a write or a message of the peer.
type ticketError struct {
	Ticket uint32
	Cause  error
}

func (e *ticketError) Error() string { return fmt.Sprintf("ticket %d: %v", e.Ticket, e.Cause) }

func (e *ticketError) Unwrap() error { return e.Cause }

// fieldError is an invalid field of a message.
type fieldError struct {
	Message string // the kind of the message
	Field   string
	Value   any
}

func (e *fieldError) Error() string {
	return fmt.Sprintf("%s message: invalid %s %v", e.Message, e.Field, e.Value)
}

// flushError is a failure to flush writes of a NIC into memory of a GPU.
type flushError struct {
	NIC   string
	Cause error
}

func (e *flushError) Error() string {
	return fmt.Sprintf("writes of %s into memory of a GPU cannot be flushed: %v", e.NIC, e.Cause)
}

func (e *flushError) Unwrap() error { return e.Cause }

// notConnectedError is the end of a negotiation at its limit.
type notConnectedError struct{ Limit time.Duration }

func (e *notConnectedError) Error() string {
	return fmt.Sprintf("the queue pairs did not connect within %v", e.Limit)
}

// portError is a listener of the peer outside the ports of relays.
type portError struct {
	NIC   string // of the peer
	Port  uint16
	Ports address.Ports // network.ports
}

func (e *portError) Error() string {
	return fmt.Sprintf("%s listens at port %d, outside network.ports %v", e.NIC, e.Port, e.Ports)
}

// connectError is a failure of the connection manager to connect a queue pair.
type connectError struct {
	NIC, Address, Host   string // of this side
	PeerNIC, PeerAddress string
	Cause                error
}

func (e *connectError) Error() string {
	return fmt.Sprintf("connect %s (%s) of host %s and %s (%s) by RDMA CM: %v", e.NIC, e.Address, e.Host, e.PeerNIC,
		e.PeerAddress, e.Cause)
}

func (e *connectError) Unwrap() error { return e.Cause }

// nicError is a permanent failure of a NIC of this host.
type nicError struct {
	NIC, Host string
	Cause     string // an event, or the text of an error
}

func (e *nicError) Error() string { return fmt.Sprintf("%s of host %s: %s", e.NIC, e.Host, e.Cause) }

// reconnectError is a failure to reconnect. The faults are texts, because the peer may have reported
// them.
type reconnectError struct {
	First, Last string
	Limit       time.Duration
}

func (e *reconnectError) Error() string {
	return fmt.Sprintf("no reconnect within %v after the fault: %s; last: %s", e.Limit, e.First, e.Last)
}

// drainError is a failure to process the writes that arrived before a fault.
type drainError struct {
	Fault string // of this relay or the peer
	Limit time.Duration
}

func (e *drainError) Error() string {
	return fmt.Sprintf("receives did not complete within %v after the fault: %s", e.Limit, e.Fault)
}
