package network

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/peerlane/peerlane/relay/network/address"
	"github.com/peerlane/peerlane/relay/wire"
)

// Rail is a listening address of a relay, as advertised to the remote side of a session: a handle
// has room for a single address, and not for the interfaces.
type Rail struct {
	// Number is the rail's, from 0; -1 for an address that is on none.
	Number    int
	Endpoint  address.Endpoint
	Interface string
	// Lane says that the lane of the session's listener reaches the rail.
	Lane bool
}

// MaxRails is the most that a relay tells of.
const MaxRails = 16

const (
	interfaceBytes = 16 // IFNAMSIZ of linux/if.h
	railBytes      = 8 + address.EndpointBytes + interfaceBytes
	railsBytes     = 8 + MaxRails*railBytes
	maxRail        = 1023 // as a plan's
)

// TellRails says where this side listens. The message is sealed for the session, so that no
// attacker in between can redirect connects of the remote side; a side sends the message once.
func (s *Session) TellRails(rails []Rail) error {
	if len(rails) > MaxRails {
		return fmt.Errorf("%d rails to tell; at most %d are possible", len(rails), MaxRails)
	}
	label := railsOfListener
	if s.initiated {
		label = railsOfInitiator
	}
	_, err := s.Conn.Write(seal(s.key(), label, encodeRails(rails), nil))
	return err
}

// HearRails reads the message of TellRails.
func (s *Session) HearRails() ([]Rail, error) {
	label := railsOfInitiator
	if s.initiated {
		label = railsOfListener
	}
	sealed := make([]byte, railsBytes+tagBytes)
	if _, err := io.ReadFull(s.Conn, sealed); err != nil {
		return nil, fmt.Errorf("the rails of %s: %w", s.Peer, err)
	}
	text, err := open(s.key(), label, sealed)
	if err != nil {
		return nil, wire.Errorf(wire.StatusMalformed, "%s: %w", s.Peer, errForeignRails)
	}
	return decodeRails(text)
}

const (
	railsOfInitiator = "rails of the initiator"
	railsOfListener  = "rails of the listener"
)

// encodeRails makes a count (64 bits) and MaxRails of: number and flags (32 bits each), an
// endpoint, an interface's name. Unused bytes are zero.
func encodeRails(rails []Rail) []byte {
	b := make([]byte, 0, railsBytes)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(rails)))
	for _, r := range rails {
		var name [interfaceBytes]byte
		wire.SetText(name[:], r.Interface)
		at := r.Endpoint.Encode()
		b = binary.LittleEndian.AppendUint32(b, uint32(int32(r.Number)))
		b = binary.LittleEndian.AppendUint32(b, map[bool]uint32{true: 1}[r.Lane])
		b = append(append(b, at[:]...), name[:]...)
	}
	return b[:railsBytes]
}

func decodeRails(text []byte) ([]Rail, error) {
	if len(text) != railsBytes {
		return nil, wire.Errorf(wire.StatusMalformed, "rails of %d bytes", len(text))
	}
	count := binary.LittleEndian.Uint64(text)
	if count > MaxRails {
		return nil, wire.Errorf(wire.StatusMalformed, "%d rails; at most %d are possible", count, MaxRails)
	}
	rails := make([]Rail, count)
	for i := range rails {
		b := text[8+i*railBytes:][:railBytes]
		number, flags := int32(binary.LittleEndian.Uint32(b)), binary.LittleEndian.Uint32(b[4:])
		at, err := address.DecodeEndpoint([address.EndpointBytes]byte(b[8:]))
		if err != nil {
			return nil, wire.Errorf(wire.StatusMalformed, "rail %d: %v", number, err)
		}
		if number < -1 || number > maxRail || flags > 1 {
			return nil, wire.Errorf(wire.StatusMalformed, "rail %d, flags %#x", number, flags)
		}
		rails[i] = Rail{
			Number:    int(number),
			Endpoint:  at,
			Interface: wire.Text(b[8+address.EndpointBytes:]),
			Lane:      flags == 1,
		}
	}
	return rails, nil
}
