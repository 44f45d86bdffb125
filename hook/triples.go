package hook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// GPUs and NICs are tested together, as triples, by `peerlane-relay rdma-test` in a sandbox like
// a relay's, with the devices of the NICs. Until the verdict a relay's data bounces through the
// host's memory, so no client waits for the test.

const (
	// tripleTimeout limits the test of one triple, contexts and connections included.
	tripleTimeout = 30 * time.Second
	// portPause is the interval of looks at a port that was down.
	portPause = time.Second
)

// sysfs is where a Tester reads NICs and PCIe ports; tests have another.
var sysfs = "/sys"

// setting identifies the ACS controls of all PCIe ports of the host, and with them the firmware
// of a NIC: results of triples hold for one.
type setting string

func readSetting() setting {
	host, err := topo.ReadSysfs(topo.Options{Sysfs: sysfs})
	if err != nil {
		return "ACS unknown"
	}
	sum := fnv.New64a()
	for _, p := range host.PCIePorts {
		fmt.Fprintln(sum, p.BusID, p.ACS == nil, p.ACS)
	}
	return setting(fmt.Sprintf("ACS %016x of %d ports", sum.Sum64(), len(host.PCIePorts)))
}

func (s setting) of(nic string) string {
	firmware, err := os.ReadFile(filepath.Join(sysfs, "class/infiniband", nic, "fw_ver"))
	version := strings.TrimSpace(string(firmware))
	if err != nil || version == "" {
		version = "unknown"
	}
	return fmt.Sprintf("firmware %.64s, %s", version, s)
}

// stale reports whether a triple is worth another test: its NIC's firmware or the host's ACS
// controls are others, or it could not be tested some time ago.
func (s setting) stale(t launch.Triple) bool {
	return t.Setting != s.of(t.NIC) || t.Verdict == launch.VerdictUntested && (t.Age() > untestedTime || t.Age() < 0)
}

// unknownTriples returns the triples that a list lacks.
func unknownTriples(list []launch.Triple, names []launch.TripleName) []launch.TripleName {
	return slices.DeleteFunc(slices.Clone(names), func(n launch.TripleName) bool { return launch.FindTriple(list, n) != nil })
}

// KnownTriples returns the results of this boot, driver, firmware and ACS for some triples.
func (t *Tester) KnownTriples(names []launch.TripleName) ([]launch.Triple, error) {
	known, err := t.Known()
	if len(known.Triples) == 0 {
		return nil, err
	}
	now := readSetting()
	return slices.DeleteFunc(known.Triples, func(k launch.Triple) bool {
		return !slices.ContainsFunc(names, func(n launch.TripleName) bool { return launch.FindTriple([]launch.Triple{k}, n) != nil }) || now.stale(k)
	}), err
}

// TestTriples tests triples, known ones only if again is set, keeps the results and tells of each,
// the known ones first. A triple that cannot be tested has VerdictUntested; the error is of the
// lock or of the file of results.
func (t *Tester) TestTriples(ctx context.Context, names []launch.TripleName, verbs *launch.Verbs, again bool, tell func(launch.Triple)) error {
	if len(names) == 0 {
		return nil
	}
	if !t.unkept {
		held, err := t.lock(ctx)
		if err != nil {
			return err
		}
		defer held.Close()
	}
	kept, err := t.Known()
	if kept.Version == 0 {
		return err // else what was kept is damaged, and written anew
	}
	now := readSetting()
	kept.Triples = slices.DeleteFunc(kept.Triples, func(k launch.Triple) bool {
		asked := slices.ContainsFunc(names, func(n launch.TripleName) bool { return launch.FindTriple([]launch.Triple{k}, n) != nil })
		return now.stale(k) || again && asked
	})
	rest := unknownTriples(kept.Triples, names)
	for _, n := range names {
		if k := launch.FindTriple(kept.Triples, n); k != nil {
			tell(*k)
		}
	}
	var failed error
	took := func(r launch.Triple) {
		r.At, r.Setting = time.Now().Unix(), now.of(r.NIC)
		kept.Triples = append(kept.Triples, r)
		if failed == nil && !t.unkept {
			failed = writeJSON(t.layout.SelfTestFile(), kept)
		}
		tell(r)
	}
	for len(rest) > 0 {
		before := len(rest)
		err := t.runTriples(ctx, rest, verbs, took)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if rest = unknownTriples(kept.Triples, rest); len(rest) < before {
			continue // one that ended the process is told of next
		}
		reason := "the test ended without a word"
		if err != nil {
			reason = err.Error()
		}
		took(launch.Triple{TripleName: rest[0], Verdict: launch.VerdictUntested, Reason: oneLine(reason)})
		rest = unknownTriples(kept.Triples, rest)
	}
	return failed
}

// runTriples has one process test triples, in a relay's sandbox with the NICs' devices.
func (t *Tester) runTriples(ctx context.Context, names []launch.TripleName, verbs *launch.Verbs, tell func(launch.Triple)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(len(names))*tripleTimeout+testerTimeout, errors.New("the test of GPUs and NICs takes too long"))
	defer cancel()
	job := launch.RDMAJob{Triples: names, Verbs: verbs}
	text, err := json.Marshal(job)
	if err != nil {
		return err
	}
	spec := t.spec()
	for _, n := range names {
		nodes := verbsNodes(n.NIC)
		spec.Devices = append(spec.Devices, nodes...)
		spec.HostNetwork = spec.HostNetwork || nodes != nil
	}
	slices.Sort(spec.Devices)
	spec.Devices = slices.Compact(spec.Devices)
	return t.confined(ctx, "rdma-test", "the test of GPUs and NICs", spec, text, func(out pipe) error {
		return launch.ReadRDMA(out, job, func(r launch.RDMAResult) {
			if r.Triple != nil {
				tell(*r.Triple)
			}
		})
	})
}

// PlannedTriples returns the triples of a plan's lanes.
func PlannedTriples(plan *topo.Plan, c config.Config) ([]launch.TripleName, error) {
	var list []launch.TripleName
	for _, l := range plan.Lanes {
		if !l.Relay && l.Kind != topo.KindDirect {
			continue
		}
		lanes, err := Lanes(plan, []string{"@" + l.GPU})
		if err != nil {
			return nil, err
		}
		addSpares(plan, lanes, c.Plan.Exclude.Pairs)
		for _, n := range launch.StagingTriples(lanes) {
			if !slices.Contains(list, n) {
				list = append(list, n)
			}
		}
	}
	return list, nil
}

// Triples returns the results of the generation's lanes, and for triples without a result the
// reason.
func (g *Generation) Triples(l paths.Layout) ([]launch.Triple, error) {
	list := []launch.Triple{}
	names := g.triples()
	reason := "not tested yet: data bounces through the host's memory until the verdict"
	var known []launch.Triple
	var err error
	if mode := g.Config.SelfTest; mode == "" || mode == launch.SelfTestOff {
		reason = `not tested: relay.self_test is "off"`
	} else {
		known, err = g.tester(l).KnownTriples(names)
	}
	for _, n := range names {
		k := launch.FindTriple(known, n)
		if k == nil {
			k = &launch.Triple{TripleName: n, Verdict: launch.VerdictUntested, Reason: reason}
		}
		list = append(list, *k)
	}
	return list, err
}

// triples returns the triples of the generation's lanes: none if its relay uses no RDMA, or no
// NIC of them is an RDMA device.
func (g *Generation) triples() []launch.TripleName {
	c := g.Config
	if c.Verbs == nil || c.Transport != launch.TransportAuto && c.Transport != launch.TransportVerbs {
		return nil
	}
	software := slices.ContainsFunc(g.Relay.Environment, func(e string) bool { return strings.HasPrefix(e, verbsVariable+"=") })
	return slices.DeleteFunc(launch.StagingTriples(c.Lanes), func(n launch.TripleName) bool { return !software && verbsNodes(n.NIC) == nil })
}

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
	names := s.generation.triples()
	if len(names) == 0 {
		return
	}
	tester := s.generation.tester(s.layout)
	known, err := tester.KnownTriples(names)
	if err != nil {
		s.log.WithError(err).Warn("what is kept of tests of GPUs and NICs is ignored")
	}
	s.triples.known = known
	rest := unknownTriples(known, names)
	if len(rest) == 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	found, done := make(chan launch.Triple, len(rest)), make(chan error, 1)
	s.triples.cancel, s.triples.found, s.triples.done = cancel, found, done
	verbs := s.generation.Config.Verbs
	s.log.Infof("testing %d triples of GPUs and NICs that this boot knows nothing of; their data bounces until then", len(rest))
	go func() { done <- testUntilUp(ctx, tester, rest, verbs, found) }()
}

// testUntilUp tests triples, and those again whose NIC's port was down and is active now.
func testUntilUp(ctx context.Context, tester *Tester, names []launch.TripleName, verbs *launch.Verbs, found chan<- launch.Triple) error {
	again := false
	for {
		var down []launch.TripleName
		err := tester.TestTriples(ctx, names, verbs, again, func(t launch.Triple) {
			if t.Verdict == launch.VerdictUntested && portDown(t.NIC) {
				down = append(down, t.TripleName)
			}
			select {
			case found <- t:
			case <-ctx.Done():
			}
		})
		if err != nil && !errors.Is(err, errLocked) || err == nil && len(down) == 0 {
			return err
		}
		for wait := true; wait && err == nil; wait = !slices.ContainsFunc(down, func(n launch.TripleName) bool { return !portDown(n.NIC) }) {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(portPause):
			}
		}
		if err == nil {
			names, again = down, true
		}
	}
}

// portDown reports whether no port of a NIC is active (/sys/class/infiniband/NIC/ports/N/state).
func portDown(nic string) bool {
	states, err := filepath.Glob(filepath.Join(sysfs, "class/infiniband", nic, "ports/*/state"))
	if err != nil || len(states) == 0 {
		return false
	}
	return !slices.ContainsFunc(states, func(path string) bool {
		text, err := os.ReadFile(path)
		return err == nil && strings.Contains(string(text), "ACTIVE")
	})
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
		s.tell(SeverityError, text)
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
	case <-time.After(endTimeout):
		s.log.Warn("the test of GPUs and NICs does not end: a system call of it, of a driver perhaps, does not return")
		s.triples.cancel = nil
	}
}
