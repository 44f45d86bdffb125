package relay

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/ring"
	"github.com/peerlane/peerlane/relay/wire"
)

// operation is an operation of a client, or of a remote client on a local region (serves).
type operation struct {
	session        *session
	connection     *connection   // after the post
	began          time.Duration // time of the possible beginning, of the loop's clock
	kind           uint32
	cookie, tag    uint64
	memory         *memory
	offset, length uint64
	wait, signal   uint32
	waitValue      uint64
	signalValue    uint64
	event          *event // that the operation waits for; nil after the event
	inTurn         bool   // the client asks for the turn of a stream
	mayBuffer      bool   // of a send: the client asks for a buffer
	state          operationState
	remote         remote           // of a one-sided operation
	serves         *servedOperation // nil for an operation of a client
	pieces         *pieces          // of a part of a list, in place of memory
	serial         uint64           // among the operations of the connection

	sender   *sender     // that has announced the message; nil for receives and reads
	send     uint64      // the number on the connection
	granted  uint64      // of a send, the bytes that the receiver has room for
	moved    uint64      // bytes that are where they belong
	inPlace  uint64      // of moved, bytes that NICs read or wrote in the client's GPU memory
	underWay int         // accesses to the memory in flight
	failure  wire.Status // of a failing operation
	in       windowKind  // of a send without a grant: the place of the message
	window   int         // the number of the window
	buffered *buffered   // of a send with a buffer; nil without
	entry    uint32      // of a list that failed: the first entry that did
}

// windowKind is the place of a message that a sender has sent without a grant.
type windowKind uint8

const (
	noWindow     windowKind = iota
	remoteWindow            // of a relay of another host
	localWindow             // of a relay of this host, until the receiver's answer
)

// remote is the target of a one-sided operation, as posted by the client.
type remote struct {
	key    wire.UUID
	offset uint64
}

// bind checks the range and holds the memory.
func (op *operation) bind(number uint32, c *connection) wire.Status {
	var need uint32
	switch op.kind {
	case wire.OpSend, wire.OpWrite:
		need = wire.AccessSend
	case wire.OpReceive, wire.OpRead:
		need = wire.AccessReceive
	}
	if need == 0 || (op.kind == wire.OpReceive) == c.sends() {
		return wire.StatusMalformed
	}
	m := op.session.memories[number]
	switch {
	case m == nil || m.state != memoryExported:
		return wire.StatusUnknownMemory
	case m.lane != c.lane:
		return wire.StatusWrongGPU
	case m.access&need == 0, m.kind == wire.MemoryIPC && need == wire.AccessReceive && c.route == wire.RouteDirect:
		// The remote relay would have to write the memory, which no handle permits.
		return wire.StatusNotPermitted
	case op.offset > m.length || op.length > m.length-op.offset:
		return wire.StatusOutOfRange
	}
	m.users++
	op.memory = m
	return wire.StatusOK
}

func (op *operation) due() bool {
	if op.inTurn {
		return op.session.ring.Timeline(op.wait) == wire.TurnRelay && !op.session.turns[op.wait] && op.reached()
	}
	return (op.wait == wire.NoTimeline || ring.Reached(op.session.ring.Timeline(op.wait), op.waitValue)) && op.reached()
}

// begin starts an operation that is due.
func (op *operation) begin() { op.apply(operationBegin, wire.StatusOK) }

// settle reports to the operation that no access to its memory is in flight, if so.
func (op *operation) settle() {
	if op.underWay == 0 {
		op.apply(operationIdle, wire.StatusOK)
	}
}

// finish ends an operation that has no access in flight.
func (op *operation) finish(status wire.Status) { op.apply(operationEnd, status) }

// apply applies an event and runs the action. status is the reason of a failure or an end.
func (op *operation) apply(e operationEvent, status wire.Status) {
	switch operationTable.Must(&op.state, e) {
	case operationStart:
		op.takeTurn()
		op.connection.start(op)
	case operationStartFailed:
		op.takeTurn()
		op.report(wire.StatusUnknownEvent, true)
	case operationWithdraw:
		if op.sender != nil { // the owner of a read's memory gets no message
			op.sender.port.Send(&wire.PeerWithdraw{Send: op.send}, 0)
		}
	case operationAnswer:
		op.complete(op.length, wire.StatusOK, true)
	case operationSettle:
		op.settle()
	case operationSettleFailure:
		op.failure = status
		op.settle()
	case operationConclude:
		op.sender.conclude(op)
	case operationReportUnstarted:
		op.report(status, false)
	case operationReport:
		op.report(status, true)
	case operationReportFailure:
		op.report(op.failure, true)
	case operationRelease:
		op.release(status)
	case operationReleaseFailure:
		op.release(op.failure)
	}
}

// takeTurn takes the turn that the operation has waited for.
func (op *operation) takeTurn() {
	op.began = op.session.relay.loop.Now()
	if op.inTurn {
		op.session.turns[op.wait] = true
	}
}

// endTurn gives the turn back to the stream, also after an error: the stream would wait for ever.
func (op *operation) endTurn() {
	if !op.inTurn {
		return
	}
	delete(op.session.turns, op.wait)
	if op.session.ended == nil {
		op.session.ring.Advance(op.wait, wire.TurnStream)
	}
}

// report ends an operation and gives the client the completion.
func (op *operation) report(status wire.Status, started bool) {
	op.account(status)
	op.complete(op.moved, status, started)
	op.flushed(status)
}

// release ends an operation whose client has the completion.
func (op *operation) release(status wire.Status) {
	op.account(status)
	op.flushed(status)
}

func (op *operation) account(status wire.Status) {
	if op.connection != nil {
		op.connection.over(op, status)
	}
	op.buffered.release()
}

func (op *operation) flushed(status wire.Status) {
	if op.connection != nil && op.serves == nil && op.pieces == nil {
		op.connection.flushes.over(op, status)
	}
}

// complete gives the client the completion and releases the client's memory: at the operation's end, and
// of a buffered send before it. The signal timeline advances also after an error, since a stream that
// waited for the value would wait for ever; the completion tells the difference. An operation that has
// not started leaves the turn to the next.
func (op *operation) complete(moved uint64, status wire.Status, started bool) {
	op.leaveEvent()
	s := op.session
	if op.memory != nil {
		op.memory.release()
	}
	if op.serves != nil {
		op.serves.finish()
		return
	}
	if op.pieces != nil {
		op.pieces.over(op, status)
		return
	}
	if op.signal != wire.NoTimeline && s.ended == nil {
		s.ring.Advance(op.signal, op.signalValue)
	}
	if started {
		op.endTurn()
	}
	s.ring.Complete(wire.Completion{Cookie: op.cookie, Length: moved, Status: uint32(status), Entry: op.entry})
	if s.ring.ClientSleeps() {
		// EAGAIN says that there is enough to read already, EPIPE that the client
		// does not listen.
		_, _ = unix.Write(s.wakeClient, []byte{1})
	}
}
