package rdmatest

import (
	"errors"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/verbs"
)

// Stream is RDMA writes between memory of two GPUs, by a NIC that reads and writes both. No relay takes
// part.
type Stream struct {
	*bench
	loop    *loop
	request verbs.Send
}

// NewStream allocates memory on two GPUs, registers it by DMA-BUF with a NIC, and connects two queue
// pairs of the NIC. Each write has so many bytes, and up to inFlight are posted at a time.
func NewStream(
	l *verbs.Library,
	nic string,
	from, to *device.Device,
	bytes uint32,
	inFlight int,
) (_ *Stream, err error) {
	b, err := newBench(l, nic, &launch.DefaultVerbs, 0)
	if err != nil {
		return nil, err
	}
	s := &Stream{bench: b, request: verbs.Send{Flags: verbs.Signaled, Op: verbs.Write, Length: bytes}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	source, address, err := s.memory(from, uint64(bytes))
	if err != nil {
		return nil, err
	}
	s.request.LKey, s.request.Address = source.LKey(), address
	target, address, err := s.memory(to, uint64(bytes))
	if err != nil {
		return nil, err
	}
	s.request.RKey, s.request.Remote = target.RKey(), address
	if s.loop, err = b.connect(&launch.RDMAResult{}, inFlight); err != nil {
		return nil, err
	}
	s.later(s.loop.close)
	return s, nil
}

// memory allocates and registers memory of a GPU.
func (s *Stream) memory(on *device.Device, bytes uint64) (region *verbs.Region, address uint64, err error) {
	m, err := device.Create(on.Driver, on.Ordinal, bytes, cuda.Access{Device: on.Ordinal, Write: true})
	if err != nil {
		return nil, 0, err
	}
	s.later(m.Close)
	// The driver makes a DMA-BUF only with a current context.
	err = on.On(func() (err error) {
		region, err = s.byDMABuf(m, bytes)
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	s.later(region.Close)
	return region, uint64(m.Ptr), nil
}

// Run keeps writes in flight for a time, after a tenth of it as warm-up, and returns the rate in GB/s.
func (s *Stream) Run(duration time.Duration) (float64, error) {
	var bytes, posted, ended int
	var from time.Time // zero during the warm-up
	done := make([]verbs.Completion, s.loop.depth)
	for begun := time.Now(); ; {
		now := time.Now()
		if from.IsZero() && ended > 0 && now.Sub(begun) >= duration/10 {
			from, bytes = now, 0
		}
		if !from.IsZero() && bytes > 0 && now.Sub(from) >= duration {
			return float64(bytes) / now.Sub(from).Seconds() / 1e9, s.drain(posted-ended, done)
		}
		for posted-ended < s.loop.depth {
			if _, err := s.loop.pairs[0].PostSend([]verbs.Send{s.request}); err != nil {
				return 0, err
			}
			posted++
		}
		n, err := s.loop.completed(done)
		if err != nil {
			return 0, err
		}
		ended += n
		bytes += n * int(s.request.Length)
	}
}

// drain waits for the last writes.
func (s *Stream) drain(n int, done []verbs.Completion) error {
	for n > 0 {
		got, err := s.loop.completed(done)
		if err != nil {
			return err
		}
		n -= got
	}
	return nil
}

// Close ends the queue pairs and frees the memory.
func (s *Stream) Close() error { return s.close() }
