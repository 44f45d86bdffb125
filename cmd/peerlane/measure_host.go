//go:build !front

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// measureHost measures copies between GPUs, and between GPU and host memory, by the self-tests of
// pairs, and stores the figures for later plans.
func (a *app) measureHost(cmd *cobra.Command, host *hostFlags) error {
	if !host.live() {
		return usageError{cmd.CommandPath(),
			errors.New("--measure tests this machine's GPUs: omit --input, --sysfs and --proc")}
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
	return a.keepMeasured(m)
}

// measure measures every pair of GPUs that can have a lane.
func (a *app) measure(ctx context.Context, t *selfTested, h *topo.Host) (*topo.Measured, error) {
	names := selftest.AllPairs(t.plan, nil)
	if len(names) == 0 {
		return nil, fmt.Errorf("measuring %s: %d GPUs can have a lane, and a copy needs two", t.words, len(t.plan.GPUs))
	}
	report, err := a.selfTest(ctx, t, names, true)
	if err != nil {
		return nil, err
	}
	m := measuredPairs(report.Pairs)
	if m.Copies == nil {
		return nil, fmt.Errorf("measuring %s: no self-test of %d pairs of GPUs ran; peerlane self-test shows the cause",
			t.words, len(names))
	}
	m.Fingerprint, m.At = h.Fingerprint(), time.Now().Unix()
	return m, nil
}

// measuredPairs converts self-tests to rates of the model. It skips pairs that corrupted data,
// because no lane stages on those GPUs.
func measuredPairs(pairs []launch.Pair) *topo.Measured {
	m := new(topo.Measured)
	memory := map[string]int{}
	for _, p := range pairs {
		if p.Verdict != launch.VerdictGood && p.Verdict != launch.VerdictSlow {
			continue
		}
		if p.Push.Client > 0 && p.Pull.Client > 0 {
			m.Copies = append(m.Copies, topo.MeasuredCopy{GPU: p.GPU.BusID, Peer: p.Server.BusID, Out: p.Push.Client,
				In: p.Pull.Client})
		}
		if p.Push.Bounce > 0 && p.Pull.Bounce > 0 {
			at, known := memory[p.GPU.BusID]
			if !known {
				at = len(m.Memory)
				memory[p.GPU.BusID] = at
				m.Memory = append(m.Memory, topo.MeasuredHost{GPU: p.GPU.BusID})
			}
			// The best of several: a measurement is never too fast.
			m.Memory[at].Out, m.Memory[at].In = max(m.Memory[at].Out, p.Push.Bounce), max(m.Memory[at].In, p.Pull.Bounce)
		}
	}
	return m
}

// keepMeasured writes the measured rates for later plans.
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
		return fmt.Errorf("storing measured rates: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("storing measured rates: %w", err)
	}
	a.log.Infof("%d copies between GPUs and the host memory of %d GPUs were measured; %s has the figures, and plans "+
		"and estimates of this host go by them", len(m.Copies), len(m.Memory), path)
	return nil
}

// useKnownPairs adds the self-tests of this boot to the measured rates; only root can read the
// record. The start of a container tests only the pairs of its lanes.
func (a *app) useKnownPairs(h *topo.Host, p *planned) {
	if os.Geteuid() != 0 || h.Measured != nil {
		return
	}
	hookBinary, err := hookPath("")
	if err != nil {
		return
	}
	tester, err := selftest.NewTester(a.layout, p.config, hookBinary)
	if err != nil {
		return // without programs there are no tests either
	}
	known, err := tester.Known()
	if err != nil || known.Simulated {
		return
	}
	m := measuredPairs(known.Pairs)
	if m.Copies == nil && m.Memory == nil {
		return
	}
	m.Fingerprint = h.Fingerprint()
	h.Measure(m)
}
