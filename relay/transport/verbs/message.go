package verbs

import (
	"encoding/binary"
	"fmt"

	"github.com/peerlane/peerlane/relay/verbs"
	"github.com/peerlane/peerlane/relay/wire"
)

// Messages between the two sides of a group travel over the control stream of the tcp.Peer. Each
// message has a fixed layout and begins with its kind. Numbers are little-endian. The dialing side
// begins:
//
//	offer   →            the NICs of the dialing side
//	        ←   answer   the NICs of the accepting side, the links, its queue pairs
//	connect →            the queue pairs of the dialing side, or its CM listeners
//	        ←   ready    a write by each queue pair has arrived
//	use     →            the same in the other direction: either side may send data
//
// Before use, either side may send refuse. After use, between the side that opens a channel and its
// peer:
//
//	next    →            the data of the next channel uses RDMA
//	path    →            of the channel: links, and the maximum length of a write
//	        ←   region   memory for granted writes
//	        ←   ticket   the immediate for the write of a grant
//	        ←   arrived  the write has arrived, if the NICs do not report arrival
const (
	kindOffer = iota + 1
	kindAnswer
	kindConnect
	kindReady
	kindUse
	kindRefuse
	kindPath
	kindRegion
	kindTicket
	kindNext
	kindArrived
)

// Limits of a group: NICs, links, and queue pairs of all links.
const (
	maxCards = 8
	maxLinks = 8
	maxPairs = 64
)

const (
	layerInfiniBand = 1
	layerEthernet   = 2 // RoCE
)

// portInfo describes a NIC and its port to the peer.
type portInfo struct {
	Name  [64]byte
	GID   [16]byte
	LID   uint16 // for InfiniBand
	Layer uint8
	MTU   uint8  // 1 to 5 for 256 to 4096 bytes
	Ways  uint32 // needs of the NIC
}

// Bits of portInfo.Ways.
const (
	// wayManaged: the connection manager connects the queue pairs, and GID has the address.
	wayManaged = 1 << iota
	// waySends: the NIC has no write with immediate; a message follows the write.
	waySends
)

func (c *portInfo) is(way uint32) bool { return c.Ways&way != 0 }

// kind returns the property that both NICs of a link share.
func (c *portInfo) kind() string {
	switch {
	case c.is(wayManaged):
		return "iWARP, connected by RDMA CM"
	case c.Layer == layerInfiniBand:
		return "InfiniBand"
	case c.Layer == layerEthernet:
		return "RoCE"
	}
	return fmt.Sprintf("link layer %d", c.Layer)
}

func (c *portInfo) name() string { return wire.Text(c.Name[:]) }

// end is a queue pair of the sender of the message: the number, and the number of the first packet.
// With the connection manager both are unknown, and Number is the index plus one.
type end struct {
	Number, PSN uint32
	// ECE has the connection options of the answering side's queue pair. In the dialing side's message,
	// ECE has the options that the queue pair of the dialing side accepts.
	ECE verbs.ECE
}

// page is memory of pageBytes for the first writes, which test the connection.
type page struct {
	Address uint64
	Keys    [maxCards]uint32 // by NIC of the owner
}

type offer struct {
	Kind  uint32
	Cards uint32
	Pairs uint32 // maximum for each link
	_     uint32
	Card  [maxCards]portInfo
}

// pairing is a link: the NIC of the offering side and the NIC of the answering side.
type pairing struct{ Theirs, Ours uint8 }

type answer struct {
	Kind  uint32
	Cards uint32
	Links uint32
	Pairs uint32 // for each link
	Card  [maxCards]portInfo
	Link  [maxLinks]pairing
	Page  page
	End   [maxPairs]end // sorted by link
	// Secret authenticates the offering side in its answers to connection requests of the
	// connection manager.
	Secret [secretBytes]byte
}

type connect struct {
	Kind uint32
	Ends uint32
	Page page
	End  [maxPairs]end
	// Secret authenticates those connection requests, which go to the Ports of the NICs of this
	// side.
	Secret [secretBytes]byte
	Ports  [maxCards]uint16
}

// short is ready, use or next.
type short struct{ Kind uint32 }

type refusal struct {
	Kind   uint32
	Reason [1020]byte
}

type path struct {
	Kind  uint32
	Links uint32
	Most  uint64 // the longest write, bytes
	Link  [maxLinks]uint8
}

type regionKeys struct {
	Kind    uint32
	Region  uint32
	Address uint64 // of the first byte
	Bytes   uint64
	Keys    [maxCards]uint32 // by NIC of the answering side
	// Weights are the shares of the answering side's NICs in writes to the region; all 0 for equal
	// shares. A NIC with weight 0 carries writes only if no NIC of a path has a weight.
	Weights [maxCards]uint16
}

// ticketed gives a grant the immediate of its write.
type ticketed struct {
	Kind   uint32
	Ticket uint32
	Grant  uint64
}

// arrived reports that the memory has all bytes of a write, if the sender's completion does not
// prove that.
type arrived struct {
	Kind   uint32
	Ticket uint32
}

func encode(m any) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, m)
	if err != nil {
		panic(err) // the layout has no fixed size
	}
	return b
}

func malformed(format string, arguments ...any) error {
	return wire.Errorf(wire.StatusMalformed, format, arguments...)
}

// decode reads a message of the peer and checks every number.
func decode(b []byte) (any, error) {
	if len(b) < 4 {
		return nil, malformed("%w", &fieldError{"RDMA", "length", len(b)})
	}
	var m interface{ check() error }
	switch kind := binary.LittleEndian.Uint32(b); kind {
	case kindOffer:
		m = &offer{}
	case kindAnswer:
		m = &answer{}
	case kindConnect:
		m = &connect{}
	case kindReady, kindUse, kindNext:
		m = &short{}
	case kindRefuse:
		m = &refusal{}
	case kindPath:
		m = &path{}
	case kindRegion:
		m = &regionKeys{}
	case kindTicket:
		m = &ticketed{}
	case kindArrived:
		m = &arrived{}
	case kindReset:
		m = &reset{}
	case kindResetAck:
		m = &resetAck{}
	case kindResume, kindGranted:
		m = &step{}
	default:
		return nil, malformed("%w", &fieldError{"RDMA", "kind", kind})
	}
	if n, err := binary.Decode(b, binary.LittleEndian, m); err != nil || n != len(b) {
		return nil, malformed("%w", &fieldError{fmt.Sprintf("%T", m), "length", len(b)})
	}
	return m, m.check()
}

func checkCards(message string, n uint32, cards []portInfo) error {
	if n > maxCards {
		return malformed("%w", &fieldError{message, "number of NICs", n})
	}
	for i := range cards[:n] {
		c := &cards[i]
		if c.name() == "" {
			return malformed("%w", &fieldError{message, "name of NIC", i})
		}
		if c.Layer != layerInfiniBand && c.Layer != layerEthernet {
			return malformed("%w", &fieldError{message, "link layer", c.Layer})
		}
		if c.MTU < 1 || c.MTU > 5 {
			return malformed("%w", &fieldError{message, "MTU", c.MTU})
		}
	}
	return nil
}

func checkEnds(message string, ends []end) error {
	for _, e := range ends {
		if e.Number == 0 || e.Number >= 1<<24 {
			return malformed("%w", &fieldError{message, "number of queue pair", e.Number})
		}
		if e.PSN >= 1<<24 {
			return malformed("%w", &fieldError{message, "packet number", e.PSN})
		}
	}
	return nil
}

func (m *offer) check() error {
	if m.Cards == 0 {
		return malformed("%w", &fieldError{"offer", "number of NICs", m.Cards})
	}
	if m.Pairs == 0 || m.Pairs > maxPairs {
		return malformed("%w", &fieldError{"offer", "number of queue pairs", m.Pairs})
	}
	return checkCards("offer", m.Cards, m.Card[:])
}

func (m *answer) check() error {
	if m.Links == 0 || m.Links > maxLinks {
		return malformed("%w", &fieldError{"answer", "number of links", m.Links})
	}
	if m.Pairs == 0 || m.Links*min(m.Pairs, maxPairs+1) > maxPairs {
		return malformed("%w", &fieldError{"answer", "number of queue pairs", m.Pairs})
	}
	if err := checkCards("answer", m.Cards, m.Card[:]); err != nil {
		return err
	}
	for _, l := range m.Link[:m.Links] {
		if uint32(l.Ours) >= m.Cards || l.Theirs >= maxCards {
			return malformed("%w", &fieldError{"answer", "link", l})
		}
	}
	return checkEnds("answer", m.End[:m.Links*m.Pairs])
}

func (m *connect) check() error {
	if m.Ends == 0 || m.Ends > maxPairs {
		return malformed("%w", &fieldError{"connect", "number of queue pairs", m.Ends})
	}
	return checkEnds("connect", m.End[:m.Ends])
}

func (*short) check() error   { return nil }
func (*refusal) check() error { return nil }

func (m *path) check() error {
	if m.Links == 0 || m.Links > maxLinks {
		return malformed("%w", &fieldError{"path", "number of links", m.Links})
	}
	if m.Most == 0 {
		return malformed("%w", &fieldError{"path", "length of writes", m.Most})
	}
	seen := map[uint8]bool{}
	for _, l := range m.Link[:m.Links] {
		if l >= maxLinks || seen[l] {
			return malformed("%w", &fieldError{"path", "link", l})
		}
		seen[l] = true
	}
	return nil
}

func (m *regionKeys) check() error {
	if m.Bytes == 0 || m.Address+m.Bytes < m.Address {
		return malformed("%w", &fieldError{"region", "length", m.Bytes})
	}
	return nil
}

func (*ticketed) check() error { return nil }
func (*arrived) check() error  { return nil }
