package verbs

/*
#include "calls.h"

#cgo noescape peerlane_post_send
#cgo nocallback peerlane_post_send
#cgo noescape peerlane_post_recv
#cgo nocallback peerlane_post_recv
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// PairConfig has the parameters of a queue pair.
type PairConfig struct {
	Send, Recv *Queue // where completions go; may be the same
	// SendDepth and RecvDepth are how many requests can be posted that have not ended. An
	// unsignalled request ends with the next signalled completion.
	SendDepth, RecvDepth int
	// Inline is up to how many bytes a request with the flag Inline may have.
	Inline int
}

func (p PairConfig) attributes() C.struct_ibv_qp_init_attr {
	return C.struct_ibv_qp_init_attr{
		send_cq: p.Send.cq,
		recv_cq: p.Recv.cq,
		cap: C.struct_ibv_qp_cap{
			max_send_wr:     C.uint32_t(p.SendDepth),
			max_recv_wr:     C.uint32_t(p.RecvDepth),
			max_send_sge:    1,
			max_recv_sge:    1,
			max_inline_data: C.uint32_t(p.Inline),
		},
		qp_type: C.IBV_QPT_RC,
	}
}

// Pair is a reliable connected (RC) queue pair.
type Pair struct {
	c  *Context
	qp *C.struct_ibv_qp
	// id is the pair's connection, if the connection manager made the pair.
	id *ID
	// inline is how many bytes the device lets be inline.
	inline int
}

// NewPair makes a queue pair (ibv_create_qp). It is in state Reset; [Pair.Init],
// [Pair.ReadyToReceive] and [Pair.ReadyToSend] connect the pair with a second pair.
func (d *Domain) NewPair(config PairConfig) (*Pair, error) {
	p := &Pair{c: d.c}
	a := config.attributes()
	if r := C.peerlane_create_qp(d.c.l.calls, d.pd, &a, &p.qp); r != 0 {
		return nil, failed(
			int32(r),
			"ibv_create_qp",
			fmt.Sprintf("%s, %d sends, %d receives", d.c.name, config.SendDepth, config.RecvDepth),
		)
	}
	p.inline = int(a.cap.max_inline_data)
	return p, nil
}

// Number is the number for the remote side, 24 bits.
func (p *Pair) Number() uint32 { return uint32(p.qp.qp_num) }

// inlineBytes is up to how many bytes a request with the flag inlineBytes may have.
func (p *Pair) inlineBytes() int { return p.inline }

// PairState is a queue pair's state (ibv_qp_state).
type PairState uint8

// States.
const (
	Reset          PairState = C.IBV_QPS_RESET
	Init           PairState = C.IBV_QPS_INIT
	ReadyToReceive PairState = C.IBV_QPS_RTR
	ReadyToSend    PairState = C.IBV_QPS_RTS
	Failed         PairState = C.IBV_QPS_ERR
)

func (s PairState) String() string {
	names := []string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// State asks the device (ibv_query_qp).
func (p *Pair) State() (PairState, error) {
	var a C.struct_ibv_qp_attr
	if r := C.peerlane_query_qp(p.c.l.calls, p.qp, &a); r != 0 {
		return 0, failed(int32(r), "ibv_query_qp", p.on())
	}
	return PairState(a.qp_state), nil
}

func (p *Pair) on() string { return fmt.Sprintf("%s, queue pair %d", p.c.name, p.Number()) }

func (p *Pair) modify(to PairState, a *C.struct_ibv_qp_attr, mask C.int) error {
	a.qp_state = C.int(to)
	r := C.peerlane_modify_qp(p.c.l.calls, p.qp, a, mask|C.IBV_QP_STATE)
	if r == 0 {
		return nil
	}
	return failed(int32(r), "ibv_modify_qp", p.on()+", to "+to.String())
}

// Init lets receives be posted. Access is the permitted remote access.
func (p *Pair) Init(port uint8, pkeyIndex uint16, access Access) error {
	a := C.struct_ibv_qp_attr{
		port_num:        C.uint8_t(port),
		pkey_index:      C.uint16_t(pkeyIndex),
		qp_access_flags: C.uint(access),
	}
	return p.modify(Init, &a, C.IBV_QP_PORT|C.IBV_QP_PKEY_INDEX|C.IBV_QP_ACCESS_FLAGS)
}

// Route is the route to the remote pair.
type Route struct {
	Pair uint32 // the other one's number
	PSN  uint32 // that the other one begins with, 24 bits
	MTU  MTU    // the smaller one of both ports
	LID  uint16 // the other port's, on InfiniBand
	// Global has packets carry GIDs, as RoCE and routed InfiniBand need.
	Global       bool
	GID          [16]byte // the other port's
	SourceIndex  uint8    // of this port's GID table
	HopLimit     uint8
	TrafficClass uint8 // DSCP in its upper six bits
	ServiceLevel uint8
	Port         uint8 // of this side
	// Reads is how many of the other side's reads may be under way, 1 to
	// Attributes.PairReads.
	Reads uint8
	// ReceiverTimer is the wait of the remote side without a posted receive: a code of the
	// InfiniBand specification, 12 for 0.64 ms.
	ReceiverTimer uint8
}

// ReadyToReceive enables answers to remote requests.
func (p *Pair) ReadyToReceive(to Route) error {
	a := C.struct_ibv_qp_attr{
		path_mtu:           C.int(to.MTU),
		dest_qp_num:        C.uint32_t(to.Pair),
		rq_psn:             C.uint32_t(to.PSN),
		max_dest_rd_atomic: C.uint8_t(to.Reads),
		min_rnr_timer:      C.uint8_t(to.ReceiverTimer),
	}
	a.ah_attr.dlid = C.uint16_t(to.LID)
	a.ah_attr.sl = C.uint8_t(to.ServiceLevel)
	a.ah_attr.port_num = C.uint8_t(to.Port)
	if to.Global {
		a.ah_attr.is_global = 1
		setGID(&a.ah_attr.grh.dgid, to.GID)
		a.ah_attr.grh.sgid_index = C.uint8_t(to.SourceIndex)
		a.ah_attr.grh.hop_limit = C.uint8_t(to.HopLimit)
		a.ah_attr.grh.traffic_class = C.uint8_t(to.TrafficClass)
	}
	return p.modify(ReadyToReceive, &a,
		C.IBV_QP_AV|C.IBV_QP_PATH_MTU|C.IBV_QP_DEST_QPN|C.IBV_QP_RQ_PSN|C.IBV_QP_MAX_DEST_RD_ATOMIC|C.IBV_QP_MIN_RNR_TIMER)
}

// ECE has the offered, or accepted, options of Enhanced Connection Establishment (ibv_ece).
type ECE struct {
	Vendor  uint32 // IEEE OUI, 0 without ECE
	Options uint32
	Mask    uint32
}

// ECE returns the options of a queue pair: the device's options until SetECE, then the accepted
// options (ibv_query_ece). Without support the error is EOPNOTSUPP.
func (p *Pair) ECE() (ECE, error) {
	var e C.struct_ibv_ece
	if r := C.peerlane_query_ece(p.c.l.calls, p.qp, &e); r != 0 {
		return ECE{}, failed(int32(r), "ibv_query_ece", p.on())
	}
	return ECE{uint32(e.vendor_id), uint32(e.options), uint32(e.comp_mask)}, nil
}

// SetECE requests options of the remote side. The device applies the options at ReadyToReceive
// (ibv_set_ece).
func (p *Pair) SetECE(to ECE) error {
	e := C.struct_ibv_ece{
		vendor_id: C.uint32_t(to.Vendor),
		options:   C.uint32_t(to.Options),
		comp_mask: C.uint32_t(to.Mask),
	}
	return failed(int32(C.peerlane_set_ece(p.c.l.calls, p.qp, &e)), "ibv_set_ece", p.on())
}

// Sending is how a pair sends.
type Sending struct {
	PSN             uint32 // that this side begins with, 24 bits
	Timeout         uint8  // for an acknowledgement, 4.096 µs × 2^Timeout; 0 for ever
	Retries         uint8  // 0 to 7
	ReceiverRetries uint8  // where no receive is posted, 0 to 6; 7 for ever
	Reads           uint8  // of this side that may be under way
}

// ReadyToSend lets this side's requests be sent.
func (p *Pair) ReadyToSend(how Sending) error {
	a := C.struct_ibv_qp_attr{
		sq_psn:        C.uint32_t(how.PSN),
		timeout:       C.uint8_t(how.Timeout),
		retry_cnt:     C.uint8_t(how.Retries),
		rnr_retry:     C.uint8_t(how.ReceiverRetries),
		max_rd_atomic: C.uint8_t(how.Reads),
	}
	return p.modify(ReadyToSend, &a,
		C.IBV_QP_SQ_PSN|C.IBV_QP_TIMEOUT|C.IBV_QP_RETRY_CNT|C.IBV_QP_RNR_RETRY|C.IBV_QP_MAX_QP_RD_ATOMIC)
}

// Fail ends it: posted requests complete as Flushed, and the pair sends and writes nothing.
func (p *Pair) Fail() error { return p.modify(Failed, &C.struct_ibv_qp_attr{}, 0) }

// Close destroys the pair, and unpolled completions are lost (ibv_destroy_qp).
func (p *Pair) Close() error {
	if p.id != nil {
		return p.id.closePair()
	}
	on := p.on() // its number is not there any more afterwards
	return failed(int32(C.peerlane_destroy_qp(p.c.l.calls, p.qp)), "ibv_destroy_qp", on)
}

// Op is the operation of a send request (ibv_wr_opcode).
type Op uint32

// Operations of send requests. Operations with an immediate, and SendMessage, use a receive of the
// remote side.
const (
	Write                Op = C.IBV_WR_RDMA_WRITE
	WriteImmediate       Op = C.IBV_WR_RDMA_WRITE_WITH_IMM
	SendMessage          Op = C.IBV_WR_SEND
	SendMessageImmediate Op = C.IBV_WR_SEND_WITH_IMM
	Read                 Op = C.IBV_WR_RDMA_READ
)

// SendFlags go with a send request (ibv_send_flags).
type SendFlags uint32

// Flags of send requests.
const (
	Fence     SendFlags = C.IBV_SEND_FENCE    // after the reads before it
	Signaled  SendFlags = C.IBV_SEND_SIGNALED // completes also on success
	Solicited SendFlags = C.IBV_SEND_SOLICITED
	Inline    SendFlags = C.IBV_SEND_INLINE // bytes are taken when it is posted, and need no region
)

// Send is a send request of a single piece of memory.
type Send struct {
	ID        uint64 // comes back with the completion
	Address   uint64 // of this side's memory, within its region's addresses
	Remote    uint64 // of the other side's memory: writes and reads
	Length    uint32 // bytes; of 0 there is no memory
	LKey      uint32
	RKey      uint32
	Immediate uint32 // in this machine's byte order
	Op        Op
	Flags     SendFlags
}

// PostSend posts requests in order, and says how many were posted: the requests before the failed
// request (ibv_post_send). ENOMEM: the queue is full.
func (p *Pair) PostSend(sends []Send) (int, error) {
	var posted C.int
	r := C.peerlane_post_send(
		p.qp,
		(*C.peerlane_send)(unsafe.Pointer(unsafe.SliceData(sends))),
		C.int(len(sends)),
		&posted,
	)
	if r != 0 {
		return int(posted), failed(int32(r), "ibv_post_send", p.on())
	}
	return len(sends), nil
}

// Recv is a receive request of a single piece of memory; of Length 0 it takes an immediate alone.
type Recv struct {
	ID      uint64 // comes back with the completion
	Address uint64
	Length  uint32
	LKey    uint32
}

// PostRecv posts receives in order, and says how many were posted: the requests before the failed
// request (ibv_post_recv). ENOMEM: the queue is full.
func (p *Pair) PostRecv(receives []Recv) (int, error) {
	var posted C.int
	r := C.peerlane_post_recv(
		p.qp,
		(*C.peerlane_recv)(unsafe.Pointer(unsafe.SliceData(receives))),
		C.int(len(receives)),
		&posted,
	)
	if r != 0 {
		return int(posted), failed(int32(r), "ibv_post_recv", p.on())
	}
	return len(receives), nil
}

// A GID in C is an array of bytes in a union, which Go sees as bytes.
func setGID(to *[16]byte, gid [16]byte) { *to = gid }
func gidBytes(from *[16]byte) [16]byte  { return *from }
