package tcp

import (
	"encoding/binary"

	"github.com/peerlane/peerlane/relay/wire"
)

// The control stream is a sequence of frames: a header (channel, kind, length of what
// follows; 32 bits each) and the payload. All numbers are little-endian.
const frameHeader = 12

// Kinds of frames.
const (
	// frameMessage has a wire message.
	frameMessage = iota + 1
	// frameOpen has the first message of a channel. Who dialed opens channels of odd
	// numbers, the other side those of even ones, each in their order.
	frameOpen
	// frameLeave: its sender says nothing more on the channel, and writes nothing that
	// was granted there.
	frameLeave
	// frameBeat has channel 0, and says that the relay lives.
	frameBeat
	// frameLanded acknowledges a write of the channel: its number, 64 bits.
	frameLanded
	// frameEager has a write of one piece: its header, and its bytes.
	frameEager
	// frameGoodbye has channel 0, and ends all: a wire.Failure.
	frameGoodbye
	// frameExtension has what another transport says, of a channel or, with 0, of all: of
	// version 2.
	frameExtension
)

// MaxExtension bounds what an extension says at a time, bytes.
const MaxExtension = 4 << 10

// maxEager bounds a frameEager's bytes.
const maxEager = 16 << 10

// maxFrame is the longest payload.
const maxFrame = pieceHeader + maxEager

type frame struct {
	channel, kind uint32
	payload       []byte
}

// nextFrame is the first frame in data, whose payload stays there, and its length
// with its header; 0 where it is not complete yet.
func nextFrame(data []byte) (frame, int, error) {
	if len(data) < frameHeader {
		return frame{}, 0, nil
	}
	f := frame{channel: binary.LittleEndian.Uint32(data), kind: binary.LittleEndian.Uint32(data[4:])}
	n := binary.LittleEndian.Uint32(data[8:])
	least, most := uint32(0), uint32(0)
	switch f.kind {
	case frameMessage, frameOpen, frameGoodbye:
		least, most = 8, wire.MaxMessage
	case frameLeave, frameBeat:
	case frameLanded:
		least, most = 8, 8
	case frameEager:
		least, most = pieceHeader+1, pieceHeader+maxEager
	case frameExtension:
		least, most = 1, MaxExtension
	default:
		return f, 0, wire.Errorf(wire.StatusMalformed, "a frame of kind %d, which this version does not know", f.kind)
	}
	if n < least || n > most {
		return f, 0, wire.Errorf(wire.StatusMalformed, "a frame of kind %d with %d bytes: it must have %d to %d", f.kind, n,
			least, most)
	}
	if ofPeer := f.kind == frameBeat || f.kind == frameGoodbye; ofPeer != (f.channel == 0) && f.kind != frameExtension {
		return f, 0, wire.Errorf(wire.StatusMalformed, "a frame of kind %d on channel %d", f.kind, f.channel)
	}
	if len(data) < frameHeader+int(n) {
		return f, 0, nil
	}
	f.payload = data[frameHeader : frameHeader+int(n)]
	return f, frameHeader + int(n), nil
}

// appendFrame appends a frame, whose payload is in parts.
func appendFrame(to []byte, channel, kind uint32, payload ...[]byte) []byte {
	n := 0
	for _, p := range payload {
		n += len(p)
	}
	to = binary.LittleEndian.AppendUint32(to, channel)
	to = binary.LittleEndian.AppendUint32(to, kind)
	to = binary.LittleEndian.AppendUint32(to, uint32(n))
	for _, p := range payload {
		to = append(to, p...)
	}
	return to
}

// piece is a part of a write: on a data stream its header comes first and its bytes
// follow.
type piece struct {
	channel, region uint32
	number          uint64 // of the write, of all its sender's
	immediate       uint64
	offset, length  uint64 // of the whole write in the region, bytes
	at              uint64 // where in the write the piece begins
	bytes           uint32 // of the piece
}

const (
	pieceHeader = 56
	// pieceMark tells a header from bytes that are read for one by mistake.
	pieceMark = 0x45434950 // "PIEC"
)

func (p *piece) header() []byte {
	b := make([]byte, 0, pieceHeader)
	b = binary.LittleEndian.AppendUint32(b, pieceMark)
	b = binary.LittleEndian.AppendUint32(b, p.channel)
	for _, v := range []uint64{p.number, p.immediate, p.offset, p.length, p.at} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	b = binary.LittleEndian.AppendUint32(b, p.region)
	return binary.LittleEndian.AppendUint32(b, p.bytes)
}

// readPiece reads a header, which is a stranger's: of its numbers only the mark is
// checked.
func readPiece(b []byte) (*piece, error) {
	word, long := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	if word(b) != pieceMark {
		return nil, wire.Errorf(wire.StatusMalformed, "bytes on a data stream that are no piece's header")
	}
	return &piece{
		channel: word(b[4:]), number: long(b[8:]), immediate: long(b[16:]), offset: long(b[24:]), length: long(b[32:]),
		at:     long(b[40:]),
		region: word(b[48:]), bytes: word(b[52:]),
	}, nil
}
