package verbs

/*
#include <stdlib.h>
#include "calls.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"
	"unsafe"
)

// MaxPrivate is the maximum of private data per side of a connection, bytes: the smallest limit of
// rdma-core's transports.
const MaxPrivate = 56

// Manager is an opened librdmacm: connections by IP address, which iWARP needs and InfiniBand and
// RoCE can do. It is safe for use from many goroutines, and is never closed: librdmacm keeps every
// found device open until the process ends, and a driver that cannot revoke a device from users
// (siw) releases the device no sooner.
type Manager struct {
	l     *Library
	calls *C.peerlane_manager
}

// Manager opens librdmacm.so.1. The error is a [*loadError].
func (l *Library) Manager() (*Manager, error) {
	path := managerLibrary
	if l.Software() {
		path = l.path // which stands in for both
	}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	var message [512]C.char
	var missing C.int
	calls := C.peerlane_manager_open(name, &message[0], C.size_t(len(message)), &missing)
	if calls == nil {
		return nil, libraryError(path, C.GoString(&message[0]), missing != 0)
	}
	return &Manager{l: l, calls: calls}, nil
}

// Events are the events of the manager's connections. The manager and its IDs belong to a single
// goroutine at a time.
type Events struct {
	m       *Manager
	channel *C.struct_rdma_event_channel
	ids     map[*C.struct_rdma_cm_id]*ID
}

// NewEvents opens /dev/infiniband/rdma_cm (rdma_create_event_channel).
func (m *Manager) NewEvents() (*Events, error) {
	e := &Events{m: m, ids: map[*C.struct_rdma_cm_id]*ID{}}
	if r := C.peerlane_cm_channel(m.calls, &e.channel); r != 0 {
		return nil, failed(int32(r), "rdma_create_event_channel", "/dev/infiniband/rdma_cm")
	}
	return e, nil
}

// FD is readable when there is an event. The descriptor does not block, and belongs to the events.
func (e *Events) FD() int { return int(e.channel.fd) }

// Close gives the channel back. Every ID has to be closed before.
func (e *Events) Close() error {
	if len(e.ids) > 0 {
		return &Error{Call: "rdma_destroy_event_channel", On: fmt.Sprintf("%d connections", len(e.ids)), Errno: syscall.EBUSY}
	}
	C.peerlane_cm_free_channel(e.m.calls, e.channel)
	return nil
}

// ConnectionKind is the kind of a connection event (rdma_cm_event_type).
type ConnectionKind uint8

// Events of connections.
const (
	AddressResolved ConnectionKind = C.RDMA_CM_EVENT_ADDR_RESOLVED
	AddressError    ConnectionKind = C.RDMA_CM_EVENT_ADDR_ERROR
	RouteResolved   ConnectionKind = C.RDMA_CM_EVENT_ROUTE_RESOLVED
	RouteError      ConnectionKind = C.RDMA_CM_EVENT_ROUTE_ERROR
	ConnectRequest  ConnectionKind = C.RDMA_CM_EVENT_CONNECT_REQUEST
	ConnectError    ConnectionKind = C.RDMA_CM_EVENT_CONNECT_ERROR
	Unreachable     ConnectionKind = C.RDMA_CM_EVENT_UNREACHABLE
	Rejected        ConnectionKind = C.RDMA_CM_EVENT_REJECTED
	Established     ConnectionKind = C.RDMA_CM_EVENT_ESTABLISHED
	Disconnected    ConnectionKind = C.RDMA_CM_EVENT_DISCONNECTED
	DeviceRemoved   ConnectionKind = C.RDMA_CM_EVENT_DEVICE_REMOVAL
	AddressChanged  ConnectionKind = C.RDMA_CM_EVENT_ADDR_CHANGE
	TimeWaitExit    ConnectionKind = C.RDMA_CM_EVENT_TIMEWAIT_EXIT
)

var connectionNames = [...]string{
	"address resolved", "address error", "route resolved", "route error", "connection request",
	"connection response", "connection error", "unreachable", "rejected", "established",
	"disconnected", "device removal", "multicast join", "multicast error", "address change", "timewait exit",
}

func (k ConnectionKind) String() string {
	if int(k) < len(connectionNames) {
		return connectionNames[k]
	}
	return fmt.Sprintf("connection event %d", uint8(k))
}

// ConnectionEvent is something that happened to a connection.
type ConnectionEvent struct {
	Kind ConnectionKind
	ID   *ID // a new one with ConnectRequest
	// Listener is the ID that a ConnectRequest came to.
	Listener *ID
	// Status is 0, a negative errno, or with Rejected the reason of the transport.
	Status  int
	Private []byte // private data of the remote side, padded by some transports
}

// Err is nil for an event that is a step forward.
func (e ConnectionEvent) Err() error {
	switch e.Kind {
	case AddressResolved, RouteResolved, ConnectRequest, Established, TimeWaitExit:
		return nil
	}
	return &ConnectionError{e.Kind, e.Status}
}

// ConnectionError is the error of a ConnectionEvent.
type ConnectionError struct {
	Kind   ConnectionKind
	Status int // of the event
}

func (e *ConnectionError) Error() string {
	if e.Status < 0 {
		return fmt.Sprintf("%s: %v", e.Kind, e.Unwrap())
	}
	return fmt.Sprintf("%s (status %d)", e.Kind, e.Status)
}

// Unwrap returns the errno; nil for a Status of the transport.
func (e *ConnectionError) Unwrap() error {
	if e.Status >= 0 {
		return nil
	}
	return syscall.Errno(-e.Status)
}

// Next takes the next event; ok is false when there is none (rdma_get_cm_event).
func (e *Events) Next() (event ConnectionEvent, ok bool, err error) {
	var c C.peerlane_cm_event
	r := C.peerlane_cm_next(e.m.calls, e.channel, &c)
	switch {
	case syscall.Errno(r) == syscall.EAGAIN:
		return ConnectionEvent{}, false, nil
	case r != 0:
		return ConnectionEvent{}, false, failed(int32(r), "rdma_get_cm_event", "")
	}
	event = ConnectionEvent{Kind: ConnectionKind(c.kind), Status: int(c.status), ID: e.ids[c.id]}
	if c.bytes > 0 {
		event.Private = C.GoBytes(unsafe.Pointer(&c.data[0]), C.int(c.bytes))
	}
	if event.Kind == ConnectRequest {
		event.Listener = e.ids[c.listener]
		event.ID = e.know(c.id)
	}
	return event, true, nil
}

func (e *Events) know(c *C.struct_rdma_cm_id) *ID {
	id := &ID{e: e, c: c}
	e.ids[c] = id
	return id
}

// ID is a connection, or a listener (rdma_cm_id).
type ID struct {
	e    *Events
	c    *C.struct_rdma_cm_id
	lent *Context
	pair *Pair
}

// NewID makes an ID (rdma_create_id).
func (e *Events) NewID() (*ID, error) {
	var c *C.struct_rdma_cm_id
	if r := C.peerlane_cm_id(e.m.calls, e.channel, &c); r != 0 {
		return nil, failed(int32(r), "rdma_create_id", "")
	}
	return e.know(c), nil
}

// Close ends it; close the pair before (rdma_destroy_id).
func (i *ID) Close() error {
	if i.pair != nil {
		return &Error{Call: "rdma_destroy_id", On: "its queue pair is there", Errno: syscall.EBUSY}
	}
	if err := failed(int32(C.peerlane_cm_destroy_id(i.e.m.calls, i.c)), "rdma_destroy_id", ""); err != nil {
		return err
	}
	delete(i.e.ids, i.c)
	return nil
}

// Bind has it be at an address of this host: of one that is a device's [ID.Context] is
// that device, without any connection. Port 0 takes one (rdma_bind_addr).
func (i *ID) Bind(at netip.AddrPort) error {
	a := address(at)
	return failed(int32(C.peerlane_cm_bind(i.e.m.calls, i.c, &a)), "rdma_bind_addr", at.String())
}

// Listen takes connections to an address; port 0 takes one that [ID.Port] tells
// (rdma_bind_addr, rdma_listen).
func (i *ID) Listen(at netip.AddrPort, backlog int) error {
	if err := i.Bind(at); err != nil {
		return err
	}
	return failed(int32(C.peerlane_cm_listen(i.e.m.calls, i.c, C.int(backlog))), "rdma_listen", at.String())
}

// Port is this side's.
func (i *ID) Port() uint16 { return uint16(C.peerlane_cm_port(i.e.m.calls, i.c)) }

// ResolveAddress starts the search for the device of a route to an address, from a source address,
// or from any for the zero value; AddressResolved or AddressError follows.
func (i *ID) ResolveAddress(from, to netip.AddrPort, limit time.Duration) error {
	source, destination := address(from), address(to)
	r := C.peerlane_cm_resolve_address(i.e.m.calls, i.c, &source, &destination, C.int(limit.Milliseconds()))
	return failed(int32(r), "rdma_resolve_addr", to.String())
}

// ResolveRoute begins to look for the way; RouteResolved or RouteError follows.
func (i *ID) ResolveRoute(limit time.Duration) error {
	return failed(
		int32(C.peerlane_cm_resolve_route(i.e.m.calls, i.c, C.int(limit.Milliseconds()))),
		"rdma_resolve_route",
		"",
	)
}

// Context is the device of the connection, after the address is resolved or the request has
// arrived. librdmacm owns the context, one per device and process; domains and queues of the
// connection are made on the context. Close does nothing.
func (i *ID) Context() (*Context, error) {
	if i.c.verbs == nil {
		return nil, errors.New("the connection has no device yet")
	}
	if i.lent == nil {
		if r := C.peerlane_unblock(i.c.verbs.async_fd); r != 0 {
			return nil, failed(int32(r), "fcntl", "the events of a device")
		}
		i.lent = &Context{l: i.e.m.l, c: i.c.verbs, name: C.GoString(&i.c.verbs.device.name[0]), lent: true}
	}
	return i.lent, nil
}

// devicePort is the port of that device.
func (i *ID) devicePort() uint8 { return uint8(i.c.port_num) }

// NewPair makes the connection's queue pair, in a domain of [ID.Context] (rdma_create_qp). The
// connection manager changes the pair's states, so that receives can be posted at once and sends
// from Established on.
func (i *ID) NewPair(d *Domain, config PairConfig) (*Pair, error) {
	a := config.attributes()
	if r := C.peerlane_cm_create_qp(i.e.m.calls, i.c, d.pd, &a); r != 0 {
		return nil, failed(int32(r), "rdma_create_qp", d.c.name)
	}
	i.pair = &Pair{c: d.c, qp: i.c.qp, id: i, inline: int(a.cap.max_inline_data)}
	return i.pair, nil
}

func (i *ID) closePair() error {
	C.peerlane_cm_destroy_qp(i.e.m.calls, i.c)
	i.pair = nil
	return nil
}

// Connection has the negotiated parameters of a connection (rdma_conn_param).
type Connection struct {
	Private         []byte // to the other side, at most MaxPrivate bytes
	Retries         uint8  // as of Sending
	ReceiverRetries uint8
	AnswerReads     uint8 // outstanding reads that this side answers
	InitiateReads   uint8 // and asks for
}

func (c Connection) parameters() (data unsafe.Pointer, p C.struct_rdma_conn_param, err error) {
	if len(c.Private) > MaxPrivate {
		return nil, p, fmt.Errorf("%d bytes of private data; there is room for %d", len(c.Private), MaxPrivate)
	}
	if len(c.Private) > 0 {
		// C gets no pointer into Go memory.
		data = unsafe.Pointer(unsafe.SliceData(slices.Clone(c.Private)))
	}
	return data, C.struct_rdma_conn_param{
		private_data_len:    C.uint8_t(len(c.Private)),
		responder_resources: C.uint8_t(c.AnswerReads),
		initiator_depth:     C.uint8_t(c.InitiateReads),
		retry_count:         C.uint8_t(c.Retries),
		rnr_retry_count:     C.uint8_t(c.ReceiverRetries),
	}, nil
}

// Connect sends the request to the remote side, after the route is resolved; Established, Rejected,
// Unreachable or ConnectError follows (rdma_connect).
func (i *ID) Connect(with Connection) error {
	data, p, err := with.parameters()
	if err != nil {
		return err
	}
	return failed(int32(C.peerlane_cm_connect(i.e.m.calls, i.c, data, &p)), "rdma_connect", "")
}

// Accept accepts a requested connection, after the pair is made; Established follows (rdma_accept).
func (i *ID) Accept(with Connection) error {
	data, p, err := with.parameters()
	if err != nil {
		return err
	}
	return failed(int32(C.peerlane_cm_accept(i.e.m.calls, i.c, data, &p)), "rdma_accept", "")
}

// Reject refuses a requested connection (rdma_reject).
func (i *ID) Reject(private []byte) error {
	data, p, err := Connection{Private: private}.parameters()
	if err != nil {
		return err
	}
	return failed(int32(C.peerlane_cm_reject(i.e.m.calls, i.c, data, p.private_data_len)), "rdma_reject", "")
}

// Disconnect ends a connection: its pair fails, on both sides (rdma_disconnect).
func (i *ID) Disconnect() error {
	return failed(int32(C.peerlane_cm_disconnect(i.e.m.calls, i.c)), "rdma_disconnect", "")
}

// address is a sockaddr; of the zero value it has no family.
func address(a netip.AddrPort) (s C.struct_sockaddr_storage) {
	port := [2]byte{byte(a.Port() >> 8), byte(a.Port())}
	ip := a.Addr()
	switch {
	case ip.Is4(), ip.Is4In6():
		in := (*syscall.RawSockaddrInet4)(unsafe.Pointer(&s))
		in.Family, in.Addr = syscall.AF_INET, ip.As4()
		*(*[2]byte)(unsafe.Pointer(&in.Port)) = port
	case ip.Is6():
		in := (*syscall.RawSockaddrInet6)(unsafe.Pointer(&s))
		in.Family, in.Addr = syscall.AF_INET6, ip.As16()
		*(*[2]byte)(unsafe.Pointer(&in.Port)) = port
	}
	return s
}
