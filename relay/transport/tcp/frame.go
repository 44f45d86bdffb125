package tcp

import (
	"encoding/binary"

	"github.com/peerlane/peerlane/relay/wire"
)

// The control stream is a sequence of frames: a header (channel, kind, length of the payload; 32
// bits each) and the payload. Numbers are little-endian.
const frameHeader = 12

// Kinds of frames.
const (
	// frameMessage has a wire message.
	frameMessage = iota + 1
	// frameOpen has the first message of a channel. The dialing side opens channels with odd
	// numbers, the accepting side channels with even numbers, both in ascending order.
	frameOpen
	// frameLeave: the sender sends no more messages on the channel and writes under no grant of the
	// channel.
	frameLeave
	// frameBeat is a heartbeat, with channel 0.
	frameBeat
	// frameLanded acknowledges a write of the channel: its number, 64 bits.
	frameLanded
	// frameEager has a write of one piece: its header, and its bytes.
	frameEager
	// frameGoodbye ends the Peer, with channel 0 and a wire.Failure.
	frameGoodbye
	// frameExtension has a message of an extension about a channel, or with channel 0 about the
	// Peer; from version 2 on.
	frameExtension
)

// MaxExtension is the maximum length of an extension's message, bytes.
const MaxExtension = 4 << 10

// maxEager is the maximum number of data bytes in a frameEager.
const maxEager = 16 << 10

// maxFrame is the longest payload.
const maxFrame = pieceHeader + maxEager

type frame struct {
	channel, kind uint32
	payload       []byte
}

// nextFrame returns the first frame in data and its length with the header; 0 for an incomplete
// frame. The payload aliases data.
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
		return f, 0, wire.Errorf(wire.StatusMalformed, "frame of unknown kind %d", f.kind)
	}
	if n < least || n > most {
		return f, 0, wire.Errorf(wire.StatusMalformed, "frame of kind %d with %d bytes: the kind has %d to %d", f.kind, n,
			least, most)
	}
	if ofPeer := f.kind == frameBeat || f.kind == frameGoodbye; ofPeer != (f.channel == 0) && f.kind != frameExtension {
		return f, 0, wire.Errorf(wire.StatusMalformed, "frame of kind %d on channel %d", f.kind, f.channel)
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

// piece is a part of a write. On a data stream the bytes follow the header.
type piece struct {
	channel, region uint32
	number          uint64 // of the write, among the sender's writes
	immediate       uint64
	offset, length  uint64 // of the whole write in the region, bytes
	at              uint64 // offset of the piece in the write
	bytes           uint32 // of the piece
}

const (
	pieceHeader = 56
	// pieceMark distinguishes a header from other bytes.
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

// readPiece reads the header of an untrusted peer. readPiece checks only the mark.
func readPiece(b []byte) (*piece, error) {
	word, long := binary.LittleEndian.Uint32, binary.LittleEndian.Uint64
	if word(b) != pieceMark {
		return nil, wire.Errorf(wire.StatusMalformed, "invalid header of a piece on a data stream")
	}
	return &piece{
		channel: word(b[4:]), number: long(b[8:]), immediate: long(b[16:]), offset: long(b[24:]), length: long(b[32:]),
		at:     long(b[40:]),
		region: word(b[48:]), bytes: word(b[52:]),
	}, nil
}
