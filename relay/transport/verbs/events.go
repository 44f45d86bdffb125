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

// watch hears what happens to a NIC.
func (f *Fabric) watch(n *nic) {
	if err := f.loop.Watch(n.context.AsyncFD(), func(ready uint32) { f.events(n, ready) }); err != nil {
		logrus.WithError(err).Warnf("the events of %s are not heard", n.name)
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

// event has those Sets go on that an event is about.
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

// portWait is the time that a link may be lost without a fault. Meanwhile NICs send again what the
// other side has not acknowledged, for Verbs.Timeout and Verbs.Retries.
const portWait = 5 * time.Second

// wentDown gives up queue pairs of a port that stays down: since is the number of its last event.
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

// backTime is how long a port that has come back has to stay before queue pairs that work are
// given up for such as go by it, too.
const backTime = 5 * time.Second

// cameBack has those Sets go by a NIC again that did, if its port stays: nothing has become of
// it since event number so many.
func (f *Fabric) cameBack(n *nic, since int) {
	time.AfterFunc(f.back, func() {
		f.loop.Do(func() {
			if f.ports[n] != since || n.dead.Load() {
				return
			}
			for s := range f.sets {
				switch {
				case !s.used || !s.had[n.context] || s.broken || s.gone != nil:
				case s.working || s.phase != running || !s.granting || !s.resolved, // they are changing just now
					!s.since.IsZero() && time.Since(s.resumed) <= f.config.Redial+f.back: // the limit is of the fault before
					f.cameBack(n, since)
					return
				case !s.uses(n, 0):
					s.giveUp(nil, fmt.Sprintf("for %s of host %s: its port %d is active again", n.name, hostname(), n.port))
				}
			}
		})
	})
}

// readdressed looks, beside the loop, whether a NIC has the address still that queue pairs
// send from and are sent to.
func (f *Fabric) readdressed(n *nic, e verbs.Event) {
	f.building.Add(1) // before Close waits: it comes after the loop
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
					case was.context != n.context || was.cm != nil: // whose connections end
					case was.infiniband() && was.is.LID != is.LID:
						s.fault(n, fmt.Sprintf("%v: its LID was %d and is %d", e, was.is.LID, is.LID))
					case !slices.Contains(gids, was.gid):
						s.fault(n, fmt.Sprintf("%v: %v is its address no more; it has %v", e, was.gid, gids))
					}
				}
			}
		})
	}()
}

// died ends what goes by a NIC, which says nothing any more: its descriptor would be ready
// for ever.
func (f *Fabric) died(n *nic, what string) {
	f.loop.Unwatch(n.context.AsyncFD())
	n.dead.Store(true)
	for _, c := range slices.Clone(f.polled) {
		if c.context == n.context {
			f.retireQueue(c)
		}
	}
	logrus.Warnf("RDMA device %s is lost, and opened anew for the next relay: %s", n.name, what)
	for s := range f.sets {
		if s.uses(n, 0) {
			s.failed(n, what)
		}
	}
}
