package relay

import (
	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/transport/verbs"
)

// The first message to a remote host waits for open NICs, and for slots that NICs know. A relay opens
// the NICs of its lanes when a client attaches, and makes and registers slots while two relays
// connect. Failures have no effect here: the connection tries again, and reports the error.

// usesNICs reports whether data of the lanes may use NICs. Call usesNICs on the loop.
func (r *Relay) usesNICs() bool {
	return r.fabric != nil && r.offRDMA() == "" && r.config.Route != launch.RouteDirect && len(r.laneNICs()) > 0
}

// openNICs opens the NICs on another goroutine. Call openNICs on the loop.
func (r *Relay) openNICs() {
	if fabric := r.fabric; r.usesNICs() {
		go func() {
			if _, err := fabric.OpenEarly(); err != nil {
				logrus.WithError(err).Debug("no NIC opened before the first peer")
			}
		}()
	}
}

// prepare makes and registers a lane's memory for a direction on another goroutine, unless one does
// so already.
func (r *Relay) prepare(l *lane, sends bool) {
	r.loop.Do(func() {
		if !r.usesNICs() || l.preparing[direction(sends)] {
			return
		}
		l.preparing[direction(sends)] = true
		fabric, config := r.fabric, r.config
		go func() {
			if err := l.prepareSlots(fabric, config, sends); err != nil {
				logrus.WithError(err).Debugf("slots of GPU %s not ready before the connection", l.spec.GPU.BusID)
			}
			r.loop.Do(func() { l.preparing[direction(sends)] = false })
		}()
	})
}

// direction returns the index of a direction: 1 for sends.
func direction(sends bool) int {
	if sends {
		return 1
	}
	return 0
}

// prepareSlots is prepare on its goroutine.
func (l *lane) prepareSlots(fabric *verbs.Fabric, config launch.Config, sends bool) error {
	nics, err := fabric.OpenEarly()
	if err != nil {
		return err
	}
	if err := l.openRemote(config.Network, false); err != nil {
		return err
	}
	out, in, err := l.slotsFor(nics)
	if err != nil {
		return err
	}
	slots := in
	if sends {
		slots = out
	}
	if l.unverifiedSlots(config, nics, slots, sends) != "" {
		return nil
	}
	for _, on := range slots.regions {
		if err := nics.Register(on.memory, !sends); err != nil {
			return err
		}
	}
	return nil
}
