package relay

import (
	"fmt"
	"sync"

	"github.com/dustin/go-humanize"
	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// hostAccount counts a relay's host memory for the container: memory of clients, slots, rings, and
// memory shared with remote relays. The kernel charges a page to the control group of the first
// process that touches the page. Clients allocate the pages of host memory and rings
// (wire.HostMemoryPopulated), but a hostile client need not, so the limit is a part of the
// container's memory limit.
type hostAccount struct {
	mu    sync.Mutex
	limit uint64 // bytes; 0 for none
	used  uint64
}

func (a *hostAccount) setLimit(limit uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.limit = limit
}

// take counts bytes more, or returns an error that names the limit.
func (a *hostAccount) take(bytes uint64, name string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.limit > 0 && (bytes > a.limit || a.used > a.limit-bytes) {
		return wire.Errorf(wire.StatusLimit, "%w", &fault.Error{Code: fault.LimitMet,
			Operation: fmt.Sprintf("%s more of host memory is asked for, and the relay has %s in %s, whose limit is %s, a "+
				"quarter of the container's memory limit", humanize.IBytes(bytes), humanize.IBytes(a.used), name,
				humanize.IBytes(a.limit)),
			Remedy: "raise the container's memory limit"}).On(name)
	}
	a.used += bytes
	return nil
}

func (a *hostAccount) release(bytes uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used -= bytes
}

// hostGranule is the unit in which a relay claims host memory: the supervisor writes a file per
// claim.
const hostGranule = 16 << 20

// takeHost claims bytes of host memory within staging.host_limit, or returns the reason of a
// refusal.
func (c *claims) takeHost(bytes uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.hostAdmission {
		return nil
	}
	need := c.host + bytes
	if need > c.hostAdmitted {
		rounded := (need + hostGranule - 1) / hostGranule * hostGranule
		a, err := c.claim(launch.HostMemory, rounded, 0)
		admitted := rounded
		if err == nil && !a.OK && rounded > need {
			a, err = c.claim(launch.HostMemory, need, 0)
			admitted = need
		}
		if err != nil {
			return err
		}
		if !a.OK {
			return wire.Errorf(wire.StatusLimit, "%w: %s", errNotAdmitted, a.Error).On("host memory")
		}
		c.hostAdmitted = admitted
	}
	c.host = need
	return nil
}

// releaseHost ends a part of a claim. The supervisor learns of it when a granule and
// more is unused.
func (c *claims) releaseHost(bytes uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.hostAdmission {
		return
	}
	c.host -= min(bytes, c.host)
	rounded := (c.host + hostGranule - 1) / hostGranule * hostGranule
	if c.hostAdmitted < rounded+hostGranule && c.host > 0 {
		return
	}
	if _, err := c.claim(launch.HostMemory, rounded, 0); err != nil {
		logrus.WithError(err).Warn("giving host memory back that is not used; it counts until this relay ends")
		return
	}
	c.hostAdmitted = rounded
}

func (c *claims) admitHost(admission bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hostAdmission = c.hostAdmission || admission
}
