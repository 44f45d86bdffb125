package measure

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/transport"
	"github.com/peerlane/peerlane/relay/transport/loop"
	"github.com/peerlane/peerlane/relay/wire"
)

// near is a stream of a GPU that a NIC reaches directly: memory of both ends is registered with
// the emulated NIC, which writes between them. No relay takes part.
type near struct {
	job       Job
	on        *device.Device // of the sender
	loop      *poll.Loop
	link      *loop.Link
	receiving *loop.Arrivals
	memory    [2]*device.Memory // of the sender, of the receiver

	// Of the loop.
	posted   uint64
	bytes    uint64
	from     time.Time // start of the measurement; zero before
	underWay int
	over     bool
	ended    chan error
}

// prepareNear makes the stream that Nic runs.
func (c *copies) prepareNear(j Job, from, to *device.Device) (err error) {
	if c.near != nil {
		return errors.New("a stream is prepared already")
	}
	n := &near{job: j, on: from, ended: make(chan error, 1)}
	if n.loop, err = poll.New(); err != nil {
		return err
	}
	go n.loop.Run()
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	ours, theirs, err := packet.Pair()
	if err != nil {
		return err
	}
	defer unix.Close(theirs)
	n.loop.Call(func() {
		// The receiver ignores the immediates: the memory belongs to the receiver.
		n.receiving, err = loop.Receive(n.loop, ours, func(uint64, uint64) {}, func(error) {})
	})
	if err != nil {
		return errors.Join(err, unix.Close(ours))
	}
	if n.link, err = loop.Dial(n.loop, j.Socket, theirs, n.end, func(time.Duration) {}); err != nil {
		return err
	}
	if err := from.Use(); err != nil {
		return err
	}
	for i, on := range []*device.Device{from, to} {
		if n.memory[i], err = device.Create(c.driver, on.Ordinal, j.Size,
			cuda.Access{Device: on.Ordinal, Write: true}); err != nil {
			return err
		}
		fd, err := n.memory[i].Export()
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		bytes := n.memory[i].Bytes
		n.loop.Call(func() {
			if i == 0 {
				n.link.AddSource(0, wire.MemoryGPU, fd, bytes)
			} else {
				n.link.AddTarget(0, wire.MemoryGPU, []device.Part{{FD: fd, Bytes: bytes}}, func(broken error) { err = broken })
			}
		})
		if err != nil {
			return err
		}
	}
	// The first write comes back when the NIC has mapped both.
	c.near = n
	n.job.Depth, n.job.Duration = 1, 0
	_, err = c.runNear(n.job)
	n.job.Depth = j.Depth
	if err != nil {
		c.near = nil
	}
	return err
}

// runNear keeps Depth writes in flight for the time, after a tenth of it as warm-up, and then
// ends the objects of prepareNear. Without a time it makes a single write.
func (c *copies) runNear(j Job) (gbs float64, err error) {
	n := c.near
	if n == nil {
		return 0, errors.New("no stream is prepared")
	}
	if j.Duration > 0 {
		c.near = nil
		defer func() { err = errors.Join(err, n.close()) }()
	}
	begin := time.Now()
	var elapsed time.Duration
	n.loop.Call(func() {
		n.bytes, n.from, n.over = 0, time.Time{}, false
		var post func()
		post = func() {
			n.posted++
			n.underWay++
			n.link.Write(transport.Target{}, transport.Source{}, n.job.Size, n.posted, func(err error) {
				n.underWay--
				now := time.Now()
				switch {
				case err != nil:
					n.end(err)
				case n.over:
				case !n.from.IsZero():
					n.bytes += n.job.Size
					elapsed = now.Sub(n.from)
				case now.Sub(begin) >= j.Duration/10:
					n.from = now
				}
				if elapsed >= j.Duration {
					n.over = true
				}
				if !n.over {
					post()
				} else if n.underWay == 0 {
					n.end(nil)
				}
			})
		}
		for range j.Depth {
			post()
		}
	})
	if err := <-n.ended; err != nil {
		return 0, fmt.Errorf("writes by the emulated NIC at %s: %w", j.Socket, err)
	}
	if elapsed == 0 {
		return 0, nil
	}
	return float64(n.bytes) / elapsed.Seconds() / 1e9, nil
}

// end is the end of a run, or of the NIC.
func (n *near) end(err error) {
	n.over = true
	select {
	case n.ended <- err:
	default: // the first error counts
	}
}

func (n *near) close() error {
	n.loop.Call(func() {
		if n.link != nil {
			n.link.Close()
		}
		if n.receiving != nil {
			n.receiving.Close()
		}
	})
	n.loop.Stop()
	err := n.on.Use()
	for _, m := range n.memory {
		if m != nil {
			err = errors.Join(err, m.Close())
		}
	}
	return err
}
