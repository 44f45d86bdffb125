package verbs

import (
	"os"
	"time"

	"github.com/peerlane/peerlane/relay/verbs"
)

func hostname() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "an unnamed host"
	}
	return name
}

// watch adds the descriptor of the connection manager to the event loop.
func (s *QPGroup) watch() {
	if err := s.watchManaged(); err != nil {
		s.failed(s.pairs[0].queue.nic, err.Error())
	}
}

// poll takes completions and posts waiting requests.
func (s *QPGroup) poll() bool {
	if s.closed || s.working {
		return false
	}
	progress := false
	if s.phase == draining || s.phase == running {
		progress = s.complete(false) // Fabric.Poll has polled the devices
	}
	if s.phase == draining {
		return s.drainEnds() || progress
	}
	if s.waitingParts > 0 && s.phase == running && !s.broken && !s.parting {
		for _, p := range s.pairs {
			if s.flush(p) {
				progress = true
			}
			if s.phase != running { // the queue pair took no request
				return progress
			}
		}
	}
	return progress
}

// room reports whether a waiting request can be posted.
func (s *QPGroup) room() bool {
	for _, p := range s.pairs {
		if len(p.waits) > 0 && len(p.posts) < sendDepth {
			return true
		}
	}
	return false
}

// batchSize is the number of completions per call of the device.
const batchSize = 32

// drain takes every available completion, and reports whether there was a completion.
func (s *QPGroup) drain() bool { return s.complete(true) }

// complete takes completions of the group's queue pairs and reports whether there was a completion.
// With ask complete polls the devices; without ask complete takes the polled completions.
func (s *QPGroup) complete(ask bool) bool {
	if s.closed || s.working || s.phase != running && s.phase != draining {
		return false
	}
	progress := false
	var batch [batchSize]verbs.Completion
	for _, q := range s.queues {
		for n := batchSize; n == batchSize; {
			var err error
			if n, err = q.read(batch[:], ask); err != nil {
				s.failed(q.nic, err.Error())
				return true
			}
			for i := range batch[:n] {
				progress = true
				s.completed(q, &batch[i])
			}
		}
	}
	if progress && s.phase == running {
		s.signs.Store(time.Now().UnixNano())
	}
	for _, q := range s.queues {
		if q.flusher != nil && (s.phase == running || s.phase == draining) {
			s.postFlushes(q)
		}
	}
	if s.phase == running {
		for _, p := range s.pairs {
			if err := s.again(p); err != nil {
				s.unposted(p, err)
				if s.phase != running {
					return true
				}
			}
		}
		s.issue()
	}
	return progress
}

func (s *QPGroup) completed(q *queue, c *verbs.Completion) {
	i, known := s.number[key{q, c.Pair}]
	if !known {
		s.flushed(q, c)
		return
	}
	p := s.pairs[i]
	if c.ID&ofReceive == 0 {
		s.sent(p, c)
		return
	}
	p.receiving--
	switch err := c.Err(); {
	case s.gone != nil: // the waiting operation has ended
	case err != nil && c.Status == verbs.Flushed && s.links[p.link].managed:
		// the connection manager reports the cause
	case err != nil:
		if s.phase == running {
			s.fault(q.nic, err.Error())
		}
	default:
		number, ok := p.receivedTicket(c)
		if !ok {
			s.peer.Fail(malformed("%w", errNoTicket))
			return
		}
		if err := s.immediate(i, number); err != nil {
			s.peer.Fail(err)
		}
	}
}
