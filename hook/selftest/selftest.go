package selftest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
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
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// A process without clients, `peerlane-relay self-test`, tests pairs of GPUs in a sandbox like a
// relay's, with a uid that no relay has. A relay, which may be compromised, is not involved:
// supervisors and the administrator start the process, check the results, and store them for the
// containers of this boot.

// simulator is the prefix of the simulator's variables.
const simulator = "PEERLANE_SIM"

// ModuleVersion is the file with the version of the loaded driver; tests replace it.
var ModuleVersion = "/sys/module/nvidia/version"

// Time limits and intervals of self-tests.
const (
	// pairTimeout limits the test of a pair, and simulatedTimeout that of simulated GPUs: the
	// tester stops before that. testerTimeout is added for the start of the tester.
	pairTimeout      = 45 * time.Second
	simulatedTimeout = 5 * time.Minute
	testerTimeout    = 15 * time.Second
	// heldTimeout limits the wait for a killed tester.
	heldTimeout = 2 * time.Second
	// testLockTimeout limits the wait for another self-test of the host.
	testLockTimeout = time.Minute
	// untestedInterval is the time after which an untested pair is tested again.
	untestedInterval = 10 * time.Minute
	// slowInterval is the time for which a pair counts as slow: copies of other processes may have
	// disturbed its test.
	slowInterval = time.Hour
)

// Tester runs the self-tests of a host.
type Tester struct {
	layout  paths.Layout
	relay   generation.Command
	sandbox generation.Sandbox
	// hook is the program whose command confine sets up the sandbox.
	hook      string
	slotBytes uint64
	unkept    bool
}

// NewTester returns the tester of a host's configuration, for a caller that is not a supervisor.
func NewTester(l paths.Layout, c config.Config, hookBinary string) (*Tester, error) {
	hookBinary, relay, err := programs.Find(hookBinary, c.Relay.Binary)
	if err != nil {
		return nil, err
	}
	s, err := generation.NewSandbox(c.Relay)
	if err != nil {
		return nil, err
	}
	return &Tester{
		layout:    l,
		relay:     generation.Command{Path: relay, Environment: c.Relay.Environment},
		sandbox:   s,
		hook:      hookBinary,
		slotBytes: uint64(c.Relay.SlotSize),
	}, nil
}

// Unkept makes the tester neither store results nor use stored results.
func (t *Tester) Unkept() *Tester {
	t.unkept = true
	return t
}

// OfGeneration returns the tester for the supervisor of a generation.
func OfGeneration(g *generation.Generation, l paths.Layout) *Tester {
	return &Tester{
		layout:    l,
		relay:     g.Relay,
		sandbox:   g.Sandbox,
		hook:      "/proc/self/exe",
		slotBytes: g.Config.SlotBytes,
	}
}

// library returns the variables in environment that replace the driver.
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

// record returns an empty record of this boot and driver.
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
		Version: launch.PairVersion, Boot: boot, Module: strings.TrimSpace(string(module)),
		Library: library(t.relay.Environment), Pairs: []launch.Pair{},
	}, nil
}

// Known returns the valid results of this boot and driver. After an error the stored results are
// damaged or untrusted, and the record is empty.
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
		err = &paths.SizeError{Path: path, Bytes: info.Size(), Limit: launch.MaxPairRecord}
	}
	if err == nil {
		err = paths.CheckTrusted(path)
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
		return r, &fault.Error{Operation: "read the record of self-tests", Object: path, Cause: err}
	}
	if kept.Boot != r.Boot || kept.Module != r.Module || kept.Library != r.Library {
		return r, nil
	}
	kept.Pairs = slices.DeleteFunc(kept.Pairs, Stale)
	return kept, nil
}

// Stale reports whether to test a pair again.
func Stale(p launch.Pair) bool {
	holds, bounded := map[string]time.Duration{launch.VerdictUntested: untestedInterval,
		launch.VerdictSlow: slowInterval}[p.Verdict]
	return bounded && (p.Age() > holds || p.Age() < 0)
}

// Unknown returns the pairs without a result in list.
func Unknown(list []launch.Pair, names []launch.PairName) []launch.PairName {
	return slices.DeleteFunc(
		slices.Clone(names),
		func(n launch.PairName) bool { return launch.FindPair(list, n) != nil },
	)
}

// Test tests pairs, stores the results, and passes every result to report, known results first. It
// repeats known results only with again. An untestable pair has VerdictUntested. Test fails only
// if the lock or the record fails.
func (t *Tester) Test(
	ctx context.Context,
	names []launch.PairName,
	again bool,
	report func(launch.PairHost, launch.Pair),
) error {
	if len(names) == 0 {
		return nil
	}
	held, kept, err := t.open(ctx)
	if err != nil {
		return err
	}
	defer held.Close()
	if again {
		kept.Pairs = slices.DeleteFunc(kept.Pairs, func(p launch.Pair) bool { return Contains(names, p) })
	}
	for _, n := range names {
		if p := launch.FindPair(kept.Pairs, n); p != nil {
			report(kept.PairHost, *p)
		}
	}
	var failed error
	took := func(h launch.PairHost, p launch.Pair) {
		p.At = time.Now().Unix() // the record uses the clock of this host
		kept.PairHost, kept.Pairs = h, append(kept.Pairs, p)
		if failed == nil && !t.unkept {
			failed = generation.WriteJSON(t.layout.SelfTestFile(), kept)
		}
		report(h, p)
	}
	rest := func() []launch.PairName { return Unknown(kept.Pairs, names) }
	err = testAll(ctx, rest, func(list []launch.PairName) error { return t.run(ctx, list, took) },
		func(n launch.PairName, reason string) {
			took(kept.PairHost, launch.Pair{PairName: n, Verdict: launch.VerdictUntested, Reason: reason})
		})
	return cmp.Or(err, failed)
}

// testAll runs testers until rest is empty, because a tester ends after a bad result. If a tester
// ends without a result, the first name of the list is untested.
func testAll[N any](ctx context.Context, rest func() []N, run func([]N) error,
	untested func(n N, reason string)) error {
	for list := rest(); len(list) > 0; list = rest() {
		err := run(list)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(rest()) < len(list) {
			continue
		}
		reason := "the test ended without a result"
		if err != nil {
			reason = err.Error()
		}
		untested(list[0], OneLine(reason))
	}
	return nil
}

// Contains reports whether a pair is in the list.
func Contains(names []launch.PairName, p launch.Pair) bool {
	return slices.ContainsFunc(
		names,
		func(n launch.PairName) bool { return launch.FindPair([]launch.Pair{p}, n) != nil },
	)
}

// OneLine returns text in one line, as launch.Pair requires.
func OneLine(text string) string {
	text = strings.Join(
		strings.FieldsFunc(
			strings.ToValidUTF8(text, "?"),
			func(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 || r == ' ' },
		),
		" ",
	)
	if len(text) > 400 {
		text = strings.ToValidUTF8(text[:400], "") + "..."
	}
	return text
}

// open locks the record until held is closed, and returns its content, because another process may
// just have tested. A damaged record is empty, and will be replaced.
func (t *Tester) open(ctx context.Context) (held io.Closer, kept launch.PairRecord, err error) {
	held = io.NopCloser(nil)
	if !t.unkept {
		if held, err = t.lock(ctx); err != nil {
			return nil, kept, err
		}
	}
	if kept, err = t.Known(); kept.Version == 0 {
		held.Close()
		return nil, kept, err // the boot or the driver is unreadable
	}
	return held, kept, nil
}

// lock prevents concurrent tests, which would disturb the measurements.
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

// spec returns the sandbox of a tester: the files of relays, without sockets. The uid is the one
// in the range of relays that no relay uses.
func (t *Tester) spec() sandbox.Spec {
	s := sandbox.Standard()
	// Set no limit of tasks: RLIMIT_NPROC counts all processes of the uid, and a container can
	// exhaust it.
	s.UID, s.Open = t.sandbox.Group, 4096
	t.sandbox.AddFiles(&s, t.relay.Environment)
	return s
}

// run tests pairs in one process, and passes the results to report.
func (t *Tester) run(ctx context.Context, names []launch.PairName, report func(launch.PairHost, launch.Pair)) error {
	each := pairTimeout
	if strings.Contains(library(t.relay.Environment), simulator) {
		each = simulatedTimeout
	}
	ctx, cancel := context.WithTimeoutCause(
		ctx,
		time.Duration(len(names))*each+testerTimeout,
		errors.New("the self-test takes too long"),
	)
	defer cancel()
	job, err := json.Marshal(launch.PairJob{Pairs: names, SlotBytes: t.slotBytes})
	if err != nil {
		return err
	}
	spec := t.spec()
	return t.relayProgram(ctx, "self-test", "the self-test", &spec, job,
		func(out io.Reader) error { return launch.ReadPairs(out, names, report) })
}

// relayProgram runs a command of the relay's program with a job as standard input, and reads its
// output. The process is in the sandbox of spec, unless spec is nil or the configuration disables
// the sandbox. what names the process in errors.
func (t *Tester) relayProgram(ctx context.Context, command, what string, spec *sandbox.Spec, job []byte,
	read func(io.Reader) error) error {
	cmd := exec.CommandContext(ctx, t.relay.Path, command)
	var reportRead *os.File
	if spec != nil && t.sandbox.Mode == config.SandboxAuto {
		var reportWrite *os.File
		var err error
		if reportRead, reportWrite, err = os.Pipe(); err != nil {
			return err
		}
		defer reportRead.Close()
		defer reportWrite.Close()
		defer context.AfterFunc(ctx, func() { reportRead.Close() })()
		cmd = exec.CommandContext(ctx, t.hook, append([]string{"confine"}, spec.Arguments(3, t.relay.Path, command)...)...)
		cmd.ExtraFiles = []*os.File{reportWrite}
	}
	stderr := &firstWords{}
	cmd.Dir, cmd.Env = "/", append([]string{programs.SearchPath}, t.relay.Environment...)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(job), stderr
	cmd.WaitDelay = time.Second // other processes may hold the pipes, and a driver may block the process
	out, err := cmd.StdoutPipe()
	// The caller's shell may have passed descriptors, which the sandbox would keep.
	err = errors.Join(err, unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC))
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", what, err)
	}
	if reportRead != nil {
		cmd.ExtraFiles[0].Close() // the child has its own copy; the pipe ends with it
		if _, err = sandbox.ReadReport(reportRead); err != nil {
			err = errors.Join(err, cmd.Process.Kill())
		}
	}
	if err == nil {
		if err = read(out); err != nil {
			err = errors.Join(err, cmd.Process.Kill()) // not the tester, or a defect of the tester
		}
	}
	ended := waitOr(ctx, cmd.Wait)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	case ended != nil:
		return fmt.Errorf("%s failed: %w: %s", what, ended, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// waitOr waits for a process until the context is done. A process that a driver blocks survives
// the kill, so waitOr gives up after heldTimeout.
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
	case <-time.After(heldTimeout):
		logrus.Warnf(
			"the self-test does not end within %v of SIGKILL: a system call does not return, perhaps in a driver",
			heldTimeout,
		)
		return context.Cause(ctx)
	}
}

// firstWords keeps the first part of a process's output.
type firstWords struct{ bytes.Buffer }

func (w *firstWords) Write(p []byte) (int, error) {
	const maxBytes = 2 << 10
	w.Buffer.Write(p[:min(len(p), max(0, maxBytes-w.Len()))])
	return len(p), nil
}

// PlannedPairs returns the pairs that the lanes of a plan can stage on, including spares.
func PlannedPairs(plan *planner.Plan, c config.Config) ([]launch.PairName, error) {
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

// AllPairs adds every other pair of two GPUs of a plan to list, without GPUs that cannot have
// lanes.
func AllPairs(plan *planner.Plan, list []launch.PairName) []launch.PairName {
	gpus := slices.DeleteFunc(slices.Clone(plan.GPUs), func(g topo.GPU) bool {
		lane, err := plan.Lane(g.BusID)
		return err == nil && lane.Role == planner.RoleRefused
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

// PairsOf returns the results of the pairs that the generation's lanes can stage on, with the
// reason for a missing result, followed by other pairs that concern the lanes.
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

// About reports whether a pair concerns lanes: a lane can stage on it, or the pair has failed and
// includes a GPU of a lane, to which another container could copy directly.
func About(lanes []launch.Lane, p launch.Pair) bool {
	bad := p.Verdict == launch.VerdictWrong || p.Verdict == launch.VerdictSlow
	return Contains(launch.StagingPairs(lanes), p) || bad && slices.ContainsFunc(lanes, func(l launch.Lane) bool {
		return l.GPU.BusID == p.GPU.BusID || l.GPU.BusID == p.Server.BusID
	})
}

// KnownPairs returns the known results that concern lanes.
func (t *Tester) KnownPairs(lanes []launch.Lane) ([]launch.Pair, error) {
	known, err := t.Known()
	return slices.DeleteFunc(known.Pairs, func(p launch.Pair) bool { return !About(lanes, p) }), err
}
