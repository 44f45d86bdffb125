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

// measureHost measures the copies of this host between its GPUs, and between these and
// host memory, by the self-tests of pairs, and keeps the figures for all plans.
func (a *app) measureHost(cmd *cobra.Command, host *hostFlags) error {
	if !host.live() {
		return usageError{cmd.CommandPath(), errors.New("--measure is about this machine's GPUs: give it without --input, --sysfs and --proc")}
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
		return &fault.Error{Code: fault.NotRoot, Operation: "keep the measurement for all plans", Remedy: "run peerlane plan --measure as root"}
	}
	return a.keepMeasured(m)
}

// measure measures each two GPUs of a host that can have lanes.
func (a *app) measure(ctx context.Context, t *selfTested, h *topo.Host) (*topo.Measured, error) {
	names := selftest.AllPairs(t.plan, nil)
	if len(names) == 0 {
		return nil, fmt.Errorf("measuring %s: it has %d GPUs that can have lanes, and copies are between two", t.words, len(t.plan.GPUs))
	}
	report, err := a.selfTest(ctx, t, names, true)
	if err != nil {
		return nil, err
	}
	m := measuredPairs(report.Pairs)
	if m.Copies == nil {
		return nil, fmt.Errorf("measuring %s: none of %d pairs of GPUs could be tested; peerlane self-test says why", t.words, len(names))
	}
	m.Fingerprint, m.At = h.Fingerprint(), time.Now().Unix()
	return m, nil
}

// measuredPairs are the rates of pairs as the model takes them. Pairs whose bytes were
// wrong tell nothing: no lane stages on them.
func measuredPairs(pairs []launch.Pair) *topo.Measured {
	m := new(topo.Measured)
	memory := map[string]int{}
	for _, p := range pairs {
		if p.Verdict != launch.VerdictGood && p.Verdict != launch.VerdictSlow {
			continue
		}
		if p.Push.Client > 0 && p.Pull.Client > 0 {
			m.Copies = append(m.Copies, topo.MeasuredCopy{GPU: p.GPU.BusID, Peer: p.Server.BusID, Out: p.Push.Client, In: p.Pull.Client})
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

// keepMeasured writes the file that all plans read.
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
		return fmt.Errorf("keeping what was measured: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("keeping what was measured: %w", err)
	}
	a.log.Infof("%d copies between GPUs and the host memory of %d GPUs were measured; %s has the figures, and plans and estimates of this host go by them", len(m.Copies), len(m.Memory), path)
	return nil
}

// useKnownPairs adds what self-tests of this boot found to what was measured, as far as
// root has that kept: containers' starts test the pairs that they need.
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
