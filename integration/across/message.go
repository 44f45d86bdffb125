package across

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
)

// messages are the messages of a side: both sides derive sizes and bytes from the seed, the side
// and the number of the message.
type messages struct {
	random  *rand.Rand
	largest uint64
	seed    uint64
	side    int
	number  uint64
}

func newMessages(seed uint64, side int, largest uint64) *messages {
	return &messages{random: rand.New(rand.NewPCG(seed, uint64(side))), largest: largest, seed: seed, side: side}
}

// edges are the first sizes of an exchange, bytes: sizes around the maximum of messages beside the
// relays' messages, around a piece of a write, and around a slot.
var edges = []uint64{1, 8, 4095, 4096, 4097, 256<<10 - 1, 256<<10 + 1, 1 << 20, 4<<20 + 3}

// next returns the next message's number and size, bytes: 1 to largest, with every power of two
// equally likely.
func (m *messages) next() (number, size uint64) {
	number = m.number
	m.number++
	size = 1 + m.random.Uint64N(1<<m.random.IntN(bits.Len64(m.largest)+1))
	if number < uint64(len(edges)) {
		size = edges[number]
	}
	return number, min(size, m.largest)
}

// fill writes a message's bytes.
func (m *messages) fill(number uint64, to []byte) {
	source := rand.NewPCG(m.seed^uint64(m.side)<<63, number)
	for len(to) >= 8 {
		binary.LittleEndian.PutUint64(to, source.Uint64())
		to = to[8:]
	}
	if len(to) > 0 {
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], source.Uint64())
		copy(to, last[:])
	}
}

// check compares the received bytes with the expected message.
func (m *messages) check(number uint64, got, scratch []byte) error {
	want := scratch[:len(got)]
	m.fill(number, want)
	if bytes.Equal(got, want) { // much faster than the loop in an emulated guest
		return nil
	}
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("byte %d of message %d, of %d bytes, is %#02x instead of %#02x: lost, duplicated or corrupt", i,
				number, len(got), got[i], want[i])
		}
	}
	return nil
}
