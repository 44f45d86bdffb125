package traffic

import (
	"math"
	"math/rand/v2"

	"github.com/peerlane/peerlane/cuda/kernels"
)

// Round is messages that two clients send each other at once. Both derive all of it
// from the seed.
type Round struct {
	Seed     uint64
	Messages int    // in each direction, at most: as many as the buffers have room for
	Largest  uint64 // bytes; sizes are log-uniform from 1 on
	// How a message that is sent, and one that is received, is handed over.
	Hand string
}

// How GPU memory is handed over between a client's stream and its relay.
const (
	HandPlain    = "plain"    // the CPU waits for the stream, and for the operation
	HandTimeline = "timeline" // After and Signal
	HandOver     = "hand-over"
)

// message is one of a round: where it begins in the sender's buffer, and in the
// receiver's, of which the bytes beside it must stay as they were.
type message struct {
	size, from, to uint64
	pattern        kernels.Pattern // of the word that `from` lies in, and those after it
}

// margin is how many bytes before and after each message are compared, and belong to no
// other one.
const margin = 64

// messages are those that one side sends; both sides' buffers have so many bytes.
func (r Round) messages(sender int, bytes uint64) []message {
	random := rand.New(rand.NewPCG(r.Seed, uint64(sender)))
	// A gap is as odd as a size.
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
			// The first one is cut to what there is.
			m.from, m.to = m.from%margin+margin, m.to%margin+margin
			m.size = min(size, bytes-4*margin)
			return append(list, m)
		}
		list = append(list, m)
	}
	return list
}

// canary is what the receiver's buffer has before a round.
func (r Round) canary(sender int) kernels.Pattern {
	return kernels.Pattern{Seed: ^(r.Seed + uint64(sender))}
}

// byteOf is a byte of a pattern.
func byteOf(p kernels.Pattern, i uint64) byte { return byte(p.Word(i/8) >> (i % 8 * 8)) }

// shift is where a message begins in its pattern.
func (m message) shift() uint64 { return m.from % 8 }
