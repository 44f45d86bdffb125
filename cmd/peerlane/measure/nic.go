package measure

import (
	"errors"
	"fmt"

	"github.com/peerlane/peerlane/relay/device"
	"github.com/peerlane/peerlane/relay/rdmatest"
	"github.com/peerlane/peerlane/relay/verbs"
)

// prepareNear prepares writes between two GPUs by a NIC that reaches both directly, for runNear.
func (c *copies) prepareNear(j Job, from, to *device.Device) error {
	if c.near != nil {
		return errors.New("a stream is prepared already")
	}
	l, err := verbs.Open()
	if err != nil {
		return err
	}
	s, err := rdmatest.NewStream(l, j.NIC, from, to, uint32(j.Size), j.Depth)
	if err == nil {
		_, err = s.Run(0) // one write
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}
	if err != nil {
		return fmt.Errorf("writes by %s: %w", j.NIC, err)
	}
	c.near = s
	return nil
}

// runNear measures the prepared stream, and closes the stream.
func (c *copies) runNear(j Job) (gbs float64, err error) {
	s := c.near
	if s == nil {
		return 0, errors.New("no stream is prepared")
	}
	c.near = nil
	gbs, err = s.Run(j.Duration)
	return gbs, errors.Join(err, s.Close())
}
