package loop

import "time"

// pace lets an emulated NIC be no faster than a real one: a token bucket for all
// its senders, whose writes have their turn one after the other. It implements
// poll.Poller.
type pace struct {
	perSecond float64 // bytes
	due       time.Time
	turn      []*sender // those with a write queued, the next one first
}

// burst is the time of which an idle NIC keeps the bytes: longer than the loop naps.
const burst = 100 * time.Microsecond

// queued is a write that waits for its turn.
type queued struct {
	bytes uint64
	since time.Time
	issue func(waited time.Duration)
}

// post issues a write when its turn has come.
func (p *pace) post(s *sender, w queued) {
	s.queue = append(s.queue, w)
	if len(s.queue) == 1 {
		p.turn = append(p.turn, s)
	}
	p.Poll()
}

// Poll issues what is due.
func (p *pace) Poll() bool {
	progress := false
	for len(p.turn) > 0 {
		now := time.Now()
		if now.Before(p.due) {
			break
		}
		s := p.turn[0]
		p.turn = p.turn[1:]
		if len(s.queue) == 0 {
			continue // it has gone
		}
		w := s.queue[0]
		if s.queue = s.queue[1:]; len(s.queue) > 0 {
			p.turn = append(p.turn, s)
		}
		if earliest := now.Add(-burst); p.due.Before(earliest) {
			p.due = earliest
		}
		p.due = p.due.Add(time.Duration(float64(w.bytes) / p.perSecond * 1e9))
		w.issue(now.Sub(w.since))
		progress = true
	}
	return progress
}

// Busy reports whether a write waits.
func (p *pace) Busy() bool { return len(p.turn) > 0 }

// Arm has nothing to arm: no write waits.
func (p *pace) Arm() bool { return false }

// Disarm has nothing to undo.
func (p *pace) Disarm() {}
