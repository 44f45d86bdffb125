package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/journal"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
)

// selfTests is the state of the supervisor's self-tests. The loop owns it.
type selfTests struct {
	// cancel is nil unless a test runs.
	cancel context.CancelFunc
	// found receives the results in order.
	found chan launch.Pair
	done  chan selfTestResult
	// pairs are the known results.
	pairs []launch.Pair
	// sent reports that the relay has the results of the servers' pairs.
	sent bool
}

// selfTestResult is the result of a test of some pairs.
type selfTestResult struct {
	names []launch.PairName
	pairs []launch.Pair
	took  time.Duration
	err   error
}

// selfTest reads the known results of the generation's pairs, and tests the other pairs while the
// relay starts.
func (s *supervisor) selfTest() {
	mode := s.generation.Config.SelfTest
	if mode == "" || mode == launch.SelfTestOff {
		return
	}
	tester := selftest.OfGeneration(s.generation, s.layout)
	known, err := tester.KnownPairs(s.generation.Config.Lanes)
	if err != nil {
		s.log.WithError(err).Warn("ignoring the stored results of self-tests")
	}
	s.tests.pairs = slices.DeleteFunc(s.tests.pairs, selftest.Stale)
	s.learn(known)
	names := selftest.Unknown(s.tests.pairs, launch.StagingPairs(s.generation.Config.Lanes))
	if len(names) == 0 && s.tests.cancel == nil {
		s.testTriples()
	}
	if len(names) == 0 || s.tests.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	lanes := s.generation.Config.Lanes
	found, done := make(chan launch.Pair, len(names)), make(chan selfTestResult, 1)
	s.tests.cancel, s.tests.found, s.tests.done, s.tests.sent = cancel, found, done, false
	s.log.Infof("testing %d pairs of GPUs without a result of this boot", len(names))
	go func() {
		begun := time.Now()
		t := selfTestResult{names: names}
		// Test spares last, one at a time: if several containers start together, the pairs of all
		// servers are tested before any spare, except that a container may wait for one spare of
		// another container.
		servers, spares := parted(names, lanes)
		for _, part := range append([][]launch.PairName{servers}, slices.Collect(slices.Chunk(spares, 1))...) {
			err := tester.Test(ctx, part, false, func(_ launch.PairHost, p launch.Pair) {
				t.pairs = append(t.pairs, p)
				found <- p
			})
			t.err = errors.Join(t.err, err, context.Cause(ctx))
			if ctx.Err() != nil || errors.Is(err, generation.ErrLocked) {
				break
			}
		}
		t.took = time.Since(begun)
		done <- t
	}()
}

// testFound records a result. It sends the results to the relay when all servers' pairs have one,
// so that the relay does not wait for the spares.
func (s *supervisor) testFound(p launch.Pair) {
	s.learn([]launch.Pair{p})
	servers, _ := parted(launch.StagingPairs(s.generation.Config.Lanes), s.generation.Config.Lanes)
	if s.tests.sent || s.relay == nil || len(selftest.Unknown(s.tests.pairs, servers)) > 0 {
		return
	}
	s.tests.sent = true
	s.configure()
}

// parted returns the pairs of the lanes' servers, and the pairs of the spares.
func parted(names []launch.PairName, lanes []launch.Lane) (servers, spares []launch.PairName) {
	lanes = slices.Clone(lanes)
	for i := range lanes {
		lanes[i].Spares = nil
	}
	planned := launch.StagingPairs(lanes)
	for _, n := range names {
		if slices.Contains(planned, n) {
			servers = append(servers, n)
		} else {
			spares = append(spares, n)
		}
	}
	return servers, spares
}

// learn replaces known results by new results.
func (s *supervisor) learn(found []launch.Pair) {
	for _, p := range found {
		s.tests.pairs = slices.DeleteFunc(
			s.tests.pairs,
			func(o launch.Pair) bool { return selftest.Contains([]launch.PairName{p.PairName}, o) },
		)
		s.tests.pairs = append(s.tests.pairs, p)
	}
}

// testsDone reports the results of a test to the log and the relay.
func (s *supervisor) testsDone(t selfTestResult) {
	s.tests.cancel()
	s.tests.cancel, s.tests.sent = nil, true
	if errors.Is(t.err, context.Canceled) { // the relay was stopped or drained
		s.learn(t.pairs)
		if s.held == "" && s.relay != nil { // a relay has started meanwhile and waits
			s.selfTest()
			s.configure()
		}
		return
	}
	if t.err != nil {
		s.log.WithError(t.err).Warn("testing pairs of GPUs")
	}
	for _, n := range selftest.Unknown(t.pairs, t.names) { // record them, so that no process waits for them
		reason := "the self-test did not reach this pair"
		if t.err != nil {
			reason = t.err.Error()
		}
		t.pairs = append(
			t.pairs,
			launch.Pair{
				PairName: n,
				Verdict:  launch.VerdictUntested,
				Reason:   selftest.OneLine(reason),
				At:       time.Now().Unix(),
			},
		)
	}
	s.learn(t.pairs)
	for _, p := range t.pairs {
		switch p.Verdict {
		case launch.VerdictGood:
		case launch.VerdictUntested:
			s.log.Warnf("%v are not tested: %s", p.PairName, p.Reason)
		default:
			text := fmt.Sprintf("pair %v is unfit: %s; relays of this boot stage elsewhere", p.PairName, p.Reason)
			s.log.Error(text)
			s.logToHost(journal.SeverityError, text)
		}
	}
	s.log.Infof("the self-test of %d pairs of GPUs took %v", len(t.names), t.took.Round(time.Millisecond))
	if s.held == "" {
		s.selfTest() // lanes may have been added meanwhile
	}
	if s.relay != nil {
		s.configure()
	}
}

// endTests cancels a running test and waits until it has no CUDA context. ended reports whether a
// test was running, and t are its results.
func (s *supervisor) endTests() (t selfTestResult, ended bool) {
	s.endTriples()
	if s.tests.cancel == nil {
		return t, false
	}
	s.tests.cancel()
	select {
	case t = <-s.tests.done:
		return t, true
	case <-time.After(process.EndTimeout):
		s.log.Warn("the self-test does not end: a system call does not return, perhaps in a driver")
		return t, false
	}
}

// knowing adds the known results to a configuration, up to the size of a datagram: failed pairs
// first, and good triples before others.
func (s *supervisor) knowing(c launch.Config) launch.Config {
	if c.SelfTest == "" || c.SelfTest == launch.SelfTestOff {
		return c
	}
	c.Testing = s.tests.cancel != nil
	for _, p := range s.tests.pairs {
		if selftest.About(c.Lanes, p) {
			c.Pairs = append(c.Pairs, p)
		}
	}
	for _, n := range launch.StagingTriples(c.Lanes) {
		if k := launch.FindTriple(s.triples.known, n); k != nil {
			c.Triples = append(c.Triples, launch.Triple{TripleName: k.TripleName, Verdict: k.Verdict, Reason: k.Reason})
		}
	}
	slices.SortStableFunc(c.Triples, func(a, b launch.Triple) int { return unusable(a) - unusable(b) })
	slices.SortStableFunc(c.Pairs, func(a, b launch.Pair) int { return urgency(b) - urgency(a) })
	fits := func(c launch.Config) bool {
		text, err := json.Marshal(c)
		return err == nil && len(text) <= launch.MaxDatagram
	}
	// A triple without a result bounces, so omit triples first.
	all := c.Triples
	if !fits(c) {
		omitted := sort.Search(len(all), func(n int) bool {
			c.Triples = all[:len(all)-n]
			return fits(c)
		})
		c.Triples = all[:len(all)-omitted]
	}
	for len(c.Pairs) > 0 && !fits(c) {
		c.Pairs = c.Pairs[:len(c.Pairs)-1]
	}
	if omitted := len(all) - len(c.Triples); omitted != s.triples.omitted {
		s.triples.omitted = omitted
		if omitted > 0 {
			s.log.Warnf("a configuration has no room for %d of %d results of GPUs and NICs: data of these bounces through the "+
				"host's memory", omitted, len(all))
		}
	}
	return c
}

// unusable returns 0 for a triple that the relay can use, and 1 otherwise.
func unusable(t launch.Triple) int {
	if t.Verdict == launch.VerdictGood {
		return 0
	}
	return 1
}

func urgency(p launch.Pair) int {
	return slices.Index(
		[]string{launch.VerdictUntested, launch.VerdictGood, launch.VerdictSlow, launch.VerdictWrong},
		p.Verdict,
	)
}
