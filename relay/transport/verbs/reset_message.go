package verbs

import "github.com/peerlane/peerlane/relay/wire"

// Messages of two relays after a failure of queue pairs in use. Either side begins, and the other
// side answers with the same messages. epoch counts the resets:
//
//	reset     the cause, and the link during a connection; the sender takes its queue
//	          pairs down
//	resetAck  the queue pairs are gone: no NIC reads or writes for their requests. Has the
//	          number of writes that have arrived
//
// Then follow offer to use, as in the first negotiation, and for each direction:
//
//	path    → of each channel, over the new links
//	resume  → end of the paths
//	        ← region   of each channel, with new keys
//	        ← ticket   for each grant whose write has not arrived
//	        ← granted  end of the tickets: every other write had arrived
const (
	kindReset = 100 + iota
	kindResetAck
	kindResume
	kindGranted
)

type reset struct {
	Kind   uint32
	Epoch  uint32
	Reason [1012]byte
	Link   uint32 // index plus one; 0 for none
}

// resetAck has the number of the receiver's writes that have arrived since the first negotiation.
// The receiver knows the number of acknowledged writes and the writes with another ticket.
type resetAck struct {
	Kind    uint32
	Epoch   uint32
	Arrived uint64
}

// step is resume or granted.
type step struct {
	Kind  uint32
	Epoch uint32
}

func (m *reset) reason() string { return wire.Text(m.Reason[:]) }

func (*reset) check() error    { return nil }
func (*resetAck) check() error { return nil }
func (*step) check() error     { return nil }
