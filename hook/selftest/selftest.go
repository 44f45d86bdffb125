package selftest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/internal/programs"
	"github.com/peerlane/peerlane/hook/lanes"
	"github.com/peerlane/peerlane/hook/process"
	"github.com/peerlane/peerlane/hook/sandbox"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// Pairs of GPUs are tested by a process that serves nobody, `peerlane-relay
// self-test`, in a sandbox like a relay's with a uid that no relay has. Relays, which
// may be taken over, have no part in it: supervisors and the administrator start
// it, look at what it says, and keep that for all containers of this boot.

// simulator is how the names of the simulator's variables begin.
const simulator = "PEERLANE_SIM"

// ModuleVersion is that of the driver that is loaded; tests have another.
var ModuleVersion = "/sys/module/nvidia/version"

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
	relay     generation.Command
	sandbox   generation.Sandbox
	hook      string // the program whose `confine` makes the sandbox
	slotBytes uint64
	unkept    bool
}

// NewTester is the tester of a host's configuration, for any process.
func NewTester(l paths.Layout, c config.Config, hookBinary string) (*Tester, error) {
	hookBinary, relay, err := programs.Find(hookBinary, c.Relay.Binary)
	if err != nil {
		return nil, err
	}
	s, err := generation.NewSandbox(c.Relay)
	if err != nil {
		return nil, err
	}
	return &Tester{layout: l, relay: generation.Command{Path: relay, Environment: c.Relay.Environment}, sandbox: s, hook: hookBinary, slotBytes: uint64(c.Relay.SlotSize)}, nil
}

// Unkept has nothing of what is found kept, nor anything used that was.
func (t *Tester) Unkept() *Tester {
	t.unkept = true
	return t
}

// OfGeneration is the one of a generation's supervisor.
func OfGeneration(g *generation.Generation, l paths.Layout) *Tester {
	return &Tester{layout: l, relay: g.Relay, sandbox: g.Sandbox, hook: "/proc/self/exe", slotBytes: g.Config.SlotBytes}
}

// library is what stands for the driver in this environment.
func library(environment []string) string {
	var list []string
	for _, e := range environment {
		if strings.HasPrefix(e, generation.LibraryVariable+"=") || strings.HasPrefix(e, simulator) {
			list = append(list, e)
		}
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// record is an empty one of this boot and driver.
func (t *Tester) record() (launch.PairRecord, error) {
	boot, err := process.BootID()
	if err != nil {
		return launch.PairRecord{}, err
	}
	module, err := os.ReadFile(ModuleVersion)
	if err = generation.UnlessGone(err); err != nil {
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
	kept.Pairs = slices.DeleteFunc(kept.Pairs, Stale)
	return kept, nil
}

// Stale reports whether a pair is worth another try.
func Stale(p launch.Pair) bool {
	holds, bounded := map[string]time.Duration{launch.VerdictUntested: untestedTime, launch.VerdictSlow: slowTime}[p.Verdict]
	return bounded && (p.Age() > holds || p.Age() < 0)
}

// Unknown are the pairs that a list has nothing of.
func Unknown(list []launch.Pair, names []launch.PairName) []launch.PairName {
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
		kept.Pairs = slices.DeleteFunc(kept.Pairs, func(p launch.Pair) bool { return Contains(names, p) })
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
			failed = generation.WriteJSON(t.layout.SelfTestFile(), kept)
		}
		tell(h, p)
	}
	for rest := Unknown(kept.Pairs, names); len(rest) > 0; rest = Unknown(kept.Pairs, rest) {
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
		took(kept.PairHost, launch.Pair{PairName: rest[0], Verdict: launch.VerdictUntested, Reason: OneLine(reason)})
	}
	return failed
}

func Contains(names []launch.PairName, p launch.Pair) bool {
	return slices.ContainsFunc(names, func(n launch.PairName) bool { return launch.FindPair([]launch.Pair{p}, n) != nil })
}

// OneLine is a sentence as a launch.Pair can have it.
func OneLine(text string) string {
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
	if err := generation.LockUnless(ctx, f, unix.LOCK_EX, testLockTimeout); err != nil {
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
	t.sandbox.AddFiles(&s, t.relay.Environment)
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
	cmd := exec.CommandContext(ctx, t.relay.Path, "self-test")
	var report *os.File
	if t.sandbox.Mode == config.SandboxAuto {
		var tell *os.File
		if report, tell, err = os.Pipe(); err != nil {
			return err
		}
		defer report.Close()
		defer tell.Close()
		defer context.AfterFunc(ctx, func() { report.Close() })()
		cmd = exec.CommandContext(ctx, t.hook, append([]string{"confine"}, t.spec().Arguments(3, t.relay.Path, "self-test")...)...)
		cmd.ExtraFiles = []*os.File{tell}
	}
	said := &firstWords{}
	cmd.Dir, cmd.Env = "/", append([]string{programs.SearchPath}, t.relay.Environment...)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(job), said
	cmd.WaitDelay = time.Second // for what others have of its pipes
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("starting the self-test: %w", err)
	}
	if report != nil {
		cmd.ExtraFiles[0].Close() // so that its end is seen
		if _, err = sandbox.ReadReport(report); err != nil {
			err = errors.Join(err, cmd.Process.Kill())
		}
	}
	if err == nil {
		if err = launch.ReadPairs(out, names, tell); err != nil {
			err = errors.Join(err, cmd.Process.Kill()) // it is not what was started, or mad
		}
	}
	ended := WaitOr(ctx, cmd.Wait)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	case ended != nil:
		return fmt.Errorf("the self-test failed: %w: %s", ended, strings.TrimSpace(said.String()))
	}
	return nil
}

// WaitOr is a wait for a process that ends with a context. One that a driver holds does
// not even then, and is left to itself after heldTime: no other test shall wait for it.
func WaitOr(ctx context.Context, wait func() error) error {
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
	planned, err := lanes.Find(plan, names)
	if err != nil {
		return nil, err
	}
	lanes.AddSpares(plan, planned, c.Plan.Exclude.Pairs)
	return launch.StagingPairs(planned), nil
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
			name := launch.PairName{GPU: lanes.Identity(a), Server: lanes.Identity(b)}
			if !slices.Contains(list, name) && !slices.Contains(list, launch.PairName{GPU: name.Server, Server: name.GPU}) {
				list = append(list, name)
			}
		}
	}
	return list
}

// PairsOf is what is known of the pairs that the generation's lanes can stage on, where
// nothing is with the reason, and then of the others that matter to them.
func PairsOf(g *generation.Generation, l paths.Layout) ([]launch.Pair, error) {
	names := launch.StagingPairs(g.Config.Lanes)
	reason := "not tested yet"
	var known []launch.Pair
	var err error
	if mode := g.Config.SelfTest; mode == "" || mode == launch.SelfTestOff {
		reason = `not tested: relay.self_test is "off"`
	} else {
		known, err = OfGeneration(g, l).KnownPairs(g.Config.Lanes)
	}
	list := []launch.Pair{}
	for _, n := range names {
		p := launch.FindPair(known, n)
		if p == nil {
			p = &launch.Pair{PairName: n, Verdict: launch.VerdictUntested, Reason: reason}
		}
		list = append(list, *p)
	}
	return append(list, slices.DeleteFunc(known, func(p launch.Pair) bool { return Contains(names, p) })...), err
}

// About reports whether a pair matters to lanes: they can stage on it, or it is not fit
// and has one of their GPUs, to which another container's could copy directly.
func About(lanes []launch.Lane, p launch.Pair) bool {
	bad := p.Verdict == launch.VerdictWrong || p.Verdict == launch.VerdictSlow
	return Contains(launch.StagingPairs(lanes), p) || bad && slices.ContainsFunc(lanes, func(l launch.Lane) bool {
		return l.GPU.BusID == p.GPU.BusID || l.GPU.BusID == p.Server.BusID
	})
}

// KnownPairs is what is known of the pairs that matter to lanes.
func (t *Tester) KnownPairs(lanes []launch.Lane) ([]launch.Pair, error) {
	known, err := t.Known()
	return slices.DeleteFunc(known.Pairs, func(p launch.Pair) bool { return !About(lanes, p) }), err
}
