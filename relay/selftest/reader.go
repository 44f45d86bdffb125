package selftest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
)

// Reads of a running kernel: so many bytes, across the border of the client's two allocations, and
// that often with another pattern in the same place.
const (
	readBytes  = 256 << 10
	readRounds = 8
	// readPolls is the number of polls of the flag before the kernel gives up: a second or two, in
	// which foreign kernels have had time slices.
	readPolls = 2_000_000
)

// readerPassed is the value of launch.Pair.Reader after a reader without a wrong byte.
const readerPassed = "passed"

// running tests that a kernel that runs during a copy, and reads the end from a flag in host
// memory, reads the copied bytes: the kernel has read the place before, and only the copy can
// refresh the value. A GPU where no kernel runs is no reason against the pair.
func (b *bench) running(p *launch.Pair) error {
	client := ends{b.client, b.mine, half - readBytes/2}
	server := ends{b.server, b.slots, 2<<20 - readBytes/2}
	for _, way := range [][2]ends{{client, server}, {server, client}} {
		why, err := b.read(way[0], way[1])
		if err != nil {
			return err
		}
		if why != nil {
			p.Reader = bounded("not tried: " + why.Error())
			return nil
		}
		p.Bytes += readRounds * readBytes
	}
	p.Reader = readerPassed
	return nil
}

// kernelsOf are a GPU's kernels, loaded once.
func (t *tester) kernelsOf(g *device.Device) (*kernels.Kernels, error) {
	if k := t.kernels[g]; k != nil {
		return k, nil
	}
	if err := g.Use(); err != nil {
		return nil, err
	}
	k, err := kernels.Load(t.driver, g.Ordinal)
	if err == nil {
		t.kernels[g] = k
	}
	return k, err
}

// read has a kernel on a copy's target read while copies are made. why says why
// that cannot be done.
func (b *bench) read(from, to ends) (why, err error) {
	k, err := b.kernelsOf(to.on)
	var page *kernels.Page
	if err == nil {
		page, err = k.NewPage()
	}
	if sticky(err) {
		return nil, err
	}
	if err != nil {
		return err, nil
	}
	seed := rand.Uint64()
	if err := to.on.Use(); err != nil {
		return nil, err
	}
	err = k.Read(b.streams[to.on], kernels.Reading{
		Value: 1, Polls: readPolls, Rounds: readRounds, Address: to.memory.Ptr + cuda.Ptr(to.at), Size: readBytes, Seed: seed,
	}, page)
	if err != nil {
		return err, page.Free()
	}
	seen, err := b.feed(from, to, seed, page)
	page.SetFlag(readRounds) // releases a waiting kernel, which then reads bytes that were not copied
	if sticky(err) {
		return nil, err
	}
	err = errors.Join(err, b.byItself(to.on, func(cuda.Stream) error { return nil }))
	if free := page.Free(); err == nil {
		err = free
	}
	switch {
	case err != nil:
		return nil, err
	case seen.Words > 0:
		return nil, wrong(
			"a kernel that runs on %s read %d wrong words of 8 bytes after a copy from %s whose end it was told of, the "+
				"first at offset %d in round %d",
			to.on.BusID,
			seen.Words,
			from.on.BusID,
			seen.First,
			seen.Round,
		)
	case seen.GaveUp || seen.Rounds < readRounds:
		return fmt.Errorf(
			"a kernel on %s was told of %d copies and saw %d in its time",
			to.on.BusID,
			readRounds,
			seen.Rounds,
		), nil
	}
	return nil, nil
}

// feed copies patterns in sequence and signals the kernel after every copy, when the kernel has
// read the previous pattern. It stops where the kernel does, or has found something, and says how
// far that was.
func (b *bench) feed(from, to ends, seed uint64, page *kernels.Page) (seen kernels.Progress, err error) {
	for round := range uint64(readRounds) {
		kernels.Pattern{Seed: seed + round}.Fill(b.view[:readBytes])
		if err := b.fill(from.on, from.memory.Ptr+cuda.Ptr(from.at), readBytes); err != nil {
			return seen, err
		}
		if err := b.copy(to.memory.At(to.at), from.memory.At(from.at), readBytes); err != nil {
			return seen, wrong("a copy from %s to %s under a running kernel failed: %w", from.on.BusID, to.on.BusID, err)
		}
		page.SetFlag(round + 1)
		for seen.Rounds <= round {
			if seen = page.Progress(); seen.Ended || seen.Words > 0 {
				return seen, nil
			}
			time.Sleep(10 * time.Microsecond)
		}
	}
	return seen, nil
}
