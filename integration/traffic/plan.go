package traffic

import (
	"math"
	"math/rand/v2"

	"github.com/peerlane/peerlane/cuda/kernels"
)

// round has the messages that two clients exchange at the same time. Both clients derive the round
// from the seed.
type round struct {
	Seed     uint64
	Messages int    // per direction, at most: as many as fit into the buffers
	Largest  uint64 // bytes; sizes are log-uniform from 1 on
	// Hand is the hand-over of sent messages, and of received messages.
	Hand string
}

// Kinds of hand-over of GPU memory between a client's stream and the client's relay.
const (
	HandPlain    = "plain"    // the CPU waits for the stream, and for the operation
	HandTimeline = "timeline" // After and Signal
	HandOver     = "hand-over"
)

// message is a message of a round: the offset in the sender's buffer, and in the receiver's buffer,
// whose neighbouring bytes must not change.
type message struct {
	size, from, to uint64
	pattern        kernels.Pattern // of the word of from, and of the following words
}

// margin is the number of compared bytes before and after a message, which belong to no other
// message.
const margin = 64

// messages returns the messages that a side sends; bytes is the size of the buffers of both sides.
func (r round) messages(sender int, bytes uint64) []message {
	random := rand.New(rand.NewPCG(r.Seed, uint64(sender)))
	// Gaps have any alignment, like sizes.
	gap := func() uint64 { return 2*margin + random.Uint64N(4096) }
	var list []message
	from, to := gap(), gap()
	for i := range r.Messages {
		size := min(r.Largest, uint64(math.Exp(random.Float64()*math.Log(float64(r.Largest+1)))))
		m := message{size: size, from: from, to: to, pattern: kernels.Pattern{Seed: r.Seed + uint64(sender)<<32 + uint64(i)}}
		from, to = from+size+gap(), to+size+gap()
		if max(from, to) > bytes {
			if len(list) > 0 {
				break
			}
			// The first message is cut to the buffer.
			m.from, m.to = m.from%margin+margin, m.to%margin+margin
			m.size = min(size, bytes-4*margin)
			return append(list, m)
		}
		list = append(list, m)
	}
	return list
}

// canary returns the content of the receiver's buffer before a round.
func (r round) canary(sender int) kernels.Pattern {
	return kernels.Pattern{Seed: ^(r.Seed + uint64(sender))}
}

// byteOf returns byte i of a pattern.
func byteOf(p kernels.Pattern, i uint64) byte { return byte(p.Word(i/8) >> (i % 8 * 8)) }

// shift returns the offset of a message in the pattern.
func (m message) shift() uint64 { return m.from % 8 }
