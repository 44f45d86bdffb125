//go:build !front

package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/hook/staging"
	"github.com/peerlane/peerlane/topo/nvml"
)

// doctorVersion is that of the JSON, which docs/doctor.schema.json describes.
const doctorVersion = 1

// doctorReport is the JSON document of peerlane doctor.
type doctorReport struct {
	Version int           `json:"version"`
	Worst   doctor.Status `json:"worst"`
	// For is the index of the GPU whose lane the report covers; nil for the whole host.
	For      *int             `json:"for,omitempty"`
	Findings []doctor.Finding `json:"findings"`
}

func newDoctorCommand(a *app) *cobra.Command {
	var hostRoot, lane, serve string
	var connect []string
	var selfTest, rdma bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find what makes lanes fail or slow, why it matters, and how to mend it",
		Long: `Look at this host for what makes lanes fail or slow without a word: driver, GPUs,
PCIe, NICs, specifications, engines, limits, relays. Each check says what it looked
at, what it found, why that matters, and the remedy. All of them run; nothing is
changed. docs/doctor.md has each check.

Not all can be seen by all users: run it as root, or read what it could not tell.
--selftest is an active test: it copies between GPUs, as peerlane self-test does.
--rdma is one, too: each lane's NIC writes and reads host memory and, by DMA-BUF and
by nvidia-peermem, the memory of its GPUs, and all bytes are compared.

--connect looks at what needs another host: is it reached, does it have the cluster key,
a common protocol, the same clock, ports, MTU, rails and rates. On that host peerlane
doctor --serve answers meanwhile, to who has the cluster key.

The exit status is by the worst of what it found.

Exit status:
  0  all is well
  1  it could not look at all
  5  nothing is wrong that could be seen, and something could not be told
  6  warning: something is slow, or fails under some condition
  7  failure: something keeps a lane from working, or gives the host away`,
		Example: `  sudo peerlane doctor
  peerlane doctor --for gpu3
  ssh -t root@host2 peerlane doctor --serve   # in another terminal, until Ctrl-C
  sudo peerlane doctor --connect host2
  peerlane doctor -o json | jq -r '.findings[] | select(.status == "failure") | .remedy'`,
		Args: noArgs,
	}
	host, form := addLiveHost(cmd), addForm(cmd)
	host.addSoftware()
	flags := cmd.Flags()
	flags.StringVar(&hostRoot, "host-root", "/", "read /dev, /etc, /usr and /boot below `DIR`, and run nothing that is there")
	flags.StringVar(&lane, "for", "", "only what touches the lane of `GPU`")
	flags.BoolVar(&selfTest, "selftest", false, "test the pairs of GPUs that lanes stage on, too: an active test, of a second or so a pair")
	flags.BoolVar(&rdma, "rdma", false, "test the NICs of lanes by RDMA on this host, too: an active test, of a second or so a NIC and GPU")
	flags.DurationVar(&interval, "interval", time.Second, "read counters of errors twice, `TIME` apart")
	flags.StringSliceVar(&connect, "connect", nil, "also what needs other hosts, on which doctor --serve runs: `HOST[:PORT]`, with commas between several")
	flags.StringVar(&serve, "serve", "", "look at nothing, and answer the doctors of other hosts, at `ADDRESS[:PORT]`, or at the one that relays use; the port is the last of network.ports unless stated")
	flags.Lookup("serve").NoOptDefVal = serveAuto
	complete(cmd, "serve", serveAuto)
	complete(cmd, "connect") // names of hosts, not of files
	must(cmd.MarkFlagDirname("host-root"))
	must(cmd.RegisterFlagCompletionFunc("for", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return a.completeGPUs(cmd, host)
	}))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if interval < 10*time.Millisecond || interval > 10*time.Second {
			return usageError{cmd.CommandPath(), fmt.Errorf("--interval %v: 10 ms to 10 s is possible", interval)}
		}
		if serve != "" && len(connect) > 0 {
			return usageError{cmd.CommandPath(), errors.New("--serve and --connect are for two hosts")}
		}
		h := &doctor.Host{
			Sysfs: host.sysfs, Proc: host.proc, Root: hostRoot, Layout: a.layout, SpecDirs: a.specDirs(&specFlags{}),
			Software: host.software, Interval: interval, Relays: generation.List, Ask: control.Ask, Staged: staging.Staged,
		}
		if host.options().NVML != nil {
			h.NVML = nvml.New()
		}
		if serve != "" {
			ctx, stop := untilInterrupted(cmd.Context())
			defer stop()
			return a.serveDoctor(ctx, h, serve)
		}
		checks := doctor.All()
		if len(connect) > 0 {
			m, err := a.meetings(cmd.Context(), h, connect)
			if err != nil {
				return err
			}
			h.Meetings, checks = m, append(checks, doctor.Others()...)
		}
		report := doctorReport{Version: doctorVersion}
		if lane != "" {
			index, err := laneOf(cmd.Context(), h, lane)
			if err != nil {
				return err
			}
			report.For = &index
		}
		if selfTest {
			if err := a.testForDoctor(cmd, host, h); err != nil {
				return err
			}
		}
		if rdma {
			check, err := a.rdmaForDoctor(cmd, host, h)
			if err != nil {
				return err
			}
			checks = append(checks, check)
		}
		report.Findings = doctor.Examine(cmd.Context(), h, checks)
		if report.For != nil {
			report.Findings = doctor.For(report.Findings, *report.For)
		}
		report.Worst = doctor.Worst(report.Findings)
		if form.value == formJSON {
			if err := a.printJSON(report); err != nil {
				return err
			}
		} else {
			a.printDoctor(report)
		}
		return diagnosis(report)
	}
	return cmd
}

var gpuN = regexp.MustCompile(`^(?i:gpu|lane=)?([0-9]+)$`)

// laneOf is the index of the GPU that a name means: "gpu3", "3", a UUID or an address.
func laneOf(ctx context.Context, h *doctor.Host, name string) (int, error) {
	if m := gpuN.FindStringSubmatch(name); m != nil {
		name = m[1]
	}
	return h.Lane(ctx, name)
}

// testForDoctor runs the self-test of GPU pairs before the checks read the results.
func (a *app) testForDoctor(cmd *cobra.Command, host *hostFlags, h *doctor.Host) error {
	if !host.live() {
		return usageError{cmd.CommandPath(), errors.New("--selftest is about this machine's GPUs, and another host is looked at")}
	}
	t, err := a.realPairs(host, "")
	if err != nil {
		return err
	}
	defer t.remove()
	names, err := selftest.PlannedPairs(t.plan, t.config)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		a.log.Info("--selftest: lanes stage on no pair of GPUs, and nothing is tested")
		return nil
	}
	report, err := a.selfTest(cmd.Context(), t, names, true)
	h.Pairs = report.Pairs
	return asRoot(err)
}

// diagnosis is the error by which scripts hear the worst.
func diagnosis(r doctorReport) error {
	count := map[doctor.Status]int{}
	for _, f := range r.Findings {
		count[f.Status]++
	}
	switch r.Worst {
	case doctor.Failure:
		return findingError{exitDoctorFailure, fmt.Errorf("failures: %d, warnings: %d, could not tell: %d", count[doctor.Failure], count[doctor.Warning], count[doctor.Unknown])}
	case doctor.Warning:
		return findingError{exitDoctorWarning, fmt.Errorf("warnings: %d, could not tell: %d", count[doctor.Warning], count[doctor.Unknown])}
	case doctor.Unknown:
		return findingError{exitDoctorUnknown, fmt.Errorf("could not tell: %d", count[doctor.Unknown])}
	}
	return nil
}

var doctorColours = map[doctor.Status]int{
	doctor.NotApplicable: cyan, doctor.OK: green, doctor.Unknown: cyan, doctor.Warning: yellow, doctor.Failure: red,
}

func (a *app) printDoctor(r doctorReport) {
	t := a.newTable("RESULT", "CHECK", "ON", "FOUND")
	for _, f := range r.Findings {
		t.AppendRow(table.Row{a.paint(f.Status.String(), doctorColours[f.Status]), f.Check, f.On, f.Found})
	}
	a.wrapLast(t, "FOUND")
	a.out.Println(t.Render())
	wrong := slices.DeleteFunc(slices.Clone(r.Findings), func(f doctor.Finding) bool { return f.Status <= doctor.OK })
	slices.SortStableFunc(wrong, func(a, b doctor.Finding) int { return int(b.Status) - int(a.Status) })
	for _, f := range wrong {
		a.out.Printf("\n%s %s, %s: %s\n", a.paint(strings.ToUpper(f.Status.String()), doctorColours[f.Status], bold), f.Check, f.On, f.Found)
		for _, line := range [][2]string{{"looked at", f.LookedAt}, {"why", f.Why}, {"remedy", f.Remedy}, {"lanes", laneWords(f.Lanes)}} {
			a.out.Printf("  %-10s %s\n", line[0]+":", line[1])
		}
	}
}

// laneWords are the lanes that a finding touches.
func laneWords(lanes []int) string {
	switch {
	case lanes == nil:
		return "all"
	case len(lanes) == 0:
		return "none"
	}
	var words []string
	for _, l := range lanes {
		words = append(words, strconv.Itoa(l))
	}
	return strings.Join(words, ", ")
}
