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

// tripleTests is the state of the supervisor's tests of triples. The loop owns it.
type tripleTests struct {
	// cancel is nil unless a test runs.
	cancel context.CancelFunc
	// found receives the results one by one.
	found chan launch.Triple
	done  chan error
	// names are the triples that are tested or under test.
	names []launch.TripleName
	known []launch.Triple
	// omitted is the number of results that did not fit into the last configuration.
	omitted int
}

// testTriples reads the known results of the generation's triples, and tests the others while the
// relay works. If a running test lacks triples of an added lane, testTriples cancels the test, and
// triplesDone starts the next one.
func (s *supervisor) testTriples() {
	if mode := s.generation.Config.SelfTest; mode == "" || mode == launch.SelfTestOff || s.held != "" {
		return
	}
	if s.triples.cancel != nil {
		if s.triplesAdded() {
			s.triples.cancel()
		}
		return
	}
	names := selftest.PossibleTriples(s.generation)
	if len(names) == 0 {
		return
	}
	tester := selftest.OfGeneration(s.generation, s.layout)
	known, err := tester.KnownTriples(names, s.generation.Config.Verbs)
	if err != nil {
		s.log.WithError(err).Warn("ignoring the kept results of tests of GPUs and NICs")
	}
	s.triples.known = known
	rest := selftest.PendingTriples(known, names)
	if len(rest) == 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	found, done := make(chan launch.Triple, len(rest)), make(chan error, 1)
	s.triples.cancel, s.triples.found, s.triples.done, s.triples.names = cancel, found, done, rest
	verbs := s.generation.Config.Verbs
	s.log.Infof("testing %d triples of GPUs and NICs; their data bounces until the verdict", len(rest))
	go func() { done <- selftest.TestUntilUp(ctx, tester, rest, verbs, found) }()
}

// triplesAdded reports whether a triple of the generation has no known result and is not being
// tested.
func (s *supervisor) triplesAdded() bool {
	unknown := selftest.UnknownTriples(s.triples.known, selftest.PossibleTriples(s.generation))
	return slices.ContainsFunc(unknown, func(n launch.TripleName) bool {
		return !launch.ContainsTriple(s.triples.names, n)
	})
}

// tripleFound records a result, and sends it to the relay.
func (s *supervisor) tripleFound(t launch.Triple) {
	s.triples.known = append(slices.DeleteFunc(s.triples.known, func(k launch.Triple) bool {
		return launch.ContainsTriple([]launch.TripleName{t.TripleName}, k.TripleName)
	}), t)
	switch t.Verdict {
	case launch.VerdictGood:
		s.log.Infof("%v are verified: %d rounds, %s", t.TripleName, t.Rounds, t.Memory)
	case launch.VerdictUntested:
		s.log.Warnf("%v could not be verified; data bounces through host memory: %s", t.TripleName, t.Reason)
	default:
		text := fmt.Sprintf("%v failed the test: %s; data bounces through host memory", t.TripleName, t.Reason)
		s.log.Error(text)
		s.logToHost(journal.SeverityError, text)
	}
	if s.relay != nil {
		s.configure()
	}
}

// triplesDone handles the end of a test of triples, and tests the triples of lanes that were added
// during the test.
func (s *supervisor) triplesDone(err error) {
	s.finishTriples(err)
	if s.held != "" || !errors.Is(err, context.Canceled) && !s.triplesAdded() {
		return
	}
	s.testTriples()
	if s.relay != nil {
		s.configure() // includes the known results of added lanes
	}
}

// finishTriples records the last results of a test of triples.
func (s *supervisor) finishTriples(err error) {
	s.triples.cancel()
	found := s.triples.found
	s.triples.cancel, s.triples.found, s.triples.done = nil, nil, nil
	for len(found) > 0 {
		s.tripleFound(<-found)
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		s.log.WithError(err).Warn("testing GPUs and NICs")
	}
}

// endTriples cancels a running test, and waits for its end.
func (s *supervisor) endTriples() {
	if s.triples.cancel == nil {
		return
	}
	s.triples.cancel()
	select {
	case err := <-s.triples.done:
		s.finishTriples(err)
	case <-time.After(process.EndTimeout):
		s.log.Warn("the test of GPUs and NICs does not end: a system call does not return, perhaps in a driver")
		s.triples.cancel, s.triples.found, s.triples.done = nil, nil, nil
	}
}
