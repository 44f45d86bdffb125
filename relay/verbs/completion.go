package verbs

/*
#include "calls.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Completion says that a request has ended (ibv_wc). The caller owns the memory again.
type Completion struct {
	ID        uint64 // the request's
	Status    Status
	Op        CompletionOp // of success only
	Bytes     uint32       // received; of success only
	Immediate uint32       // in this machine's byte order; where HasImmediate
	Pair      uint32       // the queue pair's number
	Vendor    uint32       // the device's own code of an error
	// HasImmediate says that a message came with Immediate.
	HasImmediate bool
}

// Go's is C's.
const (
	_ = -(unsafe.Sizeof(Completion{}) ^ unsafe.Sizeof(C.peerlane_completion{}))
	_ = -(unsafe.Offsetof(Completion{}.Pair) ^ unsafe.Offsetof(C.peerlane_completion{}.pair))
	_ = -(unsafe.Sizeof(Send{}) ^ unsafe.Sizeof(C.peerlane_send{}))
	_ = -(unsafe.Offsetof(Send{}.Flags) ^ unsafe.Offsetof(C.peerlane_send{}.flags))
	_ = -(unsafe.Sizeof(Recv{}) ^ unsafe.Sizeof(C.peerlane_recv{}))
)

// CompletionOp is the kind of an ended request (ibv_wc_opcode).
type CompletionOp uint32

// What ends.
const (
	SendDone          CompletionOp = C.IBV_WC_SEND
	WriteDone         CompletionOp = C.IBV_WC_RDMA_WRITE // with an immediate, too
	ReadDone          CompletionOp = C.IBV_WC_RDMA_READ
	Received          CompletionOp = C.IBV_WC_RECV
	ReceivedImmediate CompletionOp = C.IBV_WC_RECV_RDMA_WITH_IMM // of a write, whose bytes are there
)

// Status is how a request ended (ibv_wc_status).
type Status uint32

// Statuses that Peerlane tells apart.
const (
	Success               Status = C.IBV_WC_SUCCESS
	LocalLengthError      Status = C.IBV_WC_LOC_LEN_ERR
	LocalOperationError   Status = C.IBV_WC_LOC_QP_OP_ERR
	LocalProtectionError  Status = C.IBV_WC_LOC_PROT_ERR
	Flushed               Status = C.IBV_WC_WR_FLUSH_ERR
	RemoteInvalidRequest  Status = C.IBV_WC_REM_INV_REQ_ERR
	RemoteAccessError     Status = C.IBV_WC_REM_ACCESS_ERR
	RemoteOperationError  Status = C.IBV_WC_REM_OP_ERR
	RetryExceeded         Status = C.IBV_WC_RETRY_EXC_ERR
	ReceiverRetryExceeded Status = C.IBV_WC_RNR_RETRY_EXC_ERR
)

// The words of ibv_wc_status_str, with explanations for the reader.
var statuses = [...]struct{ name, means string }{
	0:  {"success", ""},
	1:  {"local length error", "a message does not fit the receive that it came for"},
	2:  {"local QP operation error", "the request is not one that this queue pair can do"},
	3:  {"local EE context operation error", ""},
	4:  {"local protection error", "the local memory is not registered for this, or not there any more"},
	5:  {"work request flushed", "the queue pair failed before"},
	6:  {"memory window bind error", ""},
	7:  {"bad response", "the other NIC answered what nobody asked"},
	8:  {"local access error", "what came was to be written where nothing may be written"},
	9:  {"remote invalid request error", "the other NIC cannot do this request"},
	10: {"remote access error", "the other side has not registered that memory for this, or not any more"},
	11: {"remote operation error", "the other NIC failed at it"},
	12: {"transport retry counter exceeded", "the other NIC does not answer: the network, its port or its relay is gone"},
	13: {"RNR retry counter exceeded", "the other side has posted no receive for it"},
	14: {"local RDD violation error", ""},
	15: {"remote invalid RD request", ""},
	16: {"aborted", "the other side gave up"},
	17: {"invalid EE context number", ""},
	18: {"invalid EE context state", ""},
	19: {"fatal error", "the device failed"},
	20: {"response timeout error", ""},
	21: {"general error", "the device does not say what failed"},
	22: {"TM error", ""},
	23: {"TM software rendezvous", ""},
}

func (s Status) String() string {
	if int(s) < len(statuses) {
		return statuses[s].name
	}
	return fmt.Sprintf("completion status %d", uint32(s))
}

// Err is nil for success, else a [*completionError].
func (c *Completion) Err() error {
	if c.Status == Success {
		return nil
	}
	return &completionError{Status: c.Status, Pair: c.Pair, Vendor: c.Vendor}
}

// completionError is the failure of a request, and so of the queue pair.
type completionError struct {
	Status Status
	Pair   uint32
	Vendor uint32
}

func (e *completionError) Error() string {
	text := fmt.Sprintf(
		"queue pair %d: %s (completion status %d, vendor's code %#x)",
		e.Pair,
		e.Status,
		uint32(e.Status),
		e.Vendor,
	)
	if int(e.Status) < len(statuses) && statuses[e.Status].means != "" {
		text += ": " + statuses[e.Status].means
	}
	return text
}
