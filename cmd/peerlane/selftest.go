//go:build !front

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/demo"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// selfTestReport is the JSON document of peerlane self-test.
type selfTestReport struct {
	launch.PairHost
	// Host describes the host in words.
	Host string `json:"host"`
	// Kept reports whether relays use the results until the next boot.
	Kept  bool          `json:"kept"`
	Pairs []launch.Pair `json:"pairs"`
}

func newSelfTestCommand(a *app) *cobra.Command {
	var gpus, hookBinary string
	var all, again bool
	cmd := &cobra.Command{
		Use:   "self-test",
		Short: "Test correctness and speed of copies between GPUs that lanes stage on",
		Long: `Test the pairs of GPUs that the plan's lanes can stage on, including spares, or every
two GPUs if no lane is staged: bit-exact copies at odd sizes and offsets, in both
directions, also for a running kernel; and rates compared with the bounce through host
memory. The test chooses size, number and streams of pieces.

As root the results are stored. Plans use the rates, as those of peerlane plan --measure.
Relays use the verdicts until the next boot or driver change: a pair that corrupts data,
or is slower than the bounce, is replaced by a spare or the bounce. Known results are
shown without a new test, unless --again is given. The first container after a boot still
has its own pairs tested.

A test takes about a second per pair, and contexts and 32 MiB on both GPUs. If a GPU is
full or in exclusive mode, the test is skipped, and the pair has no result.

OUT and IN are copies from the GPU and to the GPU, issued by that GPU, as relays do;
BY SERVER are copies issued by the server GPU, which would need a second context in a
relay.

Exit status:
  0  every pair is fit
  1  a pair could not be tested, or no pair was
  4  a pair is unfit`,
		Example: `  peerlane self-test
  peerlane self-test --again --all
  peerlane self-test --gpus simulated -o json`,
		Args: noArgs,
	}
	host, form := addLiveHost(cmd), addForm(cmd)
	host.addSoftware()
	flags := cmd.Flags()
	flags.StringVar(&gpus, "gpus", testbed.GPUsReal, "GPUs to test: real or simulated")
	flags.BoolVar(&all, "all", false, "test every two GPUs, regardless of lanes")
	flags.BoolVar(&again, "again", false, "also repeat known results")
	flags.StringVar(&hookBinary, "hook", "", "peerlane-hook is at `PATH` (default: "+defaultHook+")")
	must(cmd.MarkFlagFilename("hook"))
	complete(cmd, "gpus", testbed.GPUsReal, testbed.GPUsSimulated)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var t *selfTested
		var err error
		switch gpus {
		case testbed.GPUsReal:
			t, err = a.realPairs(host, hookBinary)
		case testbed.GPUsSimulated:
			t, err = simulatedPairs()
		default:
			err = usageError{cmd.CommandPath(), fmt.Errorf("--gpus %s is neither real nor simulated", gpus)}
		}
		if err != nil {
			return err
		}
		defer t.remove()
		names, err := selftest.PlannedPairs(t.plan, t.config)
		if err != nil {
			return err
		}
		if !all && len(names) == 0 {
			a.log.Info("the plan stages on no GPU: testing each two of them")
			all = true
		}
		if all {
			names = selftest.AllPairs(t.plan, names)
		}
		if len(names) == 0 {
			return fmt.Errorf("%s has %d GPUs that can have lanes, and a pair takes two", t.words, len(t.plan.GPUs))
		}
		report, err := a.selfTest(cmd.Context(), t, names, again)
		if err == nil && report.Kept && !report.Simulated && host.live() {
			var h *topo.Host
			if h, err = host.read(); err == nil {
				err = a.keepPairs(h, report.Pairs)
			}
		}
		if form.value == formJSON {
			err = errors.Join(err, a.printJSON(report))
		} else if len(report.Pairs) > 0 {
			a.printSelfTest(report)
		}
		if err != nil {
			return asRoot(err)
		}
		return verdictError(report.Pairs)
	}
	return cmd
}

// selfTested is a host whose pairs are tested.
type selfTested struct {
	plan   *planner.Plan
	config config.Config
	tester *selftest.Tester
	words  string
	kept   bool
	// remove removes the temporary files.
	remove func()
}

func (a *app) realPairs(host *hostFlags, hookBinary string) (*selfTested, error) {
	p, err := a.plan(host)
	if err != nil {
		return nil, err
	}
	if hookBinary, err = hookPath(hookBinary); err != nil {
		return nil, err
	}
	tester, err := selftest.NewTester(a.layout, p.config, hookBinary)
	if err != nil {
		return nil, err
	}
	t := &selfTested{plan: p.plan, config: p.config, tester: tester, words: "the host read from " + origin(p.plan.Source),
		kept: true, remove: func() {}}
	if os.Geteuid() != 0 {
		a.log.Warn("only root can store the results of a self-test for relays: printing the results only")
		t.tester, t.kept = tester.Unkept(), false
	} else if _, err := tester.Known(); err != nil {
		a.log.Warnf("ignoring and replacing the recorded self-tests: %v", err)
	}
	return t, nil
}

func simulatedPairs() (*selfTested, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	root, err := os.MkdirTemp("", "peerlane-self-test-")
	if err != nil {
		return nil, err
	}
	t := &selfTested{remove: func() { os.RemoveAll(root) }}
	err = os.Chmod(root, 0o755) // the tester is not root, and traverses the directory
	var h *testbed.Host
	if err == nil {
		h, err = testbed.New(root, filepath.Dir(self), testbed.GPUsSimulated)
	}
	if err == nil {
		err = h.Configure(func(*config.Config) {})
	}
	if err == nil {
		t.tester, err = selftest.NewTester(h.Layout, h.Config, h.HookBinary())
	}
	if err != nil {
		t.remove()
		return nil, err
	}
	t.tester.Unkept()
	t.plan, t.config, t.words = h.Plan, h.Config, h.Words
	return t, nil
}

// selfTest tests pairs and prints the progress. The report is valid even with an error.
func (a *app) selfTest(ctx context.Context, t *selfTested, names []launch.PairName, again bool) (selfTestReport,
	error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM)
	defer stop()
	report := selfTestReport{Host: t.words, Kept: t.kept, Pairs: []launch.Pair{}}
	show, done := a.progress()
	step := func() {
		if n := len(report.Pairs); n < len(names) {
			show(demo.Progress{Step: fmt.Sprintf("pair %d of %d", n+1, len(names))})
		}
	}
	step()
	err := t.tester.Test(ctx, names, again, func(h launch.PairHost, p launch.Pair) {
		report.PairHost, report.Pairs = h, append(report.Pairs, p)
		step()
	})
	done()
	report.Kept = report.Kept && err == nil // after an error the record is incomplete
	slices.SortFunc(report.Pairs, func(a, b launch.Pair) int {
		return 1<<20*(a.GPU.Index-b.GPU.Index) + a.Server.Index - b.Server.Index
	})
	return report, err
}

// Causes of a failed self-test.
var (
	errUnfit    = errors.New("they are not fit to stage on")
	errUntested = errors.New("they could not be tested")
)

// verdictError returns the exit status for the results, as an error.
func verdictError(pairs []launch.Pair) error {
	count := map[string]int{}
	for _, p := range pairs {
		count[p.Verdict]++
	}
	if bad := count[launch.VerdictWrong] + count[launch.VerdictSlow]; bad > 0 {
		return findingError{exitPairs, &fault.Error{Code: fault.UnfitPair,
			Operation: "judge", Object: fmt.Sprintf("%d of %d pairs of GPUs", bad, len(pairs)), Cause: errUnfit,
			Remedy: "run peerlane doctor"}}
	}
	if n := count[launch.VerdictUntested]; n > 0 {
		return &fault.Error{Operation: "test", Object: fmt.Sprintf("%d of %d pairs of GPUs", n, len(pairs)),
			Cause: errUntested}
	}
	return nil
}

func (a *app) printSelfTest(r selfTestReport) {
	a.out.Printf("Host: %s.\nCUDA driver %d.\n", r.Host, r.Driver)
	if r.Simulated {
		a.out.Println("These GPUs are simulated: the figures say nothing about GPUs.")
	}
	a.out.Println()
	t := a.newTable("GPU", "SERVER", "VERDICT", "CHECKED", "KERNEL", "OUT GB/S", "IN", "BOUNCE OUT", "IN",
		"BY SERVER OUT", "IN", "CHOSEN", "SECONDS", "REASON")
	for _, p := range r.Pairs {
		kernel := p.Reader
		if len(kernel) > 10 {
			kernel = "not tried"
		}
		row := table.Row{p.GPU.Index, p.Server.Index, a.verdict(p.Verdict), humanize.IBytes(p.Bytes), dash(kernel)}
		for _, rate := range []float64{p.Push.Client, p.Pull.Client, p.Push.Bounce, p.Pull.Bounce, p.Push.Server,
			p.Pull.Server} {
			row = append(row, rateWord(rate))
		}
		why := p.Reason
		if p.Verdict == launch.VerdictGood && kernel != p.Reader {
			why = "kernel " + p.Reader
		}
		t.AppendRow(append(row, dash(chosen(p)), fmt.Sprintf("%.1f", float64(p.Milliseconds)/1e3), dash(why)))
	}
	a.wrapLast(t, "REASON")
	a.out.Println(t.Render())
	if r.Kept {
		a.out.Println("\nRelays that start go by it until the next boot or another driver.")
	}
}

func (a *app) verdict(word string) terminal.Styled {
	switch word {
	case launch.VerdictGood:
		return a.paint(word, green)
	case launch.VerdictUntested:
		return a.paint(word, yellow)
	}
	return a.paint(word, red)
}

func rateWord(gbs float64) string {
	if gbs == 0 {
		return dash("")
	}
	return fmt.Sprintf("%.1f", gbs)
}

// chosen describes the calibration of a pair; empty without a calibration.
func chosen(p launch.Pair) string {
	if p.Chunk == 0 {
		return ""
	}
	return fmt.Sprintf("%s × %d by %d", humanize.IBytes(p.Chunk), p.Depth, p.Streams)
}

// pairWords describes a pair for `peerlane relay inspect`.
func pairWords(p launch.Pair) string {
	words := []string{fmt.Sprintf("GPU %d with server %d: %s", p.GPU.Index, p.Server.Index, p.Verdict)}
	if p.Reason != "" {
		words[0] += ": " + p.Reason
	}
	if p.Push.Client > 0 {
		words = append(words, fmt.Sprintf("out %s, in %s GB/s (bounce %s, %s)", rateWord(p.Push.Client),
			rateWord(p.Pull.Client), rateWord(p.Push.Bounce), rateWord(p.Pull.Bounce)))
	}
	if c := chosen(p); c != "" {
		words = append(words, "pieces of "+c+" streams")
	}
	if p.At > 0 {
		words = append(words, "tested "+humanize.Time(time.Unix(p.At, 0)))
	}
	return strings.Join(words, "; ")
}

// tuningWords describes the configuration that limits the sizes of copies.
func tuningWords(c launch.Config) string {
	words := []string{"issued by the client's GPU"}
	for _, k := range []struct {
		name  string
		value uint64
		text  string
	}{{"chunk", c.Chunk, humanize.IBytes(c.Chunk)}, {"depth", uint64(c.Depth), fmt.Sprint(c.Depth)}, {"streams",
		uint64(c.Streams), fmt.Sprint(c.Streams)}} {
		switch {
		case k.value > 0:
			words = append(words, fmt.Sprintf("%s %s by relay.%s", k.name, k.text, k.name))
		case c.Calibrated:
			words = append(words, k.name+" by the pair's calibration")
		default:
			words = append(words, k.name+" by slots and slot_size")
		}
	}
	return strings.Join(words, ", ")
}

// warnOfPairs logs the pairs of a plan that relays do not stage on. Only root can read the record
// of self-tests.
func (a *app) warnOfPairs(p *planned, hookBinary string) {
	if os.Geteuid() != 0 || p.config.Relay.SelfTest == launch.SelfTestOff {
		return
	}
	tester, err := selftest.NewTester(a.layout, p.config, hookBinary)
	if err != nil {
		return // without the programs no relay runs either
	}
	names, err := selftest.PlannedPairs(p.plan, p.config)
	if err != nil {
		return
	}
	known, err := tester.Known()
	if err != nil {
		a.log.Warnf("ignoring the recorded self-tests: %v", err)
	}
	for _, n := range names {
		if pair := launch.FindPair(known.Pairs, n); pair != nil &&
			!pair.Usable(p.config.Relay.SelfTest == launch.SelfTestRequired) {
			a.log.Warnf("relays do not stage on this pair: %v: %s: %s", n, pair.Verdict, pair.Reason)
		}
	}
	triples, err := selftest.PlannedTriples(p.plan, p.config)
	if err != nil {
		return
	}
	verified, err := tester.KnownTriples(triples, p.config.Verbs.Launch())
	if err != nil {
		return // logged above
	}
	for _, t := range verified {
		if t.Verdict != launch.VerdictGood {
			a.log.Warnf("data bounces through the host's memory: %s", tripleWords(t))
		}
	}
}

// tripleWords describes the result of a triple.
func tripleWords(t launch.Triple) string {
	if t.Verdict != launch.VerdictGood {
		return fmt.Sprintf("%v: %s: %s", t.TripleName, t.Verdict, t.Reason)
	}
	flushed := "without flushes"
	if t.Flushed {
		flushed = "with flushes"
	}
	return fmt.Sprintf("%v: verified by %d rounds each way, %s compared, %s, %s", t.TripleName, t.Rounds,
		humanize.IBytes(t.Bytes), t.Memory, flushed)
}
