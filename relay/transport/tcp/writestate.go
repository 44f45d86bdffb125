package tcp

import "github.com/peerlane/peerlane/relay/internal/statemachine"

// writeState is the state of an outstanding write, under sendQueue's lock. The write ends when the peer has
// acknowledged the bytes and neither a writer nor the kernel reads the source.
type writeState uint8

const (
	writeSending writeState = iota // a writer or the kernel reads the source
	writeSent                      // the source is free
	writeAcked                     // acknowledged; a writer or the kernel reads the source
	writeDone
)

type writeEvent uint8

const (
	writeFreed writeEvent = iota // nothing reads the source any more
	writeAck                     // the peer has the bytes
)

type writeAction uint8

const (
	writeNothing writeAction = iota
	writeFinish
	writeCount       // the write is no longer unacknowledged
	writeCountFinish // the same, and finish
)

// writeTable has the cells of a write.
var writeTable = statemachine.New("write", statemachine.Names{
	States:  []string{"sending", "sent", "acknowledged", "done"},
	Events:  []string{"freed", "ack"},
	Actions: []string{"none", "finish", "count", "count, finish"},
}, statemachine.Cells[writeState, writeEvent, writeAction]{
	writeSending: {
		writeFreed: {Next: writeSent},
		writeAck:   {Next: writeAcked, Action: writeCount},
	},
	writeSent: {
		writeAck: {Next: writeDone, Action: writeCountFinish},
	},
	writeAcked: {
		writeFreed: {Next: writeDone, Action: writeFinish},
		writeAck:   {Next: writeAcked},
	},
	writeDone: {
		writeAck: {Next: writeDone},
	},
})
