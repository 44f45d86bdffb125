//go:build !front

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/planner"
)

// measureHost measures copies between GPUs and between GPU and host memory with the self-tests of
// pairs, and the loopback of each NIC with the RDMA test. It stores the rates for later plans.
func (a *app) measureHost(cmd *cobra.Command, host *hostFlags) error {
	if !host.live() {
		return usageError{cmd.CommandPath(),
			errors.New("--measure tests this machine's GPUs and NICs: omit --input, --sysfs and --proc")}
	}
	t, err := a.realPairs(host, "")
	if err != nil {
		return err
	}
	defer t.remove()
	h, err := host.read()
	if err != nil {
		return err
	}
	m, err := a.measure(cmd.Context(), t, h)
	if err != nil {
		return asRoot(err)
	}
	if !t.kept {
		return &fault.Error{Code: fault.NotRoot, Operation: "keep the measurement for all plans",
			Remedy: "run peerlane plan --measure as root"}
	}
	if err := a.keepMeasured(m); err != nil {
		return err
	}
	a.log.Infof("%d copies between GPUs, the host memory of %d GPUs and %d loopbacks of NICs were measured; %s has the "+
		"figures, and plans and estimates of this host go by them", len(m.Copies), len(m.Memory), len(m.Loops),
		a.measuredFile())
	return nil
}

// measure measures every pair of GPUs that can have a lane, and every NIC that can carry one.
func (a *app) measure(ctx context.Context, t *selfTested, h *topo.Host) (*topo.Measured, error) {
	names, loopbacks := selftest.AllPairs(t.plan, nil), t.plan.Loopbacks(h)
	if len(names) == 0 && len(loopbacks) == 0 {
		return nil, fmt.Errorf("measure %s: %d GPUs can have a lane and no NIC has an active port, and a copy needs two "+
			"GPUs",
			t.words, len(t.plan.GPUs))
	}
	m := new(topo.Measured)
	if len(names) > 0 {
		report, err := a.selfTest(ctx, t, names, true)
		if err != nil {
			return nil, err
		}
		if m = selftest.MeasuredPairs(report.Pairs); m.Copies == nil {
			a.log.Warnf("no self-test of %d pairs of GPUs ran; peerlane self-test shows the cause", len(names))
		}
	}
	if len(loopbacks) > 0 {
		loops, err := a.measureLoops(ctx, t, loopbacks)
		if err != nil {
			return nil, err
		}
		m.Loops = loops
	}
	if m.Copies == nil && m.Memory == nil && m.Loops == nil {
		return nil, fmt.Errorf("measure %s: nothing could be measured", t.words)
	}
	m.Fingerprint, m.At = h.Fingerprint(), time.Now().Unix()
	return m, nil
}

// measureLoops measures the loopback of NICs. It warns about a NIC or memory that cannot be
// tested.
func (a *app) measureLoops(ctx context.Context, t *selfTested, loopbacks []planner.Loopback) ([]topo.MeasuredLoop,
	error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM)
	defer stop()
	loops, failed, err := t.tester.MeasureLoops(ctx, t.plan, loopbacks, t.config.Verbs.Launch())
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		a.log.Warnf("NICs are measured in part, or not at all: %v", err)
	}
	for _, text := range failed {
		a.log.Warnf("not measured: %s", text)
	}
	return loops, nil
}

// keepMeasured stores the measured rates for later plans.
func (a *app) keepMeasured(m *topo.Measured) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	if err := a.layout.CreateState(); err != nil {
		return err
	}
	path := a.measuredFile()
	next := path + ".new"
	if err := os.WriteFile(next, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("store measured rates: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("store measured rates: %w", err)
	}
	return nil
}

// useKnownPairs adds the self-tests of this boot to the measured rates; only root can read the
// record. The start of a container tests only the pairs of its lanes. Rates of `peerlane plan
// --measure` have precedence, because other copies can disturb a test at the start of a container.
// The result reports whether the self-tests added rates.
func (a *app) useKnownPairs(h *topo.Host, p *planned) bool {
	if os.Geteuid() != 0 {
		return false
	}
	hookBinary, err := hookPath("")
	if err != nil {
		return false
	}
	tester, err := selftest.NewTester(a.layout, p.config, hookBinary)
	if err != nil {
		return false // without the programs no test has run
	}
	known, err := tester.Known()
	if err != nil || known.Simulated {
		return false
	}
	return addPairs(h, known.Pairs)
}

// keepKnownPairs stores the rates that useKnownPairs added to the host of a plan, for other users
// and later boots.
func (a *app) keepKnownPairs(p *planned) {
	if !p.learned {
		return
	}
	if err := a.keepMeasured(p.host.Measured); err != nil {
		a.log.Warn(err)
	}
}

// addPairs adds rates of self-tests that the measured rates of a host lack. The result reports
// whether it added any.
func addPairs(h *topo.Host, pairs []launch.Pair) bool {
	m := &topo.Measured{Fingerprint: h.Fingerprint()}
	if h.Measured != nil {
		*m = *h.Measured
	}
	before := len(m.Copies) + len(m.Memory)
	m.Add(selftest.MeasuredPairs(pairs))
	if len(m.Copies)+len(m.Memory) == before {
		return false
	}
	m.At = time.Now().Unix()
	return h.Measure(m)
}

// keepPairs stores the rates of self-tests like `peerlane plan --measure`, in place of earlier
// rates of the same GPUs.
func (a *app) keepPairs(h *topo.Host, pairs []launch.Pair) error {
	m := selftest.MeasuredPairs(pairs)
	if m.Copies == nil && m.Memory == nil {
		return nil
	}
	a.useMeasured(h)
	if h.Measured != nil {
		m.Add(h.Measured)
	}
	m.Fingerprint, m.At = h.Fingerprint(), time.Now().Unix()
	return a.keepMeasured(m)
}
