//go:build !front

package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/peerlane/doctor"
	"github.com/peerlane/peerlane/relay/launch"
)

// rdmaForDoctor runs the active RDMA test and returns its finding as a check. A test that cannot
// run is also a finding.
func (a *app) rdmaForDoctor(cmd *cobra.Command, host *hostFlags, h *doctor.Host) (doctor.Check, error) {
	if !host.live() {
		return doctor.Check{}, usageError{cmd.CommandPath(), errors.New(
			"--rdma tests NICs of this machine; omit it with the files of another host")}
	}
	t, err := a.realPairs(host, "")
	if err != nil {
		return doctor.Check{}, err
	}
	defer t.remove()
	job, err := h.RDMAJob()
	var results []launch.RDMAResult
	if err == nil && len(job.NICs) > 0 {
		err = t.tester.RDMA(cmd.Context(), job, func(r launch.RDMAResult) { results = append(results, r) })
	}
	return doctor.RDMA(results, err), nil
}
