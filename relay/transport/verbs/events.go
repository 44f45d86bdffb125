package verbs

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/verbs"
)

// watch handles the asynchronous events of a NIC.
func (f *Fabric) watch(n *nic) {
	if err := f.loop.Watch(n.context.AsyncFD(), func(ready uint32) { f.events(n, ready) }); err != nil {
		logrus.WithError(err).Warnf("watch the events of %s", n.name)
	}
}

func (f *Fabric) events(n *nic, ready uint32) {
	for {
		e, ok, err := n.context.NextAsync()
		switch {
		case err != nil:
			f.died(n, err.Error())
			return
		case !ok && ready&(unix.EPOLLERR|unix.EPOLLHUP) != 0:
			f.died(n, "the device is gone")
			return
		case !ok:
			return
		case e.Kind == verbs.DeviceFailed:
			f.died(n, e.String())
			return
		}
		if !e.Kind.Fatal() {
			logrus.Infof("RDMA device %s: %v", n.name, e)
		}
		f.event(n, e)
	}
}

// event passes an event to the groups that use the NIC.
func (f *Fabric) event(n *nic, e verbs.Event) {
	switch e.Kind {
	case verbs.PairFailed, verbs.PairRequestError, verbs.PairAccessError:
		for s := range f.sets {
			if s.uses(n, e.Pair) {
				s.happened(n, e)
			}
		}
	case verbs.PortUp:
		if e.Port != n.port {
			return
		}
		f.ports[n]++
		for s := range f.sets {
			s.portUp(n)
		}
		f.cameBack(n, f.ports[n])
	case verbs.PortLost:
		if e.Port != n.port {
			return
		}
		f.ports[n]++
		f.wentDown(n, e, f.ports[n])
	case verbs.QueueFailed:
		for _, c := range f.polled {
			if c.Is(e) {
				f.queueFailed(c, errors.New(e.String()))
				break
			}
		}
	case verbs.GIDsChanged, verbs.LIDChanged:
		n.changes.Add(1)
		f.readdressed(n, e)
	}
}

// portWait is the maximum loss of a link without a fault. Meanwhile NICs resend unacknowledged
// packets for Verbs.Timeout and Verbs.Retries.
const portWait = 5 * time.Second

// wentDown resets queue pairs of a port that stays down: since is the number of the last event of
// the port.
func (f *Fabric) wentDown(n *nic, e verbs.Event, since int) {
	for s := range f.sets {
		if s.goesBy(n) {
			s.portDown(n)
		}
	}
	time.AfterFunc(f.config.PortWait, func() {
		f.loop.Do(func() {
			if f.ports[n] != since || n.dead.Load() {
				return
			}
			for s := range f.sets {
				if s.uses(n, 0) {
					s.fault(n, e.String())
				}
			}
		})
	})
}

// backTime is the time that a returned port must stay active before a group resets working queue
// pairs to use the port too.
const backTime = 5 * time.Second

// cameBack reconnects groups that used a NIC, if the port stays active: the port has no event after
// event number since.
func (f *Fabric) cameBack(n *nic, since int) {
	time.AfterFunc(f.back, func() {
		f.loop.Do(func() {
			if f.ports[n] != since || n.dead.Load() {
				return
			}
			for s := range f.sets {
				switch {
				case !s.used || !s.workingNICs[n.context] || s.broken || s.gone != nil:
				case s.working || s.phase != running || s.protocol.agreement != agreementComplete, // a negotiation is running
					// the time limit belongs to the previous fault
					!s.since.IsZero() && time.Since(s.resumed) <= f.config.Reconnect+f.back:
					f.cameBack(n, since)
					return
				case !s.uses(n, 0):
					s.giveUp(nil, fmt.Sprintf("%s of host %s: port %d is active again", n.name, hostname(), n.port))
				}
			}
		})
	})
}

// readdressed checks on another goroutine whether a NIC still has the address of the queue pairs.
func (f *Fabric) readdressed(n *nic, e verbs.Event) {
	f.building.Add(1) // before Close waits, which runs after the loop
	go func() {
		gids, err := n.context.GIDs(n.port)
		var is verbs.Port
		if err == nil {
			is, err = n.context.Port(n.port)
		}
		f.building.Done()
		if err != nil {
			logrus.WithError(err).Warnf("RDMA device %s", n.name)
			return
		}
		f.loop.Do(func() {
			for s := range f.sets {
				if !s.uses(n, 0) {
					continue
				}
				for _, q := range s.queues {
					switch was := q.nic; {
					case was.context != n.context || was.cm != nil:
						// a change of address ends the connections of a connection manager
					case was.infiniband() && was.is.LID != is.LID:
						s.fault(n, fmt.Sprintf("%v: the LID has changed from %d to %d", e, was.is.LID, is.LID))
					case !slices.Contains(gids, was.gid):
						s.fault(n, fmt.Sprintf("%v: %v is no longer an address of the port, which has %v", e, was.gid, gids))
					}
				}
			}
		})
	}()
}

// died fails the groups that use a lost NIC. died stops watching the NIC: the descriptor of a lost
// device stays ready.
func (f *Fabric) died(n *nic, what string) {
	f.loop.Unwatch(n.context.AsyncFD())
	n.dead.Store(true)
	for _, c := range slices.Clone(f.polled) {
		if c.context == n.context {
			f.retireQueue(c)
		}
	}
	logrus.Warnf("RDMA device %s is lost; the next peer opens the device again: %s", n.name, what)
	for s := range f.sets {
		if s.uses(n, 0) {
			s.failed(n, what)
		}
	}
}
