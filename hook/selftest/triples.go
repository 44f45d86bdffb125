package selftest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

// GPUs and NICs are tested together, as triples, by `peerlane-relay rdma-test` in a sandbox like a
// relay's, with the devices of the NICs. Until the verdict, a relay's data bounces through host
// memory, so no client waits for the test.

const (
	// tripleTimeout limits the test of one triple, including its contexts and connections.
	tripleTimeout = 30 * time.Second
	// triplesPerLock is the number of triples to test under one lock of the host's self-tests,
	// because the pairs of other containers wait for at most testLockTimeout.
	triplesPerLock = 4
	// lockPause is the time between two locks, for waiting processes.
	lockPause = 50 * time.Millisecond
	// portPause is the interval for polling a port that is down, or a held lock.
	portPause = time.Second
)

// Sysfs is the root of sysfs; tests replace it.
var Sysfs = "/sys"

// setting identifies the ACS controls of all PCIe ports of the host, the configuration of NICs'
// writes to GPU memory, and the firmware of a NIC. A triple's result is valid for one setting.
type setting string

func readSetting(verbs *launch.Verbs) setting {
	verbs = cmp.Or(verbs, &launch.DefaultVerbs)
	configured := fmt.Sprintf(", relaxed ordering %t, Data Direct %t", verbs.RelaxedOrdering, verbs.DataDirect)
	host, err := reader.Sysfs(topo.Options{Sysfs: Sysfs})
	if err != nil {
		return setting("ACS unknown" + configured)
	}
	sum := fnv.New64a()
	for _, p := range host.PCIePorts {
		fmt.Fprintln(sum, p.BusID, p.ACS == nil, p.ACS)
	}
	return setting(fmt.Sprintf("ACS %016x of %d ports%s", sum.Sum64(), len(host.PCIePorts), configured))
}

func (s setting) of(nic string) string {
	firmware, err := os.ReadFile(filepath.Join(Sysfs, "class/infiniband", nic, "fw_ver"))
	version := strings.TrimSpace(string(firmware))
	if err != nil || version == "" {
		version = "unknown"
	}
	return fmt.Sprintf("firmware %.64s, %s", version, s)
}

// stale reports whether to test a triple again: the NIC's firmware, the host's ACS controls or the
// configuration have changed, or untestedInterval has passed since it could not be tested.
func (s setting) stale(t launch.Triple) bool {
	return t.Setting != s.of(t.NIC) || t.Verdict == launch.VerdictUntested && (t.Age() > untestedInterval || t.Age() < 0)
}

// UnknownTriples returns the triples that a list lacks.
func UnknownTriples(list []launch.Triple, names []launch.TripleName) []launch.TripleName {
	return slices.DeleteFunc(slices.Clone(names), func(n launch.TripleName) bool {
		return launch.FindTriple(list, n) != nil
	})
}

// PendingTriples returns the triples that list lacks, and the untested ones whose NIC's port is
// down.
func PendingTriples(list []launch.Triple, names []launch.TripleName) []launch.TripleName {
	return slices.DeleteFunc(slices.Clone(names), func(n launch.TripleName) bool {
		k := launch.FindTriple(list, n)
		return k != nil && (k.Verdict != launch.VerdictUntested || !portDown(n.NIC))
	})
}

// KnownTriples returns the results of triples for this boot, driver, firmware, ACS and
// configuration.
func (t *Tester) KnownTriples(names []launch.TripleName, verbs *launch.Verbs) ([]launch.Triple, error) {
	known, err := t.Known()
	if len(known.Triples) == 0 {
		return nil, err
	}
	now := readSetting(verbs)
	return slices.DeleteFunc(known.Triples, func(k launch.Triple) bool {
		return !launch.ContainsTriple(names, k.TripleName) || now.stale(k)
	}), err
}

// TestTriples tests triples, stores the results, and passes the results to report, known results first. It
// repeats known results only with again. An untestable triple has VerdictUntested. TestTriples
// fails only if the lock or the file of results fails.
func (t *Tester) TestTriples(ctx context.Context, names []launch.TripleName, verbs *launch.Verbs, again bool,
	report func(launch.Triple)) error {
	if len(names) == 0 {
		return nil
	}
	held, kept, err := t.open(ctx)
	if err != nil {
		return err
	}
	defer held.Close()
	now := readSetting(verbs)
	kept.Triples = slices.DeleteFunc(kept.Triples, func(k launch.Triple) bool {
		return now.stale(k) || again && launch.ContainsTriple(names, k.TripleName)
	})
	for _, n := range names {
		if k := launch.FindTriple(kept.Triples, n); k != nil {
			report(*k)
		}
	}
	var failed error
	took := func(r launch.Triple) {
		r.At, r.Setting = time.Now().Unix(), now.of(r.NIC)
		kept.Triples = append(kept.Triples, r)
		if failed == nil && !t.unkept {
			failed = generation.WriteJSON(t.layout.SelfTestFile(), kept)
		}
		report(r)
	}
	rest := func() []launch.TripleName { return UnknownTriples(kept.Triples, names) }
	err = testAll(ctx, rest, func(list []launch.TripleName) error { return t.runTriples(ctx, list, verbs, took) },
		func(n launch.TripleName, reason string) {
			took(launch.Triple{TripleName: n, Verdict: launch.VerdictUntested, Reason: reason})
		})
	return cmp.Or(err, failed)
}

// runTriples tests triples in one process, in a relay's sandbox with the devices of the NICs.
func (t *Tester) runTriples(ctx context.Context, names []launch.TripleName, verbs *launch.Verbs,
	report func(launch.Triple)) error {
	ctx, renew, cancel := limitEach(ctx, tripleTimeout+testerTimeout, tripleTimeout,
		errors.New("the test of a GPU and a NIC takes too long"))
	defer cancel()
	job := launch.RDMAJob{Triples: names, Verbs: verbs}
	text, err := json.Marshal(job)
	if err != nil {
		return err
	}
	spec := t.spec()
	for _, n := range names {
		nodes := sandbox.VerbsNodes(n.NIC)
		spec.Devices = append(spec.Devices, nodes...)
		spec.HostNetwork = spec.HostNetwork || nodes != nil
	}
	slices.Sort(spec.Devices)
	spec.Devices = slices.Compact(spec.Devices)
	return t.relayProgram(ctx, "rdma-test", "the test of GPUs and NICs", &spec, text, func(out io.Reader) error {
		return launch.ReadRDMA(out, job, func(r launch.RDMAResult) {
			renew()
			if r.Triple != nil {
				report(*r.Triple)
			}
		})
	})
}

// limitEach returns a context that ends after first, or after each from the last call of renew.
func limitEach(ctx context.Context, first, each time.Duration, cause error) (limited context.Context, renew,
	stop func()) {
	limited, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(first, func() { cancel(cause) })
	return limited, func() { timer.Reset(each) }, func() {
		timer.Stop()
		cancel(nil)
	}
}

// PlannedTriples returns the triples of a plan's lanes.
func PlannedTriples(plan *planner.Plan, c config.Config) ([]launch.TripleName, error) {
	var list []launch.TripleName
	for _, l := range plan.Lanes {
		if !l.Relay && l.Kind != planner.KindDirect {
			continue
		}
		planned, err := lanes.Find(plan, []string{"@" + l.GPU})
		if err != nil {
			return nil, err
		}
		lanes.AddSpares(plan, planned, c.Plan.Exclude.Pairs)
		for _, n := range launch.StagingTriples(planned) {
			if !slices.Contains(list, n) {
				list = append(list, n)
			}
		}
	}
	return list, nil
}

// TriplesOf returns the results of the generation's triples, with the reason for a missing result.
func TriplesOf(g *generation.Generation, l paths.Layout) ([]launch.Triple, error) {
	list := []launch.Triple{}
	names := PossibleTriples(g)
	reason := "not tested yet: data bounces through the host's memory until the verdict"
	var known []launch.Triple
	var err error
	if mode := g.Config.SelfTest; mode == "" || mode == launch.SelfTestOff {
		reason = `not tested: relay.self_test is "off"`
	} else {
		known, err = OfGeneration(g, l).KnownTriples(names, g.Config.Verbs)
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

// PossibleTriples returns the triples of the generation's lanes; none if its relay does not use
// RDMA, or if none of the NICs is an RDMA device.
func PossibleTriples(g *generation.Generation) []launch.TripleName {
	c := g.Config
	if c.Verbs == nil || c.Transport != launch.TransportAuto && c.Transport != launch.TransportVerbs {
		return nil
	}
	software := slices.ContainsFunc(g.Relay.Environment,
		func(e string) bool { return strings.HasPrefix(e, generation.VerbsVariable+"=") })
	devices := map[string]bool{}
	return slices.DeleteFunc(launch.StagingTriples(c.Lanes), func(n launch.TripleName) bool {
		if _, known := devices[n.NIC]; !known {
			devices[n.NIC] = software || sandbox.VerbsNodes(n.NIC) != nil
		}
		return !devices[n.NIC]
	})
}

// TestUntilUp tests triples. If the port of a NIC was down before or after a test without a
// verdict, TestUntilUp waits until a port is active, and repeats the test.
func TestUntilUp(ctx context.Context, tester *Tester, names []launch.TripleName, verbs *launch.Verbs,
	found chan<- launch.Triple) error {
	for again := false; ; again = true {
		var down []launch.TripleName
		for part := range slices.Chunk(names, triplesPerLock) {
			list, err := tester.testUnlessLocked(ctx, part, verbs, again, found)
			if err != nil {
				return err
			}
			down = append(down, list...)
			if err := pause(ctx, lockPause); err != nil {
				return err
			}
		}
		if len(down) == 0 {
			return nil
		}
		for wait := true; wait; wait = !slices.ContainsFunc(down,
			func(n launch.TripleName) bool { return !portDown(n.NIC) }) {
			if err := pause(ctx, portPause); err != nil {
				return err
			}
		}
		names = down
	}
}

// testUnlessLocked tests triples unless another test holds the lock, and returns the triples
// without a verdict whose port was down before or after the test.
func (t *Tester) testUnlessLocked(ctx context.Context, names []launch.TripleName, verbs *launch.Verbs, again bool,
	found chan<- launch.Triple) (down []launch.TripleName, err error) {
	for {
		before := slices.DeleteFunc(slices.Clone(names), func(n launch.TripleName) bool { return !portDown(n.NIC) })
		err = t.TestTriples(ctx, names, verbs, again, func(r launch.Triple) {
			if r.Verdict == launch.VerdictUntested && (launch.ContainsTriple(before, r.TripleName) || portDown(r.NIC)) {
				down = append(down, r.TripleName)
			}
			select {
			case found <- r:
			case <-ctx.Done():
			}
		})
		if !errors.Is(err, generation.ErrLocked) {
			return down, err
		}
		if err := pause(ctx, portPause); err != nil {
			return nil, err
		}
	}
}

// pause waits for a duration, and fails when the context ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// portDown reports whether no port of a NIC is active (/sys/class/infiniband/NIC/ports/N/state).
func portDown(nic string) bool {
	states, err := filepath.Glob(filepath.Join(Sysfs, "class/infiniband", nic, "ports/*/state"))
	if err != nil || len(states) == 0 {
		return false
	}
	return !slices.ContainsFunc(states, func(path string) bool {
		text, err := os.ReadFile(path)
		return err == nil && strings.Contains(string(text), "ACTIVE")
	})
}
