package selftest

import (
	"errors"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
)

// Times of the measurements. A rate is the best of a few short rounds: a disturbance makes a round
// slower, never faster.
const (
	rateRounds = 3
	fewRounds  = 2 // of the calibration, which compares many
	roundTime  = time.Millisecond
	longTime   = 100 * time.Millisecond
	// calibrationTime bounds the calibration of a pair, but for the round that is
	// under way when it is over.
	calibrationTime = 200 * time.Millisecond
	// againTime is how long a pair that seems slow is measured again, and againPause the time
	// between: foreign copies share the path, with pauses.
	againTime  = 1500 * time.Millisecond
	againPause = 20 * time.Millisecond
)

// bounceChunk is the size of the pieces that the best bounces work in, bytes.
const bounceChunk = 4 << 20

// best is the best rate of some rounds, GB/s, or of one where that takes long, as on simulated
// GPUs, whose rates say nothing about GPUs. A round issues at least two pieces until the time is
// over, waits for the pieces, and returns their bytes.
func (b *bench) best(rounds int, round func(until time.Time) (uint64, error)) (float64, error) {
	if b.driver.Simulated() {
		rounds = 1
	}
	rate := 0.0
	for i, begun := 0, time.Now(); i < rounds && time.Since(begun) < longTime; i++ {
		start := time.Now()
		n, err := round(start.Add(roundTime))
		if err != nil {
			return 0, err
		}
		rate = max(rate, float64(n)/time.Since(start).Seconds()/1e9)
	}
	return rate, nil
}

// plan is how a message is cut and issued.
type plan struct {
	chunk          uint64
	depth, streams int
}

// minPieces is the minimum number of pieces of a round, for any size.
const minPieces = 4

// through is the rate of a plan, by the relay's own queues.
func (b *bench) through(rounds int, p plan, pull bool) (rate float64, err error) {
	b.copies.await(func() { rate, err = b.rounds(rounds, p, pull) })
	return rate, err
}

func (b *bench) rounds(rounds int, p plan, pull bool) (float64, error) {
	return b.best(rounds, func(until time.Time) (uint64, error) {
		var moved uint64
		var failed error
		underWay := 0
		poll := func() {
			progress := false
			for _, q := range b.queues[:p.streams] {
				progress = q.Poll() || progress
			}
			if !progress && b.driver.Simulated() { // whose streams are threads that need a processor, too
				time.Sleep(20 * time.Microsecond)
			}
		}
		for i := 0; i < max(p.depth, minPieces) || time.Now().Before(until); i++ {
			for underWay == p.depth {
				poll()
			}
			if failed != nil {
				break
			}
			at := uint64(i) % (memory / p.chunk) * p.chunk
			to, from := b.slots.At(at), b.mine.At(at)
			if pull {
				to, from = from, to
			}
			underWay++
			b.queues[i%p.streams].Move(to, from, p.chunk, func(err error) {
				underWay--
				b.copies.step.Add(1)
				moved += p.chunk
				failed = errors.Join(failed, err)
			})
		}
		for underWay > 0 {
			poll()
		}
		return moved, failed
	})
}

// simple is the rate of copies of a single call in a GPU's stream.
func (b *bench) simple(by *device.Device, chunk uint64, issue func(s cuda.Stream) error) (float64, error) {
	return b.best(rateRounds, func(until time.Time) (uint64, error) {
		var moved uint64
		for moved == 0 || time.Now().Before(until) {
			// Two pieces are in flight, so that the next piece starts at the end of the previous
			// piece.
			if err := b.byItself(by, func(s cuda.Stream) error { return errors.Join(issue(s), issue(s)) }); err != nil {
				return 0, err
			}
			moved += 2 * chunk
		}
		return moved, nil
	})
}

// rates measures a pair's copies, and the copies of the comparison.
func (b *bench) rates(p *launch.Pair) error {
	d, host := b.driver, unsafe.Pointer(&b.view[0])
	whole := plan{chunk: memory, depth: 2, streams: 1}
	type measured struct {
		rate    *float64
		measure func() (float64, error)
	}
	const comparable = 4 // of the list, by which a pair is slow or not
	list := []measured{
		{&p.Push.Client, func() (float64, error) { return b.through(rateRounds, whole, false) }},
		{&p.Pull.Client, func() (float64, error) { return b.through(rateRounds, whole, true) }},
		{&p.Push.Bounce, func() (float64, error) {
			return b.simple(
				b.client,
				bounceChunk,
				func(s cuda.Stream) error { return d.MemcpyDtoHAsync(host, b.mine.Ptr, bounceChunk, s) },
			)
		}},
		{&p.Pull.Bounce, func() (float64, error) {
			return b.simple(
				b.client,
				bounceChunk,
				func(s cuda.Stream) error { return d.MemcpyHtoDAsync(b.mine.Ptr, host, bounceChunk, s) },
			)
		}},
	}
	// The rate with a context on the server's GPU. A relay has no such context, so a failure here
	// fails no pair.
	if b.mine.Allow(cuda.Access{Device: b.server.Ordinal, Write: true}) == nil {
		byServer := func(to, from cuda.Ptr) func() (float64, error) {
			return func() (rate float64, err error) {
				b.copies.await(func() {
					rate, err = b.simple(b.server, memory, func(s cuda.Stream) error {
						b.copies.step.Add(1)
						return d.MemcpyAsync(to, from, memory, s)
					})
				})
				return rate, err
			}
		}
		list = append(
			list,
			measured{&p.Push.Server, byServer(b.slots.Ptr, b.mine.Ptr)},
			measured{&p.Pull.Server, byServer(b.mine.Ptr, b.slots.Ptr)},
		)
	}
	for _, ends := range [][2]device.Place{{b.slots.At(0), b.mine.At(0)}, {b.mine.At(0), b.slots.At(0)}} { // to warm up
		if err := b.copy(ends[0], ends[1], memory); err != nil {
			return err
		}
	}
	measure := func(list []measured) error {
		for _, m := range list {
			rate, err := m.measure()
			if err != nil {
				return err
			}
			*m.rate = max(*m.rate, rate)
		}
		return nil
	}
	err := measure(list)
	for end := time.Now().Add(againTime); err == nil && b.slow(p) != "" && time.Now().Before(end); time.Sleep(againPause) {
		err = measure(list[:comparable])
	}
	return err
}

// The candidates and the target of the calibration: the smallest values with this share of the best
// measured rate. Small pieces overlap with the next leg, and few pieces take little memory.
var (
	chunks = []uint64{1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20}
	depths = []int{1, 2, 4, 8}
)

const (
	fullDepth     = 4
	content       = 0.97
	depthContent  = 0.98
	anotherStream = 1.03 // a second stream has to bring as much
)

// calibrate chooses chunk, depth and streams. If the time is too short for the candidates, the
// calibration chooses nothing.
func (b *bench) calibrate(p *launch.Pair) error {
	end := time.Now().Add(calibrationTime)
	both := func(of plan) (float64, error) {
		push, err := b.through(fewRounds, of, false)
		if err != nil {
			return 0, err
		}
		pull, err := b.through(fewRounds, of, true)
		return min(push/p.Push.Client, pull/p.Pull.Client), err
	}
	var tried []plan
	var found []float64
	try := func(of plan) (float64, error) {
		rate, err := both(of)
		tried, found = append(tried, of), append(found, rate)
		return rate, err
	}
	for _, chunk := range chunks {
		if chunk > b.job.SlotBytes {
			break
		}
		for streams := 1; streams <= maxStreams; streams++ {
			if time.Now().After(end) {
				return nil
			}
			if _, err := try(plan{chunk, fullDepth, streams}); err != nil {
				return err
			}
		}
	}
	chosen, ok := choose(tried, found)
	if !ok {
		return nil
	}
	var shallow []float64
	top := 0.0
	for _, depth := range depths {
		if time.Now().After(end) {
			return nil
		}
		rate, err := both(plan{chosen.chunk, depth, chosen.streams})
		if err != nil {
			return err
		}
		shallow, top = append(shallow, rate), max(top, rate)
	}
	for i, rate := range shallow {
		if rate >= depthContent*top {
			chosen.depth = depths[i]
			break
		}
	}
	p.Chunk, p.Depth, p.Streams = chosen.chunk, chosen.depth, chosen.streams
	return nil
}

// choose picks the smallest chunk whose rate comes near the best of all, and a
// second stream only where that brings something.
func choose(tried []plan, rates []float64) (plan, bool) {
	top := 0.0
	for _, r := range rates {
		top = max(top, r)
	}
	for i, p := range tried {
		if rates[i] < content*top {
			continue
		}
		// A candidate with one stream precedes the same candidate with two streams.
		if p.streams == 1 && i+1 < len(tried) && tried[i+1].chunk == p.chunk && rates[i+1] > anotherStream*rates[i] {
			p = tried[i+1]
		}
		return p, true
	}
	return plan{}, false
}
