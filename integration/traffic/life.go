package traffic

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// Life is the parameters of two clients' exchange.
type Life struct {
	Bytes    uint64 // per buffer
	Messages int    // per round and direction, at most
	Largest  uint64 // message
	Rounds   int    // at most
	Memory   []string
	Hands    []string
	// Stays keeps clients for the next life, except killed clients.
	Stays bool
}

// Slot runs two clients, one life after another.
type Slot struct {
	fleet  *Fleet
	random *rand.Rand
	pick   func(*rand.Rand) [2]*container
	life   Life
	now    [2]*worker
}

// NewSlot returns a slot; pick chooses the containers of the next life.
func (f *Fleet) NewSlot(random *rand.Rand, pick func(*rand.Rand) [2]*container, life Life) *Slot {
	return &Slot{fleet: f, random: random, pick: pick, life: life}
}

func anyOf[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// Live runs a life: two clients attach, connect in both directions, exchange messages until over,
// and leave. Unexplained errors go into the report.
func (s *Slot) Live(over func() bool) {
	f, r := s.fleet, s.random
	in := s.pick(r)
	begin := time.Now()
	err := s.fill(in)
	if err == nil {
		err = s.meet(in)
	}
	rounds := 1 + r.IntN(s.life.Rounds)
	for ; err == nil && rounds > 0 && !over(); rounds-- {
		err = s.round(in)
	}
	things := f.names(in, s)
	if err != nil {
		f.failed(err, begin, things)
	}
	if err := s.part(err == nil); err != nil {
		f.failed(err, begin, things)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.report.Lives++
}

// names returns the dependencies of a life: both containers with relays, the clients, and the NICs by
// which the containers' data goes.
func (f *Fleet) names(in [2]*container, s *Slot) []string {
	things := []string{in[0].Name, in[1].Name}
	for _, c := range in {
		if c.Route == launch.RouteStaged {
			things = append(things, c.nics...)
		}
	}
	for _, w := range s.now {
		if w != nil {
			things = append(things, w.name)
		}
	}
	return things
}

// fill starts a client in both containers.
func (s *Slot) fill(in [2]*container) error {
	for i, c := range in {
		if w := s.now[i]; w != nil && w.container == c {
			idle, err := s.fleet.idle(w)
			if err != nil {
				s.now[i] = nil
				return err
			}
			if idle {
				continue
			}
			s.now[i] = nil
		}
		if s.now[i] != nil {
			return fmt.Errorf("a client of %s stays for a life in %s", s.now[i].container.Name, c.Name)
		}
		w, err := s.fleet.worker(c)
		if err != nil {
			return err
		}
		s.now[i] = w
	}
	return nil
}

// idle reports whether a client that stays still runs. A client that was killed after its part of
// the last life, while its peer still had to detach, needs a successor; no other event ends a
// client between two lives.
func (f *Fleet) idle(w *worker) (bool, error) {
	select {
	case <-w.ended:
	default:
		return true, nil // a later death belongs to the next life
	}
	if w.wasKilled() && f.explained(time.Time{}, []string{w.name}) {
		return false, nil
	}
	return false, fmt.Errorf("%s ended between two lives (%v): %s", w.name, w.err, &w.stderr)
}

// meet attaches and connects the clients.
func (s *Slot) meet(in [2]*container) error {
	a, b := s.now[0], s.now[1]
	attach := func(c *container) order {
		return order{
			Do: doAttach, Socket: s.fleet.socket(c), Bytes: s.life.Bytes,
			Out: anyOf(s.random, s.life.Memory), In: anyOf(s.random, s.life.Memory),
		}
	}
	first, second := attach(in[0]), attach(in[1])
	if _, err := both(a, b, first, second); err != nil {
		return err
	}
	for _, direction := range [][2]*worker{{a, b}, {b, a}} {
		from, to := direction[0], direction[1]
		listening, err := to.do(order{Do: doListen})
		if err != nil {
			return err
		}
		connected, err := from.do(order{Do: doConnect, Handle: listening.Handle})
		if err != nil {
			return err
		}
		if route := map[uint32]string{wire.RouteStaged: launch.RouteStaged,
			wire.RouteDirect: launch.RouteDirect}[connected.Route]; route != in[0].Route {
			return fmt.Errorf("%s is connected by route %s instead of %s", from.name, route, in[0].Route)
		}
		if _, err := to.do(order{Do: doAccept}); err != nil {
			return err
		}
	}
	return nil
}

func (s *Slot) round(in [2]*container) error {
	round := round{Seed: s.random.Uint64(), Messages: 1 + s.random.IntN(s.life.Messages), Largest: s.life.Largest,
		Hand: anyOf(s.random, s.life.Hands)}
	o := order{Do: doRound, Round: round}
	second := o
	second.Side = 1
	replies, err := both(s.now[0], s.now[1], o, second)
	f := s.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, r := range replies {
		f.report.Transfers += r.Messages
		f.report.Bytes += r.Bytes
		f.report.Routes[in[0].Route] += r.Messages
		f.report.Hands[round.Hand] += r.Messages
		f.report.Pairs[fmt.Sprintf("%d to %d", in[1-i].gpu.Index, in[i].gpu.Index)] += r.Messages
		f.report.Sizes.add(r.Decades)
		f.report.Wrong += len(r.Wrong)
		for _, text := range r.Wrong {
			f.report.problem(fmt.Sprintf("WRONG, from %s to %s: %s", in[1-i].Name, in[i].Name, text))
		}
	}
	if err == nil {
		f.report.Rounds++
	}
	return err
}

// part ends a life: clients detach or leave.
func (s *Slot) part(well bool) error {
	var failed error
	for i, w := range s.now {
		if w == nil {
			continue
		}
		select {
		case <-w.ended:
			s.now[i] = nil
			continue
		default:
		}
		if s.life.Stays {
			if _, err := w.do(order{Do: doDetach}); err != nil {
				failed = errors.Join(failed, err)
				w.kill()
				s.now[i] = nil
			}
			continue
		}
		if s.random.IntN(4) == 0 {
			over := s.fleet.killed("client", w.name)
			w.kill()
			over()
		} else {
			failed = errors.Join(failed, w.leave())
		}
		s.now[i] = nil
	}
	return failed
}

// leave ends the clients of a slot.
func (s *Slot) leave() error {
	var err error
	for i, w := range s.now {
		if w != nil {
			err = errors.Join(err, w.leave())
			s.now[i] = nil
		}
	}
	return err
}

// socket returns the socket of a container's clients.
func (f *Fleet) socket(c *container) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return f.host.Socket(c.generation)
}
