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

// doctorVersion is the version of the JSON document, which docs/doctor.schema.json describes.
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
		Short: "Diagnose lane problems",
		Long: `Examine this host for causes of failing or slow lanes: driver, GPUs, PCIe, NICs,
specifications, engines, limits, relays. Each check reports its source, its result, the
consequence and the remedy. Every check runs and changes nothing; docs/doctor.md
describes each.

Some sources need root: run as root, or see the checks with result unknown. --selftest
is an active test: it copies between GPUs, as peerlane self-test does. --rdma is another:
each lane's NIC writes and reads host memory and, by DMA-BUF and by nvidia-peermem, the
memory of its GPUs, and compares every byte.

--connect examines the connection with another host: reachability, cluster key, protocol
version, clock, ports, MTU, rails and rates. On that host run peerlane doctor --serve,
which answers hosts with the cluster key.

The exit status follows the worst result.

Exit status:
  0  no problem found
  1  no check could run
  5  no problem found, but some results are unknown
  6  warning: a lane is slow, or fails under some condition
  7  failure: a lane cannot work, or the host is exposed`,
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
	flags.StringVar(&hostRoot, "host-root", "/", "read /dev, /etc, /usr and /boot below `DIR`, and run no program there")
	flags.StringVar(&lane, "for", "", "show only findings about the lane of `GPU`")
	flags.BoolVar(&selfTest, "selftest", false,
		"also test the pairs of GPUs that lanes stage on (about a second per pair)")
	flags.BoolVar(&rdma, "rdma", false,
		"also test the NICs of lanes by RDMA on this host (about a second per NIC and GPU)")
	flags.DurationVar(&interval, "interval", time.Second, "`TIME` between two readings of error counters")
	flags.StringSliceVar(&connect, "connect", nil,
		"also run the checks between hosts, with doctor --serve on each `HOST[:PORT]`, separated by commas")
	flags.StringVar(&serve, "serve", "",
		"answer doctors of other hosts at `ADDRESS[:PORT]`, and run no check (default: the relays' "+
			"address, the last port of "+
			"network.ports)")
	flags.Lookup("serve").NoOptDefVal = serveAuto
	complete(cmd, "serve", serveAuto)
	complete(cmd, "connect") // values are host names, not files
	must(cmd.MarkFlagDirname("host-root"))
	must(cmd.RegisterFlagCompletionFunc("for", func(*cobra.Command, []string, string) ([]string,
		cobra.ShellCompDirective) {
		return a.completeGPUs(cmd, host)
	}))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if interval < 10*time.Millisecond || interval > 10*time.Second {
			return usageError{cmd.CommandPath(), fmt.Errorf("--interval %v: must be 10 ms to 10 s", interval)}
		}
		if serve != "" && len(connect) > 0 {
			return usageError{cmd.CommandPath(), errors.New("--serve and --connect are for two hosts")}
		}
		h := &doctor.Host{
			Sysfs: host.sysfs, Proc: host.proc, Root: hostRoot, Layout: a.layout, SpecDirs: a.specDirs(&specFlags{}),
			Software: host.software, Interval: interval, Relays: generation.List, Ask: control.Ask, Staged: staging.StagingByGPU,
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

// laneOf returns the index of a GPU by its name: "gpu3", "3", a UUID or a PCI address.
func laneOf(ctx context.Context, h *doctor.Host, name string) (int, error) {
	if m := gpuN.FindStringSubmatch(name); m != nil {
		name = m[1]
	}
	return h.Lane(ctx, name)
}

// testForDoctor runs the self-tests of GPU pairs before the checks read their results.
func (a *app) testForDoctor(cmd *cobra.Command, host *hostFlags, h *doctor.Host) error {
	if !host.live() {
		return usageError{cmd.CommandPath(),
			errors.New("--selftest tests GPUs of this machine; omit it with the files of another host")}
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
		a.log.Info("--selftest: lanes stage on no pair of GPUs, so nothing is tested")
		return nil
	}
	report, err := a.selfTest(cmd.Context(), t, names, true)
	h.Pairs = report.Pairs
	return asRoot(err)
}

// diagnosis returns the error with the exit status for the worst finding.
func diagnosis(r doctorReport) error {
	count := map[doctor.Status]int{}
	for _, f := range r.Findings {
		count[f.Status]++
	}
	switch r.Worst {
	case doctor.Failure:
		return findingError{exitDoctorFailure, fmt.Errorf("failures: %d, warnings: %d, could not tell: %d",
			count[doctor.Failure], count[doctor.Warning], count[doctor.Unknown])}
	case doctor.Warning:
		return findingError{exitDoctorWarning, fmt.Errorf("warnings: %d, could not tell: %d", count[doctor.Warning],
			count[doctor.Unknown])}
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
		a.out.Printf("\n%s %s, %s: %s\n", a.paint(strings.ToUpper(f.Status.String()), doctorColours[f.Status], bold),
			f.Check, f.On, f.Found)
		for _, line := range [][2]string{{"looked at", f.LookedAt}, {"why", f.Why}, {"remedy", f.Remedy},
			{"lanes", laneWords(f.Lanes)}} {
			a.out.Printf("  %-10s %s\n", line[0]+":", line[1])
		}
	}
}

// laneWords returns the lanes of a finding as text.
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
