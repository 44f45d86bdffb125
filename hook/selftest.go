package hook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// Pairs of GPUs are tested by a process that serves nobody, `peerlane-relay
// self-test`, in a sandbox like a relay's with a uid that no relay has. Relays, which
// may be taken over, have no part in it: supervisors and the administrator start
// it, look at what it says, and keep that for all containers of this boot.

// libraryVariable is package cuda's, which the hook does not import, and simulator how
// the names of the simulator's variables begin.
const (
	libraryVariable = "PEERLANE_CUDA_LIBRARY"
	simulator       = "PEERLANE_SIM"

	// verbsVariable is package relay/verbs'.
	verbsVariable = "PEERLANE_VERBS_LIBRARY"
)

// moduleVersion is that of the driver that is loaded; tests have another.
var moduleVersion = "/sys/module/nvidia/version"

// Times of self-tests.
const (
	// pairTimeout is how long a tester may take for a pair, and simulatedTimeout for one of
	// simulated GPUs: it keeps itself to less. testerTimeout is what it may take besides.
	pairTimeout      = 45 * time.Second
	simulatedTimeout = 5 * time.Minute
	testerTimeout    = 15 * time.Second
	// heldTime is how long a tester that was killed is waited for.
	heldTime = 2 * time.Second
	// testLockTimeout is how long another self-test of the host is waited for.
	testLockTimeout = time.Minute
	// untestedTime is how long a pair that could not be tested is left alone.
	untestedTime = 10 * time.Minute
	// slowTime is how long a pair counts as slow: others' copies may have been in its way.
	slowTime = time.Hour
)

// Tester is how self-tests are made on a host.
type Tester struct {
	layout    paths.Layout
	relay     Command
	sandbox   Sandbox
	hook      string // the program whose `confine` makes the sandbox
	slotBytes uint64
	unkept    bool
}

// NewTester is the tester of a host's configuration, for any process.
func NewTester(l paths.Layout, c config.Config, hookBinary string) (*Tester, error) {
	hookBinary, relay, err := binaries(Request{Config: c, HookBinary: hookBinary})
	if err != nil {
		return nil, err
	}
	s, err := newSandbox(c.Relay)
	if err != nil {
		return nil, err
	}
	return &Tester{layout: l, relay: Command{relay, c.Relay.Environment}, sandbox: s, hook: hookBinary, slotBytes: uint64(c.Relay.SlotSize)}, nil
}

// Unkept has nothing of what is found kept, nor anything used that was.
func (t *Tester) Unkept() *Tester {
	t.unkept = true
	return t
}

// tester is the one of a generation's supervisor.
func (g *Generation) tester(l paths.Layout) *Tester {
	return &Tester{layout: l, relay: g.Relay, sandbox: g.Sandbox, hook: "/proc/self/exe", slotBytes: g.Config.SlotBytes}
}

// library is what stands for the driver in this environment.
func library(environment []string) string {
	var list []string
	for _, e := range environment {
		if strings.HasPrefix(e, libraryVariable+"=") || strings.HasPrefix(e, simulator) {
			list = append(list, e)
		}
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// record is an empty one of this boot and driver.
func (t *Tester) record() (launch.PairRecord, error) {
	boot, err := bootID()
	if err != nil {
		return launch.PairRecord{}, err
	}
	module, err := os.ReadFile(moduleVersion)
	if err = unlessGone(err); err != nil {
		return launch.PairRecord{}, err
	}
	return launch.PairRecord{
		Version: launch.PairVersion, Boot: boot, Module: strings.TrimSpace(string(module)), Library: library(t.relay.Environment), Pairs: []launch.Pair{},
	}, nil
}

// Known is what was found on this boot and with this driver, as far as it holds
// still. Where the error is not nil, what was kept is damaged or not to be trusted,
// and nothing is known.
func (t *Tester) Known() (launch.PairRecord, error) {
	r, err := t.record()
	if err != nil || t.unkept {
		return r, err
	}
	path := t.layout.SelfTestFile()
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil && info.Size() > launch.MaxPairRecord {
		err = fmt.Errorf("%s has %d bytes", path, info.Size())
	}
	if err == nil {
		err = paths.Trusted(path)
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return r, err
	}
	kept, err := launch.ReadPairRecord(text)
	if err != nil {
		return r, fmt.Errorf("%s: %w", path, err)
	}
	if kept.Boot != r.Boot || kept.Module != r.Module || kept.Library != r.Library {
		return r, nil
	}
	kept.Pairs = slices.DeleteFunc(kept.Pairs, stale)
	return kept, nil
}

// stale reports whether a pair is worth another try.
func stale(p launch.Pair) bool {
	holds, bounded := map[string]time.Duration{launch.VerdictUntested: untestedTime, launch.VerdictSlow: slowTime}[p.Verdict]
	return bounded && (p.Age() > holds || p.Age() < 0)
}

// unknown are the pairs that a list has nothing of.
func unknown(list []launch.Pair, names []launch.PairName) []launch.PairName {
	return slices.DeleteFunc(slices.Clone(names), func(n launch.PairName) bool { return launch.FindPair(list, n) != nil })
}

// Test tests pairs, those that are known already only if again is set, keeps what it
// finds, and tells of each, the known ones first. A pair that cannot be tested is
// one of VerdictUntested; what Test itself fails by is the lock, or the keeping.
func (t *Tester) Test(ctx context.Context, names []launch.PairName, again bool, tell func(launch.PairHost, launch.Pair)) error {
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
	kept, err := t.Known() // another process may just have tested them
	if kept.Version == 0 {
		return err // else what was kept is damaged, and written anew
	}
	if again {
		kept.Pairs = slices.DeleteFunc(kept.Pairs, func(p launch.Pair) bool { return contains(names, p) })
	}
	for _, n := range names {
		if p := launch.FindPair(kept.Pairs, n); p != nil {
			tell(kept.PairHost, *p)
		}
	}
	var failed error
	took := func(h launch.PairHost, p launch.Pair) {
		p.At = time.Now().Unix() // by our clock
		kept.PairHost, kept.Pairs = h, append(kept.Pairs, p)
		if failed == nil && !t.unkept {
			failed = writeJSON(t.layout.SelfTestFile(), kept)
		}
		tell(h, p)
	}
	for rest := unknown(kept.Pairs, names); len(rest) > 0; rest = unknown(kept.Pairs, rest) {
		before := len(kept.Pairs)
		err := t.run(ctx, rest, took)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(kept.Pairs) > before {
			continue // a tester that has met a bad pair ends; the next one goes on
		}
		reason := "the self-test ended without a word"
		if err != nil {
			reason = err.Error()
		}
		took(kept.PairHost, launch.Pair{PairName: rest[0], Verdict: launch.VerdictUntested, Reason: oneLine(reason)})
	}
	return failed
}

func contains(names []launch.PairName, p launch.Pair) bool {
	return slices.ContainsFunc(names, func(n launch.PairName) bool { return launch.FindPair([]launch.Pair{p}, n) != nil })
}

// oneLine is a sentence as a launch.Pair can have it.
func oneLine(text string) string {
	text = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(text, "?"), func(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 || r == ' ' }), " ")
	if len(text) > 400 {
		text = strings.ToValidUTF8(text[:400], "") + "..."
	}
	return text
}

// lock keeps two from testing at the same time: each would measure the other.
func (t *Tester) lock(ctx context.Context) (*os.File, error) {
	if err := t.layout.CreateState(); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(t.layout.SelfTestLock(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lockUnless(ctx, f, unix.LOCK_EX, testLockTimeout); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// spec is what a tester is left with: of the files what relays have, and nobody's
// sockets. The uid is the one of relays that no relay has.
func (t *Tester) spec() sandbox.Spec {
	s := sandbox.Standard()
	// No limit of tasks: RLIMIT_NPROC counts all processes of the uid, which a container can take.
	s.UID, s.Open = t.sandbox.Group, 4096
	t.sandbox.files(&s, t.relay.Environment)
	return s
}

// run has one process test pairs, and tells of those that it came to.
func (t *Tester) run(ctx context.Context, names []launch.PairName, tell func(launch.PairHost, launch.Pair)) error {
	each := pairTimeout
	if strings.Contains(library(t.relay.Environment), simulator) {
		each = simulatedTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(len(names))*each+testerTimeout, errors.New("the self-test takes too long"))
	defer cancel()
	job, err := json.Marshal(launch.PairJob{Pairs: names, SlotBytes: t.slotBytes})
	if err != nil {
		return err
	}
	return t.confined(ctx, "self-test", "the self-test", t.spec(), job, func(out pipe) error { return launch.ReadPairs(out, names, tell) })
}

// pipe is the standard output of a tester.
type pipe = io.Reader

// confined runs a command of the relay's program in a sandbox, where there is one, with a job on its
// standard input, and reads what it writes. Errors call it what.
func (t *Tester) confined(ctx context.Context, command, what string, spec sandbox.Spec, job []byte, read func(pipe) error) error {
	cmd := exec.CommandContext(ctx, t.relay.Path, command)
	var report *os.File
	if t.sandbox.Mode == config.SandboxAuto {
		var tell *os.File
		var err error
		if report, tell, err = os.Pipe(); err != nil {
			return err
		}
		defer report.Close()
		defer tell.Close()
		defer context.AfterFunc(ctx, func() { report.Close() })()
		cmd = exec.CommandContext(ctx, t.hook, append([]string{"confine"}, spec.Arguments(3, t.relay.Path, command)...)...)
		cmd.ExtraFiles = []*os.File{tell}
	}
	said := &firstWords{}
	cmd.Dir, cmd.Env = "/", append([]string{searchPath}, t.relay.Environment...)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(job), said
	cmd.WaitDelay = time.Second // for what others have of its pipes
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("starting %s: %w", what, err)
	}
	if report != nil {
		cmd.ExtraFiles[0].Close() // so that its end is seen
		if _, err = hearReport(report); err != nil {
			err = errors.Join(err, cmd.Process.Kill())
		}
	}
	if err == nil {
		if err = read(out); err != nil {
			err = errors.Join(err, cmd.Process.Kill()) // it is not what was started, or mad
		}
	}
	ended := waitOr(ctx, cmd.Wait)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	case ended != nil:
		return fmt.Errorf("%s failed: %w: %s", what, ended, strings.TrimSpace(said.String()))
	}
	return nil
}

// waitOr is a wait for a process that ends with a context. One that a driver holds does
// not even then, and is left to itself after heldTime: no other test shall wait for it.
func waitOr(ctx context.Context, wait func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(heldTime):
		logrus.Warnf("the self-test does not end within %v of SIGKILL: a system call of it, of a driver perhaps, does not return", heldTime)
		return context.Cause(ctx)
	}
}

// firstWords keeps the beginning of what a process says.
type firstWords struct{ bytes.Buffer }

func (w *firstWords) Write(p []byte) (int, error) {
	const most = 2 << 10
	w.Buffer.Write(p[:min(len(p), max(0, most-w.Len()))])
	return len(p), nil
}

// PlannedPairs are those that the lanes of a plan can stage on, spares included.
func PlannedPairs(plan *topo.Plan, c config.Config) ([]launch.PairName, error) {
	var names []string
	for _, l := range plan.Lanes {
		if l.Relay {
			names = append(names, "@"+l.GPU)
		}
	}
	lanes, err := Lanes(plan, names)
	if err != nil {
		return nil, err
	}
	addSpares(plan, lanes, c.Plan.Exclude.Pairs)
	return launch.StagingPairs(lanes), nil
}

// AllPairs are some pairs, and each two GPUs of a plan that are none of them, but for
// GPUs that cannot have lanes.
func AllPairs(plan *topo.Plan, list []launch.PairName) []launch.PairName {
	gpus := slices.DeleteFunc(slices.Clone(plan.GPUs), func(g topo.GPU) bool {
		lane, err := plan.Lane(g.BusID)
		return err == nil && lane.Role == topo.RoleRefused
	})
	for i, a := range gpus {
		for _, b := range gpus[i+1:] {
			name := launch.PairName{GPU: identity(a), Server: identity(b)}
			if !slices.Contains(list, name) && !slices.Contains(list, launch.PairName{GPU: name.Server, Server: name.GPU}) {
				list = append(list, name)
			}
		}
	}
	return list
}

// Pairs is what is known of the pairs that the generation's lanes can stage on, where
// nothing is with the reason, and then of the others that matter to them.
func (g *Generation) Pairs(l paths.Layout) ([]launch.Pair, error) {
	names := launch.StagingPairs(g.Config.Lanes)
	reason := "not tested yet"
	var known []launch.Pair
	var err error
	if mode := g.Config.SelfTest; mode == "" || mode == launch.SelfTestOff {
		reason = `not tested: relay.self_test is "off"`
	} else {
		known, err = g.tester(l).KnownPairs(g.Config.Lanes)
	}
	list := []launch.Pair{}
	for _, n := range names {
		p := launch.FindPair(known, n)
		if p == nil {
			p = &launch.Pair{PairName: n, Verdict: launch.VerdictUntested, Reason: reason}
		}
		list = append(list, *p)
	}
	return append(list, slices.DeleteFunc(known, func(p launch.Pair) bool { return contains(names, p) })...), err
}

// about reports whether a pair matters to lanes: they can stage on it, or it is not fit
// and has one of their GPUs, to which another container's could copy directly.
func about(lanes []launch.Lane, p launch.Pair) bool {
	bad := p.Verdict == launch.VerdictWrong || p.Verdict == launch.VerdictSlow
	return contains(launch.StagingPairs(lanes), p) || bad && slices.ContainsFunc(lanes, func(l launch.Lane) bool {
		return l.GPU.BusID == p.GPU.BusID || l.GPU.BusID == p.Server.BusID
	})
}

// KnownPairs is what is known of the pairs that matter to lanes.
func (t *Tester) KnownPairs(lanes []launch.Lane) ([]launch.Pair, error) {
	known, err := t.Known()
	return slices.DeleteFunc(known.Pairs, func(p launch.Pair) bool { return !about(lanes, p) }), err
}

// selfTests is a supervisor's part in self-tests. It belongs to its loop.
type selfTests struct {
	cancel context.CancelFunc // while some are tested
	found  chan launch.Pair   // one by one
	done   chan tested
	pairs  []launch.Pair // what is known
	told   bool          // that the servers' pairs are
}

// tested is what a test of some pairs has come to.
type tested struct {
	names []launch.PairName
	pairs []launch.Pair
	took  time.Duration
	err   error
}

// selfTest reads what is known of the generation's pairs, and has the others
// tested while the relay starts.
func (s *supervisor) selfTest() {
	mode := s.generation.Config.SelfTest
	if mode == "" || mode == launch.SelfTestOff {
		return
	}
	tester := s.generation.tester(s.layout)
	known, err := tester.KnownPairs(s.generation.Config.Lanes)
	if err != nil {
		s.log.WithError(err).Warn("what is kept of self-tests is ignored")
	}
	s.tests.pairs = slices.DeleteFunc(s.tests.pairs, stale)
	s.learn(known)
	names := unknown(s.tests.pairs, launch.StagingPairs(s.generation.Config.Lanes))
	if len(names) == 0 && s.tests.cancel == nil {
		s.testTriples()
	}
	if len(names) == 0 || s.tests.cancel != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	lanes := s.generation.Config.Lanes
	found, done := make(chan launch.Pair, len(names)), make(chan tested, 1)
	s.tests.cancel, s.tests.found, s.tests.done, s.tests.told = cancel, found, done, false
	s.log.Infof("testing %d pairs of GPUs that this boot knows nothing of", len(names))
	go func() {
		begun := time.Now()
		t := tested{names: names}
		// Spares last, and each apart: of containers that start together each has its
		// servers tested before anybody has spares, and waits for one of another's at most.
		servers, spares := parted(names, lanes)
		for _, part := range append([][]launch.PairName{servers}, slices.Collect(slices.Chunk(spares, 1))...) {
			err := tester.Test(ctx, part, false, func(_ launch.PairHost, p launch.Pair) {
				t.pairs = append(t.pairs, p)
				found <- p
			})
			t.err = errors.Join(t.err, err, context.Cause(ctx))
			if ctx.Err() != nil || errors.Is(err, errLocked) {
				break
			}
		}
		t.took = time.Since(begun)
		done <- t
	}()
}

// testFound tells the relay when all that its lanes are planned on is tested: it need
// not wait for the spares then.
func (s *supervisor) testFound(p launch.Pair) {
	s.learn([]launch.Pair{p})
	servers, _ := parted(launch.StagingPairs(s.generation.Config.Lanes), s.generation.Config.Lanes)
	if s.tests.told || s.relay == nil || len(unknown(s.tests.pairs, servers)) > 0 {
		return
	}
	s.tests.told = true
	s.configure()
}

// parted are the pairs of lanes' own servers, and those of their spares.
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

// learn takes what is found in place of what was known.
func (s *supervisor) learn(found []launch.Pair) {
	for _, p := range found {
		s.tests.pairs = slices.DeleteFunc(s.tests.pairs, func(o launch.Pair) bool { return contains([]launch.PairName{p.PairName}, o) })
		s.tests.pairs = append(s.tests.pairs, p)
	}
}

// testsDone tells log and relay what a test has found.
func (s *supervisor) testsDone(t tested) {
	s.tests.cancel()
	s.tests.cancel, s.tests.told = nil, true
	if errors.Is(t.err, context.Canceled) { // for a relay that was stopped or drained
		s.learn(t.pairs)
		if s.held == "" && s.relay != nil { // which has started since, and waits
			s.selfTest()
			s.configure()
		}
		return
	}
	if t.err != nil {
		s.log.WithError(t.err).Warn("testing pairs of GPUs")
	}
	for _, n := range unknown(t.pairs, t.names) { // so that nobody waits for them
		reason := "the self-test has not come to it"
		if t.err != nil {
			reason = t.err.Error()
		}
		t.pairs = append(t.pairs, launch.Pair{PairName: n, Verdict: launch.VerdictUntested, Reason: oneLine(reason), At: time.Now().Unix()})
	}
	s.learn(t.pairs)
	for _, p := range t.pairs {
		switch p.Verdict {
		case launch.VerdictGood:
		case launch.VerdictUntested:
			s.log.Warnf("%v are not tested: %s", p.PairName, p.Reason)
		default:
			text := fmt.Sprintf("%v are not used as a pair: %s; relays of this boot stage elsewhere", p.PairName, p.Reason)
			s.log.Error(text)
			s.tell(SeverityError, text)
		}
	}
	s.log.Infof("the self-test of %d pairs of GPUs took %v", len(t.names), t.took.Round(time.Millisecond))
	if s.held == "" {
		s.selfTest() // for lanes that have come meanwhile
	}
	if s.relay != nil {
		s.configure()
	}
}

// endTests ends a test that is under way and waits for its end, when it has no context
// any more. ended says whether there was one, and what it has come to.
func (s *supervisor) endTests() (t tested, ended bool) {
	s.endTriples()
	if s.tests.cancel == nil {
		return t, false
	}
	s.tests.cancel()
	select {
	case t = <-s.tests.done:
		return t, true
	case <-time.After(endTimeout):
		s.log.Warn("the self-test does not end: a system call of it, of a driver perhaps, does not return")
		return t, false
	}
}

// knowing is a configuration with what is known of its pairs, as much of it as a
// datagram has room for: what speaks against pairs first.
func (s *supervisor) knowing(c launch.Config) launch.Config {
	if c.SelfTest == "" || c.SelfTest == launch.SelfTestOff {
		return c
	}
	c.Testing = s.tests.cancel != nil
	for _, p := range s.tests.pairs {
		if about(c.Lanes, p) {
			c.Pairs = append(c.Pairs, p)
		}
	}
	for _, n := range s.generation.triples() {
		if k := launch.FindTriple(s.triples.known, n); k != nil {
			c.Triples = append(c.Triples, *k)
		}
	}
	slices.SortStableFunc(c.Pairs, func(a, b launch.Pair) int { return urgency(b) - urgency(a) })
	// Without its entry a triple bounces, so triples beyond the room are left out first.
	for len(c.Pairs)+len(c.Triples) > 0 {
		if text, err := json.Marshal(c); err == nil && len(text) <= launch.MaxDatagram {
			break
		}
		if len(c.Triples) > 0 {
			c.Triples = c.Triples[:len(c.Triples)-1]
			continue
		}
		c.Pairs = c.Pairs[:len(c.Pairs)-1]
	}
	return c
}

func urgency(p launch.Pair) int {
	return slices.Index([]string{launch.VerdictUntested, launch.VerdictGood, launch.VerdictSlow, launch.VerdictWrong}, p.Verdict)
}
