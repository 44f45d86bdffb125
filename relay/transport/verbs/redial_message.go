package verbs

// What two relays say when queue pairs that were in use have failed. Either side begins, both
// answer each other alike, and epoch is how often they have done so before:
//
//	fall    what it was, and of which link where they were being connected; this side's
//	        queue pairs are being taken down
//	fallen  they are gone: nothing that was posted to them is read or written any more. How
//	        many writes have arrived
//
// Then offer to use go as the first time. And for each direction:
//
//	path    → of each channel, as it is over the new links
//	resume  → that was all
//	        ← region   of each channel, with its new keys
//	        ← ticket   of each grant whose write has not arrived
//	        ← granted  that was all: what else was under way had arrived
const (
	kindFall = 100 + iota
	kindFallen
	kindResume
	kindGranted
)

type fall struct {
	Kind   uint32
	Epoch  uint32
	Reason [1012]byte
	Link   uint32 // its number plus one, 0 for none
}

// fallen has how many of the other side's writes have arrived since the relays met. That side
// knows how many have been acknowledged to it, and which are granted again.
type fallen struct {
	Kind    uint32
	Epoch   uint32
	Arrived uint64
}

// step is resume or granted.
type step struct {
	Kind  uint32
	Epoch uint32
}

func (*fall) check() error   { return nil }
func (*fallen) check() error { return nil }
func (*step) check() error   { return nil }
