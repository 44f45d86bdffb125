package relay

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// The supervisor sends the results of pairs of GPUs: no process trusts a relay's tests, because the
// relay may be compromised.

// selfTestTimeout limits the wait of staging for a running self-test. Two connecting relays may wait
// in sequence, and libpeerlane waits a minute for them. After the timeout
// a pair counts as untested, and a late verdict that the pair is wrong ends the relay.
const selfTestTimeout = 20 * time.Second

// Orphaned records the supervisor's death: no further results of pairs will arrive.
func (r *Relay) Orphaned() { r.loop.Do(func() { r.config.Testing = false }) }

// endIfWrong ends the relay if it has staged on a pair with a wrong verdict: messages to its
// clients may be wrong. The next relay has the verdict before it stages. Call it on the loop.
func (r *Relay) endIfWrong() {
	if r.config.SelfTest == "" || r.config.SelfTest == launch.SelfTestOff {
		return
	}
	for _, l := range r.lanes {
		for _, server := range l.stagedOn() {
			p := launch.FindPair(r.config.Pairs, launch.PairName{GPU: l.spec.GPU, Server: server})
			if p != nil && p.Verdict == launch.VerdictWrong {
				r.end(launch.EndPair, wire.Errorf(wire.StatusCUDA, "%w", &fault.Error{Code: fault.UnfitPair,
					Operation: fmt.Sprintf("the relay of %s ends, because it has staged on %v, which have failed their "+
						"self-test since", r.name(), p.PairName), Cause: errors.New(p.Reason)}))
				return
			}
		}
	}
}

// stagedOn returns the server GPUs with slots of the lane or memory of its clients. Call it on the
// loop.
func (l *lane) stagedOn() (list []launch.GPU) {
	for _, p := range slices.Concat(l.placed, l.registered.placed) {
		if p.bytes > 0 && !p.host {
			list = append(list, p.gpu)
		}
	}
	for _, s := range l.serverUsage {
		if s.bytes > 0 {
			list = append(list, s.gpu)
		}
	}
	return list
}

// selfTestResult returns the configuration with the results of the lane's pairs. selfTestResult may block.
func (l *lane) selfTestResult() (config launch.Config, err error) {
	for end := time.Now().Add(selfTestTimeout); ; time.Sleep(10 * time.Millisecond) {
		if !l.relay.loop.Call(func() { config = l.relay.config }) {
			return config, errEnding
		}
		if !config.Testing || l.enough(config) {
			return config, nil
		}
		if time.Now().After(end) {
			logrus.Warnf("the self-test of this container's GPUs has not ended within %v: going on without it", selfTestTimeout)
			return config, nil
		}
	}
}

// enough reports whether the known results suffice: a result for every server, and a usable server,
// so that no spare matters.
func (l *lane) enough(config launch.Config) bool {
	usable := false
	for _, server := range l.spec.Servers {
		p := launch.FindPair(config.Pairs, launch.PairName{GPU: l.spec.GPU, Server: server})
		if p == nil {
			return false
		}
		usable = usable || p.Usable(config.SelfTest == launch.SelfTestRequired)
	}
	return usable || len(l.spec.Servers) == 0
}

// unfit returns the reason that a lane does not stage on a server GPU; empty if it does.
func (l *lane) unfit(server launch.GPU, config launch.Config) string {
	p := launch.FindPair(config.Pairs, launch.PairName{GPU: l.spec.GPU, Server: server})
	off := config.SelfTest == "" || config.SelfTest == launch.SelfTestOff
	if off || p.Usable(config.SelfTest == launch.SelfTestRequired) {
		return ""
	}
	switch {
	case p == nil:
		return `the pair is not tested yet, and relay.self_test is "required"`
	case p.Verdict == launch.VerdictUntested:
		return fmt.Sprintf(`the pair could not be tested, and relay.self_test is "required": %s`, p.Reason)
	case p.Verdict == launch.VerdictSlow:
		return "by its self-test the pair is slower than the bounce: " + p.Reason
	}
	return "the pair failed its self-test: " + p.Reason
}

// route returns the route of a sender's connection: the route of both configurations, but staged
// instead of direct if a self-test has a bad verdict on copies between the two GPUs.
func (l *lane) route(config launch.Config, hello *wire.PeerHello) (uint32, error) {
	ours := routeNumber(config.Route)
	route, err := agree(ours, hello.Route)
	if err != nil || route != wire.RouteDirect || config.SelfTest == "" || config.SelfTest == launch.SelfTestOff {
		return route, err
	}
	for _, p := range config.Pairs {
		own, other := l.uuid.GPU(), hello.GPU.GPU()
		if p.Usable(false) || (p.GPU.UUID != own || p.Server.UUID != other) && (p.GPU.UUID != other || p.Server.UUID != own) {
			continue
		}
		if ours != wire.RouteAuto || hello.Route != wire.RouteAuto {
			return 0, wire.Errorf(wire.StatusUnreachable,
				"route direct between %s and %s is not to be had: their self-test says %s: %s; with relay.route = \"auto\" "+
					"it is staged", other, own, p.Verdict, p.Reason).On(other)
		}
		logrus.Warnf("a sender on %s is staged, and not direct to %s: their self-test says %s: %s", other, own, p.Verdict,
			p.Reason)
		return wire.RouteStaged, nil
	}
	return route, nil
}

// calibration has size, depth and streams of copies to and from a server GPU; 0 means the
// configuration's slots and a single stream.
type calibration struct {
	chunk          uint64
	depth, streams int
}

// calibrated returns the self-test's choice for a server GPU, or the configured values.
func (l *lane) calibrated(server launch.GPU, config launch.Config) calibration {
	var t calibration
	if p := launch.FindPair(config.Pairs, launch.PairName{GPU: l.spec.GPU, Server: server}); p != nil &&
		config.Calibrated {
		t = calibration{p.Chunk, p.Depth, p.Streams}
	}
	if config.Chunk > 0 {
		t.chunk = config.Chunk
	}
	if config.Depth > 0 {
		t.depth = config.Depth
	}
	if config.Streams > 0 {
		t.streams = config.Streams
	}
	return t
}

// of returns the slots of a region with the configured memory: slots of a chunk, as many as fit
// into the memory, but at most twice the depth of copies, and not fewer than configured.
func (t calibration) of(z size) size {
	if t.chunk == 0 || t.chunk >= z.slotBytes {
		return z
	}
	room := int(uint64(z.slots) * z.slotBytes / t.chunk)
	if t.depth > 0 {
		room = min(room, max(2*t.depth, z.slots, minSlots))
	}
	return size{min(room, maxSlots), t.chunk}
}

// maxSlots is the largest configurable number.
const maxSlots = 1024

// stageOn makes a region per direction on a server GPU, if the pair is fit.
func (l *lane) stageOn(server launch.GPU, slots int, config launch.Config, create maker, out, in *staging) placed {
	configured := size{slots, config.SlotBytes}
	if why := l.unfit(server, config); why != "" {
		return placed{gpu: server, wanted: 2 * uint64(slots) * config.SlotBytes, note: why, unfit: true}
	}
	t := l.calibrated(server, config)
	p := l.place(server, t.of(configured), config.Admission, create, out, in)
	p.tuning = t
	return p
}
