package supervisor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/peerlane/peerlane/hook/journal"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
)

// tripleTests is a supervisor's part in tests of triples. It belongs to its loop.
type tripleTests struct {
	cancel context.CancelFunc // while some are tested
	found  chan launch.Triple // one by one
	done   chan error
	known  []launch.Triple
}

// testTriples reads the results of the generation's triples, and has the others tested while the
// relay works.
func (s *supervisor) testTriples() {
	if mode := s.generation.Config.SelfTest; mode == "" || mode == launch.SelfTestOff || s.triples.cancel != nil || s.held != "" {
		return
	}
	names := selftest.PossibleTriples(s.generation)
	if len(names) == 0 {
		return
	}
	tester := selftest.OfGeneration(s.generation, s.layout)
	known, err := tester.KnownTriples(names, s.generation.Config.Verbs)
	if err != nil {
		s.log.WithError(err).Warn("what is kept of tests of GPUs and NICs is ignored")
	}
	s.triples.known = known
	rest := selftest.UnknownTriples(known, names)
	if len(rest) == 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	found, done := make(chan launch.Triple, len(rest)), make(chan error, 1)
	s.triples.cancel, s.triples.found, s.triples.done = cancel, found, done
	verbs := s.generation.Config.Verbs
	s.log.Infof("testing %d triples of GPUs and NICs that this boot knows nothing of; their data bounces until then", len(rest))
	go func() { done <- selftest.TestUntilUp(ctx, tester, rest, verbs, found) }()
}

// tripleFound takes a result, and tells the relay.
func (s *supervisor) tripleFound(t launch.Triple) {
	s.triples.known = append(slices.DeleteFunc(s.triples.known, func(k launch.Triple) bool {
		return launch.FindTriple([]launch.Triple{k}, t.TripleName) != nil
	}), t)
	switch t.Verdict {
	case launch.VerdictGood:
		s.log.Infof("%v are verified: %d rounds, %s", t.TripleName, t.Rounds, t.Memory)
	case launch.VerdictUntested:
		s.log.Warnf("%v are not verified, and data bounces through the host's memory: %s", t.TripleName, t.Reason)
	default:
		text := fmt.Sprintf("%v are not used together: %s; data bounces through the host's memory", t.TripleName, t.Reason)
		s.log.Error(text)
		s.tell(journal.SeverityError, text)
	}
	if s.relay != nil {
		s.configure()
	}
}

// triplesDone is the end of a test of triples.
func (s *supervisor) triplesDone(err error) {
	s.triples.cancel()
	s.triples.cancel = nil
	for len(s.triples.found) > 0 {
		s.tripleFound(<-s.triples.found)
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		s.log.WithError(err).Warn("testing GPUs and NICs")
	}
}

// endTriples ends a test that is under way, and waits for its end.
func (s *supervisor) endTriples() {
	if s.triples.cancel == nil {
		return
	}
	s.triples.cancel()
	select {
	case err := <-s.triples.done:
		s.triplesDone(err)
	case <-time.After(process.EndTimeout):
		s.log.Warn("the test of GPUs and NICs does not end: a system call of it, of a driver perhaps, does not return")
		s.triples.cancel = nil
	}
}
